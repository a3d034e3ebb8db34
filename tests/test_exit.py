"""How scripts end: with Ctrl-C, without close, by an exception, by SIGKILL. Nothing is left, ever.

Each test runs a script as a user would, with a mark in its environment by which every process that descends from it
is found, whoever its parent is by then.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from failing_envs import Gate
from processes import still_alive

import aioenvs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="needs signals")]
PATHS = (Path(__file__).parent, Path(aioenvs.__file__).parent.parent)  # of what is here, and of the aioenvs under test
PROLOGUE = """
import asyncio, sys
import failing_envs as faults
from failing_envs import CountingEnv, numbered
from faces import acting, observed
from aioenvs import AsyncParallelEnv, ParallelEnv

class Arrivals:
    def __call__(self): open({arrivals!r}, "wb", buffering=0).write(b"x")
wait = faults._WaitAt({arrivals!r}, {passes!r})
arrive = Arrivals()
"""


class Script:
    """A Python script that runs in a session of its own."""

    def __init__(self, folder: Path, gate: Gate) -> None:
        self._folder, self._gate = folder, gate
        self._mark = f"AIOENVS_TEST_RUN={uuid.uuid4()}"
        self.out = self.err = ""

    def start(self, source: str, *, stdin: bool = False) -> None:
        arrivals, passes = self._gate.names
        text = PROLOGUE.format(arrivals=arrivals, passes=passes) + textwrap.dedent(source)
        path = self._folder / "script.py"
        path.write_text(text)
        name, value = self._mark.split("=")
        with path.open() if stdin else open(os.devnull) as given:
            self._popen = subprocess.Popen(
                [sys.executable, "-W", "always", "-" if stdin else str(path)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, name: value, "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the whole foreground process group, as a terminal does."""
        os.killpg(self._popen.pid, signal.SIGINT)

    def kill(self) -> None:
        self._popen.kill()

    def wait(self) -> int:
        """Wait for its end, and for that of everybody who holds its output; return the exit code."""
        self.out, self.err = self._popen.communicate(timeout=40)
        return self._popen.returncode

    def family(self) -> list[psutil.Process]:
        """The processes that carry the mark and are alive."""
        mark = self._mark.encode()
        found = []
        for process in psutil.process_iter():
            try:
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
            except OSError:
                continue
        return found

    def survivors(self, family: list[psutil.Process]) -> list[psutil.Process]:
        """Those of the family who do not end within the time that the launcher has for it, and whoever joined."""
        still_alive(family)
        return self.family()

    def clean_up(self) -> None:
        for process in self.family():
            process.kill()
        self._popen.communicate(timeout=10)


@pytest.fixture
def script(tmp_path: Path, gate: Gate) -> Iterator[Script]:
    script = Script(tmp_path, gate)
    yield script
    script.clean_up()


def test_ctrl_c_in_a_coroutine(script: Script, gate: Gate) -> None:
    script.start("""
        async def main():
            kwargs = numbered(4, {1: {"fault": wait, "at": (1, 2)}})
            async with AsyncParallelEnv(4, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
                await env.reset()
                await env.step(acting([1, 2, 3, 4]))
                try:
                    await env.step(acting([10, 20, 30, 40]))
                except asyncio.CancelledError:
                    asyncio.current_task().uncancel()
                    print("cancelled", flush=True)
                    print(observed(await env.step(acting([100, 200, 300, 400]))), flush=True)
                    raise
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted")
    """)
    gate.wait_for_arrival()
    family = script.family()
    assert len(family) == 4  # the script, the launcher, two workers
    script.press_ctrl_c()
    gate.open()
    assert script.wait() == 0
    assert script.out.splitlines() == [
        "cancelled",
        "[[0, 1, 3, 111], [1, 1, 3, 222], [2, 1, 3, 333], [3, 1, 3, 444]]",
        "interrupted",
    ]
    assert script.err == ""
    assert script.survivors(family) == []


def test_ctrl_c_in_a_plain_call(script: Script, gate: Gate) -> None:
    script.start("""
        kwargs = numbered(4, {1: {"fault": wait, "at": (1, 2)}, 3: {"fault": wait, "at": (1, 4)}})
        with ParallelEnv(4, CountingEnv, create_env_kwargs=kwargs, num_processes=2) as env:
            env.reset()
            env.step(acting([1, 2, 3, 4]))
            try:
                env.step(acting([10, 20, 30, 40]))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            print(observed(env.step(acting([100, 200, 300, 400]))), flush=True)
            env.step(acting([0] * 4))
    """)
    gate.wait_for_arrival()
    family = script.family()
    script.press_ctrl_c()
    gate.open()
    gate.wait_for_arrival()  # of env 3, which nobody lets through
    script.press_ctrl_c()
    gate.open()
    assert script.wait() in (130, -signal.SIGINT)
    assert script.out.splitlines() == [
        "interrupted",
        "[[0, 1, 3, 111], [1, 1, 3, 222], [2, 1, 3, 333], [3, 1, 3, 444]]",
    ]
    assert script.err.count("Traceback") == 1
    assert script.err.strip().endswith("KeyboardInterrupt")
    assert script.survivors(family) == []


def test_a_script_that_ends_without_close(script: Script) -> None:
    """No guard, from stdin, with functions defined there; one face of each kind, and an env that hangs."""
    script.start(
        """
        loop = asyncio.new_event_loop()
        kept = AsyncParallelEnv(3, lambda: CountingEnv(5), num_processes=3)
        print(observed(loop.run_until_complete(kept.reset())))
        plain = ParallelEnv(2, lambda: CountingEnv(6), num_processes=2)
        print(observed(plain.reset()))
        hung = ParallelEnv(1, lambda: CountingEnv(fault=faults.hang_deaf, at=(1, 1)), step_timeout=0.2)
        hung.reset()
        try:
            hung.step(acting([0]))
        except TimeoutError:
            print("late")
        """,
        stdin=True,
    )
    assert script.wait() == 0, script.err
    assert script.out.splitlines() == [str([[5, 1, 0, 0]] * 3), str([[6, 1, 0, 0]] * 2), "late"]
    for words in ("<AsyncParallelEnv num_workers=3", "<ParallelEnv num_workers=2", "<ParallelEnv num_workers=1"):
        assert f"ResourceWarning: {words}" in script.err, script.err
    assert "Traceback" not in script.err
    assert script.survivors(script.family()) == []


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_script_that_ends_by_an_exception(script: Script, method: str) -> None:
    script.start(f"""
        async def main():
            global env
            env = AsyncParallelEnv(3, CountingEnv, num_processes=2, mp_start_method={method!r})
            await env.reset()
            raise LookupError("the learner diverged")
        asyncio.run(main())
    """)
    assert script.wait() == 1
    assert script.err.count("Traceback") == 1
    assert "LookupError: the learner diverged" in script.err
    assert "ResourceWarning: <AsyncParallelEnv num_workers=3" in script.err
    assert script.survivors(script.family()) == []


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_the_parent_is_killed(script: Script, gate: Gate, method: str) -> None:
    """While workers are idle, at work, hung, deaf to signals, stopped, or have a process of their own."""
    before = shared_memory()
    script.start(f"""
        import tempfile
        options = {{"mp_start_method": {method!r}, "num_processes": 4}}
        def twice(fault):
            arrive()
            fault()
        kinds = [faults.hang, faults.hang_deaf, faults.stop_itself]
        kwargs = numbered(4, {{i: {{"fault": lambda f=f: twice(f), "at": (1, 1)}} for i, f in enumerate(kinds)}})
        idle = ParallelEnv(4, faults.ChildfulEnv, create_env_kwargs={{"folder": tempfile.mkdtemp()}}, **options)
        idle.reset()
        busy = ParallelEnv(4, CountingEnv, create_env_kwargs=kwargs, **options)
        busy.reset()
        busy.step(acting([0] * 4))
    """)
    for _ in range(3):
        gate.wait_for_arrival()
    family = script.family()
    assert len(family) >= 1 + 1 + 8 + 4
    script.kill()
    assert script.wait() == -signal.SIGKILL
    assert script.survivors(family) == []
    assert "Traceback" not in script.err
    left = shared_memory() - before
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:  # that of other programs on this machine goes with them
        time.sleep(0.05)
        left &= shared_memory()
    assert left == set()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
