"""A coroutine env with infos. Workers import this module, so it must not import torch."""

from __future__ import annotations

import asyncio
from typing import Any

from gymnasium import spaces

__all__ = ["SlowStart"]


class SlowStart:
    """Counts to 2, awaiting at each step."""

    observation_space = spaces.Discrete(10)
    action_space = spaces.Discrete(2)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        self.steps = 0
        return 0, {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        self.steps += 1
        return self.steps, 1.0, self.steps == 2, False, {"steps": self.steps}

    async def awaited(self, value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value
