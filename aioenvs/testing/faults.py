"""Counting envs that are slow, fail, die, or talk: what a system that runs envs has to bear."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

from tensordict import TensorDictBase

from .counting import CountingEnv

__all__ = ["DyingEnv", "FailingEnv", "PrintingEnv", "SlowEnv"]

Where = Literal["init", "reset", "step"]
WHERE = ("init", "reset", "step")
LINE = "x" * 79 + "\n"


class _EventfulEnv(CountingEnv):
    """A counting env that does something at the call number `at` of a method, or at each call."""

    def __init__(self, event: Callable[[], object], where: Where, at: int | None, **options: Any) -> None:
        if where not in WHERE:
            raise ValueError(f"where must be one of {WHERE}, found {where!r}")
        super().__init__(**options)
        self.event, self.where, self.at, self.calls = event, where, at, 0
        self._called("init")

    def _called(self, where: Where) -> None:
        if where == self.where:
            self.calls += 1
            if self.at is None or self.calls == self.at:
                self.event()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._called("reset")
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._called("step")
        return super()._step(tensordict)


class FailingEnv(_EventfulEnv):
    """Raises an exception, once by default; after that it can be used again.

    Args:
        where: In "step", "reset", or "init", the constructor.
        at: At which call, counted from 1 over all episodes; None for each call.
        error: What is raised.
        message: What the exception says.
        **options: As for `CountingEnv`.

    >>> from aioenvs.testing import FailingEnv
    >>> env = FailingEnv(at=2, error=ValueError, message="the reactor is hot")
    >>> td = env.rand_step(env.reset())
    >>> env.rand_step(td)
    Traceback (most recent call last):
    ValueError: the reactor is hot
    """

    def __init__(
        self,
        where: Where = "step",
        at: int | None = 1,
        *,
        error: type[BaseException] = RuntimeError,
        message: str = "this env was told to fail",
        **options: Any,
    ) -> None:
        super().__init__(functools.partial(_fail, error, message), where, at, **options)


def _fail(error: type[BaseException], message: str) -> NoReturn:
    raise error(message)


class DyingEnv(_EventfulEnv):
    """Ends the process it runs in, without a word: by a signal, or with an exit code.

    Args:
        where: In "step", "reset", or "init", the constructor.
        at: At which call, counted from 1 over all episodes.
        exit_code: The exit code, if it shall exit by `os._exit`.
        signum: Otherwise the signal that it sends to itself; SIGKILL by default.
        **options: As for `CountingEnv`.

    >>> from aioenvs.testing import DyingEnv
    >>> env = DyingEnv(at=3)
    >>> env.rollout(2)["next", "observation"].flatten().tolist()  # a third step would kill this process
    [1, 2]
    """

    def __init__(
        self,
        where: Where = "step",
        at: int | None = 1,
        *,
        exit_code: int | None = None,
        signum: int = signal.SIGKILL,
        **options: Any,
    ) -> None:
        super().__init__(functools.partial(_die, exit_code, signum), where, at, **options)


def _die(exit_code: int | None, signum: int) -> None:
    if exit_code is not None:
        os._exit(exit_code)
    else:
        os.kill(os.getpid(), signum)


class SlowEnv(_EventfulEnv):
    """Takes its time.

    Args:
        delay: Seconds; or several, which are taken in turn.
        where: In "step", "reset", or "init", the constructor.
        at: At which call, counted from 1 over all episodes; None for each call.
        sleep: What waits for so many seconds.
        **options: As for `CountingEnv`.

    >>> from aioenvs.testing import SlowEnv
    >>> waited = []
    >>> env = SlowEnv([0.1, 0.2], sleep=waited.append)
    >>> len(env.rollout(3)), waited
    (3, [0.1, 0.2, 0.1])
    """

    def __init__(
        self,
        delay: float | Iterable[float] = 0.01,
        where: Where = "step",
        at: int | None = None,
        *,
        sleep: Callable[[float], object] = time.sleep,
        **options: Any,
    ) -> None:
        delays = (float(delay),) if isinstance(delay, int | float) else tuple(delay)
        super().__init__(_Waiting(delays, sleep), where, at, **options)


class _Waiting:
    """Waits for one delay after the other."""

    def __init__(self, delays: Sequence[float], sleep: Callable[[float], object]) -> None:
        self.delays, self.sleep, self.calls = delays, sleep, 0

    def __call__(self) -> None:
        delay = self.delays[self.calls % len(self.delays)]
        self.calls += 1
        self.sleep(delay)


class PrintingEnv(_EventfulEnv):
    """Prints a lot.

    Args:
        size: How many characters, at the least, to each stream.
        streams: Which of "stdout" and "stderr".
        where: In "step", "reset", or "init", the constructor.
        at: At which call, counted from 1 over all episodes; None for each call.
        **options: As for `CountingEnv`.

    >>> from aioenvs.testing import PrintingEnv
    >>> env = PrintingEnv(160, streams=("stdout",), at=1)
    >>> td = env.rand_step(env.reset())  # doctest: +ELLIPSIS
    xxx...
    xxx...
    """

    def __init__(
        self,
        size: int = 1_000_000,
        where: Where = "step",
        at: int | None = None,
        *,
        streams: Sequence[Literal["stdout", "stderr"]] = ("stdout", "stderr"),
        **options: Any,
    ) -> None:
        super().__init__(functools.partial(_print, size, tuple(streams)), where, at, **options)


def _print(size: int, streams: Sequence[str]) -> None:
    for name in streams:
        stream = getattr(sys, name)
        for _ in range(-(-size // len(LINE))):
            stream.write(LINE)
        stream.flush()
