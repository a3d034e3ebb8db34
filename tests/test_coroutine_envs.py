"""Envs whose reset and step are coroutine functions: what they do, on every face, and what else is asked of them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from coroutine_envs import AwaitingEnv, ChattyEnv, HalfEnv, MeetingEnv, TalkingEnv, TextEnv, door
from faces import ASYNC_FACES, FACES, Face, acting, call, observed
from failing_envs import CountingEnv, Gate, Note, numbered, raise_local, raise_stop_iteration
from tensordict import NonTensorData, NonTensorStack, TensorDict

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, EnvBase, ParallelEnv, SerialEnv
from aioenvs.errors import (
    AioEnvsError,
    ConcurrencyError,
    RemoteEnvError,
    ResetNeededError,
    SpecMismatchError,
    WorkerStartError,
)
from aioenvs.testing import CountingEnv as TensorCountingEnv

over_async_faces = pytest.mark.parametrize("face", ASYNC_FACES, ids=lambda face: face.name)


async def trajectory(face: Face, factory: Any, length: int | None) -> list[Any]:
    """What a batch does with resets, partial resets and both kinds of steps."""
    async with face.open(4, factory, create_env_kwargs=numbered(4, length=length)) as env:
        found = [observed(await face.call(env.reset, seed=3))]
        found.append(observed(await face.call(env.step, acting([1, 2, 3, 4]))))
        found.append(observed(await face.call(env.step, acting([5, 6, 7, 8], only=[1, 2]))))
        mask = TensorDict({"_reset": torch.tensor([True, False, False, True])}, batch_size=[4])
        found.append(observed(await face.call(env.reset, mask)))
        for number in range(4):
            td, following = await face.call(env.step_and_maybe_reset, acting([number] * 4))
            found += [observed(td), observed(following), td["next", "done"].tolist(), td["next", "reward"].tolist()]
        return found


async def test_they_do_what_plain_envs_do(face: Face) -> None:
    assert await trajectory(face, AwaitingEnv, 3) == await trajectory(face, CountingEnv, 3)


@pytest.mark.parametrize("name", ["reset", "step"])
async def test_one_coroutine_method_will_do(face: Face, name: str) -> None:
    assert await trajectory(face, HalfEnv.of(name), 2) == await trajectory(face, CountingEnv, 2)


async def test_mixed_with_plain_ones(face: Face) -> None:
    kinds = [CountingEnv, AwaitingEnv, CountingEnv, AwaitingEnv]
    assert await trajectory(face, kinds, 3) == await trajectory(face, CountingEnv, 3)


@over_async_faces
@pytest.mark.usefixtures("any_loop")
async def test_on_both_kinds_of_loops(face: Face) -> None:
    assert await trajectory(face, AwaitingEnv, 3) == await trajectory(face, CountingEnv, 3)


async def test_all_envs_of_a_loop_step_at_the_same_time(face: Face) -> None:
    async with face.open(6, MeetingEnv, create_env_kwargs=numbered(6)) as env:
        await face.call(env.reset)
        for _ in range(3):
            await face.call(env.step_and_maybe_reset, acting([1] * 6))
        together = {"async-serial": 6, "serial": 6, "async-one-each": 1, "one-each": 1, "thread": 1}.get(face.name, 3)
        assert await face.call(env.call, "most") == [together] * 6


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (AsyncParallelEnv, {"num_processes": 1}),
        (AsyncParallelEnv, {"num_processes": 1, "backend": "thread"}),
        (AsyncSerialEnv, {}),
        (ParallelEnv, {"num_processes": 1}),
        (SerialEnv, {}),
    ],
)
async def test_two_hundred_at_the_same_time(cls: Any, options: dict[str, Any]) -> None:
    env = cls(200, MeetingEnv, create_env_kwargs=numbered(200), **options)
    await call(env.reset)
    td = await call(env.step, acting(range(200)))
    assert observed(td) == [[index, 1, 1, index] for index in range(200)]
    assert await call(env.call, "most") == [200] * 200
    await call(env.close)


async def test_plain_ones_step_while_coroutines_wait(gate: Gate) -> None:
    kwargs = numbered(2, {0: {"fault": door(gate), "at": (1, 1)}, 1: {"fault": gate.wait, "at": (1, 1)}})
    async with AsyncParallelEnv(2, [AwaitingEnv, CountingEnv], create_env_kwargs=kwargs, num_processes=1) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1, 2])))
        await gate.arrival()
        await gate.arrival()  # the plain one, which holds the loop up
        gate.open(2)
        assert observed(await stepping) == [[0, 1, 1, 1], [1, 1, 1, 2]]


@pytest.mark.parametrize("method", ["spawn", "fork"])
async def test_however_their_process_starts(method: str) -> None:
    face = Face("async", AsyncParallelEnv, 2)
    async with face.open(4, MeetingEnv, create_env_kwargs=numbered(4), mp_start_method=method) as env:
        await env.reset()
        assert observed(await env.step(acting([1, 2, 3, 4]))) == [[index, 1, 1, index + 1] for index in range(4)]


@over_async_faces
async def test_views_are_served_as_they_are_done(face: Face, gate: Gate) -> None:
    """Both are in one process, or thread; the first waits for the test, the second goes on."""
    each = {0: {"fault": door(gate), "at": (1, 1)}}
    async with face.open(4, AwaitingEnv, create_env_kwargs=numbered(4, each)) as env:
        await env.reset()
        first = asyncio.create_task(env[0].step(acting([7])))
        await gate.arrival()
        for number in range(1, 4):
            assert observed(await env[1].step(acting([1]))) == [[1, 1, number, number]]
        assert not first.done()
        with pytest.raises(ConcurrencyError, match="step is still pending"):
            await env.step(acting([1] * 4))
        gate.open()
        assert observed(await first) == [[0, 1, 1, 7]]


@over_async_faces
async def test_views_that_need_each_other(face: Face) -> None:
    async with face.open(
        4, MeetingEnv, create_env_kwargs=numbered(4, together=1 + (face.processes is not None))
    ) as env:
        await env.reset()
        found = await asyncio.gather(env[0].step(acting([1])), env[1].step(acting([2])))
        assert [observed(td) for td in found] == [[[0, 1, 1, 1]], [[1, 1, 1, 2]]]


# -- max_concurrency ------------------------------------------------------------------------------------


async def test_max_concurrency(face: Face) -> None:
    """Each step needs two envs of the loop inside at once, and there are never more than two."""
    limit = 1 if face.name in ("async-one-each", "one-each", "thread") else 2
    kwargs = numbered(8, together=limit)
    async with face.open(8, MeetingEnv, create_env_kwargs=kwargs, max_concurrency=limit) as env:
        await face.call(env.reset)
        for _ in range(3):
            await face.call(env.step, acting([1] * 8))
        assert await face.call(env.call, "most") == [limit] * 8


async def test_max_concurrency_counts_plain_envs_too(gate: Gate) -> None:
    kwargs = numbered(2, {0: {"fault": door(gate), "at": (1, 1)}, 1: {"fault": gate.wait, "at": (1, 1)}})
    options: Any = {"num_processes": 1, "max_concurrency": 1}
    async with AsyncParallelEnv(2, [AwaitingEnv, CountingEnv], create_env_kwargs=kwargs, **options) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1, 2])))
        await gate.arrival()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await gate.arrival()
        gate.open()
        await gate.arrival()
        gate.open()
        assert observed(await stepping) == [[0, 1, 1, 1], [1, 1, 1, 2]]


@pytest.mark.parametrize("cls", [AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv])
def test_bad_limits_are_refused(cls: Any) -> None:
    for wrong in (True, 1.5, "2"):
        with pytest.raises(TypeError, match="max_concurrency must be an integer, got"):
            cls(2, AwaitingEnv, max_concurrency=wrong)
    for wrong in (0, -3):
        with pytest.raises(ValueError, match="max_concurrency must be between 1 and"):
            cls(2, AwaitingEnv, max_concurrency=wrong)


# -- what else is asked ---------------------------------------------------------------------------------


async def test_calls_are_awaited_where_they_have_to_be(face: Face) -> None:
    async with face.open(4, TalkingEnv, create_env_kwargs=numbered(4)) as env:
        await face.call(env.reset)
        assert await face.call(env.call, "whisper", "hi", times=2) == [f"{index}: hihi" for index in range(4)]
        assert await face.call(env.call, "shout", "hi") == [f"{index}: HI" for index in range(4)]
        assert await face.call(env.render) == [[index, index] for index in range(4)]
        assert await face.call(env.get_attr, "distance") == [0, 10, 20, 30]
        await face.call(env.set_attr, "level", [5, 6, 7, 8])
        assert await face.call(env.get_attr, "level") == [5, 6, 7, 8]
        with pytest.raises(AttributeError, match="method"):
            await face.call(env.get_attr, "whisper")
        with pytest.raises(AttributeError, match="nothing"):
            await face.call(env.get_attr, "nothing")
        with pytest.raises(LookupError, match="nobody there") as caught:
            await face.call(env.call, "fail")
        assert any("raised by env 0 in call" in note for note in caught.value.__notes__)


async def test_states_are_awaited(face: Face) -> None:
    async with face.open(3, TalkingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([1, 2, 3]))
        states = await face.call(env.state_dict)
        assert [*states.values()] == [{"total": 1}, {"total": 2}, {"total": 3}]
        await face.call(env.step, acting([1, 2, 3]))
        await face.call(env.load_state_dict, states)
        assert observed(await face.call(env.step, acting([0, 0, 0]))) == [[0, 1, 3, 1], [1, 1, 3, 2], [2, 1, 3, 3]]


async def test_a_call_that_waits_leaves_others_alone(gate: Gate) -> None:
    env = AsyncParallelEnv(2, TalkingEnv, create_env_kwargs=numbered(2), num_processes=1)
    await env.reset()
    whispered, stepped = await asyncio.gather(env[0].call("whisper", "hi"), env[1].step(acting([4])))
    assert (whispered, observed(stepped)) == (["0: hi"], [[1, 1, 1, 4]])
    await env.close()


async def test_payloads(face: Face) -> None:
    async with face.open(3, TextEnv) as env:
        td = await face.call(env.reset)
        assert td.get("observation").tolist() == ["begin"] * 3
        td["action"] = NonTensorStack(*map(NonTensorData, ["abc", "end", "xyz"]))
        td, following = await face.call(env.step_and_maybe_reset, td)
        assert td["next"].get("observation").tolist() == ["cba", "dne", "zyx"]
        assert td["next", "done"].tolist() == [[False], [True], [False]]
        assert following.get("observation").tolist() == ["cba", "begin", "zyx"]


async def test_seeds(face: Face) -> None:
    async with face.open(3, ChattyEnv, create_env_kwargs=numbered(3, length=1)) as env:
        await face.call(env.set_seed, 0)
        seeds = [0, 795726461, 2841183792]
        assert [row[2] for row in observed(await face.call(env.reset))] == seeds
        assert [row[2] for row in observed(await face.call(env.reset))] == [-1] * 3
        assert [row[2] for row in observed(await face.call(env.reset, seed=0))] == seeds
        _, following = await face.call(env.step_and_maybe_reset, acting([1, 1, 1]))
        assert [row[2] for row in observed(following)] == [-1] * 3


@pytest.mark.parametrize("face", [f for f in FACES if "serial" in f.name or "thread" in f.name], ids=lambda f: f.name)
async def test_the_generators_of_the_process_are_left_alone(face: Face) -> None:
    async with face.open(2, AwaitingEnv, create_env_kwargs=numbered(2)) as env:
        python, numpy = random.getstate(), np.random.get_state()[1].tolist()
        await face.call(env.reset, seed=4)
        await face.call(env.step, acting([1, 1]))
        assert random.getstate() == python
        assert np.random.get_state()[1].tolist() == numpy


async def test_rollouts(face: Face) -> None:
    async with face.open(3, AwaitingEnv, create_env_kwargs=numbered(3, length=4)) as env:
        rollout = await face.call(env.rollout, 10, break_when_any_done=False)
        assert rollout["next", "observation"][..., 2].tolist() == [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]] * 3


# -- exceptions -----------------------------------------------------------------------------------------


async def test_an_exception_is_that_of_its_env_only(face: Face) -> None:
    async def overheat() -> None:
        await asyncio.sleep(0)
        raise ValueError("the reactor is hot")

    each = {1: {"fault": overheat, "at": (1, 2)}}
    async with face.open(4, AwaitingEnv, create_env_kwargs=numbered(4, each)) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([1] * 4))
        with pytest.raises(ValueError, match="the reactor is hot") as caught:
            await face.call(env.step, acting([1] * 4))
        assert caught.value.env_index == (1,)
        assert any("raised by env 1 in step, process" in note for note in caught.value.__notes__)
        if face.in_processes:
            assert any("in overheat" in note for note in caught.value.__notes__)
        with pytest.raises(ResetNeededError, match="env 1 cannot step"):
            await face.call(env.step, acting([1] * 4))
        mask = TensorDict({"_reset": torch.tensor([False, True, False, False])}, batch_size=[4])
        assert observed(await face.call(env.reset, mask)) == [[0, 1, 3, 3], [1, 2, 0, 0], [2, 1, 3, 3], [3, 1, 3, 3]]


@pytest.mark.parametrize("fault", [raise_local, raise_stop_iteration, None])
async def test_exceptions_that_cannot_travel(face: Face, fault: Any) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError("by itself")

    each = {0: {"fault": fault or cancelled, "at": (1, 1)}}
    async with face.open(2, AwaitingEnv, create_env_kwargs=numbered(2, each)) as env:
        await face.call(env.reset)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await face.call(env.step, acting([1, 1]))
        assert isinstance(caught.value, RemoteEnvError | RuntimeError) or type(caught.value).__name__ == "LocalError"
        assert caught.value.env_index == (0,)
        assert observed(await face.call(env.step, acting([1, 1], only=[1])))[1] == [1, 1, 2, 2]


class Wrong(AwaitingEnv):
    """Returns what does not fit."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        return self.result


GOOD = np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((GOOD, 0.0, False), r"step must return \(observation, reward, terminated, truncated, info\), found"),
        ((GOOD[:2], 0.0, False, False, {}), "env 0: expected"),
        ((GOOD, "much", False, False, {}), "expected a number as reward, found 'much'"),
        ((GOOD, 0.0, None, False, {}), "expected a bool as terminated, found None"),
    ],
)
async def test_results_that_do_not_fit(face: Face, result: Any, message: str) -> None:
    async with face.open(1, lambda: Wrong(result)) as env:
        await face.call(env.reset)
        with pytest.raises(SpecMismatchError, match=message):
            await face.call(env.step, acting([1]))


# -- what is no coroutine env ---------------------------------------------------------------------------


class TensorCoroutine(TensorCountingEnv):
    async def _step(self, tensordict: Any) -> Any: ...


class GeneratorEnv(AwaitingEnv):
    async def step(self, action: Any) -> Any:
        yield 1


class Passing(gym.Wrapper):
    """Hands on what the methods of its env return."""

    def __init__(self) -> None:
        super().__init__(HalfEnv.of("reset")())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (TensorCoroutine, "_step of env 0 .*deals in TensorDicts, is a coroutine function"),
        (GeneratorEnv, "step of env 0 .*is a generator function"),
    ],
)
async def test_what_is_refused(face: Face, factory: Any, message: str) -> None:
    with pytest.raises(WorkerStartError, match=f"(?s)factory of env 0 failed.*{message}") as caught:
        async with face.open(1, factory):
            pass
    assert isinstance(caught.value.__cause__, SpecMismatchError)


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_a_coroutine_from_within_a_wrapper_is_explained(cls: Any) -> None:
    with (
        cls(1, Passing) as env,
        pytest.raises(SpecMismatchError, match=r"reset must return .*not from within a wrapper"),
    ):
        env.reset()


def test_an_env_base_of_coroutines_cannot_be_mistaken() -> None:
    assert issubclass(TensorCoroutine, EnvBase)


# -- loops ----------------------------------------------------------------------------------------------


async def test_a_plain_face_inside_a_running_loop() -> None:
    with SerialEnv(3, MeetingEnv, create_env_kwargs=numbered(3)) as env:
        assert observed(env.reset()) == [[index, 1, 0, 0] for index in range(3)]
        assert observed(env.step(acting([1, 2, 3]))) == [[0, 1, 1, 1], [1, 1, 1, 2], [2, 1, 1, 3]]


def test_a_plain_face_starts_anew() -> None:
    env = SerialEnv(2, AwaitingEnv, create_env_kwargs=numbered(2))
    for _ in range(3):
        assert observed(env.reset()) == [[0, 1, 0, 0], [1, 1, 0, 0]]
        assert observed(env[1].step(acting([3]))) == [[1, 1, 1, 3]]
        env.close()
    env.close(raise_if_closed=False)


def test_a_plain_face_goes_through_changing_loops(tmp_path: Path) -> None:
    """Outside of a loop, inside one, and in another one."""
    with SerialEnv(1, AwaitingEnv, create_env_kwargs={"on_close": Note(str(tmp_path / "closed"))}) as env:
        env.reset()

        async def step() -> Any:
            return observed(env.step(acting([1])))

        assert [asyncio.run(step()), observed(env.step(acting([1]))), asyncio.run(step())] == [
            [[0, 1, 1, 1]],
            [[0, 1, 2, 2]],
            [[0, 1, 3, 3]],
        ]
    assert (tmp_path / "closed").read_text() == "x"


def test_serial_envs_belong_to_the_loop_of_their_first_command() -> None:
    env = AsyncSerialEnv(1, AwaitingEnv)
    asyncio.run(env.reset())
    with pytest.raises(AioEnvsError, match="belong to the event loop"):
        asyncio.run(env.step(acting([1])))
    asyncio.run(env.close())
    assert env.is_closed


def test_a_lone_env_in_serial_for_single() -> None:
    with ParallelEnv(1, AwaitingEnv, serial_for_single=True, max_concurrency=1) as env:
        assert isinstance(env, SerialEnv)
        assert observed(env.reset()) == [[0, 1, 0, 0]]


def test_forgotten_envs_are_reported() -> None:
    env = SerialEnv(1, AwaitingEnv)
    env.reset()
    with pytest.warns(ResourceWarning, match="was never closed"):
        del env


async def test_no_advice_to_use_more_processes() -> None:
    """Plain envs that sleep as long as these get it (`test_waiting`), and a warning is an error."""

    class Sleepy(AwaitingEnv):
        async def step(self, action: Any) -> Any:
            await asyncio.sleep(0.013)
            return await super().step(action)

    async with AsyncParallelEnv(2, Sleepy, num_processes=1) as env:
        await env.reset()
        for _ in range(25):
            td = await env.step(acting([1, 1]))
        assert observed(td) == [[0, 1, 25, 25]] * 2


@pytest.mark.parametrize("coroutines", [False, True])
def test_only_workers_with_coroutines_import_asyncio(coroutines: bool) -> None:
    class Plain:
        observation_space = action_space = gym.spaces.Discrete(2)

        def reset(self, **_: Any) -> Any:
            return 0, {}

        def step(self, action: Any) -> Any:
            return 0, 0.0, False, False, {}

        @property
        def modules(self) -> list[bool]:
            import sys

            return [name in sys.modules for name in ("asyncio", "torch")]

    class Awaiting(Plain):
        async def reset(self, **_: Any) -> Any:
            return 0, {}

    with ParallelEnv(1, Awaiting if coroutines else Plain) as env:
        env.reset()
        env.rand_step()
        assert env.get_attr("modules") == [[coroutines, False]]
