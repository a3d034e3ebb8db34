"""What leads from one step to the next: the next root, the ends of episodes, and partial resets; all pure functions."""

from aioenvs.mdp.advance import CONTROL, Entries, NestedKey, filled, flat_key, next_root, overlaid, overlay, step_mdp
from aioenvs.mdp.done import any_done, complete_done, done_mask, ruling_keys, terminated_or_truncated
from aioenvs.mdp.resets import merged, merged_reset, reset_mask

__all__ = [
    "CONTROL",
    "Entries",
    "NestedKey",
    "any_done",
    "complete_done",
    "done_mask",
    "filled",
    "flat_key",
    "merged",
    "merged_reset",
    "next_root",
    "overlaid",
    "overlay",
    "reset_mask",
    "ruling_keys",
    "step_mdp",
    "terminated_or_truncated",
]
