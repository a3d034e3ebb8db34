"""Envs whose data has no fixed shape: text, objects, and tensors that grow and shrink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from aioenvs.envs import EnvBase
from aioenvs.specs import Categorical, Composite, NonTensor, Unbounded

from .counting import done_leaves, end_of_episode, restarted

__all__ = ["DynamicShapeEnv", "NonTensorEnv"]


class NonTensorEnv(EnvBase):
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

    steps: torch.Tensor

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
        self.max_steps, self.object_action, self.padding = max_steps, object_action, padding
        size, shape = self.batch_size, torch.Size((*batch_size, 1))
        self.register_buffer("steps", torch.zeros(shape, dtype=torch.int64, device=device))
        self.actions: list[Any] = [None] * size.numel()
        self.observation_spec = Composite(
            observation=Unbounded(shape=shape, dtype=torch.int64, device=device),
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
        self.reward_spec = Unbounded(shape=shape, device=device)
        self.done_spec = Composite(done_leaves(shape, device), shape=size, device=device)

    def _stacked(self, objects: Sequence[Any]) -> NonTensorData | NonTensorStack:
        data = [NonTensorData(item, batch_size=(), device=self.device) for item in objects]
        return NonTensorStack(*data, stack_dim=0) if self.batch_size else data[0]

    def _observed(self) -> dict[str, Any]:
        steps = self.steps.flatten().tolist()
        records = [{"steps": count, "action": action} for count, action in zip(steps, self.actions, strict=True)]
        texts = [f"step {count}".ljust(self.padding) for count in steps]
        return {"observation": self.steps, "text": self._stacked(texts), "record": self._stacked(records)}

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = restarted(self.steps, tensordict, 0)
        began = (self.steps == 0).flatten().tolist()
        self.actions = [None if new else action for new, action in zip(began, self.actions, strict=True)]
        return TensorDict({**self._observed(), **end_of_episode(self.steps, None)}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        action = tensordict.get("action").tolist()
        self.actions = list(action) if self.batch_size else [action]
        entries = {**self._observed(), "reward": torch.ones_like(self.steps, dtype=torch.float32)}
        entries.update(end_of_episode(self.steps, self.max_steps))
        return TensorDict(entries, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass


class DynamicShapeEnv(EnvBase):
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

    steps: torch.Tensor

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
        self.max_steps, self.first_rows, self.max_rows, self.size_of_row = max_steps, first_rows, max_rows, size
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64, device=device))
        self.observation_spec = Composite(observation=Unbounded(shape=(-1, size), device=device), device=device)
        self.action_spec = Categorical(2, shape=(), device=device)
        self.reward_spec = Unbounded(shape=(1,), device=device)
        self.done_spec = Composite(done_leaves((1,), device), device=device)

    def _observed(self) -> torch.Tensor:
        steps = int(self.steps)
        rows = 1 + (self.first_rows + steps) % self.max_rows
        return torch.full((rows, self.size_of_row), float(steps), device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = restarted(self.steps, tensordict, 0)
        return TensorDict({"observation": self._observed(), **end_of_episode(self.steps, None)}, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        entries = {"observation": self._observed(), "reward": torch.ones(1, device=self.device)}
        return TensorDict({**entries, **end_of_episode(self.steps, self.max_steps)}, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass
