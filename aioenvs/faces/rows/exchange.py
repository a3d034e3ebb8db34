"""Between the pool's arrays and tensors: what a request carries in, and what a result carries out.

What leaves here does not look into the shared block, unless it is lent: a whole region is copied once, as bytes, and
its tensors are views of that copy; some rows are copied leaf by leaf. What travels as an object comes as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from aioenvs.engine.adapters.base import CALLERS, ResetArguments
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.layout import INPUT, NEXT, ROOT, Arrays
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.faces.rows.inputs import InputLeaf, InputObjects, Inputs, Rows, check_fits, selector
from aioenvs.faces.rows.reader import Ledger, Lent, Reader
from aioenvs.specs import NonTensor, TensorSpec
from aioenvs.tensors.device import Transfer
from aioenvs.tensors.step_mdp import CONTROL
from aioenvs.tensors.storage import array_of
from aioenvs.tensors.trees import Key, Tree, copied, is_loose, objects_of

__all__ = ["Exchange", "Rows", "Values"]

HIDDEN = CONTROL | {"env_index"}  # what of a caller's root is not about the env
Values = dict[Key, Any]  # a tensor for all envs, or a list of objects, one per env


class Exchange:
    """Reads and writes the rows of some envs of one family.

    Args:
        ledger: The family.
        members: Which of its envs, by their place in it, in the order of the batch; None for all.
        trees: Where the leaves are in a TensorDict of the batch.
        device: From where inputs may come, besides the CPU.
        ships: Whether inputs without a place in the block are sent to another process, rather than handed over.
    """

    def __init__(
        self,
        ledger: Ledger,
        members: Rows,
        trees: Mapping[str, Tree],
        device: torch.device | None,
        *,
        ships: bool = False,
    ) -> None:
        family = ledger.family
        self._ledger = ledger
        self._members = members
        self._all = selector(members)
        self._trees = trees
        self._device = device
        self._ships = ships
        self._buffer = ledger.buffers
        self.envs = family.envs if members is None else tuple(family.envs[member] for member in members)
        self._places = range(len(self.envs)) if members is None else members.tolist()
        self._loose = family.metadata.objects
        self._shows_root = family.metadata.shows_root
        self._loose_inputs = [*self._loose[INPUT], CALLERS] if self._shows_root else [*self._loose[INPUT]]
        self._rewards = family.metadata.reward_keys
        self._reader = Reader(ledger, members)
        self._lent: dict[tuple[int, str], Lent] = {}

    @functools.cached_property
    def _inputs(self) -> list[InputLeaf]:
        tree, places, bounds = self._trees[INPUT], self._ledger.inputs, self._ledger.bounds
        states = Tree.of(self._ledger.specs.full("state")).leaves
        return [
            InputLeaf(
                key,
                "state" if key in states else "action",
                self.envs,
                spec,
                tree,
                None if (own := bounds[key]) is None else own.select(self._members),
                places.get(key),
                self._device,
                free=key in self._ledger.free_states,
            )
            for key, spec in self._ledger.trees[INPUT].leaves.items()
            if not isinstance(spec, NonTensor)
        ]

    @functools.cached_property
    def _input_objects(self) -> list[InputObjects]:
        tree, spaces = self._trees[INPUT], [self._ledger.spaces[place] for place in self._places]
        return [
            InputObjects(key, self.envs, tree, [own.get(key) for own in spaces], free=key in self._ledger.free_states)
            for key in self._ledger.input_objects
        ]

    # -- in ---------------------------------------------------------------------------------------------

    def elsewhere(
        self, td: TensorDictBase, entries: Mapping[str, Any], holds: Callable[[torch.Tensor], bool]
    ) -> dict[Any, torch.Tensor]:
        """The inputs that a device holds and the host has to have: all but objects that are handed over as they are.

        Args:
            td: What the step was given.
            entries: Its entries.
            holds: Whether the device has a tensor.
        """
        found = (item for leaf in self._inputs for item in leaf.given(td, entries, objects=self._ships).items())
        return {place: value for place, value in found if isinstance(value, torch.Tensor) and holds(value)}

    def check_inputs(
        self,
        td: TensorDictBase,
        entries: Mapping[str, Any],
        rows: Rows,
        fetched: Mapping[Any, torch.Tensor] = {},
        *,
        arrived: bool = True,
    ) -> Inputs:
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
        values: Inputs = {leaf.key: leaf.check(td, entries, rows, fetched, arrived=arrived) for leaf in self._inputs}
        for each in self._input_objects:
            values[each.key] = each.check(td, rows)
        if self._shows_root:
            values[CALLERS] = _roots(td)
        return values

    def check_arrived(self, values: Inputs) -> None:
        """Check what of inputs could not be looked at before, for all envs.

        Raises:
            SpecMismatchError: If a value has the wrong range.
        """
        for leaf in self._inputs:
            leaf.check_arrived(values[leaf.key])

    def check_root(self, td: TensorDictBase) -> None:
        """Refuse root entries that rows which are not asked could not keep, or envs that are reset could not take.

        Raises:
            SpecMismatchError: If one has another kind, shape or dtype than the envs' own.
        """
        for region in (ROOT, INPUT) if self.takes_root else (ROOT,):
            leaves = self._ledger.trees[region].leaves
            if region == INPUT and self._ledger.free_states:
                leaves = {key: spec for key, spec in leaves.items() if key not in self._ledger.free_states}
            check_fits(td, self._trees[region], leaves, len(self.envs), whole=region == INPUT)

    def decide(self, rows: Rows, lends: bool = False, whole: bool = False) -> None:
        """Say where the envs in these rows write next: a command is about to be sent to them, or none of them.

        Args:
            rows: Which.
            lends: Whether the results are to be lent, where that is possible.
            whole: Whether a step writes the root, too, also where there is no reset.
        """
        if lends or not self._buffer.plain:
            lends = lends and rows is None and isinstance(self._all, slice)
            self._buffer.decide(self._targets(rows), lends=lends, whole=lends and whole)

    def write_inputs(self, values: Inputs, rows: Rows) -> dict[int, Objects] | None:
        """Store checked inputs; returns those without a row, by env."""
        for key, target in self._ledger.inputs.items():
            value = values[key]
            if value is None and (value := self._latest_state(key)) is None:
                continue
            if rows is None and self._members is None:
                target[...] = value
            else:
                target[self._targets(rows)] = value if rows is None else value[rows]
        if not self._loose_inputs:
            return None
        loose, free = [key for key in self._loose_inputs if values[key] is not None], self._ledger.free_states
        return {
            self.envs[row]: {
                key: self._alone(value) for key in loose if (value := values[key][row]) is not None or key not in free
            }
            for row in self._indices(rows)
        }

    def _latest_state(self, key: Key) -> NDArray[Any] | None:
        """Return the envs' latest values of a state that is missing, if it is an observation as well; else it stays."""
        return array_of(self.latest()[key]) if key in self._ledger.observed_states else None

    def _alone(self, value: Any) -> Any:
        """One env's part of an input, without the rest of the memory that it is in, which would be sent along."""
        return value.clone() if self._ships and isinstance(value, torch.Tensor) else value

    def share(self, values: Inputs, row: int) -> Inputs:
        """Return the share of checked inputs for one env, for whoever exchanges with it alone."""
        return {key: None if value is None else value[row : row + 1] for key, value in values.items()}

    def write_share(self, values: Inputs) -> dict[int, Objects] | None:
        """Store the share of the only env."""
        return self.write_inputs(values, None)

    def given(self, td: TensorDictBase, rows: Rows, masks: Mapping[Key, torch.Tensor]) -> dict[int, ResetArguments]:
        """Store what a caller knows of envs that will be reset, where they ask for it.

        Args:
            td: What the reset was given.
            rows: Which envs are reset.
            masks: Which of their parts are, if not all.
        """
        if not self.takes_root:
            return {}
        targets = self._targets(rows)
        # An env of which only a part is reset needs to know what the rest of it has.
        in_parts = any(mask[0].numel() > 1 and not mask.all() for mask in masks.values())
        former = self.latest() if in_parts else {}
        kept: list[Key] = []
        loose: Objects = {}
        for region in (INPUT, ROOT):
            for key, spec in self._ledger.trees[region].leaves.items():
                if key in kept or key in loose:
                    continue
                value = self._known(td, region, key, spec)
                if region == INPUT and key in self._ledger.free_states and not self._fits(value, spec):
                    continue
                if value is None and region == ROOT:
                    value = former.get(key)
                if value is None:
                    continue
                if key in (self._ledger.inputs if region == INPUT else self._ledger.halves[0][region]):
                    array = array_of(value)
                    self._ledger.store(region, key, targets, array if rows is None else array[rows])
                    kept.append(key)
                else:
                    loose[key] = value
        loose.update(masks)
        return {
            self.envs[row]: ResetArguments({}, tuple(kept), {key: value[row] for key, value in loose.items()})
            for row in self._indices(rows)
        }

    def _fits(self, value: Any, spec: TensorSpec) -> bool:
        """Whether a value of all envs can be kept as it is; objects, and what varies, can in any case."""
        if isinstance(spec, NonTensor) or -1 in spec.shape:
            return True
        form = torch.Size([len(self.envs), *spec.shape]), spec.dtype
        return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == form

    @property
    def takes_root(self) -> bool:
        """Whether a reset of the envs reads what the caller knows of them."""
        return self._ledger.family.metadata.takes_root

    def _known(self, td: TensorDictBase, region: str, key: Key, spec: TensorSpec) -> Any:
        """Return a caller's values of all envs at a key; a list where sizes vary, None where one has nothing."""
        tree = self._trees[region]
        if -1 in spec.shape:
            return tree.get_each(td, key)
        return objects_of(tree, td, key) if isinstance(spec, NonTensor) else tree.get(td, key)

    # -- out --------------------------------------------------------------------------------------------

    def after_reset(self, outcome: Outcome) -> None:
        """Note what came of a reset."""
        if outcome.objects:
            self._note(outcome, ROOT)

    def _note(self, outcome: Outcome, region: str) -> bool:
        """Keep the objects of a region as the latest; whether there were any."""
        noted = False
        for env, place in zip(self.envs, self._places, strict=True):
            regions = outcome.objects.get(env)
            if regions is not None and region in regions and env not in outcome.failures:
                self._ledger.objects[place] = regions[region]
                noted = True
        return noted

    def step_result(self, rows: Rows, outcome: Outcome, *, lends: bool = False) -> Values:
        """The outcome of a step, by key; rows that were not stepped hold their latest values and no reward.

        Args:
            rows: Which were stepped.
            outcome: What came of the command.
            lends: Whether it may be lent, as was decided before; it then is wherever it can be.
        """
        if outcome.objects:
            self._note(outcome, NEXT)
        self.count(rows, outcome)
        if lends and rows is None and (lent := self._lend(NEXT)) is not None:
            self._buffer.lend(self._all)
            return lent
        arrays = self._reader.copy(NEXT)
        if rows is None:
            return self._values(NEXT, arrays)
        others = np.ones(len(self.envs), np.bool_)
        others[rows] = False
        self._reader.replace(arrays, np.flatnonzero(others & self._reader.in_root()))
        values = self._values(NEXT, arrays)
        for key in self._rewards:
            values[key] = self._filled(key, values[key], others, 0)
        return values

    def last_step(self) -> tuple[Values, Values]:
        """The outcome of the last step of each env, which was counted, and the root for the next one."""
        following = self._values(NEXT, self._reader.copy(NEXT))
        return following, self.root_result(following, Outcome())

    def count(self, rows: Rows, outcome: Outcome) -> None:
        """Count the steps that came back, and the episodes that ended with them; see `Ledger.count`."""
        self._ledger.count(None if rows is None and self._members is None else self._targets(rows), outcome)

    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many steps came back from each env, and how many of them ended an episode."""
        return self._ledger.counts(self._all)

    def with_losses(self, following: Values, known: Any, rows: NDArray[np.intp], outcome: Outcome) -> Values:
        """The outcome of a step in which some envs were lost: what was known of them before, truncated, no reward.

        Args:
            following: The outcome.
            known: What was known before the step.
            rows: Which were lost; they have been reset since.
            outcome: What came of the command.
        """
        self.after_reset(outcome)
        lost = np.zeros(len(self.envs), np.bool_)
        lost[rows] = True
        done = self._ledger.done_leaves
        replaced = {}
        for key, value in following.items():
            if key in done:
                replaced[key] = self._filled(key, value, lost, key[-1] != "terminated")
            elif key in self._rewards:
                replaced[key] = self._filled(key, value, lost, 0)
            else:
                replaced[key] = _chosen(lost, known[key], value)
        return replaced

    def root_result(self, following: Any, outcome: Outcome, *, lends: bool = False) -> Values:
        """The root of the next step: what came of the last one, except where the env was reset since.

        Args:
            following: What came of the last step.
            outcome: What came of the command.
            lends: Whether it may be lent, as was decided before.
        """
        rows = self._reader.in_root().nonzero()[0]
        noted = self._note(outcome, ROOT) if outcome.objects else False
        if not len(rows) and not noted:
            root = dict(following)
            for key in self._rewards:
                del root[key]
            return root
        if lends and (lent := self._lend(ROOT)) is not None:
            return lent
        return self._merged(rows)

    def latest(self) -> Values:
        """Return the latest values of every env: those after its last step or reset."""
        mask = self._reader.in_root()
        return self._values(ROOT, self._reader.copy(ROOT)) if mask.all() else self._merged(np.flatnonzero(mask))

    def _merged(self, rows: NDArray[np.intp]) -> Values:
        """The values of the last step, or, in these rows, of the reset after it."""
        arrays = self._reader.copy(NEXT)
        for key in self._rewards:
            arrays.pop(key, None)
        self._reader.replace(arrays, rows)
        return self._values(ROOT, arrays)

    def _lend(self, region: str) -> Lent | None:
        """A region of these envs where it is, without being copied; None where it is not all in one place."""
        half = self._reader.half()
        if half is None:
            return None
        values = self._lent.get((half, region))
        if values is None:
            values = Lent(self._values(region, self._reader.look(region, half)), half, region)
            # Loose values are other objects each time, and tensors made in inference mode are of no use outside of it.
            if not self._loose[region] and not torch.is_inference_mode_enabled():
                self._lent[half, region] = values
        return Lent(values, half, region)

    def place(self, transfer: Transfer, following: Values | None, root: Values | None) -> tuple[Any, Any]:
        """Bring results to the device of a transfer; see `Reader.place`.

        Args:
            transfer: Where to.
            following: What came of a step.
            root: What came of it for the next one.
        """
        return self._reader.place(transfer, following, root)

    def _values(self, region: str, arrays: Arrays) -> Values:
        values: Values = {key: torch.from_numpy(array) for key, array in arrays.items()}
        for key, dtype in self._ledger.foreign[region]:
            if key in values:
                values[key] = values[key].view(dtype)
        if self._loose[region]:
            leaves, known = self._ledger.trees[region].leaves, [self._ledger.objects[place] for place in self._places]
            for key in self._loose[region]:
                found = [objects.get(key) for objects in known]
                values[key] = (
                    [copied(value) for value in found]
                    if is_loose(leaves[key])
                    else torch.stack(self._complete(found, leaves[key]))
                )
        return values

    def _filled(self, key: Key, values: Any, rows: NDArray[np.bool_], filling: float) -> Any:
        """Values of the step with all of these rows the same."""
        if isinstance(values, torch.Tensor):
            return values.masked_fill(_mask(rows, values), filling)
        like = self._complete(values, self._ledger.trees[NEXT].leaves[key])
        return [torch.full_like(value, filling) if row else value for value, row in zip(like, rows, strict=True)]

    @staticmethod
    def _complete(found: list[Any], spec: Any) -> list[torch.Tensor]:
        """Zeros for envs that have not said anything yet."""
        return [spec.zero() if value is None else value for value in found]

    def _targets(self, rows: Rows) -> Any:
        if rows is None:
            return self._all
        return rows if self._members is None else self._members[rows]

    def _indices(self, rows: Rows) -> Iterable[int]:
        return range(len(self.envs)) if rows is None else rows.tolist()

    def random_objects(self) -> list[Objects]:
        """For each env samples of its action spaces without a fixed shape, from generators seeded by torch's.

        They are non-tensor data, as TensorDicts of one env have them.
        """
        return self._ledger.random_objects(self._places)


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


def _chosen(rows: NDArray[np.bool_], new: Any, old: Any) -> Any:
    """The new values in these rows, the old ones in the others."""
    if isinstance(old, torch.Tensor):
        return torch.where(_mask(rows, old), new, old)
    return [a if row else b for row, a, b in zip(rows, new, old, strict=True)]


def _mask(rows: NDArray[np.bool_], values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(values.device).reshape(-1, *[1] * (values.ndim - 1))
