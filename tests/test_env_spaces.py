"""Values of every space, on their way from the caller to the env and back."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import FACES, Face
from gymnasium import spaces
from space_envs import (
    FIXED,
    SPACES,
    EchoEnv,
    OptionsEnv,
    OverwritingEnv,
    ReusingEnv,
    ScriptedEnv,
    describe,
)
from tensordict import NonTensorData, NonTensorStack, TensorDict

from aioenvs import SerialEnv
from aioenvs.errors import AioEnvsError, SpecMismatchError
from aioenvs.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, NonTensor, Unbounded

NUM_ENVS = 3
BOX = spaces.Box(-10, 10, (2,))
BYTES = spaces.Box(0, 255, (2,), dtype=np.uint8)
PAIR = spaces.Dict(a=BOX, b=spaces.Discrete(3))
GOOD = np.zeros(2, np.float32)
KINDS = {
    spaces.Box: (Bounded, Unbounded, Binary),
    spaces.Discrete: (Categorical,),
    spaces.MultiDiscrete: (MultiCategorical,),
    spaces.MultiBinary: (Binary,),
}
SOME = tuple(face for face in FACES if face.name in ("serial", "async-packed"))

some = pytest.mark.parametrize("face", SOME, ids=lambda face: face.name)
Leaves = Iterator[tuple[tuple[str, ...], Any, list[Any]]]


def leaves(space: Any, key: tuple[str, ...], values: list[Any]) -> Leaves:
    """Key, space and values, one per env, of each member that contains no others."""
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from leaves(child, (*key, name), [value[name] for value in values])
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from leaves(child, (*key, str(index)), [value[index] for value in values])
    else:
        yield key, space, values


def is_fixed(space: Any) -> bool:
    return isinstance(space, tuple(KINDS))


def draw(space: Any, seed: int) -> list[Any]:
    space.seed(seed)
    return [space.sample() for _ in range(NUM_ENVS)]


def mixed(first: list[Any], second: list[Any], rows: set[int]) -> list[Any]:
    return [second[row] if row in rows else first[row] for row in range(NUM_ENVS)]


def mask_of(*rows: int) -> torch.Tensor:
    return torch.tensor([row in rows for row in range(NUM_ENVS)])


def act(td: TensorDict, space: Any, values: list[Any]) -> TensorDict:
    for key, leaf, column in leaves(space, ("action",), values):
        if is_fixed(leaf):
            td[key] = torch.from_numpy(np.stack([np.asarray(value, leaf.dtype) for value in column]))
        else:
            td[key] = NonTensorStack(*[NonTensorData(value) for value in column])
    return td


def assert_holds(td: TensorDict, key: tuple[str, ...], space: Any, values: list[Any]) -> None:
    for path, leaf, column in leaves(space, key, values):
        found = td.get(path)
        if is_fixed(leaf):
            expected = np.stack([np.asarray(value, leaf.dtype) for value in column])
            assert describe(found.numpy()) == describe(expected), path
        else:
            assert [describe(value) for value in found.tolist()] == [describe(value) for value in column], path


def told(values: list[Any]) -> list[dict[str, Any]]:
    return [{"options": {"value": value}} for value in values]


@some
@pytest.mark.parametrize("name", SPACES)
@pytest.mark.every_combination
async def test_values_reach_the_env_and_come_back(name: str, face: Face) -> None:
    space = SPACES[name]()
    first, second, third, fourth = (draw(space, seed) for seed in range(4))
    async with face.open(NUM_ENVS, functools.partial(EchoEnv, space)) as env:
        td = await face.call(env.reset, list_of_kwargs=told(first))
        assert_holds(td, ("echo",), space, first)
        td = (await face.call(env.step, act(td, space, second)))["next"]
        assert_holds(td, ("echo",), space, second)
        assert td["seen"] == [describe(value) for value in second]

        td = TensorDict({"_reset": mask_of(1)}, [NUM_ENVS])
        td = await face.call(env.reset, td, list_of_kwargs=told(third))
        assert_holds(td, ("echo",), space, mixed(second, third, {1}))
        assert td["seen"] == [describe(second[0]), "reset", describe(second[2])]

        td = act(TensorDict({"_step": mask_of(0, 1)}, [NUM_ENVS]), space, fourth)
        td = (await face.call(env.step, td))["next"]
        assert_holds(td, ("echo",), space, mixed(fourth, second, {2}))
        assert td["seen"] == [describe(fourth[0]), describe(fourth[1]), describe(second[2])]
        assert td["reward"].tolist() == [[2.0], [1.0], [0.0]]


@some
@pytest.mark.parametrize("name", SPACES)
async def test_an_observation_alone_and_at_the_end_of_an_episode(name: str, face: Face) -> None:
    space = SPACES[name]()
    first, second, third = (draw(space, seed) for seed in range(3))
    key = () if isinstance(space, spaces.Dict) else ("observation",)
    factory = functools.partial(EchoEnv, space, plain=True, length=2)
    async with face.open(NUM_ENVS, factory) as env:
        td = await face.call(env.reset, list_of_kwargs=told(first))
        assert_holds(td, key, space, first)
        step, td = await face.call(env.step_and_maybe_reset, act(td, space, second))
        assert_holds(step["next"], key, space, second)
        assert_holds(td, key, space, second)
        step, td = await face.call(env.step_and_maybe_reset, act(td, space, third))
        assert step["next", "truncated"].all()
        assert_holds(step["next"], key, space, third)
        assert_holds(td, key, space, first)


@pytest.mark.parametrize("name", SPACES)
def test_specs(name: str) -> None:
    space = SPACES[name]()
    with SerialEnv(NUM_ENVS, functools.partial(EchoEnv, space)) as env:
        assert_specs(env.full_action_spec, space, "action")
        assert_specs(env.observation_spec, space, "echo")
        if is_fixed(space):
            assert env.action_spec is env.full_action_spec["action"]
        assert (env.batch_size, env.action_spec.shape[0]) == (torch.Size([NUM_ENVS]), NUM_ENVS)


def assert_specs(spec: Composite, space: Any, name: str) -> None:
    columns = list(leaves(space, (name,), draw(space, 0)))
    under = {key if isinstance(key, tuple) else (key,) for key in spec.keys(True, True)}
    assert {key for key in under if key[0] == name} == {key for key, _, _ in columns}
    for key, leaf, column in columns:
        found = spec[key]
        if not is_fixed(leaf):
            assert isinstance(found, NonTensor)
            assert found.shape == (NUM_ENVS,)
            continue
        values = torch.from_numpy(np.stack([np.asarray(value, leaf.dtype) for value in column]))
        assert isinstance(found, KINDS[type(leaf)])
        assert (found.shape, found.dtype) == (values.shape, values.dtype)
        assert found.is_in(values)


@some
@pytest.mark.parametrize("name", SPACES)
async def test_random_actions_are_in_the_space(name: str, face: Face) -> None:
    space = SPACES[name]()
    async with face.open(NUM_ENVS, functools.partial(EchoEnv, space)) as env:
        td = await face.call(env.reset, list_of_kwargs=told(draw(space, 0)))
        for _ in range(3):
            td = await face.call(env.rand_step, td)
            assert not [seen for seen in td["next", "seen"] if seen.startswith("no action")]


@pytest.mark.slow
async def test_large_payloads_in_both_directions_at_once(face: Face) -> None:
    size = 1_000_000  # more than any pipe or socket holds
    space = spaces.Text(size)
    texts = [letter * size for letter in "abc"]
    async with face.open(NUM_ENVS, functools.partial(EchoEnv, space, plain=True)) as env:
        td = await face.call(env.reset, list_of_kwargs=told(["", "", ""]))
        for _ in range(2):
            td = act(td, space, texts)
            td = await face.call(env.step, td)
            assert td["next", "observation"] == texts


@some
@pytest.mark.parametrize("kind", ReusingEnv.spaces)
async def test_an_env_may_return_the_same_array_each_time(kind: str, face: Face) -> None:
    space = ReusingEnv.spaces[kind]
    key = () if kind == "dict" else ("observation",)
    async with face.open(NUM_ENVS, functools.partial(ReusingEnv, kind, length=2)) as env:
        roots, nexts = [await face.call(env.reset)], []
        for _ in range(4):
            step, root = await face.call(env.step_and_maybe_reset, env.rand_action(roots[-1]))
            roots.append(root)
            nexts.append(step["next"])
    for found, numbers in ((roots, [-1, 1, -1, 1, -1]), (nexts, [1, 2, 1, 2])):
        for td, number in zip(found, numbers, strict=True):
            value = ReusingEnv(kind)
            value.array[:] = number
            assert_holds(td, key, space, [value.observation] * NUM_ENVS)


@some
@pytest.mark.parametrize("kind", [spaces.Tuple, spaces.Sequence])
async def test_an_env_may_change_its_action(kind: Any, face: Face) -> None:
    space = kind(BOX) if kind is spaces.Sequence else kind((BOX,))
    actions = [(np.full(2, row, np.float32),) for row in range(NUM_ENVS)]
    expected = [describe(action) for action in actions]
    async with face.open(NUM_ENVS, functools.partial(OverwritingEnv, space)) as env:
        td = await face.call(env.step, act(await face.call(env.reset), space, actions))
    assert [describe(action) for action in actions] == expected
    assert_holds(td, ("action",), space, actions)


# -- envs that do not keep their word --------------------------------------------------------------------

LIES: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "shape": (BOX, GOOD, np.zeros(3, np.float32), ["(2,)", "(3,)", "'observation'"]),
    "one dim more": (BOX, GOOD, np.zeros((1, 2), np.float32), ["(2,)", "(1, 2)", "'observation'"]),
    "scalar": (BOX, GOOD, 1.0, ["(2,)", "()"]),
    "ragged": (BOX, GOOD, [[1.0], [1.0, 2.0]], ["float32", "list"]),
    "text": (BOX, GOOD, "ab", ["float32", "<U2"]),
    "nothing": (BOX, GOOD, None, ["float32", "None"]),
    "float32 overflow": (BOX, GOOD, np.array([1e300, 0.0]), ["float32", "float64", "1.e+300"]),
    "complex": (BOX, GOOD, np.zeros(2, np.complex64), ["float32", "complex64"]),
    "floats for bytes": (BYTES, np.zeros(2, np.uint8), np.zeros(2), ["uint8", "float64"]),
    "int out of range": (BYTES, np.zeros(2, np.uint8), np.array([256, 0], np.uint16), ["uint8", "uint16", "256"]),
    "negative for bytes": (BYTES, np.zeros(2, np.uint8), np.array([-1, 0], np.int8), ["uint8", "int8"]),
    "float for discrete": (spaces.Discrete(3), 0, 1.0, ["int64", "float64"]),
    "array for discrete": (spaces.Discrete(3), 0, np.array([1]), ["int64", "()", "(1,)"]),
    "huge int for discrete": (spaces.Discrete(3), 0, 2**70, ["int64", str(2**70)]),
    "huge int for int16": (spaces.Discrete(3, dtype=np.int16), 0, 2**20, ["int16", str(2**20)]),
    "huge np.int64 for int16": (spaces.Discrete(3, dtype=np.int16), 0, np.int64(2**16), ["int16", str(2**16)]),
    "missing member": (PAIR, {"a": GOOD, "b": 0}, {"a": GOOD}, ["'a'", "'b'"]),
    "no dict": (PAIR, {"a": GOOD, "b": 0}, None, ["'a'", "'b'", "None"]),
    "member": (PAIR, {"a": GOOD, "b": 0}, {"a": GOOD[:1], "b": 0}, ["('a',)", "(2,)", "(1,)"]),
    "short tuple": (spaces.Tuple((BOX, BOX)), (GOOD, GOOD), (GOOD,), ["observation", "1"]),
    "long tuple": (spaces.Tuple((BOX, BOX)), (GOOD, GOOD), (GOOD, GOOD, GOOD), ["observation", "3"]),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("face", [FACES[1], FACES[2]], ids=lambda face: face.name)
async def test_a_step_against_the_space(name: str, face: Face) -> None:
    space, good, bad, words = LIES[name]
    factories = [lambda value=value: ScriptedEnv(space, good, value) for value in (good, good, bad)]
    async with face.open(NUM_ENVS, factories) as env:
        td = await face.call(env.reset)
        with pytest.raises(SpecMismatchError) as caught:
            await face.call(env.step, env.rand_action(td))
        assert [word for word in ("env 2", *words) if word not in str(caught.value)] == []
        await face.call(env.reset)


@pytest.mark.parametrize("face", [FACES[1], FACES[2]], ids=lambda face: face.name)
async def test_a_reset_against_the_space(face: Face) -> None:
    values = (GOOD, np.zeros(3), GOOD)
    factories = [lambda value=value: ScriptedEnv(BOX, value, GOOD) for value in values]
    async with face.open(NUM_ENVS, factories) as env:
        with pytest.raises(SpecMismatchError, match=r"env 1: expected float32.*\(2,\).*observation.*\(3,\)"):
            await face.call(env.reset)


CASTS: dict[str, tuple[Any, Any, Any]] = {
    "float64": (BOX, np.array([0.1, 2.0]), np.array([0.1, 2.0], np.float32)),
    "float64 infinity": (BOX, np.array([np.inf, np.nan]), np.array([np.inf, np.nan], np.float32)),
    "float16": (BOX, np.ones(2, np.float16), np.ones(2, np.float32)),
    "integers for floats": (BOX, np.array([1, 2]), np.array([1, 2], np.float32)),
    "list": (BOX, [0.5, 1.5], np.array([0.5, 1.5], np.float32)),
    "list of bytes": (BYTES, [1, 255], np.array([1, 255], np.uint8)),
    "int64 bytes": (BYTES, np.array([1, 255]), np.array([1, 255], np.uint8)),
    "bools for bytes": (BYTES, np.array([True, False]), np.array([1, 0], np.uint8)),
    "bools for bits": (spaces.MultiBinary(2), np.array([True, False]), np.array([1, 0], np.int8)),
    "int64 bits": (spaces.MultiBinary(2), np.array([1, 0]), np.array([1, 0], np.int8)),
    "float for 0-d": (spaces.Box(-1, 1, ()), 0.25, np.array(0.25, np.float32)),
    "int32 for discrete": (spaces.Discrete(3), np.int32(2), np.array(2)),
    "array for discrete": (spaces.Discrete(3), np.array(2, np.uint8), np.array(2)),
    "bool for discrete": (spaces.Discrete(3), True, np.array(1)),
    "swapped bytes": (BOX, np.array([1, 2], ">f4"), np.array([1, 2], np.float32)),
    "reversed": (BOX, np.array([1, 2], np.float32)[::-1], np.array([2, 1], np.float32)),
    "list for tuple": (spaces.Tuple((BOX,)), [GOOD], GOOD),
}


@pytest.mark.parametrize("name", CASTS)
def test_what_fits_is_cast(name: str) -> None:
    space, value, expected = CASTS[name]
    key = ("observation", "0") if isinstance(space, spaces.Tuple) else "observation"
    with SerialEnv(2, lambda: ScriptedEnv(space, value, value)) as env:
        td = env.rand_step(env.reset())
    for found in (td[key], td["next"][key]):
        assert describe(found.numpy()) == describe(np.stack([expected] * 2))


REWARDS = [2, np.float32(2), np.float64(2), np.int64(2), np.array(2.0), np.array([2]), np.float32(np.inf), True]


@pytest.mark.parametrize("reward", REWARDS, ids=repr)
def test_rewards_are_float32(reward: Any) -> None:
    with SerialEnv(2, lambda: ScriptedEnv(BOX, GOOD, GOOD, reward=reward)) as env:
        found = env.rand_step(env.reset())["next", "reward"]
    assert found.dtype == torch.float32
    assert found.tolist() == [[float(np.asarray(reward).item())]] * 2


@pytest.mark.parametrize("reward", [None, "much", np.zeros(2), [1.0], 1e300], ids=str)
def test_what_is_no_reward_is_refused(reward: Any) -> None:
    with SerialEnv(2, lambda: ScriptedEnv(BOX, GOOD, GOOD, reward=reward)) as env:
        td = env.rand_action(env.reset())
        with pytest.raises(SpecMismatchError, match=r"env 0.*reward"):
            env.step(td)


@pytest.mark.parametrize("name", ["action", "reward", "done", "terminated", "truncated", "next", "_reset", "_step"])
async def test_an_observation_key_that_is_taken(name: str) -> None:
    for face, member in ((FACES[1], BOX), (FACES[2], spaces.Dict(inner=BOX))):
        env = face.make(2, functools.partial(ScriptedEnv, spaces.Dict({name: member}), None))
        with pytest.raises(AioEnvsError, match=f"env [01] has an observation at .*{name}.*taken"):
            await face.call(env.start)


def test_taken_names_are_free_further_down() -> None:
    space = spaces.Dict(robot=spaces.Dict(action=BOX, reward=BOX, next=BOX, done=spaces.Discrete(2)))
    value = {"robot": {"action": GOOD, "reward": GOOD + 1, "next": GOOD + 2, "done": 1}}
    with SerialEnv(2, lambda: ScriptedEnv(space, value, value)) as env:
        td = env.rand_step(env.reset())
        assert_holds(td["next"], (), space, [value] * 2)


@some
async def test_envs_of_one_batch_may_have_different_spaces(face: Face) -> None:
    sizes = [(2,), (2,), (3,)]
    factories = [lambda size=size: EchoEnv(spaces.Box(-1, 1, size)) for size in sizes]
    async with face.open(NUM_ENVS, factories) as env:
        options = [{"options": {"value": np.zeros(size, np.float32)}} for size in sizes]
        td = await face.call(env.reset, list_of_kwargs=options)
        td = await face.call(env.step, env.rand_action(td))
        for row, size in zip(td.unbind(0), sizes, strict=True):
            assert row["action"].shape == size
            assert row["next", "echo"].shape == size
            assert torch.equal(row["next", "echo"], row["action"])


BAD_ACTIONS: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "dtype": (BOX, lambda: torch.zeros(3, 2, dtype=torch.float64), "dtype torch.float32.*dtype torch.float64"),
    "shape": (BOX, lambda: torch.zeros(3, 3), r"shape \(3, 2\).*shape \(3, 3\)"),
    "missing": (BOX, lambda: None, "a value for every env.*keys"),
    "no tensor": (BOX, lambda: NonTensorStack(*"abc"), "a value for every env"),
    "too large": (spaces.Discrete(3), lambda: torch.tensor([0, 1, 3]), "from 0 to 2.*3.*env 2"),
    "too small": (spaces.Discrete(3, start=5), lambda: torch.tensor([5, 4, 5]), "from 5 to 7.*4.*env 1"),
    "one of several": (
        spaces.MultiDiscrete([2, 3], start=[0, 10]),
        lambda: torch.tensor([[1, 12], [0, 10], [2, 10]]),
        "integers from.*env 2",
    ),
    "tensor for text": (spaces.Text(5), lambda: torch.zeros(3), "one per env, as NonTensorStack.*Tensor"),
}


@pytest.mark.parametrize("name", BAD_ACTIONS)
def test_actions_against_the_spec_step_no_env(name: str) -> None:
    space, bad, words = BAD_ACTIONS[name]
    with SerialEnv(NUM_ENVS, functools.partial(EchoEnv, space)) as env:
        td = env.reset(list_of_kwargs=told(draw(space, 0)))
        if (action := bad()) is not None:
            td["action"] = action
        with pytest.raises(SpecMismatchError, match=f"action.*{words}.*no env was stepped"):
            env.step(td)
        assert env.rand_step(td)["next", "reward"].tolist() == [[1.0]] * NUM_ENVS


# -- arguments -------------------------------------------------------------------------------------------


@some
async def test_each_env_gets_its_own_arguments(face: Face) -> None:
    built: list[dict[str, Any]] = [{"number": number, "options": {}} for number in range(NUM_ENVS)]
    common, own = {"all": 1, "nested": []}, [{}, {"options": {"mine": [1]}}, {"seed": 7}]
    async with face.open(NUM_ENVS, OptionsEnv, create_env_kwargs=built) as env:
        td = await face.call(env.reset, options=common, list_of_kwargs=own)
        assert td["number"].tolist() == [0, 1, 2]
        assert td["told"] == ["None {'all': 1, 'nested': []}", "None {'mine': [1]}", "7 {'all': 1, 'nested': []}"]
        mask = TensorDict({"_reset": mask_of(1, 2)}, [NUM_ENVS])
        again = await face.call(env.reset, mask, list_of_kwargs=[{"options": {"ignored": 0}}, {}, {"seed": 3}])
        assert again["told"] == [td["told"][0], "None None", "3 None"]
    assert built == [{"number": number, "options": {}} for number in range(NUM_ENVS)]
    assert (common, own) == ({"all": 1, "nested": []}, [{}, {"options": {"mine": [1]}}, {"seed": 7}])


@pytest.mark.parametrize("count", [2, 4])
def test_list_of_kwargs_of_another_length(count: int) -> None:
    with SerialEnv(NUM_ENVS, OptionsEnv) as env, pytest.raises(RuntimeError, match=f"3 envs, but has {count}"):
        env.reset(list_of_kwargs=[{}] * count)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_a_rollout_over_every_space(name: str) -> None:
    space = SPACES[name]()
    value = draw(space, 0)[0]
    with SerialEnv(2, functools.partial(EchoEnv, space)) as env:
        start = env.reset(options={"value": value})
        rollout = env.rollout(3, auto_reset=False, tensordict=start, break_when_any_done=False)
    for key, leaf, _ in leaves(space, ("echo",), [value]):
        assert rollout[key].shape == (2, 3, *leaf.shape)
        assert rollout[("next", *key)].equal(rollout[("action", *key[1:])])


def test_spaces_of_a_wrapped_registered_env() -> None:
    def factory() -> gym.Env:
        return gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 3)

    with SerialEnv(2, factory) as env:
        assert env.observation_spec["observation"].shape == (2, 3, 4)
        assert env.reset(seed=0)["observation"].shape == (2, 3, 4)
