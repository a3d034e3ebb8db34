"""Specs of TorchRL as ours and back, and ours as TorchRL's: nothing is lost, whatever the kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import TORCHRL_MARKS
from torchrl_envs import data

from aioenvs import specs as own
from aioenvs.integrations.torchrl import from_torchrl, to_torchrl
from aioenvs.integrations.torchrl.specs import Foreign

pytestmark = list(TORCHRL_MARKS)
MASK = torch.tensor([True, False, True])


class Mine(data.OneHot):
    """A spec of the user's own."""


THEIRS: dict[str, Callable[[], Any]] = {
    "bounded": lambda: data.Bounded(-1, 1, (3,)),
    "bounded each": lambda: data.Bounded(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])),
    "bounded bytes": lambda: data.Bounded(0, 255, (4, 8, 8), dtype=torch.uint8),
    "bounded double": lambda: data.Bounded(-1, 1, (3,), dtype=torch.float64),
    "bounded half": lambda: data.Bounded(-1, 1, (3,), dtype=torch.float16),
    "bounded integers": lambda: data.Bounded(-2, 5, (2,), dtype=torch.int32),
    "bounded varying": lambda: data.Bounded(-1, 1, (-1, 3)),
    "unbounded": lambda: data.Unbounded((3,)),
    "unbounded scalar": lambda: data.Unbounded((), dtype=torch.int64),
    "unbounded bool": lambda: data.Unbounded((2,), dtype=torch.bool),
    "unbounded varying": lambda: data.Unbounded((-1, 2), dtype=torch.float64),
    "categorical": lambda: data.Categorical(4),
    "categorical bool": lambda: data.Categorical(2, (1,), dtype=torch.bool),
    "categorical masked": lambda: data.Categorical(3, (2,), mask=MASK),
    "one-hot": lambda: data.OneHot(3),
    "one-hot masked": lambda: data.OneHot(3, (2, 3), dtype=torch.int64, mask=MASK),
    "multi-one-hot": lambda: data.MultiOneHot([2, 3]),
    "multi-one-hot batch": lambda: data.MultiOneHot([2, 3], (4, 5), dtype=torch.int64),
    "multi-categorical": lambda: data.MultiCategorical([2, 3]),
    "multi-categorical each": lambda: data.MultiCategorical(torch.tensor([[2, 3], [4, 5]]), (2, 2)),
    "binary": lambda: data.Binary(4),
    "binary batch": lambda: data.Binary(4, (2, 4), dtype=torch.bool),
    "non-tensor": lambda: data.NonTensor(()),
    "non-tensor text": lambda: data.NonTensor((2,), example_data="go left"),
    "non-tensor batched": lambda: data.NonTensor((2,), example_data="go left", batched=True),
    "composite": lambda: data.Composite(
        a=data.Bounded(0, 1, (2, 3)),
        b=data.Composite(c=data.Categorical(3, (2,)), d=None, shape=(2,)),
        shape=(2,),
        device="cpu",
    ),
    "composite named": lambda: data.Composite(a=data.Bounded(0, 1, (2, 3)), shape=(2,), names=["time"]),
    "stacked composite": lambda: torch.stack(
        [
            data.Composite(a=data.Bounded(0, 1, (2,))),
            data.Composite(a=data.Bounded(0, 1, (3,)), b=data.Unbounded(())),
        ]
    ),
    "stacked": lambda: torch.stack([data.Bounded(0, 1, (2,)), data.Bounded(0, 1, (3,))]),
}
FOREIGN: dict[str, Callable[[], Any]] = {
    "choice": lambda: data.Choice([data.Bounded(0, 1, (2,)), data.Bounded(2, 3, (2,))]),
    "another domain": lambda: data.Bounded(0, 1, (), dtype=torch.int64, domain="continuous"),
    "any number": lambda: data.Categorical(-1),
    "register": lambda: data.OneHot(3, use_register=True),
    "a class of the user's": lambda: Mine(3),
}
OURS: dict[str, Callable[[], own.TensorSpec]] = {
    "bounded": lambda: own.Bounded(-1, 1, (3,)),
    "unbounded": lambda: own.Unbounded((2,), dtype=torch.int64),
    "categorical": lambda: own.Categorical(4, (2,), mask=[[True, False, True, True]] * 2),
    "one-hot": lambda: own.OneHot(4),
    "multi-one-hot": lambda: own.MultiOneHot([2, 3], (4, 5)),
    "multi-categorical": lambda: own.MultiCategorical([2, 3], (4, 2)),
    "binary": lambda: own.Binary(3),
    "non-tensor": lambda: own.NonTensor((2,), example_data="x"),
    "composite": lambda: own.Composite(a=own.Composite(b=own.OneHot(3, (2, 3)), shape=(2,)), c=None, shape=(2,)),
    "stacked": lambda: torch.stack([own.Composite(a=own.Bounded(0, 1, (n,))) for n in (2, 3)]),
}


@pytest.mark.parametrize("name", [*THEIRS, *FOREIGN])
def test_there_and_back(name: str) -> None:
    spec = (THEIRS | FOREIGN)[name]()
    converted = from_torchrl(spec)
    back = to_torchrl(converted)
    assert type(back) is type(spec)
    assert bool(back == spec)
    assert (converted.shape, converted.device) == (spec.shape, spec.device)
    assert converted.dtype == spec.dtype or isinstance(converted, own.Composite)


@pytest.mark.parametrize("name", THEIRS)
def test_only_what_has_no_equal_stays_itself(name: str) -> None:
    converted = from_torchrl(THEIRS[name]())
    assert not isinstance(converted, Foreign)
    assert type(converted).__name__ in type(THEIRS[name]()).__name__


@pytest.mark.parametrize("name", OURS)
def test_ours_there_and_back(name: str) -> None:
    spec = OURS[name]()
    assert from_torchrl(to_torchrl(spec)) == spec


@pytest.mark.parametrize("name", [name for name in THEIRS if "varying" not in name and name != "stacked"])
def test_values_of_one_are_values_of_the_other(name: str) -> None:
    spec = THEIRS[name]()
    converted = from_torchrl(spec)
    for draw in (spec.rand, converted.rand):
        value = draw()
        assert converted.is_in(value)
        assert spec.is_in(value)


@pytest.mark.parametrize("spec", [own.Categorical(3, start=5), own.MultiCategorical([2, 3], start=[4, 7])], ids=str)
def test_integers_that_begin_elsewhere(spec: own.TensorSpec) -> None:
    converted = to_torchrl(spec)
    assert isinstance(converted, data.Bounded)
    assert (converted.shape, converted.dtype) == (spec.shape, spec.dtype)
    for _ in range(20):
        assert spec.is_in(converted.rand())
        assert converted.is_in(spec.rand())


def test_an_example_that_cannot_be_compared() -> None:
    spec = data.NonTensor((2,), example_data=np.zeros(3))
    assert isinstance(from_torchrl(spec), own.NonTensor)


def test_a_spec_that_stays_itself_does_what_specs_do() -> None:
    spec = from_torchrl(FOREIGN["choice"]())
    assert spec.rand().shape == (2,)
    assert spec.zero().tolist() == [0.0, 0.0]
    assert spec.is_in(torch.tensor([2.5, 2.5]))
    assert not spec.is_in(torch.tensor([1.5, 2.5]))
    assert spec.differences(torch.tensor([1.5, 2.5])) != []
    assert spec.expand(4, 2).shape == (4, 2)
    assert spec == spec.clone() == copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec))
    assert spec != from_torchrl(FOREIGN["any number"]())
    assert spec.to("cpu").device == torch.device("cpu")
    assert "Choice" in repr(spec)
    with pytest.raises(TypeError, match="float32"):
        spec.type_check(torch.zeros(2, dtype=torch.int64))
    many = own.Composite(a=spec).expand(3)
    assert many["a"].shape == (3, 2)
    assert many.is_in(many.rand())
