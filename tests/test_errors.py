"""An env raises: the caller gets that exception, the worker lives on, its other envs are not affected."""

import asyncio
import os
from typing import Any

import failing_envs as faults
import pytest
from faces import Face, acting, masked, observed
from failing_envs import CountingEnv, numbered

from aioenvs import SerialEnv
from aioenvs.errors import RemoteEnvError, ResetNeededError, WorkerTimeoutError

NASTY: list[tuple[Any, type[Exception], str]] = [
    (faults.raise_two_arguments, RemoteEnvError, "TwoArgumentError: the reactor is hot"),
    (faults.raise_unpicklable, RemoteEnvError, "UnpicklableError: the reactor is hot"),
    (faults.raise_stop_iteration, RemoteEnvError, "StopIteration: the reactor is hot"),
    (faults.raise_keyboard_interrupt, RemoteEnvError, "KeyboardInterrupt: the reactor is hot"),
    (faults.raise_cancelled, RemoteEnvError, "CancelledError: the reactor is hot"),
    (faults.raise_timeout, TimeoutError, "the reactor is hot"),
    (faults.raise_group, ExceptionGroup, "the reactor is hot"),
]


def failing(fault: Any = faults.raise_value_error, at: tuple[int, int] = (1, 2), **common: Any) -> Any:
    """Four envs, of which env 1 fails."""
    return numbered(4, {1: {"fault": fault, "at": at}}, **common)


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


async def test_the_exception_says_which_env_command_and_line(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=failing()) as env:
        pid = env.pids[0] if face.in_processes else os.getpid()
        if face.in_processes and face.processes is None:
            pid = env.pids[1]
        await face.call(env.reset)
        await face.call(env.step, acting([0] * 4))
        with pytest.raises(ValueError, match="the reactor is hot") as caught:
            await face.call(env.step, acting([0] * 4))
    assert f"raised by env 1 in step, process {pid}" in notes(caught.value)
    if face.in_processes:
        assert 'failing_envs.py", line' in notes(caught.value)
        assert "in raise_value_error" in notes(caught.value)


async def test_the_others_step_once_and_the_failed_env_needs_a_reset(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=failing()) as env:
        pids = env.pids
        await face.call(env.reset)
        await face.call(env.step, acting([1, 2, 3, 4]))
        with pytest.raises(ValueError, match="the reactor is hot"):
            await face.call(env.step, acting([10, 20, 30, 40]))

        others = await face.call(env.step, acting([100, 200, 300, 400], only=[0, 2, 3]))
        assert observed(others)[0] == [0, 1, 3, 111]
        assert observed(others)[2:] == [[2, 1, 3, 333], [3, 1, 3, 444]]
        for _ in range(2):
            with pytest.raises(ResetNeededError, match="env 1"):
                await face.call(env.step, acting([0] * 4, only=[1]))

        td = await face.call(env.reset, masked("_reset", 4, [1]))
        assert observed(td) == [[0, 1, 3, 111], [1, 2, 0, 0], [2, 1, 3, 333], [3, 1, 3, 444]]
        td = await face.call(env.step, acting([1000 - 1, 2, 3, 4]))
        assert observed(td) == [[0, 1, 4, 1110], [1, 2, 1, 2], [2, 1, 4, 336], [3, 1, 4, 448]]
        assert env.pids == pids


async def test_a_step_before_the_first_reset_is_the_envs_business(face: Face) -> None:
    async with face.open(2, CountingEnv, create_env_kwargs=numbered(2)) as env:
        assert observed(await face.call(env.step, acting([3, 4]))) == [[0, 0, 1, 3], [1, 0, 1, 4]]
        await face.call(env.reset)
        assert observed(await face.call(env.step, acting([5, 6]))) == [[0, 1, 1, 5], [1, 1, 1, 6]]


@pytest.mark.parametrize(
    ("command", "at", "named"),
    [
        ("reset", (2, 0), "reset"),
        ("step", (1, 1), "step"),
        ("step_and_maybe_reset", (1, 1), "step_and_maybe_reset"),
        ("rollout", (2, 3), "step"),
    ],
)
async def test_every_command_passes_the_exception_on(face: Face, command: str, at: tuple[int, int], named: str) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=failing(at=at)) as env:
        td = (await face.call(env.reset)).update(acting([0] * 4))
        argument = {"reset": None, "rollout": 5}.get(command, td)
        with pytest.raises(ValueError, match="the reactor is hot") as caught:
            await face.call(getattr(env, command), argument)
        assert f"env 1 in {named}, process" in notes(caught.value)
        assert observed(await face.call(env.reset))[1][0] == 1


async def test_a_reset_within_a_step_fails(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=failing(at=(2, 0), length=2)) as env:
        await face.call(env.reset)
        await face.call(env.step_and_maybe_reset, acting([1] * 4))
        with pytest.raises(ValueError, match="the reactor is hot") as caught:
            await face.call(env.step_and_maybe_reset, acting([1] * 4))
        assert "env 1 in step_and_maybe_reset" in notes(caught.value)
        td = await face.call(env.reset, masked("_reset", 4, [1]))
        assert observed(td) == [[env_id, 2, 0, 0] for env_id in range(4)]


async def test_a_failed_reset_leaves_the_env_in_need_of_one(face: Face) -> None:
    async with face.open(4, CountingEnv, create_env_kwargs=failing(at=(2, 0))) as env:
        await face.call(env.reset)
        with pytest.raises(ValueError, match="the reactor is hot"):
            await face.call(env.reset)
        with pytest.raises(ResetNeededError, match="env 1"):
            await face.call(env.step, acting([0] * 4))
        td = await face.call(env.reset, masked("_reset", 4, [1]))
        assert observed(td) == [[0, 2, 1, 0], [1, 2, 0, 0], [2, 2, 1, 0], [3, 2, 1, 0]]


async def test_several_fail_at_once(face: Face) -> None:
    each = {3: {"fault": faults.raise_value_error}, 1: {"fault": faults.raise_timeout}}
    async with face.open(4, CountingEnv, create_env_kwargs=numbered(4, each)) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([0] * 4))
        with pytest.raises(TimeoutError, match="the reactor is hot") as caught:
            await face.call(env.step, acting([0] * 4))
        assert "env 3 failed as well: ValueError: the reactor is hot" in notes(caught.value)
        td = await face.call(env.step, acting([0] * 4, only=[0, 2]))
        assert [row[2] for row in observed(td)][::2] == [3, 3]


@pytest.mark.parametrize(("fault", "kind", "words"), NASTY, ids=lambda value: getattr(value, "__name__", ""))
async def test_exceptions_that_are_hard_to_pass_on(
    process_face: Face, fault: Any, kind: type[Exception], words: str
) -> None:
    face = process_face
    async with face.open(4, CountingEnv, create_env_kwargs=failing(fault)) as env:
        pids = env.pids
        await face.call(env.reset)
        await face.call(env.step, acting([0] * 4))
        with pytest.raises(kind) as caught:
            await face.call(env.step, acting([0] * 4))
        assert type(caught.value) is kind
        assert words in str(caught.value)
        assert f"in {fault.__name__}" in notes(caught.value)
        td = await face.call(env.reset, masked("_reset", 4, [1]))
        assert observed(td) == [[0, 1, 2, 0], [1, 2, 0, 0], [2, 1, 2, 0], [3, 1, 2, 0]]
        assert env.pids == pids


async def test_an_exception_that_cannot_say_what_it_is(process_face: Face) -> None:
    async with process_face.open(4, CountingEnv, create_env_kwargs=failing(faults.raise_unprintable)) as env:
        await process_face.call(env.reset)
        await process_face.call(env.step, acting([0] * 4))
        with pytest.raises(faults.UnprintableError) as caught:
            await process_face.call(env.step, acting([0] * 4))
        assert "in raise_unprintable" in notes(caught.value)


async def test_an_exception_of_a_local_class(process_face: Face) -> None:
    async with process_face.open(4, CountingEnv, create_env_kwargs=failing(faults.raise_local)) as env:
        await process_face.call(env.reset)
        await process_face.call(env.step, acting([0] * 4))
        with pytest.raises(Exception, match="the reactor is hot") as caught:
            await process_face.call(env.step, acting([0] * 4))
        assert type(caught.value).__name__ == "LocalError"


async def test_the_cause_is_told_too(process_face: Face) -> None:
    async with process_face.open(4, CountingEnv, create_env_kwargs=failing(faults.raise_chained)) as env:
        await process_face.call(env.reset)
        await process_face.call(env.step, acting([0] * 4))
        with pytest.raises(ValueError, match="the reactor is hot") as caught:
            await process_face.call(env.step, acting([0] * 4))
        assert "KeyError: 'valve'" in notes(caught.value)
        assert "direct cause" in notes(caught.value)


async def test_a_timeout_of_the_env_is_not_one_of_the_worker(async_face: Face) -> None:
    kwargs = failing(faults.raise_timeout, at=(1, 1))
    async with async_face.open(4, CountingEnv, create_env_kwargs=kwargs, step_timeout=50) as env:
        await env.reset()
        async with asyncio.timeout(50) as scope:
            with pytest.raises(TimeoutError) as caught:
                await env.step(acting([0] * 4))
        assert not isinstance(caught.value, WorkerTimeoutError)
        assert not scope.expired()


def test_an_interrupt_raised_by_an_env_in_this_process_is_the_callers_own() -> None:
    with SerialEnv(4, CountingEnv, create_env_kwargs=failing(faults.raise_keyboard_interrupt, (1, 1))) as env:
        env.reset()
        with pytest.raises(KeyboardInterrupt, match="the reactor is hot"):
            env.step(acting([0] * 4))
        assert observed(env.reset())[1] == [1, 2, 0, 0]


def test_a_stop_iteration_raised_by_an_env_in_this_process() -> None:
    with SerialEnv(4, CountingEnv, create_env_kwargs=failing(faults.raise_stop_iteration, (1, 1))) as env:
        env.reset()
        with pytest.raises(RemoteEnvError, match="StopIteration: the reactor is hot") as caught:
            env.step(acting([0] * 4))
        assert isinstance(caught.value.__cause__, StopIteration)
