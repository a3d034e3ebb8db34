"""Serves envs over WebSockets: each session has one env of a pool for itself, and a slow one holds nobody else up.

    python examples/server.py                    # a demo: the server, and clients that play, over real sockets
    python examples/server.py --serve --port 8000

A client connects to ``ws://host:port/`` and sends JSON, one answer for each message::

    {"reset": {"seed": 7}}  ->  {"observation": [...]}
    {"step": 1}             ->  {"observation": [...], "reward": 1.0, "terminated": false, "truncated": false}
    anything else           ->  {"error": "..."}

The seed may be left out. After an error of an env, or the end of an episode, a session goes on with a reset. A client
gets HTTP status 503 instead of a session while all envs are taken; ``GET /`` says how many are free.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import gymnasium as gym
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from tensordict import TensorDict, TensorDictBase
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from aioenvs import AsyncParallelEnv
from aioenvs.errors import SpecMismatchError

logger = logging.getLogger("server")
MAX_WAITING = 16  # messages of one client that are read ahead
IDLE_CODE = 4000  # of a WebSocket that was closed since its client said nothing


class MessageError(Exception):
    """A message that makes no sense; it changes nothing."""


class Session:
    """What one client does with its env.

    Args:
        view: The env, as a batch of one.
    """

    def __init__(self, view: Any) -> None:
        """Begin without an episode."""
        self._view = view
        self._playing = False

    async def answer(self, text: str) -> dict[str, Any]:
        """Do what a message says, and return the answer to it."""
        try:
            name, argument = _parsed(text)
            if name == "reset":
                return await self._reset(argument)
            return await self._step(argument)
        except (MessageError, SpecMismatchError) as error:
            return {"error": str(error)}
        except Exception as error:  # of the env, or the end of its worker, which the next reset replaces
            self._playing = False
            logger.info("%r: %r", self._view, error)
            return {"error": f'{type(error).__name__}: {error}; go on with {{"reset": {{}}}}'}

    async def _reset(self, options: Any) -> dict[str, Any]:
        if not isinstance(options, dict) or not options.keys() <= {"seed"}:
            raise MessageError(
                f'expected {{"reset": {{}}}} or {{"reset": {{"seed": 7}}}}, found {options!r} as its value'
            )
        seed = options.get("seed")
        if seed is not None and type(seed) is not int:
            raise MessageError(f"expected an integer as seed, found {seed!r}")
        td = await self._view.reset(**options)
        self._playing = True
        return self._observed(td)

    async def _step(self, action: Any) -> dict[str, Any]:
        if not self._playing:
            raise MessageError('no episode has begun, or it is over; go on with {"reset": {}}')
        td = await self._view.step(TensorDict({"action": self._action(action)}, batch_size=[1]))
        after = td["next"]
        self._playing = not after["done"].item()
        scalars = {name: after[name].item() for name in ("reward", "terminated", "truncated")}
        return self._observed(after) | scalars

    def _action(self, action: Any) -> torch.Tensor:
        spec = self._view.action_spec
        try:
            tensor = torch.tensor([action])
        except (TypeError, ValueError, RuntimeError):
            expected = f"an action of shape {tuple(spec.shape[1:])} and dtype {spec.dtype}"
            raise MessageError(f"expected {expected}, found {action!r}") from None
        return tensor.to(spec.dtype) if spec.dtype.is_floating_point and tensor.dtype != torch.bool else tensor

    def _observed(self, td: TensorDictBase) -> dict[str, Any]:
        return _readable(td[0].select(*self._view.observation_keys))


def _parsed(text: str) -> tuple[str, Any]:
    """Return the name of a command and its argument."""
    try:
        message = json.loads(text)
    except ValueError as error:
        raise MessageError(f"expected JSON, found {text[:100]!r}: {error}") from None
    if not isinstance(message, dict) or len(message) != 1 or not message.keys() <= {"reset", "step"}:
        raise MessageError(f'expected {{"reset": {{...}}}} or {{"step": action}}, found {text[:100]!r}')
    (command,) = message.items()
    return command


def _readable(td: TensorDictBase) -> dict[str, Any]:
    """Return what a TensorDict holds as JSON can say it."""
    return {name: _readable(value) if isinstance(value, TensorDict) else value.tolist() for name, value in td.items()}


class Lender:
    """Lends the envs of a batch, one to each client.

    Args:
        env: The batch.
        idle_seconds: How long a client may say nothing.
    """

    def __init__(self, env: AsyncParallelEnv, idle_seconds: float) -> None:
        """Have all of them free."""
        self._env = env
        self._idle_seconds = idle_seconds
        self._free = deque(range(len(env)))
        self._returning: set[asyncio.Task[None]] = set()

    @property
    def free(self) -> int:
        """How many envs can be lent now."""
        return len(self._free)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Any]:
        """Lend an env until the end of the block."""
        index = self._free.popleft()
        try:
            yield self._env[index]
        finally:
            task = asyncio.create_task(self._take_back(index))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _take_back(self, index: int) -> None:
        """Reset an env that was lent, which also waits for what its last client left it with, and lend it again."""
        try:
            await self._env[index].reset()
        except Exception as error:  # the next session hears of it too, since it has to begin with a reset
            logger.warning("env %d could not be reset: %r", index, error)
        self._free.append(index)

    async def serve(self, websocket: WebSocket) -> None:
        """Give a client an env until it leaves or falls silent."""
        if not self._free:
            await websocket.send_denial_response(JSONResponse({"error": "all envs are taken"}, status_code=503))
            return
        inbox: asyncio.Queue[str] = asyncio.Queue(MAX_WAITING)
        with self._lent() as view, contextlib.suppress(WebSocketDisconnect):
            await websocket.accept()
            tasks = [
                asyncio.create_task(self._talk(websocket, Session(view), inbox)),
                asyncio.create_task(self._read(websocket, inbox)),
            ]
            try:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()  # whoever has left does not wait for an answer
                await asyncio.wait(tasks)
            for task in ended:
                task.result()

    async def _read(self, websocket: WebSocket, inbox: "asyncio.Queue[str]") -> None:
        """Pass on what a client says, and notice at once when it leaves."""
        while (message := await websocket.receive())["type"] != "websocket.disconnect":
            await inbox.put(message.get("text") or "")

    async def _talk(self, websocket: WebSocket, session: Session, inbox: "asyncio.Queue[str]") -> None:
        """Answer one message after the other."""
        while True:
            try:
                async with asyncio.timeout(self._idle_seconds):
                    text = await inbox.get()
            except TimeoutError:
                await websocket.close(IDLE_CODE, f"nothing was said for {self._idle_seconds} s")
                return
            await websocket.send_text(json.dumps(await session.answer(text)))

    async def close(self) -> None:
        """Wait no longer for envs that come back."""
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)


def create_app(env: Any, num_envs: int, *, idle_seconds: float = 60.0, **options: Any) -> Starlette:
    """Return an ASGI app whose envs live as long as it does.

    Args:
        env: What makes an env; see `AsyncParallelEnv`.
        num_envs: How many there are, and so how many clients can have one.
        idle_seconds: How long a client may say nothing before its env goes to somebody else.
        **options: Of `AsyncParallelEnv`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncParallelEnv(num_envs, env, **options) as envs:
            lender = app.state.lender = Lender(envs, idle_seconds)
            try:
                yield
            finally:
                await lender.close()

    async def status(request: Request) -> JSONResponse:
        return JSONResponse({"envs": num_envs, "free": request.app.state.lender.free})

    async def session(websocket: WebSocket) -> None:
        await websocket.app.state.lender.serve(websocket)

    return Starlette(routes=[Route("/", status), WebSocketRoute("/", session)], lifespan=lifespan)


# -- the demo ---------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """A server that says when it is up, or has failed to be."""

    def __init__(self, config: uvicorn.Config) -> None:
        """Be not up yet."""
        super().__init__(config)
        self.settled = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        """Start, as ever."""
        try:
            await super().startup(sockets)
        finally:
            self.settled.set()


async def play(url: str, space: gym.Space[Any], ready: asyncio.Barrier, seconds: float) -> int:
    """Play random actions over one session, once all have theirs, and return how many steps that were."""
    steps, over = 0, True
    async with connect(url) as websocket:
        await ready.wait()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            message = {"reset": {"seed": random.randrange(2**31)}} if over else {"step": space.sample().tolist()}
            await websocket.send(json.dumps(message))
            answer = json.loads(await websocket.recv())
            if "error" in answer:
                raise RuntimeError(answer["error"])
            over = answer.get("terminated", False) or answer.get("truncated", False)
            steps += "reward" in answer
    return steps


async def knock(url: str) -> int:
    """Return the HTTP status that a client gets who wants a session."""
    try:
        async with connect(url):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


async def demo(app: Starlette, options: argparse.Namespace) -> None:
    """Serve, and let as many clients play as there are envs, while one more knocks."""
    server = Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    await server.settled.wait()
    if not server.started:
        sys.exit("the server could not be started")
    url = f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    env = gym.make(options.env)
    env.close()
    ready = asyncio.Barrier(options.num_envs + 1)
    async with asyncio.TaskGroup() as group:
        clients = [
            group.create_task(play(url, env.action_space, ready, options.seconds)) for _ in range(options.num_envs)
        ]
        await ready.wait()
        began = time.perf_counter()
        print(f"one more client than there are envs: HTTP {await knock(url)}")
    elapsed, steps = time.perf_counter() - began, sum(client.result() for client in clients)
    print(f"{options.num_envs} sessions, {steps} steps in {elapsed:.1f} s: {steps / elapsed:,.0f} steps/s")
    server.should_exit = True
    await serving


def _no_refusal(record: logging.LogRecord) -> bool:
    """Tell whether a record is none: uvicorn complains of a handshake that ends with an HTTP status, as with 503."""
    return "without completing handshake" not in record.getMessage()


def _positive(number: type[Any]) -> Any:
    """Return a type of argparse: a number above 0."""

    def read(text: str) -> Any:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
        return value

    read.__name__ = number.__name__
    return read


def main() -> None:
    """Read the arguments; serve, or show how."""
    parser = argparse.ArgumentParser(description="Envs over WebSockets, one for each session.")
    count, seconds = _positive(int), _positive(float)
    parser.add_argument("--serve", action="store_true", help="serve until Ctrl-C, instead of the demo")
    parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id (default: CartPole-v1)")
    parser.add_argument("--num-envs", type=count, default=16, help="how many envs (default: 16)")
    parser.add_argument("--num-processes", type=count, help="in how many processes (default: one a core)")
    parser.add_argument(
        "--idle-seconds", type=seconds, default=60.0, help="how long a client may be silent (default: 60)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to serve (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="where to serve; 0 for any (default: 8000)")
    parser.add_argument("--seconds", type=seconds, default=3.0, help="length of the demo (default: 3)")
    options = parser.parse_args()
    if options.env not in gym.registry:
        parser.error(f"Gymnasium does not know the id {options.env!r}")
    if options.num_processes is not None and options.num_processes > options.num_envs:
        parser.error(f"{options.num_processes} processes are more than {options.num_envs} envs")
    logging.getLogger("uvicorn.error").addFilter(_no_refusal)
    app = create_app(
        options.env, options.num_envs, idle_seconds=options.idle_seconds, num_processes=options.num_processes
    )
    if options.serve:
        uvicorn.run(app, host=options.host, port=options.port)
    else:
        asyncio.run(demo(app, options))


if __name__ == "__main__":
    main()
