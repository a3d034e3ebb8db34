"""Every line of `CudaBackend`, with a `torch.cuda` that is made up (`pretend_cuda.py`); see `test_cuda.py` for more."""

import asyncio
import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_backends import are_actions
from faces import Face, acting, in_thread, observed
from failing_envs import CountingEnv, numbered
from pretend_cuda import PretendCuda

from aioenvs import AsyncParallelEnv, ParallelEnv
from aioenvs.errors import PerformanceWarning
from aioenvs.tensors import device as devices
from aioenvs.tensors.device import CudaBackend, Transfer

NUMBERED = torch.device("cpu", 0)


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendCuda]:
    pretended = PretendCuda(monkeypatch, backwards=request.param)
    monkeypatch.setattr(devices, "_cuda", lambda: pretended)
    yield pretended
    pretended.broken = False
    pretended.work()


class Pretended(CudaBackend):
    """Whose device is the CPU: actions are there, and other tensors are not."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        assert self.device == NUMBERED  # the current one
        self.device = torch.device("cpu")  # which has no number in tensors
        self.ordered: Any = None

    def holds(self, tensor: torch.Tensor) -> bool:
        return are_actions(tensor)

    def order(self, copy: torch.Tensor, fence: Any) -> None:
        super().order(copy, fence)
        self.ordered = devices._cuda().current_stream()


def some_bytes(count: int = 8) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8)


def test_memory_is_registered_once_for_all_devices(cuda: PretendCuda) -> None:
    own, memory = CudaBackend(NUMBERED), some_bytes()
    own.pin(memory)
    assert cuda.runtime.registered == {memory.data_ptr(): 8}
    own.unpin(memory)
    assert cuda.runtime.registered == {}
    assert cuda.notes == [("register", 1), ("unregister",)]


def test_what_cuda_refuses_is_said_and_forgotten(cuda: PretendCuda) -> None:
    own, memory = CudaBackend(NUMBERED), some_bytes()
    own.pin(memory)
    with pytest.raises(OSError, match=r"8 bytes.* already mapped \(cudaError 712\)"):
        own.pin(memory)
    assert cuda.runtime.error == 0  # or torch would raise it at the next occasion
    with pytest.warns(PerformanceWarning, match=r"already mapped \(cudaError 712\)"):
        Transfer(memory, own)
    own.unpin(memory)
    with pytest.raises(OSError, match=r"not registered \(cudaError 713\)"):
        own.unpin(memory)
    assert cuda.runtime.error == 0


def test_a_copy_in_is_read_after_it_was_made(cuda: PretendCuda) -> None:
    own, source = Pretended(), some_bytes()
    cuda.runs = False
    arriving, fence = own.copy_in(source)
    own.order(arriving, fence)
    result = torch.empty_like(arriving).copy_(arriving, non_blocking=True)  # on the caller's stream
    assert not fence.done()
    cuda.work()
    assert fence.done()
    assert result.tolist() == source.tolist()
    assert [stream is cuda.default_stream() for _, stream in cuda.recorded] == [True]
    fence.wait()


def test_a_copy_in_comes_after_what_its_own_stream_did(cuda: PretendCuda) -> None:
    own = Pretended()
    cuda.runs = False
    found = [own.copy_in(some_bytes(count)) for count in (2, 3)]
    cuda.work()
    assert [fence.done() for _, fence in found] == [True, True]
    assert [tensor.tolist() for tensor, _ in found] == [[0, 1], [0, 1, 2]]


def test_a_copy_out_comes_after_what_the_caller_did(cuda: PretendCuda) -> None:
    own, source, target = Pretended(), some_bytes().clone(), torch.zeros(8, dtype=torch.uint8)
    cuda.runs = False
    source.copy_(some_bytes() + 1, non_blocking=True)  # what the policy computes
    fence = own.copy_out([source], target)
    assert not fence.done()
    cuda.work()
    fence.wait()
    assert target.tolist() == list(range(1, 9))
    assert [tensor is source for tensor, _ in cuda.recorded] == [True]


def test_streams_of_a_caller_count(cuda: PretendCuda) -> None:
    own, stream = Pretended(), cuda.Stream(NUMBERED)
    assert own.callers() is None
    cuda.runs = False
    with cuda.stream(stream):
        arriving, fence = own.copy_in(some_bytes())
        own.order(arriving, fence)
        assert cuda.recorded[-1][1] is stream
        there = own.callers()
    assert there is not None
    for _ in range(2):
        with there():
            assert cuda.current_stream() is stream
        assert cuda.current_stream() is cuda.default_stream()


def test_whoever_waits_sleeps(cuda: PretendCuda) -> None:
    _, fence = Pretended().copy_in(some_bytes())
    event: Any = fence
    assert event.event.options == {"blocking": True}


def test_a_device_that_failed_says_so_to_whoever_waits(cuda: PretendCuda) -> None:
    _, fence = Pretended().copy_in(some_bytes())
    cuda.broken = True
    assert not fence.done()
    with pytest.raises(RuntimeError, match="device-side assert"):
        fence.wait()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))], ids=["copy", "pickle"])
def test_a_copy_of_it_has_streams_of_its_own(cuda: PretendCuda, make: Any) -> None:
    own = CudaBackend(NUMBERED)
    other = make(own)
    assert other.device == own.device
    assert other._into is not own._into


@pytest.mark.parametrize(("index", "other", "held"), [(0, 0, True), (0, 1, False), (None, 1, True)])
def test_tensors_of_another_device_are_not_its_own(index: int | None, other: int, held: bool) -> None:
    own = devices.StagedBackend(torch.device("cuda") if index is None else torch.device("cuda", index))
    elsewhere: Any = SimpleNamespace(device=torch.device("cuda", other))
    assert own.holds(elsewhere) == held
    assert not own.holds(torch.empty(0))


async def test_envs_step_by_it(face: Face, cuda: PretendCuda) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), device=Pretended()) as env:
        await face.call(env.reset)
        for step in range(1, 5):
            td, _ = await face.call(env.step_and_maybe_reset, acting([1, 2]))
            assert [row[2:] for row in observed(td)] == [[step, step], [step, 2 * step]]
        assert len(cuda.runtime.registered) == 1
    assert cuda.runtime.registered == {}


async def test_slots_are_kept_until_the_stream_is_through(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = numbered(2)
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=1, device=Pretended()) as env:
        await env.reset()
        monkeypatch.setattr(Pretended, "holds", lambda self, tensor: False)
        cuda.runs = False
        first = await env.step(acting([1, 1]))
        second = await env.step(acting([1, 1]))
        third = asyncio.ensure_future(env.step(acting([1, 1])))
        assert await in_thread(cuda.waited.wait, 20)
        assert not third.done()
        cuda.runs = True
        cuda.work()
        await third
        assert [observed(td)[0][2] for td in (first, second, third.result())] == [1, 2, 3]


async def test_plain_calls_within_a_loop_keep_the_streams_of_their_caller(cuda: PretendCuda) -> None:
    """There the private loop of the envs lives in another thread, where torch's current stream is another one."""
    own, stream = Pretended(), cuda.Stream(NUMBERED)
    with ParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1, device=own) as env:
        with cuda.stream(stream):
            env.reset()
            assert own.ordered is stream
            env[:1].step(acting([1]))
            assert own.ordered is stream
        env.step(acting([1, 1]))
        assert own.ordered is cuda.default_stream()
        await in_thread(env.step, acting([1, 1]))
        assert own.ordered is cuda.default_stream()
