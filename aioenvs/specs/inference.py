"""The spec of what a TensorDict holds."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from aioenvs.errors import shown

from .base import TensorSpec
from .classes import is_structure, like, opened
from .composite import Composite
from .nontensor import NonTensor
from .stacked import stack_specs
from .unbounded import Unbounded


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
    entries = {key: _entry(data, entry, options) for key, entry in inner.items()}
    data_cls = type(data) if is_structure(data) else None
    return Composite(entries, shape=data.batch_size, device=data.device, data_cls=data_cls, names=_names(data))


def _names(data: TensorDictBase) -> list[str | None] | None:
    names = list(data.names)
    return None if all(name is None for name in names) else names


def _entry(data: TensorDictBase, entry: Any, options: dict[str, bool]) -> TensorSpec:
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
