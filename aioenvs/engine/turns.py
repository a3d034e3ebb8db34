"""Which of its two slots an env writes next, and which one somebody still looks at. Pure: no I/O, no asyncio.

Results that are *lent* are looked at where the env wrote them, rather than copied. Its next command then writes to the
other slot; the one after that may write over them:

    command        1: lends   2          3
    writes to      first      second     first
    lent                      the first

What is not lent goes to the first slot, so that all envs have their values in the same one again soon after some had
them in another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.metadata import WHOLE

__all__ = ["Turns"]

Bytes = NDArray[np.uint8]


class Turns:
    """The turns of the envs of one family; rows are those of its arrays.

    Args:
        where: Where the latest values of each are; the envs write it.
        turn: Where each writes next.

    Attributes:
        plain: Whether all is in the first slot, and nothing is lent; then there is nothing to be looked up.
    """

    def __init__(self, where: Bytes, turn: Bytes) -> None:
        self.plain = True
        self._where = where
        self._turn = turn
        self._lent = np.zeros(len(turn), np.bool_)

    def decide(self, rows: Any, *, lends: bool = False, whole: bool = False) -> None:
        """Say where the next command of some envs writes, none of which is at work; it is about to be sent.

        Args:
            rows: Which envs, in a form that arrays take as an index.
            lends: Whether the results are to be lent: then all write to the same slot, if they can.
            whole: Whether a step writes the root, too, also where there is no reset.
        """
        if self.plain and not lends:
            return
        slots, lent = self._turn[rows] & 1, self._lent[rows]
        slots[~lent] = slots[lent][0] if lends and lent.any() else 0
        self._turn[rows] = slots | (WHOLE if whole else 0)
        self._lent[rows] = False
        self.plain = not (lends or self._lent.any() or self._turn.any() or (self._where > 1).any())

    def lend(self, rows: Any) -> None:
        """The results of these envs are lent: what comes next goes to the other slot."""
        self._turn[rows] = (self._turn[rows] & 1) ^ 1
        self._lent[rows] = True

    def slot(self, rows: Any) -> int | None:
        """In which slot the latest values of these envs are; None if not all are in the same."""
        slots = self.slots(rows)
        first = int(slots[0])
        return first if (slots == first).all() else None

    def slots(self, rows: Any) -> Bytes:
        """In which slot each of these envs has its latest values."""
        slots: Bytes = self._where[rows] >> 1
        return slots

    def target(self, rows: Any) -> Bytes:
        """To which slot each of these envs writes next."""
        target: Bytes = self._turn[rows] & 1
        return target
