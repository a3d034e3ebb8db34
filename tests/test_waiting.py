"""Whether envs wait or compute: the decision, the measuring, and the advice that comes of it."""

import time
import warnings

import pytest
from failing_envs import PausingEnv

from aioenvs import AsyncParallelEnv, ParallelEnv
from aioenvs.engine.worker.wait_meter import ENOUGH_STEPS, MANY_STEPS, SLOWEST, WAITING, WaitMeter, waiting_share
from aioenvs.errors import PerformanceWarning


@pytest.mark.parametrize(
    ("wall", "cpu", "pauses", "steps", "share"),
    [
        (10.0, 1.0, 100, 100, 0.9),
        (10.0, 1.0, 10, 100, 0.0),  # kept off its core by others, but it did not pause by itself
        (10.0, 8.0, 100, 100, 0.0),  # it computes
        (0.0, 0.0, 0, 0, 0.0),
    ],
)
def test_waiting_takes_time_without_cpu_and_pauses(
    wall: float, cpu: float, pauses: int, steps: int, share: float
) -> None:
    assert waiting_share(wall, cpu, pauses, steps) == pytest.approx(share)


def test_the_meter_decides_once() -> None:
    meter = WaitMeter()
    verdicts = []
    for _ in range(ENOUGH_STEPS + 20):
        with meter:
            time.sleep(0.015)
        verdicts.append(meter.verdict(2, 2))
    assert [verdict for verdict in verdicts if verdict] == [pytest.approx(100, abs=20)]


def test_one_env_needs_no_advice() -> None:
    meter = WaitMeter()
    for _ in range(ENOUGH_STEPS + 1):
        with meter:
            time.sleep(0.015)
        assert meter.verdict(1, 1) in (0, WAITING + SLOWEST)


@pytest.mark.parametrize(("sleeps", "num_processes", "advised"), [(True, 1, 1), (True, 2, 0), (False, 1, 0)])
@pytest.mark.slow
async def test_packed_envs_that_wait_bring_one_warning(sleeps: bool, num_processes: int, advised: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with AsyncParallelEnv(2, lambda: PausingEnv(sleeps), num_processes=num_processes) as env:
            td = await env.reset()
            for _ in range(ENOUGH_STEPS + 20):
                td = await env.step(env.rand_action(td))
    messages = [str(warning.message) for warning in caught if warning.category is PerformanceWarning]
    assert len(messages) == advised
    assert all("num_processes=2" in message for message in messages)


async def test_the_advice_comes_once_to_those_who_send_and_receive() -> None:
    """From whichever of the workers comes first."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with AsyncParallelEnv(4, PausingEnv, create_env_kwargs={"sleeps": True}, num_processes=2) as env:
            td = await env.reset()
            for _ in range(ENOUGH_STEPS + 20):
                env.send(env.rand_action(td))
                _, td = await env.recv(4)
                td = td[td["env_index"].argsort()]
    assert [each.category for each in caught] == [PerformanceWarning]


@pytest.mark.parametrize(("num_envs", "num_processes"), [(2, 2), (4, 1)])
def test_envs_that_are_quicker_than_messages_bring_one_warning(num_envs: int, num_processes: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ParallelEnv(num_envs, "CartPole-v1", num_processes=num_processes) as env:
            td = env.rand_action(env.reset())
            for _ in range(MANY_STEPS + 20):
                _, root = env.step_and_maybe_reset(td)
                td = root.set("action", td["action"])
    assert [each.category for each in caught] == [PerformanceWarning]
    assert "SerialEnv" in str(caught[0].message)
    assert "aioenvs bench" in str(caught[0].message)
