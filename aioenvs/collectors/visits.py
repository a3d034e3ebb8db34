"""A root that visits the device of a policy: there and back as one copy each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs.device import Fence
from aioenvs.transfer import Transfer

__all__ = ["Visit", "can_visit"]


def can_visit(td: TensorDictBase) -> bool:
    """Whether a root is on the host, and has tensors that can be told apart there and back."""
    return type(td) is TensorDict and (td.device is None or td.device.type == "cpu")


class Visit:
    """A root on the device of a policy.

    Args:
        transfer: Brings it there.
        td: The root, on the host.

    Attributes:
        td: The same on the device.
    """

    def __init__(self, transfer: Transfer, td: TensorDictBase) -> None:
        assert transfer.backend is not None
        self._transfer = transfer
        self._home = td.device
        own = _tensors(td)
        moved = transfer.place(own)
        there = {id(old): new for old, new in zip(own, moved, strict=True)}
        device = transfer.backend.device
        self.td = _replaced(td, there, device, device)
        # What comes back as it went, which is most of it, is here already.
        self._former = {id(new): (new, _version(new), old) for old, new in zip(own, moved, strict=True)}

    def fetch(self, acted: TensorDictBase) -> tuple[dict[int, torch.Tensor], Fence]:
        """Begin to bring back what a policy has changed or added; what that is when the fence has passed, by id."""
        changed = [each for each in _tensors(acted) if self._unchanged(each) is None]
        fetched, fence = self._transfer.fetch(changed)
        return {id(there): here for there, here in zip(changed, fetched, strict=True)}, fence

    def back(self, acted: TensorDictBase, fetched: dict[int, torch.Tensor]) -> TensorDictBase:
        """What a policy returned, on the host."""
        here = fetched | {id(each): own for each in _tensors(acted) if (own := self._unchanged(each)) is not None}
        return _replaced(acted, here, self._home, torch.device("cpu"))

    def _unchanged(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor was on the host, if it is as it went."""
        known = self._former.get(id(tensor))
        return known[2] if known is not None and known[1] is not None and known[1] == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count that."""
    return None if tensor.is_inference() else tensor._version


def _tensors(td: TensorDictBase) -> list[torch.Tensor]:
    return [value for value in td.values(True, True) if isinstance(value, torch.Tensor)]


def _replaced(
    td: TensorDictBase, tensors: dict[int, torch.Tensor], device: torch.device | None, otherwise: torch.device
) -> TensorDictBase:
    """The same with other tensors; those of lazy stacks, which are none that were here before, move one by one."""

    def replace(value: Any) -> Any:
        found = tensors.get(id(value))
        return value.to(otherwise) if found is None else found

    apply: Callable[..., Any] = td.apply
    replaced: TensorDictBase = apply(replace, device=device)
    return replaced
