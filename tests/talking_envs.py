"""Envs that tell what reached them; in a module of their own, since workers import it."""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase

from aioenvs.testing import CountingEnv

__all__ = ["DumbEnv", "TalkingEnv", "numbered"]


def numbered(count: int, **kwargs: Any) -> list[dict[str, Any]]:
    """Keyword arguments for so many talking envs."""
    return [{"index": index, **kwargs} for index in range(count)]


class DumbEnv(CountingEnv):
    """A counting env in which `index` is a method, and `shout` is a value."""

    shout = "!"

    def index(self) -> str:
        """Anything."""
        return "a method"


class TalkingEnv(CountingEnv):
    """A counting env with an index, attributes and methods of all kinds, and a memory of what its resets were given.

    Args:
        index: Whatever it shall be.
        **options: As for `CountingEnv`.
    """

    def __init__(self, index: Any = 0, **options: Any) -> None:
        super().__init__(**options)
        self.index = index
        self.notes: list[Any] = []
        self.given: list[dict[str, Any]] = []

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.given.append(kwargs)
        for value in kwargs.values():
            if isinstance(value, list):
                value.append("spoilt")
        return super()._reset(tensordict, **{key: value for key, value in kwargs.items() if key == "start"})

    def echo(self, **kwargs: Any) -> dict[str, Any]:
        """Return what it was called with."""
        return kwargs

    def shout(self) -> str:
        """Anything."""
        return f"here is {self.index}"

    def note(self, notes: list[Any]) -> list[Any]:
        """Add the index to a list that is kept."""
        notes.append(self.index)
        self.notes = notes
        return notes

    def fail(self, index: Any = None) -> str:
        """Raise, in one env or in all."""
        if index in (None, self.index):
            raise LookupError(f"env {self.index} does not know")
        return "well"

    def lock(self) -> Any:
        """Return what cannot leave the process."""
        return threading.Lock()

    def where(self) -> tuple[int, str]:
        """Say in which process and thread it is."""
        return os.getpid(), threading.current_thread().name

    def num_threads(self) -> int:
        """Say how many threads torch has."""
        return torch.get_num_threads()

    def render(self, scale: int = 1) -> str:
        """Return a picture, in words."""
        return f"{self.index}" * scale

    def _whisper(self) -> str:
        return "secret"

    @property
    def broken(self) -> NoReturn:
        """Raise."""
        raise ZeroDivisionError("this property is broken")
