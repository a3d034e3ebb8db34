"""The parent's side of one worker: requests out, replies matched to the futures that await them."""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from aioenvs.engine.protocol import Decoder, Frame, Opcode, encode, next_sequence
from aioenvs.errors import AioEnvsError, ProtocolError

__all__ = ["Channel", "SocketChannel"]

Answered = Callable[[Collection[int]], None]


class Channel(ABC):
    """Frames to and from one worker, however they get there.

    Args:
        generation: Which worker in the history of its envs this is; replies of another one are dropped.
        answered: Called with the envs of a request when its reply arrives, whether anybody still awaits it.

    Attributes:
        lost: Done when nothing will ever come any more, with the reason if there is one.
    """

    def __init__(self, generation: int, answered: Answered) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[Exception | None] = self._loop.create_future()
        self._generation = generation
        self._answered = answered
        self._sequence = 0
        self._pending: dict[int, tuple[asyncio.Future[Frame], Collection[int]]] = {}
        self._failure: AioEnvsError | None = None

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether requests can be sent."""

    @abstractmethod
    def _dispatch(self, frame: Frame) -> None:
        """Send a frame, if anything still can be sent.

        Raises:
            ProtocolError: If it is too large; nothing was sent then.
        """

    @abstractmethod
    def close(self) -> None:
        """Nothing is sent or received any more."""

    def request(
        self,
        opcode: Opcode,
        envs: Collection[int],
        positions: Sequence[int] = (),
        body: bytes = b"",
        *,
        cancels: bool = False,
    ) -> asyncio.Future[Frame]:
        """Send a request and return the future of its reply.

        Cancelling the future abandons the request: its reply will be dropped when it comes.

        Args:
            opcode: What to do.
            envs: Those of which the reply will be an answer.
            positions: Which of the worker's envs are to do it; none for all.
            body: What they need for it.
            cancels: Whether the worker is told when the request is abandoned, as it can cancel what it does.

        Raises:
            ProtocolError: If the body is too large.
            WorkerError: If the worker is known to be gone. If that is not sure yet, the future will say so.
        """
        if self._failure is not None:
            raise self._failure.again()
        sequence = next_sequence(self._sequence)
        self._dispatch(Frame(opcode, sequence, self._generation, positions, body))
        self._sequence = sequence
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._pending[sequence] = future, envs
        if cancels:
            future.add_done_callback(functools.partial(self._give_up, sequence))
        return future

    def _give_up(self, sequence: int, future: asyncio.Future[Frame]) -> None:
        if future.cancelled() and sequence in self._pending and self.connected:
            self._dispatch(Frame(Opcode.CANCEL, sequence, self._generation))

    def fail(self, error: AioEnvsError) -> None:
        """The worker is gone: everything that is awaited, or will be asked, gets this error."""
        self._failure = error
        pending, self._pending = self._pending, {}
        for future, _ in pending.values():
            if not future.done():
                future.set_exception(error.again())
                future.exception()  # the awaiting side may be gone as well: no complaint then

    def _reply(self, frame: Frame) -> None:
        if frame.generation != self._generation:
            return
        future, envs = self._pending.pop(frame.sequence, (None, ()))
        if future is None:
            return
        self._answered(envs)
        if not future.done():
            future.set_result(frame)


class SocketChannel(Channel, asyncio.Protocol):
    """A channel through a pipe.

    Args:
        generation: As for `Channel`.
        answered: Likewise.
    """

    def __init__(self, generation: int, answered: Answered) -> None:
        super().__init__(generation, answered)
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._broken: ProtocolError | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _dispatch(self, frame: Frame) -> None:
        data = encode(frame)
        assert self._transport is not None, "a request before the pipe was connected"
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the pipe."""
        if self._transport is not None and not self._loop.is_closed():
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._reply(frame)
        except ProtocolError as error:
            self._broken = error
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._decoder.finish()
        except ProtocolError as error:
            self._broken = self._broken or error
        if not self.lost.done():
            self.lost.set_result(self._broken or exc)
