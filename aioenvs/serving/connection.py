"""One client's WebSocket: the messages of the OpenEnv protocol, answered in order by one session."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from aioenvs.errors import AioEnvsError, ClosedError, ConcurrencyError
from aioenvs.serving.codec import MessageError, dumps, loads
from aioenvs.serving.guard import Receive, Send
from aioenvs.serving.sessions import (
    CapacityError,
    EnvFailedError,
    Session,
    SessionEndedError,
    SessionLostError,
    Sessions,
)

__all__ = ["Connection", "Limits", "explained", "reset_arguments"]

# Codes of a WebSocket that the server closes; 1012 is "service restart".
CLOSE_CODES = {"drained": 1012, "idle": 4000, "ended": 4001, "steps": 4002, "seconds": 4003}
TOO_BIG, NOT_ALLOWED = 1009, 1008
MAX_ID = 200  # of the id of a message, in characters
SEED_LIMIT = 2**63


@dataclass(frozen=True)
class Limits:
    """Bounds on what one client can ask for.

    Attributes:
        message_bytes: The size of a message.
        in_flight: How many messages of it are read before the first of them is answered; it has to wait with others.
        wait: How long it may wait for an env, in seconds; None for as long as it takes.
    """

    message_bytes: int = 1 << 20
    in_flight: int = 16
    wait: float | None = 30.0


class Connection:
    """A client.

    Args:
        sessions: Where envs come from.
        limits: Its bounds.
        scope: Of the WebSocket, as in ASGI.
        receive: See ASGI.
        send: See ASGI.
    """

    def __init__(
        self, sessions: Sessions, limits: Limits, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        self._sessions, self._limits = sessions, limits
        self._receive, self._send = receive, send
        host, port = scope.get("client") or ("?", 0)
        self._client = f"{host}:{port}"
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        self._text_form = "base64" if query.get("arrays") == ["base64"] else "json"
        self._session: Session | None = None
        self._inbox: deque[Mapping[str, Any]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._closed = False

    async def serve(self) -> None:
        """Answer until the client leaves, or its session ends."""
        await self._receive()
        await self._send({"type": "websocket.accept"})
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                self._inbox.append(message)
                if self._working is None:
                    self._working = asyncio.create_task(self._work())
                while len(self._inbox) >= self._limits.in_flight and not self._closed:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._closed = True
            if self._session is not None:
                self._session.on_end = lambda: None
                self._session.end("left")
            tasks = [task for task in (self._working, self._closing) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        """Answer what has come."""
        try:
            while self._inbox and not self._closed:
                await self._answer(self._inbox[0])
                self._inbox.popleft()
                self._room.set()
        except OSError:
            self._closed = True  # the client has left, which the reader notices once it reads
        except BaseException:
            self._closed = True
            raise
        finally:
            self._working = None
            self._room.set()

    async def _answer(self, message: Mapping[str, Any]) -> None:
        text, binary = message.get("text"), message.get("bytes")
        form = self._text_form if text is not None else "msgpack"
        raw: Any = text if text is not None else binary
        if len(raw) > self._limits.message_bytes:
            return await self._close(TOO_BIG, f"a message may have {self._limits.message_bytes} bytes")
        number: Any = None
        try:
            request = loads(raw, binary=form == "msgpack")
            if not isinstance(request, dict) or not isinstance(request.get("type"), str):
                raise MessageError('expected {"type": "reset"|"step"|"state"|"close", "data": {...}}')
            number = request.get("id")
            if not (number is None or type(number) is int or (isinstance(number, str) and len(number) <= MAX_ID)):
                number = None
                raise MessageError(f"expected an integer or at most {MAX_ID} characters as the id")
            if request["type"] == "close":
                return await self._close(1000, "")
            kind, data = await self._result(request["type"], request.get("data"), form)
        except Exception as error:
            if isinstance(error, SessionEndedError):
                return  # the closing says why
            kind, data = "error", dumps(explained(error), form)
        await self._say(kind, data, number, form)

    async def _result(self, command: str, data: Any, form: str) -> tuple[str, bytes]:
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise MessageError('expected a dict as "data"')
        if command == "state":
            return "state", dumps(self._state(), form)
        if command == "step":
            if self._session is None:
                raise MessageError("no episode has begun; go on with a reset")
            return "observation", (await self._session.ask("step", data, form)).value
        if command == "reset":
            arguments = reset_arguments(data)
            if self._session is None:
                await self._begin()
            assert self._session is not None
            return "observation", (await self._session.ask("reset", arguments, form)).value
        raise UnknownTypeError(f"unknown message type {command[:50]!r}; expected reset, step, state or close")

    def _state(self) -> dict[str, Any]:
        return {"episode_id": None, "step_count": 0} if self._session is None else self._session.state

    async def _begin(self) -> None:
        session = await self._sessions.acquire(client=self._client, wait=self._limits.wait)
        if self._closed:
            session.end("left")
            raise asyncio.CancelledError
        self._session = session
        session.on_end = self._ended

    def _ended(self) -> None:
        """Close, since somebody else ended the session; the client may be one that never reads."""
        assert self._session is not None
        reason = self._session.ended or ""
        code = CLOSE_CODES.get(reason, NOT_ALLOWED)
        self._closing = asyncio.create_task(self._close(code, str(SessionEndedError(reason))))

    async def _close(self, code: int, reason: str) -> None:
        self._closed = True
        self._room.set()
        await self._send({"type": "websocket.close", "code": code, "reason": reason[:120]})

    async def _say(self, kind: str, data: bytes, number: Any, form: str) -> None:
        if self._closed:
            return
        if form == "msgpack":
            known = number is not None
            parts = [bytes([0x83 if known else 0x82]), _PACKED["type"], _packed(kind), _PACKED["data"], data]
            parts += [_PACKED["id"], _packed(number)] if known else []
            await self._send({"type": "websocket.send", "bytes": b"".join(parts)})
            return
        tail = "" if number is None else f',"id":{json.dumps(number)}'
        text = f'{{"type":"{kind}","data":{data.decode()}{tail}}}'
        await self._send({"type": "websocket.send", "text": text})


def _packed(value: Any) -> bytes:
    if isinstance(value, str) and value in _PACKED:
        return _PACKED[value]
    return dumps(value, "msgpack")


# What most answers are made of: short strings, which begin with a byte of 0xa0 plus their length.
_PACKED = {name: bytes([0xA0 + len(name)]) + name.encode() for name in ("type", "data", "id", "observation", "state")}


class UnknownTypeError(MessageError):
    """A message of a type that nobody knows."""


def reset_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a reset that a message has; `episode_id`, and others that no env knows, are let be.

    Raises:
        MessageError: If they make no sense.
    """
    seed, options = data.get("seed"), data.get("options")
    if seed is not None and (type(seed) is not int or not 0 <= seed < SEED_LIMIT):
        raise MessageError("expected an integer of at least 0 as the seed")
    if options is not None and not isinstance(options, dict):
        raise MessageError("expected a dict as the options")
    return {"seed": seed, "options": options}


def explained(error: Exception) -> dict[str, Any]:
    """Return what a client is told of an error: what it did wrong, or what it can do, and nothing of the server."""
    match error:
        case UnknownTypeError():
            return {"message": str(error), "code": "UNKNOWN_TYPE"}
        case MessageError():
            code = "INVALID_JSON" if str(error).startswith("expected a message in") else "VALIDATION_ERROR"
            return {"message": str(error), "code": code}
        case CapacityError():
            what = {"waiting": error.waiting, "retry_after": error.retry_after}
            return {"message": str(error), "code": "CAPACITY_REACHED", **what}
        case EnvFailedError():
            message = f"the env raised {error.kind}, which the server's log has; go on with a reset"
            return {"message": message, "code": "EXECUTION_ERROR"}
        case SessionLostError():
            return {"message": str(error), "code": "SESSION_LOST"}
        case SessionEndedError():
            return {"message": str(error), "code": "SESSION_ENDED"}
        case TimeoutError():
            message = "the env took too long; its late answer will be dropped, and the next request waits for it"
            return {"message": message, "code": "TIMEOUT"}
        case ConcurrencyError():
            return {"message": "the session does something else at this moment", "code": "BUSY"}
        case ClosedError():
            return {"message": "the server stops", "code": "STOPPING"}
        case AioEnvsError():
            return {"message": "the env is out of use for now; go on with a reset", "code": "SESSION_ERROR"}
    return {"message": "something failed that the server's log has", "code": "SERVER_ERROR"}
