"""A made-up `torch.cuda`, on the CPU: what `CudaBackend` calls, with the arguments that torch's own takes.

Every call is bound to the signature of torch's function, where that is written in Python. Work on a stream is done when
the test lets it (`work`), in the order in which events say; so what was not ordered shows in the values.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

__all__ = ["PretendCuda"]

REAL = torch.cuda


def bound(real: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse arguments that torch's own would not take."""
    inspect.signature(real).bind(*args, **kwargs)


class Code(int):
    """What a function of the runtime returns: int() of it is the number, as of pybind11's enums."""


class Runtime:
    """The functions of `torch.cuda.cudart()`, which are written in C++: no names for arguments, no defaults."""

    def __init__(self, cuda: PretendCuda) -> None:
        self._cuda = cuda
        self.registered: dict[int, int] = {}
        self.error = 0  # of the last call, which CUDA keeps until somebody asks

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> Code:
        assert (type(pointer), type(size), type(flags)) == (int, int, int)
        assert size > 0
        self._cuda.note("register", flags)
        if pointer in self.registered:
            return self._failed(712)
        self.registered[pointer] = size
        return Code(0)

    def cudaHostUnregister(self, pointer: int, /) -> Code:
        assert type(pointer) is int
        self._cuda.note("unregister")
        if self.registered.pop(pointer, None) is None:
            return self._failed(713)
        return Code(0)

    def cudaGetErrorString(self, code: Code, /) -> str:
        assert isinstance(code, Code)
        return {712: "part or all of the requested memory range is already mapped", 713: "not registered"}[int(code)]

    def _failed(self, code: int) -> Code:
        self.error = code
        return Code(code)


class Stream:
    def __init__(self, cuda: PretendCuda, device: torch.device) -> None:
        self.device = device
        self._cuda = cuda
        self.todo: list[Callable[[], bool]] = []  # each says whether it could be done

    def wait_event(self, event: Event) -> None:
        bound(REAL.Stream.wait_event, self, event)
        self.todo.append(event.query)

    def wait_stream(self, stream: Stream) -> None:
        bound(REAL.Stream.wait_stream, self, stream)
        event = Event(self._cuda)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self._cuda.work()

    def work(self) -> bool:
        """Do what can be done; whether that was anything."""
        before = len(self.todo)
        while self.todo and self.todo[0]():
            del self.todo[0]
        return len(self.todo) < before


class Event:
    def __init__(self, cuda: PretendCuda, **kwargs: Any) -> None:
        bound(REAL.Event.__new__, REAL.Event, **kwargs)
        self.options = kwargs
        self._cuda = cuda
        self._passed: threading.Event | None = None

    def record(self, stream: Stream) -> None:
        bound(REAL.Event.record, self, stream)
        passed = self._passed = threading.Event()
        stream.todo.append(lambda: passed.set() or True)

    def query(self) -> bool:
        if self._cuda.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self._passed is None or self._passed.is_set()

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._cuda.waited.set()
        if self._cuda.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        assert self._passed is not None
        assert self._passed.wait(20), "nobody let the stream work"


class PretendCuda:
    """The module.

    Args:
        monkeypatch: Undoes what is done to torch itself.
        backwards: Whether streams that were made last work first.

    Attributes:
        notes: What was called.
        runs: Whether all streams work as soon as there is something to do.
        broken: Whether the device has failed, as after an assertion in a kernel.
        waited: Set when a thread of its own waits for an event.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, backwards: bool) -> None:
        self.backwards = backwards
        self.notes: list[tuple[Any, ...]] = []
        self.runs = True
        self.broken = False
        self.waited = threading.Event()
        self.recorded: list[tuple[torch.Tensor, Stream]] = []
        self.runtime = Runtime(self)
        self._streams: list[Stream] = []
        self._default = self._stream(torch.device("cpu", 0))
        self._current = threading.local()
        cuda = self
        copy_, zeros = torch.Tensor.copy_, torch.zeros

        def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return copy_(self, source)
            cuda.current_stream().todo.append(lambda: copy_(self, source) is self)
            cuda._maybe_work()
            return self

        def cleared(*args: Any, **kwargs: Any) -> torch.Tensor:
            error, cuda.runtime.error = cuda.runtime.error, 0
            if error:
                raise RuntimeError(f"CUDA error: {error}")
            return zeros(*args, **kwargs)

        def record_stream(self: torch.Tensor, stream: Stream) -> None:
            assert isinstance(stream, Stream)
            cuda.recorded.append((self, stream))

        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        monkeypatch.setattr(torch, "zeros", cleared)

    def note(self, *what: Any) -> None:
        self.notes.append(what)

    def _stream(self, device: torch.device) -> Stream:
        stream = Stream(self, device)
        self._streams.append(stream)
        return stream

    def _maybe_work(self) -> None:
        if self.runs:
            self.work()

    def work(self) -> None:
        """Do all that streams have to do, each as much at once as it can."""
        streams = self._streams[:: -1 if self.backwards else 1]
        while any(stream.work() for stream in streams):
            pass

    # -- what torch has -----------------------------------------------------------------------------------

    def current_device(self) -> int:
        return 0

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        bound(REAL.device.__init__, self, device)
        assert torch.device(device).index in (0, None)
        yield

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        bound(REAL.Stream.__new__, REAL.Stream, device, priority)
        return self._stream(torch.device(device))

    def Event(self, **kwargs: Any) -> Event:
        return Event(self, **kwargs)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        bound(REAL.stream, stream)
        former = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = former
            self._maybe_work()

    def current_stream(self, device: Any = None) -> Stream:
        bound(REAL.current_stream, device)
        stream: Stream = getattr(self._current, "stream", self._default)
        return stream

    def default_stream(self, device: Any = None) -> Stream:
        bound(REAL.default_stream, device)
        return self._default

    def cudart(self) -> Runtime:
        return self.runtime
