"""What TorchRL's code looks at in a batch, besides what every env has."""

from __future__ import annotations

import os
import signal
from typing import Any

__all__ = ["Values", "Worker"]


class Values(list[Any]):
    """The values of an attribute; calling it returns them, as TorchRL's ParallelEnv has it."""

    def __call__(self) -> list[Any]:
        """Return the values."""
        return list(self)


class Worker:
    """A worker process, as far as TorchRL's code looks at one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        """Whether the process is there."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def terminate(self) -> None:
        """End the process."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        os.kill(self.pid, signal.SIGKILL)
