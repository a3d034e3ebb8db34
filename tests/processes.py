"""Waiting for processes to end, whoever their parent is."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

__all__ = ["still_alive"]


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
