"""Who may be asked: sequences of operations against a small model, and what the errors say."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aioenvs.engine.env_states import EnvState, EnvStates
from aioenvs.errors import ClosedError, ConcurrencyError, WorkerDiedError, WorkerError

NUM_ENVS = 4
SOME = st.frozensets(st.integers(0, NUM_ENVS - 1), min_size=1)
COMMANDS = st.sampled_from(["reset", "step", "set_seed"])


@dataclass
class Model:
    """One env, told as plainly as possible."""

    held: str | None = None
    owes: bool = False
    error: WorkerError | None = None

    def state(self, closed: bool) -> EnvState:
        if closed:
            return EnvState.CLOSED
        if self.error is not None:
            return EnvState.BROKEN
        if self.held is not None:
            return EnvState.BUSY
        return EnvState.DRAINING if self.owes else EnvState.IDLE


class SlotsFollowTheModel(RuleBasedStateMachine):
    """Any order of operations leaves the slots as the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = EnvStates(NUM_ENVS)
        self.envs = [Model() for _ in range(NUM_ENVS)]
        self.closed = False
        self.deaths = 0

    @rule(envs=SOME, command=COMMANDS, replacing=st.booleans())
    def acquire(self, envs: frozenset[int], command: str, replacing: bool) -> None:
        models = [self.envs[env] for env in sorted(envs)]
        if self.closed:
            with pytest.raises(ClosedError, match=f"{command}: the envs are closed"):
                self.slots.acquire(envs, command, replacing=replacing)
        elif not replacing and (broken := [model.error for model in models if model.error is not None]):
            with pytest.raises(WorkerDiedError) as caught:
                self.slots.acquire(envs, command)
            assert str(caught.value) == str(broken[0])
        elif pending := {model.held for model in models if model.held is not None}:
            with pytest.raises(ConcurrencyError) as caught:
                self.slots.acquire(envs, command, replacing=replacing)
            assert f"while {' and '.join(sorted(pending))} is still pending" in str(caught.value)
        else:
            owing = any(model.owes for model in models)
            assert self.slots.acquire(envs, command, replacing=replacing) is not owing
            for model in models:
                model.held = command

    @rule(envs=SOME)
    def send(self, envs: frozenset[int]) -> None:
        able = {env for env in envs if self.envs[env].held and not self.envs[env].error and not self.closed}
        self.slots.sent(able)
        for env in able:
            self.envs[env].owes = True

    @rule(envs=SOME)
    def answer(self, envs: frozenset[int]) -> None:
        self.slots.answered(envs)
        for env in envs:
            self.envs[env].owes = False

    @rule(envs=SOME)
    def release(self, envs: frozenset[int]) -> None:
        self.slots.release(envs)
        for env in envs:
            self.envs[env].held = None

    @rule(envs=SOME)
    def break_(self, envs: frozenset[int]) -> None:
        self.deaths += 1
        error = WorkerDiedError(f"death {self.deaths}", env_index=sorted(envs), pid=self.deaths)
        self.slots.break_(envs, error)
        for env in envs:
            self.envs[env].error = self.envs[env].error or error
            self.envs[env].owes = False

    @rule(envs=SOME)
    def repair(self, envs: frozenset[int]) -> None:
        self.slots.repair(envs)
        for env in envs:
            self.envs[env].error = None

    @rule()
    def close(self) -> None:
        self.slots.close()
        self.closed = True
        for model in self.envs:
            model.owes = False

    @invariant()
    def agrees(self) -> None:
        everything = frozenset(range(NUM_ENVS))
        assert [self.slots.state(env) for env in range(NUM_ENVS)] == [m.state(self.closed) for m in self.envs]
        assert self.slots.unanswered(everything) == {env for env, model in enumerate(self.envs) if model.owes}
        assert self.slots.broken(everything) == {env for env, model in enumerate(self.envs) if model.error}
        for env, model in enumerate(self.envs):
            assert self.slots.drained({env}) is not model.owes


TestSlotsFollowTheModel = SlotsFollowTheModel.TestCase
TestSlotsFollowTheModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def died(message: str = "it died") -> WorkerDiedError:
    return WorkerDiedError(message, env_index=(0, 1), pid=7)


def states(slots: EnvStates) -> list[str]:
    return [slots.state(env).value for env in range(slots.num_envs)]


def test_the_life_of_a_request() -> None:
    slots = EnvStates(2)
    assert states(slots) == ["idle", "idle"]
    assert slots.acquire({0}, "step")
    slots.sent({0})
    assert states(slots) == ["busy", "idle"]
    slots.answered({0})
    assert states(slots) == ["busy", "idle"]
    slots.release({0})
    assert states(slots) == ["idle", "idle"]


def test_an_abandoned_request_drains_before_the_next_one_is_sent() -> None:
    slots = EnvStates(2)
    slots.acquire({0, 1}, "step")
    slots.sent({0, 1})
    slots.release({0, 1})
    slots.answered({1})
    assert states(slots) == ["draining", "idle"]
    assert slots.acquire({1}, "step")
    assert not slots.acquire({0}, "reset")
    assert states(slots) == ["busy", "busy"]
    assert not slots.drained({0, 1})
    slots.answered({0})
    assert slots.drained({0, 1})


def test_the_error_names_envs_and_pending_commands() -> None:
    slots = EnvStates(6)
    slots.acquire({1, 2, 3}, "step")
    slots.acquire({5}, "reset")
    with pytest.raises(ConcurrencyError) as caught:
        slots.acquire({0, 2, 3, 5}, "rollout")
    assert str(caught.value) == (
        "rollout was asked of envs 2-3, 5 while reset and step is still pending there; "
        "await that first, or address other envs"
    )


@pytest.mark.parametrize("reason", ["held", "broken", "closed"])
def test_a_refused_request_holds_nothing(reason: str) -> None:
    slots = EnvStates(3)
    if reason == "held":
        slots.acquire({1}, "step")
    elif reason == "broken":
        slots.break_({1}, died())
    else:
        slots.close()
    before = states(slots)
    with pytest.raises((ConcurrencyError, WorkerDiedError, ClosedError)):
        slots.acquire({0, 1, 2}, "reset")
    assert states(slots) == before
    slots.release({1})
    slots.repair({1})
    if reason != "closed":
        assert slots.acquire({0, 1, 2}, "reset")


def test_everybody_gets_an_error_of_their_own() -> None:
    slots = EnvStates(2)
    error = died()
    error.__cause__ = ValueError("why")
    slots.break_({0, 1}, error)
    raised = []
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match="it died") as caught:
            slots.acquire({1}, "step")
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert error.__traceback__ is None
    assert [(e.env_index, e.pid, e.__cause__) for e in raised] == [((0, 1), 7, error.__cause__)] * 2


def test_the_first_cause_of_death_stays() -> None:
    slots = EnvStates(1)
    slots.break_({0}, died("first"))
    slots.break_({0}, died("second"))
    assert str(slots.error(0)) == "first"
    slots.repair({0})
    slots.break_({0}, died("third"))
    assert str(slots.error(0)) == "third"


def test_a_command_that_replaces_dead_workers_may_hold_their_envs() -> None:
    slots = EnvStates(2)
    slots.break_({0}, died())
    assert slots.acquire({0, 1}, "reset", replacing=True)
    assert states(slots) == ["broken", "busy"]
    with pytest.raises(ConcurrencyError, match="reset was asked of envs 0-1 while reset is still pending"):
        slots.acquire({0, 1}, "reset", replacing=True)
    slots.repair({0})
    assert states(slots) == ["busy", "busy"]


def test_a_death_ends_the_wait_for_a_reply() -> None:
    slots = EnvStates(1)
    slots.acquire({0}, "step")
    slots.sent({0})
    slots.release({0})
    slots.break_({0}, died())
    assert slots.drained({0})
    slots.repair({0})
    assert states(slots) == ["idle"]


def test_closed_comes_before_everything() -> None:
    slots = EnvStates(3)
    slots.acquire({0}, "step")
    slots.sent({0})
    slots.break_({1}, died())
    slots.close()
    slots.close()
    assert states(slots) == ["closed"] * 3
    assert slots.drained({0, 1, 2})


def test_no_envs_may_always_be_asked() -> None:
    slots = EnvStates(1)
    slots.acquire({0}, "step")
    slots.sent({0})
    assert slots.acquire(frozenset(), "step")
