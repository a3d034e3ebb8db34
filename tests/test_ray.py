"""Envs in a Ray cluster of several nodes: the same as in processes, wherever Ray puts them and whatever becomes of it.

The cluster is started once, and what it holds while it is there is Ray's; what must be gone after each test are the
actors. When all is over, nothing may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failing_envs as faults
import gymnasium
import numpy as np
import psutil
import pytest
import torch
from conftest import Holdings
from coroutine_envs import LoopingEnv
from faces import Face, acting, in_thread, masked, observed
from failing_envs import CountingEnv, Gate, numbered
from gymnasium.utils.env_checker import data_equivalence
from processes import still_alive
from ray_envs import PatientEnv, PlacedEnv, WordEnv
from root_envs import MovingEnv
from root_envs import acting as moving
from tensordict import TensorDict, TensorDictBase
from torch_batches import differing

from aioenvs import AsyncCollector, AsyncParallelEnv, Collector, ParallelEnv
from aioenvs.errors import AioEnvsError, ResetNeededError, WorkerDiedError, WorkerStartError, WorkerTimeoutError
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.testing import CountingEnv as TorchCounting

ray = pytest.importorskip("ray", reason="ray is not installed: pip install aioenvs[ray]")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]  # where a machine is busy

TESTS = Path(__file__).parent
NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20}
CYCLES = 8  # of starts and closes, more than there are connections that come and go
TERM = 280.0  # seconds that a program may take which starts clusters of its own
PATIENCE = 10.0  # seconds that Ray gets to end those
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
FACES = (Face("async-ray", AsyncParallelEnv, 2), Face("ray", ParallelEnv, 2))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of a head without CPUs and two nodes, to which this process is connected."""
    before = Holdings()
    head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(**NODE)
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    gc.collect()
    before.descriptors |= Holdings().descriptors  # Ray keeps some, such as those of its logs, once it was there
    before.check()


@pytest.fixture(autouse=True)
def no_leaks(cluster: Any) -> Iterator[None]:
    """No host is left after a test; in place of the fixture of this name that counts all there is."""
    yield
    gc.collect()
    assert still_alive(hosts(), 10) == []


@pytest.fixture(params=FACES, ids=lambda face: face.name)
def face(request: pytest.FixtureRequest) -> Face:
    return request.param


def hosts() -> list[psutil.Process]:
    """The processes of all actors that host envs."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.cmdline()[:1] and child.cmdline()[0].startswith("ray::RayHost"):
                found.append(child)
        except psutil.Error:
            continue
    return found


def opened(face: Face, num_workers: int, factory: Any, **options: Any) -> Any:
    return face.open(num_workers, factory, backend="ray", **options)


def in_ray(num_workers: int, factory: Any, **options: Any) -> AsyncParallelEnv:
    return AsyncParallelEnv(num_workers, factory, **{"backend": "ray", "num_processes": 2, **options})


# -- the same as in processes ---------------------------------------------------------------------------


def texts(count: int, step: int) -> TensorDict:
    from tensordict import NonTensorData, NonTensorStack

    words = [NonTensorData("abc"[: 1 + (env + step) % 3]) for env in range(count)]
    return TensorDict({"action": NonTensorStack(*words)}, [count])


def numbers(count: int, step: int) -> TensorDict:
    return acting([(env + step) % 2 for env in range(count)])


KINDS = {
    "gymnasium": ("CartPole-v1", numbers),
    "texts": (WordEnv, texts),
    "tensors": (lambda: TorchCounting(max_steps=4, adds_up=True), numbers),
    "by-reference": (lambda: TorchCounting(max_steps=4, adds_up=True), numbers),
    "coroutines": (PatientEnv, numbers),
}


async def trajectory(face: Face, kind: str, **options: Any) -> list[TensorDictBase]:
    """Resets, steps of all and of some, and what becomes of views."""
    factory, action = KINDS[kind]
    if kind == "by-reference":
        options["use_buffers"] = False
    found = []
    async with face.open(5, factory, **options) as env:
        td = await face.call(env.reset, seed=3)
        found.append(td.clone())
        for step in range(12):
            td, following = await face.call(env.step_and_maybe_reset, td.update(action(5, step)))
            found += [td.clone(), following.clone()]
            td = following
        td = await face.call(env.step, td.update(action(5, 1)).update(masked("_step", 5, {1, 4})))
        found.append(td.clone())
        found.append((await face.call(env.reset, masked("_reset", 5, {0, 3}))).clone())
        view = env[[1, 3]]
        td = await face.call(view.reset)
        found.append((await face.call(view.step, td.update(action(2, 1)))).clone())
        found.append(await face.call(env.rollout, 6, break_when_any_done=False))
    return found


def make_cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize("kind", KINDS)
async def test_equal_to_processes(face: Face, kind: str) -> None:
    torch.manual_seed(0)
    expected = await trajectory(face, kind)
    torch.manual_seed(0)
    found = await trajectory(face, kind, backend="ray")
    assert len(found) == len(expected) > 25
    assert [differing(one, other) for one, other in zip(found[:-1], expected[:-1], strict=True)] == [[]] * (
        len(found) - 1
    )
    assert found[-1].batch_size == expected[-1].batch_size


def test_vector_faces_are_equal_to_those_of_processes() -> None:
    found = []
    for backend in ("process", "ray"):
        envs = AioVectorEnv([make_cartpole] * 4, num_processes=2, backend=backend)
        try:
            observations, infos = envs.reset(seed=3)
            seen = [observations, infos]
            for _ in range(40):
                seen += list(envs.step(np.array([1, 1, 0, 1])))
            found.append(seen)
        finally:
            envs.close()
    assert any(np.any(terminated) for terminated in found[0][4::5])  # so that envs begin anew
    for one, other in zip(*found, strict=True):
        assert data_equivalence(one, other)


async def test_results_that_are_lent_are_those_that_are_copied() -> None:
    found = []
    for copy in (True, False):
        async with in_ray(4, CountingEnv, create_env_kwargs=numbered(4, length=3)) as env:
            td = await env.reset()
            seen = []
            for step in range(8):
                td, following = await env.step_and_maybe_reset(td.update(acting([step] * 4)), copy=copy)
                seen += [observed(td), following["observation"].tolist()]
                td = following
            found.append(seen)
    assert found[0] == found[1]


async def test_a_step_sees_what_its_env_said_last() -> None:
    async with in_ray(3, MovingEnv, create_env_kwargs=[{}, {"limit": 1.5}, {}]) as env:
        td = await env.step(moving([4.0, 1.0, 2.0]))  # before any reset
        assert td["next", "position"].flatten().tolist() == [4, 1, 2]
        await env.reset()
        for expected in ([1, 1, 1], [2, 2, 2], [3, 1, 3]):
            td, root = await env.step_and_maybe_reset(moving([1.0] * 3), copy=False)
            assert td["next", "position"].flatten().tolist() == expected
        td = await env.step(moving([1.0] * 3).set("position", root["position"] + 10).update(masked("_step", 3, {0, 1})))
        assert td["next", "position"].flatten().tolist() == [4, 2, 13]
        env.send(moving([1.0] * 3))
        td, _ = await env.recv(3)
        assert sorted(td["next", "position"].flatten().tolist()) == [3, 4, 5]


async def test_64_envs_over_4_hosts_are_spread() -> None:
    kwargs = numbered(64, length=5)
    async with in_ray(64, PlacedEnv, num_processes=4, create_env_kwargs=kwargs) as env:
        assert env.num_processes == len(set(env.pids)) == 4
        assert len(set(await env.get_attr("node"))) == 2
        td = await env.reset()
        for _ in range(7):
            _, td = await env.step_and_maybe_reset(td.update(acting(range(64))))
        assert observed(td) == [[number, 2, 2, 2 * number] for number in range(64)]


async def test_large_observations_come_through() -> None:
    async with in_ray(4, lambda: TorchCounting(batch_size=[100_000])) as env:
        td = await env.reset()
        td = await env.step(env.rand_action(td))
        assert td["next", "observation"].shape == (4, 100_000, 1)
        assert bool((td["next", "observation"] == 1).all())


async def test_a_placement_group_is_used() -> None:
    group = ray.util.placement_group([{"CPU": 2}], strategy="STRICT_PACK")
    try:
        async with in_ray(2, PlacedEnv, ray_options={"num_cpus": 1, "placement_group": group}) as env:
            assert len(set(await env.get_attr("node"))) == 1
    finally:
        ray.util.remove_placement_group(group)


def test_collectors(tmp_path: Path) -> None:
    def frames(**options: Any) -> list[list[int]]:
        env = ParallelEnv(4, CountingEnv, num_processes=2, create_env_kwargs=numbered(4, length=3), **options)
        with env:
            collector = Collector(env, lambda td: td.update(acting([1] * 4)), frames_per_batch=16, total_frames=32)
            return [td["observation"].tolist() for td in collector]

    assert frames(backend="ray") == frames()


async def test_async_collector_serves_first_ready_hosts_first() -> None:
    env = in_ray(4, CountingEnv, num_processes=4, create_env_kwargs=numbered(4, length=3))
    async with env:
        collector = AsyncCollector(env, None, frames_per_batch=12, total_frames=24)
        batches = [td async for td in collector]
    assert [td.numel() for td in batches] == [12, 12]


# -- first ready, cancelling, timeouts ------------------------------------------------------------------


async def test_whoever_is_ready_first_is_served_first(gate: Gate) -> None:
    kwargs = numbered(4, {0: {"fault": gate.wait, "at": (1, 1)}})
    async with in_ray(4, CountingEnv, num_processes=4, create_env_kwargs=kwargs) as env:
        td = await env.reset()
        env.send(td.update(acting([5] * 4)).set("env_index", torch.arange(4)))
        first, _ = await env.recv(min_get=3)
        await gate.arrival()
        assert sorted(first["env_index"].tolist()) == [1, 2, 3]
        gate.open()
        last, _ = await env.recv()
        assert last["env_index"].tolist() == [0]
        assert observed(last) == [[0, 1, 1, 5]]


async def test_a_cancelled_step_is_drained(gate: Gate) -> None:
    kwargs = numbered(4, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with in_ray(4, CountingEnv, create_env_kwargs=kwargs) as env:
        td = await env.reset()
        step = asyncio.ensure_future(env.step(td.update(acting([1] * 4))))
        await gate.arrival()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        other = await env[2:].step(acting([2, 2]))  # of the other host, which has answered or will
        assert observed(other) == [[2, 1, 2, 3], [3, 1, 2, 3]]
        following = asyncio.ensure_future(env[:2].step(acting([7, 7])))
        gate.open()
        assert observed(await following) == [[0, 1, 2, 8], [1, 1, 2, 8]]


async def test_coroutines_are_cancelled_where_they_are() -> None:
    kwargs = [{"env_id": env, "waits": env == 1} for env in range(4)]
    async with in_ray(4, PatientEnv, create_env_kwargs=kwargs) as env:
        td = await env.reset()
        td = await env.step(td.update(acting([1] * 4)))
        with pytest.raises(WorkerTimeoutError, match=r"envs 0-1 .*did not answer step within 1 s"):
            await env.step(td.update(acting([1] * 4)), timeout=1)
        assert await env.get_attr("cancelled") == [0, 1, 0, 0]
        with pytest.raises(ResetNeededError):
            await env[1].step(acting([1]))
        await env.reset(masked("_reset", 4, {1}))
        assert observed(await env.step(acting([4] * 4)))[1] == [1, 2, 1, 4]


@pytest.mark.parametrize("other", [CountingEnv, PatientEnv])
async def test_plain_envs_may_run_loops_of_their_own(other: Any) -> None:
    """Ray runs its loop around them, whether there are coroutine envs or not."""
    async with in_ray(2, [LoopingEnv, other], create_env_kwargs=numbered(2), num_processes=1) as env:
        await env.reset()
        assert observed(await env.step(acting([3, 4]))) == [[0, 1, 1, 3], [1, 1, 1, 4]]
        assert await env[:1].call("count") == [1]


async def test_a_late_step_is_dropped(gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with in_ray(2, CountingEnv, create_env_kwargs=kwargs) as env:
        td = await env.reset()
        with pytest.raises(WorkerTimeoutError, match="env 1 "):
            await env.step(td.update(acting([1, 1])), timeout=0.5)
        await gate.arrival()
        gate.open()
        assert observed(await env.step(acting([2, 2]))) == [[0, 1, 2, 3], [1, 1, 2, 3]]


async def test_a_late_host_is_replaced_where_hosts_are(gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 2)}})
    async with in_ray(2, CountingEnv, create_env_kwargs=kwargs, on_worker_death="restart") as env:
        td = await env.step((await env.reset()).update(acting([1, 1])))
        td = await env.step(td.update(acting([1, 1])), timeout=2)
        assert td["next", "truncated"].flatten().tolist() == [False, True]
        assert observed(td)[0] == [0, 1, 2, 2]


# -- errors ---------------------------------------------------------------------------------------------


async def test_an_error_of_an_env_has_its_remote_traceback(face: Face) -> None:
    kwargs = numbered(4, {1: {"fault": faults.raise_value_error}})
    async with opened(face, 4, CountingEnv, create_env_kwargs=kwargs) as env:
        pids = env.pids
        await face.call(env.reset)
        await face.call(env.step, acting([0] * 4))
        with pytest.raises(ValueError, match="the reactor is hot") as caught:
            await face.call(env.step, acting([0] * 4))
        notes = "\n".join(caught.value.__notes__)
        assert f"raised by env 1 in step, process {pids[0]}" in notes
        assert "in raise_value_error" in notes
        await face.call(env.reset, masked("_reset", 4, {1}))
        assert observed(await face.call(env.step, acting([1] * 4)))[1] == [1, 2, 1, 1]
        assert env.pids == pids


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faults.raise_system_exit, "exited with code 5"),
        (faults.exit_3, r"died; Ray says: .*exit"),
        (faults.kill_itself, r"died; Ray says: .*worker process has died"),
    ],
)
async def test_the_error_says_how_a_host_died(face: Face, fault: Any, words: str) -> None:
    async with opened(face, 4, CountingEnv, create_env_kwargs=numbered(4, {1: {"fault": fault}})) as env:
        pid = env.pids[0]
        await face.call(env.reset)
        await face.call(env.step, acting([0] * 4))
        with pytest.raises(WorkerDiedError, match=words) as caught:
            await face.call(env.step, acting([0] * 4))
        assert (caught.value.env_index, caught.value.pid) == ((0, 1), pid)
        assert "last command: step" in str(caught.value)
        assert observed(await face.call(env[2:].step, acting([1, 1]))) == [[2, 1, 3, 1], [3, 1, 3, 1]]
        with pytest.raises(WorkerDiedError):
            await face.call(env[0].step, acting([1]))
        td = await face.call(env.reset)  # which starts another
        assert observed(td) == [[0, 1, 0, 0], [1, 1, 0, 0], [2, 2, 0, 0], [3, 2, 0, 0]]


async def test_an_idle_host_that_dies_is_noticed() -> None:
    async with in_ray(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await env.reset()
        os.kill(env.pids[0], signal.SIGKILL)
        worker = env._pool.hosts[0]
        await asyncio.wait_for(worker.ended, 30)
        with pytest.raises(WorkerDiedError, match="env 0 "):
            await env[0].step(acting([1]))
        assert observed(await env[1].step(acting([1]))) == [[1, 1, 1, 1]]


async def test_what_a_factory_raises() -> None:
    with pytest.raises(WorkerStartError, match="env 1") as caught:
        await in_ray(2, [CountingEnv, faults.failing_factory]).start()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


async def test_a_factory_that_exits() -> None:
    with pytest.raises(WorkerStartError, match="exited with code 1"):
        await in_ray(2, [CountingEnv, faults.sys_exiting_factory]).start()


async def test_too_few_resources() -> None:
    env = in_ray(2, CountingEnv, start_timeout=2, ray_options={"num_cpus": 1, "resources": {"unobtainium": 1}})
    with pytest.raises(WorkerStartError) as caught:
        await env.start()
    for words in ("(start_timeout)", "'unobtainium': 1", "2 hosts", "8 CPU", "are free", "num_processes"):
        assert words in str(caught.value)


# -- nodes ----------------------------------------------------------------------------------------------


@pytest.fixture
def spare_nodes(cluster: Any) -> Iterator[list[Any]]:
    """Three nodes, each with room for one host that wants to be on such a node."""
    nodes = [cluster.add_node(num_cpus=1, resources={"spare": 1}, object_store_memory=80 * 2**20) for _ in range(3)]
    yield nodes
    for node in nodes:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


SPARE = {"ray_options": {"num_cpus": 1, "resources": {"spare": 1}}, "num_processes": 2}


async def remove_node_of(cluster: Any, spare_nodes: list[Any], env: Any, host: int) -> None:
    node_id = (await env.get_attr("node"))[host]
    (node,) = [node for node in spare_nodes if node.node_id == node_id]
    await in_thread(cluster.remove_node, node, allow_graceful=False)


async def test_a_node_is_removed_in_the_middle_of_a_rollout_and_its_host_raises(
    cluster: Any, spare_nodes: list[Any]
) -> None:
    async with in_ray(2, PlacedEnv, create_env_kwargs=numbered(2), **SPARE) as env:
        rollout = asyncio.ensure_future(env.rollout(100_000, break_when_any_done=False))
        await asyncio.wait([rollout], timeout=0)
        while env.is_closed or env._pool.times[0].count < 5:
            await asyncio.wait([rollout], timeout=0.01)
        view = env[1]
        node = next(node for node in spare_nodes if node.node_id == nodes_of_hosts()[env.pids[1]])
        await in_thread(cluster.remove_node, node, allow_graceful=False)
        with pytest.raises(WorkerDiedError, match=r"env 1 .*Ray says"):
            await rollout
        assert observed(await env[0].reset())[0][0] == 0
        td = await view.reset()  # on the third node
        assert observed(td) == [[1, 1, 0, 0]]
        assert observed(await env.step((await env.reset()).update(acting([1, 2])))) == [[0, 3, 1, 1], [1, 2, 1, 2]]


def nodes_of_hosts() -> dict[int, str]:
    """On which node each host is, by its process id."""
    actors = ray._private.state.actors().values()
    return {actor["Pid"]: actor["Address"]["NodeID"] for actor in actors if actor["State"] == "ALIVE"}


async def test_a_node_is_removed_in_the_middle_of_a_rollout_and_its_host_is_replaced(
    cluster: Any, spare_nodes: list[Any]
) -> None:
    async with in_ray(2, PlacedEnv, create_env_kwargs=numbered(2), on_worker_death="restart", **SPARE) as env:
        td = await env.reset()
        pids, lost = env.pids, []
        removed = None
        for step in range(100_000):
            td, following = await env.step_and_maybe_reset(td.update(acting([1, 1])))
            if step == 5:
                removed = asyncio.ensure_future(remove_node(cluster, spare_nodes, nodes_of_hosts()[pids[1]]))
            truncated = td["next", "truncated"].flatten().tolist()
            td = following
            if any(truncated):
                lost.append(truncated)
                break
        assert removed is not None
        await removed
        assert lost == [[False, True]]
        assert observed(following)[1] == [1, 1, 0, 0]
        assert env.pids[0] == pids[0]
        assert env.pids[1] != pids[1]
        assert len(set(await env.get_attr("node"))) == 2


async def remove_node(cluster: Any, nodes: list[Any], node_id: str) -> None:
    node = next(node for node in nodes if node.node_id == node_id)
    await in_thread(cluster.remove_node, node, allow_graceful=False)


# -- the end --------------------------------------------------------------------------------------------


async def test_close_ends_the_hosts_and_closes_the_envs(face: Face, tmp_path: Path) -> None:
    note = tmp_path / "closed"
    async with opened(face, 4, CountingEnv, create_env_kwargs=numbered(4, on_close=faults.Note(str(note)))) as env:
        await face.call(env.reset)
        running = [psutil.Process(pid) for pid in env.pids]
    assert note.read_text() == "xxxx"
    assert still_alive(running, 10) == []
    assert ray.is_initialized()  # which is the user's to end


async def test_an_env_that_hangs_does_not_keep_close(gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    env = in_ray(2, CountingEnv, create_env_kwargs=kwargs, close_timeout=1)
    await env.reset()
    running = [psutil.Process(pid) for pid in env.pids]
    step = asyncio.ensure_future(env.step(acting([1, 1])))
    await gate.arrival()
    await env.close()
    with pytest.raises(AioEnvsError, match="closed"):
        await step
    assert still_alive(running, 10) == []


async def test_started_again() -> None:
    env = in_ray(2, CountingEnv, create_env_kwargs=numbered(2))
    for _ in range(3):
        assert observed(await env.reset()) == [[0, 1, 0, 0], [1, 1, 0, 0]]
        await env.close()


async def test_starts_and_closes_leave_nothing_in_the_driver() -> None:
    """Ray's own connections and threads come and go, but what stays of each cycle grows with their number."""

    async def cycle() -> None:
        async with in_ray(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
            await env.step((await env.reset()).update(acting([1, 1])))

    await cycle()
    before = Holdings()
    for _ in range(CYCLES):
        await cycle()
    after = Holdings()
    deadline = time.monotonic() + PATIENCE
    while len(after.descriptors) - len(before.descriptors) >= CYCLES and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        after = Holdings()
    assert len(after.descriptors) - len(before.descriptors) < CYCLES
    assert len(after.threads) - len(before.threads) < CYCLES
    assert after.shared_memory <= before.shared_memory


async def test_envs_that_are_forgotten_are_ended() -> None:
    env = in_ray(2, CountingEnv)
    await env.reset()
    running = [psutil.Process(pid) for pid in env.pids]
    with pytest.warns(ResourceWarning, match="was never closed"):
        del env
    await asyncio.sleep(0)  # in which the loop gets to it
    assert still_alive(running, 10) == []


@contextlib.contextmanager
def run(code: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A program, which is killed if it has not ended by itself."""
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{code}"
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | environ
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=own, **pipes) as program:
        try:
            yield program
        finally:
            program.kill()


OPEN = """
from aioenvs import ParallelEnv
import failing_envs
env = ParallelEnv(2, failing_envs.CountingEnv, num_processes=2, backend="ray")
"""


def test_a_driver_that_is_killed_leaves_no_host(cluster: Any) -> None:
    code = OPEN + "env.reset(); print(*env.pids, flush=True); input()"
    with run(code, RAY_ADDRESS=cluster.address) as driver:
        assert driver.stdout is not None
        running = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(running) == 2
        driver.kill()
    assert still_alive(running, 30) == []


def test_without_a_cluster_one_is_started_and_ended() -> None:
    code = OPEN + (
        "import psutil, ray\nwith env: print(env.reset()['observation'].tolist(), ray.is_initialized())\n"
        "gone = psutil.wait_procs(psutil.Process().children(recursive=True), 10)[1]\nprint(gone, ray.is_initialized())"
    )
    with run(code) as program:
        output, errors = program.communicate(timeout=TERM)
    assert output.splitlines() == ["[[0, 1, 0, 0], [0, 1, 0, 0]] True", "[] False"], errors
    assert (program.returncode, errors) == (0, "")


CLUSTERS = """
import threading, failing_envs, ray
from aioenvs import ParallelEnv
from aioenvs.errors import WorkerDiedError

def opened():
    options = {"num_cpus": 1}
    return ParallelEnv(3, failing_envs.CountingEnv, num_processes=3, backend="ray", ray_options=options)

def left():
    return ray.is_initialized(), [thread.name for thread in threading.enumerate() if "aioenvs" in thread.name]
"""

SHUT_DOWN = (
    CLUSTERS
    + """
first, second = opened(), opened()
for env in (first, second):
    env.reset()
ray.shutdown()
try:
    first.rand_step()
except WorkerDiedError:
    print("died")
print(second.reset()["observation"][:, 1].tolist())
first.close()
third = opened()
third.reset()
print(third.rand_step()["next", "observation"][:, 2].tolist(), second.rand_step()["next", "observation"][:, 2].tolist())
second.close()
print(left()[0])
third.close()
print(left())
"""
)

THEIRS = (
    CLUSTERS
    + """
with opened() as env:
    env.reset()
    ray.shutdown()
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(left()[0])
with opened() as env:
    env.reset()
print(left())
"""
)


def test_a_cluster_that_somebody_else_shuts_down() -> None:
    """It takes its own envs with it and no others; those begin anew in another, which is ended after the last of them.

    One that was started for envs has room for any number of them.
    """
    with run(SHUT_DOWN) as program:
        output, errors = program.communicate(timeout=TERM)
    expected = ["died", "[1, 1, 1]", "[1, 1, 1] [1, 1, 1]", "True", "(False, [])"]
    assert output.splitlines() == expected, errors


def test_a_cluster_of_the_user_is_not_ended() -> None:
    """Neither by envs that had another one before, nor by those that are in it."""
    with run(THEIRS) as program:
        output, errors = program.communicate(timeout=TERM)
    assert output.splitlines() == ["True", "(True, [])"], errors


CANCELLED = """
import asyncio, failing_envs, ray, threading
from aioenvs import AsyncParallelEnv
from aioenvs.engine.pools.ray import cluster

async def main():
    joining = asyncio.Event()
    genuine, loop = cluster._join, asyncio.get_running_loop()

    def join(num_cpus):
        loop.call_soon_threadsafe(joining.set)
        return genuine(num_cpus)

    cluster._join = join
    for closes in (False, True):
        env = AsyncParallelEnv(2, failing_envs.CountingEnv, num_processes=2, backend="ray")
        joining.clear()
        start = asyncio.ensure_future(env.start())
        await joining.wait()
        if closes:
            await env.close()
        else:
            start.cancel()
        (error,) = await asyncio.gather(start, return_exceptions=True)
        left = [thread.name for thread in threading.enumerate() if "aioenvs" in thread.name]
        print(type(error).__name__, ray.is_initialized(), left)

asyncio.run(main())
"""


def test_a_start_that_ends_while_it_joins_a_cluster_leaves_that() -> None:
    with run(CANCELLED) as program:
        output, errors = program.communicate(timeout=TERM)
    assert output.splitlines() == ["CancelledError False []", "ClosedError False []"], errors


def test_a_program_that_does_not_close_ends_all_the_same() -> None:
    code = OPEN + "env.reset(); print(*env.pids, flush=True)"
    with run(code) as program:
        output, errors = program.communicate(timeout=TERM)
    assert program.returncode == 0, errors
    assert "was never closed" in errors or errors == ""
    assert [pid for pid in map(int, output.split()) if psutil.pid_exists(pid)] == []


def test_a_cluster_that_is_not_there() -> None:
    code = OPEN + "env.start()"
    with run(code, RAY_ADDRESS="127.0.0.1:1") as program:
        _, errors = program.communicate(timeout=TERM)
    last = [line for line in errors.splitlines() if "AioEnvsError" in line][-1]
    assert re.search("no Ray cluster could be reached at RAY_ADDRESS='127.0.0.1:1'", last)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"backend='ray' needs Ray: install aioenvs\[ray\]"):
        ParallelEnv(2, CountingEnv, backend="ray").start()


# -- options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"backend": "process", "ray_options": {}}, TypeError, "ray_options={} has no meaning without backend='ray'"),
        ({"ray_options": 3}, TypeError, "ray_options must be a dict, got 3"),
        ({"ray_options": {"max_restarts": 1}}, ValueError, "ray_options may not have 'max_restarts'"),
        ({"ray_options": {"num_cpus": -1}}, ValueError, "num_cpus in ray_options must be a number of at least 0"),
        ({"mp_start_method": "spawn"}, TypeError, "has no meaning for envs that run in actors of Ray"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        AsyncParallelEnv(2, CountingEnv, **{"backend": "ray", **options})
