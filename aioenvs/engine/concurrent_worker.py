"""The child's main loop where envs have coroutines: frames are read while envs run, and answered as those are done."""

from __future__ import annotations

import asyncio
import functools
import socket

from aioenvs.engine.concurrency import Batch, ConcurrentHost
from aioenvs.engine.portal import PATIENCE, run_to_end
from aioenvs.engine.protocol import Decoder, Frame, Opcode, encode
from aioenvs.engine.worker import Worker, values_of

__all__ = ["serve_concurrently"]


def serve_concurrently(sock: socket.socket, worker: Worker, decoder: Decoder) -> None:
    """Answer frames until told to close, or until the parent is gone; then close the envs.

    Args:
        sock: Stream to the parent.
        worker: What answers; its envs are built.
        decoder: Of the stream.
    """
    run_to_end(_serve(sock, worker, decoder))


async def _serve(sock: socket.socket, worker: Worker, decoder: Decoder) -> None:
    server = _Server(worker, decoder)
    sock.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: server, sock=sock)
    patience: float | None = PATIENCE
    last = None
    try:
        last = await server.told
        if last is not None:
            patience = None  # the parent has some, and ends what exceeds it
    finally:
        await server.host.close(patience)
    if last is not None:
        transport.write(encode(worker.answer(last)))
        transport.close()
        await server.gone


class _Server(asyncio.Protocol):
    """The stream of frames.

    Attributes:
        told: The frame that said to close, or None if the parent is gone; or what else ends the worker.
        gone: Done when the stream is closed.
    """

    def __init__(self, worker: Worker, decoder: Decoder) -> None:
        loop = asyncio.get_running_loop()
        self.told: asyncio.Future[Frame | None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.host = ConcurrentHost(worker.host, worker.max_concurrency, self._fail)
        self._worker = worker
        self._decoder = decoder
        self._batches: dict[int, Batch] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._obey(frame)
        except Exception as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)
        self._end(None)

    def _obey(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CANCEL:
            batch = self._batches.get(frame.sequence)
            if batch is not None:
                batch.cancel()
        elif frame.opcode is Opcode.CLOSE:
            self._end(frame)
        elif frame.opcode is Opcode.ATTACH:
            self._answer(self._worker.answer(frame))
        else:
            self._begin(frame)

    def _begin(self, frame: Frame) -> None:
        try:
            batch = self.host.begin(frame.opcode, frame.positions, values_of(frame))
        except Exception as error:  # values that cannot be rebuilt here
            self._answer(self._worker.refusal(frame, error))
            return
        self._batches[frame.sequence] = batch
        batch.ended.add_done_callback(functools.partial(self._ended, frame, batch))

    def _ended(self, frame: Frame, batch: Batch, _: asyncio.Future[None]) -> None:
        del self._batches[frame.sequence]
        if not self.told.done():  # else nobody waits for what was cancelled because of that
            self._answer(self._worker.reply(frame, batch.outcome))

    def _answer(self, frame: Frame) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(encode(frame))

    def _end(self, how: Frame | None) -> None:
        if not self.told.done():
            self.told.set_result(how)

    def _fail(self, error: BaseException) -> None:
        if not self.told.done():
            self.told.set_exception(error)
