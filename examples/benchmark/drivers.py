"""Drivers that several libraries share."""

import asyncio
import time
from abc import abstractmethod
from typing import Any

from systems import NUM_BATCHES, Driver, Job, action_tensors

__all__ = ["LoopDriver", "TensorDictDriver"]


class LoopDriver(Driver):
    """Steps what has coroutines, on uvloop."""

    def __init__(self) -> None:
        import uvloop

        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    @abstractmethod
    async def _step(self) -> int:
        """Step once; returns how many env steps that was."""

    def step(self) -> int:
        """Step once."""
        return self._runner.run(self._step())

    def turn(self, seconds: float) -> tuple[int, float]:
        """Step within one run of the event loop."""

        async def steps() -> tuple[int, float]:
            began, count = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - began) < seconds:
                count += await self._step()
            return count, elapsed

        return self._runner.run(steps())


class TensorDictDriver(Driver):
    """Steps a batched env, of aioenvs or of TorchRL, all envs at once by plain calls.

    Args:
        job: What to do.
        env: The batched env.
    """

    def __init__(self, job: Job, env: Any) -> None:
        self._actions, self._count = action_tensors(job), 0
        self._env = env
        self._td = env.reset()

    def step(self) -> int:
        """Step all envs."""
        self._td.set("action", self._actions[self._count % NUM_BATCHES])
        self._count += 1
        _, self._td = self._env.step_and_maybe_reset(self._td)
        return len(self._actions[0])

    def close(self) -> None:
        """Close the batched env."""
        self._env.close()
