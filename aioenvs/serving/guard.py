"""Who may speak to the server: the token, hosts and origins, and how much at once. An ASGI app around another."""

from __future__ import annotations

import base64
import hmac
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["COOKIE", "Guard"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

COOKIE = "aioenvs_token"
PUBLIC = frozenset({"/health"})


class Guard:
    """Lets through what may pass.

    The token comes as `Authorization: Bearer`, as the password of `Authorization: Basic`, which clients make of
    `ws://user:token@host`, or in the cookie that `/?token=...` sets for a browser.

    Args:
        app: What it guards.
        token: What all requests but that for the health must have; None if anybody may come.
        origins: Pages of other places that may speak to the server, such as `https://lab.example`.
        any_host: Whether the server may go by any name, though there is no token. Else it goes by addresses and
            `localhost` only, so that no page can reach it by a name of its own.
        max_connections: How many one address may have at a time.
    """

    def __init__(
        self, app: App, *, token: str | None, origins: Sequence[str], any_host: bool, max_connections: int
    ) -> None:
        self.sessions: Any = None  # those of the app
        self._app = app
        self._token = None if token is None else token.encode()
        self._origins = {origin.rstrip("/").lower() for origin in origins}
        self._any_host = any_host or token is not None
        self._max_connections = max_connections
        self._connections: Counter[str] = Counter()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        address = (scope.get("client") or ("", 0))[0]
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if refusal := self._refusal(scope, headers):
            return await _refuse(scope, receive, send, *refusal)
        if self._connections[address] >= self._max_connections:
            words = f"at most {self._max_connections} connections at a time from one address"
            return await _refuse(scope, receive, send, 429, words)
        if self._token is not None and scope["path"] == "/" and "token" in _query(scope):
            return await self._welcome(scope, send)
        self._connections[address] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._connections[address] -= 1
            if not self._connections[address]:
                del self._connections[address]

    def _refusal(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "").lower()
        if not self._any_host and not self._own(host):
            return 403, "this server goes by its address or localhost only; --allow-origin tells it of another name"
        origin = headers.get("origin")
        if origin is not None and not self._welcome_origin(origin.lower(), host):
            return 403, "pages of this origin may not speak to the server; --allow-origin lets them"
        if scope["path"] not in PUBLIC and not self._known(scope, headers):
            return 401, "a token is needed: Authorization: Bearer ..., or ws://user:token@host"
        return None

    def _own(self, host: str) -> bool:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or _is_address(name) or name in {urlsplit(each).hostname for each in self._origins}

    def _welcome_origin(self, origin: str, host: str) -> bool:
        return origin in self._origins or urlsplit(origin).netloc == host

    def _known(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
        if self._token is None:
            return True
        kind, _, value = headers.get("authorization", "").partition(" ")
        given = [value] if kind.lower() == "bearer" else []
        if kind.lower() == "basic":
            given.append(_password(value))
        for part in headers.get("cookie", "").split(";"):
            name, _, content = part.strip().partition("=")
            if name == COOKIE:
                given.append(_decoded(content))
        if scope["type"] == "http" and scope["path"] == "/":
            given += _query(scope).get("token", [])
        return any(hmac.compare_digest(each.encode(), self._token) for each in given)

    async def _welcome(self, scope: Mapping[str, Any], send: Send) -> None:
        """Give a browser the token as a cookie, and have it forget the address that it stood in."""
        assert self._token is not None
        value = base64.urlsafe_b64encode(self._token).decode()
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        cookie = f"{COOKIE}={value}; HttpOnly; SameSite=Strict; Path=/{secure}"
        where = [(b"location", (scope.get("root_path", "") + "/").encode()), (b"set-cookie", cookie.encode())]
        await send({"type": "http.response.start", "status": 303, "headers": where})
        await send({"type": "http.response.body", "body": b""})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _query(scope: Mapping[str, Any]) -> dict[str, list[str]]:
    return parse_qs(scope.get("query_string", b"").decode("latin-1"))


def _password(value: str) -> str:
    try:
        return base64.b64decode(value).decode().partition(":")[2]
    except ValueError:
        return ""


def _decoded(value: str) -> str:
    try:
        return base64.urlsafe_b64decode(value.encode()).decode()
    except ValueError:
        return ""


async def _refuse(scope: Mapping[str, Any], receive: Receive, send: Send, status: int, words: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()  # the handshake
        if "websocket.http.response" not in scope.get("extensions", {}):
            return await send({"type": "websocket.close", "code": 1008})
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": words.encode()})
