"""Devices that results go to, and that actions come from.

`DeviceBackend` is all that a device has to be able to do, and the only place that calls it; `aioenvs.tensors.transfer`
says in which order.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from aioenvs.engine.double_buffer import Fence
from aioenvs.errors import AioEnvsError, shown

__all__ = [
    "PASSED",
    "CudaBackend",
    "Device",
    "DeviceBackend",
    "Fence",
    "StagedBackend",
    "backend_of",
    "bytes_of",
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
    """The operations on a device, or with host memory for its sake.

    Pass one as `device=` to bring results to a device that is not known here. All bytes are tensors of uint8. Envs that
    are pickled take theirs along, so that should be possible: without what belongs to a process.

    Attributes:
        device: Where tensors go.
        pins: Whether host memory can be pinned, so that copies of it need no help of the CPU.
    """

    device: torch.device
    pins: bool = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device, rather than on the host or on another one."""
        own, other = self.device, tensor.device
        return own.type == other.type and own.index in (None, other.index)

    def callers(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """The context in which another thread works on behalf of the calling one, such as its stream.

        Returns:
            What makes it, as often as it is entered; None where a thread has it anyway.
        """
        return None

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
            sources: Of which `holds` is true, of any dtype.
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
        target.copy_(bytes_of(sources))
        return PASSED


def _cuda() -> Any:
    """Torch's module, of which not all has annotations; the only place where this one finds it."""
    return torch.cuda


class _CudaFence:
    """An event on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event: Any = _cuda().Event(blocking=True)  # a thread that waits for it sleeps
        self.event.record(stream)

    def done(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError:  # which `wait` says to somebody who wants to know
            return False

    def wait(self) -> None:
        with _cuda().device(self._device):  # or a thread of its own would open the first device there is
            self.event.synchronize()


class CudaBackend(DeviceBackend):
    """Copies on a stream beside those that compute, in both directions.

    Args:
        device: A CUDA device; the current one if it has no number.
    """

    pins = True
    PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices

    def __init__(self, device: torch.device) -> None:
        index = _cuda().current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._into = _cuda().Stream(self.device)
        self._out = _cuda().Stream(self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device,)  # streams are of a process

    def callers(self) -> Callable[[], AbstractContextManager[Any]] | None:
        stream = _cuda().current_stream(self.device)
        return None if stream == _cuda().default_stream(self.device) else functools.partial(_cuda().stream, stream)

    def pin(self, memory: torch.Tensor) -> None:
        with _cuda().device(self.device):
            self._check(_cuda().cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, self.PORTABLE), memory)

    def unpin(self, memory: torch.Tensor) -> None:
        with _cuda().device(self.device):
            self._check(_cuda().cudart().cudaHostUnregister(memory.data_ptr()), memory)

    def _check(self, code: Any, memory: torch.Tensor) -> None:
        """Raise an error for what a call about memory of the host returned, unless it is success."""
        if not int(code):
            return
        # CUDA keeps it, and torch would blame it on the next thing that is done on the device.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)
        reason = _cuda().cudart().cudaGetErrorString(code)
        raise OSError(f"pinning {memory.nbytes} bytes, or giving them back: {reason} (cudaError {int(code)})")

    def staging(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        # Torch keeps pinned memory that was dropped, and gives it to nobody before the copies of it are done; a copy of
        # other memory has gone through memory of the driver's own when the call returns.
        if pinned:
            with contextlib.suppress(RuntimeError):  # there is no more of it
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return super().staging(nbytes, pinned=False)

    def copy_in(self, source: torch.Tensor) -> tuple[torch.Tensor, Fence]:
        with _cuda().stream(self._into):  # whose memory it is, so nothing of the caller's stream is still at it
            copy = torch.empty_like(source, device=self.device)
            copy.copy_(source, non_blocking=True)
            return copy, _CudaFence(self._into)

    def order(self, copy: torch.Tensor, fence: Fence) -> None:
        assert isinstance(fence, _CudaFence)
        stream = _cuda().current_stream(self.device)
        stream.wait_event(fence.event)
        copy.record_stream(stream)

    def copy_out(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> Fence:
        self._out.wait_stream(_cuda().current_stream(self.device))
        with _cuda().stream(self._out):
            target.copy_(bytes_of(sources), non_blocking=True)
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
        raise TypeError(
            f"expected a device, such as 'cuda:1', torch.device('cpu') or 0, or None, found {shown(device)}"
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"expected a device, such as 'cpu', 'cuda', 'cuda:1' or 'mps', found {shown(device)}"
        ) from error


def checked_device(device: Any) -> torch.device | None:
    """Return the checked device of results.

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
    """Return the backend that brings results to a device; None where they are there already, on the CPU or anywhere."""
    if isinstance(device, DeviceBackend):
        return device
    device = named_device(device)
    if device is None or device.type == "cpu":
        return None
    if device.type != "cuda":
        return StagedBackend(device)
    require_device(device)
    return CudaBackend(device)


def bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of some tensors, one behind the other."""
    flat = [_bytes_of_one(each.detach().resolve_conj().resolve_neg().reshape(-1)) for each in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _bytes_of_one(flat: torch.Tensor) -> torch.Tensor:
    if flat.stride(0) != 1:  # of a single value, which torch takes for contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
