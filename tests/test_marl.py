from __future__ import annotations

import re

import pytest

from aioenvs.envs.pettingzoo import MarlGroupMapType, check_marl_grouping

AGENTS = ["red", "green", "blue"]


@pytest.mark.parametrize("kind", MarlGroupMapType)
@pytest.mark.parametrize("agents", [AGENTS, ["red"]])
def test_the_premade_groupings_pass_the_check(kind: MarlGroupMapType, agents: list[str]) -> None:
    groups = kind.get_group_map(agents)
    check_marl_grouping(groups, agents)
    assert [agent for group in groups.values() for agent in group] == agents


def test_the_premade_groupings() -> None:
    assert MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(AGENTS) == {"agents": AGENTS}
    assert MarlGroupMapType.ONE_GROUP_PER_AGENT.get_group_map(AGENTS) == {name: [name] for name in AGENTS}


def test_a_group_map_is_not_the_callers_list() -> None:
    agents = list(AGENTS)
    groups = MarlGroupMapType.ALL_IN_ONE_GROUP.get_group_map(agents)
    groups["agents"].append("gold")
    assert agents == AGENTS


def test_any_complete_grouping_passes() -> None:
    assert check_marl_grouping({"warm": ("red",), "cold": ("blue", "green")}, tuple(AGENTS)) is None


@pytest.mark.parametrize(
    ("groups", "agents", "message"),
    [
        ({}, [], "expected at least one agent, found []"),
        (
            {"a": ["red"]},
            ["red", "blue", "red"],
            "expected agents of different names, found more than one called ['red']",
        ),
        ({"a": ["red"], "b": ["blue"], "c": []}, ["red", "blue"], "found 3 groups, ['a', 'b', 'c'], for 2 agents"),
        ({"a": AGENTS, "b": [], "c": []}, AGENTS, "expected agents in each group, found none in ['b', 'c']"),
        ({"a": [*AGENTS, "gold"]}, AGENTS, "expected agents among ['red', 'green', 'blue'], found also ['gold']"),
        ({"a": AGENTS, "b": ["red"]}, AGENTS, "expected each agent in one place, found in several ['red']"),
        ({"a": ["red", "red"], "b": ["green", "blue"]}, AGENTS, "found in several ['red']"),
        ({"a": ["green"]}, AGENTS, "expected each agent in a group, found in none ['red', 'blue']"),
    ],
    ids=["no agents", "duplicates", "many groups", "empty group", "unknown", "in two groups", "twice", "missing"],
)
def test_a_wrong_grouping_is_refused(groups: dict[str, list[str]], agents: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_marl_grouping(groups, agents)
