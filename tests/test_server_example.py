"""The server of the examples, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import failing_envs as faults
import gymnasium as gym
import httpx
import numpy as np
import pytest
from failing_envs import CountingEnv, Gate, numbered
from servers import served
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

pytestmark = pytest.mark.slow


def load_example(name: str) -> Any:
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


server = load_example("server")


@asynccontextmanager
async def serving(count: int, each: Any = None, *, idle_seconds: float = 60.0, **options: Any) -> AsyncIterator[str]:
    """A server of counting envs; gives its address."""
    options.setdefault("num_processes", count)
    kwargs = numbered(count, each)
    app = server.create_app(CountingEnv, count, idle_seconds=idle_seconds, create_env_kwargs=kwargs, **options)
    async with served(app) as address:
        yield address


def session(address: str) -> connect:
    return connect(f"ws://{address}/", open_timeout=20)


async def ask(client: ClientConnection, message: Any) -> Any:
    await client.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return json.loads(await asyncio.wait_for(client.recv(), 20))


async def observed(client: ClientConnection, message: Any) -> list[int]:
    answer = await ask(client, message)
    assert "observation" in answer, answer
    return answer["observation"]


@asynccontextmanager
async def patient_session(address: str) -> AsyncIterator[ClientConnection]:
    """A session as soon as there is an env for it."""
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(20):
            while True:
                try:
                    client = await stack.enter_async_context(session(address))
                    break
                except InvalidStatus as error:
                    if error.response.status_code != 503:
                        raise
        yield client


async def test_each_session_has_an_env_of_its_own() -> None:
    async def play(address: str) -> int:
        async with session(address) as client:
            env, episode, *rest = await observed(client, {"reset": {}})
            assert (episode, rest) == (1, [0, 0])
            for step in range(1, 6):
                answer = await ask(client, {"step": env})
                assert answer["observation"] == [env, 1, step, step * env]
                assert (answer["reward"], answer["terminated"], answer["truncated"]) == (step, False, False)
            await asyncio.wait_for(everybody.wait(), 40)
        return env

    everybody = asyncio.Barrier(64)
    async with serving(64, num_processes=2) as address:
        envs = await asyncio.gather(*(play(address) for _ in range(64)))
    assert sorted(envs) == list(range(64))


async def test_a_client_too_many_is_told_so_at_the_handshake() -> None:
    async with serving(2) as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        assert (await http.get("/")).json() == {"envs": 2, "free": 2}
        async with session(address) as one:
            async with session(address) as two:
                with pytest.raises(InvalidStatus) as caught:
                    async with session(address):
                        pass
                assert caught.value.response.status_code == 503
                assert (await http.get("/")).json() == {"envs": 2, "free": 0}
                assert sorted([(await observed(client, {"reset": {}}))[0] for client in (one, two)]) == [0, 1]
                left = (await observed(two, {"step": 1}))[0]
            async with patient_session(address) as three:
                # Reset once when it came back, and once more by its new client.
                assert await observed(three, {"reset": {}}) == [left, 3, 0, 0]
                assert (await observed(one, {"step": 1}))[2] == 1


async def test_whoever_leaves_during_a_step_gives_its_env_back(gate: Gate) -> None:
    async with serving(1, {0: {"fault": gate.wait, "at": (1, 1)}}) as address:
        async with session(address) as client:
            await observed(client, {"reset": {}})
            await client.send('{"step": 1}')
            await gate.arrival()
        gate.open()
        async with patient_session(address) as client:
            assert await observed(client, {"reset": {}}) == [0, 3, 0, 0]


async def test_a_silent_client_loses_its_env() -> None:
    async with serving(1, idle_seconds=0.5) as address, session(address) as client:
        await observed(client, {"reset": {}})
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(client.recv(), 20)
        assert client.close_code == server.IDLE_CODE
        assert client.close_reason == "nothing was said for 0.5 s"
        async with patient_session(address) as other:
            assert await observed(other, {"reset": {}}) == [0, 3, 0, 0]


NONSENSE = {
    "step": "expected JSON, found 'step'",
    "[": "expected JSON",
    "[1]": 'expected {"reset": {...}} or {"step": action}, found \'[1]\'',
    "{}": 'expected {"reset": {...}}',
    '{"close": 1}': 'expected {"reset": {...}}',
    '{"step": 1, "reset": {}}': 'expected {"reset": {...}}',
    '{"reset": 3}': 'expected {"reset": {}} or {"reset": {"seed": 7}}, found 3 as its value',
    '{"reset": {"speed": 3}}': 'expected {"reset": {}}',
    '{"reset": {"seed": "x"}}': "expected an integer as seed, found 'x'",
    '{"reset": {"seed": true}}': "expected an integer as seed, found True",
    '{"step": "left"}': "expected an action of shape () and dtype torch.int64, found 'left'",
    '{"step": null}': "found None",
    '{"step": [[1], [2, 3]]}': "found [[1], [2, 3]]",
    '{"step": 1e400}': "expected dtype torch.int64",
    '{"step": 100000000000000000000}': "found 100000000000000000000",
    '{"step": 1.5}': "expected dtype torch.int64, found dtype torch.float32",
    '{"step": [1, 2]}': "expected shape (1,), found shape (1, 2)",
    '{"step": -1}': "expected integers from 0 to 999",
}


async def test_nonsense_is_answered_and_changes_nothing() -> None:
    async with serving(1) as address, session(address) as client:
        assert (await ask(client, {"step": 1}))["error"].startswith("no episode has begun")
        await observed(client, {"reset": {"seed": 3}})
        for text, expected in NONSENSE.items():
            answer = await ask(client, text)
            assert list(answer) == ["error"], text
            assert expected in answer["error"], (text, answer)
        assert "expected JSON" in (await ask(client, b"\xff"))["error"]
        assert await observed(client, {"step": 5}) == [0, 1, 1, 5]


async def test_an_episode_that_is_over_wants_a_reset() -> None:
    async with serving(1, {0: {"length": 1}}) as address, session(address) as client:
        await observed(client, {"reset": {}})
        assert (await ask(client, {"step": 1}))["terminated"] is True
        assert (await ask(client, {"step": 1}))["error"].startswith("no episode has begun, or it is over")
        assert await observed(client, {"reset": {}}) == [0, 2, 0, 0]


async def test_a_slow_env_holds_nobody_else_up(gate: Gate) -> None:
    kwargs = {0: {"fault": gate.wait, "at": (1, 1)}}
    async with serving(2, kwargs) as address, session(address) as slow, session(address) as quick:
        assert await observed(slow, {"reset": {}}) == [0, 1, 0, 0]
        assert await observed(quick, {"reset": {}}) == [1, 1, 0, 0]
        await slow.send('{"step": 7}')
        await gate.arrival()
        for step in range(1, 20):
            assert await observed(quick, {"step": 1}) == [1, 1, step, step]
        gate.open()
        assert json.loads(await asyncio.wait_for(slow.recv(), 20))["observation"] == [0, 1, 1, 7]


async def test_messages_may_be_sent_ahead() -> None:
    async with serving(1) as address, session(address) as client:
        for message in ('{"reset": {}}', *['{"step": 2}'] * 100):
            await client.send(message)
        answers = [json.loads(await asyncio.wait_for(client.recv(), 20)) for _ in range(101)]
        assert [answer["observation"][2:] for answer in answers] == [[step, 2 * step] for step in range(101)]


@pytest.mark.parametrize(
    ("fault", "words"),
    [(faults.raise_value_error, "ValueError: the reactor is hot"), (faults.kill_itself, "WorkerDiedError: the worker")],
)
async def test_a_failure_is_told_to_its_session_only(fault: Any, words: str) -> None:
    kwargs = {0: {"fault": fault, "at": (1, 2)}}
    async with serving(2, kwargs) as address, session(address) as unlucky, session(address) as other:
        for client in (unlucky, other):
            await observed(client, {"reset": {}})
            await observed(client, {"step": 1})
        error = (await ask(unlucky, {"step": 1}))["error"]
        assert error.startswith(words)
        assert error.endswith('go on with {"reset": {}}')
        assert (await ask(unlucky, {"step": 1}))["error"].startswith("no episode has begun")
        assert await observed(other, {"step": 1}) == [1, 1, 2, 2]
        # An env that failed begins its second episode, one of a new worker its first.
        assert (await observed(unlucky, {"reset": {}}))[2:] == [0, 0]
        assert (await observed(unlucky, {"step": 9}))[2:] == [1, 9]


async def test_an_env_that_failed_is_reset_before_it_is_lent_again() -> None:
    async with serving(1, {0: {"fault": faults.kill_itself, "at": (1, 1)}}) as address:
        async with session(address) as client:
            await observed(client, {"reset": {}})
            assert "WorkerDiedError" in (await ask(client, {"step": 1}))["error"]
        async with patient_session(address) as client:
            # Its new worker would fail as the first one did, were this its first episode.
            assert await observed(client, {"reset": {}}) == [0, 2, 0, 0]
            assert await observed(client, {"step": 4}) == [0, 2, 1, 4]


async def test_shutting_down_ends_sessions_and_envs(gate: Gate) -> None:
    async with contextlib.AsyncExitStack() as clients:
        async with serving(2, {0: {"fault": gate.wait, "at": (1, 1)}}, close_timeout=2.0) as address:
            slow, idle = [await clients.enter_async_context(session(address)) for _ in range(2)]
            await observed(slow, {"reset": {}})
            await slow.send('{"step": 1}')
            await gate.arrival()
        for client in (slow, idle):
            await asyncio.wait_for(client.wait_closed(), 20)
            assert client.close_code == 1012  # "service restart", uvicorn's word for it
        gate.open()


class Reaching(gym.Env[Any, Any]):
    """Observes a dict, and wants two numbers."""

    observation_space = gym.spaces.Dict({"at": gym.spaces.Box(-9, 9, (2,)), "near": gym.spaces.Discrete(2)})
    action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return {"at": np.zeros(2, np.float32), "near": 0}, {}

    def step(self, action: Any) -> Any:
        return {"at": np.asarray(action, np.float32), "near": 1}, -0.5, False, True, {}


async def test_observations_with_keys_and_actions_of_numbers() -> None:
    async with served(server.create_app(Reaching, 1)) as address, session(address) as client:
        assert await ask(client, {"reset": {}}) == {"at": [0.0, 0.0], "near": 0}
        answer = await ask(client, {"step": [1, -0.5]})
        assert answer == {"at": [1.0, -0.5], "near": 1, "reward": -0.5, "terminated": False, "truncated": True}
        await ask(client, {"reset": {}})
        assert "expected shape (1, 2), found shape (1,)" in (await ask(client, {"step": 1}))["error"]
