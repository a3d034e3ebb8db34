"""Each example runs as a user would run it, and prints what it promises."""

import asyncio
import contextlib
import json
import re
import runpy
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


def start_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example to its end."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=55,
        check=False,
    )


def run_example(name: str, *arguments: str) -> str:
    """Run an example to its end, which is a good one; return what it printed."""
    done = start_example(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_quickstart_prints_the_same_shapes_for_both_faces() -> None:
    twin = [
        "reset: observation (4, 4)",
        *["step:  reward (4, 1) done (4, 1)"] * 3,
        "rollout: batch size (4, 50)",
    ]
    lines = run_example("quickstart.py").splitlines()
    assert lines == ["AsyncParallelEnv", *twin, "ParallelEnv", *twin]


def test_classic_loop_learns_and_is_repeatable() -> None:
    output = run_example("classic_loop.py", "--seed", "0", "--iterations", "25")
    returns = [float(found) for found in re.findall(r"mean return +([0-9.]+)$", output, flags=re.MULTILINE)]
    assert len(returns) == 25
    assert statistics.fmean(returns[-3:]) > 2 * statistics.fmean(returns[:3])
    again = run_example("classic_loop.py", "--seed", "0", "--iterations", "2")
    assert again.splitlines() == output.splitlines()[:2]


def test_classic_loop_help_lists_the_options() -> None:
    output = run_example("classic_loop.py", "--help")
    assert "--seed" in output
    assert "--iterations" in output


def test_torch_env_learns_by_gradients_through_the_env() -> None:
    first, second = run_example("torch_env.py").splitlines()
    before, after = (float(found) for found in re.findall(r"-?[0-9.]+(?= before| after)", first))
    assert after > before / 2 > before
    assert second == "serial and parallel rollouts are equal: True"


def test_hikers_walk_home_in_workers_as_by_hand() -> None:
    wandering, straight, *rest = run_example("pettingzoo_env.py").splitlines()
    home = re.match(r"random: (\d+) of 48 hikers came home$", wandering)
    assert home is not None
    assert int(home[1]) < 40
    assert straight == "straight: 48 of 48 hikers came home"
    assert rest == ["first env, on the way after each step: 2 2 2 1 1 1 0", "the same by hand: True"]


def returns_of(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"mean return (?:before|after)? *([0-9.]+)", output)]


def test_ppo_in_a_file_learns() -> None:
    returns = returns_of(run_example("cleanrl_ppo.py", "--num-envs", "4", "--total-timesteps", "20480"))
    assert len(returns) == 10
    assert returns[-1] > 3 * returns[0]


def test_ppo_in_a_file_learns_the_same_on_either_runner() -> None:
    arguments = ("--num-envs", "4", "--total-timesteps", "2048")
    short = [run_example("cleanrl_ppo.py", "--runner", runner, *arguments) for runner in ("aio", "sync")]
    assert returns_of(short[0]) == returns_of(short[1]) != []


def test_ppo_of_sb3_learns() -> None:
    arguments = ("--num-envs", "4", "--timesteps")
    before, after = returns_of(run_example("sb3_ppo.py", "--runner", "dummy", *arguments, "8000"))
    assert after > 3 * before


def test_ppo_of_sb3_learns_the_same_on_either_runner() -> None:
    arguments = ("--num-envs", "4", "--timesteps")
    short = [run_example("sb3_ppo.py", "--runner", runner, *arguments, "1024") for runner in ("aio", "dummy")]
    found = [re.findall("mean return .*", output) for output in short]
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_ppo_with_torchrl_learns() -> None:
    pytest.importorskip("torchrl")
    output = run_example("torchrl_ppo.py")
    lengths = [float(found) for found in re.findall(r"took +([0-9.]+) steps$", output, flags=re.MULTILINE)]
    assert lengths[0] < 50
    assert lengths[-1] >= 300


@pytest.mark.ray
def test_ray_cluster_steps_the_same_envs_on_two_nodes() -> None:
    options = ("--num-envs", "4", "--seconds", "0.2", "--compute-ms", "0.1", "1")
    head, *rows = run_example("ray_cluster.py", *options).splitlines()
    assert head == "4 envs in 2 hosts; milliseconds a batch"
    assert [row.split()[0] for row in rows] == ["0.1", "1"]
    assert all(float(figure) > 0 for row in rows for figure in re.findall(r"(?:process|ray) ([\d.]+)", row))


def test_coroutine_envs_await_at_the_same_time() -> None:
    output = run_example("coroutine_env.py", "--envs", "40", "--steps", "3", "--seconds", "0.2")
    found = re.search(r"steps/s: (\d+); ideal, .* took time: 200; one env after the other: 5$", output, re.MULTILINE)
    assert found is not None, output
    assert int(found[1]) <= 200


def test_coroutine_env_help_lists_the_options() -> None:
    output = run_example("coroutine_env.py", "--help")
    for option in ("--envs", "--processes", "--steps", "--seconds"):
        assert option in output


class SlowServer:
    """Answers each question with its number, once it is allowed to."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.count = 0
        self.may_answer = asyncio.Event()
        self.conversations: list[asyncio.Task[None]] = []

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.conversations.append(task)
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.rpartition(b":")[2]))
                self.count += 1
                answer = json.dumps({"position": self.count}).encode()
                self.asked.put_nowait(self.count)
                await self.may_answer.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_no_answer_to_a_question_that_was_given_up_is_taken_for_a_later_one(method: str) -> None:
    make = runpy.run_path(str(EXAMPLES / "coroutine_env.py"))["RemoteWalk"]
    server = SlowServer()
    async with await asyncio.start_server(server.converse, "127.0.0.1", 0) as listening:
        env = make(listening.sockets[0].getsockname()[1])
        server.may_answer.set()
        await env.reset()
        server.may_answer.clear()
        assert await server.asked.get() == 1
        given_up = asyncio.ensure_future(env.reset() if method == "reset" else env.step(1))
        assert await server.asked.get() == 2
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        server.may_answer.set()
        observation, _ = await env.reset()
        assert observation.tolist() == [3]
        observation, *_ = await env.step(0)
        assert observation.tolist() == [4]
        await env.close()
        await asyncio.gather(*server.conversations)


def run_async_trainer(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the async trainer after some code of the test's."""
    path = str(EXAMPLES / "async_trainer.py")
    code = f"import runpy, sys; {code}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)


def test_async_trainer_learns_and_draws_its_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    done = run_async_trainer("pass", "--total-frames", "15360", "--output", str(picture))
    assert done.returncode == 0, done.stderr
    assert int(re.findall(r"^ *(\d+) frames .* mean return", done.stdout, flags=re.MULTILINE)[-1]) == 10240
    assert float(re.findall(r"final mean return ([0-9.]+)", done.stdout)[0]) > 50
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_async_trainer_says_so_at_once_if_it_cannot_draw() -> None:
    done = run_async_trainer("sys.modules['matplotlib'] = None")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("pip install 'aioenvs[examples]'\n")


def test_async_trainer_help_lists_the_options() -> None:
    output = run_example("async_trainer.py", "--help")
    assert all(option in output for option in ("--seed", "--total-frames", "--output"))


def test_server_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, str(EXAMPLES / "server.py"), "--port", "0", "--num-envs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("running on http://127.0.0.1:" in line for line in lines)
        process.send_signal(signal.SIGINT)
        rest = list(lines)
    assert process.returncode in (0, -signal.SIGINT)
    assert "Application shutdown complete" in "".join(rest)
    assert "Error" not in "".join(rest)


def test_first_ready_compares_two_loops_with_the_ideal() -> None:
    options = ("--num-envs", "4", "--min-get", "2", "--seconds", "0.5", "--slow-ms", "20")
    lines = run_example("first_ready.py", *options).splitlines()
    assert "4 envs in 4 processes; 2 ms a step, 20 ms in 5% of them" in lines[0]
    rows = [re.findall(r"[\w(=)%,.]+", line) for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == ["step_and_maybe_reset", "send", "ideal"]
    assert all(int(row[-2].replace(",", "")) > 0 for row in rows)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("first_ready.py --slow-share 2", "expected a number from 0 to 1, found '2'"),
        ("first_ready.py --num-envs 2", "--min-get 4 is more than --num-envs 2"),
    ],
)
def test_options_that_make_no_sense(command: str, words: str) -> None:
    name, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=55, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["server.py", "remote_env.py", "first_ready.py"])
def test_help_of_the_newer_examples(name: str) -> None:
    output = run_example(name, "--help")
    assert "--num-envs" in output
    assert "default" in output or name != "first_ready.py"


def test_benchmark_measures_systems_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = "--num-envs 2 --repeats 2 --seconds 0.05 --peers floor gymnasium aioenvs --start-up --json"
    output = run_example("benchmark", *arguments.split(), str(file))
    for text in ("x floor", "aioenvs SerialEnv", "Gymnasium AsyncVectorEnv", "s to first step", "skipped sb3: "):
        assert text in output
    assert "FAILED" not in output
    measured = json.loads(file.read_text())
    assert measured["machine"]["cores"] >= 1
    (comparison,) = measured["comparisons"]
    assert comparison["num_envs"] == 2
    found = {outcome["system"]: outcome for outcome in comparison["outcomes"]}
    assert {len(outcome["turns"]) for outcome in found.values()} == {2}
    assert found["aioenvs SerialEnv"]["start_up"]["children"] == 0
    assert found["Gymnasium AsyncVectorEnv"]["start_up"]["children"] == 2
    assert found["Gymnasium AsyncVectorEnv"]["note"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--work CartPoel-v1", "'CartPoel-v1' is neither one of cartpole, "),
        ("--num-envs 0", "expected an integer of at least 1, got '0'"),
        ("--seconds nan", "expected a positive number of seconds, got 'nan'"),
        ("--peers sb4", "invalid choice: 'sb4'"),
    ],
)
def test_benchmark_says_what_it_does_not_know(arguments: str, message: str) -> None:
    done = start_example("benchmark", *arguments.split())
    assert done.returncode == 2
    assert message in done.stderr
