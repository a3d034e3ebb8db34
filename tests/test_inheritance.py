"""Workers start as their parent is then, not as it was when a launcher was started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_worker_process import START_METHODS, linux

PROGRAM = """
import os, signal, sys, time
import gymnasium as gym
from aioenvs import ParallelEnv

class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def reset(self, **_): return 0, {}
    def step(self, action): return 0, 0.0, False, False, {}
    def told(self):
        mask = os.umask(0o22)
        os.umask(mask)
        return sorted(os.sched_getaffinity(0)), mask, os.getpriority(os.PRIO_PROCESS, 0)

def told(env):
    found = env.call("told")
    assert found[0] == found[1], found
    return found[0]

cores, niceness = sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)
method = sys.argv[1]
first = ParallelEnv(2, Env, num_processes=2, mp_start_method=method, on_worker_death="restart")
first.reset()
assert told(first) == (cores, 0o22, niceness), told(first)
os.sched_setaffinity(0, cores[:1])
os.umask(0o77)
os.nice(3)
second = ParallelEnv(2, Env, mp_start_method=method)
assert second.num_processes == 1, second
second.reset()
assert told(second) == (cores[:1], 0o77, niceness + 3), told(second)
assert told(first) == (cores, 0o22, niceness), told(first)
old = first.pids[0]
os.kill(old, signal.SIGKILL)
td = first.reset()
while first.pids[0] == old or len(first.pids) < 2:
    td = first.step(first.rand_action(td))["next"]
found = [first[0].call("told")[0], first[1].call("told")[0]]
assert found == [(cores[:1], 0o77, niceness + 3), (cores, 0o22, niceness)]
first.close()
second.close()
print("as they are now")
"""


@linux
@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=[pytest.mark.slow] if each != "forkserver" else []) for each in START_METHODS]
)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_umask_and_niceness_are_those_of_now(method: str) -> None:
    """Of restarted workers, too; the number of processes counts the cores of now."""
    code = f"import os; os.umask(0o22); exec({PROGRAM!r})"
    done = subprocess.run([sys.executable, "-c", code, method], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == "as they are now\n", done.stderr
