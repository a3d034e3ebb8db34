"""`aioenvs bench`: measures the user's own env, and says how it is best hosted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aioenvs.cli.errors import EXIT_INTERRUPTED, CommandError, describe_failure
from aioenvs.cli.recommend import Advice, Measured, Profile, duration, recommend, settings_to_try
from aioenvs.cli.targets import factory_named

__all__ = ["BenchOptions", "bench", "profile_rows", "result_rows"]


@dataclass(frozen=True)
class BenchOptions:
    """The options of ``aioenvs bench``; None leaves a choice to it."""

    target: str
    num_workers: int = 8
    num_processes: Sequence[int] | None = None
    seconds: float = 1.5


def bench(options: BenchOptions) -> int:
    """Carry out ``aioenvs bench``.

    Args:
        options: What was asked.

    Returns:
        The exit code.

    Raises:
        CommandError: The env is not there, or does not run.
    """
    from aioenvs.cli.measure import profile_of, try_all
    from aioenvs.engine.config import available_cores

    factory, cores = factory_named(options.target), available_cores()
    results: list[Measured] = []
    try:
        with _progress() as show:
            show("measuring one env by itself")
            profile = _guarded(lambda: profile_of(factory, min(1.0, options.seconds)))
            settings = settings_to_try(profile, options.num_workers, cores, options.num_processes)
            with contextlib.closing(try_all(factory, options.num_workers, settings, options.seconds, show)) as turns:
                for results in turns:  # noqa: B007  the last one counts, or the one before an interrupt
                    pass
    except KeyboardInterrupt:
        if any(found.speeds for found in results):
            _print_results(options, results, None)
        return EXIT_INTERRUPTED
    if not any(found.speed for found in results if found.setting.kind != "gymnasium"):
        raise CommandError(f"no setting could be measured: {results[0].failure}")
    _print_profile(options, profile, cores)
    _print_results(options, results, recommend(profile, results, options.num_workers, cores))
    return 0


def _guarded(measure: Callable[[], Profile]) -> Profile:
    try:
        return measure()
    except Exception as error:  # whatever the env raises
        raise CommandError(f"the env does not run: {describe_failure(error)}") from error


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line on a terminal, and nothing elsewhere."""
    if not sys.stdout.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, TextColumn

    # Redrawn when there is something new: no thread that could be left over after an interrupt, or be forked.
    with Progress(TextColumn("{task.description}"), console=Console(), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=escape(text), refresh=True)


def profile_rows(profile: Profile, cores: int) -> list[tuple[str, str]]:
    """Return the names and values of what is known of one env."""
    kind = "waits" if profile.waits else "computes"
    return [
        ("step", duration(profile.step_seconds)),
        ("CPU share of a step", f"{profile.cpu_share:.0%}: it {kind}"),
        ("first reset", duration(profile.reset_seconds)),
        ("observation", f"{profile.observation_bytes:,} bytes"),
        ("cores", str(cores)),
    ]


def result_rows(results: Sequence[Measured], advice: Advice | None) -> list[tuple[str, ...]]:
    """Return, for each setting, a mark, its text, env steps per second, the range, and the ratio to serial."""
    serial = next((found.speed for found in results if found.setting.kind == "serial"), 0.0)
    rows: list[tuple[str, ...]] = []
    for found in results:
        mark = "→" if advice is not None and found.setting == advice.setting else ""
        text = found.setting.label
        if not found.speed:
            rows.append((mark, text, "failed", found.failure or "", ""))
            continue
        spread = f"{min(found.speeds):,.0f} - {max(found.speeds):,.0f}"
        times = f"{found.speed / serial:.2f}" if serial else ""
        rows.append((mark, text, f"{found.speed:,.0f}", spread, times))
    return rows


def _print_profile(options: BenchOptions, profile: Profile, cores: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"one env of {options.target}"), show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in profile_rows(profile, cores):
        table.add_row(*row)
    Console().print(table)


def _print_results(options: BenchOptions, results: Sequence[Measured], advice: Advice | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    suffix = "" if advice is not None else " (interrupted)"
    table = Table(title=escape(f"{options.num_workers} envs of {options.target}{suffix}"))
    table.add_column("")
    table.add_column("setting")
    for name in ("env steps/s", "min - max", "x serial"):
        table.add_column(name, justify="right")
    for row in result_rows(results, advice):
        table.add_row(*map(escape, row))
    console = Console()
    console.print(table)
    if advice is not None:
        text = f"Recommended: {advice.setting.text(options.num_workers)}: {advice.reason}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
