"""Commands of the parent, decoded for the env host, and their outcomes, encoded. Free of torch."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle

from aioenvs.engine.adapters.base import PLAIN_RULES, GymRules, Handling
from aioenvs.engine.adapters.building import refuse_shared
from aioenvs.engine.adapters.copying import packed
from aioenvs.engine.failure import capture, captured_start, summary
from aioenvs.engine.layout import interned
from aioenvs.engine.protocol import MAX_BODY, STEPS, Frame, Opcode
from aioenvs.engine.worker import class_identity, descriptors
from aioenvs.engine.worker.answers import Answers
from aioenvs.engine.worker.env_host import EnvHost, Outcome
from aioenvs.engine.worker.random_streams import Generators
from aioenvs.engine.worker.wait_meter import WaitMeter

__all__ = ["HostOptions", "Inherited", "Worker", "WorkerConfig", "values_of"]

Inherited = Sequence[tuple[Any, Mapping[str, Any]]]


@dataclass(frozen=True)
class HostOptions:
    """The options of those who host envs.

    Attributes:
        num_threads: How many threads torch may use, where the envs use it.
        by_reference: Whether envs that deal in tensors send them as objects rather than through the block.
        max_concurrency: How many envs may be inside a reset or step at once, if they have coroutines; None for all.
        rules: What is agreed about envs with Gymnasium's signatures.
    """

    num_threads: int = 1
    by_reference: bool = False
    max_concurrency: int | None = None
    rules: GymRules = PLAIN_RULES


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration from which a worker builds its envs; the body of the START frame.

    Attributes:
        env_index: Indices of its envs in the pool.
        factories: Per env, cloudpickled: the factory and its keyword arguments; empty where the worker was forked
            from the parent and inherited them.
        sys_path: The parent's import path.
        argv: The parent's `sys.argv`.
        registry: The parent's own Gymnasium registrations, each cloudpickled, by id, or None.
        options: How the envs are to be hosted.
        number: Which worker of the pool it is.
        replaces: Whether the envs take the place of others that were lost, so that they need a reset before they step.
    """

    env_index: tuple[int, ...]
    factories: tuple[bytes, ...]
    sys_path: list[str] = field(default_factory=lambda: list(sys.path))
    argv: list[str] = field(default_factory=lambda: list(getattr(sys, "argv", [])))
    registry: Mapping[str, bytes] | None = None
    options: HostOptions = HostOptions()
    number: int = 0
    replaces: bool = False


class Block(Protocol):
    """Where the rows of the envs are."""

    def map(self, nbytes: int) -> Any:
        """Memory of this size."""


class Worker:
    """Decodes requests for the host and encodes what comes of them.

    Attributes:
        host: The envs.
        max_concurrency: See `HostOptions`.
        number: See `WorkerConfig`.
        closing: Whether it was told to close.
    """

    def __init__(self, block: Block, inherited: Inherited) -> None:
        self.closing = False
        self._block = block
        self._inherited = inherited
        self.host = EnvHost()
        self.max_concurrency: int | None = None
        self.number = 0
        self._meter: WaitMeter | None = None  # until it knows enough

    def answer(self, frame: Frame) -> Frame:
        """Do what a frame says, and return what to answer."""
        opcode, sequence, generation, _, body = frame
        if opcode is Opcode.START or opcode is Opcode.ATTACH or opcode is Opcode.CLOSE:
            code, body = self._manage(opcode, body)
            return Frame(code, sequence, generation, (), body)
        return self.reply(frame, self._command)

    def reply(self, frame: Frame, command: Callable[[Frame], Outcome]) -> Frame:
        """Return the reply to a command.

        Args:
            frame: Which asked for it.
            command: Does what the frame says, or says what came of it.
        """
        try:
            counts, body = _encode(command(frame), frame.opcode)
        except Exception as error:  # values that cannot be rebuilt here, or are too large to be sent back
            return self.refusal(frame, error)
        return Frame(Opcode.DONE, frame.sequence, frame.generation, counts, body)

    def answer_each(self, frame: Frame, answers: Answers) -> None:
        """Let envs step, and answer for each when it is done."""
        try:
            values = values_of(frame) or {}
        except Exception as error:  # values that cannot be rebuilt here
            for position in frame.positions or range(len(self.host)):
                answers.send(self.refusal_of(frame, position, error))
            return
        answers.begin()
        meter = self._meter
        for position, outcome in self.host.step_each(frame.positions, values, meter or contextlib.nullcontext()):
            verdict = 0 if meter is None else meter.verdict(1, len(self.host))
            if isinstance(outcome, bool):
                counts = position, 2 * verdict + outcome
                answers.send(Frame(Opcode.DONE_EACH, frame.sequence, frame.generation, counts))
            else:
                answers.send(self.answer_of(frame, position, outcome, verdict))
        answers.flush()
        if meter is not None and not meter.measuring:
            self._meter = None

    def refusal(self, frame: Frame, error: Exception) -> Frame:
        """Return the reply to a command that failed as a whole."""
        failures: dict[int, BaseException] = dict.fromkeys(self.host.indices(frame.positions), error)
        counts, body = _encode(Outcome(failures=failures), frame.opcode)
        return Frame(Opcode.DONE, frame.sequence, frame.generation, counts, body)

    def refusal_of(self, frame: Frame, position: int, error: Exception) -> Frame:
        """Return the answer for one env of several, to a command that failed as a whole."""
        (env,) = self.host.indices((position,))
        return self.answer_of(frame, position, Outcome(failures={env: error}))

    def answer_of(self, frame: Frame, position: int, outcome: Outcome, verdict: int = 0) -> Frame:
        """Return the answer for one env of several that were asked to step.

        Args:
            frame: Which asked for it.
            position: Of the env.
            outcome: What came of its step.
            verdict: See `Outcome`.
        """
        counts = position, 2 * verdict + bool(outcome.finished)
        try:
            _, body = _encode(outcome, Opcode.STEP_AND_MAYBE_RESET)
        except Exception as error:  # it is too large to be sent back
            return self.refusal_of(frame, position, error)
        return Frame(Opcode.DONE_EACH, frame.sequence, frame.generation, counts, body)

    def _command(self, frame: Frame) -> Outcome:
        opcode, _, _, positions, body = frame
        values, meter = values_of(frame) if body else None, self._meter
        if meter is None or opcode not in STEPS:
            return self.host.execute(opcode, positions, values)
        with meter:
            outcome = self.host.execute(opcode, positions, values)
        outcome.verdict = meter.verdict(len(positions) or len(self.host), len(self.host))
        if not meter.measuring:
            self._meter = None
        return outcome

    def _manage(self, opcode: Opcode, body: bytes) -> tuple[Opcode, bytes]:
        if opcode is Opcode.START:
            return self._start(pickle.loads(body))
        if opcode is Opcode.ATTACH:
            nbytes, places = pickle.loads(body)
            self.host.attach(places, self._block.map(nbytes))
        elif opcode is Opcode.CLOSE:
            self.close()
            self.closing = True
        return Opcode.DONE, b""

    def _start(self, config: WorkerConfig) -> tuple[Opcode, bytes]:
        sys.path[:] = config.sys_path
        sys.argv = config.argv
        try:
            _register(config.registry)
            _settle_torch(config.options.num_threads)
            self._build(config)
            return Opcode.DONE, class_identity.dumps(interned(self.host.metadata))
        except Exception as error:
            env = config.env_index[min(len(self.host), len(config.env_index) - 1)]
            return Opcode.FAILED, pickle.dumps({env: captured_start(error, env)})
        finally:
            descriptors.drop_received()

    def _build(self, config: WorkerConfig) -> None:
        alone, options = len(config.env_index) == 1, config.options
        handling = Handling(
            by_reference=options.by_reference,
            generators=Generators.OWNED if alone else Generators.SEEDED,
            answer=packed,  # each for itself, so that what one env answered is no reason to lose the others'
            rules=options.rules,
        )
        self.host = EnvHost(handling=handling)
        self.max_concurrency, self.number = options.max_concurrency, config.number
        self._meter = WaitMeter()
        prepared = "torch" in sys.modules
        for env, data in zip(config.env_index, config.factories, strict=True):
            # Pickled ones are a copy for each env, as if each had its own process; inherited ones are what they are.
            factory, kwargs = cloudpickle.loads(data) if data else self._inherited[env]
            if not prepared and "torch" in sys.modules:  # the factory came with it
                _settle_torch(options.num_threads)
                prepared = True
            with _undisturbed(factory) if config.replaces else contextlib.nullcontext():
                self.host.build(env, factory, kwargs)
        refuse_shared(self.host.cores)
        if not prepared:
            _settle_torch(options.num_threads)
        if config.replaces:
            self.host.demand_resets()

    def close(self) -> None:
        """Close the envs."""
        self.host.close()


def values_of(frame: Frame) -> Any:
    """Return the values behind the header of a command, by env index, or None."""
    return pickle.loads(frame.body) if frame.body else None


def _encode(outcome: Outcome, command: Opcode) -> tuple[tuple[int, ...], bytes]:
    """In place of positions: finished episodes, and the verdict on the envs' time; and the body, if there is any."""
    counts = (outcome.finished, outcome.verdict) if outcome.finished or outcome.verdict else ()
    if not outcome.failures and not outcome.objects and not outcome.values:
        return counts, b""
    try:
        body = _pickled(outcome, command)
    except Exception:  # what one env answered is no reason to lose what the others did
        body = _pickled(outcome.sendable(cloudpickle.dumps), command)
    if len(body) > MAX_BODY:
        raise ValueError(f"the envs of one process answered with {len(body)} bytes, more than {MAX_BODY}")
    return counts, body


def _pickled(outcome: Outcome, command: Opcode) -> bytes:
    failures = {env: capture(error, env, command.name.lower()) for env, error in outcome.failures.items()}
    content = failures, outcome.objects, outcome.values
    try:
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)  # quicker by half, and mostly enough
    except Exception:
        body: bytes = cloudpickle.dumps(content)
        return body


def _settle_torch(num_threads: int) -> None:
    """Give torch, where it is loaded, its threads, and a random stream that no sibling has."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(num_threads)
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))


def _undisturbed(factory: Any) -> contextlib.AbstractContextManager[None]:
    """Keep what envs of a creator of TorchRL share while it makes another; by name, where torch is allowed."""
    if any(base.__module__.startswith("torchrl.") for base in type(factory).__mro__):
        sharing = importlib.import_module("aioenvs.integrations.torchrl.sharing")
        kept: contextlib.AbstractContextManager[None] = sharing.undisturbed(factory)
        return kept
    return contextlib.nullcontext()


def _register(registry: Mapping[str, bytes] | None) -> None:
    if registry is not None:
        import gymnasium

        # A package that is imported for its env registers its ids itself, which are then here already.
        warnings.filterwarnings("ignore", r"(?s).*Overriding environment")
        for name, data in registry.items():
            if name not in gymnasium.registry:
                gymnasium.registry[name] = _spec(name, data)


def _spec(name: str, data: bytes) -> Any:
    """The registration of an id; one that cannot be read here fails when an env of it is made, and no other."""
    from gymnasium.envs.registration import EnvSpec

    try:
        return cloudpickle.loads(data)
    except Exception as error:
        reason = summary(error)

    def entry_point(**_: Any) -> Any:
        raise RuntimeError(f"the registration of {name!r} cannot be read in a worker: {reason}")

    return EnvSpec(name, entry_point=entry_point)
