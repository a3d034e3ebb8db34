"""The shared block: one anonymous piece of memory that the parent and its workers map."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
import tempfile
from typing import Any, Self

__all__ = ["SharedBlock", "own_memory"]

# A map keeps a descriptor of its own for as long as arrays look into it, unless Python can be told not to.
UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class SharedBlock:
    """Anonymous shared memory behind a file descriptor.

    It has no name that could outlive its users: memfd where the system has it (Linux), else a POSIX segment
    that is unlinked as soon as it is open (macOS). It is created empty, so that its descriptor can be handed
    to workers before they have said how large it must be, and sized once.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, *, on_disk: bool = False) -> Self:
        """Make a new, empty block; `on_disk` makes it a file without a name in the directory for temporary files."""
        if on_disk:
            with tempfile.TemporaryFile() as file:
                return cls(os.dup(file.fileno()))
        return cls(os.memfd_create("aioenvs") if hasattr(os, "memfd_create") else unlinked_segment())

    def allocate(self, nbytes: int) -> mmap.mmap:
        """Give the block its size, filled with zeros, and map it.

        Raises:
            OSError: If the memory is not to be had.
        """
        os.ftruncate(self.fd, max(1, nbytes))
        return self.map(nbytes)

    def map(self, nbytes: int) -> mmap.mmap:
        """Map a block that has its size already."""
        self._map = mmap.mmap(self.fd, max(1, nbytes), **UNTRACKED)
        return self._map

    def close(self) -> None:
        """Give the descriptor back; the memory itself goes with the last array that looks into it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._map is not None:
            with contextlib.suppress(BufferError):  # arrays still point into it: it is unmapped when they go
                self._map.close()
            self._map = None


def unlinked_segment() -> int:
    """A POSIX shared memory segment whose name is gone before anyone else could learn it."""
    import _posixshmem  # what multiprocessing.shared_memory is built on

    name = f"/aioenvs-{secrets.token_hex(8)}"
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd


def own_memory(nbytes: int) -> mmap.mmap:
    """Memory of this process, for envs that live in it; it has its pages for itself, so that they can be pinned."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, max(1, nbytes))
