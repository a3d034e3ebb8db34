"""The specs of a batch, worked out from what its envs said of themselves, and what follows for its TensorDicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aioenvs.engine.layout import EnvMetadata, Family
from aioenvs.errors import SpecMismatchError, describe_envs
from aioenvs.specs import Composite
from aioenvs.specs.inferred import composites
from aioenvs.specs.stacked import stack_specs
from aioenvs.tensors.trees import region_trees

__all__ = ["EnvSpecs", "Signature", "common_device"]


@dataclass(frozen=True)
class EnvSpecs:
    """The specs of one env, without the dim of the batch."""

    output_spec: Composite
    input_spec: Composite

    def full(self, kind: str) -> Composite:
        """The Composite of one kind: observation, reward, done, action or state."""
        side = self.input_spec if kind in ("action", "state") else self.output_spec
        spec: Composite = side[f"full_{kind}_spec"]
        return spec

    def expand(self, count: int) -> EnvSpecs:
        """The specs of so many of these envs."""
        output, inputs = self.output_spec, self.input_spec
        return EnvSpecs(output.expand(count, *output.shape), inputs.expand(count, *inputs.shape))

    @classmethod
    def of(cls, metadata: EnvMetadata) -> EnvSpecs:
        """Return the specs of an env's metadata, in whichever terms they are."""
        specs = metadata.specs
        if "output_spec" in specs:
            return cls(specs["output_spec"], specs["input_spec"])
        return cls(*composites(specs))


@dataclass(frozen=True)
class Signature:
    """Locked specs, all with the batch size as leading shape.

    Attributes:
        is_lazy: Whether TensorDicts are lazy stacks of one for each env, since their values cannot be stacked.
        varies: Whether the size of something varies from step to step.
        device: Where TensorDicts go; None leaves their tensors where they are.
    """

    batch_size: torch.Size
    output_spec: Composite
    input_spec: Composite
    is_lazy: bool
    varies: bool
    device: torch.device | None

    @classmethod
    def of(
        cls,
        metadata: Sequence[EnvMetadata],
        families: Sequence[Family],
        device: torch.device | None,
        share_individual_td: bool | None,
    ) -> Signature:
        """The signature of envs with these descriptions.

        Raises:
            ValueError: If the envs are to be stacked into one tensor for each key, and cannot be.
        """
        known = {id(each): EnvSpecs.of(each) for each in {id(each): each for each in metadata}.values()}
        specs = [known[id(each)] for each in metadata]
        sizes = {tuple(each.output_spec.shape): env for env, each in reversed(list(enumerate(specs)))}
        if len(sizes) > 1:
            raise SpecMismatchError(f"expected envs of one batch size, found these, by the first env of each: {sizes}")
        if share_individual_td is False and len(families) > 1:
            groups = " and ".join(describe_envs(family.envs) for family in families)
            raise ValueError(
                "share_individual_td=False was provided but share_individual_td must be True to accommodate "
                f"non-stackable tensors: {groups} differ in keys, shapes or dtypes; leave it out to get lazy stacks"
            )
        output = _stacked([each.output_spec for each in specs], device)
        inputs = _stacked([each.input_spec for each in specs], device)
        varies = any(map(_varies, known.values()))
        is_lazy = bool(share_individual_td) or len(families) > 1 or varies
        return cls(output.shape, output.lock_(), inputs.lock_(), is_lazy, varies, device)

    def to(self, device: torch.device) -> Signature:
        """Return the specs on another device."""
        output, inputs = self.output_spec.to(device), self.input_spec.to(device)
        return Signature(self.batch_size, output.lock_(), inputs.lock_(), self.is_lazy, self.varies, device)


def common_device(metadata: Sequence[EnvMetadata]) -> torch.device | None:
    """The device of the envs' own results.

    Raises:
        ValueError: If they are on several.
    """
    devices: dict[torch.device, int] = {}
    for env, each in reversed(list(enumerate(metadata))):
        device = each.specs.get("device")
        if device is not None:
            devices[torch.device(device)] = env
    if len(devices) > 1:
        found = ", ".join(f"{device} (env {env})" for device, env in devices.items())
        raise ValueError(
            f"more than one device was found in the sub-environments: {found}; say with device= where results are to go"
        )
    return next(iter(devices), None)


def _stacked(specs: Sequence[Composite], device: torch.device | None) -> Composite:
    first = specs[0]
    if all(spec is first or spec == first for spec in specs):
        stacked = first.expand(len(specs), *first.shape)
    else:
        stacked = stack_specs(specs, 0)
    return stacked.clone() if device is None else stacked.to(device)


def _varies(specs: EnvSpecs) -> bool:
    """Whether the size of something varies."""
    trees = region_trees(specs.output_spec, specs.input_spec)
    return any(-1 in spec.shape for tree in trees.values() for spec in tree.leaves.values())
