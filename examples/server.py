"""Embeds `Sessions` in an app of one's own: each player has an env for a game, and a slow one holds nobody else up.

    python examples/server.py                       # a demonstration: the server, and a few games
    python examples/server.py --port 8000
    curl -X POST 'localhost:8000/play?seed=7'

A request plays one game with a policy of the server's, and answers with its return. `aioenvs serve` is the whole server
with sessions over WebSockets; this is for apps that do something else with envs.
"""

import argparse
import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from aioenvs.serving import CapacityError, EnvFailedError, SessionLostError, Sessions


def create_app(env: Any, num_envs: int, **options: Any) -> Starlette:
    """Return an ASGI app whose envs live as long as it does; see `Sessions`."""
    sessions = Sessions(env, num_envs, **options)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with sessions:
            yield

    async def status(_: Request) -> JSONResponse:
        return JSONResponse(sessions.gauges())

    async def play(request: Request) -> JSONResponse:
        seed = request.query_params.get("seed", "0")
        try:
            async with sessions.lease(client="player", seed=int(seed), wait=5.0) as session:
                observation, _ = await session.reset()
                total, over = 0.0, False
                while not over:
                    action = int(observation[2] > 0)
                    observation, reward, terminated, truncated, _ = await session.step(action)
                    total, over = total + float(reward), terminated or truncated
        except CapacityError as error:
            return JSONResponse({"error": str(error)}, 503, {"retry-after": str(int(error.retry_after))})
        except (EnvFailedError, SessionLostError):
            return JSONResponse({"error": "the env failed; try again"}, 502)
        return JSONResponse({"return": total})

    return Starlette(routes=[Route("/", status), Route("/play", play, methods=["POST"])], lifespan=lifespan)


async def demonstrate(app: Starlette) -> None:
    """Serve on a free port for as long as a few games take."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]

    def play(seed: int) -> str:
        url = f"http://127.0.0.1:{port}/play?seed={seed}"
        return urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).read().decode()

    for seed, answer in enumerate(await asyncio.gather(*(asyncio.to_thread(play, seed) for seed in range(4)))):
        print(f"seed {seed}: {answer}")
    server.should_exit = True
    await serving


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Games of CartPole, each in an env of its own.")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--port", type=int, help="where to serve (default: a demonstration instead)")
    arguments = parser.parse_args()
    app = create_app("CartPole-v1", arguments.num_envs)
    if arguments.port is None:
        asyncio.run(demonstrate(app))
    else:
        uvicorn.run(app, port=arguments.port)
