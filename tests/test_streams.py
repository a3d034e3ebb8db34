"""Random streams of an env's own: what a seed makes them, and that they leave no trace when the env does not run."""

import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from aioenvs import AsyncParallelEnv, SerialEnv
from aioenvs.engine.worker.random_streams import NUMPY, PYTHON, Generators, Streams, TrialStreams, here, leave_alone
from aioenvs.envs.adapter import TORCH
from aioenvs.testing import CountingEnv, RandomEnv

pytestmark = pytest.mark.usefixtures("own_generators")

SEEDS = [0, 3, 2**31, 2**32 - 2]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random_sample()), float(torch.rand((), dtype=torch.float64))


def seed_by_hand(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()


def own_streams(seed: int | None = None) -> Streams:
    streams = Streams(PYTHON, NUMPY, TORCH)
    if seed is not None:
        streams.seed(seed)
    return streams


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_means_what_it_means_by_hand(seed: int) -> None:
    seed_by_hand(seed)
    expected = [draw() for _ in range(3)]
    seed_by_hand(11)
    with own_streams(seed):
        assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("seed", [2**32, 2**63, 2**64 + 1])
def test_any_seed_will_do(seed: int) -> None:
    with own_streams(seed):
        first = draw()
    with own_streams(seed):
        assert draw() == first


def test_they_go_on_where_they_stopped() -> None:
    seed_by_hand(3)
    expected = [draw() for _ in range(4)]
    streams, found = own_streams(3), []
    for _ in range(4):
        with streams:
            found.append(draw())
        draw()  # the caller's
    assert found == expected


def test_two_of_them_do_not_meet() -> None:
    first, second = own_streams(3), own_streams(3)
    numbers: list[list[Any]] = [[], []]
    for _ in range(3):
        for streams, drawn in zip((first, second), numbers, strict=True):
            with streams:
                drawn.append(draw())
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0])) == 3


def test_the_caller_does_not_notice() -> None:
    streams = own_streams(3)
    before = states()
    with streams:
        draw()
        seed_by_hand(5)
        random.setstate(random.Random(7).getstate())
        np.random.set_state(np.random.RandomState(7).get_state())
        torch.set_rng_state(torch.Generator().manual_seed(7).get_state())
    assert states() == before


def test_an_exception_leaves_everything_in_its_place() -> None:
    seed_by_hand(3)
    expected = [draw() for _ in range(2)]
    streams = own_streams(3)
    before = states()
    with pytest.raises(ValueError, match="oops"), streams:  # noqa: PT012
        assert draw() == expected[0]
        raise ValueError("oops")
    assert states() == before
    with streams:
        assert draw() == expected[1]


def test_without_a_seed_they_are_the_callers_own() -> None:
    streams = own_streams()
    seed_by_hand(3)
    expected = [draw() for _ in range(3)]
    seed_by_hand(3)
    found = [draw()]
    with streams:
        found.append(draw())
    found.append(draw())
    assert found == expected


def test_a_new_seed_begins_anew() -> None:
    streams = own_streams(3)
    with streams:
        first = draw()
        draw()
    streams.seed(3)
    with streams:
        assert draw() == first


def test_of_no_generator_nothing_is_kept() -> None:
    streams = Streams()
    streams.seed(3)
    seed_by_hand(4)
    with streams:
        first = draw()
    seed_by_hand(4)
    assert draw() == first


def test_they_can_be_nested() -> None:
    seed_by_hand(3)
    outer_expected = [draw() for _ in range(2)]
    seed_by_hand(4)
    inner_expected = draw()
    outer, inner = own_streams(3), own_streams(4)
    before = states()
    with outer:
        found = [draw()]
        with inner:
            assert draw() == inner_expected
        found.append(draw())
    assert found == outer_expected
    assert states() == before


# -- threads and forks ----------------------------------------------------------------------------------


def test_streams_of_other_threads_wait() -> None:
    before, entered, order = states(), threading.Event(), []

    def other() -> None:
        streams = own_streams(4)
        entered.set()
        with streams:
            order.append(draw())

    thread = threading.Thread(target=other)
    with own_streams(3):
        thread.start()
        entered.wait()
        thread.join(0.05)  # more than enough to get there, if nothing kept it
        order.append(draw())
    thread.join()
    assert states() == before
    seed_by_hand(3)
    first = draw()
    seed_by_hand(4)
    assert order == [first, draw()]


class Meeting(CountingEnv):
    """Draws from the process's generators, and lets other threads have their turn in between."""

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        self.draws = [draw() for _ in range(3) if self.turn() is None]
        return super()._reset(tensordict, **kwargs)

    def turn(self) -> None:
        threading.Event().wait(0.001)


def test_batches_in_two_threads_leave_the_callers_generators_in_place() -> None:
    before, found = states(), {}

    def run(seed: int) -> None:
        with SerialEnv(2, Meeting) as env:
            env.set_seed(seed, static_seed=True)
            for _ in range(5):
                env.reset()
            found[seed] = env.get_attr("draws")

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states() == before
    for seed in (3, 4):
        seed_by_hand(seed)
        assert found[seed] == [[draw() for _ in range(15)][-3:]] * 2


def test_a_batch_in_an_env_has_streams_on_top() -> None:
    before = random.getstate(), np.random.mtrand.get_bit_generator()
    results = []
    for _ in range(2):
        torch.manual_seed(0)  # of the random actions
        with SerialEnv(2, lambda: SerialEnv(2, lambda: RandomEnv("random"))) as env:
            env.set_seed(3)
            results.append(env.rollout(3, break_when_any_done=False)["next", "observation"])
    assert torch.equal(*results)
    assert (random.getstate(), np.random.mtrand.get_bit_generator()) == before


def batch_in_a_thread() -> SerialEnv:
    return SerialEnv(1, lambda: RandomEnv("random"))


async def test_a_batch_in_a_thread_of_a_batch_leaves_the_generators_alone() -> None:
    async with AsyncParallelEnv(2, batch_in_a_thread, backend="thread") as env:
        await env.set_seed(5)
        random.seed(3)
        expected = sorted(random.random() for _ in range(2))
        random.seed(3)
        td = await env.reset()
    assert sorted(td["observation"].flatten().tolist()) == pytest.approx(expected)


def test_a_thread_is_told_for_itself() -> None:
    found = []

    def run() -> None:
        leave_alone()
        found.append(here())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [Generators.LEFT]
    assert here() is Generators.EXCHANGED


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_thread_that_it_has_not() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with own_streams(3):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        waiting = threading.Timer(10, os._exit, [1])
        waiting.daemon = True
        waiting.start()
        with own_streams(4):
            pass
        os._exit(0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_generator_that_cannot_be_put_in_place_keeps_nobody_waiting() -> None:
    def refuse(state: Any) -> None:
        raise ValueError("no")

    streams = Streams(PYTHON._replace(set=refuse))
    streams.seed(3)
    with pytest.raises(ValueError, match="no"), streams:
        pass
    thread = threading.Thread(target=TrialStreams().run, args=(int,))
    thread.start()
    other = threading.Thread(target=lambda: own_streams(4).run(draw))
    other.start()
    other.join(10)
    assert not other.is_alive()
    thread.join()
