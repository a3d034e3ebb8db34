"""The plan of a collector (how many frames, in which portions) and how far it has come. Pure."""

from __future__ import annotations

import inspect
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from aioenvs.errors import shown


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers that a collector keeps to.

    TypeError if one is no integer, ValueError if one is out of range, or they do not fit each other.

    Attributes:
        num_workers: How many envs there are.
        frames_per_batch: Frames of a batch.
        total_frames: Frames of the whole run, rounded up to full batches; None for an endless one.
        min_get: How many envs are waited for at least; None where all step together.
        init_random_frames: So many frames at the beginning have random actions, rounded up to full batches.
        reset_at_each_iter: Whether each batch begins with new episodes.
    """

    num_workers: int
    frames_per_batch: int
    total_frames: int | None
    min_get: int | None
    init_random_frames: int | None
    reset_at_each_iter: bool

    def __post_init__(self) -> None:
        _check_positive("frames_per_batch", self.frames_per_batch)
        if self.min_get is None:
            _check_divisible(self.frames_per_batch, self.num_workers, f"{self.num_workers} envs")
        else:
            _check_positive("min_get", self.min_get)
            if self.min_get > self.num_workers:
                raise ValueError(f"min_get={self.min_get} envs can never be ready: there are {self.num_workers}")
            if self.reset_at_each_iter:
                raise ValueError(
                    "reset_at_each_iter=True would lose the steps that are under way when a batch is full, which "
                    "min_get keeps for the next one; choose one of the two"
                )
        total = None if self.total_frames in (None, -1) else self.total_frames
        if total is not None:
            _check_positive("total_frames", total, ", or -1 for an endless run")
            total = _rounded_up("total_frames", total, self.frames_per_batch)
        random = self.init_random_frames
        if random is None or random in (-1, 0):
            random = 0
        else:
            _check_positive("init_random_frames", random)
            random = _rounded_up("init_random_frames", random, self.frames_per_batch)
        object.__setattr__(self, "total_frames", total)
        object.__setattr__(self, "init_random_frames", random)

    def steps_per_batch(self, batch_size: torch.Size) -> int:
        """How many steps, of all envs together or with `min_get` of single ones, fill a batch of frames.

        The batch size is `(num_workers, *bs)`; ValueError if no whole number does.
        """
        frames = batch_size.numel() if self.min_get is None else batch_size[1:].numel()
        if not frames:
            raise ValueError(f"envs of the batch size {tuple(batch_size)} have no frames to collect")
        _check_divisible(self.frames_per_batch, frames, f"steps of {frames} frames, as the envs have them")
        return self.frames_per_batch // frames


def _check_positive(name: str, value: Any, or_else: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1{or_else}, got {value}")


def _check_divisible(frames: int, unit: int, what: str) -> None:
    rest = frames % unit
    if rest:
        fitting = [str(number) for number in (frames - rest, frames - rest + unit) if number]
        raise ValueError(
            f"frames_per_batch={frames} cannot be shared out among {what}: give {' or '.join(fitting)}, or min_get for "
            "batches of whoever is ready first"
        )


def _rounded_up(name: str, frames: int, frames_per_batch: int) -> int:
    more = -frames % frames_per_batch
    if more:
        warnings.warn(
            f"{name}={frames} is not a multiple of frames_per_batch={frames_per_batch}, so {more} more will be "
            f"collected: {frames + more}",
            UserWarning,
            stacklevel=_callers_level(),
        )
    return frames + more


def _callers_level() -> int:
    """How far up the stack, seen from who asks, the code is that is not of this package."""
    package = __name__.partition(".")[0]
    frames = inspect.stack(0)[1:]
    own = itertools.takewhile(
        lambda each: each.frame.f_globals.get("__name__", "").partition(".")[0] == package, frames
    )
    return 1 + sum(1 for _ in own)


class Progress:
    """Counts the batches of a plan, and their frames."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.frames = self.iterations = 0

    @property
    def at_random(self) -> bool:
        """Whether the actions of the next batch are random, whatever the policy is."""
        return self.frames < (self.plan.init_random_frames or 0)

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
