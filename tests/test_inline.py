"""Envs in the caller's process, between the moment a command has them and the moment it asks them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from failing_envs import CountingEnv

from aioenvs import AsyncSerialEnv, SerialEnv
from aioenvs.errors import ClosedError

COMMANDS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda env, td: env.step(env.rand_action(td)),
    "step_and_maybe_reset": lambda env, td: env.step_and_maybe_reset(env.rand_action(td)),
    "reset": lambda env, td: env.reset(),
    "call": lambda env, td: env.call("reset"),
    "get_attr": lambda env, td: env.get_attr("steps"),
    "set_seed": lambda env, td: env.set_seed(1),
}


@pytest.mark.parametrize("name", COMMANDS)
async def test_a_command_that_had_not_begun_when_the_envs_were_closed_says_so(name: str) -> None:
    env = AsyncSerialEnv(2, CountingEnv)
    td = await env.reset()
    task = asyncio.ensure_future(COMMANDS[name](env, td))
    await asyncio.sleep(0)
    await env.close()
    with pytest.raises(ClosedError, match="envs 0-1 were closed while a request waited for them"):
        await task
    assert (await env.reset())["observation"][:, 1].tolist() == [1, 1]  # new envs
    await env.close()


class Interrupted(list[int]):
    """Somebody presses a key right behind the first entry."""

    def append(self, item: int) -> None:
        super().append(item)
        raise KeyboardInterrupt


def test_an_interrupt_before_a_command_begins_keeps_nobody_from_closing() -> None:
    env = SerialEnv(2, CountingEnv)
    td = env.rand_action(env.reset())
    (host,) = env._env._running.pool.hosts.values()
    host._at_work = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        env.step(td)
    host._at_work = []
    assert env.step(env.rand_action(env.reset()))["next", "observation"].shape == (2, 4)
    host._at_work = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        env.step(td)
    env.close()
    assert env.is_closed


async def test_a_command_that_is_cancelled_before_it_begins_gives_the_envs_up() -> None:
    async with AsyncSerialEnv(1, CountingEnv) as env:
        td = env.rand_action(await env.reset())
        task = asyncio.ensure_future(env.step(td))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await env.step(td))["next", "observation"][0, 2] == 1
