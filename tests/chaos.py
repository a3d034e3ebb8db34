"""Everything at once, at random, against a model of what each env must answer.

    python tests/chaos.py --seed 0 --operations 100000 --minutes 5

Envs are stepped, sent steps, reset, called, viewed, cancelled, killed, stopped, closed and opened again, several
requests at a time, and every value that comes back must be one that the model of its env allows: an env observes its
index, the generation it belongs to (drawn anew at each construction), its episode, its step, and what it was last told,
a number that no other request has. So an answer to another request, a late, a doubled or a lost one shows. Where a
request was cancelled, or a worker may be dead, the model knows several states, and each observation narrows them down.

A run is made of rounds, each with envs of its own. Decisions follow from the seed; what the system makes of them, and
when, does not, so the same seed finds a race again sooner or later rather than at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from chaos_envs import ChaosEnv, make_torch_env
from chaos_model import MANY, Mismatch, Model, require
from chaos_requests import Receipt, Request
from tensordict import TensorDict

from aioenvs import AsyncParallelEnv, ParallelEnv
from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.errors import ConcurrencyError, WorkerDiedError

__all__ = ["Mismatch", "Options", "Round", "run"]

PATIENCE = 60.0  # seconds that a round never takes


@dataclass(frozen=True)
class Options:
    """How a round is; see `AsyncParallelEnv` for most.

    Attributes:
        size: Of the observations, in bytes.
        loose: Whether these travel as objects.
        backend: "process" or "thread".
        plain: Whether it is a synchronous face, which is called in a thread.
        torch: Whether they are torch envs.
        deadly: Whether workers are killed often rather than now and then.
    """

    count: int
    processes: int
    policy: str
    max_restarts: int
    step_timeout: float | None
    method: str
    size: int
    loose: bool
    backend: str = "process"
    plain: bool = False
    torch: bool = False
    deadly: bool = True

    @classmethod
    def drawn(cls, rng: random.Random, backend: str | None = None) -> Options:
        count = rng.randint(1, 5)
        backend = backend or rng.choice(["process", "process", "thread"])
        in_threads = backend == "thread"
        method = rng.choice(["forkserver"] * 30 + ["fork"] * 4 + ["spawn"])
        return cls(
            count=count,
            processes=rng.choice([count, rng.randint(1, count)]),
            policy="raise" if in_threads else rng.choice(["raise", "restart", "restart"]),
            max_restarts=rng.choice([1, MANY, MANY, MANY]),
            step_timeout=rng.choice([None, 0.5]),
            method=method,
            size=rng.choice([1, 100, 10_000, 10_000, 1_000_000]),
            loose=rng.random() < 0.3,
            backend=backend,
            plain=rng.random() < 0.25,
            torch=(in_threads or method == "fork") and rng.random() < 0.5,  # which others would import for long
            deadly=rng.random() < 0.4,
        )

    def make(self) -> Any:
        options: dict[str, Any] = {}
        if self.backend == "process":
            options = {
                "on_worker_death": self.policy,
                "max_restarts": self.max_restarts,
                "mp_start_method": self.method,
            }
        return (ParallelEnv if self.plain else AsyncParallelEnv)(
            self.count,
            make_torch_env if self.torch else ChaosEnv,
            create_env_kwargs=[{"index": i, "size": self.size, "loose": self.loose} for i in range(self.count)],
            num_processes=self.processes,
            backend=self.backend,
            step_timeout=self.step_timeout,
            close_timeout=2.0,
            **options,
        )


class Round:
    """Some envs, what is known of them, and random operations on them.

    Args:
        options: How the envs are.
        rng: What decides.
    """

    def __init__(self, options: Options, rng: random.Random) -> None:
        self.options, self.rng = options, rng
        self.env = options.make()
        self.models = [Model(index) for index in range(options.count)]
        self.seen: set[int] = set()  # all generations that ever answered
        self.history: deque[str] = deque(maxlen=40)
        self.counts: Counter[str] = Counter()
        self.done = 0
        self.sent: dict[int, Request] = {}  # what was sent and not received, in the order of sending
        self.flying: set[Request] = set()  # what is asked and not judged yet
        self.is_closing = False
        self._told = rng.randrange(1, 2**40)
        self._stopped: set[int] = set()

    # -- asking -----------------------------------------------------------------------------------------

    @property
    def envs(self) -> Any:
        """What has the pool."""
        return self.env._env if self.options.plain else self.env

    @property
    def outstanding(self) -> list[int]:
        return list(self.env.outstanding)

    @property
    def idle(self) -> list[int]:
        """The envs that were sent nothing."""
        return [env for env in range(self.options.count) if env not in self.sent]

    async def ask(self, view: list[int] | None, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the whole, or of a view, in a thread if it blocks."""
        method = getattr(self.env if view is None else self.env[view], name)
        if self.options.plain:
            return await asyncio.to_thread(method, *args, **kwargs)
        result = method(*args, **kwargs)
        return await result if asyncio.iscoroutine(result) else result

    # -- the course of it -------------------------------------------------------------------------------

    async def run(self, operations: int, deadline: float) -> None:
        """So many operations, or fewer if the time is up; then what is certain is compared once more."""
        try:
            await self.ask(None, "start")
            while self.done < operations and time.monotonic() < deadline:
                await self._operate()
            self._resume()
            await self._check_at_rest()
        finally:
            self._resume()
            await self.ask(None, "close", raise_if_closed=False)

    async def _operate(self) -> None:
        signals = 0.0 if self.options.backend == "thread" else 1.0 if self.options.deadly else 0.1
        kind = self.rng.choices(
            ["one", "several", "send", "receive", "refuse", "kill", "stop", "resume", "overlap", "reopen", "rest"],
            [30, 12, 25, 22, 3, 4 * signals, signals if self.options.step_timeout else 0, 3, 3, 0.4, 4],
        )[0]
        if kind == "kill":
            self._signal(self.rng.randrange(self.options.processes), signal.SIGKILL)
        elif kind == "stop":
            self._signal(self.rng.randrange(self.options.processes), signal.SIGSTOP)
        elif kind == "resume":
            self._resume()
        elif kind == "rest":
            for _ in range(self.rng.randrange(20)):
                await asyncio.sleep(0)
        elif kind in ("several", "overlap") and self.options.plain:
            await self._one()  # which does one thing at a time
        else:
            await getattr(self, f"_{kind}")()

    async def _one(self) -> None:
        if self.idle:
            await self._request(self._some(self.idle), self.rng.random() < 0.5)

    async def _several(self) -> None:
        """Requests for disjoint envs, all at once, and a view that receives."""
        left = self.idle
        self.rng.shuffle(left)
        asked = []
        while left:
            size = self.rng.randint(1, len(left))
            asked.append(self._request(left[:size], True))
            left = left[size:]
        if self.sent:
            asked.append(self._receive(view=self._some(list(self.sent))))
        results = await asyncio.gather(*asked, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _overlap(self) -> None:
        """A second request for envs that are busy is refused, and does not disturb the first."""
        if not self.idle:
            return
        first = asyncio.ensure_future(self._request(self.idle, False, cancels=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scope = self.envs._running_scope
        if not first.done() and scope is not None and scope.pool.states._held:
            await self._is_refused(None, "get_attr", "steps")
        await first

    async def _is_refused(self, view: list[int] | None, name: str, *args: Any) -> None:
        try:
            await self.ask(view, name, *args)
        except (ConcurrencyError, WorkerDiedError):
            self.counts["refused"] += 1
        else:
            raise Mismatch(f"{name} was asked of a busy env")

    async def _refuse(self) -> None:
        """Whatever is asked of an env that was sent a step is refused, and so is what cannot be received."""
        if not self.sent:
            return
        busy = self._some(list(self.sent))
        self._note(f"ask {busy}, which are busy")
        td = TensorDict({"action": torch.ones(self.options.count, dtype=torch.int64)}, [self.options.count])
        await self._is_refused(None, self.rng.choice(["step", "step_and_maybe_reset", "send"]), td)
        await self._is_refused(busy, self.rng.choice(["reset", "render"]))
        try:
            await self.ask(None, "recv", len(self.sent) + 1)
        except ValueError:
            self.counts["refused"] += 1
        else:
            raise Mismatch("more was received than was sent")

    async def _reopen(self) -> None:
        """Close, with or without a request under way, and start again."""
        pending = []
        if self.rng.random() < 0.5 and not self.options.plain:
            if self.idle:
                pending.append(asyncio.ensure_future(self._request(self.idle, False, cancels=False)))
            if self.sent:
                pending.append(asyncio.ensure_future(self._receive(cancels=False)))
            for _ in range(self.rng.randrange(8)):
                await asyncio.sleep(0)
        self._note("close")
        self.is_closing = True
        for model in self.models:
            model.vague = True  # what is under way may be answered by envs that it starts itself
        await self.ask(None, "close", raise_if_closed=False)
        for model in self.models:
            model.vague = True
        for each in pending:
            await each
        await self.ask(None, "close", raise_if_closed=False)
        self.is_closing = False
        self._stopped.clear()
        self.sent.clear()
        self.models = [Model(index) for index in range(self.options.count)]
        await self.ask(None, "start")

    async def _check_at_rest(self) -> None:
        """Receive everything, reset all and step twice: nothing may be left over from before."""
        while self.sent:
            await self._receive(least=len(self.sent), cancels=False)
        everything = list(range(self.options.count))
        for kind in ("reset", "step_and_maybe_reset", "step_and_maybe_reset", "look"):
            await self._request(everything, False, kind=kind, cancels=False)

    # -- one request ------------------------------------------------------------------------------------

    async def _request(
        self, chosen: Sequence[int], by_view: bool, *, kind: str | None = None, cancels: bool = True
    ) -> None:
        options = self._timeout() if kind is None else {}
        kind = (
            kind
            or self.rng.choices(
                ["step", "step_and_maybe_reset", "reset", "echo", "look", "seed"], [20, 45, 18, 10, 8, 3]
            )[0]
        )
        if kind in ("echo", "look", "seed") and not by_view:
            by_view, chosen = bool(self.sent), self.idle
        request = Request(self, kind, list(chosen), by_view, options)
        self.flying.add(request)
        patience = self._patience(0.15) if cancels else None
        kills = self.options.backend == "process"
        kill_at = (
            self.rng.randrange(10) if kills and self.rng.random() < (0.02 if self.options.deadly else 0.001) else None
        )
        self._note(f"{request} {'' if patience is None else f'cancelled after {patience}'}")
        task = asyncio.ensure_future(request.perform())
        if kill_at is not None:
            for _ in range(kill_at):
                await asyncio.sleep(0)
            self._signal(self.rng.choice(self._hosts(chosen)), signal.SIGKILL)
        await _ended(task, patience)
        self.counts[kind] += 1
        request.judge(None if task.cancelled() else task.exception(), None if _failed(task) else task.result())

    async def _send(self) -> None:
        """Send steps to some envs, through the whole or a view of more than these."""
        if not self.idle:
            return
        chosen = self._some(self.idle)
        request = Request(self, "step_and_maybe_reset", chosen, True, self._timeout())
        view = self.rng.choice([None, sorted({*chosen, *self._some(range(self.options.count))})])
        self._note(f"send: {request} by {view or 'the whole'}")
        self.counts["send"] += 1
        try:
            await request.send(view)
        except WorkerDiedError as error:
            request.judge(error, None)
            require(self.outstanding == list(self.sent), f"{request} failed, and yet something was sent")
            return
        order = self.outstanding[len(self.sent) :]
        require(sorted(order) == chosen, f"{order} were sent something and not {chosen}")
        self.sent |= {env: request.alone(env) for env in order}

    async def _receive(self, view: list[int] | None = None, least: int | None = None, *, cancels: bool = True) -> None:
        if not self.sent:
            return
        if view is None and self.rng.random() < 0.3:
            view = sorted({self.rng.choice(list(self.sent)), *self._some(range(self.options.count))})
        there = [env for env in self.sent if view is None or env in view]
        least = self.rng.randint(1, len(there)) if least is None else min(least, len(there))
        most = self.rng.choice([None, self.rng.randint(least, len(there))])
        timeout = self.rng.choice([0.0, 0.0, 0.001, 0.05, 30.0]) if self.rng.random() < 0.25 else None
        if timeout is None and self._stopped and self.options.step_timeout is None:
            timeout = 0.05
        receipt = Receipt(self, view, least, most, timeout)
        patience = self._patience(0.2) if cancels else None
        self._note(f"{receipt} {'' if patience is None else f'cancelled after {patience}'}")
        task = asyncio.ensure_future(receipt.perform())
        await _ended(task, patience)
        self.counts["recv"] += 1
        receipt.judge(None if task.cancelled() else task.exception(), None if _failed(task) else task.result())

    def _timeout(self) -> dict[str, float]:
        """The timeout of a request of its own, or none."""
        return {"timeout": self.rng.choice([0.0, 0.002, 0.1, 30.0])} if self.rng.random() < 0.12 else {}

    def _patience(self, share: float) -> int | None:
        """After how many turns of the loop a request is cancelled; None for never."""
        return self.rng.randrange(30) if self.rng.random() < share and not self.options.plain else None

    def notice_late(self) -> None:
        """The workers of envs that were asked something long ago may have been killed for it."""
        for request in (*self.sent.values(), *self.flying):
            if request.is_slow:
                request.notice_late()

    def tell(self) -> int:
        """A number that no other request gets."""
        self._told += 1
        return self._told

    def _some(self, envs: Sequence[int]) -> list[int]:
        return sorted(self.rng.sample(envs, self.rng.randint(1, len(envs))))

    def group(self, index: int) -> tuple[int, ...]:
        """The envs of the same worker."""
        groups = self.envs._config.groups
        return next(group for group in groups if index in group)

    def _hosts(self, envs: Sequence[int]) -> list[int]:
        return [number for number, group in enumerate(self.envs._config.groups) if set(group) & set(envs)]

    # -- signals ----------------------------------------------------------------------------------------

    def _signal(self, worker: int, number: signal.Signals) -> None:
        pool: Any = self.envs._pool
        found = pool.hosts.get(worker) if pool is not None else None
        if found is None or found.pid is None or found.exited.done():
            return
        self._note(f"{number.name} to the worker of {found.envs}")
        self.counts[number.name] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.pid, number)
        if number == signal.SIGSTOP:
            self._stopped.add(found.pid)
            # Where nobody kills it, or it is not even there yet, it has to wake up some day.
            asyncio.get_running_loop().call_later(self.rng.choice([0.01, 0.1, 0.7, 2.0]), self._resume)
        now = time.monotonic()
        for env in found.envs:
            self.models[env].die(now)

    def _resume(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def _note(self, what: str) -> None:
        self.done += 1
        self.history.append(what)


async def _ended(task: asyncio.Task[Any], patience: int | None) -> None:
    """Wait for the end of a task, or cancel it after so many turns of the loop."""
    if patience is not None:
        for _ in range(patience):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


# -- runs -----------------------------------------------------------------------------------------------


class Log(logging.Handler):
    """Puts what is logged into the history of a round."""

    def __init__(self) -> None:
        super().__init__()
        self.history: deque[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.history is not None:
            self.history.append(f"  log: {record.getMessage()}")


@contextlib.contextmanager
def impatient() -> Iterator[Log]:
    """Workers that die soon after their start are restarted without much delay; yields where the log goes."""
    logger, log = logging.getLogger("aioenvs"), Log()
    former, level, restarts.LONGEST_DELAY = restarts.LONGEST_DELAY, logger.level, 0.01
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(log)
    try:
        yield log
    finally:
        restarts.LONGEST_DELAY = former
        logger.setLevel(level)
        logger.propagate = True
        logger.removeHandler(log)


async def run(
    seed: int,
    *,
    operations: int,
    seconds: float,
    per_round: int = 200,
    options: Options | None = None,
    backend: str | None = None,
    report: Callable[[str], object] = lambda _: None,
) -> Counter[str]:
    """Rounds of operations until there were enough of them, or the time is up.

    Args:
        seed: Of all decisions.
        operations: How many at most.
        seconds: How long at most; what is under way then is still finished.
        per_round: How many operations with the same envs.
        options: How the envs are; drawn for each round if None.
        backend: The only one that is drawn.
        report: Gets a line for each round.

    Returns:
        How often what happened.

    Raises:
        Mismatch: If something came back that must not; with the last operations as a note.
    """
    deadline = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    number = 0
    with impatient() as log:
        while operations > 0 and time.monotonic() < deadline:
            rng = random.Random(f"{seed} {number}")
            course = Round(options or Options.drawn(rng, backend), rng)
            size = min(per_round, operations)
            log.history = course.history
            began = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE):
                    await course.run(size, deadline)
            except BaseException as error:
                error.add_note(f"seed {seed}, round {number}: {course.options}")
                error.add_note("the last operations:\n  " + "\n  ".join(course.history))
                raise
            counts += course.counts
            counts["operations"] += course.done
            report(f"round {number}: {time.monotonic() - began:.1f} s, {course.options}")
            operations -= course.done
            number += 1
    return counts


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--backend", choices=["process", "thread"], help="use only this one")
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop rather than on asyncio's own loop")
    given = parser.parse_args(arguments)
    warnings.simplefilter("error")
    factory = None
    if given.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    began = time.monotonic()
    with asyncio.Runner(loop_factory=factory) as runner:
        counts = runner.run(
            run(
                given.seed,
                operations=given.operations,
                seconds=60 * given.minutes,
                backend=given.backend,
                report=say,
            )
        )
    each = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    say(f"{time.monotonic() - began:.0f} s: {each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
