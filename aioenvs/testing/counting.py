"""Envs that count their steps, of which some are slow, fail, die or talk, and envs whose state can be seen."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from aioenvs.envs import EnvBase
from aioenvs.specs import Categorical, Composite, Unbounded


def restarted(
    value: torch.Tensor, tensordict: TensorDictBase | None, start: float, key: Any = "_reset"
) -> torch.Tensor:
    """The value, with `start` where the mask at `key` asks for a reset; everywhere if there is no mask."""
    mask = None if tensordict is None else tensordict.get(key, None)
    if mask is None:
        return torch.full_like(value, start)
    return torch.where(mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)), start, value)


def done_leaves(shape: Sequence[int], device: Any, truncates: bool = False) -> dict[str, Categorical]:
    """The specs of `done`, `terminated` and, for envs that truncate, `truncated`."""
    names = ("done", "terminated", "truncated") if truncates else ("done", "terminated")
    return {name: Categorical(2, shape=torch.Size(shape), dtype=torch.bool, device=device) for name in names}


def end_of_episode(steps: torch.Tensor, max_steps: int | None, truncates: bool = False) -> dict[str, torch.Tensor]:
    """The values of `done`, `terminated` and, for envs that truncate, `truncated` after so many steps."""
    over = torch.zeros_like(steps, dtype=torch.bool) if max_steps is None else steps >= max_steps
    if truncates:
        return {"done": over, "terminated": torch.zeros_like(over), "truncated": over.clone()}
    return {"done": over, "terminated": over.clone()}


class EpisodicEnv(EnvBase):
    """The base of envs that count the steps of their episodes, `(*batch_size, 1)`, and draw no random numbers.

    A subclass calls `_count_steps`, sets the specs of its observations and actions, and says what it shows.
    """

    steps: torch.Tensor
    max_steps: Any

    def _count_steps(self, max_steps: int | None, *, truncates: bool = False) -> None:
        self.max_steps, self._truncates = max_steps, truncates
        shape = torch.Size((*self.batch_size, 1))
        self.register_buffer("steps", torch.zeros(shape, dtype=torch.int64, device=self.device))
        self.reward_spec = Unbounded(shape=shape, device=self.device)
        done = done_leaves(shape, self.device, truncates)
        self.done_spec = Composite(done, shape=self.batch_size, device=self.device)

    def _observed(self) -> dict[str, Any]:
        """The observation after a reset or a step."""
        raise NotImplementedError

    def _begin(self, tensordict: TensorDictBase | None) -> None:
        """Begin episodes where the masks of a reset ask for it; the steps are counted anew already."""

    def _act(self, tensordict: TensorDictBase) -> None:
        """Do what the input of a step asks for; the step is counted already."""

    def _rewarded(self, observed: dict[str, Any]) -> torch.Tensor:
        return torch.ones_like(self.steps, dtype=torch.float32)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = restarted(self.steps, tensordict, 0)
        self._begin(tensordict)
        done = end_of_episode(self.steps, None, self._truncates)
        return TensorDict({**self._observed(), **done}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        self._act(tensordict)
        entries = self._observed()
        entries["reward"] = self._rewarded(entries)
        entries.update(end_of_episode(self.steps, self.max_steps, self._truncates))
        return TensorDict(entries, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass


class CountingEnv(EpisodicEnv):
    """Counts up, whatever the action: the observation after `k` steps is `start + k * step`, the reward is 1.

    The specs are `observation` `(*batch_size, 1)`, `action` `(*batch_size,)`, an integer below `num_actions`, and
    `reward` `(*batch_size, 1)`. Each element of a batch has an episode of its own, and can be reset alone.

    Args:
        max_steps: Steps until an episode terminates; None for endless episodes.
        start: First observation. `reset(start=...)` replaces it for the episodes that begin then.
        step: Difference of two observations.
        batch_size: Any, empty dims included.
        device: Where all data lives.
        dtype: Of the observation.
        num_actions: How many actions there are.
        truncates: End episodes by `truncated` instead of `terminated`.
        adds_up: Also observe `total` `(*batch_size, 1)`, int64: the sum of the episode's actions.
        in_place: Return the same observation tensor each time, overwritten, as careless envs do.
        custom_attr: Whatever the attribute of that name shall be.

    Attributes:
        custom_attr: An attribute that a batched env forwards.
        seed: What `set_seed` was last called with.

    >>> from aioenvs.testing import CountingEnv
    >>> env = CountingEnv(max_steps=3, start=10)
    >>> env.rollout(100)["next", "observation"].flatten().tolist()
    [11, 12, 13]
    >>> env.custom_method(7, unit="m"), env.custom_property
    (('counting', (7,), {'unit': 'm'}), 3)
    """

    origin: torch.Tensor
    total: torch.Tensor
    board: torch.Tensor

    def __init__(
        self,
        max_steps: int | None = 5,
        *,
        start: int = 0,
        step: int = 1,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.int64,
        num_actions: int = 2,
        truncates: bool = False,
        adds_up: bool = False,
        in_place: bool = False,
        custom_attr: Any = "counting",
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.start, self.increment = start, step
        self.truncates, self.adds_up, self.in_place = truncates, adds_up, in_place
        self.custom_attr = custom_attr
        self.seed: int | None = None
        self._count_steps(max_steps, truncates=truncates)
        shape = self.steps.shape
        for name in ("origin", "total"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64, device=device))
        self.register_buffer("board", torch.zeros(shape, dtype=dtype, device=device))
        entries = {"observation": Unbounded(shape=shape, dtype=dtype, device=device)}
        if adds_up:
            entries["total"] = Unbounded(shape=shape, dtype=torch.int64, device=device)
        self.observation_spec = Composite(entries, shape=self.batch_size, device=device)
        self.action_spec = Categorical(num_actions, shape=self.batch_size, dtype=torch.int64, device=device)

    def custom_method(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return `custom_attr` and what the method was called with."""
        return self.custom_attr, args, kwargs

    @property
    def custom_property(self) -> int:
        """Steps of the current episodes, of all elements together."""
        return int(self.steps.sum())

    def _observed(self) -> dict[str, torch.Tensor]:
        count = (self.origin + self.increment * self.steps).to(self.board.dtype)
        entries = {"observation": self.board.copy_(count) if self.in_place else count}
        if self.adds_up:
            entries["total"] = self.total
        return entries

    def _reset(
        self, tensordict: TensorDictBase | None = None, *, start: int | None = None, **kwargs: Any
    ) -> TensorDictBase:
        self.origin = restarted(self.origin, tensordict, self.start if start is None else start)
        return super()._reset(tensordict)

    def _begin(self, tensordict: TensorDictBase | None) -> None:
        self.total = restarted(self.total, tensordict, 0)

    def _act(self, tensordict: TensorDictBase) -> None:
        self.total = self.total + tensordict["action"].unsqueeze(-1)

    def _set_seed(self, seed: int | None) -> None:
        self.seed = seed


class StateEnv(EnvBase):
    """Has no memory: its state is read from the TensorDict of each step, and written to the next.

    The state is `count` `(*batch_size, 1)`, the steps of the episode, and `("memory", "total")` `(*batch_size, 1)`, the
    sum of its actions, both int64. The observation is their difference, as a float; the reward is the action.

    Args:
        max_steps: Steps until an episode terminates.
        num_actions: How many actions there are.
        batch_size: Any.
        device: Where all data lives.

    >>> from aioenvs.testing import StateEnv
    >>> env = StateEnv()
    >>> env.state_keys
    ['count', ('memory', 'total')]
    >>> td = env.rand_action(env.reset())
    >>> td["count"] += 3  # whoever has the TensorDict has the state
    >>> env.step(td)["next", "count"], td["next", "done"]
    (tensor([4]), tensor([False]))
    """

    def __init__(
        self,
        max_steps: int = 5,
        *,
        num_actions: int = 2,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.max_steps = max_steps
        shape = torch.Size((*batch_size, 1))
        self.state_spec = self._state(shape)
        self.observation_spec = self._state(shape).update({"observation": Unbounded(shape=shape, device=device)})
        self.action_spec = Categorical(num_actions, shape=self.batch_size, device=device)
        self.reward_spec = Unbounded(shape=shape, device=device)
        self.done_spec = Composite(done_leaves(shape, device), shape=self.batch_size, device=device)

    def _state(self, shape: torch.Size) -> Composite:
        def leaf() -> Unbounded:
            return Unbounded(shape=shape, dtype=torch.int64, device=self.device)

        memory = Composite(total=leaf(), shape=self.batch_size, device=self.device)
        return Composite(count=leaf(), memory=memory, shape=self.batch_size, device=self.device)

    def _result(self, count: torch.Tensor, total: torch.Tensor, **entries: torch.Tensor) -> TensorDictBase:
        size = count.shape[:-1]
        memory = TensorDict({"total": total}, size, device=self.device)
        entries = {"count": count, "observation": (count - total).float(), **entries}
        return TensorDict({**entries, "memory": memory}, size, device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        locked = self.batch_locked or tensordict is None
        size = self.batch_size if locked or tensordict is None else tensordict.batch_size
        count = torch.zeros(*size, 1, dtype=torch.int64, device=self.device)
        return self._result(count, torch.zeros_like(count), **end_of_episode(count, None))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict["action"].unsqueeze(-1)
        count = tensordict["count"] + 1
        total = tensordict["memory", "total"] + action
        return self._result(count, total, reward=action.float(), **end_of_episode(count, self.max_steps))

    def _set_seed(self, seed: int | None) -> None:
        pass


class UnlockedStateEnv(StateEnv):
    """A `StateEnv` that takes TensorDicts of any batch size, and has none of its own.

    Args:
        max_steps: Steps until an episode terminates.
        num_actions: How many actions there are.
        device: Where all data lives.

    >>> from tensordict import TensorDict
    >>> from aioenvs.testing import UnlockedStateEnv
    >>> env = UnlockedStateEnv()
    >>> td = env.reset(TensorDict(batch_size=[7]))
    >>> env.batch_size, env.rand_step(td)["next", "observation"].shape
    (torch.Size([]), torch.Size([7, 1]))
    """

    batch_locked = False

    def __init__(self, max_steps: int = 5, *, num_actions: int = 2, device: torch.device | str | None = None) -> None:
        super().__init__(max_steps, num_actions=num_actions, device=device)


class ParameterEnv(EpisodicEnv):
    """An env with something in its `state_dict`: the observation is `gain * steps + offset`.

    `gain` is a parameter and `offset` a buffer, both of shape `(size,)`, and `steps` a buffer `(*batch_size, 1)`.
    The reward `(*batch_size, 1)` is what the submodule `head`, a linear layer, makes of the observation.

    Args:
        gain: First value of the parameter.
        offset: First value of the buffer.
        size: Last dim of the observation.
        max_steps: Steps until an episode terminates.
        batch_size: Any.
        device: Where all data lives.

    >>> from aioenvs.testing import ParameterEnv
    >>> env, other = ParameterEnv(gain=2.0), ParameterEnv(gain=7.0)
    >>> list(env.state_dict())
    ['gain', 'offset', 'steps', 'head.weight', 'head.bias']
    >>> other.load_state_dict(env.state_dict())
    <All keys matched successfully>
    >>> other.rollout(2)["next", "observation"][:, 0].tolist()
    [2.0, 4.0]
    """

    offset: torch.Tensor

    def __init__(
        self,
        gain: float = 1.0,
        offset: float = 0.0,
        *,
        size: int = 3,
        max_steps: int = 5,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.gain = nn.Parameter(torch.full((size,), gain, device=device))
        self.register_buffer("offset", torch.full((size,), offset, device=device))
        self._count_steps(max_steps)
        self.head = nn.Linear(size, 1, device=device)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        observation = Unbounded(shape=(*batch_size, size), device=device)
        self.observation_spec = Composite(observation=observation, shape=self.batch_size, device=device)
        self.action_spec = Categorical(2, shape=self.batch_size, device=device)

    def _observed(self) -> dict[str, Any]:
        return {"observation": self.gain * self.steps + self.offset}

    def _rewarded(self, observed: dict[str, Any]) -> torch.Tensor:
        reward: torch.Tensor = self.head(observed["observation"])
        return reward


Where = Literal["init", "reset", "step"]
WHERE = ("init", "reset", "step")
LINE = "x" * 79 + "\n"


class _EventfulEnv(CountingEnv):
    """A counting env that does something at the call number `at` of a method, or at each call."""

    def __init__(self, event: Callable[[], object], where: Where, at: int | None, **options: Any) -> None:
        if where not in WHERE:
            raise ValueError(f"where must be one of {WHERE}, found {where!r}")
        super().__init__(**options)
        self.event, self.where, self.at, self.calls = event, where, at, 0
        self._called("init")

    def _called(self, where: Where) -> None:
        if where == self.where:
            self.calls += 1
            if self.at is None or self.calls == self.at:
                self.event()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._called("reset")
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._called("step")
        return super()._step(tensordict)


class FailingEnv(_EventfulEnv):
    """Raises an exception, once by default; after that it can be used again.

    Args:
        where: In "step", "reset", or "init", the constructor.
        at: At which call, counted from 1 over all episodes; None for each call.
        error: What is raised.
        message: What the exception says.
        **options: As for `CountingEnv`.

    >>> from aioenvs.testing import FailingEnv
    >>> env = FailingEnv(at=2, error=ValueError, message="the reactor is hot")
    >>> td = env.rand_step(env.reset())
    >>> env.rand_step(td)
    Traceback (most recent call last):
    ValueError: the reactor is hot
    """

    def __init__(
        self,
        where: Where = "step",
        at: int | None = 1,
        *,
        error: type[BaseException] = RuntimeError,
        message: str = "this env was told to fail",
        **options: Any,
    ) -> None:
        super().__init__(functools.partial(_fail, error, message), where, at, **options)


def _fail(error: type[BaseException], message: str) -> NoReturn:
    raise error(message)


class DyingEnv(_EventfulEnv):
    """Ends the process it runs in, without a word: by a signal, or with an exit code.

    Args:
        where: In "step", "reset", or "init", the constructor.
        at: At which call, counted from 1 over all episodes.
        exit_code: The exit code, if it shall exit by `os._exit`.
        signum: Otherwise the signal that it sends to itself; SIGKILL by default.
        **options: As for `CountingEnv`.

    >>> from aioenvs.testing import DyingEnv
    >>> env = DyingEnv(at=3)
    >>> env.rollout(2)["next", "observation"].flatten().tolist()  # a third step would kill this process
    [1, 2]
    """

    def __init__(
        self,
        where: Where = "step",
        at: int | None = 1,
        *,
        exit_code: int | None = None,
        signum: int = signal.SIGKILL,
        **options: Any,
    ) -> None:
        super().__init__(functools.partial(_die, exit_code, signum), where, at, **options)


def _die(exit_code: int | None, signum: int) -> None:
    if exit_code is not None:
        os._exit(exit_code)
    else:
        os.kill(os.getpid(), signum)


class SlowEnv(_EventfulEnv):
    """Takes its time.

    Args:
        delay: Seconds; or several, which are taken in turn.
        where: In "step", "reset", or "init", the constructor.
        at: At which call, counted from 1 over all episodes; None for each call.
        sleep: What waits for so many seconds.
        **options: As for `CountingEnv`.

    >>> from aioenvs.testing import SlowEnv
    >>> waited = []
    >>> env = SlowEnv([0.1, 0.2], sleep=waited.append)
    >>> len(env.rollout(3)), waited
    (3, [0.1, 0.2, 0.1])
    """

    def __init__(
        self,
        delay: float | Iterable[float] = 0.01,
        where: Where = "step",
        at: int | None = None,
        *,
        sleep: Callable[[float], object] = time.sleep,
        **options: Any,
    ) -> None:
        delays = (float(delay),) if isinstance(delay, int | float) else tuple(delay)
        super().__init__(_Waiting(delays, sleep), where, at, **options)


class _Waiting:
    """Waits for one delay after the other."""

    def __init__(self, delays: Sequence[float], sleep: Callable[[float], object]) -> None:
        self.delays, self.sleep, self.calls = delays, sleep, 0

    def __call__(self) -> None:
        delay = self.delays[self.calls % len(self.delays)]
        self.calls += 1
        self.sleep(delay)


class PrintingEnv(_EventfulEnv):
    """Prints a lot.

    Args:
        size: How many characters, at the least, to each stream.
        streams: Which of "stdout" and "stderr".
        where: In "step", "reset", or "init", the constructor.
        at: At which call, counted from 1 over all episodes; None for each call.
        **options: As for `CountingEnv`.

    >>> from aioenvs.testing import PrintingEnv
    >>> env = PrintingEnv(160, streams=("stdout",), at=1)
    >>> td = env.rand_step(env.reset())  # doctest: +ELLIPSIS
    xxx...
    xxx...
    """

    def __init__(
        self,
        size: int = 1_000_000,
        where: Where = "step",
        at: int | None = None,
        *,
        streams: Sequence[Literal["stdout", "stderr"]] = ("stdout", "stderr"),
        **options: Any,
    ) -> None:
        super().__init__(functools.partial(_print, size, tuple(streams)), where, at, **options)


def _print(size: int, streams: Sequence[str]) -> None:
    for name in streams:
        stream = getattr(sys, name)
        for _ in range(-(-size // len(LINE))):
            stream.write(LINE)
        stream.flush()
