"""Programs as people write them, without an `if __name__ == "__main__"` guard, from wherever Python reads code."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

METHODS = ("forkserver", "spawn", "fork")
JUPYTER = "[IPKernelApp] "  # begins what a kernel says of itself

ENVS = """
import asyncio
import gymnasium as gym
import numpy as np
import threading
import uvloop
import aioenvs

class MainError(Exception):
    pass

class MainEnv(gym.Env):
    observation_space = gym.spaces.Box(-1000, 1000, (1,))
    action_space = gym.spaces.Discrete(3)

    def __init__(self, number=0):
        self.number = number

    def reset(self, *, seed=None, options=None):
        return np.full(1, self.number, np.float32), {}

    def step(self, action):
        if self.number == 13:
            raise MainError(self.number, "unlucky")
        return np.full(1, self.number + 1, np.float32), 1.0, False, False, {}

def stepped(env):
    return env.rand_step(env.reset())["next", "observation"].flatten().tolist()

async def stepped_async(env):
    td = await env.rand_step(await env.reset())
    return td["next", "observation"].flatten().tolist()
"""

FACTORIES = """
offset = 10

def local():
    class Local(MainEnv):
        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            return observation + offset, info

        def step(self, action):
            return np.full(1, self.number + offset, np.float32), 1.0, False, False, {}

    return Local(5)

gym.register("mine/Class-v0", MainEnv)
gym.register("mine/Lambda-v0", lambda number: MainEnv(number), kwargs={"number": 7})
numbered = [{"number": 1}, {"number": 2}]
cases = {
    "class": (MainEnv, numbered),
    "lambda": (lambda: MainEnv(offset), None),
    "local class": (local, None),
    "id": ("mine/Class-v0", numbered),
    "id of a lambda": ("mine/Lambda-v0", None),
    "list": ([MainEnv, lambda number: MainEnv(number * 100)], numbered),
}
for method in ("forkserver", "spawn", "fork"):
    for name, (factory, kwargs) in cases.items():
        with aioenvs.ParallelEnv(2, factory, create_env_kwargs=kwargs, mp_start_method=method) as env:
            print(method, name, stepped(env), sep=", ")
"""
FEW_FACTORIES = """
for method in ("forkserver", "spawn", "fork"):
    for factory in (MainEnv, lambda: MainEnv(2)):
        with aioenvs.ParallelEnv(2, factory, mp_start_method=method) as env:
            print(method, stepped(env))
"""
FEW_LINES = [f"{method} {values}" for method in METHODS for values in ([1.0, 1.0], [3.0, 3.0])]
FACTORY_LINES = [
    f"{method}, {name}, {values}"
    for method in METHODS
    for name, values in {
        "class": [2.0, 3.0],
        "lambda": [11.0, 11.0],
        "local class": [15.0, 15.0],
        "id": [2.0, 3.0],
        "id of a lambda": [8.0, 8.0],
        "list": [2.0, 201.0],
    }.items()
]

LOOPS = """
async def main(method):
    async with aioenvs.AsyncParallelEnv(2, lambda: MainEnv(3), mp_start_method=method) as env:
        print(method, await stepped_async(env))
    with aioenvs.ParallelEnv(2, lambda: MainEnv(4), mp_start_method=method) as env:
        print(method, stepped(env), threading.active_count())
    print(method, threading.active_count())

for run in (asyncio.run, uvloop.run):
    for method in ("forkserver", "spawn", "fork"):
        run(main(method))
        with aioenvs.ParallelEnv(2, lambda: MainEnv(5), mp_start_method=method) as env:
            print(method, stepped(env), threading.active_count())
"""
LOOP_LINES = 2 * [
    line
    for method in METHODS
    for line in (f"{method} [4.0, 4.0]", f"{method} [5.0, 5.0] 2", f"{method} 1", f"{method} [6.0, 6.0] 1")
]

ERRORS = """
for method in ("forkserver", "spawn", "fork"):
    with aioenvs.ParallelEnv(2, [MainEnv, lambda: MainEnv(13)], mp_start_method=method) as env:
        td = env.reset()
        try:
            env.rand_step(td)
        except MainError as error:
            print(method, type(error) is MainError, error.args, ["env 1" in note for note in error.__notes__])
        env.reset()
"""
ERROR_LINES = [f"{method} True (13, 'unlucky') [True]" for method in METHODS]

LATE = """
import sys
from pathlib import Path

import aioenvs
import gymnasium as gym

with aioenvs.ParallelEnv(2, "CartPole-v1") as env:
    env.reset()  # so that the launcher runs already
Path("late").mkdir()
Path("late/late_envs.py").write_text(Path("envs.py").read_text())
sys.path.insert(0, str(Path("late").resolve()))
import late_envs

gym.register("late/Late-v0", "late_envs:MainEnv", kwargs={"number": 20})
for method in ("forkserver", "spawn", "fork"):
    for factory in (late_envs.MainEnv, "late/Late-v0", lambda: late_envs.MainEnv(30)):
        with aioenvs.ParallelEnv(2, factory, mp_start_method=method) as env:
            print(method, late_envs.stepped(env))
"""


def python(folder: Path, *arguments: str, code: str = "") -> list[str]:
    """Run an interpreter to its end; returns what it printed. It, and its workers, must say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, input=code, capture_output=True, text=True, timeout=55, check=False
    )
    assert [line for line in done.stderr.splitlines() if not line.startswith(JUPYTER)] == []
    assert done.returncode == 0
    return done.stdout.splitlines()


def as_script(folder: Path, code: str) -> list[str]:
    (folder / "program.py").write_text(code)
    return python(folder, "program.py")


def as_module(folder: Path, code: str) -> list[str]:
    (folder / "program.py").write_text(code)
    return python(folder, "-m", "program")


def as_argument(folder: Path, code: str) -> list[str]:
    return python(folder, "-c", code)


def from_stdin(folder: Path, code: str) -> list[str]:
    return python(folder, "-", code=code)


@pytest.mark.parametrize("run", [as_script, from_stdin])
def test_factories_of_every_kind_and_exceptions_by_type(run: Callable[[Path, str], list[str]], tmp_path: Path) -> None:
    assert run(tmp_path, ENVS + FACTORIES + ERRORS) == FACTORY_LINES + ERROR_LINES


@pytest.mark.parametrize("run", [as_module, as_argument])
def test_factories_of_other_programs(run: Callable[[Path, str], list[str]], tmp_path: Path) -> None:
    assert run(tmp_path, ENVS + FEW_FACTORIES) == FEW_LINES


def test_both_faces_inside_a_running_loop(tmp_path: Path) -> None:
    assert as_script(tmp_path, ENVS + LOOPS) == LOOP_LINES


def test_a_module_from_a_path_that_was_added_at_run_time(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(ENVS)
    expected = [f"{method} {values}" for method in METHODS for values in ([1.0, 1.0], [21.0, 21.0], [31.0, 31.0])]
    assert as_script(tmp_path, LATE) == expected


def test_a_guard_does_no_harm(tmp_path: Path) -> None:
    main = "with aioenvs.ParallelEnv(2, MainEnv, mp_start_method='spawn') as env:\n    print(stepped(env))\n"
    guarded = "print('top')\nif __name__ == '__main__':\n" + textwrap.indent(main, "    ")
    assert as_script(tmp_path, ENVS + guarded) == ["top", "[1.0, 1.0]"]


def test_workers_print_where_the_program_prints(tmp_path: Path) -> None:
    code = """
    class Talking(MainEnv):
        def reset(self, **kwargs):
            print("reset", self.number)
            return super().reset(**kwargs)

    kwargs = [{"number": 1}, {"number": 2}]
    with aioenvs.ParallelEnv(2, Talking, create_env_kwargs=kwargs, num_processes=1) as env:
        env.reset()
    """
    assert as_script(tmp_path, ENVS + textwrap.dedent(code)) == ["reset 1", "reset 2"]


NOTEBOOK = (
    ENVS,
    """
    async with aioenvs.AsyncParallelEnv(2, lambda: MainEnv(3)) as env:
        print(await stepped_async(env))
    """,
    """
    env = aioenvs.ParallelEnv(2, MainEnv, create_env_kwargs=[{"number": 1}, {"number": 2}])
    print(stepped(env))
    """,
    """
    print(stepped(env))
    env.close()
    for method in ("spawn", "fork"):
        with aioenvs.ParallelEnv(2, lambda: MainEnv(3), mp_start_method=method) as env:
            print(method, stepped(env))
    """,
)
NOTEBOOK_OUTPUT = ["", "[4.0, 4.0]", "[2.0, 3.0]", "[2.0, 3.0]\nspawn [4.0, 4.0]\nfork [4.0, 4.0]"]

EXECUTE = """
import json
import sys
import nbclient
import nbformat

cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, kernel_name="python3", timeout=45).execute()
print(json.dumps([[dict(output) for output in cell.outputs] for cell in notebook.cells]))
"""


def test_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "execute.py").write_text(EXECUTE)
    cells = json.dumps([textwrap.dedent(cell) for cell in NOTEBOOK])
    *_, line = python(tmp_path, "-W", "ignore", "execute.py", code=cells)
    outputs = json.loads(line)
    assert {output.get("name") for cell in outputs for output in cell} == {"stdout"}
    assert ["".join(output["text"] for output in cell).strip() for cell in outputs] == NOTEBOOK_OUTPUT
