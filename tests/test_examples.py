"""Each example runs as a user would run it, and prints what it promises."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def start_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example to its end."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=55,
        check=False,
    )


def run_example(name: str, *arguments: str) -> str:
    """Run an example to its end, which is a good one; return what it printed."""
    done = start_example(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_quickstart_prints_the_same_shapes_for_both_faces() -> None:
    twin = [
        "reset: observation (4, 4)",
        *["step:  reward (4, 1) done (4, 1)"] * 3,
        "rollout: batch size (4, 50)",
    ]
    lines = run_example("quickstart.py").splitlines()
    assert lines == ["AsyncParallelEnv", *twin, "ParallelEnv", *twin]


def test_classic_loop_learns() -> None:
    output = run_example("classic_loop.py", "--seed", "0", "--iterations", "25")
    returns = [float(found) for found in re.findall(r"mean return +([0-9.]+)$", output, flags=re.MULTILINE)]
    assert len(returns) == 25
    assert statistics.fmean(returns[-3:]) > 2 * statistics.fmean(returns[:3])


def test_classic_loop_is_repeatable() -> None:
    first, second = (run_example("classic_loop.py", "--seed", "3", "--iterations", "2") for _ in range(2))
    assert first == second


def test_classic_loop_help_lists_the_options() -> None:
    output = run_example("classic_loop.py", "--help")
    assert "--seed" in output
    assert "--iterations" in output


def test_torch_env_learns_by_gradients_through_the_env() -> None:
    first, second = run_example("torch_env.py").splitlines()
    before, after = (float(found) for found in re.findall(r"-?[0-9.]+(?= before| after)", first))
    assert after > before / 2 > before
    assert second == "serial and parallel rollouts are equal: True"


def test_benchmark_measures_systems_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = "--num-envs 2 --repeats 2 --seconds 0.05 --peers floor gymnasium aioenvs --start-up --json"
    output = run_example("benchmark", *arguments.split(), str(file))
    for text in ("x floor", "aioenvs SerialEnv", "Gymnasium AsyncVectorEnv", "s to first step", "skipped sb3: "):
        assert text in output
    assert "FAILED" not in output
    measured = json.loads(file.read_text())
    assert measured["machine"]["cores"] >= 1
    (comparison,) = measured["comparisons"]
    assert comparison["num_envs"] == 2
    found = {outcome["system"]: outcome for outcome in comparison["outcomes"]}
    assert {len(outcome["turns"]) for outcome in found.values()} == {2}
    assert found["aioenvs SerialEnv"]["start_up"]["children"] == 0
    assert found["Gymnasium AsyncVectorEnv"]["start_up"]["children"] == 2
    assert found["Gymnasium AsyncVectorEnv"]["note"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--work CartPoel-v1", "'CartPoel-v1' is neither one of cartpole, "),
        ("--num-envs 0", "expected an integer of at least 1, got '0'"),
        ("--seconds nan", "expected a positive number of seconds, got 'nan'"),
        ("--peers sb4", "invalid choice: 'sb4'"),
    ],
)
def test_benchmark_says_what_it_does_not_know(arguments: str, message: str) -> None:
    done = start_example("benchmark", *arguments.split())
    assert done.returncode == 2
    assert message in done.stderr
