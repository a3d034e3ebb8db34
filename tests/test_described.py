"""What an env says of itself: keys, specs, random actions, fake data."""

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from aioenvs.envs.spec_properties import Described, by_depth
from aioenvs.specs import Binary, Bounded, Categorical, Composite, NonTensor, OneHot, StackedComposite, Unbounded


class Sketch(Described):
    """Specs, and nothing else."""

    output_spec: Any = None
    input_spec: Any = None
    batch_size: Any = torch.Size([])
    device: Any = None

    def __init__(self, batch_size: tuple[int, ...] = (), locked: bool = True, **full: Composite) -> None:
        def side(*kinds: str) -> Composite:
            spec = Composite(shape=batch_size)
            for kind in kinds:
                spec[f"full_{kind}_spec"] = full.get(kind, Composite(shape=batch_size))
            return spec.lock_() if locked else spec

        self.output_spec, self.input_spec = side("observation", "reward", "done"), side("action", "state")
        self.batch_size = torch.Size(batch_size)


def flag(*shape: int) -> Categorical:
    return Categorical(2, shape, dtype=torch.bool)


@pytest.fixture
def env() -> Sketch:
    """Agents, and flags at two depths."""
    return Sketch(
        observation=Composite(z=Unbounded((2,)), agents=Composite(position=Bounded(1, 2, shape=(3, 2)), shape=(3,))),
        reward=Composite(reward=Unbounded((1,))),
        done=Composite(
            terminated=flag(1), done=flag(1), agents=Composite(done=flag(3, 1), terminated=flag(3, 1), shape=(3,))
        ),
        action=Composite(agents=Composite(action=OneHot(4, shape=(3, 4)), shape=(3,))),
        state=Composite(b=Unbounded((1,)), a=Unbounded((1,))),
    )


def test_keys_are_sorted_by_depth_then_name(env: Sketch) -> None:
    assert env.observation_keys == ["z", ("agents", "position")]
    assert env.action_keys == [("agents", "action")]
    assert env.reward_keys == ["reward"]
    assert env.done_keys == ["done", "terminated", ("agents", "done"), ("agents", "terminated")]
    assert env.state_keys == ["a", "b"]
    assert env.reset_keys == ["_reset", ("agents", "_reset")]
    assert env.done_keys_groups == [["done", "terminated"], [("agents", "done"), ("agents", "terminated")]]


def test_by_depth_counts_names() -> None:
    assert by_depth([("b", "a"), "z", ("a", "b", "c"), "y", ("a", "z")]) == [
        "y",
        "z",
        ("a", "z"),
        ("b", "a"),
        ("a", "b", "c"),
    ]


def test_a_single_key_is_asked_for_by_name_and_several_are_an_error(env: Sketch) -> None:
    assert (env.action_key, env.reward_key) == (("agents", "action"), "reward")
    for name in ("done_key", "reset_key"):
        with pytest.raises(KeyError, match="expected one"):
            getattr(env, name)
    simple = Sketch(done=Composite(done=flag(1), terminated=flag(1)))
    assert (simple.done_key, simple.reset_key) == ("done", "_reset")
    with pytest.raises(KeyError, match="expected one action key"):
        _ = simple.action_key


def test_the_leaf_stands_for_its_composite_only_under_the_default_name(env: Sketch) -> None:
    assert env.reward_spec == Unbounded((1,))
    assert env.action_spec is env.full_action_spec
    assert Sketch(action=Composite(move=Unbounded((1,)))).action_spec == Composite(move=Unbounded((1,)))
    assert Sketch(action=Composite(action=Unbounded((1,)))).action_spec == Unbounded((1,))
    for kind in ("observation", "done", "state"):
        full = getattr(env, f"full_{kind}_spec")
        assert isinstance(full, Composite)
        assert getattr(env, f"{kind}_spec") is full


def test_specs_hold_both_sides(env: Sketch) -> None:
    assert env.specs["output_spec"] == env.output_spec
    assert env.specs["input_spec"] == env.input_spec


def test_keys_are_worked_out_once_for_locked_specs(env: Sketch) -> None:
    assert env._index is env._index
    env.output_spec = env.output_spec.clone().lock_()
    before = env._index
    assert before.output_spec is env.output_spec
    env.output_spec.unlock_()
    env.output_spec["full_observation_spec", "new"] = Unbounded((1,))
    assert "new" in env.observation_keys
    env.output_spec.lock_()
    assert "new" in env.observation_keys


def test_lists_of_keys_belong_to_the_caller(env: Sketch) -> None:
    env.action_keys.clear()
    env.done_keys_groups[0].clear()
    assert env.action_keys
    assert env.done_keys_groups[0]


def test_sizes() -> None:
    env = Sketch((2, 3))
    assert (env.shape, env.batch_dims, env.ndim, env.ndimension(), env.numel()) == (torch.Size([2, 3]), 2, 2, 2, 6)
    assert Sketch().numel() == 1


# -- random actions -------------------------------------------------------------------------------------


def test_random_actions_come_from_torchs_generator_and_go_into_the_given_tensordict(env: Sketch) -> None:
    td = TensorDict(z=torch.zeros(2))
    torch.manual_seed(0)
    assert env.rand_action(td) is td
    assert env.full_action_spec.is_in(td)
    torch.manual_seed(0)
    assert (env.rand_action()["agents", "action"] == td["agents", "action"]).all()
    assert set(td.keys()) == {"z", "agents"}


def test_random_actions_fill_several_keys_and_keep_what_stands_beside_them() -> None:
    env = Sketch(
        (2,), action=Composite(a=Binary(shape=(2, 3)), n=Composite(b=Unbounded((2, 1)), shape=(2,)), shape=(2,))
    )
    td = TensorDict({"n": {"c": torch.ones(2)}}, [2])
    assert set(env.rand_action(td).keys(True, True)) == {"a", ("n", "b"), ("n", "c")}


def test_random_actions_need_the_batch_size_unless_it_is_free() -> None:
    with pytest.raises(RuntimeError, match=r"shape==env\.batch_size, got \(5,\) and \(\)"):
        Sketch().rand_action(TensorDict(batch_size=[5]))

    class Free(Sketch):
        batch_locked: Any = False

    free = Free(action=Composite(action=Unbounded((3,))))
    assert free.rand_action(TensorDict(batch_size=[5, 2]))["action"].shape == (5, 2, 3)
    with pytest.raises(RuntimeError, match=r"shape==env\.batch_size"):
        Free((4,)).rand_action(TensorDict(batch_size=[5]))


def heterogeneous() -> Sketch:
    """Two members whose entries differ in shape and name."""
    actions = [Composite(action=Unbounded((size,))) for size in (2, 3)]
    observations = [Composite(position=Unbounded((2,))), Composite(position=Unbounded((5,)), speed=Unbounded((1,)))]
    dones = [Composite(done=flag(1), terminated=flag(1)) for _ in range(2)]
    stacks = {"action": torch.stack(actions), "observation": torch.stack(observations), "done": torch.stack(dones)}
    return Sketch((2,), **stacks)


def test_random_actions_of_different_envs() -> None:
    env = heterogeneous()
    assert isinstance(env.full_action_spec, StackedComposite)
    td = lazy_stack([TensorDict(position=torch.zeros(2)), TensorDict(position=torch.zeros(5))])
    assert env.rand_action(td) is td
    assert [part["action"].shape for part in td.unbind(0)] == [(2,), (3,)]
    assert [part["action"].shape for part in env.rand_action().unbind(0)] == [(2,), (3,)]


def test_random_actions_of_different_agents_go_into_a_dense_root() -> None:
    agents = torch.stack([Composite(action=Unbounded((size,))) for size in (2, 3)])
    env = Sketch(action=Composite(agents=agents))
    td = env.rand_action(TensorDict(z=torch.zeros(2)))
    assert [part["action"].shape for part in td["agents"].unbind(0)] == [(2,), (3,)]
    before = td["agents"][1]["action"]
    env.rand_action(td)
    assert not torch.equal(td["agents"][1]["action"], before)


# -- fake data ------------------------------------------------------------------------------------------


def test_fake_data_has_every_key_at_its_place(env: Sketch) -> None:
    fake = env.fake_tensordict()
    root = {*env.observation_keys, *env.done_keys, *env.state_keys, *env.action_keys}
    following = {*env.observation_keys, *env.done_keys, *env.reward_keys}
    assert set(fake.exclude("next").keys(True, True)) == root
    assert set(fake["next"].keys(True, True)) == following
    assert fake["agents"].batch_size == fake["next", "agents"].batch_size == (3,)


def test_fake_data_is_zero_or_what_the_spec_has_instead(env: Sketch) -> None:
    fake = env.fake_tensordict()
    assert not fake["z"].any()
    assert (fake["agents", "position"] == 1).all()
    assert env.full_action_spec.is_in(fake)
    assert env.full_observation_spec.is_in(fake["next"])


def test_fake_data_of_root_and_next_is_not_shared(env: Sketch) -> None:
    fake = env.fake_tensordict()
    fake["z"] += 1
    fake["agents", "done"][:] = True
    assert not fake["next", "z"].any()
    assert not fake["next", "agents", "done"].any()


def test_fake_data_with_a_batch_of_none_and_other_things_than_tensors() -> None:
    text = Composite(text=NonTensor((2, 0), example_data="hi"), x=Unbounded((2, 0, 3)), shape=(2, 0))
    fake = Sketch((2, 0), observation=text).fake_tensordict()
    assert fake.batch_size == fake["next"].batch_size == (2, 0)
    assert fake["x"].shape == (2, 0, 3)


def test_fake_data_of_different_envs() -> None:
    fake = heterogeneous().fake_tensordict()
    assert isinstance(fake, LazyStackedTensorDict)
    assert set(fake[0].keys(True, True)) == {
        *("action", "done", "position", "terminated"),
        *(("next", "done"), ("next", "position"), ("next", "terminated")),
    }
    assert fake[1]["next", "speed"].shape == (1,)
    assert fake[1]["action"].shape == (3,)


def test_fake_data_where_one_name_is_dense_for_some_and_stacked_for_others() -> None:
    stacked = torch.stack([Composite(action=Unbounded((size,))) for size in (2, 3)])
    dense = Composite(position=Unbounded((2, 4)), shape=(2,))
    fake = Sketch(action=Composite(agents=stacked), observation=Composite(agents=dense)).fake_tensordict()
    assert [part["action"].shape for part in fake["agents"].unbind(0)] == [(2,), (3,)]
    assert fake["agents"]["position"].shape == (2, 4)


def test_whether_an_episode_is_over_goes_by_the_root(env: Sketch) -> None:
    td = env.fake_tensordict()["next"]
    assert not env.any_done(td)
    td["agents", "done"][:] = True
    assert not env.any_done(td)
    td["done"][:] = True
    assert env.any_done(td)
    nested = Sketch(done=Composite(agents=Composite(done=flag(3, 1), terminated=flag(3, 1), shape=(3,))))
    assert nested.any_done(td)


def test_a_size_that_varies_is_known() -> None:
    assert Sketch(observation=Composite(a=Composite(x=Unbounded((-1, 2)))))._index.is_dynamic
    assert not Sketch(observation=Composite(a=Composite(x=Unbounded((1, 2)))))._index.is_dynamic
