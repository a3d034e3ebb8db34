"""The specs and keys of a batched env, worked out from what its envs said of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aioenvs.engine.layout import Key
from aioenvs.engine.metadata import ACTION, DONE_KEYS, REWARD_KEY, ROOT, EnvMetadata
from aioenvs.spaces import leaf_spec
from aioenvs.specs import Categorical, Composite, TensorSpec, Unbounded

__all__ = ["Signature"]

NestedKey = str | tuple[str, ...]


@dataclass(frozen=True)
class Signature:
    """Locked specs, all with the batch size as leading shape, and the keys in them."""

    batch_size: torch.Size
    output_spec: Composite
    input_spec: Composite

    @classmethod
    def of(cls, metadata: EnvMetadata, num_envs: int, device: torch.device | None) -> Signature:
        """The signature of `num_envs` envs with this description."""
        batch = torch.Size([num_envs])
        done = Categorical(2, (*batch, 1), torch.bool, device=device)
        reward = Unbounded((*batch, 1), torch.float32, device=device)
        output = Composite(
            full_observation_spec=_composite(metadata.spaces[ROOT], batch, device),
            full_reward_spec=_tree({REWARD_KEY: reward}, batch, device),
            full_done_spec=_tree({key: done.clone() for key in DONE_KEYS}, batch, device),
            shape=batch,
            device=device,
        )
        inputs = Composite(
            full_action_spec=_composite(metadata.spaces[ACTION], batch, device),
            full_state_spec=Composite(shape=batch, device=device),
            shape=batch,
            device=device,
        )
        return cls(batch, output.lock_(), inputs.lock_())

    def full(self, kind: str) -> Composite:
        """The Composite of one kind: observation, reward, done, action or state."""
        side = self.input_spec if kind in ("action", "state") else self.output_spec
        spec: Composite = side[f"full_{kind}_spec"]
        return spec

    def leaf(self, kind: str) -> TensorSpec:
        """The leaf if it is the only one and has the default name, else the Composite."""
        spec = self.full(kind)
        leaf: TensorSpec = spec[kind] if self.keys(kind) == [kind] else spec
        return leaf

    def keys(self, kind: str) -> list[NestedKey]:
        """The leaves' keys, by depth, then name."""
        return sorted(self.full(kind).keys(True, True), key=_by_depth)

    def key(self, kind: str) -> NestedKey:
        """The only key of a kind.

        Raises:
            KeyError: If there are several, or none.
        """
        keys = self.keys(kind)
        if len(keys) != 1:
            raise KeyError(f"there are {len(keys)} {kind} keys, {keys!r}; use {kind}_keys")
        return keys[0]


def _by_depth(key: NestedKey) -> tuple[int, str]:
    return (1, key) if isinstance(key, str) else (len(key), ".".join(key))


def _composite(spaces: dict[Key, Any], batch: torch.Size, device: torch.device | None) -> Composite:
    leaves = {}
    for key, space in spaces.items():
        spec = leaf_spec(space, device)
        leaves[key] = spec.expand(*batch, *spec.shape)
    return _tree(leaves, batch, device)


def _tree(leaves: dict[Key, TensorSpec], batch: torch.Size, device: torch.device | None) -> Composite:
    root = Composite(shape=batch, device=device)
    for key, spec in leaves.items():
        for depth in range(1, len(key)):
            if key[:depth] not in root:
                root[key[:depth]] = Composite(shape=batch, device=device)
        root[key] = spec
    return root
