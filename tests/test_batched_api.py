"""The API of batched envs over torch envs: their options, their life, their states, devices and copies."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from talking_envs import TalkingEnv, numbered
from tensordict import TensorDict
from torch_faces import (
    ASYNC_TORCH_FACES,
    OWN_TORCH_FACES,
    PROCESS_TORCH_FACES,
    Driver,
    TorchFace,
    faces_called,
    over_every_torch_face,
    over_own_torch_faces,
    over_torch_faces,
)

import aioenvs
from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.envs import EnvBase, EnvCreator, GymEnv, check_env_specs, step_mdp
from aioenvs.errors import AioEnvsError, ClosedError, WorkerStartError
from aioenvs.faces.sync_envs import BatchedEnvBase
from aioenvs.specs import Categorical, Composite, Unbounded
from aioenvs.testing import (
    CountingEnv,
    DynamicShapeEnv,
    FailingEnv,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    NonTensorEnv,
    ParameterEnv,
    RandomEnv,
    StateEnv,
)

CLASSES = [SerialEnv, ParallelEnv, AsyncSerialEnv, AsyncParallelEnv]
PLAIN_FACES = [param for param in OWN_TORCH_FACES if not param.values[0].is_async]
over_classes = pytest.mark.parametrize("cls", CLASSES)
over_parallel_classes = pytest.mark.parametrize("cls", [ParallelEnv, AsyncParallelEnv])
over_plain_classes = pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
over_plain_faces = pytest.mark.parametrize("face", PLAIN_FACES)
over_async_faces = pytest.mark.parametrize("face", ASYNC_TORCH_FACES)
over_process_faces = pytest.mark.parametrize("face", PROCESS_TORCH_FACES)
over_one_of_each = pytest.mark.parametrize("face", faces_called("serial", "async-packed", "one-each", "async-thread"))


def observed(td: Any) -> list[int]:
    """The observations, of `next` if there was a step."""
    values: list[int] = td.get("next", td)["observation"].flatten().tolist()
    return values


# -- what they are ------------------------------------------------------------------------------------------


@over_plain_classes
def test_they_are_envs(cls: Any) -> None:
    env = cls(2, CountingEnv)
    assert isinstance(env, BatchedEnvBase)
    assert isinstance(env, EnvBase)
    assert isinstance(env, torch.nn.Module)
    assert isinstance(env[0], BatchedEnvBase)
    assert list(env.parameters()) == list(env.children()) == []
    assert env.is_closed
    with pytest.raises(NotImplementedError, match="cannot be called"):
        env()


@pytest.mark.parametrize("face", [p for p in PLAIN_FACES if p.values[0].name in ("serial", "packed")])
@pytest.mark.parametrize(
    "toy",
    [
        CountingEnv,
        NestedCountingEnv,
        MultiKeyCountingEnv,
        HeterogeneousCountingEnv,
        StateEnv,
        RandomEnv,
        ParameterEnv,
        NonTensorEnv,
        DynamicShapeEnv,
        lambda: CountingEnv(batch_size=[3]),
        lambda: GymEnv("CartPole-v1"),
        "CartPole-v1",
    ],
)
def test_they_are_what_their_specs_say(face: TorchFace, toy: Any) -> None:
    with face.make(2, toy) as env:
        check_env_specs(env, return_contiguous=False if toy is DynamicShapeEnv else None)


@over_every_torch_face
async def test_sizes_and_keys(face: TorchFace) -> None:
    async with face.open(3, face.toys.CountingEnv, {"batch_size": [2]}) as env:
        assert env.batch_size == env.shape == (3, 2)
        assert env.numel() == 6
        assert env.num_workers == 3
        assert env.action_spec.shape == (3, 2)
        assert env.reward_spec.shape == (3, 2, 1)
        for spec in (env.observation_spec, env.done_spec, env.input_spec, env.output_spec):
            assert spec.shape == (3, 2)
        assert env.action_keys == [env.action_key] == ["action"]
        assert env.reward_keys == [env.reward_key] == ["reward"]
        assert env.done_keys == ["done", "terminated"]
        assert env.reset_keys == ["_reset"]


@over_own_torch_faces
async def test_specs_are_locked_and_cannot_be_set(face: TorchFace) -> None:
    async with face.open(2, CountingEnv) as env:
        assert env.output_spec.is_locked
        assert env.input_spec.is_locked
        for name in ("output_spec", "input_spec", "action_spec", "reward_spec", "observation_spec", "batch_size"):
            with pytest.raises((AttributeError, RuntimeError)):
                setattr(env.env, name, getattr(env.env, name))
        with pytest.raises((AttributeError, RuntimeError)):
            env.env.device = "cpu"


@over_plain_classes
def test_specs_cannot_be_unlocked(cls: Any) -> None:
    env = cls(2, CountingEnv)
    assert env.is_spec_locked
    assert env.set_spec_lock_() is env
    with pytest.raises(AttributeError, match="follows from its envs"):
        env.set_spec_lock_(False)


# -- options ------------------------------------------------------------------------------------------------


@over_classes
def test_memmap_and_shared_memory_exclude_each_other(cls: Any) -> None:
    with pytest.raises(RuntimeError, match=r"memmap.*shared_memory"):
        cls(2, CountingEnv, memmap=True, shared_memory=True)


@over_classes
def test_steps_after_the_end_are_not_supported(cls: Any) -> None:
    with pytest.raises(ValueError, match="allow_step_when_done"):
        cls(2, CountingEnv, allow_step_when_done=True)
    assert cls(2, CountingEnv, allow_step_when_done=False).num_workers == 2


@pytest.mark.parametrize("cls", [SerialEnv, AsyncSerialEnv])
@pytest.mark.parametrize("option", [{"mp_start_method": "spawn"}, {"num_processes": 1}, {"step_timeout": 1.0}])
def test_envs_without_processes_take_no_options_for_them(cls: Any, option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(option))):
        cls(2, CountingEnv, **option)


@over_parallel_classes
@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_envs_in_this_process_have_no_start_method(cls: Any, backend: str) -> None:
    with pytest.raises(TypeError, match="mp_start_method='spawn'"):
        cls(2, CountingEnv, backend=backend, mp_start_method="spawn")


@over_parallel_classes
def test_the_serial_backend(cls: Any) -> None:
    env = cls(2, CountingEnv, backend="serial")
    assert env.num_processes == 0
    if cls is ParallelEnv:
        with env:
            assert observed(env.reset()) == [0, 0]


@over_parallel_classes
def test_serial_for_single(cls: Any) -> None:
    serial = AsyncSerialEnv if cls is AsyncParallelEnv else SerialEnv
    options = {"serial_for_single": True, "num_processes": 1, "mp_start_method": "spawn", "step_timeout": 1.0}
    for backend in ("process", "thread"):
        env = cls(1, CountingEnv, create_env_kwargs={"start": 3}, backend=backend, device="cpu", **options)
        assert type(env) is serial
        assert env.num_workers == 1
        assert env.device == torch.device("cpu")
    assert type(cls(num_workers=1, create_env_fn=[CountingEnv], serial_for_single=True)) is serial
    assert type(cls(2, CountingEnv, **options)) is cls
    assert type(cls(1, CountingEnv, serial_for_single=False)) is cls
    with pytest.raises(RuntimeError, match="list of 2"):
        cls(1, [CountingEnv] * 2, serial_for_single=True)


def test_a_single_serial_env_works() -> None:
    with ParallelEnv(1, CountingEnv, create_env_kwargs={"start": 3}, serial_for_single=True) as env:
        assert observed(env.rand_step(env.reset())) == [4]


@over_one_of_each
@pytest.mark.parametrize(
    "options",
    [
        {"consolidate": False},
        {"consolidate": True},
        {"use_buffers": True},
        {"use_buffers": False},
        {"shared_memory": True},
        {"shared_memory": False},
        {"memmap": True},
        {"memmap": True, "shared_memory": False},
        {"share_individual_td": False},
    ],
    ids=str,
)
async def test_options_that_change_no_result(face: TorchFace, options: dict[str, Any]) -> None:
    kept = set(os.listdir("/tmp"))
    async with face.open(2, CountingEnv, [{"start": 1}, {"start": 5}], **options) as env:
        rollout = await env.rollout(7, break_when_any_done=False)
        assert rollout["next", "observation"].squeeze(-1).tolist() == [[2, 3, 4, 5, 6, 2, 3], [6, 7, 8, 9, 10, 6, 7]]
        assert not [name for name in set(os.listdir("/tmp")) - kept if "aioenvs" in name]
    assert not [name for name in set(os.listdir("/tmp")) - kept if "aioenvs" in name]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of descriptors here")
@over_process_faces
@pytest.mark.parametrize("options", [{"memmap": True}, {"shared_memory": False}], ids=str)
async def test_the_block_may_be_on_disk(face: TorchFace, options: dict[str, Any]) -> None:
    before = _unnamed_files()
    async with face.open(2, CountingEnv, **options) as env:
        assert len(_unnamed_files() - before) == 1
        assert observed(await env.reset()) == [0, 0]


def _unnamed_files() -> set[str]:
    """Files that are open but have no name."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.endswith("(deleted)") and not target.startswith(("/memfd:", "/dev/shm")):
            found.add(target)
    return found


@pytest.fixture
def own_threads() -> Iterator[int]:
    """How many threads torch has here; as before, afterwards."""
    number = torch.get_num_threads()
    yield number
    assert torch.get_num_threads() == number
    torch.set_num_threads(number)


@over_own_torch_faces
async def test_the_parents_threads_are_left_alone(face: TorchFace, own_threads: int) -> None:
    async with face.open(2, TalkingEnv) as env:
        await env.reset()
        assert torch.get_num_threads() == own_threads


@over_async_faces
async def test_the_parents_threads_are_set_while_the_envs_are_open(face: TorchFace, own_threads: int) -> None:
    env = face.make(2, TalkingEnv, num_threads=own_threads + 1)
    assert torch.get_num_threads() == own_threads
    for _ in range(2):
        await env.reset()
        assert torch.get_num_threads() == own_threads + 1
        await env.close()
        assert torch.get_num_threads() == own_threads


@over_plain_faces
def test_the_callers_threads_are_set_while_the_envs_are_open(face: TorchFace, own_threads: int) -> None:
    env = face.make(2, TalkingEnv, num_threads=own_threads + 1)
    assert torch.get_num_threads() == own_threads
    for _ in range(2):
        env.reset()
        assert torch.get_num_threads() == own_threads + 1
        env[1].reset()
        env.close()
        assert torch.get_num_threads() == own_threads


@over_plain_faces
async def test_the_callers_threads_are_set_within_an_event_loop(face: TorchFace, own_threads: int) -> None:
    with face.make(2, TalkingEnv, num_threads=own_threads + 1) as env:
        assert torch.get_num_threads() == own_threads + 1
        env.reset()
    assert torch.get_num_threads() == own_threads


@over_async_faces
async def test_a_failed_start_restores_the_parents_threads(face: TorchFace, own_threads: int) -> None:
    env = Driver(face.make(2, FailingEnv, {"where": "init"}, num_threads=own_threads + 1))
    with pytest.raises(WorkerStartError, match="told to fail"):
        await env.start()
    assert torch.get_num_threads() == own_threads
    assert env.is_closed


@over_plain_faces
def test_a_failed_start_restores_the_callers_threads(face: TorchFace, own_threads: int) -> None:
    env = face.make(2, FailingEnv, {"where": "init"}, num_threads=own_threads + 1)
    with pytest.raises(WorkerStartError, match="told to fail"):
        env.reset()
    assert torch.get_num_threads() == own_threads


@over_process_faces
async def test_threads_of_a_worker(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        assert await env.ask("num_threads") == [1, 1]
    async with face.open(2, TalkingEnv, num_sub_threads=2) as env:
        assert await env.ask("num_threads") == [2, 2]
        assert {pid for pid, _ in await env.ask("where")} == set(env.pids)


@over_classes
@pytest.mark.parametrize("name", ["num_threads", "num_sub_threads"])
def test_numbers_of_threads_are_checked(cls: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        cls(2, CountingEnv, **{name: 0})
    with pytest.raises(TypeError, match=name):
        cls(2, CountingEnv, **{name: 1.5})


@over_own_torch_faces
async def test_buffers_for_what_varies(face: TorchFace) -> None:
    env = Driver(face.make(2, DynamicShapeEnv, use_buffers=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await env.start()
    assert [str(warning.message)[:11] for warning in caught if warning.category is UserWarning] == ["use_buffers"]
    td = env.rand_action(await env.reset())
    await env.step(td)
    assert [each["next", "observation"].shape for each in td.unbind(0)] == [(2, 2), (2, 2)]
    await env.close()


# -- what makes envs ----------------------------------------------------------------------------------------


@over_classes
def test_an_env_is_no_factory(cls: Any) -> None:
    single, batched = CountingEnv(), SerialEnv(2, CountingEnv)
    for env in (single, batched, AsyncSerialEnv(2, CountingEnv), batched[0], AsyncSerialEnv(2, CountingEnv)[0]):
        for given in (env, [CountingEnv, env]):
            with pytest.raises(TypeError, match=r"must make an env, but .* is one"):
                cls(2, given)
    assert batched.is_closed
    for given in (None, 3, CountingEnv().observation_spec, {"a": 1}):
        with pytest.raises(TypeError, match="create_env_fn must"):
            cls(2, given)


@over_own_torch_faces
@pytest.mark.parametrize(
    ("factory", "found"),
    [(dict, r"\{\}"), (lambda: None, "None"), (lambda: CountingEnv, "the class CountingEnv"), (lambda: [], r"\[\]")],
)
async def test_a_factory_that_makes_no_env(face: TorchFace, factory: Any, found: str) -> None:
    env = Driver(face.make(2, [CountingEnv, factory]))
    with pytest.raises(WorkerStartError, match=f"env 1.*{found}") as caught:
        await env.reset()
    assert 1 in caught.value.env_index
    assert isinstance(caught.value.__cause__, TypeError)
    assert env.is_closed


@over_own_torch_faces
async def test_a_factory_that_raises(face: TorchFace) -> None:
    kwargs = [{}, {"where": "init", "error": ValueError, "message": "no reactor"}]
    env = Driver(face.make(2, [CountingEnv, FailingEnv], kwargs))
    for _ in range(2):
        with pytest.raises(WorkerStartError, match=r"env 1.*no reactor") as caught:
            await env.start()
        assert isinstance(caught.value.__cause__, ValueError)
        assert env.is_closed
    env.update_kwargs([{}, {"where": "step"}])
    assert observed(await env.reset()) == [0, 0]
    await env.close()


@over_own_torch_faces
async def test_factories_of_all_kinds(face: TorchFace) -> None:
    def local() -> CountingEnv:
        return CountingEnv(start=3)

    factories = [
        CountingEnv,
        lambda: CountingEnv(start=1),
        functools.partial(CountingEnv, start=2),
        local,
        EnvCreator(CountingEnv, start=4),
        EnvCreator(lambda start: CountingEnv(start=start), start=1).make_variant(start=5),
    ]
    async with face.open(6, factories) as env:
        td = await env.reset()
        assert type(td).__name__ == "TensorDict"  # by their specs they are the same
        assert observed(td) == [0, 1, 2, 3, 4, 5]


@over_plain_faces
def test_a_creator_of_a_batch(face: TorchFace) -> None:
    creator = EnvCreator(lambda start: face.make(2, CountingEnv, {"start": start}), start=4)
    copied = pickle.loads(pickle.dumps(creator)) if not face.options else creator
    for make in (creator, copied, creator.make_variant(start=4)):
        with make() as env:
            assert observed(env.reset()) == [4, 4]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
async def test_start_methods(method: str) -> None:
    env = Driver(AsyncParallelEnv(2, lambda: TalkingEnv(start=4), num_processes=1, mp_start_method=method))
    td = env.rand_action(await env.reset())
    await env.step(td)
    assert observed(td) == [5, 5]
    assert td["next", "done"].dtype is torch.bool
    assert len(set(await env.ask("where"))) == 1
    assert await env.ask("num_threads") == [1, 1]
    await env.close()


# -- life ---------------------------------------------------------------------------------------------------


@over_own_torch_faces
async def test_they_start_when_first_used(face: TorchFace) -> None:
    for use in (
        lambda env: env.reset(),
        lambda env: env.set_seed(0),
        lambda env: env.state_dict(),
        lambda env: env.rollout(2),
        lambda env: env.call("shout"),
        lambda env: env.start(),
        lambda env: env.rand_step(),
    ):
        env = Driver(face.make(2, TalkingEnv))
        assert env.is_closed
        await use(env)
        assert not env.is_closed
        await env.close()
        assert env.is_closed


@over_own_torch_faces
async def test_starting_what_is_started_is_an_error(face: TorchFace) -> None:
    async with face.open(2, TalkingEnv) as env:
        with pytest.raises(RuntimeError, match="started already"):
            await env.start()
        assert observed(await env.reset()) == [0, 0]


@over_own_torch_faces
async def test_closing_what_is_closed_is_an_error(face: TorchFace) -> None:
    env = Driver(face.make(2, TalkingEnv))
    with pytest.raises(ClosedError, match="closed already, or was never started"):
        await env.close()
    await env.close(raise_if_closed=False)
    await env.start()
    await env.close()
    with pytest.raises(ClosedError):
        await env.close(raise_if_closed=True)
    await env.close(raise_if_closed=False)


@over_own_torch_faces
async def test_they_reopen_with_envs_of_their_own(face: TorchFace) -> None:
    env = Driver(face.make(2, TalkingEnv))
    for _ in range(2):
        await env.start()
        assert await env.read("custom_attr") == ["counting"] * 2
        await env.set_attr("custom_attr", "changed")
        await env.close()


@over_plain_faces
def test_a_with_block_bears_a_close(face: TorchFace) -> None:
    with face.make(2, TalkingEnv) as env:
        assert not env.is_closed
        env.close()
    assert env.is_closed
    with env as again:
        assert again is env
        assert not env.is_closed
        with env:
            pass
        assert env.is_closed


@over_async_faces
async def test_an_async_with_block_bears_a_close(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv)
    async with env as entered:
        assert entered is env
        assert not env.is_closed
        await env.close()
    assert env.is_closed
    with pytest.raises(LookupError, match="out of here"):
        async with env:
            raise LookupError("out of here")
    assert env.is_closed


@over_plain_faces
def test_specs_start_the_envs_and_are_known_afterwards(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv, {"batch_size": [3]})
    assert env.batch_size == (2, 3)
    assert not env.is_closed
    spec = env.observation_spec
    env.close()
    assert env.observation_spec == spec
    assert env.action_keys == ["action"]
    assert env.rand_action().batch_size == (2, 3)
    assert env.fake_tensordict().batch_size == (2, 3)
    assert env.is_closed


@over_async_faces
async def test_specs_of_async_envs_are_known_once_they_were_started(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv, {"batch_size": [3]})
    for name in ("batch_size", "observation_spec", "action_keys", "specs"):
        with pytest.raises(AioEnvsError, match=r"await start\(\) first"):
            getattr(env, name)
    with pytest.raises(AioEnvsError, match=r"await start\(\) first"):
        env.rand_action()
    await env.start()
    assert env.batch_size == (2, 3)
    assert env.reward_keys == ["reward"]
    await env.close()
    assert env.batch_size == (2, 3)
    assert env.specs["output_spec"].shape == (2, 3)
    assert env.is_closed


@over_async_faces
async def test_tasks_share_a_start(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv, numbered(2))
    results = await asyncio.gather(env[0].call("shout"), env[1].call("shout"), env[0].start())
    assert results[:2] == [["here is 0"], ["here is 1"]]
    await env.close()


@over_own_torch_faces
def test_repr_says_the_state(face: TorchFace) -> None:
    env = face.make(2, TalkingEnv)
    hosts = "num_processes=" in repr(env)
    assert hosts == face.in_processes
    assert repr(env).startswith(f"<{face.class_name} num_workers=2")
    assert repr(env).endswith("closed>")


# -- states -------------------------------------------------------------------------------------------------


@over_torch_faces
async def test_states_come_by_worker(face: TorchFace) -> None:
    async with face.open(2, face.toys.ParameterEnv, [{"gain": 1.0}, {"gain": 2.0}]) as env:
        states = await env.state_dict()
        assert isinstance(states, OrderedDict)
        assert list(states) == ["worker0", "worker1"]
        assert list(states["worker1"]) == ["gain", "offset", "steps", "head.weight", "head.bias"]
        assert [state["gain"].tolist() for state in states.values()] == [[1.0] * 3, [2.0] * 3]


@over_own_torch_faces
async def test_states_go_back(face: TorchFace) -> None:
    async with face.open(2, ParameterEnv, [{"gain": 1.0}, {"gain": 2.0}]) as env:
        await env.rollout(3)
        states = copy.deepcopy(await env.state_dict())
        assert [state["steps"].item() for state in states.values()] == [3, 3]
        states["worker1"]["gain"] += 5
        await env.reset()
        await env.load_state_dict(states)
        td = await env.step(env.rand_action())
        assert td["next", "observation"].tolist() == [[4.0] * 3, [28.0] * 3]
        states["worker0"]["gain"] += 1  # the envs have theirs
        assert [state["gain"][0].item() for state in (await env.state_dict()).values()] == [1, 7]


@over_own_torch_faces
async def test_one_state_for_all(face: TorchFace) -> None:
    async with face.open(3, ParameterEnv, [{"gain": float(i)} for i in range(3)]) as env:
        state = ParameterEnv(gain=9.0).state_dict()
        await env.load_state_dict(state)
        assert [state["gain"].tolist() for state in (await env.state_dict()).values()] == [[9.0] * 3] * 3
        td = await env.rollout(2)
        assert td["next", "observation"][..., 0].tolist() == [[9, 18]] * 3


@over_own_torch_faces
async def test_a_state_that_is_missing(face: TorchFace) -> None:
    async with face.open(3, ParameterEnv) as env:
        states = await env.state_dict()
        for name in states:
            some = {other: state for other, state in states.items() if other != name}
            with pytest.raises(KeyError, match=f"3 envs.*{name}"):
                await env.load_state_dict(some)
        larger = {**states, "worker3": states["worker0"]}
        with pytest.raises(KeyError, match=r"3 envs.*worker3.*strict=False"):
            await env.load_state_dict(larger)
        await env.load_state_dict(larger, strict=False)


@over_own_torch_faces
async def test_a_state_that_does_not_fit(face: TorchFace) -> None:
    async with face.open(2, ParameterEnv) as env:
        with pytest.raises(RuntimeError, match="Missing key") as caught:
            await env.load_state_dict({"gain": torch.zeros(3)})
        assert caught.value.env_index == (0, 1)
        await env.load_state_dict({"gain": torch.full((3,), 4.0)}, strict=False)
        assert [state["gain"][0].item() for state in (await env.state_dict()).values()] == [4, 4]


@over_own_torch_faces
async def test_tensors_that_are_assigned_are_each_envs_own(face: TorchFace) -> None:
    async with face.open(2, ParameterEnv) as env:
        state = ParameterEnv(gain=9.0).state_dict()
        await env.load_state_dict(state, assign=True)
        state["gain"] += 1
        own = [state["gain"] for state in (await env.state_dict()).values()]
        assert [gain[0].item() for gain in own] == [9, 9]
        assert own[0].data_ptr() != own[1].data_ptr()


async def test_states_travel_between_faces() -> None:
    kwargs = [{"gain": 3.0}, {"offset": 2.0}]
    with SerialEnv(2, ParameterEnv, create_env_kwargs=kwargs) as first:
        first.rollout(2)
        states = first.state_dict()
        expected = first.rand_step()["next", "observation"]
    for other in (
        ParallelEnv(2, ParameterEnv, num_processes=1),
        AsyncParallelEnv(2, ParameterEnv),
        SerialEnv(2, ParameterEnv),
    ):
        env = Driver(other)
        await env.load_state_dict(states)
        assert torch.equal((await env.rand_step())["next", "observation"], expected)
        await env.close()


@over_one_of_each
async def test_gymnasium_envs_have_empty_states(face: TorchFace) -> None:
    async with face.open(2, "CartPole-v1") as env:
        states = await env.state_dict()
        assert states == OrderedDict(worker0={}, worker1={})
        await env.load_state_dict(states)
        await env.load_state_dict({})


# -- devices ------------------------------------------------------------------------------------------------


@over_own_torch_faces
async def test_the_device_of_results(face: TorchFace) -> None:
    async with face.open(2, CountingEnv) as env:
        assert env.device is None
        td = await env.reset()
        assert td.device is None
        assert env.env.to("cpu") is env.env
        assert env.device == torch.device("cpu")
        for spec in (env.output_spec, env.input_spec, env.action_spec, env.full_reward_spec):
            assert spec.device == torch.device("cpu")
        td = env.rand_action(await env.reset())
        assert td.device == torch.device("cpu")
        td, following = await env.step_and_maybe_reset(td)
        assert td["next"].device == following.device == torch.device("cpu")
        assert (await env.rollout(2)).device == torch.device("cpu")


@over_own_torch_faces
async def test_the_device_is_that_of_the_envs(face: TorchFace) -> None:
    async with face.open(2, CountingEnv, {"device": "cpu"}) as env:
        assert env.device == torch.device("cpu")
        assert (await env.reset()).device == torch.device("cpu")
        assert env.observation_spec.device == torch.device("cpu")


@over_own_torch_faces
async def test_the_device_can_be_said_before_the_start(face: TorchFace) -> None:
    for env in (face.make(2, CountingEnv, device="cpu"), face.make(2, CountingEnv).to("cpu")):
        driver = Driver(env)
        assert driver.is_closed
        assert driver.device == torch.device("cpu")
        assert (await driver.reset()).device == torch.device("cpu")
        await driver.close()
        assert driver.device == torch.device("cpu")
        assert driver.observation_spec.device == torch.device("cpu")


@over_own_torch_faces
async def test_the_device_can_change_while_they_are_closed(face: TorchFace) -> None:
    async with face.open(2, CountingEnv) as env:
        await env.close()
        env.env.to("cpu")
        assert env.observation_spec.device == torch.device("cpu")
        assert env.is_closed
        assert (await env.reset()).device == torch.device("cpu")


@over_classes
def test_results_cannot_go_to_meta(cls: Any) -> None:
    with pytest.raises(ValueError, match="meta"):
        cls(2, CountingEnv, device="meta")
    env = cls(2, CountingEnv)
    with pytest.raises(ValueError, match="meta"):
        env.to("meta")
    assert env.device is None


@over_own_torch_faces
async def test_a_device_that_is_not_there(face: TorchFace) -> None:
    env = Driver(face.make(2, CountingEnv, device="cuda:99"))
    with pytest.raises((AssertionError, RuntimeError)):
        await env.reset()
    assert env.is_closed
    async with face.open(2, CountingEnv) as env:
        with pytest.raises((AssertionError, RuntimeError)):
            env.env.to("cuda:99")
        assert env.device is None
        assert observed(await env.reset()) == [0, 0]


@over_own_torch_faces
async def test_episodes_go_on_after_a_move(face: TorchFace) -> None:
    async with face.open(2, CountingEnv) as env:
        td = await env.step(env.rand_action(await env.reset()))
        env.env.to("cpu")
        td = await env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))
        assert observed(td) == [0, 1]
        assert td.device == torch.device("cpu")
        assert observed(await env.step(env.rand_action(td))) == [1, 2]


# -- copies -------------------------------------------------------------------------------------------------

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda env: pickle.loads(pickle.dumps(env)),
    "cloudpickle": lambda env: cloudpickle.loads(cloudpickle.dumps(env)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@over_own_torch_faces
async def test_a_copy_is_not_started_and_leaves_the_original_alone(face: TorchFace, copied: Any) -> None:
    async with face.open(2, TalkingEnv, [{"start": 1}, {"start": 2}], device="cpu") as env:
        td = await env.reset()
        twin = Driver(copied(env.env))
        assert type(twin.env) is type(env.env)
        assert twin.is_closed
        assert not env.is_closed
        assert (twin.num_workers, twin.device) == (2, torch.device("cpu"))
        await env.step(env.rand_action(td))
        assert observed(td) == [2, 3]
        assert observed(await twin.reset()) == [1, 2]
        await twin.close()
        assert not env.is_closed
        assert observed(await env.reset()) == [1, 2]


def test_a_copy_of_envs_that_are_not_started() -> None:
    env = SerialEnv(2, lambda: CountingEnv(start=3))
    twin = cloudpickle.loads(cloudpickle.dumps(env))
    assert env.is_closed
    with twin:
        assert observed(twin.reset()) == [3, 3]
    twin.update_kwargs({"start": 1})
    assert env._env._config.kwargs == ({}, {})


# -- what single envs do too --------------------------------------------------------------------------------


@over_own_torch_faces
async def test_maybe_reset(face: TorchFace) -> None:
    async with face.open(3, CountingEnv, [{"max_steps": count} for count in (1, 2, 1)]) as env:
        td = await env.step(env.rand_action(await env.reset()))
        root = step_mdp(td).set("mine", torch.arange(3))
        following = await env.maybe_reset(root)
        assert observed(following) == [0, 1, 0]
        assert following["mine"].tolist() == [0, 1, 2]
        assert not following["done"].any()
        assert "_reset" not in following
        assert "_reset" not in root
        assert await env.maybe_reset(following) is following


@over_own_torch_faces
async def test_maybe_reset_of_envs_that_differ(face: TorchFace) -> None:
    async with face.open(2, [functools.partial(Keyed, name) for name in "ab"]) as env:
        td = await env.step(env.rand_action(await env.reset()))
        assert (await env.maybe_reset(step_mdp(td)))["x"].tolist() == [[1.0], [1.0]]
        td["next"][1]["b", "done"].fill_(True)
        assert (await env.maybe_reset(step_mdp(td)))["x"].tolist() == [[1.0], [0.0]]


@over_own_torch_faces
async def test_a_reset_that_shows_the_masks_only(face: TorchFace) -> None:
    async with face.open(2, StateEnv) as env:
        td = await env.step(env.rand_action(await env.reset()))
        td = step_mdp(td).set("_reset", torch.tensor([[True], [False]]))
        following = await env.reset(td, select_reset_only=True)
        assert not following["done"].any()
        assert await env.reset(td, select_reset_only=True) is not td


@over_torch_faces
async def test_the_mask_of_a_step_stays_unless_nobody_steps(face: TorchFace) -> None:
    async with face.open(2, face.toys.CountingEnv) as env:
        td = await env.reset()
        for mask, stays in (([True, False], True), ([True, True], True), ([False, False], False)):
            td = env.rand_action(td).set("_step", torch.tensor(mask))
            td = await env.step(td)
            assert ("_step" in td) is stays
            td.pop("_step", None)


@pytest.mark.parametrize("mask", [True, False])
def test_the_mask_of_a_step_of_a_single_env(mask: bool) -> None:
    env = CountingEnv()
    td = env.step(env.rand_action(env.reset()).set("_step", torch.tensor(mask)))
    assert ("_step" in td) is mask


class Keyed(EnvBase):
    """An env with a key of its own for the action, the reward and the done flags."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.observation_spec = Composite(x=Unbounded((1,)))
        self.action_spec = Composite({f"push_{name}": Unbounded((1,))})
        self.reward_spec = Composite({f"gain_{name}": Unbounded((1,))})
        flag = Categorical(2, (1,), dtype=torch.bool)
        self.done_spec = Composite({name: Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())})

    def _reset(self, tensordict: Any = None) -> TensorDict:
        self.x = torch.zeros(1)
        return TensorDict({"x": self.x})

    def _step(self, tensordict: Any) -> TensorDict:
        self.x = self.x + 1
        return TensorDict({"x": self.x, f"gain_{self.name}": tensordict[f"push_{self.name}"]})

    def _set_seed(self, seed: int | None) -> None: ...


def test_what_envs_that_differ_leave_behind() -> None:
    with SerialEnv(2, [functools.partial(Keyed, name) for name in "ab"]) as env:
        root = env.step_mdp(env.rand_step(env.reset()))
        assert [sorted(part.keys()) for part in root.tensordicts] == [["a", "x"], ["b", "x"]]


@over_one_of_each
async def test_set_truncated_of_envs_that_differ(face: TorchFace) -> None:
    async with face.open(2, [functools.partial(Keyed, name) for name in "ab"]) as env:
        td = await env.rollout(3, set_truncated=True)
        for part, name in zip(td.unbind(0), "ab", strict=True):
            assert part["next", name, "truncated"].flatten().tolist() == [False, False, True]
            assert part["next", name, "done"].flatten().tolist() == [False, False, True]


@over_plain_classes
def test_options_of_the_other_class(cls: Any) -> None:
    same = {"serial_for_single": False, "non_blocking": True, "daemon": True, "shutdown_timeout": 3.0}
    with cls(2, CountingEnv, **same) as env:
        assert env.reset().batch_size == (2,)
    if cls is ParallelEnv:
        assert env._env._config.timeouts.close == 3.0
        with pytest.raises(ValueError, match="close_timeout"):
            cls(2, CountingEnv, shutdown_timeout=-1)
    else:
        with pytest.raises(TypeError, match="mp_start_method"):
            cls(2, CountingEnv, mp_start_method="spawn")


def test_methods_for_tests_and_searches() -> None:
    with SerialEnv(2, CountingEnv) as env:
        env.check_env_specs(seed=0)
        assert env.cardinality() == env.full_action_spec.cardinality()
        assert env.all_actions().batch_size == (env.cardinality(), 2)


@over_torch_faces
async def test_what_becomes_of_the_argument_of_a_reset(face: TorchFace) -> None:
    async with face.open(2, face.toys.CountingEnv) as env:
        td = await env.step(env.rand_action(await env.reset()))
        root = td["next"].exclude("reward").set("_reset", torch.tensor([[True], [False]]))
        following = await env.reset(root)
        assert observed(following) == [0, 1]
        if face.library.differs("the argument of a reset"):
            assert following is root
        else:
            assert following is not root
            assert observed(root) == [1, 1]


# -- texts and signatures -----------------------------------------------------------------------------------

SIGNATURES = {
    "reset": ["tensordict", "list_of_kwargs", "select_reset_only", "kwargs"],
    "maybe_reset": ["tensordict"],
    "step": ["tensordict", "copy"],
    "step_and_maybe_reset": ["tensordict", "copy"],
    "rand_step": ["tensordict"],
    "rand_action": ["tensordict"],
    "set_seed": ["seed", "static_seed"],
    "load_state_dict": ["state_dict", "strict", "assign"],
    "update_kwargs": ["kwargs"],
    "to": ["device"],
    "close": ["raise_if_closed"],
    "call": ["name", "args", "kwargs"],
    "get_attr": ["name"],
    "set_attr": ["name", "values"],
    "start": [],
    "render": [],
}
TALKING = [name for name in SIGNATURES if inspect.iscoroutinefunction(getattr(AsyncParallelEnv, name))]


@over_classes
def test_parameters_have_their_usual_names(cls: Any) -> None:
    for name, expected in SIGNATURES.items():
        parameters = dict(inspect.signature(getattr(cls, name)).parameters)
        timeout = parameters.pop("timeout", None)
        assert list(parameters)[1:] == expected, name
        assert (timeout is None) == (name not in TALKING or name in ("start", "close")), name
        assert timeout is None or timeout.kind is inspect.Parameter.KEYWORD_ONLY, name
    assert list(inspect.signature(cls.rollout).parameters)[1:4] == ["max_steps", "policy", "callback"]


@pytest.mark.parametrize(("plain", "coroutine"), [(SerialEnv, AsyncSerialEnv), (ParallelEnv, AsyncParallelEnv)])
def test_the_plain_classes_have_all_that_the_async_ones_have(plain: Any, coroutine: Any) -> None:
    own = inspect.signature(plain.__init__).parameters
    assert own == inspect.signature(coroutine.__init__).parameters
    for name in dir(coroutine):
        if not name.startswith("_"):
            assert hasattr(plain, name), name
            mine, theirs = getattr(plain, name), getattr(coroutine, name)
            if callable(theirs) and name != "rollout":
                assert mine.__doc__ == theirs.__doc__, name
            assert inspect.getdoc(mine), name


def test_what_talks_to_envs_is_a_coroutine_method() -> None:
    assert set(TALKING) >= {"reset", "step", "step_and_maybe_reset", "rand_step", "set_seed", "load_state_dict"}
    for name in [*TALKING, "rollout", "state_dict"]:
        assert inspect.iscoroutinefunction(getattr(aioenvs.AsyncSerialEnv, name)), name
        assert not inspect.iscoroutinefunction(getattr(SerialEnv, name)), name


@over_torch_faces
async def test_the_argument_is_called_tensordict(face: TorchFace) -> None:
    async with face.open(2, face.toys.CountingEnv) as env:
        td = await env.reset(tensordict=None)
        td = env.rand_action(tensordict=td)
        td = await env.step(tensordict=td)
        assert observed(td) == [1, 1]
        td, _ = await env.step_and_maybe_reset(tensordict=td)
        assert observed(td) == [2, 2]
        td = await env.rand_step(tensordict=td)
        assert observed(td) == [3, 3]
        following = await env.set_seed(seed=1, static_seed=True)
        assert following == 1
        rollout = await env.rollout(max_steps=2, policy=None, callback=None, tensordict=td, auto_reset=False)
        assert rollout["next", "observation"].squeeze(-1).tolist() == [[4, 5]] * 2


def test_a_misspelt_option_is_named_with_the_class_it_was_given_to() -> None:
    for make in (ParallelEnv, SerialEnv):
        with pytest.raises(TypeError, match=rf"^{make.__name__}\(\) got an unexpected .* 'num_worker'"):
            make(2, CountingEnv, num_worker=1)  # type: ignore[call-arg]


def test_messages_of_a_plain_face_call_it_by_its_name() -> None:
    env = ParallelEnv(2, CountingEnv)
    with pytest.raises(ClosedError, match=r"<ParallelEnv "):
        env.close()


def test_an_async_face_says_where_attributes_of_the_envs_are() -> None:
    env = AsyncSerialEnv(2, CountingEnv)
    with pytest.raises(AttributeError, match=r"await get_attr\('max_steps'\)"):
        _ = env.max_steps
    assert not hasattr(env, "_max_steps")


def test_specs_of_another_library_are_refused_with_the_place_to_get_them() -> None:
    class Spec:
        pass

    env = CountingEnv()
    with pytest.raises(TypeError, match=r"found .*Spec.*import specs from aioenvs\.specs"):
        env.observation_spec = Spec()
