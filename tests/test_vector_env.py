"""`AioVectorEnv`: what may be asked when, bad input, faults, and what is given back."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from agent_envs import CrowdEnv
from failing_envs import CountingEnv, Gate, failing_factory, hang, kill_itself, raise_two_arguments
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from structured_coroutines import SlowStart
from vector_envs import Endless, Informer, Mixed, StepFails
from vector_faces import HOSTS, closed_in_the_middle_of_a_step, counting

from aioenvs.errors import (
    ClosedError,
    ConcurrencyError,
    ResetNeededError,
    SpecMismatchError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from aioenvs.integrations.gymnasium import AioVectorEnv, PendingCallError, make_vec, register, vector_spec

PROCESSES = {name: HOSTS[name] for name in ("packed", "one each")}


def opened(*args: Any, **options: Any) -> contextlib.closing[AioVectorEnv]:
    return contextlib.closing(AioVectorEnv(*args, **options))


class OptionsKeeper(CountingEnv):
    """Keeps the options of its last reset."""

    def __init__(self) -> None:
        super().__init__(0)
        self.options: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.options = options
        return super().reset(seed=seed)


def actions(*values: int) -> Any:
    return np.array(values, np.int64)


# -- without torch --------------------------------------------------------------------------------------

ALONE = """
import sys
import gymnasium as gym
from aioenvs.integrations.gymnasium import AioVectorEnv, make_vec
class Telling(gym.Wrapper):
    def modules(self):
        import sys
        return [name in sys.modules for name in ("torch", "tensordict", "gymnasium")]
for backend in ("process", "thread", "serial"):
    envs = make_vec("CartPole-v1", 2, wrappers=[Telling], vector_kwargs=dict(backend=backend))
    envs.reset(seed=1)
    envs.step(envs.action_space.sample())
    print(envs.call("modules"), "torch" in sys.modules)
    envs.close()
"""


def test_torch_is_imported_nowhere() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=50, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["([False, False, True], [False, False, True]) False"] * 3


OUTDATED = """
import gymnasium.vector
del gymnasium.vector.AutoresetMode
import aioenvs.integrations.gymnasium
"""


def test_an_older_gymnasium_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", OUTDATED], capture_output=True, text=True, timeout=50, check=False)
    assert f"needs Gymnasium 1.1 or later, found {gym.__version__}" in done.stderr.splitlines()[-1]


# -- how it is made -------------------------------------------------------------------------------------


def test_it_is_made_of_an_id_a_spec_or_callables() -> None:
    for made in ("CartPole-v1", gym.spec("CartPole-v1"), lambda: gym.make("CartPole-v1")):
        with opened(made, 2, num_processes=1) as envs:
            assert envs.reset(seed=0)[0].shape == (2, 4)
            assert repr(envs) == "AioVectorEnv(num_envs=2)"


def test_make_vec_is_that_of_gymnasium() -> None:
    wrappers = [gym.wrappers.TimeAwareObservation]
    own = make_vec("CartPole-v1", 3, wrappers=wrappers, sutton_barto_reward=True, vector_kwargs={"num_processes": 2})
    peer = gym.make_vec("CartPole-v1", 3, "sync", wrappers=wrappers, sutton_barto_reward=True)
    with contextlib.closing(own), contextlib.closing(peer):
        assert len(own.unwrapped.call("spec")) == 3
        assert own.observation_space == peer.observation_space
        np.testing.assert_array_equal(own.reset(seed=4)[0], peer.reset(seed=4)[0])
        for one, other in zip(own.step(np.zeros(3, int))[:4], peer.step(np.zeros(3, int))[:4], strict=True):
            np.testing.assert_array_equal(one, other)
        assert own.spec is not None
        assert own.spec.id == "CartPole-v1"
        with contextlib.closing(gym.make_vec(own.spec)) as again:
            assert (type(again), again.num_envs) == (AioVectorEnv, 3)


def test_gymnasium_makes_it_of_a_spec_and_of_a_registered_id() -> None:
    with contextlib.closing(gym.make_vec(vector_spec("CartPole-v1"), num_envs=2)) as envs:
        assert isinstance(envs, AioVectorEnv)
        assert repr(envs) == "AioVectorEnv(CartPole-v1, num_envs=2)"
    name = register("CartPole-v1", vector_kwargs={"autoreset_mode": "SameStep"})
    try:
        assert name == "aioenvs/CartPole-v1"
        with contextlib.closing(gym.make_vec(name, num_envs=2, vectorization_mode="vector_entry_point")) as envs:
            assert isinstance(envs, AioVectorEnv)
            assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
            assert envs.reset(seed=0)[0].shape == (2, 4)
    finally:
        del gym.registry[name]


@pytest.mark.parametrize(
    ("args", "options", "kind", "words"),
    [
        (([],), {}, ValueError, "expected a callable for each env, found none"),
        (("CartPole-v1",), {}, TypeError, "expected num_envs, or a list with a callable"),
        (("CartPole-v1", 0), {}, ValueError, "num_envs must be an integer of at least 1, got 0"),
        (([CountingEnv], 2), {}, ValueError, "num_envs is 2, but there are 1 callables"),
        (([CountingEnv()],), {}, TypeError, "must make an env, but .* is one"),
        (([CountingEnv],), {"autoreset_mode": "never"}, ValueError, "'never' is not a valid AutoresetMode"),
        (([CountingEnv],), {"backend": "rays"}, ValueError, "backend must be one of"),
        (([CountingEnv],), {"context": "fork", "mp_start_method": "spawn"}, TypeError, "mean the same"),
        (([CountingEnv],), {"observation_mode": "all"}, ValueError, "Invalid `observation_mode`"),
        (([failing_factory],), {}, WorkerStartError, "the factory of env 0 failed"),
    ],
)
def test_what_it_cannot_be_made_of(args: Any, options: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        AioVectorEnv(*args, **options)


def test_envs_on_tensordicts_are_refused() -> None:
    from aioenvs import GymEnv

    with pytest.raises(SpecMismatchError, match=r"env 0 .* deals in TensorDicts; expected an env with Gymnasium's"):
        AioVectorEnv([lambda: GymEnv("CartPole-v1")], backend="serial")


def test_envs_of_several_agents_are_refused() -> None:
    with pytest.raises(SpecMismatchError, match=r"env 0 .* has several agents; expected an env with Gymnasium's"):
        AioVectorEnv([CrowdEnv], backend="serial")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_gymnasiums_name_of_the_start_method(method: str) -> None:
    with opened(counting(), context=method, shared_memory=False, daemon=False) as envs:
        assert envs.reset()[0][:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("count", [0, -1, "2", 1.0, True])
def test_max_concurrency_is_a_number(count: Any, host: str) -> None:
    with pytest.raises(ValueError, match=r"`max_concurrency` must be an? (positive )?integer or None"):
        AioVectorEnv(counting(), max_concurrency=count, **HOSTS[host])


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("timeout", [-1, "x", float("nan")])
def test_a_timeout_is_a_time_to_come_and_else_the_step_is_over(timeout: Any, host: str) -> None:
    with opened(counting(), **HOSTS[host]) as envs:
        envs.reset()
        envs.step_async(actions(1, 2, 3))
        with pytest.raises(ValueError, match="expected timeout to be a number of seconds"):
            envs.step_wait(timeout=timeout)
        envs.step(actions(1, 2, 3))


@pytest.mark.parametrize("options", ["reset_mask", [1], 5])
def test_options_of_another_kind_go_to_the_envs(options: Any) -> None:
    with opened([OptionsKeeper] * 2, backend="serial") as envs:
        envs.reset(options=options)
        assert envs.get_attr("options") == (options, options)


def test_max_concurrency_is_a_number_of_processes() -> None:
    with opened(counting(), max_concurrency=2) as envs:
        envs.reset()
        assert len(pids(envs)) == 2


def pids(envs: AioVectorEnv) -> tuple[int, ...]:
    assert envs._vector is not None
    return envs._vector.envs.pool.pids


# -- spaces ---------------------------------------------------------------------------------------------


class Bounded(CountingEnv):
    def __init__(self, high: int, shape: tuple[int, ...] = (4,), actions: int = 3) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Box(-high, high, shape, np.int64)
        self.action_space = gym.spaces.Discrete(actions)


def bounded(*each: Any) -> list[Callable[[], Any]]:
    return [functools.partial(Bounded, *arguments) for arguments in each]


def test_spaces_that_differ() -> None:
    makes = bounded((9,), (8,), (9,))
    with pytest.raises(SpecMismatchError, match=r"spaces are not equivalent. .*env 1 has.*'different'"):
        AioVectorEnv(makes, backend="serial")
    with contextlib.closing(SyncVectorEnv(makes, observation_mode="different")) as peer:
        with opened(makes, observation_mode="different", num_processes=2) as own:
            assert own.observation_space == peer.observation_space
            assert own.single_observation_space == peer.single_observation_space
            np.testing.assert_array_equal(own.reset(seed=0)[0], peer.reset(seed=0)[0])
        spaces = (gym.spaces.Box(-99, 99, (3, 4), np.int64), gym.spaces.Box(-99, 99, (4,), np.int64))
        with opened(makes, observation_mode=spaces, backend="serial") as own:
            assert (own.observation_space, own.single_observation_space) == spaces
    with pytest.raises(SpecMismatchError, match=r"spaces of one structure, shape and dtype; env 0 has .* env 2 has"):
        AioVectorEnv(bounded((9,), (9,), (9, (5,))), observation_mode="different", backend="serial")
    with pytest.raises(SpecMismatchError, match=r"an action space different from .*: that of env 1 is"):
        AioVectorEnv(bounded((9,), (9, (4,), 4)), backend="serial")


# -- copies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_results_stay_as_they_were(host: str) -> None:
    with opened(counting(length=2), autoreset_mode="SameStep", **HOSTS[host]) as envs:
        results = [envs.reset(), *(envs.step(actions(1, 2, 3)) for _ in range(4))]
        seen = [result[0][:, 2].tolist() for result in results]
        assert seen == [[0] * 3, [1] * 3, [0] * 3, [1] * 3, [0] * 3]
        assert [result[1].tolist() for result in results[1:]] == [[1.0] * 3, [2.0] * 3] * 2
        assert all(array.flags.writeable for result in results[1:] for array in result[:4])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_copy_false_uses_the_same_array_again(mode: str) -> None:
    with opened(counting(length=3), copy=False, autoreset_mode=mode, num_processes=1) as envs:
        first, _ = envs.reset()
        second, *_ = envs.step(actions(1, 2, 3))
        assert first is second
        assert first.tolist() == [[0, 1, 1, 1], [1, 1, 1, 2], [2, 1, 1, 3]]


# -- resets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_options_reach_the_envs_and_stay_the_callers(host: str) -> None:
    with opened([Informer] * 3, **HOSTS[host]) as envs:
        given = {"level": [1], "reset_mask": np.array([True, False, True])}
        envs.reset(seed=0)
        envs.step(actions(0, 0, 0))
        observations, infos = envs.reset(options=given)
        assert observations[:, 1].tolist() == [0, 1, 0]
        assert infos["_began"].tolist() == [True, False, True]
        assert infos["options"]["level"].tolist() == [[1], None, [1]]
        assert sorted(given) == ["level", "reset_mask"]
        assert envs.get_attr("options") == ({"level": [1]}, None, {"level": [1]})


def test_a_mask_resets_what_is_over_under_disabled() -> None:
    with opened(counting({1: {"length": 2}}), autoreset_mode="Disabled", num_processes=2) as envs:
        envs.reset()
        envs.step(actions(1, 1, 1))
        *_, over, _, _ = envs.step(actions(1, 1, 1))
        assert over.tolist() == [False, True, False]
        with pytest.raises(ResetNeededError, match=r"env 1 cannot step: the episode is over.*no env was stepped"):
            envs.step(actions(5, 5, 5))
        observations, _ = envs.reset(options={"reset_mask": over})
        assert observations.tolist() == [[0, 1, 2, 2], [1, 2, 0, 0], [2, 1, 2, 2]]
        observations, *_ = envs.step(actions(1, 1, 1))
        assert observations.tolist() == [[0, 1, 3, 3], [1, 2, 1, 1], [2, 1, 3, 3]]


def test_the_step_after_the_last_ignores_its_action() -> None:
    with opened(counting({1: {"length": 1}}), num_processes=1) as envs:
        envs.reset()
        assert envs.step(actions(1, 1, 1))[2].tolist() == [False, True, False]
        observations, rewards, terminated, truncated, _ = envs.step(actions(1, 999, 1))
        assert observations.tolist() == [[0, 1, 2, 2], [1, 2, 0, 0], [2, 1, 2, 2]]
        assert rewards.tolist() == [2.0, 0.0, 2.0]
        assert not (terminated | truncated).any()
        envs.step(actions(1, 1, 1))
        observations, _ = envs.reset()  # an explicit one, which is not done again by the next step
        assert envs.step(actions(7, 7, 7))[0][:, 3].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("seed", "options", "kind", "words"),
    [
        (float("nan"), None, TypeError, "a seed must be an integer, .* got nan"),
        (1.5, None, TypeError, "a seed must be an integer, .* got 1.5"),
        (True, None, TypeError, "a seed must be an integer, .* got True"),
        ("123", None, TypeError, "a seed must be an integer, .* got '123'"),
        (-1, None, ValueError, "must not be negative, got -1"),
        ([1, 2], None, ValueError, "must match num_envs=3 but got length=2"),
        ([1, float("nan"), 2], None, TypeError, "a seed must be an integer or None, got nan"),
        (None, {"reset_mask": [True] * 3}, TypeError, "must be a numpy array"),
        (None, {"reset_mask": np.ones(3)}, TypeError, "must have `dtype=np.bool_`"),
        (None, {"reset_mask": np.ones(2, bool)}, ValueError, r"must have shape `\(3,\)`, got \(2,\)"),
        (None, {"reset_mask": np.zeros(3, bool)}, ValueError, "at least one True"),
    ],
)
def test_bad_resets_change_nothing(seed: Any, options: Any, kind: type[Exception], words: str) -> None:
    with opened(counting(), backend="serial") as envs:
        envs.reset()
        with pytest.raises(kind, match=words):
            envs.reset(seed=seed, options=options)
        assert envs.step(actions(1, 1, 1))[0][:, 1:].tolist() == [[1, 1, 1]] * 3


def test_seeds_may_be_numpys() -> None:
    with opened("CartPole-v1", 3, num_processes=1) as envs:
        one, _ = envs.reset(seed=np.int64(5))
        np.testing.assert_array_equal(envs.reset(seed=np.array([5, 6, 7]))[0], one)
        assert envs.np_random_seed == (5, 6, 7)
        assert len(envs.np_random) == 3


# -- steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_bad_actions_step_nobody(host: str) -> None:
    with opened(counting(), **HOSTS[host]) as envs:
        envs.reset()
        for bad in (
            actions(1, 2),
            actions(1, 2, 3, 4),
            [1, 2],
            5,
            None,
            np.array([True, 2.5, None]),
            np.array([[1], [2], [3]]),
            ["1", "2", "3"],
            [[1], [2, 3], [4]],
        ):
            with pytest.raises(SpecMismatchError, match=r"actions: expected int64 of shape .*no env was stepped"):
                envs.step(bad)
        for good in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.uint8), np.array([1.0, 2, 3])):
            observations, *_ = envs.step(good)
        assert observations[:, 2:].tolist() == [[4, 4], [4, 8], [4, 12]]


@pytest.mark.parametrize("host", HOSTS)
def test_the_caller_may_change_actions_that_are_under_way(host: str) -> None:
    with opened(counting(), **HOSTS[host]) as envs:
        envs.reset()
        given = actions(1, 2, 3)
        envs.step_async(given)
        given[:] = 500
        assert envs.step_wait()[0][:, 3].tolist() == [1, 2, 3]


def test_bad_structures_step_nobody() -> None:
    with opened([Mixed] * 2, backend="serial") as envs:
        envs.reset(seed=0)
        good = envs.action_space.sample()
        for bad in ({**good, "say": ("a",)}, {**good, "say": 5}, {key: good[key] for key in ("move", "say")}, [1, 2]):
            with pytest.raises(SpecMismatchError, match=r"(?s)actions: expected .*no env was stepped"):
                envs.step(bad)
        *_, infos = envs.step({**good, "say": ["yes", "no"]})
        assert infos["words"].tolist() == ["yes", "no"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_step_before_the_reset(host: str) -> None:
    with opened(counting(), **HOSTS[host]) as envs:
        assert envs.step(actions(1, 2, 3))[0].tolist() == [[0, 0, 1, 1], [1, 0, 1, 2], [2, 0, 1, 3]]
        envs.reset()
        assert envs.step(actions(1, 1, 1))[0][:, 2].tolist() == [1, 1, 1]


class Rewarding(CountingEnv):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return (observation, [0.1, 1e300, np.float64(2.5), 3, float("nan")][int(action)], *rest)


def test_rewards_are_float64() -> None:
    with opened([Rewarding] * 5, num_processes=1) as envs:
        envs.reset()
        rewards = envs.step(np.arange(5))[1]
        assert rewards.dtype == np.float64
        np.testing.assert_array_equal(rewards, [0.1, 1e300, 2.5, 3, np.nan])


# -- what may be asked when -----------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_two_halves_of_each_command(host: str) -> None:
    with opened([functools.partial(Informer, number) for number in range(3)], **HOSTS[host]) as envs:
        envs.reset_async(seed=[1, 2, 3])
        observations, infos = envs.reset_wait(timeout=20)
        assert observations.tolist() == [[0, 0], [1, 0], [2, 0]]
        assert infos["_began"].all()
        envs.step_async(actions(1, 2, 3))
        observations, rewards, *_ = envs.step_wait(timeout=20)
        assert observations.tolist() == [[0, 1], [1, 1], [2, 1]]
        np.testing.assert_array_equal(rewards, [0.1, 0.2, 0.1 * 3])
        envs.call_async("double", 4, plus=1)
        assert envs.call_wait() == (9, 10, 11)
        assert envs.call("level") == envs.get_attr("level") == (7, 7, 7)
        envs.set_attr("level", [1, 2, 3])
        assert envs.get_attr("level") == (1, 2, 3)
        envs.set_attr("level", 5)
        assert envs.get_attr("level") == (5, 5, 5)
        envs.set_attr("nobody had this", ["a", "b", "c"])
        assert envs.get_attr("nobody had this") == ("a", "b", "c")
        assert [frame[0, 0, 0] for frame in envs.render()] == [0, 1, 2]


@pytest.mark.parametrize("host", HOSTS)
def test_halves_in_the_wrong_order(host: str) -> None:
    with opened(counting(), **HOSTS[host]) as envs:
        begin = {
            "reset": envs.reset_async,
            "step": lambda: envs.step_async(actions(1, 1, 1)),
            "call": lambda: envs.call_async("steps"),
        }
        finish = {"reset": envs.reset_wait, "step": envs.step_wait, "call": envs.call_wait}
        envs.reset()
        for command in begin:
            with pytest.raises(NoAsyncCallError, match=f"Calling `{command}_wait` without any") as caught:
                finish[command]()
            assert caught.value.name == command
        for command in begin:
            begin[command]()
            for other in (*begin.values(), lambda: envs.set_attr("steps", 0), envs.render, envs.reset):
                with pytest.raises(PendingCallError, match=f"a pending call to `{command}`") as busy:
                    other()
                assert isinstance(busy.value, AlreadyPendingCallError | ConcurrencyError)
                assert busy.value.name == command
            for other_command in set(finish) - {command}:
                with pytest.raises(NoAsyncCallError, match=f"a call to `{command}` is pending"):
                    finish[other_command]()
            finish[command]()
        assert envs.step(actions(1, 1, 1))[0][:, 2].tolist() == [2] * 3


@pytest.mark.parametrize("host", HOSTS)
def test_after_close(host: str) -> None:
    envs = AioVectorEnv(counting(), **HOSTS[host])
    envs.reset()
    envs.close()
    envs.close()
    assert envs.closed
    for use in (envs.reset, envs.render, envs.step_wait, envs.reset_wait, lambda: envs.step(actions(1, 1, 1))):
        with pytest.raises(ClosedEnvironmentError, match="after a call to `close") as caught:
            use()
        assert isinstance(caught.value, ClosedError)


def test_calls_of_what_is_not_there() -> None:
    with opened(counting(), num_processes=1) as envs:
        with pytest.raises(AttributeError, match="nothing"):
            envs.call("nothing")
        for name in ("reset", "step", "close"):
            with pytest.raises(ValueError, match=f"use `{name}` directly"):
                envs.call(name)
        with pytest.raises(ValueError, match="Got `2` values for 3 environments, to set 'steps'"):
            envs.set_attr("steps", [1, 2])
        assert envs.reset()[0][:, 0].tolist() == [0, 1, 2]


# -- faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_an_env_that_raises(host: str) -> None:
    with opened([StepFails] * 3, **HOSTS[host]) as envs:
        envs.reset()
        with pytest.raises(ZeroDivisionError, match="action 1") as caught:
            envs.step(actions(0, 1, 0))
        assert caught.value.env_index == (1,)
        assert any("raised by env 1 in step" in note for note in caught.value.__notes__)
        with pytest.raises(ResetNeededError, match="env 1 cannot step"):
            envs.step(actions(0, 0, 0))
        observations, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert observations.tolist() == [2, 0, 2]
        assert envs.step(actions(0, 0, 0))[0].tolist() == [3, 1, 3]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_reset_of_its_own_that_raises(mode: str) -> None:
    each = {1: {"length": 1, "fault": raise_two_arguments, "at": (2, 0)}}
    with opened(counting(each), autoreset_mode=mode, num_processes=2) as envs:
        envs.reset()
        if mode == "NextStep":
            envs.step(actions(1, 1, 1))
        with pytest.raises(Exception, match="TwoArgumentError") as caught:
            envs.step(actions(1, 1, 1))
        assert caught.value.env_index == (1,)
        observations, _ = envs.reset()
        assert observations[:, 2].tolist() == [0, 0, 0]


@pytest.mark.parametrize("host", PROCESSES)
def test_the_death_of_a_worker(host: str) -> None:
    with opened(counting({1: {"fault": kill_itself}}), **PROCESSES[host]) as envs:
        envs.reset()
        envs.step(actions(1, 1, 1))
        with pytest.raises(WorkerDiedError, match="killed by SIGKILL") as caught:
            envs.step(actions(1, 1, 1))
        assert 1 in caught.value.env_index
        with pytest.raises(WorkerDiedError):
            envs.step(actions(1, 1, 1))
        observations, _ = envs.reset()
        assert observations[:, 2].tolist() == [0, 0, 0]


RESTARTED = {
    # mode: what the step on which the worker dies, and the next one, observe of env 1 (episode, step), and the rewards
    "NextStep": ([1, 1], [1, 0], 0.0),
    "SameStep": ([1, 0], [1, 1], 1.0),
    "Disabled": ([1, 1], [1, 1], 1.0),
}


@pytest.mark.parametrize("mode", RESTARTED)
def test_a_worker_that_is_restarted(mode: str) -> None:
    lost, following, reward = RESTARTED[mode]
    makes = counting({1: {"fault": kill_itself}})
    options: dict[str, Any] = {"autoreset_mode": mode, "copy": mode == "Disabled"}  # either shows what was before
    with opened(makes, num_processes=3, on_worker_death="restart", **options) as envs:
        envs.reset(seed=1)
        envs.step(actions(1, 1, 1))
        observations, rewards, terminated, truncated, infos = envs.step(actions(1, 1, 1))
        assert observations[:, 1:3].tolist() == [[1, 2], lost, [1, 2]]
        assert rewards.tolist() == [2.0, 0.0, 2.0]
        assert terminated.tolist() == [False] * 3
        assert truncated.tolist() == [False, True, False]
        if mode == "SameStep":
            assert infos["final_obs"][1].tolist() == [1, 1, 1, 1]
        observations, rewards, terminated, truncated, _ = envs.step(actions(1, 1, 1))
        assert observations[:, 1:3].tolist() == [[1, 3], following, [1, 3]]
        assert rewards.tolist() == [3.0, reward, 3.0]
        assert not (terminated | truncated).any()


@pytest.mark.parametrize("host", ["thread", "packed", "one each"])
def test_a_step_that_is_late_shifts_nothing(host: str, gate: Gate) -> None:
    with opened(counting({1: {"fault": gate.wait}}), **HOSTS[host]) as envs:
        envs.reset()
        envs.step(actions(1, 1, 1))
        envs.step_async(actions(2, 2, 2))
        gate.wait_for_arrival()
        with pytest.raises(TimeoutError, match=r"did not answer step within 0.01 s \(timeout\)") as caught:
            envs.step_wait(timeout=0.01)
        assert isinstance(caught.value, WorkerTimeoutError)
        assert 1 in caught.value.env_index
        with pytest.raises(NoAsyncCallError):
            envs.step_wait()
        gate.open()
        observations, rewards, *_ = envs.step(actions(4, 4, 4))
        assert observations.tolist() == [[env, 1, 3, 7] for env in range(3)]
        assert rewards.tolist() == [3.0] * 3


@pytest.mark.parametrize("host", ["thread", "one each"])
def test_a_reset_and_a_call_that_are_late(host: str, gate: Gate) -> None:
    with opened(counting({1: {"fault": gate.wait, "at": (2, 0)}}), **HOSTS[host]) as envs:
        envs.reset()
        envs.reset_async()
        gate.wait_for_arrival()
        with pytest.raises(WorkerTimeoutError, match="did not answer reset"):
            envs.reset_wait(timeout=0.01)
        envs.call_async("steps")
        with pytest.raises(WorkerTimeoutError, match="did not answer"):
            envs.call_wait(timeout=0.01)
        gate.open()
        assert envs.call("episode") == (2, 2, 2)
        assert envs.reset()[0][:, 1].tolist() == [3, 3, 3]


def test_the_time_for_every_step(gate: Gate) -> None:
    with opened(counting({0: {"fault": gate.wait}}), num_processes=3, step_timeout=0.2) as envs:
        envs.reset()
        envs.step(actions(1, 1, 1))
        with pytest.raises(WorkerTimeoutError, match=r"within 0.2 s \(step_timeout\)"):
            envs.step(actions(1, 1, 1))
        gate.open()
        assert envs.reset()[0][:, 1].tolist() == [2, 2, 2]


def test_a_late_worker_is_replaced_if_that_was_asked_for() -> None:
    makes = counting({1: {"fault": hang}})
    with opened(makes, num_processes=3, on_worker_death="restart") as envs:
        envs.reset()
        envs.step(actions(1, 1, 1))
        envs.step_async(actions(1, 1, 1))
        observations, _, _, truncated, _ = envs.step_wait(timeout=0.5)
        assert truncated.tolist() == [False, True, False]
        assert observations[:, 2].tolist() == [2, 1, 2]


def test_an_interrupt_of_the_wait_shifts_nothing(gate: Gate) -> None:
    with opened(counting({1: {"fault": gate.wait}}), num_processes=3) as envs:
        envs.reset()
        envs.step(actions(1, 1, 1))
        envs.step_async(actions(2, 2, 2))
        gate.wait_for_arrival()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            envs.step_wait()
        gate.open()
        assert envs.step(actions(4, 4, 4))[0].tolist() == [[env, 1, 3, 7] for env in range(3)]


# -- the end --------------------------------------------------------------------------------------------


PENDING = "Calling `close` while waiting for a pending call to `step` to complete"  # as Gymnasium says it


@pytest.mark.parametrize("host", ["thread", "packed", "one each"])
def test_close_while_a_step_is_pending(host: str) -> None:
    envs = AioVectorEnv(counting(), **HOSTS[host])
    envs.reset()
    envs.step_async(actions(1, 1, 1))
    with pytest.warns(UserWarning, match=PENDING):
        envs.close()
    assert envs.closed


@pytest.mark.parametrize("how", [{"terminate": True}, {"timeout": 0.05}])
def test_close_ends_a_worker_that_hangs(how: Any) -> None:
    envs = AioVectorEnv(counting({1: {"fault": hang}}), num_processes=3, close_timeout=300)
    envs.reset()
    envs.step(actions(1, 1, 1))
    envs.step_async(actions(1, 1, 1))
    with pytest.warns(UserWarning, match=PENDING):
        envs.close(**how)
    assert envs.closed


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("pending", [False, True])
def test_what_was_not_closed_says_so_and_is_gone(host: str, pending: bool) -> None:
    envs = [AioVectorEnv(counting(), **HOSTS[host])]
    envs[0].reset()
    if pending:
        envs[0].step_async(actions(1, 1, 1))
    with pytest.warns(ResourceWarning, match="AioVectorEnv was never closed"):
        envs.clear()
    gc.collect()


async def test_within_a_running_loop() -> None:
    with opened(counting(), num_processes=2) as envs:
        envs.reset()
        envs.step_async(actions(1, 2, 3))
        assert envs.step_wait()[0][:, 3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("host", ["serial", "thread", "packed"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_coroutine_envs(host: str, mode: str) -> None:
    with opened([SlowStart] * 3, autoreset_mode=mode, **HOSTS[host]) as envs:
        assert envs.reset(seed=0)[0].tolist() == [0, 0, 0]
        seen = []
        for _ in range(4):
            observations, rewards, over, _, infos = envs.step(actions(1, 1, 1))
            seen.append((observations[0], rewards[0], bool(over[0]), bool(infos)))
            if mode == "Disabled" and over.any():
                envs.reset(options={"reset_mask": over})
        assert (
            seen
            == {
                "NextStep": [
                    (1, 1.0, False, True),
                    (2, 1.0, True, True),
                    (0, 0.0, False, False),
                    (1, 1.0, False, True),
                ],
                "SameStep": [(1, 1.0, False, True), (0, 1.0, True, True)] * 2,
                "Disabled": [(1, 1.0, False, True), (2, 1.0, True, True)] * 2,
            }[mode]
        )
        assert envs.call("awaited", 3) == (6, 6, 6)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("kind", "path"),
    [("self", r"\('all'"), ("inner", r"\('(inner|same)', 'itself'\)"), ("deep", r"'more', 'more', \.\.\.\)")],
)
def test_an_info_that_contains_itself_is_refused_by_name(host: str, kind: str, path: str) -> None:
    with opened([Endless, functools.partial(Endless, kind), Endless], **HOSTS[host]) as envs:
        envs.reset()
        envs.step(actions(1, 1, 1))
        with pytest.raises(SpecMismatchError, match=rf"env 1: expected an info of dicts that end.* {path}") as caught:
            envs.step(actions(1, 1, 1))
        assert caught.value.env_index == (1,)
        assert "leave that entry out" in str(caught.value)
        with pytest.raises(ResetNeededError, match="env 1"):
            envs.step(actions(1, 1, 1))
        _, infos = envs.reset()
        assert infos["lives"].tolist() == [3] * 3
        assert envs.step(actions(1, 1, 1))[0].tolist() == [[1]] * 3


@pytest.mark.parametrize("host", HOSTS)
def test_what_is_no_tree_of_dicts_is_an_object_in_an_info(host: str) -> None:
    with opened([functools.partial(Endless, "list")] * 3, **HOSTS[host]) as envs:
        envs.reset()
        envs.step(actions(1, 1, 1))
        infos = envs.step(actions(1, 1, 1))[-1]
    assert infos["inner"]["level"].tolist() == infos["same"]["level"].tolist() == [1, 1, 1]
    assert infos["list"][0][0]["list"][0]["inner"] == {"level": 1}


def test_it_has_what_the_peer_has() -> None:
    public = {name for name in dir(AsyncVectorEnv) if not name.startswith("_")}
    assert public - set(dir(AioVectorEnv)) == set()


@pytest.mark.parametrize("host", HOSTS)
def test_whoever_closes_while_another_thread_steps_is_told_so_and_can_close_later(host: str, gate: Gate) -> None:
    closed_in_the_middle_of_a_step(functools.partial(AioVectorEnv, **HOSTS[host]), actions(1, 1, 1), gate)
