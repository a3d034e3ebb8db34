"""Batches of envs with numpy arrays in and out, as coroutines and behind plain calls. Free of torch."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from aioenvs.engine.adapters.base import INFO, Call, GymRules, ResetArguments
from aioenvs.engine.adapters.gymnasium import DONE_KEYS, REWARD_KEY
from aioenvs.engine.adapters.vector import VectorReset
from aioenvs.engine.config import BatchConfig
from aioenvs.engine.layout import IN_NEXT, IN_ROOT, INPUT, LATEST, NEXT, ROOT, STATUS
from aioenvs.engine.pools.backends import make_pool
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.pools.requests import Lease, Selection
from aioenvs.engine.portal import Immediate, LoopPortal, Portal, taskless
from aioenvs.engine.request import Request
from aioenvs.engine.rows import FamilyRows, RowIndex, Rows, Values
from aioenvs.engine.waiting import TURNS, Deadline, check_seconds, drop, outlast
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.errors import ResetNeededError, SpecMismatchError, WorkerTimeoutError, describe_envs, shown
from aioenvs.integrations.vectors.batches import ActionBatch, Inputs, ObservationBatch
from aioenvs.integrations.vectors.inside import Description, describe
from aioenvs.integrations.vectors.parts import Parts

__all__ = ["AsyncVector", "Autoreset", "Pending", "Vector", "VectorResets", "VectorSteps", "one_each"]


T = TypeVar("T")
MEMORY = ("_rows", "_observations", "_done", "_root_done", "_where")  # what looks into the block
FLAT_KEYS = (REWARD_KEY, *DONE_KEYS[1:])


class Autoreset(StrEnum):
    """The treatment of an env whose episode is over."""

    NEXT_STEP = "next step"  # the next step resets it, whatever the action
    SAME_STEP = "same step"  # it is reset at once; the last observation is besides
    DISABLED = "disabled"  # it waits for its reset


class VectorResets(NamedTuple):
    """The results of a reset.

    Attributes:
        observations: The latest of all envs, in the structure of the batched space.
        infos: Those that are not empty, of envs that were reset, by index.
    """

    observations: Any
    infos: dict[int, dict[str, Any]]


class VectorSteps(NamedTuple):
    """The results of a step of all envs.

    Attributes:
        observations: Of all envs, in the structure of the batched space.
        rewards: `(n,)`.
        terminated: bool, `(n,)`.
        truncated: bool, `(n,)`.
        infos: Those that are not empty, by index; of envs that were reset at once, those of the reset.
        finals: Of envs that were reset at once, the last observation of the episode before.
        final_infos: The info of the same step; not there if it is empty.
    """

    observations: Any
    rewards: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: dict[int, dict[str, Any]]
    finals: dict[int, Any]
    final_infos: dict[int, dict[str, Any]]


class Pending(Generic[T]):
    """A command that is under way, or about to be, for `AsyncVector.finish`.

    Args:
        command: Its name.
        selection: The envs that it is for.
        answer: What comes of it.
    """

    def __init__(self, command: str, selection: Selection, answer: Coroutine[Any, Any, T]) -> None:
        self.command = command
        self.selection = selection
        self.answer: Coroutine[Any, Any, T] | asyncio.Task[T] = answer

    def drop(self) -> None:
        """Give it up: what comes of it is dropped."""
        if isinstance(self.answer, asyncio.Task):
            drop(self.answer)
        else:
            self.answer.close()


class AsyncVector:
    """Many envs with Gymnasium's signatures, all of one structure, as coroutines; belongs to the loop that starts it.

    What cancelling a coroutine does is what it does for `aioenvs.AsyncParallelEnv`: envs that still work on it are
    waited for by the next request, and what they answer is dropped.

    Args:
        config: The envs, and what hosts them.
        autoreset: What becomes of those whose episode is over.
        reward: The dtype of rewards.
        copy: Whether each batch of observations has arrays of its own.
        by_env: See `ActionBatch`.
        batches_infos: See `GymRules`.
        yields: Whether commands to envs in this process let other tasks run.
    """

    def __init__(
        self,
        config: BatchConfig,
        autoreset: Autoreset,
        *,
        reward: str = "<f8",
        copy: bool = True,
        by_env: bool = False,
        batches_infos: bool = False,
        yields: bool = True,
    ) -> None:
        rules = GymRules(
            reward,
            reports_infos=True,
            batches_infos=batches_infos,
            resets_next=autoreset is Autoreset.NEXT_STEP,
            scalars=True,
            keeps_finals=autoreset is Autoreset.SAME_STEP,
        )
        self._config = replace(config, rules=rules)
        self.autoreset = autoreset
        self.parts = Parts(len(config.factories))  # until the envs have said what they are
        self._copy = copy
        self._by_env = by_env
        self.pool: Pool = make_pool(self._config, yields=yields)
        self.descriptions: list[Description] = []
        # Hosted envs that began anew after a loss, which the next step is to say, and the infos of that.
        self._renewed: dict[int, dict[int, dict[str, Any]]] = {}

    @property
    def num_envs(self) -> int:
        """How many envs the batch consists of: of vector envs, all of theirs."""
        return self.parts.count

    # -- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers and build the envs. Cancelling it ends what was started.

        Raises:
            WorkerStartError: If a factory raised, hung or ended its process.
            SpecMismatchError: If the envs have no Gymnasium spaces, or not those of one structure.
        """
        try:
            await self.pool.start()
            self.parts = Parts.of(self.pool.metadata)
            self._check_structure()
            self._check_autoreset()
            self.descriptions = await self.perform(
                dict.fromkeys(range(self.parts.num_hosted), Call("apply", "", (describe,))), "describe"
            )
            first, arrays = self.descriptions[0], self.pool.arrays[0]
            own = FamilyRows(self.pool.families[0], arrays, self.pool.buffers[0], flags=frozenset(DONE_KEYS))
            self._rows = Rows(range(self.parts.num_hosted), [own])
            self._observations = ObservationBatch(first.observation_space, own, self.parts, copy=self._copy)
            self._actions = ActionBatch(first.action_space, arrays[INPUT], self.parts, by_env=self._by_env)
            self._done, self._root_done = (arrays[region][DONE_KEYS[0]][..., 0] for region in (NEXT, ROOT))
            self._where = arrays[STATUS][LATEST]
        except BaseException:
            await self.pool.close()
            raise

    def _check_structure(self) -> None:
        for env, metadata in enumerate(self.pool.metadata):
            if "observation" not in metadata.specs:
                raise SpecMismatchError(
                    f"env {env} ({metadata.name}) deals in TensorDicts; expected an env with Gymnasium's signatures "
                    "and spaces, as aioenvs.ParallelEnv takes both"
                )
            if metadata.reward_keys != (REWARD_KEY,):
                raise SpecMismatchError(
                    f"env {env} ({metadata.name}) has several agents; expected an env with Gymnasium's signatures and "
                    "spaces, of one agent, as aioenvs.ParallelEnv takes both"
                )
        if len(self.pool.families) > 1:
            env = self.pool.families[1].envs[0]
            one, other = (self.pool.metadata[index] for index in (0, env))
            if (one.leaves.get(NEXT), one.objects.get(NEXT)) == (other.leaves.get(NEXT), other.objects.get(NEXT)):
                what = "Some environments have an action space different from that of env 0"
            else:
                what = (
                    "Some of the sub-environments observation spaces are not equivalent. The observation spaces do not "
                    "share a common shape and dtype"
                )
            raise SpecMismatchError(
                f"{what}: all envs of a batch must have spaces of one structure, shape and dtype; env 0 has "
                f"{shown(one.specs)}, and env {env} has {shown(other.specs)}"
            )

    def _check_autoreset(self) -> None:
        """Refuse vector envs that cannot treat what is over as it is to be treated."""
        for env, metadata in enumerate(self.pool.metadata if self.parts.size else ()):
            mode, by_mask = metadata.specs["autoreset"]
            fits = {
                Autoreset.NEXT_STEP: mode is VectorReset.NEXT_STEP,
                Autoreset.SAME_STEP: by_mask or mode is VectorReset.SAME_STEP,
                Autoreset.DISABLED: by_mask and mode is not VectorReset.SAME_STEP,
            }
            if not fits[self.autoreset]:
                raise SpecMismatchError(
                    f"env {env} ({metadata.name}) is a vector env with autoreset_mode={mode.name}"
                    f"{'' if by_mask else ', which knows no reset_mask'}; expected one whose episodes can be treated "
                    f"with {self.autoreset.name}: make it with that mode"
                )

    async def close(self, timeout: float | None = None) -> None:
        """Close all envs and end the workers, whatever state they are in. Cancelling it kills the workers at once.

        Args:
            timeout: Seconds after which that is done as well; None for `close_timeout`.
        """
        try:
            if timeout is None or not self.pool.suspends:
                return await self.pool.close()
            closing = asyncio.ensure_future(self.pool.close())
            try:
                await asyncio.wait([closing], timeout=timeout)
            finally:
                drop(closing)
                await outlast(closing)
        finally:
            if self.pool.states.closed:
                for name in MEMORY:  # whoever keeps this does not keep the block
                    self.__dict__.pop(name, None)

    # -- commands ---------------------------------------------------------------------------------------

    async def set_off(self, pending: Pending[Any]) -> None:
        """Have a command on its way when this returns, where envs do not run here one after the other."""
        if self.pool.suspends and not isinstance(pending.answer, asyncio.Task):
            pending.answer = asyncio.ensure_future(pending.answer)
            for _ in range(TURNS):  # until envs owe an answer, to this command or to one before
                await asyncio.sleep(0)
                if pending.answer.done() or self.pool.states.unanswered(pending.selection.envs):
                    break

    async def finish(self, pending: Pending[T], timeout: float | None = None) -> T:
        """Wait for a command, and hand over what comes of it.

        Args:
            pending: Which; it is over when this returns or raises.
            timeout: Seconds that it may take from now; None for as long as it may take anyway. Envs that run in this
                process one after the other cannot be interrupted.

        Raises:
            ValueError: If `timeout` is no time to come.
            WorkerTimeoutError: If it takes longer; late answers will be dropped, and the next request waits for them.
            WorkerDiedError: If a worker died; the others' envs remain usable.
            Exception: Whatever an env raised, with the worker's traceback as a note; it needs a reset.
        """
        try:
            check_seconds(timeout, "timeout")
            if timeout is not None and self.pool.suspends:
                await self.set_off(pending)
            if not isinstance(pending.answer, asyncio.Task):
                return await pending.answer
            deadline = None if timeout is None else Deadline.after(timeout, "timeout")
            result: T = await self.pool.within(pending.answer, Lease(pending.selection, pending.command, deadline))
            return result
        finally:
            await self.abandon(pending)

    async def abandon(self, pending: Pending[Any]) -> None:
        """Give a command up, if it is not over; its envs are free when this returns, or once they have answered."""
        pending.drop()
        if isinstance(pending.answer, asyncio.Task):
            await outlast(pending.answer)

    def begin_step(self, actions: Any) -> Pending[VectorSteps]:
        """A step, which is checked, and begun when it is set off or finished; see `step`."""
        inputs = self._actions.kept(self._actions.check(actions))
        return Pending("step", self.pool.everything, self._step(inputs))

    @taskless
    async def step(self, actions: Any) -> VectorSteps:
        """Let all envs take a step, or begin a new episode where that is their turn.

        Args:
            actions: One for each env, in the structure of the batched action space.

        Raises:
            SpecMismatchError: If they do not fit; no env was stepped then.
            ResetNeededError: If an episode is over, and nobody resets its env.
            Exception: As for `finish`.
        """
        return await self._step(self._actions.check(actions))

    async def _step(self, inputs: Inputs) -> VectorSteps:
        pool = self.pool
        async with Request(pool, pool.everything, "step") as request:
            if self.autoreset is Autoreset.DISABLED:
                self._refuse_finished()
            known = self._rows.latest() if pool.restarts else None
            rows = None
            if self._renewed:  # which have begun anew already
                rows = np.array([env for env in range(self.parts.num_hosted) if env not in self._renewed], np.intp)
                request.narrow(pool.select(rows.tolist()))
            outcome = Outcome()
            if rows is None or len(rows):
                loose = self._rows.write([self._actions.values(inputs)], rows)
                outcome = await request.step(loose, maybe_reset=self.autoreset is Autoreset.SAME_STEP)
            return self._stepped(rows, outcome, known)

    def _refuse_finished(self) -> None:
        in_next = self._where == IN_NEXT
        over = (
            np.where(in_next[:, None], self._done, self._root_done).reshape(-1)
            if self.parts.size
            else self._done & in_next
        )
        if over.any():
            envs = np.flatnonzero(over).tolist()
            raise ResetNeededError(
                f"{describe_envs(envs)} cannot step: the episode is over, and nothing resets of itself here; reset "
                "with options={'reset_mask': terminated | truncated} first; no env was stepped"
            )

    def _stepped(self, rows: RowIndex, outcome: Outcome, known: Sequence[Values] | None) -> VectorSteps:
        same_step, lost = self.autoreset is Autoreset.SAME_STEP, sorted(outcome.lost)
        infos, final_infos, last = self._take(outcome)
        if lost and self.autoreset is Autoreset.NEXT_STEP:
            for env in lost:
                members = self.parts.members(env)
                self._renewed[env] = {part: infos.pop(part) for part in members if part in infos}
        following, roots = self._rows.step(rows, outcome, known, maybe_reset=same_step)
        outcome.raise_failure()
        values = following[0]
        rewards, terminated, truncated = (values[key].reshape(self.num_envs) for key in FLAT_KEYS)
        if rows is not None:
            for env in sorted(self._renewed.keys() - outcome.lost):
                infos |= self._renewed.pop(env)
        finals: dict[int, Any] = {}
        if same_step and (outcome.finished or lost):
            over = terminated | truncated
            for env in np.flatnonzero(self._where == IN_ROOT).tolist():
                is_lost = env in outcome.lost
                for part in self.parts.members(env):
                    if over[part]:
                        finals[part] = (
                            self._observations.one(values, part)
                            if is_lost
                            else self._observations.final(part, last.get(env, {}))
                        )
        observations = self._observations.batch(values if roots is None else roots[0])
        return VectorSteps(observations, rewards, terminated, truncated, infos, finals, final_infos)

    def _take(self, outcome: Outcome) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
        """Take the infos out of a step, those of the steps before a reset, and tell the other objects of these.

        The infos are those of each part, the others those of each hosted env.
        """
        infos, before_reset, last = {}, {}, {}
        for env, regions in outcome.objects.items():
            *before, latest = regions.values()
            for objects in before:
                if info := objects.pop(INFO, None):
                    before_reset[env] = info
                last[env] = objects
            if info := latest.pop(INFO, None):
                infos[env] = info
        parts = self.parts
        if not parts.size:
            return infos, before_reset, last
        of_parts = parts.infos({env: info for env, info in infos.items() if env not in last})
        of_ends: dict[int, Any] = {}
        for env in last:
            own, ends = parts.ended(env, before_reset.get(env, {}), infos.get(env, {}), self._done[env])
            of_parts |= own
            of_ends |= ends
        return of_parts, of_ends, last

    def begin_reset(
        self, arguments: Mapping[int, Mapping[str, Any]], envs: Sequence[int] | None = None
    ) -> Pending[VectorResets]:
        """A reset, which is begun when it is set off or finished; see `reset`."""
        own = self.parts.reset_arguments(arguments)
        hosted = None if envs is None else sorted({self.parts.host_of(env) for env in envs})
        chosen = self.pool.everything if hosted is None else self.pool.select(hosted)
        return Pending("reset", chosen, self._reset(chosen, own))

    async def reset(
        self, arguments: Mapping[int, Mapping[str, Any]], envs: Sequence[int] | None = None
    ) -> VectorResets:
        """Begin new episodes, with new workers where they are dead.

        Args:
            arguments: For each of these envs, what its own `reset` gets.
            envs: Which, ascending; None for all.

        Raises:
            Exception: As for `finish`.
        """
        return await self.finish(self.begin_reset(arguments, envs))

    async def _reset(self, chosen: Selection, arguments: Mapping[int, ResetArguments]) -> VectorResets:
        async with Request(self.pool, chosen, "reset", replacing=True) as request:
            outcome = await request.reset(arguments)
            infos, _, _ = self._take(outcome)
            self._rows.note_reset(outcome)
            for env in self._renewed.keys() & chosen.envs:
                del self._renewed[env]
            outcome.raise_failure()
            return VectorResets(self._observations.batch(self._rows.latest()[0]), infos)

    def begin_calls(self, calls: Mapping[int, Call], command: str) -> Pending[list[Any]]:
        """Calls, which are begun when they are set off or finished; see `perform`."""
        chosen = self.pool.select(sorted(calls))
        return Pending(command, chosen, self._perform(chosen, calls, command))

    async def perform(self, calls: Mapping[int, Call], command: str) -> list[Any]:
        """Ask envs for something beyond the commands.

        Args:
            calls: For each of these envs, what.
            command: What that is called in messages.

        Returns:
            The answers, in the order of the calls.
        """
        return await self.finish(self.begin_calls(calls, command))

    async def _perform(self, chosen: Selection, calls: Mapping[int, Call], command: str) -> list[Any]:
        async with Request(self.pool, chosen, command) as request:
            outcome = await request.perform(calls)
        outcome.raise_failure()
        return [outcome.values[env] for env in calls]


class Vector:
    """Many envs behind plain calls, started when made.

    Args:
        config: The envs, and what hosts them.
        autoreset: What becomes of those whose episode is over.
        name: What it is called in messages.
        late: What a `WorkerTimeoutError` is raised as.
        **options: As for `AsyncVector`.

    Attributes:
        envs: What runs.
        pending: The command that is under way.
    """

    def __init__(
        self,
        config: BatchConfig,
        autoreset: Autoreset,
        name: str,
        late: type[WorkerTimeoutError] = WorkerTimeoutError,
        **options: Any,
    ) -> None:
        self.name = name
        self._late = late
        self.pending: Pending[Any] | None = None
        self._ending = False
        self.envs = AsyncVector(config, autoreset, yields=False, **options)
        self._portal: Portal | None = Immediate() if config.backend == "serial" else LoopPortal()
        try:
            self.run(self.envs.start())
        except BaseException:
            self._close_portal()
            raise

    @property
    def closed(self) -> bool:
        """Whether there are no envs any more."""
        return self._portal is None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; Ctrl-C cancels it."""
        assert self._portal is not None
        try:
            return self._portal.run(coroutine)
        except WorkerTimeoutError as error:
            raise self._as_late(error) from error.__cause__

    def _as_late(self, error: WorkerTimeoutError) -> WorkerTimeoutError:
        if isinstance(error, self._late):
            return error
        late = self._late(str(error), env_index=error.env_index, pid=error.pid)
        for note in getattr(error, "__notes__", ()):
            late.add_note(note)
        return late

    @property
    def hosted(self) -> list[Any] | None:
        """The env objects, where this thread runs them itself, one after the other; else None."""
        pool = self.envs.pool
        return pool.envs

    def begin(self, pending: Pending[Any]) -> None:
        """Set a command off, for `finish` to wait for."""
        try:
            self.run(self.envs.set_off(pending))
        except BaseException:
            self.run(self.envs.abandon(pending))
            raise
        self.pending = pending

    def finish(self, timeout: float | None = None) -> Any:
        """Return the results of the command that is under way, which is over then, also if it is late."""
        pending, self.pending = self.pending, None
        assert pending is not None
        return self.run(self.envs.finish(pending, timeout))

    def abandon(self) -> None:
        """Give up the command that is under way, if there is one; what comes of it is dropped."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.run(self.envs.abandon(pending))

    def close(self, timeout: float | None = None) -> None:
        """Close all envs and end the workers; see `AsyncVector.close`.

        Raises:
            ConcurrencyError: If another thread is in the middle of a call; nothing is closed then.
        """
        if self._portal is None or self._portal.foreign:
            return  # a fork leaves what is its parent's to close
        try:
            self.run(self._end(timeout))
        finally:
            if self._ending:
                self._close_portal()

    async def _end(self, timeout: float | None) -> None:
        self.envs.pool.begin_close()
        self._ending = True
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                await self.envs.abandon(pending)
        finally:
            await self.envs.close(timeout)

    def _close_portal(self) -> None:
        portal, self._portal = self._portal, None
        if portal is not None:
            portal.close()

    def __del__(self) -> None:
        if self.__dict__.get("_portal") is not None:
            try:
                warnings.warn(f"{self.name} was never closed", ResourceWarning, source=self, stacklevel=2)
            finally:
                if self.pending is not None:
                    self.pending.drop()
                self.envs.pool.discard()
                self._close_portal()


def one_each(env_fns: Any, count: int | None, name: str) -> list[Any]:
    """Return the factory of each env.

    Args:
        env_fns: A callable for each; or one, a Gymnasium id or an `EnvSpec` for all.
        count: How many; None for as many as there are callables.
        name: What the count is called in messages.

    Raises:
        TypeError: If it is not known how many there are.
        ValueError: If that is no number, or another one than there are callables.
    """
    if isinstance(env_fns, str) or callable(env_fns) or not isinstance(env_fns, Iterable):
        if count is None:
            raise TypeError(f"expected {name}, or a list with a callable for each env, found {shown(env_fns)} alone")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {shown(count)}")
        return [env_fns] * count
    factories = list(env_fns)
    if not factories:
        raise ValueError("expected a callable for each env, found none")
    if count not in (None, len(factories)):
        raise ValueError(f"{name} is {count}, but there are {len(factories)} callables")
    return factories
