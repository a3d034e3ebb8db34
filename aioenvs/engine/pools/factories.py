"""Factories on their way to the workers that will call them.

What they share with this process stays shared: tensors in shared memory, and the locks, values, arrays, queues and
pipes of `multiprocessing`, are pickled as that and torch pickle them for a process that is being started, by name or by
descriptors, which travel beside the pickles. All else is a copy for each env.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import context
from typing import Any, NamedTuple, Self

import cloudpickle

from aioenvs.engine.adapters.copying import reducer_of
from aioenvs.engine.config import BatchConfig
from aioenvs.engine.failure import summary
from aioenvs.engine.worker.commands import WorkerConfig
from aioenvs.engine.worker.descriptors import Passed
from aioenvs.errors import WorkerStartError, shown

__all__ = ["Descriptors", "Shipment", "pickle_factories"]

SCRIPT = (
    "__mp_main__"  # what `multiprocessing` calls the script in a process that it spawned; nobody else can import it
)
WRAPPER = "CloudpickleWrapper"  # TorchRL's, Gymnasium's and SB3's class of things that pickle what is in them apart


class Descriptors:
    """Copies of the descriptors to which the pickles for some workers refer, until the workers have them.

    It is what `multiprocessing` takes for the process that is being started.
    """

    DupFd = Passed

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int, int], int] = {}
        self._used: list[int] = []  # by the worker whose factories are being pickled, in the order of their numbers

    def begin(self) -> None:
        """Begin with the next worker, which has numbers of its own."""
        self._used = []

    @property
    def used(self) -> tuple[int, ...]:
        """The descriptors that the worker has to get, by number."""
        return tuple(self._used)

    def duplicate_for_child(self, fd: int) -> int:
        """Return the number of a descriptor; `multiprocessing` calls this."""
        found = os.fstat(fd)
        key = fd, found.st_dev, found.st_ino  # another may have come in its place while things were being pickled
        if key not in self._copies:
            self._copies[key] = os.dup(fd)
        copy = self._copies[key]
        if copy not in self._used:
            self._used.append(copy)
        return self._used.index(copy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for copy in self._copies.values():
            os.close(copy)
        self._copies.clear()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have all that is pickled in this thread travel with these descriptors."""
        before = context.get_spawning_popen()
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            context.set_spawning_popen(before)


class Shipment(NamedTuple):
    """The configuration and descriptors that a worker gets when it is started.

    Attributes:
        config: What it has to know.
        descriptors: Those that the pickles in it refer to.
    """

    config: WorkerConfig
    descriptors: tuple[int, ...] = ()


def pickle_factories(
    batch: BatchConfig,
    groups: Mapping[int, tuple[int, ...]],
    *,
    inherited: bool,
    descriptors: Descriptors | None,
    replaces: bool,
) -> list[Shipment]:
    """Return the configuration from which each worker builds its envs.

    Args:
        batch: What was asked for.
        groups: The envs of each worker that is to be started, by its number.
        inherited: Whether workers have the factories already, as forks of this process.
        descriptors: Gets those that have to be sent along; None where workers may be on another machine.
        replaces: See `WorkerConfig`.

    Raises:
        WorkerStartError: If a factory cannot be pickled, or shares what workers cannot.
    """
    if (script := sys.modules.get(SCRIPT)) is not None:
        cloudpickle.register_pickle_by_value(script)
    registry = None if inherited else _own_registrations()
    shipments, options = [], batch.host_options()
    for number, group in groups.items():
        if descriptors is not None:
            descriptors.begin()
        pickles = (
            b"" if inherited else _pickle(env, batch.factories[env], batch.kwargs[env], descriptors) for env in group
        )
        config = WorkerConfig(
            group, tuple(pickles), registry=registry, options=options, number=number, replaces=replaces
        )
        shipments.append(Shipment(config, () if descriptors is None else descriptors.used))
    return shipments


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves shared what is shared.

    Args:
        file: Where to.
        shares: Whether it may be; else it is refused.
    """

    def __init__(self, file: io.BytesIO, *, shares: bool) -> None:
        super().__init__(file)
        self._shares = shares

    def reducer_override(self, thing: Any) -> Any:
        """Return the reduction of a thing for the pickle."""
        if _pickles_apart(thing):
            return _filled, (type(thing), thing.__dict__)
        reduce = reducer_of(thing)
        if reduce is None:
            return super().reducer_override(thing)
        if not self._shares:
            raise TypeError(
                f"it shares a {type(thing).__name__} with this process, which workers on other machines cannot; give "
                "them a copy, such as tensor.clone()"
            )
        return reduce(thing)


def _pickles_apart(thing: Any) -> bool:
    """Whether a thing would pickle what is in it by itself, where nothing is known of what is shared."""
    return type(thing).__name__ == WRAPPER or bool(getattr(type(thing), "_pickles_apart", False))


def _filled(cls: Any, state: Mapping[str, Any]) -> Any:
    thing = cls.__new__(cls)
    thing.__dict__.update(state)
    return thing


def _dumps(value: Any, descriptors: Descriptors | None) -> bytes:
    file = io.BytesIO()
    if descriptors is None:
        _Pickler(file, shares=False).dump(value)
    else:
        with descriptors.in_use():
            _Pickler(file, shares=True).dump(value)
    return file.getvalue()


def _pickle(env: int, factory: Any, kwargs: Mapping[str, Any], descriptors: Descriptors | None) -> bytes:
    try:
        return _dumps((factory, dict(kwargs)), descriptors)
    except Exception as error:
        advice = "give a factory that builds by itself what cannot be pickled, or use mp_start_method='fork'"
        if "fork context" in str(error):  # the words of `multiprocessing`, about what has no name any more
            advice = (
                "make it of multiprocessing.get_context('spawn'), whose locks, values and queues all start methods "
                "can share, or use mp_start_method='fork'"
            )
        raise WorkerStartError(
            f"{_culprit(env, factory, kwargs)} cannot be pickled for a worker ({summary(error)}); {advice}",
            env_index=[env],
        ) from error


def _culprit(env: int, factory: Any, kwargs: Mapping[str, Any]) -> str:
    """Which part of what makes an env cannot be pickled, in words."""
    for name, value in kwargs.items():
        try:
            with Descriptors() as descriptors:
                _dumps(value, descriptors)
        except Exception:
            return f"the argument {name!r} for the factory of env {env}, {shown(value)},"
    return f"the factory of env {env}, {shown(factory)},"


def _own_registrations() -> dict[str, bytes] | None:
    """Gymnasium ids that this process knows and a fresh one would not, each pickled by itself."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return None
    own: dict[str, bytes] = {}
    for name, spec in gymnasium.registry.items():
        entry = spec.entry_point
        if (entry if isinstance(entry, str) else str(getattr(entry, "__module__", ""))).startswith("gymnasium.envs"):
            continue
        with contextlib.suppress(Exception):  # what cannot be sent is missed only by who makes it
            own[name] = cloudpickle.dumps(spec)
    return own or None
