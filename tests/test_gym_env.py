"""`GymEnv` and `GymWrapper` against the Gymnasium envs that they wrap, stepped by hand."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from faces import Face
from failing_envs import CountingEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Text, Tuple
from oracle import TORCHRL, TORCHRL_MARKS
from space_envs import (
    SPACES,
    EchoEnv,
    MarkedEnv,
    OptionsEnv,
    OverwritingEnv,
    ReusingEnv,
    ScriptedEnv,
    describe,
)
from tensordict import TensorDict, TensorDictBase, assert_close

from aioenvs.engine.worker.random_streams import seed_chain
from aioenvs.envs.base import EnvBase
from aioenvs.envs.check import check_env_specs
from aioenvs.envs.creator import EnvCreator
from aioenvs.envs.gym import GymEnv, GymWrapper
from aioenvs.errors import ClosedError, ResetNeededError, SpecMismatchError
from aioenvs.specs import Bounded, Categorical, Composite, MultiOneHot, NonTensor, OneHot, Unbounded

CLASSIC = ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1"]


class DetailsEnv(gymnasium.Env):
    """Observes the action in several parts; gives the reward that it is told to."""

    observation_space = Dict(
        position=Box(-9, 9, (2,)), agent=Dict(gear=Discrete(3, start=1)), history=Tuple((Discrete(2), Box(-9, 9, ())))
    )
    action_space = Dict(push=Box(-9, 9, (2,)), gear=Discrete(3, start=1), extra=Tuple((MultiDiscrete([2, 3]),)))

    def __init__(self, reward: Any = 1.0) -> None:
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation(np.zeros(2), 1, 0), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self._observation(action["push"], action["gear"], action["extra"][0][0]), self.reward, False, False, {}

    def _observation(self, position: Any, gear: Any, last: Any) -> Any:
        return {
            "position": np.asarray(position, np.float32),
            "agent": {"gear": gear},
            "history": (last, np.float32(position[0])),
        }


# -- the same as by hand --------------------------------------------------------------------------------


def by_hand(
    env: Any, seed: int, actions: list[Any], *, frame_skip: int = 1
) -> list[tuple[np.ndarray[Any, Any], float, bool, bool]]:
    observation, _ = env.reset(seed=seed)
    steps = [(observation.copy(), 0.0, False, False)]
    for action in actions:
        total = 0.0
        for _ in range(frame_skip):
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        steps.append((observation.copy(), total, terminated, truncated))
        if terminated or truncated:
            observation, _ = env.reset()
            steps.append((observation.copy(), 0.0, False, False))
    return steps


def by_wrapper(env: Any, seed: int, actions: list[Any]) -> list[tuple[np.ndarray[Any, Any], float, bool, bool]]:
    env.set_seed(seed)
    td = env.reset()
    steps = [(td["observation"].numpy(), 0.0, False, False)]
    for action in actions:
        td, following = env.step_and_maybe_reset(td.set("action", env.action_spec.encode(action)))
        after = td["next"]
        flags = bool(after["terminated"]), bool(after["truncated"])
        steps.append((after["observation"].numpy(), float(after["reward"]), *flags))
        if after["done"]:
            steps.append((following["observation"].numpy(), 0.0, False, False))
        td = following
    return steps


@pytest.mark.parametrize("frame_skip", [None, 3])
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", CLASSIC)
def test_trajectories_are_those_of_gymnasium(name: str, categorical: bool, frame_skip: int | None) -> None:
    raw = gymnasium.make(name)
    raw.action_space.seed(5)
    actions = [raw.action_space.sample() for _ in range(250)]
    env = GymEnv(name, categorical_action_encoding=categorical, frame_skip=frame_skip)
    expected = by_hand(raw, 7, actions, frame_skip=frame_skip or 1)
    found = by_wrapper(env, 7, actions)
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        np.testing.assert_array_equal(here[0], there[0])
        assert here[1] == pytest.approx(there[1], rel=1e-6)
        assert here[2:] == there[2:]
    raw.close()
    env.close()


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("categorical", [False, True])
def test_every_space_travels_both_ways(name: str, categorical: bool) -> None:
    space = SPACES[name]()
    space.seed(1)
    first = space.sample()
    env = GymWrapper(EchoEnv(space), categorical)
    td = env.reset(options={"value": first})
    env.observation_spec.assert_is_in(td)
    for _ in range(3):
        td = env.rand_step(td)
        assert not td["next", "seen"].startswith("no action"), td["next", "seen"]
        env.observation_spec.assert_is_in(td["next"])
        env.full_action_spec.assert_is_in(td)
        assert flat(td["next"], "echo") == flat(td, "action")
        td = env.step_mdp(td)
    if not isinstance(space, Dict | Tuple):
        td["action"] = env.full_action_spec["action"].encode(first)
        assert env.step(td)["next", "seen"] == describe(space_value(space, first))


def flat(td: TensorDictBase, key: str) -> Any:
    value = td.get(key)
    if isinstance(value, TensorDictBase) and type(value) is TensorDict:
        return {name: flat(value, name) for name in value.keys()}  # noqa: SIM118
    return value.tolist() if isinstance(value, torch.Tensor) else describe(value.data)


def space_value(space: Space, value: Any) -> Any:
    """A sample of a space as other samples of it are: Gymnasium's integers are of two types."""
    return space.dtype.type(value) if isinstance(space, Discrete) else value


# -- specs ----------------------------------------------------------------------------------------------


def test_the_specs_of_cartpole() -> None:
    env = GymEnv("CartPole-v1")
    box = gymnasium.make("CartPole-v1").observation_space
    assert isinstance(env, EnvBase)
    assert env.batch_size == ()
    assert env.observation_spec == Composite(observation=Bounded(box.low, box.high))
    assert env.action_spec == OneHot(2, dtype=torch.int64)
    assert env.reward_spec == Unbounded((1,))
    flag = Categorical(2, (1,), dtype=torch.bool)
    assert env.done_spec == Composite(done=flag, terminated=flag, truncated=flag)
    assert env.state_keys == []
    assert env.output_spec.is_locked


@pytest.mark.parametrize("categorical", [False, True])
def test_the_specs_of_containers(categorical: bool) -> None:
    env = GymWrapper(DetailsEnv(), categorical_action_encoding=categorical)
    assert set(env.observation_keys) == {"position", ("agent", "gear"), ("history", "0"), ("history", "1")}
    assert set(env.action_keys) == {("action", "push"), ("action", "gear"), ("action", "extra", "0")}
    gear: Any = env.full_action_spec["action", "gear"]
    assert gear == (Categorical(3, start=1) if categorical else OneHot(3, dtype=torch.int64, start=1))
    assert env.observation_spec["agent", "gear"] == gear
    if not categorical:
        assert env.full_action_spec["action", "extra", "0"] == MultiOneHot([2, 3], dtype=torch.int64)
    assert env.observation_spec["history", "1"] == Bounded(-9, 9, (1,))  # a number gets a dim, as in TorchRL


def test_a_tuple_observation_stands_under_its_name() -> None:
    env = GymWrapper(EchoEnv(Tuple((Box(-1, 1, (2,)), Text(3))), plain=True))
    assert env.observation_keys == [("observation", "0"), ("observation", "1")]
    assert env.action_keys == [("action", "0"), ("action", "1")]
    assert env.observation_spec["observation", "1"] == NonTensor(())


def test_an_observation_whose_key_is_taken() -> None:
    space = Dict(reward=Box(-1, 1, (2,)))
    with pytest.raises(
        SpecMismatchError, match=r"GymWrapper.*has an observation at \('reward',\), a key that is taken"
    ):
        GymWrapper(ScriptedEnv(space, None, None))


def test_device_and_to() -> None:
    env = GymEnv("CartPole-v1", device="cpu")
    assert env.device == torch.device("cpu")
    assert env.rollout(3).device == torch.device("cpu")
    assert env.to("meta") is env
    assert env.observation_spec["observation"].device == torch.device("meta")
    assert env._reset(None)["observation"].device == torch.device("meta")
    assert GymEnv("CartPole-v1").reset().device is None


# -- values ---------------------------------------------------------------------------------------------


def test_actions_of_containers_arrive_as_the_space_has_them() -> None:
    env = GymWrapper(DetailsEnv())
    td = env.reset()
    td["action"] = TensorDict(
        push=torch.tensor([1.5, -2.0]),
        gear=torch.tensor([0, 0, 1]),
        extra=TensorDict({"0": torch.tensor([0, 1, 1, 0, 0])}),
    )
    after = env.step(td)["next"]
    assert after["position"].tolist() == [1.5, -2.0]
    assert after["agent", "gear"].tolist() == [0, 0, 1]
    assert after["history", "0"].tolist() == [0, 1]
    assert after["history", "1"].tolist() == [1.5]


@pytest.mark.parametrize(
    "reward",
    [2, 2.0, True + 1, np.float64(2), np.float32(2), np.int16(2), np.array(2.0), np.array([2.0]), np.array([[2]])],
    ids=repr,
)
def test_rewards_of_any_number_type(reward: Any) -> None:
    td = GymWrapper(DetailsEnv(reward))
    after = td.rand_step(td.reset())["next"]
    assert after["reward"].tolist() == [2.0]
    assert after["reward"].dtype == torch.float32


@pytest.mark.parametrize("reward", [None, "much", [1.0, 2.0], 1e300], ids=repr)
def test_a_reward_that_is_no_number(reward: Any) -> None:
    env = GymWrapper(DetailsEnv(reward))
    td = env.reset()
    with pytest.raises(SpecMismatchError, match=r"GymWrapper\(env=.*as reward, found"):
        env.rand_step(td)


@pytest.mark.parametrize("kind", ReusingEnv.spaces)
def test_what_the_env_reuses_is_copied(kind: str) -> None:
    env = GymWrapper(ReusingEnv(kind))
    root, following = env.step_and_maybe_reset(env.rand_action(env.reset()))
    before = describe_all(root), describe_all(following)
    for _ in range(4):
        _, following = env.step_and_maybe_reset(env.rand_action(following))
    assert (describe_all(root), before[1]) == before
    assert "-1" in str(before[0])


def describe_all(td: TensorDictBase) -> str:
    return str({key: flat(td, key) for key in td.keys() if key != "action"})  # noqa: SIM118


@pytest.mark.parametrize("space", [Box(-9, 9, (2,)), MultiDiscrete([5, 4]), Tuple((Box(-9, 9, (2,)),))], ids=str)
@pytest.mark.parametrize("frame_skip", [1, 3])
def test_the_env_cannot_change_the_callers_action(space: Space, frame_skip: int) -> None:
    env = GymWrapper(OverwritingEnv(space), categorical_action_encoding=True, frame_skip=frame_skip)
    td = env.rand_action(env.reset())
    before = td.clone()
    env.step(td)
    assert_close(td.exclude("next"), before)


def test_each_repetition_gets_the_same_action() -> None:
    seen = []

    class Notes(OverwritingEnv):
        def step(self, action: Any) -> Any:
            seen.append(action.tolist())
            return super().step(action)

    env = GymWrapper(Notes(Box(-9, 9, (1,))), frame_skip=3)
    env.step(env.reset().set("action", torch.tensor([2.0])))
    assert seen == [[2.0]] * 3


@pytest.mark.parametrize(
    ("space", "wrong", "found"),
    [
        (Box(-1, 1, (2,)), np.zeros(3, np.float32), r"at \('observation',\), found float32 of shape \(3,\)"),
        (Box(-1, 1, (2,), np.int32), np.zeros(2), r"expected int32 of shape \(2,\) at .*, found float64"),
        (Discrete(3), 3, r"at \('observation',\): expected integers in \[0, 3\) .*found 3"),
        (Discrete(3), "two", r"at \('observation',\), found <U3"),
        (MultiDiscrete([2, 3]), np.array([1, 3]), r"at \('observation',\): expected integers in \[0, 3\)"),
        (Dict(a=Discrete(2)), {"b": 1}, r"exactly the members \['a'\]"),
        (Tuple((Discrete(2),)), (1, 1), r"exactly the members \[0\]"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("when", ["reset", "step"])
def test_an_observation_that_does_not_fit(space: Space, wrong: Any, found: str, when: str) -> None:
    right = space.sample()
    env = GymWrapper(ScriptedEnv(space, *([wrong] if when == "reset" else [right, wrong, right])))
    with pytest.raises(SpecMismatchError, match=found) as caught:
        env.rand_step(env.reset())
    assert str(caught.value).startswith("GymWrapper(env=")
    assert "env 0" not in str(caught.value)


@pytest.mark.parametrize(
    ("space", "action", "found"),
    [
        (Box(-1, 1, (2,)), torch.zeros(3), r"expected Bounded.*at \('action',\), found tensor"),
        (Box(-1, 1, (2,)), torch.tensor(1.0), "found tensor"),
        (Box(-1, 1, (2,), np.int32), torch.full((2,), 0.5), "expected int32.* found values of float32"),
        (Box(-1, 1, (2,), np.int8), torch.tensor([1, 300]), "do not fit"),
        (Discrete(3), torch.tensor([0, 0, 0]), r"expected OneHot.*found tensor\(\[0, 0, 0\]\)"),
        (Discrete(3), torch.tensor([0, 1, 1]), r"found tensor\(\[0, 1, 1\]\)"),
        (Discrete(3), torch.tensor(1), r"expected OneHot.*found tensor\(1\)"),
        (MultiDiscrete([2, 3]), torch.tensor([1, 1, 0, 0, 1]), r"found tensor\(\[1, 1, 0, 0, 1\]\)"),
    ],
    ids=repr,
)
def test_an_action_that_does_not_fit(space: Space, action: torch.Tensor, found: str) -> None:
    env = GymWrapper(EchoEnv(space))
    td = env.reset(options={"value": space.sample()})
    with pytest.raises(SpecMismatchError, match=found):
        env.step(td.set("action", action))
    assert env.unwrapped.steps == 0


@pytest.mark.parametrize("action", [torch.tensor(3), torch.tensor(-1), torch.tensor(1.5)])
def test_an_integer_that_is_no_choice(action: torch.Tensor) -> None:
    env = GymWrapper(EchoEnv(Discrete(3)), categorical_action_encoding=True)
    td = env.reset(options={"value": 0})
    with pytest.raises(SpecMismatchError, match=r"at \('action',\)"):
        env.step(td.set("action", action))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_one_hot_actions_of_any_dtype(dtype: torch.dtype) -> None:
    env = GymWrapper(EchoEnv(Discrete(3, start=5), plain=True), categorical_action_encoding=False)
    td = env.reset(options={"value": 5})
    after = env.step(td.set("action", torch.tensor([0, 1, 0]).to(dtype)))["next"]
    assert after["observation"].tolist() == [0, 1, 0]


def test_an_action_beyond_the_bounds_of_a_box_is_the_envs_to_judge() -> None:
    env = GymWrapper(EchoEnv(Box(-1, 1, (1,)), plain=True))
    td = env.reset(options={"value": np.zeros(1, np.float32)})
    assert env.step(td.set("action", torch.tensor([5.0])))["next", "observation"].tolist() == [5.0]


def test_an_action_that_is_missing() -> None:
    env = GymEnv("CartPole-v1")
    td = env.reset()
    with pytest.raises(SpecMismatchError, match=r"expected OneHot.* at \('action',\), found nothing among the keys"):
        env.step(td)


def test_an_env_without_actions() -> None:
    env = GymWrapper(EchoEnv(Dict({}), plain=False))
    td = env.rand_step(env.reset(options={"value": {}}))
    assert td["next", "seen"] == "{}"
    assert env.action_keys == []


def test_random_actions_without_a_fixed_shape_are_reproducible_samples() -> None:
    env = GymWrapper(EchoEnv(Tuple((Text(5), Discrete(3))), plain=True))
    torch.manual_seed(3)
    first = [env.rand_action()["action", "0"] for _ in range(5)]
    torch.manual_seed(3)
    assert [env.rand_action()["action", "0"] for _ in range(5)] == first
    assert len(set(first)) > 1
    assert all(env.action_space[0].contains(text) for text in first)


@pytest.mark.parametrize("result", [None, (0, {}, 1), (np.zeros(2, np.float32),)], ids=repr)
def test_a_malformed_result(result: Any) -> None:
    class Malformed(gymnasium.Env):
        observation_space = Box(-1, 1, (2,))
        action_space = Discrete(2)

        def __init__(self, wrong: str) -> None:
            self.wrong = wrong

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return result if self.wrong == "reset" else (np.zeros(2, np.float32), {})

        def step(self, action: Any) -> Any:
            return result

    with pytest.raises(SpecMismatchError, match=re.escape("reset must return (observation, info)")):
        GymWrapper(Malformed("reset")).reset()
    for frame_skip in (1, 2):
        env = GymWrapper(Malformed("step"), frame_skip=frame_skip)
        td = env.reset()
        with pytest.raises(SpecMismatchError, match="step must return"):
            env.rand_step(td)


# -- episodes and seeds ---------------------------------------------------------------------------------


def test_a_step_before_the_first_reset() -> None:
    env = GymEnv("CartPole-v1")
    with pytest.raises(gymnasium.error.ResetNeeded):  # of Gymnasium's own wrapper
        env.rand_step()
    with pytest.raises(ResetNeededError, match=r"GymEnv\(env=CartPole-v1.* cannot step: it failed"):
        copy.deepcopy(env).rand_step()
    assert "next" in GymWrapper(env.unwrapped).rand_step(env.reset()).keys()  # noqa: SIM118


def test_frame_skip_ends_with_the_episode() -> None:
    space = Box(0, 9, ())
    values = [np.float32(i) for i in range(6)]
    env = GymWrapper(ScriptedEnv(space, *values, reward=0.5), frame_skip=3)
    td = env.rand_step(env.reset())
    assert (td["next", "observation"].item(), td["next", "reward"].item(), td["next", "done"].item()) == (3, 1.5, False)
    td = env.rand_step(env.step_mdp(td))
    assert (td["next", "observation"].item(), td["next", "reward"].item(), td["next", "done"].item()) == (5, 1.0, True)


@pytest.mark.parametrize("frame_skip", [0, -1, 1.5, "2"])
def test_a_wrong_frame_skip(frame_skip: Any) -> None:
    with pytest.raises(ValueError, match=f"expected a frame_skip of at least 1, or None, found {frame_skip!r}"):
        GymEnv("CartPole-v1", frame_skip=frame_skip)


def test_a_seed_is_used_by_the_next_reset_only() -> None:
    env = GymWrapper(OptionsEnv())
    assert env.set_seed(4) == env.set_seed(4)
    assert env.reset()["told"] == "4 None"
    assert env.reset()["told"] == "None None"
    env.set_seed(5, static_seed=True)
    assert env.reset(seed=6)["told"] == "6 None"
    assert env.reset()["told"] == "None None"


def test_a_seed_survives_a_reset_that_failed() -> None:
    env = GymWrapper(OptionsEnv())
    env.set_seed(4)
    with pytest.raises(TypeError, match="color"):
        env.reset(color="red")
    assert env.reset()["told"] == "4 None"


def test_options_reach_the_env_and_stay_the_callers() -> None:
    env = GymWrapper(OptionsEnv(3))
    options: dict[str, Any] = {"nested": []}
    assert env.reset(options=options, seed=1)["told"] == "1 {'nested': []}"
    assert options == {"nested": []}


def test_a_rollout_starts_again_by_itself() -> None:
    env = GymWrapper(MarkedEnv(length=3))
    td = env.rollout(7, break_when_any_done=False)
    assert td.batch_size == (7,)
    assert td["next", "done"].squeeze(-1).tolist() == [False, False, True] * 2 + [False]
    assert env.rollout(7).batch_size == (3,)


def test_done_is_terminated_or_truncated() -> None:
    class Ending(ScriptedEnv):
        def step(self, action: Any) -> Any:
            return self.values[0], 0.0, *self.flags, {}

    env = GymWrapper(Ending(Discrete(2), 0, 0))
    for terminated in (False, np.bool_(True), 1, np.array([True])):
        for truncated in (False, True):
            env.unwrapped.flags = terminated, truncated
            after = env.rand_step(env.reset())["next"]
            assert after["terminated"].tolist() == [bool(terminated)]
            assert after["truncated"].tolist() == [truncated]
            assert after["done"].tolist() == [bool(terminated) or truncated]
    env.unwrapped.flags = "yes", False
    with pytest.raises(SpecMismatchError, match="expected a bool as terminated, found 'yes'"):
        env.rand_step(env.reset())


# -- the wrapped env ------------------------------------------------------------------------------------


def test_attributes_of_the_wrapped_env() -> None:
    raw = gymnasium.make("CartPole-v1")
    env = GymWrapper(raw)
    assert env.env is env._env is raw
    assert env.unwrapped is raw.unwrapped
    assert env.spec.max_episode_steps == 500
    assert env.action_space is raw.action_space
    assert env.gravity == 9.8  # behind three wrappers
    assert not hasattr(env, "gravitation")
    with pytest.raises(AttributeError, match="gravitation"):
        _ = env.gravitation


def test_what_is_read_from_the_wrapped_env_is_set_there() -> None:
    env = GymEnv("CartPole-v1")
    env.gravity = 5.0
    assert env.gravity == env.unwrapped.gravity == 5.0
    env.note = "mine"
    assert env.note == "mine"
    assert not hasattr(env.unwrapped, "note")
    before = env.is_closed
    env.is_closed = True
    assert not hasattr(env.unwrapped, "is_closed")
    env.is_closed = before
    assert GymEnv("CartPole-v1").gravity == 9.8


def test_render() -> None:
    class Painter(CountingEnv):
        def render(self) -> str:
            return f"a picture of {self.steps}"

    env = GymWrapper(Painter())
    env.rand_step(env.reset())
    assert env.render() == "a picture of 1"


def test_close() -> None:
    closed = []

    class Closing(CountingEnv):
        def close(self) -> None:
            closed.append(self)

    with GymWrapper(Closing()) as env:
        env.reset()
    assert closed == [env.env]
    assert env.is_closed
    env.close(raise_if_closed=False)
    assert len(closed) == 1


def test_an_env_whose_close_fails_is_closed() -> None:
    class Stuck(CountingEnv):
        def close(self) -> None:
            raise OSError("stuck")

    env = GymWrapper(Stuck())
    with pytest.raises(OSError, match="stuck"):
        env.close()
    assert env.is_closed
    with pytest.raises(ClosedError, match="is closed already"):
        env.close()


def test_an_env_without_close_or_gymnasiums_base_class() -> None:
    class Plain:
        observation_space = Box(-1, 1, (1,))
        action_space = Discrete(2)
        color = "red"

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.ones(1, np.float32), 1, True, False, {}

    env = GymWrapper(Plain())
    assert env.rollout(5)["next", "observation"].tolist() == [[1.0]]
    assert env.color == "red"
    env.color = "blue"
    assert env.env.color == "blue"
    assert not hasattr(env, "size")
    env.close()
    assert env.is_closed


def pickled(env: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(env))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_goes_its_own_way(copied: Callable[[Any], Any]) -> None:
    env = GymWrapper(MarkedEnv(env_id=1))
    env.set_seed(3)
    td = env.rand_step(env.reset())
    other = copied(env)
    assert other.env is not env.env
    first = other.rollout(2)
    for _ in range(3):
        td = env.rand_step(env.step_mdp(td))
    assert td["next", "word"] == "1.1.4"
    assert other.rand_step(other.reset())["next", "agent", "count"].item() == 1
    assert first.batch_size == (2,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("CartPole-v1", r"GymEnv\('CartPole-v1'\) makes one"),
        (CountingEnv, "with methods reset and step, found <class"),
        (3, "with methods reset and step, found 3"),
    ],
)
def test_what_is_no_env(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GymWrapper(wrong)


def test_a_vector_env_is_refused() -> None:
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with pytest.raises(TypeError, match=r"single env, found the vector env .*SerialEnv or ParallelEnv"):
        GymWrapper(vector)
    vector.close()


def test_a_coroutine_env_is_refused() -> None:
    class Coroutine(CountingEnv):
        async def step(self, action: Any) -> Any: ...

    with pytest.raises(TypeError, match="coroutine methods"):
        GymWrapper(Coroutine())


def test_an_env_without_spaces() -> None:
    env = CountingEnv()
    env.action_space = None
    with pytest.raises(
        SpecMismatchError, match=r"GymWrapper.*must have a Gymnasium space as its action_space, found None"
    ):
        GymWrapper(env)


def test_a_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected an empty batch_size, found \[2\]; SerialEnv"):
        GymWrapper(CountingEnv(), batch_size=[2])


# -- GymEnv ---------------------------------------------------------------------------------------------


def test_arguments_of_the_env_go_to_gymnasium() -> None:
    env = GymEnv("MountainCarContinuous-v0", goal_velocity=0.5, max_episode_steps=7)
    assert env.unwrapped.goal_velocity == 0.5
    assert env.rollout(100).batch_size == (7,)
    assert env.env_name == "MountainCarContinuous-v0"
    assert repr(env) == "GymEnv(env=MountainCarContinuous-v0, batch_size=torch.Size([]), device=None)"


def test_the_name_by_keyword() -> None:
    assert GymEnv(env_name="CartPole-v1").env_name == "CartPole-v1"


def test_an_unknown_name() -> None:
    with pytest.raises(gymnasium.error.Error, match="CartPool"):
        GymEnv("CartPool-v1")


# -- in a batch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [GymEnv, EnvCreator(GymEnv)], ids=["class", "creator"])
async def test_faces_step_it_like_any_other_env(face: Face, factory: Any) -> None:
    seeds = seed_chain(7, 3)[0]
    singles = [GymEnv("CartPole-v1") for _ in seeds]
    for single, seed in zip(singles, seeds, strict=True):
        single.set_seed(seed)
    async with face.open(3, factory, create_env_kwargs={"env_name": "CartPole-v1"}) as env:
        assert env.action_spec == OneHot(2, (3, 2), dtype=torch.int64)
        await face.call(env.set_seed, 7)
        td = await face.call(env.reset)
        alone = [single.reset() for single in singles]
        for _ in range(40):
            assert_close(td, torch.stack(alone), rtol=0, atol=0)
            action = env.action_spec.rand()
            stepped, td = await face.call(env.step_and_maybe_reset, td.set("action", action))
            pairs = [
                one.step_and_maybe_reset(row.set("action", action[i]))
                for i, (one, row) in enumerate(zip(singles, alone, strict=True))
            ]
            assert_close(stepped["next"], torch.stack([done["next"] for done, _ in pairs]), rtol=0, atol=0)
            alone = [row.exclude("action") for _, row in pairs]
            td = td.exclude("action")


async def test_infos_come_through_the_faces(face: Face) -> None:
    def make() -> GymEnv:
        return GymEnv("Swimmer-v5").auto_register_info_dict()

    async with face.open(2, make) as env:
        assert env.observation_spec["x_position"].shape == (2,)
        td = await face.call(env.rollout, 3)
        assert td["next", "x_position"].shape == (2, 3)
        assert td["x_position"][:, 1:].tolist() == td["next", "x_position"][:, :-1].tolist()


async def test_attributes_are_read_and_set_through_the_faces(async_face: Face) -> None:
    async with async_face.open(2, lambda: GymEnv("CartPole-v1")) as env:
        await env.set_attr("gravity", [1.0, 2.0])
        assert await env.get_attr("gravity") == [1.0, 2.0]
        assert [each.gravity for each in await env.get_attr("unwrapped")] == [1.0, 2.0]


@pytest.mark.parametrize("name", [*CLASSIC, "Swimmer-v5"])
@pytest.mark.parametrize("categorical", [False, True])
def test_the_check_of_specs_passes(name: str, categorical: bool) -> None:
    check_env_specs(GymEnv(name, categorical), seed=0)


@pytest.mark.parametrize("name", SPACES)
def test_the_check_of_specs_passes_for_every_space(name: str) -> None:
    env = GymWrapper(EchoEnv(SPACES[name](), plain=True))
    env.unwrapped.first = SPACES[name]().sample()
    check_env_specs(env)


# -- TorchRL's ------------------------------------------------------------------------------------------


def facts(spec: Any) -> dict[Any, Any]:
    """What specs of the two libraries have in common."""
    found = {}
    for key, leaf in spec.items(True, True):
        kind = re.sub(r"(Bounded|Unbounded)(Continuous|Discrete)", r"\1", type(leaf).__name__)
        found[key] = (kind, tuple(leaf.shape), leaf.dtype)
    return found


class TwoDicts(DetailsEnv):
    """Without what TorchRL does not know: starts, tuples of different spaces, and actions that are nested."""

    observation_space = Dict(position=Box(-9, 9, (2,)), agent=Dict(gear=Discrete(3), speed=Box(-9, 9, ())))
    action_space = Discrete(3)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self._observation(np.full(2, action), action, 0), self.reward, False, False, {}

    def _observation(self, position: Any, gear: Any, last: Any) -> Any:
        noise = np.float32(self.np_random.random())
        return {"position": np.asarray(position, np.float32), "agent": {"gear": int(gear) % 3, "speed": noise}}


TWINS: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(gymnasium.make, name, disable_env_checker=True) for name in CLASSIC},
    "Dict": TwoDicts,
    "MultiDiscrete": lambda: EchoEnv(MultiDiscrete([2, 3]), plain=True),
    "MultiDiscrete of one n": lambda: EchoEnv(MultiDiscrete([3, 3]), plain=True),
}


@pytest.mark.parametrize("library", [pytest.param(TORCHRL, marks=TORCHRL_MARKS, id="torchrl")])
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", TWINS)
def test_specs_and_trajectories_are_those_of_torchrl(name: str, categorical: bool, library: Any) -> None:
    ours = GymWrapper(TWINS[name](), categorical)
    theirs = library.GymWrapper(TWINS[name](), categorical)
    for kind in ("observation", "action", "reward", "done"):
        mine, other = (facts(getattr(env, f"full_{kind}_spec")) for env in (ours, theirs))
        if name == "MultiDiscrete of one n" and categorical:
            mine, other = ({key: fact[1:] for key, fact in each.items()} for each in (mine, other))
        assert mine == other
    if "MultiDiscrete" in name:
        return  # it has nothing to observe before the first action
    torch.manual_seed(0)
    ours.set_seed(3)
    here, there = ours.reset(), theirs.reset(seed=3)
    for _ in range(60):
        assert_close(here, there.exclude("action"))
        ours.rand_action(here)
        there.update(here.select("action"))
        here, here_next = ours.step_and_maybe_reset(here)
        there, there_next = theirs.step_and_maybe_reset(there)
        assert_close(here["next"], there["next"])
        here, there = here_next, there_next
