"""Envs whose state can be seen: it travels in the TensorDict, or it is in buffers and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from aioenvs.envs import EnvBase
from aioenvs.specs import Categorical, Composite, Unbounded

from .counting import done_leaves, end_of_episode, restarted

__all__ = ["ParameterEnv", "StateEnv", "UnlockedStateEnv"]


class StateEnv(EnvBase):
    """Has no memory: its state is read from the TensorDict of each step, and written to the next.

    The state is `count` `(*batch_size, 1)`, the steps of the episode, and `("memory", "total")` `(*batch_size, 1)`, the
    sum of its actions, both int64. The observation is their difference, as a float; the reward is the action.

    Args:
        max_steps: Steps until an episode terminates.
        num_actions: How many actions there are.
        batch_size: Any.
        device: Where all data lives.

    >>> from aioenvs.testing import StateEnv
    >>> env = StateEnv()
    >>> env.state_keys
    ['count', ('memory', 'total')]
    >>> td = env.rand_action(env.reset())
    >>> td["count"] += 3  # whoever has the TensorDict has the state
    >>> env.step(td)["next", "count"], td["next", "done"]
    (tensor([4]), tensor([False]))
    """

    def __init__(
        self,
        max_steps: int = 5,
        *,
        num_actions: int = 2,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.max_steps = max_steps
        shape = torch.Size((*batch_size, 1))
        self.state_spec = self._state(shape)
        self.observation_spec = self._state(shape).update({"observation": Unbounded(shape=shape, device=device)})
        self.action_spec = Categorical(num_actions, shape=self.batch_size, device=device)
        self.reward_spec = Unbounded(shape=shape, device=device)
        self.done_spec = Composite(done_leaves(shape, device), shape=self.batch_size, device=device)

    def _state(self, shape: torch.Size) -> Composite:
        def leaf() -> Unbounded:
            return Unbounded(shape=shape, dtype=torch.int64, device=self.device)

        memory = Composite(total=leaf(), shape=self.batch_size, device=self.device)
        return Composite(count=leaf(), memory=memory, shape=self.batch_size, device=self.device)

    def _result(self, count: torch.Tensor, total: torch.Tensor, **entries: torch.Tensor) -> TensorDictBase:
        size = count.shape[:-1]
        memory = TensorDict({"total": total}, size, device=self.device)
        entries = {"count": count, "observation": (count - total).float(), **entries}
        return TensorDict({**entries, "memory": memory}, size, device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        locked = self.batch_locked or tensordict is None
        size = self.batch_size if locked or tensordict is None else tensordict.batch_size
        count = torch.zeros(*size, 1, dtype=torch.int64, device=self.device)
        return self._result(count, torch.zeros_like(count), **end_of_episode(count, None))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict["action"].unsqueeze(-1)
        count = tensordict["count"] + 1
        total = tensordict["memory", "total"] + action
        return self._result(count, total, reward=action.float(), **end_of_episode(count, self.max_steps))

    def _set_seed(self, seed: int | None) -> None:
        pass


class UnlockedStateEnv(StateEnv):
    """A `StateEnv` that takes TensorDicts of any batch size, and has none of its own.

    Args:
        max_steps: Steps until an episode terminates.
        num_actions: How many actions there are.
        device: Where all data lives.

    >>> from tensordict import TensorDict
    >>> from aioenvs.testing import UnlockedStateEnv
    >>> env = UnlockedStateEnv()
    >>> td = env.reset(TensorDict(batch_size=[7]))
    >>> env.batch_size, env.rand_step(td)["next", "observation"].shape
    (torch.Size([]), torch.Size([7, 1]))
    """

    batch_locked = False

    def __init__(self, max_steps: int = 5, *, num_actions: int = 2, device: torch.device | str | None = None) -> None:
        super().__init__(max_steps, num_actions=num_actions, device=device)


class ParameterEnv(EnvBase):
    """An env with something in its `state_dict`: the observation is `gain * steps + offset`.

    `gain` is a parameter and `offset` a buffer, both of shape `(size,)`, and `steps` a buffer `(*batch_size, 1)`.
    The reward `(*batch_size, 1)` is what the submodule `head`, a linear layer, makes of the observation.

    Args:
        gain: First value of the parameter.
        offset: First value of the buffer.
        size: Last dim of the observation.
        max_steps: Steps until an episode terminates.
        batch_size: Any.
        device: Where all data lives.

    >>> from aioenvs.testing import ParameterEnv
    >>> env, other = ParameterEnv(gain=2.0), ParameterEnv(gain=7.0)
    >>> list(env.state_dict())
    ['gain', 'offset', 'steps', 'head.weight', 'head.bias']
    >>> other.load_state_dict(env.state_dict())
    <All keys matched successfully>
    >>> other.rollout(2)["next", "observation"][:, 0].tolist()
    [2.0, 4.0]
    """

    steps: torch.Tensor
    offset: torch.Tensor

    def __init__(
        self,
        gain: float = 1.0,
        offset: float = 0.0,
        *,
        size: int = 3,
        max_steps: int = 5,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.max_steps = max_steps
        self.gain = nn.Parameter(torch.full((size,), gain, device=device))
        self.register_buffer("offset", torch.full((size,), offset, device=device))
        shape = torch.Size((*batch_size, 1))
        self.register_buffer("steps", torch.zeros(shape, dtype=torch.int64, device=device))
        self.head = nn.Linear(size, 1, device=device)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        observation = Unbounded(shape=(*batch_size, size), device=device)
        self.observation_spec = Composite(observation=observation, shape=self.batch_size, device=device)
        self.action_spec = Categorical(2, shape=self.batch_size, device=device)
        self.reward_spec = Unbounded(shape=shape, device=device)
        self.done_spec = Composite(done_leaves(shape, device), shape=self.batch_size, device=device)

    def _observed(self) -> torch.Tensor:
        observed: torch.Tensor = self.gain * self.steps + self.offset
        return observed

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = restarted(self.steps, tensordict, 0)
        entries = {"observation": self._observed(), **end_of_episode(self.steps, None)}
        return TensorDict(entries, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        observation = self._observed()
        entries = {"observation": observation, "reward": self.head(observation)}
        entries.update(end_of_episode(self.steps, self.max_steps))
        return TensorDict(entries, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass
