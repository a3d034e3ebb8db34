"""The envs of one worker, and what each command does to them. Used by worker processes, threads and inline alike."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioenvs.engine.adapters import Attribute, Call, EnvAdapter, Handling, ResetArguments, build
from aioenvs.engine.copying import UnsendableError, received
from aioenvs.engine.failure import annotate, locate, passable, summary
from aioenvs.engine.layout import Layout
from aioenvs.engine.metadata import NEXT, ROOT, EnvMetadata
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.spaces import Objects

__all__ = ["EnvHost", "Outcome"]


@dataclass
class Outcome:
    """What came of a command.

    Attributes:
        finished: How many episodes ended.
        failures: The exception of each env that raised; the other envs have done what was asked.
        objects: Values without a fixed shape, by env and region; there is a root only for envs that were reset.
        values: What came of a call, by env.
        lost: Envs whose step was lost with their worker; they were built anew and reset.
        waiting: Share of the step time in which the envs of one process waited, one after the other; 0 if they
            did not, or nobody measured it.
    """

    finished: int = 0
    failures: dict[int, BaseException] = field(default_factory=dict)
    objects: dict[int, dict[str, Objects]] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    waiting: float = 0.0

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
            merged.waiting = max(merged.waiting, outcome.waiting)
        return merged

    def located(self, command: str) -> Outcome:
        """The same, for envs of this process: each failure says whose it is, and may reach the caller."""
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
        with contextlib.suppress(Exception):  # not every exception takes attributes
            error.env_index = tuple(sorted(self.failures))  # type: ignore[attr-defined]
        raise error


class EnvHost:
    """Owns a run of envs and executes commands on them, one env after the other.

    Positions count within the host; an empty selection means all envs. What an env is given is its own copy, which it
    shares with no other env and no caller, and what it answers is the caller's own. An env's exception is collected and
    the others go on, so that one host with many envs behaves as many hosts with one.

    Args:
        fatal: Exceptions that are no env's own business and end a command at once.
        handling: How the envs are driven.
    """

    def __init__(
        self, fatal: tuple[type[BaseException], ...] = (SystemExit,), handling: Handling | None = None
    ) -> None:
        self._fatal = fatal
        self._handling = handling or Handling()
        self._envs: list[tuple[int, EnvAdapter]] = []
        self._loose = False

    def build(self, env: int, factory: Any, kwargs: Mapping[str, Any]) -> None:
        """Make the env with this index; whatever the factory raises comes out."""
        adapter = build(factory, kwargs, env, self._handling)
        self._envs.append((env, adapter))
        self._loose = self._loose or any(adapter.metadata.objects.values())

    def __len__(self) -> int:
        return len(self._envs)

    @property
    def metadata(self) -> list[EnvMetadata]:
        """What each env says of itself."""
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
            for row, env in enumerate(envs):
                if env in hosted:
                    hosted[env].bind(arrays, row)

    def execute(self, opcode: Opcode, positions: Sequence[int], values: Mapping[int, Any] | None) -> Outcome:
        """Do what an opcode says, with values by env index where there are any."""
        if opcode is Opcode.RESET:
            return self.reset(positions, values or {})
        if opcode is Opcode.SEED:
            return self.seed(positions, values or {})
        if opcode is Opcode.CALL:
            return self.perform(positions, values or {})
        return self.step(positions, values, maybe_reset=opcode is Opcode.STEP_AND_MAYBE_RESET)

    def seed(self, positions: Sequence[int], seeds: Mapping[int, int]) -> Outcome:
        """Give each selected env its seed, by env index, for its next reset."""
        return self._each(positions, lambda env, adapter: adapter.seed(seeds[env]))

    def reset(self, positions: Sequence[int], arguments: Mapping[int, ResetArguments]) -> Outcome:
        """Reset the selected envs, with arguments by env index where there are any."""
        nothing = ResetArguments()
        outcome = self._each(positions, lambda env, adapter: adapter.reset(arguments.get(env, nothing)))
        if self._loose:
            for env, adapter in self._select(positions):
                outcome.objects[env] = {ROOT: dict(adapter.objects(ROOT))}
        return outcome

    def perform(self, positions: Sequence[int], calls: Mapping[int, Call]) -> Outcome:
        """Do what is asked of each selected env, by env index; what came of it is in the outcome's values."""
        values: dict[int, Any] = {}

        def perform(env: int, adapter: EnvAdapter) -> None:
            call = received(calls[env], keeps_graph=self._handling.keeps_grad)
            values[env] = self._answer(env, call, adapter.perform(call))

        outcome = self._each(positions, perform)
        outcome.values = values
        return outcome

    def _answer(self, env: int, call: Call, value: Any) -> Any:
        """What an env answered, as the caller's own."""
        try:
            return self._handling.answer(value)
        except Exception as error:
            refusal = _unsendable(env, f" to {call.kind} {call.name!r}", error)
            if call.kind != "get":
                raise refusal from error
            return self._handling.answer(Attribute(False, error=refusal))

    def step(self, positions: Sequence[int], inputs: Mapping[int, Objects] | None, *, maybe_reset: bool) -> Outcome:
        """Step the selected envs, and reset those whose episode ended if `maybe_reset`."""
        if inputs:
            for env, adapter in self._select(positions):
                adapter.accept(inputs[env])
        finished = []

        def advance(env: int, adapter: EnvAdapter) -> None:
            if adapter.step(maybe_reset):
                finished.append(env)

        outcome = self._each(positions, advance)
        outcome.finished = len(finished)
        if self._loose:
            for env, adapter in self._select(positions):
                regions = (NEXT, ROOT) if maybe_reset and env in finished else (NEXT,)
                outcome.objects[env] = {region: dict(adapter.objects(region)) for region in regions}
        return outcome

    def close(self) -> None:
        """Close all envs; what they raise goes to stderr, since nobody is there to catch it."""
        while self._envs:
            _, adapter = self._envs.pop()
            try:
                adapter.close()
            except self._fatal:
                raise
            except BaseException:
                traceback.print_exc(file=sys.stderr)

    def indices(self, positions: Sequence[int]) -> list[int]:
        """Indices of the selected envs."""
        return [env for env, _ in self._select(positions)]

    def _select(self, positions: Sequence[int]) -> Sequence[tuple[int, EnvAdapter]]:
        return [self._envs[position] for position in positions] if positions else self._envs

    def _each(self, positions: Sequence[int], action: Callable[[int, EnvAdapter], None]) -> Outcome:
        outcome = Outcome()
        for env, adapter in self._select(positions):
            try:
                action(env, adapter)
            except self._fatal:
                raise
            except BaseException as error:
                outcome.failures[env] = error
        return outcome


def _unsendable(env: int, what: str, error: Exception) -> UnsendableError:
    refusal = UnsendableError(summary(error))
    refusal.add_note(
        f"what env {env} answered{what} cannot be copied or pickled for the caller, so it stays where it is"
    )
    refusal.env_index = (env,)  # type: ignore[attr-defined]
    return refusal
