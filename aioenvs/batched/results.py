"""TensorDicts made of what the envs answered."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from aioenvs.batched.exchange import Rows, Values, nest
from aioenvs.engine.metadata import ACTION, REWARD_KEY

__all__ = ["Results", "keep_others"]

CONTROL = frozenset(("next", "_reset", "_step"))
LEFT_BEHIND = CONTROL | {ACTION, *REWARD_KEY}  # by the step that comes next


class Results:
    """Assembles the TensorDicts that `reset`, `step` and `step_and_maybe_reset` return.

    Args:
        batch_size: Of every TensorDict.
        device: Where they go; None leaves the tensors on the CPU, and the TensorDict without a device.
    """

    def __init__(self, batch_size: torch.Size, device: torch.device | None) -> None:
        self._batch_size = batch_size
        self._device = device

    def _of(self, values: Values) -> TensorDict:
        td = TensorDict(nest(values), batch_size=self._batch_size)
        return td if self._device is None else td.to(self._device)

    def after_reset(self, td: TensorDictBase | None, rows: Rows, values: Values) -> TensorDict:
        """The root after a reset of some rows, with the other entries of `td`."""
        if td is None:
            return self._of(values)
        result = self._of(values if rows is None else keep_others(td, rows, values))
        return _with_others(result, td, CONTROL)

    def set_next(self, td: TensorDictBase, following: Values) -> None:
        """Put a step's outcome under `next`, where other entries that are there already stay."""
        result = self._of(following)
        preset = td.get("next", None)
        td.set("next", result if preset is None else _with_others(result, preset))

    def next_root(self, td: TensorDictBase, root: Values) -> TensorDict:
        """The root for the next step, with the other entries of this one."""
        result = self._of(root)
        _with_others(result, td.get("next"), LEFT_BEHIND)
        return _with_others(result, td, LEFT_BEHIND)


def _with_others(result: TensorDict, source: TensorDictBase, left_out: frozenset[str] = frozenset()) -> TensorDict:
    """Add the entries of `source` that `result` does not have, at any depth."""
    present = set(result.keys())
    for name, value in source.items():
        if name not in present:
            if name not in left_out:
                result.set(name, value)
        elif isinstance(value, TensorDictBase) and isinstance(branch := result.get(name), TensorDict):
            _with_others(branch, value)
    return result


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
