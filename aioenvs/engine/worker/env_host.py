"""The envs of one worker, and what each command does to them. Used by worker processes, threads and inline alike."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aioenvs.engine.adapters.base import Attribute, Call, EnvAdapter, Handling, ResetArguments
from aioenvs.engine.adapters.building import build
from aioenvs.engine.adapters.copying import UnsendableError, received
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.failure import advised, annotate, attributed, locate, passable, summary
from aioenvs.engine.layout import NEXT, ROOT, STATUS, WRITE_HALF, EnvMetadata, Layout
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.worker.random_streams import NumpyStream, NumpyTurns

__all__ = ["EnvHost", "Outcome", "Plan"]


@dataclass
class _WriteHalves:
    """Where the envs of one family write, as far as it is known here; most commands find that it is as it was."""

    current: memoryview
    adapters: dict[int, EnvAdapter]
    known: bytes = b""

    def take(self) -> None:
        """Tell the envs that write elsewhere now. Only such as are not at work can."""
        now = self.current.tobytes()
        if now == self.known:
            return
        self.known = now
        for row, adapter in self.adapters.items():
            adapter.take_half(now[row])


@dataclass(slots=True)
class Outcome:
    """The outcome of a command.

    Attributes:
        finished: How many episodes ended.
        failures: The exception of each env that raised; the other envs have done what was asked.
        objects: Values without a fixed shape, by env and region; there is a root only for envs that were reset.
        values: What came of a call, by env.
        lost: Envs whose step was lost with their worker; they were built anew and reset.
        verdict: What a worker has measured of its envs' time, once: up to 100 the per cent that they wait, one after
            the other; beyond that the microseconds that a step takes; 0 where there is nothing to say.
    """

    finished: int = 0
    failures: dict[int, BaseException] = field(default_factory=dict)
    objects: dict[int, dict[str, Objects]] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    verdict: int = 0

    @classmethod
    def merged(cls, outcomes: Iterable[Outcome]) -> Outcome:
        """One outcome of those of several workers; where there is one only, that."""
        own = list(outcomes)
        if len(own) == 1:
            return own[0]
        merged = cls()
        for outcome in own:
            merged.finished += outcome.finished
            merged.failures |= outcome.failures
            merged.objects |= outcome.objects
            merged.values |= outcome.values
            merged.verdict = max(merged.verdict, outcome.verdict)
        return merged

    def of_env(self, env: int) -> Outcome:
        """Return the outcome for one of its envs; a finished episode of any counts as its own."""
        return Outcome(
            finished=int(self.finished > 0),
            failures={env: self.failures[env]} if env in self.failures else {},
            objects={env: self.objects[env]} if env in self.objects else {},
            lost=self.lost & {env},
        )

    def located(self, command: str) -> Outcome:
        """Return the outcome for envs of this process: each failure says whose it is, and may reach the caller."""
        for env, error in self.failures.items():
            self.failures[env] = annotate(passable(error), locate(env, command))
        return self

    def sendable(self, send: Callable[[Any], Any]) -> Outcome:
        """The outcome without the objects that cannot be sent, which is then the failure of their env.

        Args:
            send: Tries it.
        """
        failures, objects = dict(self.failures), dict(self.objects)
        for env, own in self.objects.items():
            try:
                send(own)
            except Exception as error:
                failures[env] = _unsendable(env, "", error)
                del objects[env]
        return dataclasses.replace(self, failures=failures, objects=objects)

    def raise_failure(self) -> None:
        """Raise the exception of the lowest env that failed, which mentions the others; none if none did."""
        if not self.failures:
            return
        lowest = min(self.failures)
        error = passable(self.failures[lowest])
        for env, other in sorted(self.failures.items()):
            if env != lowest:
                error = annotate(error, f"env {env} failed as well: {summary(other)}")
        raise attributed(error, sorted(self.failures))


class Plan(NamedTuple):
    """The plan of a command: the work on each env, and how its outcome is made.

    Attributes:
        action: Called with the index and the adapter of each env; a coroutine comes out where the env has some.
        finish: Makes the outcome, from one that has the failures, and what came out for each other env where that
            is not False.
    """

    action: Callable[[int, EnvAdapter], Any]
    finish: Callable[[Outcome, dict[int, Any]], Outcome]


class EnvHost:
    """Owns a run of envs and executes commands on them, one env after the other.

    Positions count within the host; an empty selection means all envs. What an env is given is its own copy, which it
    shares with no other env and no caller, and what it answers is the caller's own. An env's exception is collected and
    the others go on, so that one host with many envs behaves as many hosts with one.

    Args:
        fatal: Exceptions that are no env's own business and end a command at once.
        handling: How the envs are driven.

    Attributes:
        has_coroutines: Whether some of them do, so that an event loop must execute the commands (`ConcurrentHost`).
        has_plain: Whether some of them do not.
    """

    def __init__(
        self, fatal: tuple[type[BaseException], ...] = (SystemExit,), handling: Handling | None = None
    ) -> None:
        self.fatal = fatal
        self.has_coroutines = self.has_plain = False
        self._handling = handling or Handling()
        self._envs: list[tuple[int, EnvAdapter]] = []
        self._loose = False
        self._write_halves: list[_WriteHalves] = []
        self._reports_infos = self._handling.rules.reports_infos

    def build(self, env: int, factory: Any, kwargs: Mapping[str, Any]) -> None:
        """Make the env with this index; whatever the factory raises comes out."""
        adapter = build(factory, kwargs, env, self._handling)
        self._envs.append((env, adapter))
        self._loose = self._loose or any(adapter.metadata.objects.values())
        self.has_coroutines = self.has_coroutines or adapter.metadata.has_coroutines
        self.has_plain = self.has_plain or not adapter.metadata.has_coroutines

    def demand_resets(self) -> None:
        """Let no env step before it was reset."""
        for _, adapter in self._envs:
            adapter.needs_reset = True

    def __len__(self) -> int:
        return len(self._envs)

    @property
    def envs(self) -> list[Any]:
        """The envs themselves."""
        return [adapter.env for _, adapter in self._envs]

    @property
    def cores(self) -> list[tuple[int, Any]]:
        """The index of each env, and its core; see `EnvAdapter`."""
        return [(env, adapter.core) for env, adapter in self._envs]

    @property
    def metadata(self) -> list[EnvMetadata]:
        """The metadata of each env."""
        return [adapter.metadata for _, adapter in self._envs]

    def attach(self, places: Iterable[tuple[Sequence[int], Layout]], buffer: Any) -> None:
        """Connect each env to its rows in the pool's block.

        Args:
            places: The envs of each family, and their layout.
            buffer: The block.
        """
        hosted = dict(self._envs)
        for envs, layout in places:
            arrays = layout.arrays(buffer)
            own = {row: hosted[env] for row, env in enumerate(envs) if env in hosted}
            for row, adapter in own.items():
                adapter.bind(arrays, row)
            if own:
                self._write_halves.append(_WriteHalves(arrays[STATUS][WRITE_HALF].data, own))

    def execute(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any] | None) -> Outcome:
        """Do what an opcode says, with values by env index where there are any."""
        if opcode is Opcode.STEP_AND_MAYBE_RESET or opcode is Opcode.STEP:
            return self._step_here(positions, values, opcode is Opcode.STEP_AND_MAYBE_RESET)
        plan = self.plan(opcode, positions, values or {})
        outcome = Outcome()
        results: dict[int, Any] = {}
        for env, adapter in self.select(positions):
            try:
                result = plan.action(env, adapter)
                if result is not False:
                    results[env] = result
            except self.fatal:
                raise
            except BaseException as error:
                outcome.failures[env] = error
        return plan.finish(outcome, results)

    def _step_here(self, positions: Sequence[int], inputs: Mapping[int, Objects] | None, maybe_reset: bool) -> Outcome:
        """Execute a step. The hot path: it needs no plan, and exchanges generators for all envs at once."""
        for halves in self._write_halves:
            halves.take()
        envs = self.select(positions) if positions else self._envs
        if inputs:
            _accept(envs, inputs)
        outcome = Outcome()
        failures, finished = outcome.failures, []
        turns, in_place = NumpyTurns(), None
        try:
            for env, adapter in envs:
                try:
                    if adapter.generator is not in_place:
                        in_place = adapter.generator
                        turns.put(in_place)
                    if adapter.step(maybe_reset):
                        finished.append(env)
                except self.fatal:
                    raise
                except BaseException as error:
                    failures[env] = error
        finally:
            if in_place is not None:
                turns.end()
        return self._stepped(outcome, envs, finished if maybe_reset else (), len(finished))

    def plan(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any]) -> Plan:
        """Return the plan for an opcode."""
        for halves in self._write_halves:
            halves.take()
        if opcode is Opcode.RESET:
            return self._reset(positions, values)
        if opcode is Opcode.SEED:
            return Plan(lambda env, adapter: adapter.seed(values[env]), lambda outcome, _: outcome)
        if opcode is Opcode.CALL:
            return self._perform(positions, values)
        return self._step(positions, values, maybe_reset=opcode is not Opcode.STEP)

    def _reset(self, positions: Sequence[int], arguments: Mapping[int, ResetArguments]) -> Plan:
        nothing = ResetArguments()

        def finish(outcome: Outcome, _: dict[int, Any]) -> Outcome:
            if self._loose or self._reports_infos:
                for env, adapter in self.select(positions):
                    self._hand_over(outcome, env, adapter, (ROOT,))
            return outcome

        return Plan(lambda env, adapter: adapter.reset(arguments.get(env, nothing)), finish)

    def _perform(self, positions: Sequence[int], calls: Mapping[int, Call]) -> Plan:
        def perform(env: int, adapter: EnvAdapter) -> Any:
            call = received(calls[env], keeps_graph=self._handling.keeps_grad)
            value = adapter.perform(call)
            if adapter.metadata.has_coroutines:
                return self._awaited_answer(env, call, value)
            return self._answer(env, call, value)

        def finish(outcome: Outcome, values: dict[int, Any]) -> Outcome:
            outcome.values = {
                env: values.get(env, False) for env in self.indices(positions) if env not in outcome.failures
            }
            return outcome

        return Plan(perform, finish)

    async def _awaited_answer(self, env: int, call: Call, value: Coroutine[Any, Any, Any]) -> Any:
        return self._answer(env, call, await value)

    def _answer(self, env: int, call: Call, value: Any) -> Any:
        """Return an env's answer as the caller's own."""
        try:
            return self._handling.answer(value)
        except Exception as error:
            refusal = _unsendable(env, f" to {call.kind} {call.name!r}", error)
            if call.kind != "get":
                raise refusal from error
            return self._handling.answer(Attribute(False, error=refusal))

    def _step(self, positions: Sequence[int], inputs: Mapping[int, Objects], *, maybe_reset: bool) -> Plan:
        envs = self.select(positions)
        if inputs:
            _accept(envs, inputs)

        def step(_: int, adapter: EnvAdapter) -> Any:
            return _step_alone(adapter, maybe_reset)

        def finish(outcome: Outcome, finished: dict[int, bool]) -> Outcome:
            return self._stepped(outcome, envs, finished if maybe_reset else (), len(finished))

        return Plan(step, finish)

    def _stepped(
        self, outcome: Outcome, envs: Iterable[tuple[int, EnvAdapter]], begun: Container[int], finished: int
    ) -> Outcome:
        """Complete the outcome of a step.

        Args:
            outcome: Which has the failures.
            envs: That took it.
            begun: Those that have begun another episode.
            finished: How many ended one.
        """
        outcome.finished = finished
        if self._loose or self._reports_infos:
            for env, adapter in envs:
                over = env in begun
                if self._loose or over or adapter.objects(NEXT):
                    self._hand_over(outcome, env, adapter, (NEXT, ROOT) if over else (NEXT,))
        return outcome

    def step_each(
        self, positions: Sequence[int], inputs: Mapping[int, Objects], meter: contextlib.AbstractContextManager[Any]
    ) -> Iterator[tuple[int, bool | Outcome]]:
        """Let envs step, and reset those that finish; yield the position of each when it is done, and its outcome.

        Args:
            positions: Which.
            inputs: Values without a fixed shape, by env index.
            meter: A context for each step.

        Yields:
            In place of an outcome that has nothing else, whether the episode finished.
        """
        for halves in self._write_halves:
            halves.take()
        for position in positions or range(len(self._envs)):
            env, adapter = self._envs[position]
            try:
                if inputs:
                    adapter.accept(inputs[env])
                with meter:
                    finished = _step_alone(adapter) is not False
            except self.fatal:
                raise
            except BaseException as error:
                yield position, Outcome(failures={env: error})
                continue
            if self._loose or self._reports_infos:
                outcome = Outcome(finished=int(finished))
                if self._loose or finished or adapter.objects(NEXT):
                    self._hand_over(outcome, env, adapter, (NEXT, ROOT) if finished else (NEXT,))
                yield position, outcome
            else:
                yield position, finished

    def _hand_over(self, outcome: Outcome, env: int, adapter: EnvAdapter, regions: Iterable[str]) -> None:
        """Put into the outcome what of an env's has no fixed shape; an info is there only if it is not empty."""
        objects = {region: dict(adapter.objects(region)) for region in regions}
        if self._loose or any(objects.values()):
            outcome.objects[env] = objects

    def close(self) -> None:
        """Close all envs; what they raise goes to stderr, since nobody is there to catch it."""
        self._write_halves.clear()  # which look into the block
        while self._envs:
            _, adapter = self._envs.pop()
            try:
                closing = adapter.close()
                if closing is not None:  # a coroutine, which gets as far as it does without a loop
                    with contextlib.suppress(StopIteration):
                        closing.send(None)
                    closing.close()
            except self.fatal:
                raise
            except BaseException as error:
                traceback.print_exception(advised(error) if isinstance(error, Exception) else error, file=sys.stderr)

    def give_up(self) -> list[EnvAdapter]:
        """The envs that have coroutines, which are somebody else's to close from now on."""
        given_up = [adapter for _, adapter in self._envs if adapter.metadata.has_coroutines]
        self._envs = [(env, adapter) for env, adapter in self._envs if not adapter.metadata.has_coroutines]
        return given_up

    def indices(self, positions: Sequence[int]) -> list[int]:
        """Indices of the selected envs."""
        return [env for env, _ in self.select(positions)]

    def select(self, positions: Sequence[int]) -> Sequence[tuple[int, EnvAdapter]]:
        """The selected envs, with their indices."""
        return [self._envs[position] for position in positions] if positions else self._envs


def _accept(envs: Iterable[tuple[int, EnvAdapter]], inputs: Mapping[int, Objects]) -> None:
    for env, adapter in envs:
        adapter.accept(inputs[env])


def _unsendable(env: int, what: str, error: Exception) -> UnsendableError:
    refusal = UnsendableError(summary(error))
    refusal.add_note(
        f"what env {env} answered{what} cannot be copied or pickled for the caller, so it stays where it is"
    )
    refusal.env_index = (env,)  # type: ignore[attr-defined]
    return refusal


def _step_alone(adapter: EnvAdapter, maybe_reset: bool = True) -> Any:
    """Let an env step, with its own generator in place if it has one."""
    if adapter.generator is None:
        return adapter.step(maybe_reset)
    return NumpyStream(adapter.generator).run(adapter.step, maybe_reset)
