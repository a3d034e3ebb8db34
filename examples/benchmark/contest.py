"""Lets systems take turns, each in a process of its own that can fail or hang without harm to the others."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import processes
from figures import Comparison, Outcome, StartUp, Turn
from systems import System
from workloads import Workload

__all__ = ["Contestant", "Entry", "Failure", "Rules", "compete"]

RUNNER = Path(__file__).with_name("runner.py")
CLOSE_SECONDS = 20.0
GRACE_SECONDS = 2.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
MEMORY_SHARE = 0.6  # of what is available, for one system


class Failure(Exception):
    """A system failed, hung or ended; the message says how."""


class Declined(Exception):
    """A system has no place for the work."""


@dataclass(frozen=True)
class Rules:
    """What all systems get.

    Attributes:
        repeats: Turns of each.
        seconds: Length of a turn.
        warm_up: Seconds of stepping before each turn that do not count.
        timeout: Seconds that a start, or a turn beyond its length, may take.
    """

    repeats: int = 5
    seconds: float = 0.5
    warm_up: float = 0.1
    timeout: float = 120.0


@dataclass(frozen=True)
class Entry:
    """A system that enters, with its place in the module of its library."""

    peer: str
    index: int
    system: System
    num_processes: int


class Contestant:
    """A system at work in another process, its workers frozen whenever it is not its turn.

    Args:
        entry: The system.
        workload: Its name on the command line.
        num_envs: How many envs it has.
    """

    def __init__(self, entry: Entry, workload: str, num_envs: int) -> None:
        ours, theirs = socket.socketpair()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        arguments = (theirs.fileno(), workload, entry.peer, entry.index, num_envs, entry.num_processes or 1)
        self._process = subprocess.Popen(
            [sys.executable, str(RUNNER), *map(str, arguments)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=self._words,
            env={**ONE_THREAD, **os.environ},
            start_new_session=True,
        )
        theirs.close()
        self._sock, self._received = ours, b""
        self._exit = os.pidfd_open(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def _family(self) -> set[int]:
        return {self._process.pid, *self._workers}

    @property
    def _workers(self) -> set[int]:
        pid = self._process.pid
        return (processes.descendants(pid) | processes.in_session(pid)) - {pid}

    def started(self, timeout: float) -> StartUp:
        """Wait for the first step.

        Raises:
            Failure: If there was none.
            Declined: If the system has no place for the work.
        """
        return StartUp(**self._answer("started", timeout))

    def turn(self, rules: Rules) -> Turn:
        """Let the system have a turn.

        Raises:
            Failure: If it failed, or took much longer than it should.
        """
        self._say([rules.warm_up, rules.seconds])
        return Turn(**self._answer("turn", rules.warm_up + rules.seconds + rules.timeout))

    def close(self) -> str | None:
        """End the system; return what is to be said about how it ended."""
        workers = self._workers
        self._say("close")
        try:
            self._answer("closed", CLOSE_SECONDS)
            self._process.wait(CLOSE_SECONDS)
        except (Failure, subprocess.TimeoutExpired) as failure:
            return f"close: {failure}"
        left = processes.end(workers, GRACE_SECONDS)
        return f"left {left} processes behind, which were killed" if left else None

    def kill(self) -> None:
        """End what is left of it; not twice, as its number may be another's by then."""
        if self._sock.fileno() < 0:
            return
        processes.end(self._family, 0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self._sock.close()
        os.close(self._exit)
        self._words.close()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run within the block, and freeze its workers afterwards: some spin while nobody asks them."""
        processes.signal_all(self._workers, signal.SIGCONT)
        yield
        self.freeze()

    def freeze(self) -> None:
        """Stop its workers."""
        processes.signal_all(self._workers, signal.SIGSTOP)

    def _say(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, as the missing answer will show
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self, expected: str, timeout: float) -> Any:
        until = time.monotonic() + timeout
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._sock, self._exit], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise Failure(f"hung: no answer within {timeout:.0f} s{self._last_words()}")
            more = self._sock.recv(65536) if self._sock in ready else b""
            if not more:  # its children may have the other end, so that its exit is what tells
                raise Failure(f"ended with exit code {self._process.wait()}{self._last_words()}")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if "unsupported" in answer:
            raise Declined(answer["unsupported"])
        if "failed" in answer:
            raise Failure(answer["failed"])
        return answer[expected]

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; its last words: {last}" if last else ""


def compete(
    workload: Workload, num_envs: int, cores: int, entries: list[Entry], rules: Rules, say: Callable[[str], None]
) -> Comparison:
    """Start all systems, let them take turns, A B C A B C ..., and end them.

    Args:
        workload: What they do.
        num_envs: With how many envs.
        cores: For how many cores the ideal is computed.
        entries: The systems.
        rules: What they get.
        say: Is told what happens.
    """
    ideal = workload.ideal(num_envs, cores) if workload.ideal else None
    comparison = Comparison(workload.name, workload.text, num_envs, cores, ideal)
    with contextlib.ExitStack() as stack:
        playing: list[tuple[Outcome, Contestant]] = []
        for entry in entries:
            outcome = _outcome(entry)
            comparison.outcomes.append(outcome)
            say(f"{workload.name}, {num_envs} envs: starting {outcome.label}")
            if contestant := _start(outcome, entry, workload, num_envs, rules, stack):
                playing.append((outcome, contestant))
        for repeat in range(rules.repeats):
            say(f"{workload.name}, {num_envs} envs: turn {repeat + 1} of {rules.repeats}")
            playing = [pair for pair in playing if _turn(*pair, rules)]
        for outcome, contestant in playing:
            with contestant.awake():
                outcome.note = contestant.close()
            contestant.kill()
    return comparison


def _outcome(entry: Entry) -> Outcome:
    system = entry.system
    return Outcome(
        system.name, system.layout, entry.num_processes, system.native, system.headline, remark=system.remark
    )


def _start(
    outcome: Outcome, entry: Entry, workload: Workload, num_envs: int, rules: Rules, stack: contextlib.ExitStack
) -> Contestant | None:
    needed, available = entry.system.process_mb * entry.num_processes, _available_mb()
    if needed > MEMORY_SHARE * available:
        outcome.skipped = f"{entry.num_processes} processes need about {needed:,} MB, {available:,.0f} MB are available"
        return None
    contestant = stack.enter_context(Contestant(entry, workload.name, num_envs))
    try:
        outcome.start_up = contestant.started(rules.timeout)
    except Declined as reason:
        outcome.skipped = str(reason)
    except Failure as failure:
        outcome.failure = f"start: {failure}"
    else:
        contestant.freeze()
        return contestant
    contestant.kill()
    return None


def _turn(outcome: Outcome, contestant: Contestant, rules: Rules) -> bool:
    """Give a turn; return whether the system is still there."""
    try:
        with contestant.awake():
            outcome.turns.append(contestant.turn(rules))
    except Failure as failure:
        outcome.failure = f"turn {len(outcome.turns) + 1}: {failure}"
        contestant.kill()
        return False
    return True


def _available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1.024e-3
    return float("inf")
