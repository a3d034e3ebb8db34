"""Specs that follow from what there is (a Gymnasium space, a TensorDict), and tensors of values not made for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from aioenvs.engine.adapters.spaces import Alike, Numbers, conform
from aioenvs.engine.layout import Key
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.specs.base import DeviceLike, TensorSpec
from aioenvs.specs.composite import Composite
from aioenvs.specs.discrete import Binary, Categorical, MultiCategorical
from aioenvs.specs.interval import Bounded, Unbounded
from aioenvs.specs.leaf import NonTensor, numpy_dtype
from aioenvs.specs.mapping import is_structure, like, opened
from aioenvs.specs.onehot import MultiOneHot, OneHot
from aioenvs.specs.stacked import stack_specs

if TYPE_CHECKING:
    import gymnasium


def leaf_spec(space: gymnasium.Space[Any], device: DeviceLike | None = None, *, one_hot: bool = False) -> TensorSpec:
    """Return the spec of the values of a space that contains no other spaces.

    Integers stay integers, unless `one_hot`: `Discrete` becomes `Categorical`. What has no fixed shape
    (Text, Sequence, Graph, OneOf and spaces unknown here) becomes `NonTensor` of shape ().

    Args:
        space: any space but Dict and Tuple.
        device: the device of the spec.
        one_hot: encode the choices of Discrete and MultiDiscrete, as int64. As in TorchRL, MultiDiscrete becomes
            `OneHot` of shape `(*shape, n)` where all n are the same, else `MultiOneHot`; where no spec can say it
            (more than one dim, with different rows), the integers stay.

    Returns:
        The spec; its `encode` and `to_numpy` convert the space's values.

    Raises:
        TypeError: the space is a Dict or a Tuple, or no space at all.

    >>> from gymnasium.spaces import Box, Discrete
    >>> leaf_spec(Discrete(3, start=1))
    Categorical(n=3, start=1, shape=(), dtype=int64, device=cpu)
    >>> leaf_spec(Box(0, 255, (2, 2), dtype="uint8"))
    Bounded(low=0, high=255, shape=(2, 2), dtype=uint8, device=cpu)
    >>> leaf_spec(Discrete(3), one_hot=True)
    OneHot(n=3, shape=(3,), dtype=int64, device=cpu)
    """
    from gymnasium import Space, spaces

    match space:
        case spaces.Box():
            return _box_spec(space, device)
        case spaces.Discrete():
            if one_hot:
                return OneHot(int(space.n), dtype=torch.int64, device=device, start=int(space.start))
            return Categorical(int(space.n), (), dtype=_dtype(space), device=device, start=int(space.start))
        case spaces.MultiDiscrete():
            if one_hot and (encoded := _multi_one_hot(space, device)) is not None:
                return encoded
            return MultiCategorical(space.nvec, space.shape, dtype=_dtype(space), device=device, start=space.start)
        case spaces.MultiBinary():
            return Binary(shape=space.shape, dtype=_dtype(space), device=device)
        case spaces.Dict() | spaces.Tuple():
            raise TypeError(f"expected a space that contains no other spaces, found {shown(space)}")
        case Space():
            return NonTensor((), device=device)
        case _:
            raise TypeError(f"expected a gymnasium space, found {shown(space)}")


def _multi_one_hot(space: gymnasium.spaces.MultiDiscrete, device: DeviceLike | None) -> TensorSpec | None:
    """The one-hot spec of several choices; None where there is none."""
    nvec, start = np.asarray(space.nvec), np.broadcast_to(space.start, space.shape)
    if not nvec.size:
        return None
    if len(np.unique(nvec)) == len(np.unique(start)) == 1:
        n = int(nvec.flat[0])
        return OneHot(n, (*space.shape, n), dtype=torch.int64, device=device, start=int(start.flat[0]))
    row, first = nvec.reshape(-1, nvec.shape[-1])[0], start.reshape(-1, nvec.shape[-1])[0]
    if (nvec != row).any() or (start != first).any():
        return None
    return MultiOneHot(row, (*space.shape[:-1], int(row.sum())), dtype=torch.int64, device=device, start=first)


def rows_spec(spaces: Alike, device: DeviceLike | None = None, *, one_hot: bool = False) -> TensorSpec:
    """Return the spec of an array whose rows are the values of these spaces, which may differ in their bounds.

    Args:
        spaces: One for each row, that contains no other spaces.
        device: See `leaf_spec`.
        one_hot: See `leaf_spec`.

    Raises:
        SpecMismatchError: They differ, and their values are to be one-hot.

    >>> from gymnasium.spaces import Discrete
    >>> rows_spec(Alike((Discrete(2), Discrete(3))))
    MultiCategorical(nvec=[2, 3], shape=(2,), dtype=int64, device=cpu)
    """
    from gymnasium import spaces as gym_spaces

    space, count = spaces.same, len(spaces.spaces)
    if space is not None:
        spec = leaf_spec(space, device, one_hot=one_hot)
        return NonTensor((count,), device=device) if isinstance(spec, NonTensor) else _repeated(spec, count)
    match spaces.spaces[0]:
        case gym_spaces.Box():
            low, high = (np.stack([getattr(each, end) for each in spaces.spaces]) for end in ("low", "high"))
            return leaf_spec(gym_spaces.Box(low, high, dtype=low.dtype.type), device)
        case gym_spaces.Discrete() | gym_spaces.MultiDiscrete() if one_hot:
            raise SpecMismatchError(
                f"expected the same space for all where values are one-hot, found {shown(spaces.spaces)}"
            )
        case gym_spaces.Discrete() as first:
            counts, starts = ([int(getattr(each, name)) for each in spaces.spaces] for name in ("n", "start"))
            return MultiCategorical(counts, (count,), dtype=_dtype(first), device=device, start=starts)
        case gym_spaces.MultiDiscrete() as first:
            counts, starts = ([getattr(each, name) for each in spaces.spaces] for name in ("nvec", "start"))
            shape = (count, *first.shape)
            return MultiCategorical(np.stack(counts), shape, dtype=_dtype(first), device=device, start=np.stack(starts))
        case _:
            return NonTensor((count,), device=device)


def _repeated(spec: TensorSpec, count: int) -> TensorSpec:
    return spec.unsqueeze(0).expand(count, *spec.shape)


def composites(
    specs: Mapping[str, Any], device: DeviceLike | None = None, *, one_hot: bool = False
) -> tuple[Composite, Composite]:
    """Return the output spec and the input spec of an env that said in Gymnasium's terms what its values may be.

    Args:
        specs: The "observation" and the "action": spaces by key, or those of several agents as `Alike`; "reward" and
            "done" where they are not those of a single agent; "counts", how many agents there are below which name; and
            the "batch_size" of an env that has one of its own, which all of these begin with.
        device: The device of the specs.
        one_hot: See `leaf_spec`; of actions alone.
    """
    counts, size = specs.get("counts", {}), specs.get("batch_size", ())
    flags = {(name,): Numbers("|b1", (1,)) for name in ("done", "terminated", "truncated")}
    outputs = {
        "observation": specs["observation"],
        "reward": specs.get("reward", {("reward",): Numbers("<f4", (1,))}),
        "done": specs.get("done", flags),
    }
    inputs = {"action": specs["action"], "state": {}}
    found: list[Composite] = []
    for side in (outputs, inputs):
        full = {
            f"full_{kind}_spec": _nested(spaces, counts, size, device, one_hot and kind == "action")
            for kind, spaces in side.items()
        }
        found.append(Composite(full, shape=size))
    return found[0], found[1]


def _nested(
    spaces: Mapping[Key, Any], counts: Mapping[str, int], size: Sequence[int], device: DeviceLike | None, one_hot: bool
) -> Composite:
    """The specs of values by key, where what is below some names has so many rows."""
    names = dict.fromkeys(key[0] for key in spaces if key[0] in counts)
    nested = Composite({name: Composite(shape=(counts[name],)) for name in names}, shape=size)
    for key, space in spaces.items():
        nested[key] = _spec_of(space, device, one_hot)
    return nested


def _spec_of(space: Any, device: DeviceLike | None, one_hot: bool) -> TensorSpec:
    if isinstance(space, Alike):
        return rows_spec(space, device, one_hot=one_hot)
    if not isinstance(space, Numbers):
        return leaf_spec(space, device, one_hot=one_hot)
    if space.dtype == "|b1":
        return Categorical(2, space.shape, dtype=torch.bool, device=device)
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return Unbounded(space.shape, dtype=dtype, device=device)


def _box_spec(space: gymnasium.spaces.Box, device: DeviceLike | None) -> TensorSpec:
    dtype = _dtype(space)
    if dtype == torch.bool:
        return Binary(shape=space.shape, dtype=dtype, device=device)
    if dtype.is_floating_point and np.isneginf(space.low).all() and np.isposinf(space.high).all():
        return Unbounded(space.shape, dtype=dtype, device=device)
    return Bounded(space.low, space.high, space.shape, dtype=dtype, device=device)


def _dtype(space: gymnasium.Space[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, space.dtype)).dtype


def encoded(spec: TensorSpec, value: Any, key: Key) -> Any:
    """Return a numpy or Python value, which may fit or not, as a new tensor (or non-tensor data) of a leaf's spec.

    Args:
        spec: the leaf.
        value: numbers of the spec's shape, where a last dim of size 1 may be missing; the integers behind a one-hot
            spec; any object for `NonTensor`.
        key: where the value stands, for the message.

    Raises:
        SpecMismatchError: its shape or kind differs, or its numbers do not fit the dtype or the choices.

    >>> from aioenvs.specs import Unbounded
    >>> encoded(Unbounded(1), 0.5, ("speed",))
    tensor([0.5000])
    >>> encoded(Unbounded((), dtype=torch.int64), 0.5, ("laps",))
    Traceback (most recent call last):
    ...
    aioenvs.errors.SpecMismatchError: expected int64 of shape () at ('laps',), found float64 of shape ()
    """
    if isinstance(spec, NonTensor):
        return spec.encode(value)
    dtype = torch.int64 if isinstance(spec, OneHot | MultiOneHot) or spec.dtype is None else spec.dtype
    try:
        shape = np.shape(value)
    except ValueError as error:
        raise SpecMismatchError(f"expected {shown(spec)} at {key!r}, found a ragged {type(value).__name__}") from error
    array = conform(value, numpy_dtype(dtype) or np.dtype(np.float32), shape, key)
    try:
        tensor = spec.encode(array)
    except ValueError as error:
        raise SpecMismatchError(f"at {key!r}: {error}") from None
    if len(tensor.shape) != len(spec.shape):
        raise SpecMismatchError(f"expected {shown(spec)} at {key!r}, found a value of shape {np.shape(value)}")
    return tensor


def make_composite_from_td(
    data: TensorDictBase, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False
) -> Composite:
    """Return the spec of a TensorDict, with unbounded entries.

    A lazy stack whose parts have different keys or shapes gives a `StackedComposite`. Names of dims are kept, and so
    are tensorclasses.

    Args:
        data: the TensorDict.
        unsqueeze_null_shapes: whether entries without dims get the shape (1,).
        dynamic_shape: whether the size of the last dim of each entry may vary, where it is no batch dim.

    Raises:
        TypeError: something else than a TensorDict.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from aioenvs.specs import make_composite_from_td
    >>> make_composite_from_td(TensorDict(reward=torch.zeros(()), steps=torch.zeros(3, dtype=torch.int64)))
    Composite(
        'reward': Unbounded(shape=(1,), dtype=float32, device=cpu),
        'steps': Unbounded(shape=(3,), dtype=int64, device=cpu),
    shape=(), device=None)
    """
    if not is_tensor_collection(data):
        raise TypeError(f"expected a TensorDict, found {shown(data)}")
    options = {"unsqueeze_null_shapes": unsqueeze_null_shapes, "dynamic_shape": dynamic_shape}
    inner = opened(data)
    if isinstance(inner, LazyStackedTensorDict):
        options["unsqueeze_null_shapes"] = False  # each entry has the stack's dim
        parts = [make_composite_from_td(like(data, part), **options) for part in inner.tensordicts]
        stacked: Composite = stack_specs(parts, inner.stack_dim)
        return stacked
    entries = {key: _entry_spec(data, entry, options) for key, entry in inner.items()}
    data_cls = type(data) if is_structure(data) else None
    return Composite(entries, shape=data.batch_size, device=data.device, data_cls=data_cls, names=_dim_names(data))


def _dim_names(data: TensorDictBase) -> list[str | None] | None:
    names = list(data.names)
    return None if all(name is None for name in names) else names


def _entry_spec(data: TensorDictBase, entry: Any, options: dict[str, bool]) -> TensorSpec:
    if is_non_tensor(entry):
        example = entry
        while not hasattr(example, "data") or hasattr(example, "tensordicts"):
            example = example.tensordicts[0]
        features = entry.ndim - data.ndim
        return NonTensor(entry.batch_size, entry.device, example_data=example.data, feature_dims=features)
    if is_tensor_collection(entry):
        return make_composite_from_td(entry, **options)
    shape = entry.shape
    if len(shape) > data.ndim and options["dynamic_shape"]:
        shape = torch.Size([*shape[:-1], -1])
    elif not shape and options["unsqueeze_null_shapes"]:
        shape = torch.Size([1])
    return Unbounded(shape, entry.device, entry.dtype)
