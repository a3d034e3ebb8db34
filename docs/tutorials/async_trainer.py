"""From a Gymnasium loop to an async trainer, in ten steps that are measured.

The page ``async-trainer.md`` explains the steps, and includes their code from here. This draws its two pictures; by
default it takes about five minutes::

    python docs/tutorials/async_trainer.py
"""

import argparse
import asyncio
import contextlib
import copy
import inspect
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical

from aioenvs import AsyncCollector, AsyncParallelEnv, ParallelEnv
from aioenvs.integrations.gymnasium import AioVectorEnv

PICTURES = Path(__file__).parent / "pictures"


# --8<-- [start:env]
ANSWER_SECONDS = 0.02


def answer_time() -> float:
    """Draw how long the cart takes to answer: ten times as long for one step in twenty."""
    return ANSWER_SECONDS * (10 if random.random() < 0.05 else 1)


class Cart(gym.Wrapper):
    """A CartPole at the other end of a cable: a step waits for its answer, and computes next to nothing."""

    def step(self, action: Any) -> Any:
        """Step, and wait."""
        result = super().step(action)
        time.sleep(answer_time())
        return result


def make_env() -> gym.Env:
    """Build one."""
    return Cart(gym.make("CartPole-v1"))


# --8<-- [end:env]


# --8<-- [start:agent]
FRAMES = 512  # of a batch
EPOCHS, MINIBATCH = 10, 128
DISCOUNT, TRACE_DECAY, CLIP, ENTROPY_WEIGHT = 0.98, 0.9, 0.2, 0.003


def network(outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent(nn.Module):
    """Chooses actions, and says how much an observation is worth."""

    def __init__(self) -> None:
        """Build one network for each."""
        super().__init__()
        self.actor, self.critic = network(2), network(1)

    @torch.no_grad()
    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions, and return them with their log-probabilities."""
        choice = Categorical(logits=self.actor(observation))
        action = choice.sample()
        return action, choice.log_prob(action)

    def policy(self, td: TensorDict) -> TensorDict:
        """Do the same for a TensorDict: this is the form that batches and collectors call."""
        action, log_prob = self.act(td["observation"])
        return td.set("action", action).set("log_prob", log_prob)


class Learner:
    """PPO: improves an agent by batches of steps, of any shape."""

    def __init__(self, agent: Agent) -> None:
        """Begin with this agent."""
        self.agent = agent
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)

    def advantages(self, data: TensorDict, env: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate how much better than expected each action was, and how much its observation is worth."""
        with torch.no_grad():
            value = self.agent.critic(data["observation"]).squeeze(-1)
            following = self.agent.critic(data["next", "observation"]).squeeze(-1)
        reward, terminated, done = (data["next", key].squeeze(-1) for key in ("reward", "terminated", "done"))
        surprise = reward + DISCOUNT * following * ~terminated - value
        last = done.clone()
        last[:-1] |= env[1:] != env[:-1]  # the next row is another env's
        last[-1] = True
        ahead, found = 0.0, []
        for error, ends in zip(reversed(surprise.tolist()), reversed(last.tolist()), strict=True):
            ahead = error + DISCOUNT * TRACE_DECAY * ahead * (not ends)
            found.append(ahead)
        advantage = torch.tensor(found[::-1])
        return advantage, advantage + value

    def learn(self, batch: TensorDict) -> None:
        """Take the steps of the batch, env by env, and improve the agent."""
        rows, env = batch.reshape(-1), env_of(batch).reshape(-1)
        order = env.argsort(stable=True)
        data = rows.select("observation", "action", "log_prob", "next")[order]
        advantage, target = self.advantages(data, env[order])
        for chosen in (rows for _ in range(EPOCHS) for rows in torch.randperm(len(data)).split(MINIBATCH)):
            part, gain = data[chosen], advantage[chosen]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            choice = Categorical(logits=self.agent.actor(part["observation"]))
            ratio = (choice.log_prob(part["action"]) - part["log_prob"]).exp()
            surrogate = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            error = (self.agent.critic(part["observation"]).squeeze(-1) - target[chosen]).square().mean()
            loss = 0.5 * error - surrogate - ENTROPY_WEIGHT * choice.entropy().mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
            self.optimizer.step()


# --8<-- [end:agent]


def env_of(batch: TensorDict) -> Tensor:
    """Say for each step of a batch which env took it."""
    index = batch.get("env_index", None)
    if index is not None:
        return index
    envs = batch.shape[0] if batch.ndim == 2 else 1
    return torch.arange(envs).view(-1, 1).expand(envs, batch.numel() // envs).reshape(batch.shape)


# --8<-- [start:record]
def record(observation: Any, action: Tensor, log_prob: Tensor, following: Any, reward: Any, ends: Any) -> TensorDict:
    """Put the arrays of one step into the form that the learner takes."""
    terminated, truncated = (torch.as_tensor(end).unsqueeze(-1) for end in ends)
    step = TensorDict(observation=torch.as_tensor(observation), action=action, log_prob=log_prob)
    step["next"] = TensorDict(
        observation=torch.as_tensor(following),
        reward=torch.as_tensor(reward, dtype=torch.float32).unsqueeze(-1),
        terminated=terminated,
        truncated=truncated,
        done=terminated | truncated,
    )
    return step.auto_batch_size_(action.ndim)


# --8<-- [end:record]


# --8<-- [start:step1]
def one_env(agent: Agent) -> Iterator[TensorDict]:
    env = make_env()
    observation, _ = env.reset(seed=0)
    while True:
        steps = []
        for _ in range(FRAMES):
            action, log_prob = agent.act(torch.as_tensor(observation))
            following, reward, *ends, _ = env.step(action.item())
            steps.append(record(observation, action, log_prob, following, reward, ends))
            observation = env.reset()[0] if any(ends) else following
        yield torch.stack(steps)


# --8<-- [end:step1]


# --8<-- [start:step2]
def vector_loop(agent: Agent, **options: Any) -> Iterator[TensorDict]:
    with contextlib.closing(AioVectorEnv([make_env] * 16, autoreset_mode="SameStep", **options)) as envs:
        observation, _ = envs.reset(seed=0)
        while True:
            steps = []
            for _ in range(FRAMES // 16):
                action, log_prob = agent.act(torch.as_tensor(observation))
                after, reward, *ends, info = envs.step(action.numpy())
                following = after.copy()
                if "final_obs" in info:  # `after` begins a new episode there
                    ended = info["_final_obs"]
                    following[ended] = np.stack(info["final_obs"][ended])
                steps.append(record(observation, action, log_prob, following, reward, ends))
                observation = after
            yield torch.stack(steps, dim=1)


def one_process(agent: Agent) -> Iterator[TensorDict]:
    return vector_loop(agent, backend="serial")


# --8<-- [end:step2]


# --8<-- [start:step3]
def a_process_for_each_core(agent: Agent) -> Iterator[TensorDict]:
    return vector_loop(agent)


# --8<-- [end:step3]


# --8<-- [start:step4]
def a_process_for_each_env(agent: Agent) -> Iterator[TensorDict]:
    return vector_loop(agent, num_processes=16)


# --8<-- [end:step4]


# --8<-- [start:step5]
def tensordicts(agent: Agent) -> Iterator[TensorDict]:
    with ParallelEnv(16, make_env, num_processes=16) as env:
        td = env.reset(seed=0)
        while True:
            steps = []
            for _ in range(FRAMES // 16):
                step, td = env.step_and_maybe_reset(agent.policy(td))
                steps.append(step)
            yield torch.stack(steps, dim=1)


# --8<-- [end:step5]


# --8<-- [start:step6]
async def coroutines(agent: Agent) -> AsyncIterator[TensorDict]:
    async with AsyncParallelEnv(16, make_env, num_processes=16) as env:
        td = await env.reset(seed=0)
        while True:
            steps = []
            for _ in range(FRAMES // 16):
                step, td = await env.step_and_maybe_reset(agent.policy(td))
                steps.append(step)
            yield torch.stack(steps, dim=1)


# --8<-- [end:step6]


# --8<-- [start:step7]
async def collector(agent: Agent) -> AsyncIterator[TensorDict]:
    env = AsyncParallelEnv(16, make_env, num_processes=16)
    async with AsyncCollector(env, agent.policy, frames_per_batch=FRAMES) as batches:
        async for batch in batches:
            yield batch


# --8<-- [end:step7]


# --8<-- [start:step8]
async def first_ready(agent: Agent) -> AsyncIterator[TensorDict]:
    env = AsyncParallelEnv(16, make_env, num_processes=16)
    async with AsyncCollector(env, agent.policy, frames_per_batch=FRAMES, min_get=4) as batches:
        async for batch in batches:
            yield batch


# --8<-- [end:step8]


# --8<-- [start:train]
Report = Callable[[TensorDict], bool]  # is told of each batch, and says whether to go on


def train(batches: Iterator[TensorDict], learner: Learner, report: Report) -> None:
    """Learn from each batch before the next one is collected: steps 1 to 5."""
    with contextlib.closing(batches):
        for batch in batches:
            learner.learn(batch)
            if not report(batch):
                break


async def train_async(batches: AsyncIterator[TensorDict], learner: Learner, report: Report) -> None:
    """Do the same with `async for`: steps 6 to 9."""
    async with contextlib.aclosing(batches):
        async for batch in batches:
            learner.learn(batch)
            if not report(batch):
                break


# --8<-- [end:train]


# --8<-- [start:step9]
class AwaitedCart:
    """The same cart, whose answer is awaited instead."""

    def __init__(self) -> None:
        self.env = gym.make("CartPole-v1")
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        result = self.env.step(action)
        await asyncio.sleep(answer_time())
        return result


async def coroutine_envs(agent: Agent) -> AsyncIterator[TensorDict]:
    env = AsyncParallelEnv(64, AwaitedCart, num_processes=2)
    async with AsyncCollector(env, agent.policy, frames_per_batch=FRAMES, min_get=16) as batches:
        async for batch in batches:
            yield batch


# --8<-- [end:step9]


# --8<-- [start:step10]
async def train_meanwhile(batches: AsyncIterator[TensorDict], actor: Agent, learner: Learner, report: Report) -> None:
    """Learn in a thread while the envs take the steps of the next batch; `actor` is the agent that acts."""
    learning: asyncio.Future[None] | None = None
    async with contextlib.aclosing(batches):
        async for batch in batches:
            if learning is not None:
                await learning
                actor.load_state_dict(learner.agent.state_dict())
            learning = asyncio.ensure_future(asyncio.to_thread(learner.learn, batch))
            if not report(batch):
                break
            await asyncio.sleep(0)  # the thread begins now, and not when the loop has nothing else to do
    if learning is not None:
        await learning


# --8<-- [end:step10]

STEPS: tuple[tuple[str, Callable[[Agent], Any], bool], ...] = (  # name, batches, whether learning goes on meanwhile
    ("1 a Gymnasium loop", one_env, False),
    ("2 sixteen envs, one policy call", one_process, False),
    ("3 a process for each core", a_process_for_each_core, False),
    ("4 a process for each env", a_process_for_each_env, False),
    ("5 TensorDicts", tensordicts, False),
    ("6 coroutines", coroutines, False),
    ("7 a collector", collector, False),
    ("8 first ready", first_ready, False),
    ("9 coroutine envs", coroutine_envs, False),
    ("10 learning meanwhile", coroutine_envs, True),
)


class Progress:
    """Counts frames and returns, and says whether there is time left.

    Attributes:
        curve: Seconds, frames, and the mean return of the last 50 episodes, after each batch.
    """

    def __init__(self, seconds: float) -> None:
        """Allow so many seconds, from the first batch on."""
        self.seconds = seconds
        self.curve: list[tuple[float, int, float]] = []
        self._began = 0.0
        self._running = [0.0] * 64
        self._ended: deque[float] = deque(maxlen=50)

    def report(self, batch: TensorDict) -> bool:
        """Add a batch; the first one, in which workers warm up, starts the clock."""
        flat = batch.transpose(0, 1) if batch.ndim == 2 else batch
        index = env_of(batch).transpose(0, 1) if batch.ndim == 2 else env_of(batch)
        columns = (index, flat["next", "reward"], flat["next", "done"])
        for env, reward, done in zip(*(column.flatten().tolist() for column in columns), strict=True):
            self._running[env] += reward
            if done:
                self._ended.append(self._running[env])
                self._running[env] = 0.0
        now = time.perf_counter()
        self._began = self._began or now
        frames = self.curve[-1][1] + batch.numel() if self.curve else 0
        self.curve.append((now - self._began, frames, sum(self._ended) / max(1, len(self._ended))))
        return now - self._began < self.seconds

    @property
    def speed(self) -> float:
        """Frames a second, learning included."""
        seconds, frames, _ = self.curve[-1]
        return frames / seconds


def run(make_batches: Callable[[Agent], Any], meanwhile: bool, seconds: float) -> Progress:
    """Train by one of the steps for so many seconds."""
    random.seed(0)
    torch.manual_seed(0)
    agent, progress = Agent(), Progress(seconds)
    learner = Learner(agent)
    if meanwhile:
        actor = copy.deepcopy(agent)
        asyncio.run(train_meanwhile(make_batches(actor), actor, learner, progress.report))
    elif inspect.isasyncgenfunction(make_batches):
        asyncio.run(train_async(make_batches(agent), learner, progress.report))
    else:
        train(make_batches(agent), learner, progress.report)
    return progress


def draw_gains(speeds: dict[str, float], path: Path) -> None:
    """Draw the speed of each step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    bars = axes.barh([*speeds], [*speeds.values()], color="#26a69a")
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds.values()], padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="frames a second, learning included", xlim=(0, 1.15 * max(speeds.values())))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_curves(curves: dict[str, list[tuple[float, int, float]]], path: Path) -> None:
    """Draw returns against time."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for (name, curve), colour in zip(curves.items(), ("#90a4ae", "#5c6bc0", "#26a69a"), strict=False):
        axes.plot([point[0] for point in curve], [point[2] for point in curve], label=name, color=colour)
    axes.set(xlabel="seconds", ylabel="mean return of 50 episodes", ylim=(0, 510))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure all steps, train by three of them, and draw."""
    parser = argparse.ArgumentParser(description="From a Gymnasium loop to an async trainer, measured.")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long to measure each step (default: 4)")
    parser.add_argument("--train", type=float, default=45.0, help="how long to train by steps 1, 5, 10 (default: 45)")
    parser.add_argument(
        "--answer", type=float, default=0.02, help="seconds that a cart takes to answer (default: 0.02)"
    )
    parser.add_argument("--output", type=Path, default=PICTURES, help="a folder for the pictures")
    options = parser.parse_args()
    import matplotlib

    global ANSWER_SECONDS
    ANSWER_SECONDS = options.answer  # which goes to the workers with what refers to it
    matplotlib.use("Agg")  # needs no screen
    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    speeds = {}
    for name, make_batches, meanwhile in STEPS:
        speeds[name] = run(make_batches, meanwhile, options.seconds).speed
        print(f"{name:34} {speeds[name]:8,.0f} frames/s  x {speeds[name] / speeds[STEPS[0][0]]:.1f}", flush=True)
    curves = {}
    for name, make_batches, meanwhile in (STEPS[0], STEPS[4], STEPS[9]):
        curves[name] = run(make_batches, meanwhile, options.train).curve
        print(f"{name:34} mean return after {options.train:g} s: {curves[name][-1][2]:.0f}", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    draw_gains(speeds, options.output / "async-trainer-gains.png")
    draw_curves(curves, options.output / "async-trainer-curves.png")


if __name__ == "__main__":
    main()
