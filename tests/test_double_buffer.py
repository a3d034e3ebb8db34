"""Which half is written next: any order of commands against a small model of two pages for each env."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioenvs.engine.double_buffer import DoubleBuffer
from aioenvs.engine.layout import IN_NEXT, IN_ROOT, WRITE_ROOT

NUM_ENVS = 4
SOME = st.frozensets(st.integers(0, NUM_ENVS - 1), min_size=1).map(lambda envs: np.array(sorted(envs)))


@dataclass
class Page:
    """One env: what stands in its two halves, and what was lent, by the number of the command that wrote it."""

    halves: list[int] = field(default_factory=lambda: [0, 0])
    asked: int = 0
    lent: dict[int, int] = field(default_factory=dict)  # by the command that lent it: in which half


class TurnsKeepWhatIsLent(RuleBasedStateMachine):
    """Whatever is asked of whom, what was lent stands until the second next command."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.turn = np.zeros(NUM_ENVS, np.uint8), np.zeros(NUM_ENVS, np.uint8)
        self.turns = DoubleBuffer(self.where, self.turn)
        self.pages = [Page() for _ in range(NUM_ENVS)]
        self.at_work: list[tuple[np.ndarray, bool]] = []

    @rule(envs=SOME, lends=st.booleans())
    def ask(self, envs: np.ndarray, lends: bool) -> None:
        """A command is sent to those of the envs that are not at work."""
        envs = np.array([env for env in envs.tolist() if all(env not in asked for asked, _ in self.at_work)], np.intp)
        if not len(envs):
            return
        self.turns.decide(envs, lends=lends)
        for env, target in zip(envs.tolist(), self.turns.target(envs).tolist(), strict=True):
            page = self.pages[env]
            page.asked += 1
            page.halves[target] = page.asked
            page.lent = {number: half for number, half in page.lent.items() if page.asked - number < 2}
        self.at_work.append((envs, lends))

    @precondition(lambda self: self.at_work)
    @rule(
        data=st.data(), region=st.sampled_from([IN_ROOT, IN_NEXT]), ends=st.sampled_from(["done", "failed", "unheard"])
    )
    def end(self, data: st.DataObject, region: int, ends: str) -> None:
        """A command is done, fails half-way, or is answered when nobody listens any more."""
        envs, lends = self.at_work.pop(data.draw(st.integers(0, len(self.at_work) - 1)))
        if ends != "failed":
            self.where[envs] = 2 * self.turns.target(envs) + region
        if lends and ends == "done" and (half := self.turns.half(envs)) is not None:
            for env in envs.tolist():
                page = self.pages[env]
                page.lent[page.asked] = half
            self.turns.lend(envs)

    @invariant()
    def what_is_lent_stands(self) -> None:
        for page in self.pages:
            for number, half in page.lent.items():
                assert page.halves[half] == number

    @invariant()
    def plain_means_the_first_slot(self) -> None:
        if self.turns.plain:
            assert (self.where <= IN_NEXT).all()
            assert not self.turn.any()
            assert not self.turns._lent.any()


TestTurns = TurnsKeepWhatIsLent.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def make() -> tuple[DoubleBuffer, np.ndarray, np.ndarray]:
    where, turn = np.zeros(NUM_ENVS, np.uint8), np.zeros(NUM_ENVS, np.uint8)
    return DoubleBuffer(where, turn), where, turn


def test_nothing_is_looked_up_as_long_as_nothing_was_lent() -> None:
    turns, where, turn = make()
    turns.decide(slice(None))
    assert turns.plain
    assert turn.tolist() == where.tolist() == [0] * NUM_ENVS


def test_all_is_in_the_first_slot_again_two_commands_after_the_last_loan() -> None:
    turns, where, turn = make()
    everybody = slice(None)
    written = []
    for lends in (True, True, False, False, False):
        turns.decide(everybody, lends=lends)
        written.append(turns.target(everybody).tolist())
        where[:] = 2 * turn + IN_NEXT
        if lends:
            turns.lend(everybody)
    assert written == [[0] * NUM_ENVS, [1] * NUM_ENVS, *[[0] * NUM_ENVS] * 3]
    assert turns.plain


def test_after_a_loan_of_some_a_loan_of_all_goes_where_those_have_to_go() -> None:
    turns, where, _ = make()
    some = np.array([1, 2])
    turns.decide(some, lends=True)
    where[some] = IN_NEXT
    turns.lend(some)
    turns.decide(slice(None), lends=True)
    assert turns.target(slice(None)).tolist() == [1] * NUM_ENVS


def test_envs_whose_loans_are_in_different_slots_cannot_go_to_the_same() -> None:
    turns, where, _ = make()
    for envs in ([0, 1], [1]):
        turns.decide(np.array(envs), lends=True)
        where[envs] = 2 * turns.target(np.array(envs)) + IN_NEXT
        turns.lend(np.array(envs))
    turns.decide(np.array([0, 1, 2]), lends=True)
    assert turns.target(np.array([0, 1])).tolist() == [1, 0]
    where[:3] = 2 * turns.target(np.array([0, 1, 2])) + IN_NEXT
    assert turns.half(np.array([0, 1, 2])) is None
    assert turns.halves(np.array([0, 1])).tolist() == [1, 0]


@pytest.mark.parametrize("whole", [True, False])
def test_whether_the_root_is_wanted_is_said_for_one_command(whole: bool) -> None:
    turns, _, turn = make()
    turns.decide(slice(None), lends=True, whole=whole)
    assert (turn >= WRITE_ROOT).all() == whole
    turns.lend(slice(None))
    assert turn.tolist() == [1] * NUM_ENVS
