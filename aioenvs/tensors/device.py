"""Devices that results go to, and that actions come from.

`DeviceBackend` is all that a device has to be able to do, and the only place that calls it; `Transfer` says in which
order. A batch crosses as one run of bytes, on a stream of its own: its tensors are views of what arrives.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from aioenvs.engine.double_buffer import Fence as Fence
from aioenvs.engine.layout import ALIGNMENT
from aioenvs.errors import AioEnvsError, PerformanceWarning, shown


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
    """Copies of a CUDA device, by default the current one, on a stream beside those that compute, both ways."""

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

    TypeError if it is nothing that names a device, ValueError if there is no device of such a name.
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
    """Return the checked device of results; as `named_device`, and ValueError for one that can hold no data."""
    checked = named_device(device)
    if checked is not None and checked.type == "meta":
        raise ValueError("results cannot go to the device 'meta', which holds no data")
    return checked


def require_device(device: torch.device) -> None:
    """Raise AioEnvsError if a device is not there."""
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
        """Bring bytes of the host to the device; `lasts` says that nobody will write to them any more.

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
