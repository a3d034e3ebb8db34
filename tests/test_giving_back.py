"""After close the block is gone with the last result that looks into it, not when the garbage collector comes by."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from failing_envs import CountingEnv

from aioenvs import AsyncParallelEnv, AsyncSerialEnv
from aioenvs.engine import memory


class Map(mmap.mmap):
    """One that can be referred to weakly."""


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet[Any]]:
    """The blocks that are there."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()

    def make(*args: Any, **kwargs: Any) -> Map:
        new = Map(*args, **kwargs)
        made.add(new)
        return new

    monkeypatch.setattr(memory.mmap, "mmap", make)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


@pytest.mark.parametrize(
    "options", [{"num_processes": 1}, {"backend": "thread"}, None], ids=["process", "thread", "serial"]
)
async def test_what_is_lent_is_the_last_to_go(options: Any, maps: weakref.WeakSet[Any]) -> None:
    env = AsyncSerialEnv(2, CountingEnv) if options is None else AsyncParallelEnv(2, CountingEnv, **options)
    td = await env.reset()
    await env[0:1].reset()
    td, root = await env.step_and_maybe_reset(env.rand_action(td), copy=False)
    assert len(maps) == 1
    await env.close()
    assert len(maps) == 1
    assert td["next", "observation"].shape == (2, 4)
    del td, root
    assert not maps


async def test_steps_that_nobody_receives_keep_nothing(maps: weakref.WeakSet[Any]) -> None:
    env = AsyncParallelEnv(2, CountingEnv, num_processes=1)
    env.send(env.rand_action(await env.reset()))
    await env.close()
    assert not maps
