"""Tensors as the arrays that keep them, and the storage into which the steps of a batch are written as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

BEYOND = 2.0**63  # what int64 holds
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage_dtype(dtype: torch.dtype | None) -> str:
    """The name of the numpy dtype under which tensors of this dtype are kept.

    >>> storage_dtype(torch.float32), storage_dtype(torch.bfloat16)
    ('<f4', '<i2')
    """
    return array_of(torch.empty(0, dtype=dtype)).dtype.str


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor as it is kept; on the CPU it shares the memory."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(WORDS[tensor.dtype.itemsize]).numpy()


def tensor_of(array: NDArray[Any], dtype: torch.dtype | None) -> torch.Tensor:
    """Return the tensor of its true dtype that shares the memory of an array."""
    tensor = torch.from_numpy(array)
    return tensor if dtype is None or tensor.dtype is dtype else tensor.view(dtype)


def is_convertible(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether numbers of a tensor may be of another dtype: integers or flags, which are exact, of numbers."""
    exact = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return exact and not tensor.is_complex()


def cast_exactly(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """The numbers of a tensor as integers or flags, if none changes by it; else None.

    >>> cast_exactly(torch.tensor([0.0, 1.0]), torch.int8)
    tensor([0, 1], dtype=torch.int8)
    >>> cast_exactly(torch.tensor([0.5, 1.0]), torch.int8) is None
    True
    """
    if not is_convertible(tensor, dtype):
        return None
    cast = tensor.detach().to(dtype)
    # what is beyond becomes another number, which may be the same again as a float
    within = not tensor.is_floating_point() or bool((tensor.abs() < BEYOND).all())
    return cast if within and torch.equal(cast.to(tensor.dtype), tensor) else None


Path = tuple[str, ...]


class Crossing(Protocol):
    """A transfer of tensors to a device."""

    def place(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return these tensors there."""


class StepStorage:
    """The steps of one batch.

    Tensors are written into memory that is taken once, when the first step shows what there is to write. What has no
    fixed shape (text, objects, the members of lazy stacks) is kept as it comes and stacked at the end; so is everything
    once a step has other keys or shapes than the first.

    Args:
        size: How many steps.
        device: Where they are kept; None for where they are.
        crossing: What brings them there in one copy each; None where they need not be brought, or one by one will do.
        flat: Whether steps are of single envs, and stand in the order in which they come, along the first dim; else
            they are of all envs, and become a last dim named "time".
        keeps_graph: Whether steps with tensors that require grad are kept in their graph, and so as they come.
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str | int | None,
        *,
        crossing: Crossing | None = None,
        flat: bool = False,
        keeps_graph: bool = False,
    ) -> None:
        self._size = size
        self._device = None if device is None else torch.device(device)
        self._crossing = crossing
        self._flat = flat
        self._keeps_graph = keeps_graph
        self._written = 0
        self._batch: TensorDictBase | None = None
        self._structure: _Structure | None = None  # of each step, where the batch holds its tensors
        self._tensors: list[torch.Tensor] = []  # those of the batch
        self._steps: list[Sequence[torch.Tensor]] = []  # the parts of each tensor, where a step is one for all envs
        self._others: list[TensorDictBase] = []  # what it does not hold, of each step

    @property
    def left(self) -> int:
        """How many steps there is room for."""
        return self._size - self._written

    def write(self, td: TensorDictBase) -> None:
        """Add a step of all envs; or where it is flat, one of each env that has a row in `td`."""
        count = len(td) if self._flat else 1
        with torch.set_grad_enabled(self._keeps_graph and torch.is_grad_enabled()):
            self._write(td, count)
        self._written += count

    def _write(self, td: TensorDictBase, count: int) -> None:
        if not self._written:
            self._allocate(td)
        values = None if self._structure is None else self._structure.values(td, flat=self._flat)
        if values is None or (self._keeps_graph and any(value.requires_grad for value in values)):
            self._loosen()
            self._keep(td)
            return
        if values:
            own = values if self._crossing is None else self._crossing.place(values)
            torch._foreach_copy_(self._places(count), own)
        if self._structure is not None and (loose := self._structure.loose):
            self._keep(td.select(*loose))

    def _allocate(self, td: TensorDictBase) -> None:
        if isinstance(td, LazyStackedTensorDict):
            return
        self._structure = structure = _Structure.of(td)
        model = td.select(*structure.paths)
        if self._flat:
            model = model[:1].expand(self._size, *td.batch_size[1:])
        else:
            model = model.unsqueeze(td.ndim).expand(*td.batch_size, self._size)
        device = td.device if self._device is None else self._device
        self._batch = batch = model.apply(
            lambda each: torch.empty(each.shape, dtype=each.dtype, device=device or each.device), device=device
        )
        self._tensors = [batch.get(path) for path in structure.paths]
        if not self._flat:
            self._steps = [tensor.unbind(td.ndim) for tensor in self._tensors]

    def _places(self, count: int) -> list[torch.Tensor]:
        """Where the next steps come."""
        if self._flat:
            return [tensor.narrow(0, self._written, count) for tensor in self._tensors]
        return [steps[self._written] for steps in self._steps]

    def _loosen(self) -> None:
        """Keep the steps whole that were written until now."""
        batch, self._batch = self._batch, None
        self._structure, self._tensors, self._steps = None, [], []
        if batch is None or not self._written:
            return
        steps = batch[: self._written].unbind(0) if self._flat else batch[..., : self._written].unbind(batch.ndim - 1)
        others = self._others or [TensorDict({}, step.batch_size) for step in steps]
        self._others = [step.clone().update(own) for step, own in zip(steps, others, strict=True)]

    def _keep(self, td: TensorDictBase) -> None:
        own = td.clone() if self._device is None else td.clone().to(self._device)
        self._others += own.unbind(0) if self._flat else [own]

    def finish(self, *, contiguous: bool = False) -> TensorDictBase:
        """The batch, which is not written to any more.

        Args:
            contiguous: Whether steps that cannot be one tensor for each key are an error rather than a lazy stack.

        Returns:
            Of shape `(size, *bs)` where it is flat, else `(*batch_size, size)`.

        Raises:
            RuntimeError: If they cannot.
        """
        batch = self._batch
        dim = 0 if self._flat else (self._others[0].ndim if batch is None else batch.ndim - 1)
        if self._others:
            stack = TensorDict.stack if contiguous else LazyStackedTensorDict.maybe_dense_stack
            stacked = stack(self._others, dim)
            batch = stacked if batch is None else batch.update(stacked)
        assert batch is not None
        return batch if self._flat else name_time(batch, dim)


class _Node(NamedTuple):
    """The direct entries of a TensorDict, or of one in it; of tensors with their shapes and dtypes."""

    path: Path
    names: frozenset[str]
    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]


class _Structure(NamedTuple):
    """The structure of a step: its TensorDicts, and the keys of what is `loose`, neither tensor nor TensorDict."""

    nodes: tuple[_Node, ...]
    loose: tuple[Path, ...]

    @classmethod
    def of(cls, td: TensorDictBase) -> _Structure:
        """The structure of a step."""
        nodes: list[_Node] = []
        loose: list[Path] = []
        waiting: list[tuple[Path, TensorDictBase]] = [((), td)]
        for path, node in waiting:
            entries = dict(node.items())
            tensors = []
            for name, value in entries.items():
                if isinstance(value, torch.Tensor):
                    tensors.append((name, value.shape, value.dtype))
                elif type(value) is TensorDict:
                    waiting.append(((*path, name), value))
                else:
                    loose.append((*path, name))
            nodes.append(_Node(path, frozenset(entries), tuple(tensors)))
        return cls(tuple(nodes), tuple(loose))

    @property
    def paths(self) -> list[Path]:
        """The keys of the tensors."""
        return [(*node.path, name) for node in self.nodes for name, _, _ in node.tensors]

    def values(self, td: TensorDictBase, *, flat: bool) -> list[torch.Tensor] | None:
        """The tensors of another step; None if it has another structure, but for its number of rows if it is `flat`."""
        if isinstance(td, LazyStackedTensorDict):
            return None
        values: list[torch.Tensor] = []
        for path, names, tensors in self.nodes:
            node = td.get(path, None) if path else td
            if type(node) is not TensorDict:
                return None
            entries: dict[str, Any] = dict(node.items())
            if entries.keys() != names:
                return None
            for name, shape, dtype in tensors:
                value = entries[name]
                if not isinstance(value, torch.Tensor) or value.dtype is not dtype:
                    return None
                if value.shape != shape and not (flat and value.shape[1:] == shape[1:]):
                    return None
                values.append(value)
        return values


def size_of(td: TensorDictBase) -> int:
    """How many bytes a step takes of what can be written into one tensor for all steps."""
    if isinstance(td, LazyStackedTensorDict):
        return 0
    nodes = _Structure.of(td).nodes
    return sum(shape.numel() * dtype.itemsize for node in nodes for _, shape, dtype in node.tensors)


def name_time(stacked: TensorDictBase, dim: int) -> TensorDictBase:
    """Return the TensorDict with "time" as the name of a dim."""
    if not isinstance(stacked, LazyStackedTensorDict):
        return stacked.refine_names(..., "time")
    if stacked.stack_dim == dim:
        stacked._td_dim_name = "time"
    else:
        for part in stacked.tensordicts:
            name_time(part, dim - (stacked.stack_dim < dim))
    return stacked
