"""What chooses the actions: a policy on TensorDicts, of whatever the user has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase

from aioenvs.errors import shown

if TYPE_CHECKING:
    from aioenvs.rollout import Steppable

__all__ = ["Policy", "as_policy", "on_own_device", "with_action"]

Policy = Callable[[TensorDictBase], Any]
TENSORDICT_NAMES = ("td", "tensordict", "data")


def as_policy(policy: Any, env: Steppable) -> Policy:
    """Make a policy on TensorDicts of whatever the user has.

    A module with `in_keys` and `out_keys` (TensorDictModule) takes a TensorDict, and so does a callable whose first
    parameter is annotated as one or named td, tensordict or data. Any other callable takes the observations, in the
    order of `observation_keys`, and returns the action.

    Raises:
        TypeError: If it cannot be called.
    """
    if not callable(policy):
        raise TypeError(f"expected a policy that can be called, got {shown(policy)}")
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        return cast(Policy, policy)
    return policy if _takes_tensordict(policy) else _on_observations(policy, env)


def _takes_tensordict(policy: Any) -> bool:
    function = policy.forward if isinstance(policy, torch.nn.Module) else policy
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    if not parameters:
        return False
    annotation = getattr(parameters[0].annotation, "__name__", str(parameters[0].annotation))
    return "TensorDict" in annotation or parameters[0].name in TENSORDICT_NAMES


def _on_observations(policy: Callable[..., Any], env: Steppable) -> Policy:
    keys, action_keys = env.observation_keys, env.action_keys
    if len(action_keys) != 1:
        raise TypeError(
            f"a policy on observations can fill one action key, but there are {action_keys!r}; use a policy that "
            "takes and returns a TensorDict"
        )

    def act(td: TensorDictBase) -> Any:
        try:
            action = policy(*(td.get(key) for key in keys))
        except Exception as error:
            error.add_note(
                f"the policy was given the observations {keys!r}; to get the TensorDict instead, name its first "
                "parameter td, tensordict or data, or annotate it"
            )
            raise
        if not inspect.isawaitable(action):
            return td.set(action_keys[0], action)

        async def later() -> TensorDictBase:
            return td.set(action_keys[0], await action)

        return later()

    return act


def on_own_device(act: Policy, policy: Any) -> Policy:
    """Bring the data to the policy's device, and the result back."""
    parameters = getattr(policy, "parameters", None)
    device = next((parameter.device for parameter in parameters()), None) if callable(parameters) else None
    if device is None:
        return act

    def moved(td: TensorDictBase) -> Any:
        home = td.device or torch.device("cpu")
        result = act(td.to(device))
        if not inspect.isawaitable(result):
            return result.to(home)

        async def later() -> TensorDictBase:
            acted: TensorDictBase = await result
            return acted.to(home)

        return later()

    return moved


def with_action(td: TensorDictBase, acted: Any) -> TensorDictBase:
    """A root with what the policy returned for it.

    Raises:
        TypeError: If that is no TensorDict.
    """
    if not isinstance(acted, TensorDictBase):
        raise TypeError(
            f"the policy was given a TensorDict and must return one with the action, but returned {acted!r}; name its "
            "first parameter otherwise to get the observations instead (see aioenvs.policies.as_policy)"
        )
    return td if acted is td else td.update(acted)
