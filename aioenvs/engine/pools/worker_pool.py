"""The pool of worker processes on this machine."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aioenvs.engine.memory import SharedBlock
from aioenvs.engine.pools.channel import SocketChannel
from aioenvs.engine.pools.pool import Timeouts
from aioenvs.engine.pools.process_host import Launcher, WorkerHandle, WorkerProcess, shared_launcher
from aioenvs.engine.pools.replacing import ReplacingPool, WorkerOptions
from aioenvs.engine.worker import descriptors as passing

__all__ = ["WorkerPool"]


class WorkerPool(ReplacingPool):
    """Hosts the envs in worker processes, one group each, around a block that all of them map.

    Args:
        groups: The envs of each process.
        factories: One per env: a callable, or something `gymnasium.make` takes.
        kwargs: Keyword arguments for each factory.
        start_method: "forkserver", "spawn" or "fork".
        timeouts: How long things may take.
        options: What else is to be done differently.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        factories: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        start_method: str,
        timeouts: Timeouts,
        options: WorkerOptions | None = None,
    ) -> None:
        super().__init__(groups, factories, kwargs, timeouts=timeouts, options=options or WorkerOptions())
        self._method = start_method
        self.inherits = start_method == "fork"
        self._block: SharedBlock | None = None
        self._launcher: Launcher | None = None

    async def _build(self) -> None:
        self._refuse_threads()
        await super()._build()

    def _refuse_threads(self) -> None:
        count = self._options.num_threads
        if self._method == "fork" and count > 1 and "torch" in sys.modules:
            raise ValueError(
                f"num_sub_threads={count} does not go with mp_start_method='fork': a fork of a process that has used "
                "torch inherits OpenMP without its threads, and hangs at the first operation that wants them; use "
                "num_sub_threads=1, or mp_start_method='forkserver' or 'spawn'"
            )

    async def _prepare(self) -> None:
        if self._block is None:
            self._block = SharedBlock.create(on_disk=self._options.on_disk)
        if self._launcher is None or not self._launcher.alive:
            self._launcher = self._make_launcher()

    def _allocate(self, nbytes: int) -> Any:
        assert self._block is not None
        return self._block.allocate(nbytes)

    def _make_launcher(self) -> Launcher:
        if self._method == "fork":
            return Launcher.forked(list(zip(self._factories, self._kwargs, strict=True)))
        return shared_launcher(self._options.preload)

    async def _spawn(self, index: int, descriptors: Sequence[int]) -> WorkerHandle:
        assert self._launcher is not None
        assert self._block is not None
        loop = asyncio.get_running_loop()
        process = WorkerProcess(self._launcher, self._method, self._block.fd)
        channel = SocketChannel(self._next_generation(), self._answered)
        worker = self._workers[index] = WorkerHandle(self.groups[index], process, channel, self._ended)
        passing.send(process.sock, descriptors, None if self.inherits else passing.tracker())
        process.sock.setblocking(False)
        await loop.create_unix_connection(lambda: channel, sock=process.sock)
        return worker

    def _attachments(self, indices: Collection[int]) -> list[bytes]:
        return [pickle.dumps((self.families[-1].layout.end, self._places))] * len(indices)

    async def _give_back(self) -> None:
        self._release_block()
        if self._launcher is not None and self._method == "fork":
            await self._launcher.close()
        self._launcher = None

    def _give_up(self) -> None:
        self._release_block()
        if self._launcher is not None and self._method == "fork":
            self._launcher.stop()

    def _release_block(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None
