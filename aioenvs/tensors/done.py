"""When episodes end and begin: the flags `done`, `terminated` and `truncated`, and the masks of partial resets.

A node's flags are of shape `(*batch, 1)` or `(*batch,)`, or have more dims (agents). **Root rule**: the flags of a
node hide those of the nodes inside it; so an env with a `done` at its root is over when that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.errors import shown
from aioenvs.specs import Categorical, Composite
from aioenvs.specs.mapping import NestedKey, is_structure, like, opened
from aioenvs.tensors.step_mdp import Entries, flat_key, is_node, overlaid

FLAGS = ("done", "terminated", "truncated")
Path = tuple[str, ...]


def nodes_of(keys: Iterable[NestedKey]) -> dict[Path, tuple[str, ...]]:
    """The keys by the node that they are in, outer nodes first: its path, and the names there."""
    return _nodes_of(tuple(keys))


@functools.lru_cache(maxsize=256)
def _nodes_of(keys: tuple[NestedKey, ...]) -> dict[Path, tuple[str, ...]]:
    nodes: dict[Path, tuple[str, ...]] = {}
    for path in sorted(map(flat_key, keys), key=lambda path: (len(path), path)):
        nodes[path[:-1]] = (*nodes.get(path[:-1], ()), path[-1])
    return nodes


@functools.lru_cache(maxsize=256)
def _ruling(keys: tuple[NestedKey, ...]) -> tuple[tuple[Path, tuple[str, ...]], ...]:
    """The nodes that no other node hides."""
    nodes = _nodes_of(keys)
    return tuple(
        (path, names) for path, names in nodes.items() if not any(path[:depth] in nodes for depth in range(len(path)))
    )


def ruling_keys(keys: Iterable[NestedKey]) -> list[NestedKey]:
    """The keys that no node further out hides.

    >>> ruling_keys(["done", ("agents", "done")]), ruling_keys([("agents", "done"), ("agents", "a", "done")])
    (['done'], [('agents', 'done')])
    """
    paths = [(*path, name) for path, names in _ruling(tuple(keys)) for name in names]
    return [path if len(path) > 1 else path[0] for path in paths]


def any_done(td: TensorDictBase, done_keys: Sequence[NestedKey]) -> bool:
    """Whether an episode ended anywhere, by the root rule, in a root or a `next`; missing flags count as False."""
    if isinstance(td, LazyStackedTensorDict):
        return any(any_done(part, done_keys) for part in td.tensordicts)
    return any(bool(flag.any()) for flag in _ruling_flags(td, done_keys, every=False))


def done_mask(td: TensorDictBase, done_keys: Sequence[NestedKey], *, every: bool = False) -> torch.Tensor:
    """For which elements of the batch the episode ended, by the root rule: bool of shape `td.batch_size`.

    Of the declared `done_keys`, those that are missing count as False. With `every`, all that an element holds (agents,
    nodes) must have ended, rather than any.
    """
    if isinstance(td, LazyStackedTensorDict):
        return torch.stack([done_mask(part, done_keys, every=every) for part in td.tensordicts], td.stack_dim)
    masks = list(_ruling_flags(td, done_keys, every=every))
    if len(masks) == 1:
        return masks[0]
    if not masks:
        return torch.zeros(td.batch_size, dtype=torch.bool, device=td.device)
    return functools.reduce(torch.logical_and if every else torch.logical_or, masks)


def _ruling_flags(td: TensorDictBase, done_keys: Sequence[NestedKey], *, every: bool) -> Iterator[torch.Tensor]:
    """The flags of the nodes that no other node with flags hides, each as one of the dims of `td`."""
    found: list[Path] = []
    for path, names in _nodes_of(tuple(done_keys)).items():
        if any(path[: len(outer)] == outer for outer in found):
            continue
        node: Any = td.get(path, None) if path else td
        flag = None if node is None else _flag(node, names, td.ndim, every)
        if flag is not None:
            found.append(path)
            yield flag


def _flag(node: Any, names: Iterable[str], ndim: int, every: bool) -> torch.Tensor | None:
    """A node's flags as one of so many dims; None if it has none."""
    if isinstance(node, LazyStackedTensorDict):
        return _stacked_flag(node, names, ndim, every)
    flag = None
    for name in names:
        value = node.get(name, None)
        if value is not None:
            flag = value if flag is None else flag | value
    return flag if flag is None else over_extra_dims(flag, ndim, every=every)


def _stacked_flag(node: LazyStackedTensorDict, names: Iterable[str], ndim: int, every: bool) -> torch.Tensor | None:
    """Return the flag of a node whose elements may differ in shape and keys."""
    outside = node.stack_dim < ndim
    flags = [_flag(part, names, ndim - outside, every) for part in node.tensordicts]
    found = [flag for flag in flags if flag is not None]
    if not found:
        return None
    if outside:
        missing = torch.zeros_like(found[0])
        return torch.stack([missing if flag is None else flag for flag in flags], node.stack_dim)
    return over_extra_dims(torch.stack(found, -1), ndim, every=every)


def over_extra_dims(mask: torch.Tensor, ndim: int, *, every: bool = False) -> torch.Tensor:
    """A mask of so many dims: whether anything (or everything) in the dims beyond is True."""
    if mask.ndim <= ndim:
        return mask
    flat = mask.flatten(ndim) if mask.ndim > ndim + 1 else mask
    return flat.all(-1) if every else flat.any(-1)


def complete_done(td: TensorDictBase, done_keys: Sequence[NestedKey]) -> TensorDictBase:
    """Set the declared flags that are missing, in place, in every node that exists; returns `td`.

    `done` is `terminated | truncated`, `terminated` is `done`, `truncated` is False; all are False where a node has
    none of them.

    Raises:
        RuntimeError: If a node has `done` and `truncated`, which does not tell what `terminated` is.
    """
    if isinstance(td, LazyStackedTensorDict):
        for part in td.tensordicts:
            complete_done(part, done_keys)
        return td
    for path, names in nodes_of(done_keys).items():
        node = td.get(path, None) if path else td
        if node is not None:
            _complete(node, names, path)
    return td


def _complete(node: Any, names: Sequence[str], path: Path) -> None:
    if isinstance(node, LazyStackedTensorDict):
        for part in node.tensordicts:
            _complete(part, names, path)
        return
    have = {name: value for name in names if (value := node.get(name, None)) is not None}
    for name in names:
        if name not in have:
            node.set(name, _inferred(node, name, have, path))


def _inferred(node: TensorDictBase, name: str, have: dict[str, torch.Tensor], path: Path) -> torch.Tensor:
    """A flag that is missing, from those that a node has."""
    if not have:
        return torch.zeros((*node.batch_size, 1), dtype=torch.bool, device=node.device)
    if name == "done" and have.keys() <= {"terminated", "truncated"}:
        return functools.reduce(torch.logical_or, have.values()).clone()
    if name == "terminated" and "done" in have:
        if "truncated" in have:
            where = f"the node {path!r}" if path else "the root"
            raise RuntimeError(
                f"found 'done' and 'truncated' but no 'terminated' in {where}, and cannot tell one from the others; "
                "return 'terminated' too, or leave out 'done'"
            )
        return have["done"].clone()
    return torch.zeros_like(next(iter(have.values())))


def complete_done_spec(spec: Composite) -> Composite:
    """Give each done node `done` and `terminated`, like the one it has; an empty one gets both.

    Flags of one node that differ in their shape are a ValueError.
    """
    leaves = {name: leaf for name, leaf in spec.items() if not isinstance(leaf, Composite)}
    if len({leaf.shape for leaf in leaves.values()}) > 1:
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        raise ValueError(f"expected done flags of one shape beside each other, found {shapes!r}")
    for name, other in (("done", "terminated"), ("terminated", "done")):
        if name not in leaves and other in leaves:
            spec[name] = leaves[other].clone()
    for name in list(spec):
        if isinstance(inner := spec[name], Composite):
            spec[name] = complete_done_spec(inner)
    if spec.is_empty():
        for name in ("done", "terminated"):
            spec[name] = Categorical(2, (*spec.shape, 1), device=spec.device, dtype=torch.bool)
    return spec


def terminated_or_truncated(
    td: TensorDictBase,
    full_done_spec: Composite | None = None,
    key: str | None = "_reset",
    write_full_false: bool = False,
) -> bool:
    """Write into each node whether its episode ended: `done | terminated | truncated`, in place.

    Args:
        td: What holds the flags: a root, or what is under `next`.
        full_done_spec: Where flags are declared; None for wherever they are found.
        key: The name under which they are written; None to write nothing.
        write_full_false: Write them also if no episode ended.

    Returns:
        Whether an episode ended, by the root rule.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"done": torch.tensor([[True], [False]]), "a": {"done": torch.tensor([[False], [True]])}}, [2])
    >>> terminated_or_truncated(td), td["_reset"].tolist(), td["a", "_reset"].tolist()
    (True, [[True], [False]], [[False], [True]])
    """
    found: list[tuple[TensorDictBase, torch.Tensor]] = []
    over = _ended(td, full_done_spec, found)
    if key is not None and (over or write_full_false):
        for node, flag in found:
            node.set(key, flag)
    return over


def _ended(td: TensorDictBase, spec: Any, found: list[tuple[TensorDictBase, torch.Tensor]]) -> bool:
    """Whether an episode ended in a node, by the root rule; adds the flags of it and of all nodes inside it."""
    if isinstance(td, LazyStackedTensorDict):
        specs = [None] * len(td.tensordicts) if spec is None else spec.unbind(td.stack_dim)
        ends = [_ended(part, own, found) for part, own in zip(td.tensordicts, specs, strict=True)]
        return any(ends)
    flag: torch.Tensor | None = None
    inner = False
    for name, declared in (td if spec is None else spec).items():
        if is_node(declared) or hasattr(declared, "keys"):  # a Composite
            node = td.get(name, None)
            if node is not None:
                inner = _ended(node, None if spec is None else declared, found) or inner
        elif name in FLAGS or spec is not None:
            value = td.get(name, None)
            if value is not None:
                flag = value if flag is None else flag | value
    if flag is None:
        return inner
    found.append((td, flag))
    return bool(flag.any())


def reset_mask(td: TensorDictBase, reset_keys: Sequence[NestedKey]) -> torch.Tensor | None:
    """Which elements of the batch a reset is meant for, by the root rule: bool of shape `td.batch_size`; None for all.

    `reset_keys` are the keys of all masks that there may be, each shaped like the flags of its node.

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
    """Return the results of a partial reset: `fresh` where a mask in `td` says so, `td` elsewhere, without the masks.

    Each node with a mask of its own, that no node further out hides, goes by that mask; what is outside of them goes
    by all of them together. Entries that only one of the two has are taken as they are. Neither is changed.
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

    Both are TensorDicts, tensors or non-tensor data of at least as many dims as the mask. Nothing is changed in place.
    Where an element is stacked lazily, nothing of it is copied either.
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
