"""Whether envs wait or compute: measured for a while, then known."""

from __future__ import annotations

import resource
import time
from types import TracebackType

__all__ = ["WaitMeter", "waiting_share"]

ENOUGH_STEPS = 20
ENOUGH_SECONDS = 0.25
MANY_STEPS = 500  # after which quick envs are known as well
WAITING = 100  # verdicts up to here are per cent of waiting; beyond it come the microseconds of a step
SLOWEST = 255  # microseconds of an env step which are no matter any more
MOSTLY = 0.5
OWN_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # others of a Ray host pause all the time


def waiting_share(wall: float, cpu: float, pauses: int, steps: int) -> float:
    """The share of the time spent waiting, or 0 if that is no reason for advice.

    A process that is merely kept off a busy core also uses less CPU than wall time, but it does not pause by itself:
    it takes both to call it waiting.

    Args:
        wall: Seconds in steps.
        cpu: CPU seconds of all threads in them.
        pauses: How often the process gave up its core by itself.
        steps: How many single env steps that was.
    """
    share = 1 - cpu / wall if wall > 0 else 0.0
    return share if share > MOSTLY and pauses >= MOSTLY * steps else 0.0


def verdict_on(share: float, seconds: float) -> int:
    """Return in one small number that envs wait, and for how much of the time, or else how long a step takes."""
    return round(100 * share) or WAITING + min(SLOWEST, max(1, round(1e6 * seconds)))


class WaitMeter:
    """Measures the first steps of a worker, and then no more.

    Attributes:
        measuring: Whether it still does.
    """

    def __init__(self) -> None:
        self.measuring = True
        self._batches = self._steps = 0
        self._wall = self._cpu = 0.0
        self._pauses = 0

    def __enter__(self) -> None:
        if self.measuring:
            self._count(-1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.measuring:
            self._count(1)
            self._batches += 1

    def _count(self, sign: int) -> None:
        self._wall += sign * time.perf_counter()
        self._cpu += sign * time.process_time()
        self._pauses += sign * resource.getrusage(OWN_THREAD).ru_nvcsw

    def verdict(self, stepped: int, num_envs: int) -> int:
        """Once, when enough was measured: what is to be said of the steps of `num_envs` envs; 0 otherwise.

        Args:
            stepped: How many envs the last command was for.
            num_envs: How many there are.
        """
        self._steps += stepped
        enough = self._batches >= MANY_STEPS or (self._batches >= ENOUGH_STEPS and self._wall >= ENOUGH_SECONDS)
        if not self.measuring or not enough:
            return 0
        self.measuring = False
        share = waiting_share(self._wall, self._cpu, self._pauses, self._steps) if num_envs > 1 else 0.0
        return verdict_on(share, self._wall / max(1, self._steps))
