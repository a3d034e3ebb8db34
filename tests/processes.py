"""Finding processes, and waiting for them to end, whoever their parent is."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = ["children", "still_alive"]

LISTED = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def children(pid: int) -> set[int]:
    """Return the ids of all processes below one, those that await burial included."""
    if not LISTED:
        with contextlib.suppress(psutil.NoSuchProcess):
            return {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return set()
    below: set[int] = set()
    left = [pid]
    while left:
        found = set(_listed(left.pop())) - below
        below |= found
        left += found
    return below


def _listed(pid: int) -> list[int]:
    """The children of one process, of whichever of its threads: the system's own list, so no other process is read."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as listing:
                found += map(int, listing.read().split())
    return found


def still_alive(processes: Iterable[psutil.Process], patience: float = 5.0) -> list[psutil.Process]:
    """Those of the processes that have not ended after so many seconds; one that only awaits burial has ended."""
    deadline = time.monotonic() + patience
    left = [process for process in processes if _alive(process)]
    while left and time.monotonic() < deadline:
        psutil.wait_procs(left, 0.05)
        left = [process for process in left if _alive(process)]
    return left


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
