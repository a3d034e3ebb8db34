"""Launchers from the parent's side: started, given orders, stopped, and forgotten in a fork."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import itertools
import os
import pickle
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol, Self

from aioenvs.engine.pools import launcher as child
from aioenvs.engine.worker.commands import Inherited
from aioenvs.errors import AioEnvsError

__all__ = ["Disowned", "Launcher", "disown_in_forks", "shared_launcher", "shut_at_exit", "stop_launchers"]


class Disowned(Protocol):
    """Something of the parent's that holds descriptors."""

    def disown(self) -> None:
        """In a fork of the parent: close them, and leave all else alone."""


STACKING = "LAZY_LEGACY_OP"
LAUNCHER_PATIENCE = 3.0  # seconds that a launcher gets to end its workers and itself
FOREIGN_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "I_MPI_", "MV2_", "HYDRA_", "SLURM_")
HARMLESS = ("SLURM_JOB_ID", "SLURM_TMPDIR")
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Parent ends of pipes: a fork of the parent must not keep them open, or nobody would ever see them close.
_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_launchers: dict[tuple[str, ...], Launcher] = {}
_live: set[Launcher] = set()
_watched: weakref.WeakSet[Disowned] = weakref.WeakSet()
_lock = threading.Lock()


def child_environ() -> dict[str, str]:
    """The environment for workers.

    Launcher variables of MPI and Slurm are left out, since an env that starts MPI itself would be misled by them;
    numeric libraries get one thread per process unless the user chose a number, since the processes are the
    parallelism. Words that tensordict leaves there for "not set", and cannot read itself, are no setting either.
    """
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_PREFIXES) or name in HARMLESS
    }
    if environ.get(STACKING) == "None":
        del environ[STACKING]
    for name in SINGLE_THREADED:
        environ.setdefault(name, "1")
    return environ


def interpreter(code: str) -> list[str]:
    """The command line of a fresh interpreter like this one, with the same import path.

    Raises:
        AioEnvsError: If this interpreter does not know its own executable, as some embedded ones.
    """
    if not sys.executable:
        raise AioEnvsError("cannot start workers: sys.executable is not set; set it to a Python interpreter")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = [os.fspath(entry) for entry in sys.path if isinstance(entry, str | os.PathLike)]
    return [sys.executable, *flags, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


class Launcher:
    """The parent's handle of one launcher process (see `aioenvs.engine.pools.launcher`)."""

    def __init__(self, control: socket.socket, pid: int, environ: dict[str, str]) -> None:
        self.pid = pid
        self._control = control
        self._environ = environ
        self._ids = itertools.count(1)
        self._sending = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        control.settimeout(LAUNCHER_PATIENCE)  # one that does not read its orders is as good as gone
        _ends.add(control)
        _live.add(self)

    @classmethod
    def executed(cls, preload: Sequence[str]) -> Self:
        """Start a launcher in a fresh interpreter that imports `preload`."""
        ours, theirs = socket.socketpair()
        environ = child_environ()
        code = f"from aioenvs.engine.pools.launcher import main; main({theirs.fileno()}, {tuple(preload)!r})"
        with theirs:
            popen = subprocess.Popen(
                interpreter(code),
                stdin=subprocess.DEVNULL,
                env=environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        launcher = cls(ours, popen.pid, environ)
        launcher._popen = popen
        return launcher

    @classmethod
    def forked(cls, inherited: Inherited) -> Self:
        """Start a launcher as a fork of this process, which shares its memory and so what is inherited."""
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # or the child would write the buffered part once more
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.setsid()
            ours.close()
            child.main(theirs.detach(), inherited=inherited)
        theirs.close()
        return cls(ours, pid, dict(os.environ))

    @property
    def alive(self) -> bool:
        """Whether the launcher still takes orders."""
        if self._control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        return not poll.poll(0)  # it says nothing, so there is nothing to read but the end

    def launch(self, method: str, shared: tuple[int, int, int]) -> tuple[int, int]:
        """Have a worker started.

        Args:
            method: How.
            shared: The descriptors of its socket, of the block, and of the completion pipe's writing end.

        Returns:
            The worker's id here, and the reading end of its status pipe.

        Raises:
            OSError: If the launcher is gone, or no descriptors are left.
        """
        execute = None
        if method == "spawn":
            code = "from aioenvs.engine.pools.launcher import run_worker; "
            code += "sys.exit(run_worker(*map(int, sys.argv[1:4])))"
            execute = interpreter(code)
        environ = child_environ()
        order = child.Order(
            execute,
            None if environ == self._environ else environ,
            _directory(),
            limits=resource.getrlimit(resource.RLIMIT_NOFILE),
            cores=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            umask=_umask(),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
        )
        worker_id = next(self._ids)
        with contextlib.ExitStack() as stack:
            status, status_end = os.pipe()
            stack.callback(os.close, status_end)
            try:
                streams = [_duplicate(fd, stack) for fd in (1, 2)]
                self._send(child.LAUNCH, worker_id, pickle.dumps(order), [*shared, status_end, *streams])
            except BaseException:
                os.close(status)
                raise
        return worker_id, status

    def signal(self, worker_id: int, number: int) -> None:
        """Send a signal to a worker's process group, if it still lives."""
        with contextlib.suppress(OSError):
            self._send(child.SIGNAL, worker_id, number, [])

    def _send(self, kind: int, worker_id: int, body: bytes | int, descriptors: list[int]) -> None:
        data = body if isinstance(body, bytes) else b""
        number = len(body) if isinstance(body, bytes) else body
        with self._sending:
            header = child.HEADER.pack(kind, worker_id, number)
            sent = socket.send_fds(self._control, [header], descriptors) if descriptors else 0
            self._control.sendall(header[sent:] + data)

    def dismiss(self) -> None:
        """Tell it to end, without waiting."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        """End it, with any worker it still has. Cancelling it leaves the ending to the launcher itself."""
        if self._control.fileno() < 0:
            return
        self.dismiss()
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._control, _resolve, gone)
        try:
            await asyncio.wait_for(gone, LAUNCHER_PATIENCE)
        except TimeoutError:
            self._kill()
        finally:
            loop.remove_reader(self._control)
            self._bury()

    def stop(self) -> None:
        """Close without an event loop; blocks for a moment."""
        if self._control.fileno() < 0:
            return
        self.dismiss()
        try:
            self._control.recv(1)  # it says nothing: this is the end of the stream
        except TimeoutError:
            self._kill()
        except OSError:
            pass  # it ended before it had read everything
        finally:
            self._bury()

    def _kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def disown(self) -> None:
        """In a fork of the parent: the process is the parent's, not ours, to wait for."""
        if self._popen is not None:
            self._popen.returncode = 0
            self._popen = None

    def _bury(self) -> None:
        self._control.close()
        _live.discard(self)
        if self._popen is not None:
            self._popen.wait()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def disown_in_forks(thing: Disowned) -> None:
    """See to it that a fork of this process does not keep what is the parent's, as long as there is that."""
    _watched.add(thing)


def shut_at_exit(sock: socket.socket) -> None:
    """See to it that a worker sees the end of its socket when the interpreter ends, and no fork keeps it open."""
    _ends.add(sock)


def shared_launcher(preload: Sequence[str]) -> Launcher:
    """The interpreter's launcher that has imported these modules, started if need be."""
    key = tuple(preload)
    with _lock:
        launcher = _launchers.get(key)
        if launcher is not None and not launcher.alive:
            launcher.stop()
            launcher = None
        if launcher is None:
            launcher = _launchers[key] = Launcher.executed(key)
        return launcher


def stop_launchers() -> None:
    """Stop the shared launchers, with any worker they still have; the next pool starts a new one."""
    with _lock:
        stopping = list(_launchers.values())
        _launchers.clear()
    for launcher in stopping:
        launcher.stop()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _umask() -> int | None:
    """The mask for new files; None where it cannot be read without being set, which other threads would see."""
    try:
        with open("/proc/self/status", "rb") as status:
            return next((int(line.split()[1], 8) for line in status if line.startswith(b"Umask:")), None)
    except OSError:
        return None


def _duplicate(fd: int, stack: contextlib.ExitStack) -> int:
    """A copy of a standard stream, or the null device where it is closed, or was and has become something of ours."""
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        ours = kind == 0 or fd in {end.fileno() for end in _ends}  # an event loop's own have no kind
        copy = os.open(os.devnull, os.O_WRONLY) if ours else os.dup(fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        copy = os.open(os.devnull, os.O_WRONLY)
    stack.callback(os.close, copy)
    return copy


def _forget() -> None:
    """In a fork of the parent: nothing of the engine belongs to it."""
    global _lock
    _lock = threading.Lock()
    for end in list(_ends):
        if end.fileno() >= 0:
            os.close(end.detach())  # close() would wait for a transport of the parent's loop
    for thing in list(_watched):
        thing.disown()
    for launcher in _live:
        launcher.disown()
    _launchers.clear()
    _live.clear()


def _exit() -> None:
    """At the interpreter's end: let workers see the end of their pipes, then end the launchers."""
    for end in list(_ends):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    for launcher in list(_live):
        launcher.dismiss()
    for launcher in list(_live):
        launcher.stop()


os.register_at_fork(after_in_child=_forget)
atexit.register(_exit)
