"""Spaces as leaves: names, values in and out, and what is refused."""

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from aioenvs.engine.adapters.spaces import (
    Alike,
    Objects,
    conform,
    flatten,
    integer_range,
    is_outside,
    observation_key,
    reader,
    writer,
)
from aioenvs.engine.layout import Layout, Leaf
from aioenvs.errors import SpecMismatchError

KEY = ("observation",)
NUM_ENVS, ROW = 3, 1

NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "arm": spaces.Tuple([spaces.Discrete(3, start=5), spaces.Dict({"force": spaces.Box(-1, 1, ())})]),
        "text": spaces.Text(5),
    }
)
FIXED = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, ()),
    spaces.Box(-1, 1, (2, 0)),
    spaces.Box(0, 255, (4, 4), np.uint8),
    spaces.Box(-5, 5, (2,), np.int32),
    spaces.Box(-1, 1, (2,), np.float64),
    spaces.Box(-1, 1, (2,), np.float16),
    spaces.Box(0, 1, (2,), np.bool_),
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary((2, 3)),
]
LOOSE = [
    spaces.Text(6),
    spaces.Sequence(spaces.Discrete(3)),
    spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]),
]
CONTAINERS = [
    NESTED,
    spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.Text(3)]),
    spaces.Tuple([]),
    spaces.Dict({}),
    spaces.Dict({"a": spaces.Dict({"b": spaces.Tuple([spaces.MultiBinary(2)])})}),
]


class PaddedBox(spaces.Box):
    """A Box of someone else's module."""


class Unknown(gymnasium.Space[Any]):
    """A space that is none of Gymnasium's own."""

    def __init__(self) -> None:
        super().__init__(shape=(2,), dtype=np.float32)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return object()

    def contains(self, value: Any) -> bool:
        return True


class Stored:
    """Rows for one space, with the functions that write and read the env in the middle."""

    def __init__(self, space: Any, key: tuple[str, ...] = KEY) -> None:
        fixed = [leaf.leaf for leaf in flatten(space, key) if leaf.leaf is not None]
        layout = Layout.of(NUM_ENVS, {"root": fixed})
        self.arrays = layout.arrays(bytearray(max(1, layout.end)))["root"]
        self.objects: Objects = {}
        self.write = writer(space, key, self.arrays, self.objects, ROW, f"env {ROW}")
        self.read = reader(space, key, self.arrays, self.objects, ROW)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other) and one.dtype == other.dtype
    return bool(np.all(one == other))


# -- names ----------------------------------------------------------------------------------------------


def test_nested_spaces_become_paths() -> None:
    assert observation_key(NESTED) == ()
    assert {(leaf.key, leaf.leaf) for leaf in flatten(NESTED, ())} == {
        (("camera",), Leaf(("camera",), "|u1", (2, 2, 3))),
        (("arm", "0"), Leaf(("arm", "0"), "<i8", ())),
        (("arm", "1", "force"), Leaf(("arm", "1", "force"), "<f4", ())),
        (("text",), None),
    }


def test_a_tuple_stands_under_its_own_name() -> None:
    space = spaces.Tuple([spaces.Discrete(2), spaces.Text(3)])
    assert observation_key(space) == KEY
    assert [leaf.key for leaf in flatten(space, KEY)] == [("observation", "0"), ("observation", "1")]


@pytest.mark.parametrize("space", FIXED, ids=str)
def test_a_plain_space_is_one_leaf_of_its_shape_and_dtype(space: Any) -> None:
    (leaf,) = flatten(space, KEY)
    assert observation_key(space) == KEY
    assert leaf.space is space
    assert leaf.leaf == Leaf(KEY, space.dtype.str, space.shape)


@pytest.mark.parametrize("space", [*LOOSE, Unknown()], ids=lambda space: type(space).__name__)
def test_a_space_without_a_fixed_shape_has_no_leaf(space: Any) -> None:
    assert flatten(space, KEY) == [(KEY, space, None)]


def test_a_subclass_is_what_it_derives_from() -> None:
    (leaf,) = flatten(PaddedBox(-1, 1, (2,)), KEY)
    assert leaf.leaf == Leaf(KEY, "<f4", (2,))


def test_empty_containers_have_no_leaves() -> None:
    assert flatten(spaces.Dict({}), ()) == flatten(spaces.Tuple([]), KEY) == []


# -- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [*FIXED, *LOOSE, *CONTAINERS], ids=lambda space: type(space).__name__)
def test_what_is_written_is_read_back_as_the_space_has_it(space: Any) -> None:
    stored = Stored(space)
    space.seed(3)
    for _ in range(3):
        value = space.sample()
        stored.write(value)
        read = stored.read()
        assert equal(value, read)
        assert space.contains(read)
        assert type(read) is type(space.sample())


@pytest.mark.parametrize("space", [*FIXED, NESTED], ids=lambda space: type(space).__name__)
def test_other_rows_are_left_alone(space: Any) -> None:
    stored = Stored(space)
    for array in stored.arrays.values():
        array[...] = 1
    stored.write(space.sample())
    for array in stored.arrays.values():
        assert (np.delete(array, ROW, axis=0) == 1).all()


def test_objects_are_kept_as_they_are() -> None:
    stored = Stored(NESTED, ())
    sample = NESTED.sample()
    stored.write(sample)
    assert stored.objects == {("text",): sample["text"]}
    assert stored.read()["text"] is sample["text"]


def test_what_is_read_does_not_change_with_the_row() -> None:
    stored = Stored(spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, ()), spaces.Discrete(3)]))
    stored.write((np.array([0.5, 0.5], np.float32), 0.5, 1))
    vector, scalar, choice = stored.read()
    stored.write((np.zeros(2, np.float32), 0.0, 0))
    assert (vector.tolist(), float(scalar), int(choice)) == ([0.5, 0.5], 0.5, 1)


def test_what_was_written_does_not_change_with_the_env() -> None:
    stored = Stored(spaces.Box(-1, 1, (2,)))
    value = np.array([0.5, 0.5], np.float32)
    stored.write(value)
    value[:] = 0
    assert stored.read().tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(4), 3),
        (spaces.Discrete(4), np.int32(3)),
        (spaces.Discrete(4), np.uint8(3)),
        (spaces.Discrete(4), np.array(3)),
        (spaces.Discrete(4, dtype=np.int8), 3),
        (spaces.Discrete(4), True),
        (spaces.Box(-9, 9, (2,)), [1, 2]),
        (spaces.Box(-9, 9, (2,)), (1.5, 2.5)),
        (spaces.Box(-9, 9, (2,)), np.array([0.1, 0.2])),
        (spaces.Box(-9, 9, (2,)), [np.inf, np.nan]),
        (spaces.Box(-9, 9, ()), 0.25),
        (spaces.Box(-9, 9, (1,), np.float64), np.array([1.5], np.float32)),
        (spaces.Box(0, 255, (2,), np.uint8), [1, 255]),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([1, 255])),
        (spaces.Box(-9, 9, (2,), np.int8), [-3, 3]),
        (spaces.MultiBinary(2), [True, False]),
        (spaces.MultiDiscrete([3, 3]), np.array([2, 1], np.uint64)),
    ],
    ids=lambda case: repr(case)[:40],
)
def test_a_value_that_loses_nothing_is_taken(space: Any, value: Any) -> None:
    stored = Stored(space)
    stored.write(value)
    read = stored.read()
    assert np.array_equal(read, np.asarray(value).astype(space.dtype), equal_nan=True)
    assert read.dtype == space.dtype


@pytest.mark.parametrize(
    ("space", "value", "found"),
    [
        (spaces.Box(-1, 1, (2,)), [1.0], r"found float64 of shape \(1,\)"),
        (spaces.Box(-1, 1, (2,)), [[1.0, 2.0]], r"found float64 of shape \(1, 2\)"),
        (spaces.Box(-1, 1, (2,)), 1.0, r"found float64 of shape \(\)"),
        (spaces.Box(-1, 1, (2,)), [[1.0], [1.0, 2.0]], "found a ragged list"),
        (spaces.Box(-1, 1, (2,)), ["a", "b"], r"found <U1 of shape \(2,\)"),
        (spaces.Box(-1, 1, (2,)), None, "found None"),
        (spaces.Box(-1, 1, (2,)), {"a": 1}, "found {'a': 1}"),
        (spaces.Box(-1, 1, (2,)), [1e300, 0], "found values of float64 that do not fit"),
        (spaces.Box(-1, 1, (2,)), np.array([1j, 0]), "found complex128"),
        (spaces.Box(-9, 9, (2,), np.int32), [1.0, 2.0], "found float64"),
        (spaces.Box(-9, 9, (1,), np.int8), [128], "found values of .* that do not fit"),
        (spaces.Box(0, 255, (2,), np.uint8), [-1, 3], "found .*"),
        (spaces.Box(0, 255, (2,), np.uint8), [256, 3], "found .*"),
        (spaces.Discrete(4), 1.0, r"found float64 of shape \(\)"),
        (spaces.Discrete(4), [1], r"found int64 of shape \(1,\)"),
        (spaces.Discrete(4), None, "found None"),
        (spaces.Discrete(4), 2**70, "found.*"),
        (spaces.Discrete(4, dtype=np.int8), 300, "found"),
        (spaces.Discrete(4, dtype=np.int8), np.int64(300), "found"),
        (spaces.MultiDiscrete([3, 3]), np.array([2**63, 1], np.uint64), "found values of .* that do not fit"),
    ],
    ids=lambda case: repr(case)[:40],
)
def test_a_value_that_does_not_fit_is_refused(space: Any, value: Any, found: str) -> None:
    stored = Stored(space)
    expected = re.escape(f"env 1: expected {space.dtype} of shape {space.shape} at ('observation',), ")
    with pytest.raises(SpecMismatchError, match=expected + found):
        stored.write(value)
    assert not stored.arrays[KEY].any()


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}),
        (spaces.Dict({"a": spaces.Discrete(2)}), None),
        (spaces.Dict({"a": spaces.Discrete(2)}), 3),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"a": 1, "b": 1}),
        (spaces.Tuple([spaces.Discrete(2)] * 2), (1,)),
        (spaces.Tuple([spaces.Discrete(2)] * 2), (1, 1, 1)),
        (spaces.Tuple([spaces.Discrete(2)] * 2), {0: 1}),
    ],
    ids=["other key", "none", "number", "extra key", "short", "long", "mapping"],
)
def test_a_container_needs_exactly_its_members(space: Any, value: Any) -> None:
    names = list(space.spaces) if isinstance(space, spaces.Dict) else [0, 1]
    expected = f"env 1: expected a value with exactly the members {names!r} at ('observation',), found {value!r}"
    with pytest.raises(SpecMismatchError) as caught:
        Stored(space).write(value)
    assert str(caught.value) == expected


def test_an_error_in_a_nested_value_names_its_path() -> None:
    sample = NESTED.sample()
    sample["arm"] = (5, {"force": "strong"})
    with pytest.raises(SpecMismatchError, match=r"at \('arm', '1', 'force'\), found <U6 of shape \(\)"):
        Stored(NESTED, ()).write(sample)


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=3), st.sampled_from("bBhHiIlL"))
def test_integers_arrive_unchanged_or_not_at_all(numbers: list[int], code: str) -> None:
    dtype = np.dtype(code)
    bounds = np.iinfo(dtype)
    fits = all(bounds.min <= number <= bounds.max for number in numbers)
    if fits:
        assert conform(numbers, dtype, (len(numbers),), KEY).tolist() == numbers
    else:
        with pytest.raises(SpecMismatchError):
            conform(numbers, dtype, (len(numbers),), KEY)


def test_integers_of_which_numpy_makes_floats_arrive_unchanged() -> None:
    numbers = [0, 2**63 + 1]
    assert conform(numbers, np.dtype("u8"), (2,), KEY).tolist() == numbers


def test_conform_gives_exactly_the_dtype_asked_for() -> None:
    assert conform(1, np.dtype(">f4"), (), KEY).dtype == np.dtype(">f4")


# -- choices --------------------------------------------------------------------------------------------


def test_the_range_of_choices() -> None:
    assert integer_range(spaces.Discrete(4)) == (0, 4)
    assert integer_range(spaces.Discrete(4, start=-2)) == (-2, 2)
    low, high = integer_range(spaces.MultiDiscrete([2, 3], start=[1, -1]))
    assert (low.tolist(), high.tolist()) == ([1, -1], [3, 2])
    assert integer_range(spaces.MultiBinary(3)) == (0, 2)


@pytest.mark.parametrize("space", [spaces.Box(0, 3, (2,), np.int64), NESTED, *LOOSE, Unknown()])
def test_other_spaces_are_no_choices(space: Any) -> None:
    assert integer_range(space) is None


def test_spaces_of_rows_keep_one_object_of_equal_ones() -> None:
    alike = Alike.of([spaces.Discrete(3), spaces.Discrete(4), spaces.Discrete(3)])
    assert alike.spaces[0] is alike.spaces[2]
    assert alike.same is None
    assert Alike.of([spaces.Discrete(3), spaces.Discrete(3)]).same == spaces.Discrete(3)
    assert alike == Alike((spaces.Discrete(3), spaces.Discrete(4), spaces.Discrete(3)))


def test_the_range_of_choices_of_rows() -> None:
    low, high = integer_range(Alike((spaces.Discrete(3), spaces.Discrete(4, start=2)))) or ((), ())
    assert (low.tolist(), high.tolist()) == ([0, 2], [3, 6])
    low, high = integer_range(Alike((spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([4, 5])))) or ((), ())
    assert (low.tolist(), high.tolist()) == ([[0, 0], [0, 0]], [[2, 3], [4, 5]])
    assert integer_range(Alike((spaces.Box(0, 1), spaces.Box(0, 1)))) is None


def test_samples_of_rows_are_those_of_each_space() -> None:
    alike = Alike.of([spaces.Text(5), spaces.Text(3, min_length=3)])
    alike.seed(1)
    sampled = alike.sample()
    assert [space.contains(value) for space, value in zip(alike.spaces, sampled, strict=True)] == [True, True]
    alike.seed(1)
    assert alike.sample() == sampled
    assert not is_outside(alike, sampled)
    assert is_outside(alike, sampled[:1])
    assert is_outside(alike, ["a", "b"])


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (np.arange(6, dtype=np.float32)[::2], True),  # not in one piece
        (np.arange(3, dtype=">f4"), True),
        (np.arange(3.0), True),
        ([0, 1, 2], True),
        (np.arange(3, dtype=np.float32)[None], False),
        (np.float32(3), False),
        (np.arange(2, dtype=np.float32), False),
        (np.array(["a", "b", "c"]), False),
        (np.array([object()] * 3), False),
        (np.zeros(3, "M8[s]"), False),
        (np.zeros(3, [("x", np.float32)]), False),
        (bytes(12), False),
    ],
)
def test_a_row_takes_what_numpy_would_cast_to_it(value: Any, fits: bool) -> None:
    row = np.full((2, 3), 7, np.float32)
    write = writer(spaces.Box(-9, 9, (3,)), ("observation",), {("observation",): row}, {}, 1)
    if fits:
        write(value)
        assert row.tolist() == [[7, 7, 7], np.asarray(value).tolist()]
    else:
        with pytest.raises(SpecMismatchError, match="observation"):
            write(value)
        assert (row == 7).all()
