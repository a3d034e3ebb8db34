"""Sessions: envs that are lent, one to each caller, with bounds on all that callers can hold up. Free of torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from aioenvs.errors import AioEnvsError, ClosedError, ConcurrencyError, WorkerError, shown
from aioenvs.serving.codec import MessageError
from aioenvs.serving.history import History
from aioenvs.serving.hosting.batch import Batch
from aioenvs.serving.hosting.hosted import Answer

__all__ = ["CapacityError", "EnvFailedError", "Session", "SessionEndedError", "SessionLostError", "Sessions"]

logger = logging.getLogger("aioenvs.serving")
NOBODY = 0  # the number of no session
MAX_PAUSE = 30.0  # seconds between two tries to make an env anew


class CapacityError(AioEnvsError):
    """There is no env for one more session.

    Attributes:
        waiting: How many callers wait for one.
        retry_after: Seconds after which one may be free.
    """

    def __init__(self, message: str, waiting: int, retry_after: float) -> None:
        super().__init__(message)
        self.waiting = waiting
        self.retry_after = retry_after


class SessionEndedError(AioEnvsError):
    """The session is over.

    Attributes:
        reason: "left", "idle", "steps", "seconds", "drained" or "ended".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"this session is over: {ENDS.get(reason, reason)}")
        self.reason = reason


class SessionLostError(AioEnvsError):
    """The env of the session died, and another one takes its place; go on with a reset."""


class EnvFailedError(AioEnvsError):
    """The env raised; go on with a reset.

    Attributes:
        kind: The name of its exception's class.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


ENDS = {
    "left": "its holder has left",
    "idle": "nothing was asked of it for too long",
    "steps": "it has had all the steps that a session may take",
    "seconds": "it has lasted as long as a session may",
    "drained": "the server stops",
    "ended": "it was ended",
}


class Session:
    """An env that is lent. `Sessions.lease` gives one.

    Attributes:
        number: Of this session; no other one has it.
        client: Whoever has it, in words.
        env: The index of the env.
        ended: Why it is over; None as long as it is not.
        episodes: How many it has begun.
        steps: How many steps it has taken, of all episodes.
        episode_steps: Of the current one.
        episode_return: The sum of the rewards of the current episode.
        on_end: Called when it is ended by another than its holder.
    """

    def __init__(self, owner: Sessions, number: int, env: int, client: str, seed: int | None) -> None:
        self.number, self.env, self.client = number, env, client
        self.ended: str | None = None
        self.episodes = self.steps = self.episode_steps = 0
        self.episode_return = 0.0
        self.on_end: Callable[[], object] = lambda: None
        self.began = self.last_asked = time.monotonic()
        self._owner = owner
        self._seed = seed
        self._dead = False
        self.asking: asyncio.Task[Any] | None = None
        self.turn = asyncio.Lock()  # of whoever asks the env something
        self._peeking: set[asyncio.Task[Any]] = set()

    @property
    def id(self) -> str:
        """The name of its current episode."""
        return f"{self.number}-{self.episodes}"

    @property
    def state(self) -> dict[str, Any]:
        """The state of the session: `episode_id`, `step_count` and others."""
        return {
            "episode_id": self.id,
            "step_count": self.episode_steps,
            "episode_return": self.episode_return,
            "session_steps": self.steps,
        }

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Returns:
            The observation, and the info.

        Raises:
            SessionEndedError: If the session is over.
            EnvFailedError: If the env raised.
            SessionLostError: If it died.
        """
        answer = await self.ask("reset", {"seed": seed, "options": options})
        observation, _, _, _, info = answer.value
        return observation, info

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step. Cancelling it drops its outcome; the next request waits until the env has done it.

        Args:
            action: An element of the env's space.

        Returns:
            The observation, the reward, whether the episode terminated, whether it was truncated, and the info.

        Raises:
            MessageError: If there is no episode, or this is no action.
            Exception: As for `reset`.
        """
        value: tuple[Any, Any, bool, bool, dict[str, Any]] = (await self.ask("step", action)).value
        return value

    async def render(self) -> Any:
        """Return what the env renders."""
        return (await self.ask("render")).value

    async def ask(self, command: str, data: Any = None, form: str | None = None) -> Answer:
        """Do one of the commands.

        Args:
            command: "reset", "step" or "render".
            data: The arguments of the reset, or the action.
            form: How a message has the action, and the answer's value (see `codec`); None for as themselves.

        Raises:
            ConcurrencyError: If it does another one at this moment.
            Exception: As for `step`.
        """
        if self.ended is not None:
            raise SessionEndedError(self.ended)
        if self.asking is not None:
            raise ConcurrencyError(f"{command}: session {self.number} does something else at this moment; await that")
        task = self.asking = asyncio.current_task()
        assert task is not None
        begun = time.monotonic()
        try:
            return self._taken(command, await self._ask(command, data, form), time.monotonic() - begun)
        except asyncio.CancelledError:
            if self.ended is not None and task.uncancel() == 0:
                raise SessionEndedError(self.ended) from None
            raise
        except WorkerError as error:
            self._owner.history.count("deaths")
            self._dead = True
            logger.warning("session %d lost env %d: %s", self.number, self.env, str(error))
            raise SessionLostError("the env of this session died; go on with a reset, which another one answers") from (
                error
            )
        finally:
            self.asking = None
            if command != "render":
                self.last_asked = time.monotonic()
            if self.ended is not None:
                self._owner.take_back(self)

    async def _ask(self, command: str, data: Any, form: str | None) -> Answer:
        if command == "reset":
            if self._dead:
                await self._owner.batch.renew(self.env)
                self._dead = False
            if self._seed is not None and data.get("seed") is None:
                data = {**data, "seed": self._seed}
            self._seed = None
        limit = self._owner.step_seconds
        async with contextlib.nullcontext() if limit is None else asyncio.timeout(limit), self.turn:
            return await self._owner.batch.ask(self.env, self.number, command, data, form)

    async def peek(self, command: str, form: str | None = None) -> Answer:
        """Do a command for somebody else than the holder, between two of the holder's.

        Raises:
            SessionEndedError: If the session is over.
            WorkerError: If its env died.
        """
        if self.ended is not None:
            raise SessionEndedError(self.ended)
        task = asyncio.ensure_future(self._peek(command, form))
        self._peeking.add(task)
        task.add_done_callback(self._peeking.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self.ended is not None:
                raise SessionEndedError(self.ended) from None
            raise

    async def _peek(self, command: str, form: str | None) -> Answer:
        async with self.turn:
            return await self._owner.batch.ask(self.env, self.number, command, None, form)

    def _taken(self, command: str, answer: Answer, seconds: float) -> Answer:
        history = self._owner.history
        if answer.kind == "refused":
            raise MessageError(answer.value)
        if answer.kind == "failed":
            history.count("failures")
            kind, message = answer.value
            logger.warning("env %d failed in session %d: %s", self.env, self.number, message)
            raise EnvFailedError(kind, message)
        if answer.kind == "lost":
            history.count("deaths")
            raise SessionLostError("the env of this session died with another one; go on with a reset")
        if command == "reset":
            history.count("episodes")
            self.episodes += 1
            self.episode_steps, self.episode_return = 0, 0.0
        elif command == "step":
            history.step(seconds)
            self.steps += 1
            self.episode_steps += 1
            self.episode_return += answer.reward
            if self._owner.max_steps is not None and self.steps >= self._owner.max_steps:
                self.end("steps")
        return answer

    def end(self, reason: str = "ended") -> None:
        """End it, also in the middle of a command; its env goes to somebody else once it has answered."""
        if self.ended is not None:
            return
        self.ended = reason
        self._owner.history.count(f"ended_{reason}")
        for task in self._peeking:
            task.cancel()
        if self.asking is None:
            self._owner.take_back(self)
        elif self.asking is not _current_task():
            self.asking.cancel()
        if reason != "left":
            self.on_end()


def _current_task() -> asyncio.Task[Any] | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.current_task()
    return None


class Sessions:
    """Envs in worker processes, each lent to one session at a time; an async context manager.

    Args:
        make_env: What makes an env: a callable, a Gymnasium id, or an `EnvSpec`. It may have the signatures of
            Gymnasium, which may be coroutine functions, those of a PettingZoo `ParallelEnv`, or be an `EnvBase`.
        num_envs: How many, and so how many sessions there can be.
        max_waiting: How many callers may wait for an env.
        idle_seconds: How long nothing may be asked of a session before it is ended; None for as long as it likes.
        max_steps: How many steps a session may take; None for as many as it likes.
        max_seconds: How long it may last; None for as long as it likes.
        step_seconds: How long a command may take; `TimeoutError` is raised after that, and the late answer is dropped.
        stuck_seconds: How long an env may go on with what its last session left, before its worker is replaced.
        **options: `kwargs` for what makes the envs, `num_processes`, `backend`, `mp_start_method`, `max_concurrency`,
            `start_timeout`, `close_timeout`; see `aioenvs.AsyncParallelEnv`.

    Attributes:
        history: Counts of what happened.
    """

    def __init__(
        self,
        make_env: Any,
        num_envs: int,
        *,
        max_waiting: int = 64,
        idle_seconds: float | None = 60.0,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        step_seconds: float | None = None,
        stuck_seconds: float = 30.0,
        **options: Any,
    ) -> None:
        limits = {"idle_seconds": idle_seconds, "max_steps": max_steps, "max_seconds": max_seconds}
        for name, value in (limits | {"step_seconds": step_seconds, "stuck_seconds": stuck_seconds}).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {shown(value)}")
        if max_waiting < 0:
            raise ValueError(f"max_waiting must be at least 0, got {shown(max_waiting)}")
        self.batch = Batch(make_env, num_envs, **options)
        self.capacity = num_envs
        self.max_waiting, self.max_steps, self.step_seconds = max_waiting, max_steps, step_seconds
        self.history = History()
        self._idle_seconds, self._max_seconds, self._stuck_seconds = idle_seconds, max_seconds, stuck_seconds
        self._free: deque[int] = deque()
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._leased: dict[int, Session] = {}
        self._returning: dict[asyncio.Task[None], int] = {}
        self._numbers = itertools.count(1)
        self._durations: deque[float] = deque(maxlen=32)
        self._sweeping: asyncio.Task[None] | None = None
        self._refusing: str | None = "they were not started"
        self._all_back = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Start the envs."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close them."""
        await self.close()

    async def start(self) -> None:
        """Start the envs."""
        await self.batch.start()
        self._free.extend(range(self.capacity))
        self._refusing = None
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """End all sessions, and the envs, whatever they do."""
        self._refuse("they are closed")
        for session in list(self._leased.values()):
            session.end("drained")
        tasks = [*self._returning, *([self._sweeping] if self._sweeping is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.batch.close()

    async def drain(self, timeout: float) -> bool:
        """Lend no env any more, wait for the sessions to end, and end those that have not.

        Args:
            timeout: How long to wait, in seconds.

        Returns:
            Whether all of them ended by themselves.
        """
        self._refuse("the server stops")
        self._settle()
        try:
            async with asyncio.timeout(timeout):
                await self._all_back.wait()
            return True
        except TimeoutError:
            for session in list(self._leased.values()):
                session.end("drained")
            return False

    def _refuse(self, why: str) -> None:
        self._refusing = why
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(ClosedError(f"no session can begin: {why}"))

    # -- leases -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lease(
        self, *, client: str = "", seed: int | None = None, wait: float | None = 5.0
    ) -> AsyncIterator[Session]:
        """Have an env until the end of the block.

        Args:
            client: Whoever has it, in words.
            seed: Of the first reset that names none.
            wait: How long to wait for an env, in seconds; None for as long as it takes, 0 for not at all.

        Raises:
            CapacityError: If none becomes free in time, or too many wait already.
            ClosedError: If no session can begin any more.
        """
        session = await self.acquire(client=client, seed=seed, wait=wait)
        try:
            yield session
        finally:
            session.end("left")

    async def acquire(self, *, client: str = "", seed: int | None = None, wait: float | None = 5.0) -> Session:
        """Begin a session, which its `end` ends; see `lease`."""
        if self._refusing is not None:
            raise ClosedError(f"no session can begin: {self._refusing}")
        env = self._free.popleft() if self._free else await self._wait(wait)
        self.history.count("sessions")
        session = Session(self, next(self._numbers), env, client, seed)
        self._leased[session.number] = session
        self._all_back.clear()
        return session

    async def _wait(self, wait: float | None) -> int:
        waiting = self._still_waiting()
        if waiting >= self.max_waiting or wait == 0:
            raise self._full(waiting)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(wait):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._hand_out(future.result())  # it came too late
            else:
                future.cancel()
            if isinstance(error, TimeoutError):
                raise self._full(self._still_waiting()) from None
            raise

    def _still_waiting(self) -> int:
        return sum(not future.done() for future in self._waiting)

    def _full(self, waiting: int) -> CapacityError:
        self.history.count("refused")
        mean = sum(self._durations) / len(self._durations) if self._durations else 10.0
        retry_after = min(60.0, max(1.0, math.ceil(mean * (waiting + 1) / self.capacity)))
        return CapacityError(
            f"all {self.capacity} envs are taken, and {waiting} callers wait for one (at most {self.max_waiting} may); "
            f"come again in {retry_after:.0f} s",
            waiting,
            retry_after,
        )

    def _hand_out(self, env: int) -> None:
        """Give an env to whoever waits longest."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(env)
                return
        self._free.append(env)

    def take_back(self, session: Session) -> None:
        """Have the env of a session that is over made ready for the next one."""
        if self._leased.pop(session.number, None) is None:
            return
        self._durations.append(time.monotonic() - session.began)
        task = asyncio.create_task(self._retire(session))
        self._returning[task] = session.env
        task.add_done_callback(self._returned)
        self._settle()

    def _settle(self) -> None:
        if not self._leased:
            self._all_back.set()

    def _returned(self, task: asyncio.Task[None]) -> None:
        env = self._returning.pop(task)
        if not task.cancelled() and task.exception() is None:
            self._hand_out(env)
        elif not task.cancelled():
            logger.error("env %d is out of use: %s", env, repr(task.exception()))

    async def _retire(self, session: Session) -> None:
        """Wait for what an env still does, and reset it; replace its worker if it is dead, or the env is stuck."""
        env, pause = session.env, 0.1
        await session.turn.acquire()
        while True:
            try:
                async with asyncio.timeout(self._stuck_seconds):
                    answer = await self.batch.ask(env, NOBODY, "retire")
                if answer.kind == "failed":  # whoever has it next hears of it, since a session begins with a reset
                    logger.warning("env %d could not be reset: %s", env, answer.value[1])
                return
            except TimeoutError:
                logger.warning("env %d is stuck; its worker is ended", env)
                self.history.count("stuck")
                self.batch.kill(env)
            except WorkerError:
                pass
            try:
                await self.batch.renew(env)
            except ClosedError:
                raise
            except AioEnvsError as error:
                logger.warning("env %d cannot be replaced, which is tried again: %s", env, str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)

    async def _sweep(self) -> None:
        """End the sessions that are over their limits."""
        limits = [limit for limit in (self._idle_seconds, self._max_seconds) if limit is not None]
        pause = min(1.0, *(limit / 4 for limit in limits)) if limits else 1.0
        while True:
            await asyncio.sleep(pause)
            self.history.advance()
            now = time.monotonic()
            for session in list(self._leased.values()):
                if self._max_seconds is not None and now - session.began > self._max_seconds:
                    session.end("seconds")
                elif (
                    self._idle_seconds is not None
                    and session.asking is None
                    and now - session.last_asked > self._idle_seconds
                ):
                    session.end("idle")

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def about(self) -> dict[str, Any]:
        """The description of the envs."""
        return self.batch.about

    @property
    def active(self) -> list[Session]:
        """The sessions that are not over."""
        return list(self._leased.values())

    def find(self, number: int) -> Session | None:
        """Return a session that is not over."""
        return self._leased.get(number)

    def gauges(self) -> dict[str, int]:
        """How many envs there are, are free, lent and on their way back, and how many callers wait."""
        return {
            "capacity": self.capacity,
            "free": len(self._free),
            "leased": len(self._leased),
            "returning": self.capacity - len(self._free) - len(self._leased),
            "waiting": self._still_waiting(),
        }
