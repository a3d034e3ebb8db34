"""`aioenvs bench`: the decision, what is looked up, and short runs as a user starts them."""

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from coroutine_envs import AwaitingEnv, HalfEnv
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from aioenvs.cli import bench as trials
from aioenvs.cli import main as cli
from aioenvs.cli.bench import (
    GOOD_ENOUGH,
    MOST_TRIED,
    BenchOptions,
    Measured,
    Profile,
    Setting,
    duration,
    profile_of,
    profile_rows,
    recommend,
    result_rows,
    settings_to_try,
    size_of,
    try_all,
)
from aioenvs.cli.targets import CommandError, factory_named
from aioenvs.testing import CountingEnv, FailingEnv

SERIAL, ONE, TWO, EIGHT = Setting("serial"), Setting("process", 1), Setting("process", 2), Setting("process", 8)
THREADS, GYMNASIUM = Setting("thread", 8), Setting("gymnasium", 8)

ENVS = """
import asyncio
import time

import gymnasium as gym
import numpy as np


class WaitingEnv(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(0.005)
        return np.zeros(2, np.float32), 1.0, False, False, {}


class AwaitingEnv:
    observation_space = WaitingEnv.observation_space
    action_space = WaitingEnv.action_space

    async def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    async def step(self, action):
        await asyncio.sleep(0.005)
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Shelf:
    waiting = WaitingEnv


def breaks():
    raise OSError("no simulator here")


NOT_A_FACTORY = 3
"""


def profile(waits: bool = False, step_seconds: float = 5e-6, is_gymnasium: bool = True) -> Profile:
    return Profile(step_seconds, 0.001, 0.02 if waits else 1.0, waits, 16, is_gymnasium)


def measured(**speeds: float) -> list[Measured]:
    settings = {
        "serial": SERIAL,
        "one": ONE,
        "two": TWO,
        "eight": EIGHT,
        "threads": THREADS,
        "gymnasium": GYMNASIUM,
    }
    return [Measured(settings[name], [speed]) for name, speed in speeds.items()]


# -- the decision -------------------------------------------------------------------------------------


def test_a_quick_env_is_best_served_serially() -> None:
    advice = recommend(profile(), measured(serial=100_000, two=60_000, eight=20_000, gymnasium=9_000), 8, 2)
    assert advice.setting == SERIAL
    assert advice.reason == "a step takes 5 µs, so that messages to other processes would cost more than they save."


def test_an_env_that_computes_gets_the_cores() -> None:
    advice = recommend(profile(step_seconds=0.002), measured(serial=500, two=990, eight=995), 8, 2)
    assert advice.setting == TWO
    assert advice.reason == (
        "the env computes for its 2 ms a step, and 2 processes keep their cores busy with few messages: "
        "2.0 times the speed of SerialEnv."
    )


@pytest.mark.parametrize(
    ("speeds", "chosen", "where"),
    [
        ({"serial": 155, "one": 150, "two": 158}, SERIAL, "your own process can host all 8."),
        ({"serial": 120, "one": 150, "two": 158}, ONE, "1 process can host all 8: 1.2 times the speed of SerialEnv."),
        ({"serial": 120, "one": 80, "two": 158}, TWO, "2 processes can host all 8: 1.3 times the speed of SerialEnv."),
    ],
)
def test_coroutine_envs_that_wait_do_so_in_few_processes(speeds: dict[str, float], chosen: Setting, where: str) -> None:
    awaiting = replace(profile(waits=True, step_seconds=0.05, is_gymnasium=False), has_coroutines=True)
    assert settings_to_try(awaiting, 8, 2) == [SERIAL, ONE, TWO]
    advice = recommend(awaiting, measured(**speeds), 8, 2)
    assert advice.setting == chosen
    assert advice.reason == (
        "a coroutine env that waits for 98% of its 50 ms a step lets others of its process go on meanwhile, and "
        f"{where}"
    )


@pytest.mark.parametrize(
    ("speeds", "chosen", "where"),
    [
        ({"serial": 20, "two": 40, "eight": 158, "threads": 155}, THREADS, "in threads"),
        ({"serial": 20, "two": 40, "eight": 158, "threads": 100}, EIGHT, "in processes"),
    ],
)
def test_an_env_that_waits_does_so_in_many_places(speeds: dict[str, float], chosen: Setting, where: str) -> None:
    advice = recommend(profile(waits=True, step_seconds=0.05), measured(**speeds), 8, 2)
    assert advice.setting == chosen
    assert f"waits for 98% of its 50 ms a step, and {where} they wait together" in advice.reason


def test_a_quicker_vector_env_of_gymnasium_is_named_and_not_recommended() -> None:
    advice = recommend(profile(), measured(serial=100, gymnasium=250), 8, 2)
    assert advice.setting == SERIAL
    assert "Gymnasium's AsyncVectorEnv has 2.5 times its speed here" in advice.reason


def test_failed_settings_are_not_recommended() -> None:
    results = [Measured(SERIAL, [1.0]), Measured(EIGHT, [9.0], failure="OSError: gone")]
    assert recommend(profile(), results, 8, 2).setting == SERIAL
    with pytest.raises(ValueError, match="at least one setting"):
        recommend(profile(), [Measured(SERIAL, [], failure="OSError: gone"), Measured(GYMNASIUM, [3.0])], 8, 2)


@given(st.lists(st.floats(1, 1e6), min_size=4, max_size=4), st.booleans(), st.integers(1, 64), st.floats(1e-7, 10))
def test_the_recommended_setting_is_nearly_the_quickest_and_none_simpler_is(
    speeds: list[float], waits: bool, cores: int, step_seconds: float
) -> None:
    results = measured(**dict(zip(("serial", "two", "eight", "threads"), speeds, strict=True)))
    advice = recommend(profile(waits, step_seconds), results, 8, cores)
    (chosen,) = [found for found in results if found.setting == advice.setting]
    assert chosen.speed >= GOOD_ENOUGH * max(speeds)
    assert all(found.speed < GOOD_ENOUGH * max(speeds) for found in results if found.setting.cost < chosen.setting.cost)
    assert advice.reason.endswith(".")
    assert "\n" not in advice.reason


@given(st.integers(1, 2000), st.integers(1, 128), st.booleans(), st.booleans())
def test_settings_are_distinct_and_have_no_more_processes_than_envs(
    num_workers: int, cores: int, waits: bool, is_gymnasium: bool
) -> None:
    settings = settings_to_try(profile(waits, is_gymnasium=is_gymnasium), num_workers, cores)
    assert settings[0] == SERIAL
    assert len(set(settings)) == len(settings)
    counts = [setting.count for setting in settings if setting.kind == "process"]
    assert min(num_workers, cores) in counts
    assert min(num_workers, MOST_TRIED) in counts
    assert all(1 <= count <= num_workers for count in counts)
    assert any(setting.kind == "thread" for setting in settings) == waits
    assert any(setting.kind == "gymnasium" for setting in settings) == (is_gymnasium and num_workers <= MOST_TRIED)


def test_numbers_of_processes_can_be_chosen() -> None:
    settings = settings_to_try(profile(is_gymnasium=False), 8, 2, [8, 3])
    assert settings == [SERIAL, Setting("process", 3), EIGHT]


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.23e-6, "5.23 µs"), (0.002, "2 ms"), (1.5, "1.5 s"), (0.0499, "49.9 ms")]
)
def test_durations_have_a_unit_that_suits_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_tables_say_what_failed_and_what_is_recommended() -> None:
    results = [Measured(SERIAL, [100.0, 300.0, 200.0]), Measured(TWO, [400.0]), Measured(EIGHT, [], "OSError: gone")]
    rows = result_rows(results, recommend(profile(), results, 8, 2))
    assert rows == [
        ("", "serial", "200", "100 - 300", "1.00"),
        ("→", "2 processes", "400", "400 - 400", "2.00"),
        ("", "8 processes", "failed", "OSError: gone", ""),
    ]
    assert dict(profile_rows(profile(waits=True), 2))["CPU share of a step"] == "2%: it waits"


def test_settings_are_written_as_in_a_program() -> None:
    assert SERIAL.text(8) == "SerialEnv(8, ...)"
    assert TWO.text(8) == "ParallelEnv(8, ..., num_processes=2)"
    assert THREADS.text(8) == 'ParallelEnv(8, ..., num_processes=8, backend="thread")'


# -- measuring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (np.zeros((84, 84, 4), np.uint8), 28224),
        ({"a": np.zeros(2, np.float32), "b": (np.int64(3), "four")}, 20),
        (torch.zeros(3), 12),
        (7, 8),
        (None, 0),
    ],
)
def test_the_size_of_an_observation(value: object, size: int) -> None:
    assert size_of(value) == size


class Recording(gym.Env[np.ndarray, int]):
    """Ends episodes of two steps, and refuses to be stepped after one."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    closed = 0

    def reset(self, *, seed=None, options=None):
        self.left = 2
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.left > 0
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, self.left == 0, False, {}

    def close(self):
        type(self).closed += 1


def test_a_profile_resets_what_ended_and_closes_the_env() -> None:
    Recording.closed = 0
    found = profile_of(Recording, 0.01)
    assert Recording.closed == 1
    assert found.observation_bytes == 8
    assert found.is_gymnasium
    assert not found.waits
    assert found.step_seconds > 0


def test_a_profile_of_an_env_on_tensors() -> None:
    found = profile_of(lambda: CountingEnv(max_steps=3), 0.01)
    assert not found.is_gymnasium
    assert found.observation_bytes == CountingEnv().reset()["observation"].nbytes
    assert isinstance(CountingEnv().reset(), TensorDict)


@pytest.mark.parametrize("make", [AwaitingEnv, HalfEnv.of("reset"), HalfEnv.of("step")])
def test_a_profile_of_a_coroutine_env_is_taken_on_a_loop(make: Callable[..., Any]) -> None:
    closed = []

    def build() -> Any:
        return make(on_close=lambda: closed.append(True))

    found = profile_of(build, 0.01)
    assert found.has_coroutines
    assert not found.is_gymnasium
    assert not found.waits
    assert found.observation_bytes == make.observation_space.sample().nbytes
    assert closed == [True]


def test_a_coroutine_env_that_fails_is_closed_on_its_loop() -> None:
    def fail() -> None:
        raise OSError("no server here")

    closed = []
    with pytest.raises(OSError, match="no server here"):
        profile_of(lambda: AwaitingEnv(fault=fail, at=(1, 3), on_close=lambda: closed.append(True)), 0.01)
    assert closed == [True]


def test_a_coroutine_env_in_a_plain_wrapper_is_refused_and_closed_on_a_loop() -> None:
    closed = []

    class Awaiting(gym.Env[Any, Any]):
        observation_space = Recording.observation_space
        action_space = Recording.action_space

        async def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}

        async def step(self, action):
            return np.zeros(2, np.float32), 1.0, False, False, {}

        async def close(self):
            closed.append(True)

    with pytest.raises(TypeError, match="without plain wrappers, found <OrderEnforcing<Awaiting"):
        profile_of(lambda: gym.wrappers.OrderEnforcing(Awaiting()), 0.01)
    assert closed == [True]


class Clock:
    """Takes the place of `time` in `trials`; a step of a `SlowEnv` takes 1 s of it."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def process_time(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trials, "time", clock)
    return clock


def slow_env(clock: Clock) -> Recording:
    class SlowEnv(Recording):
        def step(self, action):
            clock.seconds += 1.0
            return super().step(action)

    return SlowEnv()


def test_a_turn_that_one_round_exceeds_consists_of_one_round(clock: Clock) -> None:
    *_, (serial,) = try_all(lambda: slow_env(clock), 8, [SERIAL], 1.5, lambda text: None)
    assert serial.speeds == [1.0] * 3
    assert clock.seconds == 3 * 8


def test_rounds_that_warm_up_do_not_count_and_end_with_the_turn(clock: Clock) -> None:
    *_, (serial,) = try_all(lambda: slow_env(clock), 2, [SERIAL], 3 * 20.0, lambda text: None)
    assert serial.speeds == [1.0] * 3
    assert clock.seconds == 3 * (3 * 2 + 20)


def test_a_profile_of_an_env_that_takes_long_is_one_step_after_the_first(clock: Clock) -> None:
    assert profile_of(lambda: slow_env(clock), 0.5).step_seconds == 1.0
    assert clock.seconds == 2


def test_a_setting_that_fails_leaves_the_others_alone() -> None:
    def make() -> FailingEnv:
        return FailingEnv("init") if threading.current_thread() is not threading.main_thread() else CountingEnv()

    settings = [SERIAL, Setting("thread", 1)]
    *_, results = try_all(make, 2, settings, 0.01, lambda text: None)
    serial, thread = results
    assert serial.failure is None
    assert len(serial.speeds) == 3
    assert thread.failure is not None
    assert thread.speed == 0


def test_leaving_a_trial_early_closes_its_envs() -> None:
    trial = try_all(Recording, 2, [SERIAL, TWO], 0.01, lambda text: None)
    assert all(found.speed > 0 for found in next(trial))
    trial.close()  # the fixture that looks for leaks sees whether it does


# -- what is looked up --------------------------------------------------------------------------------


@pytest.fixture
def envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module, in the working directory, that has factories."""
    name = "module_to_bench"
    (tmp_path / f"{name}.py").write_text(ENVS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_factories_and_ids_are_found(envs: str) -> None:
    assert factory_named("CartPole-v1") == "CartPole-v1"
    assert factory_named("gymnasium:CartPole-v1") == "gymnasium:CartPole-v1"
    assert factory_named("gymnasium:CartPole") == "gymnasium:CartPole"
    assert factory_named(f"{envs}:WaitingEnv").__name__ == "WaitingEnv"
    assert factory_named(f"{envs}:Shelf.waiting").__name__ == "WaitingEnv"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("CartPoel-v1", "Did you mean: `CartPole`?"),
        ("no_such_module:make", "cannot import 'no_such_module': ModuleNotFoundError"),
        ("module_to_bench:WaitngEnv", "no factory 'WaitngEnv' (did you mean 'WaitingEnv'?)"),
        ("module_to_bench:Shelf.wating", "'Shelf' has no factory 'wating' (did you mean 'waiting'?)"),
        ("module_to_bench:NOT_A_FACTORY", "is 3, which cannot be called"),
        ("module_to_bench:", "Malformed environment ID"),
        (":make", "cannot import ''"),
    ],
)
def test_what_is_not_there_is_one_line(
    target: str, message: str, envs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", target]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("aioenvs bench: error: ")
    assert message in line
    assert output.out == ""


def test_an_env_that_does_not_run_is_no_traceback(envs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", f"{envs}:breaks"]) == 1
    output = capsys.readouterr()
    assert output.err == "aioenvs bench: error: the env does not run: OSError: no simulator here\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench", "arguments are required: ENV_ID|module:factory"),
        ("bench CartPole-v1 --num-workers 0", "--num-workers: expected an integer from 1 to 65535, got '0'"),
        ("bench CartPole-v1 --num-processes 0", "--num-processes: expected an integer from 1 to 65535, got '0'"),
        ("bench CartPole-v1 --num-processes 2 9", "--num-processes 9 is more than --num-workers 8"),
        ("bench CartPole-v1 --seconds 0", "--seconds: expected a positive number of seconds, got '0'"),
        ("bench CartPole-v1 --seconds inf", "got 'inf'"),
        ("bench CartPole-v1 --num-wrokers 4", "--num-wrokers 4 (did you mean --num-workers?)"),
    ],
)
def test_nonsense_is_a_usage_error(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments.split())
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_defaults_in_the_help_are_those_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    options = BenchOptions("CartPole-v1")
    assert f"number of environments (default: {options.num_workers})" in text
    assert f"how long each setting is stepped (default: {options.seconds})" in text


def test_command_errors_keep_their_code() -> None:
    assert CommandError("no").exit_code == 1


# -- runs ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_recommends_a_setting(envs: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aioenvs", "bench", f"{envs}:WaitingEnv", "--num-workers", "3", "--seconds", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False, cwd=tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    for text in ("it waits", "8 bytes", "serial", "1 process", "3 processes", "3 threads", "Gymnasium AsyncVectorEnv"):
        assert text in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("Recommended: ParallelEnv(3, ..., num_processes=3")
    assert "they wait together" in last


@pytest.mark.slow
def test_a_run_recommends_few_processes_for_coroutine_envs(envs: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", f"{envs}:AwaitingEnv", "--num-workers", "3", "--seconds", "0.3"]) == 0
    output = capfd.readouterr()
    assert output.err == ""
    assert "it waits" in output.out
    assert "3 threads" not in output.out
    assert "AsyncVectorEnv" not in output.out
    assert "failed" not in output.out
    assert "lets others of its process go on meanwhile" in output.out.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_ends_a_run_without_a_traceback() -> None:
    terminal, program_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "aioenvs", "bench", "CartPole-v1", "--num-workers", "2", "--seconds", "1000"],
        stdin=subprocess.DEVNULL,
        stdout=program_side,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        process_group=0,
    )
    os.close(program_side)
    try:
        with process:
            received = b""
            while b"turn 1 of 3" not in received:
                received += os.read(terminal, 65536)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=30) == 130
            assert process.stderr is not None
            assert process.stderr.read() == b""
    finally:
        os.close(terminal)
