"""Coroutine envs for tests. Workers import this module, so it must not import torch.

`AwaitingEnv` does what a `failing_envs.CountingEnv` does, with coroutines. Where the fault of that is a coroutine
function it is awaited. Nothing here waits for a time: envs wait for each other (`Meeting`) or for the test (`Door`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import gymnasium as gym
import numpy as np
from failing_envs import CountingEnv, Gate

__all__ = [
    "AwaitingEnv",
    "ChattyEnv",
    "Door",
    "HalfEnv",
    "LeavingEnv",
    "LoopingEnv",
    "MeetingEnv",
    "Never",
    "TalkingEnv",
    "TextEnv",
    "WanderingEnv",
    "door",
    "leave",
]


class AwaitingEnv:
    """A `CountingEnv` behind coroutines; it has no base class.

    Args:
        env_id: See `CountingEnv`.
        fault: Called once as there; what it returns is awaited if it can be. So is that of `on_close`.
        **options: As for `CountingEnv`.
    """

    observation_space = CountingEnv.observation_space
    action_space = CountingEnv.action_space

    def __init__(self, env_id: int = 0, *, fault: Any = None, on_close: Any = None, **options: Any) -> None:
        self.inner = CountingEnv(env_id, **options)
        self.fault, self.on_close = fault, on_close
        self.seeds: list[int | None] = []

    async def _meet_fault(self, episode: int, step: int) -> None:
        if self.fault is not None and (episode, step) == self.inner.at:
            fault, self.fault = self.fault, None
            await awaited(fault())
        await asyncio.sleep(0)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seeds.append(seed)
        await self._meet_fault(self.inner.episode + 1, 0)
        return self.inner.reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        await self._meet_fault(self.inner.episode, self.inner.steps + 1)
        return self.inner.step(action)

    async def close(self) -> None:
        await asyncio.sleep(0)
        if self.on_close is not None:
            await awaited(self.on_close())


async def awaited(result: Any) -> Any:
    return await result if isinstance(result, Awaitable) else result


class LoopingEnv(CountingEnv):
    """A plain env each method of which runs an event loop of its own, and keeps in mind in which thread.

    Args:
        env_id: See `CountingEnv`.
        only: The one method that runs one; None for all.
        closed: A file that gets the name of the thread in which it was closed, if that is where it was built.
        **options: As for `CountingEnv`.
    """

    def __init__(self, env_id: int = 0, *, only: str | None = None, closed: str | None = None, **options: Any) -> None:
        super().__init__(env_id, **options)
        self.only, self.closed = only, closed
        self.threads: set[int] = set()
        self._run("init")

    def _run(self, method: str) -> int:
        self.threads.add(threading.get_ident())
        if self.only not in (None, method):
            return len(self.threads)
        counting = self._count()
        try:
            return asyncio.run(counting)
        finally:
            counting.close()

    async def _count(self) -> int:
        await asyncio.sleep(0)
        return len(self.threads)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._run("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._run("step")
        return super().step(action)

    def count(self) -> int:
        """How many threads it has been in."""
        return self._run("call")

    @property
    def counted(self) -> int:
        """The same."""
        return self._run("get")

    def state_dict(self) -> dict[str, Any]:
        return {"threads": self._run("state_dict")}

    def close(self) -> None:
        if self._run("close") == 1 and self.closed is not None:
            note(self.closed, f"{self.env_id}: {threading.current_thread().name}\n")
        super().close()


def leave(*_: Any) -> NoReturn:
    raise SystemExit(7)


class LeavingEnv(CountingEnv):
    """Has its process exit at a signal, which only a main thread can decide."""

    def __init__(self, env_id: int = 0, **options: Any) -> None:
        super().__init__(env_id, **options)
        signal.signal(signal.SIGUSR1, leave)


class HalfEnv(CountingEnv):
    """Has only one coroutine method, the other is a plain one."""

    @staticmethod
    def of(name: str) -> Callable[..., Any]:
        """The class whose method of this name is the coroutine."""
        return {"reset": _ResetAwaits, "step": _StepAwaits}[name]


class _ResetAwaits(HalfEnv):
    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed=seed, options=options)


class _StepAwaits(HalfEnv):
    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        return super().step(action)


# -- who is where at the same time ----------------------------------------------------------------------


class Meeting:
    """Where all envs of one loop must be at the same time before any of them goes on."""

    of_loop: ClassVar[weakref.WeakKeyDictionary[Any, Meeting]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.members = 0
        self.inside = self.most = 0
        self._here: list[asyncio.Future[None]] = []

    @classmethod
    def here(cls) -> Meeting:
        return cls.of_loop.setdefault(asyncio.get_running_loop(), cls())

    async def everybody(self, expected: int) -> None:
        own = asyncio.get_running_loop().create_future()
        self._here = [each for each in self._here if not each.done()] + [own]
        if len(self._here) == expected:
            here, self._here = self._here, []
            for each in here:
                each.set_result(None)
        await own


class MeetingEnv(AwaitingEnv):
    """Takes a step only together with all envs that were reset on its loop, as far as `together` does not say less.

    Args:
        env_id: See `CountingEnv`.
        together: How many have to be in a step at the same time; None for all.
        turns: How often it lets others run during a reset or a step.
    """

    def __init__(self, env_id: int = 0, *, together: int | None = None, turns: int = 3, **options: Any) -> None:
        super().__init__(env_id, **options)
        self.together, self.turns = together, turns
        self.is_member = False

    async def reset(self, **kwargs: Any) -> Any:
        meeting = Meeting.here()
        meeting.members += not self.is_member
        self.is_member = True
        async with self._inside(meeting):
            return await super().reset(**kwargs)

    async def step(self, action: Any) -> Any:
        meeting = Meeting.here()
        async with self._inside(meeting):
            await meeting.everybody(self.together or meeting.members)
            return await super().step(action)

    @contextlib.asynccontextmanager
    async def _inside(self, meeting: Meeting) -> Any:
        meeting.inside += 1
        meeting.most = max(meeting.most, meeting.inside)
        try:
            for _ in range(self.turns):
                await asyncio.sleep(0)
            yield
        finally:
            meeting.inside -= 1

    async def most(self) -> int:
        """How many envs of the loop were inside a reset or step at the same time."""
        return Meeting.here().most


# -- waiting for the test -------------------------------------------------------------------------------


class Door:
    """An awaitable `Gate`: a coroutine announces itself and waits there, without holding up its loop.

    Args:
        arrivals: The pipe for announcements.
        passes: The pipe that lets through.
        stubborn: Whether it goes on waiting when it is cancelled, and then returns.
        notes: A file that gets a "c" when it is cancelled.
    """

    def __init__(self, arrivals: str, passes: str, *, stubborn: bool = False, notes: str | None = None) -> None:
        self.arrivals, self.passes = arrivals, passes
        self.stubborn, self.notes = stubborn, notes

    async def __call__(self) -> None:
        announce(self.arrivals)
        passed = asyncio.ensure_future(self._pass())
        try:
            await asyncio.shield(passed)
        except asyncio.CancelledError:
            if self.notes is not None:
                note(self.notes, "c")
            if self.stubborn:
                announce(self.arrivals)
                await passed
                return
            passed.cancel()
            await asyncio.wait([passed])
            raise

    async def _pass(self) -> None:
        loop = asyncio.get_running_loop()
        fd = os.open(self.passes, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                ready = loop.create_future()
                loop.add_reader(fd, lambda ready=ready: ready.done() or ready.set_result(None))
                await ready
                with contextlib.suppress(BlockingIOError):
                    if os.read(fd, 1):
                        return
        finally:
            loop.remove_reader(fd)
            os.close(fd)


def announce(arrivals: str) -> None:
    fd = os.open(arrivals, os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, b"x")
    os.close(fd)


def note(path: str, what: str) -> None:
    with Path(path).open("a") as file:
        file.write(what)


def door(gate: Gate, **options: Any) -> Door:
    """A door at a gate, which the test knows how to handle."""
    return Door(*gate.names, **options)


class Never:
    """A coroutine fault that nobody ends but by cancelling it."""

    def __init__(self, arrivals: str) -> None:
        self.arrivals = arrivals

    async def __call__(self) -> None:
        announce(self.arrivals)
        await asyncio.Event().wait()


class WanderingEnv(AwaitingEnv):
    """Awaits several times in a reset and in a step, and stays at one of these for ever.

    Args:
        arrivals: The pipe where it says that it has come to where it stays.
        stay: Episode, step and await, each counted from 1 except for the step 0 of a reset.
        notes: A file that gets the number of the await at which it was cancelled.
    """

    AWAITS = 4

    def __init__(self, env_id: int, arrivals: str, stay: tuple[int, int, int], notes: str) -> None:
        super().__init__(env_id)
        self.arrivals, self.stay, self.notes = arrivals, stay, notes

    async def _wander(self, episode: int, step: int) -> None:
        for number in range(1, self.AWAITS + 1):
            if (episode, step, number) != self.stay:
                await asyncio.sleep(0)
                continue
            self.stay = (0, 0, 0)
            announce(self.arrivals)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                note(self.notes, str(number))
                raise

    async def reset(self, **kwargs: Any) -> Any:
        await self._wander(self.inner.episode + 1, 0)
        return await super().reset(**kwargs)

    async def step(self, action: Any) -> Any:
        await self._wander(self.inner.episode, self.inner.steps + 1)
        return await super().step(action)


# -- other calls, payloads and random numbers -----------------------------------------------------------


class TalkingEnv(AwaitingEnv):
    """Answers calls, some with coroutines and some without."""

    def __init__(self, env_id: int = 0, **options: Any) -> None:
        super().__init__(env_id, **options)
        self.level = 1

    async def whisper(self, word: str, *, times: int = 1) -> str:
        await asyncio.sleep(0)
        return f"{self.inner.env_id}: {word * times}"

    def shout(self, word: str) -> str:
        return f"{self.inner.env_id}: {word.upper()}"

    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise LookupError("nobody there")

    async def render(self) -> list[int]:
        await asyncio.sleep(0)
        return [self.inner.env_id] * 2

    async def state_dict(self) -> dict[str, int]:
        await asyncio.sleep(0)
        return {"total": self.inner.total}

    async def load_state_dict(self, state: dict[str, int]) -> None:
        await asyncio.sleep(0)
        self.inner.total = state["total"]

    @property
    def distance(self) -> Awaitable[int]:
        """Has to be awaited."""
        return self._measure()

    async def _measure(self) -> int:
        await asyncio.sleep(0)
        return 10 * self.inner.env_id


class TextEnv:
    """Observes the texts that it is sent."""

    observation_space = gym.spaces.Text(20)
    action_space = gym.spaces.Text(20)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await asyncio.sleep(0)
        return "begin", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return action[::-1], 0.0, action == "end", False, {"said": action}


class ChattyEnv(AwaitingEnv):
    """Draws from the generators of the process in its reset; observes its seed."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await super().reset(seed=seed, options=options)
        return np.array([self.inner.env_id, random.random() < 2, -1 if seed is None else seed, 0], np.int64), {}
