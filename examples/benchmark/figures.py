"""What was measured, and what follows from it: medians, spreads and ratios. No input or output."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Comparison", "Outcome", "StartUp", "Turn", "ratio"]


@dataclass(frozen=True)
class Turn:
    """One turn of a system.

    Attributes:
        steps: Env steps.
        seconds: How long they took.
        cpu: CPU seconds that the calling process spent meanwhile, all its threads together.
    """

    steps: int
    seconds: float
    cpu: float

    @property
    def speed(self) -> float:
        """Env steps per second."""
        return self.steps / self.seconds


@dataclass(frozen=True)
class StartUp:
    """What it takes to have a system run.

    Attributes:
        seconds: From its construction to the end of the first step; what the caller imports is not counted.
        children: Processes it has.
        private_mb: Memory that a child shares with nobody, at the median.
        private_total_mb: The same, of all children together.
        proportional_mb: Memory of all children together, what is shared divided among those who share it.
        descriptors: Open descriptors that the calling process has more than before.
        child_descriptors: Open descriptors of all children.
    """

    seconds: float
    children: int
    private_mb: float
    private_total_mb: float
    proportional_mb: float
    descriptors: int
    child_descriptors: int


@dataclass
class Outcome:
    """What came of a system in a comparison.

    Attributes:
        system: Its name.
        layout: How it spreads its envs.
        num_processes: Over how many processes or threads; 0 for the calling one.
        native: Whether its envs are others, written in C++.
        headline: Whether others are compared with it.
        turns: Its turns, in order.
        start_up: What it took to start; None if it never ran.
        skipped: Why it was not tried, if so.
        failure: What ended it early, if so.
        note: What else there is to say of this run.
        remark: What always has to be said.
    """

    system: str
    layout: str
    num_processes: int
    native: bool = False
    headline: bool = False
    turns: list[Turn] = field(default_factory=list)
    start_up: StartUp | None = None
    skipped: str | None = None
    failure: str | None = None
    note: str | None = None
    remark: str | None = None

    @property
    def label(self) -> str:
        """The name, with how many processes there are."""
        return f"{self.system}, {self.num_processes}" if self.num_processes else self.system

    @property
    def counts(self) -> bool:
        """Whether there are turns, and no failure that casts doubt on them."""
        return bool(self.turns) and self.failure is None

    @property
    def speeds(self) -> list[float]:
        """Env steps per second of each turn."""
        return [turn.speed for turn in self.turns]

    @property
    def median(self) -> float:
        """Env steps per second, at the median of the turns."""
        return statistics.median(self.speeds)

    @property
    def parent_us(self) -> float:
        """Microseconds of CPU that the calling process used for an env step, at the median of the turns."""
        return statistics.median(1e6 * turn.cpu / turn.steps for turn in self.turns)

    @property
    def parent_cpu(self) -> float:
        """Share of a core that the calling process used, at the median of the turns."""
        return statistics.median(turn.cpu / turn.seconds for turn in self.turns)


@dataclass
class Comparison:
    """Systems that did the same work in the same turns.

    Attributes:
        workload: Its name.
        text: What a step is.
        num_envs: How many envs each system had.
        cores: How many cores there are.
        ideal: Env steps per second of a system without costs; None where nobody knows.
        outcomes: One for each system.
    """

    workload: str
    text: str
    num_envs: int
    cores: int
    ideal: float | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def measured(self) -> list[Outcome]:
        """The systems with figures."""
        return [outcome for outcome in self.outcomes if outcome.counts]

    @property
    def headlines(self) -> list[Outcome]:
        """Those with which the others are compared."""
        return [outcome for outcome in self.measured if outcome.headline]

    def floor_for(self, outcome: Outcome) -> Outcome | None:
        """The floor with the same number of processes; for systems without any, the one with fewest."""
        floors = [found for found in self.measured if found.system == "floor"]
        same = [floor for floor in floors if floor.num_processes == outcome.num_processes]
        return min(same or floors, key=lambda floor: floor.num_processes, default=None)

    def overhead(self, outcome: Outcome) -> float | None:
        """Seconds of a round that are not the envs' own, at the median of the turns; None where nobody knows these.

        Envs that several processes share are taken to share the cores evenly.
        """
        alone = next((found for found in self.measured if found.system == "envs alone"), None)
        if alone is None:
            return None
        at_once = min(max(outcome.num_processes, 1), self.cores)
        own = [self.num_envs / speed / at_once for speed in alone.speeds]
        return statistics.median(
            self.num_envs / speed - least for speed, least in zip(outcome.speeds, own, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """The same, with plain types."""
        return asdict(self)


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios within each turn, so that what slows all down in one turn does not count.

    Raises:
        ValueError: If there is no turn, or one has more than the other.
    """
    if not mine or len(mine) != len(theirs):
        raise ValueError(f"expected as many turns of each, found {len(mine)} and {len(theirs)}")
    return statistics.median(own / other for own, other in zip(mine, theirs, strict=True))
