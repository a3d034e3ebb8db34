"""The example `benchmark`: its figures and tables, and what it does with systems that fail or hang."""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from rich.console import Console

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent.parent / "examples" / "benchmark"
NAMES = ("figures", "tables", "plot", "processes", "systems", "workloads", "contest", "peers")


class Modules:
    """The modules of the example, which are no package."""

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(name)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield Modules()
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def outcome_of(example: Any, system: str, num_processes: int, *speeds: float, **more: Any) -> Any:
    turns = [example.figures.Turn(steps=round(speed), seconds=1.0, cpu=0.25) for speed in speeds]
    return example.figures.Outcome(system, "packed", num_processes, turns=turns, **more)


# -- figures and tables -------------------------------------------------------------------------------


def test_ratios_are_taken_within_turns(example: Any) -> None:
    assert example.figures.ratio([10, 100, 1000], [5, 50, 500]) == 2
    assert example.figures.ratio([1, 9, 9], [1, 3, 1]) == 3
    with pytest.raises(ValueError, match="found 2 and 1"):
        example.figures.ratio([1, 2], [1])
    with pytest.raises(ValueError, match="found 0 and 0"):
        example.figures.ratio([], [])


def test_an_outcome_gives_medians(example: Any) -> None:
    outcome = outcome_of(example, "aioenvs", 2, 100, 400, 200)
    assert outcome.median == 200
    assert outcome.parent_cpu == 0.25
    assert outcome.label == "aioenvs, 2"
    assert outcome.counts
    outcome.failure = "turn 4: hung"
    assert not outcome.counts


def test_a_system_is_compared_with_the_floor_of_as_many_processes(example: Any) -> None:
    comparison = example.figures.Comparison("cartpole", "", 8, 2)
    many, few = (outcome_of(example, "floor", count, 100) for count in (8, 2))
    mine = [outcome_of(example, "aioenvs", count, 50) for count in (8, 2, 0, 5)]
    comparison.outcomes = [many, few, *mine]
    assert [comparison.floor_for(outcome) for outcome in mine] == [many, few, few, few]
    comparison.outcomes = [*mine]
    assert comparison.floor_for(mine[0]) is None


def test_a_row_has_speed_spread_and_ratios(example: Any) -> None:
    comparison = example.figures.Comparison("busy", "", 10, 2, ideal=400.0)
    floor = outcome_of(example, "floor", 2, 400, 200)
    mine = outcome_of(example, "aioenvs face", 2, 200, 100, headline=True)
    native = outcome_of(example, "C++", 2, 800, 400, native=True)
    comparison.outcomes = [floor, mine, native]
    row = example.tables.speed_row(comparison, native)
    assert row == ["C++, 2 *", "600", "400 - 800", "16.7", "25.0%", "4,688", "2.00", "1.50", "0.25"]
    table = example.tables.speed_table(comparison)
    assert table.row_count == 3
    assert len(table.columns) == len(row)
    assert any("another thing" in line for line in example.tables.left_out(comparison, []))


def test_overhead_is_what_a_round_takes_besides_the_envs(example: Any) -> None:
    comparison = example.figures.Comparison("cartpole", "", 10, 2)
    mine = [outcome_of(example, "aioenvs", count, 500, 100) for count in (0, 1, 4)]
    comparison.outcomes = [*mine]
    assert comparison.overhead(mine[0]) is None
    comparison.outcomes.append(outcome_of(example, "envs alone", 0, 1000, 1000))
    assert [comparison.overhead(each) for each in mine] == [
        pytest.approx(0.05),
        pytest.approx(0.05),
        pytest.approx(0.055),
    ]


def test_what_is_left_out_is_said_with_its_reason(example: Any) -> None:
    comparison = example.figures.Comparison("cartpole", "", 8, 2)
    comparison.outcomes = [
        outcome_of(example, "a", 0, skipped="no memory"),
        outcome_of(example, "b", 2, failure="start: OSError: gone"),
        outcome_of(example, "c", 2, 10, note="left 3 processes behind"),
    ]
    assert example.tables.left_out(comparison, [("sb3", "not installed")]) == [
        "skipped sb3: not installed",
        "skipped a: no memory",
        "FAILED b, 2: start: OSError: gone",
        "c, 2: left 3 processes behind",
    ]


def test_lines_of_a_plot_are_in_order_of_size(example: Any) -> None:
    comparisons = []
    for num_envs, speed in ((8, 80), (2, 20)):
        comparison = example.figures.Comparison("cartpole", "", num_envs, 2)
        comparison.outcomes = [outcome_of(example, "aioenvs", 2, speed), outcome_of(example, "b", 2, failure="gone")]
        comparisons.append(comparison)
    assert example.plot.lines_of(comparisons) == {"aioenvs, packed": [(2, 20), (8, 80)]}


def test_workloads_are_found_by_name_and_by_id(example: Any) -> None:
    assert example.workloads.find_workload("busy").ideal(16, 2) == pytest.approx(2000)
    assert example.workloads.find_workload("uneven").ideal(16, 2) == pytest.approx(16 / 0.0044)
    assert example.workloads.find_workload("Acrobot-v1").make().spec.id == "Acrobot-v1"
    with pytest.raises(LookupError, match="'CartPoel-v1' is neither one of cartpole, "):
        example.workloads.find_workload("CartPoel-v1")


def test_brackets_in_names_are_shown(example: Any) -> None:
    comparison = example.figures.Comparison("one", "await env[i].step()", 8, 2)
    comparison.outcomes = [outcome_of(example, "aioenvs env[i]", 8, 10, headline=True)]
    start_up = example.figures.StartUp(0.5, 8, 6.0, 48.0, 60.0, 16, 40)
    comparison.outcomes[0].start_up = start_up
    console = Console(width=180, file=io.StringIO())
    console.print(example.tables.speed_table(comparison), example.tables.start_up_table(comparison))
    shown = console.file.getvalue()
    assert "await env[i].step()" in shown
    assert shown.count("aioenvs env[i], 8") == 2
    assert "env[i], 8 / this" in shown


def measured(file: Path, arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The comparisons that short turns give, and what was printed."""
    done = subprocess.run(
        [sys.executable, str(FOLDER), *arguments.split(), "--repeats=1", "--seconds=0.1", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout
    comparisons = json.loads(file.read_text())["comparisons"]
    turns = [turn for each in comparisons for outcome in each["outcomes"] for turn in outcome["turns"]]
    assert all(turn["steps"] > 0 for turn in turns)
    return comparisons, done.stdout


def test_waiting_work_and_single_envs_are_compared_with_the_ideal_and_the_floor(tmp_path: Path) -> None:
    arguments = "--work coroutine uneven one --num-envs 4 --num-processes 2 --peers floor aioenvs --systems Async"
    (coroutine, uneven, one), shown = measured(tmp_path / "figures.json", arguments)
    assert "skipped aioenvs" not in shown
    assert (coroutine["ideal"], uneven["ideal"], one["ideal"]) == (80, pytest.approx(4 / 0.0044), None)
    assert names(coroutine) == ["aioenvs AsyncParallelEnv, 2"]
    assert {"aioenvs AsyncParallelEnv recv, 4", "aioenvs AsyncParallelEnv, 4", "floor, 4"} <= set(names(uneven))
    assert names(one) == ["floor, 4", "aioenvs AsyncParallelEnv env[i], 4"]
    assert shown.count("x ideal") == 2


def test_layers_are_measured_one_by_one(tmp_path: Path) -> None:
    (cartpole,), _ = measured(tmp_path / "figures.json", "--num-envs 4 --num-processes 2 --peers floor layers")
    layers = [f"aioenvs layers: {layer}, 2" for layer in ("frames", "+ pool", "+ arrays")]
    bare = ["envs alone, 0", "floor, 2", "pipe, 2", "asyncio pipe + td, 2"]
    assert sorted(names(cartpole)) == sorted([*bare, *layers])
    assert all(outcome["turns"] for outcome in cartpole["outcomes"])


def test_vector_envs_are_compared_with_stepping_them_by_hand(example: Any, tmp_path: Path) -> None:
    several = [workload.name for workload in example.workloads.find_workloads("vector")]
    assert several == ["vector-cartpole", "vector-envpool", "vector-pong"]
    arguments = "--work vector-cartpole --num-envs 8 --num-processes 2 --peers floor aioenvs --systems Async"
    (cartpole,), _ = measured(tmp_path / "figures.json", arguments)
    by_hand = ["by hand, arrays, 0", "by hand, TensorDicts, 0"]
    hosted = ["aioenvs AsyncSerialEnv, 0", "aioenvs AsyncParallelEnv, 1", "aioenvs AsyncParallelEnv, 2"]
    assert sorted(names(cartpole)) == sorted([*by_hand, *hosted])


def names(comparison: dict[str, Any]) -> list[str]:
    return [f"{outcome['system']}, {outcome['num_processes']}" for outcome in comparison["outcomes"]]


# -- systems that fail --------------------------------------------------------------------------------

FAULTY = """
import os
import time

from systems import Driver, System, Unsupported


class Faulty(Driver):
    def __init__(self, job):
        self.steps = 0
        if os.fork() == 0:
            time.sleep(1000)  # a child that nobody ends

    def step(self):
        self.steps += 1
        time.sleep(0.001)
        return 1

    def close(self):
        pass


class Late(Faulty):
    def turn(self, seconds):
        raise ZeroDivisionError("the ball left the field")


class Hanging(Faulty):
    def turn(self, seconds):
        time.sleep(1000)


class Dying(Faulty):
    def turn(self, seconds):
        print("no more", flush=True)
        os._exit(3)


def refuse(job):
    raise Unsupported("not here")


SYSTEMS = tuple(System(kind.__name__, "inline", kind) for kind in (Faulty, Late, Hanging, Dying))
SYSTEMS += (System("Refusing", "inline", refuse), System("Huge", "each", Faulty, process_mb=10**9))
"""


def test_systems_that_fail_harm_nobody_and_leave_nothing(tmp_path: Path) -> None:
    """A copy of the example, with a library of systems that fail in all ways, takes the place of its own."""
    folder = tmp_path / "benchmark"
    (folder / "peers").mkdir(parents=True)
    for file in (*FOLDER.glob("*.py"), FOLDER / "peers" / "__init__.py"):
        text = file.read_text().replace('"floor", "floor", "numpy"', '"floor", "faulty", "numpy"')
        (folder / file.relative_to(FOLDER)).write_text(text)
    (folder / "peers" / "faulty.py").write_text(FAULTY)
    figures = tmp_path / "figures.json"
    arguments = "--work frames --num-envs 1 --peers floor --repeats 2 --seconds 0.05 --timeout 3"
    done = subprocess.run(
        [sys.executable, str(folder), *arguments.split(), "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (comparison,) = json.loads(figures.read_text())["comparisons"]
    found = {outcome["system"]: outcome for outcome in comparison["outcomes"]}
    assert len(found["Faulty"]["turns"]) == 2
    assert found["Faulty"]["note"] == "left 1 processes behind, which were killed"
    assert found["Late"]["failure"] == "turn 1: ZeroDivisionError: the ball left the field"
    assert found["Hanging"]["failure"].startswith("turn 1: hung: no answer within 3")
    assert found["Dying"]["failure"] == "turn 1: ended with exit code 3; its last words: no more"
    assert found["Refusing"]["skipped"] == "not here"
    assert found["Huge"]["skipped"].startswith("1 processes need about 1,000,000,000 MB")
    for text in ("FAILED Late", "FAILED Hanging", "FAILED Dying", "skipped Refusing: not here"):
        assert text in done.stdout
    assert [child for child in _living() if str(folder) in " ".join(child)] == []


def _living() -> list[list[str]]:
    found = psutil.process_iter(["cmdline", "status"])
    return [one.info["cmdline"] or [] for one in found if one.info["status"] != psutil.STATUS_ZOMBIE]


def _states(found: list[psutil.Process]) -> set[str]:
    states = set()
    for one in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            states.add(one.status())
    return states


def test_a_benchmark_that_is_killed_leaves_nothing() -> None:
    command = [
        sys.executable,
        str(FOLDER),
        *["--work", "frames", "--num-envs", "2", "--peers", "gymnasium", "--seconds", "100"],
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    own = psutil.Process(process.pid)
    try:
        while psutil.STATUS_STOPPED not in _states(children := own.children(recursive=True)):  # one has its turn
            assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert psutil.wait_procs(children, timeout=30)[1] == []
