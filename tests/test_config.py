"""The arguments of a batched env, checked before anything else happens; and how many cores there are."""

import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from hypothesis import given
from hypothesis import strategies as st

from aioenvs.engine import config
from aioenvs.engine.config import BatchConfig, Timeouts, available_cores


def make() -> None:
    """A factory; nobody calls it here."""


def checked(num_workers: int = 2, create_env_fn: Any = make, **options: Any) -> BatchConfig:
    defaults: dict[str, Any] = {
        "create_env_kwargs": None,
        "num_processes": None,
        "backend": "process",
        "mp_start_method": None,
        "timeouts": Timeouts(),
    }
    return BatchConfig.of(num_workers, create_env_fn, **{**defaults, **options})


# -- groups ---------------------------------------------------------------------------------------------


@given(st.data())
def test_groups_are_contiguous_balanced_and_complete(data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, 400))
    num_processes = data.draw(st.integers(1, num_workers))
    groups = checked(num_workers, num_processes=num_processes).groups
    assert len(groups) == num_processes
    assert list(itertools.chain(*groups)) == list(range(num_workers))
    sizes = {len(group) for group in groups}
    assert 0 not in sizes
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_workers", "cores", "processes"), [(8, 3, 3), (2, 16, 2), (1, 1, 1)])
def test_by_default_there_are_as_many_processes_as_cores(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, cores: int, processes: int
) -> None:
    monkeypatch.setattr(config, "available_cores", lambda: cores)
    assert len(checked(num_workers).groups) == processes


@pytest.mark.parametrize("name", ["num_workers", "num_processes"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "must be between 1 and 65535, got 0"),
        (-3, ValueError, "must be between 1 and 65535, got -3"),
        (65536, ValueError, "must be between 1 and 65535, got 65536"),
        (2.0, TypeError, "must be an integer, got 2.0"),
        ("2", TypeError, "must be an integer, got '2'"),
        (True, TypeError, "must be an integer, got True"),
    ],
)
def test_counts_are_positive_integers(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{name} {message}"):
        checked(**{name: value})


def test_no_process_is_without_an_env() -> None:
    with pytest.raises(ValueError, match="num_processes is 3, more than the 2 envs there are to host"):
        checked(2, num_processes=3)


# -- factories ------------------------------------------------------------------------------------------


def test_one_factory_serves_all_envs() -> None:
    assert checked(3, make).factories == (make, make, make)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_each_env_can_have_a_factory_of_its_own(sequence: type) -> None:
    factories = [make, CartPoleEnv, len]
    assert checked(3, sequence(factories)).factories == tuple(factories)


def test_an_id_is_looked_up_here() -> None:
    spec = gymnasium.spec("CartPole-v1")
    assert checked(2, "CartPole-v1").factories == (spec, spec)
    assert checked(2, spec).factories == (spec, spec)
    assert checked(2, ["CartPole-v1", make]).factories == (spec, make)


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(gymnasium.error.NameNotFound, match="CartPoll"):
        checked(2, "CartPoll-v1")


@pytest.mark.parametrize("factories", [[], [make], [make] * 3])
def test_a_list_of_the_wrong_length_is_refused(factories: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=f"num_workers is 2, but create_env_fn is a list of {len(factories)}"):
        checked(2, factories)


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: [make, env]])
def test_an_env_is_no_factory(wrap: Any) -> None:
    env = CartPoleEnv()
    with pytest.raises(TypeError, match=r"create_env_fn must make an env, but <.*CartPoleEnv.*> is one; every worker"):
        checked(2, wrap(env))


@pytest.mark.parametrize("thing", [None, 3, {"id": "CartPole-v1"}, [make, None]])
def test_what_makes_no_env_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="create_env_fn must be a callable, a Gymnasium id, or a list of those, got"):
        checked(2, thing)


# -- keyword arguments ----------------------------------------------------------------------------------


def test_without_keyword_arguments_each_env_gets_none() -> None:
    assert checked(2).kwargs == ({}, {})


def test_one_dict_goes_to_all_and_a_list_to_each() -> None:
    assert checked(2, create_env_kwargs={"a": 1}).kwargs == ({"a": 1}, {"a": 1})
    assert checked(2, create_env_kwargs=[{"a": 1}, {}]).kwargs == ({"a": 1}, {})
    assert checked(2, create_env_kwargs=({"a": 1}, {"b": 2})).kwargs == ({"a": 1}, {"b": 2})


@pytest.mark.parametrize("each", [False, True])
def test_later_changes_to_the_callers_dicts_change_nothing(each: bool) -> None:
    mine = {"a": 1}
    found = checked(2, create_env_kwargs=[mine, mine] if each else mine).kwargs
    mine["a"] = 2
    assert found == ({"a": 1}, {"a": 1})


@pytest.mark.parametrize("given", [[], [{}], [{}] * 3])
def test_a_list_of_keyword_arguments_of_the_wrong_length_is_refused(given: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=f"num_workers is 2, but create_env_kwargs is a list of {len(given)}"):
        checked(2, create_env_kwargs=given)


@pytest.mark.parametrize("given", [3, [None, None], ["ab", "cd"]])
def test_what_are_no_keyword_arguments_is_refused_by_name(given: Any) -> None:
    with pytest.raises(TypeError, match="create_env_kwargs"):
        checked(2, create_env_kwargs=given)


# -- the rest -------------------------------------------------------------------------------------------


def test_the_first_start_method_is_the_default() -> None:
    assert checked().start_method == "forkserver"
    assert [checked(mp_start_method=name).start_method for name in ("spawn", "fork")] == ["spawn", "fork"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"backend": "threads"}, "backend must be one of 'process', .*'serial'.*, got 'threads'"),
        ({"backend": None}, "backend must be one of .*, got None"),
        ({"mp_start_method": "thread"}, "'thread': mp_start_method must be one of 'forkserver', 'spawn', 'fork'"),
    ],
)
def test_unknown_names_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(**option)


def test_envs_in_this_process_have_no_start_method() -> None:
    assert checked(backend="serial").start_method == ""
    with pytest.raises(TypeError, match="mp_start_method='spawn' has no meaning for envs that run in this process"):
        checked(backend="serial", mp_start_method="spawn")


def test_windows_has_no_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(NotImplementedError, match="on Windows use SerialEnv or AsyncSerialEnv, or WSL"):
        checked()
    assert checked(backend="serial").backend == "serial"


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "5", True, [1]])
@pytest.mark.parametrize("name", ["start", "step", "close"])
def test_a_timeout_is_a_positive_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}_timeout must be a positive number of seconds, got"):
        checked(timeouts=Timeouts(**{name: value}))


def test_only_closing_must_have_an_end() -> None:
    forever = Timeouts(start=None, step=None, close=1)
    assert checked(timeouts=forever).timeouts is forever
    with pytest.raises(ValueError, match="close_timeout must be a positive number of seconds, got None"):
        checked(timeouts=Timeouts(close=None))


# -- cores ----------------------------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores, 6 of them ours, whose control groups are files in a folder."""
    real = config._cgroup_quota
    (tmp_path / "fs").mkdir()
    (tmp_path / "membership").write_text("0::/\n")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 8)), raising=False)
    monkeypatch.setattr(config, "_cgroup_quota", lambda *_: real(tmp_path / "fs", tmp_path / "membership"))
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_control_groups_the_affinity_counts(system: Path) -> None:
    assert available_cores() == 6
    (system / "membership").unlink()
    assert available_cores() == 6


@pytest.mark.parametrize(("count", "cores"), [(8, 8), (None, 1)])
@pytest.mark.usefixtures("system")
def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch, count: int | None, cores: int) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert available_cores() == cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", 6),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("20000 100000\n", 1),
        ("9900000 100000\n", 6),
        ("", 6),
        ("100000\n", 6),
        ("nonsense 100000\n", 6),
        ("100000 0\n", 6),
    ],
)
def test_the_quota_of_cgroup_v2(system: Path, text: str, cores: int) -> None:
    write(system / "fs/cpu.max", text)
    assert available_cores() == cores


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({"jobs/mine": "300000 100000"}, 3),
        ({"jobs": "200000 100000", "jobs/mine": "max 100000"}, 2),
        ({"jobs": "200000 100000", "jobs/mine": "400000 100000"}, 2),
        ({"jobs": "400000 100000", "jobs/mine": "100000 100000"}, 1),
        ({".": "100000 100000"}, 1),
        ({"jobs/other": "100000 100000", "jobs/mine/below": "100000 100000"}, 6),
    ],
)
def test_the_tightest_quota_on_the_way_to_the_root_counts(system: Path, quotas: dict[str, str], cores: int) -> None:
    (system / "membership").write_text("1:name=systemd:/elsewhere\n0::/jobs/mine\n")
    for folder, text in quotas.items():
        write(system / "fs" / folder / "cpu.max", text)
    assert available_cores() == cores


def test_nothing_above_the_root_is_read(system: Path) -> None:
    write(system / "cpu.max", "100000 100000")
    assert available_cores() == 6


@pytest.mark.parametrize(
    ("quota", "period", "cores"), [("150000", "50000", 3), ("-1", "100000", 6), ("5000", "100000", 1), ("x", "1", 6)]
)
def test_the_quota_of_cgroup_v1(system: Path, quota: str, period: str, cores: int) -> None:
    (system / "membership").write_text("4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n")
    write(system / "fs/cpu/cpu.cfs_quota_us", quota + "\n")
    write(system / "fs/cpu/cpu.cfs_period_us", period + "\n")
    assert available_cores() == cores


def test_this_machine_has_a_core() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
