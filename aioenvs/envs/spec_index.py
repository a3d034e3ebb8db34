"""Keys and leaves of the specs of an env, worked out once, and the masks of its actions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from aioenvs.specs import Categorical, Composite, OneHot, StackedComposite, TensorSpec
from aioenvs.specs.mapping import NestedKey


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
