"""Factories that fail, and things that cannot be shown, for workers that import little."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium

from aioenvs.errors import SpecMismatchError


class NeedsTwo(Exception):
    """Cannot be pickled, since its constructor does not take its `args`."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.lock = threading.Lock()


class Final(Exception):
    __slots__ = ("place",)

    def __init_subclass__(cls, **_: Any) -> None:
        raise TypeError("final")


class Odd(Exception):
    """Has other things under the names that a start error uses, and is no hashable."""

    env_index = property(lambda self: "odd")
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    def __str__(self) -> str:
        return "odd"

    def __setattr__(self, name: str, value: Any) -> None:
        raise ZeroDivisionError


def final() -> Final:
    error = Final("last")
    error.place = "slot"
    return error


MADE: list[Callable[[], Exception]] = [
    lambda: gymnasium.error.DeprecatedEnv("old"),
    lambda: KeyError("key"),
    lambda: FileNotFoundError(2, "no such file", "/nowhere"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    lambda: ImportError("lib.so", name="lib", path="/lib"),
    lambda: TimeoutError("the simulator's own"),
    lambda: ExceptionGroup("many", [ValueError("one")]),
    lambda: NeedsTwo(3, reason="no"),
    final,
    Odd,
    lambda: SpecMismatchError("space"),
]


def raising(make: Callable[[], BaseException]) -> Any:
    raise make()


class Once:
    """A factory that works once, and then finds its file gone."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(self) -> Any:
        if self.flag.exists():
            raise FileNotFoundError(2, "no such file", str(self.flag))
        self.flag.touch()
        return gymnasium.make("CartPole-v1")


class Unspeakable:
    """Has neither a `repr` nor a `str`."""

    def __repr__(self) -> str:
        raise ZeroDivisionError("repr")


class UnspeakableEnv(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(3)

    def __repr__(self) -> str:
        raise ZeroDivisionError("repr")

    __str__ = __repr__

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, _: Any) -> Any:
        return self.observation_space.sample(), Unspeakable(), False, False, {}


class UnspeakableFactory(Unspeakable):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self) -> Any:
        return Unspeakable()
