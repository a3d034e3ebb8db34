"""Factories on their way to the workers that will call them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle

from aioenvs.engine.failure import summary
from aioenvs.engine.worker import WorkerConfig
from aioenvs.errors import WorkerStartError, shown

__all__ = ["pack"]

SCRIPT = (
    "__mp_main__"  # what `multiprocessing` calls the script in a process that it spawned; nobody else can import it
)


def pack(
    factories: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]],
    groups: Sequence[tuple[int, ...]],
    *,
    inherited: bool,
    **options: Any,
) -> list[WorkerConfig]:
    """What each worker has to know to build its envs.

    Args:
        factories: One per env.
        kwargs: Keyword arguments for each.
        groups: The envs of each worker; others are left alone.
        inherited: Whether workers have the factories already, as forks of this process.
        **options: Further fields of `WorkerConfig`.

    Raises:
        WorkerStartError: If a factory cannot be pickled.
    """
    if (script := sys.modules.get(SCRIPT)) is not None:
        cloudpickle.register_pickle_by_value(script)
    registry = None if inherited else _own_registrations()
    return [
        WorkerConfig(
            group,
            tuple(b"" if inherited else _pickle(env, factories[env], kwargs[env]) for env in group),
            registry=registry,
            **options,
        )
        for group in groups
    ]


def _pickle(env: int, factory: Any, kwargs: Mapping[str, Any]) -> bytes:
    try:
        data: bytes = cloudpickle.dumps((factory, dict(kwargs)))
    except Exception as error:
        raise WorkerStartError(
            f"{_culprit(env, factory, kwargs)} cannot be pickled for a worker ({summary(error)}); give a factory "
            "that builds by itself what cannot be pickled, or use mp_start_method='fork'",
            env_index=[env],
        ) from error
    return data


def _culprit(env: int, factory: Any, kwargs: Mapping[str, Any]) -> str:
    """Which part of what makes an env cannot be pickled, in words."""
    for name, value in kwargs.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"the argument {name!r} for the factory of env {env}, {shown(value)},"
    return f"the factory of env {env}, {shown(factory)},"


def _own_registrations() -> bytes | None:
    """Gymnasium ids that this process knows and a fresh one would not."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return None
    own = {}
    for name, spec in gymnasium.registry.items():
        entry = spec.entry_point
        if (entry if isinstance(entry, str) else str(getattr(entry, "__module__", ""))).startswith("gymnasium.envs"):
            continue
        try:
            cloudpickle.dumps(spec)
        except Exception:
            continue
        own[name] = spec
    return cloudpickle.dumps(own) if own else None
