"""Whether, and when, a worker that died may be restarted. Pure: the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["RestartBudget", "derived_seed"]

SHORT_LIFE = 10.0  # seconds within which a death counts as one at the start
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds before a worker that lived shortly is restarted


@dataclass
class RestartBudget:
    """How often one worker was restarted, and how often it still may be.

    Attributes:
        most: How many restarts it may have in all.
        used: How many it has had.
    """

    most: int
    used: int = 0
    _hasty: int = field(default=0, repr=False)

    def next_delay(self, lived: float) -> float | None:
        """Seconds to wait before the next restart, which is counted; None if there is none left.

        The first restart comes at once. Workers that die soon after their start wait twice as long each time.

        Args:
            lived: Seconds that the worker lived; 0 if it did not come up.
        """
        if self.used >= self.most:
            return None
        self.used += 1
        self._hasty = self._hasty + 1 if lived < SHORT_LIFE else 0
        return 0.0 if self._hasty < 2 else min(FIRST_DELAY * 2.0 ** min(self._hasty - 2, 64), LONGEST_DELAY)


def derived_seed(seed: int, restart: int) -> int:
    """A seed for an env that is built anew: not the one it began with, whose episodes it would play again."""
    return int(np.random.SeedSequence([seed % 2**64, restart]).generate_state(1)[0])
