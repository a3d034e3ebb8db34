"""Vector envs inside workers: one env of a batch each, with its parts as a batch size of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import FACES, PROCESS_FACES, Face
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from inner_vector_envs import PARTS, SEED, Countdown, Texts, pool, vector
from test_death import kill_and_reap

import aioenvs
from aioenvs.engine.worker.random_streams import seed_chain
from aioenvs.errors import ResetNeededError, SpecMismatchError, WorkerStartError

MODES = tuple(AutoresetMode)
needs_envpool = pytest.mark.skipif(find_spec("envpool") is None, reason="EnvPool is not installed")


def by_hand(seed: int, parts: int = PARTS) -> Iterator[tuple[Any, ...]]:
    """What each part does by itself: yields its roots; takes actions; yields outcomes, then roots again."""
    envs = [Countdown() for _ in range(parts)]
    roots = [env.reset(seed=own)[0] for env, own in zip(envs, seed_chain(seed, parts)[0], strict=True)]
    roots = [{key: np.copy(value) for key, value in root.items()} for root in roots]
    actions = yield roots
    while True:
        outcomes, following = [], []
        for env, action in zip(envs, actions, strict=True):
            observation, reward, terminated, _, _ = env.step(action)
            final = {key: np.copy(value) for key, value in observation.items()}
            outcomes.append((final, reward, terminated))
            root = env.reset()[0] if terminated else final
            following.append({key: np.copy(value) for key, value in root.items()})
        actions = yield outcomes, following


def same(td: Any, observations: Any) -> None:
    for part, own in enumerate(observations):
        for key, value in own.items():
            np.testing.assert_array_equal(td[key][part].numpy(), value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("face", FACES)
async def test_trajectories_are_those_of_the_parts_stepped_by_hand(face: Face, mode: AutoresetMode) -> None:
    async with face.open(2, functools.partial(vector, mode)) as env:
        assert env.batch_size == (2, PARTS)
        seeds, _ = seed_chain(SEED, 2 * PARTS)
        after = await face.call(env.set_seed, SEED)
        assert after == seed_chain(SEED, 2 * PARTS)[1]
        hands = [by_hand(seeds[0]), by_hand(seeds[PARTS])]
        td = await face.call(env.reset)
        for own, hand in zip(td, hands, strict=True):
            same(own, next(hand))
        generator = np.random.default_rng(0)
        ends = 0
        for _ in range(20):
            actions = generator.integers(0, 3, (2, PARTS, 2))
            td["action"] = torch.from_numpy(actions)
            td, root = await face.call(env.step_and_maybe_reset, td)
            for row, hand in enumerate(hands):
                outcomes, following = hand.send(actions[row])
                same(td["next"][row], [each[0] for each in outcomes])
                assert td["next", "reward"][row, :, 0].tolist() == [each[1] for each in outcomes]
                assert td["next", "terminated"][row, :, 0].tolist() == [each[2] for each in outcomes]
                same(root[row], following)
                ends += sum(each[2] for each in outcomes)
            assert not root["done"].any()
            td = root
        assert ends > 6


@pytest.mark.parametrize("face", FACES)
async def test_specs_have_the_parts(face: Face) -> None:
    async with face.open(2, functools.partial(vector, AutoresetMode.SAME_STEP)) as env:
        await face.call(env.reset)
        assert env.full_done_spec.shape == (2, PARTS)
        assert env.observation_spec["steps"].shape == (2, PARTS, 2)
        assert env.observation_spec["kind"].shape == (2, PARTS)
        assert env.action_spec.shape == (2, PARTS, 2)
        assert env.reward_spec.shape == (2, PARTS, 1)
        assert env.action_spec.is_in(env.action_spec.rand())
        assert env.num_workers == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("face", FACES)
async def test_single_parts_are_reset_by_a_mask(face: Face, mode: AutoresetMode) -> None:
    async with face.open(2, functools.partial(vector, mode)) as env:
        td = await face.call(env.reset, seed=SEED)
        td["action"] = torch.ones(2, PARTS, 2, dtype=torch.int64)
        before = (await face.call(env.step, td))["next"]
        mask = torch.zeros(2, PARTS, 1, dtype=torch.bool)
        mask[1, 2] = True
        root = before.exclude("reward").clone().set("_reset", mask)
        root["done"][1, 2] = root["terminated"][1, 2] = False
        after = await face.call(env.reset, root)
        assert after.get("_reset", None) is None
        assert after["steps"][1, 2, 0] == 0
        others = ~mask[..., 0]
        assert (after["steps"][others] == before["steps"][others]).all()
        assert (after["kind"][others] == before["kind"][others]).all()
        after["action"] = torch.zeros(2, PARTS, 2, dtype=torch.int64)
        stepped = (await face.call(env.step, after))["next", "steps"][..., 0]
        assert stepped[1, 2] == 1
        assert stepped[0, 0] in (1, 2)  # whose episode goes on, unless it was of one step


@pytest.mark.parametrize("face", FACES)
async def test_parts_that_the_env_has_reset_itself_are_not_reset_again(face: Face) -> None:
    async with face.open(1, functools.partial(vector, AutoresetMode.SAME_STEP)) as env:
        td = await face.call(env.reset, seed=SEED)
        hand = by_hand(SEED)
        next(hand)
        while True:
            td["action"] = torch.ones(1, PARTS, 2, dtype=torch.int64)
            td = await face.call(env.step, td)
            outcomes, following = hand.send(np.ones((PARTS, 2), int))
            same(td["next"][0], [each[0] for each in outcomes])
            over = td["next", "done"].clone()
            td = aioenvs.step_mdp(td)
            if over.any():
                break
        td["done"][over] = td["terminated"][over] = False
        root = await face.call(env.reset, td.set("_reset", over))
        same(root[0], following)


async def test_one_that_takes_no_mask_takes_plain_steps_alone() -> None:
    make = functools.partial(gym.make_vec, "CartPole-v1", num_envs=PARTS, vectorization_mode="vector_entry_point")
    async with aioenvs.AsyncParallelEnv(1, make) as env:
        hand = make()
        td = await env.reset(seed=SEED)
        np.testing.assert_array_equal(td["observation"][0].numpy(), hand.reset(seed=SEED)[0])
        for _ in range(40):
            td["action"] = torch.ones(1, PARTS, dtype=torch.int64)
            td = (await env.step(td))["next"]
            observation, reward, terminated, truncated, _ = hand.step(np.ones(PARTS, int))
            np.testing.assert_array_equal(td["observation"][0].numpy(), observation)
            assert td["reward"][0, :, 0].tolist() == reward.tolist()
            assert td["terminated"][0, :, 0].tolist() == terminated.tolist()
            assert td["truncated"][0, :, 0].tolist() == truncated.tolist()
        td["action"] = torch.ones(1, PARTS, dtype=torch.int64)
        with pytest.raises(SpecMismatchError, match=r"env 0 .*cannot be told to do so at once; take plain steps"):
            await env.step_and_maybe_reset(td)
        await env.step(td)  # nothing has happened
        mask = torch.zeros(1, PARTS, 1, dtype=torch.bool)
        mask[0, 0] = True
        with pytest.raises(SpecMismatchError, match="cannot reset single parts"):
            await env.reset(td.select("observation", "done", "terminated", "truncated").clone().set("_reset", mask))
        assert (await env.reset()).batch_size == (1, PARTS)
        hand.close()


@needs_envpool
@pytest.mark.parametrize("face", FACES)
async def test_an_envpool_is_stepped_as_by_hand(face: Face) -> None:
    async with face.open(2, [functools.partial(pool, seed=seed) for seed in (1, 2)]) as env:
        hands = [pool(seed=seed) for seed in (1, 2)]
        roots = [hand.reset()[0] for hand in hands]
        td = await face.call(env.reset)
        ends = 0
        for step in range(60):
            for row, root in enumerate(roots):
                np.testing.assert_array_equal(td["observation"][row].numpy(), root)
            actions = np.random.default_rng(step).integers(0, 2, (2, PARTS))
            td["action"] = torch.from_numpy(actions)
            td, following = await face.call(env.step_and_maybe_reset, td)
            for row, hand in enumerate(hands):
                observation, reward, terminated, truncated, _ = hand.step(actions[row])
                np.testing.assert_array_equal(td["next", "observation"][row].numpy(), observation)
                assert td["next", "reward"][row, :, 0].tolist() == reward.tolist()
                assert td["next", "done"][row, :, 0].tolist() == (terminated | truncated).tolist()
                roots[row] = observation.copy()
                if (over := np.flatnonzero(terminated | truncated)).size:
                    roots[row][over] = hand.reset(over)[0]
                    ends += over.size
            td = following
        assert ends > 3


@needs_envpool
def test_seeds_of_an_envpool_are_its_factorys() -> None:
    env = aioenvs.SerialEnv(1, pool)
    env.reset()
    with pytest.raises(ValueError, match=r"env 0 is a pool of EnvPool.*found 3: give it to the factory"):
        env.reset(seed=3)
    env.reset()
    env.close()


@pytest.mark.parametrize("face", FACES)
async def test_rollouts_and_first_ready(face: Face) -> None:
    async with face.open(2, functools.partial(vector, AutoresetMode.SAME_STEP)) as env:
        rollout = await face.call(env.rollout, 12, break_when_any_done=False)
        assert rollout.batch_size == (2, PARTS, 12)
        assert rollout["next", "done"].any()
        td = await face.call(env.reset)
        await face.call(env.send, env.rand_action(td))
        received: set[int] = set()
        while len(received) < 2:
            td, root = await face.call(env.recv)
            assert td["next", "steps"].shape[1:] == (PARTS, 2)
            received |= set(root["env_index"].flatten().tolist())
        assert received == {0, 1}


@pytest.mark.parametrize("face", FACES)
async def test_what_an_env_raises_comes_out(face: Face) -> None:
    makes = [functools.partial(vector, AutoresetMode.SAME_STEP, fail_at=fail_at) for fail_at in (0, 2)]
    async with face.open(2, makes) as env:
        td = await face.call(env.reset, seed=SEED)
        td["action"] = torch.ones(2, PARTS, 2, dtype=torch.int64)
        _, td = await face.call(env.step_and_maybe_reset, td)
        td["action"] = torch.ones(2, PARTS, 2, dtype=torch.int64)
        with pytest.raises(ZeroDivisionError, match="as it was told") as caught:
            await face.call(env.step_and_maybe_reset, td)
        assert caught.value.env_index == (1,)
        with pytest.raises(ResetNeededError, match="env 1"):
            await face.call(env.step_and_maybe_reset, td)
        await face.call(env.reset)


@pytest.mark.parametrize("face", PROCESS_FACES)
async def test_a_worker_that_dies_is_built_anew_and_its_parts_are_truncated(face: Face) -> None:
    make = functools.partial(vector, AutoresetMode.DISABLED)
    async with face.open(2, make, on_worker_death="restart", num_processes=2) as env:
        td = await face.call(env.reset, seed=SEED)
        await kill_and_reap(env.pids[1])
        td["action"] = torch.ones(2, PARTS, 2, dtype=torch.int64)
        td, root = await face.call(env.step_and_maybe_reset, td)
        assert td["next", "truncated"][1].all()
        assert not td["next", "reward"][1].any()
        assert (root["steps"][1, :, 0] == 0).all()


@pytest.mark.parametrize("kind", [AsyncVectorEnv, SyncVectorEnv])
def test_both_of_gymnasiums_run_in_this_process(kind: type) -> None:
    env = aioenvs.SerialEnv(1, functools.partial(vector, AutoresetMode.SAME_STEP, kind=kind))
    try:
        assert env.rollout(4, break_when_any_done=False).batch_size == (1, PARTS, 4)
    finally:
        env.close()


@pytest.mark.parametrize(
    ("makes", "error", "match"),
    [
        pytest.param(
            [functools.partial(pool, batch_size=2)],
            WorkerStartError,
            "make it with batch_size=num_envs",
            marks=needs_envpool,
        ),
        (
            [functools.partial(vector, AutoresetMode.SAME_STEP, parts) for parts in (2, 3)],
            SpecMismatchError,
            "expected envs of one batch size",
        ),
        (
            [lambda: SyncVectorEnv([Texts] * 2)],
            WorkerStartError,
            "have no fixed shape; expected Box, Discrete",
        ),
    ],
)
def test_what_cannot_be_is_refused(makes: list[Callable[[], Any]], error: type[Exception], match: str) -> None:
    env = aioenvs.ParallelEnv(len(makes), makes)
    with pytest.raises(error, match=match):
        env.reset()
