"""How often, and how late, a worker that died is restarted; and with which seed."""

from hypothesis import given
from hypothesis import strategies as st

from aioenvs.engine.pools.restart_policy import FIRST_DELAY, LONGEST_DELAY, SHORT_LIFE, RestartBudget, derived_seed

LIVES = st.lists(st.one_of(st.floats(0, SHORT_LIFE, exclude_max=True), st.floats(SHORT_LIFE, 1e9)), max_size=40)
SEEDS = st.integers(-(2**63), 2**64)


@given(LIVES, st.integers(0, 45))
def test_no_more_than_its_budget(lives: list[float], most: int) -> None:
    budget = RestartBudget(most)
    delays = [budget.next_delay(lived) for lived in lives]
    granted = min(most, len(lives))
    assert budget.used == granted
    assert None not in delays[:granted]
    assert delays[granted:] == [None] * (len(lives) - granted)


@given(LIVES)
def test_how_long_it_waits(lives: list[float]) -> None:
    budget, hasty = RestartBudget(len(lives)), 0
    for lived in lives:
        hasty = hasty + 1 if lived < SHORT_LIFE else 0
        delay = budget.next_delay(lived)
        assert delay is not None
        assert 0 <= delay <= LONGEST_DELAY
        assert (delay == 0) == (hasty < 2)


def test_it_waits_twice_as_long_each_time() -> None:
    budget = RestartBudget(10)
    delays = [budget.next_delay(0.0) for _ in range(10)]
    assert delays == [0.0, *(min(FIRST_DELAY * 2**n, LONGEST_DELAY) for n in range(9))]
    assert delays[-1] == LONGEST_DELAY


def test_one_that_lived_long_is_restarted_at_once_again() -> None:
    budget = RestartBudget(10)
    assert [budget.next_delay(lived) for lived in (0, 0, 0, SHORT_LIFE, 0, 0)] == [0, 0.1, 0.2, 0, 0, 0.1]


def test_even_a_very_large_budget_has_delays() -> None:
    budget = RestartBudget(5000)
    assert [budget.next_delay(0) for _ in range(2000)][-1] == LONGEST_DELAY


@given(SEEDS, st.integers(1, 10**6))
def test_a_derived_seed_is_one(seed: int, restart: int) -> None:
    derived = derived_seed(seed, restart)
    assert type(derived) is int
    assert 0 <= derived < 2**32
    assert derived == derived_seed(seed, restart)


def test_derived_seeds_differ() -> None:
    derived = {derived_seed(seed, restart) for seed in range(100) for restart in range(1, 11)}
    assert len(derived | set(range(100))) == 1100
