"""Requests of a caller, checked before anything is sent. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.engine.adapters.base import ResetArguments
from aioenvs.engine.rows import RowIndex
from aioenvs.engine.worker.random_streams import as_python, seed_chain
from aioenvs.errors import describe_envs, shown
from aioenvs.hints import describe
from aioenvs.tensors.done import reset_mask
from aioenvs.tensors.step_mdp import flat_key
from aioenvs.tensors.trees import Key

__all__ = [
    "check_next",
    "check_size",
    "check_tensordict",
    "each_of",
    "envs_of",
    "index_of",
    "merge_arguments",
    "named_envs",
    "read_masks",
    "reset_arguments",
    "rows_of",
    "seeds_of",
    "step_rows",
]


def check_size(td: Any, batch_size: torch.Size) -> None:
    """Refuse anything but a TensorDict of this batch size.

    Raises:
        TypeError: If it is no TensorDict.
        RuntimeError: If it has another batch size.
    """
    if type(td) is not TensorDict:
        check_tensordict(td, batch_size)
    if td.batch_size != batch_size:
        raise RuntimeError(f"Expected a tensordict with shape==env.batch_size, got {td.batch_size} and {batch_size}")


def check_tensordict(td: Any, batch_size: torch.Size) -> None:
    """Refuse anything but a TensorDict.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(td, TensorDictBase):
        raise TypeError(f"expected a TensorDict of shape {tuple(batch_size)}, got {describe(td)}")


def check_next(td: TensorDictBase, entries: Mapping[str, Any]) -> None:
    """Refuse what a step's outcome could not be put into, or merged with.

    Args:
        td: What the step was given.
        entries: Its entries.

    Raises:
        RuntimeError: If it is locked.
        TypeError: If there is something else than a TensorDict under `next`.
    """
    if td.is_locked:
        raise RuntimeError("the TensorDict is locked, so `next` cannot be set in it; unlock_() or clone() it first")
    following = entries.get("next")
    if following is not None and not isinstance(following, TensorDictBase):
        raise TypeError(f"expected a TensorDict, or nothing, under 'next', found {type(following).__name__}")


def named_envs(
    td: Any, envs: Sequence[int], read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
) -> tuple[int, ...]:
    """The envs that a TensorDict names in `env_index`, in its order; all of the batch if it names none.

    Args:
        td: With `env_index`: integers of shape `(k,)`, or of its batch size, or either with a last dim of 1.
        envs: Those of the batch, from which they may be.
        read: Brings a tensor to the host.

    Raises:
        TypeError: If it is no TensorDict, or `env_index` does not hold integers.
        ValueError: If `env_index` has another shape, or names an env twice or that is not there.
    """
    check_tensordict(td, torch.Size([len(envs)]))
    index = td.get("env_index", None)
    if index is None:
        return tuple(envs)
    dtype = index.dtype if isinstance(index, torch.Tensor) else None
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise TypeError(f"expected a tensor of integers as 'env_index', found {shown(index)}")
    if not index.ndim or not index.numel():
        raise ValueError(f"expected the index of one env per row as 'env_index', found {shown(index)}")
    index = read(index)
    named = _envs_in(index)
    if index.ndim > 1 and any(len(set(row)) > 1 for row in index.reshape(len(index), -1).tolist()):
        raise ValueError(f"expected the index of one env per row as 'env_index', found {shown(index)}")
    distinct = set(named)
    if unknown := distinct.difference(envs):
        raise ValueError(f"'env_index' names env {min(unknown)}, but there are only {describe_envs(envs)}")
    if len(distinct) < len(named):
        raise ValueError(f"'env_index' names an env twice, which can only do one thing at a time: {named!r}")
    return tuple(named)


def envs_of(td: TensorDictBase, read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> list[int]:
    """The env of each row, by `env_index`."""
    return _envs_in(read(td.get("env_index")))


def _envs_in(index: torch.Tensor) -> list[int]:
    envs: list[int] = (index if index.ndim == 1 else index.reshape(len(index), -1)[:, 0]).tolist()
    return envs


def index_of(envs: Sequence[int], batch_size: torch.Size) -> torch.Tensor:
    """The `env_index` of rows of these envs, for each part of theirs."""
    index = torch.tensor(envs)
    if len(batch_size) == 1:
        return index
    return index.reshape(-1, *[1] * (len(batch_size) - 1)).expand(batch_size).contiguous()


def read_masks(td: TensorDictBase, shapes: Mapping[Any, Any]) -> dict[Key, torch.Tensor]:
    """The masks of a partial reset, each with at least one dim more than the batch.

    Args:
        td: What the reset was given.
        shapes: Where masks may be, and the shape of each; a mask at the root may always be.

    Raises:
        ValueError: If one is not a bool tensor of its shape or of the batch size, or is where only some have flags.
    """
    keys = [*shapes] if "_reset" in shapes or td.get("_reset", None) is None else ["_reset"]
    if isinstance(td, LazyStackedTensorDict) and td.get("_reset", None) is None:
        _refuse_exclusive(td, keys)
    found = ((key, td.get(key, None)) for key in keys)
    return {
        flat_key(key): _checked(key, mask, td.batch_size, shapes.get(key)) for key, mask in found if mask is not None
    }


def _refuse_exclusive(td: LazyStackedTensorDict, keys: Sequence[Any]) -> None:
    """Refuse masks that only some envs have a place for, since a stack hides them.

    Raises:
        ValueError: If there are any.
    """
    for env, part in enumerate(td.unbind(0)):
        for key in part.keys(include_nested=True, leaves_only=True):
            if flat_key(key)[-1] == "_reset" and key not in keys:
                raise ValueError(
                    f"found a mask of a partial reset at {key!r} of row {env}, where not every env of the batch has "
                    "its flags; use one mask at the root, under '_reset'"
                )


def _checked(key: Any, mask: Any, batch_size: torch.Size, shape: Any) -> torch.Tensor:
    shape = torch.Size([*batch_size, 1]) if shape is None else shape
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        if mask.shape == batch_size:
            return mask.unsqueeze(-1)
        if mask.shape == shape or -1 in shape:
            return mask
    found = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
    raise ValueError(f"{key!r} must be a bool tensor of shape {tuple(batch_size)} or {tuple(shape)}, got {found}")


def rows_of(td: TensorDictBase, masks: Mapping[Key, torch.Tensor], reset_keys: Sequence[Any]) -> RowIndex:
    """The envs that the masks of a reset select, ascending; None if they select all, or there are none.

    Args:
        td: What the reset was given.
        masks: Those in it, checked.
        reset_keys: Where masks may be.

    Raises:
        ValueError: If some of the masks that count are there and others are not.
    """
    if not masks:
        return None
    mask = reset_mask(td, ["_reset"] if ("_reset",) in masks else reset_keys)
    assert mask is not None
    flat = mask.reshape(td.batch_size[0], -1).cpu().numpy()
    return None if flat.all() else np.flatnonzero(flat.any(1))


def step_rows(mask: Any, batch_size: torch.Size) -> RowIndex:
    """The envs that `_step` selects, ascending; None if it selects all or is not there.

    Raises:
        ValueError: If it is not a bool tensor of the right shape, or selects a part of an env only.
    """
    if mask is None:
        return None
    count = batch_size[0]
    allowed = (batch_size, torch.Size([*batch_size, 1]), batch_size[:1], torch.Size([count, 1]))
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape not in allowed:
        found = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"'_step' must be a bool tensor of shape {tuple(allowed[0])} or {tuple(allowed[1])}, got {found}"
        )
    flat = mask.reshape(count, -1).cpu().numpy()
    whole = flat.all(1)
    parts = flat.any(1) & ~whole
    if parts.any():
        env = int(np.flatnonzero(parts)[0])
        raise ValueError(
            "A batched environment's _step mask must select whole workers, so whole envs; found one that selects a "
            f"part of env {env}"
        )
    return None if whole.all() else np.flatnonzero(whole)


def each_of(values: Any, count: int, name: str) -> Sequence[Any]:
    """A list of one for each env as it is, anything else as many times as there are envs.

    Raises:
        RuntimeError: If the list has another length.
    """
    if not isinstance(values, list | tuple):
        return [values] * count
    if len(values) != count:
        raise RuntimeError(f"{name} must have one for each of {count} envs, but has {len(values)}")
    return values


def seeds_of(seed: int | None, counts: Mapping[int, int], *, static: bool = False) -> tuple[dict[int, int], int]:
    """The seed of each env, by index, and the next one of the chain.

    Args:
        seed: The first env's, None to draw one.
        counts: How many seeds each env uses up, by index, in the order of the batch.
        static: Give the same seed to all.
    """
    seeds, following = seed_chain(seed, sum(counts.values()), static=static)
    own, used = {}, 0
    for env, count in counts.items():
        own[env] = seeds[used]
        used += count
    return own, following


def reset_arguments(
    counts: Mapping[int, int], each: Sequence[Mapping[str, Any]] | None, common: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return the arguments of each env's own `reset`: the common ones, a seed of the chain, then its own.

    Args:
        counts: How many seeds each env uses up, by index, in the order of the batch.
        each: A dict for each env, in that order.
        common: What all get; `seed` is the first of a chain.

    Raises:
        RuntimeError: If there are not as many dicts as envs.
    """
    if each is not None and len(each) != len(counts):
        raise RuntimeError(f"list_of_kwargs must have one dict for each of {len(counts)} envs, but has {len(each)}")
    shared = dict(common)
    seed = shared.pop("seed", None)
    seeds = seeds_of(seed, counts)[0] if seed is not None else None
    arguments: dict[int, dict[str, Any]] = {}
    for row, env in enumerate(counts):
        own = shared | ({} if seeds is None else {"seed": seeds[env]}) | dict(each[row] if each is not None else {})
        if "seed" in own:
            own["seed"] = as_python(own["seed"])
        if own:
            arguments[env] = own
    return arguments


def merge_arguments(
    envs: Collection[int], kwargs: Mapping[int, Mapping[str, Any]], given: Mapping[int, ResetArguments]
) -> dict[int, ResetArguments]:
    """Keyword arguments, and what the caller knows, of those envs that are reset."""
    merged = {}
    for env in envs:
        known = given.get(env)
        if env in kwargs:
            merged[env] = ResetArguments(kwargs[env]) if known is None else known._replace(kwargs=kwargs[env])
        elif known is not None and (known.given or known.objects):
            merged[env] = known
    return merged
