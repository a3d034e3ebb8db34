"""The logic of a rollout, written once for coroutines and plain calls.

`rollout` is a generator that yields what has to be awaited and is sent the result, so that an async driver awaits
it and a synchronous one runs it; the policy is called by the driver's own thread in either case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.mdp import step_mdp

__all__ = ["Policy", "RolloutOptions", "Steppable", "Steps", "as_policy", "rollout"]

Policy = Callable[[TensorDictBase], Any]
Steps = Generator[Any, Any, TensorDictBase]
TENSORDICT_NAMES = ("td", "tensordict", "data")


class Steppable(Protocol):  # documented where they are defined
    """What a rollout needs of an async env."""

    @property
    def batch_size(self) -> torch.Size: ...
    @property
    def done_keys(self) -> list[Any]: ...
    @property
    def action_keys(self) -> list[Any]: ...
    @property
    def observation_keys(self) -> list[Any]: ...
    def rand_action(self, td: Any = None) -> TensorDictBase: ...
    def reset(self, td: Any = None) -> Coroutine[Any, Any, TensorDictBase]: ...
    def step(self, td: Any) -> Coroutine[Any, Any, TensorDictBase]: ...
    def step_and_maybe_reset(self, td: Any) -> Coroutine[Any, Any, tuple[TensorDictBase, TensorDictBase]]: ...


@dataclass(frozen=True)
class RolloutOptions:
    """The arguments of `rollout` that say when it ends and what it returns."""

    max_steps: int
    auto_reset: bool = True
    break_when_any_done: bool = True
    break_when_all_done: bool = False
    return_contiguous: bool = True
    set_truncated: bool = False
    auto_cast_to_device: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_steps, bool) or not isinstance(self.max_steps, int):
            raise TypeError(f"max_steps must be an integer, got {self.max_steps!r}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")
        if self.break_when_any_done and self.break_when_all_done:
            raise TypeError("break_when_any_done and break_when_all_done exclude each other; set one to False")


def rollout(
    env: Steppable,
    options: RolloutOptions,
    policy: Policy | None,
    callback: Callable[[Any, TensorDictBase], Any] | None,
    start: TensorDictBase | None,
    out: TensorDictBase | None,
) -> Steps:
    """Step the env with the policy, and stack what came of it along a last dim named "time"."""
    if start is None and not options.auto_reset:
        raise RuntimeError("rollout with auto_reset=False needs the tensordict to begin with")
    td = (yield env.reset(start)) if options.auto_reset else start
    act = as_policy(policy, env) if policy is not None else env.rand_action
    if options.auto_cast_to_device:
        act = _cast(act, policy)
    advance = _restarting if not (options.break_when_any_done or options.break_when_all_done) else _stopping
    rows: list[TensorDictBase] = []
    while td is not None and len(rows) < options.max_steps:
        td = act(td)
        if inspect.isawaitable(td):
            td = yield td
        if not isinstance(td, TensorDictBase):
            raise TypeError(
                f"the policy was given a TensorDict and must return one with the action, but returned {td!r}; name its "
                "first parameter otherwise to get the observations instead (see aioenvs.rollout.as_policy)"
            )
        row, td = yield from advance(env, td, options)
        rows.append(row)
        if callback is not None and inspect.isawaitable(pending := callback(env, row)):
            yield pending
    if options.set_truncated:
        _truncate(rows[-1], env)
    return _stacked(rows, options, out)


def _restarting(env: Steppable, td: TensorDictBase, options: RolloutOptions) -> Generator[Any, Any, Any]:
    """One step after which finished envs begin anew."""
    row, following = yield env.step_and_maybe_reset(td)
    return row, following


def _stopping(env: Steppable, td: TensorDictBase, options: RolloutOptions) -> Generator[Any, Any, Any]:
    """One step after which the rollout may be over; envs that finished before are not stepped any more."""
    if options.break_when_all_done:
        td.set("_step", ~_done(td).reshape(-1))
    row = yield env.step(td)
    row.pop("_step", None)
    done = _done(row.get("next"))
    over = done.any() if options.break_when_any_done else done.all()
    return row, None if over else step_mdp(row)


def _done(td: TensorDictBase) -> torch.Tensor:
    done: torch.Tensor = td.get("done")
    return done


def _truncate(row: TensorDictBase, env: Steppable) -> None:
    following = row.get("next")
    if "truncated" not in env.done_keys:
        raise RuntimeError("set_truncated needs envs that declare the key 'truncated'")
    following.set("truncated", following.get("truncated") | ~following.get("done"))
    following.set("done", torch.ones_like(following.get("done")))


def _stacked(rows: list[TensorDictBase], options: RolloutOptions, out: TensorDictBase | None) -> TensorDictBase:
    dim = rows[0].ndim
    stacked: TensorDictBase
    if options.return_contiguous:
        stacked = TensorDict.stack(rows, dim, out=out)
    else:
        stacked = LazyStackedTensorDict.lazy_stack(rows, dim)
    stacked.refine_names(..., "time")
    return stacked


def as_policy(policy: Any, env: Steppable) -> Policy:
    """Make a policy on TensorDicts of whatever the user has.

    A module with `in_keys` and `out_keys` (TensorDictModule) takes a TensorDict, and so does a callable whose first
    parameter is annotated as one or named td, tensordict or data. Any other callable takes the observations, in the
    order of `observation_keys`, and returns the action.

    Raises:
        TypeError: If it cannot be called.
    """
    if not callable(policy):
        raise TypeError(f"expected a policy that can be called, got {policy!r}")
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
        action = policy(*(td.get(key) for key in keys))
        if not inspect.isawaitable(action):
            return td.set(action_keys[0], action)

        async def later() -> TensorDictBase:
            return td.set(action_keys[0], await action)

        return later()

    return act


def _cast(act: Policy, policy: Any) -> Policy:
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
