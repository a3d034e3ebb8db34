from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from aioenvs import specs
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
    Stacked,
    StackedComposite,
    TensorSpec,
    Unbounded,
)

INF = math.inf
stack: Any = torch.stack  # typed for tensors only
INT64 = torch.iinfo(torch.int64)

MAKERS: dict[str, Any] = {
    "bounded": lambda: Bounded(-1, 2, shape=(3,)),
    "bounded-per-element": lambda: Bounded([-1.0, 0.0, 5.0], [1.0, 0.5, 5.0]),
    "bounded-half-open": lambda: Bounded([-INF, 0.0, -INF], [INF, INF, 3.0]),
    "bounded-scalar": lambda: Bounded(0, 1, shape=()),
    "bounded-float16": lambda: Bounded(0.1, 0.3, shape=(2, 2), dtype=torch.float16),
    "bounded-bfloat16": lambda: Bounded(0.1, 0.3, shape=(2,), dtype=torch.bfloat16),
    "bounded-float16-mixed": lambda: Bounded([-INF, 0.0, -1.0], [INF, 7.0, INF], dtype=torch.float16),
    "bounded-float16-extremes": lambda: Bounded([-65504.0, 0.1], [65504.0, 0.3], dtype=torch.float16),
    "bounded-float32-extremes": lambda: Bounded(-3.4e38, 3.4e38, shape=(4,)),
    "bounded-float64-extremes": lambda: Bounded([-1.7e308, 0.0], [1.7e308, 1.0], dtype=torch.float64),
    "bounded-uint8": lambda: Bounded(0, 255, shape=(2, 2), dtype=torch.uint8),
    "bounded-int8-per-element": lambda: Bounded([-128, 3], [127, 4], dtype=torch.int8),
    "bounded-int64-extremes": lambda: Bounded(INT64.min, INT64.max, shape=(50,), dtype=torch.int64),
    "bounded-int64-mixed": lambda: Bounded(
        [INT64.min, INT64.min, 0, -5, INT64.max - 1],
        [INT64.max, 7, INT64.max, 5, INT64.max],
        dtype=torch.int64,
    ),
    "bounded-uint16": lambda: Bounded([0, 65535], [65535, 65535], dtype=torch.uint16),
    "bounded-uint32": lambda: Bounded(7, 2**32 - 1, shape=(3,), dtype=torch.uint32),
    "bounded-uint64": lambda: Bounded([0, 2**63], [2**64 - 1, 2**64 - 1], dtype=torch.uint64),
    "bounded-varying": lambda: Bounded(0, 1, shape=(-1, 3)),
    "unbounded": lambda: Unbounded((2, 3)),
    "unbounded-int64": lambda: Unbounded((2, 3), dtype=torch.int64),
    "unbounded-uint8": lambda: Unbounded((2,), dtype=torch.uint8),
    "unbounded-uint64": lambda: Unbounded((2,), dtype=torch.uint64),
    "unbounded-bool": lambda: Unbounded((2,), dtype=torch.bool),
    "unbounded-varying": lambda: Unbounded((2, -1)),
    "categorical": lambda: Categorical(4),
    "categorical-start": lambda: Categorical(4, shape=(2, 1), start=-2, dtype=torch.int32),
    "categorical-bool": lambda: Categorical(2, shape=(1,), dtype=torch.bool),
    "categorical-masked": lambda: Categorical(4, shape=(2,), start=1, mask=[True, False, False, True]),
    "multi-categorical": lambda: MultiCategorical([2, 3, 4]),
    "multi-categorical-2d": lambda: MultiCategorical([[2, 3], [4, 5]], start=[[0, 1], [2, -3]]),
    "multi-categorical-batch": lambda: MultiCategorical([2, 3], shape=(5, 2), dtype=torch.int32),
    "binary": lambda: Binary(3),
    "binary-float": lambda: Binary(shape=(2, 2), dtype=torch.float32),
    "one-hot": lambda: OneHot(4, start=2),
    "one-hot-batch": lambda: OneHot(4, shape=(3, 4), dtype=torch.int64),
    "multi-one-hot": lambda: MultiOneHot([2, 3], start=[1, 0]),
    "multi-one-hot-batch": lambda: MultiOneHot([2, 3], shape=(4, 5), dtype=torch.float32),
    "non-tensor": lambda: NonTensor((), example_data="text"),
    "non-tensor-batch": lambda: NonTensor((2,), example_data={"a": 1}),
    "composite": lambda: Composite(a=Bounded(0, 1, shape=(3,)), b=Composite(c=Categorical(3), d=None)),
    "composite-batch": lambda: Composite(a=Binary(3), t=NonTensor((), example_data="x")).expand(2, 4),
    "composite-device": lambda: Composite(a=OneHot(3), b=Composite(c=Binary(1)), device="cpu"),
    "composite-empty": lambda: Composite(shape=(2,)),
    "stacked": lambda: stack([Categorical(3), Categorical(40)]),
    "stacked-last": lambda: stack([Bounded(0, 1, shape=(3,)), Bounded(5, 6, shape=(3,))], -1),
    "stacked-composite": lambda: stack([Composite(a=Binary(3)), Composite(a=Binary(4), b=Categorical(2))]).expand(2, 2),
    "stacked-composite-inner": lambda: stack([Composite(a=Binary(3)).expand(3), Composite(a=Binary(4)).expand(3)], 1),
}
ALL = list(MAKERS)
SEED = 3


def every_spec(check: Callable[[Any, TensorSpec], None]) -> Callable[[Any], None]:
    """Make a test that runs the check for each kind of spec (a test for each would mostly be set-up)."""

    def test(self: Any) -> None:
        for name, make in MAKERS.items():
            torch.manual_seed(SEED)
            try:
                check(self, make())
            except BaseException as error:
                error.add_note(f"the spec is {name!r}")
                raise

    return test


def sized(shape: Any) -> tuple[int, ...]:
    return tuple(1 if size == -1 else size for size in shape)


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape)


class TestEverySpec:
    @every_spec
    def test_rand_is_in(self, spec: TensorSpec) -> None:
        for lead in ((), (6,), (2, 0)):
            value = spec.rand(lead)
            assert shape_of(value) == (*lead, *sized(spec.shape))
            assert spec.is_in(value)
            assert spec.differences(value) == []
            spec.assert_is_in(value)

    @every_spec
    def test_rand_follows_the_seed(self, spec: TensorSpec) -> None:
        torch.manual_seed(SEED)
        first = spec.rand((3,))
        torch.manual_seed(SEED)
        second = spec.rand((3,))
        same = first == second
        assert bool(same.all()) if hasattr(same, "all") else same

    @every_spec
    def test_zero_and_one(self, spec: TensorSpec) -> None:
        for value, expected in ((spec.zero((5,)), 0), (spec.one((5,)), 1)):
            assert shape_of(value) == (5, *sized(spec.shape))
            if isinstance(value, torch.Tensor):
                assert value.dtype == spec.dtype
                assert bool((value.double() == expected).all())

    @every_spec
    def test_a_clone_is_equal_and_another_object(self, spec: TensorSpec) -> None:
        for other in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
            assert other is not spec
            assert other == spec
            assert other.is_in(spec.rand())

    @every_spec
    def test_differs_from_all_others(self, spec: TensorSpec) -> None:
        assert sum(MAKERS[name]() == spec for name in ALL) == 1
        other: Any = "spec"
        assert spec != other

    @every_spec
    def test_cannot_be_hashed(self, spec: TensorSpec) -> None:
        with pytest.raises(TypeError, match="unhashable"):
            hash(spec)

    @every_spec
    def test_expand(self, spec: TensorSpec) -> None:
        wide = spec.expand(3, 2, *spec.shape)
        assert wide.shape == (3, 2, *spec.shape)
        assert wide == spec.expand((3, 2, *spec.shape))
        assert wide == spec.expand(torch.Size([3, 2, *[-1] * spec.ndim]))
        assert wide.is_in(wide.rand((4,)))
        assert wide.is_in(spec.rand((4, 3, 2)))
        with pytest.raises(ValueError, match="cannot expand"):
            wide.expand(3)
        with pytest.raises(ValueError, match="cannot expand"):
            wide.expand(3, 5, *spec.shape)

    @every_spec
    def test_index_of_a_batch(self, spec: TensorSpec) -> None:
        wide = spec.expand(3, 2, *spec.shape)
        assert wide[0, 1] == spec
        assert wide[-1][1] == spec
        assert wide[0].shape == (2, *spec.shape)
        assert wide[1:].shape == (2, 2, *spec.shape)
        assert wide[..., *[slice(None)] * (wide.ndim - 2)].shape == wide.shape if spec._event_ndim == 0 else True
        assert wide[1:, 0].is_in(wide[1:, 0].rand())
        with pytest.raises(IndexError):
            wide[3]

    @every_spec
    def test_index_with_a_list(self, spec: TensorSpec) -> None:
        if "stacked" in type(spec).__name__.lower():
            return
        wide = spec.expand(3, *spec.shape)
        assert wide[[0, 2]].shape == (2, *spec.shape)
        assert wide[torch.tensor([True, False, True])] == spec.expand(2, *spec.shape)
        assert wide[np.array([0, 1, 2, 0])].is_in(spec.rand((4,)))

    @every_spec
    def test_stack_and_unbind(self, spec: TensorSpec) -> None:
        stacked = stack([spec, spec.clone(), spec])
        assert type(stacked) is type(spec)
        assert stacked.shape == (3, *spec.shape)
        assert list(stacked.unbind(0)) == [spec] * 3
        assert stacked == spec.expand(3, *spec.shape)

    @every_spec
    def test_squeeze_and_unsqueeze(self, spec: TensorSpec) -> None:
        wide = spec.unsqueeze(0)
        assert wide.shape == (1, *spec.shape)
        assert wide.squeeze(0) == spec
        assert wide.is_in(wide.rand())
        assert 1 not in spec.expand(1, 2, 1, *spec.shape).squeeze().shape
        with pytest.raises(IndexError):
            spec.unsqueeze(9)

    @every_spec
    def test_to_a_device(self, spec: TensorSpec) -> None:
        there = spec.to("meta")
        assert there.device == torch.device("meta")
        assert there.shape == spec.shape
        assert there == there.clone() != spec
        assert spec.to("cpu").to("cpu") == spec.to("cpu")

    @every_spec
    def test_encode_undoes_to_numpy(self, spec: TensorSpec) -> None:
        if spec.dtype == torch.bfloat16:
            return
        value = spec.rand()
        back = spec.encode(spec.to_numpy(value))
        assert type(back) is type(value) or isinstance(back, NonTensorStack)
        assert spec.is_in(back)
        same = back == value
        assert bool(same.all()) if hasattr(same, "all") else same

    @every_spec
    def test_project_keeps_what_is_in(self, spec: TensorSpec) -> None:
        value = spec.rand((2,))
        same = spec.project(value) == value
        assert bool(same.all()) if hasattr(same, "all") else same

    @every_spec
    def test_project_of_anything_is_in(self, spec: TensorSpec) -> None:
        value = spec.zero((2,)) if not isinstance(spec, Stacked) else spec.rand((2,)) * 0
        assert spec.is_in(spec.project(value))

    @every_spec
    def test_other_kinds_of_values_are_not_in(self, spec: TensorSpec) -> None:
        wrong: Any = torch.zeros(1, dtype=torch.complex64)
        assert not spec.is_in(wrong) or spec == Composite(shape=(2,))
        if not isinstance(spec, NonTensor):
            assert not spec.is_in("text")
            assert len(spec.differences("text")) == 1
            with pytest.raises(SpecMismatchError, match="text"):
                spec.assert_is_in("text")

    @every_spec
    def test_repr_names_class_and_shape(self, spec: TensorSpec) -> None:
        text = repr(spec)
        assert text.startswith(type(spec).__name__)
        assert f"shape={tuple(spec.shape)}" in text

    @every_spec
    def test_other_torch_functions_are_refused(self, spec: TensorSpec) -> None:
        with pytest.raises(TypeError):
            torch.cat([spec, spec])  # type: ignore[list-item]


LEAVES = [name for name in ALL if not name.startswith(("composite", "stacked", "non-tensor"))]


def test_a_leaf_checks_dtype_and_shape() -> None:
    for name in LEAVES:
        check_dtype_and_shape(MAKERS[name]())


def check_dtype_and_shape(spec: Any) -> None:
    value = spec.rand((2,))
    other = torch.float32 if spec.dtype != torch.float32 else torch.float64
    assert not spec.is_in(value.to(other))
    assert "expected dtype" in spec.differences(value.to(other))[0]
    if spec.shape:
        wrong = value[..., :0].expand(*value.shape[:-1], 0)
        if spec.shape[-1] != -1:
            assert not spec.is_in(wrong)
            assert "expected shape" in spec.differences(wrong)[0]
            with pytest.raises(ValueError, match="expected"):
                spec.project(wrong)
            if spec.shape != (1,):
                with pytest.raises(ValueError, match="expected"):
                    spec.encode(np.zeros((7, 9)))


def test_encode_copies() -> None:
    for name in LEAVES:
        check_that_encode_copies(MAKERS[name]())


def check_that_encode_copies(spec: Any) -> None:
    if spec.dtype == torch.bfloat16:
        return  # numpy has none
    array = np.array(spec.to_numpy(spec.rand((2,))))
    value = spec.encode(array)
    before = value.clone()
    array[...] = 1
    assert torch.equal(value, before)
    array = np.asarray(spec.to_numpy(value))
    array[...] = 1
    assert torch.equal(value, before)


def test_space_is_where_torchrl_keeps_the_bounds() -> None:
    assert torch.equal(Bounded(0, 1, shape=(2,)).space.high, torch.ones(2))
    assert OneHot(3).space.n == 3


def test_all_names_are_exported() -> None:
    classes = [name for name in specs.__all__ if name != "make_composite_from_td"]
    assert all(issubclass(getattr(specs, name), TensorSpec) for name in classes)


class TestBounded:
    def test_bounds_keep_their_memory_small(self) -> None:
        for spec in (Bounded(0, 255, shape=(84, 84)), Bounded(np.zeros((84, 84)), np.full((84, 84), 255.0))):
            for wide in (
                spec,
                spec.expand(32, 84, 84),
                spec.expand(32, 84, 84)[[0, 7]],
                spec.to(torch.uint8),
            ):
                assert wide.low.untyped_storage().nbytes() <= 8
                assert wide.low.shape == wide.shape
        per_element = Bounded(np.zeros(3), np.arange(3.0))
        assert per_element.expand(1000, 3).high.untyped_storage().nbytes() == 24
        assert per_element.expand(1000, 3).to("cpu").high.untyped_storage().nbytes() == 24
        assert len(pickle.dumps(per_element.expand(10**6, 3))) < 2000

    @pytest.mark.parametrize(
        ("low", "high", "dtype"),
        [
            (0, 1, torch.float32),
            (0, 1.5, torch.float32),
            ([0], [1], torch.float32),
            (np.zeros(2), 1, torch.float64),
            (0, np.ones(2, np.int32), torch.int32),
            (torch.zeros(2, dtype=torch.float16), 1, torch.float16),
        ],
    )
    def test_default_dtype(self, low: Any, high: Any, dtype: torch.dtype) -> None:
        assert Bounded(low, high, shape=(2,)).dtype == dtype

    def test_default_shape_is_that_of_the_bounds(self) -> None:
        assert Bounded(np.zeros((2, 1)), np.ones(3)).shape == (2, 3)

    def test_does_not_share_memory_with_its_arguments(self) -> None:
        low, high = torch.zeros(2), np.arange(1, 3)
        spec = Bounded(low, high)
        low -= 5
        high += 5
        assert spec == Bounded([0, 0], [1, 2])

    def test_range(self) -> None:
        spec = Bounded([-1.0, 0.0], [1.0, INF])
        inside, outside = [[-1.0, 0.0], [1.0, INF]], [[1.1, 0.0], [0.0, -0.1], [math.nan, 0.0]]
        assert all(spec.is_in(torch.tensor(value)) for value in inside)
        assert not any(spec.is_in(torch.tensor(value)) for value in outside)
        assert spec.is_in(torch.tensor(inside))
        assert not spec.is_in(torch.tensor(inside + outside))
        assert not Bounded(0, 1, shape=(1,)).is_in(torch.tensor([math.nan]))
        assert spec.differences(torch.tensor([3.0, 0.0])) == [
            "expected elements in [[-1.0, 0.0], [1.0, inf]], found [3.0, 0.0]"
        ]

    def test_project(self) -> None:
        spec = Bounded([-1.0, 2.0], [1.0, 3.0])
        value = spec.project(torch.tensor([[5.0, -5.0], [math.nan, INF], [0.5, 2.5]]))
        assert value.tolist() == [[1.0, 2.0], [0.0, 3.0], [0.5, 2.5]]
        integers = Bounded(-3, 3, shape=(2,), dtype=torch.int8)
        assert integers.project(torch.tensor([1e30, -1e30])).tolist() == [3, -3]
        assert integers.project(torch.tensor([300, -1])).tolist() == [3, -1]
        assert integers.project(torch.tensor([1.6, math.nan])).tolist() == [2, 0]

    def test_integers_reach_both_bounds(self) -> None:
        assert set(Bounded(-1, 1, shape=(200,), dtype=torch.int8).rand().tolist()) == {-1, 0, 1}
        drawn = Bounded([3, -1], [4, 1], dtype=torch.int64).rand((200,))
        assert [set(column) for column in drawn.T.tolist()] == [{3, 4}, {-1, 0, 1}]

    def test_wide_integers_are_spread(self) -> None:
        spec = MAKERS["bounded-int64-mixed"]()
        drawn = spec.rand((400,)).double()
        assert (drawn[:, 0] < 0).double().mean().item() == pytest.approx(0.5, abs=0.15)
        assert (drawn[:, 1] < -(2.0**62)).double().mean().item() == pytest.approx(0.5, abs=0.15)
        assert (drawn[:, 2] < 2.0**62).double().mean().item() == pytest.approx(0.5, abs=0.15)

    def test_draws_like_gymnasium_without_bounds(self) -> None:
        drawn = Bounded([-INF, 10.0, -INF, 0.0], [INF, INF, -10.0, 4.0]).rand((4000,)).double()
        assert drawn.mean(0).tolist() == pytest.approx([0.0, 11.0, -11.0, 2.0], abs=0.15)
        assert drawn.std(0).tolist() == pytest.approx([1.0, 1.0, 1.0, 4 / 12**0.5], abs=0.15)

    def test_infinite_bounds_of_integers_are_the_extremes(self) -> None:
        spec = Bounded(-INF, INF, shape=(2,), dtype=torch.int64)
        assert (spec.low[0].item(), spec.high[0].item()) == (INT64.min, INT64.max)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"low": 0, "high": 1}, "needs a shape"),
            ({"low": 1, "high": 0, "shape": (2,)}, "low <= high"),
            ({"low": math.nan, "high": 0, "shape": (2,)}, "low <= high"),
            ({"low": INF, "high": INF, "shape": (2,)}, "low <= high"),
            ({"low": [0, 0, 0], "high": 1, "shape": (2,)}, r"low that broadcasts to \(2,\), found \(3,\)"),
            ({"low": 0, "high": [[1, 1]], "shape": (2,)}, "high that broadcasts"),
            ({"low": 0, "high": 256, "shape": (2,), "dtype": torch.uint8}, "uint8 cannot hold"),
            ({"low": -1, "high": 2, "shape": (2,), "dtype": torch.uint64}, "uint64 cannot hold"),
            ({"low": 0.5, "high": 2, "shape": (2,), "dtype": torch.int32}, "whole numbers"),
            ({"low": 0, "high": 1, "shape": (2,), "dtype": torch.bool}, "dtype of a number"),
            ({"low": "a", "high": 1, "shape": (2,)}, "number or an array"),
            ({"low": 0, "high": 1, "shape": (-2,)}, "sizes >= 0"),
        ],
    )
    def test_wrong_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Bounded(**arguments)

    def test_other_dtype(self) -> None:
        spec = Bounded(0, 200, shape=(2,)).to(torch.uint8)
        assert spec == Bounded(0, 200, shape=(2,), dtype=torch.uint8)
        with pytest.raises(ValueError, match="int8 cannot hold"):
            spec.to(torch.int8)

    def test_index_and_reshape_follow_the_elements(self) -> None:
        spec = Bounded(np.zeros((2, 3)), np.arange(1.0, 7.0).reshape(2, 3))
        assert spec[1].high.tolist() == [4, 5, 6]
        assert spec[:, 1].high.tolist() == [2, 5]
        assert spec[..., -1].high.tolist() == [3, 6]
        assert spec.reshape(3, 2).high.tolist() == [[1, 2], [3, 4], [5, 6]]
        assert spec.reshape(-1).shape == (6,)
        assert [part.high.tolist() for part in spec.unbind(-1)] == [[1, 4], [2, 5], [3, 6]]
        with pytest.raises(IndexError, match="does not fit the batch dims"):
            spec[0, 0, 0]

    @settings(max_examples=60, deadline=None)
    @given(bounds=st.lists(st.integers(INT64.min, INT64.max), min_size=2, max_size=2), n=st.integers(1, 3))
    def test_any_integer_interval(self, bounds: list[int], n: int) -> None:
        low, high = sorted(bounds)
        for spec in (
            Bounded(low, high, shape=(n,), dtype=torch.int64),
            Bounded([low, low], [low, high], dtype=torch.int64),
        ):
            assert spec.is_in(spec.rand((5,)))
            if low > INT64.min:
                assert not spec.is_in(torch.full(spec.shape, low - 1))


class TestUnbounded:
    def test_defaults_are_torchrls(self) -> None:
        assert Unbounded().shape == (1,)
        assert Unbounded(3).shape == (3,)

    def test_a_size_that_varies(self) -> None:
        spec = Unbounded((2, -1, 3))
        assert spec.is_in(torch.zeros(2, 7, 3))
        assert not spec.is_in(torch.zeros(3, 7, 3))
        assert spec.expand(4, 2, -1, 3)[0] == spec
        assert spec[1].shape == (-1, 3)
        with pytest.raises(ValueError, match="varies"):
            spec.unbind(1)
        with pytest.raises(ValueError, match="reshape"):
            spec.reshape(6)
        with pytest.raises(ValueError, match="new dim needs a size"):
            spec.expand(-1, 2, -1, 3)
        with pytest.raises(IndexError, match="batch dims"):
            spec[..., 0]


class TestCategorical:
    def test_values(self) -> None:
        spec = Categorical(3, start=-1)
        assert set(spec.rand((100,)).tolist()) == {-1, 0, 1}
        assert (spec.n, spec.start) == (3, -1)
        assert not spec.is_in(torch.tensor(2))
        assert spec.project(torch.tensor([-7, 0, 7])).tolist() == [-1, 0, 1]
        assert isinstance(spec.to_numpy(torch.tensor(1)), np.int64)

    def test_mask(self) -> None:
        spec = Categorical(4, shape=(2,), mask=[[True, False, False, True], [False, True, False, False]])
        drawn = spec.rand((100,))
        assert [set(column) for column in drawn.T.tolist()] == [{0, 3}, {1}]
        assert spec.is_in(torch.tensor([3, 1]))
        assert not spec.is_in(torch.tensor([1, 3]))
        assert "mask" in spec.differences(torch.tensor([1, 1]))[0]
        assert spec.project(torch.tensor([2, 3])).tolist() == [3, 1]
        assert spec[1].is_in(torch.tensor(1))
        assert not spec.expand(3, 2)[2, 1].is_in(torch.tensor(0))

    def test_update_mask(self) -> None:
        spec = Categorical(3, shape=(2,))
        twin = spec.clone()
        spec.update_mask(torch.tensor([False, True, False]))
        assert spec.rand().tolist() == [1, 1]
        assert spec != twin
        spec.update_mask(None)
        assert spec == twin

    @pytest.mark.parametrize("mask", [[1, 0, 2], [0.5, 1, 1], [[True] * 4], [[[True] * 3]] * 2, []])
    def test_wrong_masks(self, mask: Any) -> None:
        with pytest.raises(ValueError, match="mask"):
            Categorical(3, mask=mask)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"n": 0}, "n >= 1"),
            ({"n": 300, "dtype": torch.uint8}, "uint8 cannot hold the values from 0 to 299"),
            ({"n": 3, "start": -1, "dtype": torch.uint8}, "uint8 cannot hold"),
            ({"n": 3, "dtype": torch.bool}, "bool cannot hold"),
        ],
    )
    def test_wrong_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Categorical(**arguments)

    def test_a_float_must_be_whole(self) -> None:
        spec = Categorical(3, dtype=torch.float32)
        assert spec.is_in(spec.rand((9,)))
        assert not spec.is_in(torch.tensor(0.5))


class TestMultiCategorical:
    def test_values(self) -> None:
        spec = MultiCategorical([2, 3], start=[5, -1])
        assert [set(column) for column in spec.rand((200,)).T.tolist()] == [{5, 6}, {-1, 0, 1}]
        assert spec.nvec.tolist() == [2, 3]
        assert spec.start.tolist() == [5, -1]
        assert not spec.is_in(torch.tensor([7, 0]))
        assert spec.project(torch.tensor([9, -9])).tolist() == [6, -1]
        assert spec[0] == MultiCategorical(2, start=5)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"nvec": [2, 0]}, "n >= 1"),
            ({"nvec": [2, 1.5]}, "integers for nvec"),
            ({"nvec": [2, 3], "shape": (3,)}, "nvec that broadcasts"),
            ({"nvec": [2, 3], "start": [1, 2, 3]}, "start that broadcasts"),
            ({"nvec": [2, 300], "dtype": torch.uint8}, "uint8 cannot hold"),
        ],
    )
    def test_wrong_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            MultiCategorical(**arguments)


class TestOneHot:
    def test_values(self) -> None:
        spec = OneHot(3, start=1)
        assert spec.n == 3
        assert spec.encode([1, 3]).tolist() == [[True, False, False], [False, False, True]]
        assert spec.to_numpy(spec.encode([1, 3])).tolist() == [1, 3]
        assert not spec.is_in(torch.tensor([True, True, False]))
        assert not spec.is_in(spec.zero())
        assert spec.project(torch.tensor([False, True, True])).tolist() == [False, True, False]
        assert "exactly one 1" in spec.differences(spec.zero())[0]
        assert spec.rand((500,)).double().mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.1)

    def test_several(self) -> None:
        spec = MultiOneHot([2, 3])
        assert spec.nvec == [2, 3]
        assert not spec.is_in(torch.tensor([True, True, False, False, False]))
        assert not MultiOneHot([2, 3], dtype=torch.float32).is_in(torch.tensor([1, 0, 0.5, 0.5, 0]))
        scores = torch.tensor([0.1, 0.2, 0.5, 0.3, 0.4])
        assert spec.project(scores).int().tolist() == [0, 1, 1, 0, 0]

    def test_the_last_dim_stays(self) -> None:
        spec = OneHot(3, shape=(2, 3))
        assert spec[0] == OneHot(3)
        assert spec.unsqueeze(1).shape == (2, 1, 3)
        assert spec.reshape(1, 2, 3).shape == (1, 2, 3)
        assert OneHot(1, shape=(1, 1)).squeeze().shape == (1,)
        for wrong in (lambda: OneHot(3)[0], lambda: spec[0, 0], lambda: spec.unsqueeze(-1)):
            with pytest.raises(IndexError):
                wrong()
        with pytest.raises(ValueError, match="cannot reshape"):
            spec.reshape(3, 2)
        with pytest.raises(ValueError, match="cannot expand the last dim"):
            OneHot(1).expand(2)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: OneHot(0), "n >= 1"),
            (lambda: MultiOneHot([]), "n >= 1"),
            (lambda: MultiOneHot(np.array([[2]])), "n >= 1"),
            (lambda: OneHot(3, shape=(4,)), "ends with 3"),
            (lambda: OneHot(3).encode(3), r"integers in \[0, 3\)"),
            (lambda: OneHot(3, start=1).encode([1, 0]), r"\[1, 4\).*found \[1, 0\]"),
            (lambda: MultiOneHot([2, 3]).encode([1, 1, 1]), "integers of shape"),
        ],
    )
    def test_errors(self, make: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make()


class TestBinary:
    def test_values(self) -> None:
        spec = Binary(3)
        assert (spec.n, spec.dtype) == (2, torch.int8)
        assert Binary(shape=()).rand().shape == ()
        assert not spec.is_in(torch.tensor([0, 1, 2], dtype=torch.int8))
        assert not Binary(2, dtype=torch.float32).is_in(torch.tensor([0.0, 0.5]))
        assert spec.project(torch.tensor([-1, 0, 4])).tolist() == [0, 0, 1]

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="needs n or a shape"):
            Binary()
        with pytest.raises(ValueError, match="ends with n=3"):
            Binary(3, shape=(2,))


class TestNonTensor:
    def test_what_is_in(self) -> None:
        spec = NonTensor((2,))
        assert spec.is_in(NonTensorData("a", batch_size=(5, 2)))
        assert spec.is_in(NonTensorStack("a", "b"))
        assert spec.is_in(["a", "b"])
        assert not spec.is_in(NonTensorData("a"))
        assert spec.differences(NonTensorData("a")) == ["expected batch size (*, 2), found ()"]
        assert spec.differences(torch.zeros(2)) == ["expected non-tensor data, found a tensor (2,)"]

    def test_encode(self) -> None:
        assert NonTensor(()).encode(["a", "b"]).data == ["a", "b"]
        each = NonTensor((2,)).encode(["a", "b"])
        assert isinstance(each, NonTensorStack)
        assert NonTensor((2,)).to_numpy(each) == ["a", "b"]
        assert NonTensor((2,)).encode("abc").tolist() == ["abc", "abc"]
        assert NonTensor((2,)).encode(each) is each

    def test_dtype_and_device(self) -> None:
        assert NonTensor().dtype is None
        assert NonTensor().device is None
        assert Composite(text=NonTensor(()), device="meta")["text"].to("cpu").device == torch.device("cpu")
        assert NonTensor().to(torch.float64) == NonTensor()


def nested() -> Composite:
    return Composite({"a": Bounded(0, 1, shape=(3,)), ("b", "c"): Categorical(3), ("b", "d"): None})


class TestComposite:
    def test_construction(self) -> None:
        assert nested() == Composite(a=Bounded(0, 1, shape=(3,)), b={"c": Categorical(3), "d": None})
        assert nested() == Composite(nested())
        assert Composite(a=Composite(), shape=(2,))["a"].shape == (2,)

    def test_keys(self) -> None:
        spec = nested()
        assert list(spec.keys()) == list(spec) == ["a", "b"]
        assert set(spec.keys(True)) == {"a", "b", ("b", "c"), ("b", "d")}
        assert set(spec.keys(True, True)) == {"a", ("b", "c"), ("b", "d")}
        assert list(spec.keys(leaves_only=True)) == ["a"]
        assert dict(spec.items(True, True))["b", "c"] == Categorical(3)
        assert list(spec.values()) == [spec["a"], spec["b"]]
        assert len(spec) == 2
        assert ("b", "c") in spec
        assert ("b", "x") not in spec
        assert 3 not in spec
        assert spec["b", "d"] is None
        assert ("b", "d") in spec

    def test_get_set_delete(self) -> None:
        spec = nested()
        assert spec.get(("b", "c")) == Categorical(3)
        assert spec.get("x", 5) == 5
        assert spec.set(("x", "y", "z"), Binary(2)) is spec
        spec["w"] = Binary(1)
        assert spec["x", "y"] == Composite(z=Binary(2))
        del spec["x", "y", "z"]
        assert spec["x", "y"].is_empty()
        assert spec.pop("w") == Binary(1)
        assert spec.pop("w", None) is None
        with pytest.raises(KeyError, match=r"'e' at \('b',\)"):
            spec["b", "e"]
        with pytest.raises(KeyError, match="found 'nothing'"):
            del spec["nothing"]
        with pytest.raises(KeyError):
            spec.pop("nothing")
        with pytest.raises(TypeError, match="str or a tuple"):
            spec.set(3, Binary(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'n': expected a spec"):
            spec.set("n", 3)

    def test_update_merges(self) -> None:
        spec = nested()
        spec.update({"b": {"e": Binary(2)}, "f": Binary(1)})
        assert set(spec["b"].keys()) == {"c", "d", "e"}
        assert spec.update(Composite(b=Composite(c=Binary(4))))["b", "c"] == Binary(4)

    def test_select_and_exclude(self) -> None:
        spec = nested()
        assert spec.select(("b", "c")) == Composite(b=Composite(c=Categorical(3)))
        assert spec.exclude("a", "x", ("b", "d")) == Composite(b=Composite(c=Categorical(3)))
        assert spec == nested()
        assert spec.select("a", "x", strict=False) == Composite(a=spec["a"])
        with pytest.raises(KeyError, match="'x'"):
            spec.select("x")
        assert spec.expand(2).empty() == Composite(shape=(2,))

    def test_lock(self) -> None:
        spec = nested().lock_()
        assert spec.is_locked
        for change in (
            lambda: spec.set("x", Binary(1)),
            lambda: spec["b"].set("x", Binary(1)),
            lambda: spec.pop("a"),
            lambda: spec.update({}),
            lambda: setattr(spec, "shape", ()),
        ):
            with pytest.raises(RuntimeError, match="Cannot modify a locked Composite"):
                change()
        assert spec == nested()
        for free in (spec.clone(), spec.expand(2), spec.to("cpu")):
            assert not free.is_locked
            free["b"].set("x", Binary(shape=(2, 1)))
        spec.unlock_()
        spec["b"].set("x", Binary(1))

    @pytest.mark.parametrize("key", ["x", ("b", "x")])
    def test_an_entry_starts_with_the_batch_shape(self, key: Any) -> None:
        spec = nested().expand(2, 4)
        with pytest.raises(ValueError, match=r"'x': expected .* starts with \(2, 4\), found \(2, 3\)"):
            spec.set(key, Binary(shape=(2, 3)))
        assert spec == nested().expand(2, 4)
        with pytest.raises(ValueError, match=r"'a': expected .* starts with \(2,\), found \(\)"):
            Composite(a=Categorical(3), shape=(2,))
        with pytest.raises(ValueError, match="starts with"):
            Composite(a=Composite(c=Binary(3)), shape=(2,))

    def test_set_the_shape(self) -> None:
        spec = Composite(a=Binary(shape=(2, 3)), b=Composite(c=Binary(shape=(2, 4))))
        spec.shape = (2,)
        assert spec.batch_size == spec["b"].shape == (2,)
        with pytest.raises(ValueError, match="starts with"):
            spec.shape = (2, 3)
        assert spec.shape == (2,)

    def test_device(self) -> None:
        assert nested().device is None
        with pytest.raises(RuntimeError, match="'a': expected a spec on cpu, found one on meta"):
            Composite(a=Binary(1, device="meta"), device="cpu")
        assert nested().to("meta")["b", "c"].device == torch.device("meta")
        assert Composite(a=Binary(1), device="cpu").rand().device == torch.device("cpu")
        assert nested().to(torch.float64)["b", "c"].dtype == torch.float64
        assert nested().to(None) == nested()

    def test_values(self) -> None:
        spec = nested().expand(2)
        td = spec.rand((5,))
        assert isinstance(td, TensorDict)
        assert td.batch_size == (5, 2)
        assert td["b"].batch_size == (5, 2)
        assert set(td.keys(True, True)) == {"a", ("b", "c")}
        assert spec.is_in(td.set("more", torch.zeros(5, 2)))

    def test_differences_name_the_key(self) -> None:
        spec = nested()
        td = TensorDict({"a": torch.full((4,), 2.0), "b": {"c": torch.tensor(7)}})
        assert not spec.is_in(td)
        assert spec.differences(td) == [
            "'a': expected shape (*, 3), found (4,)",
            "('b', 'c'): expected elements in [0, 2], found 7",
        ]
        assert not spec.is_in(TensorDict({"a": torch.zeros(3)}))
        missing = spec.differences(TensorDict({"a": torch.zeros(3)}))
        assert len(missing) == 1
        assert missing[0].startswith("'b': expected Composite(")
        assert missing[0].endswith("found nothing among the keys ['a']")
        large = Composite(a=Bounded(0, 1, shape=(20,))).differences({"a": torch.arange(20.0)})
        assert large == ["'a': expected elements in [0.0, 1.0], found elements from 0 to 19"]
        with pytest.raises(SpecMismatchError, match="'a': expected shape"):
            spec.assert_is_in(td)

    def test_project_and_encode(self) -> None:
        spec = nested()
        td = TensorDict({"a": torch.full((3,), 2.0), "b": {"c": torch.tensor(7)}, "more": torch.zeros(())})
        fixed = spec.project(td)
        assert spec.is_in(fixed)
        assert "more" in fixed
        assert td["a"].max() == 2
        values = {"a": [0, 1, 1], "b": {"c": np.int64(2)}}
        assert spec.to_numpy(spec.encode(values))["b"]["c"] == 2
        with pytest.raises(KeyError, match=r"expected the key 'b', found \['a'\]"):
            spec.encode({"a": [0, 1, 1]})

    def test_encode_adds_a_missing_last_dim_of_size_one(self) -> None:
        spec = Composite(reward=Unbounded((2, 1)), shape=(2,))
        assert spec.encode({"reward": [1.0, 2.0]})["reward"].tolist() == [[1.0], [2.0]]

    def test_shape_operations_act_on_the_batch(self) -> None:
        spec = Composite(a=Binary(shape=(2, 1, 3)), b=Composite(c=Categorical(3, shape=(2, 1)))).clone()
        spec.shape = (2, 1)
        for changed, batch in (
            (spec.squeeze(), (2,)),
            (spec.unsqueeze(-1), (2, 1, 1)),
            (spec.reshape(1, 2), (1, 2)),
            (spec[:, 0], (2,)),
            (spec[..., 0], (2,)),
            (spec[None], (1, 2, 1)),
            (spec.expand(2, 4), (2, 4)),
            (stack([spec, spec], -1), (2, 1, 2)),
        ):
            assert changed.shape == changed["b"].shape == batch
            assert changed["a"].shape == (*batch, 3)
            assert changed.is_in(changed.rand())
        assert [part.shape for part in spec.unbind(0)] == [(1,), (1,)]

    def test_repr_shows_the_tree(self) -> None:
        assert repr(nested()) == (
            "Composite(\n"
            "    'a': Bounded(low=0.0, high=1.0, shape=(3,), dtype=float32, device=cpu),\n"
            "    'b': Composite(\n"
            "        'c': Categorical(n=3, shape=(), dtype=int64, device=cpu),\n"
            "        'd': None,\n"
            "    shape=(), device=None),\n"
            "shape=(), device=None)"
        )


class TestStacked:
    def test_dense_values_where_shapes_agree(self) -> None:
        spec = stack([Bounded(0, 1, shape=(3,)), Bounded(5, 6, shape=(3,))], 1)
        assert isinstance(spec, Stacked)
        assert (spec.shape, spec.stack_dim, spec.dtype) == ((3, 2), 1, torch.float32)
        value = spec.rand((4,))
        assert value.shape == (4, 3, 2)
        assert bool((value[..., 1] >= 5).all())
        assert spec.is_in(value)
        assert not spec.is_in(value.flip(-1))
        assert spec.project(value * 0).tolist() == [[[0.0, 5.0]] * 3] * 4

    def test_nested_tensors_where_they_differ(self) -> None:
        spec = stack([Bounded(0, 1, shape=(3,)), Bounded(0, 1, shape=(4,))])
        assert spec.shape == (2, -1)
        value = spec.rand()
        assert value.is_nested
        assert spec.is_in(value)
        assert spec.is_in([torch.zeros(3), torch.zeros(4)])
        assert spec.is_in((torch.zeros(9, 3), torch.zeros(9, 4)))
        assert not spec.is_in([torch.zeros(4), torch.zeros(3)])
        assert spec.differences([torch.zeros(3), torch.zeros(3)]) == ["[1] expected shape (*, 4), found (3,)"]
        assert spec.differences([torch.zeros(3)]) == ["expected 2 values along dim 0, found 1"]
        with pytest.raises(ValueError, match=r"shapes \[\(5, 3\), \(5, 4\)\] along dim 1"):
            spec.rand((5,))

    def test_index(self) -> None:
        parts = [Categorical(n, shape=(3,)) for n in (2, 3, 4)]
        spec = stack(parts, 1)
        assert list(spec.unbind(1)) == parts
        assert spec[:, 1] == parts[1]
        assert spec[0, -1] == Categorical(4)
        assert spec[0] == stack([part[0] for part in parts])
        assert spec[..., 1:] == stack(parts[1:], 1)
        assert spec[:, [2, 0]] == stack([parts[2], parts[0]], 1)
        assert spec[:, torch.tensor([True, False, False])] == parts[0].unsqueeze(1)
        assert spec[:, torch.tensor(1)] == parts[1]
        assert len(spec.unbind(0)) == 3
        for wrong in ((slice(None), 3), (0, 0, 0), ([0, 1], [0, 1]), (slice(None), slice(3, None)), (0, [[0]])):
            with pytest.raises(IndexError):
                spec[wrong]

    def test_expand_and_squeeze(self) -> None:
        spec = stack([Categorical(2), Categorical(3)])
        assert spec.expand(4, 2)[1] == spec
        assert spec.unsqueeze(1).shape == (2, 1)
        assert spec.unsqueeze(1).squeeze() == spec
        assert spec.unsqueeze(1).expand(2, 5).rand().shape == (2, 5)
        assert Stacked(Categorical(2)).squeeze() == Categorical(2)
        with pytest.raises(ValueError, match="expand"):
            Stacked(Categorical(2)).expand(4)
        with pytest.raises(NotImplementedError):
            spec.reshape(1, 2)

    def test_different_kinds_and_dtypes(self) -> None:
        spec = stack([Binary(2), Unbounded((2,))])
        assert spec.dtype is None
        assert spec.is_in([torch.zeros(2, dtype=torch.int8), torch.zeros(2)])
        with pytest.raises(ValueError, match=r"dtypes \['int8', 'float32'\]"):
            spec.rand()
        ragged = stack([Binary(2), Unbounded(())])
        assert ragged.shape == (2,)
        assert ragged[1] == Unbounded(())
        text = stack([NonTensor((), example_data="a"), NonTensor((), example_data="b")])
        assert text == NonTensor((2,))

    def test_errors(self) -> None:
        for make, error, message in (
            (lambda: stack([Binary(2), Unbounded(())], 1), ValueError, "dim 1 along which to stack"),
            (lambda: stack([Binary(2), Composite(shape=(2,))]), TypeError, "composites and leaves"),
            (lambda: stack([Binary(2), torch.zeros(2)]), TypeError, "only specs"),
            (lambda: stack([Binary(2), Binary(2, device="meta")]), ValueError, "one device"),
            (lambda: stack([Composite(), Composite(a=Binary(1), shape=())], 1), IndexError, "dim"),
            (lambda: stack([OneHot(2), OneHot(2)], -1), IndexError, "last dim"),
            (lambda: specs.stacked.stack_specs([]), ValueError, "empty list"),
            (lambda: Stacked(), ValueError, "at least one"),
            (lambda: StackedComposite(Composite(shape=(2,)), Composite(shape=(3,))), ValueError, "one shape"),
        ):
            with pytest.raises(error, match=message):
                make()


class TestStackedComposite:
    def make(self) -> Any:
        first = Composite({"a": Bounded(0, 1, shape=(3,)), "c": Binary(2), ("n", "x"): Categorical(2)})
        second = Composite({"a": Bounded(0, 1, shape=(4,)), "d": Binary(2), ("n", "x"): Categorical(2)})
        return stack([first, second])

    def test_keys_that_all_have(self) -> None:
        spec = self.make()
        assert isinstance(spec, Composite)
        assert set(spec.keys(True)) == {"a", "n", ("n", "x")}
        assert spec["a"].shape == (2, -1)
        assert spec["n", "x"] == Categorical(2, shape=(2,))
        assert "c" not in spec
        assert "d" in spec[1]
        with pytest.raises(KeyError, match="'c'"):
            spec["c"]

    def test_values_are_lazy_stacks(self) -> None:
        spec = self.make().expand(3, 2)
        assert spec.stack_dim == 1
        td = spec.rand((5,))
        assert isinstance(td, LazyStackedTensorDict)
        assert td.batch_size == (5, 3, 2)
        assert td[:, 1, 0]["a"].shape == (5, 3)
        assert "d" in td[0, 0, 1]
        assert spec.is_in(td)
        assert not spec.is_in(td.exclude("a"))
        assert spec.differences(td[..., 0]) != []
        assert spec.differences(TensorDict({})) != []

    def test_differences_name_index_and_key(self) -> None:
        spec = self.make()
        td = spec.zero()
        td[1]["n", "x"].fill_(9)
        assert spec.differences(td) == ["[1] ('n', 'x'): expected elements in [0, 1], found 9"]

    def test_changes_reach_all(self) -> None:
        spec = self.make()
        spec["done"] = Categorical(2, shape=(2, 1), dtype=torch.bool)
        spec["n", "y"] = stack([Binary(2), Binary(3)])
        assert spec[0]["done"] == Categorical(2, shape=(1,), dtype=torch.bool)
        assert spec[1]["n", "y"] == Binary(3)
        del spec["n", "x"]
        assert ("n", "x") not in spec[0]
        assert spec.pop("done").shape == (2, 1)
        spec["nothing"] = None
        assert spec["nothing"] is None
        with pytest.raises(ValueError, match="starts with"):
            spec["z"] = Binary(3)

    def test_select_exclude_empty_lock(self) -> None:
        spec = self.make()
        assert list(spec.select("a").keys()) == ["a"]
        assert spec.exclude("a", "c", "d") == Composite({("n", "x"): Categorical(2)}).expand(2)
        assert spec.empty() == Composite(shape=(2,))
        assert spec.lock_().is_locked
        with pytest.raises(RuntimeError, match="locked"):
            spec["z"] = Binary(shape=(2, 1))
        assert not spec.clone().is_locked
        assert not spec.unlock_().is_locked

    def test_index(self) -> None:
        spec = self.make().expand(3, 2)
        assert spec[:, 0] == self.make()[0].expand(3)
        assert spec[0] == self.make()
        assert spec[1:, [1]] == self.make()[1].expand(2, 1)
        assert spec.to("meta").device == torch.device("meta")

    def test_inside_a_composite(self) -> None:
        spec = Composite(agents=self.make(), done=Binary(1))
        assert ("agents", "n", "x") in spec.keys(True, True)
        assert spec.is_in(spec.rand())
        wide = spec.expand(4)
        assert wide["agents"].shape == (4, 2)
        assert wide[0] == spec
        assert wide.is_in(wide.rand((2,)))


class TestAgainstTorchRL:
    """TorchRL's own specs as the oracle for shapes, dtypes and what is in."""

    CASES: tuple[tuple[str, dict[str, Any]], ...] = (
        ("Bounded", {"low": -1, "high": 1, "shape": (3,)}),
        ("Bounded", {"low": 0, "high": 255, "shape": (2, 2), "dtype": torch.uint8}),
        ("Unbounded", {"shape": (2,), "dtype": torch.int64}),
        ("Unbounded", {}),
        ("Categorical", {"n": 4}),
        ("Categorical", {"n": 2, "shape": (1,), "dtype": torch.bool}),
        ("MultiCategorical", {"nvec": [2, 3]}),
        ("MultiCategorical", {"nvec": [2, 3], "shape": (4, 2)}),
        ("OneHot", {"n": 3}),
        ("MultiOneHot", {"nvec": [2, 3]}),
        ("Binary", {"n": 3}),
        ("Binary", {"shape": (2, 3)}),
        ("NonTensor", {"shape": (2,), "example_data": "a"}),
    )

    @pytest.mark.filterwarnings("default")
    def test_same_verdicts(self) -> None:
        theirs_module = pytest.importorskip("torchrl.data")
        for name, arguments in self.CASES:
            ours, theirs = getattr(specs, name)(**arguments), getattr(theirs_module, name)(**arguments)
            for a, b in ((ours, theirs), (self.wide(ours), self.wide(theirs))):
                assert (a.shape, a.device) == (b.shape, b.device), name
                for make in ("rand", "zero", "one"):
                    value, other = getattr(a, make)((2,)), getattr(b, make)((2,))
                    assert value.shape == other.shape, name
                    if name == "NonTensor":
                        assert value.tolist() == other.tolist()
                        continue
                    assert value.dtype == other.dtype, name
                    opposite = (1 - other.to(torch.int64)).to(value.dtype)
                    for candidate in (value, other, opposite, value.to(torch.float64)):
                        assert a.is_in(candidate) == bool(b.is_in(candidate)), (name, make, candidate)

    @staticmethod
    def wide(spec: Any) -> Any:
        return spec.expand(2, *spec.shape)

    @pytest.mark.filterwarnings("default")
    def test_same_trees(self) -> None:
        theirs = pytest.importorskip("torchrl.data")
        trees = []
        for module in (specs, theirs):
            leaf = {"a": module.Bounded(0, 1, shape=(3,)), "b": module.Composite(c=module.Binary(2))}
            trees.append(module.Composite(leaf).expand(4))
        ours, other = trees
        assert set(ours.keys(True)) == set(other.keys(True))
        assert set(ours.keys(True, True)) == set(other.keys(True, True))
        for key in ours.keys(True):
            assert ours[key].shape == other[key].shape
        assert other.is_in(ours.rand((2,)))
        assert ours.is_in(other.rand((2,)))
        assert ours[1:3, None].shape == other[1:3, None].shape
