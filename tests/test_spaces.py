from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aioenvs.spaces import leaf_spec
from aioenvs.specs import Binary, Bounded, Categorical, MultiCategorical, NonTensor, Unbounded

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
    (spaces.Box(0.1, 0.7, (2,), np.float16), Bounded(np.float16(0.1), np.float16(0.7), (2,), torch.float16)),
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
