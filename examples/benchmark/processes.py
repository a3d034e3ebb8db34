"""Processes as Linux shows them: who descends from whom, what they hold, and how to be rid of them."""

import contextlib
import ctypes
import os
import re
import signal
import statistics
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from figures import StartUp

__all__ = [
    "adopt_orphans",
    "descendants",
    "end",
    "end_with_parent",
    "in_session",
    "open_descriptors",
    "signal_all",
    "start_up_of",
]

PROC = Path("/proc")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none of them can be lost."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """End when the parent does, however it ends, and take all descendants along, frozen ones too."""

    def leave(number: int, frame: object) -> None:
        signal_all(descendants(os.getpid()), signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _stats() -> dict[int, tuple[int, int, str]]:
    """Parent, session and state of every process."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = (int(parent), int(session), state)
    return found


def descendants(pid: int) -> set[int]:
    """Return the children of a process, their children, and so on; those that have ended are left out."""
    stats = _stats()
    found = {pid}
    while more := {child for child, (parent, _, state) in stats.items() if parent in found and state != "Z"} - found:
        found |= more
    return found - {pid}


def in_session(session: int) -> set[int]:
    """Return the living processes of a session."""
    return {pid for pid, (_, its, state) in _stats().items() if its == session and state != "Z"}


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each of them that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(pids: Collection[int], grace: float) -> int:
    """Give processes some seconds to end, then kill the rest; return how many it had to kill."""
    until = time.monotonic() + grace
    while (living := set(pids) & set(_living())) and time.monotonic() < until:
        time.sleep(0.02)
    signal_all(living, signal.SIGKILL)
    signal_all(living, signal.SIGCONT)
    for pid in living:  # those whose parent ended are children of this process
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return len(living)


def _living() -> list[int]:
    return [pid for pid, (_, _, state) in _stats().items() if state != "Z"]


def open_descriptors(pid: int | str) -> int:
    """Count the open descriptors of a process."""
    with contextlib.suppress(OSError):
        return len(os.listdir(PROC / str(pid) / "fd"))
    return 0


def _memory(pid: int) -> tuple[float, float]:
    """Private and proportional memory of a process, in MB."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0.0, 0.0
    private = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB$", text, re.MULTILINE)
    proportional = re.findall(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
    return sum(map(int, private)) * 1.024e-3, sum(map(int, proportional)) * 1.024e-3


def start_up_of(seconds: float, descriptors: int) -> StartUp:
    """Describe what this process has started.

    Args:
        seconds: How long it took.
        descriptors: How many this process had before.
    """
    children = descendants(os.getpid())
    memory = [_memory(pid) for pid in children]
    private, proportional = ([pair[which] for pair in memory] for which in (0, 1))
    return StartUp(
        seconds=seconds,
        children=len(children),
        private_mb=statistics.median(private) if private else 0.0,
        private_total_mb=sum(private),
        proportional_mb=sum(proportional),
        descriptors=open_descriptors("self") - descriptors,
        child_descriptors=sum(map(open_descriptors, children)),
    )
