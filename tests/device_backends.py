"""A device that is made up: its copies are done when the test says so, and everything that is asked of it is noted.

Its tensors are on the CPU. A copy into it is empty until it is done, and has then what the source has *at that time*,
so that a source that was written too early shows.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aioenvs.device import DeviceBackend

__all__ = ["Copy", "FakeBackend"]


@dataclass(eq=False)
class Copy:
    """One copy, which is also its fence.

    Attributes:
        kind: "in" or "out".
        nbytes: Of the source.
        ordered: Whether the caller's stream waits for it.
        waited: How often somebody waited for it.
    """

    kind: str
    source: torch.Tensor
    target: torch.Tensor
    passed: threading.Event = field(default_factory=threading.Event)
    ordered: bool = False
    waited: int = 0
    asked: threading.Event = field(default_factory=threading.Event)

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def release(self) -> None:
        """Do the copy."""
        if not self.passed.is_set():
            self.target.copy_(self.source)
            self.passed.set()

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        self.waited += 1
        self.asked.set()
        assert self.passed.wait(20), "nobody let the copy through"


class FakeBackend(DeviceBackend):
    """A device of one's own.

    Args:
        held: Whether copies wait for `release`; else they are done at once.
        fails: Raised by `pin`.
        pins: Whether memory can be pinned for it.
    """

    def __init__(self, *, held: bool = False, fails: Exception | None = None, pins: bool = True) -> None:
        self.device = torch.device("cpu")
        self.pins = pins
        self.held = held
        self.fails = fails
        self.copies: list[Copy] = []
        self.pinned: list[int] = []
        self.notes: list[str] = []
        self.staged: list[bool] = []
        self._held: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self.there: list[torch.Tensor] = []

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a tensor on the device from now on."""
        self.there.append(tensor)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self.there)

    @property
    def into(self) -> list[Copy]:
        """The copies to the device."""
        return [copy for copy in self.copies if copy.kind == "in"]

    @property
    def under_way(self) -> list[Copy]:
        return [copy for copy in self.copies if not copy.done()]

    def next_held(self) -> Copy:
        """Wait for the next copy that is held."""
        return self._held.get(timeout=20)

    def release(self, *, held: bool = False) -> None:
        """Let all copies through, and those to come, unless they are `held` again."""
        self.held = held
        for copy in self.copies:
            copy.release()

    def pin(self, memory: torch.Tensor) -> None:
        if self.fails is not None:
            raise type(self.fails)(*self.fails.args)  # one whose traceback is nobody else's
        self.notes.append("pin")
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        self.notes.append("unpin")
        assert not self.under_way, "unpinned under a copy"
        memory[0].item()  # it is mapped still
        self.pinned.remove(memory.data_ptr())

    def staging(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        self.staged.append(pinned)
        return super().staging(nbytes, pinned=pinned)

    def copy_in(self, source: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        return self._begin("in", source, torch.zeros_like(source))

    def order(self, copy: torch.Tensor, fence: Any) -> None:
        assert copy is fence.target
        fence.ordered = True

    def copy_out(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> Copy:
        flat = torch.cat([source.reshape(-1).view(torch.uint8) for source in sources])
        return self._begin("out", flat, target)[1]

    def _begin(self, kind: str, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        copy = Copy(kind, source, target)
        self.copies.append(copy)
        if self.held:
            self._held.put(copy)
        else:
            copy.release()
        return target, copy
