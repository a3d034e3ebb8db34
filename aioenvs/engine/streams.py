"""Random streams of an env's own, for envs that draw from the generators that all of a process share.

`random`, `numpy.random` and torch each have one generator per process. An env that draws from them would get other
numbers when other envs live in its process, and would disturb those of the caller where they live in the caller's. Once
an env has been given a seed, it therefore has states of its own, which are in place while it runs: those that
`random.seed`, `numpy.random.seed` and `torch.manual_seed` make of that seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["NUMPY", "PYTHON", "Generator", "Streams", "TrialStreams"]

TRIAL = 64  # calls of an env after which it is believed not to draw from the process's generators


class Generator(NamedTuple):
    """One of the process's generators.

    Attributes:
        get: Takes its state.
        set: Puts a state in place.
        seeded: Makes a new state from a seed.
        mark: Makes of a state something that differs once it has been drawn from.
    """

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


PYTHON = Generator(random.getstate, random.setstate, lambda seed: random.Random(seed).getstate())
# The generator itself is exchanged, which is a hundred times quicker than its state.
NUMPY = Generator(np.random.mtrand.get_bit_generator, np.random.mtrand.set_bit_generator, _numpy_generator, _numpy_mark)


class Streams:
    """The states of one env; a context in which they are in place. Before it is seeded the context does nothing.

    >>> streams = Streams(PYTHON)
    >>> streams.seed(3)
    >>> with streams:
    ...     first = random.random()
    >>> first == random.Random(3).random()
    True
    """

    def __init__(self, *generators: Generator) -> None:
        self._generators = generators
        self._own: list[Any] | None = None
        self._others: list[Any] = []

    def seed(self, seed: int) -> None:
        """Begin new streams."""
        self._own = [generator.seeded(seed) for generator in self._generators]

    def __enter__(self) -> None:
        if self._own is not None:
            self._others = self._exchange(self._own)

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own = self._exchange(self._others)

    def _exchange(self, states: Sequence[Any]) -> list[Any]:
        """Put these states in place, and return those that were."""
        replaced = [generator.get() for generator in self._generators]
        for generator, state in zip(self._generators, states, strict=True):
            generator.set(state)
        return replaced


class TrialStreams(Streams):
    """Streams for an env that may well have no use for them, which it shows within its first calls.

    Keeping streams costs as much as a quick env's step. One that draws from the process's generators for the first time
    after `TRIAL` calls is therefore not helped.
    """

    def __init__(self, *generators: Generator) -> None:
        super().__init__(*generators)
        self._left = TRIAL
        self._marks: list[Any] = []

    def seed(self, seed: int) -> None:
        """Begin new streams, and a new trial."""
        super().seed(seed)
        assert self._own is not None
        self._left, self._marks = TRIAL, self._marked(self._own)

    @property
    def are_idle(self) -> bool:
        """Whether the trial is over and nothing was drawn."""
        return self._left == 0

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._left > 0 and self._own is not None:
            self._left = -1 if self._marked(self._own) != self._marks else self._left - 1

    def _marked(self, states: Sequence[Any]) -> list[Any]:
        return [generator.mark(state) for generator, state in zip(self._generators, states, strict=True)]
