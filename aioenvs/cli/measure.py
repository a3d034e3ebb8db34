"""Measures an env by itself, and some ways of hosting several of it, taking turns."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from aioenvs.cli.errors import describe
from aioenvs.cli.recommend import Measured, Profile, Setting
from aioenvs.engine.adapters.gymnasium import has_coroutines
from aioenvs.engine.worker.wait_meter import waiting_share
from aioenvs.errors import PerformanceWarning, shown

__all__ = ["profile_of", "size_of", "try_all"]

TURNS = 3
WARM_UP_ROUNDS = 3

Round = Callable[[], object]


def size_of(value: Any) -> int:
    """Return the bytes of an observation: of arrays and tensors what their elements take, of text its characters."""
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(size_of, value))
    if isinstance(value, str | bytes):
        return len(value)
    if (count := getattr(value, "nbytes", None)) is not None:
        return int(count)
    return 8 if isinstance(value, int | float) else 0


def profile_of(factory: Any, seconds: float) -> Profile:
    """Build one env in this process, step it with random actions for some seconds, and close it.

    Args:
        factory: What `SerialEnv` takes.
        seconds: How long.

    Raises:
        Exception: What the env, or what makes it, raised.
    """
    with _one_env(factory) as (env, awaits):
        began = time.perf_counter()
        is_tensor_env = awaits or hasattr(env, "output_spec")
        step, size = _tensor_stepper(env) if is_tensor_env else _stepper(env)
        reset_seconds = time.perf_counter() - began
        step()
        wall, cpu, pauses, steps = _timed(step, seconds)
    waits = waiting_share(wall, cpu, pauses, steps) > 0
    return Profile(wall / steps, reset_seconds, min(1.0, cpu / wall), waits, size, not is_tensor_env, awaits)


@contextlib.contextmanager
def _one_env(factory: Any) -> Iterator[tuple[Any, bool]]:
    """An env, and whether it is a coroutine env: then it is stepped and closed on a loop, and deals in TensorDicts."""
    env = _build(factory)
    if has_coroutines(env):
        with _on_a_loop(env) as batch:
            yield batch, True
        return
    if has_coroutines(inner := getattr(env, "unwrapped", env)):
        with _on_a_loop(inner):
            raise TypeError(
                f"expected a coroutine env without plain wrappers, found {shown(env)}: pass what makes the env "
                "itself, or register it with disable_env_checker=True and order_enforce=False"
            )
    try:
        yield env, False
    finally:
        env.close()


@contextlib.contextmanager
def _on_a_loop(env: Any) -> Iterator[Any]:
    """The coroutine env on a loop of its own, which closes it, too."""
    from aioenvs import SerialEnv

    batch = SerialEnv(1, lambda: env)
    try:
        batch.start()
        yield batch
    finally:
        batch.close(raise_if_closed=False)


def _build(factory: Any) -> Any:
    if callable(factory):
        return factory()
    import gymnasium

    return gymnasium.make(factory)


def _stepper(env: Any) -> tuple[Round, int]:
    observation, _ = env.reset(seed=0)
    env.action_space.seed(0)

    def step() -> None:
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()

    return step, size_of(observation)


def _tensor_stepper(env: Any) -> tuple[Round, int]:
    td = env.reset()
    done = set(env.done_keys)
    return _random_steps(env, td), sum(size_of(td[key]) for key in td.keys(True, True) if key not in done)


def _random_steps(env: Any, td: Any) -> Round:
    """Steps with random actions from a root on."""

    def step() -> None:
        nonlocal td
        _, td = env.step_and_maybe_reset(env.rand_action(td))

    return step


def _timed(step: Round, seconds: float) -> tuple[float, float, int, int]:
    """Wall seconds, CPU seconds, pauses, and how many steps that was."""
    steps, pauses = 0, resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    cpu, began = time.process_time(), time.perf_counter()
    while (wall := time.perf_counter() - began) < seconds or not steps:
        step()
        steps += 1
    cpu = time.process_time() - cpu
    return wall, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - pauses, steps


def try_all(
    factory: Any, num_workers: int, settings: Sequence[Setting], seconds: float, show: Callable[[str], None]
) -> Generator[list[Measured], None, None]:
    """Start all settings, and let them take turns.

    Those that fail take no further turns; the result says why. Leaving the generator closes all envs.

    Args:
        factory: What a batched env takes.
        num_workers: How many envs each setting has.
        settings: The settings.
        seconds: How long each is stepped, all turns together.
        show: Is told what happens.

    Yields:
        What is known after each turn of all, one for each setting: the same list each time.
    """
    results = [Measured(setting, []) for setting in settings]
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # the settings that it would warn of are here on purpose
        rounds: dict[int, Round] = {}
        # Gymnasium forks this process: first, while it has no pipes and threads of the others.
        for index in sorted(range(len(settings)), key=lambda index: settings[index].kind != "gymnasium"):
            show(f"starting {settings[index].label}")
            with _noting_failure(results[index]):
                rounds[index] = stack.enter_context(_started(settings[index], factory, num_workers))
        for turn in range(TURNS):
            for index, step in rounds.items():
                show(f"turn {turn + 1} of {TURNS}: {settings[index].label}")
                if results[index].failure is None:
                    with _noting_failure(results[index]):
                        results[index].speeds.append(_speed(step, num_workers, seconds / TURNS))
            yield results


@contextlib.contextmanager
def _noting_failure(result: Measured) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever an env or another library raises
        result.failure = describe(error)


def _speed(step: Round, num_workers: int, seconds: float) -> float:
    """Env steps per second; of a round that takes longer than all of this should, there is only one."""
    began = time.perf_counter()
    for _ in range(WARM_UP_ROUNDS):
        step()
        if (elapsed := time.perf_counter() - began) >= seconds:
            return num_workers / elapsed
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not count:
        step()
        count += 1
    return count * num_workers / elapsed


@contextlib.contextmanager
def _started(setting: Setting, factory: Any, num_workers: int) -> Iterator[Round]:
    """The envs of a setting, running within the block: a function that steps all of them once."""
    if setting.kind == "gymnasium":
        with _vector_env(factory, num_workers) as step:
            yield step
        return
    from aioenvs import ParallelEnv, SerialEnv

    if setting.kind == "serial":
        env: Any = SerialEnv(num_workers, factory)
    else:
        env = ParallelEnv(num_workers, factory, num_processes=setting.count, backend=setting.kind)
    try:
        yield _random_steps(env, env.reset())
    finally:
        env.close(raise_if_closed=False)


@contextlib.contextmanager
def _vector_env(factory: Any, num_workers: int) -> Iterator[Round]:
    """Gymnasium's vector env with a process for each env, and the same meaning of a step."""
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    with _deaf_children():
        env = AsyncVectorEnv([lambda: _build(factory)] * num_workers, autoreset_mode=AutoresetMode.SAME_STEP)
    try:
        env.reset(seed=0)
        env.action_space.seed(0)
        yield lambda: env.step(env.action_space.sample())
    except BaseException:
        for process in env.processes:  # a worker in the midst of a step would not hear that it shall close
            process.kill()
            process.join()
        env.closed = True
        raise
    env.close()


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Children that are made within the block leave Ctrl-C to their parent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
