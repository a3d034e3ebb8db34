"""Measures `aioenvs serve` beside OpenEnv's own server: python tests/serving_speed.py [--clients 32] [--seconds 5].

Both servers and all clients run on this machine, one pair after the other and several times over; medians are told.
Needs openenv-core, of which the clients are coroutines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def server(kind: str, envs: int) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m"]
    if kind == "openenv":
        command += ["uvicorn", "openenv_cartpole:app", "--port", str(port), "--log-level", "warning"]
    else:
        command += ["aioenvs", "serve", "CartPole-v1", "--num-envs", str(envs), "--port", str(port)]
        command += ["--num-processes", "2", "--drain-seconds", "2"]
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


async def play_openenv(url: str, clients: int, seconds: float, latencies: list[float], starts: list[float]) -> None:
    from openenv.core import GenericEnvClient

    start = asyncio.Barrier(clients)

    async def one() -> None:
        began = time.perf_counter()
        async with GenericEnvClient(base_url=url) as client:
            await client.reset(seed=1)
            starts.append(time.perf_counter() - began)
            await start.wait()
            until, done, action = time.perf_counter() + seconds, False, 0
            while (now := time.perf_counter()) < until:
                if done:
                    await client.reset()
                    now = time.perf_counter()
                action = 1 - action
                done = (await client.step({"action": action})).done
                latencies.append(time.perf_counter() - now)

    await asyncio.gather(*(one() for _ in range(clients)))


async def play_remotely(url: str, clients: int, seconds: float, latencies: list[float], starts: list[float]) -> None:
    from aioenvs.serving import RemoteEnv

    make, start = RemoteEnv(url), asyncio.Barrier(clients)

    async def one() -> None:
        env, began = make(), time.perf_counter()
        await env.reset(seed=1)
        starts.append(time.perf_counter() - began)
        await start.wait()
        until, done, action = time.perf_counter() + seconds, False, 0
        while (now := time.perf_counter()) < until:
            if done:
                await env.reset()
                now = time.perf_counter()
            action = 1 - action
            _, _, terminated, truncated, _ = await env.step(action)
            done = terminated or truncated
            latencies.append(time.perf_counter() - now)
        await env.close()

    await asyncio.gather(*(one() for _ in range(clients)))


def measure(pair: str, clients: int, seconds: float) -> tuple[float, float, float]:
    latencies: list[float] = []
    starts: list[float] = []
    with server("openenv" if pair == "openenv" else "aioenvs", clients) as url:
        play = play_remotely if pair == "remote" else play_openenv
        asyncio.run(play(url, clients, seconds, latencies, starts))
    ordered = sorted(latencies)
    return len(ordered) / seconds, 1000 * ordered[int(0.99 * len(ordered))], 1000 * statistics.median(starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = {"openenv": "OpenEnv's client and server", "mixed": "its client, ours", "remote": "RemoteEnv, ours"}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for pair, each in found.items():
            each.append(measure(pair, options.clients, options.seconds))
    base = [statistics.median(column) for column in zip(*found["openenv"], strict=True)]
    for pair, words in names.items():
        rate, p99, start = (statistics.median(column) for column in zip(*found[pair], strict=True))
        ratios = f"{rate / base[0]:.2f} and {p99 / base[1]:.2f} of the first"
        print(f"{words}: {rate:,.0f} steps/s, p99 {p99:.1f} ms, start {start:.1f} ms ({ratios})")


if __name__ == "__main__":
    main()
