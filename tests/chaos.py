"""Everything at once, at random, against a model of what each env must answer.

    python tests/chaos.py --seed 0 --operations 100000 --minutes 5

Envs are stepped, reset, called, viewed, cancelled, killed, stopped, closed and opened again, several requests at a
time, and every value that comes back must be one that the model of its env allows: an env observes its index, the
generation it belongs to (drawn anew at each construction), its episode, its step, and what it was last told, a number
that no other request has. So an answer to another request, a late, a doubled or a lost one shows. Where a request was
cancelled, or a worker may be dead, the model knows several states, and each observation narrows them down.

A run is made of rounds, each with envs of its own. Decisions follow from the seed; what the system makes of them, and
when, does not, so the same seed finds a race again sooner or later rather than at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
import uuid
import warnings
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs import AsyncParallelEnv
from aioenvs.engine import restarts
from aioenvs.errors import (
    ClosedError,
    ConcurrencyError,
    ResetNeededError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each worker would import torch for it

__all__ = ["ChaosEnv", "Mismatch", "Options", "Round", "run"]

UNTOLD = -1  # what an env was last told after a reset without options
FAILING = 61  # every so many actions one makes its env fail
MODULUS = 251
MANY = 10**6  # restarts that are never used up
PATIENCE = 60.0  # seconds that a round never takes


class ChaosEnv(gym.Env[Any, Any]):
    """Observes `mark` `[index, generation, episode, step, last]`, and `bulk`, which follows from it.

    Args:
        index: Its index.
        size: Of `bulk`.
        loose: Whether `bulk` is a text, which travels as an object, rather than an array.
    """

    action_space = gym.spaces.Discrete(2**62)

    def __init__(self, index: int, size: int, loose: bool) -> None:
        bulk: Any = gym.spaces.Box(0, 255, (size,), np.uint8)
        if loose:
            bulk = gym.spaces.Text(max(size, 1), charset=[chr(65 + i) for i in range(26)])
        self.observation_space = gym.spaces.Dict(mark=gym.spaces.Box(-(2**63), 2**63 - 1, (5,), np.int64), bulk=bulk)
        self.index, self.size, self.loose = index, size, loose
        self.generation = uuid.uuid4().int >> 65
        self.episode, self.steps, self.last = 0, 0, UNTOLD

    @property
    def mark(self) -> tuple[int, ...]:
        return self.index, self.generation, self.episode, self.steps, self.last

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps, self.last = self.episode + 1, 0, (options or {}).get("told", UNTOLD)
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        if action % FAILING == 0:
            raise ValueError(f"env {self.index} was told {int(action)}")
        self.steps, self.last = self.steps + 1, int(action)
        return self._observation(), reward_of(self.last), self.steps >= length_of(self.index), False, {}

    def echo(self, told: int, payload: bytes) -> tuple[tuple[int, ...], int, bytes]:
        return self.mark, told, payload[::-1]

    def _observation(self) -> Any:
        return {"mark": np.array(self.mark, np.int64), "bulk": bulk_of(self.mark, self.size, self.loose)}


def reward_of(action: int) -> float:
    return float(action % 1000 + 1)


def length_of(index: int) -> int:
    return 5 + 3 * index


def bulk_of(mark: Sequence[int], size: int, loose: bool) -> Any:
    number = sum(mark) % MODULUS
    return chr(65 + number % 26) * max(size, 1) if loose else np.full(size, number, np.uint8)


class Mismatch(AssertionError):
    """Something came back that must not."""


class State(NamedTuple):
    """What an env may be in."""

    episode: int
    steps: int
    last: int
    can_step: bool = True

    def stepped(self, index: int, action: int, maybe_reset: bool) -> State:
        """The state after a step."""
        if not self.can_step or action % FAILING == 0:
            return self._replace(can_step=False)
        after = State(self.episode, self.steps + 1, action)
        return after.was_reset(UNTOLD) if maybe_reset and after.steps >= length_of(index) else after

    def was_reset(self, told: int) -> State:
        """The state after a reset."""
        return State(self.episode + 1, 0, told)


UNRESET = State(0, 0, UNTOLD, False)
SETTLED = State(1, 0, UNTOLD)


@dataclass
class Model:
    """What is known of an env.

    Attributes:
        index: Its index.
        generation: The one that its caller knows; None if it will learn of a new one.
        states: What it may be in.
        deaths: When its worker was killed, or stopped for too long, as far as nobody heard of it.
        owed: Whether it is certain that it was lost, and nobody has heard of it.
        vague: Whether nothing is certain, until it was reset or has stepped.
    """

    index: int
    generation: int | None = None
    states: set[State] = field(default_factory=lambda: {UNRESET})
    deaths: list[float] = field(default_factory=list)
    owed: bool = False
    vague: bool = False

    @property
    def may_be_dead(self) -> bool:
        return bool(self.deaths) or self.owed or self.vague

    def settle(self, generation: int | None, state: State) -> None:
        """It is certain again."""
        self.generation, self.states, self.owed, self.vague = generation, {state}, False, False


@dataclass(frozen=True)
class Options:
    """How a round is; see `AsyncParallelEnv` for most.

    Attributes:
        size: Of the observations, in bytes.
        loose: Whether these travel as objects.
    """

    count: int
    processes: int
    policy: str
    max_restarts: int
    step_timeout: float | None
    method: str
    size: int
    loose: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> Options:
        count = rng.randint(1, 5)
        return cls(
            count=count,
            processes=rng.randint(1, count),
            policy=rng.choice(["raise", "restart", "restart"]),
            max_restarts=rng.choice([1, MANY, MANY, MANY]),
            step_timeout=rng.choice([None, 0.5]),
            method=rng.choice(["forkserver"] * 6 + ["fork", "spawn"]),
            size=rng.choice([1, 100, 10_000, 10_000, 1_000_000]),
            loose=rng.random() < 0.3,
        )

    def make(self) -> AsyncParallelEnv:
        env: AsyncParallelEnv = AsyncParallelEnv(
            self.count,
            ChaosEnv,
            create_env_kwargs=[{"index": i, "size": self.size, "loose": self.loose} for i in range(self.count)],
            num_processes=self.processes,
            on_worker_death=self.policy,
            max_restarts=self.max_restarts,
            step_timeout=self.step_timeout,
            mp_start_method=self.method,
            close_timeout=2.0,
        )
        return env


class Round:
    """Some envs, what is known of them, and random operations on them.

    Args:
        options: How the envs are.
        rng: What decides.
    """

    def __init__(self, options: Options, rng: random.Random) -> None:
        self.options, self.rng = options, rng
        self.env = options.make()
        self.models = [Model(index) for index in range(options.count)]
        self.seen: set[int] = set()  # all generations that ever answered
        self.history: deque[str] = deque(maxlen=40)
        self.counts: Counter[str] = Counter()
        self._told = rng.randrange(1, 2**40)
        self._stopped: set[int] = set()

    # -- the course of it -------------------------------------------------------------------------------

    async def run(self, operations: int, deadline: float) -> None:
        """So many operations, or fewer if the time is up; then what is certain is compared once more."""
        try:
            await self.env.start()
            for _ in range(operations):
                if time.monotonic() > deadline:
                    break
                await self._operate()
            self._resume()
            await self._check_at_rest()
        finally:
            self._resume()
            await self.env.close(raise_if_closed=False)

    async def _operate(self) -> None:
        kind = self.rng.choices(
            ["one", "several", "kill", "stop", "resume", "overlap", "reopen", "rest"],
            [50, 25, 4, 1 if self.options.step_timeout else 0, 3, 3, 0.4, 4],
        )[0]
        if kind in ("one", "several", "overlap"):
            await getattr(self, f"_{kind}")()
        elif kind == "kill":
            self._signal(self.rng.randrange(self.options.processes), signal.SIGKILL)
        elif kind == "stop":
            self._signal(self.rng.randrange(self.options.processes), signal.SIGSTOP)
        elif kind == "resume":
            self._resume()
        elif kind == "reopen":
            await self._reopen()
        else:
            for _ in range(self.rng.randrange(20)):
                await asyncio.sleep(0)

    async def _one(self) -> None:
        chosen = self._some(range(self.options.count))
        await self._request(chosen, self.rng.random() < 0.5)

    async def _several(self) -> None:
        """Requests for disjoint envs, all at once."""
        left = list(range(self.options.count))
        self.rng.shuffle(left)
        parts = []
        while left:
            size = self.rng.randint(1, len(left))
            parts.append(left[:size])
            left = left[size:]
        results = await asyncio.gather(*(self._request(part, True) for part in parts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _overlap(self) -> None:
        """A second request for envs that are busy is refused, and does not disturb the first."""
        everything = list(range(self.options.count))
        first = asyncio.ensure_future(self._request(everything, False, cancels=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scope = self.env._running_scope
        if not first.done() and scope is not None and scope.pool.slots._held:
            try:
                await self.env.get_attr("steps")
            except (ConcurrencyError, WorkerDiedError):
                self.counts["refused"] += 1
            else:
                raise Mismatch("a busy env was asked a second time")
        await first

    async def _reopen(self) -> None:
        """Close, with or without a request under way, and start again."""
        pending = None
        if self.rng.random() < 0.5:
            pending = asyncio.ensure_future(self._request(list(range(self.options.count)), False, cancels=False))
            for _ in range(self.rng.randrange(8)):
                await asyncio.sleep(0)
        self._note("close")
        await self.env.close(raise_if_closed=False)
        for model in self.models:
            model.vague = True  # what is under way may have been answered before, or by envs that it started itself
        if pending is not None:
            await pending
        await self.env.close(raise_if_closed=False)
        self._stopped.clear()
        self.models = [Model(index) for index in range(self.options.count)]
        await self.env.start()

    async def _check_at_rest(self) -> None:
        """Reset all and step twice: nothing may be left over from before."""
        everything = list(range(self.options.count))
        for kind in ("reset", "step_and_maybe_reset", "step_and_maybe_reset", "look"):
            await self._request(everything, False, kind=kind, cancels=False)

    # -- one request ------------------------------------------------------------------------------------

    async def _request(
        self, chosen: Sequence[int], by_view: bool, *, kind: str | None = None, cancels: bool = True
    ) -> None:
        kind = (
            kind
            or self.rng.choices(
                ["step", "step_and_maybe_reset", "reset", "echo", "look", "seed"], [20, 45, 12, 10, 8, 3]
            )[0]
        )
        if kind in ("echo", "look", "seed") and not by_view:
            chosen = list(range(self.options.count))
        request = Request(self, kind, list(chosen), by_view)
        patience = self.rng.randrange(30) if cancels and self.rng.random() < 0.15 else None
        kill_at = self.rng.randrange(10) if self.rng.random() < 0.02 else None
        self._note(f"{request} {'' if patience is None else f'cancelled after {patience}'}")
        task = asyncio.ensure_future(request.perform())
        if kill_at is not None:
            for _ in range(kill_at):
                await asyncio.sleep(0)
            self._signal(self.rng.choice(self._hosts(chosen)), signal.SIGKILL)
        if patience is not None:
            for _ in range(patience):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        self.counts[kind] += 1
        request.judge(None if task.cancelled() else task.exception(), None if _failed(task) else task.result())

    def tell(self) -> int:
        """A number that no other request gets."""
        self._told += 1
        return self._told

    def _some(self, envs: Sequence[int]) -> list[int]:
        return sorted(self.rng.sample(envs, self.rng.randint(1, len(envs))))

    def group(self, index: int) -> tuple[int, ...]:
        """The envs of the same worker."""
        groups = self.env._config.groups
        return next(group for group in groups if index in group)

    def _hosts(self, envs: Sequence[int]) -> list[int]:
        return [number for number, group in enumerate(self.env._config.groups) if set(group) & set(envs)]

    # -- signals ----------------------------------------------------------------------------------------

    def _signal(self, worker: int, number: signal.Signals) -> None:
        pool: Any = self.env._pool
        found = pool._workers.get(worker) if pool is not None else None
        if found is None or found.process.pid is None or found.process.exited.done():
            return
        self._note(f"{number.name} to the worker of {found.envs}")
        self.counts[number.name] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.process.pid, number)
        if number == signal.SIGSTOP:
            self._stopped.add(found.process.pid)
            if self.options.policy == "raise":  # where nobody kills it, it has to wake up some day
                asyncio.get_running_loop().call_later(self.rng.choice([0.01, 0.1, 0.7]), self._resume)
        now = time.monotonic()
        for env in found.envs:
            self.models[env].deaths.append(now)

    def _resume(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def _note(self, what: str) -> None:
        self.history.append(what)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


class Request:
    """One request, and whether what came of it is what the models allow.

    Args:
        round_: Where.
        kind: What is asked.
        chosen: Of which envs.
        by_view: Whether of a view of them, or of the whole with a mask.
    """

    def __init__(self, round_: Round, kind: str, chosen: list[int], by_view: bool) -> None:
        self.round, self.kind, self.chosen, self.by_view = round_, kind, chosen, by_view
        self.told = {env: round_.tell() for env in chosen}
        self.payload = round_.rng.randbytes(round_.rng.choice([0, 100, 100_000, 1_000_000])) if kind == "echo" else b""
        self.envs = chosen if by_view else list(range(round_.options.count))
        self.began = time.monotonic()
        self.took = 0.0

    def __repr__(self) -> str:
        return f"{self.kind} of {'view' if self.by_view else 'mask'} {self.chosen}, telling {list(self.told.values())}"

    @property
    def models(self) -> list[Model]:
        return [self.round.models[env] for env in self.chosen]

    # -- asking -----------------------------------------------------------------------------------------

    async def perform(self) -> Any:
        env: Any = self.round.env[self.chosen] if self.by_view else self.round.env
        try:
            return await self._ask(env)
        finally:
            self.took = time.monotonic() - self.began

    def _ask(self, env: Any) -> Awaitable[Any]:
        if self.kind == "echo":
            return env.call("echo", self.told[self.chosen[0]], self.payload)
        if self.kind == "look":
            return env.get_attr("mark")
        if self.kind == "seed":
            return env.set_seed(self.told[self.chosen[0]] % 2**31)
        mask = torch.tensor([each in self.told for each in self.envs])
        if self.kind == "reset":
            each = [{"options": {"told": self.told.get(index, UNTOLD)}} for index in self.envs]
            td = TensorDict({"_reset": mask.unsqueeze(-1)}, [len(self.envs)])
            return env.reset(td, list_of_kwargs=each)
        actions = torch.tensor([self.told.get(index, 1) for index in self.envs])
        return getattr(env, self.kind)(TensorDict({"action": actions, "_step": mask}, [len(self.envs)]))

    # -- judging ----------------------------------------------------------------------------------------

    def judge(self, error: BaseException | None, result: Any) -> None:
        """Compare with the models, and bring them up to date.

        Raises:
            Mismatch: If it cannot be.
        """
        if self._was_slow:
            for env in {sibling for own in self.chosen for sibling in self.round.group(own)}:
                self.round.models[env].deaths.append(time.monotonic())
        try:
            if error is not None:
                self._judge_error(error)
            elif result is None:
                self.round.counts["cancelled"] += 1
                self._open_all()
            else:
                getattr(self, f"_judge_{self.kind}")(result)
        except Mismatch as mismatch:
            raise Mismatch(f"{self}: {mismatch}; known were {self.models}") from error

    @property
    def _was_slow(self) -> bool:
        """Whether the time for a step may have been exceeded, without anybody's doing."""
        limit = self.round.options.step_timeout
        return limit is not None and self.took > 0.8 * limit

    @property
    def _restarts(self) -> bool:
        return self.round.options.policy == "restart"

    def _after(self, model: Model, state: State) -> State:
        if self.kind == "reset":
            return state.was_reset(self.told[model.index])
        if self.kind.startswith("step"):
            return state.stepped(model.index, self.told[model.index], self.kind != "step")
        return state

    def _open_all(self) -> None:
        """Each env may have done it, or not."""
        for model in self.models:
            model.states |= {self._after(model, state) for state in model.states}
            if model.may_be_dead:
                for sibling in self.round.group(model.index):
                    self.round.models[sibling].vague = True

    def _judge_error(self, error: BaseException) -> None:
        self.round.counts[type(error).__name__] += 1
        failed = tuple(getattr(error, "env_index", ()))
        if isinstance(error, ValueError) and "was told" in str(error):
            first = failed[0]
            _require(first in self.told, f"the error {error!r} is of another env")
            _require(f"env {first} was told {self.told[first]}" in str(error), f"{error!r} is of another request")
            self._failed_some(failed)
        elif isinstance(error, ResetNeededError):
            _require(set(failed) <= set(self.told), f"{error!r} is of another env")
            self._failed_some(failed)
        elif isinstance(error, WorkerTimeoutError):
            _require(self._was_slow and not self._restarts, f"{error!r} without cause")
            self._open_all()
        elif isinstance(error, WorkerDiedError | WorkerStartError):
            envs = [self.round.models[env] for env in error.env_index if env in self.told]
            _require(any(model.may_be_dead for model in envs), f"{error!r} without cause")
            excused = self.kind in ("echo", "look", "seed") or self.round.options.max_restarts < MANY
            _require(not self._restarts or excused, f"{error!r} was not restarted")
            self._open_all()
            for env in error.env_index:
                self.round.models[env].vague = True
        elif isinstance(error, ClosedError):
            _require(any("close" in each for each in self.round.history), f"{error!r} without cause")
            self._open_all()
        else:
            raise Mismatch(f"an unexpected {error!r}")

    def _failed_some(self, failed: Sequence[int]) -> None:
        """Some envs failed, and the others have stepped."""
        for model in self.models:
            after = {self._after(model, state) for state in model.states}
            could_fail = {state for state in after if not state.can_step}
            if model.may_be_dead:
                model.states, model.vague, model.owed = after | model.states, True, False  # the error told of the loss
            elif model.index in failed:
                _require(bool(could_fail), f"env {model.index} failed without cause")
                model.states = could_fail
            else:
                _require(after != could_fail, f"env {model.index} did not fail")
                model.states = after - could_fail

    # -- judging results --------------------------------------------------------------------------------

    def _rows(self, td: TensorDictBase) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The mark of each env in a result, whose bulk fits it."""
        options = self.round.options
        bulk = td.get("bulk")
        for row, (env, mark) in enumerate(zip(self.envs, td["mark"].tolist(), strict=True)):
            _require(mark[0] == env or not any(mark), f"env {env} got the row {mark}")
            expected = bulk_of(mark, options.size, options.loose)
            model = self.round.models[env]
            certain = any(mark) and env in self.told and len(model.states) == 1 and not model.vague
            if options.loose:
                found = bulk.tolist()[row]
                _require(found == expected or not certain, f"env {env}: {str(found)[:9]} does not fit {mark}")
            else:
                same = bool((bulk[row].numpy() == expected).all())
                _require(same or not certain, f"env {env}: the bulk does not fit {mark}")
            yield env, tuple(mark)

    def _judge_step(self, td: TensorDictBase, root: TensorDictBase | None = None) -> None:
        following = td["next"]
        roots = dict(self._rows(root)) if root is not None else {}
        for row, (env, mark) in enumerate(self._rows(following)):
            if env not in self.told:
                continue
            model = self.round.models[env]
            flags = {name: bool(following[name][row]) for name in ("done", "terminated", "truncated")}
            reward = float(following["reward"][row])
            if flags["truncated"]:
                self._lost(model, mark, reward, flags, roots.get(env))
            else:
                self._stepped(model, mark, reward, flags, roots.get(env))

    def _judge_step_and_maybe_reset(self, result: tuple[TensorDictBase, TensorDictBase]) -> None:
        self._judge_step(*result)

    def _lost(
        self, model: Model, mark: tuple[int, ...], reward: float, flags: dict[str, bool], root: tuple[int, ...] | None
    ) -> None:
        self.round.counts["lost"] += 1
        _require(self._restarts and model.may_be_dead, f"env {model.index} was lost without cause")
        _require(flags == {"done": True, "terminated": False, "truncated": True}, f"a lost step has {flags}")
        _require(reward == 0, f"a lost step has the reward {reward}")
        had_ended = any(state.steps >= length_of(model.index) for state in model.states)  # and should not have stepped
        # A worker that died over a step which was cancelled may have written a part of it.
        is_certain = len(model.states) == 1 and not model.vague and not had_ended
        if is_certain and model.generation is not None:
            known = {(model.index, model.generation, *state[:3]) for state in model.states}
            _require(mark in known, f"a lost step observes {mark}")
        if root is not None:
            _require(root[2:] == SETTLED[:3], f"the root after a loss is {root}")
            _require(root[1] not in self.round.seen, f"the generation {root[1]} after a loss is an old one")
            self.round.seen.add(root[1])
        model.deaths = model.deaths[1:]
        model.settle(None if root is None else root[1], SETTLED)

    def _stepped(
        self, model: Model, mark: tuple[int, ...], reward: float, flags: dict[str, bool], root: tuple[int, ...] | None
    ) -> None:
        action = self.told[model.index]
        _require(not model.owed, f"env {model.index} stepped before its loss was told")
        _require(mark[4] == action, f"env {model.index} was told {action} and observes {mark}")
        self._belongs(model, mark)
        before = [state.stepped(model.index, action, False) for state in model.states]
        _require(State(*mark[2:]) in before or model.vague, f"env {model.index} observes {mark}")
        over = mark[3] >= length_of(model.index)
        _require(flags == {"done": over, "terminated": over, "truncated": False}, f"{mark} has {flags}")
        _require(reward == reward_of(action), f"the reward for {action} is {reward}")
        state = State(*mark[2:])
        if root is not None:
            state = state.was_reset(UNTOLD) if over else state
            _require(root == (model.index, mark[1], *state[:3]), f"the root after {mark} is {root}")
        self._is_alive(model)
        model.settle(mark[1], state)

    def _belongs(self, model: Model, mark: tuple[int, ...]) -> None:
        """Whether a generation is the one that is known, or a new one where there may be one."""
        generation = mark[1]
        if generation == model.generation:
            return
        _require(model.generation is None or model.vague, f"{mark} comes from an env that nobody heard of")
        _require(generation not in self.round.seen or model.vague, f"{mark} comes from an old env")
        self.round.seen.add(generation)

    def _is_alive(self, model: Model) -> None:
        """It answered as if nothing was: it survived what was done to it before it was asked."""
        model.deaths = [death for death in model.deaths if death >= self.began]

    def _judge_reset(self, td: TensorDictBase) -> None:
        for env, mark in self._rows(td):
            if env in self.told:
                self._was_reset(self.round.models[env], mark)

    def _was_reset(self, model: Model, mark: tuple[int, ...]) -> None:
        told = self.told[model.index]
        _require(mark[3:] == (0, told), f"env {model.index} was reset with {told} and observes {mark}")
        if mark[1] == model.generation:
            known = {state.was_reset(told)[:3] for state in model.states}
            _require(mark[2:] in known or model.vague, f"env {model.index} was reset and observes {mark}")
            _require(not model.owed, f"{mark} comes from an env that is dead")
        else:
            fresh = 2 if self._restarts else 1
            expected = {state.was_reset(told).episode for state in model.states} if model.generation is None else set()
            _require(model.generation is None or model.may_be_dead, f"{mark} comes from nowhere")
            _require(mark[1] not in self.round.seen or model.vague, f"{mark} comes from an old env")
            _require(mark[2] in expected | {fresh} or model.vague, f"{mark} has had another number of episodes")
            self.round.seen.add(mark[1])
            if not self._restarts and model.generation is not None:
                for sibling in set(self.round.group(model.index)) - {model.index}:
                    self.round.models[sibling].vague = True
        self._is_alive(model)
        model.settle(mark[1], State(*mark[2:]))

    def _judge_echo(self, result: list[Any]) -> None:
        told = self.told[self.chosen[0]]
        for env, (mark, number, payload) in zip(self.envs, result, strict=True):
            _require(number == told and payload == self.payload[::-1], f"env {env} answered to another call")
            self._looked(self.round.models[env], mark)

    def _judge_look(self, result: list[Any]) -> None:
        for env, mark in zip(self.envs, result, strict=True):
            self._looked(self.round.models[env], mark)

    def _judge_seed(self, result: int) -> None:
        _require(isinstance(result, int), f"set_seed returned {result!r}")

    def _looked(self, model: Model, mark: tuple[int, ...]) -> None:
        _require(mark[0] == model.index, f"env {model.index} says that it is {mark}")
        if model.vague:
            return
        if mark[1] == model.generation or model.generation is None:
            known = {state[:3] for state in model.states}
            fresh = {SETTLED[:3]} if model.may_be_dead else set()
            _require(mark[2:] in known | fresh, f"env {model.index} says that it is {mark}")
            return
        _require(self._restarts and model.may_be_dead, f"env {model.index} is another one: {mark}")
        _require(mark[2:] == SETTLED[:3], f"env {model.index} was restarted and says that it is {mark}")
        model.owed = True


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Mismatch(what)


# -- runs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Workers that die soon after their start are restarted without much delay, and without a word to the log."""
    logger = logging.getLogger("aioenvs")
    former, level = restarts.LONGEST_DELAY, logger.level
    restarts.LONGEST_DELAY = 0.01
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        restarts.LONGEST_DELAY = former
        logger.setLevel(level)


async def run(
    seed: int,
    *,
    operations: int,
    seconds: float,
    per_round: int = 200,
    options: Options | None = None,
    report: Callable[[str], object] = lambda _: None,
) -> Counter[str]:
    """Rounds of operations until there were enough of them, or the time is up.

    Args:
        seed: Of all decisions.
        operations: How many at most.
        seconds: How long at most; what is under way then is still finished.
        per_round: How many operations with the same envs.
        options: How the envs are; drawn for each round if None.
        report: Gets a line for each round.

    Returns:
        How often what happened.

    Raises:
        Mismatch: If something came back that must not; with the last operations as a note.
    """
    deadline = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    number = 0
    with impatient():
        while operations > 0 and time.monotonic() < deadline:
            rng = random.Random(f"{seed} {number}")
            course = Round(options or Options.drawn(rng), rng)
            size = min(per_round, operations)
            began = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE):
                    await course.run(size, deadline)
            except BaseException as error:
                error.add_note(f"seed {seed}, round {number}: {course.options}")
                error.add_note("the last operations:\n  " + "\n  ".join(course.history))
                raise
            counts += course.counts
            report(f"round {number}: {time.monotonic() - began:.1f} s, {course.options}")
            operations -= size
            number += 1
    return counts


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop rather than on asyncio's own loop")
    given = parser.parse_args(arguments)
    warnings.simplefilter("error")
    factory = None
    if given.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    began = time.monotonic()
    with asyncio.Runner(loop_factory=factory) as runner:
        counts = runner.run(
            run(
                given.seed,
                operations=given.operations,
                seconds=60 * given.minutes,
                report=say,
            )
        )
    each = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    say(f"{time.monotonic() - began:.0f} s: {each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
