"""The rollout, written once for coroutines and plain calls, and the policies that choose its actions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.errors import shown
from aioenvs.hints import describe
from aioenvs.tensors.done import any_done, done_mask, merged, nodes_of, terminated_or_truncated
from aioenvs.tensors.step_mdp import is_node, next_root
from aioenvs.tensors.storage import StepStorage, name_time, size_of

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
    """A root with what the policy returned for it; TypeError if that is no TensorDict."""
    if not isinstance(acted, TensorDictBase):
        raise TypeError(
            f"the policy was given a TensorDict and must return one with the action, but returned {acted!r}; name its "
            "first parameter otherwise to get the observations instead (see aioenvs.tensors.rollout.as_policy)"
        )
    return td if acted is td else td.update(acted)


RolloutSteps = Generator[Any, Any, TensorDictBase]
LARGE = 1 << 15  # bytes of a step from which on writing it costs less than keeping it


class Steppable(Protocol):  # documented where they are defined
    """The part of an env that a rollout needs; its commands return a result, or something that can be awaited for it.

    An env whose elements cannot be stepped apart has `step_dims`: how many leading dims of the batch a `_step` mask
    may tell apart. One whose results may be elsewhere can have `on_host`, which brings a TensorDict of those to the
    host. What an env returns is copied, since it may use its tensors again, unless its `copies_results` is
    true.
    """

    @property
    def batch_size(self) -> torch.Size: ...
    @property
    def done_keys(self) -> list[Any]: ...
    @property
    def action_keys(self) -> list[Any]: ...
    @property
    def reward_keys(self) -> list[Any]: ...
    @property
    def observation_keys(self) -> list[Any]: ...
    def rand_action(self, tensordict: Any = None, /) -> TensorDictBase: ...
    def reset(self, tensordict: Any = None, /) -> Any: ...
    def step(self, tensordict: Any, /) -> Any: ...
    def step_and_maybe_reset(self, tensordict: Any, /) -> Any: ...


@dataclass(frozen=True)
class RolloutOptions:
    """The arguments of `rollout` that say when it ends and what it returns.

    `break_when_any_done` None is the contrary of `break_when_all_done`. `return_contiguous` None stacks into one tensor
    per key wherever keys and shapes allow it.
    """

    max_steps: int
    auto_reset: bool = True
    break_when_any_done: bool | None = None
    break_when_all_done: bool | None = None
    return_contiguous: bool | None = None
    set_truncated: bool = False
    auto_cast_to_device: bool = False
    storing_device: torch.device | str | int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_steps, bool) or not isinstance(self.max_steps, int):
            raise TypeError(f"max_steps must be an integer, got {shown(self.max_steps)}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")
        if self.break_when_any_done is None:
            object.__setattr__(self, "break_when_any_done", not self.break_when_all_done)
        if self.break_when_any_done and self.break_when_all_done:
            raise TypeError(
                "Cannot have both break_when_all_done and break_when_any_done True at the same time; set one to False"
            )


def rollout(
    env: Steppable,
    options: RolloutOptions,
    policy: Policy | None,
    callback: Callable[[Any, TensorDictBase], Any] | None,
    start: TensorDictBase | None,
    out: TensorDictBase | None,
) -> RolloutSteps:
    """Step the env with the policy, and stack what came of it along a last dim named "time"."""
    truncated = _truncated_nodes(env) if options.set_truncated else []
    act = as_policy(policy, env) if policy is not None else env.rand_action
    if options.auto_cast_to_device:
        act = on_own_device(act, policy)
    advance = _Advance(env, options)
    td = advance.own((yield from _beginning(env, start, options)))
    steps = _Kept(options, out)
    while td is not None:
        td = yield from _acted(act, td)
        row, td = yield from advance(td)
        if callback is not None:
            yield from settle(callback(env, row))
        if td is None:
            for node in truncated:
                _truncate(row.get("next"), node)
        steps.add((yield from settle(_on_host(env, row, options.storing_device))))
    return steps.stacked()


def settle(value: Any) -> Generator[Any, Any, Any]:
    """A value that is there, or the result of one that has to be awaited."""
    if inspect.isawaitable(value):
        value = yield value
    return value


def drive(steps: RolloutSteps) -> TensorDictBase:
    """Run a rollout of an env that returns its results at once.

    TypeError if the env, the policy or the callback returned something that has to be awaited.
    """
    try:
        pending = next(steps)
    except StopIteration as stop:
        stacked: TensorDictBase = stop.value
        return stacked
    if inspect.iscoroutine(pending):
        pending.close()
    steps.close()
    raise TypeError(
        f"expected results, but the policy or the callback returned {shown(pending)}, which has to be awaited; use "
        "an async env for coroutine functions, or a plain function here"
    )


def _beginning(env: Steppable, start: TensorDictBase | None, options: RolloutOptions) -> Generator[Any, Any, Any]:
    """The first root: fresh, or the one that was given, of which only the finished elements begin anew."""
    if options.auto_reset:
        return (yield from settle(env.reset(start)))
    if start is None:
        raise RuntimeError("rollout with auto_reset=False needs the tensordict to begin with")
    if not isinstance(start, TensorDictBase):
        raise TypeError(f"expected a TensorDict of shape {tuple(env.batch_size)} to begin with, got {describe(start)}")
    if any_done(start, _every_key(env, "done")):
        start = start.copy()
        terminated_or_truncated(start, getattr(env, "full_done_spec", None))
        return (yield from settle(env.reset(start)))
    return start


def _on_host(env: Steppable, row: TensorDictBase, device: torch.device | str | int | None) -> Any:
    """A step on the host, if it shall be stored there, and the env knows of a way that is better than leaf by leaf."""
    bring = None if device is None or torch.device(device).type != "cpu" else getattr(env, "on_host", None)
    return row if bring is None else bring(row)


def _acted(act: Policy, td: TensorDictBase) -> Generator[Any, Any, TensorDictBase]:
    """The root with what the policy returned for it."""
    return with_action(td, (yield from settle(act(td))))


class _Advance:
    """One step after the other: the row that each gives, and the root for the next one, None at the end."""

    def __init__(self, env: Steppable, options: RolloutOptions) -> None:
        self._env = env
        self._options = options
        states = _every_key(env, "state")
        rewards = (key for key in _every_key(env, "reward") if key not in states)
        self._excluded = (*rewards, *_every_key(env, "action"))
        self._done_keys = tuple(_every_key(env, "done"))
        self._going: torch.Tensor | None = None  # elements that have not finished yet, None for all
        self._left = options.max_steps
        self._row: TensorDictBase | None = None  # the last one
        self._is_own = bool(getattr(env, "copies_results", False))

    def own(self, td: TensorDictBase) -> TensorDictBase:
        """Return a TensorDict to which no step will write."""
        return td if self._is_own else td.clone()

    def __call__(self, td: TensorDictBase) -> Generator[Any, Any, Any]:
        self._left -= 1
        last = not self._left
        if not (self._options.break_when_any_done or self._options.break_when_all_done or last):
            row, following = yield from settle(self._env.step_and_maybe_reset(td))
            return self._with_own_next(row), self.own(following)
        stepping = self._stepping()
        if stepping is not None:
            td.set("_step", stepping)
        row = self._with_own_next((yield from settle(self._env.step(td))))
        over = last or self._over(row.get("next"))
        following = None if over else next_root(row, self._excluded)
        if stepping is not None:
            row = merged(stepping, row.exclude("_step"), self._row)
        self._row = row
        return row, following

    def _with_own_next(self, row: TensorDictBase) -> TensorDictBase:
        return row if self._is_own else row.set("next", row.get("next").clone())

    def _stepping(self) -> torch.Tensor | None:
        """Which elements are stepped: those still going, and those that cannot be stepped without them."""
        going = self._going
        if going is None:
            return None
        dims = getattr(self._env, "step_dims", going.ndim)
        if dims < going.ndim:
            whole = going.flatten(dims).any(-1)
            going = whole.reshape(whole.shape + (1,) * (going.ndim - dims)).expand_as(going)
        return None if going.all() else going

    def _over(self, following: TensorDictBase) -> bool:
        if self._options.break_when_any_done:
            return any_done(following, self._done_keys)
        if self._options.break_when_all_done:
            going = ~done_mask(following, self._done_keys, every=True)
            self._going = going if self._going is None else self._going & going
            return not self._going.any()
        return False


def _every_key(env: Steppable, kind: str) -> Sequence[Any]:
    """The keys of a kind, and of a batch of envs that differ also those that only some have."""
    every = getattr(env, "every_key", None)
    return list(dict.fromkeys((*getattr(env, f"{kind}_keys", ()), *(every(kind) if every is not None else ()))))


def _truncated_nodes(env: Steppable) -> list[tuple[str, ...]]:
    """The nodes that can be truncated."""
    keys = _every_key(env, "done")
    nodes = [path for path, names in nodes_of(keys).items() if "truncated" in names]
    if not nodes:
        raise RuntimeError(
            "set_truncated was set to True but no truncated key could be found: it needs envs that declare the key "
            f"'truncated', and their done keys are {keys!r}"
        )
    return nodes


def _truncate(td: TensorDictBase, path: tuple[str, ...]) -> None:
    """Set `truncated` in a node where it is not done, and then `done`."""
    if isinstance(td, LazyStackedTensorDict):
        for part in td.tensordicts:
            _truncate(part, path)
    elif path:
        if is_node(node := td.get(path[0], None)):
            _truncate(node, path[1:])
    elif (truncated := td.get("truncated", None)) is not None:
        done = td.get("done")
        td.set("truncated", truncated | ~done)
        td.set("done", torch.ones_like(done))


class _Kept:
    """The steps of a rollout: large ones are written where they belong, small ones are quicker to stack at the end."""

    def __init__(self, options: RolloutOptions, out: TensorDictBase | None) -> None:
        self._options = options
        self._out = out
        self._rows: list[TensorDictBase] = []
        self._storage: StepStorage | None = None

    def add(self, row: TensorDictBase) -> None:
        if not self._rows and self._storage is None and self._fits(row):
            options = self._options
            self._storage = StepStorage(options.max_steps, options.storing_device, keeps_graph=True)
        if self._storage is not None:
            self._storage.write(row)
        else:
            device = self._options.storing_device
            self._rows.append(row if device is None else row.to(device))

    def _fits(self, first: TensorDictBase) -> bool:
        """Whether the size of all that will be written is known, and writing it at once is worth it."""
        options = self._options
        may_break = options.break_when_any_done or options.break_when_all_done
        if may_break or options.return_contiguous is False or self._out is not None:
            return False
        return size_of(first) >= LARGE

    def stacked(self) -> TensorDictBase:
        contiguous = bool(self._options.return_contiguous)
        try:
            return self._stack() if self._storage is None else self._storage.finish(contiguous=contiguous)
        except RuntimeError as error:
            if contiguous:
                error.add_note("keys or shapes differ from step to step: call rollout with return_contiguous=False")
            raise

    def _stack(self) -> TensorDictBase:
        rows, out, dim = self._rows, self._out, self._rows[0].ndim
        stacked: TensorDictBase
        if self._options.return_contiguous:
            stacked = TensorDict.stack(rows, dim, out=out)
        elif self._options.return_contiguous is None:
            stacked = LazyStackedTensorDict.maybe_dense_stack(rows, dim, out=out)
        else:
            stacked = LazyStackedTensorDict.lazy_stack(rows, dim, out=out)
        return name_time(stacked, dim)
