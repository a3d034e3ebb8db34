"""The layers of aioenvs one by one, to see what each costs: these reach below the public faces."""

import asyncio
from typing import Any

from systems import Job, System

from aioenvs.engine.protocol import Opcode
from aioenvs.engine.request import Request
from peers.aioenvs_faces import CoroutineDriver

__all__ = ["SYSTEMS"]


class FramesDriver(CoroutineDriver):
    """A frame to each worker, which steps its envs, and one back; nobody reads what came of it."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, num_processes=job.num_processes)
        running = self._env._running
        assert running is not None
        self._pool: Any = running.pool
        self._rows: Any = running.everything.rows
        (self._input,) = self._pool.arrays[0]["input"].values()
        self._hosts = list(self._pool.hosts.values())

    async def _step(self) -> int:
        self._input[...] = self._next_actions()
        opcode = Opcode.STEP_AND_MAYBE_RESET
        await asyncio.gather(*[host.ask(opcode) for host in self._hosts])
        return len(self._input)


class PoolDriver(FramesDriver):
    """The same through the pool, which sees to it that nobody else asks these envs and says what came of it."""

    async def _step(self) -> int:
        self._input[...] = self._next_actions()
        async with Request(self._pool, self._pool.everything, "step") as request:
            self._read(await request.step(None, maybe_reset=True))
        return len(self._input)

    def _read(self, outcome: Any) -> None:
        """Read nothing."""


class ArraysDriver(PoolDriver):
    """The same, and results are copied out: of the step, and what the next one begins with."""

    def _read(self, outcome: Any) -> None:
        self._rows.step(None, outcome, None, maybe_reset=True)


SYSTEMS = (
    System("aioenvs layers: frames", "packed", FramesDriver),
    System("aioenvs layers: + pool", "packed", PoolDriver),
    System("aioenvs layers: + arrays", "packed", ArraysDriver),
)
