"""Several agents: a PettingZoo env in worker processes, whose agents leave one after the other.

Three hikers on a line walk home, each to a hut of its own; who has arrived is out. The agents of a group are rows of
one nested TensorDict, so one call of a policy acts for the hikers of all envs. What the workers give is what the env
gives when it is stepped by hand.

Run it by ``python examples/pettingzoo_env.py``; it takes a few seconds.
"""

import argparse
from typing import Any

import numpy as np
import pettingzoo
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDictBase

from aioenvs import ParallelEnv, PettingZooWrapper

NUM_ENVS = 16
HIKERS = ("hiker_0", "hiker_1", "hiker_2")
MAX_STEPS = 10
SEED = 1


class Hikers(pettingzoo.ParallelEnv):
    """Each hiker observes how far its hut is, and takes a step to the left (0) or to the right (1)."""

    def __init__(self) -> None:
        self.possible_agents = list(HIKERS)
        self.random = np.random.default_rng()

    def observation_space(self, agent: str) -> Box:
        """How far the hut is, and on which side."""
        return Box(-20, 20, (1,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        """To the left, or to the right."""
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """Put all hikers somewhere."""
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.steps = list(HIKERS), 0
        self.distance = {agent: int(self.random.integers(1, 9) * self.random.choice([-1, 1])) for agent in HIKERS}
        return self._observed(), {agent: {} for agent in HIKERS}

    def step(self, actions: dict[str, int]) -> Any:
        """Move those who are on the way; one who is home leaves with a reward of 1."""
        self.steps += 1
        for agent, action in actions.items():
            self.distance[agent] += -1 if action else 1
        home = {agent: self.distance[agent] == 0 for agent in self.agents}
        late = {agent: self.steps == MAX_STEPS and not home[agent] for agent in self.agents}
        rewards = {agent: float(home[agent]) for agent in self.agents}
        result = self._observed(), rewards, home, late, {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not home[agent] and not late[agent]]
        return result

    def _observed(self) -> dict[str, Any]:
        return {agent: np.array([self.distance[agent]], np.float32) for agent in self.agents}


def make() -> PettingZooWrapper:
    """An env whose episode goes on until the last hiker is home; its `mask` says who is on the way."""
    return PettingZooWrapper(Hikers(), use_mask=True, done_on_any=False)


def straight(td: TensorDictBase) -> TensorDictBase:
    """Walk towards the hut: one call for all hikers of all envs."""
    td["hiker", "action"] = (td["hiker", "observation"].squeeze(-1) > 0).long()
    return td


def by_hand(seed: int) -> list[list[float]]:
    """The rewards of all hikers in each step of an episode."""
    env, rewards = Hikers(), []
    observations, _ = env.reset(seed=seed)
    while env.agents:
        actions = {agent: int(observations[agent][0] > 0) for agent in env.agents}
        observations, reward, *_ = env.step(actions)
        rewards.append([reward.get(agent, 0.0) for agent in HIKERS])
    return rewards


def main() -> None:
    """Compare hikers who wander with those who walk straight, and these with the env stepped by hand."""
    argparse.ArgumentParser(description="Several agents: a PettingZoo env in worker processes.").parse_args()
    torch.manual_seed(SEED)
    with ParallelEnv(NUM_ENVS, make) as env:
        for name, policy in (("random", None), ("straight", straight)):
            env.set_seed(SEED)
            rollout = env.rollout(MAX_STEPS, policy, break_when_any_done=False, break_when_all_done=True)
            home = rollout["next", "hiker", "terminated"][:, -1].sum()
            print(f"{name}: {home} of {NUM_ENVS * len(HIKERS)} hikers came home")
    first, expected = rollout[0], by_hand(SEED)
    print("first env, on the way after each step:", *first["next", "hiker", "mask"].sum(-1).tolist()[: len(expected)])
    print("the same by hand:", first["next", "hiker", "reward"].squeeze(-1).tolist()[: len(expected)] == expected)


if __name__ == "__main__":
    main()
