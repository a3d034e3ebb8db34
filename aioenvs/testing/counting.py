"""Envs that count their steps: nothing about them is random, so that every value can be told in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs.envs import EnvBase
from aioenvs.specs import Categorical, Composite, Unbounded

__all__ = ["CountingEnv", "done_leaves", "end_of_episode", "restarted"]


def restarted(
    value: torch.Tensor, tensordict: TensorDictBase | None, start: float, key: Any = "_reset"
) -> torch.Tensor:
    """The value, with `start` where the mask at `key` asks for a reset; everywhere if there is no mask."""
    mask = None if tensordict is None else tensordict.get(key, None)
    if mask is None:
        return torch.full_like(value, start)
    return torch.where(mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)), start, value)


def done_leaves(shape: Sequence[int], device: Any, truncates: bool = False) -> dict[str, Categorical]:
    """The specs of `done`, `terminated` and, for envs that truncate, `truncated`."""
    names = ("done", "terminated", "truncated") if truncates else ("done", "terminated")
    return {name: Categorical(2, shape=torch.Size(shape), dtype=torch.bool, device=device) for name in names}


def end_of_episode(steps: torch.Tensor, max_steps: int | None, truncates: bool = False) -> dict[str, torch.Tensor]:
    """The values of `done`, `terminated` and, for envs that truncate, `truncated` after so many steps."""
    over = torch.zeros_like(steps, dtype=torch.bool) if max_steps is None else steps >= max_steps
    if truncates:
        return {"done": over, "terminated": torch.zeros_like(over), "truncated": over.clone()}
    return {"done": over, "terminated": over.clone()}


class CountingEnv(EnvBase):
    """Counts up, whatever the action: the observation after `k` steps is `start + k * step`, the reward is 1.

    The specs are `observation` `(*batch_size, 1)`, `action` `(*batch_size,)`, an integer below `num_actions`, and
    `reward` `(*batch_size, 1)`. Each element of a batch has an episode of its own, and can be reset alone.

    Args:
        max_steps: Steps until an episode terminates; None for endless episodes.
        start: First observation. `reset(start=...)` replaces it for the episodes that begin then.
        step: Difference of two observations.
        batch_size: Any, empty dims included.
        device: Where all data lives.
        dtype: Of the observation.
        num_actions: How many actions there are.
        truncates: End episodes by `truncated` instead of `terminated`.
        adds_up: Also observe `total` `(*batch_size, 1)`, int64: the sum of the episode's actions.
        in_place: Return the same observation tensor each time, overwritten, as careless envs do.
        custom_attr: Whatever the attribute of that name shall be.

    Attributes:
        custom_attr: An attribute that a batched env forwards.
        seed: What `set_seed` was last called with.

    >>> from aioenvs.testing import CountingEnv
    >>> env = CountingEnv(max_steps=3, start=10)
    >>> env.rollout(100)["next", "observation"].flatten().tolist()
    [11, 12, 13]
    >>> env.custom_method(7, unit="m"), env.custom_property
    (('counting', (7,), {'unit': 'm'}), 3)
    """

    steps: torch.Tensor
    origin: torch.Tensor
    total: torch.Tensor
    board: torch.Tensor

    def __init__(
        self,
        max_steps: int | None = 5,
        *,
        start: int = 0,
        step: int = 1,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.int64,
        num_actions: int = 2,
        truncates: bool = False,
        adds_up: bool = False,
        in_place: bool = False,
        custom_attr: Any = "counting",
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.max_steps, self.start, self.increment = max_steps, start, step
        self.truncates, self.adds_up, self.in_place = truncates, adds_up, in_place
        self.custom_attr = custom_attr
        self.seed: int | None = None
        shape = torch.Size((*batch_size, 1))
        for name in ("steps", "origin", "total"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64, device=device))
        self.register_buffer("board", torch.zeros(shape, dtype=dtype, device=device))
        entries = {"observation": Unbounded(shape=shape, dtype=dtype, device=device)}
        if adds_up:
            entries["total"] = Unbounded(shape=shape, dtype=torch.int64, device=device)
        self.observation_spec = Composite(entries, shape=self.batch_size, device=device)
        self.action_spec = Categorical(num_actions, shape=self.batch_size, dtype=torch.int64, device=device)
        self.reward_spec = Unbounded(shape=shape, device=device)
        self.done_spec = Composite(done_leaves(shape, device, truncates), shape=self.batch_size, device=device)

    def custom_method(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return `custom_attr` and what the method was called with."""
        return self.custom_attr, args, kwargs

    @property
    def custom_property(self) -> int:
        """Steps of the current episodes, of all elements together."""
        return int(self.steps.sum())

    def _observed(self) -> dict[str, torch.Tensor]:
        count = (self.origin + self.increment * self.steps).to(self.board.dtype)
        entries = {"observation": self.board.copy_(count) if self.in_place else count}
        if self.adds_up:
            entries["total"] = self.total
        return entries

    def _reset(
        self, tensordict: TensorDictBase | None = None, *, start: int | None = None, **kwargs: Any
    ) -> TensorDictBase:
        self.origin = restarted(self.origin, tensordict, self.start if start is None else start)
        self.steps = restarted(self.steps, tensordict, 0)
        self.total = restarted(self.total, tensordict, 0)
        done = end_of_episode(self.steps, None, self.truncates)
        return TensorDict({**self._observed(), **done}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        self.total = self.total + tensordict["action"].unsqueeze(-1)
        return TensorDict(
            {
                **self._observed(),
                "reward": torch.ones_like(self.steps, dtype=torch.float32),
                **end_of_episode(self.steps, self.max_steps, self.truncates),
            },
            self.batch_size,
            device=self.device,
        )

    def _set_seed(self, seed: int | None) -> None:
        self.seed = seed
