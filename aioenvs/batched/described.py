"""What every batched env can say of itself, async or sync: sizes, specs, keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs.batched.signature import NestedKey, Signature
from aioenvs.specs import Composite, TensorSpec

if TYPE_CHECKING:
    from aioenvs.batched.config import BatchConfig

__all__ = ["Described"]


class Described(ABC):
    """Specs and keys over a signature that is known once the envs are started.

    `action_spec` and `reward_spec` are the leaf where it is the only one and has the default name, else the
    Composite, as in TorchRL; the `full_*` ones are always Composites. All have `batch_size` as leading shape.
    """

    _config: BatchConfig
    _batch_size: torch.Size

    @property
    @abstractmethod
    def _signature(self) -> Signature: ...

    @property
    @abstractmethod
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers, in order; empty where envs live in this process."""

    @property
    def num_workers(self) -> int:
        """How many envs there are."""
        return len(self._config.factories)

    @property
    def num_processes(self) -> int:
        """How many processes host them; 0 where they live in this one."""
        return len(self._config.groups) if self._config.backend == "process" else 0

    @property
    def batch_size(self) -> torch.Size:
        """`(num_workers,)`."""
        return self._batch_size

    def __len__(self) -> int:
        return self.num_workers

    @property
    def output_spec(self) -> Composite:
        """`full_observation_spec`, `full_reward_spec` and `full_done_spec`."""
        return self._signature.output_spec

    @property
    def input_spec(self) -> Composite:
        """`full_action_spec` and `full_state_spec`."""
        return self._signature.input_spec

    @property
    def observation_spec(self) -> Composite:
        """The observations, as a Composite."""
        return self._signature.full("observation")

    @property
    def full_observation_spec(self) -> Composite:
        """The observations, as a Composite."""
        return self._signature.full("observation")

    @property
    def action_spec(self) -> TensorSpec:
        """The action: the leaf, or the Composite where there are several."""
        return self._signature.leaf("action")

    @property
    def full_action_spec(self) -> Composite:
        """The actions, as a Composite."""
        return self._signature.full("action")

    @property
    def reward_spec(self) -> TensorSpec:
        """The reward: the leaf, or the Composite where there are several."""
        return self._signature.leaf("reward")

    @property
    def full_reward_spec(self) -> Composite:
        """The rewards, as a Composite."""
        return self._signature.full("reward")

    @property
    def done_spec(self) -> Composite:
        """`done`, `terminated` and `truncated`, as a Composite."""
        return self._signature.full("done")

    @property
    def full_done_spec(self) -> Composite:
        """`done`, `terminated` and `truncated`, as a Composite."""
        return self._signature.full("done")

    @property
    def state_spec(self) -> Composite:
        """Inputs that are not actions, as a Composite."""
        return self._signature.full("state")

    @property
    def full_state_spec(self) -> Composite:
        """Inputs that are not actions, as a Composite."""
        return self._signature.full("state")

    @property
    def observation_keys(self) -> list[NestedKey]:
        """Keys of the observations, by depth, then name."""
        return self._signature.keys("observation")

    @property
    def action_keys(self) -> list[NestedKey]:
        """Keys of the actions, by depth, then name."""
        return self._signature.keys("action")

    @property
    def reward_keys(self) -> list[NestedKey]:
        """Keys of the rewards, by depth, then name."""
        return self._signature.keys("reward")

    @property
    def done_keys(self) -> list[NestedKey]:
        """Keys of the done flags, by depth, then name."""
        return self._signature.keys("done")

    @property
    def state_keys(self) -> list[NestedKey]:
        """Keys of the inputs that are not actions, by depth, then name."""
        return self._signature.keys("state")

    @property
    def reset_keys(self) -> list[NestedKey]:
        """Keys of the masks that a partial reset reads."""
        return ["_reset"]

    @property
    def action_key(self) -> NestedKey:
        """The only action key; KeyError if there are several."""
        return self._signature.key("action")

    @property
    def reward_key(self) -> NestedKey:
        """The only reward key; KeyError if there are several."""
        return self._signature.key("reward")

    @abstractmethod
    def _random_objects(self) -> dict[NestedKey, Any]:
        """Random actions that have no fixed shape."""

    def rand_action(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Fill in random actions, drawn from torch's generator.

        Args:
            td: Where to put them, of shape `batch_size`; None for a new TensorDict.

        Returns:
            The same TensorDict, with an action for every env.
        """
        if td is None:
            td = TensorDict({}, batch_size=self.batch_size)
        spec = self.action_spec
        if isinstance(spec, Composite):
            td.update(spec.rand())
        else:
            td.set("action", spec.rand())
        for key, value in self._random_objects().items():
            td.set(key, value)
        return td
