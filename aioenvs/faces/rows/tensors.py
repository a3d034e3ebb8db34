"""Tensors of what the rows of envs hold: views of its copies, or of where it is; on the host or on another device."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aioenvs.engine.double_buffer import DoubleBuffer
from aioenvs.engine.layout import HALVES, NEXT, ROOT, Arrays, Family
from aioenvs.engine.rows import FamilyRows, Lent, Rows, Values
from aioenvs.faces.batch_specs import EnvSpecs
from aioenvs.specs import TensorSpec
from aioenvs.tensors.device import Transfer, typed
from aioenvs.tensors.trees import Key, Tree, copied, is_loose, region_trees


class FamilyTensors:
    """Makes tensors of the values of the envs of one family.

    Args:
        family: The family.
        arrays: Its arrays.
        buffers: In which half its envs have and write their values.

    Attributes:
        specs: Of one of its envs.
        trees: Where the leaves of each region are in a TensorDict of one env.
        rows: The rows of its envs.
    """

    def __init__(self, family: Family, arrays: dict[str, Arrays], buffers: DoubleBuffer) -> None:
        self.specs = EnvSpecs.of(family.metadata)
        self.trees = region_trees(self.specs.output_spec, self.specs.input_spec)
        states = Tree.of(self.specs.full("state")).leaves if family.metadata.free_states else {}
        root = self.trees[ROOT]
        others = Tree.of(self.specs.full("observation"), self.specs.full("reward")).leaves
        self.rows = FamilyRows(
            family,
            arrays,
            buffers,
            free_states=frozenset(states),
            observed_states=frozenset(
                key
                for key, spec in states.items()
                if (own := root.leaves.get(key)) is not None and (own.shape, own.dtype) == (spec.shape, spec.dtype)
            ),
            flags=frozenset(key for key in root.entries if key not in others),
            fill=functools.partial(_filled, self.trees[NEXT].leaves),  # which does not know this, as that knows it
        )
        # Leaves that are kept under another dtype, since numpy does not have theirs.
        self._foreign = {
            region: [
                (key, dtype)
                for key, array in self.rows.halves[0][region].items()
                if (dtype := self.trees[region].leaves[key].dtype) is not torch.from_numpy(array[:0]).dtype
            ]
            for region in (NEXT, ROOT)
        }
        self._loose = {
            region: [(key, self.trees[region].leaves[key]) for key in self.rows.loose[region]]
            for region in (NEXT, ROOT)
        }

    def of(self, region: str, values: Values, known: tuple[Values, Mapping[Key, Any]] | None = None) -> dict[Key, Any]:
        """Return tensors of the values of a region, or lists of objects where there can be none.

        Args:
            region: Which.
            values: Arrays, and lists of one object for each env.
            known: Values of which the tensors are there already.
        """
        loose = self._loose[region]
        if loose:
            values = dict(values)
            objects = [(key, spec, values.pop(key)) for key, spec in loose if key in values]
        if known is None:
            tensors: dict[Key, Any] = {key: torch.from_numpy(array) for key, array in values.items()}
        else:
            arrays, own = known
            tensors = {
                key: own[key] if arrays.get(key) is array else torch.from_numpy(array) for key, array in values.items()
            }
        for key, dtype in self._foreign[region]:
            if key in tensors and tensors[key].dtype is not dtype:
                tensors[key] = tensors[key].view(dtype)
        if loose:
            for key, spec, found in objects:
                if is_loose(spec):
                    tensors[key] = [copied(value) for value in found]
                else:  # envs that have not said anything yet have zeros
                    tensors[key] = torch.stack([spec.zero() if value is None else value for value in found])
        return tensors


def _filled(leaves: Mapping[Key, TensorSpec], key: Key, value: Any, filling: float) -> Any:
    """Return an object of the kind that is at a key, full of one number."""
    return torch.full_like(leaves[key].zero() if value is None else value, filling)


class _LentTensors(dict[Key, Any]):
    """Tensors that are where the envs wrote them, all of one region of one half.

    Attributes:
        half: In which half.
        region: In which region of it.
    """

    def __init__(self, tensors: Mapping[Key, Any], half: int, region: str) -> None:
        super().__init__(tensors)
        self.half = half
        self.region = region


class _HalfBytes:
    """The regions of one half as one run of bytes, and what is where in it."""

    def __init__(self, own: FamilyTensors, half: int) -> None:
        family, memory = own.rows.family, own.rows.memory
        regions = {region: family.layout.regions[name] for region, name in HALVES[half].items()}
        self._first = regions[NEXT].offset
        self._ends = {region: each.offset - self._first + each.nbytes for region, each in regions.items()}
        self._bytes = torch.from_numpy(memory[self._first : self._first + max(self._ends.values())])
        count = len(family.envs)
        self._plans = {
            region: [
                (item.leaf.key, each.offset - self._first + item.offset, dtype, torch.Size([count, *item.leaf.shape]))
                for item in each.places
                if (dtype := own.trees[region].leaves[item.leaf.key].dtype) is not None
            ]
            for region, each in regions.items()
        }

    def upto(self, region: str) -> torch.Tensor:
        """The bytes from the beginning of the half to the end of a region."""
        return self._bytes[: self._ends[region]]

    def of(self, region: str) -> torch.Tensor:
        """The bytes of a region alone, which are the last of the half or the first."""
        return self._bytes[: self._ends[region]] if region == NEXT else self._bytes[self._ends[NEXT] :]

    def values(self, region: str, copy: torch.Tensor, *, alone: bool) -> dict[Key, torch.Tensor]:
        """Return the tensors of a region in a copy of these bytes.

        Args:
            region: Which.
            copy: Of what `of` has if `alone`, else of what `upto` has.
            alone: See `copy`.
        """
        base = self._ends[NEXT] if alone and region == ROOT else 0
        return {key: typed(copy, offset - base, dtype, shape) for key, offset, dtype, shape in self._plans[region]}


class BatchTensors:
    """Makes tensors of the values of a batch: one for each key, or for each env its own.

    Args:
        rows: The rows of the batch.
        families: What makes tensors for each part.
        is_lazy: Whether each env has its own.
    """

    def __init__(self, rows: Rows, families: Sequence[FamilyTensors], *, is_lazy: bool) -> None:
        self._rows = rows
        self._families = families
        self._is_lazy = is_lazy
        self._lent: dict[tuple[int, int, str], dict[Key, Any]] = {}

    def of(self, region: str, values: Sequence[Values]) -> Any:
        """Return the tensors of a region, of all parts: by key, or a list of such for each env if lazy."""
        parts = [self._part(number, region, own) for number, own in enumerate(values)]
        return self._joined(parts) if self._is_lazy else parts[0]

    def step(self, following: Sequence[Values], root: Sequence[Values] | None) -> tuple[Any, Any]:
        """Return the tensors of what came of a step, and of the root for the next one, if there is one."""
        lent = type(following[0]) is Lent or (root is not None and type(root[0]) is Lent)
        if not self._is_lazy and not lent:
            family, own = self._families[0], following[0]
            tensors = family.of(NEXT, own)
            return tensors, None if root is None else family.of(ROOT, root[0], (own, tensors))
        parts = [self._part(number, NEXT, own) for number, own in enumerate(following)]
        roots = None
        if root is not None:
            known = zip(following, parts, strict=True)
            roots = [
                self._part(number, ROOT, own, before)
                for number, (own, before) in enumerate(zip(root, known, strict=True))
            ]
        if not self._is_lazy:
            return parts[0], None if roots is None else roots[0]
        return self._joined(parts), None if roots is None else self._joined(roots)

    def _part(
        self, number: int, region: str, values: Values, known: tuple[Values, dict[Key, Any]] | None = None
    ) -> dict[Key, Any]:
        family = self._families[number]
        if type(values) is not Lent:
            return family.of(region, values, known)
        place = number, values.half, values.region
        tensors = self._lent.get(place)
        if tensors is None:
            tensors = family.of(region, values)
            # Loose values are other objects each time, and tensors made in inference mode are of no use outside of it.
            if not family.rows.loose[region] and not torch.is_inference_mode_enabled():
                self._lent[place] = tensors
        return _LentTensors(tensors, values.half, values.region)

    def _joined(self, parts: Sequence[Mapping[Key, Any]]) -> list[dict[Key, Any]]:
        """The values of each env, in the order of the batch."""
        joined: list[dict[Key, Any]] = [{} for _ in self._rows.envs]
        for part, own in zip(self._rows.parts, parts, strict=True):
            for key, value in own.items():
                for row, place in enumerate(part.places.tolist()):
                    joined[place][key] = value[row]
        return joined

    def place(self, transfer: Transfer, following: Any, root: Any) -> tuple[Any, Any]:
        """Bring results to the device of a transfer.

        What is lent by all envs of the family goes as it is in the block, in one run, with a fence before its half;
        anything else in one copy of what it has.

        Args:
            transfer: Where to.
            following: What came of a step.
            root: What came of it for the next one, or of a reset.
        """
        lent = [each for each in (following, root) if type(each) is _LentTensors]
        part = self._rows.parts[0]
        if not lent or part.members is not None or any(part.own.loose[each.region] for each in lent):
            return placed(transfer, following, root)
        half = lent[0].half
        alone, run = len(lent) == 1, self._bytes[half]
        copy, fence = transfer.bring(run.of(lent[0].region) if alone else run.upto(ROOT))
        part.own.buffers.guard(part.all, half, fence)
        moved = {id(each): run.values(each.region, copy, alone=alone) for each in lent}
        arrived = {id(own[key]): moved[id(own)][key] for own in lent for key in own}
        results = [
            None if each is None else {key: arrived.get(id(value), value) for key, value in each.items()}
            for each in (following, root)
        ]
        return results[0], results[1]

    @functools.cached_property
    def _bytes(self) -> list[_HalfBytes]:
        return [_HalfBytes(self._families[0], half) for half in range(len(HALVES))]


def placed(transfer: Transfer, *results: Any) -> tuple[Any, ...]:
    """Results on the device of a transfer: values, lists of values with one entry per env, or None."""
    tensors: list[torch.Tensor] = []
    for each in results:
        for values in each if isinstance(each, list) else [each or {}]:
            for value in values.values():
                tensors += [item for item in _items(value) if isinstance(item, torch.Tensor)]
    if not tensors:
        return results
    moved = {id(old): new for old, new in zip(tensors, transfer.place(tensors), strict=True)}
    return tuple(_exchanged(each, moved) for each in results)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _exchanged(result: Any, moved: Mapping[int, torch.Tensor]) -> Any:
    """A result with other tensors, by the ids of what they were."""
    if isinstance(result, list):
        return [_exchanged(values, moved) for values in result]
    if result is None:
        return None
    return {
        key: [moved.get(id(item), item) for item in value] if isinstance(value, list) else moved.get(id(value), value)
        for key, value in result.items()
    }
