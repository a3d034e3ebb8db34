"""`aioenvs bench`: measures an env by itself, then several of it hosted in some ways, and recommends one."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from aioenvs.cli.report import print_table
from aioenvs.cli.targets import EXIT_INTERRUPTED, CommandError, describe, describe_failure, factory_named
from aioenvs.engine.adapters.gymnasium import has_coroutines
from aioenvs.engine.config import available_cores
from aioenvs.engine.worker.wait_meter import waiting_share
from aioenvs.errors import PerformanceWarning, shown

MOST_TRIED = 64  # processes or threads; more of them take long to start, and envs that gain by them gain by these
GOOD_ENOUGH = 0.9  # of the best speed: not worth more processes
TURNS = 3
WARM_UP_ROUNDS = 3

Round = Callable[[], object]


@dataclass(frozen=True)
class Profile:
    """One env by itself.

    Attributes:
        step_seconds: What a step takes, resets between episodes included.
        reset_seconds: What the first reset took.
        cpu_share: CPU time of the process over wall time, in steps.
        waits: Whether it gives up its core in most steps and spends most of their time so.
        observation_bytes: Size of one observation.
        is_gymnasium: Whether it is a `gymnasium.Env`.
        has_coroutines: Whether its `reset` or `step` is a coroutine function, so that many wait on one event loop.
    """

    step_seconds: float
    reset_seconds: float
    cpu_share: float
    waits: bool
    observation_bytes: int
    is_gymnasium: bool
    has_coroutines: bool = False


@dataclass(frozen=True)
class Setting:
    """One way of hosting some envs.

    Its kind is "serial", "process", "thread", or "gymnasium" for its `AsyncVectorEnv`; it has so many processes or
    threads, 0 for the calling process.
    """

    kind: str
    count: int = 0

    @property
    def cost(self) -> tuple[int, int]:
        """Return the rank by simplicity: no process before some, few before many; threads count as one process."""
        return (0 if self.kind == "serial" else 1 if self.kind == "thread" else self.count, self.count)

    @property
    def label(self) -> str:
        """The name in a table."""
        if self.kind == "serial":
            return "serial"
        if self.kind == "gymnasium":
            return "Gymnasium AsyncVectorEnv"
        several = "processes" if self.kind == "process" else "threads"
        return f"1 {self.kind}" if self.count == 1 else f"{self.count} {several}"

    def text(self, num_workers: int) -> str:
        """How a setting of aioenvs is written in a program, without what makes the env."""
        if self.kind == "serial":
            return f"SerialEnv({num_workers}, ...)"
        backend = ', backend="thread"' if self.kind == "thread" else ""
        return f"ParallelEnv({num_workers}, ..., num_processes={self.count}{backend})"


@dataclass
class Measured:
    """A setting with the env steps per second of each turn, or why there are none."""

    setting: Setting
    speeds: list[float]
    failure: str | None = None

    @property
    def speed(self) -> float:
        """The median; 0 if there is none."""
        return median(self.speeds) if self.speeds and self.failure is None else 0.0


@dataclass(frozen=True)
class Advice:
    """A recommended setting, and the reason in a sentence."""

    setting: Setting
    reason: str


def settings_to_try(
    profile: Profile, num_workers: int, cores: int, num_processes: Sequence[int] | None = None
) -> list[Setting]:
    """Return the settings that are worth a trial.

    `num_processes` are the numbers of processes to try; None for 1, the powers of two up to the cores, the cores, and
    one for each env; for envs that wait, a few times the cores as well. Coroutine envs, which wait together within a
    process, get no more than the cores.
    """
    most = min(num_workers, MOST_TRIED)
    if num_processes is None:
        powers = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
        many = [] if profile.has_coroutines else [most, 4 * cores] if profile.waits else [most]
        num_processes = [*powers, cores, *many]
    settings = [Setting("serial")]
    settings += [Setting("process", count) for count in sorted({min(count, num_workers) for count in num_processes})]
    if profile.waits and not profile.has_coroutines:
        settings.append(Setting("thread", most))
    if profile.is_gymnasium and num_workers <= MOST_TRIED:
        settings.append(Setting("gymnasium", num_workers))
    return settings


def recommend(profile: Profile, results: Sequence[Measured], num_workers: int, cores: int) -> Advice:
    """Choose the simplest setting of those that are nearly as quick as the quickest.

    ValueError if no setting of aioenvs was measured.
    """
    own = [found for found in results if found.setting.kind != "gymnasium" and found.speed]
    if not own:
        raise ValueError("expected at least one setting that was measured, found none")
    quickest = max(own, key=lambda found: found.speed)
    near = [found for found in own if found.speed >= GOOD_ENOUGH * quickest.speed]
    best = min(near, key=lambda found: found.setting.cost)
    reason = _reason(profile, best.setting, num_workers, cores)
    gain = _gain(best, own)
    other = next((found for found in results if found.setting.kind == "gymnasium"), None)
    if other is not None and other.speed > best.speed:
        gain += f", though Gymnasium's AsyncVectorEnv has {other.speed / best.speed:.1f} times its speed here"
    return Advice(best.setting, f"{reason}{gain}.")


def _reason(profile: Profile, setting: Setting, num_workers: int, cores: int) -> str:
    step = duration(profile.step_seconds)
    if profile.has_coroutines and profile.waits and num_workers > 1:
        where = "your own process" if setting.kind == "serial" else setting.label
        return (
            f"a coroutine env that waits for {1 - profile.cpu_share:.0%} of its {step} a step lets others of its "
            f"process go on meanwhile, and {where} can host all {num_workers}"
        )
    if setting.kind == "serial":
        if num_workers == 1:
            return f"there is only one env, and its step of {step} gains nothing by another process"
        if cores == 1 and not profile.waits:
            return "there is one core, which one process keeps busy"
        return f"a step takes {step}, so that messages to other processes would cost more than they save"
    if profile.waits:
        together = "in threads" if setting.kind == "thread" else "in processes"
        return f"the env waits for {1 - profile.cpu_share:.0%} of its {step} a step, and {together} they wait together"
    if setting.count < cores and setting.count < num_workers:
        noun = "process does" if setting.count == 1 else "processes do"
        return f"{setting.count} {noun} as well as one for each of the {cores} cores"
    if setting.count <= cores:
        noun = "process keeps its core" if setting.count == 1 else "processes keep their cores"
        return f"the env computes for its {step} a step, and {setting.count} {noun} busy with few messages"
    return f"more processes than the {cores} cores were quicker with steps of {step}, which then overlap"


def _gain(best: Measured, own: Sequence[Measured]) -> str:
    serial = next((found for found in own if found.setting.kind == "serial"), None)
    if serial is None or serial is best:
        return ""
    return f": {best.speed / serial.speed:.1f} times the speed of SerialEnv"


def duration(seconds: float) -> str:
    """Write a duration with a unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


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
    """Build one env in this process, step it with random actions for some seconds, and close it."""
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
    """Start all settings, and let them take turns, all turns of each so many seconds together; `show` is told of it.

    Those that fail take no further turns; the result says why. Leaving the generator closes all envs.

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


@dataclass(frozen=True)
class BenchOptions:
    """The options of ``aioenvs bench``; None leaves a choice to it."""

    target: str
    num_workers: int = 8
    num_processes: Sequence[int] | None = None
    seconds: float = 1.5


def bench(options: BenchOptions) -> int:
    """Carry out ``aioenvs bench``; returns the exit code.

    CommandError if the env is not there, or does not run.
    """
    factory, cores = factory_named(options.target), available_cores()
    results: list[Measured] = []
    try:
        with _progress() as show:
            show("measuring one env by itself")
            profile = _guarded(lambda: profile_of(factory, min(1.0, options.seconds)))
            settings = settings_to_try(profile, options.num_workers, cores, options.num_processes)
            with contextlib.closing(try_all(factory, options.num_workers, settings, options.seconds, show)) as turns:
                for results in turns:  # noqa: B007  the last one counts, or the one before an interrupt
                    pass
    except KeyboardInterrupt:
        if any(found.speeds for found in results):
            _print_results(options, results, None)
        return EXIT_INTERRUPTED
    if not any(found.speed for found in results if found.setting.kind != "gymnasium"):
        raise CommandError(f"no setting could be measured: {results[0].failure}")
    print_table(f"one env of {options.target}", profile_rows(profile, cores))
    _print_results(options, results, recommend(profile, results, options.num_workers, cores))
    return 0


def _guarded(measure: Callable[[], Profile]) -> Profile:
    try:
        return measure()
    except Exception as error:  # whatever the env raises
        raise CommandError(f"the env does not run: {describe_failure(error)}") from error


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line on a terminal, and nothing elsewhere."""
    if not sys.stdout.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, TextColumn

    # Redrawn when there is something new: no thread that could be left over after an interrupt, or be forked.
    with Progress(TextColumn("{task.description}"), console=Console(), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=escape(text), refresh=True)


def profile_rows(profile: Profile, cores: int) -> list[tuple[str, str]]:
    """Return the names and values of what is known of one env."""
    kind = "waits" if profile.waits else "computes"
    return [
        ("step", duration(profile.step_seconds)),
        ("CPU share of a step", f"{profile.cpu_share:.0%}: it {kind}"),
        ("first reset", duration(profile.reset_seconds)),
        ("observation", f"{profile.observation_bytes:,} bytes"),
        ("cores", str(cores)),
    ]


def result_rows(results: Sequence[Measured], advice: Advice | None) -> list[tuple[str, ...]]:
    """Return, for each setting, a mark, its text, env steps per second, the range, and the ratio to serial."""
    serial = next((found.speed for found in results if found.setting.kind == "serial"), 0.0)
    rows: list[tuple[str, ...]] = []
    for found in results:
        mark = "→" if advice is not None and found.setting == advice.setting else ""
        text = found.setting.label
        if not found.speed:
            rows.append((mark, text, "failed", found.failure or "", ""))
            continue
        spread = f"{min(found.speeds):,.0f} - {max(found.speeds):,.0f}"
        times = f"{found.speed / serial:.2f}" if serial else ""
        rows.append((mark, text, f"{found.speed:,.0f}", spread, times))
    return rows


def _print_results(options: BenchOptions, results: Sequence[Measured], advice: Advice | None) -> None:
    suffix = "" if advice is not None else " (interrupted)"
    header = ("", "setting", "env steps/s", "min - max", "x serial")
    print_table(f"{options.num_workers} envs of {options.target}{suffix}", result_rows(results, advice), header)
    if advice is not None:
        from rich.console import Console

        text = f"Recommended: {advice.setting.text(options.num_workers)}: {advice.reason}"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
