"""Actions that are on a device which is made up: fetched without anybody being blocked, and before anybody is asked."""

import asyncio

import pytest
import torch
from device_backends import FakeBackend, counting, waited_for
from faces import FACES, Face, acting, in_thread, observed
from tensordict import TensorDict, TensorDictBase

from aioenvs.errors import (
    SpecMismatchError,
)

ASYNC_FACES = [face for face in FACES if face.is_async]
over_async_faces = pytest.mark.parametrize("face", ASYNC_FACES, ids=lambda face: face.name)


def totals(td: TensorDictBase) -> list[list[int]]:
    """How many steps each env took, and the sum of its actions."""
    return [row[2:] for row in observed(td)]


# -- steps ----------------------------------------------------------------------------------------------


@over_async_faces
async def test_actions_are_awaited(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.held = True
        td = acting([3, 4])
        backend.hold(td["action"])
        task = asyncio.ensure_future(env.step(td))
        copy = await in_thread(backend.next_held)
        assert copy.kind == "out"
        await waited_for(copy)
        assert not task.done()
        backend.release()
        assert [row[3] for row in observed(await task)] == [3, 4]


@over_async_faces
async def test_who_is_cancelled_while_actions_come_has_asked_nobody(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        backend.held = True
        td = acting([3, 4])
        backend.hold(td["action"])
        task = asyncio.ensure_future(env.step(td))
        await waited_for(await in_thread(backend.next_held))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        backend.release()
        assert [row[2:] for row in observed(await env.step(acting([5, 6])))] == [[1, 5], [1, 6]]


@over_async_faces
async def test_actions_that_do_not_fit_ask_nobody(face: Face, backend: FakeBackend) -> None:
    async with counting(face, backend) as env:
        for wrong in (torch.tensor([1, 5000]), torch.tensor([1.0, 2.0]), torch.tensor([1])):
            td = TensorDict({"action": torch.zeros(2)}, [2])
            td._tensordict["action"] = backend.hold(wrong)
            with pytest.raises(SpecMismatchError):
                await env.step(td)
        assert totals(await env.step(acting([0, 0]))) == [[1, 0], [1, 0]]
