"""Resets and steps of a torch-native env: what its author's methods return, checked, completed and joined."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor, lazy_stack

from aioenvs.envs.spec_properties import OUTPUTS, SettableSpecs, SpecIndex
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.specs import TensorSpec
from aioenvs.specs.mapping import NestedKey, is_structure, like, opened
from aioenvs.tensors.done import complete_done, merged, merged_reset, reset_mask, ruling_keys, terminated_or_truncated
from aioenvs.tensors.step_mdp import CONTROL, next_root, overlay

Path = tuple[str, ...]


class _Node:
    """The output entries that stand beside each other at one path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.observations: dict[str, TensorSpec] = {}
        self.rewards: dict[str, TensorSpec] = {}
        self.dones: dict[str, TensorSpec] = {}

    def key(self, name: str) -> NestedKey:
        return (*self.path, name) if self.path else name


class Outcomes:
    """The checks of one env's results, prepared once per spec; `ndim` is the env's number of batch dims."""

    def __init__(self, index: SpecIndex, ndim: int) -> None:
        self._ndim = ndim
        self._nodes: dict[Path, _Node] = {}
        for kind in ("observation", "reward", "done"):
            full = index.full(kind)
            for key in index.keys(kind):
                path, name = ((), key) if isinstance(key, str) else (key[:-1], key[-1])
                node = self._nodes.setdefault(path, _Node(path))
                getattr(node, f"{kind}s")[name] = full[key]
        self._ruling = ruling_keys(index.keys("done"))

    def of_step(self, out: TensorDictBase, shape: torch.Size) -> TensorDictBase:
        """A step's result with all done flags, and rewards of the right shape; changed in place.

        `shape` is the batch size of the step's input. An observation or a reward that is missing, or that has another
        number of elements, is a SpecMismatchError.
        """
        lead = shape[: len(shape) - self._ndim]
        for path, node in self._nodes.items():
            td = _node(out, path, "_step", missing_ok=not (node.observations or node.rewards))
            if td is None:
                continue
            entries = entries_of(td)
            _require(node.observations, entries, node, "_step")
            _require(node.rewards, entries, node, "_step")
            for name, spec in node.rewards.items():
                _reshape(td, entries, name, spec, lead, node)
            if node.dones:
                _complete(td, entries, lead, node)
        return out

    def of_reset(self, out: TensorDictBase, shape: torch.Size, *, partial: bool) -> TensorDictBase:
        """A reset's result with all done flags; changed in place.

        `shape` is the batch size of a full reset; of a `partial` one, entries may be missing, which else are a
        SpecMismatchError.
        """
        lead = shape[: len(shape) - self._ndim]
        for path, node in self._nodes.items():
            if not (node.observations or node.dones):
                continue
            td = _node(out, path, "_reset", missing_ok=partial or not node.observations)
            if td is None:
                continue
            entries = entries_of(td)
            if not partial:
                _require(node.observations, entries, node, "_reset")
            if node.dones:
                _complete(td, entries, lead, node)
        return out

    def mismatched_dtypes(self, out: TensorDictBase, *, rewards: bool) -> list[str]:
        """Sentences on the entries whose dtype is not the spec's."""
        found = []
        for node in self._nodes.values():
            for name, spec in {**node.observations, **(node.rewards if rewards else {}), **node.dones}.items():
                value = out.get(node.key(name), None)
                if isinstance(value, torch.Tensor) and spec.dtype not in (None, value.dtype):
                    found.append(f"{node.key(name)!r}: expected dtype {spec.dtype}, found {value.dtype}")
        return found

    def done_after(self, out: TensorDictBase, masks: Mapping[NestedKey, torch.Tensor]) -> NestedKey | None:
        """The key of a flag that is set although its episode began just now; None if there is none.

        Args:
            out: What a reset returned.
            masks: Those that the reset was given, by key; where a flag has none, all began.
        """
        for key in self._ruling:
            value = out.get(key)
            if not value.any():
                continue
            mask = masks.get("_reset" if isinstance(key, str) else (*key[:-1], "_reset"), masks.get("_reset"))
            if mask is None or bool((value & _like(mask, value)).any()):
                return key
        return None


def _node(out: TensorDictBase, path: Path, method: str, *, missing_ok: bool) -> Any:
    """The TensorDict or tensorclass at a path; None if it is a field of a tensorclass which is None."""
    if not path:
        return out
    td: Any = out.get(path, None)
    if td is None and len(path) > 1 and is_structure(out.get(path[:-1], None)):
        return None
    if td is None:
        if not missing_ok:
            found = sorted(map(str, out.keys()))
            raise SpecMismatchError(
                f"{path!r}: expected a TensorDict in what {method} returned, found the keys {shown(found)}"
            )
        out.set(path, out.empty())
        td = out.get(path)
    if not isinstance(td, TensorDictBase) and not is_structure(td):
        raise SpecMismatchError(f"{path!r}: expected a TensorDict in what {method} returned, found {shown(td)}")
    return td


def entries_of(td: TensorDictBase) -> Mapping[str, Any]:
    """Return the direct entries of a TensorDict, which are quicker had at once; of a lazy stack when asked for."""
    return dict(td.items()) if type(td) is TensorDict else _Entries(td)


class _Entries(Mapping[str, Any]):
    """The entries of a TensorDict that may not have all of them as a whole, or of a tensorclass: all of its fields."""

    def __init__(self, td: Any) -> None:
        self._td = td
        self._names = {field.name for field in dataclasses.fields(td)} if is_structure(td) else set(td.keys())

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._td.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # which does not need the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _require(specs: Mapping[str, TensorSpec], entries: Mapping[str, Any], node: _Node, method: str) -> None:
    if specs.keys() <= entries.keys():
        return
    name = next(name for name in specs if name not in entries)
    where = f" at {node.path!r}" if node.path else ""
    raise SpecMismatchError(
        f"{node.key(name)!r}: expected {shown(specs[name])} in what {method} returned, "
        f"found only the keys {sorted(entries)!r}{where}"
    )


def _complete(td: TensorDictBase, entries: Mapping[str, Any], lead: torch.Size, node: _Node) -> None:
    """Bring the flags into the spec's shape, and fill in those that are missing."""
    missing = node.dones.keys() - entries.keys()
    if len(missing) == len(node.dones):
        for name, spec in node.dones.items():
            td.set(name, spec.zero(lead))
        return
    flags = {}
    for name, spec in node.dones.items():
        if name in missing:
            continue
        flags[name] = value = _reshape(td, entries, name, spec, lead, node)
        if value.dtype is not spec.dtype and spec.dtype is not None:
            raise SpecMismatchError(
                f"{node.key(name)!r}: expected dtype {spec.dtype} in what the env returned, found {value.dtype}"
            )
    if missing == {"terminated"} and len(node.dones) == 2:  # done alone, which most envs return
        td.set("terminated", flags["done"].clone())
    elif missing:
        complete_done(td, tuple(node.dones))


def _reshape(
    td: TensorDictBase, entries: Mapping[str, Any], name: str, spec: TensorSpec, lead: torch.Size, node: _Node
) -> Any:
    """The entry, brought into the spec's shape."""
    value: Any = entries[name]
    expected = lead + spec.shape if lead else spec.shape
    if value.shape == expected or -1 in expected:
        return value
    if not isinstance(value, torch.Tensor) or value.numel() != math.prod(expected):
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        raise SpecMismatchError(
            f"{node.key(name)!r}: expected shape {tuple(expected)} in what the env returned, found {shown(found)}"
        )
    value = value.reshape(expected)
    td.set(name, value)
    return value


def _like(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The mask with as many dims as the value, so that they broadcast."""
    if mask.ndim > value.ndim:
        return mask.reshape(value.shape)
    return mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))


def whole_rows(mask: torch.Tensor, batch_size: torch.Size) -> torch.Tensor:
    """A `_step` mask, bool `(*batch_size, *)`, as one of the batch's shape.

    Raises:
        ValueError: If it selects some but not all of what belongs to one env, or has another shape.
    """
    ndim = len(batch_size)
    if mask.shape[:ndim] != batch_size:
        raise ValueError(f"expected a mask '_step' of shape {tuple(batch_size)}, found {tuple(mask.shape)}")
    if mask.ndim == ndim:
        return mask
    inner = mask.flatten(ndim)
    rows = inner.any(-1)
    if inner.shape[-1] > 1 and bool((rows != inner.all(-1)).any()):
        raise ValueError(f"expected '_step' to select whole envs, all or none of each, found {shown(mask)}")
    return rows


def idle(td: TensorDictBase, index: SpecIndex, ndim: int) -> TensorDictBase:
    """Return the `next` of an env that does not step: the root's observations and done flags again, no reward."""
    lead = td.batch_size[: td.ndim - ndim]
    following = td.select(*index.keys("observation"), *index.keys("done"), strict=False)
    for kind in ("observation", "done", "reward"):
        full = index.full(kind)
        for key in index.keys(kind):
            if kind == "reward" or following.get(key, None) is None:
                following.set(key, full[key].zero(lead))
    return following


def scattered(base: TensorDictBase, rows: torch.Tensor, part: TensorDictBase) -> TensorDictBase:
    """Put the values `(rows.sum(),)` of some rows into `base`, in place; where it has none, other rows become zeros."""
    for name in list(part.keys()):
        value, before = part.get(name), base.get(name, None)
        if is_non_tensor(value):
            base.set(name, _scattered_objects(before, rows, value))
        elif is_structure(value):
            inner = TensorDict({}, batch_size=rows.shape) if before is None else opened(before).copy()
            base.set(name, like(value, scattered(inner, rows, opened(value))))
        elif isinstance(value, TensorDictBase):
            inner = TensorDict({}, batch_size=rows.shape) if before is None else before.copy()
            base.set(name, scattered(inner, rows, value))
        else:
            before = value.new_zeros(rows.shape + value.shape[1:]) if before is None else before
            base.set(name, before.index_put((rows,), value))
    return base


def _scattered_objects(before: Any, rows: torch.Tensor, part: Any) -> Any:
    values = iter(part.unbind(0))
    others: Sequence[Any] = [NonTensorData(None)] * rows.numel() if before is None else before.reshape(-1).unbind(0)
    flat = rows.reshape(-1).tolist()
    chosen = [next(values) if row else other for row, other in zip(flat, others, strict=True)]
    return lazy_stack(chosen).reshape(rows.shape)


def snapshot(td: TensorDictBase) -> dict[str, Any]:
    """The entries, nested ones as pairs of a snapshot and the TensorDict; a lazy stack is not looked into."""
    if not isinstance(td, TensorDict):
        return {}
    return {name: (snapshot(value), value) if isinstance(value, TensorDict) else value for name, value in td.items()}


def restore(td: TensorDictBase, before: Mapping[str, Any]) -> None:
    """Make the entries what they were at the snapshot."""
    if isinstance(td, LazyStackedTensorDict):
        return
    for name in set(td.keys()).difference(before):
        del td[name]
    for name, value in before.items():
        if isinstance(value, tuple):
            restore(value[1], value[0])
            value = value[1]
        if td.get(name, None) is not value:
            td.set(name, value)


class Transitions(SettableSpecs):
    """`reset` and `step`, over `_reset` and `_step`, which a subclass writes."""

    _run_type_checks: bool
    _allow_done_after_reset: bool

    @abstractmethod
    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        raise NotImplementedError

    @abstractmethod
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError

    @property
    def _outcomes(self) -> Outcomes:
        index = self._index
        outcomes: Outcomes | None = index.__dict__.get("outcomes")
        if outcomes is None:
            outcomes = index.__dict__["outcomes"] = Outcomes(index, self.batch_dims)
        return outcomes

    # Reset

    def reset(
        self, tensordict: TensorDictBase | None = None, *, select_reset_only: bool = False, **kwargs: Any
    ) -> TensorDictBase:
        """Begin new episodes, all of them or those that a mask names.

        Args:
            tensordict: Of shape `batch_size`; it is updated in place. `_reset` in it (bool, shaped like done), or one
                beside each nested done, says what is to be reset. Where it is False the TensorDict keeps its values,
                and gets those that it does not have from `_reset`'s result.
            select_reset_only: Show `_reset` only the masks.
            **kwargs: Are given to `_reset`.

        Returns:
            The TensorDict with observations and done flags, without masks.

        Raises:
            RuntimeError: If the TensorDict has another batch size, or an episode is over when it begins.
            ValueError: If some of the nested masks are there, but not all.
            SpecMismatchError: If `_reset` returned something else than the specs say.
        """
        if tensordict is None:
            return self._call_reset(None, select_reset_only, (), kwargs)
        self._check_batch_size(tensordict)
        keys = self._index.reset_keys
        if "_reset" not in keys and tensordict.get("_reset", None) is not None:
            keys = ["_reset"]
        mask = reset_mask(tensordict, keys)
        if mask is None or all(tensordict.get(key).all() for key in ruling_keys(keys)):
            overlay(tensordict, self._call_reset(tensordict, select_reset_only, (), kwargs))
        elif mask.any():
            out = self._call_reset(tensordict, select_reset_only, ruling_keys(keys), kwargs)
            overlay(tensordict, merged_reset(tensordict, out, keys))
        return self._without_masks(tensordict)

    def _call_reset(
        self,
        tensordict: TensorDictBase | None,
        select_reset_only: bool,
        mask_keys: Sequence[NestedKey],
        kwargs: dict[str, Any],
    ) -> TensorDictBase:
        """Call `_reset`, and check and complete what it returns; `mask_keys` are those of a partial reset."""
        masks = {} if tensordict is None else {key: tensordict.get(key) for key in mask_keys}
        shown = tensordict
        if select_reset_only and tensordict is not None:
            shown = tensordict.select(*self._index.reset_keys, strict=False)
        out = self._reset(shown, **kwargs)
        if out is shown and out is not None:
            raise RuntimeError(
                f"{type(self).__name__}._reset returned the TensorDict that it was given; it must return a new one, "
                "such as tensordict.empty() with the observations set"
            )
        shape = self._expected_shape(out, tensordict)
        out = self._received(out, shape, "_reset")
        outcomes = self._outcomes
        outcomes.of_reset(out, shape, partial=bool(masks))
        if self._run_type_checks:
            self._check_dtypes(outcomes.mismatched_dtypes(out, rewards=False), "_reset")
        if not self._allow_done_after_reset and (key := outcomes.done_after(out, masks)) is not None:
            raise RuntimeError(
                f"The done entry {key!r} was (partially) True after a call to reset() in env {self!r}; pass "
                "allow_done_after_reset=True to its constructor if that is intended"
            )
        return out

    def _expected_shape(self, out: Any, tensordict: TensorDictBase | None) -> torch.Size:
        if tensordict is not None:
            return cast(torch.Size, tensordict.batch_size)
        is_free = not self.batch_locked and not self.batch_size and isinstance(out, TensorDictBase)
        return cast(torch.Size, out.batch_size) if is_free else self.batch_size

    def _without_masks(self, tensordict: TensorDictBase) -> TensorDictBase:
        for key in {"_reset", *self._index.reset_keys}:
            if tensordict.get(key, None) is not None:
                del tensordict[key]
        return tensordict

    # Step

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step once.

        Args:
            tensordict: Of shape `batch_size`, with the actions and what else `_step` reads; it is updated in place.
                Entries under `next` stay if the step gives none of their name. If it holds `_step` (bool, of shape
                `batch_size`, or with more dims if it selects whole elements), only those step; elsewhere `next` has
                the root's observations and done flags again, and no reward. The method `_step` sees that mask if the
                env has a batch size, and only the rows that it selects if not. The mask stays where it is, unless it
                selects nobody.

        Returns:
            The same TensorDict, with `next`.

        Raises:
            RuntimeError: If it has another batch size.
            SpecMismatchError: If `_step` returned something else than the specs say.
        """
        self._check_batch_size(tensordict)
        entries = entries_of(tensordict)
        preset: Any = entries.get("next")
        mask: Any = entries.get("_step")
        whole = mask is None or mask.all()
        following = self._call_step(tensordict) if whole else self._step_some(tensordict, mask)
        if mask is not None and not whole and not mask.any():
            del tensordict["_step"]
        if preset is not None:
            _keep(preset, following)
        return tensordict.set("next", following)

    def _call_step(self, tensordict: TensorDictBase) -> TensorDictBase:
        before = snapshot(tensordict)
        out = self._step(tensordict)
        if out is tensordict:
            out = self._apart(tensordict, before)
        shape = tensordict.batch_size
        out = self._received(out, shape, "_step")
        for name in CONTROL.intersection(out.keys()):  # of a copy of the input
            del out[name]
        outcomes = self._outcomes
        outcomes.of_step(out, shape)
        if self._run_type_checks:
            self._check_dtypes(outcomes.mismatched_dtypes(out, rewards=True), "_step")
        return out

    def _apart(self, tensordict: TensorDictBase, before: dict[str, Any]) -> TensorDictBase:
        """Return the entries that a step wrote into its own input, which becomes what it was."""
        index = self._index
        outputs = [key for kind in OUTPUTS for key in index.keys(kind)]
        new = set(tensordict.keys()).difference(before)
        out = tensordict.select(*outputs, *new, strict=False)
        restore(tensordict, before)
        return out

    def _step_some(self, tensordict: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        rows = whole_rows(mask, tensordict.batch_size)
        following: TensorDictBase = idle(tensordict, self._index, self.batch_dims)
        if not rows.any():
            return following
        if self.batch_size:
            return cast(TensorDictBase, merged(rows, self._call_step(tensordict), following))
        return scattered(following, rows, self._call_step(tensordict[rows]))

    def _received(self, out: Any, shape: torch.Size, method: str) -> TensorDictBase:
        """A result of the env's device and of the right batch size."""
        if not isinstance(out, TensorDictBase):
            raise SpecMismatchError(f"expected a TensorDict from {type(self).__name__}.{method}, found {shown(out)}")
        if out.batch_size != shape:
            try:
                out.batch_size = shape
            except RuntimeError as error:
                raise SpecMismatchError(
                    f"expected a TensorDict of batch size {tuple(shape)} from {type(self).__name__}.{method}, found "
                    f"{tuple(out.batch_size)}: {error}"
                ) from None
        device = self.device
        return out if device is None or out.device == device else out.to(device)

    def _check_dtypes(self, differences: list[str], method: str) -> None:
        if differences:
            raise SpecMismatchError("\n".join([f"{type(self).__name__}.{method} returned other dtypes:", *differences]))

    def step_mdp(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """The root of the next step, from a step's result; see `aioenvs.step_mdp`."""
        return next_root(next_tensordict, self._index.left_behind)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, and begin new episodes where they are over.

        Args:
            tensordict: As for `step`.

        Returns:
            The TensorDict with `next`, where the true last observations are: the same one, or where it is not on the
            env's device a copy there; and the root of the next step.
        """
        device = self.device
        if device is not None and tensordict.device != device:
            tensordict = tensordict.to(device)
        tensordict = self.step(tensordict)
        root = self.step_mdp(tensordict)
        if self._mark_ends(root):
            tensordict.set("next", tensordict.get("next").clone())  # the env may reuse its tensors for the reset
            root = self.reset(root, select_reset_only=True)
        return tensordict, root

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Begin new episodes where the done flags say that they are over.

        Args:
            tensordict: Of shape `batch_size`, with the done flags.

        Returns:
            The same TensorDict, with the new observations there.
        """
        return self.reset(tensordict, select_reset_only=True) if self._mark_ends(tensordict) else tensordict

    def _mark_ends(self, tensordict: TensorDictBase) -> bool:
        """Whether an episode is over; if so, the masks of a reset are set."""
        spec = self._index.full("done")
        if "done" in spec and not isinstance(tensordict, LazyStackedTensorDict):  # whose flags may differ in shape
            done = tensordict.get("done", None)
            if done is not None and not done.any():
                return False
        return terminated_or_truncated(tensordict, spec)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step with random actions.

        Args:
            tensordict: As for `step`, without the actions; None for an env that needs nothing else.
        """
        return self.step(self.rand_action(tensordict))

    def cardinality(self, tensordict: TensorDictBase | None = None) -> int | float:
        """How many actions there are; an env in which that depends on the state overrides it.

        Args:
            tensordict: The state, which does not matter here.

        Raises:
            NotImplementedError: If an action is not discrete.
        """
        return self._index.full("action").cardinality()

    def all_actions(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """All actions that the masks of the specs allow.

        Args:
            tensordict: What the env is reset with before, as in TorchRL; None for no reset.

        Returns:
            TensorDict of shape `(cardinality, *batch_size)`.

        Raises:
            NotImplementedError: If an action is not discrete.
        """
        if tensordict is not None:
            self.reset(tensordict)
        actions: TensorDictBase = self._index.full("action").enumerate(use_mask=True)
        return actions


def _keep(preset: TensorDictBase, following: TensorDictBase) -> None:
    """Add the entries that only `preset` has."""
    for name, value in preset.items():
        mine = following.get(name, None)
        if mine is None:
            following.set(name, value)
        elif isinstance(value, TensorDictBase) and isinstance(mine, TensorDictBase) and mine is not value:
            _keep(value, mine)
