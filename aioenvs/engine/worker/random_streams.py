"""Random generators of single envs, and the chain of their seeds."""

from __future__ import annotations

import operator
import os
import random
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np

from aioenvs.errors import shown

__all__ = [
    "NUMPY",
    "PYTHON",
    "Generator",
    "Generators",
    "NumpyStream",
    "NumpyTurns",
    "Streams",
    "TrialStreams",
    "as_python",
    "here",
    "integer_seed",
    "leave_alone",
    "next_seed",
    "seed_chain",
    "torch_generator",
]


LIMIT = 2**32 - 1


def next_seed(seed: int) -> int:
    """The seed that follows in the chain; the rule is TorchRL's `seed_generator`."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % LIMIT


def as_python(seed: Any) -> Any:
    """An integer of numpy or torch, also in an array without dims, as one of Python; anything else as it is.

    >>> as_python(np.int64(3)), as_python(np.array(3)), as_python("three")
    (3, 3, 'three')
    """
    if isinstance(seed, bool | np.bool_) or getattr(seed, "shape", ()) != ():
        return seed
    try:
        return operator.index(seed)
    except TypeError:
        return seed


def integer_seed(seed: Any) -> int:
    """A seed as an integer of Python, which is what Gymnasium's envs take.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is negative.
    """
    number = as_python(seed)
    if type(number) is not int:
        raise TypeError(f"a seed must be an integer or None, got {shown(seed)}")
    if number < 0:
        raise ValueError(f"a seed must not be negative, got {number}")
    return number


def seed_chain(seed: int | None, count: int, *, static: bool = False) -> tuple[list[int], int]:
    """Seeds for `count` envs, and the next one in the chain.

    Args:
        seed: The first env's seed, None to draw one.
        count: How many envs.
        static: Give the same seed to all, and return it.

    Raises:
        TypeError: If the seed is not an integer.
        ValueError: If it is negative.
    """
    if seed is None:
        seed = secrets.randbelow(LIMIT)
    current = integer_seed(seed)
    if static:
        return [current] * count, current
    seeds = []
    for _ in range(count):
        seeds.append(current)
        current = next_seed(current)
    return seeds, current


T = TypeVar("T")

TRIAL = 64  # calls of an env after which it is believed not to draw from a generator that is slow to exchange

_get_numpy, _set_numpy = np.random.mtrand.get_bit_generator, np.random.mtrand.set_bit_generator


class Generators(StrEnum):
    """The treatment of the process's generators when an env is given a seed."""

    LEFT = "left"  # nothing: other threads use them at the same time
    EXCHANGED = "exchanged"  # the env's own states are in their place while it runs
    SEEDED = "seeded"  # the same, and besides they are seeded themselves, for what is not exchanged
    OWNED = "owned"  # they are seeded: the env is alone in its process


class Generator(NamedTuple):
    """One of the process's generators.

    Attributes:
        name: "python", "numpy" or "torch".
        get: Takes its state.
        set: Puts a state in place.
        seeded: Makes a new state from a seed.
        mark: Makes of a state something that differs once it has been drawn from.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    seeded: Callable[[int], Any]
    mark: Callable[[Any], Any] = lambda state: state


def _numpy_generator(seed: int) -> np.random.MT19937:
    state: Any = np.random.RandomState(seed % 2**32).get_state(legacy=False)
    generator = np.random.MT19937()
    generator.state = state
    return generator


def _numpy_mark(generator: Any) -> Any:
    state = generator.state["state"]
    return state["pos"], state["key"].tobytes()


def _python_mark(state: Any) -> Any:
    _, numbers, gauss = state
    return numbers[-1], numbers[0], gauss  # the place in the numbers, and one that is new whenever all of them are


PYTHON = Generator(
    "python", random.getstate, random.setstate, lambda seed: random.Random(seed).getstate(), _python_mark
)
# The generator itself is exchanged, which is a hundred times quicker than its state.
NUMPY = Generator("numpy", _get_numpy, _set_numpy, _numpy_generator, _numpy_mark)


def torch_generator(torch: Any) -> Generator:
    """Torch's generator on the CPU.

    Args:
        torch: The module, which not every process has.
    """

    def seeded(seed: int) -> Any:
        return torch.Generator().manual_seed(seed % 2**63).get_state()

    return Generator("torch", torch.get_rng_state, torch.set_rng_state, seeded, lambda state: state.numpy().tobytes())


# -- who may use them -----------------------------------------------------------------------------------

# Held while streams are in place; the thread that holds it may put others on top, as a batch within an env does.
_lock = threading.RLock()
_thread = threading.local()


def _after_fork() -> None:
    """In a fork no other thread is left that could release the lock, and the one there is hosts nothing."""
    global _lock, _thread
    _thread = threading.local()
    if _lock.acquire(blocking=False):
        _lock.release()
    else:
        _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def leave_alone() -> None:
    """Have envs that are built in this thread from now on leave the process's generators alone."""
    _thread.generators = Generators.LEFT


def here() -> Generators:
    """Return the treatment of the process's generators by envs in this thread."""
    generators: Generators = getattr(_thread, "generators", Generators.EXCHANGED)
    return generators


# -- streams --------------------------------------------------------------------------------------------


class Streams:
    """The states of one env; a context in which they are in place. Before it is seeded the context does nothing.

    Args:
        *generators: Whose states.
        use: What becomes of the generators themselves.

    >>> streams = Streams(PYTHON)
    >>> streams.seed(3)
    >>> with streams:
    ...     first = random.random()
    >>> first == random.Random(3).random()
    True
    """

    def __init__(self, *generators: Generator, use: Generators = Generators.EXCHANGED) -> None:
        self._generators: Sequence[Generator] = generators
        self._use = use
        self._own: list[Any] | None = None
        self._others: list[Any] = []

    def seed(self, seed: int) -> None:
        """Begin new streams."""
        if self._use in (Generators.SEEDED, Generators.OWNED):
            for generator in self._generators:
                generator.set(generator.seeded(seed))
        if self._use in (Generators.SEEDED, Generators.EXCHANGED):
            self._own = [generator.seeded(seed) for generator in self._generators]

    def __enter__(self) -> None:
        if self._own is not None:
            _lock.acquire()
            try:
                self._others = self._exchange(self._own)
            except BaseException:
                _lock.release()
                raise

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            try:
                self._own = self._exchange(self._others)
            finally:
                _lock.release()

    def run(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call something with them in place."""
        with self:
            return method(*args, **kwargs)

    def _exchange(self, states: Sequence[Any]) -> list[Any]:
        """Put these states in place, and return those that were."""
        replaced = [generator.get() for generator in self._generators]
        for generator, state in zip(self._generators, states, strict=True):
            generator.set(state)
        return replaced


class TrialStreams(Streams):
    """Streams for an env that may well have no use for them, which it shows within its first calls.

    Exchanging numpy's generator costs next to nothing, and is done always. That of Python's and of torch's states costs
    more than a quick env's step; one of them from which the env has not drawn within `TRIAL` calls since it was seeded
    is therefore not exchanged any more. An env that draws from it only later shares it with the others in its process:
    with `Generators.SEEDED` its draws still follow from the seeds of all of them, and with `Generators.OWNED` from its
    own, as if it had been exchanged.

    Args:
        *kept: What is exchanged always besides numpy's, as the env is likely to use it.
        use: What becomes of the generators themselves.
    """

    def __init__(self, *kept: Generator, use: Generators = Generators.EXCHANGED) -> None:
        super().__init__(use=use)
        self._kept = (NUMPY, *kept)
        self._left = 0
        self._marks: list[Any] = []

    def seed(self, seed: int) -> None:
        """Begin new streams, torch's among them if it is loaded by now, and a new trial."""
        kept, torch = {generator.name for generator in self._kept}, sys.modules.get("torch")
        tried = [PYTHON] if torch is None else [PYTHON, torch_generator(torch)]
        self._generators = (*self._kept, *(generator for generator in tried if generator.name not in kept))
        super().seed(seed)
        if self._own is not None:
            self._left, self._marks = TRIAL, self._marked(self._own)

    def settled(self) -> Streams | NumpyStream | None:
        """Return the streams to go on with: these until the trial is over, or fewer; None if there are none to keep."""
        if self._own is None:
            return None
        if self._left > 0:
            return self
        used = [old != new for old, new in zip(self._marks, self._marked(self._own), strict=True)]
        used[: len(self._kept)] = [True] * len(self._kept)
        if not any(used[1:]):
            return NumpyStream(self._own[0])
        rest = Streams(*(generator for generator, kept in zip(self._generators, used, strict=True) if kept))
        rest._own = [state for state, kept in zip(self._own, used, strict=True) if kept]
        return rest

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._left -= 1

    def _marked(self, states: Sequence[Any]) -> list[Any]:
        return [generator.mark(state) for generator, state in zip(self._generators, states, strict=True)]


class NumpyStream:
    """The `Streams` of numpy's generator alone, as quick as can be.

    Attributes:
        own: The generator.
    """

    def __init__(self, own: Any) -> None:
        self.own = own

    def run(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call something with them in place."""
        turns = NumpyTurns()
        try:
            turns.put(self.own)
            return method(*args, **kwargs)
        finally:
            turns.end()


class NumpyTurns:
    """The generators of several envs in the place of numpy's, one after the other, until the end of all turns.

    Other threads that want to put some in place wait from the first one to the end.
    """

    _others: Any = None  # the one that was there before, while another is in its place

    def put(self, own: Any) -> None:
        """Put a generator in place; None for the one that was there before."""
        if own is None:
            self.end()
            return
        if self._others is None:
            _lock.acquire()
            self._others = _get_numpy()
        _set_numpy(own)

    def end(self) -> None:
        """Put back the one that was there before, and let others go on."""
        if self._others is None:
            return
        others, self._others = self._others, None
        try:
            _set_numpy(others)
        finally:
            _lock.release()
