"""A check that an env gives what its specs say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from tensordict import NonTensorStack, TensorDictBase

from aioenvs.envs.spec_properties import by_depth
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.hints import hints_at_keywords
from aioenvs.specs import Composite, NonTensor, StackedComposite
from aioenvs.specs.mapping import NestedKey
from aioenvs.tensors.step_mdp import flat_key

MAX_STEPS = 3
ROOT = ("observation", "done", "state", "action")
NEXT = ("observation", "reward", "done")


@hints_at_keywords
def check_env_specs(
    env: Any,
    return_contiguous: bool | None = None,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: bool | Literal["both"] | None = None,
) -> None:
    """Compare a short random rollout with the specs. For tests of an env: it steps, resets and seeds it.

    Args:
        env: A single or a batched env with plain calls.
        return_contiguous: Whether the rollout is stacked densely; None for wherever the specs allow it.
        check_dtype: Whether dtypes must be the same.
        seed: For torch's generator, which is afterwards as it was, and for the env, which is not.
        tensordict: What to begin the rollout with, instead of a reset.
        break_when_any_done: Whether the rollout ends with an episode, as it does by default, or goes on after a reset;
            "both" to check one and the other.

    Raises:
        SpecMismatchError: If the rollout differs from the specs. It names each key, and what was expected and found.
            (It is a ValueError; TorchRL raises AssertionError.)

    >>> import aioenvs.envs
    >>> check_env_specs(aioenvs.envs.GymEnv("CartPole-v1"), seed=0)
    """
    with _seeded(seed):
        if seed is not None:
            env.set_seed(seed)
        for options in _rollouts(return_contiguous, check_dtype, tensordict, break_when_any_done):
            env.rollout(MAX_STEPS, **options)


async def check_async_env_specs(
    env: Any,
    return_contiguous: bool | None = None,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: bool | Literal["both"] | None = None,
) -> None:
    """Check, as `check_env_specs` does and with the same arguments, an env whose methods are coroutines.

    Cancelling it cancels the rollout.

    Raises:
        SpecMismatchError: If the rollout differs from the specs.
    """
    with _seeded(seed):
        if seed is not None:
            await env.set_seed(seed)
        for options in _rollouts(return_contiguous, check_dtype, tensordict, break_when_any_done):
            await env.rollout(MAX_STEPS, **options)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's generator, which is afterwards as it was."""
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _rollouts(
    contiguous: bool | None, check_dtype: bool, start: TensorDictBase | None, stop: bool | Literal["both"] | None
) -> Iterator[dict[str, Any]]:
    """The arguments of the rollouts to make, of which each step is compared."""

    def compare(env: Any, row: TensorDictBase) -> None:
        specs = {kind: getattr(env, f"full_{kind}_spec") for kind in (*ROOT, *NEXT)}
        differences = _differences(specs, env.fake_tensordict(), row, env.device, check_dtype)
        if differences:
            raise SpecMismatchError("\n".join([f"what {shown(env)} gives differs from its specs:", *differences]))

    for stops in (True, False) if stop == "both" else (stop is None or stop,):
        yield {
            "callback": compare,
            "return_contiguous": contiguous,
            "tensordict": None if start is None else start.copy(),
            "auto_reset": start is None,
            "break_when_any_done": stops,
        }


def _differences(
    specs: Mapping[str, Composite], fake: TensorDictBase, row: TensorDictBase, device: Any, check_dtype: bool
) -> list[str]:
    """How a step's result differs from the specs; envs that differ are looked at one by one."""
    stacked = next((spec for spec in specs.values() if isinstance(spec, StackedComposite)), None)
    if stacked is None:
        return _key_differences(fake, row) or _value_differences(specs, row, device, check_dtype)
    dim = stacked.stack_dim
    members = zip(*(spec.unbind(dim) for spec in specs.values()), strict=True)
    triples = zip(members, fake.unbind(dim), row.unbind(dim), strict=True)
    return [
        f"[{place}] {text}"
        for place, (own, fake_part, part) in enumerate(triples)
        for text in _differences(dict(zip(specs, own, strict=True)), fake_part, part, device, check_dtype)
    ]


def _key_differences(fake: TensorDictBase, row: TensorDictBase) -> list[str]:
    expected, found = _leaf_keys(fake), _leaf_keys(row)
    if expected == found:
        return []
    return [
        f"expected the keys {by_depth(expected)!r}, found {by_depth(found)!r}",
        f"missing in the rollout: {by_depth(expected - found)!r}",
        f"missing in the specs: {by_depth(found - expected)!r}",
    ]


def _leaf_keys(td: TensorDictBase) -> set[NestedKey]:
    found = set(td.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf))
    # Fields of a tensorclass may be None, so they are compared as its values are; tensordict lists them all the same.
    return {key for key in found if not any(outer in found for outer in _above(key))}


def _above(key: NestedKey) -> list[NestedKey]:
    path = flat_key(key)
    return [path[0] if depth == 1 else path[:depth] for depth in range(1, len(path))]


def _is_leaf(kind: type) -> bool:
    return not issubclass(kind, TensorDictBase) or issubclass(kind, NonTensorStack)


def _value_differences(
    specs: Mapping[str, Composite], row: TensorDictBase, device: Any, check_dtype: bool
) -> list[str]:
    found = []
    for where, td, kinds in (("root", row, ROOT), ("next", row.get("next"), NEXT)):
        for kind in kinds:
            spec = specs[kind]
            lead = td.batch_size[: td.ndim - spec.ndim]
            texts = _layout_differences(spec, td, lead, device) or [
                text for text in spec.differences(td) if check_dtype or "expected dtype" not in text
            ]
            found += [f"{kind}, at {where}: {text}" for text in texts]
    return found


def _layout_differences(spec: Composite, td: TensorDictBase, lead: torch.Size, device: Any) -> list[str]:
    """How shapes and devices differ; where the spec leaves a size open, any will do."""
    found = []
    for key, entry in spec.items(include_nested=True):
        try:
            value: Any = td.get(key)
        except RuntimeError:  # a ragged lazy stack: its elements are compared with theirs
            continue
        if value is None or entry is None or isinstance(entry, NonTensor) or -1 in entry.shape:
            continue
        shape = value.batch_size if isinstance(value, TensorDictBase) else value.shape
        if shape != lead + entry.shape:
            what = "batch size" if isinstance(value, TensorDictBase) else "shape"
            found.append(f"{key!r}: expected {what} {tuple(lead + entry.shape)}, found {tuple(shape)}")
        if device is not None and isinstance(value, torch.Tensor) and value.device != entry.device:
            found.append(f"{key!r}: expected device {entry.device}, found {value.device}")
    return found
