"""Methods and attributes of the envs, reached through the batch."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import cloudpickle
import pytest
import torch
from talking_envs import DumbEnv, TalkingEnv, numbered
from torch_faces import (
    OWN_TORCH_FACES,
    TORCH_FACES,
    TorchFace,
    faces_called,
    over_own_torch_faces,
    over_torch_faces,
)

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, SerialEnv
from aioenvs.envs import GymEnv
from aioenvs.errors import AioEnvsError

over_plain_faces = pytest.mark.parametrize("face", [p for p in OWN_TORCH_FACES if not p.values[0].is_async])
over_one_of_each = pytest.mark.parametrize("face", faces_called("serial", "async-packed", "thread"))
over_gym_faces = pytest.mark.parametrize("face", faces_called("async-serial", "packed", "async-thread"))
over_plain_torch_faces = pytest.mark.parametrize("face", [p for p in TORCH_FACES if not p.values[0].is_async])


@over_torch_faces
async def test_a_method_is_called_in_every_env(face: TorchFace) -> None:
    async with face.open(3, face.toys.CountingEnv, [{"custom_attr": name} for name in "abc"]) as env:
        assert await env.ask("custom_method", 1, unit="m") == [(name, (1,), {"unit": "m"}) for name in "abc"]


@over_torch_faces
async def test_an_attribute_comes_from_every_env(face: TorchFace) -> None:
    async with face.open(3, face.toys.CountingEnv, [{"custom_attr": name} for name in "abc"]) as env:
        assert await env.read("custom_attr") == ["a", "b", "c"]


@over_own_torch_faces
async def test_a_property_is_read_when_it_is_asked_for(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv) as env:
        td = await env.reset()
        td["_step"] = torch.tensor([True, False, True])
        await env.step(env.rand_action(td))
        assert await env.read("custom_property") == [1, 0, 1]


@over_own_torch_faces
async def test_arguments_may_have_any_name(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        kwargs = {"name": "x", "args": 1, "kwargs": 2, "kind": 3, "tensordict": 4}
        assert await env.call("echo", **kwargs) == [kwargs] * 2


@over_plain_faces
def test_arguments_of_a_forwarded_method_may_have_any_name(face: TorchFace) -> None:
    with face.make(2, TalkingEnv) as env:
        assert env.echo(name="x", args=1) == [{"name": "x", "args": 1}] * 2


@over_own_torch_faces
async def test_what_no_env_has_is_an_attribute_error_and_kills_nobody(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv) as env:
        for ask in (env.call, env.get_attr, env.read, env.ask):
            with pytest.raises(AttributeError, match="telepathy"):
                await ask("telepathy")
        with pytest.raises(AttributeError, match="telepathy"):
            await env.set_attr("telepathy", 1)
        assert await env.read("index") == [0, 0, 0]
        assert (await env.reset()).batch_size == (3,)


@over_plain_torch_faces
def test_hasattr_tells_the_truth(face: TorchFace) -> None:
    face.library.skip_if_differs("missing attribute")
    with face.make(2, TalkingEnv) as env:
        names = ("index", "echo", "custom_property", "telepathy", "_whisper", "__wrapped__")
        assert [hasattr(env, name) for name in names] == [True, True, True, False, False, False]
        assert getattr(env, "telepathy", "none") == "none"


@over_plain_faces
def test_a_name_with_an_underscore_is_never_asked_of_the_envs(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv)
    for name in ("_whisper", "__custom__", "_env_name"):
        with pytest.raises(AttributeError, match=name):
            getattr(env, name)
    assert env.is_closed  # nobody was asked, so nobody was started


@over_plain_faces
def test_a_probe_starts_nobody(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv, numbered(2))
    for _ in range(2):
        assert not hasattr(env, "index")
        with pytest.raises(AttributeError, match=r"'index'.*start\(\) comes first"):
            env.index  # noqa: B018
        with pytest.raises(AttributeError, match="'index'"):
            env[0].index  # noqa: B018
        assert env.is_closed
        with env:
            assert env.index == [0, 1]


@over_plain_faces
def test_an_unknown_name_is_one_of_the_batch(face: TorchFace) -> None:
    with (
        face.make(2, TalkingEnv) as env,
        pytest.raises(AttributeError, match=r"telepathy not found in <.*Env num_workers=2.*telepathy"),
    ):
        env.telepathy  # noqa: B018


@over_plain_faces
def test_an_attribute_of_the_envs_cannot_be_hidden(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv, numbered(2))
    env.tag = "before the start"
    with env:
        for name in ("index", "echo", "custom_property"):
            with pytest.raises(AttributeError, match=rf"set_attr\('{name}', value\)"):
                setattr(env, name, 7)
        with pytest.raises(AttributeError, match="set_attr"):
            env[0].index = 7
        assert env.index == [0, 1]
        env.tag, env.other, env._index_of_mine = "mine", "mine", 3
        assert (env.tag, env.other) == ("mine", "mine")


class Scored(SerialEnv):
    """A batch with attributes and modules of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scores = [1, 2]
        self.net = torch.nn.Linear(1, 1)


class AsyncScored(AsyncSerialEnv):
    """The same with coroutines."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scores = [1, 2]


def test_a_subclass_has_attributes_of_its_own() -> None:
    with Scored(2, TalkingEnv, create_env_kwargs=numbered(2)) as env:
        assert (env.scores, env.index, env.net.in_features) == ([1, 2], [0, 1], 1)
        env.net = torch.nn.Linear(2, 1)
        assert env.net.in_features == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda env: cloudpickle.loads(cloudpickle.dumps(env))])
async def test_a_copy_of_a_subclass_has_its_attributes(copied: Any) -> None:
    with Scored(2, TalkingEnv, create_env_kwargs=numbered(2)) as env:
        env.scores.append(3)
        twin = copied(env)
        assert (type(twin), twin.scores, twin.net.in_features, twin.is_closed) == (Scored, [1, 2, 3], 1, True)
        with twin:
            assert twin.index == env.index == [0, 1]
    async with AsyncScored(2, TalkingEnv) as whole:
        twin = copied(whole)
        assert (type(twin), twin.scores, twin.is_closed, whole.is_closed) == (AsyncScored, [1, 2], True, False)


@over_plain_faces
def test_a_forwarded_method_can_be_kept(face: TorchFace) -> None:
    with face.make(2, TalkingEnv, numbered(2)) as env:
        shout = env.shout
        assert shout() == shout() == ["here is 0", "here is 1"]


@over_own_torch_faces
async def test_the_exception_of_a_method_says_whose_it_is(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv, numbered(3)) as env:
        td = await env.reset()
        with pytest.raises(LookupError, match="env 1 does not know") as caught:
            await env.ask("fail", 1)
        assert caught.value.env_index == (1,)
        assert any("env 1" in note for note in caught.value.__notes__)
        with pytest.raises(LookupError, match="env 0 does not know") as caught:
            await env.ask("fail")
        assert caught.value.env_index == (0, 1, 2)
        await env.step(env.rand_action(td))  # a method that fails ends no episode
        assert td["next", "observation"].flatten().tolist() == [1, 1, 1]


@over_own_torch_faces
async def test_the_exception_of_a_property_comes_out(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        with pytest.raises(ZeroDivisionError, match="this property is broken"):
            await env.read("broken")


@over_own_torch_faces
async def test_what_cannot_leave_its_process_is_an_error_and_kills_nobody(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv, numbered(2)) as env:
        if face.class_name in ("SerialEnv", "AsyncSerialEnv"):
            assert len(await env.ask("lock")) == 2  # there is nowhere to go
        else:
            with pytest.raises(TypeError, match="lock"):
                await env.ask("lock")
        assert await env.read("index") == [0, 1]
        await env.step(env.rand_action(await env.reset()))


@over_own_torch_faces
async def test_what_cannot_be_sent_is_an_error_and_asks_nobody(face: TorchFace) -> None:
    if not face.in_processes:
        pytest.skip("in the same process it need not be sent")
    async with face.open(2, TalkingEnv) as env:
        with pytest.raises(TypeError, match="lock"):
            await env.ask("note", [threading.Lock()])
        assert await env.read("notes") == [[], []]


@over_own_torch_faces
async def test_arguments_are_each_envs_own(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv, numbered(3)) as env:
        given: list[Any] = []
        assert await env.ask("note", given) == [[0], [1], [2]]
        assert given == []
        await env.ask("note", notes=given)
        assert await env.read("notes") == [[0], [1], [2]]
        assert given == []


@over_own_torch_faces
async def test_values_that_are_set_are_each_envs_own(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv, numbered(3)) as env:
        value = {"notes": []}
        await env.set_attr("custom_attr", value)
        value["notes"].append("changed since")
        assert await env.read("custom_attr") == [{"notes": []}] * 3


@over_own_torch_faces
async def test_set_attr_takes_one_value_or_one_for_each(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv) as env:
        await env.set_attr("index", "all")
        assert await env.get_attr("index") == ["all"] * 3
        await env.set_attr("index", ["a", "b", "c"])
        assert await env.get_attr("index") == ["a", "b", "c"]
        await env.set_attr("index", ("d", "e", "f"))
        assert await env.get_attr("index") == ["d", "e", "f"]
        await env.set_attr("index", torch.arange(3))
        assert [value.tolist() for value in await env.get_attr("index")] == [[0, 1, 2]] * 3
        with pytest.raises(RuntimeError, match=r"3 envs.* 2"):
            await env.set_attr("index", ["a", "b"])
        await env.set_attr("max_steps", [1, 2, 3])
        rollout = await env.rollout(10, break_when_any_done=False)
        assert rollout["next", "done"].sum(1).flatten().tolist() == [10, 5, 3]


@over_own_torch_faces
async def test_a_method_is_no_value(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        with pytest.raises(AttributeError, match="call\\('shout'"):
            await env.get_attr("shout")
        with pytest.raises(TypeError, match="not callable"):
            await env.call("index")


@over_plain_faces
def test_what_is_a_method_in_some_envs_only_is_neither(face: TorchFace) -> None:
    with face.make(2, [TalkingEnv, DumbEnv]) as env:
        for name in ("index", "shout"):
            assert not hasattr(env, name)
        with pytest.raises(AttributeError, match=r"'shout' is a method in some of the envs of .* only"):
            _ = env.shout


@over_own_torch_faces
async def test_render(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv, numbered(2)) as env:
        assert await env.render() == ["0", "1"]
        assert await env.call("render", scale=2) == ["00", "11"]


@over_own_torch_faces
async def test_tensors_go_both_ways(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        await env.set_attr("custom_attr", [torch.zeros(2), torch.ones(2)])
        values = await env.read("custom_attr")
        assert torch.equal(torch.stack(values), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


@pytest.mark.parametrize("face", [p for p in OWN_TORCH_FACES if p.values[0].keeps_grad])
async def test_a_tensor_keeps_its_gradient_where_there_is_no_process(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        weight = torch.nn.Parameter(torch.ones(()))
        await env.set_attr("custom_attr", weight * 2)
        sum(await env.read("custom_attr")).backward()
        assert weight.grad == 4
        (received, *_) = await env.ask("echo", weight=weight)
        assert received["weight"] is weight


@over_gym_faces
async def test_attributes_of_gymnasium_envs_are_reached_through_their_wrappers(face: TorchFace) -> None:
    async with face.open(2, "CartPole-v1", {"render_mode": "rgb_array"}) as env:
        assert await env.read("gravity") == [9.8, 9.8]
        await env.set_attr("gravity", [1.0, 2.0])
        assert await env.get_attr("gravity") == [1.0, 2.0]
        assert await env.read("render_mode") == ["rgb_array"] * 2
        with pytest.raises(AttributeError, match="telepathy"):
            await env.set_attr("telepathy", 1)
        with pytest.raises(AttributeError, match="telepathy"):
            await env.read("telepathy")
        await env.reset(seed=0)
        assert [frame.shape for frame in await env.render()] == [(400, 600, 3)] * 2
        assert [space.n for space in await env.read("action_space")] == [2, 2]


@over_gym_faces
@pytest.mark.parametrize("factory", ["CartPole-v1", lambda: GymEnv("CartPole-v1")], ids=["gymnasium", "GymEnv"])
async def test_what_is_set_in_a_gymnasium_env_counts(face: TorchFace, factory: Any) -> None:
    async with face.open(2, factory) as env:
        await env.set_attr("force_mag", [0.0, 1000.0])
        td = await env.reset(seed=0)
        td = await env.step(env.rand_action(td))
        speeds = td["next", "observation"][:, 1].abs().tolist()
        assert speeds[0] < 0.1 < 10 < speeds[1]


async def test_async_faces_forward_by_name_only() -> None:
    for cls in (AsyncSerialEnv, AsyncParallelEnv):
        env = cls(2, TalkingEnv)
        assert not hasattr(env, "shout")
        assert env.is_closed


@over_one_of_each
async def test_a_started_batch_can_be_copied(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv, numbered(2)) as env:
        twin = copy.copy(env.env)
        assert twin.is_closed
        assert not env.is_closed
        assert twin.num_workers == 2


async def test_a_request_in_flight_keeps_others_from_calling() -> None:
    async with AsyncParallelEnv(2, TalkingEnv, num_processes=1) as env:
        results = await asyncio.gather(env.call("shout"), env.get_attr("index"), return_exceptions=True)
        assert results[0] == ["here is 0"] * 2
        assert isinstance(results[1], AioEnvsError)
        assert "call" in str(results[1])
