"""The report of `aioenvs run`: a live line while it measures, and a table at the end."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

REFRESH_SECONDS = 0.1


@dataclass(frozen=True)
class RunOptions:
    """The options of ``aioenvs run``; None leaves a choice to the library."""

    target: str
    num_workers: int = 8
    num_processes: int | None = None
    steps: int = 1000
    seed: int | None = None
    backend: str = "process"
    start_method: str | None = None


class EpisodeStats:
    """Returns of finished episodes, accumulated over batches of steps.

    Example:
        >>> import numpy as np
        >>> stats = EpisodeStats(num_envs=2)
        >>> stats.update(np.array([1.0, 5.0]), np.array([False, True]))
        >>> stats.update(np.array([1.0, 7.0]), np.array([True, False]))
        >>> stats.count, stats.mean, stats.std
        (2, 3.5, 1.5)
    """

    def __init__(self, num_envs: int) -> None:
        """Start with no finished episode."""
        import numpy as np

        self._running: npt.NDArray[np.float64] = np.zeros(num_envs)
        self._returns: list[float] = []
        self._total = 0.0

    def update(self, reward: npt.NDArray[np.floating], done: npt.NDArray[np.bool_]) -> None:
        """Add one step of every environment: its rewards and whether its episode ended, both ``(num_envs,)``."""
        self._running += reward
        if done.any():
            finished = self._running[done].tolist()
            self._returns += finished
            self._total += math.fsum(finished)
            self._running[done] = 0.0

    @property
    def count(self) -> int:
        """The number of finished episodes."""
        return len(self._returns)

    @property
    def mean(self) -> float | None:
        """The mean return; None before the first episode ended."""
        return self._total / self.count if self._returns else None

    @property
    def std(self) -> float | None:
        """The population standard deviation of the returns; None before the first episode ended."""
        if (mean := self.mean) is None:
            return None
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self._returns) / self.count)


@dataclass
class RunReport:
    """The measurements of a run so far, which can be shown at any time.

    Attributes:
        options: What was asked.
        stats: The returns of the finished episodes.
        steps: How many times each environment was stepped.
        startup_seconds: From the construction to the end of the first reset; None before that.
        stepping_seconds: The time spent stepping.
        num_processes: The worker processes; None before they are up.
        memory_bytes: The private memory of each worker, as far as the platform tells.
        advice: What the envs themselves warned of, such as that they would be quicker hosted otherwise.
    """

    options: RunOptions
    stats: EpisodeStats
    steps: int = 0
    startup_seconds: float | None = None
    stepping_seconds: float = 0.0
    num_processes: int | None = None
    memory_bytes: list[int] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    @property
    def env_steps_per_second(self) -> float | None:
        """Steps a second summed over the environments; None before the first step."""
        if self.steps == 0 or self.stepping_seconds <= 0:
            return None
        return self.steps * self.options.num_workers / self.stepping_seconds

    @property
    def complete(self) -> bool:
        """Whether every step was taken."""
        return self.steps == self.options.steps


def parse_private_bytes(smaps_rollup: str) -> int:
    """Return the bytes that a process shares with no other, given its ``/proc/<pid>/smaps_rollup``."""
    fields = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB$", smaps_rollup, flags=re.MULTILINE)
    return 1024 * sum(map(int, fields))


def private_memory(pids: Sequence[int], proc: Path = Path("/proc")) -> list[int]:
    """Return the bytes of private memory of each process whose ``smaps_rollup`` can be read."""
    found = []
    for pid in pids:
        with suppress(OSError):
            found.append(parse_private_bytes((proc / str(pid) / "smaps_rollup").read_text()))
    return found


def _number(value: float | None, unit: str = "", digits: int = 1) -> str:
    """Format a number that may not be known."""
    return "n/a" if value is None else f"{value:,.{digits}f}{unit}"


def summary_rows(report: RunReport) -> list[tuple[str, str]]:
    """Return the names and values of the final table; what was not measured is ``"n/a"``."""
    stats = report.stats
    rows = [
        ("environments", str(report.options.num_workers)),
        ("steps of each", f"{report.steps:,}"),
        ("env steps/s", _number(report.env_steps_per_second, digits=0)),
        ("episodes", f"{stats.count:,}"),
        ("return (mean ± std)", f"{_number(stats.mean)} ± {_number(stats.std)}" if stats.count else "n/a"),
        ("start-up", _number(report.startup_seconds, " s", digits=2)),
    ]
    if report.options.backend == "process":
        rows.append(("worker processes", _number(report.num_processes, digits=0)))
        rows.append(("private memory of each", _memory_text(report.memory_bytes)))
    elif report.options.backend == "ray":
        rows.append(("actors", _number(report.num_processes, digits=0)))
    return rows


def _memory_text(memory_bytes: Sequence[int]) -> str:
    """Format the workers' memory: one number, or the range."""
    sizes = sorted({f"{size / 1e6:.1f}" for size in memory_bytes}, key=float)
    if not sizes:
        return "n/a"
    return f"{sizes[0]} MB" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} MB"


def print_summary(report: RunReport) -> None:
    """Print the final table, and what there is to advise."""
    from rich.console import Console

    print_table(report.options.target + ("" if report.complete else " (interrupted)"), summary_rows(report))
    for advice in report.advice:
        Console().print(advice, markup=False, highlight=False)


def print_table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print rows of text as a table: names and values, or what the header says, numbers from the third column on."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), show_header=bool(header))
    for place, name in enumerate(header or ("", "")):
        is_number = place > 1 if header else place == 1
        table.add_column(name, style=None if header or place else "bold", justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


@contextmanager
def live_line(report: RunReport) -> Iterator[Callable[[], None]]:
    """Show the report on one line of the terminal while the block runs.

    Yields:
        A function that redraws the line, at most ten times a second; it does nothing where stdout is
        not a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console()
    if not sys.stdout.isatty():
        yield lambda: None
        return
    name, status = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[status]}"))
    columns = (name, BarColumn(bar_width=10), MofNCompleteColumn(), status)
    # Redrawn by the event loop itself: no thread that could be left over after an interrupt.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(report.options.target, total=report.options.steps, status="starting")
        progress.refresh()
        shown = -math.inf

        def show() -> None:
            nonlocal shown
            if (now := time.monotonic()) - shown >= REFRESH_SECONDS:
                shown = now
                progress.update(task, completed=report.steps, status=_status(report), refresh=True)

        yield show


def _status(report: RunReport) -> str:
    """Return the changing part of the live line."""
    speed, mean = _number(report.env_steps_per_second, digits=0), _number(report.stats.mean)
    return f"{speed} env steps/s · {report.stats.count:,} episodes · mean return {mean}"
