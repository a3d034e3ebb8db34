"""One seed, the same numbers: whatever hosts the envs, however they draw, and whoever else draws meanwhile."""

import functools
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from faces import masked
from tensordict import TensorDictBase
from test_death import kill_and_reap
from torch_faces import OWN_TORCH_FACES, Driver, TorchFace, over_own_torch_faces, over_torch_faces

from aioenvs import AsyncParallelEnv, ParallelEnv, SerialEnv
from aioenvs.errors import WorkerDiedError
from aioenvs.testing import CountingEnv, RandomEnv

pytestmark = pytest.mark.usefixtures("own_generators")

CHAIN = [0, 795726461, 2841183792, 2309840538]
SOURCES = ["torch", "numpy", "random", "own"]
METHODS = ["forkserver", "spawn", "fork"]
LIMIT = 2**32 - 1

over_streams_of_their_own = pytest.mark.parametrize(
    "face", [param for param in OWN_TORCH_FACES if "thread" not in param.id]
)


def next_seed(seed: int) -> int:
    """TorchRL's rule, as it is published."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % LIMIT


class DrawingEnv(RandomEnv):
    """Draws from all three generators of its process, and seeds none of them itself."""

    def __init__(self, max_steps: int = 3) -> None:
        super().__init__(size=3, max_steps=max_steps)

    def _draw(self) -> torch.Tensor:
        drawn = random.random(), np.random.random_sample(), float(torch.rand((), dtype=torch.float64))
        return torch.tensor(drawn, dtype=torch.float64)

    def _set_seed(self, seed: int | None) -> None:
        pass


class FragileEnv(DrawingEnv):
    """Draws, and then fails, in the second step."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        following = super()._step(tensordict)
        if self.steps == 2:
            raise ValueError("a fuse has blown")
        return following


class StubbornEnv(RandomEnv):
    """Refuses to be seeded."""

    def _set_seed(self, seed: int | None) -> None:
        super()._set_seed(seed)
        raise ValueError("I choose my own luck")


def states() -> tuple[Any, ...]:
    """What the generators of this process are about to draw."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()


def seed_by_hand(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Workers need not import this module, and all that it imports."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def still(td: TensorDictBase) -> TensorDictBase:
    """A policy that draws nothing."""
    return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


def alone(make: Any, seed: int, steps: int) -> torch.Tensor:
    """What one env observes that is run by itself, seeded by hand: after its reset, and after each step."""
    seed_by_hand(seed)
    env = make()
    env.set_seed(seed)
    rollout = env.rollout(steps, still, break_when_any_done=False)
    return seen(rollout)


def seen(rollout: TensorDictBase) -> torch.Tensor:
    return torch.stack([rollout["observation"], rollout["next", "observation"]], -2)


async def rolled(env: Driver, steps: int) -> torch.Tensor:
    return seen(await env.rollout(steps, still, break_when_any_done=False))


# -- which seed goes where ------------------------------------------------------------------------------


def counting(face: TorchFace) -> Any:
    """Counting envs whose seed has a name of which TorchRL's workers think nothing else."""

    class Seeded(face.toys.CountingEnv):  # type: ignore[misc,name-defined]
        @property
        def given_seed(self) -> Any:
            return self.seed

    return Seeded


@over_torch_faces
async def test_the_chain(face: TorchFace) -> None:
    async with face.open(3, counting(face)) as env:
        following = await env.set_seed(0)
        assert following == CHAIN[3]
        assert await env.read("given_seed") == CHAIN[:3]
        assert await env.set_seed(following) == next_seed(next_seed(next_seed(following)))
        assert (await env.read("given_seed"))[:2] == [following, next_seed(following)]
        assert await env.set_seed(7, static_seed=True) == 7
        assert await env.read("given_seed") == [7] * 3


@over_own_torch_faces
async def test_none_draws_entropy(face: TorchFace) -> None:
    async with face.open(3, CountingEnv) as env:
        followed = [await env.set_seed(None), await env.set_seed()]
        seeds = await env.read("seed")
    first, second, third = seeds
    assert (second, third) == (next_seed(first), next_seed(second))
    assert followed[1] == next_seed(third)
    assert followed[0] != followed[1]


@over_own_torch_faces
async def test_a_seed_of_a_reset_starts_the_same_chain(face: TorchFace) -> None:
    async with face.open(3, RandomEnv, {"source": "own"}) as env:
        td = await env.reset(seed=0)
        rest = await rolled_on(env, td)
        await env.set_seed(0)
        again = await env.reset()
        assert torch.equal(td["observation"], again["observation"])
        assert torch.equal(rest, await rolled_on(env, again))


async def rolled_on(env: Driver, td: TensorDictBase, steps: int = 3) -> torch.Tensor:
    return seen(await env.rollout(steps, still, tensordict=td, auto_reset=False, break_when_any_done=False))


@over_own_torch_faces
async def test_a_partial_reset_seeds_only_those_that_it_resets(face: TorchFace) -> None:
    async with face.open(3, CountingEnv) as env:
        await env.reset(seed=0)
        await env.reset(masked("_reset", 3, [0, 2]), seed=5)
        assert await env.read("seed") == [5, CHAIN[1], next_seed(next_seed(5))]
        await env.reset(list_of_kwargs=[{}, {"seed": 9}, {}])
        assert await env.read("seed") == [5, 9, next_seed(next_seed(5))]


@over_own_torch_faces
async def test_a_view_has_a_chain_of_its_own(face: TorchFace) -> None:
    async with face.open(3, CountingEnv) as env:
        await env.set_seed(5)
        assert await env[[2, 0]].set_seed(0) == CHAIN[2]
        assert await env.read("seed") == [CHAIN[1], next_seed(5), CHAIN[0]]


@over_own_torch_faces
@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)])
async def test_a_bad_seed_seeds_nobody(face: TorchFace, seed: Any, error: type[Exception]) -> None:
    async with face.open(2, CountingEnv) as env:
        with pytest.raises(error, match="seed must"):
            await env.set_seed(seed)
        with pytest.raises(error, match="seed must"):
            await env.reset(seed=seed)
        assert await env.read("seed") == [None, None]


@over_streams_of_their_own
async def test_an_env_that_refuses_its_seed(face: TorchFace) -> None:
    expected = torch.stack([alone(RandomEnv, seed, 4) for seed in CHAIN[:3]])
    before = states()
    async with face.open(3, [RandomEnv, StubbornEnv, RandomEnv]) as env:
        with pytest.raises(ValueError, match="my own luck") as caught:
            await env.set_seed(0)
        assert caught.value.env_index == (1,)
        assert torch.equal(await rolled(env, 4), expected)
    assert states() == before


# -- the same numbers everywhere ------------------------------------------------------------------------


@over_streams_of_their_own
@pytest.mark.parametrize("source", SOURCES)
async def test_each_env_draws_as_if_it_were_alone(face: TorchFace, source: str) -> None:
    make = functools.partial(RandomEnv, source, size=2, max_steps=3)
    expected = torch.stack([alone(make, seed, 8) for seed in CHAIN[:3]])
    async with face.open(3, make) as env:
        await env.set_seed(0)
        assert torch.equal(await rolled(env, 8), expected)
        await env.set_seed(0)
        assert torch.equal(await rolled(env, 8), expected)


@over_own_torch_faces
async def test_generators_of_their_own_are_the_same_also_in_threads(face: TorchFace) -> None:
    expected = torch.stack([alone(lambda: RandomEnv("own", max_steps=3), seed, 8) for seed in CHAIN[:3]])
    async with face.open(3, RandomEnv, {"source": "own", "max_steps": 3}) as env:
        await env.set_seed(0)
        assert torch.equal(await rolled(env, 8), expected)


@over_streams_of_their_own
async def test_an_env_that_knows_nothing_of_seeds_draws_as_if_it_were_alone(face: TorchFace) -> None:
    expected = torch.stack([alone(DrawingEnv, seed, 8) for seed in CHAIN[:3]])
    async with face.open(3, DrawingEnv) as env:
        await env.reset(seed=0)
        await env.set_seed(0)
        assert torch.equal(await rolled(env, 8), expected)


@over_streams_of_their_own
async def test_with_a_static_seed_all_draw_the_same(face: TorchFace) -> None:
    expected = alone(DrawingEnv, 7, 8).expand(3, -1, -1, -1)
    async with face.open(3, DrawingEnv) as env:
        await env.set_seed(7, static_seed=True)
        assert torch.equal(await rolled(env, 8), expected)


@over_streams_of_their_own
async def test_envs_that_are_stepped_at_different_times(face: TorchFace) -> None:
    expected = torch.stack([alone(DrawingEnv, seed, 6) for seed in CHAIN[:3]])
    async with face.open(3, DrawingEnv) as env:
        await env.set_seed(0)
        for i in (2, 0, 1):
            assert torch.equal(await rolled(env[i], 6), expected[i : i + 1])


@over_streams_of_their_own
async def test_a_stream_survives_an_exception(face: TorchFace) -> None:
    async with face.open(2, FragileEnv) as env:
        await env.set_seed(0)
        td = still(await env.reset())
        await env.step(td)
        before = states()
        with pytest.raises(ValueError, match="fuse"):
            await env.step(td)
        assert states() == before
        again = await env.reset()
    expected = torch.stack([alone_after(3, seed) for seed in CHAIN[:2]])
    assert torch.equal(again["observation"], expected)


def alone_after(draws: int, seed: int) -> torch.Tensor:
    """What an env draws that is alone and has drawn before."""
    seed_by_hand(seed)
    env = DrawingEnv()
    for _ in range(draws):
        env._draw()
    return env._draw()


@over_streams_of_their_own
async def test_calls_use_the_stream_too(face: TorchFace) -> None:
    async with face.open(2, DrawingEnv) as env:
        await env.set_seed(0)
        before = states()
        found = await env.call("_draw")
        assert states() == before
        assert torch.equal(torch.stack(found), torch.stack([alone_after(0, seed) for seed in CHAIN[:2]]))
        assert torch.equal(
            (await env.reset())["observation"], torch.stack([alone_after(1, seed) for seed in CHAIN[:2]])
        )


# -- nested ---------------------------------------------------------------------------------------------


def two_in_one() -> SerialEnv:
    return SerialEnv(2, DrawingEnv)


@over_streams_of_their_own
async def test_nested_envs_share_one_chain(face: TorchFace) -> None:
    expected = torch.stack([alone(DrawingEnv, seed, 5) for seed in CHAIN])
    async with face.open(2, two_in_one) as env:
        assert await env.set_seed(0) == next_seed(CHAIN[3])
        found = await rolled(env, 5)
    assert found.shape[:2] == (2, 2)
    assert torch.equal(found.flatten(0, 1), expected)


@over_streams_of_their_own
async def test_a_static_seed_reaches_nested_envs(face: TorchFace) -> None:
    expected = alone(DrawingEnv, 7, 5)
    async with face.open(2, two_in_one) as env:
        assert await env.set_seed(7, static_seed=True) == 7
        found = await rolled(env, 5)
    assert torch.equal(found, expected.expand_as(found))


# -- the caller's generators ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
async def test_seeded_envs_leave_the_callers_generators_alone(source: str) -> None:
    env = SerialEnv(3, RandomEnv, create_env_kwargs={"source": source, "max_steps": 2})
    before = states()
    env.set_seed(0)
    td = still(env.reset())
    for _ in range(4):
        _, td = env.step_and_maybe_reset(still(td))
    env.reset(masked("_reset", 3, [1]))
    env.reset(seed=4)
    env.rollout(5, still, break_when_any_done=False)
    env.close()
    assert states() == before


def test_random_actions_are_the_callers() -> None:
    with SerialEnv(3, DrawingEnv) as env, SerialEnv(3, DrawingEnv) as other:
        for each, seed in ((env, 0), (other, 1)):
            each.set_seed(seed)
        torch.manual_seed(5)
        actions = env.rollout(6, break_when_any_done=False)["action"]
        torch.manual_seed(5)
        assert torch.equal(other.rollout(6, break_when_any_done=False)["action"], actions)


def test_what_is_not_seeded_follows_the_caller() -> None:
    with SerialEnv(2, DrawingEnv) as env:
        seed_by_hand(5)
        expected = torch.stack([DrawingEnv()._draw() for _ in range(4)])
        seed_by_hand(5)
        td = still(env.reset())
        found = torch.cat([td["observation"], env.step(td)["next", "observation"]])
        assert torch.equal(found, expected)


# -- workers that nobody has seeded ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "num_processes"),
    [("forkserver", 1), ("forkserver", 3), ("fork", 1), ("fork", 3), ("spawn", 2)],  # fresh interpreters are slow
)
@pytest.mark.slow
def test_unseeded_workers_share_no_stream(method: str, num_processes: int) -> None:
    options: dict[str, Any] = {"num_processes": num_processes, "mp_start_method": method}
    drawn = []
    for _ in range(1 if method == "spawn" else 2):
        seed_by_hand(5)
        with ParallelEnv(3, DrawingEnv, **options) as env:
            drawn.extend(env.reset()["observation"])
    seed_by_hand(5)
    drawn.extend(DrawingEnv()._draw() for _ in range(3))
    for numbers in torch.stack(drawn).unbind(-1):
        assert len(set(numbers.tolist())) == len(drawn)


async def test_a_replacement_does_not_draw_what_the_dead_one_drew() -> None:
    async with AsyncParallelEnv(2, DrawingEnv, num_processes=1, mp_start_method="fork") as env:
        drawn = list((await env.reset())["observation"])
        await killed(Driver(env), env.pids)
        drawn += list((await env.reset())["observation"])
        drawn += list((await env.reset())["observation"])
    for numbers in torch.stack(drawn).unbind(-1):
        assert len(set(numbers.tolist())) == 6


# -- after a death --------------------------------------------------------------------------------------


async def killed(env: Driver, pids: Sequence[int]) -> None:
    """Kill these workers, and let the envs notice it."""
    for pid in pids:
        await kill_and_reap(pid)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        await env.set_seed(1)


@pytest.mark.parametrize("method", ["forkserver", "fork"])
async def test_a_seeded_reset_of_a_replacement(method: str) -> None:
    async with AsyncParallelEnv(3, DrawingEnv, num_processes=2, mp_start_method=method) as env:
        first = await env.reset(seed=0)
        await killed(Driver(env), env.pids)
        again = await env.reset(seed=0)
    assert torch.equal(again["observation"], first["observation"])
    assert torch.equal(first["observation"], torch.stack([alone_after(0, seed) for seed in CHAIN[:3]]))


def two_in_processes() -> ParallelEnv:
    return ParallelEnv(2, DrawingEnv, num_processes=2, mp_start_method="fork")


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
async def test_a_seeded_reset_of_a_nested_replacement(cls: Any) -> None:
    expected = torch.stack([alone_after(0, seed) for seed in CHAIN]).unflatten(0, (2, 2))
    driver = Driver(cls(2, two_in_processes))
    try:
        assert torch.equal((await driver.reset(seed=0))["observation"], expected)
        await killed(driver, [(await driver.get_attr("pids"))[1][0]])
        assert torch.equal((await driver.reset(seed=0))["observation"], expected)
    finally:
        await driver.close()
