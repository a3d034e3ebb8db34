"""Specs: what the tensors of an environment look like, and which values they may take.

The names and their meaning are TorchRL's. A leaf spec describes one tensor, a `Composite` describes
a `TensorDict`, and `torch.stack` of specs describes a batch of them.
"""

from __future__ import annotations

from .base import TensorSpec
from .composite import Composite
from .discrete import Binary, Categorical, MultiCategorical
from .inference import make_composite_from_td
from .interval import Bounded
from .nontensor import NonTensor
from .onehot import MultiOneHot, OneHot
from .stacked import Stacked, StackedComposite
from .unbounded import BoundedContinuous, Unbounded, UnboundedContinuous, UnboundedDiscrete

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
