"""The example that embeds sessions in an app of its own, and the one that steps envs of a server."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import gymnasium as gym
import httpx
import pytest
from servers import served

from aioenvs.serving import create_app

pytestmark = pytest.mark.slow


def load_example(name: str) -> Any:
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(seed: int) -> float:
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(int(observation[2] > 0))
        total, over = total + float(reward), terminated or truncated
    return total


async def test_each_request_has_an_env_for_its_game() -> None:
    app = load_example("server").create_app("CartPole-v1", 2, num_processes=1)
    async with served(app) as address, httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as http:
        answers = await asyncio.gather(*(http.post("/play", params={"seed": seed}) for seed in range(6)))
        assert [answer.json()["return"] for answer in answers] == [expected(seed) for seed in range(6)]
        assert (await http.get("/")).json()["capacity"] == 2


async def test_a_policy_improves_on_envs_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    async with served(create_app("CartPole-v1", 8, num_processes=1)) as address:
        best = await load_example("remote_env").improve(f"ws://{address}", None, 8, 3)
    assert best >= 50
    assert "round 2" in capsys.readouterr().out
