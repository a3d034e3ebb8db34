"""The child's main loop where envs have coroutines: frames are read while envs run, and answered as those are done."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable

from aioenvs.engine.beside import Place, PlainThread
from aioenvs.engine.concurrency import Batch, ConcurrentHost
from aioenvs.engine.portal import PATIENCE, run_to_end
from aioenvs.engine.protocol import Decoder, Frame, Opcode, encode
from aioenvs.engine.worker import Worker, values_of

__all__ = ["ConcurrentServer", "serve_concurrently"]


def serve_concurrently(sock: socket.socket, worker: Worker, decoder: Decoder) -> None:
    """Answer frames until told to close, or until the parent is gone; then close the envs.

    The loop has a thread of its own where there are envs without coroutines, which stay in the calling one.

    Args:
        sock: Stream to the parent.
        worker: What answers; its envs are built.
        decoder: Of the stream.
    """
    if worker.host.has_plain:
        plain = PlainThread()
        plain.run_beside(_serve(sock, worker, decoder, plain.order), "aioenvs loop")
    else:
        run_to_end(_serve(sock, worker, decoder))


async def _serve(sock: socket.socket, worker: Worker, decoder: Decoder, place: Place | None = None) -> None:
    stream = _Stream(worker, decoder, place)
    sock.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=sock)
    last = await stream.server.serve()
    if last is not None:
        transport.write(encode(worker.answer(last)))
        transport.close()
        await stream.gone


class ConcurrentServer:
    """Has frames obeyed while envs run, and sends the answers as those are done.

    Args:
        worker: What answers; its envs are built.
        send: Called with each answer.
        place: Where envs without coroutines do what they are asked; None for right here.
    """

    def __init__(self, worker: Worker, send: Callable[[Frame], None], place: Place | None = None) -> None:
        self._told: asyncio.Future[Frame | None] = asyncio.get_running_loop().create_future()
        self._host = ConcurrentHost(worker.host, worker.max_concurrency, self.fail, place)
        self._worker = worker
        self._send = send
        self._batches: dict[int, Batch] = {}

    async def serve(self) -> Frame | None:
        """Wait until told to close, or until the parent is gone; then end what is under way, and close the envs.

        Returns:
            The frame that said to close, which is yet to be answered; None if the parent is gone.

        Raises:
            BaseException: Whatever else ends the worker.
        """
        patience: float | None = PATIENCE
        try:
            last = await self._told
            if last is not None:
                patience = None  # the parent has some, and ends what exceeds it
            return last
        finally:
            await self._host.close(patience)

    def obey(self, frame: Frame) -> None:
        """Do what a frame says, or begin it."""
        if frame.opcode is Opcode.CANCEL:
            batch = self._batches.get(frame.sequence)
            if batch is not None:
                batch.cancel()
        elif frame.opcode is Opcode.CLOSE:
            self.end(frame)
        elif frame.opcode is Opcode.ATTACH:
            self._send(self._worker.answer(frame))
        else:
            self._begin(frame)

    def _begin(self, frame: Frame) -> None:
        try:
            batch = self._host.begin(frame.opcode, frame.positions, values_of(frame))
        except Exception as error:  # values that cannot be rebuilt here
            self._send(self._worker.refusal(frame, error))
            return
        self._batches[frame.sequence] = batch
        batch.ended.add_done_callback(functools.partial(self._ended, frame, batch))

    def _ended(self, frame: Frame, batch: Batch, _: asyncio.Future[None]) -> None:
        del self._batches[frame.sequence]
        if not self._told.done():  # else nobody waits for what was cancelled because of that
            self._send(self._worker.reply(frame, batch.outcome))

    def end(self, how: Frame | None) -> None:
        """Have it end, for a frame that says so, or because the parent is gone."""
        if not self._told.done():
            self._told.set_result(how)

    def fail(self, error: BaseException) -> None:
        """Have it end, for an exception."""
        if not self._told.done():
            self._told.set_exception(error)


class _Stream(asyncio.Protocol):
    """The stream of frames.

    Attributes:
        server: Obeys them.
        gone: Done when the stream is closed.
    """

    def __init__(self, worker: Worker, decoder: Decoder, place: Place | None) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.server = ConcurrentServer(worker, self._send, place)
        self._decoder = decoder
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self.server.obey(frame)
        except Exception as error:
            self.server.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)
        self.server.end(None)

    def _send(self, frame: Frame) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(encode(frame))
