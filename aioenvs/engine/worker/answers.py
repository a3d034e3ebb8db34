"""The way of a worker's answers: those without a body over the pool's completion pipe, the others over the socket."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from aioenvs.engine.protocol import RECORD, Frame, Opcode, encode, encode_record

__all__ = ["Answers"]

SOON = 200e-6  # seconds that an answer may wait for others that go along with it
MOST = select.PIPE_BUF // RECORD.size  # records that are written at once


class Answers:
    """Sends the answers of one worker.

    Those of single envs that come quickly one after the other go together, in one write. None of them waits for an env
    that takes its time: a thread sees to what nobody else sends.

    Args:
        send: Sends bytes to the parent, over the socket.
        done: Descriptor of the completion pipe, in which a write of up to PIPE_BUF bytes is never torn apart.
        soon: Has something done once all that is ready has been; None where the thread sees to it.

    Attributes:
        worker: The number of the worker, once it is known.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        done: int,
        soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.worker = 0
        self._send = send
        self._done = done
        self._soon = soon
        self._records: list[bytes] = []
        self._since = 0.0  # when the last were written
        self._lock = threading.Lock()  # between the two who write
        self._armed: threading.Semaphore | None = None

    def send(self, answer: Frame) -> None:
        """Send an answer; those of single envs are sent soon."""
        if answer.body or answer.opcode is Opcode.FAILED:
            self._send(encode(answer))
        elif answer.opcode is Opcode.DONE:
            os.write(self._done, encode_record(answer, self.worker))
        else:
            self._collect(encode_record(answer, self.worker))

    def begin(self) -> None:
        """Say that envs begin to step, each for itself."""
        self._since = time.perf_counter()

    def _collect(self, record: bytes) -> None:
        with self._lock:
            self._records.append(record)
            count = len(self._records)
        if count >= MOST:
            self.flush()
        elif self._soon is not None:
            if count == 1:
                self._soon(self._flush_soon)
        elif time.perf_counter() - self._since > SOON:
            self.flush()
        elif count == 1:
            if self._armed is None:
                self._armed = threading.Semaphore(0)
                threading.Thread(
                    target=self._see_to_it, args=(self._armed,), name="aioenvs answers", daemon=True
                ).start()
            self._armed.release()

    def flush(self) -> None:
        """Send what is left."""
        with self._lock:
            if self._records:
                data = b"".join(self._records)
                self._records.clear()
                os.write(self._done, data)
        self._since = time.perf_counter()

    def _flush_soon(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, as the stream says as well
            self.flush()

    def _see_to_it(self, armed: threading.Semaphore) -> None:
        while armed.acquire():
            time.sleep(SOON)
            try:
                self.flush()
            except OSError:  # the parent is gone, which the other thread finds out as well
                return
