"""The server: an ASGI app that speaks the OpenEnv protocol, over WebSockets and HTTP, with a page and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute

from aioenvs.serving.codec import MessageError, dumps, loads
from aioenvs.serving.connection import Connection, Limits, explained, reset_arguments
from aioenvs.serving.guard import Guard
from aioenvs.serving.live import Live
from aioenvs.serving.sessions import CapacityError, EnvFailedError, Session, SessionEndedError, Sessions

__all__ = ["create_app"]

logger = logging.getLogger("aioenvs.serving")
PAGE = Path(__file__).with_name("page")
STATE_SCHEMA = {
    "type": "object",
    "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}},
}
# Nothing of the page comes from elsewhere, and no other page may show it in a frame.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def create_app(
    make_env: Any,
    num_envs: int | None = None,
    *,
    token: str | None = None,
    allow_origins: Sequence[str] = (),
    any_host: bool = False,
    max_connections: int = 1024,
    limits: Limits | None = None,
    **options: Any,
) -> Guard:
    """Return an ASGI app whose envs live as long as it does.

    Args:
        make_env: What makes an env, or `Sessions` that are there already, which are whose they are.
        num_envs: How many envs.
        token: What clients have to show; None if anybody may come.
        allow_origins: Pages of other places that may speak to it.
        any_host: See `Guard`.
        max_connections: How many one address may have at a time.
        limits: What one client may ask for.
        **options: Of `Sessions`.
    """
    if isinstance(make_env, Sessions):
        if num_envs is not None or options:
            raise TypeError("sessions that are there already take no options of new ones")
        sessions, owned = make_env, False
    elif num_envs is None:
        raise TypeError("expected num_envs, the number of envs")
    else:
        sessions, owned = Sessions(make_env, num_envs, **options), True
    served = _Served(sessions, limits or Limits())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with sessions if owned else contextlib.nullcontext():
            yield

    app = Starlette(routes=served.routes(), lifespan=lifespan)
    app.state.sessions = sessions
    guard = Guard(app, token=token, origins=allow_origins, any_host=any_host, max_connections=max_connections)
    guard.sessions = sessions
    return guard


class _Served:
    """The endpoints."""

    def __init__(self, sessions: Sessions, limits: Limits) -> None:
        self._sessions, self._limits = sessions, limits
        self._live = Live(sessions)
        self._by_id: dict[str, Session] = {}

    def routes(self) -> list[Any]:
        """Return all of them."""
        files = [Route(f"/{name}", self._file(name)) for name in ("page.js", "page.css")]
        return [
            Route("/", self._file("page.html")),
            *files,
            Route("/live", self._stream),
            Route("/metrics", self._metrics),
            Route("/sessions/{number:int}/picture", self._picture),
            Route("/sessions/{number:int}", self._end, methods=["DELETE"]),
            Route("/health", self._health),
            Route("/metadata", self._metadata),
            Route("/schema", self._schema),
            Route("/reset", self._reset, methods=["POST"]),
            Route("/step", self._step, methods=["POST"]),
            Route("/state", self._state),
            Route("/close", self._close, methods=["POST"]),
            WebSocketRoute("/ws", _Socket(self._sessions, self._limits)),
        ]

    # -- the protocol over HTTP -----------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    async def _metadata(self, _: Request) -> Response:
        from aioenvs import __version__

        about = self._sessions.about
        value = {
            "name": about["name"],
            "description": about["description"],
            "version": __version__,
            "num_envs": self._sessions.capacity,
            "spaces": about["spaces"],
        }
        return Response(dumps(value, "base64"), media_type="application/json")

    async def _schema(self, _: Request) -> Response:
        return JSONResponse({**self._sessions.about["schemas"], "state": STATE_SCHEMA})

    async def _reset(self, request: Request) -> Response:
        try:
            data = await self._body(request)
            arguments = reset_arguments(data)
            if data.get("session_id") is None:
                name = secrets.token_urlsafe(16)
                client = f"{request.client.host if request.client else '?'} (HTTP)"
                session = await self._sessions.acquire(client=client, wait=self._limits.wait)
                self._by_id[name] = session
                session.on_end = lambda: self._by_id.pop(name, None)
            else:
                name, session = self._named(data)
            return _with_name((await session.ask("reset", arguments, "json")).value, name)
        except Exception as error:
            return _refused(error)

    async def _step(self, request: Request) -> Response:
        try:
            data = await self._body(request)
            name, session = self._named(data)
            return _with_name((await session.ask("step", data.get("action"), "json")).value, name)
        except Exception as error:
            return _refused(error)

    async def _state(self, request: Request) -> Response:
        try:
            return JSONResponse(self._named(request.query_params)[1].state)
        except Exception as error:
            return _refused(error)

    async def _close(self, request: Request) -> Response:
        try:
            name, session = self._named(await self._body(request))
            session.end("left")
            del self._by_id[name]
            return JSONResponse({})
        except Exception as error:
            return _refused(error)

    def _named(self, data: Mapping[str, Any]) -> tuple[str, Session]:
        name = data.get("session_id")
        session = self._by_id.get(name) if isinstance(name, str) else None
        if session is None or session.ended is not None or not isinstance(name, str):
            raise MessageError('there is no session of this "session_id"; a reset without one begins one')
        return name, session

    async def _body(self, request: Request) -> dict[str, Any]:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._limits.message_bytes:
                raise TooBigError(f"a message may have {self._limits.message_bytes} bytes")
        data = loads(bytes(body)) if body else {}
        if not isinstance(data, dict):
            raise MessageError("expected a dict")
        return data

    # -- the page ---------------------------------------------------------------------------------------

    def _file(self, name: str) -> Any:
        async def respond(_: Request) -> Response:
            return FileResponse(PAGE / name, headers=PAGE_HEADERS)

        return respond

    async def _stream(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            while not await request.is_disconnected():
                yield b"data: " + json.dumps(self._live.now(), separators=(",", ":")).encode() + b"\n\n"
                await asyncio.sleep(1.0)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _metrics(self, _: Request) -> Response:
        text, kind = self._live.metrics()
        return Response(text, media_type=kind)

    async def _picture(self, request: Request) -> Response:
        session = self._sessions.find(request.path_params["number"])
        if session is None or not self._sessions.about["renders"]:
            return JSONResponse({"message": "there is no picture"}, 404)
        try:
            picture = await self._live.picture(session)
        except Exception as error:
            return _refused(error)
        return Response(picture, media_type="image/png", headers={"cache-control": "no-store"})

    async def _end(self, request: Request) -> Response:
        session = self._sessions.find(request.path_params["number"])
        if session is None:
            return JSONResponse({"message": "there is no such session"}, 404)
        session.end("ended")
        return JSONResponse({})


class TooBigError(MessageError):
    """More bytes than a message may have."""


class _Socket:
    """The WebSocket, as an ASGI app: what Starlette's own does for each message would double its cost."""

    def __init__(self, sessions: Sessions, limits: Limits) -> None:
        self._sessions, self._limits = sessions, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await Connection(self._sessions, self._limits, scope, receive, send).serve()
        except OSError:
            pass  # the client has left
        except Exception:
            logger.exception("a connection failed")


def _with_name(value: bytes, name: str) -> Response:
    body = value[:-1] + b',"session_id":' + json.dumps(name).encode() + b"}"
    return Response(body, media_type="application/json")


def _refused(error: Exception) -> Response:
    status = 500
    match error:
        case TooBigError():
            status = 413
        case MessageError():
            status = 422
        case CapacityError():
            return JSONResponse(explained(error), 503, {"retry-after": f"{error.retry_after:.0f}"})
        case SessionEndedError():
            status = 410
        case EnvFailedError():
            status = 500
    told = explained(error)
    if told["code"] == "SERVER_ERROR":
        logger.error("a request failed", exc_info=error)
    return JSONResponse(told, status)
