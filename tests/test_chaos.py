"""A short run of chaos.py, which says what it is; and that it would find what it looks for."""

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from chaos import Mismatch, Options, Round, run
from chaos_requests import Request

from aioenvs.engine.double_buffer import DoubleBuffer
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.pools.restart_policy import RestartPolicy
from aioenvs.engine.rows import Part
from aioenvs.faces.first_ready import PendingSteps
from aioenvs.faces.session import Session

pytestmark = pytest.mark.slow

PLAIN = Options(
    count=3,
    processes=2,
    policy="restart",
    max_restarts=10**6,
    step_timeout=None,
    method="forkserver",
    size=9,
    loose=False,
)
THREADS = replace(PLAIN, backend="thread", policy="raise", processes=3)


def go(seed: int, operations: int, options: Options | None = None, factory: Any = None) -> Counter[str]:
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(run(seed, operations=operations, seconds=20, per_round=60, options=options))


@pytest.mark.parametrize("factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        replace(PLAIN, processes=3, policy="raise", loose=True, step_timeout=0.5),
        replace(PLAIN, plain=True, deadly=False),
        replace(PLAIN, backend="thread", policy="raise", torch=True, loose=True),
    ],
    ids=["packed", "one each", "plain", "thread"],
)
def test_nothing_comes_back_that_must_not(options: Options, factory: Any) -> None:
    counts = go(1, 80, options, factory)
    assert counts["step_and_maybe_reset"] > 0
    assert counts["reset"] > 0
    assert counts["received"] > 0


def test_one_with_deaths() -> None:
    counts = go(0, 300, PLAIN)
    assert counts["lost"] > 0
    assert counts["cancelled"] > 0


async def test_an_error_may_name_an_env_whose_worker_was_replaced_meanwhile() -> None:
    """Of two steps that were sent, one fails, and the other is lost with a worker that a third env has a new one of."""
    course = Round(replace(PLAIN, count=4, policy="raise"), random.Random(0))  # envs 0 and 1, 2 and 3
    async with course.env:
        await course._request([1, 2, 3], True, kind="reset", cancels=False)
        worker = course.env._pool.hosts[1]
        os.kill(worker.pid, signal.SIGSTOP)  # so that it never answers
        for env in (0, 2):
            request = Request(course, "step_and_maybe_reset", [env], True, {})
            await request.send(None)
            course.sent[env] = request.alone(env)
        course._signal(1, signal.SIGKILL)
        await asyncio.wait([worker.ended])
        await course._request([1], True, kind="look", cancels=False)  # after which the error of env 0 has come, too
        await course._request([3], True, kind="reset", cancels=False)
        await course._receive(view=[0, 2], least=2, cancels=False)
        assert course.counts["ResetNeededError"] == 1
        assert course.sent == {}


def test_a_reply_that_comes_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be if nobody counted requests: a reply goes to whoever still waits, and waits first."""

    def answered(self: Pool, host: Any, sequence: int, *args: Any, **kwargs: Any) -> None:
        waiting = [number for number, share in host.pending.items() if not getattr(share.request, "settled", True)]
        genuine(self, host, min(waiting, default=sequence), *args, **kwargs)

    genuine = Pool.answered
    monkeypatch.setattr(Pool, "answered", answered)
    monkeypatch.setattr("aioenvs.engine.env_states.EnvStates.unanswered", lambda self, envs: set())
    monkeypatch.setattr("aioenvs.engine.env_states.EnvStates.drained", lambda self, envs: True)
    monkeypatch.setattr("aioenvs.engine.env_states.EnvStates.sent", lambda self, envs: None)
    with pytest.raises(Mismatch):
        go(1, 2000, replace(PLAIN, policy="raise"))


def test_results_that_are_not_copies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "_copy", lambda self, region: {k: v[...] for k, v in self.own.halves[0][region].items()})
    with pytest.raises((Mismatch, RuntimeError, IndexError, ValueError, AssertionError)):
        go(1, 2000, PLAIN)


def test_a_loss_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestartPolicy, "take_lost", lambda self, envs: self._lost.clear() or {})
    with pytest.raises(Mismatch):
        go(1, 2000, PLAIN)


def test_another_reward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(self: Part, region: str, arrays: Any) -> Any:
        return {key: value + (key == ("reward",)) for key, value in genuine(self, region, arrays).items()}

    genuine = Part._with_objects
    monkeypatch.setattr(Part, "_with_objects", values)
    with pytest.raises(Mismatch, match="the reward for") as caught:
        go(1, 100, PLAIN)
    assert any(note.startswith("seed 1, round 0: Options(") for note in caught.value.__notes__)
    assert any("the last operations" in note for note in caught.value.__notes__)


def test_a_recv_that_loses_something_when_it_is_cancelled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(self: PendingSteps, waiter: Any, deadline: Any) -> None:
        try:
            await genuine(self, waiter, deadline)
        except asyncio.CancelledError:
            self.take(list(self._settled))
            raise

    genuine = PendingSteps._wait
    monkeypatch.setattr(PendingSteps, "_wait", wait)
    with pytest.raises((Mismatch, ValueError)):
        go(1, 2000, THREADS)


def test_a_result_of_another_env_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_step(self: Session, envs: Any) -> Any:
        return genuine(self, envs[::-1])

    genuine = Session.last_step
    monkeypatch.setattr(Session, "last_step", last_step)
    with pytest.raises(Mismatch):
        go(1, 2000, THREADS)


def test_a_step_that_is_sent_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_first_ready(self: Pool, lease: Any, inputs: Any, deliver: Any) -> Any:
        genuine(self, lease, inputs, lambda envs, outcome: None)
        return genuine(self, lease, inputs, deliver)

    genuine = Pool.step_first_ready
    monkeypatch.setattr(Pool, "step_first_ready", step_first_ready)
    with pytest.raises(Mismatch):
        go(1, 2000, THREADS)


def test_options_are_drawn_by_the_seed() -> None:
    first, second = (Options.drawn(random.Random(3)) for _ in range(2))
    assert first == second


def test_a_loan_that_is_written_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DoubleBuffer, "lend", lambda self, rows: None)
    with pytest.raises(Mismatch, match="what was lent changed before its time"):
        go(1, 2000, THREADS)
