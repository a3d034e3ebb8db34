"""Envs in threads: the promises of worker processes, as far as threads can keep them, and what is their own.

Most of what holds for every face is tested over threads where it is tested over all; the bodies of `test_cancel` and
`test_close` that only async faces can run are run here once more.
"""

import asyncio
import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import failing_envs as faults
import gymnasium as gym
import numpy as np
import pytest
import torch
from faces import THREAD_FACES, Face, acting, call, in_thread, masked, observed
from failing_envs import CountingEnv, Gate, numbered
from tensordict import NonTensorData, NonTensorStack, TensorDict
from test_busy import test_other_envs_may_be_stepped_at_the_same_time  # noqa: F401
from test_cancel import (  # noqa: F401
    cancelled,
    rows,
    test_a_cancelled_reset,
    test_a_request_that_is_cancelled_while_it_waits,
    test_another_event_loop_is_refused,
    test_asyncio_timeout,
    test_cancelled_at_any_time,
    test_cancelling_one_request_leaves_the_other_alone,
    test_close_from_another_event_loop,
    test_envs_that_are_not_concerned_need_not_wait,
    test_the_next_step_waits_for_a_cancelled_one,
    turn_the_loop,
)
from test_close import (  # noqa: F401
    drop,
    test_closed_with_an_unread_reply,
    test_two_tasks_close_at_once,
)
from test_exit import Script, script  # noqa: F401

from aioenvs import AsyncParallelEnv, ParallelEnv
from aioenvs.engine.pools.thread_host import Mailbox
from aioenvs.errors import (
    AioEnvsError,
    ClosedError,
    RemoteEnvError,
    ResetNeededError,
    WorkerStartError,
    WorkerTimeoutError,
)
from aioenvs.testing import DifferentiableEnv, NonTensorEnv, RandomEnv

pytestmark = pytest.mark.usefixtures("any_loop")
ONE_EACH = Face("async-thread-one-each", AsyncParallelEnv, 0, threads=None)
over_thread_faces = pytest.mark.parametrize("face", THREAD_FACES, ids=lambda face: face.name)


@pytest.fixture(params=[THREAD_FACES[0], ONE_EACH], ids=lambda face: face.name)
def async_face(request: pytest.FixtureRequest) -> Face:
    return request.param


def threaded(num_workers: int, factory: Any = CountingEnv, **options: Any) -> AsyncParallelEnv:
    return AsyncParallelEnv(num_workers, factory, backend="thread", **options)


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aioenvs env")]


class Witness(CountingEnv):
    """Writes down in which thread it is made, reset, stepped and closed."""

    def __init__(self, log: list[tuple[int, str, int]], env_id: int) -> None:
        super().__init__(env_id)
        self.log = log
        self.saw("init")

    def saw(self, what: str) -> None:
        self.log.append((self.env_id, what, threading.get_ident()))

    def reset(self, **kwargs: Any) -> Any:
        self.saw("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.saw("step")
        return super().step(action)

    def close(self) -> None:
        self.saw("close")


def witnesses(count: int) -> tuple[list[tuple[int, str, int]], list[Callable[[], Witness]]]:
    log: list[tuple[int, str, int]] = []
    return log, [lambda env=env: Witness(log, env) for env in range(count)]


# -- where envs run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "homes"), [(None, [[0], [1], [2], [3]]), (2, [[0, 1], [2, 3]]), (1, [[0, 1, 2, 3]])]
)
async def test_each_env_spends_its_life_in_the_thread_of_its_group(threads: int | None, homes: list[list[int]]) -> None:
    log, factories = witnesses(4)
    async with threaded(4, factories, num_processes=threads) as env:
        assert (env.num_processes, env.pids) == (0, ())
        assert [thread.daemon for thread in own_threads()] == [True] * len(homes)
        await env.reset()
        await env.step(acting([0] * 4))
    where = {frozenset(ident for number, _, ident in log if number == env_id) for env_id in range(4)}
    assert len(where) == len(homes)
    assert all(len(idents) == 1 and threading.get_ident() not in idents for idents in where)
    for home in homes:
        assert len({ident for number, _, ident in log if number in home}) == 1
    lives = [[what for number, what, _ in log if number == env_id] for env_id in range(4)]
    assert lives == [["init", "reset", "step", "close"]] * 4
    assert own_threads() == []


async def test_envs_are_built_at_the_same_time() -> None:
    everybody = threading.Barrier(3)

    def factory() -> CountingEnv:
        everybody.wait(20)
        return CountingEnv()

    async with threaded(3, factory) as env:
        assert len(await env.reset()) == 3


async def test_envs_wait_at_the_same_time_and_the_loop_goes_on(gate: Gate) -> None:
    async with threaded(3, create_env_kwargs=numbered(3, fault=gate.wait, at=(1, 1))) as env:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1, 2, 3])))
        for _ in range(3):
            await gate.arrival()  # in the loop, which is therefore free
        assert not stepping.done()
        gate.open(3)
        assert observed(await stepping) == rows(1, 1, 1, 2, 3)


async def test_many_starts_and_closes_leave_no_thread() -> None:
    before = threading.active_count()
    env = threaded(3, create_env_kwargs=numbered(3))
    for _ in range(20):
        assert observed(await env.reset()) == rows(1, 0, 0, 0, 0)
        assert threading.active_count() == before + 3
        await env.close()
        assert threading.active_count() == before


@pytest.mark.parametrize("at_once", [True, False])
async def test_the_loop_is_woken_once_for_what_comes_at_a_time(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, delivered = asyncio.get_running_loop(), []
    mailbox = Mailbox()
    wakes: list[Any] = []

    class Counted:
        def call_soon_threadsafe(self, callback: Any) -> None:
            wakes.append(callback)
            loop.call_soon_threadsafe(callback)

    monkeypatch.setattr(mailbox, "_loop", Counted())
    for number in range(3):
        letter = partial(delivered.append, number)
        await in_thread(mailbox.put, letter) if not at_once else mailbox.put(letter)
    await turn_the_loop()
    assert delivered == [0, 1, 2]
    assert len(wakes) == (1 if at_once else 3)


# -- failures -------------------------------------------------------------------------------------------


@over_thread_faces
@pytest.mark.parametrize("fault", [faults.raise_system_exit, faults.raise_keyboard_interrupt, faults.raise_cancelled])
async def test_what_would_end_a_process_is_the_failure_of_one_env(face: Face, fault: Any) -> None:
    kwargs = numbered(4, {1: {"fault": fault, "at": (1, 2)}})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([1, 2, 3, 4]))
        threads = own_threads()
        with pytest.raises(RemoteEnvError) as caught:
            await face.call(env.step, acting([10, 20, 30, 40]))
        assert caught.value.env_index == (1,)
        assert any("raised by env 1 in step" in note for note in caught.value.__notes__)
        with pytest.raises(ResetNeededError, match="env 1"):
            await face.call(env.step, acting([0] * 4, only=[1]))
        td = await face.call(env.reset, masked("_reset", 4, [1]))
        assert observed(td)[1] == [1, 2, 0, 0]
        assert observed(await face.call(env.step, acting([0] * 4)))[0] == [0, 1, 3, 11]
        assert own_threads() == threads


@pytest.mark.parametrize("threads", [None, 1])
@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        (faults.failing_factory, FileNotFoundError),
        (faults.sys_exiting_factory, RemoteEnvError),
        (faults.raise_keyboard_interrupt, RemoteEnvError),
        (faults.raise_stop_iteration, RemoteEnvError),
        (faults.raise_timeout, TimeoutError),
    ],
)
async def test_a_factory_that_fails(factory: Any, cause: type[Exception], threads: int | None) -> None:
    log, factories = witnesses(4)
    env = threaded(4, [factories[0], factory, *factories[2:]], num_processes=threads)
    with pytest.raises(WorkerStartError, match="the factory of env 1 failed") as caught:
        await env.start()
    assert type(caught.value.__cause__) is cause
    assert 1 in caught.value.env_index
    assert env.is_closed
    assert own_threads() == []
    made = [number for number, what, _ in log if what == "init"]
    assert sorted(made) == sorted(number for number, what, _ in log if what == "close")
    assert threads is None or made == [0]  # else they were built at the same time, or not any more


async def test_envs_that_do_not_fit_together_are_closed() -> None:
    log, factories = witnesses(2)

    class Unfit(faults.OtherSpaceEnv):
        def close(self) -> None:
            log.append((2, "close", 0))

    with pytest.raises(ValueError, match="non-stackable"):
        await threaded(3, [*factories, Unfit], share_individual_td=False).start()
    assert sorted(number for number, what, _ in log if what == "close") == [0, 1, 2]
    assert own_threads() == []


async def test_a_factory_that_hangs(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    log, factories = witnesses(3)

    def hanging() -> Witness:
        gate.wait()
        return Witness(log, 2)

    order = [factories[0], factories[1], hanging]
    env = threaded(3, order, num_processes=2, start_timeout=0.2, close_timeout=0.1)
    with pytest.raises(WorkerStartError, match=r"start_timeout.*the factory of env 2 has not returned"):
        await env.start()
    assert "envs 1-2 did not close" in caplog.text
    assert [number for number, what, _ in log if what == "close"] == [0]
    (left,) = own_threads()
    gate.open()
    await in_thread(left.join)
    assert sorted(number for number, what, _ in log if what == "close") == [0, 1, 2]  # late, but in its own thread


@pytest.mark.parametrize("turns", range(6))
async def test_a_start_that_is_cancelled(turns: int) -> None:
    log, factories = witnesses(3)
    env = threaded(3, factories)
    starting = asyncio.create_task(env.start())
    await turn_the_loop(turns)
    if not starting.done():
        await cancelled(starting)
    await env.close(raise_if_closed=False)
    assert own_threads() == []
    lives = [what for _, what, _ in log]
    assert lives.count("init") == lives.count("close")
    async with env:
        assert observed(await env.reset()) == rows(1, 0, 0, 0, 0)


# -- late answers ---------------------------------------------------------------------------------------


@over_thread_faces
async def test_step_timeout_names_the_late_env(face: Face, gate: Gate) -> None:
    kwargs = numbered(4, {1: {"fault": gate.wait, "at": (1, 2)}})
    async with face.open(4, CountingEnv, create_env_kwargs=kwargs, step_timeout=0.3) as env:
        await face.call(env.reset)
        await face.call(env.step, acting([1, 2, 3, 4]))
        for action in (10, 999):  # the second one waits for the first and is never sent
            with pytest.raises(WorkerTimeoutError, match=r"^envs? [01-]+ did not answer step.*step_timeout") as caught:
                await face.call(env.step, acting([action] * 4))
            assert list(caught.value.env_index) == ([1] if face.threads is None else [0, 1])
            assert caught.value.pid is None
        gate.open()
        assert observed(await face.call(env.step, acting([100, 200, 300, 400]))) == rows(1, 3, 111, 212, 313, 414)


class Reader(CountingEnv):
    """Takes lists, and observes their sum."""

    action_space = gym.spaces.Sequence(gym.spaces.Discrete(1000))

    def step(self, action: Any) -> Any:
        result = super().step(sum(action))
        action.clear()
        return result


def asking(actions: list[Any]) -> TensorDict:
    """What `step` needs where actions are objects."""
    return TensorDict({"action": NonTensorStack(*map(NonTensorData, actions))}, batch_size=[len(actions)])


async def test_a_caller_who_gave_up_may_change_what_he_gave(gate: Gate) -> None:
    kwargs = numbered(2, {0: {"fault": gate.wait, "at": (1, 1)}})
    async with threaded(2, Reader, create_env_kwargs=kwargs, num_processes=1) as env:
        await env.reset()
        actions = [[1, 2], [3, 4]]
        stepping = asyncio.create_task(env.step(asking(actions)))
        await gate.arrival()  # env 1 has not read its action yet
        await cancelled(stepping)
        actions[1].append(500)
        gate.open()
        assert observed(await env.step(asking([[10], [20]]))) == rows(1, 2, 13, 27)
        assert actions == [[1, 2], [3, 4, 500]]  # the env emptied its own copy


async def test_the_loop_may_be_over_before_the_thread_is(gate: Gate) -> None:
    log, _ = witnesses(0)
    env = threaded(1, lambda: Gated(log, gate))

    async def give_up() -> None:
        await env.reset()
        stepping = asyncio.create_task(env.step(acting([1])))
        await gate.arrival()
        await cancelled(stepping)

    def elsewhere() -> None:
        asyncio.run(give_up())
        gate.open()  # the answer finds its loop closed
        with pytest.raises(AioEnvsError, match="event loop"):
            asyncio.run(env.step(acting([1])))
        asyncio.run(env.close())

    await in_thread(elsewhere)
    assert env.is_closed
    for thread in own_threads():
        await in_thread(thread.join)
    assert [what for _, what, _ in log] == ["init", "reset", "step", "close"]


class Gated(Witness):
    """Waits at a gate when it is stepped."""

    def __init__(self, log: list[tuple[int, str, int]], gate: Gate) -> None:
        super().__init__(log, 0)
        self.gate = gate

    def step(self, action: Any) -> Any:
        self.gate.wait()
        return super().step(action)


# -- the end --------------------------------------------------------------------------------------------


async def test_closed_when_an_env_hangs(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    log, factories = witnesses(3)
    env = threaded(3, [*factories[:2], lambda: Gated(log, gate)], close_timeout=0.1)
    await env.reset()
    stepping = asyncio.create_task(env.step(acting([0] * 3)))
    await gate.arrival()
    with caplog.at_level(logging.WARNING, "aioenvs"):
        await env.close()
    assert env.is_closed
    with pytest.raises(ClosedError, match="closed while step was pending"):
        await stepping
    assert "env 2 did not close: the thread is still busy with step" in caplog.text
    (left,) = own_threads()
    gate.open()
    await in_thread(left.join)
    assert sum(what == "close" for _, what, _ in log) == 3


async def test_what_had_not_begun_when_the_envs_were_closed_is_not_done(gate: Gate) -> None:
    log, factories = witnesses(2)
    env = threaded(2, [lambda: Gated(log, gate), factories[1]], num_processes=1)
    await env.reset()
    first = asyncio.create_task(env.step(acting([0] * 2, only=[0])))
    await gate.arrival()
    second = asyncio.create_task(env.step(acting([0] * 2, only=[1])))
    await turn_the_loop()
    closing = asyncio.create_task(env.close())
    await turn_the_loop()
    gate.open()
    await closing
    assert observed(await first)[0] == [0, 1, 1, 0]
    with pytest.raises(ClosedError):
        await second
    assert (1, "step") not in [(number, what) for number, what, _ in log]


async def test_a_cancelled_close_does_not_wait(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    env = threaded(2, create_env_kwargs=numbered(2, {1: {"on_close": gate.wait}}), close_timeout=50)
    await env.reset()
    closing = asyncio.create_task(env.close())
    await gate.arrival()
    await cancelled(closing)
    assert env.is_closed
    assert "env 1 did not close" in caplog.text
    gate.open()


@pytest.mark.parametrize(
    "on_close", [faults.raise_value_error, faults.raise_system_exit, faults.raise_keyboard_interrupt]
)
async def test_an_env_that_cannot_close(on_close: Any, capfd: pytest.CaptureFixture[str]) -> None:
    log, factories = witnesses(2)
    async with threaded(3, [*factories, lambda: CountingEnv(on_close=on_close)], num_processes=1):
        pass
    assert [number for number, what, _ in log if what == "close"] == [1, 0]
    assert "raise_" in capfd.readouterr().err
    assert own_threads() == []


@over_thread_faces
async def test_forgotten_envs_are_closed_in_their_threads(face: Face) -> None:
    log, factories = witnesses(2)
    owner = [face.make(2, factories)]
    await call(owner[0].reset)
    threads = own_threads()
    with pytest.warns(ResourceWarning, match="was never closed"):
        drop(owner)
    for thread in threads:
        await in_thread(thread.join)
    made = {(number, ident) for number, what, ident in log if what == "init"}
    assert {(number, ident) for number, what, ident in log if what == "close"} == made


def test_ctrl_c_cancels_a_call_and_the_envs_remain_usable() -> None:
    go_on = threading.Event()

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(20)

    factories = [lambda: CountingEnv(0, fault=press, at=(1, 1)), lambda: CountingEnv(1)]
    with ParallelEnv(2, factories, backend="thread") as env:
        env.reset()
        with pytest.raises(KeyboardInterrupt):
            env.step(acting([1, 2]))
        go_on.set()
        assert observed(env.step(acting([10, 20]))) == rows(1, 2, 11, 22)


@pytest.mark.slow
def test_a_hanging_env_does_not_keep_the_interpreter(script: Script, gate: Gate) -> None:  # noqa: F811
    script.start("""
        kwargs = numbered(3, {1: {"fault": wait, "at": (1, 1)}})
        options = {"create_env_kwargs": kwargs, "backend": "thread", "step_timeout": 0.2}
        env = ParallelEnv(3, CountingEnv, **options, close_timeout=0.1)
        env.reset()
        try:
            env.step(acting([0, 0, 0]))
        except TimeoutError:
            print("late")
        env.close()
        print("closed")
        forgotten = ParallelEnv(3, CountingEnv, **options)
        forgotten.reset()
        try:
            forgotten.step(acting([0, 0, 0]))
        except TimeoutError:
            print("late again")
    """)
    assert script.wait() == 0
    assert script.out.splitlines() == ["late", "closed", "late again"]
    assert "env 1 did not close" in script.err
    assert "<ParallelEnv num_workers=3, open> was never closed" in script.err


@pytest.mark.slow
def test_a_fork_leaves_the_envs_to_its_parent(script: Script, gate: Gate) -> None:  # noqa: F811
    script.start("""
        import os
        async def main():
            env = AsyncParallelEnv(2, CountingEnv, create_env_kwargs=numbered(2), backend="thread")
            await env.reset()
            if os.fork() == 0:
                try:
                    asyncio.run(env.step(acting([1, 1])))
                except RuntimeError as error:
                    print("event loop and process that started them" in str(error), flush=True)
                asyncio.run(env.close())
                print("child", env.is_closed, flush=True)
                os._exit(0)
            os.wait()
            print(observed(await env.step(acting([1, 2]))))
            await env.close()
        asyncio.run(main())
    """)
    assert script.wait() == 0
    assert script.out.splitlines() == ["True", "child True", "[[0, 1, 1, 1], [1, 1, 1, 2]]"]


# -- what crosses from thread to thread -----------------------------------------------------------------


class Keeper(CountingEnv):
    """Has things to give away."""

    def __init__(self) -> None:
        super().__init__()
        self.things = [1, 2]
        self.lock = threading.Lock()
        self.given: Any = None

    def take(self, given: list[int]) -> list[int]:
        given.append(len(given))
        self.given = given
        return given


async def test_envs_and_callers_share_nothing() -> None:
    async with threaded(2, Keeper) as env:
        first, _ = await env.get_attr("things")
        first.append(3)
        assert await env.get_attr("things") == [[1, 2], [1, 2]]
        mine = [7]
        given = await env.call("take", mine)
        assert (mine, given) == ([7], [[7, 1], [7, 1]])
        given[0].append(9)
        assert await env.get_attr("given") == [[7, 1], [7, 1]]
        await env.set_attr("things", [mine, mine])
        mine.append(8)
        assert await env.get_attr("things") == [[7], [7]]


async def test_what_cannot_be_copied_stays_where_it_is() -> None:
    async with threaded(2, Keeper) as env:
        with pytest.raises(TypeError, match="lock") as caught:
            await env.get_attr("lock")
        assert any("what env 0 answered to get 'lock' cannot be copied" in note for note in caught.value.__notes__)
        assert observed(await env.reset()) == [[0, 1, 0, 0]] * 2


async def test_a_tensor_within_a_graph_is_copied_too() -> None:
    weight = torch.ones(2, requires_grad=True) * 3
    async with threaded(1, Keeper) as env:
        await env.set_attr("things", [weight])
        (things,) = await env.get_attr("things")
        assert things.tolist() == [3.0, 3.0]


@over_thread_faces
async def test_objects_of_torch_envs_are_the_callers_own(face: Face) -> None:
    async with face.open(2, NonTensorEnv) as env:
        td = await face.call(env.rand_step, await face.call(env.reset))
        record = td["next", "record"][0]
        record["steps"] = 99
        other = await face.call(env.step, td.select("action"))
        assert [each["steps"] for each in other["next", "record"]] == [2, 2]


@over_thread_faces
async def test_results_have_no_gradients(face: Face) -> None:
    async with face.open(2, DifferentiableEnv) as env:
        td = await face.call(env.rand_action, await face.call(env.reset))
        td["action"] = td["action"].clone().requires_grad_()
        td = await face.call(env.step, td)
        assert not td["next", "reward"].requires_grad


# -- random streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", THREAD_FACES[:1], ids=lambda face: face.name)
async def test_the_generators_of_the_process_stay_in_place(face: Face) -> None:
    """An env in a thread draws from them as anybody does; only a seed of its own reaches a generator of its own."""
    generator = np.random.mtrand.get_bit_generator()
    async with face.open(1, lambda: RandomEnv("random")) as env:
        await env.set_seed(5)
        random.seed(3)
        expected = [random.random() for _ in range(3)]
        random.seed(3)
        td = await env.reset()
        assert td["observation"].item() == expected[0]
        assert random.random() == expected[1]
        td = await env.rand_step(td)
        assert td["next", "observation"].item() == expected[2]
    assert np.random.mtrand.get_bit_generator() is generator


@over_thread_faces
async def test_a_seed_reaches_what_is_an_envs_own(face: Face) -> None:
    async with face.open(3, lambda: RandomEnv("own")) as env:
        observations = []
        for _ in range(2):
            await face.call(env.set_seed, 3)
            observations.append((await face.call(env.reset))["observation"].flatten().tolist())
    assert observations[0] == observations[1]
    assert len(set(observations[0])) == 3


# -- options --------------------------------------------------------------------------------------------


def test_options_that_mean_nothing_to_threads() -> None:
    with pytest.raises(TypeError, match="mp_start_method='fork' has no meaning"):
        threaded(2, mp_start_method="fork")
    with pytest.raises(ValueError, match="num_processes is 3, more than the 2 envs"):
        threaded(2, num_processes=3)
    with ParallelEnv(2, NonTensorEnv, backend="thread", use_buffers=False, num_sub_threads=2, memmap=True) as env:
        assert env.rollout(2).batch_size == (2, 2)
