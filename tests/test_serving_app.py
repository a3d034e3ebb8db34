"""The server over real sockets: the protocol, its bounds, and who is let in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import failing_envs as faults
import gymnasium as gym
import httpx
import numpy as np
import pytest
from failing_envs import CountingEnv, Gate, numbered
from servers import served
from test_serving_sessions import until

pytest.importorskip("starlette")
msgpack = pytest.importorskip("msgpack")

from websockets.asyncio.client import ClientConnection, connect  # noqa: E402
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

from aioenvs.serving.app import create_app  # noqa: E402
from aioenvs.serving.codec import restored  # noqa: E402
from aioenvs.serving.connection import Limits  # noqa: E402


@contextlib.asynccontextmanager
async def serving(count: int, each: Any = None, **options: Any) -> AsyncIterator[tuple[str, Any]]:
    options.setdefault("num_processes", count)
    app = create_app(CountingEnv, count, kwargs=numbered(count, each), **options)
    async with served(app) as address:
        yield address, app.sessions


async def ask(client: ClientConnection, kind: Any, data: Any = None, **more: Any) -> Any:
    message = {"type": kind, **({} if data is None else {"data": data}), **more}
    await client.send(json.dumps(message))
    return json.loads(await asyncio.wait_for(client.recv(), 20))


async def refused(client: ClientConnection, message: str | bytes) -> str:
    await client.send(message)
    answer = json.loads(await asyncio.wait_for(client.recv(), 20))
    assert answer["type"] == "error", answer
    code: str = answer["data"]["code"]
    return code


async def test_an_episode_in_the_protocol() -> None:
    async with serving(1, {0: {"length": 2}}) as (address, sessions), connect(f"ws://{address}/ws") as client:
        assert (await ask(client, "state"))["data"] == {"episode_id": None, "step_count": 0}
        reset = {"observation": {"observation": [0, 1, 0, 0]}, "reward": None, "done": False}
        assert await ask(client, "reset", {"seed": 7, "episode_id": "x"}) == {"type": "observation", "data": reset}
        answer = await ask(client, "step", {"action": 5, "metadata": {}}, id="a")
        both = {"terminated": False, "truncated": False}
        step = {"observation": {"observation": [0, 1, 1, 5]}, "reward": 1.0, "done": False, **both}
        assert answer == {"type": "observation", "data": step, "id": "a"}
        assert (await ask(client, "state", id=3))["data"]["step_count"] == 1
        assert (await ask(client, "step", {"action": 1}))["data"]["done"] is True
        await client.send('{"type": "close"}')
        await client.wait_closed()
        assert client.close_code == 1000
        await until(lambda: sessions.gauges()["free"] == 1)


async def test_arrays_as_their_bytes() -> None:
    async with serving(1) as (address, _), connect(f"ws://{address}/ws?arrays=base64") as client:
        await ask(client, "reset")
        assert restored((await ask(client, "step", {"action": 5}))["data"])["observation"]["observation"].tolist() == [
            *(0, 1, 1, 5)
        ]
        await client.send(msgpack.packb({"type": "step", "data": {"action": 6}, "id": "z"}))
        answer = restored(msgpack.unpackb(await client.recv()))
        observation = answer["data"]["observation"]["observation"]
        assert (answer["type"], answer["id"], observation.dtype, observation.tolist()) == (
            *("observation", "z", np.int64),
            [0, 1, 2, 11],
        )


NONSENSE = {
    "{": "INVALID_JSON",
    b"\xc1": "INVALID_JSON",
    "[" * 100_000: "INVALID_JSON",
    '{"type": "reset", "data": ' + '{"options": ' * 40 + "1" + "}" * 41: "VALIDATION_ERROR",
    "7": "VALIDATION_ERROR",
    '{"type": "fly"}': "UNKNOWN_TYPE",
    '{"type": "step", "data": {"action": 1}}': "VALIDATION_ERROR",
    '{"type": "reset", "data": {"seed": "x"}}': "VALIDATION_ERROR",
    '{"type": "reset", "data": [1]}': "VALIDATION_ERROR",
    '{"type": "reset", "id": [1]}': "VALIDATION_ERROR",
}


async def test_nonsense_is_refused_and_changes_nothing() -> None:
    async with serving(1) as (address, _), connect(f"ws://{address}/ws") as client:
        for message, code in NONSENSE.items():
            if isinstance(message, bytes):
                await client.send(message)
                assert msgpack.unpackb(await client.recv())["data"]["code"] == code
            else:
                assert await refused(client, message) == code
        await ask(client, "reset")
        for action in ('{"action": 1000}', '{"action": true}', '{"action": [1]}', '{"act": 1}', "{}", "[]"):
            assert await refused(client, f'{{"type": "step", "data": {action}}}') == "VALIDATION_ERROR"
        assert (await ask(client, "step", {"action": 3}))["data"]["observation"]["observation"] == [0, 1, 1, 3]


async def test_large_messages_close_their_connection_only() -> None:
    limits = Limits(message_bytes=1000)
    async with serving(2, limits=limits) as (address, _), connect(f"ws://{address}/ws") as other:
        await ask(other, "reset")
        async with connect(f"ws://{address}/ws") as client:
            await client.send(" " * 1001)
            with pytest.raises(ConnectionClosed):
                await client.recv()
            assert client.close_code == 1009
        assert (await ask(other, "step", {"action": 1}))["type"] == "observation"


async def test_messages_sent_ahead_are_answered_in_order() -> None:
    async with serving(1, limits=Limits(in_flight=3)) as (address, _), connect(f"ws://{address}/ws") as client:
        await client.send('{"type": "reset"}')
        for number in range(100):
            await client.send(json.dumps({"type": "step", "data": {"action": 2}, "id": number}))
        await client.recv()
        for number in range(100):
            answer = json.loads(await asyncio.wait_for(client.recv(), 20))
            assert answer["id"] == number
            assert answer["data"]["observation"]["observation"][2] == number + 1


async def test_who_leaves_in_a_step_frees_the_env(gate: Gate) -> None:
    async with serving(1, {0: {"fault": gate.wait, "at": (1, 1)}}) as (address, sessions):
        client = await connect(f"ws://{address}/ws")
        await ask(client, "reset")
        await client.send('{"type": "step", "data": {"action": 9}}')
        await gate.arrival()
        client.transport.abort()
        await until(lambda: sessions.gauges()["returning"] == 1)
        gate.open()
        async with connect(f"ws://{address}/ws") as client:
            assert (await ask(client, "reset"))["data"]["observation"]["observation"] == [0, 3, 0, 0]


async def test_who_leaves_with_messages_unread_is_forgotten(gate: Gate) -> None:
    async with serving(1, {0: {"fault": gate.wait, "at": (1, 1)}}, limits=Limits(in_flight=2)) as (address, sessions):
        client = await connect(f"ws://{address}/ws")
        await ask(client, "reset")
        for _ in range(20):
            await client.send('{"type": "step", "data": {"action": 9}}')
        await gate.arrival()
        client.transport.abort()
        gate.open()
        await until(lambda: sessions.gauges()["free"] == 1)


async def test_faults_are_told_without_anything_of_the_server() -> None:
    each = {0: {"fault": faults.raise_value_error, "at": (1, 1)}}
    async with serving(1, each) as (address, sessions), connect(f"ws://{address}/ws") as client:
        await ask(client, "reset")
        data = (await ask(client, "step", {"action": 1}))["data"]
        assert data == {
            "message": "the env raised ValueError, which the server's log has; go on with a reset",
            "code": "EXECUTION_ERROR",
        }
        await ask(client, "reset")
        sessions.batch.kill(0)
        assert (await ask(client, "step", {"action": 1}))["data"]["code"] == "SESSION_LOST"
        assert (await ask(client, "reset"))["type"] == "observation"


async def test_capacity_and_the_end_of_a_session_from_outside() -> None:
    async with serving(1, limits=Limits(wait=0.05), idle_seconds=1.0) as (address, sessions):
        url = f"ws://{address}/ws"
        async with connect(url) as one, connect(url) as other, httpx.AsyncClient(base_url=f"http://{address}") as http:
            await ask(one, "reset")
            full = (await ask(other, "reset"))["data"]
            assert (full["code"], full["waiting"], full["retry_after"] >= 1) == ("CAPACITY_REACHED", 0, True)
            number = sessions.active[0].number
            assert (await http.delete(f"/sessions/{number}", headers={"origin": "http://evil.example"})).status_code
            assert sessions.active
            assert (await http.delete(f"/sessions/{number}")).status_code == 200
            await one.wait_closed()
            assert (one.close_code, "it was ended" in (one.close_reason or "")) == (4001, True)
            await until(lambda: sessions.gauges()["free"] == 1)
            await ask(other, "reset")
            await other.wait_closed()
            assert other.close_code == 4000  # idle


async def test_http_with_a_session_id() -> None:
    async with serving(1) as (address, sessions), httpx.AsyncClient(base_url=f"http://{address}") as http:
        assert (await http.get("/health")).json() == {"status": "healthy"}
        assert restored((await http.get("/metadata")).json())["spaces"]["action"]["n"] == 1000
        schema = (await http.get("/schema")).json()
        assert schema["action"]["properties"]["action"] == {"type": "integer", "minimum": 0, "maximum": 999}
        name = (await http.post("/reset", json={"seed": 1})).json()["session_id"]
        answer = (await http.post("/step", json={"action": {"action": 4}, "session_id": name})).json()
        assert answer["observation"] == {"observation": [0, 1, 1, 4]}
        assert (await http.get("/state", params={"session_id": name})).json()["step_count"] == 1
        assert (await http.post("/step", json={"action": {"action": 4}, "session_id": "x"})).status_code == 422
        assert (await http.post("/step", content=b" " * (2 << 20))).status_code == 413
        assert (await http.post("/close", json={"session_id": name})).status_code == 200
        await until(lambda: sessions.gauges()["free"] == 1)


async def status_of(url: str, **options: Any) -> int:
    try:
        async with connect(url, **options):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


async def test_a_token_is_wanted_everywhere() -> None:
    basic = "Basic " + base64.b64encode(b"user:secret").decode()
    async with serving(1, token="secret") as (address, _), httpx.AsyncClient(base_url=f"http://{address}") as http:
        for path in ("/", "/page.js", "/metrics", "/live", "/metadata", "/sessions/1/picture"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metadata", headers={"authorization": "Bearer secre"})).status_code == 401
        assert (await http.get("/metadata", headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await http.get("/metadata", headers={"authorization": basic})).status_code == 200
        assert await status_of(f"ws://{address}/ws") == 401
        assert await status_of(f"ws://user:secret@{address}/ws") == 101
        assert (await http.get("/?token=wrong")).status_code == 401
        welcome = await http.get("/?token=secret")
        assert (welcome.status_code, welcome.headers["location"]) == (303, "/")
        assert "HttpOnly" in welcome.headers["set-cookie"]
        assert (await http.get("/page.js")).status_code == 200  # the client keeps the cookie


async def test_pages_of_others_and_names_of_others_are_refused() -> None:
    async with serving(1, allow_origins=["https://lab.example"]) as (address, _):
        url = f"ws://{address}/ws"
        assert await status_of(url, origin="http://evil.example") == 403
        assert await status_of(url, origin="https://lab.example") == 101
        assert await status_of(url, origin=f"http://{address}") == 101
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            assert (await http.get("/", headers={"host": "rebound.example"})).status_code == 403


async def test_connections_of_an_address_are_bounded() -> None:
    async with serving(1, max_connections=1) as (address, _), connect(f"ws://{address}/ws"):
        assert await status_of(f"ws://{address}/ws") == 429


class Reaching(gym.Env[Any, Any]):
    """Observes a dict, wants two numbers, reports what JSON does not know, and renders."""

    observation_space = gym.spaces.Dict({"at": gym.spaces.Box(-9, 9, (2,)), "near": gym.spaces.Discrete(2)})
    action_space = gym.spaces.Box(-1, 1, (2,))
    render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return {"at": np.zeros(2, np.float32), "near": 0}, {"options": options, "what": object(), "nan": float("nan")}

    def step(self, action: Any) -> Any:
        return {"at": np.asarray(action, np.float32), "near": 1}, -0.5, False, True, {}

    def render(self) -> Any:
        return np.full((4, 6, 3), 7, np.uint8)


async def test_dicts_infos_and_pictures() -> None:
    app = create_app(Reaching, 1)
    async with served(app) as address, connect(f"ws://{address}/ws") as client:
        data = (await ask(client, "reset", {"options": {"a": [1]}}))["data"]
        assert data["observation"] == {"at": [0.0, 0.0], "near": 0}
        assert data["info"] == {"options": {"a": [1]}, "what": "<object>", "nan": None}
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            picture = await http.get(f"/sessions/{app.sessions.active[0].number}/picture")
            assert (picture.headers["content-type"], picture.content[:4]) == ("image/png", b"\x89PNG")
        data = (await ask(client, "step", {"action": [1, -0.5]}))["data"]
        assert (data["observation"]["at"], data["done"], data["truncated"]) == ([1.0, -0.5], True, True)


async def test_metrics_and_the_stream_of_the_page() -> None:
    pytest.importorskip("prometheus_client")
    async with serving(1) as (address, _), connect(f"ws://{address}/ws") as client:
        await ask(client, "reset")
        await ask(client, "step", {"action": 1})
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            lines = (await http.get("/metrics")).text.splitlines()
            assert "aioenvs_free 0.0" in lines
            assert "aioenvs_steps_total 1.0" in lines
            async with http.stream("GET", "/live") as stream:
                line = await anext(stream.aiter_lines())
        now = json.loads(line.removeprefix("data: "))
        assert (now["gauges"]["leased"], now["sessions"][0]["steps"]) == (1, 1)
