"""Results on their way to another device, and actions on their way back.

A batch crosses as one run of bytes, on a stream of its own: its tensors are views of what arrives. `DeviceBackend` is
all that a device has to be able to do, and the only place that calls it; `Transfer` says in which order.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from aioenvs.engine.layout import ALIGNMENT
from aioenvs.engine.turns import Fence
from aioenvs.errors import AioEnvsError, PerformanceWarning

__all__ = [
    "PASSED",
    "CudaBackend",
    "Device",
    "DeviceBackend",
    "Fence",
    "StagedBackend",
    "Transfer",
    "backend_of",
    "checked_device",
    "named_device",
    "require_device",
    "typed",
]

logger = logging.getLogger("aioenvs")


class _Passed:
    """The fence of what was done at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


PASSED: Fence = _Passed()


class DeviceBackend(ABC):
    """What has to be done on a device, or with host memory for its sake.

    Pass one as `device=` to bring results to a device that is not known here. All bytes are tensors of uint8.

    Attributes:
        device: Where tensors go.
        pins: Whether host memory can be pinned, so that copies of it need no help of the CPU.
    """

    device: torch.device
    pins: bool = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device, rather than on the host."""
        return tensor.device.type == self.device.type

    def pin(self, memory: torch.Tensor) -> None:  # noqa: B027 - where `pins` is false
        """Pin memory that the host has mapped.

        Raises:
            Exception: If that is not possible; copies then go without.
        """

    def unpin(self, memory: torch.Tensor) -> None:  # noqa: B027 - where `pins` is false
        """Undo it, before the memory is unmapped; no copy of it is under way."""

    def staging(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Host memory of so many bytes, pinned where that is wanted and can be."""
        return torch.empty(nbytes, dtype=torch.uint8)

    @abstractmethod
    def copy_in(self, source: torch.Tensor) -> tuple[torch.Tensor, Fence]:
        """Begin to copy bytes of the host to the device.

        Returns:
            The copy, which may only be read by what comes after `order`; and the fence of the source, which must stay
            as it is until that has passed.
        """

    @abstractmethod
    def order(self, copy: torch.Tensor, fence: Fence) -> None:
        """Let whatever the caller's stream does from now on with a copy come after it; without waiting here."""

    @abstractmethod
    def copy_out(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> Fence:
        """Begin to copy bytes from the device to the host, one behind the other.

        What the caller's stream was told until now to do with the sources comes first.

        Args:
            sources: On the device, of any dtype.
            target: On the host; it can be read when the fence has passed.
        """


class StagedBackend(DeviceBackend):
    """Copies that are done when the call returns; for any device that torch knows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy_in(self, source: torch.Tensor) -> tuple[torch.Tensor, Fence]:
        return torch.empty_like(source, device=self.device).copy_(source), PASSED

    def order(self, copy: torch.Tensor, fence: Fence) -> None:
        """Do nothing: it is there."""

    def copy_out(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> Fence:
        target.copy_(_bytes_of(sources))
        return PASSED


def _cuda() -> Any:
    """Torch's module, of which not all has annotations."""
    return torch.cuda


class _CudaFence:
    """An event on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event: Any = _cuda().Event(blocking=True)  # a thread that waits for it sleeps
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaBackend(DeviceBackend):
    """Copies on a stream beside those that compute, in both directions.

    Args:
        device: A CUDA device.
    """

    pins = True
    PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._into = _cuda().Stream(device)
        self._out = _cuda().Stream(device)

    def pin(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            error = _cuda().cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, self.PORTABLE)
            if int(error):
                with contextlib.suppress(RuntimeError):  # the driver reports it once more to whoever comes next
                    torch.zeros(1, device=self.device)
                raise OSError(f"cudaHostRegister of {memory.nbytes} bytes returned {error}")

    def unpin(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            error = _cuda().cudart().cudaHostUnregister(memory.data_ptr())
            if int(error):
                raise OSError(f"cudaHostUnregister returned {error}")

    def staging(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        # Torch keeps pinned memory that was dropped, and gives it to nobody before the copies of it are done.
        if pinned:
            with contextlib.suppress(RuntimeError):  # there is no more of it
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return super().staging(nbytes, pinned=False)

    def copy_in(self, source: torch.Tensor) -> tuple[torch.Tensor, Fence]:
        with torch.cuda.stream(self._into):  # whose memory it is, so nothing of the caller's stream is still at it
            copy = torch.empty_like(source, device=self.device)
            copy.copy_(source, non_blocking=True)
            return copy, _CudaFence(self._into)

    def order(self, copy: torch.Tensor, fence: Fence) -> None:
        assert isinstance(fence, _CudaFence)
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(fence.event)
        copy.record_stream(stream)

    def copy_out(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> Fence:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            target.copy_(_bytes_of(sources), non_blocking=True)
            fence = _CudaFence(self._out)
        for source in sources:
            source.record_stream(self._out)
        return fence


Device = torch.device | str | int | DeviceBackend | None


def named_device(device: Any) -> torch.device | None:
    """The device that an argument means; None for None.

    Raises:
        TypeError: If it is nothing that names a device.
        ValueError: If there is no device of such a name.
    """
    if device is None:
        return None
    if isinstance(device, DeviceBackend):
        return device.device
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"expected a device, such as 'cuda:1', torch.device('cpu') or 0, or None, found {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"expected a device, such as 'cpu', 'cuda', 'cuda:1' or 'mps', found {device!r}") from error


def checked_device(device: Any) -> torch.device | None:
    """The same, for results.

    Raises:
        TypeError: If it is nothing that names a device.
        ValueError: If there is no device of such a name, or it can hold no data.
    """
    checked = named_device(device)
    if checked is not None and checked.type == "meta":
        raise ValueError("results cannot go to the device 'meta', which holds no data")
    return checked


def require_device(device: torch.device) -> None:
    """Say so if a device is not there.

    Raises:
        AioEnvsError: If it is not.
    """
    try:
        torch.empty(0, device=device)
    except Exception as error:  # whatever the library of the device says
        raise AioEnvsError(f"expected a device of this machine, found {str(device)!r}: {error}") from error


def backend_of(device: Device) -> DeviceBackend | None:
    """What brings results to a device; None where they are already there, on the CPU or nowhere in particular."""
    if isinstance(device, DeviceBackend):
        return device
    device = named_device(device)
    if device is None or device.type == "cpu":
        return None
    if device.type != "cuda":
        return StagedBackend(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaBackend(torch.device("cuda", index))


class Transfer:
    """What crosses between the memory of some envs and a device.

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

    def bring(self, source: torch.Tensor) -> tuple[torch.Tensor, Fence]:
        """Bring bytes of the block to the device.

        Returns:
            What arrives there, which the caller's stream can use; and the fence of the source.
        """
        assert self.backend is not None
        copy, fence = self.backend.copy_in(source)
        self._note(fence)
        self.backend.order(copy, fence)
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
            copy, _ = self.bring(staging)
            for offset, tensor in zip(offsets, packed, strict=True):
                placed[id(tensor)] = typed(copy, offset, tensor.dtype, tensor.shape)
        return [
            own if (own := placed[id(each)]).device == backend.device else own.to(backend.device) for each in tensors
        ]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Fence]:
        """Begin to bring tensors of the device here, all in one copy.

        Returns:
            What they will be when the fence has passed.
        """
        backend = self.backend
        assert backend is not None
        if not tensors:
            return [], PASSED
        # The widest first, so that each is aligned without gaps.
        ordered = sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize)
        sources = [tensors[place] for place in ordered]
        nbytes = sum(source.nbytes for source in sources)
        staging = backend.staging(nbytes, pinned=self._stages_pinned and backend.pins)
        fence = backend.copy_out(sources, staging)
        self._note(fence)
        fetched = list(tensors)
        offset = 0
        for place, source in zip(ordered, sources, strict=True):
            fetched[place] = typed(staging, offset, source.dtype, source.shape)
            offset += source.nbytes
        return fetched, fence

    def _note(self, fence: Fence) -> None:
        self._fences = [*(each for each in self._fences if not each.done()), fence]

    @property
    def pending(self) -> list[Fence]:
        """The fences of copies that are under way; none in a fork, which has no part in them."""
        return [fence for fence in self._fences if not fence.done()] if os.getpid() == self._owner else []

    def close(self) -> None:
        """Wait for the copies that are under way, and unpin the block. Never raises; nothing to do in a fork."""
        memory, self._memory = self._memory, None
        pinned_by, self._pinned_by = self._pinned_by, None
        if os.getpid() != self._owner:
            return
        try:
            for fence in self.pending:
                fence.wait()
            if pinned_by is not None and memory is not None:
                pinned_by.unpin(memory)
        except Exception as error:  # of a device that is gone, and the memory goes in any case
            logger.warning("the buffers of envs could not be unpinned: %s", error)


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


def _bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of some tensors, one behind the other."""
    flat = [each.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for each in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
