"""Numbers for trajectories, each used once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aioenvs.storage import array_of

__all__ = ["TRAJ_IDS", "TrajectoryIds"]

TRAJ_IDS = ("collector", "traj_ids")


class TrajectoryIds:
    """Hands out the numbers 0, 1, 2, ...

    Attributes:
        following: The next one.

    >>> ids = TrajectoryIds()
    >>> own = ids.take((3,))
    >>> ids.renewed(own, torch.tensor([False, True, False])).tolist(), own.tolist(), ids.following
    ([0, 3, 2], [0, 1, 2], 4)
    """

    def __init__(self) -> None:
        self.following = 0

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """New numbers: int64, of this shape."""
        count = torch.Size(shape).numel()
        self.following += count
        return torch.arange(self.following - count, self.following).reshape(torch.Size(shape))

    def renewed(self, ids: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """The same numbers with new ones where a trajectory ended.

        Args:
            ids: Int64.
            ended: Bool, of the same shape.
        """
        flags = array_of(ended)
        count = int(np.count_nonzero(flags))
        if not count:
            return ids
        renewed = array_of(ids).copy()
        renewed[flags] = np.arange(self.following, self.following + count)
        self.following += count
        return torch.from_numpy(renewed).to(ids.device)
