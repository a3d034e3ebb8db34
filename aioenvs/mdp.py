"""From one step's TensorDict to the next step's root."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase

__all__ = ["step_mdp"]

MASKS = ("_reset", "_step")


def step_mdp(td: TensorDictBase) -> TensorDict:
    """The root of the next step: what is under `next`, without reward, and the root's other keys.

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
    following: TensorDictBase = td["next"]
    left_out = {"next", "action", "reward", *MASKS}
    values: dict[str, Any] = {name: value for name, value in td.items() if name not in left_out}
    values.update((name, value) for name, value in following.items() if name != "reward")
    return TensorDict(values, batch_size=td.batch_size, device=td.device)
