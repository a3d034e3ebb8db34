"""From one step's TensorDict to the next step's root."""

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from aioenvs import step_mdp
from aioenvs.tensors.step_mdp import next_root


def a_step(**root: torch.Tensor) -> TensorDict:
    """What `step` leaves behind for two envs."""
    return TensorDict(
        {
            "observation": torch.zeros(2, 3),
            "done": torch.zeros(2, 1, dtype=torch.bool),
            "action": torch.ones(2),
            "next": {
                "observation": torch.ones(2, 3),
                "reward": torch.full((2, 1), 5.0),
                "done": torch.ones(2, 1, dtype=torch.bool),
            },
            **root,
        },
        [2],
    )


def test_what_came_next_becomes_the_root() -> None:
    root = step_mdp(a_step())
    assert set(root.keys()) == {"observation", "done"}
    assert (root["observation"] == 1).all()
    assert root["done"].all()


def test_other_keys_of_the_root_stay() -> None:
    root = step_mdp(a_step(env_index=torch.arange(2), hidden=torch.ones(2, 7)))
    assert set(root.keys()) == {"observation", "done", "env_index", "hidden"}
    assert root["env_index"].tolist() == [0, 1]


def test_keys_that_came_next_win_and_new_ones_are_taken_over() -> None:
    td = a_step(hidden=torch.zeros(2))
    td["next", "hidden"] = torch.ones(2)
    td["next", "log_prob"] = torch.full((2,), 3.0)
    root = step_mdp(td)
    assert root["hidden"].tolist() == [1, 1]
    assert root["log_prob"].tolist() == [3, 3]


@pytest.mark.parametrize("name", ["_reset", "_step", "reward", "action"])
def test_what_belongs_to_one_step_is_left_out(name: str) -> None:
    assert name not in step_mdp(a_step(**{name: torch.ones(2, dtype=torch.bool)}))


def test_nested_keys_and_objects_are_taken_over() -> None:
    td = a_step()
    td["agent"] = TensorDict({"state": torch.zeros(2)}, [2])
    td["next", "agent"] = TensorDict({"state": torch.ones(2)}, [2])
    td["next", "text"] = NonTensorStack(NonTensorData("a"), NonTensorData("b"))
    root = step_mdp(td)
    assert root["agent", "state"].tolist() == [1, 1]
    assert root.get("text").tolist() == ["a", "b"]


def test_nothing_is_copied_and_the_step_stays_as_it_was() -> None:
    td = a_step(hidden=torch.ones(2))
    before = td.clone()
    root = step_mdp(td)
    assert root["observation"].data_ptr() == td["next", "observation"].data_ptr()
    assert root["hidden"].data_ptr() == td["hidden"].data_ptr()
    root["extra"] = torch.ones(2)
    assert (td == before).all()
    assert set(td.keys(True)) == set(before.keys(True))


@pytest.mark.parametrize("batch", [[], [2], [2, 3]])
def test_any_batch_size(batch: list[int]) -> None:
    td = TensorDict({"action": torch.zeros(batch), "next": {"observation": torch.ones(*batch, 4)}}, batch)
    root = step_mdp(td)
    assert root.batch_size == torch.Size(batch)
    assert root["observation"].shape == (*batch, 4)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_device_stays(device: str | None) -> None:
    td = a_step()
    td = td.to(device) if device is not None else td
    assert step_mdp(td).device == (torch.device(device) if device is not None else None)


def test_a_locked_step_gives_a_root_that_can_be_changed() -> None:
    root = step_mdp(a_step().lock_())
    root["action"] = torch.ones(2)
    assert "action" in root


def test_gradients_pass() -> None:
    td = a_step()
    weight = torch.ones(2, 3, requires_grad=True)
    td["next", "observation"] = weight * 2
    step_mdp(td)["observation"].sum().backward()
    assert (weight.grad == 2).all()


def test_without_a_step_there_is_no_next_root() -> None:
    with pytest.raises(KeyError, match="next"):
        step_mdp(TensorDict({"observation": torch.zeros(2)}, [2]))


# -- flags ------------------------------------------------------------------------------------------------


FLAG_KEYS = {"done", "terminated", "truncated", "reward", "action", "observation", "mine"}


def with_flags() -> TensorDict:
    flags = {name: torch.zeros(2, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    both = {"observation": torch.zeros(2), "reward": torch.zeros(2, 1), **flags}
    following = {name: torch.ones_like(value) for name, value in both.items()}
    return TensorDict({**both, "action": torch.zeros(2), "mine": torch.zeros(2), "next": following}, [2])


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {"reward", "action"}),
        ({"exclude_reward": False}, {"action"}),
        ({"exclude_action": False}, {"reward"}),
        ({"exclude_done": True}, {"reward", "action", "done"}),
        ({"exclude_done": True, "done_keys": ["done", "terminated"]}, {"reward", "action", "done", "terminated"}),
        ({"keep_other": False}, {"reward", "action", "mine"}),
        ({"keep_other": False, "exclude_action": False}, {"reward", "mine"}),
        ({"reward_keys": "observation"}, {"observation", "action"}),
        ({"action_keys": ["action", "mine"]}, {"reward", "action", "mine"}),
    ],
    ids=str,
)
def test_flags_say_what_is_left_out(options: dict[str, Any], left: set[str]) -> None:
    root = step_mdp(with_flags(), **options)
    assert set(root.keys()) == FLAG_KEYS - left
    assert all((root[name] == (name not in {"action", "mine"})).all() for name in root.keys())  # noqa: SIM118


def test_a_destination_is_updated_and_returned() -> None:
    destination = TensorDict({"older": torch.ones(2), "observation": torch.full((2,), 9.0)}, [2])
    root = step_mdp(with_flags(), destination)
    assert root is destination
    assert set(root.keys()) == FLAG_KEYS - {"reward", "action"} | {"older"}
    assert root["observation"].tolist() == [1, 1]


def test_a_step_of_nothing_but_next() -> None:
    td = TensorDict({"next": {"observation": torch.ones(2), "reward": torch.ones(2)}}, [2])
    assert set(step_mdp(td).keys()) == {"observation"}
    assert set(step_mdp(td, exclude_reward=False, keep_other=False).keys()) == {"observation", "reward"}
    empty = step_mdp(TensorDict({"next": {"reward": torch.ones(2)}}, [2]))
    assert (empty.batch_size, list(empty.keys())) == (torch.Size([2]), [])


# -- nested and heterogeneous -----------------------------------------------------------------------------


def of_agents() -> TensorDict:
    following = TensorDict(
        {
            "agents": TensorDict({"observation": torch.ones(2, 3, 4), "reward": torch.ones(2, 3, 1)}, [2, 3]),
            "group": {"inner": {"reward": torch.ones(2), "done": torch.ones(2, dtype=torch.bool)}},
        },
        [2],
    )
    agents = TensorDict({"action": torch.zeros(2, 3), "hidden": torch.zeros(2, 3)}, [2, 3], names=[None, "agent"])
    return TensorDict({"agents": agents, "group": {"inner": {"action": torch.zeros(2)}}, "next": following}, [2])


NESTED = {
    "reward_keys": [("agents", "reward"), ("group", "inner", "reward")],
    "action_keys": [("agents", "action"), ("group", "inner", "action")],
    "done_keys": [("group", "inner", "done")],
}


def test_nested_keys_of_any_depth() -> None:
    root = step_mdp(of_agents(), **NESTED)
    assert set(root.keys(True, True)) == {
        ("agents", "observation"),
        ("agents", "hidden"),
        ("group", "inner", "done"),
    }
    assert root["agents"].batch_size == torch.Size([2, 3])
    root = step_mdp(of_agents(), **NESTED, exclude_done=True, exclude_action=False, exclude_reward=False)
    assert {("agents", "action"), ("group", "inner", "action"), ("group", "inner", "reward")} <= set(root.keys(True))
    root = step_mdp(of_agents(), **NESTED, keep_other=False, exclude_action=False)
    assert ("agents", "action") in root.keys(True)
    assert ("agents", "hidden") not in root.keys(True)


def test_a_node_of_which_nothing_remains_is_left_out() -> None:
    root = step_mdp(of_agents(), **NESTED, exclude_done=True)
    assert "group" not in root.keys()  # noqa: SIM118


def test_what_is_set_in_a_node_of_the_root_does_not_show_in_the_step() -> None:
    td = of_agents()
    before = td.clone()
    root = step_mdp(td, **NESTED)
    root["agents", "action"] = torch.full((2, 3), 7.0)
    root["group", "inner", "new"] = torch.zeros(2)
    assert set(td.keys(True)) == set(before.keys(True))
    assert (td == before).all()


def test_masks_are_left_out_at_any_depth() -> None:
    td = of_agents()
    td["agents", "_reset"] = torch.ones(2, 3, 1, dtype=torch.bool)
    td["_step"] = torch.ones(2, dtype=torch.bool)
    assert not {"_step", ("agents", "_reset")} & set(step_mdp(td).keys(True))


def test_dim_names_stay() -> None:
    td = of_agents()
    td.names = ["env"]
    root = step_mdp(td)
    assert root.names == ["env"]
    assert root["agents"].names[0] == "env"


def test_a_number_of_agents_that_varies() -> None:
    td = TensorDict({"agents": TensorDict({"hidden": torch.zeros(2, 3), "step": torch.zeros(2, 4)}, [2])}, [2])
    td["agents"].batch_size = [2]
    td["next", "agents"] = TensorDict({"observation": torch.zeros(2, 4)}, [2, 4])
    root = step_mdp(td)
    assert root["agents"].batch_size == torch.Size([2, 4])
    assert set(root["agents"].keys()) == {"observation", "step"}


def different(dims: int, value: float) -> TensorDict:
    """A step of an env with observations of its own shape, and a key of its own."""
    following = {
        "observation": torch.full((dims,), value),
        f"own{dims}": torch.full((1,), value),
        "reward": torch.ones(1),
    }
    return TensorDict({"observation": torch.zeros(dims), "action": torch.zeros(1), f"mine{dims}": torch.zeros(1)}).set(
        "next", TensorDict(following)
    )


def test_lazily_stacked_steps_keep_their_own_keys() -> None:
    td = LazyStackedTensorDict(different(2, 1), different(3, 2), stack_dim=0, stack_dim_name="env")
    root = step_mdp(td)
    assert isinstance(root, LazyStackedTensorDict)
    assert (root.batch_size, root.names) == (torch.Size([2]), ["env"])
    assert set(root[0].keys()) == {"observation", "own2", "mine2"}
    assert set(root[1].keys()) == {"observation", "own3", "mine3"}
    assert root[1]["observation"].tolist() == [2, 2, 2]
    destination = LazyStackedTensorDict(TensorDict({"a": torch.ones(1)}), TensorDict({"b": torch.ones(1)}), stack_dim=0)
    assert step_mdp(td, destination) is destination
    assert set(destination[1].keys()) == {"b", "observation", "own3", "mine3"}


def agents_apart(steps: list[TensorDict]) -> TensorDict:
    """The same envs as agents that are stacked lazily in a node of both the root and what came next."""
    root = LazyStackedTensorDict(*(step.exclude("next") for step in steps), stack_dim=0)
    following = LazyStackedTensorDict(*(step["next"] for step in steps), stack_dim=0)
    return TensorDict({"agents": root, "next": TensorDict({"agents": following})})


def test_lazily_stacked_nodes_keep_their_own_keys() -> None:
    root = step_mdp(agents_apart([different(2, 1), different(3, 2)]), action_keys=[("agents", "action")])
    agents = root.get("agents")
    assert isinstance(agents, LazyStackedTensorDict)
    assert [set(agent.keys()) for agent in agents.tensordicts] == [
        {"observation", "own2", "mine2", "reward"},
        {"observation", "own3", "mine3", "reward"},
    ]


def test_a_lazily_stacked_node_beside_a_dense_one() -> None:
    td = agents_apart([different(2, 1), different(3, 2)])
    td["agents"] = TensorDict({"mine": torch.arange(2)}, [2])
    agents = step_mdp(td).get("agents")
    assert [agent["mine"].item() for agent in agents.tensordicts] == [0, 1]
    assert agents[1]["observation"].tolist() == [2, 2, 2]
    td = agents_apart([different(2, 1), different(3, 2)])
    td["next", "agents"] = TensorDict({"reward": torch.arange(2)}, [2])
    agents = step_mdp(td, reward_keys=[("agents", "reward")]).get("agents")
    assert [agent["observation"].tolist() for agent in agents.tensordicts] == [[0, 0], [0, 0, 0]]


def test_a_number_of_lazily_stacked_agents_that_varies() -> None:
    td = agents_apart([different(2, 1), different(3, 2)])
    td["next", "agents"] = LazyStackedTensorDict(*[different(dims, 1)["next"] for dims in (2, 3, 4)], stack_dim=0)
    assert [len(agent["observation"]) for agent in step_mdp(td).get("agents").tensordicts] == [2, 3, 4]


def test_keys_worked_out_beforehand() -> None:
    root = next_root(of_agents(), (("agents", "reward"), ("agents", "action")))
    assert set(root["agents"].keys()) == {"observation", "hidden"}


# -- the same as TorchRL ----------------------------------------------------------------------------------

LEAVES = ("observation", "done", "reward", "action", "mine", "text")
NODES = ("agents", "group")


def random_node(rng: random.Random, batch: tuple[int, ...], depth: int, value: float) -> TensorDict:
    """A TensorDict of random leaves and nodes; deeper ones may have more batch dims."""
    td = TensorDict({}, batch)
    for name in rng.sample(LEAVES, rng.randint(1, len(LEAVES))):
        td[name] = NonTensorData(f"{value}", batch_size=batch) if name == "text" else torch.full((*batch, 2), value)
    for name in NODES if depth else ():
        if rng.random() < 0.7:
            more = (*batch, 3) if name == "agents" else batch
            td[name] = random_node(rng, more, depth - 1, value)
    return td


def random_keys(rng: random.Random, name: str) -> list[Any]:
    paths = [(), ("agents",), ("group",), ("agents", "agents"), ("agents", "group"), ("group", "agents", "agents")]
    return [(*path, name) if path else name for path in rng.sample(paths, rng.randint(1, len(paths)))]


def random_step(rng: random.Random) -> TensorDictBase:
    batch = rng.choice([(), (2,), (2, 2)])
    steps = [
        random_node(rng, batch, 3, 0.0).set("next", random_node(rng, batch, 3, 1.0)) for _ in range(rng.choice([1, 2]))
    ]
    return steps[0] if len(steps) == 1 else LazyStackedTensorDict(*steps, stack_dim=rng.randint(0, len(batch)))


def leaves(td: TensorDictBase, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All there is in a TensorDict: the leaf under each path, and the batch size of each node."""
    if isinstance(td, LazyStackedTensorDict) and not isinstance(td, NonTensorStack):
        for number, part in enumerate(td.tensordicts):
            yield from leaves(part, (*at, number))
    elif isinstance(td, TensorDictBase) and not isinstance(td, NonTensorStack):
        yield at, td.batch_size
        for name, value in td.items():
            yield from leaves(value, (*at, name))
    else:
        yield at, td.data_ptr() if isinstance(td, torch.Tensor) else td.tolist()


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.every_combination
def test_the_result_is_that_of_torchrl(seed: int) -> None:
    """It differs on purpose in that masks are left out, which these steps do not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils = pytest.importorskip("torchrl.envs.utils")
    rng = random.Random(seed)
    for _ in range(10):
        td = random_step(rng)
        options = {
            **{flag: rng.random() < 0.5 for flag in ("keep_other", "exclude_reward", "exclude_done", "exclude_action")},
            **{f"{name}_keys": random_keys(rng, name) for name in ("reward", "done", "action")},
        }
        if not options["keep_other"]:  # TorchRL fails where an action is missing
            options["exclude_action"] = True
        assert dict(leaves(step_mdp(td, **options))) == dict(leaves(utils.step_mdp(td, **options))), options
