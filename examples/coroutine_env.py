"""Envs that wait for a server: 500 of them in two processes, each awaiting its own answers.

The env is a plain class with Gymnasium's spaces and signatures, whose `reset` and `step` are coroutines. It asks an
HTTP server, which this script starts in a thread of its own, and which thinks for a while about every answer, as a
language model or a simulator elsewhere would. While one env waits the others of its process go on, so 500 envs take
about as long for a step as one.

Run it by ``python examples/coroutine_env.py``; it takes a few seconds.
"""

import argparse
import asyncio
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import uvloop
from tensordict import TensorDict

from aioenvs import AsyncParallelEnv


class RemoteWalk:
    """A walk on a line that a server keeps; an episode ends when it is far enough from 0.

    Args:
        port: Where the server listens on this machine.
    """

    observation_space = gym.spaces.Box(-10, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, port: int) -> None:
        self.port = port
        self.position = 0
        self.connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin at 0."""
        self.position = await self.ask({"position": 0, "move": 0})
        return np.array([self.position], np.float32), {}

    async def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go up or down."""
        self.position = await self.ask({"position": self.position, "move": 2 * int(action) - 1})
        done = abs(self.position) >= 10
        return np.array([self.position], np.float32), float(done), done, False, {}

    async def ask(self, question: dict[str, int]) -> int:
        """Post a question to the server, and await its answer; hang up if that is given up."""
        if self.connection is None:  # not in the constructor, which runs before there is a loop
            self.connection = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.connection
        body = json.dumps(question).encode()
        try:
            writer.write(b"POST /walk HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            return int(json.loads(await read_body(reader))["position"])
        except BaseException:  # cancelled, say: the answer may still come, and nobody must take it for a later one
            await self.close()
            raise

    async def close(self) -> None:
        """Hang up; the next question opens another connection."""
        if self.connection is not None:
            self.connection[1].close()
            self.connection = None


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """The body of the next HTTP message; raises IncompleteReadError at the end of the stream."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return await reader.readexactly(int(length))


@contextlib.contextmanager
def server(seconds: float) -> Iterator[int]:
    """An HTTP server in a thread, which thinks for some seconds about each answer; gives its port."""
    started: queue.SimpleQueue[tuple[int, Callable[[], object]]] = queue.SimpleQueue()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                question = json.loads(await read_body(reader))
                await asyncio.sleep(seconds)
                answer = json.dumps({"position": question["position"] + question["move"]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        writer.close()

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(converse, "127.0.0.1", 0, backlog=2048) as listening:
            started.put((listening.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(ended.set)))
            await ended.wait()

    thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
    thread.start()
    port, stop = started.get()
    try:
        yield port
    finally:
        stop()
        thread.join()


async def measure(port: int, num_envs: int, num_processes: int, steps: int) -> tuple[float, TensorDict]:
    """Step all envs so often; returns the seconds that a step took, and the last one."""
    kwargs = {"port": port}
    async with AsyncParallelEnv(num_envs, RemoteWalk, create_env_kwargs=kwargs, num_processes=num_processes) as env:
        td = await env.reset()
        began = time.perf_counter()
        for _ in range(steps):
            last, td = await env.step_and_maybe_reset(env.rand_action(td))
        return (time.perf_counter() - began) / steps, last


def main() -> None:
    """Start the server, step the envs, compare with what would be ideal."""
    parser = argparse.ArgumentParser(description="Hundreds of envs that await a server, in few processes.")
    parser.add_argument("--envs", type=int, default=500, help="how many envs (default: 500)")
    parser.add_argument("--processes", type=int, default=2, help="in how many processes (default: 2)")
    parser.add_argument("--steps", type=int, default=30, help="how many steps each takes (default: 30)")
    parser.add_argument("--seconds", type=float, default=0.1, help="how long the server thinks (default: 0.1)")
    options = parser.parse_args()
    with server(options.seconds) as port:
        seconds, last = uvloop.run(measure(port, options.envs, options.processes, options.steps))
    print(f"a step of {len(last)} envs: {1000 * seconds:.0f} ms; the server thinks for {1000 * options.seconds:.0f} ms")
    print(f"steps/s: {options.envs / seconds:.0f}; ideal, if nothing but thinking took time: ", end="")
    print(f"{options.envs / options.seconds:.0f}; one env after the other: {1 / options.seconds:.0f}")


if __name__ == "__main__":
    main()
