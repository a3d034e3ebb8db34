"""Envs of TorchRL behind the plain faces, whose specs are ours; and the asynchronous faces with TorchRL's specs."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import pytest
import torch
from oracle import TORCHRL_MARKS
from torchrl_envs import made, theirs

import aioenvs
from aioenvs import specs
from aioenvs.engine.preload import modules_to_preload
from aioenvs.errors import SpecMismatchError
from aioenvs.integrations import torchrl as ours

pytestmark = list(TORCHRL_MARKS)
cartpole = functools.partial(theirs.GymEnv, "CartPole-v1")
WORKER = "aioenvs.integrations.torchrl.worker"


def counted() -> Any:
    return theirs.TransformedEnv(cartpole(), theirs.StepCounter(4))


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
@pytest.mark.parametrize("factory", [cartpole, counted], ids=["through", "transformed"])
async def test_an_env_of_torchrl_behind_an_async_face(backend: str, factory: Any) -> None:
    async with aioenvs.AsyncParallelEnv(3, factory, backend=backend, **hosts(backend)) as env:
        assert isinstance(env.action_spec, specs.OneHot)
        assert env.output_spec["full_observation_spec", "observation"].shape == (3, 4)
        td = await env.reset(seed=0)
        again = await env.reset(seed=0)
        assert td["observation"].tolist() == again["observation"].tolist()
        assert len({tuple(row) for row in td["observation"].tolist()}) == 3
        td = (await env.step_and_maybe_reset(env.rand_action(td)))[0]
        assert td["next", "reward"].tolist() == [[1.0]] * 3
        assert (await env.rollout(6, break_when_any_done=False)).batch_size == (3, 6)


def hosts(backend: str) -> dict[str, Any]:
    return {} if backend == "serial" else {"num_processes": 2}


@pytest.mark.parametrize("name", ["model-based", "dict", "transforms", "tic-tac-toe", "pettingzoo-turns"])
def test_specs_hold_for_results(name: str) -> None:
    with aioenvs.SerialEnv(2, made(name)) as env:
        aioenvs.check_env_specs(env)


def test_first_ready() -> None:
    with aioenvs.ParallelEnv(3, counted, num_processes=2) as env:
        env.send(env.rand_action(env.reset()))
        td, following = env.recv(min_get=3)
        assert sorted(td["env_index"].tolist()) == [0, 1, 2]
        assert following["step_count"].tolist() == [[1]] * 3


def test_a_step_before_the_reset_is_refused_by_the_env() -> None:
    with aioenvs.SerialEnv(1, lambda: theirs.TransformedEnv(cartpole(), theirs.RewardScaling(0, 2))) as env:
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step(env.rand_action())
        assert env.rand_step(env.reset())["next", "reward"].tolist() == [[2.0]]


def test_a_missing_value_is_told() -> None:
    class Forgetful(theirs.PendulumEnv):
        def _step(self, tensordict: Any) -> Any:
            return super()._step(tensordict).exclude("th")

    with aioenvs.SerialEnv(1, Forgetful) as env:
        td = env.reset()
        with pytest.raises(SpecMismatchError, match="th"):
            env.step(env.rand_action(td))


def test_states_are_the_callers() -> None:
    with aioenvs.ParallelEnv(2, made("model-based"), num_processes=2) as env:
        td = env.reset()
        td["th"], td["thdot"] = torch.tensor([0.1, 0.2]), torch.zeros(2)
        assert env.reset(td.clone())["th"].tolist() == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize(
    ("factory", "found"),
    [(cartpole, True), (counted, True), (lambda: theirs.PendulumEnv(), True), (aioenvs.testing.CountingEnv, False)],
    ids=["partial", "function", "lambda", "ours"],
)
def test_workers_start_where_torchrl_is_imported(factory: Any, found: bool) -> None:
    assert (WORKER in modules_to_preload([factory])) == found


@pytest.mark.parametrize("cls", [ours.AsyncSerialEnv, functools.partial(ours.AsyncParallelEnv, num_processes=2)])
async def test_async_faces_with_specs_of_torchrl(cls: Any) -> None:
    expected = theirs.SerialEnv(2, cartpole)
    try:
        async with cls(2, cartpole) as env:
            assert env.output_spec == expected.output_spec
            assert env.input_spec == expected.input_spec
            for name in ("action_spec", "reward_spec", "done_spec", "observation_spec", "full_done_spec", "state_spec"):
                assert getattr(env, name) == getattr(expected, name), name
            td = await env.reset()
            td, following = await env.step_and_maybe_reset(td.update(env.full_action_spec.rand()))
            assert (await env.maybe_reset(following)).batch_size == (2,)
            assert (await env.rollout(5, break_when_any_done=False, set_truncated=True)).batch_size == (2, 5)
            env.to("cpu")
            assert env.output_spec.device == torch.device("cpu")
        assert env.output_spec.device == torch.device("cpu")
    finally:
        expected.close(raise_if_closed=False)


async def test_an_async_collector_over_specs_of_torchrl() -> None:
    env = ours.AsyncParallelEnv(2, cartpole, num_processes=1, serial_for_single=True)
    collector = aioenvs.AsyncCollector(env, None, frames_per_batch=20, total_frames=40)
    async with env:
        assert [batch.numel() async for batch in collector] == [20, 20]
    assert isinstance(ours.AsyncParallelEnv(1, cartpole, serial_for_single=True), ours.AsyncSerialEnv)
