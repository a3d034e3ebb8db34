"""Envs to learn from: one that gradients flow through, and one that draws random numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs.envs import EnvBase
from aioenvs.specs import Categorical, Composite, Unbounded

from .counting import done_leaves, end_of_episode, restarted

__all__ = ["DifferentiableEnv", "RandomEnv"]

Source = Literal["torch", "numpy", "random", "own"]
SOURCES = ("torch", "numpy", "random", "own")


class DifferentiableEnv(EnvBase):
    """A linear system that gradients flow through: `observation = decay * observation + gain * action`.

    Observation and action are `(*batch_size, size)`. The reward `(*batch_size, 1)` is minus the sum of the squares of
    the new observation. The graph reaches back to the reset.

    Args:
        decay: How much of the observation stays.
        gain: How much an action adds.
        start: Each entry of the first observation.
        size: Last dim of observation and action.
        max_steps: Steps until an episode terminates; None for endless episodes.
        batch_size: Any.
        device: Where all data lives.

    >>> import torch
    >>> from aioenvs.envs import step_mdp
    >>> from aioenvs.testing import DifferentiableEnv
    >>> env = DifferentiableEnv(decay=0.5, size=1)
    >>> td = env.reset()
    >>> action = torch.ones(1, requires_grad=True)
    >>> for _ in range(2):
    ...     td = step_mdp(env.step(td.set("action", action)))
    >>> torch.autograd.grad(td["observation"].sum(), action)
    (tensor([1.5000]),)
    """

    steps: torch.Tensor

    def __init__(
        self,
        *,
        decay: float = 0.9,
        gain: float = 1.0,
        start: float = 1.0,
        size: int = 3,
        max_steps: int | None = None,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.decay, self.gain, self.start, self.max_steps = decay, gain, start, max_steps
        shape, whole = torch.Size((*batch_size, 1)), torch.Size((*batch_size, size))
        self.register_buffer("steps", torch.zeros(shape, dtype=torch.int64, device=device))
        self.current = torch.full(whole, start, device=device)
        observation = Unbounded(shape=whole, device=device)
        self.observation_spec = Composite(observation=observation, shape=self.batch_size, device=device)
        self.action_spec = Unbounded(shape=whole, device=device)
        self.reward_spec = Unbounded(shape=shape, device=device)
        self.done_spec = Composite(done_leaves(shape, device), shape=self.batch_size, device=device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = restarted(self.steps, tensordict, 0)
        self.current = restarted(self.current, tensordict, self.start)
        entries = {"observation": self.current, **end_of_episode(self.steps, None)}
        return TensorDict(entries, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        self.current = self.decay * self.current + self.gain * tensordict["action"]
        entries = {"observation": self.current, "reward": -self.current.square().sum(-1, keepdim=True)}
        entries.update(end_of_episode(self.steps, self.max_steps))
        return TensorDict(entries, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass


class RandomEnv(EnvBase):
    """Observes random numbers between 0 and 1, new ones at each reset and step; the reward is their sum.

    Args:
        source: Where they come from: the global generators of "torch", "numpy" or "random", which `set_seed` seeds,
            or "own", a generator of this env's own, which draws entropy until it is seeded.
        size: Last dim of the observation `(*batch_size, size)`, float64.
        max_steps: Steps until an episode terminates.
        batch_size: Any.
        device: Where all data lives.

    Raises:
        ValueError: If there is no such source.

    >>> from aioenvs.testing import RandomEnv
    >>> env = RandomEnv("own")
    >>> _ = env.set_seed(3)
    >>> first = env.reset()
    >>> _ = env.set_seed(3)
    >>> bool((env.reset() == first).all()), bool((env.reset() == first).all())
    (True, False)
    """

    steps: torch.Tensor

    def __init__(
        self,
        source: Source = "torch",
        *,
        size: int = 1,
        max_steps: int = 5,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        if source not in SOURCES:
            raise ValueError(f"source must be one of {SOURCES}, found {source!r}")
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.source, self.max_steps = source, max_steps
        self.generator = np.random.default_rng() if source == "own" else None
        shape, self.drawn = torch.Size((*batch_size, 1)), torch.Size((*batch_size, size))
        self.register_buffer("steps", torch.zeros(shape, dtype=torch.int64, device=device))
        observation = Unbounded(shape=self.drawn, dtype=torch.float64, device=device)
        self.observation_spec = Composite(observation=observation, shape=self.batch_size, device=device)
        self.action_spec = Categorical(2, shape=self.batch_size, device=device)
        self.reward_spec = Unbounded(shape=shape, device=device)
        self.done_spec = Composite(done_leaves(shape, device), shape=self.batch_size, device=device)

    def _draw(self) -> torch.Tensor:
        shape = self.drawn
        if self.generator is not None:
            return torch.as_tensor(self.generator.random(shape)).to(self.device)
        if self.source == "torch":
            return torch.rand(shape, dtype=torch.float64).to(self.device)
        if self.source == "numpy":
            return torch.as_tensor(np.random.random_sample(shape)).to(self.device)
        numbers = [random.random() for _ in range(shape.numel())]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device).reshape(shape)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = restarted(self.steps, tensordict, 0)
        entries = {"observation": self._draw(), **end_of_episode(self.steps, None)}
        return TensorDict(entries, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        drawn = self._draw()
        entries = {"observation": drawn, "reward": drawn.sum(-1, keepdim=True).float()}
        entries.update(end_of_episode(self.steps, self.max_steps))
        return TensorDict(entries, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        if self.source == "own":
            self.generator = np.random.default_rng(seed)
        elif self.source == "numpy":
            np.random.seed(seed)
        elif self.source == "random":
            random.seed(seed)
        elif seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
