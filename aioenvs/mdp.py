"""From one step's TensorDict to the next step's root: what stays, and what is left behind."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase

__all__ = ["CONTROL", "LEFT_BEHIND", "Entries", "filled", "step_mdp"]

Entries = dict[str, Any]
CONTROL = frozenset(("next", "_reset", "_step"))
LEFT_BEHIND = CONTROL | {"action", "reward"}


def step_mdp(td: TensorDictBase) -> TensorDict:
    """The root of the next step: what is under `next`, without the reward, and the root's other entries.

    Action, reward and masks of this step are left out; nothing is copied.

    Args:
        td: A step's result, with `next`, of any batch size.

    Raises:
        KeyError: If there is no `next`.

    >>> import torch
    >>> td = TensorDict({"action": torch.ones(2), "next": {"observation": torch.zeros(2, 4)}}, [2])
    >>> sorted(step_mdp(td).keys())
    ['observation']
    """
    entries = filled({}, dict(td["next"].items()), LEFT_BEHIND)
    return TensorDict(filled(entries, dict(td.items()), LEFT_BEHIND), batch_size=td.batch_size, device=td.device)


def filled(entries: Entries, others: Entries, left_out: frozenset[str] = frozenset()) -> Entries:
    """The entries, and those of the others that they do not have, at any depth.

    Args:
        entries: What prevails; a dict stands for a nested TensorDict that is still to be made.
        others: What is added.
        left_out: Outermost names that are not.
    """
    for name, value in others.items():
        mine = entries.get(name)
        if mine is None:
            if name not in left_out:
                entries[name] = value
        elif isinstance(value, TensorDictBase) and (inner := _opened(mine)) is not None:
            entries[name] = filled(inner, dict(value.items()))
    return entries


def _opened(value: Any) -> Entries | None:
    """What is in a nested TensorDict, made or still to be made."""
    if type(value) is dict:
        return value
    return dict(value.items()) if isinstance(value, TensorDict) else None
