"""What an env says of itself: specs, keys, sizes, random actions. Shared by single and batched envs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from aioenvs.envs.allowed import draw_allowed
from aioenvs.envs.spec_index import INPUTS, SpecIndex
from aioenvs.mdp import NestedKey, any_done
from aioenvs.specs import Composite, StackedComposite, TensorSpec

__all__ = ["Described"]


class Described(ABC):
    """Specs and keys of an env, single or batched, sync or async.

    A subclass says what `output_spec`, `input_spec`, `batch_size` and `device` are; the rest follows from them.
    All specs have `batch_size` as leading shape. `action_spec` and `reward_spec` are the leaf where it is the only
    one and has the default name, else the Composite; the `full_*` specs are always Composites. Lists of keys are
    sorted by depth, then name; a key at the root is a str, a nested one a tuple.

    >>> from aioenvs.specs import Bounded, Categorical, Composite
    >>> class Walker(Described):
    ...     output_spec = Composite(full_observation_spec=Composite(legs=Bounded(-1, 1, shape=(2,))))
    ...     input_spec = Composite(full_action_spec=Composite(action=Categorical(3)))
    ...     batch_size, device = torch.Size([]), None
    >>> walker = Walker()
    >>> walker.observation_keys, walker.action_key, walker.action_spec.n, walker.state_keys
    (['legs'], 'action', 3, [])
    """

    @property
    def batch_locked(self) -> bool:
        """Whether TensorDicts must have the env's own batch size; else any will do, if `batch_size` is empty."""
        return True

    @property
    @abstractmethod
    def output_spec(self) -> Composite:
        """`full_observation_spec`, `full_reward_spec` and `full_done_spec`."""

    @property
    @abstractmethod
    def input_spec(self) -> Composite:
        """`full_action_spec` and `full_state_spec`."""

    @property
    @abstractmethod
    def batch_size(self) -> torch.Size:
        """The leading shape of all specs, and the batch size of all TensorDicts."""

    @property
    @abstractmethod
    def device(self) -> torch.device | None:
        """Where results go; None if there is no single device."""

    @property
    def _index(self) -> SpecIndex:
        """What follows from the specs. Kept as long as they are the same, locked objects."""
        output_spec, input_spec = self.output_spec, self.input_spec
        index: SpecIndex | None = self.__dict__.get("_known_index")
        if index is not None and index.output_spec is output_spec and index.input_spec is input_spec:
            if output_spec.is_locked and input_spec.is_locked:
                return index
            del self.__dict__["_known_index"]
        index = SpecIndex(output_spec, input_spec)
        if output_spec.is_locked and input_spec.is_locked:
            self.__dict__["_known_index"] = index
        return index

    @property
    def specs(self) -> Composite:
        """`output_spec` and `input_spec` in one Composite."""
        return Composite(output_spec=self.output_spec, input_spec=self.input_spec, shape=self.batch_size)

    @property
    def observation_spec(self) -> Composite:
        """The observations."""
        return self._index.full("observation")

    @property
    def full_observation_spec(self) -> Composite:
        """The observations."""
        return self._index.full("observation")

    @property
    def action_spec(self) -> TensorSpec:
        """The action: the leaf if it is the only one and is called "action", else the Composite."""
        return self._index.leaf("action")

    @property
    def full_action_spec(self) -> Composite:
        """The actions."""
        return self._index.full("action")

    @property
    def reward_spec(self) -> TensorSpec:
        """The reward: the leaf if it is the only one and is called "reward", else the Composite."""
        return self._index.leaf("reward")

    @property
    def full_reward_spec(self) -> Composite:
        """The rewards."""
        return self._index.full("reward")

    @property
    def done_spec(self) -> Composite:
        """The done flags: `done`, `terminated`, and what else there is."""
        return self._index.full("done")

    @property
    def full_done_spec(self) -> Composite:
        """The done flags: `done`, `terminated`, and what else there is."""
        return self._index.full("done")

    @property
    def state_spec(self) -> Composite:
        """The inputs that are no actions."""
        return self._index.full("state")

    @property
    def full_state_spec(self) -> Composite:
        """The inputs that are no actions."""
        return self._index.full("state")

    @property
    def observation_keys(self) -> list[NestedKey]:
        """Keys of the observations."""
        return list(self._index.keys("observation"))

    @property
    def action_keys(self) -> list[NestedKey]:
        """Keys of the actions."""
        return list(self._index.keys("action"))

    @property
    def reward_keys(self) -> list[NestedKey]:
        """Keys of the rewards."""
        return list(self._index.keys("reward"))

    @property
    def done_keys(self) -> list[NestedKey]:
        """Keys of the done flags."""
        return list(self._index.keys("done"))

    @property
    def state_keys(self) -> list[NestedKey]:
        """Keys of the inputs that are no actions."""
        return list(self._index.keys("state"))

    @property
    def reset_keys(self) -> list[NestedKey]:
        """Keys of the masks that a partial reset reads, one beside each done."""
        return list(self._index.reset_keys)

    @property
    def done_keys_groups(self) -> list[list[NestedKey]]:
        """The done keys that belong to each of `reset_keys`."""
        return [list(group) for group in self._index.done_keys_groups]

    def every_key(self, kind: str) -> list[NestedKey]:
        """Keys of a kind ("observation", "reward", "done", "action" or "state") that any env of a batch has.

        They are more than those in `done_keys` and so on where envs differ, since all have those.
        """
        return list(self._index.every_key(kind))

    @property
    def action_key(self) -> NestedKey:
        """The only action key; KeyError if there is another number of them."""
        return self._only("action", self._index.keys("action"))

    @property
    def reward_key(self) -> NestedKey:
        """The only reward key; KeyError if there is another number of them."""
        return self._only("reward", self._index.keys("reward"))

    @property
    def done_key(self) -> NestedKey:
        """The only key called "done", at any depth; KeyError if there is another number of them."""
        return self._only("done", [key for key in self._index.keys("done") if key == "done" or key[-1] == "done"])

    @property
    def reset_key(self) -> NestedKey:
        """The only mask's key; KeyError if there is another number of them."""
        return self._only("reset", self._index.reset_keys)

    @staticmethod
    def _only(kind: str, keys: list[NestedKey]) -> NestedKey:
        if len(keys) != 1:
            raise KeyError(f"expected one {kind} key, found {keys!r}; use {kind}_keys")
        return keys[0]

    @property
    def shape(self) -> torch.Size:
        """The same as `batch_size`."""
        return self.batch_size

    @property
    def batch_dims(self) -> int:
        """The number of batch dims."""
        return len(self.batch_size)

    @property
    def ndim(self) -> int:
        """The number of batch dims."""
        return len(self.batch_size)

    def ndimension(self) -> int:
        """The number of batch dims."""
        return len(self.batch_size)

    def numel(self) -> int:
        """The number of elements of a batch; 1 for an empty batch size."""
        return math.prod(self.batch_size)

    def _check_batch_size(self, tensordict: TensorDictBase) -> None:
        size = tensordict.batch_size
        if size != self.batch_size and (self.batch_locked or self.batch_size):
            raise RuntimeError(
                f"Expected a tensordict with shape==env.batch_size, got {tuple(size)} and {tuple(self.batch_size)}"
            )

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Fill in random actions, drawn from torch's generator.

        Where an observation beside an action is an `action_mask`, of a flag for each of its choices, the action is
        among those that it allows; it does not count where it allows none.

        Args:
            tensordict: Where to put them, of shape `batch_size`, or of any where the env has no batch size and is
                not `batch_locked`; None for a new TensorDict.

        Returns:
            The same TensorDict, with a value for every action key.

        Raises:
            RuntimeError: If the TensorDict has another batch size.
        """
        spec = self._index.full("action")
        if tensordict is None:
            drawn: TensorDictBase = spec.rand()
            return drawn
        self._check_batch_size(tensordict)
        size = tensordict.batch_size
        lead = size[: len(size) - spec.ndim]
        tensordict.update(spec.rand(lead))
        for key, mask_key in self._index.masked_actions.items():
            mask = tensordict.get(mask_key, None)
            if mask is not None:
                tensordict.set(key, draw_allowed(spec[key], mask, lead))
        return tensordict

    def fake_tensordict(self) -> TensorDictBase:
        """What a step returns, with zeros in it, or the nearest values that the specs allow.

        Returns:
            TensorDict of shape `batch_size` with observations, states, done flags and actions, and under `next`
            observations, rewards and done flags.
        """
        index = self._index
        outputs = [index.full(kind) for kind in ("observation", "done")]
        fake = _zeros([*outputs, *(index.full(kind) for kind in INPUTS)])
        fake.set("next", _zeros([*outputs, index.full("reward")]))
        return fake if self.device is None else fake.to(self.device)

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Whether an episode is over anywhere, by the root rule: a done at the root hides the nested ones.

        Args:
            tensordict: With the done flags at its root, such as what is under a step's `next`.
        """
        return any_done(tensordict, self._index.every_key("done"))


def _zeros(specs: Sequence[Composite]) -> TensorDictBase:
    """Zeros of what all of them have, or the nearest values that are in a spec; of two entries the first counts."""
    stacked = next((spec for spec in specs if isinstance(spec, StackedComposite)), None)
    if stacked is not None:
        members = zip(*(spec.unbind(stacked.stack_dim) for spec in specs), strict=True)
        return LazyStackedTensorDict(*map(_zeros, members), stack_dim=stacked.stack_dim)
    entries: dict[str, list[TensorSpec]] = {}
    for name, spec in (item for composite in specs for item in composite.items() if item[1] is not None):
        entries.setdefault(name, []).append(spec)
    zeros: TensorDictBase = specs[0].empty().zero()
    for name, found in entries.items():
        composites = [spec for spec in found if isinstance(spec, Composite)]
        zeros.set(name, _zeros(composites) if composites else _zero(found[0]))
    return zeros


def _zero(spec: TensorSpec) -> Any:
    zero = spec.zero()
    return zero if spec.is_in(zero) else spec.project(zero)
