"""Random streams of an env's own: what a seed makes them, and that they leave no trace when the env does not run."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from aioenvs.engine.streams import NUMPY, PYTHON, Streams
from aioenvs.envs.adapter import TORCH

SEEDS = [0, 3, 2**31, 2**32 - 2]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random_sample()), float(torch.rand((), dtype=torch.float64))


def seed_by_hand(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def own_streams(seed: int | None = None) -> Streams:
    streams = Streams(PYTHON, NUMPY, TORCH)
    if seed is not None:
        streams.seed(seed)
    return streams


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_means_what_it_means_by_hand(seed: int) -> None:
    seed_by_hand(seed)
    expected = [draw() for _ in range(3)]
    seed_by_hand(11)
    with own_streams(seed):
        assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("seed", [2**32, 2**63, 2**64 + 1])
def test_any_seed_will_do(seed: int) -> None:
    with own_streams(seed):
        first = draw()
    with own_streams(seed):
        assert draw() == first


def test_they_go_on_where_they_stopped() -> None:
    seed_by_hand(3)
    expected = [draw() for _ in range(4)]
    streams, found = own_streams(3), []
    for _ in range(4):
        with streams:
            found.append(draw())
        draw()  # the caller's
    assert found == expected


def test_two_of_them_do_not_meet() -> None:
    first, second = own_streams(3), own_streams(3)
    numbers: list[list[Any]] = [[], []]
    for _ in range(3):
        for streams, drawn in zip((first, second), numbers, strict=True):
            with streams:
                drawn.append(draw())
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0])) == 3


def test_the_caller_does_not_notice() -> None:
    streams = own_streams(3)
    before = states()
    with streams:
        draw()
        seed_by_hand(5)
        random.setstate(random.Random(7).getstate())
        np.random.set_state(np.random.RandomState(7).get_state())
        torch.set_rng_state(torch.Generator().manual_seed(7).get_state())
    assert states() == before


def test_an_exception_leaves_everything_in_its_place() -> None:
    seed_by_hand(3)
    expected = [draw() for _ in range(2)]
    streams = own_streams(3)
    before = states()
    with pytest.raises(ValueError, match="oops"), streams:  # noqa: PT012
        assert draw() == expected[0]
        raise ValueError("oops")
    assert states() == before
    with streams:
        assert draw() == expected[1]


def test_without_a_seed_they_are_the_callers_own() -> None:
    streams = own_streams()
    seed_by_hand(3)
    expected = [draw() for _ in range(3)]
    seed_by_hand(3)
    found = [draw()]
    with streams:
        found.append(draw())
    found.append(draw())
    assert found == expected


def test_a_new_seed_begins_anew() -> None:
    streams = own_streams(3)
    with streams:
        first = draw()
        draw()
    streams.seed(3)
    with streams:
        assert draw() == first


def test_of_no_generator_nothing_is_kept() -> None:
    streams = Streams()
    streams.seed(3)
    seed_by_hand(4)
    with streams:
        first = draw()
    seed_by_hand(4)
    assert draw() == first


def test_they_can_be_nested() -> None:
    seed_by_hand(3)
    outer_expected = [draw() for _ in range(2)]
    seed_by_hand(4)
    inner_expected = draw()
    outer, inner = own_streams(3), own_streams(4)
    before = states()
    with outer:
        found = [draw()]
        with inner:
            assert draw() == inner_expected
        found.append(draw())
    assert found == outer_expected
    assert states() == before
