"""A Gymnasium space for what no other space describes. Free of torch, since workers import it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from gymnasium import Space

from aioenvs.errors import shown

__all__ = ["Anything"]


class Anything(Space[Any]):
    """Any object that can be pickled: chat messages, tool results, images of varying size, None.

    Its values travel behind the frames, per env, and are non-tensor data in a TensorDict; those of other spaces, such
    as the other members of a `Dict`, take the quick way as ever.

    Args:
        examples: What `sample` chooses from.
        seed: Of that choice.

    >>> messages = Anything(examples=[[{"role": "user", "content": "Hello"}]])
    >>> messages.sample()
    [{'role': 'user', 'content': 'Hello'}]
    >>> None in messages
    True
    """

    def __init__(self, examples: Sequence[Any] = (None,), seed: int | None = None) -> None:
        if not isinstance(examples, Sequence) or isinstance(examples, str | bytes) or not examples:
            raise ValueError(f"expected a list of objects to sample from as examples, found {shown(examples)}")
        super().__init__(None, None, seed)
        self.examples = tuple(examples)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """A copy of one of the examples; masks and probabilities have no meaning here."""
        return copy.deepcopy(self.examples[int(self.np_random.integers(len(self.examples)))])

    def contains(self, x: Any) -> bool:
        """True."""
        return True

    @property
    def is_np_flattenable(self) -> bool:
        """False: not every value is made of numbers."""
        return False

    def __eq__(self, other: object) -> bool:
        """Whether the other is such a space, whatever its examples."""
        return isinstance(other, Anything)

    def __hash__(self) -> int:
        return hash(Anything)

    def __repr__(self) -> str:
        return "Anything()"
