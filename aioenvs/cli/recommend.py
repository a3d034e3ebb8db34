"""Which way of hosting envs suits them, decided from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Advice", "Measured", "Profile", "Setting", "duration", "recommend", "settings_to_try"]

MOST_TRIED = 64  # processes or threads; more of them take long to start, and envs that gain by them gain by these
GOOD_ENOUGH = 0.9  # of the best speed: not worth more processes


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

    Attributes:
        kind: "serial", "process", "thread", or "gymnasium" for its `AsyncVectorEnv`.
        count: Processes or threads; 0 for the calling process.
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
    """A setting with its measured speed, or why it failed.

    Attributes:
        setting: It.
        speeds: Env steps per second of each turn.
        failure: Why there are none, if so.
    """

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

    Args:
        profile: What is known of the env.
        num_workers: How many envs there shall be.
        cores: How many cores are available.
        num_processes: Which numbers of processes to try; None for 1, the powers of two up to the cores, the cores, and
            one for each env; for envs that wait, a few times the cores as well. Coroutine envs, which wait together
            within a process, get no more than the cores.
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

    Args:
        profile: What is known of the env.
        results: What was measured.
        num_workers: How many envs there are.
        cores: How many cores are available.

    Raises:
        ValueError: If no setting of aioenvs was measured.
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
