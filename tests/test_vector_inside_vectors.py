"""Vector envs inside the vector faces, of Gymnasium and of SB3, as if their envs had been given one by one."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from inner_vector_envs import PARTS, Countdown, Texts, pool, vector
from test_death import kill_and_reap
from test_vector_inside import needs_envpool
from test_vector_oracle import compare
from vector_faces import HOSTS

from aioenvs.errors import ResetNeededError, SpecMismatchError, WorkerStartError
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.integrations.sb3 import AioVecEnv

COUNT, SEED = 2, 11
MODES = tuple(AutoresetMode)


def same(own: Any, peer: Any) -> None:
    compare(opened(own), opened(peer))


def opened(value: Any) -> Any:
    """Arrays of objects as tuples, and dicts in the order of their keys, which infos of one env may not have."""
    if isinstance(value, dict):
        return {key: opened(value[key]) for key in sorted(value)}
    if isinstance(value, tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return tuple(map(opened, value))
    return value


def both(mode: AutoresetMode, inner: AutoresetMode, **options: Any) -> tuple[AioVectorEnv, SyncVectorEnv]:
    ours = AioVectorEnv(functools.partial(vector, inner), COUNT, autoreset_mode=mode, **options)
    return ours, SyncVectorEnv([Countdown] * (COUNT * PARTS), autoreset_mode=mode)


@pytest.mark.parametrize(
    ("mode", "inner"),
    [
        (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP),
        *((AutoresetMode.SAME_STEP, inner) for inner in MODES),
        (AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP),
        (AutoresetMode.DISABLED, AutoresetMode.DISABLED),
    ],
)
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_results_are_those_of_single_envs(host: dict[str, Any], mode: AutoresetMode, inner: AutoresetMode) -> None:
    host = {**host, **({"num_processes": 2} if "num_processes" in host else {})}
    ours, theirs = both(mode, inner, **host)
    try:
        assert (ours.num_envs, ours.action_space) == (theirs.num_envs, theirs.action_space)
        assert ours.observation_space == theirs.observation_space
        same(ours.reset(seed=SEED), theirs.reset(seed=SEED))
        generator, ends = np.random.default_rng(0), 0
        for _ in range(25):
            actions = generator.integers(0, 3, (COUNT * PARTS, 2))
            mine, other = ours.step(actions), theirs.step(actions)
            same(mine, other)
            over = other[2] | other[3]
            ends += over.sum()
            if mode is AutoresetMode.DISABLED and over.any():
                with pytest.raises(ResetNeededError):
                    ours.step(actions)
                options = [{"reset_mask": over.copy()} for _ in range(2)]
                same(ours.reset(options=options[0]), theirs.reset(options=options[1]))
        assert ends > 10
    finally:
        ours.close()
        theirs.close()


def test_single_ones_are_reset_with_a_seed_of_their_own() -> None:
    ours, theirs = both(AutoresetMode.DISABLED, AutoresetMode.DISABLED, num_processes=2)
    try:
        same(ours.reset(seed=[3, 1, 4, 1, 5, 9]), theirs.reset(seed=[3, 1, 4, 1, 5, 9]))
        mask = np.array([False, True, False, False, False, True])
        seeds = [None, 7, None, None, None, 8]
        mine = ours.reset(seed=seeds, options={"reset_mask": mask})
        same(mine, theirs.reset(seed=seeds, options={"reset_mask": mask}))
    finally:
        ours.close()
        theirs.close()


def test_modes_that_a_vector_env_does_not_have_are_refused() -> None:
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        with pytest.raises(SpecMismatchError, match=rf"env 0 .*mode=SAME_STEP; expected .* with {mode.name}"):
            AioVectorEnv(functools.partial(vector, AutoresetMode.SAME_STEP), 1, autoreset_mode=mode)
    make = functools.partial(gym.make_vec, "CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    with pytest.raises(SpecMismatchError, match=r"which knows no reset_mask; expected .* with SAME_STEP"):
        AioVecEnv(make, 1)
    with pytest.raises(SpecMismatchError, match="must have as many envs each"):
        AioVectorEnv([functools.partial(vector, AutoresetMode.NEXT_STEP, parts) for parts in (2, 3)])
    with pytest.raises(WorkerStartError, match="have no fixed shape"):
        AioVectorEnv(lambda: SyncVectorEnv([Texts] * 2), 1)


def test_gymnasiums_own_vector_cartpole_has_its_own_results() -> None:
    make = functools.partial(gym.make_vec, "CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    ours, theirs = AioVectorEnv(make, 1), make()
    try:
        same(ours.reset(seed=SEED), theirs.reset(seed=SEED))
        for step in range(60):
            actions = np.full(4, step % 3 == 0, np.int64)
            observations, rewards, *others = theirs.step(actions)
            same(ours.step(actions), (observations, rewards.astype(np.float64), *others))
        with pytest.raises(ValueError, match="takes one seed for all of its parts"):
            ours.reset(seed=[1, 2, 3, 9])
    finally:
        ours.close()
        theirs.close()


@needs_envpool
def test_an_envpool_in_the_vector_face() -> None:
    ours, theirs = AioVectorEnv(functools.partial(pool, 5), 1), pool(5)
    try:
        assert ours.num_envs == 5
        observations, infos = ours.reset()
        np.testing.assert_array_equal(observations, theirs.reset()[0])
        assert infos["elapsed_step"].tolist() == [0] * 5
        ends = 0
        for step in range(40):
            actions = np.random.default_rng(step).integers(0, 2, 5)
            mine, other = ours.step(actions), theirs.step(actions)
            for own, expected in zip(mine[:4], other[:4], strict=True):
                np.testing.assert_array_equal(own, expected)
            np.testing.assert_array_equal(mine[4]["elapsed_step"], other[4]["elapsed_step"])
            ends += (other[2] | other[3]).sum()
        assert ends
    finally:
        ours.close()


def test_sb3_gets_each_env_of_them() -> None:
    ours = AioVecEnv(functools.partial(vector, AutoresetMode.DISABLED), COUNT, num_processes=2)
    try:
        assert ours.num_envs == COUNT * PARTS
        ours.seed(SEED)
        singles = [Countdown() for _ in range(COUNT * PARTS)]
        roots = [single.reset(seed=SEED + part)[0] for part, single in enumerate(singles)]
        observations = ours.reset()
        for part, root in enumerate(roots):
            np.testing.assert_array_equal(observations["steps"][part], root["steps"])
        ends = 0
        for _ in range(12):
            actions = np.ones((COUNT * PARTS, 2), np.int64)
            observations, rewards, dones, infos = ours.step(actions)
            for part, single in enumerate(singles):
                final, reward, terminated, _, info = single.step(actions[part])
                assert (rewards[part], dones[part]) == (reward, terminated)
                assert infos[part]["left"] == info["left"]
                if terminated:
                    np.testing.assert_array_equal(infos[part]["terminal_observation"]["steps"], final["steps"])
                    final, begun = single.reset()
                    assert ours.reset_infos[part] == begun
                    ends += 1
                np.testing.assert_array_equal(observations["steps"][part], final["steps"])
        assert ends > 6
        assert len(ours.get_attr("num_envs")) == COUNT * PARTS
    finally:
        ours.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
async def test_a_worker_that_dies_truncates_all_of_its_envs(mode: AutoresetMode) -> None:
    make = functools.partial(vector, AutoresetMode.NEXT_STEP)
    envs = AioVectorEnv(make, COUNT, num_processes=2, autoreset_mode=mode, on_worker_death="restart")
    try:
        before, _ = envs.reset(seed=SEED)
        await kill_and_reap(envs._vector.envs.pool.pids[1])
        actions = np.ones((COUNT * PARTS, 2), np.int64)
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        assert truncated[PARTS:].all()
        assert not terminated[PARTS:].any()
        assert not rewards[PARTS:].any()
        assert rewards[:PARTS].all()
        if mode is AutoresetMode.SAME_STEP:
            assert (observations["steps"][PARTS:, 0] == 0).all()
            for part in range(PARTS, COUNT * PARTS):
                np.testing.assert_array_equal(infos["final_obs"][part]["steps"], before["steps"][part])
        else:
            observations, rewards, _, truncated, infos = envs.step(actions)
            assert (observations["steps"][PARTS:, 0] == 0).all()
            assert not rewards[PARTS:].any()
            assert infos["_episode"][PARTS:].all()
        envs.step(actions)
    finally:
        envs.close()
