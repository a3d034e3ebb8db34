"""Envs of a server, stepped from elsewhere through the same batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gymnasium as gym
import pytest
import torch
from failing_envs import Gate
from servers import served
from test_serving_sessions import until

pytest.importorskip("msgpack")

from test_serving_app import serving

from aioenvs import AsyncParallelEnv
from aioenvs.serving import RemoteEnv, ServerError, create_app


@pytest.fixture
async def cartpoles() -> AsyncIterator[tuple[str, Any]]:
    app = create_app("CartPole-v1", 4, num_processes=2, token="secret")
    async with served(app) as address:
        yield f"ws://{address}", app.sessions


async def test_a_batch_of_envs_elsewhere_is_that_of_envs_here(cartpoles: Any) -> None:
    url, sessions = cartpoles
    async with (
        AsyncParallelEnv(4, RemoteEnv(url, "secret"), num_processes=2) as far,
        AsyncParallelEnv(4, "CartPole-v1", num_processes=1) as near,
    ):
        assert far.action_spec == near.action_spec
        assert far.observation_spec == near.observation_spec
        for env in (far, near):
            await env.set_seed(3)
        one, other = await far.reset(), await near.reset()
        for step in range(40):
            torch.manual_seed(step)
            action = near.rand_action(other.clone())["action"]
            (stepped, one), (wanted, other) = [
                await env.step_and_maybe_reset(td.set("action", action)) for env, td in ((far, one), (near, other))
            ]
            for key in ("observation", "reward", "done", "terminated"):
                assert (stepped["next", key] == wanted["next", key]).all(), (step, key)
            if stepped["next", "done"].any():  # seeds of later episodes are drawn in different processes
                break
        assert sessions.gauges()["leased"] == 4
    await until(lambda: sessions.gauges()["free"] == 4)


async def test_a_cancelled_step_shifts_nothing(gate: Gate) -> None:
    async with serving(1, {0: {"fault": gate.wait, "at": (1, 1)}}) as (address, _):
        env = RemoteEnv(f"http://{address}/")()
        await env.reset()
        step = asyncio.create_task(env.step(5))
        await gate.arrival()
        step.cancel()
        await asyncio.wait([step])
        gate.open()
        assert (await env.step(2))[0].tolist() == [0, 1, 2, 7]
        with pytest.raises(ServerError, match="expected an integer from 0 to 999") as caught:
            await env.step(1000)
        assert caught.value.code == "VALIDATION_ERROR"
        await env.close()


async def test_a_lost_env_raises_or_truncates_and_comes_back() -> None:
    async with serving(2) as (address, sessions):
        strict, lenient = RemoteEnv(f"ws://{address}")(), RemoteEnv(f"ws://{address}", truncates=True)()
        for env in (strict, lenient):
            await env.reset()
            last = (await env.step(3))[0]
        for session in sessions.active:
            sessions.batch.kill(session.env)
        with pytest.raises(ServerError, match="died"):
            await strict.step(1)
        observation, reward, terminated, truncated, info = await lenient.step(1)
        assert (observation.tolist(), reward, terminated, truncated) == (last.tolist(), 0.0, False, True)
        assert "died" in info["lost"]
        for env in (strict, lenient):
            await env.reset()
            env._socket.transport.abort()
        with pytest.raises(ConnectionError):
            await strict.step(1)
        assert (await lenient.step(1))[3] is True
        for env in (strict, lenient):
            assert (await env.reset())[0].tolist()[2:] == [0, 0]
            await env.close()


async def test_more_envs_than_there_are_get_their_turns() -> None:
    async with serving(1) as (address, _):
        make = RemoteEnv(f"ws://{address}")

        async def play() -> None:
            env = make()
            await env.reset()
            await env.step(1)
            await env.close()

        await asyncio.gather(*(play() for _ in range(20)))


def test_addresses_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="ws://host:8000"):
        RemoteEnv("localhost:8000")
    with pytest.raises(ConnectionError, match="cannot be read"):
        RemoteEnv("ws://127.0.0.1:9")()


class Pictures(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), "uint8")
    action_space = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.MultiBinary(2)])

    def reset(self, **_: Any) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), float(action[0]), False, False, {"flags": action[1]}


async def test_structured_actions_and_pictures_travel() -> None:
    async with served(create_app(Pictures, 1)) as address:
        env = RemoteEnv(f"ws://{address}")()
        assert env.observation_space == Pictures.observation_space
        observation, _ = await env.reset()
        assert env.observation_space.contains(observation)
        action = env.action_space.sample()
        _, reward, *_, info = await env.step(action)
        assert (reward, info["flags"].tolist()) == (action[0], action[1].tolist())
        await env.close()
