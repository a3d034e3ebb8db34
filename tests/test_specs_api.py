"""What TorchRL's specs offer besides: other names, more shape operations, names of dims, inference from data."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

from aioenvs.errors import SpecMismatchError
from aioenvs.specs import (
    Binary,
    Bounded,
    BoundedContinuous,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
    make_composite_from_td,
)

stack: Any = torch.stack  # typed for tensors only
META = torch.device("meta")


def hetero() -> Any:
    """Two composites with entries of different shapes, and entries that the other has not."""
    first = Composite({"a": Bounded(0, 1, shape=(3,)), "c": Binary(2), ("n", "x"): Categorical(2)})
    second = Composite({"a": Bounded(0, 1, shape=(4,)), "d": Binary(2), ("n", "x"): Categorical(2)})
    return stack([first, second])


class TestConstructors:
    """The arguments of TorchRL's constructors, by position too."""

    @pytest.mark.parametrize(
        ("made", "expected"),
        [
            (Categorical(4, (2,), META, torch.int32), Categorical(4, (2,), device=META, dtype=torch.int32)),
            (Categorical(4, None, None, None, None), Categorical(4)),
            (Categorical(4, (2,), torch.int32, META), Categorical(4, (2,), device=META, dtype=torch.int32)),
            (Categorical(4, (2,), torch.int32, device=META), Categorical(4, (2,), device=META, dtype=torch.int32)),
            (Categorical(4, (), None, torch.int32, [True] * 4), Categorical(4, dtype=torch.int32, mask=[True] * 4)),
            (Bounded(0, 1, (2,), META, torch.float64), Bounded(0, 1, (2,), device=META, dtype=torch.float64)),
            (Bounded(0, 1, (2,), torch.float64), Bounded(0, 1, (2,), dtype=torch.float64)),
            (Unbounded((2,), META, torch.int64), Unbounded((2,), device=META, dtype=torch.int64)),
            (Unbounded((2,), "cpu", dtype=None), Unbounded((2,))),
            (Binary(2, (2,), META, torch.bool), Binary(2, device=META, dtype=torch.bool)),
            (OneHot(2, None, META, torch.int64), OneHot(2, device=META, dtype=torch.int64)),
            (MultiOneHot([2], None, META, torch.int64), MultiOneHot([2], device=META, dtype=torch.int64)),
            (MultiCategorical([2], (1,), META, torch.int32), MultiCategorical([2], device=META, dtype=torch.int32)),
            (Composite({"a": Binary(2)}, batch_size=()), Composite(a=Binary(2), shape=None)),
            (NonTensor((2,), META, None, "a"), NonTensor((2,), device=META)),
        ],
        ids=repr,
    )
    def test_positions(self, made: Any, expected: Any) -> None:
        assert made == expected

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: Categorical(4, dtype="int32"), TypeError, "expected a torch.dtype"),  # type: ignore[arg-type]
            (lambda: OneHot(4, use_register=True), NotImplementedError, "use_register"),
            (lambda: Composite(Binary(2)), TypeError, "expected a mapping of specs"),  # type: ignore[arg-type]
            (lambda: Composite(shape=(2,), batch_size=(2,)), TypeError, "found both"),
            (lambda: NonTensor(dtype=torch.int64), ValueError, "no dtype"),  # type: ignore[arg-type]
            (lambda: NonTensor((2,), feature_dims=2), ValueError, r"feature_dims in \[0, 1\]"),
            (lambda: Composite(names=["a"]), ValueError, "expected 0 names"),
        ],
    )
    def test_errors(self, make: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            make()

    def test_kinds_by_dtype(self) -> None:
        assert isinstance(Unbounded((2,)), UnboundedContinuous)
        assert not isinstance(Unbounded((2,), dtype=torch.int64), UnboundedContinuous)
        assert isinstance(Unbounded((2,), dtype=torch.int64), UnboundedDiscrete)
        assert isinstance(Bounded(0, 1, (2,)), BoundedContinuous)
        assert not isinstance(Bounded(0, 1, (2,), dtype=torch.uint8), BoundedContinuous)
        assert not isinstance(Binary(2), UnboundedDiscrete)
        assert UnboundedDiscrete((2,)) == Unbounded((2,), dtype=torch.int64)
        assert UnboundedDiscrete((2,), dtype=torch.uint8) == Unbounded((2,), dtype=torch.uint8)
        assert UnboundedContinuous() == Unbounded()
        assert BoundedContinuous(0, 1, (2,)) == Bounded(0, 1, (2,))
        assert pickle.loads(pickle.dumps(UnboundedDiscrete())) == UnboundedDiscrete()

    def test_kinds_of_torchrl(self) -> None:
        assert isinstance(MultiOneHot([2]), OneHot)
        assert not isinstance(OneHot(2), MultiOneHot)
        assert isinstance(MultiCategorical([2]), Categorical)
        assert isinstance(Binary(2), Categorical)
        assert not isinstance(Categorical(2), Binary | MultiCategorical)


class TestOtherNames:
    def test_values(self) -> None:
        for spec in (Bounded(0, 1, (3,)), Composite(a=Binary(2)), hetero(), NonTensor((2,))):
            for shape in ((2,), None, []):
                assert spec.sample(shape).shape == spec.zeros(shape).shape == spec.ones(shape).shape
                assert spec.contains(spec.rand(shape))
            assert spec.ndimension() == spec.ndim == len(spec.shape)
            assert spec.cpu() == spec.to("cpu")
            assert spec.to(None) == spec

    def test_domain(self) -> None:
        assert [s.domain for s in (Bounded(0, 1, (1,)), Unbounded(), Categorical(2), OneHot(2), Binary(2))] == [
            "continuous",
            "continuous",
            *["discrete"] * 3,
        ]
        assert Bounded(0, 1, (1,), dtype=torch.uint8).domain == Unbounded(dtype=torch.int64).domain == "discrete"
        assert (Composite().domain, hetero().domain, NonTensor().domain) == ("composite", "composite", None)

    def test_space(self) -> None:
        bounded, binary = Bounded(-1, 1, (2,)), Binary(2)
        assert bounded.space is bounded
        assert binary.space is binary
        assert Composite().space is None
        assert NonTensor().space is None
        assert Unbounded((2,)).space.high.tolist() == [torch.finfo(torch.float32).max] * 2
        assert Unbounded((), dtype=torch.uint8).space.low == 0
        assert Unbounded((-1, 2), dtype=torch.bool).space.high.tolist() == [[True, True]]

    def test_bounds_can_be_replaced(self) -> None:
        spec = Bounded(-1, 1, (2,))
        wide = spec.expand(3, 2)
        spec.space.low = torch.tensor([-3.0, 0.0])
        spec.high = 5
        assert spec == Bounded([-3, 0], [5, 5])
        assert wide == Bounded(-1, 1, (3, 2))
        assert spec.is_in(torch.tensor([-2.0, 3.0]))
        for wrong, message in ((9, "low <= high"), ([0, 0, 0], "low that broadcasts")):
            with pytest.raises(ValueError, match=message):
                spec.low = torch.tensor(wrong)
        assert spec == Bounded([-3, 0], [5, 5])

    def test_type_check(self) -> None:
        for spec in (Categorical(4), hetero(), stack([Categorical(2), Categorical(3)]), Composite(a=Binary(2), b=None)):
            assert spec.type_check(spec.rand()) is None
        with pytest.raises(TypeError, match=r"expected dtype int64 .* found torch.float32"):
            Categorical(4).type_check(torch.tensor(1.0))
        composite = Composite({"a": Binary(2), ("n", "x"): Categorical(2)})
        wrong = {"a": torch.zeros(2), "n": {"x": torch.tensor(0)}}
        for check in (
            lambda: composite.type_check(wrong),
            lambda: composite.type_check(wrong, ["a"]),
            lambda: composite.type_check(torch.zeros(2), "a"),
        ):
            with pytest.raises(TypeError, match="'a': expected dtype int8"):
                check()
        assert composite.type_check(wrong, "n") is None
        with pytest.raises(TypeError, match="non-tensor"):
            NonTensor().type_check(torch.zeros(1))
        with pytest.raises(TypeError, match="int64"):
            hetero().type_check(lazy_stack([TensorDict({**hetero()[i].rand(), "n": {"x": 0.5}}) for i in range(2)]))

    def test_safe_to_numpy(self) -> None:
        for spec in (Categorical(2), Composite(a=Categorical(2)), stack([Categorical(2), Categorical(3)])):
            wrong = spec.zero() + 7
            assert spec.to_numpy(wrong) is not None
            with pytest.raises(SpecMismatchError):
                spec.to_numpy(wrong, safe=True)

    def test_encode_on_the_cpu(self) -> None:
        spec = Composite(a=Bounded(0, 1, (2,), META), b=OneHot(3, device=META), t=NonTensor(()), device=META)
        there = spec.encode({"a": [0, 1], "b": 1, "t": "x"}, ignore_device=True)
        assert there["a"].tolist() == [0.0, 1.0]
        assert there["b"].tolist() == [False, True, False]
        assert spec["a"].encode([0, 1]).device == META


class TestShapes:
    @pytest.mark.parametrize(
        "spec",
        [
            Bounded(np.zeros((2, 3)), np.arange(6).reshape(2, 3) + 1.0).unsqueeze(-1),
            Categorical(3, (2, 3, 1), mask=[True, False, True]),
            OneHot(3, (2, 3, 1, 3), mask=[True, False, True]),
            Composite(
                a=Binary(shape=(2, 3, 1, 4)), b=Composite(c=Unbounded((2, 3, 1)), shape=(2, 3, 1)), shape=(2, 3, 1)
            ),
            NonTensor((2, 3, 1)),
        ],
        ids=lambda spec: type(spec).__name__,
    )
    def test_view_flatten_unflatten(self, spec: Any) -> None:
        event = spec.shape[3:]
        assert spec.flatten(0, 1).shape == (6, 1, *event)
        assert spec.flatten(0, 1).unflatten(0, (2, 3)) == spec
        assert spec.flatten(0, 1).unflatten(0, (2, -1)) == spec
        assert spec.view(-1, 1, 1, *event).shape == (6, 1, 1, *event)
        assert spec.view((3, 2, *event)).is_in(spec.view(3, 2, *event).rand())
        assert torch.squeeze(spec, 2).shape == (2, 3, *event)
        assert torch.unsqueeze(spec, 0)[0] == spec
        assert torch.unsqueeze(input=spec, dim=0) == spec.unsqueeze(0)
        assert torch.index_select(spec, 1, torch.tensor([0, 2])) == spec[:, [0, 2]]
        if not event:
            assert spec.flatten().shape == (6,)
        for wrong in (lambda: spec.flatten(1, 0), lambda: spec.unflatten(0, (3, -1)), lambda: spec.view(-1, -1)):
            with pytest.raises(ValueError, match=r"expected start_dim|cannot reshape"):
                wrong()

    def test_a_size_that_varies(self) -> None:
        spec = Composite(a=Bounded([[0, 1]] * 3, [[1, 2]] * 3), b=OneHot(2, (3, 2)), shape=(3,)).make_neg_dim(0)
        assert (spec.shape, spec["a"].shape, spec["b"].shape) == ((-1,), (-1, 2), (-1, 2))
        assert spec.is_in(TensorDict({"a": torch.ones(7, 2), "b": OneHot(2).rand((7,))}, [7]))
        with pytest.raises(ValueError, match="what is allowed differs"):
            Categorical(2, (2,), mask=[[True, False], [True] * 2]).make_neg_dim(0)
        with pytest.raises(ValueError, match="what is allowed differs"):
            Bounded([0, 1], [1, 2]).make_neg_dim(0)
        stacked = stack([Categorical(2, (3,)), Categorical(3, (3,))])
        assert stacked.make_neg_dim(1).shape == (2, -1)
        with pytest.raises(ValueError, match="the specs differ"):
            stacked.make_neg_dim(0)
        with pytest.raises(IndexError):
            OneHot(2).make_neg_dim(0)

    @pytest.mark.parametrize("batch", [(), (3,), (32, 0), (2, 4)])
    def test_batches_of_trees(self, batch: tuple[int, ...]) -> None:
        leaves = Composite(
            {
                "bounded": Bounded([-1.0, 0.0], [1.0, 5.0]),
                "done": Categorical(2, (1,), dtype=torch.bool),
                "hot": OneHot(3, mask=[True, False, True]),
                ("n", "pair"): MultiCategorical([2, 3], mask=[True, False, True, True, False]),
                ("n", "deep", "text"): NonTensor((), example_data="go"),
                "agents": hetero(),
            }
        )
        spec = leaves.expand(batch)
        for many in (stack([spec] * 3), spec.expand(3, *batch), stack([spec, spec.clone(), spec])):
            assert many.shape == many["n", "deep"].shape == (3, *batch)
            assert many["agents"].shape == (3, *batch, 2)
            assert many["agents"].stack_dim == len(batch) + 1
            assert many[0] == many[-1] == spec
            assert many.unbind(0) == (spec,) * 3
            assert many[[0, 2]] == many[1:] == many[torch.tensor([True, False, True])] == spec.expand(2, *batch)
            assert many[:, None][1, 0] == spec
            value = many.rand((2,))
            assert value.batch_size == (2, 3, *batch)
            assert isinstance(value["agents"], LazyStackedTensorDict)
            assert many.is_in(value)
            assert spec.is_in(value[0, 1])
            assert many.zero()["agents"].batch_size == (3, *batch, 2)
            assert pickle.loads(pickle.dumps(many)) == many == many.clone()
        inner = stack([spec] * 2, len(batch))
        assert inner.shape == (*batch, 2)
        assert inner["agents"].stack_dim == len(batch) + 1
        assert inner[..., 1] == spec


class TestComposite:
    def make(self) -> Composite:
        return Composite({"a": Binary(shape=(3, 2)), ("n", "x"): Categorical(2, (3,)), ("n", "y"): None}, shape=(3,))

    def test_keys_with_leaves_of_ones_own(self) -> None:
        spec = Composite(a=Binary(2), s=hetero())
        assert set(spec.keys(True, True, is_leaf=lambda cls: issubclass(cls, StackedComposite))) == {"a", "s"}
        assert list(spec.items(True, True, is_leaf=lambda cls: True)) == [("a", spec["a"]), ("s", spec["s"])]

    def test_static_keys(self) -> None:
        static = Composite(x=Binary(2), step_mdp_static=True)
        spec = Composite(a=Binary(2), s=static)
        assert set(spec.keys(True, True, step_mdp_static_only=True)) == {("s", "x")}
        assert set(static.clone().expand(3).keys(step_mdp_static_only=True)) == {"x"}
        assert list(spec["s"].keys(step_mdp_static_only=False)) == ["x"]

    def test_separates(self) -> None:
        spec = self.make()
        apart = spec.separates("a", ("n", "x"), "missing")
        assert set(apart.keys(True, True)) == {"a", ("n", "x")}
        assert apart.shape == (3,)
        assert set(spec.keys(True, True)) == {("n", "y")}
        assert spec.separates("missing") is None
        assert spec.separates("missing", default=Binary(shape=(3, 1)))["missing"] == Binary(shape=(3, 1))

    def test_is_empty(self) -> None:
        assert Composite().is_empty()
        nested = Composite(a=Composite(b=Composite()))
        assert not nested.is_empty()
        assert nested.is_empty(recurse=True)
        assert not Composite(a=Composite(b=None)).is_empty(recurse=True)

    def test_locks(self) -> None:
        spec = self.make()
        spec.is_locked = True
        assert spec["n"].is_locked
        spec.unlock_(recurse=False)
        assert (spec.is_locked, spec["n"].is_locked) == (False, True)
        spec.unlock_().lock_(recurse=False)
        assert (spec.is_locked, spec["n"].is_locked) == (True, False)
        for change in (lambda: setattr(spec, "batch_size", ()), lambda: setattr(spec, "device", "cpu")):
            with pytest.raises(RuntimeError, match="locked"):
                change()

    def test_batch_size_can_be_set(self) -> None:
        spec = self.make()
        spec.batch_size = ()
        assert spec.shape == ()
        assert self.make()["n"].shape == (3,)

    def test_device_can_be_set(self) -> None:
        spec = self.make()
        spec.device = "meta"
        assert spec.device == spec["a"].device == spec["n"].device == META
        assert spec.rand()["a"].device == META
        spec.device = None
        assert spec.device is spec["n"].device is None
        assert spec["a"].device == META

    def test_update_moves_to_the_device(self) -> None:
        spec = Composite(a=Binary(2, device=META), device=META)
        spec.update(Composite(b=Binary(2), c=Composite(d=Binary(2))))
        assert spec["b"].device == spec["c", "d"].device == META

    def test_to_a_dtype(self) -> None:
        spec = self.make().to(torch.float64)
        assert spec["a"].dtype == spec["n", "x"].dtype == spec.rand()["n", "x"].dtype == torch.float64

    def test_names(self) -> None:
        spec = self.make()
        assert spec.names == spec.rand().names == [None]
        assert spec.refine_names("agents") is spec
        assert spec.names == spec["n"].names == ["agents"]
        assert spec.zero((2,)).names == [None, "agents"]
        assert spec.expand(5, 3).names == spec.expand(5, 3)["n"].names == [None, "agents"]
        assert spec.clone().names == spec.to("cpu").names == ["agents"]
        assert spec[0].names == []
        assert stack([spec, spec]).names == [None, "agents"]
        assert stack([spec, spec], -1).names == ["agents", None]
        assert spec.expand(5, 3).refine_names("time", ...).names == ["time", "agents"]
        assert Composite(shape=(2, 3), names=["a", None]).refine_names(..., "b").names == ["a", "b"]
        with pytest.raises(RuntimeError, match="another name"):
            spec.refine_names("time")
        with pytest.raises(ValueError, match="expected 1 names"):
            spec.refine_names("agents", "time")
        spec.names = None
        assert spec.names == [None]

    def test_names_of_a_stacked_one(self) -> None:
        spec = hetero().expand(3, 2)
        assert spec.names == [None, None]
        spec.names = ["time", None]
        assert spec.names == ["time", None]
        assert spec[:, 0].names == ["time"]
        with pytest.raises(ValueError, match="expected 2 names"):
            spec.names = ["time"]

    def test_a_tensorclass(self) -> None:
        @tensorclass
        class Pair:
            a: torch.Tensor
            b: torch.Tensor

        spec = Composite(a=Binary(2), b=Unbounded((3,)), data_cls=Pair).expand(4)
        value = spec.rand()
        assert isinstance(value, Pair)
        assert value.a.shape == (4, 2)
        assert value.batch_size == (4,)


class TestStacked:
    def test_the_dim_has_torchrls_name(self) -> None:
        spec = Stacked(Categorical(2, (3,)), Categorical(3, (3,)), dim=-1)
        assert spec.dim == spec.stack_dim == 1
        assert StackedComposite(Composite(a=Binary(2)), Composite(), dim=0).dim == 0

    def test_index_before_and_behind_the_dim(self) -> None:
        spec = hetero().expand(4, 2).unsqueeze(-1).expand(4, 2, 5)
        assert spec.stack_dim == 1
        for index, shape, dim in (
            ([0, 2], (2, 2, 5), 1),
            (torch.tensor([[0, 1], [2, 3]]), (2, 2, 2, 5), 2),
            (torch.tensor([True, False, True, True]), (3, 2, 5), 1),
            (None, (1, 4, 2, 5), 2),
            ((slice(None), None), (4, 1, 2, 5), 2),
            ((slice(None), slice(None), None), (4, 2, 1, 5), 1),
            ((..., [0, 1]), (4, 2, 2), 1),
            ((0, ..., 0), (2,), 0),
            ((slice(1, 3), [1, 0]), (2, 2, 5), 1),
        ):
            part = spec[index]
            assert isinstance(part, StackedComposite)
            assert (part.shape, part.stack_dim) == (shape, dim)
            assert part.is_in(part.rand())
            assert part.zero().batch_size == spec.zero()[index].batch_size
        assert spec[:, 1] == hetero()[1].expand(4, 5)
        assert spec[[0, 1], 1] == hetero()[1].expand(2, 5)
        for wrong in ((torch.ones(4, 2, dtype=torch.bool),), ([0, 1], [0, 1]), (0, "a"), (0, 0, 0, 0)):
            with pytest.raises(IndexError):
                spec[wrong]

    def test_device_can_be_set(self) -> None:
        for spec in (hetero(), stack([Categorical(2), Categorical(3)])):
            spec.device = "meta"
            assert spec.device == spec[0].device == META
            assert spec.rand().device == META
        spec = hetero().to("meta")
        assert spec.clear_device_().device is None

    def test_locks(self) -> None:
        spec = hetero()
        spec.is_locked = True
        assert spec[0]["n"].is_locked
        assert not spec.unlock_().is_locked

    def test_not_dense(self) -> None:
        dense = stack([Composite(a=Categorical(2))] * 2)
        assert dense != StackedComposite(Composite(a=Categorical(2)), Composite(a=Categorical(2)))
        assert hetero() != stack([hetero()[1], hetero()[0]])
        assert hetero().keys() == {"a": 0, "n": 0}.keys()


class TestNonTensor:
    def test_one_object_covers_the_feature_dims(self) -> None:
        spec = NonTensor((2,), example_data="a")
        assert isinstance(spec.rand(), NonTensorData)
        assert isinstance(spec.rand((3,)), NonTensorStack)
        assert spec.expand(3, 2).zero().tolist() == [["a", "a"]] * 3
        assert spec.expand(3, 2)[0, 0].rand((4,)).batch_size == (4,)
        assert isinstance(NonTensor((), example_data="a").rand((3,)), NonTensorData)
        assert isinstance(NonTensor((3, 2), example_data="a", batched=True).rand(), NonTensorData)
        assert isinstance(NonTensor((3, 2), example_data="a", feature_dims=1).rand(), NonTensorStack)
        assert spec.rand((3, 0)).batch_size == (3, 0, 2)
        assert (spec.batched, spec.feature_dims) == (False, 1)

    def test_in_a_composite(self) -> None:
        spec = Composite(text=NonTensor((), example_data="a")).expand(3)
        assert spec.rand().batch_size == (3,)
        assert spec.rand()[0]["text"] == "a"
        assert spec.is_in(lazy_stack([TensorDict(text=text) for text in ("a", "b", "c")]))


class TestMakeCompositeFromTd:
    def test_leaves(self) -> None:
        td = TensorDict(
            a=torch.zeros(3),
            b=torch.zeros(()),
            n=TensorDict(c=torch.zeros((), dtype=torch.int64), d=torch.zeros(2, dtype=torch.bool)),
            text="hello",
        )
        spec = make_composite_from_td(td)
        assert spec["a"] == Unbounded((3,))
        assert spec["b"] == Unbounded((1,))
        assert spec["n", "c"] == Unbounded((1,), dtype=torch.int64)
        assert spec["n", "d"] == Unbounded((2,), dtype=torch.bool)
        assert spec["text"] == NonTensor(())
        assert spec.rand()["text"] == "hello"
        plain = make_composite_from_td(td, unsqueeze_null_shapes=False)
        assert plain["b"].shape == plain["n", "c"].shape == ()
        assert plain.is_in(td)
        assert make_composite_from_td(td, dynamic_shape=True)["a"].shape == (-1,)

    def test_batches(self) -> None:
        td = TensorDict(
            a=torch.zeros(4, 2),
            b=torch.zeros(4),
            n=TensorDict(c=torch.zeros(4, 3), batch_size=[4]),
            text=NonTensorStack("a", "b", "c", "d"),
            batch_size=[4],
            device="cpu",
            names=["time"],
        )
        spec = make_composite_from_td(td)
        assert spec.shape == spec["n"].shape == (4,)
        assert spec["b"].shape == (4,)
        assert spec.device == torch.device("cpu")
        assert spec.names == ["time"]
        assert spec.is_in(td)
        assert spec.rand()["text"] is not None
        assert spec[0].is_in(td[0])

    def test_lazy_stacks(self) -> None:
        same = lazy_stack([TensorDict(b=torch.zeros(2), r=torch.zeros(())) for _ in range(3)])
        spec = make_composite_from_td(same)
        assert type(spec) is Composite
        assert (spec.shape, spec["b"].shape, spec["r"].shape) == ((3,), (3, 2), (3,))
        ragged = lazy_stack([TensorDict(b=torch.zeros(2)), TensorDict(b=torch.zeros(3), c=torch.zeros(1))])
        spec = make_composite_from_td(TensorDict(agents=ragged, batch_size=[]))
        assert isinstance(spec["agents"], StackedComposite)
        assert spec["agents", "b"].shape == (2, -1)
        assert "c" in spec["agents"][1]
        assert spec.is_in(TensorDict(agents=ragged, batch_size=[]))

    def test_other_things(self) -> None:
        with pytest.raises(TypeError, match="expected a TensorDict, found 3"):
            make_composite_from_td(3)  # type: ignore[arg-type]


def test_infinite_bounds_are_kept() -> None:
    spec = Bounded(-math.inf, math.inf, (2,))
    spec.low = 0
    assert spec == Bounded(0, math.inf, (2,))


# -- locks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_a_locked_composite_keeps_its_device_and_names(stacked: bool) -> None:
    spec = hetero() if stacked else Composite(a=Categorical(3, (2,)), shape=(2,), device="cpu")
    names, device = spec.names, spec.device
    spec.lock_()
    for change in (
        lambda: spec.clear_device_(),
        lambda: setattr(spec, "names", ["x"]),
        lambda: spec.refine_names("x"),
        lambda: setattr(spec, "device", "meta"),
        lambda: setattr(spec, "device", None),
    ):
        with pytest.raises(RuntimeError, match="locked"):
            change()
    assert (spec.names, spec.device) == (names, device)


def test_the_mask_of_a_leaf_can_be_changed_in_a_locked_composite() -> None:
    """As in TorchRL."""
    spec = Composite(a=Categorical(3, (2,)), shape=(2,)).lock_()
    spec["a"].update_mask(torch.tensor([False, False, True]))
    assert spec.rand()["a"].tolist() == [2, 2]


# -- values as indices, and what else there is ------------------------------------------------------------------


def test_binary_is_a_categorical_of_two() -> None:
    spec = Binary(3)
    value = torch.tensor([0, 1, 0], dtype=torch.int8)
    assert spec.to_one_hot(value, safe=True).int().tolist() == [[1, 0], [0, 1], [1, 0]]
    assert spec.to_one_hot_spec() == OneHot(2, (3, 2))
    assert spec.to_one_hot_spec().is_in(spec.to_one_hot(value))
    assert spec.to_categorical(value) is value
    assert spec.to_categorical_spec() is spec
    with pytest.raises(SpecMismatchError):
        spec.to_one_hot(value + 1, safe=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32, torch.int64])
def test_the_mask_of_binary(dtype: torch.dtype) -> None:
    spec = Binary(2, dtype=dtype)
    spec.update_mask(torch.tensor([[True, False], [True, True]]))
    assert spec.mask is not None
    assert {tuple(row) for row in spec.rand((50,)).int().tolist()} == {(0, 0), (0, 1)}
    assert not spec.is_in(torch.ones(2, dtype=dtype))
    assert spec.project(torch.ones(2, dtype=dtype)).int().tolist() == [0, 1]
    assert "masked" in repr(spec)
    assert Binary(2, mask=spec.mask, dtype=dtype) == spec != Binary(2, dtype=dtype)
    assert spec.expand(4, 2).rand()[:, 0].int().tolist() == [0] * 4
    spec.update_mask(None)
    assert spec == Binary(2, dtype=dtype)


def test_a_value_is_an_index() -> None:
    data = torch.arange(100) * 10
    hot = OneHot(100)
    value = hot.encode(50)
    assert hot.index(value, data).tolist() == [500]
    assert hot.to_categorical_spec().index(hot.to_categorical(value), data).item() == 500
    assert Categorical(3, (2,), start=1).index(torch.tensor([1, 3]), torch.tensor([5, 6, 7])).tolist() == [5, 7]
    rows = torch.stack([data, data + 1])
    assert hot.index(hot.encode([1, 2]), rows).tolist() == [[10], [21]]
    assert hot.index(value, rows).tolist() == [[500], [501]]
    several = MultiOneHot([2, 3])
    assert several.index(several.encode([1, 2]), torch.tensor([1, 2, 10, 20, 30])).tolist() == [2, 30]
    for spec in (Bounded(0, 1, shape=(2,)), Unbounded((2,)), Composite()):
        with pytest.raises(NotImplementedError, match="is no index"):
            spec.index(torch.zeros(2), data)
    for spec in (hot, hot.to_categorical_spec()):
        with pytest.raises(TypeError, match="expected a"):
            spec.index(50, data)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_values_are_put_into_a_tensordict(lead: tuple[int, ...]) -> None:
    spec = Composite(a=Bounded(0.25, 0.75, shape=(2, 1)), shape=(2,))
    td = TensorDict({"mine": torch.ones(*lead, 2)}, [*lead, 2])
    assert spec.zeros_update(td) is td
    assert (td["a"].shape, td["a"].sum()) == ((*lead, 2, 1), 0)
    assert spec.ones_update(td)["a"].min() == 1
    assert spec.is_in(spec.rand_update(td))
    assert td["mine"].all()
