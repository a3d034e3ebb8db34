"""Envs that are slow, fail, die or talk, and envs whose state can be seen."""

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
from aioenvs.testing.counting import CountingEnv, done_leaves, end_of_episode, restarted

__all__ = ["DyingEnv", "FailingEnv", "ParameterEnv", "PrintingEnv", "SlowEnv", "StateEnv", "UnlockedStateEnv"]


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


class ParameterEnv(EnvBase):
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

    steps: torch.Tensor
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
        self.max_steps = max_steps
        self.gain = nn.Parameter(torch.full((size,), gain, device=device))
        self.register_buffer("offset", torch.full((size,), offset, device=device))
        shape = torch.Size((*batch_size, 1))
        self.register_buffer("steps", torch.zeros(shape, dtype=torch.int64, device=device))
        self.head = nn.Linear(size, 1, device=device)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        observation = Unbounded(shape=(*batch_size, size), device=device)
        self.observation_spec = Composite(observation=observation, shape=self.batch_size, device=device)
        self.action_spec = Categorical(2, shape=self.batch_size, device=device)
        self.reward_spec = Unbounded(shape=shape, device=device)
        self.done_spec = Composite(done_leaves(shape, device), shape=self.batch_size, device=device)

    def _observed(self) -> torch.Tensor:
        observed: torch.Tensor = self.gain * self.steps + self.offset
        return observed

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = restarted(self.steps, tensordict, 0)
        entries = {"observation": self._observed(), **end_of_episode(self.steps, None)}
        return TensorDict(entries, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps = self.steps + 1
        observation = self._observed()
        entries = {"observation": observation, "reward": self.head(observation)}
        entries.update(end_of_episode(self.steps, self.max_steps))
        return TensorDict(entries, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass


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
