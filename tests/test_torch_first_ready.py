"""`send` and `recv` of torch envs: what each env answers is what it would answer alone."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch_batches import differing, faces, stacked
from torch_faces import GRAD_TORCH_FACES, Driver, TorchFace

from aioenvs.envs import EnvBase
from aioenvs.errors import SpecMismatchError
from aioenvs.testing import (
    CountingEnv,
    DifferentiableEnv,
    DynamicShapeEnv,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    NonTensorEnv,
    StateEnv,
)

Make = Callable[[], EnvBase]

over_faces = pytest.mark.parametrize(
    "face", faces("serial", "async-serial", "thread", "async-thread", "async-packed", torchrl=False)
)
over_some_faces = pytest.mark.parametrize("face", faces("serial", "async-serial", "thread", "packed", torchrl=False))
BATCHES: dict[str, list[Make]] = {
    "alike": [functools.partial(CountingEnv, 2 + n, start=10 * n, adds_up=True) for n in range(4)],
    "nested keys": [functools.partial(NestedCountingEnv, 2 + n) for n in range(3)],
    "several keys": [functools.partial(MultiKeyCountingEnv, (4, 3, 2)) for _ in range(3)],
    "batches": [functools.partial(CountingEnv, 2 + n, batch_size=(2,), adds_up=True) for n in range(3)],
    "states": [functools.partial(StateEnv, 3) for _ in range(3)],
    "other keys": [functools.partial(CountingEnv, 2), functools.partial(CountingEnv, 3, adds_up=True)] * 2,
    "other shapes": [functools.partial(NestedCountingEnv, 2, nested_dim=n) for n in (1, 3, 1)],
    "agents": [functools.partial(HeterogeneousCountingEnv, 2 + n) for n in range(3)],
    "other agents": [functools.partial(HeterogeneousCountingEnv, 2, num_agents=n) for n in (2, 3)],
    "objects": [functools.partial(NonTensorEnv, 2 + n) for n in range(3)],
    "objects or not": [functools.partial(NonTensorEnv, 2), functools.partial(CountingEnv, 3)],
    "batches of objects": [functools.partial(NonTensorEnv, 2, batch_size=(2,)) for _ in range(3)],
    "sizes that vary": [functools.partial(DynamicShapeEnv, 3, first_rows=n) for n in range(3)],
    "other batches": [
        functools.partial(CountingEnv, 2, batch_size=(4,)),
        functools.partial(StateEnv, 3, batch_size=(4,)),
    ],
}


def alone(td: TensorDictBase, row: int) -> TensorDictBase:
    """What one env answered."""
    return td[row].exclude("env_index")


@pytest.mark.parametrize("makes", BATCHES.values(), ids=BATCHES.keys())
@over_faces
@pytest.mark.every_combination
async def test_each_env_answers_as_it_would_alone(face: TorchFace, makes: list[Make]) -> None:
    torch.manual_seed(0)
    rng, count = random.Random(0), len(makes)
    references = [make() for make in makes]
    roots = [env.reset() for env in references]
    actions = [env.rand_action() for env in references]
    async with face.open(count, makes) as env:
        td = await env.reset()
        env.send(td.update(stacked(actions)))
        for _ in range(10):
            waiting = len(env.outstanding)
            td, following = await env.recv(rng.randint(1, waiting), rng.choice([None, waiting]))
            numbers = td["env_index"].reshape(td.batch_size[0], -1)[:, 0].tolist()
            assert td["env_index"].shape == td.batch_size == following.batch_size
            again = []
            for row, number in enumerate(numbers):
                expected = references[number].step_and_maybe_reset(roots[number].update(actions[number]))
                assert differing(alone(td, row), expected[0]) == []
                assert differing(alone(following, row), expected[1]) == []
                roots[number], actions[number] = expected[1].clone(), references[number].rand_action()
                again.append(following[row].clone().update(actions[number]))
            rng.shuffle(again)
            env.send(stacked(again))


@over_faces
@pytest.mark.parametrize("makes", [BATCHES["other keys"], BATCHES["objects or not"] * 2], ids=["keys", "objects"])
async def test_views_of_envs_that_differ(face: TorchFace, makes: list[Make]) -> None:
    """Those of one kind make a dense batch, and all a lazy one."""
    async with face.open(4, makes) as env:
        td = await env.reset()
        even, odd = env[0::2], env[1::2]
        for view in (even, odd):
            view.send(view.rand_action(await view.reset()))
        assert env.outstanding == (0, 2, 1, 3)
        received, _ = await even.recv(2)
        assert not isinstance(received, LazyStackedTensorDict)
        assert received["next", "observation"].flatten().tolist() == [1, 1]
        env.send(env[0].rand_action(td[:1]).set("env_index", torch.tensor([0])))
        received, following = await env.recv(3)
        assert isinstance(received, LazyStackedTensorDict)
        assert sorted(received["env_index"].tolist()) == [0, 1, 3]
        steps = dict(
            zip(received["env_index"].tolist(), received["next", "observation"].flatten().tolist(), strict=True)
        )
        assert steps == {0: 2, 1: 1, 3: 1}
        assert following["env_index"].tolist() == received["env_index"].tolist()


# -- objects ----------------------------------------------------------------------------------------------


def objects(*items: Any) -> TensorDict:
    return TensorDict({"action": NonTensorStack(*map(NonTensorData, items))}, [len(items)])


async def told(env: Driver, *args: Any) -> dict[int, Any]:
    """What each env says that it was told, by what it observed."""
    td, _ = await env.recv(*args)
    records = td.get(("next", "record")).tolist()
    return dict(zip(td["env_index"].tolist(), [record["action"] for record in records], strict=True))


@over_some_faces
async def test_an_object_may_be_changed_as_soon_as_it_was_sent(face: TorchFace) -> None:
    async with face.open(3, NonTensorEnv) as env:
        await env.reset()
        given = [{"jump": [number]} for number in range(3)]
        env.send(objects(*given))
        for own in given:
            own["jump"].append("spoilt")
        expected = {number: {"jump": [number]} for number in range(3)}
        td, _ = await env.recv(3)
        records = td.get(("next", "record")).tolist()
        assert {n: r["action"] for n, r in zip(td["env_index"].tolist(), records, strict=True)} == expected
        assert dict(zip(td["env_index"].tolist(), td.get("action").tolist(), strict=True)) == expected


@over_some_faces
async def test_an_object_that_contains_itself_is_not_sent(face: TorchFace) -> None:
    """TensorDict would have to copy it for the result, which it could not."""
    async with face.open(2, NonTensorEnv) as env:
        await env.reset()
        endless: dict[str, Any] = {"jump": 1}
        endless["itself"] = endless
        with pytest.raises(SpecMismatchError, match="contains itself"):
            env.send(objects("a", endless))
        assert env.outstanding == ()
        env.send(objects("e", "f"))
        td, _ = await env.recv(2)
        assert td["next", "observation"].flatten().tolist() == [1] * 2


@pytest.mark.parametrize("face", faces("packed", "async-one-each", torchrl=False))
async def test_an_object_that_cannot_be_pickled(face: TorchFace) -> None:
    """For the third env; the first two are sent nothing either."""
    async with face.open(4, NonTensorEnv) as env:
        await env.reset()
        with pytest.raises(TypeError, match="pickle"):
            env.send(objects("a", "b", threading.Lock(), "d"))
        assert env.outstanding == ()
        env.send(objects("e", "f", "g", "h"))
        td, _ = await env.recv(4)
        assert td["next", "observation"].flatten().tolist() == [1] * 4


@pytest.mark.parametrize("face", faces("serial", "async-serial", "thread", torchrl=False))
async def test_an_object_that_cannot_be_copied_is_shared(face: TorchFace) -> None:
    async with face.open(2, NonTensorEnv) as env:
        await env.reset()
        lock = threading.Lock()
        env.send(objects(lock, {"jump": 1}))
        td, _ = await env.recv(2)
        assert td[td["env_index"].argsort()].get("action").tolist() == [lock, {"jump": 1}]


@over_some_faces
async def test_large_objects_both_ways(face: TorchFace) -> None:
    async with face.open(3, functools.partial(NonTensorEnv, padding=2_000_000)) as env:
        await env.reset()
        for _ in range(2):
            env.send(objects(*["x" * 2_000_000 + str(number) for number in range(3)]))
            found = await told(env, 3)
            assert {number: action[-1] for number, action in found.items()} == {0: "0", 1: "1", 2: "2"}


# -- gradients --------------------------------------------------------------------------------------------


def total(tds: Sequence[TensorDictBase]) -> torch.Tensor:
    return sum((td["next", "reward"].sum() + td["next", "observation"].sum() for td in tds), torch.zeros(()))


@pytest.mark.parametrize("face", [param for param in GRAD_TORCH_FACES if "torchrl" not in param.values[0].name])
async def test_gradients(face: TorchFace) -> None:
    options: dict[str, Any] = {"decay": 0.8, "gain": 0.5, "size": 3}
    actions = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expected = []
    for number in range(2):
        env = DifferentiableEnv(**options)
        td = env.reset()
        for step in range(4):
            td, following = env.step_and_maybe_reset(td.set("action", actions[step, number]))
            expected.append(td)
            td = following
    async with face.open(2, DifferentiableEnv, options) as batch:
        td, found = await batch.reset(), []
        batch.send(td.set("action", actions[0]))
        for step in range(1, 5):
            received, following = await batch.recv(2)
            found.append(received)
            if step < 4:
                batch.send(following.set("action", actions[step, following["env_index"]]))
        (gradient,) = torch.autograd.grad(total(found), actions)
    (other,) = torch.autograd.grad(total(expected), actions)
    assert gradient.any()
    torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("face", faces("thread", "packed", torchrl=False))
async def test_no_gradients_from_elsewhere(face: TorchFace) -> None:
    async with face.open(2, DifferentiableEnv, {"size": 3}) as env:
        td = await env.reset()
        env.send(td.set("action", torch.ones(2, 3, requires_grad=True)))
        received, following = await env.recv(2)
        assert received["action"].requires_grad
        assert not received["next", "reward"].requires_grad
        assert not following["observation"].requires_grad
