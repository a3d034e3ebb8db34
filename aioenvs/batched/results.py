"""TensorDicts made of what the envs answered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from aioenvs.batched.exchange import Rows, Values, nest
from aioenvs.engine.metadata import REWARD_KEY
from aioenvs.mdp import CONTROL, LEFT_BEHIND, Entries, filled

__all__ = ["Results", "keep_others"]

PLAIN = frozenset((torch.Tensor,))


class Results:
    """Assembles the TensorDicts that `reset`, `step` and `step_and_maybe_reset` return.

    Args:
        batch_size: Of every TensorDict.
        device: Where they go; None leaves the tensors on the CPU, and the TensorDict without a device.
    """

    def __init__(self, batch_size: torch.Size, device: torch.device | None) -> None:
        self._batch_size = batch_size
        self._device = device

    def _of(self, entries: Entries) -> TensorDict:
        # What the envs answered has the right shapes, so tensordict need not check it again.
        plain = PLAIN.issuperset(map(type, entries.values()))
        make: Callable[..., TensorDict] = TensorDict._new_unsafe if plain else TensorDict
        td = make(entries, batch_size=self._batch_size)
        return td if self._device is None else td.to(self._device)

    def after_reset(self, td: TensorDictBase | None, rows: Rows, values: Values) -> TensorDict:
        """The root after a reset of some rows, with the other entries of `td`."""
        if td is None:
            return self._of(nest(values))
        kept = values if rows is None else keep_others(td, rows, values)
        return self._of(filled(nest(kept), dict(td.items()), CONTROL))

    def after_step(
        self, td: TensorDictBase, entries: Entries, following: Values, root: Values | None
    ) -> TensorDict | None:
        """Put a step's outcome under `next`, where other entries that are there already stay.

        Args:
            td: What the step was given.
            entries: Its entries.
            following: The outcome.
            root: The root for the next step, None if nobody wants it.

        Returns:
            The root for the next step, with the other entries of this one; None if nobody wants it.
        """
        preset = entries.get("next")
        others = {} if preset is None else dict(preset.items())
        td.set("next", self._of(filled(nest(following), others)))
        if root is None:
            return None
        return self._of(filled(filled(nest(root), others, LEFT_BEHIND), entries, LEFT_BEHIND))


def keep_others(td: TensorDictBase, rows: NDArray[np.intp], values: Values) -> Values:
    """Give all rows but these the values that `td` has at its root, where it has any."""
    mask = torch.ones(td.batch_size[0], dtype=torch.bool)
    mask[rows] = False
    kept = dict(values)
    for key, value in values.items():
        given = td.get(key, None) if key != REWARD_KEY else None
        if given is None:
            continue
        if isinstance(value, torch.Tensor):
            kept[key] = value.clone()
            kept[key][mask] = given.detach().to(value.device)[mask]
        else:
            kept[key] = [old if keep else new for old, new, keep in zip(given.tolist(), value, mask, strict=True)]
    return kept
