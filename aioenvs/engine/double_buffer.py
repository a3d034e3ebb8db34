"""Which of its two halves an env writes next, and which one somebody still looks at. Pure: no I/O, no asyncio.

Results that are *lent* are looked at where the env wrote them, rather than copied. Its next command then writes to the
other half; the one after that may write over them:

    command        1: lends   2          3
    writes to      first      second     first
    lent                      the first

A half may also be read by something else than a caller, such as a copy to another device: a `Fence` then stands before
it, and a command that would write there waits until it has passed.

What is not lent goes to the first half, so that all envs have their values in the same one again soon after some had
them in another.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.layout import WRITE_ROOT

__all__ = ["DoubleBuffer", "Fence"]

Bytes = NDArray[np.uint8]


class Fence(Protocol):
    """Something that is done with memory at some time, and no worker's doing."""

    def done(self) -> bool:
        """Whether the copy is done; at once."""

    def wait(self) -> None:
        """Wait until it is, in any thread, while others run."""


class DoubleBuffer:
    """The turns of the envs of one family; rows are those of its arrays.

    Args:
        where: Where the latest values of each are; the envs write it.
        write_half: Where each writes next.

    Attributes:
        plain: Whether all is in the first half, and nothing is lent; then there is nothing to be looked up.
    """

    def __init__(self, where: Bytes, write_half: Bytes) -> None:
        self.plain = True
        self._where = where
        self._write_half = write_half
        self._lent = np.zeros(len(write_half), np.bool_)
        self._guarded: list[tuple[int, NDArray[np.bool_], Fence]] = []

    def decide(self, rows: Any, *, lends: bool = False, whole: bool = False) -> None:
        """Say where the next command of some envs writes, none of which is at work; it is about to be sent.

        Args:
            rows: Which envs, in a form that arrays take as an index.
            lends: Whether the results are to be lent: then all write to the same half, if they can.
            whole: Whether a step writes the root, too, also where there is no reset.
        """
        if self.plain and not lends:
            return
        halves, lent = self._write_half[rows] & 1, self._lent[rows]
        halves[~lent] = halves[lent][0] if lends and lent.any() else 0
        self._write_half[rows] = halves | (WRITE_ROOT if whole else 0)
        self._lent[rows] = False
        self.plain = not (lends or self._lent.any() or self._write_half.any() or (self._where > 1).any())

    def lend(self, rows: Any) -> None:
        """The results of these envs are lent: what comes next goes to the other half."""
        self.plain = False  # others may have found it so while these were at work
        self._write_half[rows] = (self._write_half[rows] & 1) ^ 1
        self._lent[rows] = True

    def guard(self, rows: Any, half: int, fence: Fence) -> None:
        """Let nobody write to this half of these envs before the fence has passed."""
        self._guarded = [*self.standing(), (half, self._marked(rows), fence)]

    @property
    def guarded(self) -> bool:
        """Whether there may be a fence anywhere."""
        return bool(self._guarded)

    def standing(self) -> list[tuple[int, NDArray[np.bool_], Fence]]:
        """The fences that have not passed: of which half, and of which envs."""
        return [guarded for guarded in self._guarded if not guarded[2].done()]

    def in_use(self, rows: Any) -> list[Fence]:
        """The fences that the next command to these envs has to wait for.

        What is lent says where that goes; where nothing is, it is yet to be decided, and so may be either half.
        """
        asked = self._marked(rows)
        self._guarded = self.standing()
        return [
            fence
            for half, envs, fence in self._guarded
            if (envs & asked & (~self._lent | (self._write_half & 1 == half))).any()
        ]

    def _marked(self, rows: Any) -> NDArray[np.bool_]:
        marked = np.zeros(len(self._write_half), np.bool_)
        marked[rows] = True
        return marked

    def half(self, rows: Any) -> int | None:
        """In which half the latest values of these envs are; None if not all are in the same."""
        halves = self.halves(rows)
        first = int(halves[0])
        return first if (halves == first).all() else None

    def halves(self, rows: Any) -> Bytes:
        """In which half each of these envs has its latest values."""
        halves: Bytes = self._where[rows] >> 1
        return halves

    def target(self, rows: Any) -> Bytes:
        """To which half each of these envs writes next."""
        target: Bytes = self._write_half[rows] & 1
        return target
