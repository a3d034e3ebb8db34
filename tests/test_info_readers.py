from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from oracle import TORCHRL, TORCHRL_MARKS
from tensordict import TensorDict, TensorDictBase

from aioenvs.envs.check import check_env_specs
from aioenvs.envs.gym import GymEnv, GymWrapper
from aioenvs.envs.info import BaseInfoDictReader, default_info_dict_reader
from aioenvs.errors import SpecMismatchError
from aioenvs.specs import Bounded, Categorical, Composite, NonTensor, OneHot, TensorSpec, Unbounded

F64, I64, F32 = torch.float64, torch.int64, torch.float32


class InfoEnv(gymnasium.Env):
    """Gives the infos that it is told to: `infos[0]` at a reset, then the others in turn, the last one for ever."""

    observation_space = Box(-1, 1, (2,))
    action_space = Discrete(2)

    def __init__(self, *infos: Any) -> None:
        self.infos = infos
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.steps = 0
        return np.zeros(2, np.float32), self.infos[0]

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, False, False, self.infos[min(self.steps, len(self.infos) - 1)]


RICH = {
    "speed": 1.5,
    "lives": 3,
    "won": True,
    "position": np.array([1.0, 2.0], np.float32),
    "counts": [1, 2, 3],
    "number": np.int16(4),
    "scalar": np.array(2.5),
    "deep": {"inner": {"x": 1}, "name": "a"},
    "name": "text",
    "nothing": None,
    "thing": object(),
    "ragged": [[1], [1, 2]],
    "swapped": np.ones(2, ">f4"),
    "attached": torch.ones(2, requires_grad=True),
    "objects": np.array([None, 1], dtype=object),
    "words": np.array(["a"]),
    "huge": 2**70,
    "_private": 1.0,
    3: 4.0,
}
RICH_SPECS = {
    "speed": Unbounded((), dtype=F64),
    "lives": Unbounded((), dtype=I64),
    "won": Unbounded((), dtype=torch.bool),
    "position": Unbounded((2,)),
    "counts": Unbounded((3,), dtype=I64),
    "number": Unbounded((), dtype=torch.int16),
    "scalar": Unbounded((), dtype=F64),
    "swapped": Unbounded((2,)),
    ("deep", "inner", "x"): Unbounded((), dtype=I64),
}


def learned(env: Any) -> dict[Any, TensorSpec]:
    return {key: spec for key, spec in env.observation_spec.items(True, True) if key != "observation"}


def after_reset_and_step(env: Any) -> tuple[TensorDictBase, TensorDictBase]:
    td = env.reset()
    env.observation_spec.assert_is_in(td)
    return td.clone(), env.rand_step(td)["next"]


# -- learning -------------------------------------------------------------------------------------------


def test_all_numbers_are_registered() -> None:
    env = GymWrapper(InfoEnv(RICH))
    assert env.auto_register_info_dict() is env
    assert learned(env) == RICH_SPECS
    for td in after_reset_and_step(env):
        assert td["speed"].item() == 1.5
        assert td["won"].item() is True
        assert td["counts"].tolist() == [1, 2, 3]
        assert td["deep", "inner", "x"].item() == 1
    assert env.rollout(4)["next", "position"].shape == (4, 2)


def test_private_entries_on_demand() -> None:
    env = GymWrapper(InfoEnv({"_private": 1.0, "deep": {"_x": 2}})).auto_register_info_dict(ignore_private=False)
    assert set(learned(env)) == {"_private", ("deep", "_x")}
    env = GymWrapper(InfoEnv({"_private": 1.0, "deep": {"_x": 2}})).set_info_dict_reader(ignore_private=False)
    assert set(learned(env)) == {"_private", ("deep", "_x")}


def test_what_a_reset_does_not_say_is_zero() -> None:
    env = GymWrapper(InfoEnv({}, {"speed": 1.5, "deep": {"x": np.ones(2)}})).auto_register_info_dict()
    check_env_specs(env)
    first, second = after_reset_and_step(env)
    assert first["speed"].item() == 0
    assert first["deep", "x"].tolist() == [0, 0]
    assert second["speed"].item() == 1.5
    td = env.rollout(3)
    assert td["speed"].tolist() == [0, 1.5, 1.5]


def test_what_a_later_step_does_not_say_is_zero() -> None:
    env = GymWrapper(InfoEnv({"a": 1}, {"a": 2, "b": 3}, {})).auto_register_info_dict()
    assert env.rollout(3)["next", "a"].tolist() == [2, 0, 0]
    assert env.rollout(3)["next", "b"].tolist() == [3, 0, 0]


def test_an_entry_of_changing_type_gets_the_wider_one_and_of_changing_shape_none() -> None:
    env = GymWrapper(InfoEnv({"a": 0, "b": [1], "c": 1}, {"a": 1.5, "b": [1, 2], "c": "x"}))
    assert learned(env.auto_register_info_dict()) == {"a": Unbounded((), dtype=F64)}
    assert env.rollout(2)["a"].tolist() == [0, 1.5]


def test_entries_where_the_env_has_something_are_not_learned() -> None:
    infos = {"observation": 1.0, "reward": 2.0, "done": True, "action": 3, "next": {"x": 1}, "speed": 1.0}
    env = GymWrapper(InfoEnv(infos)).auto_register_info_dict()
    assert set(learned(env)) == {"speed"}
    td = env.rand_step(env.reset())
    assert td["next", "reward"].tolist() == [1.0]
    assert td["observation"].tolist() == [0, 0]


def test_learning_leaves_the_seed_for_the_users_reset() -> None:
    raw = InfoEnv({"a": 1})
    env = GymWrapper(raw)
    env.set_seed(5)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    env.auto_register_info_dict()
    assert torch.equal(torch.get_rng_state(), before)
    env.reset()
    assert raw.seeds == [None, 5]


def test_learning_does_not_disturb_the_action_space() -> None:
    raw = InfoEnv({"a": 1})
    raw.action_space = Discrete(100)
    raw.action_space.seed(1)
    expected = copy.deepcopy(raw.action_space)
    GymWrapper(raw).auto_register_info_dict()
    assert [raw.action_space.sample() for _ in range(5)] == [expected.sample() for _ in range(5)]


def test_a_trajectory_with_infos_is_the_one_without() -> None:
    plain, read = GymEnv("Pendulum-v1"), GymWrapper(InfoOfPendulum(gymnasium.make("Pendulum-v1")))
    read.auto_register_info_dict()
    for env in (plain, read):
        env.set_seed(1)
    torch.manual_seed(0)
    first = plain.rollout(5)
    torch.manual_seed(0)
    second = read.rollout(5)
    assert torch.equal(first["next", "observation"], second["next", "observation"])
    assert torch.equal(second["next", "angle"], second["next", "observation"][:, 0].double())


class InfoOfPendulum(gymnasium.Wrapper):
    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        return (observation, *rest[:-1], {"angle": float(observation[0])})


# -- readers with keys ----------------------------------------------------------------------------------


def test_an_info_that_contains_itself_is_not_learned() -> None:
    info: dict[str, Any] = {"speed": 1.0, "inner": {"lives": 3}}
    info["inner"]["_all"] = info
    reader = default_info_dict_reader()
    reader.learn([info], [])
    assert set(reader.info_spec.keys(True, True)) == {"speed", ("inner", "lives")}
    with pytest.raises(SpecMismatchError, match=r"contains itself.* at \('inner', '_all'\); leave that entry out"):
        default_info_dict_reader(ignore_private=False).learn([info], [])
    default_info_dict_reader(["speed"], ignore_private=False).learn([info], [])
    with pytest.raises(SpecMismatchError, match=r"contains itself.* at \('_all', 'inner'\)"):
        default_info_dict_reader(["inner"], ignore_private=False).learn([info], [])


def test_only_the_named_entries_are_read() -> None:
    env = GymWrapper(InfoEnv(RICH)).set_info_dict_reader(default_info_dict_reader(["lives", ("deep", "inner", "x")]))
    assert set(learned(env)) == {"lives", ("deep", "inner", "x")}
    assert env.reset()["lives"].item() == 3


def test_a_named_dict_is_read_with_all_that_is_in_it() -> None:
    env = GymWrapper(InfoEnv({}, {"episode": {"r": 1.5, "l": 7}})).set_info_dict_reader(
        default_info_dict_reader(["episode"])
    )
    assert learned(env) == {("episode", "r"): Unbounded((), dtype=F64), ("episode", "l"): Unbounded((), dtype=I64)}


def test_a_named_entry_that_is_not_seen_yet_is_one_number() -> None:
    env = GymWrapper(InfoEnv({}, {}, {"success": True})).set_info_dict_reader(default_info_dict_reader(["success"]))
    assert learned(env) == {"success": Unbounded(())}
    assert env.rollout(3)["next", "success"].tolist() == [0, 1, 1]


@pytest.mark.parametrize(("info", "key"), [({"a": "text"}, "a"), ({"a": None}, "a"), ({"a": {"b": "x"}}, "a")])
def test_a_named_entry_that_is_no_number_needs_a_spec(info: Any, key: str) -> None:
    env = GymWrapper(InfoEnv(info))
    with pytest.raises(ValueError, match=r"expected numbers of one shape at \('a'.*NonTensor\(\)"):
        env.set_info_dict_reader(default_info_dict_reader([key]))
    assert learned(env) == {}
    assert env.info_dict_reader == []


def test_named_entries_of_changing_shape_need_a_spec() -> None:
    with pytest.raises(ValueError, match=r"expected numbers of one shape at \('a',\)"):
        GymWrapper(InfoEnv({"a": [1]}, {"a": [1, 2]})).set_info_dict_reader(default_info_dict_reader(["a"]))


@pytest.mark.parametrize(
    "spec",
    [
        [Unbounded((1,)), NonTensor(())],
        {"speed": Unbounded((1,)), "name": NonTensor(())},
        Composite(speed=Unbounded((1,)), name=NonTensor(())),
    ],
    ids=["sequence", "mapping", "composite"],
)
def test_specs_in_three_forms(spec: Any) -> None:
    reader = default_info_dict_reader(["speed", "name"], spec)
    env = GymWrapper(InfoEnv(RICH)).set_info_dict_reader(reader)
    assert learned(env) == {"speed": Unbounded((1,)), "name": NonTensor(())}
    td = env.reset()
    assert td["speed"].tolist() == [1.5]
    assert td["name"] == "text"


def test_a_spec_needs_no_keys_and_no_steps() -> None:
    raw = InfoEnv({"lives": 2})
    env = GymWrapper(raw).set_info_dict_reader(default_info_dict_reader(spec={"lives": OneHot(4)}))
    assert raw.seeds == []
    assert env.reset()["lives"].tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("keys", "spec"),
    [
        (["a", "b"], [Unbounded(())]),
        (None, [Unbounded(())]),
        (["a", "b"], {"a": Unbounded(())}),
        (["a"], {"a": Unbounded(()), "b": Unbounded(())}),
    ],
)
def test_specs_that_do_not_match_the_keys(keys: Any, spec: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a spec (of|for) each key of"):
        default_info_dict_reader(keys, spec)


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        (Unbounded((), dtype=I64), 2.7, "expected int64 of shape () at ('x',), found float64"),
        (Unbounded((2,)), [1.0, 2.0, 3.0], "at ('x',): expected shape (*, 2)"),
        (Unbounded(()), "text", "at ('x',), found <U4"),
        (Unbounded(()), None, "at ('x',), found None"),
        (OneHot(3), 5, "at ('x',): expected integers in [0, 3)"),
    ],
    ids=repr,
)
def test_an_entry_that_does_not_fit_its_spec(spec: TensorSpec, value: Any, message: str) -> None:
    env = GymWrapper(InfoEnv({}, {"x": value})).set_info_dict_reader(default_info_dict_reader(["x"], [spec]))
    td = env.reset()
    with pytest.raises(SpecMismatchError, match=re.escape(message)):
        env.rand_step(td)


def test_what_the_env_reuses_is_copied() -> None:
    array, words = np.zeros(2), ["a"]
    env = GymWrapper(InfoEnv({"array": array, "words": words}))
    env.set_info_dict_reader(default_info_dict_reader(spec={"array": Unbounded((2,)), "words": NonTensor(())}))
    td = env.reset()
    array[:] = 7
    words.append("b")
    assert td["array"].tolist() == [0, 0]
    assert td["words"] == ["a"]


def test_a_reader_can_serve_two_envs() -> None:
    reader = default_info_dict_reader(["a"])
    envs = [GymWrapper(InfoEnv({"a": value})).set_info_dict_reader(reader) for value in (1, 2)]
    assert [env.reset()["a"].item() for env in envs] == [1, 2]


def test_a_reader_by_itself() -> None:
    reader = default_info_dict_reader(["a", "b"], [Unbounded(()), Categorical(3)])
    td = TensorDict()
    assert reader({"a": 1}, td) is td
    assert (td["a"].item(), td["b"].item()) == (1.0, 0)
    lazy = default_info_dict_reader()
    assert lazy({"a": 1, "c": "x"}, TensorDict())["a"].item() == 1
    assert lazy.info_spec == Composite(a=Unbounded((), dtype=I64))


# -- other readers --------------------------------------------------------------------------------------


def test_a_function_whose_spec_is_learned_from_what_it_writes() -> None:
    def read(info: Any, td: TensorDictBase) -> None:
        if "x" in info:
            td["double"] = torch.tensor([2.0 * info["x"]])
            td["label"] = info["label"]

    env = GymWrapper(InfoEnv({}, {"x": 1, "label": "one"}, {})).set_info_dict_reader(read)
    assert learned(env) == {"double": Unbounded((1,)), "label": NonTensor(())}
    td = env.rollout(2)
    assert td["next", "double"].tolist() == [[2.0], [0.0]]
    assert td["double"].tolist() == [[0.0], [2.0]]


def test_a_function_that_returns_another_tensordict() -> None:
    env = GymWrapper(InfoEnv({"x": 1})).set_info_dict_reader(
        lambda info, td: td.clone().set("x", torch.tensor(info["x"]))
    )
    assert env.rollout(2)["x"].tolist() == [1, 1]


def test_a_function_may_use_and_change_what_the_env_returned() -> None:
    def read(info: Any, td: TensorDictBase) -> None:
        td["sum"] = td["observation"].sum() + info["x"]
        td["observation"] = td["observation"] + 1

    env = GymWrapper(InfoEnv({"x": 1})).set_info_dict_reader(read)
    assert learned(env) == {"sum": Unbounded(())}
    td = env.rollout(2)
    assert td["sum"].tolist() == [1, 1]
    assert td["observation"].tolist() == [[1, 1], [1, 1]]


class Reader(BaseInfoDictReader):
    """Reads one entry; says what it is."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    @property
    def info_spec(self) -> Any:
        return self.spec

    def __call__(self, info_dict: Any, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("x", torch.tensor(float(info_dict["x"])))


@pytest.mark.parametrize("spec", [Composite(x=Bounded(0, 5, ())), {"x": Bounded(0, 5, ())}], ids=["composite", "dict"])
def test_a_class_of_readers(spec: Any) -> None:
    raw = InfoEnv({"x": 3})
    env = GymWrapper(raw).set_info_dict_reader(Reader(spec))
    assert raw.seeds == []
    assert learned(env) == {"x": Bounded(0, 5, ())}
    assert env.reset()["x"].item() == 3


def test_a_class_of_readers_that_does_not_know_its_spec() -> None:
    assert learned(GymWrapper(InfoEnv({"x": 3})).set_info_dict_reader(Reader(None))) == {"x": Unbounded(())}


def test_several_readers() -> None:
    env = GymWrapper(InfoEnv(RICH))
    env.set_info_dict_reader(default_info_dict_reader(["lives"]))
    env.set_info_dict_reader(default_info_dict_reader([("deep", "inner")]))
    env.set_info_dict_reader(lambda info, td: td.set("twice", torch.tensor(2 * info["lives"])))
    assert set(learned(env)) == {"lives", ("deep", "inner", "x"), "twice"}
    assert len(env.info_dict_reader) == 3
    td = env.rollout(2)
    assert td["twice"].tolist() == [6, 6]
    assert env.observation_spec.is_locked


def test_a_second_reader_without_keys_adds_what_the_first_left() -> None:
    env = GymWrapper(InfoEnv({"a": 1, "b": 2})).set_info_dict_reader(default_info_dict_reader(["a"]))
    assert set(learned(env.set_info_dict_reader())) == {"a", "b"}


def test_automatic_registration_is_for_envs_without_readers() -> None:
    env = GymWrapper(InfoEnv({"a": 1})).auto_register_info_dict()
    with pytest.raises(RuntimeError, match=r"already has the info readers \[default_info_dict_reader"):
        env.auto_register_info_dict()


def test_automatic_registration_of_another_reader() -> None:
    env = GymWrapper(InfoEnv({"x": 1, "y": 2})).auto_register_info_dict(
        info_dict_reader=default_info_dict_reader(["y"])
    )
    assert set(learned(env)) == {"y"}


@pytest.mark.parametrize("key", ["observation", "reward", "done", "action", ("observation", "x"), ("next", "x")])
def test_a_reader_must_not_write_where_the_env_has_something(key: Any) -> None:
    env = GymWrapper(InfoEnv({}))
    spec = Composite()
    spec[key] = Unbounded(())
    with pytest.raises(SpecMismatchError, match="already has something at"):
        env.set_info_dict_reader(default_info_dict_reader(spec=spec))
    assert env.info_dict_reader == []


def test_infos_stand_beside_nested_observations() -> None:
    class Nested(InfoEnv):
        observation_space = Dict(agent=Dict(position=Box(-1, 1, (2,))))

        def reset(self, **kwargs: Any) -> Any:
            return {"agent": {"position": np.zeros(2, np.float32)}}, super().reset(**kwargs)[1]

        def step(self, action: Any) -> Any:
            return {"agent": {"position": np.ones(2, np.float32)}}, *super().step(action)[1:]

    env = GymWrapper(Nested({"agent": {"fuel": 5}})).auto_register_info_dict()
    assert set(env.observation_keys) == {("agent", "position"), ("agent", "fuel")}
    assert env.rollout(2)["next", "agent", "fuel"].tolist() == [5, 5]


# -- together with the rest -----------------------------------------------------------------------------


def test_frame_skip_reads_the_last_info() -> None:
    env = GymWrapper(InfoEnv(*({"n": i} for i in range(10))), frame_skip=3).auto_register_info_dict()
    assert env.rollout(3)["next", "n"].tolist() == [3, 6, 9]


@pytest.mark.parametrize("info", [None, "text", ()])
def test_an_info_that_is_no_dict_says_nothing(info: Any) -> None:
    env = GymWrapper(InfoEnv(info)).set_info_dict_reader(default_info_dict_reader(spec={"a": Unbounded(())}))
    assert env.rollout(2)["a"].tolist() == [0, 0]


def test_device() -> None:
    env = GymWrapper(InfoEnv({"a": 1}), device="cpu").auto_register_info_dict()
    assert env.observation_spec["a"].device == torch.device("cpu")
    td = env.to("meta")._reset(None)
    assert td["a"].device == torch.device("meta")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(cloudpickle.dumps(env))])
def test_readers_are_copied_with_the_env(copied: Any) -> None:
    env = copied(GymWrapper(InfoEnv({}, {"a": 1})).auto_register_info_dict())
    assert env.rollout(2)["next", "a"].tolist() == [1, 1]


def test_readers_of_a_registered_env() -> None:
    env = GymEnv("Swimmer-v5").auto_register_info_dict()
    assert {"x_position", "y_velocity", "reward_forward", "reward_ctrl"} <= set(learned(env))
    assert env.observation_spec["x_position"] == Unbounded((), dtype=F64)
    td = env.rollout(3)
    assert td["next", "x_position"].dtype == F64
    assert td["x_position"][1:].tolist() == td["next", "x_position"][:-1].tolist()


@pytest.mark.parametrize("library", [pytest.param(TORCHRL, marks=TORCHRL_MARKS, id="torchrl")])
@pytest.mark.parametrize("spec", [[Unbounded((), dtype=F64)], None], ids=["spec", "learned"])
def test_values_are_those_of_torchrl(spec: Any, library: Any) -> None:
    keys = ["x_position"]
    ours = GymEnv("Swimmer-v5").set_info_dict_reader(default_info_dict_reader(keys, spec))
    theirs = library.GymEnv("Swimmer-v5").set_info_dict_reader(
        library.default_info_dict_reader(keys, spec and [library.specs.Unbounded((), dtype=F64)])
    )
    ours.set_seed(3)
    here, there = ours.reset(), theirs.reset(seed=3)
    for _ in range(5):
        assert here["x_position"] == there["x_position"]
        action = ours.rand_action()["action"]
        here, there = (env.step(td.set("action", action))["next"] for env, td in ((ours, here), (theirs, there)))
    assert here["x_position"].dtype == there["x_position"].dtype
