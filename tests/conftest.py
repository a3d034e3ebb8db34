"""Fixtures for all tests; their names and meaning are stable.

face           each kind of host in turn (see `faces.py`): this process, worker processes that have several envs or one
               each, and threads; async and sync
process_face   the two of them that have worker processes
async_face     envs in processes of both kinds, async
any_loop       name it to run an async test on uvloop as well as on asyncio's own loop
backend        a `device_backends.FakeBackend`; what the test still holds back is let through at its end
gate           a `failing_envs.Gate`: an env can wait there, and the test lets it through
no_leaks       (always on) fails a test that leaves processes, threads, descriptors or shared memory, or for which an
               event loop logs an error of a task of aioenvs, such as an exception that nobody heard of

The launchers that the engine keeps for the whole session are no leak; the workers below them are.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from device_backends import FakeBackend
from faces import ASYNC_PROCESS_FACES, FACES, PROCESS_FACES, Face
from failing_envs import Gate
from oracle import start_what_torchrl_shares
from processes import children, still_alive
from tiers import EVERY_COMBINATION, beyond_covering, beyond_one_face

from aioenvs.engine.pools import launching as process

# A program that needs a library which only few have.
collect_ignore = [] if importlib.util.find_spec("openenv") else ["openenv_cartpole.py"]

PATIENCE = 2.0  # seconds that what was just closed gets to vanish
PACKAGE = f"{Path(process.__file__).parents[1]}{os.sep}"
DESCRIPTORS = Path("/proc/self/fd")
SHARED_MEMORY = Path("/dev/shm")

# Where this variable is set, as in images of containers, pytest would rewrite all test modules in each run, and every
# interpreter that a test starts would compile the package, and whatever was installed without its bytecode, once more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        f"--{EVERY_COMBINATION.replace('_', '-')}",
        action="store_true",
        help="run tests of several parameters with all combinations of their values, see tests/tiers.py",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(EVERY_COMBINATION) or config.getoption("keyword"):  # or a case asked for may not be there
        return
    dropped = set()
    for item in beyond_covering(items):
        if item.get_closest_marker(EVERY_COMBINATION):
            item.add_marker(pytest.mark.slow)
        else:
            dropped.add(item)
    items[:] = [item for item in items if item not in dropped]
    for item in beyond_one_face(items):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Send workers what test modules define: if they imported those, they would import pytest and the peers as well."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(params=FACES, ids=lambda face: face.name)
def face(request: pytest.FixtureRequest) -> Face:
    return request.param


@pytest.fixture(params=PROCESS_FACES, ids=lambda face: face.name)
def process_face(request: pytest.FixtureRequest) -> Face:
    return request.param


@pytest.fixture(params=ASYNC_PROCESS_FACES, ids=lambda face: face.name)
def async_face(request: pytest.FixtureRequest) -> Face:
    return request.param


@pytest.fixture
def any_loop() -> None:
    pass


def pytest_asyncio_loop_factories(config: pytest.Config, item: Any) -> Mapping[str, Callable[[], Any]]:
    factories = _loop_factories()
    return factories if "any_loop" in item.fixturenames else {"asyncio": factories["asyncio"]}


def _loop_factories() -> dict[str, Callable[[], Any]]:
    factories: dict[str, Callable[[], Any]] = {"asyncio": asyncio.SelectorEventLoop}
    if sys.platform != "win32":
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    backend = FakeBackend()
    yield backend
    backend.end()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as gate:
        yield gate


@pytest.fixture
def own_generators() -> Iterator[None]:
    """Leaves the process's random generators as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.fixture(scope="session", autouse=True)
def _session() -> Iterator[None]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or the programs of tests could not be interrupted
    for make_loop in _loop_factories().values():
        make_loop().close()  # uvloop opens a pipe for the whole process with its first loop
    start_what_torchrl_shares()
    gc.collect()
    gc.freeze()  # what was imported until here need not be looked through after each test
    yield
    process.stop_launchers()


@pytest.fixture(scope="module", autouse=True)
def _module() -> None:
    gc.freeze()  # nor what the tests of other modules left


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before, imported = Holdings(), len(sys.modules)
    with _Complaints() as complaints:
        yield
        gc.collect()  # what was dropped must be gone, not hide in a cycle
    if len(sys.modules) != imported:
        gc.freeze()  # nor what this one imported
    before.check()
    if complaints.heard:
        pytest.fail("asyncio complained: " + "\n".join(complaints.heard), pytrace=False)


class _Complaints(logging.Handler):
    """Errors that event loops log of the package's own tasks: failures nobody heard of, and the like."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def __enter__(self) -> Self:
        logging.getLogger("asyncio").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("asyncio").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if PACKAGE in message:  # and not only in the traceback of what an env of the test's does
            self.heard.append(message)


class Holdings:
    """What the test process had before a test."""

    def __init__(self) -> None:
        self.processes = _processes()
        self.threads = set(threading.enumerate())
        self.descriptors = _descriptors()
        self.shared_memory = _shared_memory()

    def check(self) -> None:
        leaks: list[Any] = []
        leaks += [_describe(left) for left in still_alive(_new(self.processes), PATIENCE)]
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(PATIENCE)
            leaks += [thread] if thread.is_alive() else []
        leaks += sorted(_descriptors() - self.descriptors)
        leaks += sorted(self._shared_memory_left())
        if leaks:
            pytest.fail("the test left behind: " + ", ".join(map(str, leaks)), pytrace=False)

    def _shared_memory_left(self) -> set[str]:
        left, deadline = _shared_memory() - self.shared_memory, time.monotonic() + PATIENCE
        while left and time.monotonic() < deadline:  # other programs that ended just now have theirs taken away
            time.sleep(0.05)
            left &= _shared_memory()
        return left


def _shared_launchers() -> list[process.Launcher]:
    return list(process._launchers.values())


def _processes() -> set[int]:
    """The ids of all processes below this one, but for the launchers."""
    shared = {launcher.pid for launcher in _shared_launchers()}
    return children(os.getpid()) - shared


def _new(before: set[int]) -> list[psutil.Process]:
    found = []
    for pid in _processes() - before:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            found.append(psutil.Process(pid))
    return found


def _describe(left: psutil.Process) -> str:
    try:
        return f"{left.pid} ({left.status()}): {' '.join(left.cmdline())[-200:]}"
    except psutil.Error:
        return f"{left.pid}"


def _descriptors() -> set[tuple[int, str]]:
    """Open descriptors and what they lead to; nothing where the system does not tell."""
    if not DESCRIPTORS.exists():
        return set()
    shared = {launcher._control.fileno() for launcher in _shared_launchers()}
    found = set()
    for name in os.listdir(DESCRIPTORS):
        try:
            target = os.readlink(DESCRIPTORS / name)
        except OSError:  # the one that listed the directory
            continue
        if int(name) not in shared:
            found.add((int(name), target))
    return found


def _shared_memory() -> set[str]:
    """Names of shared memory, but for what is not ours.

    Other programs on this machine have some, and torch names its own after who made it; multiprocessing has semaphores
    for peers, which aioenvs does not use.
    """
    names = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.exists() else []
    return {name for name in names if not name.startswith("sem.mp-") and not _made_elsewhere(name)}


def _made_elsewhere(name: str) -> bool:
    maker = re.match(r"torch_(\d+)_", name)
    if maker is None or (pid := int(maker[1])) == os.getpid():
        return False
    return psutil.pid_exists(pid) and pid not in children(os.getpid())
