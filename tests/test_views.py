"""Views: some envs of a batch, as a batch of their own."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import itertools
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from talking_envs import TalkingEnv, numbered
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch_faces import ASYNC_TORCH_FACES, OWN_TORCH_FACES, Driver, TorchFace, over_own_torch_faces

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.envs import EnvBase
from aioenvs.errors import AioEnvsError, ClosedError, ConcurrencyError
from aioenvs.faces import session as scope
from aioenvs.specs import Bounded
from aioenvs.testing import HeterogeneousCountingEnv, ParameterEnv, RandomEnv, StateEnv

over_async_faces = pytest.mark.parametrize("face", ASYNC_TORCH_FACES)
over_plain_faces = pytest.mark.parametrize("face", [p for p in OWN_TORCH_FACES if not p.values[0].is_async])
over_faces_with_streams = pytest.mark.parametrize(
    "face",
    [p for p in OWN_TORCH_FACES if "thread" not in p.values[0].name],  # where all share the process's generators
)

INDICES: list[tuple[Any, list[int]]] = [
    (0, [0]),
    (-1, [3]),
    (np.int64(2), [2]),
    (torch.tensor(2), [2]),
    (slice(1, 3), [1, 2]),
    (slice(None), [0, 1, 2, 3]),
    (slice(None, None, -2), [3, 1]),
    ([2, 0], [2, 0]),
    ((3, -3), [3, 1]),
    (range(3), [0, 1, 2]),
    (np.array([3, 1, 2]), [3, 1, 2]),
    (np.array([1, 0], np.uint8), [1, 0]),
    (torch.tensor([1, -1]), [1, 3]),
]
BAD_INDICES: list[tuple[Any, type[Exception]]] = [
    (4, IndexError),
    (-5, IndexError),
    ([0, 4], IndexError),
    ([], IndexError),
    (slice(2, 2), IndexError),
    (torch.zeros(0, dtype=torch.int64), IndexError),
    ([1, 1], IndexError),
    ([1, -3], IndexError),
    (0.5, IndexError),
    ("a", IndexError),
    (None, IndexError),
    (..., IndexError),
    ([[0, 1]], IndexError),
    (True, NotImplementedError),
    ([True, False, False, False], NotImplementedError),
    (np.array([True] * 4), NotImplementedError),
    (torch.tensor([False, True, True, False]), NotImplementedError),
]


def observed(td: TensorDictBase) -> list[int]:
    """The observations, of `next` if there was a step."""
    values: list[int] = td.get("next", td)["observation"].flatten().tolist()
    return values


def counting(count: int = 4, **kwargs: Any) -> list[dict[str, Any]]:
    """Keyword arguments for envs that begin with 0, 10, 20, ..."""
    return numbered(count, **kwargs) if "start" in kwargs else [{"start": 10 * i, **kwargs} for i in range(count)]


async def stepped(env: Driver, td: TensorDictBase) -> list[int]:
    """What is observed after a step; the TensorDict becomes the root of the next one."""
    _, following = await env.step_and_maybe_reset(env.rand_action(td))
    td.update(following)
    return observed(following)


@pytest.mark.parametrize(("index", "envs"), INDICES)
@pytest.mark.parametrize("cls", [SerialEnv, AsyncSerialEnv])
def test_what_an_index_selects(cls: Any, index: Any, envs: list[int]) -> None:
    view = cls(4, TalkingEnv)[index]
    assert view.env_index == tuple(envs)
    assert view.num_workers == len(view) == len(envs)
    assert isinstance(view, EnvBase) == (cls is SerialEnv)


@pytest.mark.parametrize(("index", "error"), BAD_INDICES)
@pytest.mark.parametrize("cls", [SerialEnv, AsyncSerialEnv])
def test_what_selects_no_envs(cls: Any, index: Any, error: type[Exception]) -> None:
    env = cls(4, TalkingEnv)
    with pytest.raises(error):
        env[index]
    with pytest.raises(error):
        env[:][index]
    assert env.is_closed


def test_the_errors_say_what_was_found() -> None:
    env = SerialEnv(4, TalkingEnv)
    with pytest.raises(IndexError, match="index 7 is out of bounds for 4 envs"):
        env[[0, 7]]
    with pytest.raises(IndexError, match=r"\[1, 1\] selects an env twice"):
        env[[1, 1]]
    with pytest.raises(NotImplementedError, match="nonzero"):
        env[[True, False, True, True]]


@over_own_torch_faces
async def test_a_view_is_a_batch_of_its_own(face: TorchFace) -> None:
    async with face.open(4, TalkingEnv, counting()) as env:
        view = env[[2, 0]]
        assert view.batch_size == (2,)
        assert view.action_spec.shape == view.observation_spec.shape == (2,)
        assert view.observation_keys == env.observation_keys == ["observation"]
        assert view.device == env.device
        assert not view.is_closed
        assert view.num_seeds == 2
        td = await view.reset()
        assert observed(td) == [20, 0]
        assert (await view.step(view.rand_action(td))) is td
        assert observed(td) == [21, 1]
        assert await stepped(view, await view.reset()) == [21, 1]
        assert observed(await view.rand_step()) == [22, 2]
        rollout = await view.rollout(3)
        assert rollout["observation"].squeeze(-1).tolist() == [[20, 21, 22], [0, 1, 2]]


@over_own_torch_faces
async def test_views_and_the_whole_take_turns(face: TorchFace) -> None:
    async with face.open(4, TalkingEnv, counting(max_steps=None)) as env:
        whole = await env.reset()
        front, back = env[:2], env[[3, 2]]
        first, last = whole[:2].clone(), whole[[3, 2]]
        assert await stepped(front, first) == [1, 11]
        assert await stepped(back, last) == [31, 21]
        assert await stepped(env, whole) == [2, 12, 22, 32]
        assert await stepped(front, first) == [3, 13]
        assert observed(await env[1].reset()) == [10]
        assert await stepped(env, whole) == [4, 11, 23, 33]
        assert observed(await back.reset()) == [30, 20]
        assert await stepped(back, last) == [31, 21]
        assert observed(whole) == [4, 11, 23, 33]  # what was given out stays as it was


@over_own_torch_faces
async def test_a_partial_reset_of_a_view(face: TorchFace) -> None:
    async with face.open(4, TalkingEnv, counting()) as env:
        view = env[[3, 1, 2]]
        td = await view.reset()
        await stepped(view, td)
        await stepped(view, td)
        mask = torch.tensor([[True], [False], [True]])
        td = await view.reset(TensorDict({"_reset": mask, "observation": torch.full((3, 1), 7)}, [3]))
        assert observed(td) == [30, 7, 20]
        assert observed(await view.reset(TensorDict({"_reset": torch.zeros(3, 1, dtype=torch.bool)}, [3]))) == [
            30,
            12,
            20,
        ]


@over_own_torch_faces
async def test_a_partial_step_of_a_view(face: TorchFace) -> None:
    async with face.open(4, TalkingEnv, counting()) as env:
        view = env[[3, 1, 2]]
        td = view.rand_action(await view.reset())
        td["_step"] = torch.tensor([False, True, True])
        await view.step(td)
        assert observed(td) == [30, 11, 21]
        assert td["next", "reward"].flatten().tolist() == [0, 1, 1]
        with pytest.raises(RuntimeError, match="shape"):
            await view.step(env.rand_action())


@over_own_torch_faces
async def test_seeds_of_a_view_are_a_chain_of_its_own(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv) as env:
        following = await env[[2, 0]].set_seed(0)
        assert following == 2841183792
        assert await env.read("seed") == [795726461, None, 0]
        await env[1].set_seed(5, static_seed=True)
        assert await env.read("seed") == [795726461, 5, 0]
        await env[[1, 2]].reset(seed=0)
        assert await env.read("seed") == [795726461, 0, 795726461]


@over_faces_with_streams
async def test_a_view_of_a_random_env_gives_what_the_whole_gives(face: TorchFace) -> None:
    async with face.open(3, RandomEnv) as env:
        await env.set_seed(3)
        whole = await env.reset()
        await env.set_seed(3)
        parts = [await env[i].reset() for i in (2, 0, 1)]
        for part, i in zip(parts, (2, 0, 1), strict=True):
            assert torch.equal(part["observation"], whole[i : i + 1]["observation"])


@over_own_torch_faces
async def test_reset_arguments_of_a_view(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv) as env:
        td = await env[[2, 0]].reset(list_of_kwargs=[{"start": 5}, {}], hint=1)
        assert observed(td) == [5, 0]
        assert await env.read("given") == [[{"hint": 1}], [], [{"hint": 1, "start": 5}]]


@over_own_torch_faces
async def test_methods_and_attributes_of_a_view(face: TorchFace) -> None:
    async with face.open(4, TalkingEnv, numbered(4)) as env:
        view = env[[3, 1]]
        assert await view.ask("shout") == ["here is 3", "here is 1"]
        assert await view.read("index") == [3, 1]
        await view.set_attr("custom_attr", ["a", "b"])
        assert await env.read("custom_attr") == ["counting", "b", "counting", "a"]
        with pytest.raises(RuntimeError, match="2 envs"):
            await view.set_attr("custom_attr", ["a"] * 4)
        assert await view.render() == ["3", "1"]
        with pytest.raises(LookupError, match="env 1 does not") as caught:
            await view.ask("fail", 1)
        assert caught.value.env_index == (1,)


@over_own_torch_faces
async def test_states_of_a_view(face: TorchFace) -> None:
    async with face.open(3, ParameterEnv, [{"gain": float(i)} for i in range(3)]) as env:
        view = env[[2, 1]]
        states = await view.state_dict()
        assert list(states) == ["worker0", "worker1"]
        assert [state["gain"][0].item() for state in states.values()] == [2, 1]
        await env[[0, 1]].load_state_dict(states)
        gains = [state["gain"][0].item() for state in (await env.state_dict()).values()]
        assert gains == [2, 1, 2]


@over_own_torch_faces
async def test_a_view_of_a_view(face: TorchFace) -> None:
    async with face.open(5, TalkingEnv, counting(5)) as env:
        view = env[1:][[3, 0, 1]][-2:]
        assert view.env_index == (1, 2)
        assert observed(await view.reset()) == [10, 20]
        with pytest.raises(IndexError):
            view[2]
        assert [each.env_index for each in env[[3, 1]]] == [(3,), (1,)]


@over_own_torch_faces
async def test_closing_a_view_leaves_the_envs_open(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        view = env[0]
        await view.close()
        await view.close()
        assert not env.is_closed
        assert observed(await view.reset()) == [0]
        if face.is_async:
            async with view.env:
                pass
        else:
            with view.env:
                pass
        assert not env.is_closed


@over_own_torch_faces
async def test_a_view_starts_the_envs(face: TorchFace) -> None:
    view = Driver(face.make(3, TalkingEnv, counting(3)))[1:]
    assert view.is_closed
    assert observed(await view.reset()) == [10, 20]
    assert not view.is_closed
    whole = view.env._owner if face.is_async else view.env._whole
    await Driver(whole).close()
    assert view.is_closed


@over_own_torch_faces
async def test_a_view_does_not_start_again_what_was_closed(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv, counting(3)) as env:
        view = env[[2, 0]]
        td = await view.reset()
        assert view.batch_size == (2,)
        await env.close()
        assert view.is_closed
        assert view.batch_size == (2,)  # known from before
        for use in (view.reset, view.start, lambda: view.step(td.set("action", td["observation"])), env[[1]].reset):
            with pytest.raises(ClosedError, match="parent environment has been closed"):
                await use()
        assert env.is_closed
        await env.reset()
        assert observed(await view.reset()) == [20, 0]


@over_plain_faces
def test_a_view_keeps_the_envs_alive(face: TorchFace) -> None:
    view = face.make(2, TalkingEnv, counting(2))[1]
    gc.collect()
    assert observed(view.reset()) == [10]
    view.__dict__["_whole"].close()


@over_async_faces
async def test_an_async_view_keeps_the_envs_alive(face: TorchFace) -> None:
    view = face.make(2, TalkingEnv, counting(2))[1]
    gc.collect()
    assert observed(await view.reset()) == [10]
    await view._owner.close()


@over_plain_faces
def test_specs_of_a_view_start_the_envs(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv)
    assert env[1].batch_size == (1,)
    assert not env.is_closed
    env.close()


async def test_specs_of_an_async_view_are_known_once_the_envs_were_started() -> None:
    env = AsyncSerialEnv(2, TalkingEnv)
    with pytest.raises(AioEnvsError, match="start"):
        _ = env[1].batch_size
    await env[0].start()
    assert env[1].batch_size == (1,)
    await env.close()


@over_plain_faces
def test_a_view_notices_that_the_whole_has_changed(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv)
    view = env[1]
    assert view.observation_spec["observation"].dtype == torch.int64
    env.close()
    env.update_kwargs({"dtype": torch.float64})
    env.start()
    assert view.observation_spec["observation"].dtype == torch.float64
    env.close()
    env.to("cpu")
    env.start()
    assert view.observation_spec.device == view.device == torch.device("cpu")
    if not env.is_closed:
        env.close()


@over_own_torch_faces
async def test_a_view_goes_to_the_device_of_the_whole(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        view = env[1]
        assert (await view.reset()).device is None
        env.env.to("cpu")
        assert view.device == torch.device("cpu")
        assert view.action_spec.device == torch.device("cpu")
        assert (await view.reset()).device == torch.device("cpu")


def test_a_view_cannot_go_elsewhere() -> None:
    env = SerialEnv(2, TalkingEnv)
    with pytest.raises(RuntimeError, match="a view has no device of its own"):
        env[0].to("cpu")
    for name, value in (("device", "cpu"), ("batch_size", [1]), ("action_spec", None)):
        with pytest.raises((AttributeError, RuntimeError), match=r"cannot be set|has no setter"):
            setattr(env[0], name, value)
    assert env.is_closed


@pytest.mark.parametrize("cls", [SerialEnv, AsyncSerialEnv, ParallelEnv, AsyncParallelEnv])
def test_repr_of_a_view(cls: Any) -> None:
    env = cls(3, TalkingEnv)
    assert repr(env[[2, 0]]) == f"<envs [2, 0] of {env!r}>"


@over_plain_faces
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda env: cloudpickle.loads(cloudpickle.dumps(env))])
def test_a_copied_view(face: TorchFace, copied: Any) -> None:
    with face.make(2, TalkingEnv, counting(2)) as env:
        view = copied(env[1])
        assert view.env_index == (1,)
        assert observed(view.reset()) == [10]
        assert view.whole._env is view._env.whole
        assert (view.whole is env) == (copied is copy.copy)
        if view.whole is not env:
            view.whole.close()
        assert not env.is_closed


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda env: cloudpickle.loads(cloudpickle.dumps(env))])
async def test_a_copied_async_view(copied: Any) -> None:
    async with AsyncSerialEnv(2, TalkingEnv, create_env_kwargs=counting(2)) as env:
        view = copied(env[1])
        assert view.env_index == (1,)
        assert observed(await view.reset()) == [10]
        assert (view.whole is env) == (copied is copy.copy)
        await view.whole.close(raise_if_closed=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda env: cloudpickle.loads(cloudpickle.dumps(env))])
@pytest.mark.parametrize("cls", [SerialEnv, AsyncSerialEnv])
def test_a_copied_view_of_a_view_is_of_the_same_envs(cls: Any, copied: Any) -> None:
    view = copied(cls(4, TalkingEnv)[1:4][[2, 0]])
    assert view.env_index == (3, 1)
    assert view.whole.num_workers == 4


def test_a_view_that_is_pickled_along_with_its_whole_remains_a_view_of_it() -> None:
    env = SerialEnv(3, TalkingEnv)
    whole, view = cloudpickle.loads(cloudpickle.dumps((env, env[1:])))
    assert view.whole is whole


@over_async_faces
async def test_views_may_be_awaited_at_the_same_time(face: TorchFace) -> None:
    async with face.open(6, TalkingEnv, counting(6, max_steps=3)) as env:
        views = [env[[0, 3]], env[[5, 1]], env[[4, 2]]]
        starts = [[0, 30], [50, 10], [40, 20]]
        tds = await asyncio.gather(*(view.reset() for view in views))
        assert [observed(td) for td in tds] == starts
        for step in range(1, 8):
            expected = [[start + step % 3 for start in own] for own in starts]
            assert await asyncio.gather(*map(stepped, views, tds)) == expected


@over_async_faces
async def test_views_start_the_envs_together(face: TorchFace) -> None:
    env = Driver(face.make(4, TalkingEnv, counting(4)))
    tds = await asyncio.gather(*(env[i].reset() for i in range(4)))
    assert [observed(td) for td in tds] == [[0], [10], [20], [30]]
    await env.close()


@over_async_faces
async def test_views_that_share_an_env_exclude_each_other(face: TorchFace) -> None:
    async with face.open(3, TalkingEnv, counting(3)) as env:
        results = await asyncio.gather(
            env[:2].reset(), env[1:].reset(), env[2].reset(), env.reset(), return_exceptions=True
        )
        assert observed(results[0]) == [0, 10]
        assert observed(results[2]) == [20]
        for refused in (results[1], results[3]):
            assert isinstance(refused, ConcurrencyError)
            assert "env" in str(refused)
            assert "reset" in str(refused)
        assert observed(await env.reset()) == [0, 10, 20]


@over_async_faces
async def test_rollouts_of_views_at_the_same_time(face: TorchFace) -> None:
    async with face.open(4, TalkingEnv, counting(4, max_steps=None)) as env:
        rollouts = await asyncio.gather(*(env[[i]].rollout(5) for i in range(4)))
        for i, rollout in enumerate(rollouts):
            assert rollout["next", "observation"].flatten().tolist() == [10 * i + k for k in range(1, 6)]


@over_own_torch_faces
async def test_views_of_envs_that_cannot_be_stacked(face: TorchFace) -> None:
    factories = [TalkingEnv, lambda: TalkingEnv(batch_size=(), adds_up=True)] * 2
    async with face.open(4, factories) as env:
        assert isinstance(await env.reset(), LazyStackedTensorDict)
        alike = env[[3, 1]]
        td = await alike.reset()
        assert isinstance(td, TensorDict)
        assert "total" in td
        await alike.step(td.update({"action": torch.tensor([1, 0])}))
        assert td["next", "total"].flatten().tolist() == [1, 0]
        assert td["next", "observation"].flatten().tolist() == [1, 1]
        plain = await env[0].reset()
        assert sorted(plain.keys()) == ["done", "observation", "terminated"]
        mixed = env[[1, 2]]
        td = mixed.rand_action(await mixed.reset())
        assert isinstance(td, LazyStackedTensorDict)
        await mixed.step(td)
        assert [sorted(each["next"].keys()) for each in td.unbind(0)] == [
            ["done", "observation", "reward", "terminated", "total"],
            ["done", "observation", "reward", "terminated"],
        ]
        whole = env.rand_action(await env.reset())
        await env.step(whole)
        assert [each["next", "observation"].item() for each in whole.unbind(0)] == [1] * 4


@over_own_torch_faces
async def test_views_of_heterogeneous_agents_and_of_states(face: TorchFace) -> None:
    async with face.open(3, HeterogeneousCountingEnv) as env:
        rollout = await env[[2, 0]].rollout(2)
        assert rollout.batch_size == (2, 2)
    async with face.open(3, StateEnv) as env:
        view = env[[2, 0]]
        td = view.rand_action(await view.reset())
        td["count"] += torch.tensor([[7], [0]])
        await view.step(td)
        assert td["next", "count"].flatten().tolist() == [8, 1]


# -- how many are remembered --------------------------------------------------------------------------------


def test_views_share_what_they_can_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "MAX_SCOPES", 8)
    with SerialEnv(6, TalkingEnv, create_env_kwargs=numbered(6)) as env:
        running = env._env._running
        assert running is not None
        first, second = env[[0, 1]], env[[5, 3]]
        assert first.output_spec is second.output_spec
        for low, high in itertools.permutations(range(6), 2):
            assert env[[low, high]].index == [low, high]
        assert len(running._scopes) == 8
        assert len(running._specs) == 2
        assert first.index == [0, 1]
        assert env.index == [0, 1, 2, 3, 4, 5]


def test_views_of_envs_with_other_bounds_look_different() -> None:
    with SerialEnv(3, ParameterEnv) as env:
        assert env[[0, 1]].action_spec == env[[1, 2]].action_spec
    makers = [functools.partial(BoundedEnv, high) for high in (1.0, 2.0, 1.0)]
    with SerialEnv(3, makers) as env:
        highs = [env[i].action_spec.high.item() for i in range(3)]
        assert highs == [1.0, 2.0, 1.0]
        assert env[[0, 2]].output_spec is env[[2, 0]].output_spec
        assert [spec.high.item() for spec in env[[1, 0]].action_spec.unbind(0)] == [2.0, 1.0]
        assert [spec.high.item() for spec in env[[0, 1]].action_spec.unbind(0)] == [1.0, 2.0]


class BoundedEnv(RandomEnv):
    """Takes actions up to a bound."""

    def __init__(self, high: float) -> None:
        super().__init__()
        self.action_spec = Bounded(-1, high, shape=(1,))


# -- what hosts them ----------------------------------------------------------------------------------------


def test_the_processes_of_a_view() -> None:
    with ParallelEnv(4, TalkingEnv, num_processes=2) as env:
        assert (env[0].pids, env[1:].pids, env[3].num_processes) == (env.pids[:1], env.pids, 1)
    assert (env[1:3].pids, env[1:3].num_processes) == ((), 2)
    assert (SerialEnv(2, TalkingEnv)[0].pids, SerialEnv(2, TalkingEnv)[0].num_processes) == ((), 0)


@over_async_faces
def test_a_view_changes_no_arguments(face: TorchFace) -> None:
    with pytest.raises(AioEnvsError, match="update_kwargs of the envs that it is a view of"):
        face.make(2, TalkingEnv)[0].update_kwargs({"index": 1})


@over_plain_faces
def test_a_plain_view_changes_no_arguments(face: TorchFace) -> None:
    with pytest.raises(AioEnvsError, match="update_kwargs of the envs that it is a view of"):
        face.make(2, TalkingEnv)[0].update_kwargs({"index": 1})
