"""Envs of several agents in all faces, against the same envs stepped by hand; in workers that have no torch."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agent_envs import MIXED, CrowdEnv, MaskedEnv, SpacesEnv, kill_at
from agent_rows import Played, actions_for, check_same
from collecting import collector, every_batch
from faces import EVERY_FACE, FACES, PROCESS_FACES, Face, call, masked
from gymnasium.spaces import Discrete, Text
from tensordict import NonTensorStack, TensorDictBase
from test_pettingzoo import LEAVING, made

from aioenvs import ParallelEnv, PettingZooWrapper, SerialEnv, step_mdp
from aioenvs.engine.adapters.pettingzoo import PettingZooAdapter
from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.engine.worker.random_streams import seed_chain
from aioenvs.envs import unwrapping as through
from aioenvs.envs.check import check_async_env_specs, check_env_specs
from aioenvs.errors import SpecMismatchError, WorkerStartError

COUNT = 3
over_every_face = pytest.mark.parametrize("face", EVERY_FACE, ids=lambda face: face.name)
GROUPS = {"walker": ["walker_0", "walker_1", "walker_2"], "guard": ["guard"]}


def tag() -> Any:
    return made("tag", max_cycles=7)


def knights() -> Any:
    return made("knights", max_cycles=9)


def multiwalker() -> Any:
    return made("multiwalker", max_cycles=8, n_walkers=2)


def leaving() -> Any:
    return PettingZooWrapper(CrowdEnv(), **LEAVING)


def drawn(hands: list[Played], draw: np.random.Generator) -> dict[str, Any]:
    """Actions of all agents of several envs, by group."""
    each = [actions_for(hand.env, hand.groups, draw) for hand in hands]
    return {group: np.stack([own[group] for own in each]) for group in hands[0].groups}


async def compare(face: Face, env: Any, hands: list[Played], steps: int) -> int:
    """Step envs as they are stepped by hand, with resets where an episode ends; returns how many ended."""
    await face.call(env.set_seed, 9)
    td, ends, draw = await face.call(env.reset), 0, np.random.default_rng(3)
    seeds, _ = seed_chain(9, len(hands))
    check_same(td, torch.stack([hand.reset(seed=seed) for hand, seed in zip(hands, seeds, strict=True)]))
    for _ in range(steps):
        actions = drawn(hands, draw)
        for group, values in actions.items():
            td[group, "action"] = torch.as_tensor(values)
        td, following = await face.call(env.step_and_maybe_reset, td)
        results = [
            hand.step({group: values[place] for group, values in actions.items()}) for place, hand in enumerate(hands)
        ]
        check_same(td["next"], torch.stack(results))
        roots = []
        for hand, result in zip(hands, results, strict=True):
            ends += int(result["done"])
            roots.append(
                hand.reset() if result["done"] else result.exclude(*((group, "reward") for group in hand.groups))
            )
        check_same(following, torch.stack(roots))
        td = following
    return ends


@over_every_face
@pytest.mark.parametrize("make", [CrowdEnv, tag])
@pytest.mark.slow
async def test_raw_envs_give_what_they_give_by_hand(face: Face, make: Callable[[], Any]) -> None:
    groups = PettingZooWrapper(make()).group_map
    async with face.open(COUNT, make) as env:
        assert await compare(face, env, [Played(make(), groups) for _ in range(COUNT)], 12) > 0


@pytest.mark.parametrize("face", FACES[:3], ids=lambda face: face.name)
@pytest.mark.parametrize("make", [knights, multiwalker])
@pytest.mark.slow
async def test_more_real_envs_give_what_they_give_by_hand(face: Face, make: Callable[[], Any]) -> None:
    groups = PettingZooWrapper(make()).group_map
    async with face.open(2, make) as env:
        assert await compare(face, env, [Played(make(), groups) for _ in range(2)], 12) > 0


@over_every_face
async def test_agents_leave_in_wrapped_envs(face: Face) -> None:
    async with face.open(COUNT, leaving) as env:
        hands = [Played(CrowdEnv(), GROUPS, use_mask=True, on_any=False) for _ in range(COUNT)]
        assert await compare(face, env, hands, 14) == 2 * COUNT


async def test_raw_and_wrapped_envs_give_the_same(face: Face) -> None:
    rollouts = []
    for make in (CrowdEnv, lambda: PettingZooWrapper(CrowdEnv())):
        async with face.open(COUNT, make) as env:
            await face.call(env.set_seed, 5)
            torch.manual_seed(0)
            rollouts.append(await face.call(env.rollout, 8, break_when_any_done=False))
    check_same(*rollouts)


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("make", [CrowdEnv, MaskedEnv])
def test_workers_see_through_to_the_same_results(
    make: Callable[[], Any], categorical: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapped() -> Any:
        return PettingZooWrapper(make(), categorical_actions=categorical, **LEAVING)

    rollouts = []
    assert through.can_see_through(wrapped())
    for sees in (True, False):
        if not sees:
            monkeypatch.setattr(through, "can_see_through", lambda env: False)
        with SerialEnv(2, wrapped) as env:
            env.set_seed(5)
            torch.manual_seed(0)
            rollouts.append(env.rollout(14, break_when_any_done=False))
    check_same(*rollouts)


def test_workers_do_not_see_through_what_has_objects() -> None:
    assert not through.can_see_through(PettingZooWrapper(SpacesEnv(MIXED, MIXED)))


def test_a_one_hot_action_that_is_none_is_refused() -> None:
    with SerialEnv(2, lambda: PettingZooWrapper(CrowdEnv(), categorical_actions=False)) as env:
        td = env.rand_action(env.reset())
        td["walker", "action"][1, 2] = 0
        with pytest.raises(SpecMismatchError, match=r"expected OneHot\(n=5, shape=\(3, 5\).*\('walker', 'action'\)"):
            env.step(td)


async def test_a_worker_has_no_torch(process_face: Face) -> None:
    async with process_face.open(COUNT, CrowdEnv) as env:
        await process_face.call(env.rollout, 8, break_when_any_done=False)
        loaded = await env.call("loaded", "torch") if process_face.is_async else env.loaded("torch")
        assert list(loaded) == [False] * COUNT
        again = await env.call("loaded", "numpy") if process_face.is_async else env.loaded("numpy")
        assert list(again) == [True] * COUNT


class NoisyEnv(CrowdEnv):
    """Draws its rewards from the generators that all of a process share."""

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        result[1].update({name: np.random.random() + random.random() for name in result[1]})
        return result


@pytest.mark.parametrize("wrapped", [False, True])
async def test_what_envs_draw_does_not_depend_on_their_processes(wrapped: bool) -> None:
    def make() -> Any:
        return PettingZooWrapper(NoisyEnv()) if wrapped else NoisyEnv()

    rewards = []
    for face in FACES[:3]:  # threads share their generators
        async with face.open(COUNT, make) as env:
            await face.call(env.set_seed, 2)
            torch.manual_seed(0)
            rollout = await face.call(env.rollout, 6, break_when_any_done=False)
            rewards.append(rollout["next", "walker", "reward"])
    assert len(rewards[0].unique()) == rewards[0].numel()
    assert all(torch.equal(each, rewards[0]) for each in rewards[1:])


async def test_specs_say_what_comes(face: Face) -> None:
    for make in (CrowdEnv, MaskedEnv, lambda: SpacesEnv(MIXED, MIXED)):
        async with face.open(2, make) as env:
            if face.is_async:
                await check_async_env_specs(env, seed=0, break_when_any_done="both")
            else:
                await call(check_env_specs, env, seed=0, break_when_any_done="both")


async def test_texts_of_several_agents_go_both_ways(face: Face) -> None:
    names, space = ("poet_0", "poet_1"), Text(6)

    class EchoEnv(SpacesEnv):
        def step(self, actions: Any) -> Any:
            return dict(actions), *super().step(actions)[1:]

    async with face.open(2, lambda: EchoEnv(dict.fromkeys(names, space), dict.fromkeys(names, space))) as env:
        td = await face.call(env.reset)
        words = [["a", "b"], ["c", "d"]]
        td["poet", "action"] = NonTensorStack(*(NonTensorStack(*own) for own in words))
        td = await face.call(env.step, td)
        assert [list(own) for own in td["next", "poet", "observation"]] == words
        td["poet", "action"] = NonTensorStack(*(NonTensorStack(*own) for own in [["a", "b"], ["c", "toolong"]]))
        with pytest.raises(SpecMismatchError, match=r"expected a value of .*found \['c', 'toolong'\] for env 1"):
            await face.call(env.step, td)


async def test_a_partial_reset_leaves_the_others_alone(face: Face) -> None:
    async with face.open(COUNT, CrowdEnv, create_env_kwargs={"lives": [-1] * 4}) as env:
        td = await face.call(env.reset, seed=4)
        td = step_mdp(await face.call(env.step, env.rand_action(td)))
        before = td.clone()
        td = await face.call(env.reset, td.update(masked("_reset", COUNT, [1])))
        check_same(td[[0, 2]], before[[0, 2]])
        assert td["guard", "observation"][1, 0, :2].tolist() == [seed_chain(4, COUNT)[0][1] + 1, 0]
        td = await face.call(env.step, env.rand_action(td))
        assert td["next", "guard", "observation"][:, 0, 1].tolist() == [2, 1, 2]
        td = env.rand_action(step_mdp(td)).update(masked("_step", COUNT, [2]))
        td = await face.call(env.step, td)
        assert td["next", "guard", "observation"][:, 0, 1].tolist() == [2, 1, 3]
        assert td["next", "walker", "reward"][:2].abs().sum() == 0


@pytest.mark.parametrize("make", [CrowdEnv, leaving])
async def test_a_reset_of_an_env_that_is_done_is_not_done(face: Face, make: Callable[[], Any]) -> None:
    async with face.open(2, make, create_env_kwargs={"lives": [1] * 4} if make is CrowdEnv else None) as env:
        td = await face.call(env.rollout, 7)
        td = step_mdp(td[:, -1].clone())
        assert td["walker", "done"].all()
        td["_reset"] = td["done"]
        td = await face.call(env.reset, td)
        flags = [
            (*group, name) for group in ((), ("walker",), ("guard",)) for name in ("done", "terminated", "truncated")
        ]
        assert not any(td[flag].any() for flag in flags)


async def test_an_action_out_of_range_is_refused_before_anything_is_sent(face: Face) -> None:
    async with face.open(2, CrowdEnv) as env:
        td = env.rand_action(await face.call(env.reset))
        td["walker", "action"][1, 0] = 5
        with pytest.raises(
            SpecMismatchError, match=r"\('walker', 'action'\): expected integers from 0 to 4.*for env 1"
        ):
            await face.call(env.step, td)
        del td["walker", "action"]
        with pytest.raises(SpecMismatchError, match=r"\('walker', 'action'\): expected a value for every env"):
            await face.call(env.step, td)


async def test_random_actions_keep_to_the_masks_of_each_env(face: Face) -> None:
    async with face.open(COUNT, MaskedEnv) as env:
        rollout = await face.call(env.rollout, 20, break_when_any_done=False)  # a ruled out action would raise
        assert rollout["next", "done"].sum() == 2 * COUNT


async def test_collectors_collect_all_agents(face: Face) -> None:
    async with face.open(COUNT, leaving) as env:
        source = collector(env, frames_per_batch=6 * COUNT, total_frames=12 * COUNT)
        batches = await every_batch(source)
    assert len(batches) == 2
    for batch in batches:
        assert batch.shape == (COUNT, 6)
        assert batch["walker", "observation"].shape == (COUNT, 6, 3, 4)
        assert batch["next", "done"][..., 0].tolist() == [[False] * 5 + [True]] * COUNT
        assert batch["next", "walker", "mask"][0].tolist()[1] == [False, True, True]
        reward = batch["next", "walker", "reward"][..., 0]
        alive = batch["walker", "mask"]
        assert torch.equal(reward, batch["walker", "action"] * alive)


async def test_a_policy_acts_for_a_group(face: Face) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        td["walker", "action"] = (td["walker", "observation"][..., 2] + 1).long()  # its number
        td["guard", "action"] = torch.full_like(td["guard", "observation"][..., 0], 6).long()
        return td

    async with face.open(2, CrowdEnv) as env:
        rollout = await face.call(env.rollout, 2, policy)
        assert rollout["next", "walker", "reward"][..., 0].tolist() == [[[1, 2, 3]] * 2] * 2
        assert rollout["next", "guard", "reward"].flatten().tolist() == [6] * 4


async def test_envs_with_other_agents_are_stacked_lazily(face: Face) -> None:
    few = {"lives": (2, -1), "names": ("walker_0", "guard"), "spaces": (5, 7)}
    async with face.open(2, CrowdEnv, create_env_kwargs=[{}, few]) as env:
        rollout = await face.call(env.rollout, 5, break_when_any_done=False)
        assert [part["walker", "observation"].shape[1] for part in rollout.unbind(0)] == [3, 1]
        assert rollout["next", "done"].sum() == 4


@pytest.mark.parametrize("face", PROCESS_FACES, ids=lambda face: face.name)
@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_dead_worker_is_restarted_and_its_step_truncated(
    face: Face, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)

    def make(dies: bool = False) -> Any:
        env = CrowdEnv([-1] * 4, fault=kill_at(3) if dies else None)
        return PettingZooWrapper(env, **LEAVING) if wrapped else env

    kwargs = [{"dies": True}, {}, {}]
    async with face.open(COUNT, make, create_env_kwargs=kwargs, on_worker_death="restart") as env:
        td = await face.call(env.reset, seed=1)
        for _ in range(2):
            td = step_mdp(await face.call(env.step, env.rand_action(td)))
        known = td.clone()
        td = await face.call(env.step, env.rand_action(td))
        following = td["next"]
        lost = following["truncated"][:, 0].tolist()
        assert lost[0]
        assert not lost[2] or face.processes == 2
        assert following["walker", "truncated"][0].all()
        assert following["walker", "done"][0].all()
        assert not following["walker", "terminated"].any()
        assert following["walker", "reward"][0].abs().sum() == 0
        assert torch.equal(following["walker", "observation"][0], known["walker", "observation"][0])
        for place in range(COUNT):
            if not lost[place]:
                assert following["guard", "observation"][place, 0, 1] == 3
        mask = masked("_reset", COUNT, [place for place in range(COUNT) if lost[place]])
        td = await face.call(env.reset, step_mdp(td).update(mask))
        td = await face.call(env.step, env.rand_action(td))
        assert td["next", "guard", "observation"][0, 0, 1] == 1


def test_bad_envs_are_refused_where_they_start() -> None:
    aec = "pettingzoo.classic.tictactoe.tictactoe"

    class AwaitingEnv(CrowdEnv):
        async def step(self, actions: Any) -> Any:
            return super().step(actions)

    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: importlib.import_module(aec).env(), r"env 0 is the AEC env.*aec_to_parallel\(env\)"),
        (lambda: CrowdEnv([], names=[]), "env 0 .*must have agents"),
        (AwaitingEnv, "PettingZoo's signatures and coroutine"),
    ]
    for make, message in cases:
        for cls in (SerialEnv, ParallelEnv):
            env = cls(1, make)
            with pytest.raises(WorkerStartError, match=message):
                env.start()
    absent = r"env 0: the agents \['walker_1'\] are not there"
    with SerialEnv(1, lambda: CrowdEnv((1, 0, 1, 1))) as env, pytest.raises(SpecMismatchError, match=absent):
        env.reset()


async def test_a_failing_env_fails_alone_and_needs_a_reset(face: Face) -> None:
    def fault(step: int) -> None:
        if step == 2:
            raise ValueError("no more")

    kwargs = [{"fault": fault}, {}]
    async with face.open(2, CrowdEnv, create_env_kwargs=kwargs) as env:
        td = step_mdp(await face.call(env.step, env.rand_action(await face.call(env.reset))))
        with pytest.raises(ValueError, match="no more"):
            await face.call(env.step, env.rand_action(td))
        td = await face.call(env.reset)
        td = await face.call(env.step, env.rand_action(td))
        assert td["next", "guard", "observation"][:, 0, 1].tolist() == [1, 1]


async def test_methods_and_attributes_of_the_envs(face: Face) -> None:
    async with face.open(2, CrowdEnv) as env:
        await face.call(env.reset, seed=0)
        states = await face.call(env.call, "state") if face.is_async else env.state()
        assert [state.tolist() for state in states] == [[0] * 5] * 2
        names = await face.call(env.get_attr, "possible_agents") if face.is_async else env.possible_agents
        assert names[0] == [*GROUPS["walker"], "guard"]


def test_an_adapter_of_its_own_needs_no_torch() -> None:
    adapter = PettingZooAdapter(CrowdEnv(), 0)
    assert ("walker", "observation") in {leaf.key for leaf in adapter.metadata.leaves["next"]}
    assert adapter.metadata.specs["action"]["walker", "action"].spaces == (Discrete(5),) * 3


async def test_whoever_is_ready_first_is_received(face: Face) -> None:
    async with face.open(COUNT, CrowdEnv, create_env_kwargs={"lives": [-1] * 4}) as env:
        td = await face.call(env.reset)
        td["env_index"] = torch.arange(COUNT)
        await face.call(env.send, env.rand_action(td))
        counts = dict.fromkeys(range(COUNT), 0)
        for _ in range(4):
            td, following = await face.call(env.recv, min_get=COUNT)
            for place, index in enumerate(td["env_index"].tolist()):
                counts[index] += 1
                assert td["next", "guard", "observation"][place, 0, 1] == counts[index]
                assert (
                    td["next", "walker", "reward"][place].flatten().tolist() == td["walker", "action"][place].tolist()
                )
            await face.call(env.send, env.rand_action(following))
        await face.call(env.recv, min_get=COUNT)
        assert list(counts.values()) == [4] * COUNT


async def test_a_view_steps_its_envs_alone(face: Face) -> None:
    async with face.open(COUNT, CrowdEnv, create_env_kwargs={"lives": [-1] * 4}) as env:
        await face.call(env.reset)
        view = env[1:]
        td = await face.call(view.step, view.rand_action(await face.call(view.reset)))
        assert td["next", "walker", "observation"].shape == (COUNT - 1, 3, 4)
        td = await face.call(env[0].step, env[0].rand_action(await face.call(env[0].reset)))
        assert td["next", "guard", "reward"].numel() == 1
