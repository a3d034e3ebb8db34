"""Torch-native envs: specs that are set, resets, steps, masks, copies; and classes written for TorchRL."""

import copy
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor, lazy_stack

import aioenvs.envs
import aioenvs.specs
from aioenvs.engine.worker.random_streams import next_seed
from aioenvs.envs import EnvBase, check_env_specs
from aioenvs.errors import ClosedError, SpecMismatchError
from aioenvs.specs import Bounded, Categorical, Composite, NonTensor, OneHot, Unbounded
from aioenvs.testing import CountingEnv, ParameterEnv


def _rows(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(*like.shape[:-1], -1).any(-1, keepdim=True)


class Counter(EnvBase):
    """Counts its steps, for each element of its batch; the mask of a partial reset is read, that of a step too."""

    def __init__(self, *batch_size: int, max_steps: int = 3, **options: Any) -> None:
        super().__init__(batch_size=batch_size, **options)
        self.max_steps = max_steps
        self.observation_spec_unbatched = Composite(count=Unbounded((1,)))
        self.action_spec_unbatched = Unbounded((1,))
        self.reward_spec_unbatched = Unbounded((1,))
        self.register_buffer("count", torch.zeros(*batch_size, 1))
        self.calls: list[str] = []
        self.seed: int | None = None

    def _reset(self, tensordict: TensorDictBase | None = None, start: float = 0.0) -> TensorDictBase:
        self.calls.append("reset")
        mask = None if tensordict is None else tensordict.get("_reset", None)
        fresh = torch.full_like(self.count, start)
        self.count = fresh if mask is None else torch.where(mask, fresh, self.count)
        return TensorDict({"count": self.count.clone()}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.calls.append("step")
        mask = tensordict.get("_step", None)
        moved = self.count + 1
        self.count = moved if mask is None else torch.where(_rows(mask, self.count), moved, self.count)
        out = {"count": self.count.clone(), "reward": tensordict["action"] * 2, "done": self.count >= self.max_steps}
        return TensorDict(out, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        self.seed = seed


class Custom(EnvBase):
    """Returns what it was given."""

    def __init__(self, results: dict[str, Any], fresh: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.results, self.fresh = results, {"x": torch.zeros(2)} if fresh is None else fresh
        self.observation_spec = Composite(x=Unbounded((2,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None) -> Any:
        return TensorDict(self.fresh) if isinstance(self.fresh, dict) else self.fresh

    def _step(self, tensordict: TensorDictBase) -> Any:
        return TensorDict(self.results) if isinstance(self.results, dict) else self.results

    def _set_seed(self, seed: int | None) -> None: ...


def full_step(**more: Any) -> dict[str, Any]:
    return {"x": torch.ones(2), "reward": torch.ones(1), **more}


def acted(env: EnvBase, td: TensorDictBase | None = None) -> TensorDictBase:
    return (env.reset() if td is None else td).set("action", torch.ones(*env.batch_size, 1))


# -- specs ----------------------------------------------------------------------------------------------


def test_a_leaf_becomes_a_composite_with_the_default_name() -> None:
    env = Counter()
    assert env.action_spec == Unbounded((1,))
    assert env.full_action_spec == Composite(action=Unbounded((1,)))
    assert env.full_reward_spec == Composite(reward=Unbounded((1,)))
    env.observation_spec = Unbounded((4,))
    assert env.observation_keys == ["observation"]


def test_done_and_terminated_are_there_by_default_and_completed_in_every_node() -> None:
    env = Counter(4)
    flag = Categorical(2, (4, 1), dtype=torch.bool)
    assert env.full_done_spec == Composite(done=flag, terminated=flag, shape=(4,))
    inner = Composite(terminated=Categorical(2, (4, 3, 1), dtype=torch.bool), shape=(4,))
    env.done_spec = Composite(done=flag, agents=inner, shape=(4,))
    assert env.done_keys == ["done", "terminated", ("agents", "done"), ("agents", "terminated")]
    env.done_spec = flag
    assert env.done_keys == ["done", "terminated"]
    with pytest.raises(ValueError, match="flags of one shape"):
        env.done_spec = Composite(done=flag, truncated=Categorical(2, (4, 2), dtype=torch.bool), shape=(4,))


def test_truncated_can_be_added_to_every_node() -> None:
    env = Agents(2, root=True)
    assert env.add_truncated_keys() is env
    assert env.done_keys[:3] == ["done", "terminated", "truncated"]
    assert env.full_done_spec["agents", "truncated"].shape == (2, 3, 1)
    td = Counter().add_truncated_keys().rollout(2, set_truncated=True)
    assert td["next", "truncated"].flatten().tolist() == [False, True]


def test_specs_without_batch_dims_go_both_ways() -> None:
    env = Counter(2, 3)
    assert env.action_spec.shape == (2, 3, 1)
    assert env.action_spec_unbatched == Unbounded((1,))
    assert env.full_observation_spec_unbatched == Composite(count=Unbounded((1,)))
    env.full_state_spec_unbatched = Composite(a=Composite(b=OneHot(3)))
    assert env.full_state_spec["a", "b"].shape == (2, 3, 3)
    env.output_spec_unbatched = env.output_spec_unbatched
    env.input_spec_unbatched = env.input_spec_unbatched
    assert env.observation_spec["count"].shape == (2, 3, 1)
    assert env.state_spec["a"].shape == (2, 3)


def test_whole_sides_can_be_set() -> None:
    env = Counter()
    env.output_spec = Composite(full_reward_spec=Composite(r=Unbounded((1,))))
    env.input_spec = Composite(full_state_spec=Composite(s=Unbounded((1,))))
    assert (env.reward_keys, env.state_keys, env.observation_keys) == (["r"], ["s"], ["count"])
    with pytest.raises(ValueError, match=r"found also .'full_action_spec'"):
        env.output_spec = Composite(full_action_spec=Composite())
    with pytest.raises(TypeError, match="expected a Composite"):
        env.input_spec = Unbounded((1,))


@pytest.mark.parametrize("kind", ["observation", "action", "reward", "done", "state"])
def test_the_leading_shape_must_be_the_batch_size(kind: str) -> None:
    env = Counter(4)
    with pytest.raises(ValueError, match=r"batch size \(4,\), found"):
        setattr(env, f"{kind}_spec", Composite(x=Unbounded((5, 1)), shape=(5,)))


def test_what_is_no_spec_is_refused() -> None:
    env = Counter()
    with pytest.raises(TypeError, match=r"expected a spec of aioenvs.specs as action_spec, found 3"):
        env.action_spec = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"expected a Composite of aioenvs.specs as state_spec"):
        env.state_spec = Unbounded((1,))  # type: ignore[assignment]
    for name in ("reward_spec", "done_spec"):
        with pytest.raises(RuntimeError, match="at least one dim"):
            setattr(env, name, Unbounded(()))
    env.state_spec = None  # type: ignore[assignment]
    assert env.state_keys == []


def test_keys_that_collide_are_refused_and_nothing_changes() -> None:
    class Clash(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(reward=Unbounded((1,)))

    with pytest.raises(RuntimeError, match="'reward' collides"):
        Clash()
    env = Counter()
    with pytest.raises(RuntimeError, match="'action' collides: it is in action_spec and in state_spec"):
        env.state_spec = Composite(action=Unbounded((1,)))
    assert env.state_keys == []
    env.state_spec = env.observation_spec.clone()  # a state may come from an observation
    assert env.state_keys == ["count"]


def test_locked_specs_can_be_set_but_not_changed() -> None:
    env = Counter()
    assert env.is_spec_locked
    for change in (
        lambda: env.observation_spec.set("new", Unbounded((1,))),
        lambda: env.full_done_spec.set(("a", "done"), Unbounded((1,))),
        lambda: env.input_spec.pop("full_state_spec"),
    ):
        with pytest.raises(RuntimeError, match="locked"):
            change()
    env.observation_spec = Composite(new=Unbounded((1,)))
    assert env.observation_keys == ["new"]
    assert env.is_spec_locked
    assert env.output_spec.is_locked


def test_the_lock_can_be_opened() -> None:
    env = Counter(spec_locked=False)
    assert not env.is_spec_locked
    env.observation_spec["new"] = Unbounded((1,))
    assert env.observation_keys == ["count", "new"]
    assert env.set_spec_lock_() is env
    with pytest.raises(RuntimeError, match="locked"):
        env.observation_spec["newer"] = Unbounded((1,))
    env.is_spec_locked = False
    env.observation_spec["newer"] = Unbounded((1,))
    assert env.observation_keys == ["count", "new", "newer"]


def test_the_callers_spec_stays_the_callers() -> None:
    spec = Composite(count=Unbounded((1,)))
    env = Counter()
    env.observation_spec = spec
    spec["other"] = Unbounded((1,))
    assert env.observation_keys == ["count"]


def test_specs_may_be_set_before_the_constructor_of_the_base() -> None:
    class Early(Counter):
        def __init__(self) -> None:
            self.batch_size = torch.Size([2])
            self.state_spec = Composite(s=Unbounded((2, 1)), shape=(2,))
            super().__init__(2)

    assert Early().state_keys == ["s"]


def test_specs_may_start_as_attributes_of_the_class() -> None:
    class Given(Custom):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            cls._input_spec = Composite(full_state_spec=Composite(s=Unbounded((1,))))
            return super().__new__(cls, *args, _batch_locked=False, **kwargs)

    env = Given({})
    assert env.state_keys == ["s"]
    assert not env.batch_locked
    assert "full_action_spec" not in Given._input_spec


def test_batch_size_can_be_set_to_what_the_specs_start_with() -> None:
    env = Custom({})
    env.observation_spec = Composite(x=Unbounded((3, 2)))
    env.action_spec = env.reward_spec = Unbounded((3, 1))
    env.done_spec = Categorical(2, (3, 1), dtype=torch.bool)
    env.batch_size = [3]
    assert (env.batch_size, env.output_spec.shape, env.observation_spec.shape) == ((3,), (3,), (3,))
    with pytest.raises(ValueError, match="starts with"):
        env.batch_size = [4]
    assert env.batch_size == (3,)


def test_specs_of_different_agents() -> None:
    env = Custom({})
    env.observation_spec = Composite(a=torch.stack([Composite(x=Unbounded((size,))) for size in (2, 3)]))
    assert env.observation_keys == [("a", "x")]
    assert env.fake_tensordict()["a"][1]["x"].shape == (3,)


def test_batch_locked_is_an_attribute_of_the_class() -> None:
    with pytest.raises(RuntimeError, match="read-only"):
        Counter().batch_locked = False


def test_an_env_moves_with_its_parameters_and_results() -> None:
    env = Counter()
    assert env.device is None
    assert env.to("meta") is env
    assert (env.device, env.action_spec.device, env.count.device) == (torch.device("meta"),) * 3
    assert env.is_spec_locked
    env = Counter(device="cpu")
    assert env.reset().device == torch.device("cpu")
    assert env.rollout(2).device == torch.device("cpu")
    with pytest.raises(RuntimeError, match=r"use env\.to"):
        env.device = "meta"


# -- reset ----------------------------------------------------------------------------------------------


def test_reset_gives_observations_and_flags() -> None:
    td = Counter(2).reset()
    assert set(td.keys()) == {"count", "done", "terminated"}
    assert td["done"].shape == (2, 1)
    assert not td["done"].any()
    assert td["done"].data_ptr() != td["terminated"].data_ptr()


def test_reset_updates_the_given_tensordict_and_hands_on_arguments() -> None:
    env = Counter(2)
    td = TensorDict({"count": torch.ones(2, 1), "mine": torch.ones(2)}, [2])
    assert env.reset(td, start=5.0) is td
    assert (td["count"] == 5).all()
    assert "mine" in td


def test_a_mask_resets_some_and_keeps_what_the_others_have() -> None:
    env = Counter(3)
    td = env.rollout(2)[:, -1]["next"].select("count", "done", "terminated")
    td["count"] = torch.tensor([[7.0], [8.0], [9.0]])
    td["_reset"] = torch.tensor([[True], [False], [True]])
    out = env.reset(td)
    assert out is td
    assert set(td.keys()) == {"count", "done", "terminated"}
    assert td["count"].flatten().tolist() == [0, 8, 0]
    assert env.count.flatten().tolist() == [0, 2, 0]


def test_rows_that_are_not_reset_get_what_the_tensordict_lacks_from_the_env() -> None:
    env = Counter(2)
    env.rollout(2)
    td = env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))
    assert td["count"].flatten().tolist() == [0, 2]
    assert set(td.keys()) == {"count", "done", "terminated"}


def test_a_mask_without_true_calls_nobody() -> None:
    env = Counter(2)
    td = TensorDict({"count": torch.ones(2, 1), "_reset": torch.zeros(2, 1, dtype=torch.bool)}, [2])
    assert env.reset(td) is td
    assert list(td.keys()) == ["count"]
    assert env.calls == []


def test_a_mask_that_is_all_true_is_a_full_reset() -> None:
    env = Counter(2)
    td = env.reset(TensorDict({"_reset": torch.ones(2, 1, dtype=torch.bool)}, [2]))
    assert set(td.keys()) == {"count", "done", "terminated"}
    one = Counter()
    td = one.rollout(3)[-1]["next"].set("_reset", torch.tensor([True]))
    assert one.reset(td)["count"].item() == 0


def test_only_masks_are_shown_if_asked_for() -> None:
    seen: list[Any] = []

    class Seeing(Counter):
        def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDictBase:
            seen.append(None if tensordict is None else set(tensordict.keys()))
            return super()._reset(tensordict, **kwargs)

    env = Seeing(2)
    td = env.reset().set("_reset", torch.tensor([[True], [False]]))
    env.reset(td.copy(), select_reset_only=True)
    env.reset(td.copy())
    assert seen == [None, {"_reset"}, {"_reset", "count", "done", "terminated"}]


class Agents(EnvBase):
    """Three agents that are reset one by one, and something that they share; there is no flag at the root."""

    def __init__(self, *batch_size: int, groups: tuple[str, ...] = ("agents",), root: bool = False) -> None:
        super().__init__(batch_size=batch_size)
        node = (*batch_size, 3)

        def each(**leaves: Any) -> Composite:
            return Composite({group: Composite(**leaves, shape=node) for group in groups}, shape=batch_size)

        flag = Categorical(2, (*node, 1), dtype=torch.bool)
        self.groups, self.node = groups, node
        self.observation_spec = each(at=Unbounded((*node, 1)))
        self.observation_spec = self.observation_spec.clone().set("shared", Unbounded((*batch_size, 1)))
        self.action_spec = each(action=Unbounded((*node, 1)))
        self.reward_spec = each(reward=Unbounded((*node, 1)))
        self.done_spec = each(done=flag)
        if root:
            self.done_spec = self.done_spec.clone().set("done", Categorical(2, (*batch_size, 1), dtype=torch.bool))
        self.seen: list[Any] = []

    def _made(self, value: float, **more: Any) -> TensorDictBase:
        td = TensorDict({"shared": torch.full((*self.batch_size, 1), value)}, self.batch_size)
        for group in self.groups:
            td[group] = TensorDict({"at": torch.full((*self.node, 1), value), **more}, self.node)
        return td

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        self.seen.append(tensordict)
        return self._made(0.0)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._made(1.0, reward=torch.ones(*self.node, 1), done=torch.ones(*self.node, 1, dtype=torch.bool))

    def _set_seed(self, seed: int | None) -> None: ...


def agents_mask(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool).unsqueeze(-1)


def test_agents_are_reset_one_by_one_and_what_they_share_with_any_of_them() -> None:
    env = Agents(2)
    td = env.rand_step(env.reset())["next"]
    td["agents", "_reset"] = agents_mask([1, 0, 0], [0, 0, 0])
    td = env.reset(td)
    assert td["agents", "at"].squeeze(-1).tolist() == [[0, 1, 1], [1, 1, 1]]
    assert td["agents", "done"].squeeze(-1).tolist() == [[False, True, True], [True, True, True]]
    assert td["shared"].flatten().tolist() == [0, 1]
    assert ("agents", "_reset") not in td.keys(True)


def test_nested_masks_are_all_there_or_none() -> None:
    env = Agents(2, groups=("a", "b"))
    td = env.rand_step(env.reset())["next"]
    td["a", "_reset"] = agents_mask([1, 1, 1], [0, 0, 0])
    with pytest.raises(ValueError, match=r"\('b', '_reset'\)"):
        env.reset(td)
    td["b", "_reset"] = agents_mask([0, 0, 0], [0, 0, 1])
    td = env.reset(td)
    assert td["a", "at"].squeeze(-1).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert td["b", "at"].squeeze(-1).tolist() == [[1, 1, 1], [1, 1, 0]]
    assert td["shared"].flatten().tolist() == [0, 0]


@pytest.mark.parametrize("root", [True, False])
def test_a_mask_at_the_root_hides_the_nested_ones(root: bool) -> None:
    env = Agents(2, root=root)
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[True], [False]])
    td = env.reset(td)
    assert td["agents", "at"].squeeze(-1).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert "_reset" not in td


def test_agents_that_are_done_begin_anew() -> None:
    env = Agents()
    td, td_ = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert (td["next", "agents", "at"] == 1).all()
    assert (td_["agents", "at"] == 0).all()
    assert not td_["agents", "done"].any()


def test_a_batch_size_that_is_not_the_envs_is_refused() -> None:
    env = Counter(2)
    for method in (env.reset, env.step, env.rand_step):
        with pytest.raises(RuntimeError, match=r"shape==env\.batch_size, got \(3,\) and \(2,\)"):
            method(TensorDict(batch_size=[3]))
    assert env.calls == []


def test_an_episode_that_is_over_when_it_begins_is_an_error_unless_allowed() -> None:
    over = {"x": torch.zeros(2), "done": torch.tensor([True])}
    with pytest.raises(RuntimeError, match=r"'done' was .* True after a call to reset"):
        Custom({}, over).reset()
    assert Custom({}, over, allow_done_after_reset=True).reset()["terminated"].item()


def test_only_what_was_reset_must_not_be_over() -> None:
    class Stubborn(Counter):
        def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDictBase:
            return super()._reset(tensordict).set("done", torch.tensor([[True], [False]]))

    env = Stubborn(2)
    td = TensorDict({"_reset": torch.tensor([[False], [True]])}, [2])
    assert env.reset(td)["done"].flatten().tolist() == [True, False]
    with pytest.raises(RuntimeError, match="after a call to reset"):
        env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))


# -- what the author's methods return -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"x": torch.ones(2)}, r"'reward': expected Unbounded.*_step returned, found only the keys \['x'\]"),
        ({"reward": torch.ones(1)}, r"'x': expected Unbounded.*found only the keys \['reward'\]"),
        (full_step(reward=torch.ones(3)), r"'reward': expected shape \(1,\).*found \(3,\)"),
        (full_step(done=torch.ones(1)), r"'done': expected dtype torch\.bool.*found torch\.float32"),
        (full_step(done=torch.ones(2, dtype=torch.bool)), r"'done': expected shape \(1,\).*found \(2,\)"),
        (None, r"expected a TensorDict from Custom\._step, found None"),
        ((1, 2), r"expected a TensorDict from Custom\._step, found \(1, 2\)"),
    ],
)
def test_a_step_that_lacks_something_says_what(results: Any, message: str) -> None:
    env = Custom(results)
    with pytest.raises(SpecMismatchError, match=message):
        env.step(acted(env))


@pytest.mark.parametrize(
    ("fresh", "message"),
    [
        ({"y": torch.ones(2)}, r"'x': expected Unbounded.*_reset returned, found only the keys \['y'\]"),
        (torch.ones(2), r"expected a TensorDict from Custom\._reset, found tensor"),
    ],
)
def test_a_reset_that_lacks_something_says_what(fresh: Any, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=message):
        Custom({}, fresh).reset()


def test_a_batch_size_that_fits_is_set_and_another_is_refused() -> None:
    class Careless(Counter):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            return TensorDict(super()._step(tensordict).to_dict(), [])

    env = Careless(2)
    assert env.step(acted(env))["next"].batch_size == (2,)
    env = Counter(2)
    env._step = lambda td: TensorDict({"count": torch.ones(3, 1)}, [3])  # type: ignore[method-assign]
    with pytest.raises(SpecMismatchError, match=r"batch size \(2,\) from Counter\._step, found \(3,\)"):
        env.step(acted(env))


def test_dtypes_are_checked_if_asked_for() -> None:
    wrong = full_step(x=torch.ones(2, dtype=torch.float64))
    env = Custom(wrong)
    assert env.step(acted(env))["next", "x"].dtype is torch.float64
    env = Custom(wrong, run_type_checks=True)
    assert env.run_type_checks
    with pytest.raises(SpecMismatchError, match=r"'x': expected dtype torch\.float32, found torch\.float64"):
        env.step(acted(env))
    env.run_type_checks = False
    env.step(acted(env))
    with pytest.raises(SpecMismatchError, match="_reset returned other dtypes"):
        Custom({}, {"x": torch.ones(2, dtype=torch.int64)}, run_type_checks=True).reset()


def test_a_reset_must_not_write_into_its_input() -> None:
    class Inplace(Counter):
        def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDictBase:
            return super()._reset() if tensordict is None else tensordict.update(super()._reset())

    env = Inplace()
    with pytest.raises(RuntimeError, match="returned the TensorDict that it was given"):
        env.reset(env.reset())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (False, False, False)),
        ({"done": True}, (True, True, False)),
        ({"terminated": True}, (True, True, False)),
        ({"truncated": True}, (True, False, True)),
        ({"terminated": False, "truncated": True}, (True, False, True)),
        ({"terminated": True, "truncated": False}, (True, True, False)),
        ({"done": True, "terminated": False, "truncated": True}, (True, False, True)),
    ],
)
def test_flags_that_are_missing_follow_from_the_others(flags: dict[str, bool], expected: tuple[bool, ...]) -> None:
    env = Custom(full_step(**flags))
    flag = Categorical(2, (1,), dtype=torch.bool)
    env.done_spec = Composite(done=flag, terminated=flag, truncated=flag)
    out = env.step(acted(env))["next"]
    assert tuple(out[name].item() for name in ("done", "terminated", "truncated")) == expected
    assert all(out[name].shape == (1,) for name in ("done", "terminated", "truncated"))


def test_flags_are_completed_in_nested_nodes_even_if_the_node_is_missing() -> None:
    env = Custom(full_step(done=torch.tensor([True])))
    flag = Categorical(2, (3, 1), dtype=torch.bool)
    env.done_spec = Composite(done=Categorical(2, (1,), dtype=torch.bool), agents=Composite(done=flag, shape=(3,)))
    out = env.step(acted(env))["next"]
    assert out["done"].item()
    assert not out["agents", "terminated"].any()
    assert out["agents", "done"].shape == (3, 1)
    assert env.reset()["agents", "done"].shape == (3, 1)


def test_a_missing_dim_is_added_to_rewards_and_flags() -> None:
    class Flat(Counter):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            out = super()._step(tensordict)
            return out.set("reward", out["reward"].squeeze(-1)).set("done", out["done"].squeeze(-1))

    out = Flat(2).rand_step()["next"]
    assert (out["reward"].shape, out["done"].shape, out["terminated"].shape) == ((2, 1),) * 3


# -- step -----------------------------------------------------------------------------------------------


def test_step_sets_next_and_returns_the_same_tensordict() -> None:
    env = Counter()
    td = acted(env)
    assert env.step(td) is td
    assert set(td.keys()) == {"action", "count", "done", "next", "terminated"}
    assert set(td["next"].keys()) == {"count", "done", "reward", "terminated"}
    assert (td["count"].item(), td["next", "count"].item(), td["next", "reward"].item()) == (0, 1, 2)


def test_what_stands_under_next_before_passes_through_unless_the_step_gives_it() -> None:
    env = Counter()
    hidden = torch.ones(3)
    td = acted(env).set("next", TensorDict({"count": torch.ones(1) * 9, "net": {"hidden": hidden}}))
    env.step(td)
    assert td["next", "net", "hidden"] is hidden
    assert td["next", "count"].item() == 1
    env.step(td)
    assert td["next", "count"].item() == 2


def test_a_step_that_writes_into_its_input_gives_a_clean_next() -> None:
    class Inplace(EnvBase):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(x=Unbounded((1,)), n=Composite(y=Unbounded((1,))))
            self.action_spec = self.reward_spec = Unbounded((1,))

        def _reset(self, tensordict: Any = None) -> TensorDictBase:
            return TensorDict({"x": torch.zeros(1), "n": {"y": torch.zeros(1)}})

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            tensordict["x"] = tensordict["x"] + 1
            tensordict["n", "y"] = tensordict["n", "y"] + 1
            return tensordict.update({"reward": torch.ones(1), "info": torch.ones(1)})

        def _set_seed(self, seed: int | None) -> None: ...

    env = Inplace()
    td = acted(env)
    keep = td["n"]
    env.step(td)
    assert set(td.keys()) == {"action", "done", "n", "next", "terminated", "x"}
    assert set(td["next"].keys(True, True)) == {"done", "info", "reward", "terminated", "x", ("n", "y")}
    assert (td["x"].item(), td["next", "x"].item()) == (0, 1)
    assert (td["n", "y"].item(), keep["y"].item(), td["next", "n", "y"].item()) == (0, 0, 1)
    assert env.rollout(4)["next", "x"].flatten().tolist() == [1, 2, 3, 4]


def test_a_step_that_returns_a_changed_copy_of_its_input_piles_nothing_up() -> None:
    class Copying(Custom):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            assert "_step" in tensordict
            return tensordict.clone().update(full_step())

    env = Copying({})
    td = acted(env).set("_step", torch.tensor([True]))
    env.step(td)
    env.step(td.set("_step", torch.tensor([True])))
    assert set(td["next"].keys()) == {"action", "done", "reward", "terminated", "x"}


def test_a_step_that_fails_leaves_its_input_as_it_was() -> None:
    env = Custom({})
    td = acted(env).set("_step", torch.tensor([True]))
    keys = set(td.keys())
    with pytest.raises(SpecMismatchError):
        env.step(td)
    assert set(td.keys()) == keys


def test_gradients_flow_through_resets_steps_and_masks() -> None:
    class Smooth(Counter):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            at = tensordict["count"] + tensordict["action"]
            return TensorDict({"count": at, "reward": -(at**2), "done": tensordict["action"] > 9}, self.batch_size)

    env = Smooth(2)
    gain = torch.ones((), requires_grad=True)
    td = env.rollout(3, lambda td: td.set("action", gain.expand(2, 1)))
    td["next", "reward"].sum().backward()
    assert gain.grad == -2 * (1 + 4 + 9) * 2
    td = acted(env, env.reset()).set("_step", torch.tensor([True, False]))
    td["action"] = td["action"].requires_grad_()
    env.step(td)["next", "reward"].sum().backward()
    assert td["action"].grad.flatten().tolist() == [-2, 0]


# -- masks of a step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_step_of_some_repeats_the_root_elsewhere(shape: tuple[int, ...]) -> None:
    env = Counter(3)
    td = acted(env, env.step(acted(env))["next"].select("count", "done", "terminated"))
    td["_step"] = torch.tensor([True, False, True]).reshape(shape)
    assert env.step(td) is td
    assert td["_step"].flatten().tolist() == [True, False, True]
    assert td["next", "count"].flatten().tolist() == [2, 1, 2]
    assert td["next", "reward"].flatten().tolist() == [2, 0, 2]
    assert not td["next", "done"].any()


def test_a_step_of_all_is_plain_and_a_step_of_nobody_calls_nobody() -> None:
    env = Counter(2)
    td = env.step(acted(env).set("_step", torch.ones(2, dtype=torch.bool)))
    assert (td["next", "reward"] == 2).all()
    env.calls.clear()
    td = env.step(acted(env, td["next"].exclude("reward")).set("_step", torch.zeros(2, dtype=torch.bool)))
    assert env.calls == []
    assert set(td["next"].keys()) == {"count", "done", "reward", "terminated"}
    assert (td["next", "count"] == 1).all()
    assert not td["next", "reward"].any()
    one = Counter()
    assert one.step(acted(one).set("_step", torch.tensor([False])))["next", "count"].item() == 0


def test_a_mask_selects_whole_envs() -> None:
    env = Counter(2)
    with pytest.raises(ValueError, match="whole envs"):
        env.step(acted(env).set("_step", torch.tensor([[True, False], [True, True]])))
    td = env.step(acted(env).set("_step", torch.tensor([[True, True], [False, False]])))
    assert td["next", "count"].flatten().tolist() == [1, 0]


class Free(EnvBase):
    """Keeps nothing itself, and takes any batch."""

    batch_locked = False

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(x=Unbounded((2,)), note=NonTensor((), example_data="a"))
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-1, 1, (2,))
        self.reward_spec = Unbounded((1,))
        self.batches: list[torch.Size] = []

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        size = torch.Size([]) if tensordict is None else tensordict.batch_size
        return TensorDict({"x": torch.zeros(*size, 2), "note": NonTensorData("a", batch_size=size)}, size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        size = tensordict.batch_size
        self.batches.append(size)
        x = tensordict["x"] + tensordict["action"]
        out = {"x": x, "reward": x.sum(-1), "done": x[..., 0] > 2, "note": NonTensorData("b", batch_size=size)}
        return TensorDict(out, size)

    def _set_seed(self, seed: int | None) -> None: ...


@pytest.mark.parametrize("size", [(), (4,), (2, 3), (2, 0)])
def test_an_env_that_is_not_batch_locked_takes_any_batch(size: tuple[int, ...]) -> None:
    env = Free()
    td = env.rand_step(env.reset(TensorDict(batch_size=size)))
    assert td["next", "reward"].shape == td["next", "done"].shape == (*size, 1)
    assert env.rollout(3, tensordict=TensorDict(batch_size=size)).batch_size == (*size, 3)


def test_finished_rows_of_any_batch_begin_anew() -> None:
    env = Free()
    push = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    td = env.rollout(
        5, lambda td: td.set("action", push), tensordict=TensorDict(batch_size=[2]), break_when_any_done=False
    )
    assert td["next", "x"][..., 0].tolist() == [[1, 2, 3, 1, 2], [0, 0, 0, 0, 0]]
    assert td["x"][..., 0].tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]]
    assert td["next", "done"].squeeze(-1).tolist() == [[False, False, True, False, False], [False] * 5]


def test_only_the_rows_of_a_mask_reach_an_env_that_takes_any_batch() -> None:
    env = Free()
    td = env.reset(TensorDict(batch_size=[2, 2])).set("action", torch.ones(2, 2, 2))
    td["_step"] = torch.tensor([[True, False], [True, True]])
    env.step(td)
    assert env.batches == [(3,)]
    assert td["next", "x"][..., 0].tolist() == [[1, 0], [1, 1]]
    assert td["next", "reward"].squeeze(-1).tolist() == [[2, 0], [2, 2]]
    assert [[part.data for part in row.unbind(0)] for row in td["next"].get("note").unbind(0)] == [
        ["b", "a"],
        ["b", "b"],
    ]
    assert is_non_tensor(td.get("note"))


# -- several steps --------------------------------------------------------------------------------------


def test_step_and_maybe_reset_keeps_the_true_end_and_begins_anew() -> None:
    env = Counter(2)
    td = env.reset()
    env.count[1] = 2.0
    td, td_ = env.step_and_maybe_reset(acted(env, td))
    assert td["next", "count"].flatten().tolist() == [1, 3]
    assert td["next", "done"].flatten().tolist() == [False, True]
    assert td_["count"].flatten().tolist() == [1, 0]
    assert set(td_.keys()) == {"count", "done", "terminated"}
    assert not td_["done"].any()


def test_the_true_end_stays_though_the_env_reuses_its_tensors() -> None:
    class Reusing(Counter):
        def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDictBase:
            self.count.zero_()
            return TensorDict({"count": self.count})

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            self.count += 1
            return TensorDict({"count": self.count, "reward": torch.ones(1), "done": self.count >= 1})

    env = Reusing()
    td, td_ = env.step_and_maybe_reset(acted(env))
    assert (td["next", "count"].item(), td_["count"].item()) == (1, 0)


def test_maybe_reset_does_nothing_while_nothing_ended() -> None:
    env = Counter(2)
    td = env.reset()
    assert env.maybe_reset(td) is td
    assert env.calls == ["reset"]


def test_rollouts_stop_or_go_on() -> None:
    env = Counter(max_steps=3)
    assert env.rollout(10).batch_size == (3,)
    td = env.rollout(7, break_when_any_done=False)
    assert td["next", "count"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert td.names == ["time"]
    rows: list[Any] = []
    env.rollout(2, lambda td: td.set("action", torch.ones(1)), lambda env, td: rows.append((env, td)))
    assert [(row[0] is env, row[1]["next", "reward"].item()) for row in rows] == [(True, 2.0)] * 2


def test_a_rollout_until_the_last_has_finished() -> None:
    env = Counter(2)
    td = env.reset()
    env.count[1] = 1.0
    td = env.rollout(9, auto_reset=False, tensordict=td, break_when_all_done=True)
    assert td["next", "count"].squeeze(-1).tolist() == [[1, 2, 3], [2, 3, 3]]


def test_rand_step_needs_no_tensordict() -> None:
    assert set(Counter().rand_step().keys()) == {"action", "next"}


# -- the rest -------------------------------------------------------------------------------------------


def test_seeds_follow_the_chain() -> None:
    env = Counter()
    assert env.set_seed(0) == next_seed(0) == 795726461
    assert env.seed == 0
    assert env.set_seed(7, static_seed=True) == 7
    following = env.set_seed()
    assert isinstance(env.seed, int)
    assert following == next_seed(env.seed)
    with pytest.raises(TypeError, match="integer or None"):
        env.set_seed("0")  # type: ignore[arg-type]


def test_state_dicts_are_those_of_the_module() -> None:
    env, other = Counter(), Counter()
    env.rollout(2)
    other.load_state_dict(env.state_dict())
    assert list(env.state_dict()) == ["count"]
    assert other.count.item() == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_its_own_way(duplicate: Any) -> None:
    env = Counter(2)
    env.rollout(2)
    other = duplicate(env)
    assert other.is_spec_locked
    assert other.specs == env.specs
    other.rand_step()
    assert (env.count.tolist(), other.count.tolist()) == ([[2], [2]], [[3], [3]])
    other.observation_spec = Composite(new=Unbounded((2, 1)), shape=(2,))
    assert (env.observation_keys, other.observation_keys) == (["count"], ["new"])


def test_closing() -> None:
    with Counter() as env:
        assert not env.is_closed
    assert env.is_closed
    env.close(raise_if_closed=False)
    with pytest.raises(ClosedError, match="closed already"):
        env.close()
    with Counter() as env:
        env.close()


def test_a_close_of_ones_own_needs_no_arguments() -> None:
    class Own(Counter):
        def close(self) -> None:  # type: ignore[override]
            self.is_closed = True

    with Own() as env:
        pass
    assert env.is_closed


def test_an_env_is_not_called() -> None:
    with pytest.raises(NotImplementedError, match="use reset and step"):
        Counter()(TensorDict())


def test_it_says_what_it_is() -> None:
    assert repr(Counter(2, device="cpu")) == "Counter(batch_size=(2,), device=cpu)"


def test_what_must_be_written_is_abstract() -> None:
    with pytest.raises(TypeError, match="_reset"):
        EnvBase()  # type: ignore[abstract]


def test_envs_that_reset_themselves_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="auto_reset=True is for envs that reset themselves"):
        Counter(auto_reset=True)


@pytest.mark.slow
def test_a_lazy_package_does_not_load_gymnasium() -> None:
    code = "import sys, aioenvs.envs as e; e.EnvBase, e.check_env_specs, e.step_mdp; print('gymnasium' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("name", aioenvs.envs.__all__)
def test_every_name_resolves(name: str) -> None:
    assert getattr(aioenvs.envs, name) is getattr(aioenvs.envs, name)
    assert name in dir(aioenvs.envs)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'aioenvs\.envs' has no attribute 'GymEnvs'"):
        _ = aioenvs.envs.GymEnvs


# -- classes written for TorchRL ------------------------------------------------------------------------


def library(name: str) -> SimpleNamespace:
    if name == "aioenvs":
        return SimpleNamespace(EnvBase=EnvBase, data=aioenvs.specs)
    data, envs = pytest.importorskip("torchrl.data"), pytest.importorskip("torchrl.envs")
    names = {name: getattr(data, name) for name in ("Bounded", "Categorical", "Composite", "OneHot", "Unbounded")}
    make = pytest.importorskip("torchrl.envs.utils").make_composite_from_td
    return SimpleNamespace(EnvBase=envs.EnvBase, data=SimpleNamespace(**names, make_composite_from_td=make))


def pendulum(base: Any, data: Any) -> Any:
    """A stateless env whose state and parameters are in the TensorDict."""

    class Pendulum(base):  # type: ignore[misc]
        batch_locked = False

        def __init__(self, td_params: Any = None, seed: int = 0, device: str = "cpu") -> None:
            td_params = self.params() if td_params is None else td_params
            super().__init__(device=device, batch_size=[])
            self.observation_spec = data.Composite(
                th=data.Bounded(-torch.pi, torch.pi, shape=(), dtype=torch.float32),
                thdot=data.Bounded(-8.0, 8.0, shape=(), dtype=torch.float32),
                params=data.make_composite_from_td(td_params["params"], unsqueeze_null_shapes=False),
                shape=(),
            )
            self.state_spec = self.observation_spec.clone()
            self.action_spec = data.Bounded(-2.0, 2.0, shape=(1,), dtype=torch.float32)
            self.reward_spec = data.Unbounded(shape=(*td_params.shape, 1))
            self.set_seed(seed)

        @staticmethod
        def params(batch_size: Any = ()) -> TensorDictBase:
            td = TensorDict({"params": TensorDict({"dt": 0.05, "g": 10.0, "max_speed": 8.0})})
            return td.expand(batch_size).contiguous() if batch_size else td

        def _reset(self, tensordict: Any) -> Any:
            size = self.batch_size if tensordict is None else tensordict.shape
            if tensordict is None or "_reset" in tensordict:
                tensordict = self.params(size)
            th = torch.rand(size, generator=self.rng, device=self.device) - 0.5
            return TensorDict({"th": th, "thdot": th * 0, "params": tensordict["params"]}, batch_size=size)

        def _step(self, tensordict: Any) -> Any:
            th, thdot, params = tensordict["th"], tensordict["thdot"], tensordict["params"]
            u = tensordict["action"].squeeze(-1).clamp(-2, 2)
            cost = th**2 + 0.1 * thdot**2 + 0.001 * u**2
            speed = (thdot + (params["g"] * th.sin() + 3 * u) * params["dt"]).clamp(
                -params["max_speed"], params["max_speed"]
            )
            reward = -cost.view(*tensordict.shape, 1)
            done = torch.zeros_like(reward, dtype=torch.bool)
            moved = {"th": th + speed * params["dt"], "thdot": speed, "params": params, "reward": reward, "done": done}
            return TensorDict(moved, tensordict.shape)

        def _set_seed(self, seed: int | None) -> None:
            self.rng = torch.Generator().manual_seed(seed)  # type: ignore[arg-type]

    return Pendulum


def walkers(base: Any, data: Any) -> Any:
    """Several agents in a nested TensorDict, of a batch, with a state of their own."""

    class Walkers(base):  # type: ignore[misc]
        def __init__(self, batch_size: Any = (2,), n: int = 3) -> None:
            super().__init__(device="cpu", batch_size=batch_size)
            size = (*batch_size, n)

            def agents(**leaves: Any) -> Any:
                return data.Composite(agents=data.Composite(**leaves, shape=size), shape=batch_size)

            self.full_observation_spec = agents(observation=data.Unbounded((*size, 2)))
            self.full_action_spec = agents(action=data.Bounded(-1, 1, shape=(*size, 2)))
            self.full_reward_spec = agents(reward=data.Unbounded((*size, 1)))
            self.full_done_spec = data.Composite(
                done=data.Categorical(2, shape=(*batch_size, 1), dtype=torch.bool), shape=batch_size
            )
            self.at, self.size, self.time = torch.zeros(*size, 2), size, torch.zeros(*batch_size, 1)

        def _reset(self, tensordict: Any) -> Any:
            mask = torch.ones_like(self.time, dtype=torch.bool)
            if tensordict is not None and "_reset" in tensordict:
                mask = tensordict["_reset"]
            self.time = torch.where(mask, 0.0, self.time)
            self.at = torch.where(mask.unsqueeze(-1), 0.0, self.at)
            return TensorDict({"agents": TensorDict({"observation": self.at}, self.size)}, self.batch_size)

        def _step(self, tensordict: Any) -> Any:
            self.at = self.at + tensordict["agents", "action"]
            self.time = self.time + torch.arange(1.0, 3.0).view(2, 1)
            inner = {"observation": self.at, "reward": self.at.sum(-1, keepdim=True)}
            out = {"agents": TensorDict(inner, self.size), "done": self.time >= 4}
            return TensorDict(out, self.batch_size)

        def _set_seed(self, seed: int | None) -> None:
            torch.manual_seed(seed)  # type: ignore[arg-type]

    return Walkers


def maze(base: Any, data: Any) -> Any:
    """Nested keys everywhere, two rewards, a one-hot action, only `terminated` and `truncated`."""

    class Maze(base):  # type: ignore[misc]
        def __init__(self, length: int = 3) -> None:
            super().__init__()
            self.length, self.place = length, 0
            flag = data.Categorical(2, shape=(1,), dtype=torch.bool)
            self.observation_spec = data.Composite(data=data.Composite(place=data.Categorical(9, shape=(1,))))
            self.action_spec = data.Composite(data=data.Composite(move=data.OneHot(2)))
            self.reward_spec = data.Composite(data=data.Composite(a=data.Unbounded((1,)), b=data.Unbounded((2, 1))))
            self.done_spec = data.Composite(terminated=flag, truncated=flag.clone())

        def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
            self.place = 0
            return TensorDict({"data": {"place": torch.tensor([0])}})

        def _step(self, tensordict: Any) -> Any:
            self.place += 1 + int(tensordict["data", "move"].int().argmax())
            place = torch.tensor([self.place])
            rewards = {"a": place.float(), "b": place.float().expand(2, 1)}
            return TensorDict({"data": {"place": place, **rewards}, "terminated": place >= self.length})

        def _set_seed(self, seed: int | None) -> None: ...

    return Maze


def pushing(key: Any) -> Any:
    def policy(td: TensorDictBase) -> TensorDictBase:
        if key == ("data", "move"):
            return td.set(key, torch.nn.functional.one_hot(torch.tensor(1), 2).expand(*td.shape, 2))
        shape = td["agents"].shape if isinstance(key, tuple) else td.shape
        return td.set(key, torch.full((*shape, 2 if isinstance(key, tuple) else 1), 0.5))

    return policy


CASES = [(pendulum, "action"), (walkers, ("agents", "action")), (maze, ("data", "move"))]


@pytest.mark.parametrize(("make", "key"), CASES)
def test_a_class_for_torchrl_works_when_its_imports_are_switched(make: Any, key: Any) -> None:
    env = make(EnvBase, aioenvs.specs)()
    check_env_specs(env, seed=0, break_when_any_done="both")
    assert env.action_keys == [key]
    assert env.rollout(4, pushing(key), break_when_any_done=False).shape == (*env.batch_size, 4)


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize(("make", "key"), CASES)
@pytest.mark.filterwarnings("default")
def test_a_class_gives_the_same_in_torchrl(make: Any, key: Any, stop: bool) -> None:
    rollouts = []
    for name in ("aioenvs", "torchrl"):
        found = library(name)
        env = make(found.EnvBase, found.data)()
        env.set_seed(1)
        rollouts.append(env.rollout(6, pushing(key), break_when_any_done=stop))
    ours, theirs = rollouts
    assert ours.batch_size == theirs.batch_size
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for name in ours.keys(True, True):
        assert torch.equal(ours[name], theirs[name]), name


def test_parameters_in_the_tensordict_batch_a_stateless_env() -> None:
    env = pendulum(EnvBase, aioenvs.specs)()
    td = env.reset(env.params([10]))
    assert td.batch_size == (10,)
    td = env.rand_step(td)
    assert td["next", "reward"].shape == (10, 1)
    assert td["next", "params", "g"].shape == (10,)
    assert env.rollout(5, auto_reset=False, tensordict=env.reset(env.params([10]))).batch_size == (10, 5)


class Mixed(EnvBase):
    """Two agents whose entries have different shapes: lazily stacked."""

    def __init__(self) -> None:
        super().__init__()
        flags = Composite(done=Categorical(2, (1,), dtype=torch.bool))
        self.observation_spec = Composite(agents=torch.stack([Composite(x=Unbounded((n,))) for n in (2, 3)]))
        self.action_spec = Composite(agents=torch.stack([Composite(action=Unbounded((n,))) for n in (1, 2)]))
        self.reward_spec = Composite(agents=torch.stack([Composite(reward=Unbounded((1,)))] * 2))
        self.done_spec = flags
        self.steps = 0

    def _made(self, **more: Any) -> TensorDictBase:
        return TensorDict({"agents": lazy_stack([TensorDict(x=torch.ones(n) * self.steps, **more) for n in (2, 3)])})

    def _reset(self, tensordict: Any = None) -> TensorDictBase:
        self.steps = 0
        return self._made()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert [part["action"].shape for part in tensordict["agents"].unbind(0)] == [(1,), (2,)]
        self.steps += 1
        return self._made(reward=torch.ones(1)).set("done", torch.tensor([self.steps >= 2]))

    def _set_seed(self, seed: int | None) -> None: ...


def test_agents_of_different_shapes() -> None:
    env = Mixed()
    check_env_specs(env, break_when_any_done="both")
    td = env.rollout(5, break_when_any_done=False, return_contiguous=False)
    assert isinstance(td, LazyStackedTensorDict)
    assert [row["next", "agents"][1]["x"][0].item() for row in td.unbind(0)] == [1, 2, 1, 2, 1]


# -- options of the constructor, and what envs offer besides ---------------------------------------------------


class Loose(Counter):
    """Says itself that its specs are not locked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, spec_locked=False, **options)


class Late(Counter):
    """Asks itself for what is not supported."""

    def __init__(self) -> None:
        super().__init__(1, auto_reset=True)


def test_options_that_a_subclass_gives_to_the_constructor() -> None:
    env = Loose()
    assert not env.is_spec_locked
    env.observation_spec["more"] = Unbounded((1, 1))
    assert not Counter(1, spec_locked=False).is_spec_locked
    assert Counter(1).is_spec_locked
    with pytest.raises(NotImplementedError, match="Late: auto_reset=True"):
        Late()


def test_an_action_cannot_be_called_done() -> None:
    class Confused(Counter):
        def __init__(self) -> None:
            super().__init__(1)
            self.action_spec = Composite(done=Unbounded((1, 1)), shape=(1,))

    with pytest.raises(RuntimeError, match="'done' collides: it is in action_spec and in done_spec"):
        Confused()
    env = Counter(1)
    with pytest.raises(RuntimeError, match="'terminated' collides"):
        env.action_spec = Composite(terminated=Unbounded((1, 1)), shape=(1,))
    assert env.action_keys == ["action"]


@pytest.mark.parametrize("flags", [(None, None), (False, True), (False, False)])
def test_a_rollout_keeps_what_an_env_writes_over(flags: tuple[bool | None, bool | None]) -> None:
    env = CountingEnv(max_steps=2, in_place=True)
    options = {"break_when_any_done": flags[0], "break_when_all_done": flags[1]}
    steps = 4 if flags == (False, False) else 2
    seen = []
    td = env.rollout(4, callback=lambda env, td: seen.append(td["next", "observation"].item()), **options)
    assert td["observation"].flatten().tolist() == [0, 1, 0, 1][:steps]
    assert td["next", "observation"].flatten().tolist() == seen == [1, 2, 1, 2][:steps]


def test_a_rollout_that_copies_keeps_gradients() -> None:
    env = ParameterEnv()
    td = env.rollout(3)
    td["next", "reward"].sum().backward()
    assert all(parameter.grad is not None for parameter in env.parameters())


def test_where_a_rollout_is_kept() -> None:
    env = Counter(2)
    td = env.rollout(3, storing_device="meta", trust_policy=True)
    assert td["next", "count"].device.type == "meta"
    assert env.rollout(2, storing_device="cpu").device == torch.device("cpu")


def test_all_actions() -> None:
    class Choosing(Counter):
        def __init__(self) -> None:
            super().__init__(2)
            self.action_spec = Categorical(3, (2,), mask=torch.tensor([True, False, True]))

    env = Choosing()
    assert (env.cardinality(), Counter(2).calls) == (3, [])
    assert env.all_actions()["action"].tolist() == [[0, 0], [2, 2]]
    env.all_actions(TensorDict(batch_size=[2]))
    assert env.calls == ["reset"]
    env.check_env_specs(check_dtype=False)
    with pytest.raises(NotImplementedError, match="cannot be listed"):
        Counter(2).all_actions()
