"""Envs of a batch that are vector envs: their parts, counted through, are what the batch consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import ResetArguments
from aioenvs.engine.layout import Arrays, EnvMetadata
from aioenvs.errors import SpecMismatchError, shown

__all__ = ["Parts", "infos_by_part"]

RESET_MASK = ("_reset",)
FINALS = ("final_obs", "final_observation", "final_info")  # what a vector env says of episodes that it ended itself


@dataclass(frozen=True)
class Parts:
    """The parts of the hosted envs, one after the other; a single env is one part of its own.

    Attributes:
        num_hosted: How many envs are hosted.
        size: How many parts each of them has; 0 for single envs.
    """

    num_hosted: int
    size: int = 0

    @classmethod
    def of(cls, metadata: Sequence[EnvMetadata]) -> Parts:
        """Return the parts of hosted envs.

        Raises:
            SpecMismatchError: If some of them are vector envs of another size than the first.
        """
        sizes = [next(iter(each.specs.get("batch_size", ())), 0) for each in metadata]
        for env, size in enumerate(sizes):
            if size != sizes[0]:
                raise SpecMismatchError(
                    f"expected envs of one size, found env 0 ({metadata[0].name}) and env {env} "
                    f"({metadata[env].name}); vector envs of a batch must have as many envs each"
                )
        return cls(len(metadata), sizes[0])

    @property
    def count(self) -> int:
        """How many parts there are in all."""
        return self.num_hosted * max(self.size, 1)

    def members(self, env: int) -> range:
        """The parts of a hosted env."""
        size = max(self.size, 1)
        return range(env * size, (env + 1) * size)

    def host_of(self, part: int) -> int:
        """The hosted env that a part belongs to."""
        return part // max(self.size, 1)

    def flat(self, array: NDArray[Any]) -> NDArray[Any]:
        """Rows of hosted envs as rows of parts; a view where that is possible."""
        return array.reshape(self.count, *array.shape[2:]) if self.size else array

    def flat_arrays(self, arrays: Arrays) -> Arrays:
        """Arrays of rows of hosted envs as arrays of rows of parts."""
        return {key: self.flat(array) for key, array in arrays.items()} if self.size else arrays

    def of_hosted(self, value: Any) -> Any:
        """Rows of parts as rows of hosted envs."""
        if not self.size:
            return value
        return value.reshape(self.num_hosted, self.size, *value.shape[1:])

    def reset_arguments(self, given: Mapping[int, Mapping[str, Any]]) -> dict[int, ResetArguments]:
        """Return the arguments of the resets of hosted envs.

        Args:
            given: For each part that is to be reset, what it gets: a seed, and options, which all of them share.
        """
        if not self.size:
            return {env: ResetArguments(own) for env, own in given.items()}
        found: dict[int, ResetArguments] = {}
        for env in sorted({self.host_of(part) for part in given}):
            members = self.members(env)
            own = {part - members.start: given[part] for part in members if part in given}
            each = [{name: value for name, value in argument.items() if name != "seed"} for argument in own.values()]
            kwargs = each[0]
            if any(other != kwargs for other in each):
                raise SpecMismatchError(
                    f"reset: expected the same options for all parts of env {env}, a vector env, found {shown(each)}"
                )
            seeds = [own.get(part, {}).get("seed") for part in range(self.size)]
            if any(seed is not None for seed in seeds):
                kwargs["seed"] = seeds
            mask = np.isin(np.arange(self.size), list(own))
            found[env] = ResetArguments(kwargs, (), {} if mask.all() else {RESET_MASK: mask})
        return found

    def infos(self, infos: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Infos of hosted envs as infos of parts; those that are empty are left out."""
        if not self.size:
            return {env: dict(info) for env, info in infos.items()}
        found: dict[int, dict[str, Any]] = {}
        for env, info in infos.items():
            own = zip(self.members(env), infos_by_part(info, self.size), strict=True)
            found.update((part, each) for part, each in own if each)
        return found

    def ended(
        self, env: int, step: Mapping[str, Any], begun: Mapping[str, Any], over: NDArray[np.bool_]
    ) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """The infos of parts after a step that ended episodes of some, and those of the last step of these episodes.

        Args:
            env: The hosted vector env.
            step: What it said of the step.
            begun: What it said of the reset after that, if it was told to reset.
            over: Which of its parts ended an episode, `(size,)`.
        """
        members, of_step = self.members(env), infos_by_part(step, self.size)
        if any(name in step for name in FINALS):  # it has begun the next episodes itself, and merged its infos
            of_reset, last = of_step, infos_by_part(step.get("final_info", {}), self.size)
        else:
            of_reset, last = infos_by_part(begun, self.size), of_step
        infos, final_infos = {}, {}
        for part, is_over, own, reset, final in zip(members, over.tolist(), of_step, of_reset, last, strict=True):
            infos[part] = reset if is_over else own
            if is_over:
                final_infos[part] = final
        return {part: info for part, info in infos.items() if info}, final_infos


def infos_by_part(infos: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Return the infos of each of so many envs, of what a vector env says of them together.

    >>> infos_by_part({"lives": np.array([3, 0]), "_lives": np.array([True, False]), "frame": np.array([5, 6])}, 2)
    [{'lives': 3, 'frame': 5}, {'frame': 6}]
    """
    found: list[dict[str, Any]] = [{} for _ in range(size)]
    for key, value in infos.items():
        if key in FINALS or (key.startswith("_") and key[1:] in infos):
            continue
        mask = infos.get(f"_{key}")
        chosen = range(size) if mask is None else np.flatnonzero(mask).tolist()
        if isinstance(value, Mapping):
            each: Any = infos_by_part(value, size)
        elif isinstance(value, np.ndarray | list | tuple) and len(value) == size:
            each = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
        else:
            each = [value] * size
        for part in chosen:
            if each[part] or not isinstance(value, Mapping):
                found[part][key] = each[part]
    return found
