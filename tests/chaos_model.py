"""What chaos.py knows of its envs: the states that each may be in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chaos_envs import FAILING, UNTOLD, length_of

__all__ = ["MANY", "SETTLED", "UNRESET", "Mismatch", "Model", "State", "require"]

MANY = 10**6  # restarts that are never used up


class Mismatch(AssertionError):
    """Something came back that must not."""


class State(NamedTuple):
    """What an env may be in."""

    episode: int
    steps: int
    last: int
    can_step: bool = True

    def stepped(self, index: int, action: int, maybe_reset: bool) -> State:
        """The state after a step."""
        if not self.can_step or action % FAILING == 0:
            return self._replace(can_step=False)
        after = State(self.episode, self.steps + 1, action)
        return after.was_reset(UNTOLD) if maybe_reset and after.steps >= length_of(index) else after

    def was_reset(self, told: int) -> State:
        """The state after a reset."""
        return State(self.episode + 1, 0, told)


UNRESET = State(0, 0, UNTOLD, False)
SETTLED = State(1, 0, UNTOLD)


@dataclass
class Model:
    """What is known of an env.

    Attributes:
        index: Its index.
        generation: The one that its caller knows; None if it will learn of a new one.
        states: What it may be in.
        deaths: When its worker was killed, or stopped for too long, as far as nobody heard of it.
        last_death: When that was last, whoever heard of it.
        owed: Whether it is certain that it was lost, and nobody has heard of it.
        vague: Whether nothing is certain, until it was reset or has stepped.
        asked: How many steps and resets it was asked for.
        lent: What was lent last: how many that were, the tensors, and what was in them.
    """

    index: int
    generation: int | None = None
    states: set[State] = field(default_factory=lambda: {UNRESET})
    deaths: list[float] = field(default_factory=list)
    last_death: float = -math.inf
    owed: bool = False
    vague: bool = False
    asked: int = 0
    lent: tuple[int, dict[str, Any], dict[str, Any]] | None = None

    @property
    def may_be_dead(self) -> bool:
        return bool(self.deaths) or self.owed or self.vague

    def die(self, when: float) -> None:
        """Its worker is killed, or may be."""
        self.deaths.append(when)
        self.last_death = max(self.last_death, when)

    def settle(self, generation: int | None, state: State) -> None:
        """It is certain again."""
        self.generation, self.states, self.owed, self.vague = generation, {state}, False, False


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Mismatch(what)
