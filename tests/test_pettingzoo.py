"""`PettingZooWrapper` against the envs that it wraps, stepped by hand, and against TorchRL's."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agent_envs import MIXED, CrowdEnv, MaskedEnv, SpacesEnv
from agent_rows import Played, actions_for, check_same
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text
from oracle import TORCHRL_MARKS
from pettingzoo.utils.conversions import turn_based_aec_to_parallel
from tensordict import TensorDictBase

from aioenvs import GymWrapper, MarlGroupMapType, PettingZooEnv, PettingZooWrapper, check_env_specs, step_mdp
from aioenvs.errors import ResetNeededError, SpecMismatchError
from aioenvs.specs import Bounded, Categorical, MultiCategorical, NonTensor, OneHot

REAL = {
    "tag": "mpe2.simple_tag_v3",
    "speaker-listener": "mpe2.simple_speaker_listener_v4",
    "comm": "mpe2.simple_world_comm_v3",
    "multiwalker": "pettingzoo.sisl.multiwalker.multiwalker",
    "pursuit": "pettingzoo.sisl.pursuit.pursuit",
    "knights": "pettingzoo.butterfly.knights_archers_zombies.knights_archers_zombies",
    "pistons": "pettingzoo.butterfly.pistonball.pistonball",
}
LEAVING = {"use_mask": True, "done_on_any": False}


def made(name: str, **kwargs: Any) -> Any:
    """A real env."""
    return importlib.import_module(REAL[name]).parallel_env(**kwargs)


def tictactoe() -> Any:
    """A turn-based game as an env in which both act at once, with action masks."""
    return turn_based_aec_to_parallel(importlib.import_module("pettingzoo.classic.tictactoe.tictactoe").env())


def acting(td: TensorDictBase, actions: dict[str, Any]) -> TensorDictBase:
    for group, values in actions.items():
        td[group, "action"] = torch.as_tensor(values)
    return td


# -- the same as by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, LEAVING], ids=["any", "all"])
@pytest.mark.parametrize("name", REAL)
@pytest.mark.slow
def test_a_real_env_gives_what_it_gives_by_hand(name: str, options: dict[str, Any]) -> None:
    env = PettingZooWrapper(made(name), **options)
    on_any = not options
    hand, draw = Played(made(name), env.group_map, use_mask=not on_any, on_any=on_any), np.random.default_rng(0)
    td = env.reset(seed=3)
    check_same(td, hand.reset(seed=3))
    for _ in range(60):
        actions = actions_for(hand.env, env.group_map, draw)
        td = env.step(acting(td, actions))
        check_same(td["next"], hand.step(actions))
        td = step_mdp(td)
        if td["done"]:
            td = env.reset(seed=4)
            check_same(td, hand.reset(seed=4))
    env.close()
    hand.env.close()


@pytest.mark.parametrize("lives", [(2, -1, 4, -1), (1, 1, 1, 1), (0, 3, -1, 2), (6, 6, 6, 6)])
@pytest.mark.parametrize("last_words", [True, False])
def test_agents_that_leave_have_empty_rows_and_stay_done(lives: tuple[int, ...], last_words: bool) -> None:
    env = PettingZooWrapper(CrowdEnv(lives, last_words=last_words), **LEAVING)
    hand = Played(CrowdEnv(lives, last_words=last_words), env.group_map, use_mask=True, on_any=False)
    td, draw = env.reset(seed=0), np.random.default_rng(1)
    check_same(td, hand.reset(seed=0))
    while not td["done"]:
        actions = actions_for(hand.env, env.group_map, draw)
        td = env.step(acting(td, actions))
        check_same(td["next"], hand.step(actions))
        td = step_mdp(td)
    assert not td["walker", "mask"].any()
    assert td["walker", "done"].all()
    assert hand.env.agents == []


def test_the_last_flags_of_an_agent_stay_and_the_root_is_truncated_with_the_rest() -> None:
    env = PettingZooWrapper(CrowdEnv((2, -1, -1, -1), length=4), **LEAVING)
    found = [
        tuple(bool(td["next", *key]) for key in (("done",), ("terminated",), ("truncated",)))
        for td in env.rollout(10).unbind(0)
    ]
    assert found == [(False, False, False)] * 3 + [(True, False, True)]
    rollout = env.rollout(10)
    assert rollout["next", "walker", "terminated"][..., 0].tolist() == [[False] * 3, *[[True, False, False]] * 3]
    assert rollout["next", "walker", "truncated"][-1, :, 0].tolist() == [False, True, True]


def test_an_episode_ends_with_the_first_agent_unless_told_otherwise() -> None:
    ends = {True: 2, False: 6, None: 2}
    for on_any, steps in ends.items():
        assert PettingZooWrapper(CrowdEnv(), done_on_any=on_any).rollout(20).shape == (steps,)


def test_without_masks_agents_must_stay() -> None:
    env = PettingZooWrapper(CrowdEnv(), use_mask=False, done_on_any=False)
    td = env.rand_step(env.rand_step(env.reset())["next"].exclude("reward"))
    with pytest.raises(SpecMismatchError, match=r"the agents \['walker_0'\] are not there.*use_mask=True"):
        env.rand_step(step_mdp(td))
    with pytest.raises(ResetNeededError):
        env.rand_step(step_mdp(td))
    assert env.rand_step(env.reset())["next", "walker", "reward"].shape == (3, 1)
    with pytest.raises(SpecMismatchError, match=r"the agents \['walker_1'\] are not there"):
        PettingZooWrapper(CrowdEnv((1, 0, 1, 1))).reset()


def test_an_agent_may_come_later() -> None:
    class LateEnv(CrowdEnv):
        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            if self.steps == 2:
                self.agents = ["walker_0", *self.agents]
                result[0]["walker_0"] = np.ones(4)
                for values, value in zip(result[1:], (0.5, False, False, {}), strict=True):
                    values["walker_0"] = value
            return result

    env = PettingZooWrapper(LateEnv((0, -1, -1, -1)), **LEAVING)
    rollout = env.rollout(4)
    assert rollout["next", "walker", "mask"][:, 0].tolist() == [False, True, True, True]
    assert rollout["next", "walker", "done"][:, 0, 0].tolist() == [True, False, False, False]
    assert rollout["next", "walker", "reward"][1, 0].item() == 0.5


# -- the same as TorchRL's ------------------------------------------------------------------------------

CASES: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: made(name) for name in ("tag", "comm", "knights")},
    "multiwalker": lambda: made("multiwalker", remove_on_fall=True),
    "tictactoe": tictactoe,
    "masks in observations": MaskedEnv,
    "masks in infos": lambda: MaskedEnv("info"),
    "leaving": lambda: CrowdEnv(strict=False),
    "infos": lambda: CrowdEnv(strict=False, infos=lambda number, step: {"place": [number, step], "half": step / 2}),
}


@pytest.mark.parametrize("options", [{}, LEAVING], ids=["any", "all"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=TORCHRL_MARKS) for name in CASES])
@pytest.mark.slow
def test_torchrls_wrapper_gives_the_same(name: str, options: dict[str, Any]) -> None:
    from torchrl.envs.libs.pettingzoo import PettingZooWrapper as TheirWrapper
    from torchrl.envs.utils import step_mdp as their_step_mdp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is made for another version
        env, theirs = PettingZooWrapper(CASES[name](), **options), TheirWrapper(CASES[name](), **options)
        td, other = env.reset(seed=5), theirs.reset(seed=5)

    def is_theirs_alone(key: Any) -> bool:  # of an agent that terminated and has left they say that it is truncated too
        return key[-1] == "truncated" and "mask" in td[key[0]] and not td[key[0], "mask"].all()

    assert env.group_map == theirs.group_map
    torch.manual_seed(0)
    for _ in range(60):
        check_same(td, other, but=is_theirs_alone)
        td = env.rand_action(td)
        other.update(td.select(*env.action_keys))
        td, other = env.step(td), theirs.step(other)
        over = bool(td["next", "done"])
        following = td["next"]
        td = following
        check_same(following, other["next"], but=is_theirs_alone)
        if over:
            break
        td, other = (
            following.exclude("reward", *env.reward_keys),
            their_step_mdp(other, action_keys=env.action_keys, reward_keys=env.reward_keys),
        )
    env.close()


# -- groups and specs -----------------------------------------------------------------------------------


def test_agents_are_grouped_by_their_names() -> None:
    names = ("red_0", "red_1", "blue_x_3", "gold", "gold_7", "_1")
    env = PettingZooWrapper(CrowdEnv([-1] * 6, names=names, spaces=[3] * 6))
    assert env.group_map == {
        "red": ["red_0", "red_1"],
        "blue_x": ["blue_x_3"],
        "gold": ["gold", "gold_7"],
        "_1": ["_1"],
    }


def test_names_that_do_not_tell_groups_apart_need_a_group_map() -> None:
    env = CrowdEnv([-1] * 2, names=(1, "1"), spaces=[3] * 2)
    assert PettingZooWrapper(env).group_map == {"1": [1, "1"]}
    spaces = {"a": Box(-1, 1, (1,)), "a_0": Box(-1, 1, (2,)), "a_0_1": Box(-1, 1, (1,))}
    with pytest.raises(SpecMismatchError, match=r"whose names do not tell their groups apart, \['a', 'a_0', 'a_0_1'\]"):
        PettingZooWrapper(SpacesEnv(spaces, dict.fromkeys(spaces, Discrete(2))))
    assert PettingZooWrapper(env, group_map={"both": [1, "1"]}).rollout(3).shape == (3,)


@pytest.mark.parametrize(
    ("group_map", "groups"),
    [
        (MarlGroupMapType.ALL_IN_ONE_GROUP, {"agents": ["walker_0", "walker_1", "walker_2", "guard"]}),
        (
            MarlGroupMapType.ONE_GROUP_PER_AGENT,
            {name: [name] for name in ("walker_0", "walker_1", "walker_2", "guard")},
        ),
        ({"a": ("guard", "walker_1"), "b": ["walker_2", "walker_0"]},) * 2,
    ],
)
def test_agents_are_grouped_as_told(group_map: Any, groups: dict[str, Any]) -> None:
    env = PettingZooWrapper(CrowdEnv(), group_map=group_map)
    assert env.group_map == {name: list(agents) for name, agents in groups.items()}
    hand, draw = Played(CrowdEnv(), env.group_map), np.random.default_rng(0)
    td = env.reset(seed=1)
    check_same(td, hand.reset(seed=1))
    actions = actions_for(hand.env, env.group_map, draw)
    check_same(env.step(acting(td, actions))["next"], hand.step(actions))


def test_agents_of_a_group_may_differ_in_the_number_of_their_actions() -> None:
    env = PettingZooWrapper(CrowdEnv(), group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)
    spec = env.full_action_spec["agents", "action"]
    assert isinstance(spec, MultiCategorical)
    assert spec.nvec.tolist() == [5, 5, 5, 7]
    td = env.reset()
    td["agents", "action"] = torch.tensor([0, 0, 5, 0])
    with pytest.raises(SpecMismatchError, match=r"expected MultiCategorical.*found tensor\(\[0, 0, 5, 0\]\)"):
        env.step(td)
    with pytest.raises(SpecMismatchError, match="the same space for all where values are one-hot"):
        PettingZooWrapper(CrowdEnv(), group_map=MarlGroupMapType.ALL_IN_ONE_GROUP, categorical_actions=False)


def test_agents_of_a_group_may_differ_in_bounds() -> None:
    spaces = {f"arm_{i}": Box(-1 - i, 1 + i, (2,), np.float32) for i in range(3)}
    choices = {f"arm_{i}": MultiDiscrete([2, 3 + i]) for i in range(3)}
    env = PettingZooWrapper(SpacesEnv(spaces, choices))
    spec = env.observation_spec["arm", "observation"]
    assert isinstance(spec, Bounded)
    assert spec.high.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert env.full_action_spec["arm", "action"].nvec.tolist() == [[2, 3], [2, 4], [2, 5]]
    check_env_specs(env, seed=0)


def test_agents_of_one_name_that_cannot_be_stacked_are_groups_of_their_own() -> None:
    spaces = {"arm_0": Box(-1, 1, (2,)), "arm_1": Box(-1, 1, (3,)), "leg_0": Discrete(2), "leg_1": Discrete(2)}
    env = PettingZooWrapper(SpacesEnv(spaces, dict.fromkeys(spaces, Discrete(3))))
    assert env.group_map == {"arm_0": ["arm_0"], "arm_1": ["arm_1"], "leg": ["leg_0", "leg_1"]}
    check_env_specs(env, seed=0)
    with pytest.raises(
        SpecMismatchError, match=r"group 'arm' need observation spaces of one shape.*'arm_0'.*'arm_1'.*group_map"
    ):
        PettingZooWrapper(
            SpacesEnv(spaces, dict.fromkeys(spaces, Discrete(3))),
            group_map={"arm": ["arm_0", "arm_1"], "leg": ["leg_0", "leg_1"]},
        )


@pytest.mark.parametrize("categorical", [True, False])
def test_observations_and_actions_of_all_spaces(categorical: bool) -> None:
    inner = SpacesEnv(MIXED, MIXED)
    env = PettingZooWrapper(inner, categorical_actions=categorical)
    check_env_specs(env, seed=0)
    td = env.rand_step(env.reset(seed=2))
    sent, given = inner.sent[-1], inner.given[-1]
    following = td["next"]
    assert following["box", "observation"][0].tolist() == sent["box"].tolist()
    assert following["image", "observation"][0].tolist() == sent["image"].tolist()
    assert following["dict", "observation", "camera", "zoom"].item() == sent["dict"]["camera"]["zoom"]
    assert following["tuple", "observation", "1"][0].tolist() == sent["tuple"][1].tolist()
    assert list(following["text", "observation"]) == [sent["text"]]
    assert td["dict", "action", "position"][0].tolist() == given["dict"]["position"].tolist()
    assert list(td["text", "action"]) == [given["text"]]
    discrete, multi = env.full_action_spec["discrete", "action"], env.full_action_spec["multi", "action"]
    if categorical:
        assert (td["discrete", "action"].item(), td["multi", "action"][0].tolist()) == (
            given["discrete"],
            given["multi"].tolist(),
        )
    else:
        assert isinstance(discrete, OneHot)
        assert discrete.to_numpy(td["discrete", "action"])[0] == given["discrete"]
        assert multi.to_numpy(td["multi", "action"])[0].tolist() == given["multi"].tolist()
    assert isinstance(env.observation_spec["text", "observation"], NonTensor)


def test_texts_of_several_agents_are_rows_of_objects() -> None:
    space = Text(4)
    inner = SpacesEnv({"poet_0": space, "poet_1": space}, {"poet_0": space, "poet_1": space})
    env = PettingZooWrapper(inner)
    td = env.rand_step(env.reset())
    assert list(td["next", "poet", "observation"]) == list(inner.sent[-1].values())
    assert list(td["poet", "action"]) == list(inner.given[-1].values())
    check_env_specs(env)


# -- action masks, infos, states ------------------------------------------------------------------------


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("where", ["observation", "info"])
def test_random_actions_keep_to_the_action_masks(where: str, categorical: bool) -> None:
    env = PettingZooWrapper(MaskedEnv(where), categorical_actions=categorical)
    torch.manual_seed(0)
    rollout = env.rollout(9)  # a ruled out action would raise
    assert rollout.shape == (9,)
    steps = torch.arange(9)
    for agent in (0, 1):
        mask = rollout["player", "action_mask"][:, agent]
        assert (~mask).nonzero().tolist() == torch.stack([steps, (steps + agent) % 4], 1).tolist()
    key = ("player", "observation", "observation") if where == "observation" else ("player", "observation")
    assert rollout[key].shape == (9, 2, 2)
    assert env.observation_spec["player", "action_mask"] == Categorical(2, (2, 4), dtype=torch.bool, device="cpu")
    check_env_specs(env)


def test_a_mask_that_allows_nothing_does_not_count() -> None:
    env = PettingZooWrapper(tictactoe())
    td = env.reset(seed=0)
    assert td["player", "action_mask"].tolist() == [[True] * 9, [False] * 9]  # it is the first player's turn
    assert env.rollout(9)["next", "player", "reward"].abs().sum() > 0 or env.rollout(9).shape == (9,)


def test_agents_that_do_not_act_have_no_action_ruled_out() -> None:
    class LeavingEnv(MaskedEnv):
        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            if self.steps == 2:
                self.agents = ["player_1"]
                result[2]["player_0"] = True
            return result

    env = PettingZooWrapper(LeavingEnv("info"), **LEAVING)
    rollout = env.rollout(4)
    assert rollout["next", "player", "action_mask"][:, 0].sum(-1).tolist() == [3, 4, 4, 4]
    assert rollout["next", "player", "action_mask"][:, 1].sum(-1).tolist() == [3, 3, 3, 3]


def test_a_wrong_action_mask_is_refused() -> None:
    class WrongEnv(MaskedEnv):
        def mask(self, agent: str) -> Any:
            return np.ones(4 if self.steps == 0 else 3, np.int8)

    env = PettingZooWrapper(WrongEnv("info"))
    td = env.rand_action(env.reset())
    td["player", "action"] = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(SpecMismatchError, match=r"agent 'player_0': expected an action mask of shape \(4,\)"):
        env.step(td)


def test_numbers_in_infos_are_observations_of_each_agent() -> None:
    def infos(number: int, step: int) -> dict[str, Any]:
        last = {} if step == 2 else {"late": step}
        return {"place": np.array([number, step]), "good": number == 1, "word": "x", "ragged": [1] * number, **last}

    env = PettingZooWrapper(CrowdEnv(infos=infos), **LEAVING)
    rollout = env.rollout(3)
    info = rollout["next", "walker", "info"]
    assert sorted(info.keys()) == ["good", "late", "place"]
    assert info["place"].tolist() == [[[0, step], [1, step], [2, step]] for step in (1, 2)] + [[[0, 0], [1, 3], [2, 3]]]
    assert info["good"].tolist() == [[0, 1, 0]] * 3
    assert info["late"].tolist() == [[1, 1, 1], [0, 0, 0], [0, 3, 3]]
    assert {value.dtype for value in info.values()} == {torch.float32}
    check_env_specs(env)


def test_infos_may_have_more_than_agents() -> None:
    class ToldEnv(CrowdEnv):
        def _informed(self, names: Any) -> Any:
            return super()._informed(names) | {"__common__": {"wind": 3.0}}

    assert PettingZooWrapper(ToldEnv()).rollout(2).shape == (2,)


def test_the_state_is_an_observation_if_asked_for() -> None:
    env = PettingZooWrapper(CrowdEnv(), return_state=True)
    td = env.rand_step(env.reset())
    assert td["next", "state"].tolist() == [1, *td["walker", "action"].tolist(), *td["guard", "action"].tolist()]
    assert (td["state"].tolist(), td["state"].dtype) == ([0] * 5, torch.int64)
    assert "state" not in PettingZooWrapper(CrowdEnv()).reset()
    real = PettingZooWrapper(made("tag"), return_state=True)
    td = real.reset(seed=0)
    assert td["state"].tolist() == torch.cat([td[group, "observation"].flatten() for group in real.group_map]).tolist()
    check_env_specs(real)
    with pytest.raises(SpecMismatchError, match=r"has no state\(\); leave out return_state=True"):
        PettingZooWrapper(MaskedEnv(), return_state=True)


# -- seeds, copies, attributes --------------------------------------------------------------------------


def test_seeds_are_those_of_the_envs_own_reset() -> None:
    env = PettingZooWrapper(CrowdEnv(), seed=11)
    assert [env.reset()["guard", "observation"][0, 0].item() for _ in range(2)] == [11, 12]
    env.set_seed(20)
    assert env.reset()["guard", "observation"][0, 0] == 20
    assert env.reset(seed=30)["guard", "observation"][0, 0] == 30


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_begins_with_a_reset(copied: Callable[[Any], Any]) -> None:
    env = PettingZooWrapper(CrowdEnv(), **LEAVING)
    env.rollout(3)
    twin = copied(env)
    assert twin.group_map == env.group_map
    torch.manual_seed(0)
    rollout = twin.rollout(8)
    env.env.seed = twin.env.seed - 1
    torch.manual_seed(0)
    check_same(env.rollout(8), rollout)


def test_what_the_wrapped_env_has_can_be_read_and_set() -> None:
    env = PettingZooWrapper(CrowdEnv())
    env.length = 3
    assert (env.env.length, env.length, env.possible_agents[0]) == (3, 3, "walker_0")
    assert env.rollout(2, break_when_any_done=False).shape == (2,)
    assert not hasattr(env, "nonsense")
    env.close()
    assert env.is_closed


def test_results_go_to_the_device_of_the_env() -> None:
    td = PettingZooWrapper(CrowdEnv(), device="cpu").rollout(1)
    assert td.device == torch.device("cpu")
    assert PettingZooWrapper(CrowdEnv()).reset().device is None


# -- by name --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["multiwalker_v9", "sisl/multiwalker_v9", "sisl/multiwalker-v9"])
def test_an_env_by_its_name(task: str) -> None:
    env = PettingZooEnv(task, n_walkers=2)
    assert env.group_map == {"walker": ["walker_0", "walker_1"]}
    assert repr(env) == f"PettingZooEnv(task={task!r}, device=None)"
    check_env_specs(env)
    env.close()
    assert PettingZooEnv("mpe/simple_tag_v3", parallel=True).group_map["agent"] == ["agent_0"]


def test_names_that_lead_nowhere() -> None:
    with pytest.raises(ImportError, match=r"found 'walker_v1'; there is none in pettingzoo.butterfly or"):
        PettingZooEnv("walker_v1")
    with pytest.raises(ImportError, match=r"found 'nothing/walker_v1'; there is none in pettingzoo.nothing or nothing"):
        PettingZooEnv("nothing/walker_v1")
    with pytest.raises(TypeError, match=r"'tictactoe_v3' has no parallel form: AEC envs.*turn_based_aec_to_parallel"):
        PettingZooEnv("tictactoe_v3")
    with pytest.raises(TypeError, match=r"expected parallel=True, found False: AEC envs"):
        PettingZooEnv("multiwalker_v9", parallel=False)


# -- refusals -------------------------------------------------------------------------------------------


def test_what_is_no_parallel_env_is_refused() -> None:
    aec = importlib.import_module("pettingzoo.classic.tictactoe.tictactoe").env()
    with pytest.raises(TypeError, match=r"is the AEC env.*aec_to_parallel\(env\).*turn_based_aec_to_parallel"):
        PettingZooWrapper(aec)
    for other in (CrowdEnv, 3, "multiwalker_v9", importlib.import_module("gymnasium").make("CartPole-v1")):
        with pytest.raises(TypeError, match=r"PettingZooWrapper wraps a pettingzoo\.ParallelEnv"):
            PettingZooWrapper(other)


def test_wrappers_name_the_other_one() -> None:
    with pytest.raises(TypeError, match=r"GymWrapper wraps an env of one agent, found .*; PettingZooWrapper wraps it"):
        GymWrapper(CrowdEnv())


def test_bad_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected each agent in a group, found in none \['guard'\]"):
        PettingZooWrapper(CrowdEnv(), group_map={"all": ["walker_0", "walker_1", "walker_2"]})
    with pytest.raises(SpecMismatchError, match=r"has the groups \['done'\], keys that are taken"):
        PettingZooWrapper(CrowdEnv(names=("walker_0", "walker_1", "walker_2", "done")))
    with pytest.raises(SpecMismatchError, match="action masks of different shapes, or some have none"):
        PettingZooWrapper(
            SpacesEnv({"a": Dict(x=Discrete(2), action_mask=Discrete(2)), "b": Dict(x=Discrete(2))}, MIXED_ACTIONS),
            group_map=MarlGroupMapType.ALL_IN_ONE_GROUP,
        )


MIXED_ACTIONS = {"a": Discrete(2), "b": Discrete(2)}


class ChangingEnv(CrowdEnv):
    """Does one thing wrong.

    Args:
        change: Changes the result of a step in place.
        late: Whether spaces change after the first reset.
    """

    def __init__(self, change: Callable[[Any, Any], object] = lambda env, result: None, *, late: bool = False) -> None:
        super().__init__([-1] * 4)
        self.change, self.late, self.resets = change, late, 0

    def action_space(self, agent: Any) -> Any:
        return Discrete(9) if self.late and self.resets > 1 else super().action_space(agent)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.resets += 1
        return super().reset(seed, options)

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        return self.change(self, result) or result


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "unknown observation": (
        lambda env, result: result[0].update(ghost=np.zeros(4)),
        r"expected observations of agents among possible_agents, \['walker_0'.*found also \['ghost'\]",
    ),
    "unknown agent": (
        lambda env, result: env.agents.append("ghost"),
        r"expected env.agents of .*found also \['ghost'\]",
    ),
    "missing observation": (
        lambda env, result: [result[0].pop("guard")][1:],
        r"an observation of each agent in env.agents.*found none of \['guard'\]",
    ),
    "missing reward": (
        lambda env, result: [result[part].pop("guard") for part in (1, 3)][2:],
        "an entry for agent 'guard', which has an observation, in each dict of a step, found none in rewards and trunc",
    ),
    "bad reward": (
        lambda env, result: result[1].update(guard="much"),
        "a number as reward of agent 'guard', found 'much'",
    ),
    "bad flag": (
        lambda env, result: result[2].update(guard="yes"),
        "a bool as termination of agent 'guard', found 'yes'",
    ),
    "wrong shape": (
        lambda env, result: result[0].update(guard=np.zeros(3)),
        r"agent 'guard': expected float64 of shape \(4,\) at \('guard', 'observation'\), found float64 of shape \(3,\)",
    ),
    "four parts": (lambda env, result: result[:4], r"step must return \(observations, rewards, terminations"),
    "no dict": (
        lambda env, result: ([0] * 4, *result[1:]),
        r"expected a dict by agent as observations, found \[0, 0, 0, 0\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_told_and_asks_for_a_reset(name: str) -> None:
    change, message = WRONG[name]
    env = PettingZooWrapper(ChangingEnv(change))
    td = env.rand_action(env.reset())
    with pytest.raises(SpecMismatchError, match=message):
        env.step(td)
    with pytest.raises(ResetNeededError):
        env.step(td)
    env.env.change = lambda env, result: None
    assert env.rand_step(env.reset())["next", "guard", "reward"].shape == (1, 1)


def test_spaces_must_stay() -> None:
    env = PettingZooWrapper(ChangingEnv(late=True))
    with pytest.raises(
        SpecMismatchError, match=r"the action space of agent 'walker_0' to stay Discrete\(5\), found Disc"
    ):
        env.reset()


def test_an_env_without_agents_or_spaces_is_refused() -> None:
    with pytest.raises(
        SpecMismatchError, match=r"must have agents, of different names, as possible_agents, found \[\]"
    ):
        PettingZooWrapper(CrowdEnv([], names=[]))
    with pytest.raises(SpecMismatchError, match=r"of different names.*found \['a', 'a'\]"):
        PettingZooWrapper(CrowdEnv([1, 1], names=["a", "a"]))
    with pytest.raises(SpecMismatchError, match=r"a Gymnasium space as observation_space\('a'\), found None"):
        PettingZooWrapper(SpacesEnv({"a": None}, MIXED_ACTIONS))


def test_a_bad_action_is_refused() -> None:
    env = PettingZooWrapper(CrowdEnv())
    td = env.rand_action(env.reset())
    for bad in (torch.tensor([0, 0, 5]), torch.zeros(3, 1, dtype=torch.int64), torch.full((3,), 0.5)):
        wrong = td.exclude(("walker", "action")).update({"walker": {"action": bad}})
        with pytest.raises(SpecMismatchError, match=r"expected Categorical.* at \('walker', 'action'\), found"):
            env.step(wrong)
    del td["guard", "action"]
    with pytest.raises(SpecMismatchError, match=r"at \('guard', 'action'\), found nothing"):
        env.step(td)
