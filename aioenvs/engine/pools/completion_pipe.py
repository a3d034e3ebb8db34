"""The pipe in which all local workers of a pool write that they are done, so that a batch wakes the parent once."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Protocol

from aioenvs.engine.pools.host import Host
from aioenvs.engine.pools.launching import disown_in_forks
from aioenvs.engine.pools.requests import Share
from aioenvs.engine.protocol import RECORD, RECORD_MAGIC, Opcode

__all__ = ["CompletionPipe", "Settler"]

logger = logging.getLogger("aioenvs")

CHUNK = 1 << 16  # bytes that the pipe of most systems holds
MAGIC = bytes([RECORD_MAGIC])
DONE, DONE_EACH = int(Opcode.DONE), int(Opcode.DONE_EACH)

Each = list[tuple[Host, Share, int, int, float]]


class Settler(Protocol):
    """Someone who hears of the answers, the pool."""

    def answered(self, host: Host, sequence: int, finished: int = 0, waiting: float = 0.0) -> None:
        """A host has answered a request."""

    def answered_each(self, answers: Each) -> None:
        """Hosts have answered for single envs: each with its share, the env, the finished episodes and the waiting."""


class CompletionPipe:
    """The pipe, read by the running event loop.

    A record counts if it is one of a known host, of the generation that this has now, and answers what it still owes.
    All else is dropped: what is late as well as what an env wrote to a descriptor that is not its own, among which
    records are found wherever they begin.

    Args:
        hosts: By number; they may be replaced.
        settler: Hears of the answers.

    Attributes:
        writing: The descriptor for workers; -1 once closed.
    """

    def __init__(self, hosts: Mapping[int, Host], settler: Settler) -> None:
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
        each: Each = []
        if self._rest or len(data) % RECORD.size or not self._all_taken(data, each):
            data, self._rest = self._rest + data, b""
            self._search(data, each)
        if each:
            self._settler.answered_each(each)

    def _all_taken(self, data: bytes, each: Each) -> bool:
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
                answered(host, sequence, number, value / 100)
            elif share.left is None or not self._took_one(host, sequence, share, number, value, each):
                return False
        return True

    def _took_one(self, host: Host, sequence: int, share: Share, position: int, value: int, each: Each) -> bool:
        """Take in the answer for one env, and return whether one was owed."""
        assert share.left is not None
        env = share.left.pop(position, None)
        if env is None:
            return False
        if not share.left:
            del host.pending[sequence]
        each.append((host, share, env, value & 1, (value >> 1) / 100))
        return True

    def _search(self, data: bytes, each: Each) -> None:
        """Take in the records that are owed among other bytes."""
        begin, foreign, last = 0, 0, len(data) - RECORD.size
        while begin <= last and (found := data.find(MAGIC, begin, last + 1)) >= 0:
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
                self._settler.answered(host, sequence, number, value / 100)
            elif share.left is None or not self._took_one(host, sequence, share, number, value, each):
                begin = found + 1
                foreign += 1
        rest = data.find(MAGIC, max(begin, last + 1))
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
