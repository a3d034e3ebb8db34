"""Measures aioenvs beside other libraries and beside the floor, on the same work and in one run.

    python examples/benchmark --peers all --num-envs 8 32
    python examples/benchmark --work halfcheetah busy uneven --peers all --json figures.json

All systems step the same env, begin a new episode where one ends, and hand out results that are the caller's own. They
take turns, A B C A B C ..., each in a process of its own, so that a noisy machine is noisy for all. Tables give
medians, and medians of the ratios within a turn. The floor is a hand-written loop of bare socketpairs and
shared arrays.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import processes
import workloads
from contest import Entry, Rules, compete
from figures import Comparison
from peers import PEERS, load
from plot import draw
from rich.console import Console
from rich.markup import escape
from systems import System
from tables import left_out, speed_table, start_up_table
from workloads import Workload, find_workloads

QUICK = ("floor", "aioenvs", "gymnasium")


def suits(system: System, workload: Workload) -> bool:
    """Whether a system is of interest for a workload."""
    return (
        workload.kind in system.kinds
        and (workload.first_ready or not system.first_ready)
        and (workload.waits or not system.for_waiting)
    )


def entries_for(peers: Sequence[str], workload: Workload, num_envs: int, packed: int, *, one_each: bool) -> list[Entry]:
    """Return the systems that enter.

    Args:
        peers: The libraries.
        workload: What they do.
        num_envs: With how many envs.
        packed: How many processes those have that can share them.
        one_each: Whether those systems also enter with one process for each env, where that is not the same.
    """
    entries = []
    for peer in peers:
        for index, system in enumerate(load(peer)):
            count = {"inline": 0, "one": 1, "packed": packed, "each": num_envs}[system.layout]
            twin = any(entry.system.name == system.name and entry.num_processes == count for entry in entries)
            more = system.layout == "each" and any(entry.system.name == system.name for entry in entries)
            if suits(system, workload) and not twin and (one_each or not more):
                entries.append(Entry(peer, index, system, count))
    return entries


def count(text: str) -> int:
    """Read a number of at least 1."""
    if not text.isdecimal() or not (value := int(text)):
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def duration(text: str) -> float:
    """Read a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    names = ", ".join([*workloads.WORKLOADS, *workloads.GROUPS])
    found = argparse.ArgumentParser(
        prog="python examples/benchmark", description="Measure aioenvs beside other libraries, on the same work."
    )
    add = found.add_argument
    add(
        "--work",
        nargs="+",
        default=["cartpole"],
        metavar="NAME",
        help=f"{names}, or a Gymnasium id (default: cartpole)",
    )
    add("--num-envs", nargs="+", type=count, metavar="N", help="numbers of envs (default: what suits the work)")
    add("--num-processes", type=count, metavar="N", help="processes of systems that share them (default: one a core)")
    add(
        "--peers",
        nargs="+",
        default=list(QUICK),
        choices=[*PEERS, "all"],
        metavar="NAME",
        help=f"{', '.join(PEERS)} or all (default: {' '.join(QUICK)}, which start in seconds)",
    )
    add("--one-each", action="store_true", help="systems that share processes also enter with one for each env")
    add("--systems", default="", metavar="TEXT", help="only systems whose name has this in it, and the floor")
    add("--repeats", type=count, default=5, metavar="N", help="turns of each system (default: 5)")
    add("--seconds", type=duration, default=0.3, metavar="S", help="length of a turn (default: 0.3)")
    add("--timeout", type=duration, default=120.0, metavar="S", help="for a start or a turn (default: 120)")
    add("--start-up", action="store_true", help="also show time to the first step, memory and descriptors")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--plot", type=Path, metavar="FILE", help="plot env steps/s over the number of envs (needs matplotlib)")
    return found


def machine() -> dict[str, Any]:
    """Describe where this runs."""
    model = [line.partition(":")[2] for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model[0].strip() if model else platform.machine(),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {peer.distribution: peer.version for peer in PEERS.values() if peer.missing() is None},
    }


def _lines(file: str) -> list[str]:
    return Path(file).read_text().splitlines() if Path(file).exists() else []


def measure(options: argparse.Namespace, chosen: Sequence[Workload], peers: Sequence[str], console: Console) -> Any:
    """Run all comparisons and print each as soon as it is there."""
    cores = len(os.sched_getaffinity(0))
    rules = Rules(options.repeats, options.seconds, min(0.25 * options.seconds, 1.0), options.timeout)
    absent = [(name, peer.missing() or "") for name, peer in PEERS.items() if peer.missing()]
    absent += [(name, "not asked for (--peers)") for name in PEERS if name not in peers and not PEERS[name].missing()]
    comparisons = []
    for workload in chosen:
        if reason := workload.missing():
            console.print(f"skipped {workload.name}: {reason}", markup=False)
            continue
        for num_envs in options.num_envs or workload.num_envs:
            packed = min(num_envs, options.num_processes or workload.num_processes or cores)
            entries = entries_for(peers, workload, num_envs, packed, one_each=options.one_each or workload.waits)
            wanted = [entry for entry in entries if options.systems in entry.system.name or entry.peer == "floor"]
            with console.status("") as status:
                comparison = compete(workload, num_envs, cores, wanted, rules, lambda text: status.update(escape(text)))
            comparisons.append(comparison)
            show(comparison, absent, options.start_up, console)
    return comparisons


def show(comparison: Comparison, absent: Sequence[tuple[str, str]], start_up: bool, console: Console) -> None:
    """Print what came of a comparison."""
    if comparison.measured:
        console.print(speed_table(comparison))
        if start_up:
            console.print(start_up_table(comparison))
    for line in left_out(comparison, absent):
        console.print(line, markup=False, highlight=False)
    console.print()


def main() -> None:
    """Read the arguments, measure, and print."""
    command = parser()
    options = command.parse_args()
    try:
        chosen = [workload for name in options.work for workload in find_workloads(name)]
    except LookupError as error:
        command.error(str(error.args[0]))
    names = list(PEERS) if "all" in options.peers else list(dict.fromkeys(options.peers))
    peers = [name for name in names if PEERS[name].missing() is None]
    processes.adopt_orphans()
    console = Console(width=None if os.isatty(1) else 180)
    here = machine()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    console.print(
        f"{here['cores']} cores ({here['cpu']}), load {here['load_before']:.1f}; Python {here['python']}, {versions}",
        f"{options.repeats} turns of {options.seconds} s; one thread each for OpenMP and BLAS unless set otherwise",
        sep="\n",
        highlight=False,
    )
    if here["load_before"] > 0.5 * here["cores"]:
        console.print("Other programs use this machine: what follows is provisional, and favours many processes.")
    comparisons = measure(options, chosen, peers, console)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": here, "comparisons": [c.to_json() for c in comparisons]}, indent=1)
        )
    if options.plot:
        draw(comparisons, options.plot)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # what a shell reports for it; the systems have been ended
