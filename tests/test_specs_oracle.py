"""The same calls on TorchRL's specs and on these; they skip where TorchRL is not installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from aioenvs import specs as ours

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def theirs() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("torchrl.data")


MASK = torch.tensor([True, False, True, False, True])
ALL_LEAVES: dict[str, Any] = {
    "bounded": lambda m: m.Bounded(-1, 1, (3,)),
    "bounded-by-position": lambda m: m.Bounded(-1, 1, (3,), "cpu", torch.float64),
    "bounded-integers": lambda m: m.Bounded(0, 7, (2,), dtype=torch.uint8),
    "unbounded": lambda m: m.Unbounded((2, 3)),
    "unbounded-by-position": lambda m: m.Unbounded((2,), "cpu", torch.int64),
    "unbounded-discrete": lambda m: m.UnboundedDiscrete((2,)),
    "unbounded-continuous": lambda m: m.UnboundedContinuous((2,)),
    "bounded-continuous": lambda m: m.BoundedContinuous(-1, 1, (2,)),
    "categorical": lambda m: m.Categorical(5),
    "categorical-batch": lambda m: m.Categorical(5, (2, 1), "cpu", torch.int32),
    "categorical-masked": lambda m: m.Categorical(5, (2,), mask=MASK),
    "categorical-bool": lambda m: m.Categorical(2, (1,), dtype=torch.bool),
    "one-hot": lambda m: m.OneHot(5),
    "one-hot-batch": lambda m: m.OneHot(5, (2, 5), "cpu", torch.int64),
    "one-hot-masked": lambda m: m.OneHot(5, (2, 5), mask=MASK),
    "multi-categorical": lambda m: m.MultiCategorical([2, 3]),
    "multi-categorical-batch": lambda m: m.MultiCategorical([2, 3], (4, 2)),
    "multi-categorical-masked": lambda m: m.MultiCategorical([2, 3], (4, 2), mask=MASK),
    "multi-one-hot": lambda m: m.MultiOneHot([2, 3]),
    "multi-one-hot-batch": lambda m: m.MultiOneHot([2, 3], (4, 5)),
    "multi-one-hot-masked": lambda m: m.MultiOneHot([2, 3], (4, 5), mask=MASK),
    "binary": lambda m: m.Binary(3),
    "binary-2d": lambda m: m.Binary(shape=(2, 3)),
    "non-tensor": lambda m: m.NonTensor((2,), example_data="a"),
}
leaves = pytest.mark.parametrize("make", ALL_LEAVES.values(), ids=ALL_LEAVES)


def outcome(call: Any, *arguments: Any) -> Any:
    """What a call gives, or that it raises."""
    try:
        return call(*arguments)
    except Exception:
        return "raises"


@leaves
class TestLeaves:
    def test_attributes(self, make: Any, theirs: Any) -> None:
        mine, other = make(ours), make(theirs)
        for name in ("shape", "dtype", "device", "ndim", "domain"):
            assert getattr(mine, name) == getattr(other, name), name
        for name in ("n", "low", "high"):
            if hasattr(other, name):
                assert bool(torch.as_tensor(getattr(mine, name) == getattr(other, name)).all()), name
                assert bool(torch.as_tensor(getattr(mine.space, name) == getattr(other.space, name)).all()), name
        if hasattr(other, "nvec"):
            assert torch.equal(torch.as_tensor(mine.nvec), torch.as_tensor(other.nvec))
        if getattr(other, "mask", None) is not None:
            assert torch.equal(mine.mask, other.mask)

    def test_kinds(self, make: Any, theirs: Any) -> None:
        mine, other = make(ours), make(theirs)
        for name in ours.__all__:
            if name not in ("make_composite_from_td", "TensorSpec"):
                assert isinstance(mine, getattr(ours, name)) == isinstance(other, getattr(theirs, name)), name

    def test_values_of_one_are_in_the_other(self, make: Any, theirs: Any) -> None:
        mine, other = make(ours), make(theirs)
        pairs = [(mine, other)]
        if getattr(mine, "mask", None) is None:  # TorchRL's masks do not survive expand
            pairs.append((mine.expand(3, *mine.shape), other.expand(3, *other.shape)))
        for a, b in pairs:
            for name in ("rand", "sample", "zero", "zeros", "one", "ones"):
                for shape in ((), (2,), None):
                    value, twin = getattr(a, name)(shape), outcome(getattr(b, name), shape)
                    if isinstance(twin, str):  # a mask of a MultiCategorical
                        continue
                    assert value.shape == twin.shape
                    assert value.dtype == twin.dtype
                    if name in ("rand", "sample"):
                        assert a.is_in(twin)
                        assert bool(b.is_in(value))

    def test_shape_operations(self, make: Any, theirs: Any) -> None:
        mine, other = make(ours), make(theirs)
        wide = [outcome(spec.expand, 2, 1, *spec.shape) for spec in (mine, other)]
        assert wide[0].shape == (2, 1, *mine.shape)
        rest = tuple(mine.shape)
        for operation in (
            lambda spec: spec.squeeze(1),
            lambda spec: spec.unsqueeze(0),
            lambda spec: torch.squeeze(spec, 1),
            lambda spec: torch.unsqueeze(spec, 1),
            lambda spec: spec.flatten(0, 1),
            lambda spec: spec.unflatten(0, (2, 1)),
            lambda spec: spec.view(1, 2, *rest),
            lambda spec: spec.reshape(1, 2, *rest),
            lambda spec: spec[0],
            lambda spec: spec[:, 0],
            lambda spec: spec[1:],
            lambda spec: torch.stack([spec, spec.clone()]),
            lambda spec: torch.stack([spec, spec.clone()], 1),
            lambda spec: spec.clone(),
            lambda spec: spec.cpu(),
        ):
            mine_made, other_made = (outcome(operation, spec) for spec in wide)
            if isinstance(other_made, str):  # TorchRL cannot do it
                continue
            assert mine_made.shape == other_made.shape
            if getattr(mine, "mask", None) is None:
                assert mine_made.is_in(other_made.rand())
                assert bool(other_made.is_in(mine_made.rand()))

    def test_listing(self, make: Any, theirs: Any) -> None:
        mine, other = make(ours), make(theirs)
        assert outcome(lambda: int(mine.cardinality())) == outcome(lambda: int(other.cardinality()))
        a, b = outcome(mine.enumerate), outcome(other.enumerate)
        if isinstance(a, str):
            assert b == "raises"
        elif isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
        else:  # a mask of several choices
            assert mine.mask is not None

    def test_conversions(self, make: Any, theirs: Any) -> None:
        mine, other = make(ours), make(theirs)
        if not hasattr(mine, "to_one_hot"):
            return
        value = mine.rand((4,))
        for name in ("to_one_hot", "to_categorical"):
            twin = outcome(getattr(other, name), value)
            if isinstance(twin, str):  # of a bool Categorical
                twin = getattr(other, name)(value.long())
            assert torch.equal(getattr(mine, name)(value), twin), name
            a, b = (getattr(spec, f"{name}_spec")() for spec in (mine, other))
            assert (type(a).__name__, a.shape, a.dtype) == (type(b).__name__, b.shape, b.dtype)
            assert a.is_in(twin)
        encoded = mine.to_numpy(value)
        assert encoded.tolist() == other.to_numpy(value).tolist()

    def test_type_check(self, make: Any, theirs: Any) -> None:
        mine, other = make(ours), make(theirs)
        for dtype in (torch.float32, torch.int64, torch.bool):
            value = torch.zeros(2, dtype=dtype)
            a, b = outcome(mine.type_check, value), outcome(other.type_check, value)
            assert a == b
        assert mine.type_check(mine.rand()) is None


def trees(module: Any, shape: tuple[int, ...] = (3,)) -> Any:
    leaf = {
        "a": module.Categorical(2, shape),
        "n": module.Composite(x=module.Unbounded((*shape, 2)), z=module.Composite(shape=shape), shape=shape),
    }
    return module.Composite(leaf, shape=shape)


def ragged(module: Any) -> Any:
    first = module.Composite(a=module.Unbounded((3,)), c=module.Binary(2), n=module.Composite(x=module.Categorical(2)))
    second = module.Composite(a=module.Unbounded((4,)), d=module.Binary(2), n=module.Composite(x=module.Categorical(2)))
    return torch.stack([first, second])


class TestTrees:
    @pytest.mark.parametrize("shape", [(), (3,), (32, 0), (2, 4)])
    def test_reading(self, shape: tuple[int, ...], theirs: Any) -> None:
        mine, other = trees(ours, shape), trees(theirs, shape)
        for arguments in ((), (True,), (True, True), (False, True)):
            assert set(mine.keys(*arguments)) == set(other.keys(*arguments))
        assert (mine.shape, mine.batch_size, mine.device, len(mine)) == (
            other.shape,
            other.batch_size,
            other.device,
            len(other),
        )
        assert mine.names == other.names
        value = other.rand((2,))
        assert mine.rand((2,)).batch_size == value.batch_size == (2, *shape)
        assert mine.is_in(value)
        assert bool(other.is_in(mine.zero((2,))))

    @pytest.mark.parametrize(
        "change",
        [
            lambda spec, m: spec.set("b", m.Binary(shape=(3, 2))),
            lambda spec, m: spec.set(("q", "b"), m.Binary(shape=(3, 2))),
            lambda spec, m: spec.__setitem__(("n", "b"), m.Binary(shape=(3, 2))),
            lambda spec, m: spec.update({"n": {"b": m.Binary(shape=(3, 2))}}),
            lambda spec, m: spec.update(m.Composite(n=m.Composite(x=m.Binary(shape=(3, 2)), shape=(3,)), shape=(3,))),
            lambda spec, m: spec.__delitem__("a"),
            lambda spec, m: spec.__delitem__(("n", "x")),
            lambda spec, m: spec.pop("a"),
            lambda spec, m: spec.pop(("n", "x")),
            lambda spec, m: spec.pop("missing"),
            lambda spec, m: spec.pop("missing", None),
            lambda spec, m: spec.separates("a", ("n", "x")),
            lambda spec, m: spec.separates("missing"),
            lambda spec, m: spec.set("b", m.Binary(2)),
            lambda spec, m: setattr(spec, "shape", ()),
            lambda spec, m: spec.lock_().set("b", m.Binary(shape=(3, 2))),
            lambda spec, m: spec.lock_()["n"].set("b", m.Binary(shape=(3, 2))),
            lambda spec, m: spec.lock_().unlock_().set("b", m.Binary(shape=(3, 2))),
            lambda spec, m: spec.refine_names("time"),
            lambda spec, m: setattr(spec, "is_locked", True),
        ],
    )
    def test_changing(self, change: Any, theirs: Any) -> None:
        mine, other = trees(ours), trees(theirs)
        results = [outcome(change, spec, module) for spec, module in ((mine, ours), (other, theirs))]
        assert [result == "raises" for result in results].count(True) in (0, 2)
        assert {k: v.shape for k, v in mine.items(True)} == {k: v.shape for k, v in other.items(True)}
        assert (mine.shape, mine.device, mine.names, mine.is_locked) == (
            other.shape,
            other.device,
            other.names,
            other.is_locked,
        )
        if isinstance(results[0], ours.Composite):
            assert set(results[0].keys(True)) == set(results[1].keys(True))

    @pytest.mark.parametrize(
        "operation",
        [
            lambda spec: spec.expand(2, 3),
            lambda spec: spec.expand(torch.Size([2, 3])),
            lambda spec: spec[0],
            lambda spec: spec[:2],
            lambda spec: spec[[0, 1]],
            lambda spec: spec[torch.tensor([True, False, True])],
            lambda spec: spec[..., None],
            lambda spec: spec.unsqueeze(-1),
            lambda spec: spec.unsqueeze(0).squeeze(0),
            lambda spec: spec.unsqueeze(0).flatten(0, 1),
            lambda spec: spec.unflatten(0, (3, 1)),
            lambda spec: spec.view(1, 3),
            lambda spec: spec.empty(),
            lambda spec: spec.clone(),
            lambda spec: spec.to("cpu"),
            lambda spec: spec.to(torch.float64),
            lambda spec: torch.stack([spec, spec], 0),
            lambda spec: torch.stack([spec, spec], -1),
            lambda spec: spec.unbind(0)[1],
            lambda spec: torch.index_select(spec, 0, torch.tensor([2])),
        ],
    )
    def test_operations(self, operation: Any, theirs: Any) -> None:
        mine, other = operation(trees(ours)), operation(trees(theirs))
        assert (mine.shape, mine.device) == (other.shape, other.device)
        described = [
            {k: (v.shape, None if hasattr(v, "keys") else v.dtype) for k, v in s.items(True)} for s in (mine, other)
        ]
        assert described[0] == described[1]
        assert mine.rand().batch_size == other.rand().batch_size

    def test_enumerate(self, theirs: Any) -> None:
        made = [m.Composite(a=m.Categorical(2), b=m.OneHot(3)) for m in (ours, theirs)]
        assert made[0].cardinality() == made[1].cardinality()
        mine, other = (spec.enumerate() for spec in made)
        assert mine.batch_size == other.batch_size
        rows = [{(int(row["a"]), tuple(row["b"].tolist())) for row in value} for value in (mine, other)]
        assert rows[0] == rows[1]

    @pytest.mark.parametrize(
        "operation",
        [
            lambda spec: spec,
            lambda spec: spec.expand(5, 2),
            lambda spec: spec.unsqueeze(0),
            lambda spec: spec.unsqueeze(-1),
            lambda spec: spec.clone(),
        ],
    )
    def test_stacked(self, operation: Any, theirs: Any) -> None:
        mine, other = operation(ragged(ours)), operation(ragged(theirs))
        assert type(mine).__name__ == type(other).__name__
        assert (mine.shape, mine.stack_dim, mine.dim) == (other.shape, other.stack_dim, other.dim)
        assert set(mine.keys(True, True)) == set(other.keys(True, True))
        assert mine["a"].shape == other["a"].shape
        assert mine["n", "x"].shape == other["n", "x"].shape
        value, twin = mine.rand(), other.rand()
        assert type(value) is type(twin)
        assert value.batch_size == twin.batch_size
        assert mine.is_in(twin)
        assert bool(other.is_in(value))

    def test_stacked_inside(self, theirs: Any) -> None:
        made = [m.Composite(g=ragged(m)) for m in (ours, theirs)]
        for operation in (
            lambda spec: spec.expand(4),
            lambda spec: torch.stack([spec] * 3),
            lambda spec: spec.unsqueeze(0),
        ):
            mine, other = (operation(spec) for spec in made)
            assert mine["g"].shape == other["g"].shape
            assert mine["g"].stack_dim == other["g"].stack_dim
            assert mine.rand()["g"].batch_size == other.rand()["g"].batch_size


class TestInference:
    CASES: tuple[Any, ...] = (
        TensorDict(a=torch.zeros(3), b=torch.zeros(()), n=TensorDict(c=torch.zeros((), dtype=torch.int64)), t="hi"),
        TensorDict(a=torch.zeros(3, 1), b=torch.zeros(3), t=NonTensorStack("a", "b", "c"), batch_size=[3]),
        lazy_stack([TensorDict(b=torch.zeros(2), r=torch.zeros(())) for _ in range(2)]),
        TensorDict(),
    )

    @pytest.mark.parametrize("td", CASES, ids=range(len(CASES)))
    @pytest.mark.parametrize("options", [{}, {"unsqueeze_null_shapes": False}, {"dynamic_shape": True}], ids=str)
    def test_make_composite_from_td(self, td: Any, options: dict[str, bool], theirs: Any) -> None:
        if "dynamic_shape" in options and td.batch_size:
            return  # TorchRL lets batch dims vary too
        from torchrl.envs.utils import make_composite_from_td

        mine, other = ours.make_composite_from_td(td, **options), make_composite_from_td(td, **options)
        assert mine.shape == other.shape
        assert {k: (type(v).__name__[:9], v.shape) for k, v in mine.items(True)} == {
            k: (type(v).__name__[:9], v.shape) for k, v in other.items(True)
        }
        dtypes = [{k: v.dtype for k, v in spec.items(True, True)} for spec in (mine, other)]
        assert dtypes[0] == dtypes[1]
