"""Envs whose data has no fixed shape, and envs to learn from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from aioenvs.specs import Categorical, Composite, NonTensor, Unbounded
from aioenvs.testing.counting import EpisodicEnv, restarted


class NonTensorEnv(EpisodicEnv):
    """Observes text and an object, and takes objects as actions.

    Besides the count of steps, `observation` `(*batch_size, 1)`, int64, it observes `text`, such as "step 2", and
    `record`, a dict `{"steps": 2, "action": the last action}`, both non-tensor data of batch size `batch_size`.

    Args:
        max_steps: Steps until an episode terminates.
        object_action: Whether an action is any object, by default the string "go", or an integer tensor below 2.
        padding: How many characters to add to each text.
        batch_size: Empty or one dim.
        device: Where all tensors live.

    Raises:
        ValueError: If there are more batch dims.

    >>> from tensordict import NonTensorData, TensorDict
    >>> from aioenvs.testing import NonTensorEnv
    >>> env = NonTensorEnv()
    >>> env.reset()["text"], env.rand_action()["action"]
    ('step 0', 'go')
    >>> td = env.step(TensorDict(action=NonTensorData({"jump": 2})))
    >>> td["next", "text"], td["next", "record"]
    ('step 1', {'steps': 1, 'action': {'jump': 2}})
    """

    def __init__(
        self,
        max_steps: int = 5,
        *,
        object_action: bool = True,
        padding: int = 0,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        if len(batch_size) > 1:
            raise ValueError(f"expected a batch_size of at most one dim, found {tuple(batch_size)!r}")
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.object_action, self.padding = object_action, padding
        self._count_steps(max_steps)
        size = self.batch_size
        self.actions: list[Any] = [None] * size.numel()
        self.observation_spec = Composite(
            observation=Unbounded(shape=self.steps.shape, dtype=torch.int64, device=device),
            text=NonTensor(shape=size, device=device, example_data="step 0"),
            record=NonTensor(shape=size, device=device, example_data={"steps": 0, "action": None}),
            shape=size,
            device=device,
        )
        self.action_spec = (
            NonTensor(shape=size, device=device, example_data="go")
            if object_action
            else Categorical(2, shape=size, device=device)
        )

    def _stacked(self, objects: Sequence[Any]) -> NonTensorData | NonTensorStack:
        data = [NonTensorData(item, batch_size=(), device=self.device) for item in objects]
        return NonTensorStack(*data, stack_dim=0) if self.batch_size else data[0]

    def _observed(self) -> dict[str, Any]:
        steps = self.steps.flatten().tolist()
        records = [{"steps": count, "action": action} for count, action in zip(steps, self.actions, strict=True)]
        texts = [f"step {count}".ljust(self.padding) for count in steps]
        return {"observation": self.steps, "text": self._stacked(texts), "record": self._stacked(records)}

    def _begin(self, tensordict: TensorDictBase | None) -> None:
        began = (self.steps == 0).flatten().tolist()
        self.actions = [None if new else action for new, action in zip(began, self.actions, strict=True)]

    def _act(self, tensordict: TensorDictBase) -> None:
        action = tensordict.get("action").tolist()
        self.actions = list(action) if self.batch_size else [action]


class DynamicShapeEnv(EpisodicEnv):
    """Observes a float32 tensor `(rows, size)`, where the number of rows differs from step to step.

    After `k` steps all its entries are `k`, and there are `1 + (first_rows + k) % max_rows` rows.

    Args:
        max_steps: Steps until an episode terminates.
        first_rows: What to add to the count of steps when it is made a number of rows.
        max_rows: The largest number of rows.
        size: The number of columns.
        device: Where all data lives.

    >>> from aioenvs.testing import DynamicShapeEnv
    >>> env = DynamicShapeEnv(max_rows=3)
    >>> env.observation_spec["observation"].shape
    torch.Size([-1, 2])
    >>> rollout = env.rollout(3, return_contiguous=False)
    >>> [td["next", "observation"].shape[0] for td in rollout.unbind(0)]
    [2, 3, 1]
    """

    def __init__(
        self,
        max_steps: int = 5,
        *,
        first_rows: int = 0,
        max_rows: int = 4,
        size: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size([]))
        self.first_rows, self.max_rows, self.size_of_row = first_rows, max_rows, size
        self._count_steps(max_steps)
        self.observation_spec = Composite(observation=Unbounded(shape=(-1, size), device=device), device=device)
        self.action_spec = Categorical(2, shape=(), device=device)

    def _observed(self) -> dict[str, Any]:
        steps = int(self.steps)
        rows = 1 + (self.first_rows + steps) % self.max_rows
        return {"observation": torch.full((rows, self.size_of_row), float(steps), device=self.device)}


Source = Literal["torch", "numpy", "random", "own"]
SOURCES = ("torch", "numpy", "random", "own")


class DifferentiableEnv(EpisodicEnv):
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
        self.decay, self.gain, self.start = decay, gain, start
        self._count_steps(max_steps)
        whole = torch.Size((*batch_size, size))
        self.current = torch.full(whole, start, device=device)
        observation = Unbounded(shape=whole, device=device)
        self.observation_spec = Composite(observation=observation, shape=self.batch_size, device=device)
        self.action_spec = Unbounded(shape=whole, device=device)

    def _observed(self) -> dict[str, Any]:
        return {"observation": self.current}

    def _begin(self, tensordict: TensorDictBase | None) -> None:
        self.current = restarted(self.current, tensordict, self.start)

    def _act(self, tensordict: TensorDictBase) -> None:
        self.current = self.decay * self.current + self.gain * tensordict["action"]

    def _rewarded(self, observed: dict[str, Any]) -> torch.Tensor:
        return -self.current.square().sum(-1, keepdim=True)


class RandomEnv(EpisodicEnv):
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
        self.source = source
        self._count_steps(max_steps)
        self.generator = np.random.default_rng() if source == "own" else None
        self.drawn = torch.Size((*batch_size, size))
        observation = Unbounded(shape=self.drawn, dtype=torch.float64, device=device)
        self.observation_spec = Composite(observation=observation, shape=self.batch_size, device=device)
        self.action_spec = Categorical(2, shape=self.batch_size, device=device)

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

    def _observed(self) -> dict[str, Any]:
        return {"observation": self._draw()}

    def _rewarded(self, observed: dict[str, Any]) -> torch.Tensor:
        reward: torch.Tensor = observed["observation"].sum(-1, keepdim=True).float()
        return reward

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
