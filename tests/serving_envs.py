"""Envs for servers that run as programs."""

from __future__ import annotations

from typing import Any

import numpy as np
from failing_envs import CountingEnv


class Drawn(CountingEnv):
    """Counts, and shows a picture that grows darker with each step."""

    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((40, 60, 3), 255 - self.steps % 256, np.uint8)
