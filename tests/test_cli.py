"""The command line: arguments, statistics and messages in this process; whole runs as a user starts them."""

import errno
import importlib.metadata
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import aioenvs
from aioenvs.cli import main as cli
from aioenvs.cli.report import EpisodeStats, RunOptions, RunReport, parse_private_bytes, private_memory, summary_rows
from aioenvs.cli.targets import check_env_id, describe_failure

SMAPS_ROLLUP = """\
55d0c0a00000-7ffd1a5f6000 ---p 00000000 00:00 0                          [rollup]
Rss:               28416 kB
Pss:               14200 kB
Shared_Clean:      12160 kB
Shared_Dirty:          4 kB
Private_Clean:      1000 kB
Private_Dirty:     15252 kB
Private_Hugetlb:       0 kB
Anonymous:         15252 kB
"""


def table_of(output: str) -> dict[str, str]:
    """The names and values of the table that a run prints."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    rows = (line.split("│") for line in plain.splitlines() if line.count("│") == 3)
    return {name.strip(): value.strip() for _, name, value, _ in rows}


# -- statistics ---------------------------------------------------------------------------------------


@st.composite
def reward_and_done(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    shape = draw(st.tuples(st.integers(0, 30), st.integers(1, 5)))
    reward = draw(hnp.arrays(np.float32, shape, elements=st.integers(-100, 100)))
    return reward, draw(hnp.arrays(np.bool_, shape))


@given(reward_and_done())
def test_episode_stats_equal_those_of_one_env_at_a_time(batches: tuple[np.ndarray, np.ndarray]) -> None:
    rewards, dones = batches
    stats = EpisodeStats(rewards.shape[1])
    returns = []
    for reward, done in zip(rewards, dones, strict=True):
        stats.update(reward, done)
    for env in range(rewards.shape[1]):
        total = 0.0
        for reward, done in zip(rewards[:, env], dones[:, env], strict=True):
            total += float(reward)
            if done:
                returns.append(total)
                total = 0.0
    assert stats.count == len(returns)
    if returns:
        assert stats.mean == pytest.approx(statistics.fmean(returns))
        assert stats.std == pytest.approx(statistics.pstdev(returns))
    else:
        assert stats.mean is None
        assert stats.std is None


def test_episode_stats_sum_float32_rewards_in_double_precision() -> None:
    stats = EpisodeStats(1)
    stats.update(np.array([2**24], dtype=np.float32), np.array([False]))
    stats.update(np.array([1], dtype=np.float32), np.array([True]))
    assert stats.mean == 2**24 + 1


def test_env_steps_per_second_counts_every_env() -> None:
    report = RunReport(RunOptions("X-v0", num_workers=4), EpisodeStats(4))
    assert report.env_steps_per_second is None
    report.steps, report.stepping_seconds = 50, 0.5
    assert report.env_steps_per_second == 400


def test_private_bytes_are_the_clean_and_the_dirty_ones() -> None:
    assert parse_private_bytes(SMAPS_ROLLUP) == (1000 + 15252) * 1024


def test_private_memory_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text(SMAPS_ROLLUP)
    assert private_memory([7, 8], proc=tmp_path) == [16252 * 1024]


def test_summary_says_what_was_never_measured() -> None:
    report = RunReport(RunOptions("X-v0"), EpisodeStats(8))
    unknown = {name for name, value in summary_rows(report) if value == "n/a"}
    assert unknown == {
        "env steps/s",
        "return (mean ± std)",
        "start-up",
        "worker processes",
        "private memory of each",
    }


def test_summary_gives_the_range_of_memory() -> None:
    report = RunReport(RunOptions("X-v0"), EpisodeStats(8))
    report.memory_bytes = [12_000_000, 9_500_000, 12_000_001]
    assert dict(summary_rows(report))["private memory of each"] == "9.5 to 12.0 MB"
    report.memory_bytes = [12_000_000, 12_000_001]
    assert dict(summary_rows(report))["private memory of each"] == "12.0 MB"


def test_failure_names_error_cause_and_notes() -> None:
    error = RuntimeError("no worker\ncame up")
    error.__cause__ = KeyError("rom")
    error.add_note("env 3, in reset")
    assert describe_failure(error).splitlines() == [
        "RuntimeError: no worker came up",
        "caused by KeyError: 'rom'",
        "env 3, in reset",
    ]


# -- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rum CartPole-v1", "invalid choice: 'rum'"),
        ("run", "arguments are required: ENV_ID"),
        ("run CartPole-v1 --num-workers 0", "--num-workers: expected an integer from 1 to 65535, got '0'"),
        ("run CartPole-v1 --num-processes 0", "--num-processes: expected an integer of at least 1, got '0'"),
        ("run CartPole-v1 --steps -3", "--steps: expected an integer of at least 1, got '-3'"),
        ("run CartPole-v1 --steps 1e3", "--steps: expected an integer of at least 1, got '1e3'"),
        ("run CartPole-v1 --seed -1", "--seed: expected an integer from 0 to 4294967295, got '-1'"),
        ("run CartPole-v1 --seed 4294967296", "got '4294967296'"),
        (
            "run CartPole-v1 --num-workers 4 --num-processes 9",
            "--num-processes 9 is more than --num-workers 4",
        ),
        ("run CartPole-v1 --num-processes 9", "--num-processes 9 is more than --num-workers 8"),
        ("run CartPole-v1 --backend serial --start-method fork", "--start-method has no meaning"),
        ("run CartPole-v1 --backend serial --num-processes 1", "--num-processes has no meaning"),
        ("run CartPole-v1 --backend thread --start-method fork", "--start-method has no meaning"),
        ("run CartPole-v1 --backend ray --start-method fork", "--backend ray, whose actors Ray starts"),
        ("run CartPole-v1 --backend ray --num-processes 9", "--num-processes 9 is more than --num-workers 8"),
        ("run CartPole-v1 --backend thread --num-processes 9", "--num-processes 9 is more than --num-workers 8"),
        ("run CartPole-v1 --backend ray --num-processes 1.5", "expected an integer of at least 1, got '1.5'"),
        ("run CartPole-v1 --num-workers 99999", "expected an integer from 1 to 65535, got '99999'"),
        ("run CartPole-v1 --num-workers", "--num-workers: expected one argument"),
        ("run CartPole-v1 --backend threads", "invalid choice: 'threads'"),
        ("run CartPole-v1 --num-wrokers 4", "--num-wrokers 4 (did you mean --num-workers?)"),
        ("run CartPole-v1 --num-work 4", "--num-work 4 (did you mean --num-workers?)"),
        ("run CartPole-v1 Pendulum-v1", "unrecognized arguments: Pendulum-v1"),
        ("--verison", "--verison (did you mean --version?)"),
    ],
)
def test_nonsense_is_a_usage_error(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments.split())
    assert raised.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: aioenvs")
    assert message in errors


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPoel-v1", "Environment `CartPoel` doesn't exist. Did you mean: `CartPole`?"),
        ("CartPole-v99", "version `v99` for environment `CartPole` doesn't exist"),
        ("NoSuchNamespace/Pong-v5", "write package:NoSuchNamespace/Pong-v5"),
        ("no_such_module:Pong-v5", "cannot import 'no_such_module': ModuleNotFoundError"),
        (":CartPole-v1", "cannot import ''"),
        ("", "Malformed environment ID"),
    ],
)
def test_unknown_env_id_is_one_line(env_id: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", env_id]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("aioenvs run: error: ")
    assert message in line
    assert output.out == ""


@pytest.mark.parametrize("env_id", ["CartPole-v1", "CartPole", "gymnasium:CartPole-v1"])
def test_known_env_ids_pass(env_id: str) -> None:
    assert check_env_id(env_id) is None


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gymnasium:make_vce", "'gymnasium' has no factory 'make_vce' (did you mean 'make_vec'?)"),
        ("no_such_file.py:make", "there is no file 'no_such_file.py'"),
        ("envs_of_mine.py", "'envs_of_mine.py' is a file; say which factory of it, such as envs_of_mine.py:make_env"),
        ("envs_of_mine.py:", "'envs_of_mine.py' is a file; say which factory of it"),
        ("envs_of_mine.py:mkae", "'envs_of_mine' has no factory 'mkae' (did you mean 'make'?)"),
        ("envs_of_mine.py:NUMBER", "'envs_of_mine:NUMBER' is 3, which cannot be called to make an env"),
        ("envs_of_mine.py:Own-v7", "version `v7` for environment `Own` doesn't exist"),
        ("folder/broken_envs_of_mine.py:make", "cannot import 'broken_envs_of_mine': ZeroDivisionError"),
        ("folder/random.py:make", "'folder/random.py' cannot be imported, since another module is called 'random'"),
    ],
)
@pytest.mark.usefixtures("own_envs")
@pytest.mark.filterwarnings("ignore:.*Overriding environment Own:UserWarning")
def test_a_factory_that_is_not_there_is_one_line(
    command: str, target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, target]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith(f"aioenvs {command}: error: ")
    assert message in line
    assert output.out == ""


def test_missing_ray_is_a_usage_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["run", "CartPole-v1", "--backend", "ray"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aioenvs run: error: --backend ray needs Ray")
    assert line.endswith("pip install 'aioenvs[ray]'")


def test_missing_gymnasium_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert cli.main(["run", "CartPole-v1"]) == 1
    assert "pip install 'aioenvs[gym]'" in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: aioenvs")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"aioenvs {aioenvs.__version__}\n"


def test_defaults_in_the_help_are_those_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    options = RunOptions("CartPole-v1")
    assert f"number of environments (default: {options.num_workers})" in text
    assert f"steps of each environment (default: {options.steps})" in text
    assert f"where environments live (default: {options.backend})" in text
    assert "pip install 'aioenvs[ray]'" in text


def test_help_imports_nothing_heavy() -> None:
    code = "import sys\nfrom aioenvs.cli.main import main\nmain([])\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "tensordict", "gymnasium", "numpy", "rich"} & set(done.stderr.split())


# -- runs ---------------------------------------------------------------------------------------------

OWN_ENVS = """
import gymnasium as gym
import numpy as np

from aioenvs.testing import CountingEnv, NestedCountingEnv

NUMBER = 3


class Made(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 2.0, self.steps == 5, False, {}


def make():
    return Made()


def parts():
    return CountingEnv(batch_size=(3,))


gym.register("Own-v0", Made)
"""


@pytest.fixture
def own_envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files that have factories, and one that cannot be imported."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in (tmp_path / "envs_of_mine.py", folder / "more_envs_of_mine.py", folder / "random.py"):
        file.write_text(OWN_ENVS)
    (folder / "broken_envs_of_mine.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("envs_of_mine", "more_envs_of_mine", "broken_envs_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("backend", ["process", "thread", "serial"])
@pytest.mark.parametrize(
    ("target", "score"),
    [
        ("envs_of_mine:make", "10.0 ± 0.0"),
        ("folder/more_envs_of_mine.py:make", "10.0 ± 0.0"),
        ("folder/more_envs_of_mine.py:Own-v0", "10.0 ± 0.0"),
        ("envs_of_mine.py:CountingEnv", "5.0 ± 0.0"),
        ("envs_of_mine.py:NestedCountingEnv", "5.0 ± 0.0"),
        ("envs_of_mine.py:parts", "15.0 ± 0.0"),
    ],
)
@pytest.mark.usefixtures("own_envs")
@pytest.mark.filterwarnings("ignore:.*Overriding environment Own:UserWarning")
def test_a_factory_is_run(backend: str, target: str, score: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", target, "--backend", backend, "--num-workers", "2", "--steps", "15"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    table = table_of(output.out)
    assert table["episodes"] == "6"
    assert table["return (mean ± std)"] == score


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_actors_of_a_ray_cluster(own_envs: Path) -> None:
    command = [sys.executable, "-m", "aioenvs", "run", "folder/more_envs_of_mine.py:make", "--backend", "ray"]
    options = ["--num-workers", "3", "--num-processes", "2", "--steps", "10"]
    settings = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=own_envs, env=settings)
    assert done.returncode == 0, done.stderr
    table = table_of(done.stdout)
    assert table["episodes"] == "6"
    assert table["return (mean ± std)"] == "10.0 ± 0.0"
    assert table["actors"] == "2"
    assert "worker processes" not in table


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_a_cluster_that_is_not_there(own_envs: Path) -> None:
    command = [sys.executable, "-m", "aioenvs", "run", "CartPole-v1", "--backend", "ray"]
    settings = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=own_envs, env=settings)
    assert done.returncode == 1
    assert "no Ray cluster could be reached at RAY_ADDRESS='127.0.0.1:1'" in done.stderr
    assert "Traceback" not in done.stderr


FAILING_ENVS = """
import os

import gymnasium as gym


class FailingEnv(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, where):
        self.where = where
        if where == "factory":
            raise gym.error.DependencyNotInstalled("no simulator here")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        if self.where == "exit":
            os._exit(3)
        raise ZeroDivisionError("the ball left the field")


for place in ("factory", "step", "exit"):
    gym.register(f"Failing-{place}-v0", FailingEnv, kwargs={"where": place})
"""


@pytest.fixture
def failing_envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module, in the working directory, that registers environments that fail."""
    name = "module_with_failing_envs"
    (tmp_path / f"{name}.py").write_text(FAILING_ENVS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(gym.registry)
    yield name
    sys.modules.pop(name, None)
    for env_id in set(gym.registry) - known:  # or workers of later tests would look for the module
        del gym.registry[env_id]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("factory", ["WorkerStartError", "DependencyNotInstalled", "no simulator here"]),
        ("step", ["ZeroDivisionError: the ball left the field"]),
        ("exit", ["WorkerDiedError"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Overriding environment Failing:UserWarning")
def test_failing_env_is_reported_without_a_traceback_of_the_cli(
    place: str, expected: list[str], failing_envs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env_id = f"{failing_envs}:Failing-{place}-v0"
    assert cli.main(["run", env_id, "--num-workers", "2", "--num-processes", "2"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("aioenvs run: error: ")
    assert all(text in output.err for text in expected)
    assert "cli.py" not in output.err
    assert output.out == ""


def test_same_seed_gives_the_same_episodes_in_processes_and_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables = []
    choices = (["--num-processes", "2"], ["--backend", "serial"], ["--backend", "thread"])
    for choice in choices:
        command = ["run", "CartPole-v1", "--num-workers", "3", "--steps", "100", "--seed", "5", *choice]
        assert cli.main(command) == 0
        tables.append(table_of(capsys.readouterr().out))
    packed, serial, threads = tables
    assert int(packed["episodes"]) > 0
    for row in ("episodes", "return (mean ± std)"):
        assert packed[row] == serial[row] == threads[row]
    assert packed["worker processes"] == "2"
    assert "worker processes" not in serial
    assert "worker processes" not in threads


@pytest.mark.slow
def test_run_prints_a_table_and_nothing_else() -> None:
    command = [sys.executable, "-m", "aioenvs", "run", "CartPole-v1", "--steps", "50", "--num-workers", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    table = table_of(done.stdout)
    assert table["environments"] == "4"
    assert table["steps of each"] == "50"
    assert float(table["env steps/s"].replace(",", "")) > 0
    assert float(table["start-up"].removesuffix(" s")) > 0
    assert 1 <= int(table["worker processes"]) <= 4
    if sys.platform == "linux":
        assert table["private memory of each"].endswith(" MB")


def read_terminal(terminal: int, until: bytes | None = None) -> bytes:
    """Read what was written to a pseudo-terminal, up to some text or to its end."""
    received = b""
    while until is None or until not in received:
        try:
            chunk = os.read(terminal, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # Linux: the last writer has closed it
                raise
            chunk = b""
        if not chunk:
            assert until is None, f"{until!r} never came, but {received!r}"
            break
        received += chunk
    return received


@pytest.mark.parametrize(
    "backend", ["process", "thread", "serial", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(120)])]
)
@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_what_was_measured(backend: str) -> None:
    terminal, program_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "aioenvs", "run", "CartPole-v1", "--steps", "100000000", "--backend", backend],
        stdin=subprocess.DEVNULL,
        stdout=program_side,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        process_group=0,
    )
    os.close(program_side)
    try:
        with process:
            read_terminal(terminal, until=b"episodes")  # the live line, so it is stepping
            workers = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and workers
            shown = read_terminal(terminal).decode()
            assert process.wait(timeout=20) == 130
            assert process.stderr is not None
            assert process.stderr.read() == b""
    finally:
        os.close(terminal)
    assert "CartPole-v1 (interrupted)" in shown
    table = table_of(shown)
    assert 0 < int(table["steps of each"].replace(",", "")) < 100000000
    assert bool(workers) == (backend in ("process", "ray"))
    assert psutil.wait_procs(workers, timeout=5)[1] == []


def test_console_script_points_at_main() -> None:
    distribution = importlib.metadata.distribution("aioenvs")
    (script,) = distribution.entry_points.select(group="console_scripts", name="aioenvs")
    assert script.load() is cli.main
