"""A thousand sessions with a language model, stepped at once: first ready, cancelling, restarts.

The page ``language-model.md`` explains the parts, and includes their code from here. A server in a process of its own,
on 127.0.0.1, plays the model, with a stated delay. This runs everything, and draws the two pictures in two minutes::

    python docs/tutorials/language_model.py
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensordict import NonTensorStack, TensorDict

from aioenvs import Anything, AsyncParallelEnv

PICTURES = Path(__file__).parent / "pictures"


# --8<-- [start:model]
class Model:
    """Thinks of a number, and says whether a guess is too low or too high; a connection is a conversation.

    Args:
        seconds: How long it thinks about an answer; ten times as long about one guess in twenty.
    """

    def __init__(self, seconds: float) -> None:
        """Begin without conversations."""
        self.seconds = seconds
        self.hung_up = 0  # questions whose answer nobody waited for any more

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer lines until the other side hangs up."""
        secret = 0
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                said = json.loads(line)
                if said == "how many have hung up?":
                    answer = str(self.hung_up)
                elif said == "hello":
                    await asyncio.sleep(self.seconds)
                    secret, answer = random.randint(1, 1000), "I am thinking of a number from 1 to 1000."
                else:
                    guess = int(said)
                    answer = "yes" if guess == secret else "higher" if guess < secret else "lower"
                    long = random.random() < 0.05
                    await asyncio.sleep(self.seconds * (10 if long else 1))
                self.hung_up += reader.at_eof()
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()


async def serve(seconds: float) -> None:
    """Serve the model, and print the port."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each conversation
    async with await asyncio.start_server(Model(seconds).converse, "127.0.0.1", 0, backlog=4096) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


# --8<-- [end:model]


# --8<-- [start:env]
class GuessingGame:
    """An episode is a conversation in which the agent has to find the number.

    Args:
        port: Where the model listens on this machine.
    """

    observation_space = Anything()  # the conversation so far: a list of messages
    action_space = Anything()  # the next thing that the agent says: a str

    def __init__(self, port: int) -> None:
        self.port = port
        self.connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.messages = [{"role": "model", "content": await self.ask("hello")}]
        return list(self.messages), {}

    async def step(self, action: str) -> Any:
        answer = await self.ask(action)
        self.messages += [{"role": "agent", "content": action}, {"role": "model", "content": answer}]
        found = answer == "yes"
        return list(self.messages), float(found), found, len(self.messages) > 40, {}

    async def ask(self, text: str) -> str:
        if self.connection is None:  # not in the constructor, which runs before there is a loop
            self.connection = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.connection
        try:
            writer.write(json.dumps(text).encode() + b"\n")
            return str(json.loads(await reader.readline()))
        except BaseException:  # cancelled, say: the answer may still come, and must not be taken for a later one
            await self.close()
            raise

    async def close(self) -> None:
        if self.connection is not None:
            self.connection[1].close()
            self.connection = None


# --8<-- [end:env]


# --8<-- [start:agent]
def next_guess(messages: list[dict[str, str]]) -> str:
    """Halve the range that the conversation leaves."""
    low, high = 1, 1000
    for said, answer in zip(messages[1::2], messages[2::2], strict=True):
        guess = int(said["content"])
        low, high = (guess + 1, high) if answer["content"] == "higher" else (low, guess - 1)
    return str((low + high) // 2)


def agent(td: TensorDict) -> TensorDict:
    """Choose an action for each row."""
    td["action"] = NonTensorStack(*[next_guess(row["observation"]) for row in td.unbind(0)])
    return td


# --8<-- [end:agent]


# --8<-- [start:batch]
def sessions(number: int, port: int) -> AsyncParallelEnv:
    """So many sessions, in four processes."""
    return AsyncParallelEnv(
        number, GuessingGame, create_env_kwargs={"port": port}, num_processes=4, on_worker_death="restart"
    )


# --8<-- [end:batch]


# --8<-- [start:together]
async def all_together(number: int, port: int, rounds: int) -> float:
    """Step all sessions at once; returns answers per second."""
    async with sessions(number, port) as env:
        td = await env.reset()
        answers, began = 0, time.perf_counter()
        for _ in range(rounds):
            step, td = await env.step_and_maybe_reset(agent(td))
            answers += number + int(step["next", "done"].sum())  # those that ended have said hello again
        return answers / (time.perf_counter() - began)


# --8<-- [end:together]


# --8<-- [start:first]
async def whoever_is_ready(number: int, port: int, seconds: float) -> tuple[float, int]:
    """Step each session as soon as its answer is there; returns answers per second, and how many numbers were found."""
    found = answers = 0
    async with sessions(number, port) as env:
        env.send(agent(await env.reset()))
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            td, following = await env.recv(min_get=1)
            env.send(agent(following))
            answers += len(td) + int(td["next", "done"].sum())
            found += int(td["next", "terminated"].sum())
        return answers / (time.perf_counter() - began), found


# --8<-- [end:first]


# --8<-- [start:cancel]
async def giving_up(number: int, port: int, patience: float) -> None:
    """Give up the sessions that do not answer in time, and go on with new ones."""
    async with sessions(number, port) as env:
        td = await env.reset()
        try:
            async with asyncio.timeout(patience):
                await env.step(agent(td))
        except TimeoutError:
            began = time.perf_counter()
            td = await env.reset()  # coroutines were cancelled where they awaited; nobody waits for their answers
            print(f"after giving up, all {len(td)} had new episodes in {time.perf_counter() - began:.1f} s")
        assert all(len(row["observation"]) == 1 for row in td.unbind(0))


# --8<-- [end:cancel]


# --8<-- [start:restart]
async def losing_a_process(number: int, port: int, seconds: float) -> dict[str, list[float]]:
    """Kill one of the four processes on the way; returns when steps came back, by their kind."""
    others, killed, lost = [], [], []
    async with sessions(number, port) as env:
        env.send(agent(await env.reset()))
        began = time.perf_counter()
        victim: int | None = env.pids[0]
        while (now := time.perf_counter() - began) < seconds or not lost:
            if victim is not None and now > seconds / 3:
                os.kill(victim, signal.SIGKILL)
                victim = None
            td, following = await env.recv(min_get=1)
            env.send(agent(following))
            now = time.perf_counter() - began
            for index, truncated in zip(td["env_index"].tolist(), td["next", "truncated"].tolist(), strict=True):
                (lost if truncated[0] else killed if index < number // 4 else others).append(now)
        print(f"{sum(env.statistics().restarts)} sessions were built anew, {len(lost)} steps were truncated")
    return {"of the other processes": others, "of the process that is killed": killed, "lost, truncated": lost}


# --8<-- [end:restart]


@contextlib.contextmanager
def model(seconds: float) -> Iterator[int]:
    """Run the model in a process of its own; gives its port."""
    command = [sys.executable, __file__, "--serve", "--answer", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


async def ask(port: int, question: str) -> str:
    """Ask the model something, as a conversation of one line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps(question).encode() + b"\n")
    answer = json.loads(await reader.readline())
    writer.close()
    return str(answer)


def draw_speeds(speeds: dict[str, float], path: Path) -> None:
    """Draw answers per second."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 2.4))
    bars = axes.barh([*speeds], [*speeds.values()], color=["#90a4ae", "#5c6bc0", "#26a69a", "#cfd8dc"])
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds.values()], padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="answers a second", xlim=(0, 1.15 * max(speeds.values())))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_restart(steps: dict[str, list[float]], seconds: float, path: Path) -> None:
    """Draw steps per second over time, around the death of a process."""
    from matplotlib import pyplot

    width = seconds / 50
    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    axes.hist(
        [*steps.values()],
        [width * place for place in range(51)],
        weights=[[1 / width] * len(times) for times in steps.values()],
        stacked=True,
        label=[*steps],
        color=["#26a69a", "#5c6bc0", "#ef5350"],
    )
    axes.axvline(seconds / 3, color="#37474f", linestyle="--")
    axes.set(xlabel="seconds; the process is killed at the dashed line", ylabel="steps a second")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


async def run(options: argparse.Namespace, port: int) -> None:
    """Go through the parts of the page."""
    number, answer, seconds = options.sessions, options.answer, options.seconds
    mean = answer * (0.95 + 0.05 * 10)
    together = await all_together(number, port, max(1, round(seconds / (10 * answer))))
    await giving_up(number, port, 3 * answer)
    await asyncio.sleep(8 * answer)  # the model notices when it has thought to the end
    hung_up = await ask(port, "how many have hung up?")
    print(f"questions of which the model saw that nobody waited any more: {hung_up}")
    first, found = await whoever_is_ready(number, port, seconds)
    print(f"all together: {together:.0f} answers/s; whoever is ready: {first:.0f}; ideal: {number / mean:.0f}")
    print(f"{found} numbers were found")
    steps = await losing_a_process(number, port, seconds)
    options.output.mkdir(parents=True, exist_ok=True)
    speeds = {
        "one after the other": 1 / mean,
        "all together": together,
        "whoever is ready": first,
        "ideal": number / mean,
    }
    draw_speeds(speeds, options.output / "language-model-speeds.png")
    draw_restart(steps, seconds, options.output / "language-model-restart.png")


def main() -> None:
    """Start the model, run all parts, draw."""
    parser = argparse.ArgumentParser(description="A thousand sessions with a language model, stepped at once.")
    parser.add_argument("--sessions", type=int, default=1000, help="how many sessions (default: 1000)")
    parser.add_argument("--answer", type=float, default=1.0, help="seconds that the model takes (default: 1)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each part takes (default: 20)")
    parser.add_argument("--output", type=Path, default=PICTURES, help="a folder for the pictures")
    parser.add_argument("--serve", action="store_true", help="be the model, and nothing else")
    options = parser.parse_args()
    if options.serve:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(options.answer))
        return
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    with model(options.answer) as port:
        asyncio.run(run(options, port))


if __name__ == "__main__":
    main()
