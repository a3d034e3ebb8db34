"""The command line: ``aioenvs run ENV_ID`` steps an environment with random actions.

Importing this module, and so ``aioenvs --help``, imports neither torch nor Gymnasium nor numpy.
"""

import argparse
import difflib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from aioenvs.registry import find_spec

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    import numpy.typing as npt

    from aioenvs import AsyncParallelEnv, AsyncSerialEnv

__all__ = ["main"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for a process that SIGINT ended: 128 + 2

MAX_SEED = 2**32 - 1
MAX_WORKERS = 65535
REFRESH_SECONDS = 0.1


class UsageError(Exception):
    """Two of the arguments contradict each other."""


class CommandError(Exception):
    """The command cannot go on; the message is all the user needs to see."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE) -> None:
        """Keep the exit code that goes with the message."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RunOptions:
    """What ``aioenvs run`` was asked to do; None leaves a choice to the library."""

    env_id: str
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

    def update(self, reward: "npt.NDArray[np.floating]", done: "npt.NDArray[np.bool_]") -> None:
        """Add one step of every environment.

        Args:
            reward: The rewards, of shape ``(num_envs,)``.
            done: Which episodes ended with this step, of shape ``(num_envs,)``.
        """
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
    """What a run has measured so far; it can be shown at any time.

    Attributes:
        options: What was asked.
        stats: The returns of the finished episodes.
        steps: How many times each environment was stepped.
        startup_seconds: From the construction to the end of the first reset; None before that.
        stepping_seconds: The time spent stepping.
        num_processes: The worker processes; None before they are up.
        memory_bytes: The private memory of each worker, as far as the platform tells.
    """

    options: RunOptions
    stats: EpisodeStats
    steps: int = 0
    startup_seconds: float | None = None
    stepping_seconds: float = 0.0
    num_processes: int | None = None
    memory_bytes: list[int] = field(default_factory=list)

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


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the option a misspelt one may stand for."""

    def unknown_arguments(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error that names the unknown arguments."""
        known = [option for action in self._actions for option in action.option_strings]
        options = [name.partition("=")[0] for name in unknown if name.startswith("-")]
        near = [match for name in options for match in difflib.get_close_matches(name, known, n=1)]
        hint = f" (did you mean {', '.join(near)}?)" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _integer(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Return an argparse type for the integers of ``[low, high]``."""
    allowed = f"an integer of at least {low}" if high == math.inf else f"an integer from {low} to {high}"

    def parse(text: str) -> int:
        with suppress(ValueError):
            if low <= (value := int(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"expected {allowed}, got {text!r}")

    return parse


def _build_parser() -> _Parser:
    """Describe the command line."""
    from aioenvs import __version__

    parser = _Parser(
        prog="aioenvs",
        description="Step many reinforcement-learning environments at once.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"aioenvs {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_run_command(commands)
    return parser


def _add_run_command(commands: "argparse._SubParsersAction[_Parser]") -> None:
    """Describe ``aioenvs run``."""
    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        help="step an environment with random actions and report speed, returns and memory",
        description="Step copies of one environment with random actions; report speed, returns and memory.",
        argument_default=argparse.SUPPRESS,  # the defaults are those of RunOptions
    )
    run.set_defaults(parser=run)
    add, count, workers = run.add_argument, _integer(1), _integer(1, MAX_WORKERS)
    add("env_id", metavar="ENV_ID", help="a Gymnasium id such as CartPole-v1, or module:id")
    add("--num-workers", type=workers, metavar="N", help="number of environments (default: 8)")
    add("--num-processes", type=count, metavar="N", help="processes that host them (default: one a core)")
    add("--steps", type=count, metavar="N", help="steps of each environment (default: 1000)")
    add("--seed", type=_integer(0, MAX_SEED), metavar="S", help="makes environments and actions repeatable")
    add("--backend", choices=["process", "serial"], help="where environments live (default: process)")
    add("--start-method", choices=["spawn", "forkserver", "fork"], help="how the processes start")


def check_options(options: RunOptions) -> None:
    """Check what no single argument can tell.

    Raises:
        UsageError: Two of the arguments contradict each other.
    """
    for_processes = {"--num-processes": options.num_processes, "--start-method": options.start_method}
    for name, value in for_processes.items():
        if options.backend == "serial" and value is not None:
            raise UsageError(f"{name} has no meaning with --backend serial, which starts no process")
    if options.num_processes is not None and options.num_processes > options.num_workers:
        raise UsageError(
            f"--num-processes {options.num_processes} is more than --num-workers {options.num_workers}: "
            "a process hosts at least one environment"
        )


def check_env_id(env_id: str) -> None:
    """Check that Gymnasium knows an id, before anything is started.

    Args:
        env_id: A Gymnasium id, or ``module:id``. The module is imported; the working directory counts
            as one of the places to look for it, as it does for ``python -m``.

    Raises:
        CommandError: Gymnasium is not installed, the id is not registered or not well formed, or its
            module cannot be imported.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        find_spec(env_id)
    except Exception as error:  # Gymnasium's own, or what importing a module raised
        code = EXIT_FAILURE if getattr(error, "name", None) == "gymnasium" else EXIT_USAGE
        raise CommandError(" ".join([one_line(error), *getattr(error, "__notes__", [])]), code) from error


def one_line(error: BaseException) -> str:
    """Return an exception's message on one line."""
    return " ".join(str(error).split())


def _describe(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    return f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")


def describe_failure(error: BaseException) -> str:
    """Return what ended a run: the error, its cause if it has one, and the notes on where it happened."""
    lines = [_describe(error)]
    if error.__cause__ is not None:
        lines.append(f"caused by {_describe(error.__cause__)}")
    return "\n".join([*lines, *getattr(error, "__notes__", [])])


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


def run(options: RunOptions) -> int:
    """Carry out ``aioenvs run``.

    Args:
        options: What was asked, checked by `check_options`.

    Returns:
        The exit code.

    Raises:
        CommandError: The environment id is unknown, Gymnasium is missing, or the run failed.
    """
    check_env_id(options.env_id)
    report = RunReport(options, EpisodeStats(options.num_workers))
    exit_code = 0
    try:
        _run_event_loop(report)
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    _print_summary(report)
    return exit_code


def _run_event_loop(report: RunReport) -> None:
    """Run to the end, with a live line on a terminal."""
    import asyncio

    import torch

    from aioenvs import errors

    if report.options.seed is not None:
        torch.manual_seed(report.options.seed)  # random actions come from torch's global generator
    try:
        with live_line(report) as show, asyncio.Runner(loop_factory=_event_loop_factory()) as runner:
            runner.run(_step_all(report, show))
    except Exception as error:
        # What an environment raised carries notes. Anything else is a bug, and shows its traceback.
        if not isinstance(error, errors.AioEnvsError) and not hasattr(error, "__notes__"):
            raise
        raise CommandError(describe_failure(error)) from error


async def _step_all(report: RunReport, show: Callable[[], None]) -> None:
    """Step the environments, keep the report current, and call `show` after every step.

    Cancelling it closes the environments and leaves in the report what was measured until then.
    """
    options = report.options
    build = _env_factory(options)
    constructed = time.perf_counter()
    async with build() as env:
        try:
            if options.seed is not None:
                await env.set_seed(options.seed)
            td = await env.reset()
            started = time.perf_counter()
            report.startup_seconds = started - constructed
            report.num_processes = env.num_processes
            while not report.complete:
                td, next_td = await env.step_and_maybe_reset(env.rand_action(td))
                report.steps += 1
                report.stepping_seconds = time.perf_counter() - started
                reward, done = td["next", "reward"], td["next", "done"]
                report.stats.update(reward.squeeze(-1).numpy(), done.squeeze(-1).numpy())
                td = next_td
                show()
        finally:
            report.memory_bytes = private_memory(env.pids)


def _env_factory(options: RunOptions) -> "Callable[[], AsyncParallelEnv | AsyncSerialEnv]":
    """Import what the run needs and return what constructs its environments."""
    from aioenvs import AsyncParallelEnv, AsyncSerialEnv

    if options.backend == "serial":
        return partial(AsyncSerialEnv, options.num_workers, options.env_id)
    return partial(
        AsyncParallelEnv,
        options.num_workers,
        options.env_id,
        num_processes=options.num_processes,
        mp_start_method=options.start_method,
    )


def _event_loop_factory() -> "Callable[[], asyncio.AbstractEventLoop] | None":
    """Return uvloop's loop, or None (asyncio's own) on a platform without uvloop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


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
    return rows


def _memory_text(memory_bytes: Sequence[int]) -> str:
    """Format the workers' memory: one number, or the range."""
    sizes = sorted({f"{size / 1e6:.1f}" for size in memory_bytes}, key=float)
    if not sizes:
        return "n/a"
    return f"{sizes[0]} MB" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} MB"


def _print_summary(report: RunReport) -> None:
    """Print the final table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    suffix = "" if report.complete else " (interrupted)"
    table = Table(title=escape(report.options.env_id + suffix), show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in summary_rows(report):
        table.add_row(*row)
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
        task = progress.add_task(report.options.env_id, total=report.options.steps, status="starting")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments, without the program's name; those of the process by default.

    Returns:
        The exit code: 0, 1 when the run failed, 2 for an unknown environment, 130 when interrupted.
        Arguments that make no sense raise ``SystemExit(2)``, as argparse does.
    """
    parser = _build_parser()
    args, unknown = parser.parse_known_args(argv)
    given = vars(args)
    command: _Parser = given.pop("parser", parser)
    if unknown:
        command.unknown_arguments(unknown)
    if given.pop("command") is None:
        parser.print_help()
        return 0
    options = RunOptions(**given)
    try:
        check_options(options)
        return run(options)
    except UsageError as error:
        command.error(str(error))
    except CommandError as error:
        print(f"{command.prog}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
