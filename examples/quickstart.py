"""The same few steps twice: with coroutines, then without.

Run it by ``python examples/quickstart.py``; it takes a few seconds.
"""

import argparse
import asyncio

from aioenvs import AsyncParallelEnv, ParallelEnv

NUM_WORKERS = 4


async def with_coroutines() -> None:
    """Step four CartPoles from an event loop."""
    async with AsyncParallelEnv(NUM_WORKERS, "CartPole-v1") as env:
        await env.set_seed(0)
        td = await env.reset()
        print("reset: observation", tuple(td["observation"].shape))
        for _ in range(3):
            # `td` gets a "next" entry with what the step led to. `td_next` is where the following step
            # begins: the same observations, or those of a new episode for each env that had finished.
            td, td_next = await env.step_and_maybe_reset(env.rand_action(td))
            print("step:  reward", tuple(td["next", "reward"].shape), "done", tuple(td["next", "done"].shape))
            td = td_next
        rollout = await env.rollout(50, break_when_any_done=False)
        print("rollout: batch size", tuple(rollout.batch_size))


def without_coroutines() -> None:
    """Step four CartPoles from a plain loop: the same methods, without ``await``."""
    with ParallelEnv(NUM_WORKERS, "CartPole-v1") as env:
        env.set_seed(0)
        td = env.reset()
        print("reset: observation", tuple(td["observation"].shape))
        for _ in range(3):
            td, td_next = env.step_and_maybe_reset(env.rand_action(td))
            print("step:  reward", tuple(td["next", "reward"].shape), "done", tuple(td["next", "done"].shape))
            td = td_next
        rollout = env.rollout(50, break_when_any_done=False)
        print("rollout: batch size", tuple(rollout.batch_size))


def main() -> None:
    """Run both."""
    argparse.ArgumentParser(description="The async face and its sync twin, side by side.").parse_args()
    print("AsyncParallelEnv")
    asyncio.run(with_coroutines())
    print("ParallelEnv")
    without_coroutines()


if __name__ == "__main__":
    main()
