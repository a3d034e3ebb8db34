"""Keyword arguments: of the factories, and of resets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from space_envs import HintedCartPole
from talking_envs import TalkingEnv, numbered
from tensordict import TensorDict
from torch_faces import Driver, TorchFace, faces_called, over_own_torch_faces, over_torch_faces

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.envs import EnvCreator, GymWrapper
from aioenvs.errors import AioEnvsError

CLASSES = [SerialEnv, ParallelEnv, AsyncSerialEnv, AsyncParallelEnv]
over_classes = pytest.mark.parametrize("cls", CLASSES)
over_gym_faces = pytest.mark.parametrize("face", faces_called("serial", "packed", "async-one-each", "thread"))


def observed(td: Any) -> list[int]:
    """The observations at the root."""
    values: list[int] = td["observation"].flatten().tolist()
    return values


# -- of the factories ---------------------------------------------------------------------------------------


@over_torch_faces
async def test_arguments_for_all_envs(face: TorchFace) -> None:
    given = {"start": 7}
    async with face.open(3, face.toys.CountingEnv, given) as env:
        assert observed(await env.reset()) == [7, 7, 7]
    assert given == {"start": 7}


@over_torch_faces
async def test_arguments_for_each_env(face: TorchFace) -> None:
    given = [{"start": 7}, {}, {"start": 9}]
    async with face.open(3, face.toys.CountingEnv, given) as env:
        assert observed(await env.reset()) == [7, 0, 9]
    assert given == [{"start": 7}, {}, {"start": 9}]


@over_own_torch_faces
async def test_no_env_shares_its_arguments(face: TorchFace) -> None:
    shared: list[Any] = []
    async with face.open(3, TalkingEnv, {"index": shared}) as env:
        await env.call("note", [0])
        assert await env.ask("echo") == [{}] * 3
        indices = await env.read("index")
        assert indices == [[]] * 3
        assert all(index is not shared for index in indices)
        assert len({id(index) for index in indices}) == 3


@over_classes
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_wrong_number_of_arguments_is_refused(cls: Any, kind: Any) -> None:
    with pytest.raises(RuntimeError, match=r"num_workers is 3.*create_env_kwargs is a list of 2"):
        cls(3, TalkingEnv, create_env_kwargs=kind([{}, {}]))
    with pytest.raises(RuntimeError, match=r"num_workers is 2.*create_env_fn is a list of 3"):
        cls(2, kind([TalkingEnv] * 3))


@over_classes
@pytest.mark.parametrize("given", [3, "kwargs", [1, 2], [{}, None]])
def test_arguments_that_are_none_are_refused(cls: Any, given: Any) -> None:
    with pytest.raises(TypeError, match="create_env_kwargs must be a dict"):
        cls(2, TalkingEnv, create_env_kwargs=given)


@over_torch_faces
async def test_update_kwargs_before_the_start(face: TorchFace) -> None:
    env = Driver(face.make(2, face.toys.CountingEnv, {"start": 1, "step": 10}))
    env.update_kwargs({"start": 3})
    await env.start()
    td = await env.reset()
    assert observed(td) == [3, 3]
    await env.step(env.rand_action(td))
    assert td["next", "observation"].flatten().tolist() == [13, 13]
    await env.close()


@over_torch_faces
async def test_update_kwargs_with_one_dict_for_each(face: TorchFace) -> None:
    given = [{"start": 3}, {"start": 4}]
    env = Driver(face.make(2, face.toys.CountingEnv, [{"step": 2}, {"step": 3}]))
    env.update_kwargs(given)
    await env.start()
    td = await env.reset()
    assert observed(td) == [3, 4]
    await env.step(env.rand_action(td))
    assert td["next", "observation"].flatten().tolist() == [5, 7]
    await env.close()
    assert given == [{"start": 3}, {"start": 4}]


@over_own_torch_faces
async def test_update_kwargs_needs_envs_that_are_closed(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        with pytest.raises(AioEnvsError, match=r"started.*close\(\) first"):
            env.update_kwargs({"start": 3})
        assert observed(await env.reset()) == [0, 0]
        await env.close()
        env.update_kwargs({"start": 3})
        assert observed(await env.reset()) == [3, 3]


@over_own_torch_faces
async def test_update_kwargs_may_change_the_specs(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        assert env.observation_spec["observation"].dtype is torch.int64
        await env.close()
        env.update_kwargs({"batch_size": [3], "dtype": torch.float32})
        await env.start()
        assert env.batch_size == (2, 3)
        assert env.observation_spec["observation"].dtype is torch.float32


@over_classes
def test_update_kwargs_refuses_a_wrong_number(cls: Any) -> None:
    env = cls(2, TalkingEnv)
    with pytest.raises(RuntimeError, match=r"2.*3"):
        env.update_kwargs([{}] * 3)
    with pytest.raises(TypeError, match="dict"):
        env.update_kwargs(3)


@over_own_torch_faces
async def test_a_creator_and_arguments_of_the_batch(face: TorchFace) -> None:
    creator = EnvCreator(TalkingEnv, start=1, step=10)
    variant = creator.make_variant(start=2)
    async with face.open(3, [creator, variant, TalkingEnv], [{}, {"step": 20}, {"start": 5}]) as env:
        td = env.rand_action(await env.reset())
        assert observed(td) == [1, 2, 5]
        await env.step(td)
        assert td["next", "observation"].flatten().tolist() == [11, 22, 6]
    assert creator.create_env_kwargs == {"start": 1, "step": 10}
    assert variant.create_env_kwargs == {"start": 2, "step": 10}


# -- of resets ----------------------------------------------------------------------------------------------


@over_torch_faces
async def test_reset_arguments_for_all(face: TorchFace) -> None:
    async with face.open(2, face.toys.CountingEnv) as env:
        assert observed(await env.reset(start=7)) == [7, 7]
        assert observed(await env.reset()) == [0, 0]


@over_torch_faces
async def test_reset_arguments_for_each(face: TorchFace) -> None:
    async with face.open(3, face.toys.CountingEnv) as env:
        assert observed(await env.reset(list_of_kwargs=[{"start": 7}, {}, {"start": 9}])) == [7, 0, 9]


@over_own_torch_faces
async def test_an_envs_own_reset_arguments_prevail(face: TorchFace) -> None:
    each = [{"start": 1, "hint": "own"}, {}]
    async with face.open(2, TalkingEnv) as env:
        td = await env.reset(list_of_kwargs=each, start=5, hint="common", note="all")
        assert observed(td) == [1, 5]
        assert await env.read("given") == [
            [{"start": 1, "hint": "own", "note": "all"}],
            [{"start": 5, "hint": "common", "note": "all"}],
        ]
    assert each == [{"start": 1, "hint": "own"}, {}]


@over_own_torch_faces
async def test_the_callers_objects_stay_as_they_are(face: TorchFace) -> None:
    each, common = [{"own": [1]}, {}], ["common"]
    async with face.open(2, TalkingEnv) as env:
        await env.reset(list_of_kwargs=each, common=common)
        assert await env.read("given") == [
            [{"common": ["common", "spoilt"], "own": [1, "spoilt"]}],
            [{"common": ["common", "spoilt"]}],
        ]
    assert each == [{"own": [1]}, {}]
    assert common == ["common"]


@over_own_torch_faces
async def test_arguments_of_envs_that_are_not_reset_are_ignored(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv) as env:
        await env.reset()
        mask = TensorDict({"_reset": torch.tensor([[False], [True], [False]])}, [3])
        td = await env.reset(mask, list_of_kwargs=[{"start": 1}, {"start": 2}, {"start": 3}], hint=4)
        assert observed(td) == [0, 2, 0]
        assert await env.read("given") == [[{}], [{}, {"start": 2, "hint": 4}], [{}]]


@over_own_torch_faces
async def test_a_wrong_number_of_reset_arguments_resets_nobody(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        with pytest.raises(RuntimeError, match=r"2 envs.* 3"):
            await env.reset(list_of_kwargs=[{}] * 3)
        assert await env.read("given") == [[], []]


@over_own_torch_faces
async def test_a_seed_of_a_reset_begins_the_chain(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv) as env:
        await env.reset(seed=0)
        assert await env.read("seed") == [0, 795726461, 2841183792]
        await env.reset(seed=0, list_of_kwargs=[{}, {"seed": 5}, {}])
        assert await env.read("seed") == [0, 5, 2841183792]
        assert await env.read("given") == [[{}, {}]] * 3  # a seed is no argument of an env's own reset


@over_own_torch_faces
async def test_reset_arguments_with_an_error_kill_nobody(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        with pytest.raises(TypeError, match="must be Number") as caught:
            await env.reset(list_of_kwargs=[{}, {"start": "no number"}])
        assert caught.value.env_index == (1,)
        assert observed(await env.reset()) == [0, 0]


@over_gym_faces
async def test_seeds_and_options_reach_gymnasium_envs(face: TorchFace) -> None:
    for factory in (HintedCartPole, lambda: GymWrapper(HintedCartPole())):
        async with face.open(2, factory) as env:
            options = {"low": 0.0, "nested": {"deep": [1]}}
            await env.reset(seed=0, options=options)
            assert options == {"low": 0.0, "nested": {"deep": [1]}}
            assert await env.read("resets") == [[(0, options)], [(795726461, options)]]
            await env.reset(list_of_kwargs=[{"options": {"a": 1}}, {"seed": 3}])
            assert [resets[1] for resets in await env.read("resets")] == [(None, {"a": 1}), (3, None)]


@over_gym_faces
async def test_a_seed_is_used_once(face: TorchFace) -> None:
    async with face.open(2, HintedCartPole) as env:
        await env.set_seed(0)
        await env.reset()
        await env.reset()
        assert await env.read("resets") == [[(0, None), (None, None)], [(795726461, None), (None, None)]]


def test_numbers_of_arguments() -> None:
    assert numbered(2, start=1) == [{"index": 0, "start": 1}, {"index": 1, "start": 1}]
