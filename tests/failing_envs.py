"""Small Gymnasium envs for tests: one that counts, and everything that can go wrong with an env.

`CountingEnv` observes `[env id, episode, step, sum of the episode's actions]`, so that a test can tell whether a result
belongs to the right env and step, and whether every action came once. A *fault* is a function that the env calls once,
at a given step of a given episode (step 0 is the reset), or when it is closed. Faults that wait do so at a `Gate`,
never for a time. Workers import this module, so it must not import torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import gymnasium as gym
import numpy as np

Fault = Callable[[], object]
NUM_ACTIONS = 1000


class CountingEnv(gym.Env[Any, Any]):
    """Counts its episodes and steps.

    Args:
        env_id: First entry of every observation.
        length: Steps of an episode; None for endless ones.
        fault: Called once, before the step `at[1]` of the episode `at[0]` is counted.
        at: Episode and step of the fault, both counted from 1; step 0 is the reset.
        on_close: Called by `close`.
    """

    observation_space = gym.spaces.Box(-(2**40), 2**40, (4,), np.int64)
    action_space = gym.spaces.Discrete(NUM_ACTIONS)

    def __init__(
        self,
        env_id: int = 0,
        *,
        length: int | None = None,
        fault: Fault | None = None,
        at: tuple[int, int] = (1, 2),
        on_close: Fault | None = None,
    ) -> None:
        self.env_id, self.length = env_id, length
        self.fault, self.at, self.on_close = fault, at, on_close
        self.episode = self.steps = self.total = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._maybe_fail(self.episode + 1, 0)
        self.episode += 1
        self.steps = self.total = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._maybe_fail(self.episode, self.steps + 1)
        self.steps += 1
        self.total += int(action)
        return self._observation(), float(self.steps), self.steps == self.length, False, {}

    def close(self) -> None:
        if self.on_close is not None:
            self.on_close()

    def _maybe_fail(self, episode: int, step: int) -> None:
        if self.fault is not None and (episode, step) == self.at:
            fault, self.fault = self.fault, None
            fault()

    def _observation(self) -> Any:
        return np.array([self.env_id, self.episode, self.steps, self.total], np.int64)


class DrawingEnv(CountingEnv):
    """Counts, draws itself and has a state."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((2, 2, 3), self.env_id + 7, np.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]

    def scaled(self, factor: int) -> int:
        return self.env_id * factor


def numbered(count: int, each: Mapping[int, Mapping[str, Any]] | None = None, **common: Any) -> list[dict[str, Any]]:
    """`create_env_kwargs` that give each `CountingEnv` its index as id, and some envs more than that."""
    return [{"env_id": env, **common, **(each or {}).get(env, {})} for env in range(count)]


class NarrowEnv(CountingEnv):
    """Has as many actions as it is told."""

    def __init__(self, env_id: int, actions: int) -> None:
        super().__init__(env_id)
        self.action_space = gym.spaces.Discrete(actions)


class ReportingEnv(CountingEnv):
    """Observes whatever a function says when it is called in the worker: four integers."""

    def __init__(self, report: Callable[[], list[int]], env_id: int = 0) -> None:
        super().__init__(env_id)
        self.report = report

    def _observation(self) -> Any:
        return np.array(self.report(), np.int64)


def loaded_modules() -> list[int]:
    return [int(name in sys.modules) for name in ("gymnasium", "torch", "tensordict", "aioenvs.faces.async_envs")]


def surroundings() -> list[int]:
    """What there is to read on stdin, how many variables of MPI or Slurm, AIOENVS_TEST, and whether `here` is here."""
    foreign = sum(name.startswith(("SLURM_PROCID", "OMPI_", "PMI_", "PMIX_")) for name in os.environ)
    return [len(sys.stdin.read()), foreign, int(os.environ["AIOENVS_TEST"]), int(Path("here").exists())]


# -- gates ----------------------------------------------------------------------------------------------


class Gate:
    """A place where envs in any process or thread wait until the test lets them through: two named pipes."""

    def __init__(self, folder: Path) -> None:
        self._names = (str(folder / "arrivals"), str(folder / "passes"))
        for name in self._names:
            os.mkfifo(name)
        self._arrivals, self._passes = (os.open(name, os.O_RDWR) for name in self._names)

    @property
    def names(self) -> tuple[str, str]:
        """The pipes of arrivals and passes."""
        return self._names

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._arrivals, self._passes):
            os.close(fd)

    @property
    def wait(self) -> Fault:
        """A fault: announce yourself, then wait for a pass."""
        return _WaitAt(*self._names)

    async def arrival(self) -> None:
        """Wait until an env has come to the gate."""
        arrived = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._arrivals, lambda: arrived.done() or arrived.set_result(None))
        try:
            await asyncio.wait_for(arrived, 20)
        finally:
            loop.remove_reader(self._arrivals)
        os.read(self._arrivals, 1)

    def wait_for_arrival(self) -> None:
        """The same without an event loop."""
        assert select.select([self._arrivals], [], [], 20)[0], "nobody came to the gate"
        os.read(self._arrivals, 1)

    def open(self, passes: int = 1) -> None:
        """Let so many envs through, now or when they come."""
        os.write(self._passes, b"x" * passes)


class _WaitAt:
    def __init__(self, arrivals: str, passes: str) -> None:
        self.arrivals, self.passes = arrivals, passes

    def __call__(self) -> None:
        with open(self.passes, "rb", buffering=0) as passes:
            with open(self.arrivals, "wb", buffering=0) as arrivals:
                arrivals.write(b"x")
            passes.read(1)


class Note:
    """A fault that leaves an `x` in a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> None:
        with open(self.path, "a") as file:
            file.write("x")


# -- exceptions -----------------------------------------------------------------------------------------


class TwoArgumentError(Exception):
    """Cannot be rebuilt from `args`, as pickle would."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class UnpicklableError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("no words")


def raise_value_error() -> NoReturn:
    raise ValueError("the reactor is hot")


def raise_two_arguments() -> NoReturn:
    raise TwoArgumentError(7, "the reactor is hot")


def raise_unpicklable() -> NoReturn:
    raise UnpicklableError("the reactor is hot")


def raise_unprintable() -> NoReturn:
    raise UnprintableError("the reactor is hot")


def raise_local() -> NoReturn:
    class LocalError(Exception):
        pass

    raise LocalError("the reactor is hot")


def raise_chained() -> NoReturn:
    try:
        raise KeyError("valve")
    except KeyError as error:
        raise ValueError("the reactor is hot") from error


def raise_group() -> NoReturn:
    raise ExceptionGroup("the reactor is hot", [ValueError("inlet"), OSError(5, "outlet")])


def raise_stop_iteration() -> NoReturn:
    raise StopIteration("the reactor is hot")


def raise_keyboard_interrupt() -> NoReturn:
    raise KeyboardInterrupt("the reactor is hot")


def raise_cancelled() -> NoReturn:
    raise asyncio.CancelledError("the reactor is hot")


def raise_timeout() -> NoReturn:
    raise TimeoutError("the reactor is hot")


# -- the ends of processes ------------------------------------------------------------------------------


def raise_system_exit() -> NoReturn:
    raise SystemExit(5)


def exit_3() -> NoReturn:
    os._exit(3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def abort_with_words() -> NoReturn:
    sys.stderr.write("malloc(): corrupted top size\n")
    sys.stderr.flush()
    os.abort()


def hang() -> NoReturn:
    """Never come back, whatever signal may be caught."""
    while True:
        time.sleep(3600)


def close_all_descriptors() -> NoReturn:
    """What a careless daemon would do: the pipe to the parent is gone, the process is not."""
    os.closerange(3, 1000)
    hang()


def hang_deaf() -> NoReturn:
    """The same, and SIGTERM is ignored too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def write_a_lot() -> None:
    """1 MB to each standard descriptor, as a library in C would."""
    for fd in (1, 2):
        for _ in range(1024):
            os.write(fd, b"x" * 1023 + b"\n")


def print_a_lot() -> None:
    """1 MB to each stream."""
    for stream in (sys.stdout, sys.stderr):
        for _ in range(1024):
            stream.write("x" * 1023 + "\n")
        stream.flush()


# -- factories ------------------------------------------------------------------------------------------


def failing_factory(env_id: int = 0) -> NoReturn:
    raise FileNotFoundError(2, "no licence file", f"/licences/{env_id}")


def exiting_factory(env_id: int = 0) -> NoReturn:
    sys.stderr.write("licence server says no\n")
    sys.stderr.flush()
    os._exit(4)


def sys_exiting_factory(env_id: int = 0) -> NoReturn:
    raise SystemExit("the licence has expired")


def hanging_factory(env_id: int = 0) -> NoReturn:
    hang()


def gated_factory(wait: Fault) -> CountingEnv:
    wait()
    return CountingEnv()


def licensed_factory(licence: str) -> CountingEnv:
    """Fails as long as there is no such file."""
    if not Path(licence).exists():
        raise FileNotFoundError(licence)
    return CountingEnv()


class OtherSpaceEnv(CountingEnv):
    observation_space = gym.spaces.Box(-1, 1, (7,), np.float32)


class ChildfulEnv(CountingEnv):
    """Starts a process of its own, as a simulator would, and writes its pid to a file in `folder`."""

    def __init__(self, env_id: int = 0, folder: str = "", **options: Any) -> None:
        super().__init__(env_id, **options)
        self.simulator = subprocess.Popen(["sleep", "3600"])
        Path(folder, f"{env_id}.pid").write_text(str(self.simulator.pid))


# -- envs and values of test_robustness -----------------------------------------------------------------


class Sleeper(CountingEnv):
    """Hangs where the action is 1."""

    def step(self, action: Any) -> Any:
        if action == 1:
            signal.pause()
        return super().step(action)


class FailingTwin(CountingEnv):
    """Always fails."""

    def step(self, action: Any) -> Any:
        return 1 // 0


class Scribbler(CountingEnv):
    """Writes into its action, and observes how long that became."""

    action_space = gym.spaces.Sequence(gym.spaces.Discrete(9))

    def step(self, action: Any) -> Any:
        action.append(0)
        self.env_id = len(action)
        return super().step(1)


class Unbuildable:
    """Can be pickled, but not rebuilt anywhere."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("cannot be rebuilt")


class PausingEnv(gym.Env[Any, Any]):
    """Sleeps, or computes, for some milliseconds a step.

    Args:
        sleeps: Whether it sleeps.
    """

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, sleeps: bool) -> None:
        self.sleeps = sleeps

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self.sleeps:
            time.sleep(0.008)
        else:
            end = time.process_time() + 0.008
            while time.process_time() < end:
                pass
        return 1, 0.0, False, False, {}
