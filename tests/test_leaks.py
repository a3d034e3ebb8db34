"""Nothing grows: short runs of leaks.py, and that it would find what it looks for."""

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from leaks import Growth, growth_of_restarts, growth_of_starts, growth_of_steps

from aioenvs.engine.pools.pool import Pool

pytestmark = pytest.mark.slow

CYCLES = 100
MEGABYTES = 2 * 2**20  # fewer than what is observed in each batch of a run


async def check(grow: Callable[[], Awaitable[Growth]], cycles: int = CYCLES) -> None:
    """Fail if anything grows; memory only if it does so twice, since an allocator may take some more of it once."""
    found = await grow()
    most = {"descriptors": 0, "threads": 0, "processes": 0, "objects": cycles // 4, "memory": MEGABYTES}
    most["launchers' descriptors"] = 10  # it may still be closing those of the last workers
    too_many = {what: n for what, n in found.items() if n > most.get(what, most[what.split()[-1]])}
    if too_many and all(what.split()[-1] == "memory" for what in too_many):
        again = await grow()
        too_many = {what: (n, again[what]) for what, n in too_many.items() if again[what] > MEGABYTES}
    assert not too_many


@pytest.mark.parametrize(
    ("cycles", "options"),
    [
        (CYCLES, {"num_processes": 1}),
        (24, {"num_processes": 1, "mp_start_method": "fork"}),
        (8, {"num_processes": 1, "mp_start_method": "spawn"}),
        (CYCLES, {"backend": "thread"}),
        (CYCLES, {"backend": "serial"}),
    ],
    ids=["forkserver", "fork", "spawn", "thread", "serial"],
)
async def test_starts_and_closes(cycles: int, options: dict[str, Any]) -> None:
    await check(lambda: growth_of_starts(cycles, **options), cycles)


@pytest.mark.parametrize("policy", ["raise", "restart"])
async def test_deaths(policy: str) -> None:
    await check(lambda: growth_of_restarts(CYCLES, policy))


async def test_steps_with_objects() -> None:
    """25,000 steps of envs, with as many texts in either direction."""
    await check(lambda: growth_of_steps(batches=250), 250)


async def test_what_each_start_leaves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    left, copies = [], []
    start = Pool.start

    async def careless(self: Pool) -> None:
        left.append([self])
        copies.append(os.dup(0))
        await start(self)

    monkeypatch.setattr(Pool, "start", careless)
    try:
        growth = await growth_of_starts(20, num_processes=1)
    finally:
        for descriptor in copies:
            os.close(descriptor)
    assert growth["own objects"] >= 20
    assert growth["own descriptors"] == 20
