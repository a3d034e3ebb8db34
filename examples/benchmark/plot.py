"""A plot of speed over the number of envs, one line for each system."""

from collections.abc import Sequence
from pathlib import Path

from figures import Comparison

__all__ = ["draw", "lines_of"]


def lines_of(comparisons: Sequence[Comparison]) -> dict[str, list[tuple[int, float]]]:
    """Return, for each system, its speeds as pairs of the number of envs and env steps per second, in order."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for comparison in sorted(comparisons, key=lambda found: found.num_envs):
        for outcome in comparison.measured:
            name = outcome.system if outcome.layout == "inline" else f"{outcome.system}, {outcome.layout}"
            lines.setdefault(name, []).append((comparison.num_envs, outcome.median))
    return lines


def draw(comparisons: Sequence[Comparison], file: Path) -> None:
    """Draw one panel for each workload.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(comparison.workload for comparison in comparisons))
    figure = Figure(figsize=(9, 6 * len(names)), layout="constrained")
    for panel, name in zip(figure.subplots(len(names), squeeze=False).flat, names, strict=True):
        chosen = [comparison for comparison in comparisons if comparison.workload == name]
        for system, points in lines_of(chosen).items():
            bold = 2.5 if system.startswith("aioenvs") else 1.0
            panel.plot(*zip(*points, strict=True), marker="o", linewidth=bold, label=system)
        panel.set(xscale="log", yscale="log", xlabel="envs", ylabel="env steps/s", title=chosen[0].text)
        sizes = sorted({comparison.num_envs for comparison in chosen})
        panel.xaxis.minorticks_off()
        panel.set_xticks(sizes, labels=map(str, sizes))
        panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file)
