"""Clients that behave badly, all at once and at random, against a model of what each session must observe.

    python tests/serving_chaos.py --seed 0 --operations 100000

Envs observe their index, episode, step and the sum of the episode's actions; actions are drawn from a thousand, so an
answer to another session, a late or a doubled one shows. Workers are killed all the while. At the end each env is free.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from typing import Any

from failing_envs import CountingEnv, numbered
from servers import served
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from aioenvs.serving import create_app
from aioenvs.serving.connection import Limits

PATIENCE = 60.0
GARBAGE = ("{", "[" * 5000, '{"type": 7}', '{"type": "fly"}', '{"type":"step","data":{"action":"x"}}', "\0", '"' * 99)


class Client:
    """One connection after the other, each with its model: what its env has shown last, if that is known."""

    def __init__(self, url: str, seed: int, done: Counter[str]) -> None:
        self._url, self._rng, self._done = url, random.Random(seed), done
        self._at: list[int] | None = None
        self._env: int | None = None

    async def run(self, operations: int) -> None:
        while operations > 0:
            self._at = self._env = None
            with contextlib.suppress(ConnectionClosed, InvalidMessage, InvalidStatus, OSError):
                async with connect(self._url, compression=None, ping_interval=None) as client:
                    while operations > 0:
                        operations -= 1
                        if not await asyncio.wait_for(self._one(client), PATIENCE):
                            break

    async def _one(self, client: ClientConnection) -> bool:
        """Do something; False if the connection is given up."""
        kinds = ["step"] * 30 + ["reset"] * 4 + ["ahead"] * 3 + ["garbage"] * 2 + ["state", "vanish", "close", "half"]
        kind = self._rng.choice([*kinds, *["large", "deaf"] * (self._rng.random() < 0.1)])
        self._done[kind] += 1
        if kind in ("step", "ahead"):
            actions = [self._rng.randrange(1000) for _ in range(1 if kind == "step" else self._rng.randint(2, 12))]
            for action in actions:
                await client.send(json.dumps({"type": "step", "data": {"action": action}, "id": action}))
            for action in actions:
                answer = json.loads(await client.recv())
                assert answer["id"] == action, (answer, action)
                self._stepped(answer, action)
            return True
        if kind == "reset":
            await client.send('{"type": "reset", "data": {"seed": 1}}')
            self._begun(json.loads(await client.recv()))
            return True
        if kind == "garbage":
            await client.send(self._rng.choice(GARBAGE))
            assert json.loads(await client.recv())["type"] == "error"
            return True
        if kind == "state":
            await client.send('{"type": "state"}')
            assert json.loads(await client.recv())["data"]["step_count"] == (self._at[2] if self._at else 0) or (
                self._at is None
            )
            return True
        await client.send('{"type": "step", "data": {"action": 1}}')
        if kind == "close":
            await client.send('{"type": "close"}')
            await client.send('{"type": "reset"}')
            return False
        if kind == "half":
            client.transport.write(b"\x81\xfe")
        elif kind == "large":
            await client.send(" " * (2 << 20))
        elif kind == "deaf":
            client.transport.pause_reading()
            for _ in range(200):
                await client.send('{"type": "state"}')
        client.transport.abort()
        return False

    def _begun(self, answer: Any) -> None:
        if answer["type"] == "error":
            assert answer["data"]["code"] in ("SESSION_LOST", "CAPACITY_REACHED", "SESSION_ERROR"), answer
            self._at = None
            return
        env, episode, *rest = answer["data"]["observation"]["observation"]
        assert rest == [0, 0], answer
        assert self._env in (None, env), answer
        self._env, self._at = env, [env, episode, 0, 0]

    def _stepped(self, answer: Any, action: int) -> None:
        if answer["type"] == "error":
            allowed = ("SESSION_LOST",) if self._at is not None else ("SESSION_LOST", "VALIDATION_ERROR")
            assert answer["data"]["code"] in allowed, (answer, self._at)
            self._at = None
            return
        assert self._at is not None, answer
        self._at = [*self._at[:2], self._at[2] + 1, self._at[3] + action]
        assert answer["data"]["observation"]["observation"] == self._at, (answer, self._at, action)


async def run(operations: int, seed: int = 0, envs: int = 6, clients: int = 10) -> Counter[str]:
    """Do that many operations, and return how many there were of each kind."""
    done: Counter[str] = Counter()
    rng = random.Random(seed)
    app = create_app(
        CountingEnv, envs, kwargs=numbered(envs), num_processes=3, idle_seconds=5.0, limits=Limits(wait=PATIENCE)
    )
    async with served(app) as address:

        async def kill() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.1, 0.8))
                pid = rng.choice(app.sessions.batch.workers())["pid"]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                done["kill"] += 1

        killing = asyncio.create_task(kill())
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    client = Client(f"ws://{address}/ws", seed * 1000 + number, done)
                    group.create_task(client.run(operations // clients))
        finally:
            killing.cancel()
        async with asyncio.timeout(PATIENCE):
            while app.sessions.gauges()["free"] != envs:  # noqa: ASYNC110 - the server runs in another loop
                await asyncio.sleep(0.05)
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(dict(asyncio.run(run(options.operations, options.seed))))
