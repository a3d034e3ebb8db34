"""Results on their way to another device, and actions on their way back.

A batch crosses as one run of bytes, on a stream of its own: its tensors are views of what arrives.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from aioenvs.engine.layout import ALIGNMENT
from aioenvs.errors import PerformanceWarning
from aioenvs.tensors.device import PASSED, DeviceBackend, Fence

__all__ = ["Transfer", "typed"]

_weak: Any = StorageWeakRef
MAX_TWINS = 64  # which are remembered; whoever needs one needs it soon

logger = logging.getLogger("aioenvs")


class _Twin(NamedTuple):
    """The host's copy of a run of bytes on a device.

    Attributes:
        there: A weak reference to the memory in which it is.
        version: How often that had been written to.
        start: Where the run begins in it.
        own: The same bytes on the host.
    """

    there: Any
    version: int
    start: int
    own: torch.UntypedStorage


class _Twins:
    """The host's copies of tensors on a device, as long as these are there, and as they came.

    That it was written to is told by torch's count, which leaves out what is written through `Tensor.data`.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Twin] = {}

    def add(self, there: torch.Tensor, own: torch.Tensor) -> None:
        """Remember a contiguous tensor by the same one on the host, of which no other memory is kept."""
        known = [(key, each) for key, each in self._known.items() if not each.there.expired()]
        self._known = dict(known[-MAX_TWINS:])
        reference = _weak(there.untyped_storage())
        if there.is_inference() or own.storage_offset() or reference.cdata in self._known:
            return  # nobody counts the changes of inference tensors
        start = int(there.storage_offset()) * there.itemsize
        self._known[reference.cdata] = _Twin(reference, there._version, start, own.untyped_storage())

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A view of such a tensor, on the host; None if it is none, or somebody has written to its memory."""
        twin = self._known.get(tensor.untyped_storage()._cdata)
        if twin is None or tensor.is_inference() or tensor._version != twin.version:
            return None
        if tensor.is_conj() or tensor.is_neg():  # its values are not those of its memory
            return None
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        offset = tensor.storage_offset() - twin.start // tensor.itemsize
        if offset < 0 or (offset + reach) * tensor.itemsize > twin.own.nbytes() or not tensor.numel():
            return None
        return torch.empty(0, dtype=tensor.dtype).set_(twin.own, offset, tensor.shape, tensor.stride())


class Transfer:
    """The transfer between the memory of some envs and a device.

    Args:
        memory: The block into which the envs write, as bytes; None if there is none to be pinned.
        backend: Of the device; None if nothing crosses.
        pin_memory: Whether the block is to be pinned; None where results go to a device that gains by it.
        pinning: What pins it where results stay on the host, if anything can.
    """

    def __init__(
        self,
        memory: torch.Tensor | None,
        backend: DeviceBackend | None,
        pin_memory: bool | None = None,
        pinning: DeviceBackend | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._memory = memory
        self._stages_pinned = memory is None
        self.wanted = pin_memory
        self._pinned_by: DeviceBackend | None = None
        self._warned = False
        self._fences: list[Fence] = []
        self._twins = _Twins()
        self._remembers = False
        self.backend: DeviceBackend | None = None
        self.turn_to(backend, pinning)

    def turn_to(self, backend: DeviceBackend | None, pinning: DeviceBackend | None = None) -> None:
        """Bring what comes from now on to another device; what is under way stays under way."""
        self.backend = backend
        pinning = backend or pinning
        wanted = self.wanted if self.wanted is not None else backend is not None and backend.pins
        if wanted and self._pinned_by is None and self._memory is not None:
            self._pin(pinning, self._memory)

    def _pin(self, backend: DeviceBackend | None, memory: torch.Tensor) -> None:
        try:
            if backend is None or not backend.pins:
                found = "there is no CUDA device" if backend is None else f"nothing to pin it for on {backend.device}"
                raise NotImplementedError(found)
            backend.pin(memory)
        except Exception as error:
            if not self._warned:
                warnings.warn(
                    f"the {memory.nbytes} bytes of the envs' buffers could not be pinned ({error}); results are "
                    "copied without, which is slower; pin_memory=False says that this is expected",
                    PerformanceWarning,
                    stacklevel=2,
                )
            self._warned = True
        else:
            self._pinned_by = backend
            self._stages_pinned = True

    @property
    def is_pinned(self) -> bool:
        """Whether the block is pinned."""
        return self._pinned_by is not None

    # -- in and out -------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Keep on the host, too, what goes to the device from now on, for as long as it is there; see `home`."""
        self._remembers = True

    def know(self, there: torch.Tensor, own: torch.Tensor) -> None:
        """Remember a small tensor on the device by the same one on the host."""
        if self.backend is not None and self.backend.holds(there):
            self._twins.add(there, own.clone())

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the host: at once if that has had it before, else when all is done of which it comes."""
        own = None if self.backend is None else self._twins.of(tensor)
        return tensor.cpu() if own is None else own

    def bring(self, source: torch.Tensor, *, lasts: bool = False) -> tuple[torch.Tensor, Fence]:
        """Bring bytes of the host to the device.

        Args:
            source: The bytes.
            lasts: Whether nobody will write to them any more.

        Returns:
            What arrives there, which the caller's stream can use; and the fence of the source.
        """
        assert self.backend is not None
        copy, fence = self.backend.copy_in(source)
        self._note(fence)
        self.backend.order(copy, fence)
        if self._remembers:
            self._twins.add(copy, source if lasts else source.clone())
        return copy, fence

    def place(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Bring tensors to the device: those of the host, as far as no gradient flows through them, all in one copy."""
        backend = self.backend
        assert backend is not None
        placed = {id(each): each for each in tensors}
        packed = [each for each in placed.values() if each.is_cpu and not (each.requires_grad or backend.holds(each))]
        if packed:
            offsets, nbytes = _offsets(packed)
            staging = backend.staging(nbytes, pinned=self._stages_pinned and backend.pins)
            for offset, tensor in zip(offsets, packed, strict=True):
                typed(staging, offset, tensor.dtype, tensor.shape).copy_(tensor)
            copy, _ = self.bring(staging, lasts=True)
            for offset, tensor in zip(offsets, packed, strict=True):
                placed[id(tensor)] = typed(copy, offset, tensor.dtype, tensor.shape)
        return [
            own if (own := placed[id(each)]).device == backend.device else own.to(backend.device) for each in tensors
        ]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Fence]:
        """Begin to bring tensors of the device here, all in one copy.

        Those that are here already stay; those of yet another device come at once.

        Returns:
            What they will be when the fence has passed.
        """
        backend = self.backend
        assert backend is not None
        there = [place for place, tensor in enumerate(tensors) if backend.holds(tensor)]
        fetched = [tensor if backend.holds(tensor) else tensor.cpu() for tensor in tensors]
        if not there:
            return fetched, PASSED
        # The widest first, so that each is aligned without gaps.
        ordered = sorted(there, key=lambda place: -tensors[place].itemsize)
        sources = [tensors[place] for place in ordered]
        nbytes = sum(source.nbytes for source in sources)
        staging = backend.staging(nbytes, pinned=self._stages_pinned and backend.pins)
        fence = backend.copy_out(sources, staging)
        self._note(fence)
        offset = 0
        for place, source in zip(ordered, sources, strict=True):
            fetched[place] = typed(staging, offset, source.dtype, source.shape)
            offset += source.nbytes
        return fetched, fence

    def home(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Fence]:
        """Bring tensors home; those that the host has had before, and was to remember, are only to be read."""
        twins = [self._twins.of(tensor) for tensor in tensors]
        rest, fence = self.fetch([tensor for tensor, own in zip(tensors, twins, strict=True) if own is None])
        missing = iter(rest)
        return [next(missing) if own is None else own for own in twins], fence

    def _note(self, fence: Fence) -> None:
        self._fences = [*(each for each in self._fences if not each.done()), fence]

    @property
    def pending(self) -> list[Fence]:
        """The fences of copies that are under way; none in a fork, which has no part in them."""
        return [fence for fence in self._fences if not fence.done()] if os.getpid() == self._owner else []

    def close(self) -> None:
        """Wait for the copies that are under way, and unpin the block. Never raises; nothing to do in a fork.

        Whoever calls it sees to it that no copy has to be waited for that may never end.
        """
        memory, self._memory = self._memory, None
        pinned_by, self._pinned_by = self._pinned_by, None
        if os.getpid() != self._owner:
            return
        for fence in self.pending:
            try:
                fence.wait()
            except Exception as error:  # whoever wanted what it brings has heard of it, too
                logger.warning("a copy of the buffers of envs failed: %s", str(error))
        try:
            if pinned_by is not None and memory is not None:
                pinned_by.unpin(memory)
        except Exception as error:  # of a device that is gone, and the memory goes in any case
            logger.warning("the buffers of envs could not be unpinned: %s", str(error))


def typed(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Some of the bytes of a buffer as a tensor."""
    nbytes = math.prod(shape) * dtype.itemsize
    return buffer[offset : offset + nbytes].view(dtype).view(torch.Size(shape))


def _offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each of these comes in a buffer for all, and how large that is."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
