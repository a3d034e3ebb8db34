"""Specs: what the tensors of an environment look like, and which values they may take.

The names and their meaning are TorchRL's. A leaf spec describes one tensor, a `Composite` describes
a `TensorDict`, and `torch.stack` of specs describes a batch of them.
"""

from __future__ import annotations

from aioenvs.specs.base import TensorSpec
from aioenvs.specs.composite import Composite
from aioenvs.specs.discrete import Binary, Categorical, MultiCategorical
from aioenvs.specs.inferred import make_composite_from_td
from aioenvs.specs.interval import Bounded, BoundedContinuous, Unbounded, UnboundedContinuous, UnboundedDiscrete
from aioenvs.specs.leaf import NonTensor
from aioenvs.specs.onehot import MultiOneHot, OneHot
from aioenvs.specs.stacked import Stacked, StackedComposite

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "make_composite_from_td",
]
