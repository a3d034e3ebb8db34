"""What an env says of itself: specs, keys, sizes, random actions. Shared by single and batched envs."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from aioenvs.envs.allowed import draw_allowed, mask_keys
from aioenvs.mdp import NestedKey, any_done
from aioenvs.specs import Composite, StackedComposite, TensorSpec

__all__ = ["Described", "NestedKey", "SpecIndex", "by_depth"]

OUTPUTS = ("observation", "reward", "done")
INPUTS = ("action", "state")


def by_depth(keys: Iterable[NestedKey]) -> list[NestedKey]:
    """The keys in order: outer ones first, then by name."""
    return sorted(keys, key=lambda key: (0, (key,)) if isinstance(key, str) else (len(key) - 1, key))


class SpecIndex:
    """What follows from one pair of specs, worked out when it is first asked for.

    Args:
        output_spec: Of `full_observation_spec`, `full_reward_spec` and `full_done_spec`.
        input_spec: Of `full_action_spec` and `full_state_spec`.
    """

    def __init__(self, output_spec: Composite, input_spec: Composite) -> None:
        self.output_spec = output_spec
        self.input_spec = input_spec
        self._full: dict[str, Composite] = {}
        self._keys: dict[str, list[NestedKey]] = {}

    def full(self, kind: str) -> Composite:
        """The Composite of a kind: observation, reward, done, action or state."""
        spec = self._full.get(kind)
        if spec is None:
            parent = self.output_spec if kind in OUTPUTS else self.input_spec
            name = f"full_{kind}_spec"
            spec = parent[name] if name in parent else Composite(shape=parent.shape, device=parent.device)
            self._full[kind] = spec
        return spec

    @functools.cached_property
    def members(self) -> list[SpecIndex]:
        """What follows for each env, where the specs are those of a batch of envs that differ."""
        specs = (self.output_spec, self.input_spec)
        dims = [spec.stack_dim for spec in specs if isinstance(spec, StackedComposite)]
        pairs = zip(*(spec.unbind(dims[0]) for spec in specs), strict=True) if dims else ()
        return [SpecIndex(output_spec, input_spec) for output_spec, input_spec in pairs]

    def keys(self, kind: str) -> list[NestedKey]:
        """The keys of a kind's leaves, in order; of envs that differ, those that all have."""
        keys = self._keys.get(kind)
        if keys is None:
            found = self._found(kind, set.intersection)
            keys = self._keys[kind] = by_depth(found)
        return keys

    def every_key(self, kind: str) -> list[NestedKey]:
        """The same; of envs that differ, those that any has."""
        return by_depth(self._found(kind, set.union)) if self.members else self.keys(kind)

    def _found(self, kind: str, joined: Callable[..., set[NestedKey]]) -> set[NestedKey]:
        if self.members:
            return joined(*(member._found(kind, joined) for member in self.members))
        return set(self.full(kind).keys(include_nested=True, leaves_only=True))

    def leaf(self, kind: str) -> TensorSpec:
        """The kind's only spec where that has the default name, else the Composite."""
        full = self.full(kind)
        spec: TensorSpec = full[kind] if self.keys(kind) == [kind] else full
        return spec

    @functools.cached_property
    def done_keys_groups(self) -> list[list[NestedKey]]:
        """The done keys of each node that has some, outer nodes first."""
        groups: dict[tuple[str, ...], list[NestedKey]] = {}
        for key in self.keys("done"):
            groups.setdefault(() if isinstance(key, str) else key[:-1], []).append(key)
        return list(groups.values())

    @functools.cached_property
    def reset_keys(self) -> list[NestedKey]:
        """The key of each done node's mask for a partial reset."""
        firsts = (group[0] for group in self.done_keys_groups)
        return by_depth("_reset" if isinstance(key, str) else (*key[:-1], "_reset") for key in firsts)

    @functools.cached_property
    def left_behind(self) -> tuple[NestedKey, ...]:
        """What a step leaves behind: the actions, and the rewards that are no inputs of the next."""
        states = self.every_key("state")
        rewards = [key for key in self.every_key("reward") if key not in states]
        return (*rewards, *self.every_key("action"))

    @functools.cached_property
    def masked_actions(self) -> dict[NestedKey, NestedKey]:
        """Which observations say what actions are allowed, by the keys of the actions."""
        if self.members:
            return {}
        return mask_keys(self.full("action"), self.keys("action"), self.full("observation"))

    @functools.cached_property
    def is_dynamic(self) -> bool:
        """Whether the size of something varies: a shape has a -1."""
        return (
            any(member.is_dynamic for member in self.members)
            if self.members
            else any(
                spec is not None and -1 in spec.shape
                for parent in (self.output_spec, self.input_spec)
                for spec in parent.values(include_nested=True)
            )
        )


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
