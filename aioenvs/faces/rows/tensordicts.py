"""TensorDicts made of the rows of envs: dense ones, and lazy stacks where values cannot be stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.engine.layout import NEXT, ROOT
from aioenvs.engine.rows import RowIndex
from aioenvs.envs.spec_properties import SpecIndex
from aioenvs.faces.batch_specs import EnvSpecs
from aioenvs.specs import NonTensor
from aioenvs.tensors.step_mdp import CONTROL, Entries, filled, flat_key, next_root, overlaid
from aioenvs.tensors.trees import Key, Tree, copied, nested_key, non_tensor, objects_of, plain

PLAIN = frozenset((torch.Tensor,))
Values = dict[Key, Any]  # a tensor for all envs, or a list of objects, one per env


class Results(Protocol):
    """Assembles the TensorDicts that `reset`, `step` and `step_and_maybe_reset` return."""

    def after_reset(self, td: TensorDictBase | None, rows: RowIndex, values: Any) -> TensorDictBase:
        """The root after a reset of some rows, with the other entries of `td`."""

    def joined(self, values: Sequence[Any]) -> Any:
        """The values of envs each of which was exchanged with alone."""

    def keep_others(self, td: TensorDictBase, rows: NDArray[np.intp], values: Any) -> Any:
        """Give all rows but these the values that `td` has at its root, where it has any."""

    def after_step(self, td: TensorDictBase, entries: Entries, following: Any, root: Any) -> TensorDictBase | None:
        """Put a step's outcome under `next`, where other entries that are there already stay.

        Args:
            td: What the step was given.
            entries: Its entries.
            following: The outcome.
            root: The root for the next step, None if nobody wants it.

        Returns:
            The root for the next step, with the other entries of this one; None if nobody wants it.
        """


class _Assembly:
    """The base of dense and lazy results: which entries of one step the next one does not get."""

    def __init__(self, specs: Sequence[EnvSpecs], device: torch.device | None) -> None:
        self._device = device
        indices = [SpecIndex(each.output_spec, each.input_spec) for each in specs]
        self._excluded = tuple({key for index in indices for key in index.left_behind})
        self._masks = (*{"_reset", *(key for index in indices for key in index.reset_keys)}, "_step", "next")

    def _placed(self, td: TensorDictBase) -> TensorDictBase:
        if self._device is None:
            return td
        if td.device == self._device:
            return td
        placed: TensorDictBase = td.to(self._device)
        return placed

    def _next_root(self, td: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        """The next root, of a step's result and of what is known of its observations and flags."""
        return overlaid(next_root(td, self._excluded), root)

    def _others(self, td: TensorDictBase) -> TensorDictBase:
        """Return the entries that are no answer to this request; nodes are new, and the caller's stay as they are."""
        return td.exclude(*self._masks).copy()


class DenseResults(_Assembly):
    """Results with one tensor for each key, for envs of one family.

    Args:
        specs: Of each env.
        batch_size: Of the batch.
        trees: Where the leaves are in a TensorDict of the batch.
        device: Where results go.
    """

    def __init__(
        self, specs: EnvSpecs, batch_size: torch.Size, trees: Mapping[str, Tree], device: torch.device | None
    ) -> None:
        super().__init__([specs], device)
        self._batch_size = batch_size
        self._trees = trees
        inputs, outputs = ({name for key in self._excluded if (name := flat_key(key)[0])}, set(trees[ROOT].leaves))
        # Where everything has the batch size of the root, and no node holds both what stays and what does not, names of
        # the first level say all there is to say, and no TensorDict but the result need be made.
        self._is_simple = (
            len(self._batch_size) == 1
            and all(tree.is_flat for tree in trees.values())
            and not any(isinstance(spec, NonTensor) and spec.ndim != 1 for spec in trees[NEXT].leaves.values())
            and inputs.isdisjoint(key[0] for key in outputs)
            and {nested_key(key) for key in trees[NEXT].leaves.keys() - outputs}.issubset(self._excluded)
            and all(mask in CONTROL for mask in self._masks)
        )
        self._left_behind = frozenset(CONTROL | inputs)
        # Where besides every leaf is a tensor that stays where it is, the names of the leaves are all that is needed.
        self._is_plain = self._is_simple and device is None
        for spec_key, spec in [item for tree in trees.values() for item in tree.leaves.items()]:
            self._is_plain = self._is_plain and len(spec_key) == 1 and not isinstance(spec, NonTensor)

    def _of(self, entries: Entries, names: list[str | None] | None = None) -> TensorDictBase:
        # What the envs answered has the right shapes, so tensordict need not check it again.
        if not PLAIN.issuperset(map(type, entries.values())):
            return self._placed(TensorDict(entries, batch_size=self._batch_size, names=names))
        device = self._device
        if device is not None and any(value.device != device for value in entries.values()):
            return self._placed(TensorDict._new_unsafe(entries, batch_size=self._batch_size, names=names))
        return TensorDict._new_unsafe(entries, batch_size=self._batch_size, device=device, names=names)

    def _build(self, region: str, values: Values) -> TensorDictBase:
        return self._placed(self._trees[region].build(values))

    def after_reset(self, td: TensorDictBase | None, rows: RowIndex, values: Values) -> TensorDictBase:
        if td is not None and rows is not None:
            values = self.keep_others(td, rows, values)
        if not self._is_simple or isinstance(td, LazyStackedTensorDict):
            root = self._build(ROOT, values)
            return root if td is None else overlaid(self._others(td), root)
        entries = _nest(values)
        if td is None:
            return self._of(entries)
        return self._of(filled(entries, dict(td.items()), CONTROL), td._maybe_names())

    def joined(self, values: Sequence[Values]) -> Values:
        joined: Values = {}
        for key, first in values[0].items():
            parts = [own[key] for own in values]
            is_tensor = isinstance(first, torch.Tensor)
            joined[key] = torch.cat(parts) if is_tensor else [value for part in parts for value in part]
        return joined

    def keep_others(self, td: TensorDictBase, rows: NDArray[np.intp], values: Values) -> Values:
        mask = torch.ones(td.batch_size[0], dtype=torch.bool)
        mask[rows] = False
        kept = dict(values)
        for key in self._trees[ROOT].leaves:
            value, tree = values.get(key), self._trees[ROOT]
            is_tensor = isinstance(value, torch.Tensor)
            given = tree.get(td, key) if is_tensor else objects_of(tree, td, key)
            if given is None or value is None:
                continue
            if isinstance(value, torch.Tensor):
                shape = (-1, *[1] * (value.ndim - 1))
                kept[key] = torch.where(mask.reshape(shape).to(value.device), given.to(value.device), value)
            else:
                olds = zip(given, value, mask, strict=True)
                kept[key] = [copied(old) if keep else new for old, new, keep in olds]
        return kept

    def after_step(
        self, td: TensorDictBase, entries: Entries, following: Values, root: Values | None
    ) -> TensorDictBase | None:
        preset = entries.get("next")
        if self._is_plain and preset is None and type(td) is TensorDict and td.device is None and not td._has_names():
            # Nothing has to be looked at: these are tensors of one level, which stay where they are.
            make, size = TensorDict._new_unsafe, self._batch_size
            td._set_str(
                "next",
                make({key[0]: value for key, value in following.items()}, batch_size=size, device=None, names=None),
                inplace=False,
                validated=True,
            )
            if root is None:
                return None
            own = {key[0]: value for key, value in root.items()}
            for name, value in entries.items():
                if name not in own and name not in self._left_behind:
                    own[name] = value
            return make(own, batch_size=size, device=None, names=None)
        if not self._is_simple or isinstance(td, LazyStackedTensorDict):
            outcome = self._build(NEXT, following)
            td.set("next", outcome if preset is None else overlaid(preset, outcome))
            return None if root is None else self._next_root(td, self._build(ROOT, root))
        others = {} if preset is None else dict(preset.items())
        outcome = self._of(filled(_nest(following), others))
        # Where nothing of the outcome has to change to fit in, tensordict need not look whether it does.
        if type(td) is TensorDict and not td._has_names() and td.device in (None, outcome.device):
            td._set_str("next", outcome, inplace=False, validated=True)
        else:
            td.set("next", outcome)
        if root is None:
            return None
        left_behind = self._left_behind
        return self._of(filled(filled(_nest(root), others, left_behind), entries, left_behind), td._maybe_names())


class LazyResults(_Assembly):
    """Results that are a lazy stack of one TensorDict for each env.

    Args:
        specs: Of each env.
        trees: Where the leaves are in a TensorDict of each env.
        device: Where results go.
    """

    def __init__(
        self, specs: Sequence[EnvSpecs], trees: Sequence[Mapping[str, Tree]], device: torch.device | None
    ) -> None:
        super().__init__(list({id(each): each for each in specs}.values()), device)
        self._trees = trees

    def _build(self, region: str, values: Sequence[Values]) -> LazyStackedTensorDict:
        tds = (trees[region].build(own) for trees, own in zip(self._trees, values, strict=True))
        return LazyStackedTensorDict(*[self._placed(td) for td in tds], stack_dim=0)

    def after_reset(self, td: TensorDictBase | None, rows: RowIndex, values: Sequence[Values]) -> TensorDictBase:
        if td is None:
            return self._build(ROOT, values)
        if rows is not None:
            values = self.keep_others(td, rows, values)
        return self._joined(self._others(td), self._build(ROOT, values))

    def joined(self, values: Sequence[Any]) -> list[Values]:
        # Alone an env may have been no lazy stack.
        return [own[0] if isinstance(own, list) else {key: value[0] for key, value in own.items()} for own in values]

    def keep_others(self, td: TensorDictBase, rows: NDArray[np.intp], values: Sequence[Values]) -> list[Values]:
        kept = []
        for row, (own, trees, value) in enumerate(zip(td.unbind(0), self._trees, values, strict=True)):
            given = {} if row in rows else {key: copied(plain(old)) for key, old in trees[ROOT].read(own).items()}
            kept.append({**value, **given})
        return kept

    def after_step(
        self, td: TensorDictBase, entries: Entries, following: Sequence[Values], root: Sequence[Values] | None
    ) -> TensorDictBase | None:
        preset = entries.get("next")
        outcome = self._build(NEXT, following)
        td.set("next", outcome if preset is None else self._joined(preset, outcome))
        if root is None:
            return None
        return self._joined(next_root(td, self._excluded), self._build(ROOT, root))

    def _joined(self, others: TensorDictBase, new: LazyStackedTensorDict) -> TensorDictBase:
        """Return the new entries, and those that the others have besides."""
        pairs = zip(others.unbind(0), new.tensordicts, strict=True)
        return LazyStackedTensorDict(*[overlaid(old, own) for old, own in pairs], stack_dim=0)


def _nest(values: Values) -> Entries:
    """Turn `{("a", "b"): tensor}` into `{"a": {"b": tensor}}`."""
    nested: Entries = {}
    for key, value in values.items():
        entry = value if type(value) is torch.Tensor else non_tensor(value, 1)
        if len(key) == 1:
            nested[key[0]] = entry
            continue
        branch = nested
        for name in key[:-1]:
            branch = branch.setdefault(name, {})
        branch[key[-1]] = entry
    return nested
