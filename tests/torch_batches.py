"""What a batch of torch envs must do, by hand: the same envs one by one, and their results stacked.

    reference = ByHand([toys.CountingEnv() for _ in range(3)])
    assert differing(await env.reset(), reference.reset()) == []

`Toy` names an env of `aioenvs.testing`, so that one case serves aioenvs' faces and TorchRL's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch_faces import OWN_TORCH_FACES, Driver, TorchFace, faces_called

__all__ = ["ByHand", "Toy", "differing", "faces", "mask_of", "of_own", "trajectory"]


class Toy(NamedTuple):
    """An env of `aioenvs.testing`: the name of its class, and what that is given."""

    name: str
    kwargs: dict[str, Any]

    def factory(self, toys: Any) -> Callable[[], Any]:
        """What makes one, of the library whose toys these are."""
        return functools.partial(getattr(toys, self.name), **self.kwargs)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.kwargs.items())])


def faces(*names: str, torchrl: bool = True) -> list[Any]:
    """Some faces, as parameters: aioenvs' own of these names, or `OWN_TORCH_FACES`; and TorchRL's SerialEnv."""
    own = faces_called(*names) if names else OWN_TORCH_FACES
    return [*own, *(faces_called("torchrl-serial") if torchrl else ())]


def of_own(face: TorchFace) -> bool:
    """Whether it is one of aioenvs' own."""
    return face.library.name == "aioenvs"


def mask_of(count: int, chosen: Sequence[int], *shape: int) -> torch.Tensor:
    """A mask `(count, *shape)` that is True in these rows."""
    mask = torch.zeros(count, *shape, dtype=torch.bool)
    mask[list(chosen)] = True
    return mask


def stacked(tds: Sequence[TensorDictBase]) -> TensorDictBase:
    """One for all envs; dense if they have the same keys, shapes and dtypes."""
    if len({layout(td) for td in tds}) > 1:
        return LazyStackedTensorDict(*tds, stack_dim=0)
    result: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(list(tds), 0)
    return result


def layout(td: TensorDictBase) -> Any:
    """The keys, with what is at each."""
    if isinstance(td, LazyStackedTensorDict) and not isinstance(td, NonTensorStack):
        return tuple(layout(part) for part in td.tensordicts)
    if not isinstance(td, TensorDict):
        return type(td) if isinstance(td, TensorDictBase) or not hasattr(td, "dtype") else (td.dtype, td.shape)
    return td.batch_size, frozenset((key, layout(value)) for key, value in td.items())


class ByHand:
    """Single envs, one after the other; `step_and_maybe_reset` and so on take and give what those of a batch do."""

    def __init__(self, envs: Sequence[Any]) -> None:
        self.envs = envs

    def rand_action(self) -> TensorDictBase:
        return stacked([env.rand_action() for env in self.envs])

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        parts = [None] * len(self.envs) if tensordict is None else tensordict.unbind(0)
        return stacked([env.reset(td) for env, td in zip(self.envs, parts, strict=True)])

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return stacked([env.step(td).clone() for env, td in zip(self.envs, tensordict.unbind(0), strict=True)])

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        pairs = [env.step_and_maybe_reset(td) for env, td in zip(self.envs, tensordict.unbind(0), strict=True)]
        return stacked([td.clone() for td, _ in pairs]), stacked([root.clone() for _, root in pairs])


async def trajectory(env: Driver, actions: Sequence[TensorDictBase]) -> list[TensorDictBase]:
    """The first root, and of each step with these actions its result and the next root."""
    td = await env.reset()
    found = [td.clone()]
    for action in actions:
        td, following = await env.step_and_maybe_reset(td.update(action))
        found += [td, following.clone()]
        td = following
    return found


def trajectory_by_hand(reference: ByHand, actions: Sequence[TensorDictBase]) -> list[TensorDictBase]:
    """The same of envs one by one."""
    td = reference.reset()
    found = [td.clone()]
    for action in actions:
        td, following = reference.step_and_maybe_reset(td.update(action))
        found += [td, following.clone()]
        td = following
    return found


def differing(one: Any, other: Any, key: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where two TensorDicts differ: in keys, batch sizes, shapes, dtypes or values."""
    if isinstance(one, TensorDict | LazyStackedTensorDict) and not isinstance(one, NonTensorStack):
        if not isinstance(other, TensorDictBase) or one.batch_size != other.batch_size:
            return [(*key, "batch_size")]
        lazy = next((td for td in (one, other) if isinstance(td, LazyStackedTensorDict)), None)
        if lazy is not None:
            pairs = zip(one.unbind(lazy.stack_dim), other.unbind(lazy.stack_dim), strict=True)
            return [found for at, (a, b) in enumerate(pairs) for found in differing(a, b, (*key, at))]
        names = set(one.keys())
        found = [(*key, name) for name in names ^ set(other.keys())]
        for name in sorted(names & set(other.keys())):
            found += differing(one.get(name), other.get(name), (*key, name))
        return found
    if isinstance(one, NonTensorData | NonTensorStack):
        same = isinstance(other, NonTensorData | NonTensorStack) and one.tolist() == other.tolist()
        return [] if same and one.batch_size == other.batch_size else [key]
    return [] if one.dtype is other.dtype and torch.equal(one, other) else [key]
