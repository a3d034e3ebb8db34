"""The launcher: a small helper process that starts workers, watches them, and ends them with the parent.

Every worker is a child of a launcher, which
- starts it in no time: it has imported what workers need and only forks (or, for "spawn", forks and executes);
- passes its stderr on and keeps the tail, reaps it, and reports both over a pipe of the worker's own;
- ends its whole process group when it exits, or when the parent is gone, however hard that was killed.

There are two kinds: a shared one that is executed once per interpreter, and, for "fork", one per pool that is
itself a fork of the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aioenvs.engine.memory import SharedBlock
from aioenvs.engine.worker import serve as worker
from aioenvs.engine.worker.commands import Inherited

__all__ = ["EXIT", "HEADER", "LAUNCH", "PID", "SIGNAL", "TAIL", "Order", "main", "run_worker", "signal_group"]

HEADER = struct.Struct("<BII")  # kind, worker id, length of the pickled order, or signal number
LAUNCH, SIGNAL = 1, 2
PID = struct.Struct("<i")  # first on a status pipe: the pid, or minus the errno of a failed fork
EXIT = struct.Struct("<i")  # then, at the end: the return code as in subprocess, and the tail of stderr
TAIL = 3000  # with the return code, well below PIPE_BUF, so that it is written at once
GRACE = 1.0  # seconds that workers get to close their envs once the parent is gone


@dataclass(frozen=True)
class Order:
    """An order of the parent's.

    Six descriptors travel beside it: socket, block, completion pipe, status pipe, stdout, stderr.

    Attributes:
        execute: Command line of a fresh interpreter, or None to run the worker in the fork itself.
        environ: The environment, where it is not the launcher's own.
        cwd: The working directory.
        limits: The parent's limits on open files.
        cores: Those that the thread which asks may use; None where the system does not tell.
        umask: The parent's; None likewise.
        niceness: The parent's.
    """

    execute: list[str] | None
    environ: dict[str, str] | None
    cwd: str | None
    limits: tuple[int, int]
    cores: frozenset[int] | None = None
    umask: int | None = None
    niceness: int = 0


@dataclass
class _Child:
    pid: int
    status: int
    stderr: int
    target: int
    pending: bytes = b""
    tail: bytes = b""
    open: bool = True

    def descriptors(self) -> list[int]:
        return [self.status, self.stderr, self.target]


@dataclass
class _Launcher:
    control: socket.socket
    inherited: Inherited
    children: dict[int, _Child] = field(default_factory=dict)
    wakeup: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def serve(self) -> None:
        wakeup, waker = self.wakeup
        for end in (wakeup, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with wakeup, waker:
            try:
                while self._turn(None):
                    pass
            finally:
                self._end_all()

    def _turn(self, timeout: float | None) -> bool:
        """Wait for something and deal with it; False once the parent has closed the control socket."""
        wakeup = self.wakeup[0]
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        if timeout is None:
            poll.register(self.control, select.POLLIN)
        for child in self.children.values():
            if child.pending:
                poll.register(child.target, select.POLLOUT)
            elif child.open:
                poll.register(child.stderr, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}
        for child in self.children.values():
            if child.target in ready or child.stderr in ready:
                _pass_on(child)
        if wakeup.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                wakeup.recv(4096)
            self._reap()
        return self._obey() if self.control.fileno() in ready else True

    def _obey(self) -> bool:
        header, descriptors, _, _ = socket.recv_fds(self.control, HEADER.size, 8)
        try:
            kind, worker_id, number = HEADER.unpack(header + _receive(self.control, HEADER.size - len(header)))
            order = _receive(self.control, number) if kind == LAUNCH else b""
        except EOFError:
            return False
        if kind == LAUNCH:
            self._launch(worker_id, pickle.loads(order), descriptors)
        elif worker_id in self.children:
            signal_group(self.children[worker_id].pid, number)
        return True

    def _launch(self, worker_id: int, order: Order, descriptors: list[int]) -> None:
        if len(descriptors) != 6:  # no room for them: the parent sees its status pipe close
            for fd in descriptors:
                os.close(fd)
            return
        sock, block, done, status, stdout, target = descriptors
        closing = [sock, block, done, stdout]
        stderr = -1
        try:
            stderr, child_stderr = os.pipe()
            closing.append(child_stderr)
            os.set_blocking(stderr, False)
            pid = self._fork()
            if pid == 0:
                own = sock, block, done
                self._become_worker(order, own, stdout, child_stderr, [status, stderr, target])
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self.children[worker_id] = _Child(pid, status, stderr, target)
            _report(status, PID.pack(pid))
        except OSError as error:
            _report(status, PID.pack(-(error.errno or 1)))
            closing += [status, target, stderr]
        for fd in closing:
            if fd >= 0:
                os.close(fd)

    @staticmethod
    def _fork() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: libraries may have some
            return os.fork()

    def _become_worker(
        self, order: Order, own: tuple[int, int, int], stdout: int, stderr: int, foreign: list[int]
    ) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for end in (self.control, *self.wakeup):
                end.close()
            for fd in [*foreign, *(fd for child in self.children.values() for fd in child.descriptors())]:
                os.close(fd)
            self.children.clear()
            _settle(order, stdout, stderr)
            if order.execute is not None:
                for fd in own:
                    os.set_inheritable(fd, True)
                os.execve(order.execute[0], [*order.execute, *map(str, own)], os.environ)
            code = run_worker(*own, self.inherited)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for worker_id, child in list(self.children.items()):
            if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # Not reaped yet, so its number cannot have been given to another group.
            signal_group(child.pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            while child.open and not child.pending:
                if not _pass_on(child):
                    break
            _report(child.status, EXIT.pack(code) + child.tail)
            for fd in child.descriptors():
                os.close(fd)
            del self.children[worker_id]

    def _end_all(self) -> None:
        deadline = time.monotonic() + GRACE
        while self.children and (left := deadline - time.monotonic()) > 0:
            self._turn(left)
        for child in self.children.values():
            signal_group(child.pid, signal.SIGKILL)
        while self.children:
            self._turn(GRACE)


def main(control: int, preload: Sequence[str] = (), inherited: Inherited = ()) -> None:
    """Run a launcher until the parent closes the control socket, then end the process.

    Args:
        control: Descriptor of a stream socket to the parent.
        preload: Modules that workers will need; one that cannot be imported is left for the worker to miss.
        inherited: For a fork of the parent: factories and keyword arguments, which then need not be pickled.
    """
    code = 1
    try:
        _become_plain()
        for name in preload:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        atexit._clear()  # what the parent registered is the parent's to run
        gc.freeze()  # collections would touch, and so copy, the pages that workers share
        with socket.socket(fileno=control) as sock:
            _Launcher(sock, inherited).serve()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _become_plain() -> None:
    """Undo what a fork has of its parent, or a fresh interpreter of its environment."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _forget_loops()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # a standard stream that was closed
        pass
    os.close(fd)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # three descriptors per worker are needed


def _forget_loops() -> None:
    """Undo what a fork inside of a running event loop has of that; from Python 3.12 on asyncio does the most of it."""
    sys.set_asyncgen_hooks(None, None)
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and sys.version_info < (3, 12):
        policy: Any = asyncio.get_event_loop_policy()
        if hasattr(policy, "_local"):
            policy._local = type(policy._local)()  # or `get_event_loop` would return the parent's, as if it ran here


def run_worker(sock: int, block: int, done: int, inherited: Inherited = ()) -> int:
    """Run a worker on these descriptors; returns the exit code for the process."""
    for fd in (sock, block, done):
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 0
    try:
        with socket.socket(fileno=sock) as pipe:
            worker.serve(pipe, SharedBlock(block), done, inherited)
    except SystemExit as error:
        code = worker.exit_code(error)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code


def _settle(order: Order, stdout: int, stderr: int) -> None:
    """Make a fresh fork a process of its own: group, limits, directory, environment, standard streams."""
    os.setpgid(0, 0)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, order.limits)
    if order.cores is not None:
        with contextlib.suppress(OSError):  # none of them is online any more
            os.sched_setaffinity(0, order.cores)
    if order.umask is not None:
        os.umask(order.umask)
    # Without privilege it can only be raised: the worker of a parent that became nicer is as nice; that of one which a
    # privileged somebody made less nice stays as nice as its launcher, which began as the parent was then.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, order.niceness)
    if order.cwd is not None:
        os.chdir(order.cwd)
    if order.environ is not None:
        os.environ.clear()
        os.environ.update(order.environ)
    null = os.open(os.devnull, os.O_RDWR)
    for fd, standard in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, standard)
        if fd > 2:
            os.close(fd)
    # A fork of the parent has the parent's stream objects, which may lead elsewhere (pytest, Jupyter).
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, errors="backslashreplace", closefd=False) for fd in (1, 2))


def _pass_on(child: _Child) -> bool:
    """Move some of a child's stderr to where it belongs, without ever blocking; False if nothing moved."""
    if not child.pending:
        try:
            data = os.read(child.stderr, select.PIPE_BUF)
        except BlockingIOError:
            return False
        child.open = bool(data)
        child.pending = data
        child.tail = (child.tail + data)[-TAIL:]
        if not data:
            return False
    poll = select.poll()
    poll.register(child.target, select.POLLOUT)
    if not poll.poll(0):
        return False
    try:
        written = os.write(child.target, child.pending)
    except OSError:
        written = len(child.pending)  # nobody is there to read it
    child.pending = child.pending[written:]
    return True


def _report(status: int, message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(status, message)


def signal_group(pid: int, number: int) -> None:
    """Signal a process group, if there is any of it left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _receive(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = sock.recv(length - len(data))
        if not chunk:
            raise EOFError("the parent closed the control socket inside an order")
        data += chunk
    return data
