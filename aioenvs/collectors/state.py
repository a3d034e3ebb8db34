"""What of a collector can be saved and restored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioenvs.batched.base import AsyncEnvs
from aioenvs.collectors.acting import Actor
from aioenvs.collectors.progress import Progress
from aioenvs.collectors.trajectories import TrajectoryIds

__all__ = ["Saved"]


@dataclass(frozen=True)
class Saved:
    """All that is part of a state.

    Attributes:
        env: The envs, none of which is at work.
        actor: The policy.
        progress: How far the run has come.
        ids: Numbers the trajectories.
    """

    env: AsyncEnvs
    actor: Actor
    progress: Progress
    ids: TrajectoryIds

    async def take(self) -> OrderedDict[str, Any]:
        """The state as it is."""
        state: OrderedDict[str, Any] = OrderedDict()
        if self.actor.module is not None:
            state["policy_state_dict"] = self.actor.module.state_dict()
        state["env_state_dict"] = await self.env.state_dict()
        progress = self.progress
        state |= {"frames": progress.frames, "iter": progress.iterations, "traj_ids": self.ids.following}
        return state

    async def restore(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Make it what it was.

        Args:
            state: What `take` returned.
            strict: Whether it must have the states of envs and policy, with just the keys that these have.

        Raises:
            KeyError: If something is missing.
            TypeError: If it has the state of a policy, and the policy has none.
        """
        frames, iterations, following = (state[name] for name in ("frames", "iter", "traj_ids"))
        if strict and self.actor.module is not None and "policy_state_dict" not in state:
            raise KeyError("policy_state_dict")
        if strict or "env_state_dict" in state:
            await self.env.load_state_dict(state["env_state_dict"], strict)
        if "policy_state_dict" in state:
            self.actor.load(state["policy_state_dict"])
        self.progress.frames, self.progress.iterations, self.ids.following = frames, iterations, following
