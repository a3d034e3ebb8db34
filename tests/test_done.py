"""When episodes end, and partial resets: the flags of a root and of nested nodes."""

import random
import warnings
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from aioenvs.tensors.done import (
    any_done,
    complete_done,
    done_mask,
    merged,
    merged_reset,
    reset_mask,
    ruling_keys,
    terminated_or_truncated,
)

AGENTS = [("agents", "done"), ("agents", "terminated")]


def flags(*values: Any) -> torch.Tensor:
    """Flags of shape `(len(values), 1)`, or of more dims if they are nested."""
    return torch.tensor(values, dtype=torch.bool).unsqueeze(-1)


def of_agents(*done: list[bool]) -> TensorDict:
    """A TensorDict for some envs with some agents each, with a `done` for each agent."""
    size = [len(done), len(done[0])]
    return TensorDict({"agents": TensorDict({"done": flags(*done)}, size)}, size[:1])


def apart(*done: list[bool]) -> LazyStackedTensorDict:
    """Envs that are stacked lazily, with different numbers of agents, and done flags of one or the other node."""
    parts = [TensorDict({f"group{len(own)}": TensorDict({"done": flags(*own)}, [len(own)])}) for own in done]
    return LazyStackedTensorDict(*parts, stack_dim=0)


# -- who is done ------------------------------------------------------------------------------------------


def test_outer_keys_hide_inner_ones() -> None:
    keys = ["done", ("agents", "done"), "truncated"]
    assert ruling_keys(keys) == ["done", "truncated"]
    keys = [("a", "b", "done"), ("a", "done"), ("c", "b", "done")]
    assert ruling_keys(keys) == [("a", "done"), ("c", "b", "done")]
    assert ruling_keys([]) == []


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_flags_with_and_without_a_last_dim(shape: tuple[int, ...]) -> None:
    td = TensorDict({"done": torch.tensor([False, True, False]).reshape(shape)}, [3])
    assert done_mask(td, ["done"]).tolist() == [False, True, False]
    assert any_done(td, ["done"])
    td["done"] = torch.zeros_like(td["done"])
    assert not any_done(td, ["done"])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_env_without_batch_dims(shape: tuple[int, ...]) -> None:
    td = TensorDict({"done": torch.ones(shape, dtype=torch.bool)})
    assert done_mask(td, ["done"]).shape == ()
    assert done_mask(td, ["done"]).item()
    assert any_done(td, ["done"])


def test_each_flag_counts() -> None:
    td = TensorDict({"done": flags(False, False, False), "truncated": flags(True, False, False)}, [3])
    td["terminated"] = flags(False, True, False)
    assert done_mask(td, ["done", "terminated", "truncated"]).tolist() == [True, True, False]
    assert done_mask(td, ["done", "terminated"]).tolist() == [False, True, False]


def test_missing_flags_count_as_false() -> None:
    td = TensorDict({"observation": torch.zeros(2)}, [2])
    assert not any_done(td, ["done", *AGENTS])
    assert done_mask(td, ["done", *AGENTS]).tolist() == [False, False]
    assert done_mask(td, ["done"], every=True).tolist() == [False, False]


def test_an_element_is_done_with_any_or_with_every_agent() -> None:
    td = of_agents([True, False], [True, True], [False, False])
    assert done_mask(td, AGENTS).tolist() == [True, True, False]
    assert done_mask(td, AGENTS, every=True).tolist() == [False, True, False]


def test_several_nodes_none_of_which_hides_another() -> None:
    td = of_agents([True, True], [True, True], [False, False])
    td["other"] = TensorDict({"done": flags(False, True, True)}, [3])
    keys = [*AGENTS, ("other", "done")]
    assert done_mask(td, keys).tolist() == [True, True, True]
    assert done_mask(td, keys, every=True).tolist() == [False, True, False]


def test_a_done_at_the_root_hides_those_of_the_agents() -> None:
    td = of_agents([True, True], [False, False]).set("done", flags(False, True))
    assert done_mask(td, ["done", *AGENTS]).tolist() == [False, True]
    td["done"] = flags(False, False)
    assert not any_done(td, ["done", *AGENTS])


def test_more_batch_dims() -> None:
    td = TensorDict({"done": torch.tensor([[[True], [False]], [[False], [False]]])}, [2, 2])
    assert done_mask(td, ["done"]).tolist() == [[True, False], [False, False]]


def test_envs_stacked_lazily() -> None:
    td = apart([True, False], [True, True, True])
    keys = [("group2", "done"), ("group3", "done")]
    assert done_mask(td, keys).tolist() == [True, True]
    assert done_mask(td, keys, every=True).tolist() == [False, True]
    assert any_done(td, keys)
    assert not any_done(apart([False] * 2, [False] * 3), keys)


def test_agents_stacked_lazily() -> None:
    parts = [TensorDict({"done": flags(False, True), f"own{number}": torch.zeros(2)}, [2]) for number in range(2)]
    parts[1]["done"] = flags(False, False)
    for dim, any_of, every_of in ((0, [True, False], [False, False]), (1, [False, True], [False, False])):
        td = TensorDict({"agents": LazyStackedTensorDict(*parts, stack_dim=dim)}, [2])
        assert done_mask(td, AGENTS).tolist() == any_of
        assert done_mask(td, AGENTS, every=True).tolist() == every_of


def test_agents_with_flags_of_different_shapes() -> None:
    parts = [
        TensorDict({"done": flags([True, False], [False, False])}, [2]),
        TensorDict({"done": flags(True, False)}, [2]),
    ]
    td = TensorDict({"agents": LazyStackedTensorDict(*parts, stack_dim=1)}, [2])
    assert done_mask(td, AGENTS).tolist() == [True, False]
    assert any_done(td, AGENTS)


# -- filling in what is missing ---------------------------------------------------------------------------

ALL = ["done", "terminated", "truncated"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"terminated": True}, (True, True, False)),
        ({"terminated": False}, (False, False, False)),
        ({"done": True}, (True, True, False)),
        ({"truncated": True}, (True, False, True)),
        ({"terminated": False, "truncated": True}, (True, False, True)),
        ({"done": True, "terminated": False}, (True, False, False)),
        ({}, (False, False, False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_missing_flags_follow_from_the_others(
    given: dict[str, bool], expected: tuple[bool, ...], shape: tuple[int, ...]
) -> None:
    td = TensorDict({name: torch.full(shape, value) for name, value in given.items()}, [2])
    assert complete_done(td, ALL) is td
    assert tuple(bool(td[name].all()) for name in ALL) == expected
    assert tuple(bool(td[name].any()) for name in ALL) == expected
    assert {td[name].shape for name in ALL} == {torch.Size(shape if given else (2, 1))}
    assert len({td[name].data_ptr() for name in ALL}) == 3


def test_only_declared_flags_are_filled_in() -> None:
    td = complete_done(TensorDict({"terminated": flags(True)}, [1]), ["done", "terminated"])
    assert set(td.keys()) == {"done", "terminated"}
    td = complete_done(TensorDict({"truncated": flags(True)}, [1]), ["done", "terminated"])
    assert td["done"].tolist() == [[False]]


def test_done_and_truncated_do_not_tell_what_terminated_is() -> None:
    with pytest.raises(RuntimeError, match=r"found 'done' and 'truncated' but no 'terminated' in the root"):
        complete_done(TensorDict({"done": flags(True), "truncated": flags(True)}, [1]), ALL)


def test_each_node_is_filled_in() -> None:
    td = complete_done(of_agents([True, False]), ["done", "terminated", *AGENTS, ("absent", "done")])
    assert td["agents", "terminated"].tolist() == [[[True], [False]]]
    assert td["done"].tolist() == [[False]]
    assert "absent" not in td.keys()  # noqa: SIM118


def test_lazily_stacked_nodes_are_filled_in() -> None:
    td = complete_done(
        apart([True, False], [True] * 3), [("group2", "terminated"), ("group3", "terminated"), ("group2", "done")]
    )
    assert td[0]["group2", "terminated"].tolist() == [[True], [False]]
    parts = [TensorDict({"terminated": flags(True)}, [1]), TensorDict({"done": flags(True), "own": torch.ones(1)}, [1])]
    td = TensorDict({"agents": LazyStackedTensorDict(*parts, stack_dim=1)}, [1])
    complete_done(td, AGENTS)
    assert td["agents", "done"].shape == td["agents", "terminated"].shape == (1, 2, 1)
    assert td["agents", "done"].all()


# -- masks of who ended ------------------------------------------------------------------------------------


def test_the_masks_are_written_beside_the_flags() -> None:
    td = TensorDict({"done": flags(False, False), "truncated": flags(True, False)}, [2])
    td["agents"] = TensorDict({"terminated": flags([False, True], [False, False])}, [2, 2])
    assert terminated_or_truncated(td)
    assert td["_reset"].tolist() == [[True], [False]]
    assert td["agents", "_reset"].tolist() == [[[False], [True]], [[False], [False]]]


@pytest.mark.parametrize("full", [False, True])
def test_without_an_end_masks_are_written_on_demand(full: bool) -> None:
    td = TensorDict({"done": flags(False, False)}, [2])
    assert not terminated_or_truncated(td, key="_mine", write_full_false=full)
    assert ("_mine" in td) is full


def test_an_end_hidden_by_the_root_is_none() -> None:
    td = of_agents([True, True]).set("done", flags(False))
    assert not terminated_or_truncated(td)
    assert "_reset" not in td
    assert ("agents", "_reset") not in td.keys(True)


def test_no_key_nothing_written() -> None:
    td = of_agents([True, False])
    assert terminated_or_truncated(td, key=None)
    assert set(td.keys(True, True)) == {("agents", "done")}


def test_masks_of_envs_stacked_lazily() -> None:
    td = apart([True, False], [False] * 3)
    assert terminated_or_truncated(td)
    assert td[0]["group2", "_reset"].tolist() == [[True], [False]]
    assert td[1]["group3", "_reset"].tolist() == [[False]] * 3


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("write", [False, True])
def test_the_masks_are_those_of_torchrl(seed: int, write: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils = pytest.importorskip("torchrl.envs.utils")
    rng = random.Random(seed)
    td = random_flags(rng, (2,), 2)
    theirs = td.clone()
    found = utils._terminated_or_truncated(theirs, write_full_false=write)
    assert terminated_or_truncated(td, write_full_false=write) == bool(found)
    assert set(td.keys(True)) == set(theirs.keys(True))
    assert (td == theirs).all()


def random_flags(rng: random.Random, batch: tuple[int, ...], depth: int) -> TensorDict:
    td = TensorDict({"observation": torch.zeros(batch)}, batch)
    for name in rng.sample(ALL, rng.choice([0, 1, 3])):
        td[name] = torch.tensor(rng.random() < 0.2).expand(*batch, 1).clone()
    for name in ("agents", "group") if depth else ():
        td[name] = random_flags(rng, (*batch, 2) if name == "agents" else batch, depth - 1)
    return td


# -- partial resets ----------------------------------------------------------------------------------------

KEYS = [("agents", "_reset"), ("other", "_reset")]


def test_without_masks_all_are_meant() -> None:
    assert reset_mask(TensorDict({}, [2]), ["_reset"]) is None


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_the_mask_of_the_root(shape: tuple[int, ...]) -> None:
    td = TensorDict({"_reset": torch.tensor([True, False]).reshape(shape)}, [2])
    found = reset_mask(td, ["_reset", *KEYS])
    assert found is not None
    assert found.tolist() == [True, False]


def nested_masks(agents: list[list[bool]], other: list[bool]) -> TensorDict:
    td = TensorDict({"agents": TensorDict({"_reset": flags(*agents)}, [3, 2])}, [3])
    return td.set("other", TensorDict({"_reset": flags(*other)}, [3]))


def test_any_of_several_masks_counts() -> None:
    td = nested_masks([[True, False], [False, False], [False, False]], [False, True, False])
    found = reset_mask(td, KEYS)
    assert found is not None
    assert found.tolist() == [True, True, False]
    td["_reset"] = flags(False, False, True)
    found = reset_mask(td, ["_reset", *KEYS])
    assert found is not None
    assert found.tolist() == [False, False, True]


def test_all_masks_or_none() -> None:
    td = nested_masks([[True, False]] * 3, [True] * 3)
    del td["other", "_reset"]
    with pytest.raises(
        ValueError, match=r"under none, found only \[\('agents', '_reset'\)\]; set \[\('other', '_reset'\)"
    ):
        reset_mask(td, KEYS)


def test_a_reset_of_some_rows_keeps_the_others() -> None:
    td = TensorDict({"_reset": flags(True, False), "observation": torch.ones(2, 3), "mine": torch.arange(2)}, [2])
    fresh = TensorDict({"observation": torch.zeros(2, 3), "new": torch.full((2,), 5)}, [2])
    before = td.clone()
    result = merged_reset(td, fresh, ["_reset"])
    assert set(result.keys()) == {"observation", "mine", "new"}
    assert result["observation"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert (td == before).all()
    assert not fresh["observation"].any()


def test_a_reset_without_masks_takes_all() -> None:
    td = TensorDict({"observation": torch.ones(2), "mine": torch.ones(2)}, [2])
    result = merged_reset(td, TensorDict({"observation": torch.zeros(2)}, [2]), ["_reset"])
    assert result["observation"].tolist() == [0, 0]
    assert result["mine"].tolist() == [1, 1]
    assert td["observation"].tolist() == [1, 1]


def test_each_node_goes_by_its_own_mask() -> None:
    td = nested_masks([[True, False], [False, False], [False, False]], [False, True, False])
    old = TensorDict({"agents": TensorDict({"observation": torch.ones(3, 2)}, [3, 2]), "state": torch.ones(3)}, [3])
    td = td.update(old.set("other", TensorDict({"observation": torch.ones(3)}, [3])))
    fresh = td.exclude(*KEYS).apply(torch.zeros_like)
    result = merged_reset(td, fresh, KEYS)
    assert result["agents", "observation"].tolist() == [[0, 1], [1, 1], [1, 1]]
    assert result["other", "observation"].tolist() == [1, 0, 1]
    assert result["state"].tolist() == [0, 0, 1]
    assert not [key for key in result.keys(True) if "_reset" in key]


def test_the_mask_of_the_root_prevails() -> None:
    td = nested_masks([[True, True], [True, True], [False, False]], [True] * 3)
    td["agents", "observation"] = torch.ones(3, 2)
    td["_reset"] = flags(False, False, True)
    fresh = TensorDict({"agents": TensorDict({"observation": torch.zeros(3, 2)}, [3, 2])}, [3])
    result = merged_reset(td, fresh, ["_reset", *KEYS])
    assert result["agents", "observation"].tolist() == [[1, 1], [1, 1], [0, 0]]


# -- merging -----------------------------------------------------------------------------------------------


def two(value: float, word: str, **own: torch.Tensor) -> TensorDictBase:
    text = torch.stack([NonTensorData(f"{word}{number}") for number in range(2)])
    return TensorDict(
        {"x": torch.full((2, 3), value), "node": {"y": torch.full((2,), value)}, "text": text, **own}, [2]
    )


def test_rows_are_taken_from_one_or_the_other() -> None:
    td = merged(torch.tensor([True, False]), two(1, "new", a=torch.ones(2)), two(0, "old", b=torch.ones(2)))
    assert td["x"].tolist() == [[1.0] * 3, [0.0] * 3]
    assert td["node", "y"].tolist() == [1, 0]
    assert td["text"] == ["new0", "old1"]
    assert {"a", "b"} <= set(td.keys())


def test_one_text_for_all_rows() -> None:
    new, old = (TensorDict({"text": NonTensorData(word, batch_size=[2])}, [2]) for word in ("new", "old"))
    assert merged(torch.tensor([False, True]), new, old)["text"] == ["old", "new"]


def test_without_batch_dims_it_is_one_or_the_other() -> None:
    new, old = (TensorDict({"x": torch.full((size,), size), "text": NonTensorData(str(size))}) for size in (2, 3))
    assert merged(torch.tensor(True), new, old)["x"].tolist() == [2, 2]
    assert merged(torch.tensor(False), new, old)["x"].tolist() == [3, 3, 3]
    assert merged(torch.tensor(False), new, old)["text"] == "3"


def test_rows_stacked_lazily_keep_their_shapes() -> None:
    def rows(value: float) -> LazyStackedTensorDict:
        parts = [TensorDict({"x": torch.full((size,), value), f"own{size}": torch.zeros(1)}) for size in (2, 3)]
        return LazyStackedTensorDict(*parts, stack_dim=0, stack_dim_name="env")

    td = merged(torch.tensor([False, True]), rows(1), rows(0))
    assert [part["x"].tolist() for part in td.tensordicts] == [[0, 0], [1, 1, 1]]
    assert [set(part.keys()) for part in td.tensordicts] == [{"x", "own2"}, {"x", "own3"}]
    assert td.names == ["env"]


def test_gradients_pass_through_the_rows_taken() -> None:
    new, old = (torch.ones(2, requires_grad=True) for _ in range(2))
    merged(torch.tensor([True, False]), TensorDict({"x": new}, [2]), TensorDict({"x": old}, [2]))["x"].sum().backward()
    assert new.grad is not None
    assert old.grad is not None
    assert (new.grad.tolist(), old.grad.tolist()) == ([1, 0], [0, 1])
