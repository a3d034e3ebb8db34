"""The actor of a Ray cluster that hosts envs: what a worker process is elsewhere, with Ray in place of its pipe.

It needs no Ray to be imported, so that whoever looks for it finds a plain class.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import pickle
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from aioenvs.engine.layout import Family
from aioenvs.engine.memory import own_memory
from aioenvs.engine.pools.ray.rows import NOTHING, Bytes, RayRows
from aioenvs.engine.protocol import Frame, Opcode
from aioenvs.engine.worker.commands import Worker
from aioenvs.engine.worker.concurrent import ConcurrentServer
from aioenvs.engine.worker.plain_thread import PlainThread, done_at
from aioenvs.engine.worker.serve import draw_afresh, exit_code

__all__ = ["RayActor"]

MAX_EARLY = 1024  # requests that were given up before they came, or after they were answered

Message = tuple[int, int, int, Sequence[int], bytes]


class _OwnBlock:
    """Memory of this process in place of a block that it shares."""

    def map(self, nbytes: int) -> Any:
        self.buffer = own_memory(nbytes)
        return self.buffer


class RayActor:
    """Hosts envs, and answers frames, each with the rows that go along with it.

    Ray calls it inside of a running event loop, on which envs with coroutines live; the others have a thread.
    """

    def __init__(self) -> None:
        draw_afresh()
        self._block = _OwnBlock()
        self._worker = Worker(self._block, ())
        self._cargo: RayRows | None = None
        self._envs: tuple[int, ...] = ()
        self._server: ConcurrentServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._early: set[int] = set()
        self._left: asyncio.Future[int] | None = None
        self._plain = PlainThread()
        threading.Thread(target=self._plain.work, name="aioenvs envs", daemon=True).start()

    async def hello(self) -> tuple[int, str]:
        """The process id, and the name of the machine."""
        return os.getpid(), socket.gethostname()

    async def watch(self) -> int:
        """Wait until it ends of itself, or was told to, and return the exit code; if it dies, Ray says so instead."""
        return await self._leaving()

    def _leaving(self) -> asyncio.Future[int]:
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
        return self._left

    async def cancel(self, sequence: int) -> None:
        """Cancel what coroutines do for a request."""
        if sequence in self._waiting and self._server is not None:
            self._server.obey(Frame(Opcode.CANCEL, sequence))
            return
        self._early.add(sequence)
        if len(self._early) > MAX_EARLY:
            self._early.remove(min(self._early))

    async def answer(self, message: Message, rows: Bytes) -> tuple[Message, Bytes]:
        """Do what a frame says.

        Args:
            message: The frame.
            rows: What the envs need of the parent's block, uint8.

        Returns:
            The frame that answers it, and what they wrote.
        """
        code, sequence, generation, positions, body = message
        frame = Frame(Opcode(code), sequence, generation, positions, body)
        if frame.opcode is Opcode.START:
            frame = frame._replace(body=self._prepared(body))
        elif frame.opcode is Opcode.ATTACH:
            families, frame = self._placed(frame)
        elif self._cargo is not None:
            self._cargo.unpack_command(frame.opcode, positions, rows)
        try:
            reply = await self._reply(frame)
        except SystemExit as error:  # which would end the loop and leave the parent without a word
            self._end(exit_code(error))
            await asyncio.get_running_loop().create_future()  # until the process is ended
            raise
        if frame.opcode is Opcode.ATTACH:
            arrays = [family.layout.arrays(self._block.buffer) for family in families]
            self._cargo = RayRows(self._envs, families, arrays)
        if frame.opcode is Opcode.CLOSE:
            self._end(0)
        written = NOTHING if self._cargo is None else self._cargo.pack_answer(frame.opcode, positions)
        return (int(reply.opcode), reply.sequence, reply.generation, tuple(reply.positions), reply.body), written

    def _prepared(self, body: bytes) -> bytes:
        """Return the configuration of a worker, with this machine's import path before the parent's."""
        config = pickle.loads(body)
        self._envs = config.env_index
        path = [*sys.path, *(entry for entry in config.sys_path if entry not in sys.path)]
        return pickle.dumps(dataclasses.replace(config, sys_path=path))

    def _placed(self, frame: Frame) -> tuple[tuple[Family, ...], Frame]:
        """The families, and the frame with what a worker gets to know of them."""
        families: tuple[Family, ...] = pickle.loads(frame.body)
        places = [(family.envs, family.layout) for family in families]
        return families, frame._replace(body=pickle.dumps((families[-1].layout.end, places)))

    async def _reply(self, frame: Frame) -> Frame:
        """Return the reply, once there is one.

        Raises:
            SystemExit: If an env wants that.
        """
        if self._server is None:
            reply = await done_at(self._plain.order, functools.partial(self._worker.answer, frame))
            if self._worker.host.has_coroutines and not self._worker.closing:
                self._server = ConcurrentServer(self._worker, self._settle, self._plain.order)
                self._serving = asyncio.ensure_future(self._serve(self._server))
            return reply
        waiting: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[frame.sequence] = waiting
        self._server.obey(frame)
        if frame.sequence in self._early:
            self._early.remove(frame.sequence)
            self._server.obey(Frame(Opcode.CANCEL, frame.sequence))
        try:
            return await waiting
        finally:
            self._waiting.pop(frame.sequence, None)

    def _settle(self, frame: Frame) -> None:
        waiting = self._waiting.get(frame.sequence)
        if waiting is not None and not waiting.done():
            waiting.set_result(frame)

    async def _serve(self, server: ConcurrentServer) -> None:
        try:
            last = await server.serve()
            if last is not None:
                self._settle(self._worker.answer(last))
        except SystemExit as error:
            self._end(exit_code(error))

    def _end(self, code: int) -> None:
        leaving = self._leaving()
        if not leaving.done():
            leaving.set_result(code)
