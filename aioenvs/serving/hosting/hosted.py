"""Envs where they live, behind one method that answers to sessions. Workers import this module, so it is light."""

from __future__ import annotations

import inspect
import struct
import zlib
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from aioenvs.engine.adapters.agents import has_agents, refuse_turns
from aioenvs.engine.adapters.gymnasium import has_coroutines
from aioenvs.serving.codec import MessageError, dumps
from aioenvs.serving.hosting.players import Agents, Plain
from aioenvs.serving.spaces import described, json_schema

__all__ = ["Answer", "Hosted", "make_hosted"]


class Answer(NamedTuple):
    """The answer of an env to one request of a session.

    Attributes:
        kind: "done"; "refused" if it makes no sense, with the reason as value; "failed" if the env raised, with its
            error in words; "lost" if this is no longer the env that the session had.
        value: What came of it, as bytes if a form was asked for.
        reward: Of a step, summed up where there are several.
        over: Whether the episode is.
    """

    kind: str
    value: Any = None
    reward: float = 0.0
    over: bool = False


def make_hosted(factory: Any, kwargs: Mapping[str, Any]) -> Hosted:
    """Make an env for sessions.

    Args:
        factory: A callable, or what `gymnasium.make` takes.
        kwargs: Its keyword arguments.
    """
    env = factory(**kwargs) if callable(factory) else gymnasium.make(factory, **kwargs)
    if not callable(getattr(env, "reset", None)) or not callable(getattr(env, "step", None)):
        raise TypeError(f"expected an env, with methods reset and step, from {factory!r}, found {env!r}")
    if has_coroutines(env):
        return HostedCoroutines(Plain(env))
    if hasattr(env, "output_spec") and hasattr(env, "input_spec"):
        from aioenvs.serving.hosting.tensors import Tensors

        return Hosted(Tensors(env))
    if has_agents(env):
        refuse_turns(env, "what the factory made")
        return Hosted(Agents(env))
    return Hosted(Plain(env))


class Hosted:
    """An env that belongs to one session at a time. To its batch it is an env of no content.

    Args:
        player: The env proper.
    """

    observation_space = spaces.Discrete(1)
    action_space = spaces.Discrete(1)

    def __init__(self, player: Plain) -> None:
        self._player = player
        self._holder: int | None = None
        self._playing = False
        self._used = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Do nothing: a reset of the batch only puts an env in the place of one that was lost."""
        return 0, {}

    def step(self, action: Any) -> Any:
        """Do nothing."""
        return 0, 0.0, False, False, {}

    def answer(self, holder: int, command: str, data: Any, form: str | None) -> Any:
        """Return what a request comes to; see `_answer`."""
        return _at_once(self._answer(holder, command, data, form))

    async def _answer(self, holder: int, command: str, data: Any, form: str | None) -> Answer:
        """Return what a request comes to.

        Args:
            holder: The number of the session. A reset makes the env its own; any other one's step is refused.
            command: "reset", "step", "render", or "retire" at the end of a session.
            data: The arguments of the reset, or the payload of the action.
            form: How the value is to be written (see `codec`); None for as it is.
        """
        try:
            if command == "retire":
                return await self._retire()
            if command == "reset":
                self._holder = holder
            elif self._holder != holder:
                return Answer("lost")
            if command == "render":
                picture = await _settled(self._player.env.render())
                return Answer("done", png(picture) if form else picture)
            return await (self._reset(data, form) if command == "reset" else self._step(data, form))
        except MessageError as error:
            return Answer("refused", str(error))
        except Exception as error:
            self._playing = False
            return Answer("failed", (type(error).__name__, f"{type(error).__name__}: {error}"))

    async def _reset(self, data: Mapping[str, Any], form: str | None) -> Answer:
        self._playing, self._used = False, True
        observation, info = await _settled(self._player.reset(data.get("seed"), data.get("options")))
        self._playing = True
        return _written(self._observed(observation, form), None, False, False, info, form)

    async def _step(self, data: Any, form: str | None) -> Answer:
        if not self._playing:
            raise MessageError("no episode has begun, or it is over; go on with a reset")
        action = self._player.action(data, payload=form is not None)
        observation, reward, terminated, truncated, info = await _settled(self._player.step(action))
        self._playing = not (terminated or truncated)
        return _written(self._observed(observation, form), reward, terminated, truncated, info, form)

    def _observed(self, observation: Any, form: str | None) -> Any:
        return self._player.observed(observation, payload=form is not None)

    async def _retire(self) -> Answer:
        """Leave nothing of a session's episode to the next one."""
        self._holder, self._playing = None, False
        if self._used:
            self._used = False
            await _settled(self._player.reset(None, None))
        return Answer("done")

    def about(self) -> dict[str, Any]:
        """Return the description of the env."""
        player = self._player
        env = player.env
        unwrapped = getattr(env, "unwrapped", env)
        spec = getattr(env, "spec", None)
        name = getattr(spec, "id", None) or type(unwrapped).__name__
        lines = (inspect.getdoc(type(unwrapped)) or "").splitlines()
        doc = next((line for line in lines if line and not line.startswith("#")), "")
        both = {"observation": player.observation_space, "action": player.action_space}
        schemas = {}
        for key, space in both.items():
            schema = json_schema(space)
            if not isinstance(space, spaces.Dict):
                schema = {"type": "object", "properties": {key: schema}, "required": [key]}
            schemas[key] = schema
        return {
            "name": str(name),
            "description": doc,
            "concurrent": isinstance(self, HostedCoroutines),
            "renders": getattr(env, "render_mode", None) == "rgb_array",
            "spaces": {key: described(space) for key, space in both.items()},
            "schemas": schemas,
        }

    def close(self) -> Any:
        """Close the env."""
        return self._player.env.close() if hasattr(self._player.env, "close") else None


class HostedCoroutines(Hosted):
    """A `Hosted` env with coroutines, of which others run while it waits."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Do nothing."""
        return 0, {}

    async def step(self, action: Any) -> Any:
        """Do nothing."""
        return 0, 0.0, False, False, {}

    async def answer(self, holder: int, command: str, data: Any, form: str | None) -> Any:
        """Return what a request comes to; one that is cancelled leaves an env that needs a reset."""
        try:
            return await self._answer(holder, command, data, form)
        except BaseException:
            self._playing = False
            raise


async def _settled(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise TypeError("an env whose reset and step are no coroutine functions returned something to wait for")


def _written(observed: Any, reward: Any, terminated: Any, truncated: Any, info: Any, form: str | None) -> Answer:
    total = 0.0
    if reward is not None:
        total = float(sum(reward.values())) if isinstance(reward, Mapping) else float(np.sum(reward))
        if not isinstance(reward, Mapping) and np.ndim(reward) == 0:
            reward = total
    over = bool(terminated) or bool(truncated)
    if form is None:
        return Answer("done", (observed, reward, bool(terminated), bool(truncated), info), total, over)
    value = {"observation": observed, "reward": reward, "done": over}
    if reward is not None:
        value |= {"terminated": bool(terminated), "truncated": bool(truncated)}
    if info:
        value["info"] = info
    return Answer("done", dumps(value, form), total, over)


def png(picture: Any) -> bytes:
    """Return a picture, `(height, width, 3)` of bytes, as a PNG file.

    Raises:
        MessageError: If it is none.
    """
    pixels = np.asarray(picture)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise MessageError("the env renders no pictures; it needs render_mode='rgb_array'")
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with the number of its filter
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
