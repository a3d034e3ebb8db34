"""From one step's TensorDict to the next step's root: what stays, and what is left behind."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase

from aioenvs.engine.layout import Key
from aioenvs.hints import describe
from aioenvs.specs.mapping import NestedKey as NestedKey
from aioenvs.specs.mapping import is_structure, like, opened

Entries = dict[str, Any]
CONTROL = frozenset(("next", "_reset", "_step"))

Tree = Mapping[str, Any]
"""Names that are left out: None for a whole entry, a Tree for some of what is in it."""

MASKS: Tree = {"_reset": None, "_step": None}


def step_mdp(
    tensordict: TensorDictBase,
    next_tensordict: TensorDictBase | None = None,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
    reward_keys: NestedKey | Sequence[NestedKey] = "reward",
    done_keys: NestedKey | Sequence[NestedKey] = "done",
    action_keys: NestedKey | Sequence[NestedKey] = "action",
) -> TensorDictBase:
    """The root of the next step: what is under `next`, and the root's other entries.

    Where both have an entry, the one under `next` prevails, at any depth. Nothing is copied, `tensordict` stays as it
    was, and what is set in the result later does not show in it. Masks of this step (`_reset`, `_step`) are left out,
    and so are nodes of which nothing remains.

    Args:
        tensordict: A step's result, with `next`, of any batch size; it may be stacked lazily, with different keys.
        next_tensordict: Updated with the result, and returned, if given.
        keep_other: Keep the root's entries that are not actions, rewards or flags.
        exclude_reward: Leave out the rewards.
        exclude_done: Leave out the flags named in `done_keys`.
        exclude_action: Leave out the actions; else the root's stay.
        reward_keys: One key or a list of keys; a tuple of names is one nested key.
        done_keys: The same, of the flags; the default names `done` alone.
        action_keys: The same, of the actions.

    Returns:
        A TensorDict of the same batch size, device and dim names.

    Raises:
        TypeError: If it has to be awaited.
        KeyError: If there is no `next`.

    >>> import torch
    >>> td = TensorDict({"action": torch.ones(2), "next": {"observation": torch.zeros(2, 4)}}, [2])
    >>> sorted(step_mdp(td).keys())
    ['observation']
    """
    if inspect.isawaitable(tensordict):
        raise TypeError(f"expected a step's result, a TensorDict, got {describe(tensordict)}")
    rewards, flags, actions = _hashable(reward_keys), _hashable(done_keys), _hashable(action_keys)
    excluded = (
        *(rewards if exclude_reward else ()),
        *(flags if exclude_done else ()),
        *(actions if exclude_action else ()),
    )
    kept = () if keep_other or exclude_action else actions
    root = next_root(tensordict, excluded, None if keep_other else kept)
    return root if next_tensordict is None else next_tensordict.update(root)


def next_root(
    td: TensorDictBase, excluded: tuple[NestedKey, ...], selected: tuple[NestedKey, ...] | None = None
) -> TensorDictBase:
    """`step_mdp` with the keys worked out beforehand: quicker where the same ones are used step after step.

    `excluded` keys are left out; `selected` ones are taken from the root, all if it is None.
    """
    if isinstance(td, LazyStackedTensorDict):
        return _restacked(td, [next_root(part, excluded, selected) for part in td.tensordicts])
    new = td.get("next", None)
    if new is None:
        raise KeyError(f"expected the result of a step, with 'next', but found only the keys {sorted(td.keys())!r}")
    old = td if selected is None else td.select(*selected, strict=False)
    root = _joined(old, new, _left_out(excluded))
    return td.empty() if root is None else root


def overlaid(old: TensorDictBase, new: TensorDictBase) -> TensorDictBase:
    """Return the entries of `new`, and of `old` where `new` has none, at any depth; on `old`'s device if it has one.

    Nothing is copied or changed. A tensorclass of `new` counts as a whole, and so does a node of another size.
    """
    joined = _joined(old, new, {})
    if joined is None:
        return old.copy()
    if joined.device != old.device:
        joined = joined.clear_device_() if old.device is None else joined.to(old.device)
    if not isinstance(joined, LazyStackedTensorDict) and old._has_names():
        joined.names = old.names
    return joined


def overlay(td: TensorDictBase, new: TensorDictBase) -> None:
    """Put what is in `new` into `td`, in place; see `overlaid`."""
    if isinstance(td, LazyStackedTensorDict):
        for part, own in zip(td.tensordicts, new.unbind(td.stack_dim), strict=True):
            overlay(part, own)
        return
    for name, value in new.items():
        mine = td.get(name, None) if is_node(value) else None
        td.set(name, overlaid(mine, value) if is_node(mine) else value)


def _hashable(keys: NestedKey | Sequence[NestedKey]) -> tuple[NestedKey, ...]:
    return (keys,) if isinstance(keys, str | tuple) else tuple(keys)


@functools.lru_cache(maxsize=256)
def _left_out(keys: tuple[NestedKey, ...]) -> Tree:
    tree: dict[str, Any] = {"next": None, **MASKS}
    for key in keys:
        *nodes, name = flat_key(key)
        branch = tree
        for node in nodes:
            branch = branch.setdefault(node, dict(MASKS))
            if branch is None:  # all of it is left out already
                break
        else:
            branch[name] = None
    return tree


def flat_key(key: Any) -> Key:
    """The names of a key, from the outermost to the innermost."""
    return (key,) if isinstance(key, str) else tuple(name for part in key for name in flat_key(part))


def is_node(value: Any) -> bool:
    """Whether a value is a TensorDict with entries of its own, rather than a leaf."""
    return isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack)


def _joined(old: TensorDictBase | None, new: TensorDictBase | None, left_out: Tree) -> TensorDictBase | None:
    """Return the entries of `new`, and those of `old` besides, without those left out; None if there are none."""
    model: Any = old if new is None else new
    if is_structure(model):  # of two, the new one counts, as it is one value
        inner = _joined(opened(old), None, left_out) if new is None else _joined(None, opened(new), left_out)
        return None if inner is None else like(model, inner)
    if isinstance(new, LazyStackedTensorDict) or isinstance(old, LazyStackedTensorDict):
        return _joined_parts(old, new, left_out)
    entries: Entries = {}
    theirs: Iterable[tuple[str, Any]] = () if new is None else new.items()
    for name, value in theirs:
        branch = left_out.get(name, MASKS)
        if branch is None:
            continue
        if type(value) is torch.Tensor or not (is_node(value) or is_structure(value)):
            entries[name] = value
        else:
            mine = None if old is None else old.get(name, None)
            entries[name] = _joined(mine if is_node(mine) else None, value, branch)
    if old is not None:
        fits = new is None or old.batch_size == new.batch_size
        for name, value in old.items():
            branch = left_out.get(name, MASKS)
            if branch is None or name in entries or not (fits or _fits(value, model.batch_size)):
                continue
            entries[name] = _joined(value, None, branch) if is_node(value) or is_structure(value) else value
    entries = {name: value for name, value in entries.items() if value is not None}
    if not entries:
        return None
    return TensorDict._new_unsafe(
        entries, batch_size=model.batch_size, device=model.device, names=model._maybe_names(), nested=False
    )


def _fits(value: Any, batch_size: torch.Size) -> bool:
    shape: torch.Size = value.shape
    return shape[: len(batch_size)] == batch_size


def _joined_parts(old: Any, new: Any, left_out: Tree) -> TensorDictBase | None:
    """Return the joined entries where one is stacked lazily: element by element, as their keys may differ."""
    stack = new if isinstance(new, LazyStackedTensorDict) else old
    theirs, mine = _parts(new, stack.stack_dim), _parts(old, stack.stack_dim)
    if theirs is None:
        assert mine is not None
        pairs: list[tuple[Any, Any]] = [(part, None) for part in mine]
    elif mine is None or len(mine) != len(theirs):  # a number of agents that varies
        pairs = [(None, part) for part in theirs]
    else:
        pairs = list(zip(mine, theirs, strict=True))
    joined = [_joined(mine, theirs, left_out) for mine, theirs in pairs]
    if all(part is None for part in joined):
        return None
    models = [mine if theirs is None else theirs for mine, theirs in pairs]
    return _restacked(stack, [m.empty() if part is None else part for m, part in zip(models, joined, strict=True)])


def _parts(td: TensorDictBase | None, dim: int) -> Sequence[TensorDictBase] | None:
    if td is None or td.ndim <= dim:
        return None
    if isinstance(td, LazyStackedTensorDict) and td.stack_dim == dim:
        return list(td.tensordicts)
    return list(td.unbind(dim))


def _restacked(stack: LazyStackedTensorDict, parts: Sequence[TensorDictBase]) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*parts, stack_dim=stack.stack_dim, stack_dim_name=stack._td_dim_name)


def filled(entries: Entries, others: Entries, left_out: frozenset[str] = frozenset()) -> Entries:
    """The entries, and those of the others that they do not have, but for outermost names that are left out.

    Of the entries, a dict stands for a nested TensorDict that is still to be made.
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
    """Return the entries of a nested TensorDict, made or still to be made."""
    if type(value) is dict:
        return value
    return dict(value.items()) if isinstance(value, TensorDict) else None
