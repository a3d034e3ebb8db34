"""How a worker drives one env: the interface, and what goes through it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, Protocol

from aioenvs.engine.adapters.copying import copied
from aioenvs.engine.adapters.spaces import Objects
from aioenvs.engine.layout import Arrays, EnvMetadata, Key
from aioenvs.engine.worker.random_streams import Generators

__all__ = [
    "CALLERS",
    "FINAL",
    "INFO",
    "PLAIN_RULES",
    "Attribute",
    "Call",
    "EnvAdapter",
    "GymRules",
    "Handling",
    "ResetArguments",
    "at_path",
]

# Where an info is among the objects of a region, and the last observation of an episode as the env has it; no value of
# a space has these places.
INFO: Key = ()
FINAL: Key = ("\0",)
CALLERS: Key = ()  # where the root that the caller has of an env is among the objects of its input, if it is shown that


class ResetArguments(NamedTuple):
    """The arguments of the reset of one env.

    Attributes:
        kwargs: Keyword arguments for the env's own `reset`.
        given: Keys whose rows, in the regions `root` and `input`, hold what the caller knows of the env.
        objects: The caller's values that have no such row, masks among them, by key.
    """

    kwargs: Mapping[str, Any] = {}
    given: tuple[Key, ...] = ()
    objects: Mapping[Key, Any] = {}


class Call(NamedTuple):
    """Something that is asked of an env beyond the commands.

    Attributes:
        kind: "call" a method, "get" or "set" an attribute, take the "state_dict" or "load_state_dict", or "apply" to
            the env, where it has Gymnasium's signatures, the function that is the first of `args`.
        name: Of the method or attribute; a path of names (`at_path`), unless it is to be set.
        args: For the method; or the one value to set or load.
        kwargs: For the method.
    """

    kind: str
    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class Attribute(NamedTuple):
    """An attribute of an env: its value, unless it is something to call, which stays where it is.

    Attributes:
        is_callable: Whether it can be called.
        value: Its value otherwise.
        error: Why the value stays where it is as well, if it does.
    """

    is_callable: bool
    value: Any = None
    error: Exception | None = None


def at_path(first: Callable[[str], Any], path: str) -> Any:
    """The attribute at the end of a path of names, such as `gauge.level`.

    Args:
        first: Finds the first one.
        path: The names, with dots between them.
    """
    name, *rest = path.split(".")
    return functools.reduce(getattr, rest, first(name))


class GymRules(NamedTuple):
    """The rules for envs with Gymnasium's signatures.

    Attributes:
        reward: The dtype of their rewards.
        reports_infos: Whether their infos, where they are not empty, are among the objects that travel, at `INFO`.
        batches_infos: Whether dicts in these will be batched key by key, so that none may contain itself.
        resets_next: Whether the step after the last one of an episode ignores its input and begins the next episode:
            its outcome is then the observation of the reset, no reward, and no end.
        scalars: Whether actions of a Box without dims are numpy's scalars rather than arrays.
        keeps_finals: Whether the last observation of an episode, where it is not just what its rows have, is among the
            objects that travel, at `FINAL`.
    """

    reward: str = "<f4"
    reports_infos: bool = False
    batches_infos: bool = False
    resets_next: bool = False
    scalars: bool = False
    keeps_finals: bool = False


PLAIN_RULES = GymRules()


class Handling(NamedTuple):
    """How envs are driven by what hosts them.

    Attributes:
        by_reference: Whether those that deal in tensors hand them over as objects rather than through arrays.
        keeps_grad: Whether gradients may flow through these; else they run under no_grad.
        generators: What becomes of the process's random generators when an env is seeded.
        answer: Makes of what an env answered to a call something that is the caller's own.
        rules: What is agreed about those with Gymnasium's signatures.
    """

    by_reference: bool = False
    keeps_grad: bool = False
    generators: Generators = Generators.EXCHANGED
    answer: Callable[[Any], Any] = copied
    rules: GymRules = PLAIN_RULES


class EnvAdapter(Protocol):
    """One env behind the worker's commands. Values go through the rows it was bound to.

    Where the metadata say that it has coroutines, its reset, step, perform and close return one.

    Attributes:
        metadata: What the env says of itself.
        env: The env.
        needs_reset: Whether it refuses to step: it failed, was cancelled or was replaced since its last reset. One that
            was never reset does not.
    """

    metadata: EnvMetadata
    env: Any
    needs_reset: bool

    @property
    def generator(self) -> Any:
        """The generator that whoever has it step puts in the place of numpy's meanwhile (`NumpyTurns`).

        None for an env that leaves numpy's alone, or exchanges whatever it draws from by itself.
        """

    @property
    def core(self) -> Any:
        """The object that no other env may share: the innermost env; None if it keeps nothing of its own."""

    def bind(self, arrays: Mapping[str, Arrays], row: int) -> None:
        """Take these arrays, by region, and this row of each, for all values of fixed shape."""

    def take_half(self, write_half: int) -> None:
        """Write to the half that this says from now on (`WRITE_HALF`); to the first one until it is called."""

    def seed(self, seed: int) -> None:
        """Use this seed at the next reset."""

    def reset(self, arguments: ResetArguments) -> Coroutine[Any, Any, None] | None:
        """Begin an episode; the observation goes to the `root` region."""

    def step(self, maybe_reset: bool) -> Coroutine[Any, Any, bool] | bool:
        """Take one step with the stored input; the outcome goes to `next`.

        True at the end of an episode; with `maybe_reset` the next one has begun then, and is in `root`. True as well if
        `root` holds what the next step begins with for another reason.
        """

    def accept(self, objects: Objects) -> None:
        """Take the input of the next step that has no row; it is the env's own from then on, so copy it."""

    def objects(self, region: str) -> Objects:
        """The outcome that has no row, by key."""

    def perform(self, call: Call) -> Any:
        """Do what is asked beyond the commands; the arguments are the env's own.

        Raises:
            AttributeError: If the env has no such attribute.
        """

    def close(self) -> Coroutine[Any, Any, None] | None:
        """Close the env."""
