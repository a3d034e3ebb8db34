"""How the agents of a multi-agent env are grouped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum

from aioenvs.errors import shown

__all__ = ["MarlGroupMapType", "check_marl_grouping"]


class MarlGroupMapType(Enum):
    """A grouping that fits any agents; agents of a group share one nested TensorDict.

    Attributes:
        ALL_IN_ONE_GROUP: One group called "agents".
        ONE_GROUP_PER_AGENT: Each agent is a group of its own name.

    >>> MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(["red", "blue"])
    {'agents': ['red', 'blue']}
    >>> MarlGroupMapType.ONE_GROUP_PER_AGENT.get_group_map(["red", "blue"])
    {'red': ['red'], 'blue': ['blue']}
    """

    ALL_IN_ONE_GROUP = 1
    ONE_GROUP_PER_AGENT = 2

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Group these agents.

        Args:
            agent_names: All agents of an env.

        Returns:
            The agents of each group, by its name.
        """
        if self is MarlGroupMapType.ALL_IN_ONE_GROUP:
            return {"agents": list(agent_names)}
        return {name: [name] for name in agent_names}


def check_marl_grouping(group_map: Mapping[str, Sequence[str]], agent_names: Sequence[str]) -> None:
    """Check that each agent is in exactly one group.

    Args:
        group_map: The agents of each group, by its name.
        agent_names: All agents of the env.

    Raises:
        ValueError: There are no agents, or some of one name; more groups than agents, or an empty group; or an
            agent of a group is unknown, is in two places, or is in none. The message names the culprits.

    >>> check_marl_grouping({"team": ["red"], "rest": []}, ["red", "blue"])
    Traceback (most recent call last):
    ...
    ValueError: expected agents in each group, found none in ['rest']
    """
    if not agent_names:
        raise ValueError(f"expected at least one agent, found {shown(agent_names)}")
    _refuse("expected agents of different names, found more than one called", _repeated(agent_names))
    if len(group_map) > len(agent_names):
        raise ValueError(
            f"expected at most as many groups as agents, found {len(group_map)} groups, {shown(list(group_map))}, "
            f"for {len(agent_names)} agents, {shown(list(agent_names))}"
        )
    grouped = [agent for group in group_map.values() for agent in group]
    _refuse("expected agents in each group, found none in", [name for name, group in group_map.items() if not group])
    _refuse(
        f"expected agents among {shown(list(agent_names))}, found also",
        [agent for agent in dict.fromkeys(grouped) if agent not in agent_names],
    )
    _refuse("expected each agent in one place, found in several", _repeated(grouped))
    _refuse("expected each agent in a group, found in none", [agent for agent in agent_names if agent not in grouped])


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _refuse(problem: str, culprits: Sequence[str]) -> None:
    if culprits:
        raise ValueError(f"{problem} {shown(culprits)}")
