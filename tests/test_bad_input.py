"""Bad input is refused before anything is sent: nothing was stepped, and the message says what to do."""

from typing import Any

import pytest
import torch
from faces import Face, acting, masked, observed
from failing_envs import NUM_ACTIONS, CountingEnv, numbered
from tensordict import TensorDict

from aioenvs import AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.errors import SpecMismatchError

both_parallel = pytest.mark.parametrize("cls", [AsyncParallelEnv, ParallelEnv])
every_class = pytest.mark.parametrize("cls", [AsyncParallelEnv, ParallelEnv, AsyncSerialEnv, SerialEnv])


def with_action(action: Any, size: int = 3) -> TensorDict:
    return TensorDict({"action": action}, batch_size=[size])


BAD_ACTIONS: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "two of three": (with_action(torch.zeros(2, dtype=torch.int64), 2), RuntimeError, ["shape==env.batch_size"]),
    "four of three": (acting([0] * 4), RuntimeError, ["shape==env.batch_size"]),
    "missing": (TensorDict({}, batch_size=[3]), SpecMismatchError, ["action", "a value for every env"]),
    "other key": (
        TensorDict({"actoin": torch.zeros(3)}, batch_size=[3]),
        SpecMismatchError,
        ["'action'", "actoin"],
    ),
    "float": (with_action(torch.full((3,), 0.5)), SpecMismatchError, ["int64", "float32"]),
    "one-hot": (with_action(torch.zeros(3, 5, dtype=torch.int64)), SpecMismatchError, ["(3,)", "(3, 5)"]),
    "column": (with_action(torch.zeros(3, 1, dtype=torch.int64)), SpecMismatchError, ["(3,)", "(3, 1)"]),
    "too large": (acting([0, NUM_ACTIONS, 0]), SpecMismatchError, ["0 to 999", "1000", "env 1"]),
    "negative": (acting([0, 0, -1]), SpecMismatchError, ["0 to 999", "-1", "env 2"]),
    "text": (TensorDict({"action": ["left"] * 3}, batch_size=[3]), SpecMismatchError, ["action"]),
}


@pytest.mark.parametrize("case", BAD_ACTIONS)
async def test_actions_that_do_not_fit(face: Face, case: str) -> None:
    td, kind, words = BAD_ACTIONS[case]
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        before = set(td.keys())
        for command in (env.step, env.step_and_maybe_reset):
            with pytest.raises(kind) as caught:
                await face.call(command, td)
            assert all(word in str(caught.value) for word in words), str(caught.value)
            assert set(td.keys()) == before
        td = await face.call(env.step, acting([1, 2, 3]))
        assert observed(td) == [[0, 1, 1, 1], [1, 1, 1, 2], [2, 1, 1, 3]]


async def test_a_spec_mismatch_is_a_value_error_and_a_runtime_error(face: Face) -> None:
    async with face.open(3, CountingEnv) as env:
        await face.call(env.reset)
        with pytest.raises(ValueError, match="action"):
            await face.call(env.step, with_action(torch.full((3,), 0.5)))
        with pytest.raises(RuntimeError, match="action"):
            await face.call(env.step, with_action(torch.full((3,), 0.5)))


@pytest.mark.parametrize("command", ["reset", "step"])
@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(3, 2, dtype=torch.bool), torch.ones(3, dtype=torch.int64)])
async def test_masks_that_do_not_fit(face: Face, command: str, mask: torch.Tensor) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        with pytest.raises(ValueError, match=f"_{command}"):
            await face.call(getattr(env, command), acting([1, 1, 1]).set(f"_{command}", mask))
        td = await face.call(env.step, acting([1, 2, 3]))
        assert observed(td) == [[0, 1, 1, 1], [1, 1, 1, 2], [2, 1, 1, 3]]


async def test_arguments_of_reset_and_step(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        with pytest.raises(RuntimeError, match=r"3.*2"):
            await face.call(env.reset, list_of_kwargs=[{}, {}])
        with pytest.raises(RuntimeError, match=r"shape==env\.batch_size"):
            await face.call(env.reset, masked("_reset", 2, [0]))
        for wrong in ({"action": 1}, torch.zeros(3), None):
            with pytest.raises(TypeError, match="TensorDict"):
                await face.call(env.step, wrong)
        with pytest.raises((TypeError, ValueError)):
            await face.call(env.set_seed, "many")
        td = await face.call(env.step, acting([1, 2, 3]))
        assert observed(td) == [[0, 1, 1, 1], [1, 1, 1, 2], [2, 1, 1, 3]]


async def test_an_argument_that_the_envs_do_not_take(face: Face) -> None:
    async with face.open(3, CountingEnv, create_env_kwargs=numbered(3)) as env:
        await face.call(env.reset)
        with pytest.raises(TypeError, match="colour"):
            await face.call(env.reset, colour="red")
        assert observed(await face.call(env.reset))[0][0] == 0


@every_class
@pytest.mark.parametrize(
    ("count", "kind"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)]
)
def test_numbers_of_envs(cls: Any, count: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="num_workers") as caught:
        cls(count, CountingEnv)
    assert repr(count) in str(caught.value)


@both_parallel
@pytest.mark.parametrize(
    ("count", "kind"), [(4, ValueError), (0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_numbers_of_processes(cls: Any, count: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="num_processes") as caught:
        cls(3, CountingEnv, num_processes=count)
    assert repr(count) in str(caught.value)


@both_parallel
def test_names_of_start_methods_and_backends(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"'teleport': mp_start_method must be one of 'forkserver', 'spawn', 'fork'"):
        cls(2, CountingEnv, mp_start_method="teleport")
    with pytest.raises(ValueError, match=r"backend.*'teleport'"):
        cls(2, CountingEnv, backend="teleport")
    with pytest.raises(TypeError, match="mp_start_method"):
        cls(2, CountingEnv, backend="serial", mp_start_method="spawn")


@both_parallel
@pytest.mark.parametrize("name", ["step_timeout", "start_timeout", "close_timeout"])
@pytest.mark.parametrize("value", [0, -1, "soon", True, float("nan")])
def test_timeouts(cls: Any, name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        cls(2, CountingEnv, **{name: value})


@every_class
def test_factories(cls: Any) -> None:
    with pytest.raises(TypeError, match=r"is one.*lambda"):
        cls(2, CountingEnv())
    with pytest.raises(TypeError, match=r"is one"):
        cls(2, [CountingEnv, CountingEnv()])
    for nothing in (None, 7, {"id": "CartPole-v1"}):
        with pytest.raises(TypeError, match="create_env_fn"):
            cls(2, nothing)


@every_class
def test_lists_of_the_wrong_length(cls: Any) -> None:
    with pytest.raises(RuntimeError, match=r"3.*create_env_fn.*2"):
        cls(3, [CountingEnv, CountingEnv])
    with pytest.raises(RuntimeError, match=r"3.*create_env_kwargs.*4"):
        cls(3, CountingEnv, create_env_kwargs=[{}] * 4)
    with pytest.raises(RuntimeError, match=r"3.*0"):
        cls(3, [])
