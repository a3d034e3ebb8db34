"""Envs that are busy: with an answer that is late, or with somebody else's request."""

import asyncio
from typing import Any

import pytest
from faces import FACES, Face, acting, masked, observed
from failing_envs import CountingEnv, Gate, numbered

from aioenvs.errors import ConcurrencyError, WorkerTimeoutError

overlapping = pytest.mark.parametrize(
    "face", [face for face in FACES if face.name != "async-serial"], ids=lambda face: face.name
)


def gated(gate: Gate, at: tuple[int, int] = (1, 2)) -> Any:
    """Four envs, of which env 1 waits at the gate."""
    return numbered(4, {1: {"fault": gate.wait, "at": at}})


def rows(episode: int, step: int, *totals: int) -> list[list[int]]:
    return [[env, episode, step, total] for env, total in enumerate(totals)]


async def test_step_timeout_names_the_late_env(process_face: Face, gate: Gate) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=gated(gate), step_timeout=0.3) as env:
        pids = env.pids
        await face.call(env.reset)
        await face.call(env.step, acting([1, 2, 3, 4]))
        for action in (10, 1000 - 1):  # the second one waits for the first and is never sent
            with pytest.raises(WorkerTimeoutError, match=r"step_timeout") as caught:
                await face.call(env.step, acting([action] * 4))
            assert isinstance(caught.value, TimeoutError)
            assert list(caught.value.env_index) == ([1] if face.processes is None else [0, 1])
            assert caught.value.pid == pids[1 if face.processes is None else 0]
        gate.open()
        td = await face.call(env.step, acting([100, 200, 300, 400]))
        assert observed(td) == rows(1, 3, 111, 212, 313, 414)
        assert env.pids == pids


@overlapping
async def test_two_steps_at_once(face: Face, gate: Gate) -> None:
    kwargs = gated(gate, at=(1, 1))
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs) as env:
        await face.call(env.reset)
        first = asyncio.create_task(face.call(env.step, acting([1, 2, 3, 4])))
        await gate.arrival()
        for command, argument in (("step", acting([10] * 4)), ("reset", None), ("set_seed", 1)):
            with pytest.raises(ConcurrencyError) as caught:
                await face.call(getattr(env, command), argument)
            if face.is_async or face.name == "serial":  # the others have a loop of their own, which is busy
                assert f"{command} was asked of" in str(caught.value)
                assert "step is still pending" in str(caught.value)
        gate.open()
        assert observed(await first) == rows(1, 1, 1, 2, 3, 4)
        assert observed(await face.call(env.step, acting([0] * 4))) == rows(1, 2, 1, 2, 3, 4)


async def test_other_envs_may_be_stepped_at_the_same_time(async_face: Face, gate: Gate) -> None:
    async with async_face.open(4, CountingEnv, create_env_kwargs=gated(gate, at=(1, 1))) as env:
        await env.reset()
        first = asyncio.create_task(env.step(acting([1, 2, 3, 4], only=[1])))
        await gate.arrival()
        td = await env.step(acting([10, 20, 30, 40], only=[2, 3]))
        assert observed(td)[2:] == [[2, 1, 1, 30], [3, 1, 1, 40]]
        sibling = asyncio.create_task(env.step(acting([100, 200, 300, 400], only=[0])))
        await asyncio.sleep(0)
        assert not sibling.done()
        with pytest.raises(ConcurrencyError, match="env 1"):
            await env.reset(masked("_reset", 4, [1, 2]))
        gate.open()
        assert observed(await first)[1] == [1, 1, 1, 2]
        assert observed(await sibling)[0] == [0, 1, 1, 100]
