"""What an env of several agents must give, worked out from its own dicts by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

__all__ = ["Played", "actions_for", "check_same", "flat"]


class Played:
    """An env stepped by hand, whose dicts become the TensorDicts that are expected.

    Args:
        env: With PettingZoo's parallel signatures.
        groups: The agents of each group.
        use_mask: Whether there are masks of agents.
        on_any: Whether the episode is over with the first agent's.
    """

    def __init__(
        self, env: Any, groups: Mapping[str, Sequence[Any]], *, use_mask: bool = False, on_any: bool = True
    ) -> None:
        self.env, self.groups, self.use_mask, self.on_any = env, groups, use_mask, on_any
        self.ended: dict[Any, tuple[bool, bool]] = {}

    def reset(self, **kwargs: Any) -> TensorDictBase:
        self.ended = {}
        observations, _ = self.env.reset(**kwargs)
        td = TensorDict({name: torch.zeros(1, dtype=torch.bool) for name in ("done", "terminated", "truncated")})
        for group, agents in self.groups.items():
            td[group] = self._observed(agents, observations)
            for name in ("done", "terminated", "truncated"):
                td[group, name] = torch.zeros(len(agents), 1, dtype=torch.bool)
        return td

    def step(self, actions: Mapping[str, Any]) -> TensorDictBase:
        """The outcome of a step, given the actions of each group as an array."""
        own = {
            agent: row
            for group, agents in self.groups.items()
            for agent, row in zip(agents, actions[group], strict=True)
        }
        result = self.env.step({agent: own[agent] for agent in self.env.agents})
        observations, rewards, terminations, truncations, _ = result
        for agent in self.env.possible_agents:
            if agent in terminations:
                self.ended[agent] = bool(terminations[agent]), bool(truncations[agent])
            elif not any(self.ended.get(agent, (False, False))):
                self.ended[agent] = True, False
        td = TensorDict()
        for group, agents in self.groups.items():
            td[group] = self._observed(agents, observations)
            td[group, "reward"] = torch.tensor([[float(rewards.get(agent, 0))] for agent in agents])
            for place, name in enumerate(("terminated", "truncated")):
                td[group, name] = torch.tensor([[self.ended[agent][place]] for agent in agents])
            td[group, "done"] = td[group, "terminated"] | td[group, "truncated"]
        over = any if self.on_any else all
        ended = list(self.ended.values())
        done = over(any(flags) for flags in ended)
        td["done"] = torch.tensor([done])
        td["terminated"] = torch.tensor([over(flags[0] for flags in ended)])
        td["truncated"] = torch.tensor([done and any(flags[1] for flags in ended)])
        return td

    def _observed(self, agents: Sequence[Any], observations: Mapping[Any, Any]) -> TensorDictBase:
        td = TensorDict(batch_size=[len(agents)])
        space = self.env.observation_space(agents[0])
        zeros = np.zeros(space.shape, space.dtype)
        td["observation"] = torch.as_tensor(np.stack([observations.get(agent, zeros) for agent in agents]))
        if self.use_mask:
            td["mask"] = torch.tensor([agent in self.env.agents for agent in agents])
        return td


def actions_for(env: Any, groups: Mapping[str, Sequence[Any]], draw: np.random.Generator) -> dict[str, Any]:
    """Actions of all agents, those that are gone too, as an array for each group."""
    actions: dict[str, Any] = {}
    for group, agents in groups.items():
        rows: list[Any] = []
        for agent in agents:
            space = env.action_space(agent)
            space.seed(int(draw.integers(2**31)))
            rows.append(space.sample())
        actions[group] = np.stack(rows)
    return actions


def flat(td: TensorDictBase) -> dict[Any, Any]:
    """The leaves, by key."""
    return {key: value for key, value in td.items(True, True) if not is_tensor_collection(value)}


def check_same(
    found: TensorDictBase, expected: TensorDictBase, *, but: Callable[[Any], bool] = lambda key: False
) -> None:
    """Check that two TensorDicts have the same keys, shapes, dtypes and values; those of some keys may differ."""
    mine, others = flat(found), flat(expected)
    assert sorted(map(str, mine)) == sorted(map(str, others))
    for key, value in mine.items():
        if not but(key):
            assert (key, value.dtype, value.shape) == (key, others[key].dtype, others[key].shape)
            assert torch.equal(value, others[key]), key
