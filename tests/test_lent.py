"""Results that are lent rather than copied: how long they stand, and that nothing else notices."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faces import EVERY_FACE, Face, acting, masked, observed
from failing_envs import CountingEnv, Gate, numbered, raise_value_error
from tensordict import TensorDictBase
from test_death import kill_and_reap
from test_restarts import RESTART, kill_and_wait

from aioenvs import AsyncParallelEnv, AsyncSerialEnv
from aioenvs.engine.pools import restart_policy as restarts
from aioenvs.errors import WorkerDiedError
from aioenvs.testing import CountingEnv as TorchCountingEnv
from aioenvs.testing import DynamicShapeEnv, NestedCountingEnv

over_every_face = pytest.mark.parametrize("face", EVERY_FACE, ids=lambda face: face.name)


def pointer(td: TensorDictBase) -> int:
    return int(td["observation"].untyped_storage().data_ptr())


async def lent(face: Face, env: Any, actions: list[int]) -> tuple[TensorDictBase, TensorDictBase]:
    result: tuple[TensorDictBase, TensorDictBase] = await face.call(
        env.step_and_maybe_reset, acting(actions), copy=False
    )
    return result


async def copied(face: Face, env: Any, actions: list[int]) -> tuple[TensorDictBase, TensorDictBase]:
    result: tuple[TensorDictBase, TensorDictBase] = await face.call(env.step_and_maybe_reset, acting(actions))
    return result


def steps(td: TensorDictBase) -> list[int]:
    return [row[2] for row in observed(td)]


@over_every_face
async def test_what_is_lent_stands_for_one_step_and_is_gone_after_the_next(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        first, _ = await lent(face, env, [1, 2, 3])
        assert observed(first) == [[0, 1, 1, 1], [1, 1, 1, 2], [2, 1, 1, 3]]
        second, _ = await lent(face, env, [1, 2, 3])
        assert steps(first) == [1, 1, 1]
        assert steps(second) == [2, 2, 2]
        third, _ = await lent(face, env, [1, 2, 3])
        assert steps(first) == steps(third) == [3, 3, 3]
        assert steps(second) == [2, 2, 2]
        assert pointer(first["next"]) == pointer(third["next"])
        assert first["next", "reward"].flatten().tolist() == [3.0] * 3


@over_every_face
async def test_the_values_are_those_of_copies(face: Face) -> None:
    actions = [[env + step for env in range(4)] for step in range(12)]
    rows: dict[bool, list[Any]] = {}
    for copy in (True, False):
        async with face.open(
            4, CountingEnv, create_env_kwargs=numbered(4, {1: {"length": 3}, 2: {"length": 2}})
        ) as env:
            await face.call(env.reset)
            rows[copy] = []
            for own in actions:
                td, root = await face.call(env.step_and_maybe_reset, acting(own), copy=copy)
                rows[copy].append((td["next"].clone().to_dict(), root.clone().to_dict()))
    for one, other in zip(rows[True], rows[False], strict=True):
        torch.testing.assert_close(one, other)


@over_every_face
async def test_the_root_is_lent_too_where_some_began_anew(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3, {1: {"length": 2}})) as env:
        await face.call(env.reset)
        await lent(face, env, [1, 1, 1])
        td, root = await lent(face, env, [1, 1, 1])
        assert td["next", "done"].flatten().tolist() == [False, True, False]
        assert observed(root) == [[0, 1, 2, 2], [1, 2, 0, 0], [2, 1, 2, 2]]
        assert not root["done"].any()
        await lent(face, env, [1, 1, 1])
        assert observed(root) == [[0, 1, 2, 2], [1, 2, 0, 0], [2, 1, 2, 2]]
        await lent(face, env, [1, 1, 1])
        assert observed(root)[1] == [1, 3, 0, 0]


@over_every_face
async def test_copies_between_loans_are_the_caller_s_own(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await face.call(env.reset)
        first, _ = await lent(face, env, [1, 1])
        kept, _ = await copied(face, env, [1, 1])
        assert steps(first) == [1, 1]
        more = [await copied(face, env, [1, 1]) for _ in range(3)]
        assert steps(kept) == [2, 2]
        assert [steps(td) for td, _ in more] == [[3, 3], [4, 4], [5, 5]]
        assert [steps(root) for _, root in more] == [[3, 3], [4, 4], [5, 5]]


@over_every_face
async def test_a_plain_step_lends_as_well(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await face.call(env.reset)
        first = await face.call(env.step, acting([1, 1]), copy=False)
        second = await face.call(env.step, acting([1, 1]), copy=False)
        assert (steps(first), steps(second)) == ([1, 1], [2, 2])
        await face.call(env.step, acting([1, 1]), copy=False)
        assert steps(first) == [3, 3]


@over_every_face
async def test_a_reset_is_a_command_like_a_step(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        first, _ = await lent(face, env, [1, 1, 1])
        fresh = await face.call(env.reset, masked("_reset", 3, [1]))
        assert observed(fresh) == [[0, 1, 1, 1], [1, 2, 0, 0], [2, 1, 1, 1]]
        assert steps(first) == [1, 1, 1]
        following, root = await copied(face, env, [1, 1, 1])
        assert steps(following) == steps(root) == [2, 1, 2]
        assert [steps(first)[env] for env in (0, 2)] == [1, 1]


@over_every_face
async def test_steps_of_some_keep_what_the_others_have(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        first, root = await lent(face, env, [1, 1, 1])
        td = root.update(acting([1, 1, 1], only=[0]))
        partly, _ = await face.call(env.step_and_maybe_reset, td, copy=False)
        assert steps(partly) == [2, 1, 1]
        assert partly["next", "reward"].flatten().tolist() == [2.0, 0.0, 0.0]
        assert steps(first) == [1, 1, 1]
        await face.call(env.reset, masked("_reset", 3, [2]))
        td = acting([1, 1, 1], only=[1])
        partly, root = await face.call(env.step_and_maybe_reset, td, copy=False)
        assert steps(partly) == steps(root) == [2, 2, 0]
        await face.call(env.step, acting([1, 1, 1], only=[2]))
        whole, root = await lent(face, env, [1, 1, 1])
        assert steps(whole) == steps(root) == [3, 3, 2]


@over_every_face
async def test_views_lend_each_for_itself(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4)) as env:
        await face.call(env.reset)
        view = env[1:3]
        first, _ = await lent(face, view, [1, 1])
        second, _ = await lent(face, view, [1, 1])
        assert (steps(first), steps(second)) == ([1, 1], [2, 2])
        whole, root = await copied(face, env, [1, 1, 1, 1])
        assert steps(whole) == steps(root) == [1, 3, 3, 1]
        assert steps(second) == [2, 2]
        apart, _ = await face.call(env[[3, 0]].step_and_maybe_reset, acting([1, 1]), copy=False)
        assert [row[:3] for row in observed(apart)] == [[3, 1, 2], [0, 1, 2]]
        await lent(face, env[[3, 0]], [1, 1])
        assert steps(apart) == [2, 2]  # a copy


@over_every_face
async def test_a_batch_in_different_halves_comes_as_a_copy_once(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        await lent(face, env[:2], [1, 1])
        await lent(face, env[1:2], [1])
        mixed, root = await lent(face, env, [1, 1, 1])
        assert steps(mixed) == steps(root) == [2, 3, 1]
        after, _ = await lent(face, env, [1, 1, 1])
        assert steps(mixed) == [2, 3, 1]
        assert steps(after) == [3, 4, 2]
        own = [await lent(face, env, [1, 1, 1]) for _ in range(2)]
        assert steps(after) == steps(own[1][0]) == [5, 6, 4]


@over_every_face
async def test_send_and_recv_count_as_steps(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        first, _ = await lent(face, env, [1, 1, 1])
        await face.call(env.send, acting([1, 1, 1]))
        td, root = await face.call(env.recv, 3)
        order = td["env_index"].tolist()
        assert [row[:3] for row in observed(td)] == [[env, 1, 2] for env in order]
        assert observed(td) == observed(root)
        assert steps(first) == [1, 1, 1]
        assert env.statistics().steps == (2, 2, 2)


@over_every_face
async def test_episodes_are_counted_wherever_they_end(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2, length=2)) as env:
        await face.call(env.reset)
        for _ in range(3):
            await lent(face, env, [1, 1])
        await lent(face, env[:1], [1])
        assert env.statistics().episodes == (2, 1)
        assert env.statistics().steps == (4, 3)


# -- lifetime -------------------------------------------------------------------------------------------


@over_every_face
async def test_it_can_be_looked_at_after_close(face: Face) -> None:
    env = face.make(2, CountingEnv, create_env_kwargs=numbered(2))
    await face.call(env.reset)
    first, root = await lent(face, env, [1, 2])
    await face.call(env.close)
    del env
    gc.collect()
    assert observed(first) == observed(root) == [[0, 1, 1, 1], [1, 1, 1, 2]]
    first["next", "observation"].zero_()  # it is memory still
    assert observed(root) == [[0] * 4] * 2


async def test_it_outlives_its_worker(process_face: Face) -> None:
    face = process_face
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1) as env:
        await face.call(env.reset)
        first, _ = await lent(face, env, [1, 1])
        await kill_and_reap(env.pids[0])
        with pytest.raises(WorkerDiedError):
            await lent(face, env, [1, 1])
        assert steps(first) == [1, 1]
        await face.call(env.reset)
        assert steps(first) == [1, 1]
        second, _ = await lent(face, env, [5, 5])
        assert [row[2:] for row in observed(second)] == [[1, 5], [1, 5]]
        third, _ = await lent(face, env, [5, 5])
        assert (steps(second), steps(third)) == ([1, 1], [2, 2])


async def test_a_restart_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), num_processes=1, **RESTART) as env:
        await env.reset()
        td, root = await env.step_and_maybe_reset(acting([1, 1]), copy=False)
        await kill_and_wait(env)
        lost, fresh = await env.step_and_maybe_reset(acting([1, 1]), copy=False)
        assert lost["next", "truncated"].all()
        assert steps(td) == steps(root) == steps(lost) == [1, 1]
        assert [row[1:] for row in observed(fresh)] == [[1, 0, 0]] * 2
        further, _ = await env.step_and_maybe_reset(acting([1, 1]), copy=False)
        assert steps(further) == [1, 1]
        assert not further["next", "truncated"].any()


async def test_a_loss_is_told_in_another_half_than_the_reset_was(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.0)
    kwargs = {"fault": gate.wait, "at": (1, 2)}
    async with AsyncParallelEnv(1, CountingEnv, create_env_kwargs=kwargs, num_processes=1, **RESTART) as env:
        await env.reset()
        first, _ = await env.step_and_maybe_reset(acting([1]), copy=False)
        unheard = asyncio.ensure_future(env.step_and_maybe_reset(acting([1])))
        await gate.arrival()
        await kill_and_reap(env.pids[0])
        unheard.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unheard
        lost, root = await env.step_and_maybe_reset(acting([1]))
        assert lost["next", "truncated"].all()
        assert observed(lost) == observed(first) == [[0, 1, 1, 1]]
        assert observed(root) == [[0, 1, 0, 0]]
        assert steps((await env.step_and_maybe_reset(acting([1])))[0]) == [1]


async def test_an_env_that_raised_counts_as_asked(face: Face) -> None:
    fails = {1: {"fault": raise_value_error, "at": (1, 2)}}
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2, fails)) as env:
        await face.call(env.reset)
        first, _ = await lent(face, env, [1, 1])
        with pytest.raises(ValueError, match="the reactor is hot"):
            await lent(face, env, [1, 1])
        assert steps(first) == [1, 1]
        fresh = await face.call(env.reset)
        assert steps(fresh) == [0, 0]
        assert [row[1] for row in observed(fresh)] == [2, 2]


async def test_a_cancelled_step_leaves_the_former_one_alone(async_face: Face, gate: Gate) -> None:
    waits = {1: {"fault": gate.wait, "at": (1, 2)}}
    async with async_face.open(2, CountingEnv, create_env_kwargs=numbered(2, waits)) as env:
        await env.reset()
        first, _ = await env.step_and_maybe_reset(acting([1, 1]), copy=False)
        step = asyncio.ensure_future(env.step_and_maybe_reset(acting([1, 1]), copy=False))
        await gate.arrival()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert steps(first) == [1, 1]
        gate.open()
        after, _ = await env.step_and_maybe_reset(acting([1, 1]), copy=False)
        assert steps(after) == [3, 3]


# -- other kinds of envs --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TorchCountingEnv, NestedCountingEnv], ids=lambda make: make.__name__)
@pytest.mark.parametrize("lazy", [True, None], ids=["lazy", "dense"])
async def test_envs_that_deal_in_tensordicts(make: Callable[..., Any], lazy: bool | None) -> None:
    rows: dict[bool, list[Any]] = {}
    for copy in (True, False):
        options: dict[str, Any] = {"share_individual_td": lazy, "create_env_kwargs": {"max_steps": 3}}
        async with AsyncParallelEnv(3, make, num_processes=1, **options) as env:
            torch.manual_seed(0)
            root, rows[copy] = await env.reset(), []
            for _ in range(8):
                td, root = await env.step_and_maybe_reset(env.rand_action(root), copy=copy)
                rows[copy].append((td.get("next").clone(), root.clone()))
    for one, other in zip(rows[True], rows[False], strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))


async def test_a_torch_env_lends_its_rows() -> None:
    async with AsyncParallelEnv(3, TorchCountingEnv, num_processes=1, create_env_kwargs={"max_steps": 2}) as env:
        root = await env.reset()
        first, root = await env.step_and_maybe_reset(env.rand_action(root), copy=False)
        second, root = await env.step_and_maybe_reset(env.rand_action(root), copy=False)
        assert second["next", "done"].all()
        assert not root["done"].any()
        third, _ = await env.step_and_maybe_reset(env.rand_action(root), copy=False)
        assert pointer(first["next"]) == pointer(third["next"]) != pointer(second["next"])


@pytest.mark.parametrize("cls", [AsyncParallelEnv, AsyncSerialEnv])
async def test_what_has_no_fixed_shape_is_a_copy(cls: Any) -> None:
    async with cls(2, DynamicShapeEnv) as env:
        root = await env.reset()
        first, root = await env.step_and_maybe_reset(env.rand_action(root), copy=False)
        before = [part["next", "observation"].clone() for part in first.unbind(0)]
        for _ in range(2):
            _, root = await env.step_and_maybe_reset(env.rand_action(root), copy=False)
        after = [part["next", "observation"] for part in first.unbind(0)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@over_every_face
async def test_loans_after_those_of_inference_mode_can_be_learned_from(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await face.call(env.reset)
        with torch.inference_mode():
            for _ in range(2):
                await lent(face, env, [1, 1])
        weight = torch.ones(1, requires_grad=True)
        for _ in range(2):  # each half
            td, _ = await lent(face, env, [1, 1])
            (td["next", "reward"] * weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2 * (3 + 4)]


async def test_what_is_lent_outside_of_inference_mode_is_no_inference_tensor() -> None:
    async with AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        await env.reset()
        found = []
        for inside in (True, True, False, False):  # twice each, for either half of the block
            with torch.inference_mode(inside):
                td, _ = await env.step_and_maybe_reset(acting([1, 1]), copy=False)
            found.append(td["next", "observation"].is_inference())
    assert found == [True, True, False, False]
