"""The same envs in processes and on a Ray cluster: one argument is another, the rest of the loop stays.

Without a cluster to connect to, this script starts one of two nodes on this machine, which have as many CPUs as they
are told. Where there is one, `RAY_ADDRESS=<host>:<port> python examples/ray_cluster.py` uses that.

Run it by ``python examples/ray_cluster.py``; it takes a few seconds. `--compute-ms 0.1 1 10` compares envs that compute
for so long in a step.
"""

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from aioenvs import ParallelEnv


class ComputingEnv(gym.Env[Any, Any]):
    """Keeps a core busy for as long as a simulator would.

    Args:
        milliseconds: Of each step.
    """

    observation_space = gym.spaces.Box(-1, 1, (16,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, milliseconds: float) -> None:
        self.seconds = milliseconds / 1000
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin anew."""
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 16).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        """Compute, and observe random numbers; an episode has 100 steps."""
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.steps += 1
        return self.np_random.uniform(-1, 1, 16).astype(np.float32), 1.0, False, self.steps == 100, {}


@contextlib.contextmanager
def two_nodes(num_cpus: int) -> Iterator[None]:
    """A cluster of two nodes on this machine, unless RAY_ADDRESS names another."""
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": num_cpus, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(env: ParallelEnv, seconds: float) -> float:
    """Step all envs for some seconds.

    Returns:
        Milliseconds a batch: the 10th percentile, which others on the machine have little to do with.
    """
    td = env.rand_action(env.reset(seed=0))
    env.step_and_maybe_reset(td)
    durations = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        td, following = env.step_and_maybe_reset(env.rand_action(td))
        durations.append(time.perf_counter() - begin)
        td = following
    return 1000 * float(np.percentile(durations, 10))


def main() -> None:
    """Compare the backends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=8, help="how many envs (default: %(default)s)")
    parser.add_argument("--num-hosts", type=int, default=2, help="processes, or actors (default: %(default)s)")
    parser.add_argument("--compute-ms", type=float, nargs="+", default=[1.0], help="of a step (default: 1)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each, in turns (default: %(default)s)")
    options = parser.parse_args()
    with two_nodes(options.num_hosts):
        print(f"{options.num_envs} envs in {options.num_hosts} hosts; milliseconds a batch")
        for milliseconds in options.compute_ms:
            found: dict[str, list[float]] = {"process": [], "ray": []}
            for _ in range(options.repeats):
                for backend, own in found.items():
                    with ParallelEnv(
                        options.num_envs,
                        ComputingEnv,
                        create_env_kwargs={"milliseconds": milliseconds},
                        num_processes=options.num_hosts,
                        backend=backend,
                    ) as env:
                        own.append(measure(env, options.seconds))
            process, ray = (float(np.median(own)) for own in found.values())
            print(f"{milliseconds:5g} ms a step: process {process:.2f}, ray {ray:.2f}, ratio {process / ray:.2f}")


if __name__ == "__main__":
    main()
