"""`aioenvs serve` as a program: OpenEnv's client, signals, refusals, and the page in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

pytest.importorskip("starlette")
pytest.importorskip("msgpack")

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from aioenvs.cli.main import main
from aioenvs.serving import RemoteEnv

HERE = Path(__file__).parent


@contextlib.contextmanager
def running(*command: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server as a process of its own; `{port}` stands for a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    arguments = [sys.executable, "-m", *(part.format(port=port) for part in command)]
    process = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(*options: str) -> Any:
    return running("aioenvs", "serve", *options, "--port", "{port}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--token-env, or say --insecure"),
        (["--token-env", "NO_SUCH_VARIABLE"], "there is no such variable"),
        (["--num-envs", "1", "--num-processes", "2"], "is more than --num-envs 1"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["serve", "CartPole-v1", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
async def test_a_stop_under_load_closes_sessions_and_ends_in_time() -> None:
    with serve("CartPole-v1", "--num-envs", "8", "--num-processes", "2", "--drain-seconds", "4") as (address, process):

        async def play() -> int | None:
            async with connect(f"ws://{address}/ws") as client:
                with contextlib.suppress(ConnectionClosed):
                    while True:
                        await client.send('{"type": "reset"}')
                        done = json.loads(await client.recv())["data"]["done"]
                        while not done:
                            await client.send('{"type": "step", "data": {"action": 1}}')
                            done = json.loads(await client.recv())["data"]["done"]
                await client.wait_closed()
                return client.close_code

        clients = [asyncio.create_task(play()) for _ in range(8)]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*clients) == [1012] * 8
        assert await asyncio.to_thread(process.wait, 10) in (0, -signal.SIGTERM)
        assert time.monotonic() - began < 4.5


@pytest.mark.slow
def test_openenvs_client_plays_cartpole() -> None:
    core = pytest.importorskip("openenv.core")
    reference = gym.make("CartPole-v1")
    with (
        serve("CartPole-v1", "--num-envs", "2", "--num-processes", "1") as (address, _),
        core.GenericEnvClient(base_url=f"http://{address}").sync() as client,
    ):
        for seed in range(100):
            result = client.reset(seed=seed)
            observation, _ = reference.reset(seed=seed)
            returns, expected, done, over = 0.0, 0.0, False, False
            while not done:
                assert result.observation["observation"] == observation.tolist()
                action = int(result.observation["observation"][2] > 0)
                result = client.step({"action": action})
                observation, reward, terminated, truncated, _ = reference.step(action)
                returns, expected = returns + result.reward, expected + float(reward)
                done, over = result.done, terminated or truncated
                assert done == over
            assert returns == expected
            assert client.state()["step_count"] == returns


@pytest.mark.slow
async def test_remote_envs_play_on_openenvs_server() -> None:
    pytest.importorskip("openenv.core")
    reference = gym.make("CartPole-v1")
    with running("uvicorn", "openenv_cartpole:app", "--port", "{port}") as (address, _):
        env = RemoteEnv(f"http://{address}")()
        observed, _ = await env.reset(seed=5)
        wanted, _ = reference.reset(seed=5)
        over = False
        while not over:
            assert observed == {"observation": wanted.tolist()}
            observed, reward, terminated, truncated, _ = await env.step({"action": 1})
            wanted, expected, *ends, _ = reference.step(1)
            assert (reward, terminated or truncated) == (expected, any(ends))
            over = any(ends)
        await env.close()


# As root it needs no sandbox; and nothing of its own that asks for hosts elsewhere.
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.mark.slow
def test_the_page_in_a_browser() -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium")
    with contextlib.ExitStack() as stack:
        options = ("--num-envs", "4", "--num-processes", "2", "--drain-seconds", "1")
        address, _ = stack.enter_context(serve("serving_envs:Drawn", *options))
        player = stack.enter_context(playing(address))
        browser = stack.enter_context(sync_api.sync_playwright()).chromium.launch(
            executable_path=chromium, args=CHROMIUM
        )
        page = browser.new_page(bypass_csp=True)  # for what the test itself evaluates
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"http://{address}/")
        page.wait_for_selector("#sessions button")
        assert page.inner_text("#gauge-leased") == "1"
        steps = "document.querySelector('#sessions tbody tr').cells[4].textContent"
        before = page.evaluate(steps)
        page.wait_for_function(f"{steps} !== {before!r}")
        page.wait_for_function("Number(document.getElementById('rate').textContent) > 0")
        page.click("#sessions button")
        page.wait_for_selector("#picture:not([hidden])")
        assert page.evaluate("document.getElementById('picture').naturalWidth") == 60
        page.set_viewport_size({"width": 340, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= 340
        assert page.is_visible("#end")
        page.click("#end")
        page.wait_for_selector("#none:not([hidden])")
        assert player.wait(10) == 0
        assert problems == []
        browser.close()


PLAYER = """
import asyncio, json, sys
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

async def main():
    async with connect(f"ws://{sys.argv[1]}/ws") as client:
        try:
            while True:
                await client.send('{"type": "reset"}')
                done = json.loads(await client.recv())["data"]["done"]
                while not done:
                    await asyncio.sleep(0.01)
                    await client.send('{"type": "step", "data": {"action": 1}}')
                    done = json.loads(await client.recv())["data"]["done"]
        except ConnectionClosed:
            sys.exit(client.close_code != 4001)

asyncio.run(main())
"""


@contextlib.contextmanager
def playing(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A client that plays in a process of its own, and ends well if its session is ended."""
    process = subprocess.Popen([sys.executable, "-c", PLAYER, address])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
