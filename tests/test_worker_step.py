"""A step of a worker's envs: what it calls for each of them, and whose random numbers they draw."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from aioenvs import GymWrapper, SerialEnv
from aioenvs.engine.adapters.base import Handling
from aioenvs.engine.layout import NEXT, form_families
from aioenvs.engine.protocol import Frame, Opcode
from aioenvs.engine.worker.commands import Worker
from aioenvs.engine.worker.env_host import EnvHost
from aioenvs.engine.worker.random_streams import TRIAL, Generators

pytestmark = pytest.mark.usefixtures("own_generators")


class DrawingEnv(gym.Env[Any, Any]):
    """Observes a draw from numpy's generator; one of its steps may fail behind that."""

    observation_space = gym.spaces.Box(0, 1, (), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fails_at: int = 0, length: int = 7) -> None:
        self.steps, self.fails_at, self.length = 0, fails_at, length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.array(np.random.random_sample()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        seen = np.array(np.random.random_sample())
        if self.steps == self.fails_at:
            raise ValueError("as it was told")
        return seen, 1.0, self.steps % self.length == 0, False, {}


class QuietEnv(DrawingEnv):
    """Draws nothing."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.array(0.5), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array(0.5), 1.0, False, False, {}


def hosted(*envs: Any, generators: Generators = Generators.EXCHANGED) -> tuple[EnvHost, Any]:
    host = EnvHost(handling=Handling(generators=generators))
    for index, env in enumerate(envs):
        host.build(index, lambda env=env: env, {})
    (family,) = form_families(host.metadata)
    block = bytearray(family.layout.end)
    host.attach([(family.envs, family.layout)], block)
    return host, family.layout.arrays(block)[NEXT]["observation",]


def drawn(seed: int, count: int) -> list[float]:
    return list(np.random.RandomState(seed).random_sample(count))


def test_each_env_draws_from_its_own_stream_whoever_stands_beside_it() -> None:
    # Env 1 has no stream of its own, so it draws from the process's, also between two that have one; env 3 fails.
    host, observed = hosted(DrawingEnv(), DrawingEnv(), DrawingEnv(), DrawingEnv(fails_at=TRIAL + 8), DrawingEnv())
    host.execute(Opcode.SEED, (0, 2, 3, 4), {env: 10 + env for env in (0, 2, 3, 4)})
    np.random.seed(1)
    host.execute(Opcode.RESET, (), None)
    seen, failed = [], []
    for _ in range(TRIAL + 20):
        failed += host.execute(Opcode.STEP, (), None).failures
        seen.append(observed.copy())
    values = np.stack(seen)
    for env in (0, 2, 4):
        assert values[:, env].tolist() == drawn(10 + env, TRIAL + 21)[1:]
    assert values[:, 1].tolist() == drawn(1, TRIAL + 21)[1:]
    assert set(failed) == {3}
    assert np.random.random_sample() == drawn(1, TRIAL + 22)[-1]


def test_an_env_inside_a_wrapper_draws_from_its_own_stream_as_well() -> None:
    env = SerialEnv(2, lambda: GymWrapper(DrawingEnv(length=10**6)))
    env.set_seed(3, static_seed=True)
    state, td = np.random.get_state()[1].tolist(), env.reset()
    for _ in range(TRIAL + 20):
        td = env.step(td.set("action", torch.tensor([[1, 0]] * 2)))["next"]
    assert td["observation"].tolist() == [drawn(3, TRIAL + 21)[-1]] * 2
    assert np.random.get_state()[1].tolist() == state
    env.close()


def test_a_seed_between_steps_begins_with_the_next_episode() -> None:
    host, observed = hosted(DrawingEnv(length=TRIAL + 10), DrawingEnv(length=10**6), generators=Generators.SEEDED)
    host.execute(Opcode.SEED, (), {0: 3, 1: 4})
    host.execute(Opcode.RESET, (), None)
    for _ in range(TRIAL + 5):
        host.execute(Opcode.STEP_AND_MAYBE_RESET, (), None)
    host.execute(Opcode.SEED, (0,), {0: 5})
    for _ in range(6):  # the fifth of which ends the episode of env 0
        host.execute(Opcode.STEP_AND_MAYBE_RESET, (), None)
    assert observed.tolist() == [drawn(5, 2)[1], drawn(4, TRIAL + 12)[-1]]


def test_the_process_has_its_generator_back_after_an_exit() -> None:
    class Exiting(DrawingEnv):
        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps > TRIAL + 2:
                raise SystemExit(3)
            return np.array(0.5), 1.0, False, False, {}

    host, _ = hosted(QuietEnv(), Exiting())
    host.execute(Opcode.SEED, (), {0: 3, 1: 4})
    host.execute(Opcode.RESET, (), None)
    before = np.random.mtrand.get_bit_generator()
    for _ in range(TRIAL + 2):
        host.execute(Opcode.STEP, (), None)
    with pytest.raises(SystemExit):
        host.execute(Opcode.STEP, (), None)
    assert np.random.mtrand.get_bit_generator() is before


@pytest.mark.parametrize("seeded", [False, True])
def test_a_plain_env_costs_few_calls(seeded: bool) -> None:
    count, steps = 32, 10
    host, _ = hosted(*(QuietEnv() for _ in range(count)), generators=Generators.SEEDED)
    if seeded:
        host.execute(Opcode.SEED, (), {env: env for env in range(count)})
    host.execute(Opcode.RESET, (), None)
    worker = Worker(None, ())  # type: ignore[arg-type]  # which is attached already
    worker.host = host
    frame = Frame(Opcode.STEP_AND_MAYBE_RESET, 1)
    for _ in range(TRIAL + 1):
        worker.answer(frame)
    calls: Counter[str] = Counter()

    def count_call(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "aioenvs" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count_call)
    try:
        for _ in range(steps):
            worker.answer(frame)
    finally:
        sys.setprofile(None)
    own = {name: number for name, number in calls.items() if not name.startswith("QuietEnv")}
    each = sum(number for number in own.values() if number >= count * steps) / (count * steps)
    once = sum(number for number in own.values() if number < count * steps) / steps
    assert each <= 4, own  # put, step, after, write
    assert once <= 14, own
