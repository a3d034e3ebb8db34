"""What comes back of steps that envs were sent, whenever and with whomever it was sent, and whatever happened since."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import failing_envs as faults
import pytest
import torch
from faces import acting, masked, observed
from failing_envs import CountingEnv, Gate, Scribbler, numbered
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.errors import RemoteEnvError, WorkerDiedError, WorkerStartError, WorkerTimeoutError
from aioenvs.faces import first_ready as outbox
from aioenvs.faces import steps
from aioenvs.faces.first_ready import SentInputs, gathered
from aioenvs.specs import Composite, Unbounded
from aioenvs.testing import NestedCountingEnv


def sent(td: TensorDict) -> SentInputs:
    return SentInputs(td)


def numbers(*values: int, **others: Any) -> TensorDict:
    return TensorDict({"action": torch.tensor(values), **others}, [len(values)])


def to_envs(actions: list[int], envs: list[int]) -> TensorDict:
    return acting(actions).set("env_index", torch.tensor(envs))


# -- rows of what was sent ------------------------------------------------------------------------------


def test_rows_of_one_and_of_several() -> None:
    one, two = sent(numbers(1, 2, 3)), sent(numbers(4, 5))
    for rows, expected in (([(one, 2), (one, 0)], [3, 1]), ([(two, 1), (one, 1), (two, 0)], [5, 2, 4])):
        td = gathered(rows)
        assert type(td) is TensorDict
        assert td.batch_size == (len(expected),)
        assert td["action"].tolist() == expected


def test_rows_are_copies() -> None:
    td = numbers(1, 2)
    kept = sent(td)
    td["action"] += 10
    rows = gathered([(kept, 0), (kept, 1)])
    rows["action"] += 100
    assert gathered([(kept, 0), (kept, 1)])["action"].tolist() == [1, 2]


@pytest.mark.parametrize("nested", [False, True])
def test_rows_with_other_keys_shapes_or_dtypes(nested: bool) -> None:
    def with_others(value: torch.Tensor, name: str = "hidden") -> SentInputs:
        others: Any = {name: value}
        return sent(numbers(1, 2, policy=TensorDict(others, [2])) if nested else numbers(1, 2, **others))

    first = with_others(torch.zeros(2, 3))
    key = ("policy", "hidden") if nested else "hidden"
    assert gathered([(first, 0), (with_others(torch.ones(2, 3)), 1)])[key].tolist() == [[0.0] * 3, [1.0] * 3]
    for other in (with_others(torch.ones(2, 4)), with_others(torch.ones(2, 3), "state")):
        td = gathered([(first, 1), (other, 1)])
        assert isinstance(td, LazyStackedTensorDict) or isinstance(td["policy"], LazyStackedTensorDict)
        assert td["action"].tolist() == [2, 2]


def test_rows_of_a_batch_of_batches_keep_their_size() -> None:
    td = TensorDict({"action": torch.arange(6).reshape(2, 3), "mask": torch.ones(2, 3, 5)}, [2, 3])
    rows = gathered([(sent(td), 1), (sent(td), 1)])
    assert rows.batch_size == (2, 3)
    assert rows["action"].tolist() == [[3, 4, 5]] * 2
    assert rows["mask"].shape == (2, 3, 5)


# -- what is read when it is received -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_processes": 1}, {"num_processes": 3}, {"backend": "thread"}])
@pytest.mark.parametrize("on_worker_death", ["error", "restart"])
async def test_episodes_that_end(options: dict[str, Any], on_worker_death: str) -> None:
    if options.get("backend") == "thread" and on_worker_death == "restart":
        pytest.skip("no thread dies")
    options = {**options, "on_worker_death": on_worker_death} if on_worker_death == "restart" else options
    lengths = {0: {"length": 1}, 2: {"length": 2}}
    async with AsyncParallelEnv(3, CountingEnv, create_env_kwargs=numbered(3, lengths), **options) as env:
        await env.reset()
        roots = {index: [index, 1, 0, 0] for index in range(3)}
        for step in range(1, 5):
            env.send(to_envs([1, 1, 1], [2, 0, 1]))
            td, after = await env.recv(3)
            order = td["env_index"].tolist()
            assert sorted(order) == [0, 1, 2]
            assert td["next", "done"].flatten().tolist() == [
                {0: True, 1: False, 2: step % 2 == 0}[index] for index in order
            ]
            expected = {0: [0, step, 1, 1], 1: [1, 1, step, step], 2: [2, (step + 1) // 2, 2 - step % 2, 2 - step % 2]}
            assert observed(td) == [expected[index] for index in order]
            roots = {
                0: [0, step + 1, 0, 0],
                1: expected[1],
                2: [2, step // 2 + 1, 0, 0] if step % 2 == 0 else expected[2],
            }
            assert after["observation"].tolist() == [roots[index] for index in order]
            assert after["env_index"].tolist() == order
        counted = env.statistics()
        assert (counted.steps, counted.episodes) == ((4, 4, 4), (4, 0, 2))


async def test_steps_are_counted_once() -> None:
    async with AsyncSerialEnv(2, CountingEnv) as env:
        await env.reset()
        env.send(acting([0, 0]))
        receiving = asyncio.create_task(env[0].recv())
        await env[1].recv()
        await receiving
        assert env.statistics().steps == (1, 1)


async def test_what_came_before_its_worker_died_is_received_after_others_began_anew() -> None:
    kwargs = numbered(2, {1: {"fault": faults.kill_itself, "at": (1, 1)}})
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=1) as env:
        await env.reset()
        env.send(to_envs([5], [0]))
        env.send(to_envs([6], [1]))
        with pytest.raises(WorkerDiedError):
            await env[1].recv()
        assert observed(await env.reset(masked("_reset", 2, [1])))[1] == [1, 1, 0, 0]
        td, after = await env.recv()
        assert observed(td) == [[0, 1, 1, 5]]
        assert after["observation"].tolist() == [[0, 1, 1, 5]]


async def test_results_stay_as_they_are_while_the_envs_go_on() -> None:
    async with AsyncParallelEnv(3, CountingEnv, create_env_kwargs=numbered(3), num_processes=2) as env:
        await env.reset()
        results = []
        for _ in range(4):
            env.send(to_envs([1, 1], [2, 0]))
            results.append((await env.recv(2))[0])
        assert [sorted(observed(td)) for td in results] == [[[0, 1, n, n], [2, 1, n, n]] for n in range(1, 5)]


@pytest.mark.parametrize("options", [{}, {"on_worker_death": "restart"}, {"share_individual_td": True}])
async def test_envs_with_batches_of_their_own(options: dict[str, Any]) -> None:
    """First ready, and all together, are the same steps."""
    async with (
        AsyncParallelEnv(3, NestedCountingEnv, num_processes=2, **options) as one,
        AsyncParallelEnv(3, NestedCountingEnv, num_processes=2, **options) as two,
    ):
        root, sibling = await one.reset(), await two.reset()
        for _ in range(6):
            root = one.rand_action(root)
            sibling.update(root.select(*one.action_keys))
            expected, sibling = await two.step_and_maybe_reset(sibling)
            one.send(root)
            rows = {}
            for count in (1, 2):
                td, after = await one.recv(count, count)
                assert td.batch_size == after.batch_size == (count, *one.batch_size[1:])
                for row, index in enumerate(td["env_index"].reshape(count, -1)[:, 0].tolist()):
                    rows[index] = td[row].exclude("env_index"), after[row].exclude("env_index")
            assert sorted(rows) == [0, 1, 2]
            for index, (td, after) in rows.items():
                assert (td == expected[index]).all()
                assert (after == sibling[index]).all()
            root = sibling.clone()


@pytest.mark.parametrize("options", [{"num_processes": 2}, {"backend": "thread"}])
async def test_an_env_that_is_late_takes_its_step_when_it_is_ready(options: dict[str, Any], gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, **options) as env:
        await env.reset()
        with pytest.raises(WorkerTimeoutError):
            await env.step(acting([1, 2]), timeout=0.3)
        env.send(to_envs([20, 10], [1, 0]))
        td, _ = await env.recv()
        assert observed(td) == [[0, 1, 2, 11]]
        assert td["action"].tolist() == [10]
        gate.open()
        td, after = await env.recv()
        assert observed(td) == [[1, 1, 2, 22]]
        assert after["observation"].tolist() == [[1, 1, 2, 22]]


@pytest.mark.parametrize("options", [{"num_processes": 1}, {"num_processes": 2}, {"backend": "thread"}])
async def test_actions_that_are_objects_reach_the_envs_that_they_are_for(options: dict[str, Any]) -> None:
    async with AsyncParallelEnv(3, Scribbler, **options) as env:
        await env.reset()
        actions = NonTensorStack(NonTensorData([1, 2, 3]), NonTensorData([]))
        env.send(TensorDict({"action": actions, "env_index": torch.tensor([2, 0])}, [2]))
        td, _ = await env.recv(2)
        found = dict(zip(td["env_index"].tolist(), (row[0] for row in observed(td)), strict=True))
        assert found == {2: 4, 0: 1}  # each adds one to its own list


async def test_what_cannot_be_stacked_is_not_lost() -> None:
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1) as env:
        await env.reset()
        for index, width in enumerate((3, 5)):
            td = to_envs([1], [index]).set("cache", torch.zeros(1, width))
            env.send(td)
        td, following = await env.recv(2)
        assert [row["cache"].shape for row in td.unbind(0)] == [(3,), (5,)]
        assert [row["cache"].shape for row in following.unbind(0)] == [(3,), (5,)]
        assert [row["observation"].tolist() for row in following.unbind(0)] == [[0, 1, 1, 1], [1, 1, 1, 1]]
        env.send(to_envs([1], [0]).set("a", torch.zeros(1)))
        env.send(to_envs([1], [1]).to("cpu"))
        td, _ = await env.recv(2)
        assert sorted(td["env_index"].tolist()) == [0, 1]


async def test_results_that_cannot_be_assembled_can_still_be_received(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1) as env:
        await env.reset()
        env.send(acting([1, 2]))
        with monkeypatch.context() as patch:
            patch.setattr("aioenvs.faces.steps.gathered", lambda parts: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await env.recv(2)
        assert env.outstanding == (0, 1)
        td, _ = await env.recv(2)
        assert td["next", "observation"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 2]]


async def test_a_timeout_of_recv_counts_what_has_come(gate: Gate) -> None:
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        await env.reset()
        env.send(acting([0, 0]))
        with pytest.raises(WorkerTimeoutError, match=r"recv: 1 more of env 1 should have answered within 0.3 s"):
            await env.recv(2, timeout=0.3)
        gate.open()
        await env.recv(2)


async def test_the_end_of_several_workers_names_all_their_envs() -> None:
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=numbered(4), num_processes=2) as env:
        await env.reset()
        for pid in env.pids:
            os.kill(pid, signal.SIGSTOP)
        env.send(to_envs([1, 1], [0, 3]))
        for pid in env.pids:
            os.kill(pid, signal.SIGKILL)
        named: set[int] = set()
        while env.outstanding:
            with pytest.raises(WorkerDiedError) as caught:
                await env.recv(len(env.outstanding))
            named |= set(caught.value.env_index)
        assert named == {0, 1, 2, 3}


async def test_whoever_asks_for_an_attribute_is_told_that_envs_are_busy(gate: Gate) -> None:
    with SerialEnv(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        env.reset()
        env.send(acting([1, 1]))
        assert not hasattr(env, "env_id")
        with pytest.raises(AttributeError, match="its envs cannot be asked now: get_attr was asked of envs 0-1 while"):
            env.env_id  # noqa: B018
        env.recv(2)
        assert env.env_id == [0, 1]


def test_no_env_may_have_an_entry_of_that_name() -> None:
    class Indexed(NestedCountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(env_index=Unbounded((1,)))

    with pytest.raises(WorkerStartError, match=r"env 0 \(Indexed\) has an entry 'env_index', a key that is taken"):
        SerialEnv(1, Indexed).start()


class Numbered(Exception):
    """Has an `env_index` of its own, which means something else and cannot be changed."""

    @property
    def env_index(self) -> tuple[int, ...]:
        return (7,)


def raise_numbered() -> None:
    raise Numbered("of the simulator")


@pytest.mark.parametrize("cls", [AsyncParallelEnv, AsyncSerialEnv])
async def test_an_error_with_an_index_of_its_own_has_a_stand_in(cls: Any) -> None:
    kwargs = numbered(2, {1: {"fault": raise_numbered, "at": (1, 1)}})
    async with cls(2, CountingEnv, create_env_kwargs=kwargs) as env:
        await env.reset()
        with pytest.raises(RemoteEnvError, match="of the simulator") as caught:
            await env.step(acting([1, 1]))
        assert caught.value.env_index == (1,)
        assert any("raised by env 1 in step" in note for note in caught.value.__notes__)


def interrupting(target: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C the next time that a function is called, and only then."""
    genuine = getattr(target, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(target, name, genuine)
        signal.raise_signal(signal.SIGINT)
        return genuine(*args, **kwargs)

    monkeypatch.setattr(target, name, interrupted)


@pytest.mark.parametrize("make", [SerialEnv, lambda *args, **kw: ParallelEnv(*args, num_processes=2, **kw)])
def test_what_ctrl_c_kept_from_being_returned_is_received_later(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        env.reset()
        env.send(acting([1, 2]))
        interrupting(steps, "gathered", monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            env.recv(2)
        assert sorted(env.outstanding) == [0, 1]
        td, _ = env.recv(2)
        assert sorted(td["next", "observation"].tolist()) == [[0, 1, 1, 1], [1, 1, 1, 2]]


@pytest.mark.parametrize(("target", "name"), [(outbox, "_Send"), (outbox.PendingSteps, "_settle")])
def test_ctrl_c_while_a_serial_env_sends_leaves_it_usable(
    target: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SerialEnv(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        env.reset()
        interrupting(target, name, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            env.send(acting([1, 2, 3]))
        if env.outstanding:
            env.recv(len(env.outstanding))
        assert observed(env.reset()) == [[0, 2, 0, 0], [1, 2, 0, 0], [2, 2, 0, 0]]
