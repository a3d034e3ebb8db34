"""The state that envs of one of TorchRL's `EnvCreator`s share, put where all processes find it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDictBase
from torchrl.envs.env_creator import EnvCreator


def share_states(factories: Iterable[Any], *, with_kwargs: bool) -> None:
    """Move the states of all creators among some factories to shared memory, which changes none of their tensors.

    TorchRL does so when the first of the envs is built, in the parent, which here is in a worker. Their keyword
    arguments are shared, too, if `with_kwargs`: that is if they are pickled for a worker, but not in a fork, where
    tensors that were not shared are a copy for each process.
    """
    for factory in {id(factory): factory for factory in factories}.values():
        while isinstance(factory, EnvCreator):
            _share(factory.state_dict())
            if with_kwargs:
                _share(factory.create_env_kwargs)
            factory = factory.create_env_fn


@contextlib.contextmanager
def undisturbed(factory: Any) -> Iterator[None]:
    """Keep the numbers that the envs of a creator share, such as a count of trajectories, while it makes another one.

    It loads its state into each env that it makes, and so sets them back to what they were when it was made itself,
    which is no matter as long as all of its envs begin. For any other factory this does nothing.
    """
    with contextlib.ExitStack() as stack:
        values = factory._mp_values if isinstance(factory, EnvCreator) else ()
        for value in {id(value): value for _, value in values if hasattr(value, "get_lock")}.values():
            stack.enter_context(value.get_lock())  # siblings may go on counting once it is as it was
            stack.callback(setattr, value, "value", value.value)
        yield


def _share(value: Any) -> None:
    """Move the tensors in a value to shared memory, in place."""
    if isinstance(value, TensorDictBase):
        for leaf in value.values(True, True):
            _share(leaf)
    elif isinstance(value, Mapping):
        for part in value.values():
            _share(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _share(part)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided and not _is_shared(value):
        value.share_memory_()  # type: ignore[no-untyped-call]


def _is_shared(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, MemoryMappedTensor) or bool(tensor.is_shared())  # type: ignore[no-untyped-call]
