"""Devices that results go to, and that actions come from.

`DeviceBackend` is all that a device has to be able to do, and the only place that calls it; `aioenvs.transfer` says in
which order.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from aioenvs.engine.turns import Fence
from aioenvs.errors import AioEnvsError

__all__ = [
    "PASSED",
    "CudaBackend",
    "Device",
    "DeviceBackend",
    "Fence",
    "StagedBackend",
    "backend_of",
    "checked_device",
    "named_device",
    "require_device",
]


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


def _bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of some tensors, one behind the other."""
    flat = [each.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for each in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
