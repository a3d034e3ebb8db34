"""Every coroutine of the async faces is cancelled at every moment, and nothing is left, shifted or lost.

A moment is a turn of the event loop after the coroutine was started; or one of its own suspensions, right then or as
soon as what it waits for has come. An env observes `[index, generation, episode, step, last action, seed, knob]`. What
a cancelled command has done is open, so there is a set of states that each env may be in; the next command must show
one of them, and everything after it must follow from that.
"""

import asyncio
import itertools
import sys
import types
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from faces import ASYNC_FACES, Face, acting, in_thread, masked
from processes import still_alive
from tensordict import TensorDict, TensorDictBase

from aioenvs.engine.env_states import EnvState
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.worker.random_streams import seed_chain
from aioenvs.envs import EnvBase
from aioenvs.specs import Categorical, Composite, Unbounded

COUNT = 3
VIEW = [2, 0]
NONE = -1  # for no action yet, no seed, no knob
END = 7  # the action that ends an episode
ACTIONS = 2**40

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("any_loop")]


# -- the envs -------------------------------------------------------------------------------------------


class GymMarkEnv(gym.Env[Any, Any]):
    """Observes what it is in."""

    observation_space = gym.spaces.Box(-(2**63), 2**63 - 1, (7,), np.int64)
    action_space = gym.spaces.Discrete(ACTIONS)

    def __init__(self, index: int) -> None:
        self.index, self.generation, self.knob = index, uuid.uuid4().int >> 66, NONE
        self.episode, self.steps, self.last, self.seed = 0, 0, NONE, NONE

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode, self.steps, self.last = self.episode + 1, 0, NONE
        self.seed = NONE if seed is None else seed
        return self.mark(), {}

    def step(self, action: Any) -> Any:
        self.steps, self.last = self.steps + 1, int(action)
        return self.mark(), 0.0, bool(action == END), False, {}

    def mark(self) -> Any:
        mark = [self.index, self.generation, self.episode, self.steps, self.last, self.seed, self.knob]
        return np.array(mark, np.int64)

    def render(self) -> Any:
        return self.mark().tolist()

    def turn(self, knob: int) -> int:
        self.knob = knob
        return self.index

    def state_dict(self) -> dict[str, Any]:
        return {"knob": self.knob}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.knob = state["knob"]


class TorchMarkEnv(EnvBase):
    """The same, with TensorDicts."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = GymMarkEnv(index)
        self.given: int | None = None
        flag = {name: Categorical(2, shape=(1,), dtype=torch.bool) for name in ("done", "terminated")}
        self.observation_spec = Composite({"observation": Unbounded((7,), dtype=torch.int64)})
        self.action_spec = Categorical(ACTIONS, shape=(), dtype=torch.int64)
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(flag)

    def _outcome(self, observation: Any, done: bool, **entries: Any) -> TensorDictBase:
        flags = {name: torch.tensor([done]) for name in ("done", "terminated")}
        return TensorDict({"observation": torch.tensor(observation), **flags, **entries})

    def _set_seed(self, seed: int | None) -> None:
        self.given = seed

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        seed, self.given = self.given, None
        return self._outcome(self.inner.reset(seed=seed)[0], False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, _, done, *_ = self.inner.step(tensordict["action"].item())
        return self._outcome(observation, done, reward=torch.zeros(1))

    @property
    def knob(self) -> int:
        return self.inner.knob

    @knob.setter
    def knob(self, knob: int) -> None:
        self.inner.knob = knob

    def render(self) -> Any:
        return self.inner.render()

    def turn(self, knob: int) -> int:
        return self.inner.turn(knob)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.inner.load_state_dict(state_dict)


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Workers need not import this module, and all that it imports."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


# -- what an env may be in ------------------------------------------------------------------------------


class State(NamedTuple):
    """What an env is in; an action that was drawn is None."""

    episode: int = 0
    steps: int = 0
    last: int | None = NONE
    seed: int = NONE
    knob: int = NONE
    given: int = NONE  # the seed of the next reset

    def stepped(self, action: int | None) -> "State":
        return self._replace(steps=self.steps + 1, last=action)

    def was_reset(self) -> "State":
        return State(self.episode + 1, seed=self.given, knob=self.knob)

    def shows(self, mark: list[int]) -> bool:
        episode, steps, last, seed, knob = mark[2:]
        same = (episode, steps, seed, knob) == (self.episode, self.steps, self.seed, self.knob)
        return same and self.last in (None, last)


class Command(NamedTuple):
    """A command, and what comes of it.

    Attributes:
        ask: Gives the coroutine for so many envs, and a number that no other command has.
        course: The states that an env goes through, by its state before, its place and the number.
        rows: What the result says of the state afterwards: a mark for each env; None if nothing.
    """

    ask: Callable[[Any, int, int], Coroutine[Any, Any, Any]]
    course: Callable[[State, int, int], list[State]] = lambda state, place, number: []
    rows: Callable[[Any], Any] | None = None


def actions(count: int, number: int) -> list[int]:
    return [number + place for place in range(count)]


def ending(count: int, number: int) -> TensorDict:
    """Actions of which the first ends the episode."""
    return acting([END, *actions(count, number)[1:]])


def over(count: int) -> TensorDict:
    """What is known of envs of which the first has finished."""
    done = torch.tensor([[place == 0] for place in range(count)])
    return TensorDict({"done": done, "terminated": done.clone()}, [count])


def after_ending(state: State, place: int, number: int) -> list[State]:
    return [state.stepped(END).was_reset() if place == 0 else state.stepped(number + place)]


def roll(state: State, place: int, number: int) -> list[State]:
    begun = state.was_reset()
    return [begun, begun.stepped(None), begun.stepped(None).stepped(None)]


def turned(state: State, place: int, number: int) -> list[State]:
    return [state._replace(knob=number)]


def first_only(course: Callable[[State, int, int], list[State]]) -> Callable[[State, int, int], list[State]]:
    return lambda state, place, number: course(state, place, number) if place == 0 else []


def reset(state: State, place: int, number: int) -> list[State]:
    return [state.was_reset()]


def step(state: State, place: int, number: int) -> list[State]:
    return [state.stepped(number + place)]


def observed(td: TensorDictBase) -> Any:
    return td.get("next", td)["observation"].tolist()


COMMANDS = {
    "reset": Command(lambda env, count, number: env.reset(), reset, observed),
    "partial reset": Command(lambda env, count, number: env.reset(masked("_reset", count, [0])), first_only(reset)),
    "step": Command(lambda env, count, number: env.step(acting(actions(count, number))), step, observed),
    "partial step": Command(
        lambda env, count, number: env.step(acting(actions(count, number), only=[0])), first_only(step)
    ),
    "step_and_maybe_reset": Command(
        lambda env, count, number: env.step_and_maybe_reset(ending(count, number)),
        after_ending,
        lambda result: result[1]["observation"].tolist(),
    ),
    "maybe_reset": Command(lambda env, count, number: env.maybe_reset(over(count)), first_only(reset)),
    "rand_step": Command(lambda env, count, number: env.rand_step(), lambda s, *_: [s.stepped(None)], observed),
    "rollout": Command(lambda env, count, number: env.rollout(2), roll, lambda td: observed(td[:, -1])),
    "set_seed": Command(
        lambda env, count, number: env.set_seed(number),
        lambda state, place, number: [state._replace(given=seed_chain(number, COUNT)[0][place])],
    ),
    "call": Command(lambda env, count, number: env.call("turn", number), turned),
    "get_attr": Command(lambda env, count, number: env.get_attr("knob")),
    "set_attr": Command(lambda env, count, number: env.set_attr("knob", number), turned),
    "render": Command(lambda env, count, number: env.render(), rows=list),
    "state_dict": Command(lambda env, count, number: env.state_dict()),
    "load_state_dict": Command(lambda env, count, number: env.load_state_dict({"knob": number}), turned),
}


# -- when it is cancelled -------------------------------------------------------------------------------


async def after_turns(coroutine: Coroutine[Any, Any, Any], turns: int) -> Any:
    """Cancel a coroutine after so many turns of the loop; what it returns if that was too late."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(turns):
        await asyncio.sleep(0)
        if task.done():
            break
    in_time = task.cancel()
    result = await task
    assert not in_time, "a cancelled coroutine went on as if it was not"
    return result


async def at_suspension(coroutine: Coroutine[Any, Any, Any], number: int, late: bool) -> Any:
    """Cancel a coroutine when it waits for the n-th time, or just when it need not wait any longer."""
    task = asyncio.ensure_future(_interrupted(coroutine, number, late))
    return await task


@types.coroutine
def _interrupted(coroutine: Coroutine[Any, Any, Any], number: int, late: bool) -> Any:
    task, error = asyncio.current_task(), None
    assert task is not None
    for suspension in itertools.count(1):
        try:
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            assert suspension <= number, "a cancelled coroutine went on as if it was not"
            return stop.value
        if suspension == number and late and awaited is not None:
            awaited.add_done_callback(lambda _: task.cancel())  # which comes before the task's own
        elif suspension == number:
            task.cancel()
        error = None
        try:
            yield awaited
        except BaseException as caught:
            error = caught


async def moments(attempt: Callable[[Callable[[Any], Awaitable[Any]]], Awaitable[bool]]) -> int:
    """Make attempts that are cancelled at all moments, one after the other; return how many were.

    Args:
        attempt: Is given what runs a coroutine and cancels it, and says whether it was cancelled.
    """
    cancelled = turns = 0
    while await attempt(partial(after_turns, turns=turns)):
        cancelled += 1
        turns = turns + 1 if turns < 8 else turns * 2  # the later ones differ by what the clock says only
    for late in (False, True):
        number = 1
        while await attempt(partial(at_suspension, number=number, late=late)):
            number += 1
        cancelled += number - 1
    return cancelled


# -- what must hold afterwards --------------------------------------------------------------------------


class Trial:
    """Envs that run, and what is known of them."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.states = [State()] * COUNT
        self.generations: list[int] = []
        self.numbers = itertools.count(1000, 100)

    async def begin(self) -> None:
        marks = observed(await self.env.reset())
        self.generations = [mark[1] for mark in marks]
        self._settle([{state.was_reset()} for state in self.states], marks)

    async def check(self, name: str, command: Command, envs: list[int], *, draining: bool = False) -> None:
        """Cancel a command for these envs at all moments; `draining` also while the envs owe an earlier answer."""
        target = self.env if envs == list(range(COUNT)) else self.env[envs]

        async def attempt(cancelling: Callable[[Any], Awaitable[Any]]) -> bool:
            before = await self._abandon() if draining else [{state} for state in self.states]
            after, number, cancelled = list(before), next(self.numbers), False
            try:
                result = await cancelling(command.ask(target, len(envs), number))
            except asyncio.CancelledError:
                cancelled = True
            for place, env in enumerate(envs):
                courses = [[state, *command.course(state, place, number)] for state in before[env]]
                after[env] = {state for course in courses for state in (course if cancelled else course[-1:])}
            if not cancelled and command.rows is not None:
                self._compare([after[env] for env in envs], command.rows(result), envs)
            self._check_slots()
            await self.follow_up(after, reset=name == "set_seed")
            return cancelled

        assert await moments(attempt) >= 1

    async def _abandon(self) -> list[set[State]]:
        """Have a step of all envs under way for which nobody waits; what they are in then."""
        number = next(self.numbers)
        with pytest.raises(asyncio.CancelledError):
            await at_suspension(self.env.step(acting(actions(COUNT, number))), 1, late=False)
        return [{state, state.stepped(number + env)} for env, state in enumerate(self.states)]

    def _check_slots(self) -> None:
        slots = self.env._pool.states
        assert not slots._held
        assert {slots.state(env) for env in range(COUNT)} <= {EnvState.IDLE, EnvState.DRAINING}

    async def follow_up(self, after: list[set[State]], *, reset: bool) -> None:
        """Whatever the envs are in now, they step on from there, all of them."""
        if reset:
            marks = observed(await self.env.reset())
            self._settle([{state.was_reset() for state in states} for states in after], marks)
            after = [{state} for state in self.states]
        for _ in range(2):
            number = next(self.numbers)
            marks = observed(await self.env.step(acting(actions(COUNT, number))))
            self._settle([{s.stepped(number + env) for s in states} for env, states in enumerate(after)], marks)
            after = [{state} for state in self.states]

    def _settle(self, after: list[set[State]], marks: list[list[int]]) -> None:
        self._compare(after, marks, range(COUNT))
        found = [[s for s in states if s.shows(mark)] for states, mark in zip(after, marks, strict=True)]
        self.states = [states[0]._replace(last=mark[4]) for states, mark in zip(found, marks, strict=True)]

    def _compare(self, after: list[set[State]], marks: list[list[int]], envs: Any) -> None:
        for env, states, mark in zip(envs, after, marks, strict=True):
            assert mark[:2] == [env, self.generations[env]]
            assert any(state.shows(mark) for state in states), (env, mark, states)


def make(face: Face, cls: Any = GymMarkEnv) -> Any:
    return face.make(COUNT, cls, create_env_kwargs=[{"index": index} for index in range(COUNT)])


over_faces = pytest.mark.parametrize("face", ASYNC_FACES, ids=lambda face: face.name)
over_envs = pytest.mark.parametrize("cls", [GymMarkEnv, TorchMarkEnv])


@over_faces
@over_envs
async def test_commands(face: Face, cls: Any) -> None:
    """Of all envs, and of a view, which leaves the others alone."""
    async with make(face, cls) as env:
        trial = Trial(env)
        await trial.begin()
        for name, command in COMMANDS.items():
            await trial.check(name, command, list(range(COUNT)))
            await trial.check(name, command, VIEW)
            if cls is GymMarkEnv:  # what the envs deal in is no matter of that
                await trial.check(name, command, list(range(COUNT)), draining=True)


@over_faces
async def test_closed_right_after_a_cancelled_command(face: Face) -> None:
    env = make(face)
    for number, command in enumerate(COMMANDS.values()):
        await env.reset()
        with pytest.raises(asyncio.CancelledError):
            await at_suspension(command.ask(env, COUNT, 1000), 1, late=number % 2 == 1)
        await env.close()
        assert env.is_closed
    assert asyncio.all_tasks() == {asyncio.current_task()}


STARTS: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {
    "start": lambda env: env.start(),
    "enter": lambda env: env.__aenter__(),
    "enter a view": lambda env: env[VIEW].__aenter__(),
    "reset": lambda env: env.reset(),
}


@over_faces
async def test_starts(face: Face) -> None:
    """A cancelled start leaves nothing, and the next one is as if there had been none."""
    env = make(face)

    async def attempt(cancelling: Callable[[Any], Awaitable[Any]], *, start: str) -> bool:
        nonlocal env
        try:
            await cancelling(STARTS[start](env))
        except asyncio.CancelledError:
            if start == "reset":  # the envs may have been up
                await env.close(raise_if_closed=False)
            assert env.is_closed
            assert env.pids == ()
            return True
        trial = Trial(env)
        trial.states = [State(episode=start == "reset")] * COUNT
        await trial.begin()
        await trial.follow_up([{state} for state in trial.states], reset=True)
        await env.close()
        env = make(face)  # since a view does not start again what was closed
        return False

    for start in STARTS:
        assert await moments(partial(attempt, start=start)) >= 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("face", [face for face in ASYNC_FACES if face.name != "async-serial"], ids=lambda f: f.name)
@pytest.mark.parametrize("turns", range(3))
async def test_a_start_that_is_cancelled_as_it_succeeds(
    face: Face, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: Pool) -> None:
        await genuine(self)
        asyncio.get_running_loop().call_soon(starting.cancel)
        for _ in range(turns):
            await asyncio.sleep(0)

    genuine = Pool.start
    monkeypatch.setattr(Pool, "start", start)
    env = make(face)
    starting = asyncio.ensure_future(env.start())
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert env.is_closed
    assert env.pids == ()


@over_faces
async def test_close(face: Face) -> None:
    """A cancelled close has closed everything, unless it had not begun; and the next start is a new one."""
    env = make(face)
    former: list[int] = []

    async def attempt(cancelling: Callable[[Any], Awaitable[Any]], *, draining: bool) -> bool:
        nonlocal former
        trial = Trial(env)
        await trial.begin()
        assert set(former).isdisjoint(trial.generations)
        former = trial.generations
        workers = [psutil.Process(pid) for pid in env.pids]
        if draining:
            with pytest.raises(asyncio.CancelledError):
                await at_suspension(env.step(acting([1] * COUNT)), 1, late=False)
        cancelled = False
        try:
            await cancelling(env.close())
        except asyncio.CancelledError:
            cancelled = True
        if not env.is_closed:
            assert cancelled
            await env.close()
        assert await in_thread(still_alive, workers, 0) == []
        return cancelled

    for draining in (False, True):
        assert await moments(partial(attempt, draining=draining)) >= 1
    assert asyncio.all_tasks() == {asyncio.current_task()}
