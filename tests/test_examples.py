"""Each example runs as a user would run it, and prints what it promises."""

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: str) -> str:
    """Run an example to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=55,
        check=False,
    )
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


def test_classic_loop_learns_and_is_repeatable() -> None:
    output = run_example("classic_loop.py", "--seed", "0", "--iterations", "25")
    returns = [float(found) for found in re.findall(r"mean return +([0-9.]+)$", output, flags=re.MULTILINE)]
    assert len(returns) == 25
    assert statistics.fmean(returns[-3:]) > 2 * statistics.fmean(returns[:3])
    again = run_example("classic_loop.py", "--seed", "0", "--iterations", "2")
    assert again.splitlines() == output.splitlines()[:2]


def test_classic_loop_help_lists_the_options() -> None:
    output = run_example("classic_loop.py", "--help")
    assert "--seed" in output
    assert "--iterations" in output


def test_torch_env_learns_by_gradients_through_the_env() -> None:
    first, second = run_example("torch_env.py").splitlines()
    before, after = (float(found) for found in re.findall(r"-?[0-9.]+(?= before| after)", first))
    assert after > before / 2 > before
    assert second == "serial and parallel rollouts are equal: True"


def test_coroutine_envs_await_at_the_same_time() -> None:
    output = run_example("coroutine_env.py", "--envs", "40", "--steps", "3", "--seconds", "0.2")
    found = re.search(r"steps/s: (\d+); ideal, .* took time: 200; one env after the other: 5$", output, re.MULTILINE)
    assert found is not None, output
    assert int(found[1]) <= 200


def test_coroutine_env_help_lists_the_options() -> None:
    output = run_example("coroutine_env.py", "--help")
    for option in ("--envs", "--processes", "--steps", "--seconds"):
        assert option in output


def run_async_trainer(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the async trainer after some code of the test's."""
    path = str(EXAMPLES / "async_trainer.py")
    code = f"import runpy, sys; {code}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)


def test_async_trainer_learns_and_draws_its_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    done = run_async_trainer("pass", "--total-frames", "15360", "--output", str(picture))
    assert done.returncode == 0, done.stderr
    assert int(re.findall(r"^ *(\d+) frames .* mean return", done.stdout, flags=re.MULTILINE)[-1]) == 10240
    assert float(re.findall(r"final mean return ([0-9.]+)", done.stdout)[0]) > 50
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_async_trainer_says_so_at_once_if_it_cannot_draw() -> None:
    done = run_async_trainer("sys.modules['matplotlib'] = None")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("pip install 'aioenvs[examples]'\n")


def test_async_trainer_help_lists_the_options() -> None:
    output = run_example("async_trainer.py", "--help")
    assert all(option in output for option in ("--seed", "--total-frames", "--output"))
