"""Actions of which an observation says which are allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from aioenvs.mdp import NestedKey
from aioenvs.specs import Categorical, Composite, OneHot

__all__ = ["draw_allowed", "mask_keys"]


def mask_keys(actions: Composite, keys: Iterable[NestedKey], observations: Composite) -> dict[NestedKey, NestedKey]:
    """Find the observations that say which actions are allowed: `action_mask` beside one, a flag for each choice.

    Args:
        actions: The specs of the actions.
        keys: Those of the actions.
        observations: The specs of the observations.

    Returns:
        The keys of the masks, by those of the actions.
    """
    found: dict[NestedKey, NestedKey] = {}
    known = set(observations.keys(True, True))
    for key in keys:
        mask_key: NestedKey = "action_mask" if isinstance(key, str) else (*key[:-1], "action_mask")
        spec: Any = actions[key]
        if mask_key in known and type(spec) in (Categorical, OneHot):
            choices = spec.shape if type(spec) is OneHot else (*spec.shape, spec.n)
            if tuple(observations[mask_key].shape) == tuple(choices):
                found[key] = mask_key
    return found


def draw_allowed(spec: Any, mask: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """Draw a random value among those that a mask allows; where it allows none, among all.

    Args:
        spec: A `Categorical` or `OneHot`.
        mask: Which choices are allowed, `(*lead, *spec.shape, n)`, or `(*lead, *spec.shape)` for `OneHot`.
        lead: The dims that the spec does not have.
    """
    allowed = mask.to(torch.bool)
    masked = spec.expand(*lead, *spec.shape).clone()
    masked.update_mask(allowed | ~allowed.any(-1, keepdim=True))
    drawn: torch.Tensor = masked.rand()
    return drawn
