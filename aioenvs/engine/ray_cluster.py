"""The Ray cluster that pools share: joined by the first that needs one, left by the last."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from aioenvs.engine.deadlines import outlast
from aioenvs.errors import AioEnvsError

__all__ = ["aside", "connected_ray", "import_ray", "join", "leave", "resources"]

T = TypeVar("T")

PATIENCE = 10.0  # seconds in which a cluster has to take a connection
STORE = 256 * 2**20  # bytes of shared memory of a cluster of one machine
_lock = threading.Lock()
_users = 0
_keeper: _Keeper | None = None  # of what we joined, rather than the user


def import_ray() -> Any:
    """The package.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"backend='ray' needs Ray: install aioenvs[ray] ({error})", name="ray") from error
    return ray


def connected_ray() -> Any:
    """The package, as long as it is connected to a cluster: asked for something otherwise, it would join one.

    Raises:
        AioEnvsError: If it is not, any more.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise AioEnvsError("Ray was shut down, and took the hosts of the envs with it")
    return ray


async def aside(function: Callable[[], T]) -> T:
    """Call something that blocks in a thread of its own; cancelling it waits for its end."""
    with ThreadPoolExecutor(1, "aioenvs ray") as executor:
        called = asyncio.get_running_loop().run_in_executor(executor, function)
        await outlast(called)
        return called.result()


class _Keeper:
    """Joins a cluster, and ends that when it is told to.

    This takes a thread that lives as long: what Ray starts on this machine dies with the thread that started it.
    """

    def __init__(self, num_cpus: int) -> None:
        self.joined: Future[None] = Future()
        self._num_cpus = num_cpus
        self._told = threading.Event()
        # A daemon, since Ray itself sees to an end that comes with the interpreter's.
        self._thread = threading.Thread(target=self._keep, name="aioenvs ray", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        ray = import_ray()
        try:
            _connect(ray, self._num_cpus)
        except BaseException as error:
            self.joined.set_exception(error)
            return
        self.joined.set_result(None)
        self._told.wait()
        ray.shutdown()

    def end(self) -> None:
        """End it, and wait for that."""
        self._told.set()
        self._thread.join()


async def join(num_cpus: int) -> None:
    """Join the cluster that this process is connected to, or that RAY_ADDRESS names, or else start one here.

    Args:
        num_cpus: How many CPUs one that is started has at least; they are what Ray counts, not what there is.

    Raises:
        AioEnvsError: If the cluster that RAY_ADDRESS names cannot be reached.
    """
    await aside(functools.partial(_join, num_cpus))


def _join(num_cpus: int) -> None:
    global _users, _keeper
    ray = import_ray()
    with _lock:
        if not ray.is_initialized():
            keeper = _Keeper(num_cpus)
            keeper.joined.result()
            _keeper, _users = keeper, 0
        _users += 1


def _connect(ray: Any, num_cpus: int) -> None:
    address = os.environ.get("RAY_ADDRESS", "local")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address in ("", "local"):
        most = max(num_cpus, os.cpu_count() or 1)
        ray.init("local", num_cpus=most, include_dashboard=False, object_store_memory=STORE, **quiet)
        return
    try:
        _knock(address)
        ray.init(address, **quiet)
    except Exception as error:
        raise AioEnvsError(
            f"no Ray cluster could be reached at RAY_ADDRESS={address!r}: {error}; start one there, or unset it to "
            "have one started on this machine"
        ) from error


def _knock(address: str) -> None:
    """See whether anybody listens there, which Ray itself would wait for, for minutes.

    Raises:
        OSError: If nobody does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), PATIENCE).close()


def leave() -> None:
    """Say that one fewer needs the cluster; the last ends what `join` has begun. Blocks for a moment then."""
    global _users, _keeper
    with _lock:
        _users -= 1
        if _users == 0 and _keeper is not None:
            keeper, _keeper = _keeper, None
            keeper.end()


def resources() -> str:
    """What the cluster has, and what of it is free, in words."""
    ray = import_ray()
    return f"it has {_in_words(ray.cluster_resources())}, of which {_in_words(ray.available_resources())} are free"


def _in_words(amounts: dict[str, float]) -> str:
    own = {name: amount for name, amount in sorted(amounts.items()) if not name.startswith("node:") and amount}
    counted = [f"{amount:g} {name}" for name, amount in own.items() if "memory" not in name]
    return ", ".join(counted) if counted else "nothing"
