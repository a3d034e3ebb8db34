"""The specs of an env: their keys and leaves, worked out once, the properties that follow from them, and setters."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Never, Self, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from aioenvs.errors import shown
from aioenvs.specs import Categorical, Composite, OneHot, StackedComposite, TensorSpec
from aioenvs.specs.mapping import NestedKey
from aioenvs.tensors.done import any_done, complete_done_spec
from aioenvs.tensors.step_mdp import flat_key


def mask_keys(actions: Composite, keys: Iterable[NestedKey], observations: Composite) -> dict[NestedKey, NestedKey]:
    """Find the observations that say which actions are allowed: `action_mask` beside one, a flag for each choice.

    The keys of the masks are returned by those of the actions.
    """
    found: dict[NestedKey, NestedKey] = {}
    known = set(observations.keys(True, True))
    for key in keys:
        mask_key: NestedKey = "action_mask" if isinstance(key, str) else (*key[:-1], "action_mask")
        spec: Any = actions[key]
        if mask_key in known and type(spec) in (Categorical, OneHot):
            choices = spec.shape if type(spec) is OneHot else (*spec.shape, spec.n)
            if tuple(observations[mask_key].shape) == tuple(choices):
                found[key] = mask_key
    return found


def draw_allowed(spec: Any, mask: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """Draw a random value among those that a mask allows; where it allows none, among all.

    Args:
        spec: A `Categorical` or `OneHot`.
        mask: Which choices are allowed, `(*lead, *spec.shape, n)`, or `(*lead, *spec.shape)` for `OneHot`.
        lead: The dims that the spec does not have.
    """
    allowed = mask.to(torch.bool)
    masked = spec.expand(*lead, *spec.shape).clone()
    masked.update_mask(allowed | ~allowed.any(-1, keepdim=True))
    drawn: torch.Tensor = masked.rand()
    return drawn


OUTPUTS = ("observation", "reward", "done")
INPUTS = ("action", "state")


def by_depth(keys: Iterable[NestedKey]) -> list[NestedKey]:
    """The keys in order: outer ones first, then by name."""
    return sorted(keys, key=lambda key: (0, (key,)) if isinstance(key, str) else (len(key) - 1, key))


class SpecIndex:
    """Keys and leaves of one pair of specs, an output and an input spec, worked out when first asked for."""

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
        """The index of each env, where the specs are those of a batch of envs that differ."""
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
        """Return the keys; of envs that differ, those that any has."""
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
        """The keys that a step leaves behind: the actions, and the rewards that are no inputs of the next."""
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


Keys = list[NestedKey]
T = TypeVar("T")
FLAGS = "The done flags: `done`, `terminated`, and what else there is."


class FromIndex(Generic[T]):
    """A property of an env that follows from the index of its specs, and cannot be set."""

    def __init__(self, read: Callable[[SpecIndex], T], doc: str) -> None:
        self._read = read
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, env: Any, owner: type | None = None) -> T:
        return cast(T, self) if env is None else self._read(env._index)

    def __set__(self, env: Any, value: Never) -> None:
        raise AttributeError(
            f"property {self._name!r} of {type(env).__name__!r} object has no setter", name=self._name, obj=env
        )


def _only(kind: str, keys: Keys) -> NestedKey:
    if len(keys) != 1:
        raise KeyError(f"expected one {kind} key, found {keys!r}; use {kind}_keys")
    return keys[0]


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
        """The index of the specs, kept as long as they are the same, locked objects."""
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

    observation_spec = FromIndex[Composite](lambda index: index.full("observation"), "The observations.")
    full_observation_spec = FromIndex[Composite](lambda index: index.full("observation"), "The observations.")
    action_spec = FromIndex[TensorSpec](
        lambda index: index.leaf("action"),
        'The action: the leaf if it is the only one and is called "action", else the Composite.',
    )
    full_action_spec = FromIndex[Composite](lambda index: index.full("action"), "The actions.")
    reward_spec = FromIndex[TensorSpec](
        lambda index: index.leaf("reward"),
        'The reward: the leaf if it is the only one and is called "reward", else the Composite.',
    )
    full_reward_spec = FromIndex[Composite](lambda index: index.full("reward"), "The rewards.")
    done_spec = FromIndex[Composite](lambda index: index.full("done"), FLAGS)
    full_done_spec = FromIndex[Composite](lambda index: index.full("done"), FLAGS)
    state_spec = FromIndex[Composite](lambda index: index.full("state"), "The inputs that are no actions.")
    full_state_spec = FromIndex[Composite](lambda index: index.full("state"), "The inputs that are no actions.")

    observation_keys = FromIndex[Keys](lambda index: list(index.keys("observation")), "Keys of the observations.")
    action_keys = FromIndex[Keys](lambda index: list(index.keys("action")), "Keys of the actions.")
    reward_keys = FromIndex[Keys](lambda index: list(index.keys("reward")), "Keys of the rewards.")
    done_keys = FromIndex[Keys](lambda index: list(index.keys("done")), "Keys of the done flags.")
    state_keys = FromIndex[Keys](lambda index: list(index.keys("state")), "Keys of the inputs that are no actions.")
    reset_keys = FromIndex[Keys](
        lambda index: list(index.reset_keys), "Keys of the masks that a partial reset reads, one beside each done."
    )
    done_keys_groups = FromIndex[list[Keys]](
        lambda index: list(map(list, index.done_keys_groups)), "The done keys that belong to each of `reset_keys`."
    )
    action_key = FromIndex[NestedKey](
        lambda index: _only("action", index.keys("action")),
        "The only action key; KeyError if there is another number of them.",
    )
    reward_key = FromIndex[NestedKey](
        lambda index: _only("reward", index.keys("reward")),
        "The only reward key; KeyError if there is another number of them.",
    )
    done_key = FromIndex[NestedKey](
        lambda index: _only("done", [key for key in index.keys("done") if flat_key(key)[-1] == "done"]),
        'The only key called "done", at any depth; KeyError if there is another number of them.',
    )
    reset_key = FromIndex[NestedKey](
        lambda index: _only("reset", index.reset_keys),
        "The only mask's key; KeyError if there is another number of them.",
    )

    def every_key(self, kind: str) -> list[NestedKey]:
        """Keys of a kind ("observation", "reward", "done", "action" or "state") that any env of a batch has.

        They are more than those in `done_keys` and so on where envs differ, since all have those.
        """
        return list(self._index.every_key(kind))

    @property
    def shape(self) -> torch.Size:
        """The batch size, as TorchRL calls it."""
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
        """Return a TensorDict as a step returns it, of zeros, or the nearest values that the specs allow.

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


PARTS = {"_output_spec": OUTPUTS, "_input_spec": INPUTS}


class _Settable(FromIndex[T]):
    """A spec of one kind that can be read and set."""

    def __init__(self, kind: str, *, full: bool = True, unbatched: bool = False) -> None:
        self._kind = kind
        self._unbatched = unbatched
        what = "a Composite" if full else "the leaf if it is the only one and has the default name, else the Composite"
        doc = f"The {kind} spec, {what}{', without the batch dims' if unbatched else ''}; can be set."
        super().__init__(lambda index: cast(Any, index.full(kind) if full else index.leaf(kind)), doc)

    def __get__(self, env: Any, owner: type | None = None) -> T:
        spec: Any = super().__get__(env, owner)
        return cast(T, env._without_batch(spec) if self._unbatched and env is not None else spec)

    def __set__(self, env: Any, value: Any) -> None:
        if self._unbatched and isinstance(value, TensorSpec):
            value = value.expand(*env.batch_size, *value.shape)
        env._set_spec(self._kind, value)


class SettableSpecs(Described):
    """Specs that can be set while they are locked, but not be changed behind the env's back."""

    observation_spec = _Settable[Composite]("observation")
    full_observation_spec = _Settable[Composite]("observation")
    action_spec = _Settable[TensorSpec]("action", full=False)
    full_action_spec = _Settable[Composite]("action")
    reward_spec = _Settable[TensorSpec]("reward", full=False)
    full_reward_spec = _Settable[Composite]("reward")
    done_spec = _Settable[Composite]("done")
    full_done_spec = _Settable[Composite]("done")
    state_spec = _Settable[Composite]("state")
    full_state_spec = _Settable[Composite]("state")

    observation_spec_unbatched = _Settable[Composite]("observation", unbatched=True)
    full_observation_spec_unbatched = _Settable[Composite]("observation", unbatched=True)
    action_spec_unbatched = _Settable[TensorSpec]("action", full=False, unbatched=True)
    full_action_spec_unbatched = _Settable[Composite]("action", unbatched=True)
    reward_spec_unbatched = _Settable[TensorSpec]("reward", full=False, unbatched=True)
    full_reward_spec_unbatched = _Settable[Composite]("reward", unbatched=True)
    done_spec_unbatched = _Settable[Composite]("done", unbatched=True)
    full_done_spec_unbatched = _Settable[Composite]("done", unbatched=True)
    state_spec_unbatched = _Settable[Composite]("state", unbatched=True)
    full_state_spec_unbatched = _Settable[Composite]("state", unbatched=True)

    @property
    def output_spec(self) -> Composite:
        """`full_observation_spec`, `full_reward_spec` and `full_done_spec`."""
        spec: Composite = self.__dict__["_output_spec"]
        return spec

    @output_spec.setter
    def output_spec(self, spec: Composite) -> None:
        self._set_parts("_output_spec", spec)

    @property
    def input_spec(self) -> Composite:
        """`full_action_spec` and `full_state_spec`."""
        spec: Composite = self.__dict__["_input_spec"]
        return spec

    @input_spec.setter
    def input_spec(self, spec: Composite) -> None:
        self._set_parts("_input_spec", spec)

    @property
    def output_spec_unbatched(self) -> Composite:
        """`output_spec` without the batch dims; can be set."""
        return cast(Composite, self._without_batch(self.output_spec))

    @output_spec_unbatched.setter
    def output_spec_unbatched(self, spec: Composite) -> None:
        self.output_spec = spec.expand(*self.batch_size, *spec.shape)

    @property
    def input_spec_unbatched(self) -> Composite:
        """`input_spec` without the batch dims; can be set."""
        return cast(Composite, self._without_batch(self.input_spec))

    @input_spec_unbatched.setter
    def input_spec_unbatched(self, spec: Composite) -> None:
        self.input_spec = spec.expand(*self.batch_size, *spec.shape)

    @property
    def is_spec_locked(self) -> bool:
        """Whether the specs can be changed by setting them as a whole only; can be set, as by `set_spec_lock_`."""
        locked: bool = self.__dict__.get("_is_spec_locked", False)
        return locked

    @is_spec_locked.setter
    def is_spec_locked(self, locked: bool) -> None:
        self.set_spec_lock_(locked)

    def set_spec_lock_(self, mode: bool = True) -> Self:
        """Lock the specs, or unlock them; returns the env.

        Args:
            mode: Whether they shall be locked.
        """
        self.__dict__.pop("_known_index", None)
        for name in PARTS:
            spec: Composite = self.__dict__[name]
            spec.lock_() if mode else spec.unlock_()
        self.__dict__["_is_spec_locked"] = mode
        return self

    def add_truncated_keys(self) -> Self:
        """Declare `truncated` beside each `done`; returns the env."""
        spec = self._index.full("done").clone()
        for key in self._index.keys("done"):
            name, other = (key, "truncated") if isinstance(key, str) else (key[-1], (*key[:-1], "truncated"))
            if name == "done" and other not in spec:
                spec[other] = spec[key].clone()
        self._set_spec("done", spec)
        return self

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        locked = self.is_spec_locked
        self.set_spec_lock_(False)
        try:
            yield
        finally:
            self.set_spec_lock_(locked)

    def _without_batch(self, spec: TensorSpec) -> TensorSpec:
        one: TensorSpec = spec[(0,) * self.batch_dims] if self.batch_dims else spec
        return one

    def _set_parts(self, name: str, spec: Composite) -> None:
        if not isinstance(spec, Composite):
            raise TypeError(f"expected a Composite for {name[1:]}, found {shown(spec)}")
        known = [f"full_{kind}_spec" for kind in PARTS[name]]
        if unknown := [key for key in spec if key not in known]:
            raise ValueError(f"expected {known!r} in {name[1:]}, found also {shown(unknown)}")
        for kind in PARTS[name]:
            if (part := spec.get(f"full_{kind}_spec")) is not None:
                self._set_spec(kind, part)

    def _set_spec(self, kind: str, spec: TensorSpec | Mapping[Any, Any] | None) -> None:
        full = self._as_full(kind, spec)
        parent: Composite = self.__dict__["_output_spec" if kind in OUTPUTS else "_input_spec"]
        name, before = f"full_{kind}_spec", parent.get(f"full_{kind}_spec")
        if parent.device is not None:
            full = full.to(parent.device)
        with self._unlocked():
            parent[name] = complete_done_spec(full) if kind == "done" else full
            if self.__dict__.get("_is_set_up"):
                try:
                    self._check_collisions()
                except RuntimeError:
                    parent[name] = before
                    raise

    def _as_full(self, kind: str, spec: Any) -> Composite:
        """A spec as the env keeps it: a Composite of its own, with the batch size."""
        batch_size = self.batch_size
        if spec is None and kind == "state":
            return Composite(shape=batch_size)
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=batch_size)
        if not isinstance(spec, TensorSpec) or (kind == "state" and not isinstance(spec, Composite)):
            wanted, found = "a Composite" if kind == "state" else "a spec", type(spec)
            raise TypeError(
                f"expected {wanted} of aioenvs.specs as {kind}_spec, found {shown(spec)[:60]} "
                f"({found.__module__}.{found.__qualname__}); import specs from aioenvs.specs"
            )
        if spec.shape[: len(batch_size)] != batch_size:
            raise ValueError(
                f"expected a {kind}_spec whose shape starts with the env's batch size {tuple(batch_size)}, found "
                f"{tuple(spec.shape)}; set {kind}_spec_unbatched for a spec without batch dims"
            )
        full = spec.clone() if isinstance(spec, Composite) else Composite({kind: spec.clone()}, shape=batch_size)
        if kind in ("reward", "done"):
            for key, leaf in full.items(include_nested=True, leaves_only=True):
                if leaf is not None and not leaf.ndim:
                    raise RuntimeError(f"expected at least one dim for {key!r} in {kind}_spec, such as (1,), found ()")
        return full

    def _check_collisions(self) -> None:
        for kinds in PARTS.values():
            owners: dict[Any, str] = {}
            for kind in kinds:
                for key in self._index.keys(kind):
                    if key in owners:
                        raise RuntimeError(
                            f"the key {key!r} collides: it is in {owners[key]}_spec and in {kind}_spec; rename one"
                        )
                    owners[key] = kind
        flags = self._index.keys("done")
        for key in self._index.keys("action"):
            if key in flags:
                raise RuntimeError(
                    f"the key {key!r} collides: it is in action_spec and in done_spec; rename the action"
                )
