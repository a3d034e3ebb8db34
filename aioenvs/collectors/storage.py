"""Where the steps of a batch are written as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.device import Transfer
from aioenvs.rollout import name_time

__all__ = ["Storage"]

Path = tuple[str, ...]


class Storage:
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
    """

    def __init__(self, size: int, device: torch.device | None, *, flat: bool, crossing: Transfer | None = None) -> None:
        self._size = size
        self._device = device
        self._crossing = crossing
        self._flat = flat
        self._written = 0
        self._batch: TensorDictBase | None = None
        self._tensors: dict[Path, torch.Tensor] = {}  # those of the batch
        self._steps: list[Sequence[torch.Tensor]] = []  # the parts of each tensor, where a step is one for all envs
        self._loose: list[Path] = []  # the keys of what it does not hold
        self._others: list[TensorDictBase] = []  # and that, of each step
        self._is_lazy = False  # whether it holds nothing, and the steps are there whole

    @property
    def left(self) -> int:
        """How many steps there is room for."""
        return self._size - self._written

    def write(self, td: TensorDictBase) -> None:
        """Add a step of all envs; or where it is flat, one of each env that has a row in `td`."""
        count = len(td) if self._flat else 1
        with torch.no_grad():
            self._write(td, count)
        self._written += count

    def _write(self, td: TensorDictBase, count: int) -> None:
        tensors, loose = _leaves(td)
        if not self._written:
            self._is_lazy = isinstance(td, LazyStackedTensorDict)
            if not self._is_lazy:
                self._allocate(td, tensors, loose)
        if not self._is_lazy:
            places = self._places(count)
            if isinstance(td, LazyStackedTensorDict) or loose != self._loose or not _match(tensors, places):
                self._loosen()
            else:
                values = list(tensors.values())
                if self._crossing is not None:
                    values = self._crossing.place(values)
                for path, value in zip(tensors, values, strict=True):
                    places[path].copy_(value)
        if self._is_lazy:
            self._keep(td)
        elif loose:
            self._keep(td.select(*loose))

    def _allocate(self, td: TensorDictBase, tensors: dict[Path, torch.Tensor], loose: list[Path]) -> None:
        model = td.select(*tensors)
        if self._flat:
            model = model[:1].expand(self._size, *td.batch_size[1:])
        else:
            model = model.unsqueeze(td.ndim).expand(*td.batch_size, self._size)
        device = td.device if self._device is None else self._device
        self._batch = model.apply(
            lambda each: torch.empty(each.shape, dtype=each.dtype, device=device or each.device), device=device
        )
        self._tensors, self._loose = _leaves(self._batch)[0], loose
        if not self._flat:
            self._steps = [tensor.unbind(td.ndim) for tensor in self._tensors.values()]

    def _places(self, count: int) -> dict[Path, torch.Tensor]:
        """Where the next steps come."""
        if self._flat:
            return {path: tensor.narrow(0, self._written, count) for path, tensor in self._tensors.items()}
        return {path: steps[self._written] for path, steps in zip(self._tensors, self._steps, strict=True)}

    def _loosen(self) -> None:
        """Keep the steps whole that were written until now."""
        batch = self._batch
        assert batch is not None
        steps = batch[: self._written].unbind(0) if self._flat else batch[..., : self._written].unbind(batch.ndim - 1)
        others = self._others or [TensorDict({}, step.batch_size) for step in steps]
        self._others = [step.clone().update(own) for step, own in zip(steps, others, strict=True)]
        self._batch, self._tensors, self._steps, self._is_lazy = None, {}, [], True

    def _keep(self, td: TensorDictBase) -> None:
        own = td.clone() if self._device is None else td.clone().to(self._device)
        self._others += own.unbind(0) if self._flat else [own]

    def finish(self) -> TensorDictBase:
        """The batch, which is not written to any more.

        Returns:
            Of shape `(size, *bs)` where it is flat, else `(*batch_size, size)`.
        """
        batch = self._batch
        dim = 0 if self._flat else (self._others[0].ndim if batch is None else batch.ndim - 1)
        if self._others:
            stacked = LazyStackedTensorDict.maybe_dense_stack(self._others, dim)
            batch = stacked if batch is None else batch.update(stacked)
        assert batch is not None
        return batch if self._flat else name_time(batch, dim)


def _match(tensors: Mapping[Path, torch.Tensor], places: Mapping[Path, torch.Tensor]) -> bool:
    """Whether tensors have the keys, shapes and dtypes of the places for them."""
    return tensors.keys() == places.keys() and all(
        place.shape == (value := tensors[path]).shape and place.dtype == value.dtype for path, place in places.items()
    )


def _leaves(td: TensorDictBase) -> tuple[dict[Path, torch.Tensor], list[Path]]:
    """The tensors of a TensorDict, and the keys of what is neither one nor a TensorDict of such."""
    tensors: dict[Path, torch.Tensor] = {}
    loose: list[Path] = []
    if isinstance(td, LazyStackedTensorDict):
        return tensors, loose
    for path, value in _walk(td, ()):
        if isinstance(value, torch.Tensor):
            tensors[path] = value
        else:
            loose.append(path)
    return tensors, loose


def _walk(td: TensorDictBase, path: Path) -> Iterator[tuple[Path, Any]]:
    for name, value in td.items():
        if type(value) is TensorDict:
            yield from _walk(value, (*path, name))
        else:
            yield (*path, name), value
