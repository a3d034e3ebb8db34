"""The chain of seeds; the numbers are those of TorchRL's seed_generator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioenvs.engine.worker.random_streams import LIMIT, next_seed, seed_chain

CHAIN = [0, 795726461, 2841183792, 2309840538]


def test_the_chain_of_torchrl() -> None:
    assert seed_chain(0, 3) == (CHAIN[:3], CHAIN[3])


def test_a_chain_goes_on_where_another_one_ended() -> None:
    seeds, following = seed_chain(0, 1)
    assert seeds + seed_chain(following, 2)[0] == CHAIN[:3]


@given(st.integers(0, 2**80), st.integers(0, 4))
def test_each_seed_follows_from_the_one_before(seed: int, count: int) -> None:
    seeds, following = seed_chain(seed, count)
    assert len(seeds) == count
    assert [*seeds, following][0] == seed
    assert [next_seed(one) for one in seeds] == [*seeds, following][1:]
    assert all(0 <= one < LIMIT for one in [*seeds, following][1:])


def test_static_seeds_are_all_the_same_and_returned() -> None:
    assert seed_chain(7, 3, static=True) == ([7, 7, 7], 7)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_a_numpy_integer_is_an_integer(dtype: type[np.integer]) -> None:
    seeds, following = seed_chain(dtype(5), 2)
    assert (seeds, following) == seed_chain(5, 2)
    assert {type(seed) for seed in [*seeds, following]} == {int}


def test_no_seed_draws_one() -> None:
    drawn = {seed_chain(None, 1)[0][0] for _ in range(5)}
    assert len(drawn) > 1
    assert all(0 <= seed < LIMIT for seed in drawn)


def test_no_seed_is_still_the_same_for_all_if_static() -> None:
    seeds, following = seed_chain(None, 3, static=True)
    assert set(seeds) == {following}


@pytest.mark.parametrize("seed", [1.0, "1", True, np.True_, np.float32(1), [1], np.array([1])])
def test_what_is_no_integer_is_refused(seed: object) -> None:
    with pytest.raises(TypeError, match="a seed must be an integer or None, got"):
        seed_chain(seed, 1)


@pytest.mark.parametrize("seed", [-1, np.int64(-7)])
def test_a_negative_seed_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="a seed must not be negative, got -"):
        seed_chain(seed, 1)
