"""Resets and steps of a torch-native env: what its author's methods return, checked, completed and joined."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from aioenvs.envs.completion import Outcomes, entries_of, idle, restore, scattered, snapshot, whole_rows
from aioenvs.envs.spec_index import OUTPUTS
from aioenvs.envs.spec_properties import SettableSpecs
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.specs.mapping import NestedKey
from aioenvs.tensors.done import merged, merged_reset, reset_mask, ruling_keys, terminated_or_truncated
from aioenvs.tensors.step_mdp import CONTROL, next_root, overlay


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
