"""How far a run of a collector has come. Pure."""

from __future__ import annotations

from aioenvs.collectors.plan import Plan

__all__ = ["Progress", "Progressing"]


class Progress:
    """Counts batches.

    Attributes:
        plan: What was asked for.
        frames: How many frames the batches have had.
        iterations: How many batches there were.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.frames = self.iterations = 0

    @property
    def at_random(self) -> bool:
        """Whether the actions of the next batch are random, whatever the policy is."""
        return self.frames < self.plan.random_frames

    @property
    def batches_left(self) -> int | None:
        """How many batches are to come; None for any number."""
        total = self.plan.total_frames
        return None if total is None else (total - self.frames) // self.plan.frames_per_batch

    def count(self) -> None:
        """There was a batch more."""
        self.frames += self.plan.frames_per_batch
        self.iterations += 1


class Progressing:
    """Says how far it has come."""

    _progress: Progress

    @property
    def frames(self) -> int:
        """How many frames the batches have had."""
        return self._progress.frames

    @property
    def iterations(self) -> int:
        """How many batches there were."""
        return self._progress.iterations

    @property
    def frames_per_batch(self) -> int:
        """How many frames a batch has."""
        return self._progress.plan.frames_per_batch

    @property
    def total_frames(self) -> int:
        """How many frames all batches have together; -1 for an endless run."""
        total = self._progress.plan.total_frames
        return -1 if total is None else total

    @property
    def is_finished(self) -> bool:
        """Whether all frames were returned."""
        total = self._progress.plan.total_frames
        return total is not None and self._progress.frames >= total

    def __len__(self) -> int:
        """How many batches there are.

        Raises:
            TypeError: If the run is endless.
        """
        plan = self._progress.plan
        if plan.total_frames is None:
            raise TypeError("an endless run (total_frames=-1) has no length")
        return plan.total_frames // plan.frames_per_batch
