"""A device that is made up: its copies are done when the test says so, and everything that is asked of it is noted.

Its tensors are on the CPU. A copy into it is empty until it is done, and has then what the source has *at that time*,
so that a source that was written too early shows.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from faces import Face, in_thread
from failing_envs import CountingEnv, numbered

from aioenvs.tensors.device import DeviceBackend, bytes_of

__all__ = ["Copy", "FakeBackend", "are_actions", "counting", "waited_for", "watchmen_gone"]


@dataclass(eq=False)
class Copy:
    """One copy, which is also its fence.

    Attributes:
        kind: "in" or "out".
        nbytes: Of the source.
        ordered: Whether the caller's stream waits for it.
        waited: How often somebody waited for it.
        error: Raised by those waits, once it is released.
    """

    kind: str
    source: torch.Tensor
    target: torch.Tensor
    passed: threading.Event = field(default_factory=threading.Event)
    ordered: bool = False
    waited: int = 0
    asked: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def release(self) -> None:
        """Do the copy, unless it fails."""
        if not self.passed.is_set():
            if self.error is None:
                self.target.copy_(self.source)
            self.passed.set()

    def done(self) -> bool:
        return self.passed.is_set() and self.error is None

    def wait(self) -> None:
        self.waited += 1
        self.asked.set()
        assert self.passed.wait(20), "nobody let the copy through"
        if self.error is not None:
            raise self.error


class FakeBackend(DeviceBackend):
    """A device of one's own.

    Args:
        held: Whether copies wait for `release`; else they are done at once.
        fails: Raised by `pin`.
        pins: Whether memory can be pinned for it.
        claims: Which tensors are on it besides those that came by a copy, or are made so by `hold`.
    """

    def __init__(
        self,
        *,
        held: bool = False,
        fails: Exception | None = None,
        pins: bool = True,
        claims: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> None:
        self.device = torch.device("cpu")
        self.pins = pins
        self.held = held
        self.fails = fails
        self.copies: list[Copy] = []
        self.pinned: list[int] = []
        self.notes: list[str] = []
        self.staged: list[bool] = []
        self._held: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self.claims = claims
        self.fails_at: int | None = None  # which copy from it, counted from 1
        self.there: list[torch.Tensor] = []

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a tensor on the device from now on."""
        self.there.append(tensor)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        there = [*self.there, *(copy.target for copy in self.into)]
        return self.claims(tensor) or any(_is_in(tensor, each) for each in there)

    @property
    def into(self) -> list[Copy]:
        """The copies to the device."""
        return [copy for copy in self.copies if copy.kind == "in"]

    @property
    def under_way(self) -> list[Copy]:
        return [copy for copy in self.copies if not copy.passed.is_set()]

    def next_held(self) -> Copy:
        """Wait for the next copy that is held."""
        return self._held.get(timeout=20)

    def release(self, *, held: bool = False) -> None:
        """Let all copies through, and those to come, unless they are `held` again."""
        self.held = held
        for copy in self.copies:
            copy.release()

    def end(self) -> None:
        """Let all copies through, and forget them, since they look into the block."""
        self.release()
        self.copies.clear()
        self._held = queue.SimpleQueue()

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
        return self._begin("out", bytes_of(sources), target)[1]

    def _begin(self, kind: str, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        copy = Copy(kind, source, target)
        self.copies.append(copy)
        if kind == "out" and self.fails_at == len([each for each in self.copies if each.kind == "out"]):
            copy.error = RuntimeError("device-side assert")
        if self.held:
            self._held.put(copy)
        else:
            copy.release()
        return target, copy


def _is_in(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it looks into the same memory."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def are_actions(tensor: torch.Tensor) -> bool:
    """Whether these are actions of `CountingEnv`, by their form."""
    return tensor.dtype == torch.int64 and tensor.ndim == 1


async def waited_for(copy: Copy) -> None:
    """Wait until somebody waits for a copy."""
    assert await in_thread(copy.asked.wait, 20)


async def watchmen_gone() -> None:
    """Wait for the threads that wait for copies on behalf of envs that are gone."""
    for thread in threading.enumerate():
        if thread.name == "aioenvs fences":
            await in_thread(thread.join, 20)


@asynccontextmanager
async def counting(
    face: Face,
    backend: FakeBackend,
    count: int = 2,
    each: Mapping[int, Mapping[str, Any]] | None = None,
    **options: Any,
) -> AsyncIterator[Any]:
    """Some `CountingEnv`s with results on a device, which have been reset.

    Args:
        face: Which class.
        backend: The device.
        count: How many.
        each: What some of them are told besides their number.
        **options: Of the class.
    """
    options["create_env_kwargs"] = numbered(count, each)
    async with face.open(count, CountingEnv, device=backend, **options) as env:
        await face.call(env.reset)
        yield env
