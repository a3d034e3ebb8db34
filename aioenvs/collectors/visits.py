"""A root that visits the device of a policy: there and back as one copy each."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs.device import Fence
from aioenvs.transfer import Transfer
from aioenvs.trees import exchanged, tensors_of

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
        own = tensors_of(td)
        moved = transfer.place(own)
        there = {id(old): new for old, new in zip(own, moved, strict=True)}
        device = transfer.backend.device
        self.td = exchanged(td, there, device, device)
        # What comes back as it went, which is most of it, is here already.
        self._former = {id(new): (new, _version(new), old) for old, new in zip(own, moved, strict=True)}

    def fetch(self, acted: TensorDictBase) -> tuple[dict[int, torch.Tensor], Fence]:
        """Begin to bring back what a policy has changed or added; what that is when the fence has passed, by id."""
        changed = [each for each in tensors_of(acted) if self._unchanged(each) is None]
        fetched, fence = self._transfer.fetch(changed)
        return {id(there): here for there, here in zip(changed, fetched, strict=True)}, fence

    def back(self, acted: TensorDictBase, fetched: dict[int, torch.Tensor]) -> TensorDictBase:
        """What a policy returned, on the host."""
        here = fetched | {id(each): own for each in tensors_of(acted) if (own := self._unchanged(each)) is not None}
        return exchanged(acted, here, self._home, torch.device("cpu"))

    def _unchanged(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor was on the host, if it is as it went."""
        known = self._former.get(id(tensor))
        return known[2] if known is not None and known[1] is not None and known[1] == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count that."""
    return None if tensor.is_inference() else tensor._version
