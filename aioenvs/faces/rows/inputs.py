"""Inputs of a step or a reset, checked before anything is sent: from a TensorDict to arrays for the rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.engine.adapters.base import CALLERS, ResetArguments
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.layout import INPUT, ROOT, EnvMetadata
from aioenvs.engine.rows import FamilyRows, Part, RowIndex, Rows, Values
from aioenvs.faces.batch_specs import EnvSpecs
from aioenvs.faces.rows.leaves import Bounds, EnvsOfFamily, InputLeaf, InputObjects, Place, check_fits
from aioenvs.specs import NonTensor, TensorSpec
from aioenvs.tensors.step_mdp import CONTROL
from aioenvs.tensors.storage import array_of
from aioenvs.tensors.trees import Key, Tree, non_tensor, objects_of, region_trees

HIDDEN = CONTROL | {"env_index"}  # what of a caller's root is not about the env


class FamilyInputs:
    """The requirements of all inputs of the envs of a family.

    Args:
        own: The family's rows.
        specs: Of one of its envs.
        metadata: What each of its envs says of itself.
        device: From where inputs may come, besides the CPU.
        ships: Whether inputs without a place in the block are sent to another process, rather than handed over.
    """

    def __init__(
        self,
        own: FamilyRows,
        specs: EnvSpecs,
        metadata: Sequence[EnvMetadata],
        device: torch.device | None,
        *,
        ships: bool,
    ) -> None:
        trees = region_trees(specs.output_spec, specs.input_spec)
        self.leaves = {region: trees[region].leaves for region in (INPUT, ROOT)}
        self.shows_root = own.family.metadata.shows_root
        self._spaces = [copy.deepcopy(each.specs.get("action", {})) for each in metadata]
        states = Tree.of(specs.full("state")).leaves
        self.fixed = [
            InputLeaf(
                key,
                "state" if key in states else "action",
                spec,
                Bounds.of([each.get(key) for each in self._spaces], len(spec.shape)),
                own.inputs.get(key),
                device,
                free=key in own.free_states,
                ships=ships,
            )
            for key, spec in self.leaves[INPUT].items()
            if not isinstance(spec, NonTensor)
        ]
        self.objects = [
            InputObjects(key, [each.get(key) for each in self._spaces], free=key in own.free_states)
            for key, spec in self.leaves[INPUT].items()
            if isinstance(spec, NonTensor)
        ]

    def random_objects(self, part: Part) -> list[Objects]:
        """For each env of a part samples of its action spaces without a fixed shape; see `BatchInputs`."""
        members = range(len(self._spaces)) if part.members is None else part.members.tolist()
        sampled: list[Objects] = [{} for _ in members]
        for each in self.objects:
            depth = self.leaves[INPUT][each.key].ndim
            for own, place in zip(sampled, members, strict=True):
                spaces = self._spaces[place]
                if each.key in spaces:
                    spaces[each.key].seed(int(torch.randint(2**31, ())))
                    own[each.key] = non_tensor(spaces[each.key].sample(), depth)
        return sampled


class _PartInputs:
    """The inputs of those envs of a batch that are of one family.

    Args:
        family: What is required of them.
        part: Their rows.
        trees: Where the leaves of each region are in a TensorDict of theirs.
    """

    def __init__(self, family: FamilyInputs, part: Part, trees: Mapping[str, Tree]) -> None:
        self.family = family
        self._part = part
        self._trees = trees
        self._batch = EnvsOfFamily(part.envs, part.members, trees[INPUT])

    def given(self, td: TensorDictBase, entries: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
        for leaf in self.family.fixed:
            yield from leaf.given(self._batch, td, entries).items()

    def check(
        self,
        td: TensorDictBase,
        entries: Mapping[str, Any],
        rows: RowIndex,
        fetched: Mapping[Any, torch.Tensor],
        arrived: bool,
    ) -> Values:
        batch, family = self._batch, self.family
        values: Values = {leaf.key: leaf.check(batch, td, entries, rows, fetched, arrived) for leaf in family.fixed}
        for each in family.objects:
            values[each.key] = each.check(batch, td, rows)
        if family.shows_root:
            values[CALLERS] = _roots(td)
        return values

    def check_arrived(self, values: Values) -> None:
        for leaf in self.family.fixed:
            leaf.check_arrived(self._batch, values[leaf.key])

    def check_root(self, td: TensorDictBase) -> None:
        own = self._part.own
        for region in (ROOT, INPUT) if own.family.metadata.takes_root else (ROOT,):
            leaves = self.family.leaves[region]
            if region == INPUT and own.free_states:
                leaves = {key: spec for key, spec in leaves.items() if key not in own.free_states}
            check_fits(td, self._trees[region], leaves, len(self._batch.envs), whole=region == INPUT)

    def store(
        self, td: TensorDictBase, rows: RowIndex, masks: Mapping[Key, torch.Tensor], latest: Callable[[], Values]
    ) -> dict[int, ResetArguments]:
        own, envs = self._part.own, self._batch.envs
        if not own.family.metadata.takes_root:
            return {}
        targets = self._part.targets(rows)
        # An env of which only a part is reset needs to know what the rest of it has.
        in_parts = any(mask[0].numel() > 1 and not mask.all() for mask in masks.values())
        former = latest() if in_parts else {}
        kept: list[Key] = []
        loose: Objects = {}
        for region in (INPUT, ROOT):
            for key, spec in self.family.leaves[region].items():
                if key in kept or key in loose:
                    continue
                value = self._known(td, region, key, spec)
                if region == INPUT and key in own.free_states and not self._fits(value, spec):
                    continue
                if value is None and region == ROOT:
                    value = former.get(key)
                if value is None:
                    continue
                if key in (own.inputs if region == INPUT else own.halves[0][region]):
                    array = array_of(value) if isinstance(value, torch.Tensor) else value
                    own.store(region, key, targets, array if rows is None else array[rows])
                    kept.append(key)
                else:
                    loose[key] = value
        loose.update((key, mask.numpy()) for key, mask in masks.items())  # envs without torch read them, too
        return {
            envs[row]: ResetArguments({}, tuple(kept), {key: value[row] for key, value in loose.items()})
            for row in self._batch.asked(rows)
        }

    def _fits(self, value: Any, spec: TensorSpec) -> bool:
        """Whether a value of all envs can be kept as it is; objects, and what varies, can in any case."""
        if isinstance(spec, NonTensor) or -1 in spec.shape:
            return True
        form = torch.Size([len(self._batch.envs), *spec.shape]), spec.dtype
        return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == form

    def _known(self, td: TensorDictBase, region: str, key: Key, spec: TensorSpec) -> Any:
        """Return a caller's values of all envs at a key; a list where sizes vary, None where one has nothing."""
        tree = self._trees[region]
        if -1 in spec.shape:
            return tree.get_each(td, key)
        return objects_of(tree, td, key) if isinstance(spec, NonTensor) else tree.get(td, key)


class BatchInputs:
    """The inputs of a batch of envs, brought to the form in which `Rows` takes them.

    Args:
        rows: The rows of the envs.
        families: What is required of the inputs of each part.
        trees: Where the leaves are, in a TensorDict of each part.
        is_lazy: Whether the TensorDicts of the batch are lazy stacks.
    """

    def __init__(
        self, rows: Rows, families: Sequence[FamilyInputs], trees: Sequence[Mapping[str, Tree]], *, is_lazy: bool
    ) -> None:
        self._rows = rows
        self._is_lazy = is_lazy
        parts = zip(families, rows.parts, trees, strict=True)
        self._parts = [_PartInputs(family, part, own) for family, part, own in parts]

    def _split(self, td: TensorDictBase, entries: Mapping[str, Any]) -> Sequence[tuple[TensorDictBase, Any]]:
        """Each part's share of a TensorDict, and its entries as far as they can be had as a whole."""
        if not self._is_lazy:
            return [(td, entries)]
        own = td.unbind(0)
        places = (part.places.tolist() for part in self._rows.parts)
        return [(LazyStackedTensorDict(*[own[place] for place in each], stack_dim=0), {}) for each in places]

    def elsewhere(
        self, td: TensorDictBase, entries: Mapping[str, Any], holds: Callable[[torch.Tensor], bool]
    ) -> dict[Any, torch.Tensor]:
        """The inputs that a device holds and the host has to have, by the number of the part and their place in it.

        Args:
            td: What the step was given.
            entries: Its entries.
            holds: Whether the device has a tensor.
        """
        return {
            (number, place): value
            for number, (part, own) in enumerate(zip(self._parts, self._split(td, entries), strict=True))
            for place, value in part.given(*own)
            if isinstance(value, torch.Tensor) and holds(value)
        }

    def check(
        self,
        td: TensorDictBase,
        entries: Mapping[str, Any],
        rows: RowIndex,
        fetched: Mapping[Any, torch.Tensor] = {},
        *,
        arrived: bool = True,
    ) -> list[Values]:
        """The whole batch of inputs, checked; nothing is written yet.

        Args:
            td: What the step was given.
            entries: Its entries.
            rows: Which envs are to step; what the others' values are does not matter.
            fetched: Those of them that were `elsewhere`.
            arrived: Whether these are here; else `check_arrived` is to be called when they are.

        Raises:
            SpecMismatchError: If a key is missing, or a value has the wrong shape, dtype, device or range.
        """
        shares: list[dict[Any, torch.Tensor]] = [{} for _ in self._parts]
        for (number, place), value in fetched.items():
            shares[number][place] = value
        if not self._is_lazy:
            return [self._parts[0].check(td, entries, rows, shares[0], arrived)]
        found = zip(self._parts, self._split(td, entries), self._rows.local(rows), shares, strict=True)
        return [part.check(*own, local, share, arrived) for part, own, (_, local), share in found]

    def check_arrived(self, values: Sequence[Values]) -> None:
        """Check what of inputs could not be looked at before, for all envs.

        Raises:
            SpecMismatchError: If a value has the wrong range.
        """
        for part, own in zip(self._parts, values, strict=True):
            part.check_arrived(own)

    def check_root(self, td: TensorDictBase) -> None:
        """Refuse root entries that rows which are not asked could not keep, or envs that are reset could not take.

        Raises:
            SpecMismatchError: If one has another kind, shape or dtype than the envs' own.
        """
        for part, (own, _) in zip(self._parts, self._split(td, {}), strict=True):
            part.check_root(own)

    def store(
        self, td: TensorDictBase, rows: RowIndex, masks: Mapping[Key, torch.Tensor], latest: Callable[[int], Values]
    ) -> dict[int, ResetArguments]:
        """Store what a caller knows of envs that will be reset, where they ask for it.

        Args:
            td: What the reset was given.
            rows: Which envs are reset.
            masks: Which of their parts are, if not all.
            latest: The latest values of all envs of a part, by its number.

        Returns:
            What cannot be stored, by env.
        """
        found: dict[int, ResetArguments] = {}
        splits = zip(self._parts, self._split(td, {}), self._rows.local(rows), strict=True)
        for number, (part, (own, _), (of, local)) in enumerate(splits):
            shares = {key: mask[of.places] for key, mask in masks.items()} if self._is_lazy else masks
            found |= part.store(own, local, shares, lambda number=number: latest(number))  # type: ignore[misc]
        return found

    def random_objects(self) -> list[Objects]:
        """For each env samples of its action spaces without a fixed shape, from generators seeded by torch's.

        They are non-tensor data, as TensorDicts of one env have them.
        """
        parts = zip(self._parts, self._rows.parts, strict=True)
        return self._rows.joined([own.family.random_objects(part) for own, part in parts])


def _roots(td: TensorDictBase) -> Sequence[Any]:
    """For each env the root that the caller has of it: a plain dict where there are but tensors, which is quicker."""
    own = {name: value for name, value in td.items() if name not in HIDDEN} if type(td) is TensorDict else {}
    if own and all(type(value) is torch.Tensor for value in own.values()):
        return [
            dict(zip(own, row, strict=True)) for row in zip(*(value.unbind(0) for value in own.values()), strict=True)
        ]
    hidden = HIDDEN.intersection(td.keys())
    roots: Sequence[Any] = (td.exclude(*hidden) if hidden else td).unbind(0)
    return roots
