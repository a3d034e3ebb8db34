"""The main loop of a worker process: read a frame, have it done, answer. Blocking, and free of torch."""

from __future__ import annotations

import os
import random
import socket
import sys

import numpy as np

from aioenvs.engine.memory import SharedBlock
from aioenvs.engine.protocol import Decoder, Opcode
from aioenvs.engine.worker import descriptors
from aioenvs.engine.worker.answers import Answers
from aioenvs.engine.worker.commands import Inherited, Worker

__all__ = ["draw_afresh", "exit_code", "serve"]

CHUNK = 1 << 14


def serve(sock: socket.socket, block: SharedBlock, done: int, inherited: Inherited = ()) -> None:
    """Answer frames until told to close, or until the parent is gone; then close the envs.

    Args:
        sock: Blocking stream to the parent.
        block: The pool's shared block, sized by the parent before it says ATTACH.
        done: Descriptor of the pipe for answers without a body.
        inherited: Factory and keyword arguments of every env of the pool, for a fork of the parent.
    """
    draw_afresh()
    worker = Worker(block, inherited)
    decoder, answers = Decoder(), Answers(sock.sendall, done)
    try:
        descriptors.receive(sock)
        while data := sock.recv(CHUNK):
            for frame in decoder.feed(data):
                if frame.opcode is Opcode.STEP_EACH:
                    worker.answer_each(frame, answers)
                else:
                    answers.send(worker.answer(frame))
                answers.worker = worker.number
                if worker.closing:
                    return
                if worker.host.has_coroutines:
                    from aioenvs.engine.worker.concurrent import serve_concurrently

                    return serve_concurrently(sock, worker, decoder, done)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    finally:
        worker.close()


def draw_afresh() -> None:
    """Give this process random streams of its own: forked siblings must not share one, and nobody has seeded them."""
    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))


def exit_code(error: SystemExit) -> int:
    """The code with which a process ends for this; what it says is written to stderr."""
    if isinstance(error.code, str):
        sys.stderr.write(error.code + "\n")
    return error.code if isinstance(error.code, int) else int(error.code is not None)
