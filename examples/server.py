"""Embeds `Sessions` in an app of one's own: each player has an env for a game, and a slow one holds nobody else up.

    python examples/server.py --port 8000
    curl -X POST 'localhost:8000/play?seed=7'

A request plays one game with a policy of the server's, and answers with its return. `aioenvs serve` is the whole server
with sessions over WebSockets; this is for apps that do something else with envs.
"""

import argparse
import contextlib
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Games of CartPole, each in an env of its own.")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(create_app("CartPole-v1", arguments.num_envs), port=arguments.port)
