"""Collectors: which batches they give, and that nothing is lost, whatever happens in between."""

import asyncio
import functools
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import collecting
import pytest
import torch
from collecting import (
    NUM_ENVS,
    by_step,
    check_continuous,
    check_ids,
    check_steps,
    collector,
    every_batch,
    persistently,
    trajectories,
)
from faces import EVERY_FACE, THREAD_FACES, Face
from failing_envs import CountingEnv, Gate, NarrowEnv, kill_itself, numbered, raise_value_error
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type
from torch import nn

import aioenvs.testing as toys
from aioenvs import AsyncCollector, AsyncParallelEnv, AsyncSerialEnv, Collector, ParallelEnv, SerialEnv
from aioenvs.collectors.policy import PolicyRunner
from aioenvs.collectors.strategy import FirstReady, Lockstep, ShieldedCommand
from aioenvs.errors import AioEnvsError, ClosedError, ConcurrencyError, SpecMismatchError, WorkerDiedError

LENGTHS = numbered(NUM_ENVS, {0: {"length": 3}, 1: {"length": 5}, 2: {"length": 4}})
ENDLESS = numbered(NUM_ENVS)

EITHER = pytest.mark.parametrize("min_get", [None, 1], ids=["lockstep", "first-ready"])
one_of_each = pytest.mark.parametrize(
    "face", [EVERY_FACE[1], EVERY_FACE[0], EVERY_FACE[4], EVERY_FACE[2]], ids=lambda face: face.name
)
two_of_them = pytest.mark.parametrize("face", [EVERY_FACE[1], EVERY_FACE[2]], ids=lambda face: face.name)
one_process_each = pytest.mark.parametrize("face", [EVERY_FACE[3], EVERY_FACE[5]], ids=lambda face: face.name)


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until something is so."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


# -- batches ---------------------------------------------------------------------------------------------


async def test_all_envs_together_go_on_from_batch_to_batch(face: Face) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=LENGTHS) as env:
        source = collector(env, by_step, frames_per_batch=12, total_frames=36)
        assert len(source) == 3
        batches = await every_batch(source)
        assert [batch.batch_size for batch in batches] == [(NUM_ENVS, 4)] * 3
        assert [batch.names for batch in batches] == [[None, "time"]] * 3
        assert (source.frames, source.iterations, source.is_finished) == (36, 3, True)
        assert await every_batch(source) == []
        envs = trajectories(batches)
        for env_id, own in enumerate(envs):
            assert own["observation"][0].tolist() == [env_id, 1, 0, 0]
            assert own["action"].tolist() == by_step(own["observation"]).tolist()
            check_continuous(own)
        check_ids(envs)
        assert "env_index" not in batches[0]


@pytest.mark.parametrize("min_get", [1, 2, NUM_ENVS])
async def test_whoever_is_ready_first_fills_batches_exactly(face: Face, min_get: int) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        source = collector(env, by_step, frames_per_batch=7, total_frames=28, min_get=min_get)
        batches = await every_batch(source)
        assert [batch.batch_size for batch in batches] == [(7,)] * 4
        assert (source.frames, source.iterations) == (28, 4)
        envs = trajectories(batches)
        for env_id, own in enumerate(envs):
            assert own["observation"][0].tolist() == [env_id, 1, 0, 0]
            check_continuous(own)
        check_ids(envs)
        assert env.outstanding == ()
        assert sum(await face.call(env.get_attr, "steps")) == 28


@one_of_each
async def test_episodes_end_wherever_a_batch_ends(face: Face) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=LENGTHS) as env:
        batches = await every_batch(collector(env, by_step, frames_per_batch=5, total_frames=50, min_get=1))
        envs = trajectories(batches)
        for own in envs:
            check_continuous(own)
        check_ids(envs)
        assert sum(int(own["next", "done"].sum()) for own in envs) >= 6


@one_of_each
@EITHER
async def test_what_was_returned_never_changes(face: Face, min_get: int | None) -> None:
    def scribbling(td: TensorDictBase) -> TensorDictBase:
        td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))
        td["observation"] += 1000  # of a tensor that is also the last step's
        return td

    async with face.open(NUM_ENVS, toys.CountingEnv, create_env_kwargs={"in_place": True}) as env:
        source = collector(env, scribbling, frames_per_batch=9, min_get=min_get)
        batches, copies = [], []
        for _ in range(3):
            batch = await face.call(source.next)
            batches.append(batch)
            copies.append(batch.clone())
        for batch, copy in zip(batches, copies, strict=True):
            assert (batch == copy).all()
            assert batch["next", "observation"].max() < 1000
        pointers = [leaf.untyped_storage().data_ptr() for batch in batches for leaf in batch.values(True, True)]
        assert len(set(pointers)) == len(pointers)
        await face.call(source.shutdown)


@EITHER
async def test_random_actions_come_first(min_get: int | None) -> None:
    async with AsyncSerialEnv(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        marked = AsyncCollector(
            env,
            lambda observation: torch.full_like(observation[..., 0], 999),
            frames_per_batch=6,
            total_frames=18,
            init_random_frames=6,
            min_get=min_get,
        )
        first, second, third = [batch["action"] async for batch in marked]
        assert (first != 999).any()
        assert (third == 999).all()
        assert (second == 999).sum() >= 6 - NUM_ENVS  # what was under way was chosen before


async def test_each_batch_can_begin_with_new_episodes() -> None:
    async with AsyncSerialEnv(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        source = AsyncCollector(env, by_step, frames_per_batch=6, total_frames=18, reset_at_each_iter=True)
        batches = [batch async for batch in source]
        assert [batch["observation"][0, :, 1:3].tolist() for batch in batches] == [
            [[episode, 0], [episode, 1]] for episode in (1, 2, 3)
        ]
        ids = [set(batch["collector", "traj_ids"].flatten().tolist()) for batch in batches]
        assert set().union(*ids) == set(range(9))


async def test_a_reset_begins_new_episodes_and_keeps_what_is_under_way() -> None:
    async with AsyncParallelEnv(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS, num_processes=2) as env:
        source = AsyncCollector(env, by_step, frames_per_batch=4, min_get=1)
        batches = [await source.next()]
        await source.reset()
        batches += [await source.next() for _ in range(3)]
        await source.shutdown(close_env=False)
        for own in trajectories(batches):
            check_steps(own)
            episodes, steps = own["observation"][:, 1].tolist(), own["observation"][:, 2].tolist()
            assert episodes == sorted(episodes)
            assert set(episodes) <= {1, 2}
            assert steps == [*range(episodes.count(1)), *range(episodes.count(2))]
            assert len(set(own["collector", "traj_ids"].tolist())) == len(set(episodes))


NARROW = numbered(NUM_ENVS, {0: {"actions": 1}, 1: {"actions": 1000}, 2: {"actions": 2}})


@one_of_each
@pytest.mark.parametrize("part", [[0, 1, 2], [2, 0, 1]], ids=["whole", "view"])
@pytest.mark.parametrize("policy", [None, by_step], ids=["no-policy", "at-first"])
async def test_random_actions_are_those_of_the_env_whoever_is_first(face: Face, part: list[int], policy: Any) -> None:
    async with face.open(NUM_ENVS, NarrowEnv, create_env_kwargs=NARROW) as env:
        envs = env if part == [0, 1, 2] else env[part]
        options: dict[str, Any] = {"min_get": 1, "init_random_frames": 20}
        source = collector(envs, policy, frames_per_batch=4, total_frames=20, **options)
        for own, most in zip(trajectories(await every_batch(source)), (1, 1000, 2), strict=True):
            check_continuous(own)
            assert own["action"].max() < most


# -- the policy ------------------------------------------------------------------------------------------


async def test_envs_work_while_the_policy_computes(gate: Gate) -> None:
    kwargs = numbered(2, {0: {"fault": gate.wait, "at": (1, 1)}})
    seen = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.append(td["env_index"].tolist())
        if seen == [[0, 1], [1]]:  # env 0 is in the middle of its step, and ends it before this returns
            gate.wait_for_arrival()
            gate.open()
        return td.set("action", td["observation"][..., 2] + 1)

    env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2)
    async with AsyncCollector(env, policy, frames_per_batch=8, min_get=1) as source:
        batch = await source.next()
        assert seen[:2] == [[0, 1], [1]]
        assert batch["env_index"][0] == 1


async def test_a_slow_env_holds_nobody_up_and_loses_nothing(gate: Gate) -> None:
    kwargs = numbered(NUM_ENVS, {0: {"fault": gate.wait, "at": (1, 2)}})
    async with AsyncParallelEnv(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs, num_processes=NUM_ENVS) as env:
        source = AsyncCollector(env, by_step, frames_per_batch=10, total_frames=30, min_get=1)
        first = await source.next()
        await gate.arrival()
        second = await source.next()
        assert (first["env_index"] == 0).sum() + (second["env_index"] == 0).sum() == 1
        assert 0 in env.outstanding
        gate.open()
        third = await source.next()
        envs = trajectories([first, second, third])
        for own in envs:
            check_continuous(own)
        assert sum(map(len, envs)) == 30


async def test_a_policy_can_be_a_server_somewhere_else() -> None:
    sizes = []
    graded = []

    async def remote(observation: torch.Tensor) -> torch.Tensor:
        graded.append(torch.is_grad_enabled())
        sizes.append(len(observation))
        await asyncio.sleep(0)
        graded.append(torch.is_grad_enabled())
        return by_step(observation)

    async def bystander() -> list[bool]:
        found = []
        while not source.is_finished:
            await asyncio.sleep(0)
            found.append(torch.is_grad_enabled())
        return found

    async with AsyncParallelEnv(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS, num_processes=2) as env:
        source = AsyncCollector(env, remote, frames_per_batch=6, total_frames=24, min_get=2)
        watch = asyncio.create_task(bystander())
        batches = [batch async for batch in source]
        for own in trajectories(batches):
            check_continuous(own)
            assert own["action"].tolist() == by_step(own["observation"]).tolist()
        assert sizes[0] == NUM_ENVS
        assert sum(sizes) == 24
        assert not any(graded)
        assert all(await watch)  # what the collector switches off is off for nobody else


@EITHER
@pytest.mark.parametrize("cls", [ParallelEnv, SerialEnv])
async def test_a_plain_collector_inside_a_running_loop(cls: Any, min_get: int | None) -> None:
    env = cls(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS)
    with Collector(env, by_step, frames_per_batch=6, total_frames=12, min_get=min_get) as source:
        for own in trajectories(list(source)):
            check_continuous(own)


async def test_a_serial_env_without_a_loop_refuses_a_coroutine_function() -> None:
    async def remote(observation: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return by_step(observation)

    with Collector(SerialEnv(2, CountingEnv), remote, frames_per_batch=2) as source:
        with pytest.raises(TypeError, match="use AsyncSerialEnv"):
            source.next()
        source.update_policy(by_step)
        assert source.next()["action"].tolist() == [[0], [0]]


class Learner(nn.Module):
    """Acts by the sign of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(5.0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (observation[..., 0] * 0 + self.weight).long()


@EITHER
async def test_a_module_always_has_its_latest_weights(min_get: int | None) -> None:
    policy = Learner()
    async with AsyncSerialEnv(2, CountingEnv) as env:
        source = AsyncCollector(env, policy, frames_per_batch=4, policy_device="cpu", min_get=min_get)
        assert set((await source.next())["action"].flatten().tolist()) == {5}
        with torch.no_grad():
            policy.weight.fill_(6.0)
        await source.reset()
        await source.next()
        assert set((await source.next())["action"].flatten().tolist()) == {6}
        source.update_policy_weights_()
        source.update_policy({"weight": torch.tensor(7.0)})
        await source.next()
        assert set((await source.next())["action"].flatten().tolist()) == {7}
        source.update_policy_weights_(TensorDict({"weight": torch.tensor(8.0)}))
        await source.next()
        assert set((await source.next())["action"].flatten().tolist()) == {8}
        source.update_policy(lambda observation: torch.full_like(observation[..., 0], 9))
        await source.next()
        assert set((await source.next())["action"].flatten().tolist()) == {9}
        for update in (source.update_policy, source.update_policy_weights_):
            with pytest.raises(TypeError, match="expected a policy with weights"):
                update({"weight": torch.tensor(7.0)})
        source.update_policy_weights_()  # what is called as it was given has its latest weights, if it has any
        await source.next()
        await source.shutdown()


def test_a_module_is_copied_to_another_device() -> None:
    policy = Learner()
    assert PolicyRunner(policy, "cpu", None).module is policy
    actor = PolicyRunner(policy, "meta", None)
    assert actor.module is not None
    assert (actor.module.weight.device.type, policy.weight.device.type) == ("meta", "cpu")
    for weights in (None, policy):
        with pytest.warns(UserWarning, match="copying from a non-meta parameter"):
            actor.load(weights)
    assert actor.module.weight.device.type == "meta"
    assert PolicyRunner(by_step, "meta", None).module is None


async def test_modules_explore_unless_told_otherwise() -> None:
    seen = []

    def choose(observation: torch.Tensor) -> torch.Tensor:
        seen.append(interaction_type())
        return observation[..., 0]

    policy = TensorDictModule(choose, in_keys=["observation"], out_keys=["action"])
    for asked in (InteractionType.RANDOM, InteractionType.DETERMINISTIC):
        async with AsyncSerialEnv(2, CountingEnv) as env:
            await AsyncCollector(env, policy, frames_per_batch=2, exploration_type=asked).next()
    assert seen == [InteractionType.RANDOM, InteractionType.DETERMINISTIC]
    assert interaction_type() is None or interaction_type() != InteractionType.RANDOM


@one_of_each
@EITHER
async def test_no_gradients_are_recorded(face: Face, min_get: int | None) -> None:
    async with face.open(2, toys.ParameterEnv) as env:
        source = collector(env, frames_per_batch=6, storing_device="cpu", min_get=min_get)
        for _ in range(2):
            batch = await face.call(source.next)
            assert not any(leaf.requires_grad for leaf in batch.values(True, True))
        assert torch.is_grad_enabled()


# -- cancelling ------------------------------------------------------------------------------------------


@EITHER
@pytest.mark.usefixtures("any_loop")
async def test_cancelling_loses_nothing(gate: Gate, min_get: int | None) -> None:
    kwargs = numbered(NUM_ENVS, {0: {"fault": gate.wait, "at": (1, 3)}})
    async with AsyncParallelEnv(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs, num_processes=NUM_ENVS) as env:
        get = None if min_get is None else NUM_ENVS
        source = AsyncCollector(env, by_step, frames_per_batch=15, total_frames=30, min_get=get)
        waiting = asyncio.create_task(source.next())
        await gate.arrival()
        for _ in range(3):
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            waiting = asyncio.create_task(source.next())
            await asyncio.sleep(0)
        gate.open()
        batches = [await waiting, await source.next()]
        for own in trajectories(batches):
            assert len(own) == 10
            check_continuous(own)
            assert own["observation"][:, 2].tolist() == list(range(10))


@EITHER
async def test_cancelling_the_first_reset_loses_nothing(gate: Gate, min_get: int | None) -> None:
    kwargs = numbered(NUM_ENVS, {0: {"fault": gate.wait, "at": (1, 0)}})
    async with AsyncParallelEnv(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs, num_processes=NUM_ENVS) as env:
        source = AsyncCollector(env, by_step, frames_per_batch=6, total_frames=6, min_get=min_get)
        waiting = asyncio.create_task(source.next())
        await gate.arrival()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open()
        batch = await source.next()
        assert set(batch["observation"][..., 1].flatten().tolist()) == {1}  # nobody was reset twice


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("fails", [False, True])
async def test_a_result_is_kept_whenever_its_waiter_is_cancelled(turns: int, fails: bool) -> None:
    errand, finish = ShieldedCommand(), asyncio.Event()

    async def command() -> int:
        await finish.wait()
        if fails:
            raise LookupError("nothing there")
        return 7

    async def attempt() -> Any:
        try:
            return await errand.result(command)
        except LookupError as error:
            return str(error)

    waiting = asyncio.create_task(attempt())
    await asyncio.sleep(0)
    finish.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    try:
        found = await waiting
    except asyncio.CancelledError:
        assert errand.pending
        found = await attempt()
    assert found == ("nothing there" if fails else 7)
    assert not errand.pending


@pytest.mark.parametrize("min_get", [None, 1])
async def test_one_that_is_forgotten_while_envs_are_at_work(gate: Gate, min_get: int | None) -> None:
    """Its envs are closed over a command that nobody waits for, of which nobody has to hear (see `no_leaks`)."""
    kwargs = numbered(2, {1: {"fault": gate.wait, "at": (1, 0)}})
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2, close_timeout=1) as env:
        collector = AsyncCollector(env, None, frames_per_batch=8, min_get=min_get)
        waiting = asyncio.ensure_future(collector.next())
        await gate.arrival()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del collector, waiting


async def test_a_policy_that_waits_is_cancelled_and_asked_again() -> None:
    asked = []
    hanging = asyncio.Event()

    async def remote(observation: torch.Tensor) -> torch.Tensor:
        asked.append(observation[..., 2].tolist())
        if len(asked) == 2:
            hanging.set()
            await asyncio.Event().wait()
        return by_step(observation)

    async with AsyncSerialEnv(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        source = AsyncCollector(env, remote, frames_per_batch=6)
        waiting = asyncio.create_task(source.next())
        await hanging.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        batch = await source.next()
        assert asked == [[0, 0], [1, 1], [1, 1], [2, 2]]
        for own in batch.unbind(0):
            check_continuous(own)


@EITHER
@pytest.mark.parametrize("cls", [ParallelEnv, SerialEnv])
def test_an_interrupt_loses_nothing(cls: Any, min_get: int | None) -> None:
    calls = itertools.count()

    def policy(observation: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return by_step(observation)

    with Collector(
        cls(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS), policy, frames_per_batch=18, min_get=min_get
    ) as (source):
        with pytest.raises(KeyboardInterrupt):
            source.next()
        for own in trajectories([source.next(), source.next()]):
            check_continuous(own)


@pytest.mark.parametrize("min_get", [None, 1, 2])
def test_an_interrupt_within_a_step_of_this_process_begins_new_episodes(min_get: int | None) -> None:
    fault = functools.partial(signal.raise_signal, signal.SIGINT)
    kwargs = numbered(NUM_ENVS, {1: {"fault": fault, "at": (1, 3)}})
    env = SerialEnv(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs)
    with Collector(env, by_step, frames_per_batch=18, total_frames=36, min_get=min_get) as source:
        with pytest.raises(KeyboardInterrupt):
            source.next()
        envs = trajectories(list(source))
        for own in envs:
            check_steps(own)
            assert set(own["observation"][:, 1].tolist()) == {1, 2}
        check_ids(envs)


# -- others who use the envs -----------------------------------------------------------------------------


async def test_envs_that_somebody_else_has_taken_over_begin_anew(gate: Gate) -> None:
    fault = {"fault": gate.wait, "at": (1, 2)}
    kwargs = numbered(NUM_ENVS, {0: fault, 1: fault, 2: fault})
    async with AsyncParallelEnv(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs, num_processes=NUM_ENVS) as env:
        source = AsyncCollector(env, by_step, frames_per_batch=9, min_get=1)
        waiting = asyncio.create_task(source.next())
        for _ in range(NUM_ENVS):
            await gate.arrival()
        await until(lambda: len(env.outstanding) == NUM_ENVS)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open(NUM_ENVS)
        await env.recv(NUM_ENVS)
        await env.reset()
        envs = trajectories([await source.next(), await source.next()])
        for own in envs:
            check_continuous(own[:1])
            check_continuous(own[1:])
            assert own["observation"][:2, 1:3].tolist() == [[1, 0], [3, 0]]
        check_ids(envs)
        await source.shutdown()


@one_of_each
async def test_steps_that_somebody_else_has_received_are_missing(face: Face) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        source = collector(env, by_step, frames_per_batch=2, min_get=1)
        batches = [await face.call(source.next)]
        taken = env.outstanding
        assert taken
        await face.call(env.recv, len(taken))
        while not set(taken) <= {env_id for batch in batches[1:] for env_id in batch["env_index"].tolist()}:
            batches.append(await face.call(source.next))
        for env_id, own in enumerate(trajectories(batches)):
            check_steps(own)
            assert (2 in own["observation"][:, 1].tolist()) == (env_id in taken)
        await face.call(source.shutdown)


async def test_a_failure_that_takes_results_away_is_made_up_for() -> None:
    async with AsyncParallelEnv(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS, num_processes=2) as env:
        receive = env.recv

        async def fail(*args: Any) -> Any:
            del env.recv
            await receive(NUM_ENVS)
            raise MemoryError("no room for results")

        source = AsyncCollector(env, by_step, frames_per_batch=6, min_get=NUM_ENVS)
        env.recv = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            await source.next()
        for own in trajectories([await source.next(), await source.next()]):
            check_continuous(own)
            assert own["observation"][0, 1:3].tolist() == [2, 0]


# -- failures --------------------------------------------------------------------------------------------


async def test_an_env_that_raises_costs_nobody_else_a_step(face: Face) -> None:
    kwargs = numbered(NUM_ENVS, {1: {"fault": raise_value_error, "at": (1, 3)}})
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs) as env:
        source = collector(env, by_step, frames_per_batch=12, total_frames=24, min_get=2)
        batches, (error,) = await persistently(source, ValueError)
        assert str(error) == "the reactor is hot"
        envs = trajectories(batches)
        assert sum(map(len, envs)) == 24
        check_continuous(envs[0])
        check_continuous(envs[2])
        check_steps(envs[1])
        assert envs[1]["observation"][:4, 1:3].tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
        ids = envs[1]["collector", "traj_ids"].tolist()
        assert ids[0] == ids[1] != ids[2] == ids[3]
        check_ids(envs)


async def test_of_all_envs_together_a_step_that_fails_is_missing(face: Face) -> None:
    kwargs = numbered(NUM_ENVS, {1: {"fault": raise_value_error, "at": (1, 3)}})
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs) as env:
        source = collector(env, by_step, frames_per_batch=12, total_frames=24)
        batches, (error,) = await persistently(source, ValueError)
        assert str(error) == "the reactor is hot"
        assert [batch.batch_size for batch in batches] == [(NUM_ENVS, 4)] * 2
        envs = trajectories(batches)
        for env_id, own in enumerate(envs):
            check_steps(own)
            check_continuous(own[:2])
            check_continuous(own[2:])
            assert own["collector", "traj_ids"][1] != own["collector", "traj_ids"][2]
            assert own["observation"][2, 1:3].tolist() == ([2, 0] if env_id == 1 else [1, 3])
        check_ids(envs)


@EITHER
async def test_a_first_reset_that_fails_is_made_up_for(face: Face, min_get: int | None) -> None:
    kwargs = numbered(NUM_ENVS, {1: {"fault": raise_value_error, "at": (1, 0)}})
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs) as env:
        source = collector(env, by_step, frames_per_batch=6, total_frames=12, min_get=min_get)
        batches, errors = await persistently(source, ValueError)
        assert len(errors) == 1
        for own in trajectories(batches):
            check_continuous(own)
            assert own["observation"][0, 2] == 0


@EITHER
async def test_an_exception_of_the_policy_costs_nothing(face: Face, min_get: int | None) -> None:
    calls = itertools.count()

    def policy(observation: torch.Tensor) -> torch.Tensor:
        match next(calls):
            case 2:
                raise LookupError("no such move")
            case 3:
                return observation[..., 0].float() + 0.5  # which is no action
        return by_step(observation)

    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        source = collector(env, policy, frames_per_batch=12, total_frames=24, min_get=min_get)
        batches, errors = await persistently(source, (LookupError, ValueError))
        assert [type(error) for error in errors] == [LookupError, SpecMismatchError]
        for own in trajectories(batches):
            check_continuous(own)


@one_process_each
@EITHER
async def test_a_worker_that_dies_is_replaced_with_the_next_batch(face: Face, min_get: int | None) -> None:
    kwargs = numbered(NUM_ENVS, {1: {"fault": kill_itself, "at": (1, 3)}})
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs) as env:
        source = collector(env, by_step, frames_per_batch=12, total_frames=24, min_get=min_get)
        batches, errors = await persistently(source, WorkerDiedError)  # of the new env, too: it has the same fault
        assert errors
        assert sum(batch.numel() for batch in batches) == 24
        envs = trajectories(batches)
        for own in envs:
            check_steps(own)
        if min_get is not None:
            check_continuous(envs[0])
            check_continuous(envs[2])
        check_ids(envs)


@EITHER
async def test_a_worker_that_is_restarted_costs_one_truncated_step(min_get: int | None) -> None:
    kwargs = numbered(NUM_ENVS, {1: {"fault": kill_itself, "at": (1, 3)}})
    options: dict[str, Any] = {"num_processes": NUM_ENVS, "on_worker_death": "restart"}
    async with AsyncParallelEnv(NUM_ENVS, CountingEnv, create_env_kwargs=kwargs, **options) as env:
        get = None if min_get is None else NUM_ENVS
        source = AsyncCollector(env, by_step, frames_per_batch=12, total_frames=12, min_get=get)
        (batch,) = [batch async for batch in source]
        envs = trajectories([batch])
        check_continuous(envs[0])
        check_continuous(envs[2])
        assert envs[1]["next", "truncated"][:, 0].tolist() == [False, False, True, False]
        assert envs[1]["observation"][:, 2].tolist() == [0, 1, 2, 0]
        ids = envs[1]["collector", "traj_ids"].tolist()
        assert ids[0] == ids[1] == ids[2] != ids[3]


@pytest.mark.parametrize("min_get", [1, 2])
async def test_envs_of_one_process_that_die_together_are_one_error(min_get: int) -> None:
    kwargs = numbered(4, {1: {"fault": kill_itself, "at": (1, 3)}})
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        source = AsyncCollector(env, by_step, frames_per_batch=11, total_frames=33, min_get=min_get)
        batches, errors = await persistently(source, WorkerDiedError)
        assert {error.env_index for error in errors} == {(0, 1)}
        flat = torch.cat(batches)
        for env_id in (2, 3):
            check_continuous(flat[flat["env_index"] == env_id])
        assert len(flat) == 33


@pytest.mark.parametrize("min_get", [None, 2], ids=["lockstep", "first-ready"])
async def test_envs_whose_worker_was_replaced_for_another_begin_anew(min_get: int | None) -> None:
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=numbered(4), num_processes=2) as env:
        source = AsyncCollector(env[[0, 2]], by_step, frames_per_batch=2, min_get=min_get)
        first = await source.next()
        assert env.outstanding == ()
        os.kill(env.pids[0], signal.SIGKILL)
        await until(lambda: env.statistics().states[:2] == ("broken", "broken"))
        await env[1].reset()  # gives env 0 a new process, too, in which it was never reset
        batch = torch.cat([await source.next(), await source.next()], -1)
        for index, root in ((0, [0, 1, 0, 0]), (2, [2, 1, 1, 2])):
            own = batch[batch["observation"][..., 0] == index]
            check_continuous(own)
            assert own["observation"][0].tolist() == root
            same = first[first["observation"][..., 0] == index]["collector", "traj_ids"][0]
            assert (own["collector", "traj_ids"] == same).all() == (index == 2 and min_get is not None)


async def test_two_workers_that_die_at_once_take_all_their_envs_with_them(gate: Gate) -> None:
    fault = {"fault": gate.wait, "at": (1, 1)}
    kwargs = numbered(4, {1: fault, 3: fault})
    async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
        source = AsyncCollector(env, by_step, frames_per_batch=4, total_frames=4, min_get=1)
        waiting = asyncio.create_task(source.next())
        await gate.arrival()
        await gate.arrival()
        await until(lambda: env.outstanding == (1, 3))  # the others are ready, but no more steps are wanted of them
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for pid in env.pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: set(env.statistics().states) == {"broken"})
        gate.open(2)
        (batch,), errors = await persistently(source, WorkerDiedError)
        assert errors
        assert len(batch) == 4
        check_steps(batch)


# -- what else envs may be ------------------------------------------------------------------------------


@pytest.mark.parametrize("face", [EVERY_FACE[0], EVERY_FACE[2], THREAD_FACES[0]], ids=lambda face: face.name)
@EITHER
async def test_views_are_collected_from_at_the_same_time(face: Face, min_get: int | None) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        sources = [
            AsyncCollector(env[part], by_step, frames_per_batch=6, total_frames=12, min_get=min_get)
            for part in ([0, 1], [3, 2])
        ]
        every = await asyncio.gather(*(every_batch(source) for source in sources))
        for batches, chosen in zip(every, ([0, 1], [3, 2]), strict=True):
            seen = torch.cat(batches, -1)
            if min_get is None:
                assert seen["observation"][:, 0, 0].tolist() == chosen
            else:
                assert set(seen["env_index"].tolist()) == set(chosen)
                assert (seen["env_index"] == seen["observation"][:, 0]).all()
        for source in sources:
            await source.shutdown()
        assert not env.is_closed


async def test_a_plain_view() -> None:
    with ParallelEnv(4, CountingEnv, create_env_kwargs=numbered(4), num_processes=2) as env:
        with Collector(env[1:3], by_step, frames_per_batch=6, total_frames=6) as source:
            (batch,) = source
        assert batch["observation"][:, 0, 0].tolist() == [1, 2]
        assert not env.is_closed


TOYS: dict[str, Callable[[], Any]] = {
    "nested": lambda: toys.NestedCountingEnv(max_steps=3),
    "many-keys": lambda: toys.MultiKeyCountingEnv(max_steps=3),
    "agents": lambda: toys.HeterogeneousCountingEnv(max_steps=3),
    "agents-done": lambda: toys.HeterogeneousCountingEnv(max_steps=3, nest_done=True),
    "exclusive": lambda: toys.HeterogeneousCountingEnv(max_steps=3, exclusive_keys=True),
    "text": lambda: toys.NonTensorEnv(max_steps=3),
    "dynamic": lambda: toys.DynamicShapeEnv(max_steps=3),
    "state": lambda: toys.StateEnv(max_steps=3),
    "batched": lambda: toys.CountingEnv(max_steps=3, batch_size=(2,)),
}


@pytest.mark.parametrize("toy", TOYS)
@two_of_them
async def test_batches_are_what_rollouts_are(face: Face, toy: str) -> None:
    torch.manual_seed(0)
    async with face.open(2, TOYS[toy]) as env:
        rollout = await face.call(env.rollout, 7, break_when_any_done=False)
        torch.manual_seed(0)
        frames = env.batch_size.numel() * 7
        (batch,) = await every_batch(collector(env, frames_per_batch=frames, total_frames=frames))
        assert batch.batch_size == rollout.batch_size
        assert batch.names == rollout.names
        own = [part.exclude("collector") for part in batch.unbind(0)]
        for mine, theirs in zip(own, rollout.unbind(0), strict=True):
            for step, expected in zip(mine.unbind(-1), theirs.unbind(-1), strict=True):
                assert set(step.keys(True)) == set(expected.keys(True))
                assert all_equal(step, expected)


@pytest.mark.parametrize("toy", TOYS)
@two_of_them
async def test_whoever_is_ready_first_may_be_any_env(face: Face, toy: str) -> None:
    async with face.open(2, TOYS[toy]) as env:
        elements = env.batch_size[1:]
        size = 5 * elements.numel()
        batches = await every_batch(collector(env, frames_per_batch=size, total_frames=2 * size, min_get=1))
        assert [batch.batch_size for batch in batches] == [(5, *elements)] * 2
        steps = [step for batch in batches for step in batch.unbind(0)]
        assert env.outstanding == ()
        for index in range(2):
            own = [step for step in steps if int(step["env_index"].flatten()[0]) == index]
            for now, then in itertools.pairwise(own):
                ids = now["collector", "traj_ids"], then["collector", "traj_ids"]
                assert ids[0].shape == elements
                if torch.equal(*ids):
                    assert follows(now, then)


def follows(now: TensorDictBase, then: TensorDictBase) -> bool:
    """Whether a step has the observations at its root that came of the last one."""
    following = now["next"]
    names = [name for name in ("observation", "text", "data", "lazy", "memory") if name in following]
    if not names:
        return False
    pairs = [(following.get(name), then.get(name)) for name in names]
    return all(
        all_equal(one.exclude("reward"), other) if isinstance(one, TensorDictBase) else all_equal(one, other)
        for one, other in pairs
    )


def all_equal(one: Any, other: Any) -> bool:
    """Whether two TensorDicts hold the same, objects included."""
    if isinstance(one, TensorDictBase):
        if isinstance(one, LazyStackedTensorDict) or isinstance(other, LazyStackedTensorDict):
            return all(all_equal(*pair) for pair in zip(one.unbind(0), other.unbind(0), strict=True))
        return all(all_equal(value, other.get(key)) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    tolist = getattr(one, "tolist", None)
    return bool((tolist() if tolist else one) == (other.tolist() if tolist else other))


@one_of_each
@EITHER
async def test_envs_that_differ_make_lazy_stacks(face: Face, min_get: int | None) -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))

    factories = [lambda: toys.CountingEnv(max_steps=3), lambda: toys.CountingEnv(max_steps=4, adds_up=True)]
    async with face.open(2, factories) as env:
        (batch,) = await every_batch(collector(env, act, frames_per_batch=10, total_frames=10, min_get=min_get))
        assert isinstance(batch, LazyStackedTensorDict)
        assert batch["next", "reward"].shape == ((2, 5, 1) if min_get is None else (10, 1))
        if min_get is None:
            assert "total" in batch[1]
            assert "total" not in batch[0]
            assert batch[0]["collector", "traj_ids"].tolist() == [0, 0, 0, 2, 2]
            assert batch[1]["next", "total"].flatten().tolist() == [1, 2, 3, 4, 1]


async def test_each_element_of_a_batch_has_trajectories_of_its_own() -> None:
    async with AsyncSerialEnv(2, lambda: toys.CountingEnv(max_steps=2, batch_size=(2,))) as env:
        (batch,) = [batch async for batch in AsyncCollector(env, frames_per_batch=12, total_frames=12)]
        assert batch["collector", "traj_ids"].tolist() == [[[0, 0, 4], [1, 1, 5]], [[2, 2, 6], [3, 3, 7]]]


async def test_a_policy_may_add_keys_in_the_middle_of_a_batch() -> None:
    calls = itertools.count()

    def act(td: TensorDictBase) -> TensorDictBase:
        if next(calls) >= 2:
            td.set("extra", torch.ones(td.batch_size))
        return td.set("action", by_step(td["observation"]))

    async with AsyncSerialEnv(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        (batch,) = [batch async for batch in AsyncCollector(env, act, frames_per_batch=8, total_frames=8)]
        assert ["extra" in batch[:, step] for step in range(4)] == [False, False, True, True]
        for own in batch.unbind(0):
            check_continuous(own)


# -- seeds and states ------------------------------------------------------------------------------------


async def test_the_same_seed_gives_the_same_batches_by_either_kind() -> None:
    def linear() -> nn.Module:
        torch.manual_seed(3)
        return nn.Linear(4, 2)

    def policy(net: nn.Module) -> Callable[[torch.Tensor], Any]:
        return lambda observation: torch.distributions.Categorical(logits=net(observation)).sample()

    results = []
    options: dict[str, Any] = {"frames_per_batch": 60, "total_frames": 180}
    for cls in (AsyncParallelEnv, AsyncSerialEnv):
        async with AsyncCollector(cls(3, "CartPole-v1"), policy(linear()), **options) as source:
            await source.set_seed(7)
            results.append(torch.cat([batch async for batch in source], 1))
    for plain in (ParallelEnv, SerialEnv):
        with Collector(plain(3, "CartPole-v1"), policy(linear()), **options) as twin:
            twin.set_seed(7)
            results.append(torch.cat(list(twin), 1))
    first, *others = results
    assert first["next", "done"].any()
    assert all((first == other).all() for other in others)


@one_of_each
@EITHER
async def test_a_state_goes_on_where_it_was_taken(face: Face, min_get: int | None) -> None:
    options: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 24, "min_get": min_get}
    async with face.open(2, toys.CountingEnv, create_env_kwargs={"max_steps": None}) as env:
        policy = nn.Sequential(Act())
        source = collector(env, policy, **options)
        first = await face.call(source.next)
        state = await face.call(source.state_dict)
        rest = await every_batch(source)
        assert (state["frames"], state["iter"]) == (8, 1)
        assert len(rest) == 2
        if min_get is not None:
            flat = torch.cat([first, *rest])
            for own in (flat[flat["env_index"] == index] for index in range(2)):
                assert own["observation"].flatten().tolist() == list(range(len(own)))
    async with face.open(2, toys.CountingEnv, create_env_kwargs={"max_steps": None}) as env:
        other = collector(env, nn.Sequential(Act(0)), **options)
        await face.call(other.load_state_dict, state)
        batches = await every_batch(other)
        assert (other.frames, other.iterations, len(batches)) == (24, 3, 2)
        assert batches[0]["action"].flatten().tolist() == [1] * 8
        assert batches[0]["collector", "traj_ids"].min() == state["traj_ids"]
        with pytest.raises(KeyError):
            await face.call(other.load_state_dict, {"frames": 0})


class Act(nn.Module):
    """Always the same action."""

    def __init__(self, action: int = 1) -> None:
        super().__init__()
        self.register_buffer("action", torch.tensor(action))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.action.expand(observation.shape[:-1])


# -- use and misuse --------------------------------------------------------------------------------------


@one_of_each
@EITHER
async def test_shutdown_closes_the_envs_or_leaves_them_free(face: Face, min_get: int | None) -> None:
    env = face.make(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS)
    source = collector(env, by_step, frames_per_batch=3, min_get=min_get, close_env=False)
    await face.call(source.next)
    await face.call(source.shutdown)
    assert env.outstanding == ()
    td = await face.call(env.reset)
    await face.call(env.step, td.set("action", by_step(td["observation"])))
    assert not env.is_closed
    with pytest.raises(ClosedError, match="was shut down"):
        await face.call(source.next)
    other = collector(env, by_step, frames_per_batch=3, min_get=min_get)
    await face.call(other.next)
    await face.call(other.shutdown)
    await face.call(other.shutdown)
    assert env.is_closed


async def test_shutdown_waits_for_nobody_if_it_closes(gate: Gate) -> None:
    kwargs = numbered(2, {0: {"fault": gate.wait, "at": (1, 2)}})
    env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2, close_timeout=0.2)
    for min_get in (None, 1):
        async with AsyncCollector(env, by_step, frames_per_batch=20, min_get=min_get) as source:
            waiting = asyncio.create_task(source.next())
            await gate.arrival()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert env.is_closed


def test_leaving_a_plain_collector_waits_for_nobody(gate: Gate) -> None:
    kwargs = numbered(2, {0: {"fault": gate.wait, "at": (1, 2)}})
    env = ParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2, close_timeout=0.2)
    with Collector(env, by_step, frames_per_batch=6, min_get=1) as source:
        source.next()
        gate.wait_for_arrival()
    assert env.is_closed
    source.shutdown()


@EITHER
async def test_shutdown_while_another_task_waits(gate: Gate, min_get: int | None) -> None:
    kwargs = numbered(2, {0: {"fault": gate.wait, "at": (1, 2)}})
    env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2, close_timeout=0.2)
    source = AsyncCollector(env, by_step, frames_per_batch=200, min_get=min_get and 2)
    waiting = asyncio.create_task(source.next())
    await gate.arrival()
    with pytest.raises(ConcurrencyError, match="await or cancel that first"):
        await source.shutdown(close_env=False)
    await source.shutdown()
    with pytest.raises(ClosedError):
        await waiting


@EITHER
async def test_shutdown_of_a_view_leaves_its_envs_free(face: Face, min_get: int | None) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        view = env[[2, 0]]
        source = collector(view, by_step, frames_per_batch=2 if min_get is None else 1, min_get=min_get)
        await face.call(source.next)
        await face.call(source.shutdown)
        assert env.outstanding == ()
        td = await face.call(env.reset)
        await face.call(env.step, td.set("action", by_step(td["observation"])))


@EITHER
async def test_shutdown_of_a_view_while_another_task_waits(gate: Gate, min_get: int | None) -> None:
    kwargs = numbered(3, {0: {"fault": gate.wait, "at": (1, 2)}})
    async with AsyncParallelEnv(3, CountingEnv, create_env_kwargs=kwargs, num_processes=3) as env:
        source = AsyncCollector(env[:2], by_step, frames_per_batch=200, min_get=min_get and 2)
        waiting = asyncio.create_task(source.next())
        await gate.arrival()
        with pytest.raises(ConcurrencyError, match="await or cancel that first"):
            await source.shutdown(close_env=True)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open()
        await source.shutdown()
        assert env.outstanding == ()
        assert (await env.reset())["observation"][:, 2].tolist() == [0, 0, 0]


def test_envs_of_another_loop_are_not_waited_for_without_end() -> None:
    async def collect() -> AsyncCollector:
        env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=2)
        source = AsyncCollector(env, by_step, frames_per_batch=1, min_get=1)
        await source.next()
        return source

    with asyncio.Runner() as runner:
        source = runner.run(collect())
        with pytest.raises(AioEnvsError, match="another one"):
            asyncio.run(source.shutdown(close_env=False))
        runner.run(source.env.close())


@EITHER
@pytest.mark.parametrize("cls", [ParallelEnv, SerialEnv])
def test_no_loop_is_kept_or_made_for_closed_envs(cls: Any, min_get: int | None) -> None:
    env = cls(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS)
    part = Collector(env[:2], by_step, frames_per_batch=2, min_get=min_get)
    with Collector(env, by_step, frames_per_batch=3, min_get=min_get) as source:
        source.next()
        source.shutdown(close_env=False)
        part.next()
        assert not env.is_closed
        env.close()
    part.shutdown()
    source.shutdown()
    for ended in (part, source):
        with pytest.raises(ClosedError, match="was shut down"):
            ended.next()
    assert env.is_closed


@EITHER
async def test_envs_that_were_closed_in_between_begin_anew(face: Face, min_get: int | None) -> None:
    env = face.make(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS)
    source = collector(env, by_step, frames_per_batch=6, min_get=min_get)
    await face.call(source.next)
    await face.call(env.close)
    batches = [await face.call(source.next), await face.call(source.next)]
    for own in trajectories(batches):
        check_continuous(own)
    await face.call(source.shutdown)


async def test_one_call_at_a_time(gate: Gate) -> None:
    kwargs = numbered(2, {0: {"fault": gate.wait, "at": (1, 2)}})
    env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=kwargs, num_processes=2)
    async with AsyncCollector(env, by_step, frames_per_batch=8) as source:
        waiting = asyncio.create_task(source.next())
        await gate.arrival()
        others: list[Callable[[], Awaitable[Any]]] = [source.next, source.state_dict, source.reset, source.set_seed]
        for other in others:
            with pytest.raises(ConcurrencyError, match="busy with another call"):
                await other()
        gate.open()
        assert (await waiting).batch_size == (2, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frames_per_batch": 10}, ValueError, "among 3 envs: give 9 or 12"),
        ({"frames_per_batch": 2}, ValueError, "among 3 envs: give 3,"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be at least 1"),
        ({"frames_per_batch": 3.0}, TypeError, "frames_per_batch must be an integer"),
        ({"frames_per_batch": 3, "min_get": 4}, ValueError, "min_get=4 envs can never be ready: there are 3"),
        ({"frames_per_batch": 3, "min_get": 0}, ValueError, "min_get must be at least 1"),
        ({"frames_per_batch": 3, "min_get": True}, TypeError, "min_get must be an integer"),
        ({"frames_per_batch": 3, "total_frames": 0}, ValueError, "total_frames must be at least 1, or -1"),
        ({"frames_per_batch": 3, "total_frames": "9"}, TypeError, "total_frames must be an integer"),
        ({"frames_per_batch": 3, "min_get": 1, "reset_at_each_iter": True}, ValueError, "would lose the steps"),
        ({"frames_per_batch": 3, "init_random_frames": -3}, ValueError, "init_random_frames must be at least 1"),
        ({"frames_per_batch": 3, "policy": 3}, TypeError, "expected a policy that can be called"),
    ],
)
@pytest.mark.parametrize("cls", [SerialEnv, AsyncSerialEnv])
def test_bad_arguments(cls: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collector(cls(NUM_ENVS, CountingEnv), **options)


@pytest.mark.parametrize("cls", [SerialEnv, AsyncSerialEnv])
def test_totals_are_rounded_up_with_a_warning(cls: Any) -> None:
    with pytest.warns(UserWarning, match="so 2 more will be collected: 12") as caught:
        source = collector(cls(NUM_ENVS, CountingEnv), frames_per_batch=6, total_frames=10)
    assert caught[0].filename == collecting.__file__
    assert (source.total_frames, len(source)) == (12, 2)
    with pytest.warns(UserWarning, match="init_random_frames=4"):
        source = collector(cls(NUM_ENVS, CountingEnv), frames_per_batch=6, init_random_frames=4)
    assert source.total_frames == -1
    with pytest.raises(TypeError, match="an endless run"):
        len(source)


def test_each_kind_of_envs_has_its_kind_of_collector() -> None:
    with pytest.raises(TypeError, match="use Collector for it"):
        AsyncCollector(SerialEnv(2, CountingEnv), frames_per_batch=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use AsyncCollector for it"):
        Collector(AsyncSerialEnv(2, CountingEnv), frames_per_batch=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an AsyncParallelEnv"):
        AsyncCollector("CartPole-v1", frames_per_batch=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a ParallelEnv"):
        Collector(toys.CountingEnv(), frames_per_batch=2)  # type: ignore[arg-type]


async def test_frames_that_the_batch_size_of_the_envs_does_not_divide() -> None:
    async with AsyncSerialEnv(2, lambda: toys.CountingEnv(batch_size=(3,))) as env:
        for min_get, fitting in ((None, "6 or 12"), (1, "6 or 9")):
            with pytest.raises(ValueError, match=f"give {fitting}"):
                await AsyncCollector(env, frames_per_batch=8, min_get=min_get).next()


def test_what_it_says_of_itself() -> None:
    with Collector(SerialEnv(2, CountingEnv), frames_per_batch=2, total_frames=4) as source:
        source.update_policy_weights_()
        source.next()
        assert repr(source) == f"<Collector of {source.env!r}, 2 of 4 frames>"
        assert (source.frames_per_batch, source.total_frames) == (2, 4)
    assert repr(source).endswith(", closed>")
    asynchronous = AsyncCollector(AsyncSerialEnv(2, CountingEnv), frames_per_batch=2)
    assert repr(asynchronous) == f"<AsyncCollector of {asynchronous.env!r}, 0 frames>"


@pytest.mark.parametrize("way", [Lockstep, FirstReady])
def test_a_batch_that_ctrl_c_kept_from_its_caller_comes_next(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(self: Any, *args: Any) -> Any:
        found = await genuine(self, *args)
        monkeypatch.setattr(way, "batch", genuine)
        signal.raise_signal(signal.SIGINT)
        return found

    genuine, min_get = way.batch, None if way is Lockstep else 1
    env = ParallelEnv(1, CountingEnv, create_env_kwargs=numbered(1), num_processes=1)
    with Collector(env, by_step, frames_per_batch=4, total_frames=12, min_get=min_get) as source:
        monkeypatch.setattr(way, "batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.next()
        assert (source.frames, source.iterations) == (0, 0)
        steps = [batch["next", "observation"][..., 2].flatten().tolist() for batch in source]
    assert steps == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


async def test_an_env_whose_worker_was_replaced_after_its_last_step_begins_anew(tmp_path: Path) -> None:
    died = tmp_path / "died"

    class Mortal(CountingEnv):
        """Fails in its third step, and takes its process with it in the reset after that."""

        def reset(self, **options: Any) -> Any:
            if self.env_id == 0 and self.episode == 1 and not died.exists():
                died.touch()
                os._exit(3)
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            if self.env_id == 0 and self.steps == 2 and not died.exists():
                raise ValueError("once")
            return super().step(action)

    env = AsyncParallelEnv(2, Mortal, create_env_kwargs=numbered(2), num_processes=1)
    async with AsyncCollector(env, by_step, frames_per_batch=4, total_frames=24, min_get=1) as source:
        batches, errors = await persistently(source, Exception)
    assert [type(error) for error in errors] == [ValueError, WorkerDiedError]
    assert [len(batch) for batch in batches] == [4] * 6
