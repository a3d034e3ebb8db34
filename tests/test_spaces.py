from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aioenvs.engine.adapters.spaces import Alike, Numbers
from aioenvs.errors import SpecMismatchError
from aioenvs.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)
from aioenvs.specs.inferred import composites, encoded, leaf_spec, rows_spec

gymnasium: Any = pytest.importorskip("gymnasium")
spaces: Any = gymnasium.spaces
INF = np.inf
CARTPOLE = np.array([4.8, INF, 0.42, INF], np.float32)

TENSOR_SPACES: list[tuple[Any, Any]] = [
    (spaces.Box(-1, 1, (3,)), Bounded(-1, 1, shape=(3,))),
    (spaces.Box(-1, 1, ()), Bounded(-1, 1, shape=())),
    (spaces.Box(0, 255, (4, 4), np.uint8), Bounded(0, 255, shape=(4, 4), dtype=torch.uint8)),
    (spaces.Box(-CARTPOLE, CARTPOLE), Bounded(-CARTPOLE, CARTPOLE)),
    (
        spaces.Box(np.array([-2, 0]), np.array([-1, 5]), dtype=np.int16),
        Bounded([-2, 0], [-1, 5], dtype=torch.int16),
    ),
    (spaces.Box(0.1, 0.7, (2,), np.float16), Bounded(np.float16(0.1), np.float16(0.7), (2,), dtype=torch.float16)),
    (spaces.Box(-1, 1, (2,), np.float64), Bounded(-1, 1, shape=(2,), dtype=torch.float64)),
    (spaces.Box(0, 60000, (2,), np.uint16), Bounded(0, 60000, shape=(2,), dtype=torch.uint16)),
    (spaces.Box(0, 2**40, (2,), np.uint64), Bounded(0, 2**40, shape=(2,), dtype=torch.uint64)),
    (spaces.Box(-INF, INF, (2, 3)), Unbounded((2, 3))),
    (spaces.Box(-INF, INF, (2,), np.float64), Unbounded((2,), dtype=torch.float64)),
    (spaces.Box(0, INF, (2,)), Bounded(0, INF, shape=(2,))),
    (spaces.Box(0, 1, (2,), bool), Binary(2, dtype=torch.bool)),
    (spaces.Box(-1, 1, (0,)), Unbounded((0,))),
    (spaces.Discrete(4), Categorical(4)),
    (spaces.Discrete(4, start=-2), Categorical(4, start=-2)),
    (spaces.Discrete(4, dtype=np.int32), Categorical(4, dtype=torch.int32)),
    (spaces.MultiDiscrete([2, 3]), MultiCategorical([2, 3])),
    (spaces.MultiDiscrete([2, 3], start=[5, -1]), MultiCategorical([2, 3], start=[5, -1])),
    (spaces.MultiDiscrete([[2, 3], [4, 5]]), MultiCategorical([[2, 3], [4, 5]])),
    (spaces.MultiDiscrete([2, 3], dtype=np.int32), MultiCategorical([2, 3], dtype=torch.int32)),
    (spaces.MultiBinary(3), Binary(3)),
    (spaces.MultiBinary((2, 3)), Binary(shape=(2, 3))),
]
IDS = [str(space) for space, _ in TENSOR_SPACES]

OTHER_SPACES: list[Any] = [
    spaces.Text(5),
    spaces.Sequence(spaces.Box(0, 1, (2,))),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,))]),
]


class CustomSpace(gymnasium.Space):  # type: ignore[misc]
    """A space that nobody knows."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return {"any", "thing"}


@pytest.mark.parametrize(("space", "expected"), TENSOR_SPACES, ids=IDS)
def test_spec(space: Any, expected: Any) -> None:
    assert leaf_spec(space) == expected


@pytest.mark.parametrize(("space", "expected"), TENSOR_SPACES, ids=IDS)
def test_samples_travel_both_ways(space: Any, expected: Any) -> None:
    spec = leaf_spec(space)
    space.seed(0)
    for _ in range(3):
        sample = space.sample()
        value = spec.encode(sample)
        spec.assert_is_in(value)
        back = spec.to_numpy(value)
        assert space.contains(back)
        np.testing.assert_array_equal(back, sample)
        assert space.contains(spec.to_numpy(spec.rand()))


@pytest.mark.parametrize("space", [*OTHER_SPACES, CustomSpace()], ids=lambda space: type(space).__name__)
def test_spaces_without_a_fixed_shape(space: Any) -> None:
    spec = leaf_spec(space)
    assert spec == NonTensor(())
    sample = space.sample()
    value = spec.encode(sample)
    assert spec.is_in(value)
    assert spec.to_numpy(value) is sample


def test_a_subclass_of_a_known_space() -> None:
    class Angle(spaces.Box):  # type: ignore[misc]
        pass

    assert leaf_spec(Angle(-1, 1, (2,))) == Bounded(-1, 1, shape=(2,))


def test_device() -> None:
    for space, _ in TENSOR_SPACES:
        assert leaf_spec(space, "meta").device == torch.device("meta")


@pytest.mark.parametrize("space", [spaces.Dict(a=spaces.Discrete(2)), spaces.Tuple([spaces.Discrete(2)])])
def test_containers_are_refused(space: Any) -> None:
    with pytest.raises(TypeError, match="contains no other spaces"):
        leaf_spec(space)


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a gymnasium space, found 3"):
        leaf_spec(3)  # type: ignore[arg-type]


INT64 = torch.int64
ONE_HOT_SPACES: list[tuple[Any, Any]] = [
    (spaces.Discrete(4), OneHot(4, dtype=INT64)),
    (spaces.Discrete(4, start=-2), OneHot(4, dtype=INT64, start=-2)),
    (spaces.Discrete(4, dtype=np.int32), OneHot(4, dtype=INT64)),
    (spaces.MultiDiscrete([2, 3]), MultiOneHot([2, 3], dtype=INT64)),
    (spaces.MultiDiscrete([2, 3], start=[5, -1]), MultiOneHot([2, 3], dtype=INT64, start=[5, -1])),
    (spaces.MultiDiscrete([3, 3]), OneHot(3, (2, 3), dtype=INT64)),
    (spaces.MultiDiscrete([3, 3], start=[4, 4]), OneHot(3, (2, 3), dtype=INT64, start=4)),
    (spaces.MultiDiscrete([3, 3], start=[4, 5]), MultiOneHot([3, 3], dtype=INT64, start=[4, 5])),
    (spaces.MultiDiscrete([3]), OneHot(3, (1, 3), dtype=INT64)),
    (spaces.MultiDiscrete([[2, 2], [2, 2]]), OneHot(2, (2, 2, 2), dtype=INT64)),
    (spaces.MultiDiscrete([[2, 3], [2, 3]]), MultiOneHot([2, 3], (2, 5), dtype=INT64)),
    (spaces.MultiDiscrete([[2, 3], [4, 5]]), MultiCategorical([[2, 3], [4, 5]])),
]


@pytest.mark.parametrize(("space", "expected"), ONE_HOT_SPACES, ids=[str(space) for space, _ in ONE_HOT_SPACES])
def test_one_hot(space: Any, expected: Any) -> None:
    spec = leaf_spec(space, one_hot=True)
    assert spec == expected
    space.seed(0)
    sample = space.sample()
    value = spec.encode(sample)
    spec.assert_is_in(value)
    np.testing.assert_array_equal(spec.to_numpy(value), sample)
    assert leaf_spec(space, "meta", one_hot=True).device == torch.device("meta")


@pytest.mark.parametrize(
    ("space", "expected"), [(space, spec) for space, spec in TENSOR_SPACES if "Discrete" not in str(space)]
)
def test_one_hot_changes_choices_only(space: Any, expected: Any) -> None:
    assert leaf_spec(space, one_hot=True) == expected


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        (Unbounded(()), 1, torch.tensor(1.0)),
        (Unbounded(1), 1.5, torch.tensor([1.5])),
        (Unbounded((2,), dtype=torch.float64), [1, 2.5], torch.tensor([1, 2.5], dtype=torch.float64)),
        (Unbounded((-1,)), np.arange(3), torch.arange(3.0)),
        (Unbounded((), dtype=torch.bool), True, torch.tensor(True)),
        (Bounded(0, 255, (2,), dtype=torch.uint8), [0, 255], torch.tensor([0, 255], dtype=torch.uint8)),
        (Categorical(3, start=1), np.int32(3), torch.tensor(3)),
        (OneHot(3), 1, torch.tensor([False, True, False])),
        (MultiOneHot([2, 3]), [1, 0], torch.tensor([0, 1, 1, 0, 0]).bool()),
        (Unbounded((2,)), torch.tensor([1, 2]), torch.tensor([1.0, 2.0])),
        (Unbounded((), dtype=torch.bfloat16), 0.5, torch.tensor(0.5, dtype=torch.bfloat16)),
    ],
    ids=repr,
)
def test_encoded(spec: Any, value: Any, expected: Any) -> None:
    tensor = encoded(spec, value, ("key",))
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    assert torch.equal(tensor, expected)


def test_encoded_shares_no_memory() -> None:
    array = np.zeros(2, np.float32)
    tensor = encoded(Unbounded((2,)), array, ("key",))
    array[:] = 1
    assert not tensor.any()


def test_encoded_objects() -> None:
    thing = {"any": "thing"}
    assert encoded(NonTensor(()), thing, ("key",)).data is thing


@pytest.mark.parametrize(
    ("spec", "value", "found"),
    [
        (Unbounded((2,)), [1.0, 2.0, 3.0], r"found \(3,\)"),
        (Unbounded((2,)), [[1.0, 2.0]], r"of shape \(1, 2\)"),
        (Unbounded((2,)), 1.0, r"found \(\)"),
        (Unbounded(()), [1.0], r"of shape \(1,\)"),
        (Unbounded((2,)), [[1.0], [2.0, 3.0]], "found a ragged list"),
        (Unbounded(()), "fast", "found <U4"),
        (Unbounded(()), None, "found None"),
        (Unbounded(()), {"a": 1}, "found {'a': 1}"),
        (Unbounded((), dtype=torch.int64), 2.7, "expected int64 .* found float64"),
        (Unbounded((), dtype=torch.bool), 2, "expected bool .* found int64"),
        (Unbounded((), dtype=torch.int8), 300, "do not fit: 300"),
        (Unbounded(()), 1e300, "do not fit"),
        (OneHot(3), 3, r"expected integers in \[0, 3\)"),
        (OneHot(3), 1.0, "expected int64"),
        (MultiOneHot([2, 3]), [1, -1], "expected integers in"),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_not_encoded(spec: Any, value: Any, found: str) -> None:
    with pytest.raises(SpecMismatchError, match=found) as caught:
        encoded(spec, value, ("outer", "key"))
    assert "('outer', 'key')" in str(caught.value)
    assert "env 0" not in str(caught.value)


# -- rows, and all of an env ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([spaces.Discrete(3)] * 2, Categorical(3, (2,), dtype=torch.int64)),
        ([spaces.Discrete(3), spaces.Discrete(4, start=1)], MultiCategorical([3, 4], start=[0, 1])),
        ([spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([4, 5])], MultiCategorical([[2, 3], [4, 5]])),
        (
            [spaces.Box(-1, 1, (2,)), spaces.Box(-2, 1, (2,))],
            Bounded([[-1.0, -1], [-2, -2]], 1, (2, 2), dtype=torch.float32),
        ),
        ([spaces.Box(-np.inf, np.inf, (2,))] * 3, Unbounded((3, 2), dtype=torch.float32)),
        ([spaces.Text(3), spaces.Text(4)], NonTensor((2,))),
    ],
    ids=str,
)
def test_rows_of_spaces(rows: Any, expected: Any) -> None:
    spec = rows_spec(Alike(tuple(rows)))
    assert spec == expected
    assert spec.is_in(spec.rand())


def test_one_hot_rows_are_those_of_one_space() -> None:
    assert rows_spec(Alike((spaces.Discrete(3),) * 2), one_hot=True) == OneHot(3, (2, 3), dtype=torch.int64)
    with pytest.raises(SpecMismatchError, match="the same space for all where values are one-hot"):
        rows_spec(Alike((spaces.Discrete(3), spaces.Discrete(4))), one_hot=True)


def test_the_specs_of_an_env_in_gymnasiums_terms() -> None:
    outputs, inputs = composites(
        {"observation": {("x",): spaces.Box(0, 1, (2,))}, "action": {("action",): spaces.Discrete(2)}}
    )
    assert outputs["full_reward_spec"] == Composite(reward=Unbounded((1,), dtype=torch.float32))
    assert sorted(outputs["full_done_spec"].keys()) == ["done", "terminated", "truncated"]
    assert inputs["full_action_spec", "action"] == Categorical(2, (), dtype=torch.int64)


def test_what_several_agents_have_is_nested_with_a_shape_of_its_own() -> None:
    rows = Alike((spaces.Discrete(2),) * 3)
    outputs, inputs = composites(
        {
            "observation": {("team", "x", "y"): rows, ("state",): Numbers("<i8", (4,))},
            "action": {("team", "action"): rows},
            "reward": {("team", "reward"): Numbers("<f4", (3, 1))},
            "done": {("team", "done"): Numbers("|b1", (3, 1)), ("done",): Numbers("|b1", (1,))},
            "counts": {"team": 3},
        },
        one_hot=True,
    )
    observation = outputs["full_observation_spec"]
    assert (observation["team"].shape, observation["team", "x"].shape, observation.shape) == ((3,), (3,), ())
    assert observation["state"] == Unbounded((4,), dtype=torch.int64)
    assert observation["team", "x", "y"] == Categorical(2, (3,), dtype=torch.int64)
    assert outputs["full_done_spec", "team", "done"] == Categorical(2, (3, 1), dtype=torch.bool)
    assert inputs["full_action_spec", "team", "action"] == OneHot(2, (3, 2), dtype=torch.int64)
