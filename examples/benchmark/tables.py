"""Tables of what was measured, for a terminal."""

from collections.abc import Iterable, Sequence

from figures import Comparison, Outcome, ratio
from rich.markup import escape
from rich.table import Table

__all__ = ["left_out", "speed_table", "start_up_table"]


def speed_table(comparison: Comparison) -> Table:
    """Return speeds: the median, the range, what is not the envs' own, and ratios to those that are of interest."""
    c = comparison
    table = Table(title=escape(f"{c.workload}: {c.text}; {c.num_envs} envs"), title_justify="left")
    table.add_column("system, processes", no_wrap=True)
    columns = ["env steps/s", "min - max", "ms a round", "parent CPU", "its us a round"]
    if any(c.overhead(found) is not None for found in c.measured):
        columns.append("overhead, ms")
    if c.floor_for(Outcome("", "", 0)):
        columns.append("x floor")
    if c.ideal:
        columns.append("x ideal")
    for name in (*columns, *(f"{_short(found)} / this" for found in c.headlines)):
        table.add_column(escape(name), justify="right")
    for outcome in sorted(c.measured, key=lambda found: -found.median):
        table.add_row(*map(escape, speed_row(c, outcome)))
    return table


def speed_row(comparison: Comparison, outcome: Outcome) -> list[str]:
    """Return the cells of a row."""
    speeds, median = outcome.speeds, outcome.median
    cells = [
        outcome.label + (" *" if outcome.native else ""),
        f"{median:,.0f}",
        f"{min(speeds):,.0f} - {max(speeds):,.0f}",
        _milliseconds(1e3 * comparison.num_envs / median),
        f"{outcome.parent_cpu:.1%}",
        f"{comparison.num_envs * outcome.parent_us:,.0f}",
    ]
    if (overhead := comparison.overhead(outcome)) is not None:
        cells.append(_milliseconds(1e3 * overhead))
    if floor := comparison.floor_for(outcome):
        cells.append(f"{ratio(speeds, floor.speeds):.2f}")
    if comparison.ideal:
        cells.append(f"{median / comparison.ideal:.2f}")
    return [*cells, *(f"{ratio(found.speeds, speeds):.2f}" for found in comparison.headlines)]


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(outcome: Outcome) -> str:
    return outcome.label.removeprefix("aioenvs ")


def start_up_table(comparison: Comparison) -> Table:
    """Return what it took to start each system that has processes."""
    table = Table(title=escape(f"start-up: {comparison.workload}, {comparison.num_envs} envs"), title_justify="left")
    table.add_column("system, processes", no_wrap=True)
    for name in (
        "s to first step",
        "children",
        "private MB each",
        "private MB",
        "proportional MB",
        "descriptors",
        "of children",
    ):
        table.add_column(name, justify="right")
    for outcome in comparison.outcomes:
        if (found := outcome.start_up) is not None:
            table.add_row(
                escape(outcome.label),
                f"{found.seconds:.2f}",
                f"{found.children}",
                f"{found.private_mb:,.0f}",
                f"{found.private_total_mb:,.0f}",
                f"{found.proportional_mb:,.0f}",
                f"{found.descriptors:+}",
                f"{found.child_descriptors:,}",
            )
    return table


def left_out(comparison: Comparison, absent: Iterable[tuple[str, str]]) -> Sequence[str]:
    """Return lines that say what was not measured and why, and what else must be known."""
    lines = [f"skipped {name}: {reason}" for name, reason in absent]
    for outcome in comparison.outcomes:
        lines += [f"skipped {outcome.label}: {outcome.skipped}"] if outcome.skipped else []
        lines += [f"FAILED {outcome.label}: {outcome.failure}"] if outcome.failure else []
        lines += [f"{outcome.label}: {outcome.note}"] if outcome.note else []
    remarks = {outcome.system: outcome.remark for outcome in comparison.measured if outcome.remark}
    lines += [f"{system}: {remark}" for system, remark in remarks.items()]
    if any(outcome.native for outcome in comparison.measured):
        lines.append("* steps C++ rewrites of the envs in threads, not the Python envs of the others: another thing")
    return lines
