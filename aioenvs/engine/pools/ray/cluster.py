"""The Ray cluster that pools share: joined by the first that needs one, left by the last."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from aioenvs.engine.waiting import hear, outlast
from aioenvs.errors import AioEnvsError

__all__ = ["Membership", "aside", "connected_ray", "import_ray", "join", "resources"]

T = TypeVar("T")

LOCAL = "local"
SHUT_DOWN = "Ray was shut down, and took the hosts of the envs with it"
PATIENCE = 10.0  # seconds in which a cluster has to take a connection
STORE = 256 * 2**20  # bytes of shared memory of a cluster of one machine
_lock = threading.Lock()


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
        raise AioEnvsError(SHUT_DOWN)
    return ray


async def aside(function: Callable[[], T]) -> T:
    """Call something that blocks in a thread of its own; cancelling it waits for its end."""
    with ThreadPoolExecutor(1, "aioenvs ray") as executor:
        called = asyncio.get_running_loop().run_in_executor(executor, function)
        called.add_done_callback(hear)  # who was cancelled does not ask for its result
        await outlast(called)
        return called.result()


def _connection(ray: Any) -> tuple[str, str]:
    """Return the mark that tells a connection to a cluster from former ones of this process."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


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
            connection = _connection(ray)
        except BaseException as error:
            self.joined.set_exception(error)
            return
        self.joined.set_result(None)
        self._told.wait()
        if ray.is_initialized() and _connection(ray) == connection:  # and not shut down by somebody else meanwhile
            ray.shutdown()

    def end(self) -> None:
        """End it, and wait for that."""
        self._told.set()
        self._thread.join()


class _Cluster:
    """A cluster that this process is connected to, as long as that is so.

    Args:
        ray: The package, connected.
        keeper: Of what we joined, rather than the user.

    Attributes:
        users: How many pools need it.
    """

    def __init__(self, ray: Any, keeper: _Keeper | None) -> None:
        self.users = 0
        self.keeper = keeper
        self.is_local = keeper is not None and _address() == LOCAL
        self._ray = ray
        self._connection = _connection(ray)

    @property
    def is_connected(self) -> bool:
        """Whether the cluster is the one that calls go to."""
        return self._ray.is_initialized() and _connection(self._ray) == self._connection


_current: _Cluster | None = None


class Membership:
    """One pool's share in a cluster.

    Attributes:
        is_local: Whether the cluster was started on this machine for such pools, and for nothing else.
    """

    def __init__(self, cluster: _Cluster) -> None:
        cluster.users += 1
        self.is_local = cluster.is_local
        self._cluster: _Cluster | None = cluster

    @property
    def is_valid(self) -> bool:
        """Whether there still is such a cluster: somebody else may have shut it down."""
        return self._cluster is not None and self._cluster.is_connected

    def leave(self) -> None:
        """Do without the cluster; the last one ends what `join` has begun. Blocks for a moment then."""
        with _lock:
            cluster, self._cluster = self._cluster, None
            if cluster is None:
                return
            cluster.users -= 1
            if cluster.users == 0 and cluster.keeper is not None:
                cluster.keeper.end()


async def join(num_cpus: int) -> Membership:
    """Join the cluster that this process is connected to, or that RAY_ADDRESS names, or else start one here.

    Cancelling it waits until it has been joined, which nothing can keep Ray from, and leaves it.

    Args:
        num_cpus: How many CPUs one that is started has at least; they are what Ray counts, not what there is.

    Raises:
        AioEnvsError: If the cluster that RAY_ADDRESS names cannot be reached.
    """
    joined: list[Membership] = []
    try:
        await aside(lambda: joined.append(_join(num_cpus)))
    except BaseException:
        for membership in joined:
            await aside(membership.leave)
        raise
    return joined[0]


def _join(num_cpus: int) -> Membership:
    global _current
    ray = import_ray()
    with _lock:
        if not ray.is_initialized():
            keeper = _Keeper(num_cpus)
            keeper.joined.result()
            _current = _Cluster(ray, keeper)
        elif _current is None or not _current.is_connected:
            _current = _Cluster(ray, None)
        return Membership(_current)


def _address() -> str:
    """Where the cluster is that is to be joined."""
    return os.environ.get("RAY_ADDRESS", "") or LOCAL


def _connect(ray: Any, num_cpus: int) -> None:
    address = _address()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        most = max(num_cpus, os.cpu_count() or 1)
        ray.init(LOCAL, num_cpus=most, include_dashboard=False, object_store_memory=STORE, **quiet)
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


def resources() -> str:
    """Return the resources of the cluster, and those that are free, in words."""
    ray = import_ray()
    return f"it has {_in_words(ray.cluster_resources())}, of which {_in_words(ray.available_resources())} are free"


def _in_words(amounts: dict[str, float]) -> str:
    own = {name: amount for name, amount in sorted(amounts.items()) if not name.startswith("node:") and amount}
    counted = [f"{amount:g} {name}" for name, amount in own.items() if "memory" not in name]
    return ", ".join(counted) if counted else "nothing"
