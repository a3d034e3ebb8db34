"""The configuration of a batch: the arguments, checked, and how many processes the machine suggests."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aioenvs.engine.adapters.base import PLAIN_RULES, GymRules
from aioenvs.engine.worker.commands import HostOptions
from aioenvs.errors import shown
from aioenvs.registry import find_spec

__all__ = ["BatchConfig", "Timeouts", "available_cores"]

BACKENDS = ("process", "thread", "serial", "ray")
REPLACED = ("process", "ray")  # those whose workers can die alone
START_METHODS = ("forkserver", "spawn", "fork")
ON_WORKER_DEATH = ("raise", "restart")
OWN_RAY_OPTIONS = frozenset(
    (
        *("max_restarts", "max_task_retries", "max_concurrency", "max_pending_calls", "concurrency_groups"),
        *("lifetime", "name", "namespace", "get_if_exists", "allow_out_of_order_execution"),
    )
)
ENV_METHODS = ("reset", "step")
STARTS_PER_CORE = 4  # fresh interpreters that import at the same time; more of them would only slow each other down


@dataclass(frozen=True)
class Timeouts:
    """How long things may take, in seconds; None for as long as they like.

    Attributes:
        start: From ordering a process to its envs being built.
        step: Any other command that does not say otherwise.
        close: Closing all envs, before the processes are killed.
    """

    start: float | None = 60.0
    step: float | None = None
    close: float = 5.0


@dataclass(frozen=True)
class BatchConfig:
    """Checked arguments of a batched env.

    Attributes:
        factories: One per env: a callable, a Gymnasium id or an `EnvSpec`.
        kwargs: Keyword arguments for each factory.
        groups: The envs of each process or thread.
        share_individual_td: Whether results are lazy stacks; None where they have to be.
        use_buffers: Whether tensors go through the shared block where they can; None for the same.
        on_disk: Whether the block is a file.
        num_threads: Threads of torch in this process while the envs are open; None to leave them alone.
        num_sub_threads: Threads of torch in each worker.
        max_restarts: How often a worker that died is restarted unasked; None for never.
        max_concurrency: How many envs of a process or thread may be inside a reset or step at once, if they have
            coroutines; None for all.
        pin_memory: Whether the block is pinned; None where results go to a device that gains by it.
        non_blocking: Whether results are returned while they still cross to a device; False for when they are there.
        rules: What is agreed about envs with Gymnasium's signatures.
        ray_options: What Ray is asked for, for each host.
    """

    factories: tuple[Any, ...]
    kwargs: tuple[Mapping[str, Any], ...]
    groups: tuple[tuple[int, ...], ...]
    backend: str
    start_method: str
    timeouts: Timeouts
    share_individual_td: bool | None = None
    use_buffers: bool | None = None
    on_disk: bool = False
    num_threads: int | None = None
    num_sub_threads: int = 1
    max_restarts: int | None = None
    max_concurrency: int | None = None
    pin_memory: bool | None = None
    non_blocking: bool | None = None
    rules: GymRules = PLAIN_RULES
    ray_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        num_workers: int,
        create_env_fn: Any,
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        num_processes: int | None = None,
        backend: str = "process",
        mp_start_method: str | None = None,
        timeouts: Timeouts | None = None,
        shared_memory: bool | None = None,
        memmap: bool = False,
        allow_step_when_done: bool = False,
        on_worker_death: str = "raise",
        max_restarts: int = 10,
        ray_options: Mapping[str, Any] | None = None,
        called: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> BatchConfig:
        """Check the arguments of a batched env; the options are further attributes.

        The names by which the caller knows arguments are in `called`, where they are others than here: messages have
        those.

        Raises:
            TypeError: If a factory is an env, or anything else that cannot make one.
            ValueError: If a number or a name is out of range.
            RuntimeError: If a list has another length than there are envs.
            NotImplementedError: For worker processes on Windows.
        """
        _check_count(called.get("num_workers", "num_workers"), num_workers)
        for name in ("num_threads", "num_sub_threads", "max_concurrency"):
            if options.get(name) is not None:
                _check_count(name, options[name])
        for name in ("pin_memory", "non_blocking"):
            if not isinstance(options.get(name), bool | None):
                raise TypeError(f"{name} must be True, False or None, got {shown(options[name])}")
        if allow_step_when_done:
            raise ValueError(
                "allow_step_when_done is deprecated in TorchRL and not supported here: an env whose episode is over "
                "needs a reset; use step_and_maybe_reset, or a reset with a mask"
            )
        return cls(
            factories=_factories(num_workers, create_env_fn, called.get("create_env_fn", "create_env_fn")),
            kwargs=_kwargs(num_workers, create_env_kwargs, "create_env_kwargs"),
            groups=_groups(num_workers, num_processes, _choice("backend", backend, BACKENDS)),
            backend=backend,
            start_method=_start_method(backend, mp_start_method, called.get("mp_start_method", "mp_start_method")),
            timeouts=_check_timeouts(timeouts or Timeouts()),
            on_disk=_on_disk(memmap, shared_memory),
            max_restarts=_max_restarts(backend, on_worker_death, max_restarts),
            ray_options=_ray_options(backend, ray_options),
            **options,
        )

    def with_kwargs(self, given: Any) -> BatchConfig:
        """Return a copy with other keyword arguments; those that are not given stay.

        Raises:
            TypeError: If they are neither a dict nor a list of dicts.
            RuntimeError: If the list has another length than there are envs.
        """
        changes = _kwargs(len(self.factories), given, "kwargs")
        return replace(self, kwargs=tuple({**old, **new} for old, new in zip(self.kwargs, changes, strict=True)))

    def host_options(self) -> HostOptions:
        """Return the options that whoever hosts envs gets to know."""
        return HostOptions(
            num_threads=self.num_sub_threads,
            by_reference=self.use_buffers is False,
            max_concurrency=self.max_concurrency,
            rules=self.rules,
        )

    @property
    def starts_at_once(self) -> int:
        """How many hosts may be starting at the same time."""
        return STARTS_PER_CORE * available_cores() if self.start_method == "spawn" else len(self.groups)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    if not 1 <= value <= 65535:
        raise ValueError(f"{name} must be between 1 and 65535, got {value}")


def _on_disk(memmap: bool, shared_memory: bool | None) -> bool:
    if memmap and shared_memory:
        raise RuntimeError(
            "memmap and shared memory are mutually exclusive features; give memmap=True or shared_memory=True, not both"
        )
    return memmap or shared_memory is False


def _check_timeouts(timeouts: Timeouts) -> Timeouts:
    for name, value in (("start", timeouts.start), ("step", timeouts.step), ("close", timeouts.close)):
        if value is None and name != "close":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name}_timeout must be a positive number of seconds, got {shown(value)}")
    return timeouts


def _max_restarts(backend: str, on_worker_death: str, max_restarts: Any) -> int | None:
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts must be an integer of at least 0, got {shown(max_restarts)}")
    if _choice("on_worker_death", on_worker_death, ON_WORKER_DEATH) == "raise":
        return None
    if backend not in REPLACED:
        raise TypeError(f"on_worker_death={shown(on_worker_death)} has no meaning for envs that run in this process")
    return max_restarts


def _ray_options(backend: str, given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if backend != "ray":
        raise TypeError(f"ray_options={shown(given)} has no meaning without backend='ray'")
    if not isinstance(given, Mapping):
        raise TypeError(f"ray_options must be a dict, got {shown(given)}")
    if taken := sorted(set(given) & OWN_RAY_OPTIONS):
        raise ValueError(
            f"ray_options may not have {taken[0]!r}: hosts belong to their envs, which restart them (on_worker_death) "
            "and end them"
        )
    num_cpus = given.get("num_cpus", 1)
    if isinstance(num_cpus, bool) or not isinstance(num_cpus, int | float) or num_cpus < 0:
        raise ValueError(f"num_cpus in ray_options must be a number of at least 0, got {shown(num_cpus)}")
    return dict(given)


def _choice(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")
    return value


def _start_method(backend: str, method: str | None, name: str) -> str:
    if backend != "process":
        if method is not None:
            where = "in actors of Ray" if backend == "ray" else "in this process"
            raise TypeError(f"{name}={shown(method)} has no meaning for envs that run {where}")
        return ""
    if sys.platform == "win32":
        raise NotImplementedError(
            "worker processes need Linux or macOS; on Windows use SerialEnv or AsyncSerialEnv, or WSL"
        )
    if method is not None and method not in START_METHODS:
        choices = ", ".join(map(repr, START_METHODS))
        raise ValueError(f"cannot find context for {shown(method)}: {name} must be one of {choices}")
    return START_METHODS[0] if method is None else method


def _factories(num_workers: int, create_env_fn: Any, name: str) -> tuple[Any, ...]:
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if len(create_env_fn) != num_workers:
            raise RuntimeError(
                f"len({name}) and num_workers mismatch: num_workers is {num_workers}, but {name} is a list of "
                f"{len(create_env_fn)}; give one factory for all, or one for each"
            )
        return tuple(_factory(fn, name) for fn in create_env_fn)
    return (_factory(create_env_fn, name),) * num_workers


def _factory(fn: Any, name: str) -> Any:
    if all(callable(getattr(fn, method, None)) for method in ENV_METHODS) and not isinstance(fn, type):
        raise TypeError(
            f"{name} must make an env, but {shown(fn)} is one; every worker needs an env of its own: "
            "give a function that returns it, such as lambda: ..."
        )
    if isinstance(fn, str):
        return find_spec(fn)
    if callable(fn) or type(fn).__name__ == "EnvSpec":
        return fn
    raise TypeError(f"{name} must be a callable, a Gymnasium id, or a list of those, got {shown(fn)}")


def _kwargs(num_workers: int, given: Any, name: str) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ({},) * num_workers
    if isinstance(given, Mapping):
        return (dict(given),) * num_workers
    if not isinstance(given, Sequence) or not all(isinstance(kwargs, Mapping) for kwargs in given):
        raise TypeError(f"{name} must be a dict, or a list of one dict for each env, got {shown(given)}")
    if len(given) != num_workers:
        raise RuntimeError(
            f"len({name}) and num_workers mismatch: num_workers is {num_workers}, but {name} is a list of "
            f"{len(given)}; give one dict for all, or one for each"
        )
    return tuple(dict(kwargs) for kwargs in given)


def _groups(num_workers: int, num_processes: int | None, backend: str) -> tuple[tuple[int, ...], ...]:
    if backend == "serial" and num_processes is not None:
        raise TypeError(f"num_processes={shown(num_processes)} has no meaning for envs that run one after the other")
    if num_processes is None:  # threads are for envs that wait, and those do it best all at once
        num_processes = num_workers if backend == "thread" else min(num_workers, available_cores())
    _check_count("num_processes", num_processes)
    if num_processes > num_workers:
        raise ValueError(f"num_processes is {num_processes}, more than the {num_workers} envs there are to host")
    bounds = [num_workers * process // num_processes for process in range(num_processes + 1)]
    return tuple(tuple(range(low, high)) for low, high in itertools.pairwise(bounds))


def available_cores() -> int:
    """Cores that this process may use: its affinity and, on Linux, its cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min(cores, int(quota) if quota is not None else cores))


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """Cores granted by the quota of cgroup v2, or of v1, whichever the system has."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    path = next((line.split("::", 1)[1].strip("/") for line in lines if line.startswith("0::")), "")
    quotas = [
        _v2_quota(folder / "cpu.max")
        for folder in (root / path, *(root / path).parents)
        if root in (folder, *folder.parents)
    ]
    quotas.append(_v1_quota(root / "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _v2_quota(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _v1_quota(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
