"""Gymnasium envs that draw from the generators of the process: each has streams of its own once it is seeded."""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from drawing_envs import SharedDiceEnv, TorchDiceEnv
from faces import Face

from aioenvs import AsyncParallelEnv, ParallelEnv, SerialEnv
from aioenvs.engine.worker.random_streams import (
    NUMPY,
    PYTHON,
    TRIAL,
    Generators,
    Streams,
    TrialStreams,
    torch_generator,
)

NUM_ENVS = 4


def drawn_by_hand(seed: int) -> list[float]:
    """The first draws of an env that is alone with its generators."""
    return [random.Random(seed).random(), np.random.RandomState(seed).rand()]


@functools.cache
def trajectory(late: int, processes: int, repetition: int = 0) -> torch.Tensor:
    """What two envs that use torch observe in many steps, given the seed 3."""
    make = functools.partial(ParallelEnv, num_processes=processes) if processes else SerialEnv
    with make(2, TorchDiceEnv, create_env_kwargs={"late": late}) as env:
        env.set_seed(3)
        observations: torch.Tensor = env.rollout(3 * TRIAL, break_when_any_done=False)["next", "observation"]
        return observations


async def test_trajectories_do_not_depend_on_who_shares_the_process(face: Face) -> None:
    if face.threads != 0:
        pytest.skip("threads use the process's generators at the same time")
    with SerialEnv(NUM_ENVS, SharedDiceEnv) as serial:
        serial.set_seed(3)
        expected = serial.rollout(100, break_when_any_done=False)["next", "observation"]
    async with face.open(NUM_ENVS, SharedDiceEnv) as env:
        await face.call(env.set_seed, 3)
        found = await face.call(env.rollout, 100, break_when_any_done=False)
    assert torch.equal(found["next", "observation"], expected)
    assert len(expected[..., :2].unique()) == expected[..., :2].numel()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_seeds_reach_torch_too(processes: int) -> None:
    expected = trajectory(0, 0)
    assert torch.equal(trajectory(0, processes), expected)
    assert len(expected[..., :3].unique()) == expected[..., :3].numel()


@pytest.mark.slow
def test_seeds_reach_envs_that_begin_to_draw_late_and_have_their_process_to_themselves() -> None:
    late = trajectory(2 * TRIAL, 2)
    torch.manual_seed(3)
    assert late[0, 2 * TRIAL - 1, :3].tolist() == [*drawn_by_hand(3), torch.rand((), dtype=torch.float64).item()]


@pytest.mark.slow
def test_draws_that_begin_late_can_be_repeated_with_as_many_processes() -> None:
    late = trajectory(2 * TRIAL, 1)
    assert (late[:, -1, :3] != 0).all()
    assert torch.equal(trajectory(2 * TRIAL, 1, repetition=1), late)


@pytest.mark.slow
def test_numpys_stream_is_the_envs_own_however_late_it_draws() -> None:
    numbers = [trajectory(2 * TRIAL, processes)[..., 1] for processes in (0, 1, 2)]
    assert torch.equal(numbers[0], numbers[1])
    assert torch.equal(numbers[0], numbers[2])
    assert numbers[0][0, 2 * TRIAL - 1] == np.random.RandomState(3).rand()


async def test_the_streams_are_those_of_the_seed(face: Face) -> None:
    if face.threads != 0:
        pytest.skip("threads use the process's generators at the same time")
    async with face.open(2, SharedDiceEnv) as env:
        td = await face.call(env.reset, list_of_kwargs=[{"seed": 1}, {"seed": 2}])
        again = await face.call(env.reset, list_of_kwargs=[{"seed": 1}, {"seed": 2}])
    assert td["observation"][:, :2].tolist() == [drawn_by_hand(1), drawn_by_hand(2)]
    assert torch.equal(td["observation"], again["observation"])


def test_the_callers_generators_are_left_alone() -> None:
    with SerialEnv(2, SharedDiceEnv) as env:
        env.reset(seed=0)
        before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
        env.rollout(20, break_when_any_done=False)
        assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == before


def test_without_a_seed_the_callers_generators_are_used() -> None:
    with SerialEnv(1, SharedDiceEnv) as env:
        random.seed(5)
        np.random.seed(5)
        assert env.reset()["observation"][0, :2].tolist() == drawn_by_hand(5)


@pytest.mark.parametrize("kept", [[], [torch_generator(torch)], [PYTHON], [PYTHON, torch_generator(torch)]])
def test_each_generator_is_exchanged_once(kept: Any) -> None:
    streams = TrialStreams(*kept)
    streams.seed(1)
    assert sorted(generator.name for generator in streams._generators) == ["numpy", "python", "torch"]
    random.seed(2)
    torch.manual_seed(2)
    assert streams.run(random.random) == random.Random(1).random()
    assert streams.run(torch.rand, 1) == torch.rand(1, generator=torch.Generator().manual_seed(1))


async def test_an_env_that_begins_to_draw_late_is_not_helped() -> None:
    make = [lambda: SharedDiceEnv(late=2 * TRIAL)] * 2
    async with AsyncParallelEnv(2, make, num_processes=1) as env:
        td = await env.reset(seed=0)
        for _ in range(2 * TRIAL):
            td, root = await env.step_and_maybe_reset(env.rand_action(td))
            td = root
        shared = td["observation"][:, :2]
    assert (shared != 0).all()
    assert shared[1].tolist() != drawn_by_hand(0)


def test_after_a_trial_it_goes_on_with_what_was_drawn_from() -> None:
    idle, busy = TrialStreams(), TrialStreams()
    assert idle.settled() is None
    for streams in (idle, busy):
        streams.seed(1)
    for _ in range(TRIAL):
        assert idle.settled() is idle
        with idle:
            pass
        busy.run(random.random)
    shared, kept = random.Random(1), idle.settled()
    assert kept is not None
    random.seed(1)
    assert kept.run(random.random) == shared.random()  # no more of its own
    assert kept.run(np.random.rand) == np.random.RandomState(1).rand()
    rest = busy.settled()
    assert rest is not None
    own = random.Random(1)
    expected = [own.random() for _ in range(TRIAL + 1)][-1]
    assert rest.run(random.random) == expected
    assert random.random() == shared.random()
    idle.seed(2)
    assert idle.settled() is idle


@pytest.mark.parametrize("use", [Generators.LEFT, Generators.OWNED])
def test_where_nothing_is_exchanged_there_is_nothing_to_go_on_with(use: Generators) -> None:
    random.seed(5)
    before = random.getstate(), np.random.mtrand.get_bit_generator()
    streams = TrialStreams(use=use)
    streams.seed(3)
    drawn = random.random()
    random.setstate(before[0])
    np.random.mtrand.set_bit_generator(before[1])
    assert streams.settled() is None
    assert drawn == (random.Random(3).random() if use is Generators.OWNED else random.Random(5).random())


def test_an_exception_within_numpys_stream_leaves_it_where_it_was() -> None:
    streams = TrialStreams()
    streams.seed(1)
    for _ in range(TRIAL):
        streams.run(int)
    numpys, before = streams.settled(), np.random.mtrand.get_bit_generator()
    assert numpys is not None
    with pytest.raises(ValueError, match="invalid literal"):
        numpys.run(int, "x")
    assert np.random.mtrand.get_bit_generator() is before


@pytest.mark.parametrize("generator", [PYTHON, NUMPY, torch_generator(torch)], ids=["python", "numpy", "torch"])
def test_a_mark_changes_with_each_draw(generator: Any) -> None:
    draw = random.random if generator is PYTHON else np.random.rand if generator is NUMPY else lambda: torch.rand(())
    streams = Streams(generator)
    streams.seed(0)
    marks = set()
    for _ in range(700):
        with streams:
            draw()
            marks.add(generator.mark(generator.get()))
    assert len(marks) == 700
