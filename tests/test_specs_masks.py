"""Masks, conversions between integers and one-hot, and the listing of values."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

from aioenvs.errors import SpecMismatchError
from aioenvs.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, NonTensor, OneHot
from aioenvs.specs import Unbounded as UnboundedSpec

# Of five values, three are allowed: 0 of the first two, 0 and 2 of the other three.
ROW = torch.tensor([True, False, True, False, True])
MASKED: dict[str, Any] = {
    "categorical": lambda: Categorical(5, mask=ROW),
    "categorical-start": lambda: Categorical(5, (2,), start=-2, mask=ROW),
    "categorical-each": lambda: Categorical(5, (2,), mask=torch.stack([ROW, ~ROW])),
    "categorical-float": lambda: Categorical(5, (2, 3), dtype=torch.float32, mask=ROW),
    "one-hot": lambda: OneHot(5, mask=ROW),
    "one-hot-batch": lambda: OneHot(5, (3, 5), dtype=torch.float32, mask=ROW),
    "one-hot-each": lambda: OneHot(5, (2, 5), mask=torch.stack([ROW, ~ROW])),
    "multi-categorical": lambda: MultiCategorical([2, 3], mask=ROW),
    "multi-categorical-batch": lambda: MultiCategorical([2, 3], (4, 2), mask=ROW, start=[1, -1]),
    "multi-one-hot": lambda: MultiOneHot([2, 3], mask=ROW),
    "multi-one-hot-batch": lambda: MultiOneHot([2, 3], (4, 5), mask=ROW, dtype=torch.int64),
}
masked = pytest.mark.parametrize("make", MASKED.values(), ids=MASKED)


@masked
class TestMasks:
    def test_what_is_drawn_is_allowed(self, make: Any) -> None:
        spec, free = make(), make()
        free.update_mask(None)
        values = spec.rand((40,))
        assert values.shape == (40, *spec.shape)
        assert spec.is_in(values)
        assert not spec.is_in(free.rand((400,)))
        assert free.is_in(values)
        assert spec.rand((0,)).shape == (0, *spec.shape)
        assert free.mask is None
        assert free != spec

    def test_project_gives_what_is_allowed(self, make: Any) -> None:
        spec, free = make(), make()
        free.update_mask(None)
        values = free.rand((50,))
        projected = spec.project(values)
        assert spec.is_in(projected)
        assert projected.dtype == spec.dtype
        inside = spec.rand((50,))
        assert torch.equal(spec.project(inside), inside)

    def test_the_mask_follows_the_shape(self, make: Any) -> None:
        spec = make()
        wide = spec.expand(3, *spec.shape)
        assert wide.mask.shape == (3, *spec.mask.shape)
        assert torch.equal(wide[1].mask, spec.mask)
        assert torch.equal(torch.stack([spec, spec.clone()])[0].mask, spec.mask)
        assert torch.equal(wide.unsqueeze(0).squeeze(0).mask, wide.mask)
        assert wide.is_in(wide.rand((2,)))
        assert spec.expand(3, 0, *spec.shape).rand().shape == (3, 0, *spec.shape)

    def test_copies_are_equal_and_apart(self, make: Any) -> None:
        spec = make()
        for other in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
            assert other == spec
            other.update_mask(None)
            assert other != spec
            assert spec.mask is not None

    def test_the_mask_is_a_copy(self, make: Any) -> None:
        spec = make()
        mask = spec.mask.clone()
        spec.update_mask(mask)
        mask[:] = False
        assert spec.is_in(spec.rand((9,)))

    def test_a_mask_that_allows_nothing_fails_when_it_is_used(self, make: Any) -> None:
        spec = make()
        inside = spec.rand()
        spec.update_mask(torch.zeros_like(spec.mask))
        assert not spec.is_in(inside)
        for use in (spec.rand, lambda: spec.project(inside)):
            with pytest.raises(ValueError, match="allows no value"):
                use()

    @pytest.mark.parametrize("wrong", [[True] * 3, [[[True] * 5] * 7] * 9, [2, 0, 1, 0, 1], [0.5] * 5])
    def test_wrong_masks(self, make: Any, wrong: Any) -> None:
        spec = make()
        with pytest.raises(ValueError, match="expected a bool mask of shape"):
            spec.update_mask(torch.tensor(wrong))
        assert spec == make()

    def test_masks_of_zeros_and_ones(self, make: Any) -> None:
        spec = make()
        spec.update_mask(spec.mask.int().numpy())
        assert spec == make()

    def test_conversion_keeps_the_mask(self, make: Any) -> None:
        spec = make()
        hot, integers = spec.to_one_hot_spec(), spec.to_categorical_spec()
        value = spec.rand((6,))
        if isinstance(spec, OneHot):
            assert hot is spec
            assert integers.is_in(spec.to_categorical(value))
            assert torch.equal(integers.to_one_hot(spec.to_categorical(value)).to(spec.dtype), value)
            assert spec.to_one_hot(value) is value
        else:
            assert integers is spec
            assert hot.is_in(spec.to_one_hot(value))
            assert torch.equal(hot.to_categorical(spec.to_one_hot(value)).to(spec.dtype), value)
            assert spec.to_categorical(value) is value

    def test_enumerate(self, make: Any) -> None:
        spec = make()
        values = spec.enumerate()
        assert len(values) == spec.cardinality()
        assert len({tuple(value.flatten().tolist()) for value in values}) == len(values)
        assert values.shape[1:] == spec.shape
        assert values.dtype == spec.dtype
        if len(spec.mask.reshape(-1, 5).unique(dim=0)) > 1:
            with pytest.raises(ValueError, match="the same mask"):
                spec.enumerate(use_mask=True)
            return
        allowed = spec.enumerate(use_mask=True)
        assert [spec.is_in(value) for value in values].count(True) == len(allowed) > 0
        assert all(spec.is_in(value) for value in allowed)


def test_all_that_is_allowed_is_drawn() -> None:
    assert set(Categorical(5, mask=ROW).rand((200,)).tolist()) == {0, 2, 4}
    assert set(OneHot(5, mask=ROW).rand((200,)).int().argmax(-1).tolist()) == {0, 2, 4}
    pairs = {tuple(pair) for pair in MultiCategorical([2, 3], mask=ROW).rand((200,)).tolist()}
    assert pairs == {(0, 0), (0, 2)}
    assert {tuple(row) for row in MultiOneHot([2, 3], mask=ROW).rand((200,)).int().tolist()} == {
        (1, 0, 1, 0, 0),
        (1, 0, 0, 0, 1),
    }


class TestConversions:
    def test_values(self) -> None:
        assert Categorical(3).to_one_hot(torch.tensor([0, 2])).tolist() == [[True, False, False], [False, False, True]]
        assert Categorical(3, start=4).to_one_hot(torch.tensor(5)).tolist() == [False, True, False]
        assert OneHot(3, start=4).to_categorical(torch.tensor([False, True, False])) == 5
        assert MultiCategorical([2, 3]).to_one_hot(torch.tensor([1, 2])).int().tolist() == [0, 1, 0, 0, 1]
        assert MultiOneHot([2, 3]).to_categorical(torch.tensor([0, 1, 0, 0, 1])).tolist() == [1, 2]

    def test_specs(self) -> None:
        assert Categorical(3, (2,)).to_one_hot_spec() == OneHot(3, (2, 3))
        assert OneHot(3, (2, 3)).to_categorical_spec() == Categorical(3, (2,))
        assert MultiCategorical([2, 3], (4, 2)).to_one_hot_spec() == MultiOneHot([2, 3], (4, 5))
        assert MultiOneHot([2, 3], (4, 5)).to_categorical_spec() == MultiCategorical([2, 3], (4, 2))
        assert Categorical(2, (1,), dtype=torch.bool).to_one_hot_spec() == OneHot(2, (1, 2))

    def test_safe(self) -> None:
        outside = torch.tensor([True, True, False])
        assert OneHot(3).to_categorical(outside) == 0
        for convert in (OneHot(3).to_categorical, OneHot(3).to_one_hot, OneHot(3).to_numpy):
            with pytest.raises(SpecMismatchError, match="exactly one 1"):
                convert(outside, safe=True)
        for spec in (Categorical(3), Categorical(3, mask=[True, True, False])):
            with pytest.raises(SpecMismatchError):
                spec.to_one_hot(torch.tensor(3), safe=True)
        with pytest.raises(ValueError, match=r"integers in \[0, 3\)"):
            Categorical(3).to_one_hot(torch.tensor(3))
        with pytest.raises(SpecMismatchError):
            MultiCategorical([2, 2]).to_categorical(torch.tensor([2, 0]), safe=True)

    def test_rows_that_differ_cannot_be_one_hot(self) -> None:
        spec = MultiCategorical([[2, 3], [4, 5]])
        assert spec.cardinality() == 120
        for use in (spec.to_one_hot_spec, lambda: spec.update_mask(ROW)):
            with pytest.raises(ValueError, match="the same nvec for all rows"):
                use()
        with pytest.raises(ValueError, match="the same start"):
            MultiCategorical([[2, 3]] * 2, start=[[0, 1], [2, 3]]).to_one_hot_spec()


class TestCardinality:
    def test_numbers(self) -> None:
        # The batch dims do not count, as in TorchRL.
        assert Categorical(4, (2,)).cardinality() == 4
        assert OneHot(3, (2, 3)).cardinality() == 3
        assert MultiCategorical([2, 3], (4, 2)).cardinality() == MultiOneHot([2, 3]).cardinality() == 6
        assert Binary(3).cardinality() == 2
        assert Bounded(0, 1, (2,)).cardinality() == math.inf
        assert Composite(a=Categorical(4), b=Composite(c=OneHot(3)), d=None).cardinality() == 12

    def test_lists(self) -> None:
        assert Categorical(3, start=1).enumerate().tolist() == [1, 2, 3]
        assert Categorical(2, (2,)).enumerate().tolist() == [[0, 0], [1, 1]]
        assert OneHot(2).enumerate().tolist() == [[True, False], [False, True]]
        assert MultiCategorical([2, 2], start=[0, 5]).enumerate().tolist() == [[0, 5], [0, 6], [1, 5], [1, 6]]
        assert Binary(2).enumerate().tolist() == [[0, 0], [1, 1]]

    def test_composite(self) -> None:
        spec = Composite(a=Categorical(2, (3,)), b=Composite(c=OneHot(3, (3, 3)), shape=(3,)), d=None, shape=(3,))
        every = spec.enumerate()
        assert every.batch_size == (6, 3)
        assert spec.is_in(every)
        pairs = {(int(row["a"][0]), int(row["b", "c"][0].int().argmax())) for row in every}
        assert len(pairs) == 6
        masked = Composite(a=Categorical(2, mask=[True, False]), b=Categorical(3))
        assert masked.enumerate(use_mask=True)["a"].tolist() == [0, 0, 0]
        assert Composite().enumerate().batch_size == (1,)

    @pytest.mark.parametrize(
        "spec",
        [UnboundedSpec(), NonTensor(), torch.stack([Categorical(2), Categorical(3)])],  # type: ignore[list-item]
        ids=["unbounded", "non-tensor", "stacked"],
    )
    def test_of_specs_without_a_number(self, spec: Any) -> None:
        for use in (spec.cardinality, spec.enumerate):
            with pytest.raises(NotImplementedError, match=type(spec).__name__):
                use()
        with pytest.raises(NotImplementedError):
            Bounded(0, 1, (2,)).enumerate()
