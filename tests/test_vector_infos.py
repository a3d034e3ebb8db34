"""Infos of many envs as one: what keeps its dtype, what shares one, and what stays an object."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st

from aioenvs.integrations.vectors.batches import batch_infos


def batched(*values: Any) -> Any:
    """The batch of one key, whose value env i has as `values[i]`; `...` for none."""
    infos = batch_infos({env: {"key": value} for env, value in enumerate(values) if value is not ...}, len(values))
    assert infos["_key"].tolist() == [value is not ... for value in values]
    assert infos.keys() == {"key", "_key"}
    return infos["key"]


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ((1, 2, 3), np.int64, [1, 2, 3]),
        ((1, 2.7), np.float64, [1, 2.7]),
        ((2.7, 1), np.float64, [2.7, 1]),
        ((..., 2.7), np.float64, [0, 2.7]),
        ((True, False, ...), np.bool_, [True, False, False]),
        ((np.float32(0.5), np.float32(1)), np.float32, [0.5, 1]),
        ((np.int8(5), np.int64(2**40)), np.int64, [5, 2**40]),
        ((np.uint8(200), -1), np.int64, [200, -1]),
        ((0.1, np.float32(0.1)), np.float64, [0.1, float(np.float32(0.1))]),
        ((float("inf"), 1), np.float64, [np.inf, 1]),
    ],
)
def test_numbers_share_a_dtype_that_holds_them(values: Any, dtype: Any, expected: Any) -> None:
    found = batched(*values)
    assert found.dtype == dtype
    assert found.tolist() == expected


def test_nan_is_a_number() -> None:
    np.testing.assert_array_equal(batched(float("nan"), 1), [np.nan, 1])


@pytest.mark.parametrize(
    "values",
    [
        (2**53 + 1, 0.5),
        (2**70, 1),
        (True, 1),
        (None, 1),
        (1, None),
        (None, None),
        ("a", 1),
        ("a", "b"),
        ({"a": 1}, 5),
        ([1], [1, 2]),
        ((1, 2), (3, 4)),
        (np.bool_(True), np.bool_(False)),
        (1 + 2j, 1),
        (np.uint64(2**63 + 1), -1),
    ],
)
def test_what_has_no_dtype_in_common_stays_as_it_is(values: Any) -> None:
    found = batched(*values)
    assert found.dtype == object
    assert [*map(type, found)] == [*map(type, values)]
    assert found.tolist() == list(values)


def test_arrays_of_one_shape_are_stacked() -> None:
    found = batched(np.zeros((2, 3), np.float32), ..., np.ones((2, 3), np.float32))
    assert (found.shape, found.dtype) == ((3, 2, 3), np.float32)
    assert found[2].all()
    assert not found[:2].any()
    assert batched(np.array([1]), np.array([2.5])).dtype == object  # int64 has values that float64 has not
    found = batched(np.array([1], np.int32), np.array([2.5]))
    assert found.dtype == np.float64
    assert found.tolist() == [[1], [2.5]]


def test_arrays_of_several_shapes_are_objects() -> None:
    found = batched(np.zeros(2), np.zeros(3), ...)
    assert found.dtype == object
    assert [None if each is None else each.shape for each in found] == [(2,), (3,), None]


def test_dicts_are_batched_in_turn() -> None:
    infos = batch_infos({0: {"a": {"b": {"c": 1}}}, 2: {"a": {"b": {}}}}, 3)
    assert infos["_a"].tolist() == [True, False, True]
    assert infos["a"]["_b"].tolist() == [True, False, True]
    assert infos["a"]["b"]["c"].tolist() == [1, 0, 0]
    assert infos["a"]["b"]["_c"].tolist() == [True, False, False]


def test_final_observations_stay_apart() -> None:
    found = batch_infos({1: {"final_obs": np.zeros(2)}, 2: {"final_obs": np.ones(2)}}, 3)["final_obs"]
    assert found.dtype == object
    assert found[0] is None
    assert found[2].tolist() == [1, 1]


def test_nothing_is_nothing() -> None:
    assert batch_infos({}, 3) == {}
    assert batch_infos({0: {}, 1: {}}, 3) == {}


numbers = st.one_of(
    st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.booleans(), st.none(), st.text("xyz", max_size=3)
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), numbers), min_size=1, max_size=5))
def test_no_value_changes(infos: list[dict[str, Any]]) -> None:
    found = batch_infos(dict(enumerate(infos)), len(infos))
    for env, info in enumerate(infos):
        for key in "abc":
            assert bool(found.get(f"_{key}", np.zeros(len(infos)))[env]) is (key in info)
        for key, value in info.items():
            assert found[key][env] == value
            assert isinstance(found[key][env], bool | np.bool_) is isinstance(value, bool)


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "i": st.integers(-99, 99),
                "f": st.floats(-9, 9),
                "d": st.dictionaries(st.just("x"), st.text("xyz", max_size=2)),
            },
        ),
        min_size=1,
        max_size=4,
    )
)
def test_it_is_what_gymnasium_makes_where_types_agree(infos: list[dict[str, Any]]) -> None:
    peer = VectorEnv()
    peer.num_envs = len(infos)
    expected: dict[str, Any] = {}
    for env, info in enumerate(infos):
        expected = peer._add_info(expected, info, env)
    _compare(batch_infos(dict(enumerate(infos)), len(infos)), expected)


def _compare(own: Any, peer: Any) -> None:
    assert own.keys() == peer.keys()
    for key, value in peer.items():
        if isinstance(value, dict):
            _compare(own[key], value)
        else:
            assert own[key].dtype == value.dtype
            np.testing.assert_array_equal(own[key], value)


def test_lengths_of_time_keep_their_units_and_stand_beside_anything() -> None:
    for values in (
        (np.timedelta64(3, "s"), np.timedelta64(4, "ms")),
        (np.timedelta64(3, "s"), 1.5),
        (np.timedelta64(3, "s"), ...),
    ):
        found = batched(*values)
        assert found.dtype == object
        assert [(type(value), str(value)) for value in found if value is not None] == [
            (type(value), str(value)) for value in values if value is not ...
        ]
