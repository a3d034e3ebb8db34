"""The rows that go along with a command and its answer, where both sides have a block of their own. Pure.

The parent's block has the rows of all envs, that of a worker those of its own only, so that a row is another one on
either side; what is sent is the bytes of the selected rows, leaf by leaf, in the order in which both sides look at
them. What comes first says what follows: the envs' turns which half is meant, and where they are which regions were
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.layout import (
    HALVES,
    IN_ROOT,
    INPUT,
    LATEST,
    NEXT,
    ROOT,
    STATUS,
    WRITE_HALF,
    WRITE_ROOT,
    Arrays,
    Family,
)
from aioenvs.engine.protocol import STEPS, Opcode

__all__ = ["RayRows"]

Rows = NDArray[np.intp]
Bytes = NDArray[np.uint8]
NOTHING: Bytes = np.zeros(0, np.uint8)


class _Part(NamedTuple):
    """Rows of one family."""

    arrays: Mapping[str, Arrays]
    rows: Rows
    takes_root: bool

    def by_half(self) -> Iterator[tuple[Mapping[str, str], Rows]]:
        """The regions to which envs write now, and the rows of these envs."""
        buffers = self.arrays[STATUS][WRITE_HALF][self.rows] & 1
        for number, half in enumerate(HALVES):
            if len(rows := self.rows[buffers == number]):
                yield half, rows

    def all_of(self, region: str, rows: Rows) -> Iterator[tuple[NDArray[Any], Rows]]:
        """These rows of all leaves of a region."""
        for array in self.arrays[region].values():
            yield array, rows


class RayRows:
    """Packs and unpacks what goes along with the commands to one worker, on either side.

    Args:
        envs: Those of the worker, by position.
        families: Of this side's block, whether they have other envs besides or not.
        arrays: Of each family, by region.
    """

    def __init__(self, envs: Sequence[int], families: Iterable[Family], arrays: Iterable[Mapping[str, Arrays]]) -> None:
        self._families = []
        for family, own in zip(families, arrays, strict=True):
            rows = {env: row for row, env in enumerate(family.envs)}
            hosted = [(position, rows[env]) for position, env in enumerate(envs) if env in rows]
            if hosted:
                self._families.append((own, hosted, family.metadata.takes_root))
        self._everything = self._choose(range(len(envs)))

    def _choose(self, positions: Sequence[int]) -> list[_Part]:
        chosen = frozenset(positions)
        parts = [
            (own, [row for position, row in hosted if position in chosen], takes_root)
            for own, hosted, takes_root in self._families
        ]
        return [_Part(own, np.array(rows, np.intp), takes_root) for own, rows, takes_root in parts if rows]

    def pack_command(self, opcode: Opcode, positions: Sequence[int]) -> Bytes:
        """Return the rows that envs need for a command; an empty selection means all."""
        return _packed(self._commanded(opcode, positions))

    def unpack_command(self, opcode: Opcode, positions: Sequence[int], data: Bytes) -> None:
        """Put that into the rows of this side."""
        _unpack(self._commanded(opcode, positions), data)

    def pack_answer(self, opcode: Opcode, positions: Sequence[int]) -> Bytes:
        """Return the rows that envs wrote for a command."""
        return _packed(self._answered(opcode, positions))

    def unpack_answer(self, opcode: Opcode, positions: Sequence[int], data: Bytes) -> None:
        """Put that into the rows of this side."""
        _unpack(self._answered(opcode, positions), data)

    def _commanded(self, opcode: Opcode, positions: Sequence[int]) -> Iterator[tuple[NDArray[Any], Rows]]:
        if opcode not in STEPS and opcode is not Opcode.RESET:
            return
        for part in self._choose(positions) if len(positions) else self._everything:
            yield part.arrays[STATUS][WRITE_HALF], part.rows
            if opcode in STEPS or part.takes_root:
                yield from part.all_of(INPUT, part.rows)
            if opcode is Opcode.RESET and part.takes_root:
                for half, rows in part.by_half():
                    yield from part.all_of(half[ROOT], rows)

    def _answered(self, opcode: Opcode, positions: Sequence[int]) -> Iterator[tuple[NDArray[Any], Rows]]:
        if opcode not in STEPS and opcode is not Opcode.RESET:
            return
        for part in self._choose(positions) if len(positions) else self._everything:
            status = part.arrays[STATUS]
            yield status[LATEST], part.rows
            for half, rows in part.by_half():
                begun = rows
                if opcode in STEPS:
                    yield from part.all_of(half[NEXT], rows)
                    begun = rows[(status[LATEST][rows] & 1 == IN_ROOT) | (status[WRITE_HALF][rows] & WRITE_ROOT != 0)]
                if len(begun):
                    yield from part.all_of(half[ROOT], begun)


def _packed(leaves: Iterable[tuple[NDArray[Any], Rows]]) -> Bytes:
    pieces = [array[_index(rows)].tobytes() for array, rows in leaves]
    return np.frombuffer(b"".join(pieces), np.uint8) if pieces else NOTHING


def _unpack(leaves: Iterable[tuple[NDArray[Any], Rows]], data: Bytes) -> None:
    begin = 0
    for array, rows in leaves:  # what is written here says what comes next
        shape = (len(rows), *array.shape[1:])
        end = begin + int(np.prod(shape)) * array.itemsize
        array[_index(rows)] = np.frombuffer(data[begin:end], array.dtype).reshape(shape)
        begin = end
    if begin != len(data):
        raise ValueError(f"expected {begin} bytes of rows, found {len(data)}")


def _index(rows: Rows) -> Any:
    """Rows in the quickest form that selects them."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows
