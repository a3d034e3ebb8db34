"""What the envs of a batch have done."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Statistics"]


@dataclass(frozen=True)
class Statistics:
    """What the envs have done since they were started; one entry per env, in the order of the batch.

    Attributes:
        steps: Steps that came back.
        episodes: Steps that ended an episode, lost ones included.
        restarts: How often the worker of the env was replaced after its death.
        mean_step_seconds: How long a step took on average, from asking its worker to the answer. Envs that share a
            worker have its time in common.
        max_step_seconds: The longest of these.
        states: "idle", "busy", "draining" (it still works on something that nobody waits for) or "broken" (its worker
            is dead).
    """

    steps: tuple[int, ...]
    episodes: tuple[int, ...]
    restarts: tuple[int, ...]
    mean_step_seconds: tuple[float, ...]
    max_step_seconds: tuple[float, ...]
    states: tuple[str, ...]
