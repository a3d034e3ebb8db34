"""The same with a real device; skipped where there is none. `cuda_check.py` runs these and measures besides."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from faces import Face, acting, observed
from failing_envs import CountingEnv, numbered
from space_envs import EveryDtype, Pictures
from torch_batches import differing

from aioenvs import AsyncCollector, AsyncParallelEnv, AsyncSerialEnv, ParallelEnv
from aioenvs.errors import PerformanceWarning
from aioenvs.tensors.device import CudaBackend, Transfer, backend_of
from aioenvs.testing import CountingEnv as TorchCountingEnv

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SLEEP = 200_000_000  # cycles of the device, about a tenth of a second


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    torch.zeros(1, device="cuda")
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def on_device(td: Any) -> Any:
    return td.update(td.select("action").to("cuda"))


async def test_values_are_those_of_the_host(face: Face) -> None:
    rows: dict[str, list[Any]] = {}
    for device in ("cpu", "cuda"):
        async with face.open(3, EveryDtype, device=device) as env:
            torch.manual_seed(0)
            root, rows[device] = await face.call(env.reset, seed=0), []
            for _ in range(6):
                td = env.rand_action(root.cpu()).to(device)
                td, root = await face.call(env.step_and_maybe_reset, td)
                assert td["next"].device == root.device == torch.empty(0, device=device).device
                rows[device] += [td.cpu().copy(), root.cpu().copy()]  # on the host, root is what the next step gets
    assert all(differing(*pair) == [] for pair in zip(rows["cpu"], rows["cuda"], strict=True))


@pytest.mark.parametrize("pin_memory", [True, False, None])
async def test_the_block_is_pinned_while_the_envs_run(pin_memory: bool | None) -> None:
    env = AsyncParallelEnv(2, CountingEnv, num_processes=1, device="cuda", pin_memory=pin_memory)
    await env.reset()
    assert env._running is not None
    memory = env._running.transfer._memory
    assert memory is not None
    assert memory.is_pinned() == (pin_memory is not False)
    await env.close()
    assert not memory.is_pinned()


async def test_results_on_the_host_can_be_pinned() -> None:
    async with AsyncParallelEnv(2, CountingEnv, num_processes=1, pin_memory=True) as env:
        root = await env.reset()
        td = await env.step(root.update(acting([1, 2])), copy=False)
        assert td["next", "observation"].is_pinned()
        assert [row[3] for row in observed(td.to("cuda", non_blocking=True).cpu())] == [1, 2]


async def test_a_step_does_not_wait_for_the_device() -> None:
    """Neither for its own copy nor for what else the device has to do; the result is in order all the same."""
    async with AsyncParallelEnv(4, Pictures, num_processes=2, device="cuda") as env:
        root = await env.reset()
        root = (await env.step_and_maybe_reset(root.update(acting([1] * 4))))[1]
        busy = torch.cuda.Event()
        torch.cuda._sleep(SLEEP)
        busy.record()
        _, root = await env.step_and_maybe_reset(root.update(acting([1] * 4)))
        assert not busy.query()
        assert root["observation"].float().mean((1, 2, 3)).tolist() == [2.0] * 4


async def test_steps_call_nothing_that_synchronises(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3, {1: {"length": 2}}), device="cuda") as env:
        root = await face.call(env.reset)
        action = torch.tensor([1, 2, 3], device="cuda")
        sums = torch.zeros(3, device="cuda", dtype=torch.int64)
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(10):
            td, root = await face.call(env.step_and_maybe_reset, root.set("action", action))
            sums += td["next", "observation"][:, 3]
        torch.cuda.set_sync_debug_mode("default")
        assert sums.tolist() == [55, 2 * (5 * 1 + 5 * 2), 165]


async def test_every_picture_arrives_whole(face: Face) -> None:
    """Though the envs write the next ones while these are under way."""
    async with face.open(4, Pictures, device="cuda") as env:
        root = await face.call(env.reset)
        found = []
        for _ in range(40):
            torch.cuda._sleep(2_000_000)
            td, root = await face.call(env.step_and_maybe_reset, root.update(acting([1] * 4)))
            found.append(td["next", "observation"])
        for step, pictures in enumerate(found, start=1):
            assert (pictures == step % 256).all(), step


async def test_memory_is_given_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        async with AsyncSerialEnv(4, Pictures, device="cuda") as env:
            root = await env.reset()
            for _ in range(5):
                td, root = await env.step_and_maybe_reset(on_device(root.update(acting([1] * 4))))
        del td, root
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


async def test_moves_while_they_run(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), device="cuda") as env:
        root = await face.call(env.reset)
        for step, device in enumerate(["cpu", "cuda", "cuda", "cpu"], start=1):
            env.to(device)
            _, root = await face.call(env.step_and_maybe_reset, root.to(device).update(acting([1, 1]).to(device)))
            assert root["observation"].device.type == device
            assert [row[2] for row in observed(root)] == [step, step]


def test_memory_that_cannot_be_pinned_leaves_no_error_behind() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    backend = backend_of("cuda")
    assert isinstance(backend, CudaBackend)
    backend.pin(memory)
    with pytest.raises(OSError, match=r"pinning 1048576 bytes.*cudaError 712"):
        backend.pin(memory)
    assert (torch.zeros(3, device="cuda") + 1).tolist() == [1, 1, 1]
    with pytest.warns(PerformanceWarning, match="could not be pinned"):
        crossing = Transfer(memory, backend)
    assert crossing.bring(memory[:4])[0].tolist() == [0] * 4
    backend.unpin(memory)
    with pytest.raises(OSError, match=r"pinning 1048576 bytes.*cudaError 713"):
        backend.unpin(memory)
    assert (torch.zeros(3, device="cuda") + 1).tolist() == [1, 1, 1]


async def test_envs_that_live_there() -> None:
    async with AsyncSerialEnv(2, lambda: TorchCountingEnv(device="cuda")) as env:
        assert env.device == torch.empty(0, device="cuda").device
        td = await env.rand_step(await env.reset())
        assert td["next", "observation"].is_cuda


@pytest.mark.parametrize("min_get", [None, 2])
async def test_collectors(min_get: int | None) -> None:
    policy = torch.nn.Linear(4, 2, device="cuda")

    def act(observation: torch.Tensor) -> torch.Tensor:
        return policy(observation).argmax(-1)

    with warnings.catch_warnings():
        async with AsyncParallelEnv(4, "CartPole-v1", num_processes=2) as env:
            source = AsyncCollector(
                env, act, frames_per_batch=16, policy_device="cuda", storing_device="cuda", min_get=min_get
            )
            for _ in range(3):
                batch = await source.next()
                assert batch["action"].is_cuda
                expected = policy(batch["observation"]).argmax(-1)
                assert torch.equal(batch["action"], expected)
            await source.shutdown()


def test_plain_calls_on_another_stream() -> None:
    with ParallelEnv(2, Pictures, num_processes=1, device="cuda") as env:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            td, _ = env.step_and_maybe_reset(env.reset().update(acting([1, 1])))
            total = td["next", "observation"].float().mean()
        stream.synchronize()
        assert total.item() == 1.0
