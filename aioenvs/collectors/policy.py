"""The policy of a collector: where it lives, and roots that visit its device."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type

from aioenvs.engine.double_buffer import Fence
from aioenvs.engine.portal import awaited, driven
from aioenvs.errors import shown
from aioenvs.faces.commands import AsyncEnvs
from aioenvs.tensors.device import Device, Transfer, backend_of, named_device
from aioenvs.tensors.rollout import Policy, as_policy, with_action
from aioenvs.tensors.trees import exchanged, tensors_of


def can_visit(td: TensorDictBase) -> bool:
    """Whether a root is on the host, and has tensors that can be told apart there and back."""
    return type(td) is TensorDict and (td.device is None or td.device.type == "cpu")


class PolicyTransfer:
    """A root on the device of a policy: `td` is there what the root is on the host."""

    def __init__(self, transfer: Transfer, td: TensorDictBase) -> None:
        assert transfer.backend is not None
        self._transfer = transfer
        self._home = td.device
        own = tensors_of(td)
        moved = transfer.place(own)
        there = {id(old): new for old, new in zip(own, moved, strict=True)}
        device = transfer.backend.device
        self.td = exchanged(td, there, device, device)
        # What comes back as it went, which is most of it, is here already.
        self._former = {id(new): (new, _version(new), old) for old, new in zip(own, moved, strict=True)}

    def fetch(self, acted: TensorDictBase) -> tuple[dict[int, torch.Tensor], Fence]:
        """Begin to bring back what a policy has changed or added; what that is when the fence has passed, by id."""
        changed = [each for each in tensors_of(acted) if self._unchanged(each) is None]
        fetched, fence = self._transfer.fetch(changed)
        return {id(there): here for there, here in zip(changed, fetched, strict=True)}, fence

    def back(self, acted: TensorDictBase, fetched: dict[int, torch.Tensor]) -> TensorDictBase:
        """Return the outputs of the policy on the host."""
        here = fetched | {id(each): own for each in tensors_of(acted) if (own := self._unchanged(each)) is not None}
        return exchanged(acted, here, self._home, torch.device("cpu"))

    def _unchanged(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor as it was on the host, if it is unchanged since."""
        known = self._former.get(id(tensor))
        return known[2] if known is not None and known[1] is not None and known[1] == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count that."""
    return None if tensor.is_inference() else tensor._version


class PolicyRunner:
    """Calls a policy, in inference mode if `infers`; without one, actions are random.

    The device is where it shall be called, None for where the data is; a module that is elsewhere is copied there.
    `exploration` is how modules with distributions choose, None for as they are told by others.
    """

    infers = False

    def __init__(self, policy: Any, device: Device, exploration: InteractionType | str | None) -> None:
        self._device = named_device(device)
        self._given_device = device
        self._transfer: Transfer | None = None  # made when it is needed first
        self._exploring = functools.partial(set_interaction_type, exploration) if exploration is not None else None
        self._act: Policy | None = None  # made when it is called first, when the envs are known
        self.replace(policy)

    def replace(self, policy: Any) -> None:
        """Call another policy from now on; TypeError if it cannot be called."""
        if policy is not None and not callable(policy):
            raise TypeError(f"expected a policy that can be called, or None for random actions, got {shown(policy)}")
        self._given = policy
        self._policy = _placed(policy, self._device)
        self._act = None

    @property
    def module(self) -> torch.nn.Module | None:
        """The module that is called, if it has weights."""
        return self._policy if isinstance(self._policy, torch.nn.Module) else None

    def load(self, weights: Any = None) -> None:
        """Give the policy the weights of a module, a state dict or a TensorDict.

        None stands for those of the policy that was given, where a copy is called, and else for nothing. Weights for a
        policy without any are a TypeError.
        """
        if weights is None and self._policy is self._given:
            return
        if self.module is None:
            raise TypeError(f"expected a policy with weights, a torch.nn.Module, but it is {shown(self._policy)}")
        weights = self._given if weights is None else weights
        if isinstance(weights, TensorDictBase):
            TensorDict.from_module(self.module).data.update_(weights.data)
            return
        self.module.load_state_dict(weights.state_dict() if isinstance(weights, torch.nn.Module) else weights)

    async def act(self, env: AsyncEnvs, td: TensorDictBase, *, at_random: bool) -> TensorDictBase:
        """The root of some envs with the actions: of all in their order, or of those that its `env_index` names.

        `at_random` has them chosen at random, whatever the policy is. A policy that returns no TensorDict although it
        was given one is a TypeError.
        """
        if at_random or self._policy is None:
            return env.rand_action(td)
        if self._act is None:
            self._act = as_policy(self._policy, env)
        visit = self._visit(td)
        if visit is not None:
            acted = await self._called(visit.td)
            if isinstance(acted, TensorDictBase):
                fetched, fence = visit.fetch(acted)
                scope = await env._scope()
                await scope.pool.passed([fence])
                acted = visit.back(acted, fetched)
            return with_action(td, acted)
        acted = await self._called(td if self._device is None else td.to(self._device))
        if self._device is not None and isinstance(acted, TensorDictBase):
            acted = acted.to(td.device or torch.device("cpu"))
        return with_action(td, acted)

    def _visit(self, td: TensorDictBase) -> PolicyTransfer | None:
        """Return the transfer that brings a root to the policy in one copy; None where none is needed, or possible."""
        if self._device is None or not can_visit(td):
            return None
        if self._transfer is None:
            self._transfer = Transfer(None, backend_of(self._given_device))
        return None if self._transfer.backend is None else PolicyTransfer(self._transfer, td)

    async def _called(self, td: TensorDictBase) -> Any:
        """Return the root with the outputs of the policy."""
        assert self._act is not None
        if not self.infers and self._exploring is None:
            acted: Any = self._act(td)
        else:
            with self._conditions():
                acted = self._act(td)
        return await driven(awaited(acted), self._conditions) if inspect.isawaitable(acted) else acted

    @contextmanager
    def _conditions(self) -> Iterator[None]:
        """Return the context in which the policy is called."""
        exploring = nullcontext() if self._exploring is None else self._exploring()
        with torch.inference_mode() if self.infers else nullcontext(), exploring:
            yield


def _placed(policy: Any, device: torch.device | None) -> Any:
    if device is None or not isinstance(policy, torch.nn.Module):
        return policy
    tensors = [*policy.parameters(), *policy.buffers()]
    if all(torch.empty(0, device=device).device == tensor.device for tensor in tensors):
        return policy
    return copy.deepcopy(policy).to(device)


def places_of(env: AsyncEnvs) -> Mapping[int, int]:
    """The rows of a batch, by the index that an env has in the whole."""
    return {index: place for place, index in enumerate(getattr(env, "env_index", range(env.num_workers)))}
