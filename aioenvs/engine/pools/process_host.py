"""Worker processes from the parent's side: hosts that are one, and what those of a pool share."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from aioenvs.engine.config import BatchConfig
from aioenvs.engine.layout import Family
from aioenvs.engine.memory import SharedBlock
from aioenvs.engine.pools import launcher as child
from aioenvs.engine.pools.factories import Shipment, pickle_factories
from aioenvs.engine.pools.host import Exit, Host, HostKind, HostTraits, Owner, WorkerHost
from aioenvs.engine.pools.launching import Launcher, disown_in_forks, shared_launcher, shut_at_exit
from aioenvs.engine.pools.requests import Share
from aioenvs.engine.preload import modules_to_preload
from aioenvs.engine.protocol import HEADER, MAGIC, MAX_SEQUENCE, RECORD, RECORD_MAGIC, Decoder, Frame, Opcode, encode
from aioenvs.engine.worker import descriptors as passing
from aioenvs.errors import ProtocolError

__all__ = ["CompletionPipe", "ProcessHost", "Processes"]

logger = logging.getLogger("aioenvs")

CHUNK = 1 << 18  # bytes that are read at once; a pipe holds less
OWED_MAGIC = bytes([RECORD_MAGIC])
DONE, DONE_EACH = int(Opcode.DONE), int(Opcode.DONE_EACH)


class CompletionPipe:
    """The pipe, read by the running event loop.

    A record counts if it is one of a known host, of the generation that this has now, and answers what it still owes.
    All else is dropped: what is late as well as what an env wrote to a descriptor that is not its own, among which
    records are found wherever they begin.

    Args:
        hosts: By number; they may be replaced.
        settler: The pool, which hears of the answers.

    Attributes:
        writing: The descriptor for workers; -1 once closed.
    """

    def __init__(self, hosts: Mapping[int, Host], settler: Any) -> None:
        self._hosts = hosts
        self._settler = settler
        self._loop = asyncio.get_running_loop()
        self._reading, self.writing = os.pipe()
        self._rest = b""
        self._warned = False
        os.set_blocking(self._reading, False)
        disown_in_forks(self)  # which would keep the reading end open, and workers write to nobody for ever
        self._loop.add_reader(self._reading, self.drain)

    def drain(self) -> None:
        """Take in all that was written so far; who acts upon the end of a worker does this first."""
        while self._reading >= 0:
            try:
                data = os.read(self._reading, CHUNK)
            except BlockingIOError:
                return
            self._take(data)
            if len(data) < CHUNK:
                return

    def _take(self, data: bytes) -> None:
        each: list[Any] = []
        if self._rest or len(data) % RECORD.size or not self._all_taken(data, each):
            data, self._rest = self._rest + data, b""
            self._search(data, each)
        if each:
            self._settler.answered_each(each)

    def _all_taken(self, data: bytes, each: list[Any]) -> bool:
        """Take in records, and return whether all of them were; taken ones are owed no more, and so not found again."""
        hosts, answered = self._hosts, self._settler.answered
        for magic, code, worker, generation, number, sequence, value in RECORD.iter_unpack(data):
            host = hosts.get(worker)
            if magic != RECORD_MAGIC or host is None or host.generation != generation:
                return False
            share = host.pending.get(sequence)
            if share is None:
                return False
            if share.left is None and code == DONE:
                answered(host, sequence, number, value)
            elif share.left is None or not self._took_one(host, sequence, share, number, value, each):
                return False
        return True

    def _took_one(self, host: Host, sequence: int, share: Share, position: int, value: int, each: list[Any]) -> bool:
        """Take in the answer for one env, and return whether one was owed."""
        assert share.left is not None
        env = share.left.pop(position, None)
        if env is None:
            return False
        if not share.left:
            del host.pending[sequence]
        each.append((host, share, env, value & 1, value >> 1))
        return True

    def _search(self, data: bytes, each: list[Any]) -> None:
        """Take in the records that are owed among other bytes."""
        begin, foreign, last = 0, 0, len(data) - RECORD.size
        while begin <= last and (found := data.find(OWED_MAGIC, begin, last + 1)) >= 0:
            foreign += found - begin
            _, code, worker, generation, number, sequence, value = RECORD.unpack_from(data, found)
            host = self._hosts.get(worker)
            begin = found + RECORD.size
            share = None if host is None or host.generation != generation else host.pending.get(sequence)
            if host is None or code not in (DONE, DONE_EACH):
                begin = found + 1
                foreign += 1
            elif share is None:  # of a host that is gone, or something that looks so: another may begin within
                begin = self._next_owed(data, found)
            elif share.left is None and code == DONE:
                self._settler.answered(host, sequence, number, value)
            elif share.left is None or not self._took_one(host, sequence, share, number, value, each):
                begin = found + 1
                foreign += 1
        rest = data.find(OWED_MAGIC, max(begin, last + 1))
        self._rest = data[rest:] if rest >= 0 else b""
        foreign += len(data) - len(self._rest) - min(begin, len(data))
        if foreign and not self._warned:
            self._warned = True
            logger.warning(
                "%d bytes that no worker's engine has written came with the answers of envs: an env, or a library that "
                "it uses, writes to descriptors that are not its own; they were left out",
                foreign,
            )

    def _next_owed(self, data: bytes, old: int) -> int:
        """Return where an owed record begins within what looks like an old one, or else the end of that."""
        for begin in range(old + 1, min(old + RECORD.size, len(data) - RECORD.size + 1)):
            if data[begin] == RECORD_MAGIC:
                _, _, worker, generation, _, sequence, _ = RECORD.unpack_from(data, begin)
                host = self._hosts.get(worker)
                if host is not None and host.generation == generation and sequence in host.pending:
                    return begin
        return old + RECORD.size

    def close(self) -> None:
        """Close both ends."""
        if self._reading >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._reading)
            self.disown()

    def disown(self) -> None:
        """Close both ends where the loop is another process's."""
        for end in (self._reading, self.writing):
            if end >= 0:
                os.close(end)
        self._reading = self.writing = -1


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
        shut_at_exit(self._sock)
        with theirs:
            shared = theirs.fileno(), kind.block.fd, kind.pipe.writing
            try:
                self._id, self._status = kind.launcher.launch(kind.config.start_method, shared)
            except BaseException:
                self._lose(None)
                self._finish(Exit(None, cause="could not be started"))
                raise
        self._launcher = kind.launcher
        disown_in_forks(self)
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

    def send(self, share: Share, opcode: Opcode, positions: Sequence[int] = (), enclosed: Any = None) -> None:
        if positions or enclosed or self._backlog or self._failure is not None or self._sock is None:
            super().send(share, opcode, positions, enclosed)
            return
        # The straight way of the same, for a whole batch: of its frame nothing changes but the number.
        sequence = self._sequence = self._sequence + 1 if self._sequence < MAX_SEQUENCE else 1
        self.pending[sequence] = share
        self.last_command = opcode
        try:
            if self._sock.send(HEADER.pack(MAGIC, opcode, 0, self.generation, 0, sequence, 0)) == HEADER.size:
                return
            self._lose(ProtocolError("a piece of a frame was sent"))  # which does not happen to so few bytes
        except BlockingIOError:
            self.transmit(opcode, sequence, positions, enclosed)
        except OSError:  # as in `_write`
            return

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


class Processes(HostKind):
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
        super().__init__(config)
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

    def allocate(self, nbytes: int) -> Any:
        assert self.block is not None
        return self.block.allocate(nbytes)

    def notice(self) -> None:
        if self.pipe is not None:
            self.pipe.drain()

    def hurry(self, hosts: Sequence[WorkerHost]) -> None:
        for host in hosts:
            host.signal(signal.SIGKILL)

    async def give_back(self) -> None:
        launcher = self._give_up_shared()
        if launcher is not None:
            await launcher.close()

    def give_up(self) -> None:
        launcher = self._give_up_shared()
        if launcher is not None:
            launcher.stop()

    def _give_up_shared(self) -> Launcher | None:
        """Close what is the pool's, and return the launcher if that is, too."""
        if self.pipe is not None:
            self.pipe.close()
        if self.block is not None:
            self.block.close()
        launcher, self.pipe, self.block, self.launcher = self.launcher, None, None, None
        return launcher if self.inherits else None
