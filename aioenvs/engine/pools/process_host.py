"""Worker processes from the parent's side: started, watched, stopped, and their last words."""

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
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from aioenvs.engine.pools import launcher as child
from aioenvs.engine.pools.channel import Channel
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.worker.commands import Inherited
from aioenvs.errors import AioEnvsError, describe_exit

__all__ = [
    "Exit",
    "Launcher",
    "Process",
    "WorkerHandle",
    "WorkerProcess",
    "end_all",
    "shared_launcher",
    "stop_launchers",
]


STACKING = "LAZY_LEGACY_OP"
LAUNCHER_PATIENCE = 3.0  # seconds that a launcher gets to end its workers and itself
FOREIGN_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "I_MPI_", "MV2_", "HYDRA_", "SLURM_")
HARMLESS = ("SLURM_JOB_ID", "SLURM_TMPDIR")
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Parent ends of pipes: a fork of the parent must not keep them open, or nobody would ever see them close.
_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_launchers: dict[tuple[str, ...], Launcher] = {}
_live: set[Launcher] = set()
_watched: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
_lock = threading.Lock()


@dataclass(frozen=True)
class Exit:
    """How a worker ended.

    Attributes:
        returncode: As in `subprocess`; None if unknown.
        stderr: The tail of what it wrote to stderr.
        cause: What else is known of it, in words, where there is no code.
    """

    returncode: int | None
    stderr: str = ""
    cause: str = ""

    def __str__(self) -> str:
        words = self.cause or describe_exit(self.returncode)
        return f"{words}; the end of its stderr:\n{self.stderr.rstrip()}" if self.stderr.strip() else words


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
        """Whether it still takes orders."""
        if self._control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        return not poll.poll(0)  # it says nothing, so there is nothing to read but the end

    def launch(self, method: str, block: int, sock: socket.socket) -> tuple[int, int]:
        """Have a worker started on these descriptors.

        Returns:
            The worker's id here, and the reading end of its status pipe.

        Raises:
            OSError: If the launcher is gone, or no descriptors are left.
        """
        execute = None
        if method == "spawn":
            code = "from aioenvs.engine.pools.launcher import run_worker; "
            code += "sys.exit(run_worker(int(sys.argv[1]), int(sys.argv[2])))"
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
                self._send(child.LAUNCH, worker_id, pickle.dumps(order), [sock.fileno(), block, status_end, *streams])
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


class WorkerProcess:
    """One worker process: its end of the pipe, its pid, and a future that says how it ended."""

    def __init__(self, launcher: Launcher, method: str, block: int) -> None:
        """Order the process; it is starting when this returns.

        Raises:
            OSError: If it cannot be ordered.
        """
        self._loop = asyncio.get_running_loop()
        self._launcher = launcher
        self.pid: int | None = None
        self.abandoned = False
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        self.sock, theirs = socket.socketpair()
        _ends.add(self.sock)
        with theirs:
            try:
                self._id, self._status = launcher.launch(method, block, theirs)
            except BaseException:
                self.sock.close()
                raise
        _watched.add(self)
        self._loop.add_reader(self._status, self._on_status)

    def signal(self, number: int) -> None:
        """Signal the worker and whatever it started."""
        if not self.exited.done():
            self._launcher.signal(self._id, number)

    def kill(self) -> None:
        """Kill the worker where its launcher cannot do it any more."""
        if self.pid is not None:
            child.signal_group(self.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """Give up the descriptors without waiting; the worker ends by itself, or by its launcher."""
        self.abandoned = True
        self._finish(Exit(None))
        self.sock.close()

    def disown(self) -> None:
        """In a fork of the parent: the loop, and what it watches, are the parent's."""
        if self._status >= 0:
            os.close(self._status)
            self._status = -1

    def _on_status(self) -> None:
        data = os.read(self._status, 65536)
        if self.pid is None and len(data) >= child.PID.size:
            (number,) = child.PID.unpack_from(data)
            data = data[child.PID.size :]
            if number < 0:
                self._finish(Exit(None, f"no process could be made: {os.strerror(-number)}"))
                return
            self.pid = number
            if not data:
                return
        if len(data) < child.EXIT.size:
            self._finish(Exit(None, "the launcher that watched it is gone"))
            return
        (returncode,) = child.EXIT.unpack_from(data)
        self._finish(Exit(returncode, data[child.EXIT.size :].decode(errors="replace")))

    def _finish(self, how: Exit) -> None:
        if self._status < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._status)
            self.exited.set_result(how)
        os.close(self._status)
        self._status = -1


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
    for process in list(_watched):
        process.disown()
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


LAST_WORDS = 0.05  # seconds between the end of a worker's pipe and the report of its exit, or the other way round
KILL_PATIENCE = 2.0  # seconds until a killed process has to be gone


class Process(Protocol):
    """A process that runs a worker.

    Attributes:
        pid: Where it runs; None if it does not yet.
        exited: Says how it ended.
        abandoned: Whether it was given up.
    """

    pid: int | None
    exited: asyncio.Future[Exit]
    abandoned: bool

    def signal(self, number: int) -> None:
        """End it, by a signal where there are any."""

    def kill(self) -> None:
        """End it where it can no longer be said to have."""

    def abandon(self) -> None:
        """Give back what is held for it, without waiting."""


class WorkerHandle:
    """One process in the pool, with its pipe.

    Its end shows in two places, and is acted upon once: when both have said so, or a moment after the first. This is
    done by callbacks rather than a task, which somebody who cancels all tasks would take with him.

    Args:
        envs: The envs that it hosts.
        process: The process.
        channel: Its pipe.
        on_end: Called once with the worker, how the process ended, and what ended the pipe.
    """

    def __init__(
        self,
        envs: tuple[int, ...],
        process: Process,
        channel: Channel,
        on_end: Callable[[WorkerHandle, Exit, Exception | None], None],
    ) -> None:
        self.envs = envs
        self.process = process
        self.channel = channel
        self.last_command = Opcode.START
        self.closing = False
        self.killed_for = ""  # why it was killed, if it was, in words
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._began = time.monotonic()
        self._lived: float | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        process.exited.add_done_callback(self._sign)
        channel.lost.add_done_callback(self._sign)

    @property
    def is_ending(self) -> bool:
        """Whether one sign of its end was seen; the other, or the decision without it, comes within a moment."""
        return not self.ended.done() and (self.process.exited.done() or self.channel.lost.done())

    @property
    def lived(self) -> float:
        """Seconds from its start to its end, or until now."""
        return time.monotonic() - self._began if self._lived is None else self._lived

    def _sign(self, _: asyncio.Future[Any]) -> None:
        if self.process.exited.done() and self.channel.lost.done():
            self._end()
        elif self._timer is None:
            self._timer = self._loop.call_later(LAST_WORDS, self._end)

    def _end(self) -> None:
        if self.ended.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._lived = self.lived
        exited, lost = self.process.exited, self.channel.lost
        how = exited.result() if exited.done() else Exit(None, "its pipe was closed, but it did not exit")
        self._on_end(self, how, lost.result() if lost.done() else None)
        self.ended.set_result(None)


async def end_all(workers: Sequence[WorkerHandle], budget: float, *, polite: bool) -> None:
    """End these workers: ask them to close their envs, then terminate, then kill.

    Args:
        workers: All of them, whatever state they are in.
        budget: Seconds for asking and terminating together.
        polite: Whether to ask first, or to kill at once.
    """
    ladder: list[tuple[float, Callable[[WorkerHandle], None]]] = [(KILL_PATIENCE, _kill)]
    if polite:
        ladder = [(0.8 * budget, _ask_to_close), (0.2 * budget, _terminate), *ladder]
    for worker in workers:
        worker.closing = True
    for patience, act in ladder:
        alive = [worker for worker in workers if not worker.process.exited.done()]
        if not alive:
            return
        for worker in alive:
            act(worker)
        await asyncio.wait([worker.process.exited for worker in alive], timeout=patience)


def _ask_to_close(worker: WorkerHandle) -> None:
    if not worker.channel.connected:
        _kill(worker)
        return
    with contextlib.suppress(Exception):
        worker.channel.request(Opcode.CLOSE, ())


def _terminate(worker: WorkerHandle) -> None:
    worker.process.signal(signal.SIGTERM)


def _kill(worker: WorkerHandle) -> None:
    worker.process.signal(signal.SIGKILL)
