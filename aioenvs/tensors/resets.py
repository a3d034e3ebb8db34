"""Partial resets: who is meant, and how what they began with joins what the others have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.errors import shown
from aioenvs.specs.tensorclasses import is_structure, like, opened
from aioenvs.tensors.done import nodes_of, over_extra_dims, ruling_keys
from aioenvs.tensors.step_mdp import Entries, NestedKey, is_node, overlaid

__all__ = ["merged", "merged_reset", "reset_mask"]


def reset_mask(td: TensorDictBase, reset_keys: Sequence[NestedKey]) -> torch.Tensor | None:
    """Which elements of the batch a reset is meant for, by the root rule.

    Args:
        td: What the reset was given.
        reset_keys: The keys of all masks that there may be, each shaped like the flags of its node.

    Returns:
        A mask of shape `td.batch_size`; None if there are no masks, so that all are meant.

    Raises:
        ValueError: If some masks that count are there and others are not.
    """
    masks = _masks(td, reset_keys)
    if not masks:
        return None
    return functools.reduce(torch.logical_or, [over_extra_dims(mask, td.ndim) for mask in masks.values()])


def _masks(td: TensorDictBase, reset_keys: Sequence[NestedKey]) -> dict[NestedKey, torch.Tensor]:
    """The masks that count."""
    ruling = ruling_keys(reset_keys)
    masks = {key: mask for key in ruling if (mask := td.get(key, None)) is not None}
    if masks and len(masks) < len(ruling):
        missing = [key for key in ruling if key not in masks]
        raise ValueError(
            f"expected masks under all of {ruling!r} or under none, found only {list(masks)!r}; set {shown(missing)} "
            "too"
        )
    return masks


def merged_reset(td: TensorDictBase, fresh: TensorDictBase, reset_keys: Sequence[NestedKey]) -> TensorDictBase:
    """Return the results of a partial reset: `fresh` where a mask says so, `td` elsewhere.

    Each node with a mask of its own, that no node further out hides, goes by that mask; what is outside of them goes
    by all of them together. Entries that only one of the two has are taken as they are. Neither is changed.

    Args:
        td: What the reset was given, with the masks.
        fresh: What it came to, as if all had been reset.
        reset_keys: The keys of all masks that there may be.

    Returns:
        A TensorDict without the masks.
    """
    masks = _masks(td, reset_keys)
    rest = td.exclude(*reset_keys)
    if not masks:
        return overlaid(rest, fresh)
    whole = reset_mask(td, reset_keys)
    assert whole is not None
    result = merged(whole, fresh, rest)
    for path in nodes_of(masks):
        new, old = (fresh.get(path, None), rest.get(path, None)) if path else (None, None)
        if new is not None and old is not None:
            mask = over_extra_dims(masks[(*path, "_reset")], new.ndim)
            result.set(path, merged(mask, new, old))
    return result


def merged(mask: torch.Tensor, fresh: Any, kept: Any) -> Any:
    """`fresh` where the mask is True, `kept` elsewhere; entries that only one of them has are taken as they are.

    Nothing is changed in place. Where an element is stacked lazily, nothing of it is copied either.

    Args:
        mask: Of at most so many dims as the two have.
        fresh: A TensorDict, a tensor, or non-tensor data.
        kept: The same.
    """
    if not mask.ndim and not is_node(fresh):
        return fresh if mask else kept
    if type(fresh) is torch.Tensor:
        return torch.where(mask.reshape(mask.shape + (1,) * (fresh.ndim - mask.ndim)), fresh, kept)
    if is_structure(fresh) and _is_alike(opened(fresh), opened(kept)):
        return like(fresh, _merged_entries(mask, opened(fresh), opened(kept)))
    if not is_node(fresh):
        choices = zip(mask.unbind(0), fresh.unbind(0), kept.unbind(0), strict=True)
        return LazyStackedTensorDict.lazy_stack([merged(*choice) for choice in choices], 0)
    stack = next((td for td in (fresh, kept) if isinstance(td, LazyStackedTensorDict)), None)
    return _merged_entries(mask, fresh, kept) if stack is None else _merged_parts(mask, fresh, kept, stack)


def _is_alike(fresh: Any, kept: Any) -> bool:
    """Whether two have the same entries, and none is stacked lazily."""
    return type(fresh) is type(kept) is TensorDict and fresh.keys() == kept.keys()


def _merged_entries(mask: torch.Tensor, fresh: TensorDictBase, kept: TensorDictBase) -> TensorDictBase:
    others: Entries = dict(kept.items())
    entries: Entries = {
        name: value if (other := others.pop(name, None)) is None else merged(mask, value, other)
        for name, value in fresh.items()
    }
    return TensorDict._new_unsafe(
        {**entries, **others},
        batch_size=fresh.batch_size,
        device=fresh.device,
        names=fresh._maybe_names(),
        nested=False,
    )


def _merged_parts(
    mask: torch.Tensor, fresh: TensorDictBase, kept: TensorDictBase, stack: LazyStackedTensorDict
) -> TensorDictBase:
    dim = stack.stack_dim
    news, olds = fresh.unbind(dim), kept.unbind(dim)
    masks = mask.unbind(dim) if dim < mask.ndim else [mask] * len(news)
    parts = [merged(*choice) for choice in zip(masks, news, olds, strict=True)]
    return LazyStackedTensorDict(*parts, stack_dim=dim, stack_dim_name=stack._td_dim_name)
