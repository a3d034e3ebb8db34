"""Counts of what sessions do, for pages and metrics: totals, and the last minutes second by second."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import NamedTuple

__all__ = ["History", "Second"]

SECONDS = 300
SAMPLES = 2000  # latencies that are kept of one second; later ones are not looked at


class Second(NamedTuple):
    """The steps of one second.

    Attributes:
        time: When it began, since the epoch.
        steps: How many there were.
        p50: The median of their latencies, in milliseconds.
        p99: Their 99th percentile.
    """

    time: int
    steps: int
    p50: float
    p99: float


class History:
    """Counts of events, and of steps by second.

    Attributes:
        totals: How often, by name.
        seconds: The last ones that are complete.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.seconds: deque[Second] = deque(maxlen=SECONDS)
        self.step_seconds = 0.0
        self._now = int(time.time())
        self._latencies: list[float] = []
        self._steps = 0

    def count(self, name: str) -> None:
        """Count one more."""
        self.totals[name] += 1

    def step(self, seconds: float) -> None:
        """Count a step that took so long."""
        self.totals["steps"] += 1
        self.step_seconds += seconds
        if int(time.time()) != self._now:
            self.advance()
        self._steps += 1
        if len(self._latencies) < SAMPLES:
            self._latencies.append(seconds)

    def advance(self) -> None:
        """Complete the seconds that are over."""
        now = int(time.time())
        if now == self._now:
            return
        ordered = sorted(self._latencies)
        p50, p99 = (1000 * ordered[int(share * (len(ordered) - 1))] if ordered else 0.0 for share in (0.5, 0.99))
        self.seconds.append(Second(self._now, self._steps, p50, p99))
        for second in range(max(self._now + 1, now - SECONDS), now):
            self.seconds.append(Second(second, 0, 0.0, 0.0))
        self._now, self._steps, self._latencies = now, 0, []
