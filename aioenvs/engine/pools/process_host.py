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
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from aioenvs.engine.config import BatchConfig
from aioenvs.engine.layout import Family
from aioenvs.engine.memory import SharedBlock
from aioenvs.engine.pools import launcher as child
from aioenvs.engine.pools.completion_pipe import CompletionPipe, close_in_fork
from aioenvs.engine.pools.factories import Shipment, pickle_factories
from aioenvs.engine.pools.host import Exit, HostTraits, Owner, WorkerHost, end_all
from aioenvs.engine.preload import modules_to_preload
from aioenvs.engine.protocol import HEADER, MAGIC, Decoder, Frame, Opcode, encode
from aioenvs.engine.worker import descriptors as passing
from aioenvs.engine.worker.commands import Inherited
from aioenvs.errors import AioEnvsError, ProtocolError

__all__ = [
    "Launcher",
    "ProcessHost",
    "Processes",
    "shared_launcher",
    "stop_launchers",
]


CHUNK = 1 << 18
STACKING = "LAZY_LEGACY_OP"
LAUNCHER_PATIENCE = 3.0  # seconds that a launcher gets to end its workers and itself
FOREIGN_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "I_MPI_", "MV2_", "HYDRA_", "SLURM_")
HARMLESS = ("SLURM_JOB_ID", "SLURM_TMPDIR")
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Parent ends of pipes: a fork of the parent must not keep them open, or nobody would ever see them close.
_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_launchers: dict[tuple[str, ...], Launcher] = {}
_live: set[Launcher] = set()
_watched: weakref.WeakSet[ProcessHost] = weakref.WeakSet()
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
        """Whether it still takes orders."""
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


class ProcessHost(WorkerHost):
    """A host that is a process on this machine: commands and bodies over a socket, word of its end over a pipe.

    Args:
        index: As for `Host`.
        envs: Likewise.
        owner: Likewise.
        generation: Likewise.
        kind: What all hosts of the pool share.
    """

    def __init__(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int, kind: Processes) -> None:
        super().__init__(index, envs, owner, generation, kind.config.timeouts.start)
        self._kind = kind
        self._sock: socket.socket | None = None
        self._decoder = Decoder()
        self._backlog: deque[memoryview] = deque()
        self._id = 0
        self._status = -1

    async def spawn(self, descriptors: Sequence[int]) -> None:
        kind = self._kind
        assert kind.launcher is not None
        assert kind.block is not None
        assert kind.pipe is not None
        self._sock, theirs = socket.socketpair()
        _ends.add(self._sock)
        with theirs:
            shared = theirs.fileno(), kind.block.fd, kind.pipe.writing
            try:
                self._id, self._status = kind.launcher.launch(kind.config.start_method, shared)
            except BaseException:
                self._lose(None)
                self._finish(Exit(None, cause="could not be started"))
                raise
        self._launcher = kind.launcher
        _watched.add(self)
        self._loop.add_reader(self._status, self._on_status)
        passing.send(self._sock, descriptors, None if kind.inherits else passing.tracker())
        self.connect(self._sock)

    def connect(self, sock: socket.socket) -> None:
        """Exchange frames over this socket from now on."""
        self._sock = sock
        sock.setblocking(False)
        self._loop.add_reader(sock, self._on_readable)

    def attachment(self, families: Sequence[Family]) -> bytes:
        places = [(family.envs, family.layout) for family in families]
        return pickle.dumps((families[-1].layout.end, places))

    # -- requests ---------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._sock is not None and not self.lost.done()

    def transmit(self, opcode: Opcode, sequence: int, positions: Sequence[int], enclosed: Any) -> None:
        if enclosed:
            self._write(encode(Frame(opcode, sequence, self.generation, positions, enclosed)))
        else:  # all that changes from one whole batch to the next is the number
            head = HEADER.pack(MAGIC, opcode, len(positions), self.generation, 0, sequence, 0)
            self._write(head + array("H", positions).tobytes() if positions else head)

    def cancel(self, sequence: int) -> None:
        self._write(encode(Frame(Opcode.CANCEL, sequence, self.generation)))

    def _write(self, data: bytes) -> None:
        sock = self._sock
        if sock is None or self.lost.done():
            return
        if self._backlog:
            self._backlog.append(memoryview(data))
            return
        try:
            sent = sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # it is gone, as reading will say: perhaps there is something left to be read
            return
        if sent < len(data) and not self._loop.is_closed():
            self._backlog.append(memoryview(data)[sent:])
            self._loop.add_writer(sock, self._on_writable)

    def _on_writable(self) -> None:
        assert self._sock is not None
        try:
            while self._backlog:
                data = self._backlog[0]
                sent = self._sock.send(data)
                if sent < len(data):
                    self._backlog[0] = data[sent:]
                else:
                    self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError:  # as above
            self._backlog.clear()
        self._loop.remove_writer(self._sock)

    def _on_readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        try:
            if data:
                for frame in self._decoder.feed(data):
                    self.receive(frame)
                return
            self._decoder.finish()
        except ProtocolError as error:
            self._lose(error)
        else:
            self._lose(None)

    def _lose(self, cause: Exception | None) -> None:
        """Have no socket any more."""
        sock = self._sock
        if sock is not None and sock.fileno() >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(sock)
                self._loop.remove_writer(sock)
            sock.close()
        self._backlog.clear()
        if not self.lost.done() and not self._loop.is_closed():
            self.lost.set_result(cause)

    def disconnect(self) -> None:
        self._lose(None)

    # -- the process ------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Signal the worker and whatever it started."""
        if self._status >= 0:
            self._launcher.signal(self._id, number)

    def kill(self) -> None:
        """Kill the worker where its launcher cannot do it any more."""
        if self.pid is not None:
            child.signal_group(self.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """Give up the descriptors without waiting; the worker ends by itself, or by its launcher."""
        self.abandoned = True
        self._finish(Exit(None))

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
                self._finish(Exit(None, cause=f"no process could be made: {os.strerror(-number)}"))
                return
            self.pid = number
            if not data:
                return
        if len(data) < child.EXIT.size:
            self._finish(Exit(None, cause="the launcher that watched it is gone"))
            return
        (returncode,) = child.EXIT.unpack_from(data)
        self._finish(Exit(returncode, data[child.EXIT.size :].decode(errors="replace")))

    def _finish(self, how: Exit) -> None:
        if self._status >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._status)
            os.close(self._status)
            self._status = -1
        if not self.exited.done() and not self._loop.is_closed():
            self.exited.set_result(how)


class Processes:
    """The kind of hosts that are processes on this machine, around a block that all of them map.

    Args:
        config: What was asked for.

    Attributes:
        block: The block.
        pipe: Where they say that they are done.
        launcher: Starts them.
        inherits: Whether they have the factories already.
    """

    traits = HostTraits(ships=True, can_die=True, bulk=True)

    def __init__(self, config: BatchConfig) -> None:
        self.config = config
        self.inherits = config.start_method == "fork"
        self.block: SharedBlock | None = None
        self.pipe: CompletionPipe | None = None
        self.launcher: Launcher | None = None

    def pack(self, groups: Mapping[int, tuple[int, ...]], descriptors: Any, *, replaces: bool) -> list[Shipment]:
        return pickle_factories(
            self.config, groups, inherited=self.inherits, descriptors=descriptors, replaces=replaces
        )

    async def prepare(self, owner: Any, hosts: Mapping[int, WorkerHost]) -> None:
        self._refuse_threads()
        if self.block is None:
            self.block = SharedBlock.create(on_disk=self.config.on_disk)
        if self.pipe is None:
            self.pipe = CompletionPipe(hosts, owner)
        if self.launcher is None or not self.launcher.alive:
            self.launcher = self._make_launcher()

    def _refuse_threads(self) -> None:
        count = self.config.num_sub_threads
        if self.inherits and count > 1 and "torch" in sys.modules:
            raise ValueError(
                f"num_sub_threads={count} does not go with mp_start_method='fork': a fork of a process that has used "
                "torch inherits OpenMP without its threads, and hangs at the first operation that wants them; use "
                "num_sub_threads=1, or mp_start_method='forkserver' or 'spawn'"
            )

    def _make_launcher(self) -> Launcher:
        if self.inherits:
            return Launcher.forked(list(zip(self.config.factories, self.config.kwargs, strict=True)))
        return shared_launcher(modules_to_preload(self.config.factories))

    def make(self, index: int, envs: tuple[int, ...], owner: Owner, generation: int) -> ProcessHost:
        return ProcessHost(index, envs, owner, generation, self)

    def check(self, hosts: Sequence[WorkerHost]) -> None:
        """Check nothing: each has a process of its own."""

    def allocate(self, nbytes: int) -> Any:
        assert self.block is not None
        return self.block.allocate(nbytes)

    def notice(self) -> None:
        if self.pipe is not None:
            self.pipe.drain()

    def begin_close(self, close: Callable[[], None]) -> None:
        """Close nothing: envs that are at work elsewhere can be ended."""

    async def end(self, hosts: Sequence[WorkerHost], *, polite: bool) -> None:
        await end_all(hosts, self.config.timeouts.close, polite=polite)

    def hurry(self, hosts: Sequence[WorkerHost]) -> None:
        for host in hosts:
            host.signal(signal.SIGKILL)

    def let_go(self, hosts: Sequence[WorkerHost], loop: asyncio.AbstractEventLoop | None) -> None:
        for host in hosts:
            host.dismiss()

    async def give_back(self) -> None:
        self._give_up_shared()
        launcher, self.launcher = self.launcher, None
        if launcher is not None and self.inherits:
            await launcher.close()

    def give_up(self) -> None:
        self._give_up_shared()
        launcher, self.launcher = self.launcher, None
        if launcher is not None and self.inherits:
            launcher.stop()

    def _give_up_shared(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
        if self.block is not None:
            self.block.close()
            self.block = None


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
    for host in list(_watched):
        host.disown()
    close_in_fork()
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
