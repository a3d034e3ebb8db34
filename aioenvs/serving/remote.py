"""Envs of a server elsewhere, as coroutine envs for `aioenvs.AsyncParallelEnv` and other batches. Free of torch."""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
import json
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from gymnasium import Space

from aioenvs.anything import Anything
from aioenvs.errors import AioEnvsError
from aioenvs.serving.codec import dumps, loads, restored
from aioenvs.serving.spaces import payload_of, rebuilt, unwrapped

__all__ = ["RemoteEnv", "ServerError"]

CONNECT_SECONDS = 20.0


class ServerError(AioEnvsError):
    """The server refused something, or its env failed.

    Attributes:
        code: What it was, in a word; see the protocol.
        retry_after: Seconds after which it may be tried again; None if that is not the point.
    """

    def __init__(self, message: str, code: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.args, self.code, self.retry_after)


class RemoteEnv:
    """A factory of envs that are a server's: each call makes one, with a connection and so a session of its own.

    Args:
        url: Of the server, such as `ws://host:8000`; `aioenvs serve`, or any that speaks the OpenEnv protocol. Of one
            that says nothing of its spaces, actions and observations are dicts in the space `Anything`.
        token: What the server wants to be shown, if it does.
        truncates: Whether a step of an env that was lost, with its connection or on the server, truncates the episode,
            with the last observation again and no reward; else it raises. The reset after that connects again.
        wait: How long a reset tries to get a session, in seconds.

    >>> make = RemoteEnv("ws://127.0.0.1:8000")
    >>> make
    RemoteEnv('ws://127.0.0.1:8000')
    """

    def __init__(self, url: str, token: str | None = None, *, truncates: bool = False, wait: float = 60.0) -> None:
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        if scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError(f"expected the address of a server, such as ws://host:8000, found {url!r}")
        path = parts.path.rstrip("/").removesuffix("/ws")
        self.url = urlunsplit((scheme, parts.netloc, path, "", ""))
        self.token, self.truncates, self.wait = token, truncates, wait

    def __repr__(self) -> str:
        return f"RemoteEnv({self.url!r})"

    def __call__(self) -> RemoteSession:
        """Make an env. It connects when it is reset."""
        observation_space, action_space = _spaces(self.url, self.token)
        return RemoteSession(self, observation_space, action_space)


class RemoteSession:
    """An env of a server's, with Gymnasium's signatures as coroutines. A `RemoteEnv` makes it.

    Args:
        made_by: What says where it is.
        observation_space: What the server says of its observations; None if it says nothing.
        action_space: The same of actions.
    """

    metadata: Mapping[str, Any] = {}
    render_mode = None

    def __init__(
        self, made_by: RemoteEnv, observation_space: Space[Any] | None, action_space: Space[Any] | None
    ) -> None:
        self._made_by = made_by
        self._speaks_ours = observation_space is not None
        self.observation_space: Space[Any] = Anything() if observation_space is None else observation_space
        self.action_space: Space[Any] = Anything() if action_space is None else action_space
        self._socket: Any = None
        self._numbers = itertools.count()
        self._last: Any = None

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; connect if need be, and wait until there is an env.

        Raises:
            ServerError: If there is none in time, or it cannot begin.
            ConnectionError: If the server cannot be reached.
        """
        given = {"seed": seed, "options": options}
        data = {name: value for name, value in given.items() if value is not None}
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._made_by.wait, 0.1
        while True:
            try:
                answer = await self._request("reset", data)
                break
            except (ServerError, ConnectionError) as error:
                if isinstance(error, ServerError) and error.retry_after is None and error.code != "SESSION_LOST":
                    raise
                if loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
        return self._observed(answer), answer.get("info") or {}

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step. One that is cancelled, or is late, shifts nothing: its answer is dropped when it comes.

        Raises:
            ServerError: If the server refuses it, or its env failed.
            ConnectionError: If the connection is lost; the next reset makes another one.
        """
        payload = payload_of(self.action_space, action, "action") if self._speaks_ours else action
        try:
            if self._socket is None:
                raise ConnectionError(f"there is no connection to {self._made_by.url}; go on with a reset")
            answer = await self._request("step", payload)
        except (ConnectionError, ServerError) as error:
            lost = isinstance(error, ConnectionError) or error.code in ("SESSION_LOST", "SESSION_ENDED")
            if not lost or not self._made_by.truncates or self._last is None:
                raise
            return self._last, 0.0, False, True, {"lost": str(error)}
        done = bool(answer.get("done"))
        truncated = bool(answer.get("truncated", False))
        terminated = bool(answer.get("terminated", done and not truncated))
        reward = float(answer.get("reward") or 0.0)
        return self._observed(answer), reward, terminated, truncated, answer.get("info") or {}

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    def _observed(self, answer: Mapping[str, Any]) -> Any:
        observation = answer.get("observation")
        if self._speaks_ours:
            observation = unwrapped(self.observation_space, observation, "observation")
        self._last = observation
        return observation

    async def _request(self, command: str, data: Any) -> Any:
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            self._socket = await self._connected()
        socket = self._socket
        try:
            return await (self._exchange if self._speaks_ours else self._exchange_plainly)(socket, command, data)
        except ConnectionClosed as error:
            self._drop(socket)
            why = f": {error.rcvd.reason}" if error.rcvd is not None and error.rcvd.reason else ""
            raise ConnectionError(f"the connection to {self._made_by.url} was lost{why}") from error

    async def _exchange(self, socket: Any, command: str, data: Any) -> Any:
        number = next(self._numbers)
        await socket.send(dumps({"type": command, "data": data, "id": number}, "msgpack"))
        while True:  # answers to requests that nobody waits for any more come first
            answer = loads(await socket.recv(), binary=True)
            if answer.get("id") == number:
                return _data_of(answer, restore=True)

    async def _exchange_plainly(self, socket: Any, command: str, data: Any) -> Any:
        """Ask a server that knows no ids; a connection on which an answer is outstanding is of no use any more."""
        try:
            await socket.send(dumps({"type": command, "data": data}, "json").decode())
            answer = loads(await socket.recv())
        except BaseException:
            self._drop(socket)
            raise
        return _data_of(answer, restore=False)

    def _drop(self, socket: Any) -> None:
        if self._socket is socket:
            self._socket = None
        socket.transport.abort()

    async def _connected(self) -> Any:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake

        token, url = self._made_by.token, self._made_by.url
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            return await connect(
                f"{url}/ws",
                additional_headers=headers,
                compression=None,
                max_size=None,
                open_timeout=CONNECT_SECONDS,
                proxy=None,
            )
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise ConnectionError(f"cannot connect to {url}: {error}") from error


def _data_of(answer: Any, *, restore: bool) -> Any:
    data = answer.get("data") or {}
    if answer.get("type") == "error":
        raise ServerError(str(data.get("message")), str(data.get("code", "")), data.get("retry_after"))
    return restored(data) if restore else data


@functools.lru_cache(maxsize=16)
def _spaces(url: str, token: str | None) -> tuple[Space[Any] | None, Space[Any] | None]:
    """The spaces of a server; asked once a process, as many envs may be made in it."""
    parts = urlsplit(url)
    netloc = parts.netloc.rpartition("@")[2]
    address = urlunsplit(("https" if parts.scheme == "wss" else "http", netloc, f"{parts.path}/metadata", "", ""))
    request = urllib.request.Request(address)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    elif parts.password is not None:
        both = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
        request.add_header("Authorization", f"Basic {both}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=CONNECT_SECONDS) as answer:
            described = json.loads(answer.read(1 << 26)).get("spaces")
    except (OSError, ValueError) as error:
        raise ConnectionError(f"{address} cannot be read: {error}") from error
    if not isinstance(described, dict):
        return None, None
    described = restored(described)
    return rebuilt(described.get("observation")), rebuilt(described.get("action"))
