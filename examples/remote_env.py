"""Improves a policy on envs of a server elsewhere, stepped like those of this machine.

    python examples/remote_env.py                   # with a server of its own
    aioenvs serve CartPole-v1 --num-envs 16
    python examples/remote_env.py ws://127.0.0.1:8000

The policy is linear, and each round keeps the best of a few that are drawn around it, one for each env.
"""

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from aioenvs import AsyncParallelEnv
from aioenvs.serving import RemoteEnv


@contextlib.contextmanager
def served(num_envs: int) -> Iterator[str]:
    """Serve CartPoles from another process; yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "aioenvs", "serve", "CartPole-v1"]
    with subprocess.Popen([*command, "--num-envs", str(num_envs), "--port", str(port)]) as server:
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"ws://127.0.0.1:{port}"
        finally:
            server.terminate()


async def improve(url: str, token: str | None, num_envs: int, rounds: int) -> float:
    """Return the best return of the last round."""
    torch.manual_seed(0)
    center, best = torch.zeros(4), 0.0
    async with AsyncParallelEnv(num_envs, RemoteEnv(url, token), num_processes=min(2, num_envs)) as env:
        for number in range(rounds):
            weights = center + torch.randn(num_envs, 4) / (1 + number)
            td = await env.reset()
            returns, alive = torch.zeros(num_envs), torch.ones(num_envs, dtype=torch.bool)
            while alive.any():
                td["action"] = ((td["observation"] * weights).sum(-1) > 0).long()
                stepped, td = await env.step_and_maybe_reset(td)
                returns += alive * stepped["next", "reward"].squeeze(-1)
                alive &= ~stepped["next", "done"].squeeze(-1)
            best, center = returns.max().item(), weights[returns.argmax()]
            print(f"round {number}: best return {best:.0f}, mean {returns.mean().item():.0f}")
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="CartPole on a server.")
    parser.add_argument("url", nargs="?", help="of the server (default: one is started)")
    parser.add_argument("--token")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = served(options.num_envs) if options.url is None else contextlib.nullcontext(options.url)
    with server as address:
        asyncio.run(improve(address, options.token, options.num_envs, options.rounds))
