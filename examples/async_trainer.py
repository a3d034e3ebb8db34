"""An asynchronous trainer: PPO on CartPole, with batches from ``AsyncCollector``.

The collector steps the environments with the policy, and each of its batches improves the policy: the clipped objective
of PPO, with generalized advantage estimation. The mean return of the last 100 episodes is printed and drawn; 500 is the
most that CartPole gives. The same seed gives the same numbers on the same machine.

    python examples/async_trainer.py --seed 1 --output curve.png
"""

import argparse
import asyncio
import importlib.util
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical

from aioenvs import AsyncCollector, AsyncParallelEnv

NUM_WORKERS = 16
STEPS_PER_BATCH = 32  # of each environment
EPOCHS = 10
MINIBATCH = 256
DISCOUNT = 0.98
TRACE_DECAY = 0.9
CLIP = 0.2
ENTROPY_WEIGHT = 0.003
VALUE_WEIGHT = 0.5
LEARNING_RATE = 1e-3
MAX_GRADIENT = 0.5
GOAL = 450.0


def network(outputs: int, gain: float) -> nn.Sequential:
    """Build a network with two hidden layers, whose last layer starts with small weights where ``gain`` is small."""
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """Chooses actions, and says what an observation is worth."""

    def __init__(self) -> None:
        """Build one network for each."""
        super().__init__()
        self.actor = network(2, 0.01)
        self.critic = network(1, 1.0)

    def act(self, td: TensorDict) -> TensorDict:
        """Sample an action for each environment: this is what the collector calls before each step."""
        choice = Categorical(logits=self.actor(td["observation"]))
        action = choice.sample()
        return td.set("action", action).set("log_prob", choice.log_prob(action))

    def worth(self, observation: Tensor) -> Tensor:
        """The value of observations ``(*batch, 4)``, of shape ``(*batch,)``."""
        return self.critic(observation).squeeze(-1)


def advantages(batch: TensorDict, value: Tensor, next_value: Tensor) -> Tensor:
    """How much better than expected each action of a batch was, by generalized advantage estimation.

    Args:
        batch: What the collector gave, of batch size ``(num_envs, steps)``.
        value: What its observations are worth, of that shape.
        next_value: What those that followed are worth; an episode that was cut off by its time limit would go on from
            there, one that terminated would not.
    """
    following = batch["next"]
    reward, terminated, done = (following[key].squeeze(-1) for key in ("reward", "terminated", "done"))
    surprise = reward + DISCOUNT * next_value * ~terminated - value
    result = torch.empty_like(surprise)
    ahead = torch.zeros_like(surprise[:, 0])
    for step in reversed(range(surprise.shape[1])):
        ahead = surprise[:, step] + DISCOUNT * TRACE_DECAY * ahead * ~done[:, step]
        result[:, step] = ahead
    return result


def loss_of(agent: Agent, data: TensorDict) -> Tensor:
    """The loss of PPO for some steps, of batch size ``(steps,)``."""
    choice = Categorical(logits=agent.actor(data["observation"]))
    ratio = (choice.log_prob(data["action"]) - data["log_prob"]).exp()
    advantage = data["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    error = (agent.worth(data["observation"]) - data["target"]).square().mean()
    return VALUE_WEIGHT * error - gain - ENTROPY_WEIGHT * choice.entropy().mean()


def learn(agent: Agent, optimizer: torch.optim.Optimizer, batch: TensorDict) -> None:
    """Improve the agent by a batch of batch size ``(num_envs, steps)``."""
    with torch.no_grad():
        value, next_value = agent.worth(batch["observation"]), agent.worth(batch["next", "observation"])
    advantage = advantages(batch, value, next_value)
    data = batch.select("observation", "action", "log_prob")
    data = data.set("advantage", advantage).set("target", advantage + value).reshape(-1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data)).split(MINIBATCH):
            optimizer.zero_grad()
            loss_of(agent, data[rows]).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRADIENT)
            optimizer.step()


@dataclass
class Returns:
    """Adds up the rewards of each episode.

    Attributes:
        running: What the episodes under way have got so far.
        last: The returns of the last 100 that ended.
        curve: Frames and the mean of those, after each batch.
    """

    running: Tensor = field(default_factory=lambda: torch.zeros(NUM_WORKERS))
    last: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    curve: list[tuple[int, float]] = field(default_factory=list)

    def add(self, batch: TensorDict, frames: int) -> float:
        """Add a batch, and return the mean return of the last 100 episodes."""
        reward, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
        for step in range(reward.shape[1]):
            self.running += reward[:, step]
            self.last.extend(self.running[done[:, step]].tolist())
            self.running[done[:, step]] = 0.0
        mean = sum(self.last) / max(1, len(self.last))
        self.curve.append((frames, mean))
        return mean

    def has_reached(self, goal: float) -> bool:
        """Whether the mean of 100 episodes is that high."""
        return len(self.last) == self.last.maxlen and self.curve[-1][1] >= goal


async def train(seed: int, total_frames: int) -> Returns:
    """Train an agent, print how it gets on, and return what it got."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    agent, returns = Agent(), Returns()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    began, reached = time.perf_counter(), False
    collector = AsyncCollector(
        AsyncParallelEnv(NUM_WORKERS, "CartPole-v1"),
        agent.act,
        frames_per_batch=NUM_WORKERS * STEPS_PER_BATCH,
        total_frames=total_frames,
    )
    async with collector:
        await collector.set_seed(seed)
        async for batch in collector:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (collector.iterations - 1) / len(collector))
            learn(agent, optimizer, batch)
            mean = returns.add(batch, collector.frames)
            seconds = time.perf_counter() - began
            if collector.iterations % 20 == 0:
                print(f"{collector.frames:7d} frames  {seconds:5.1f} s  mean return {mean:6.1f}", flush=True)
            if not reached and returns.has_reached(GOAL):
                reached = True
                print(
                    f"{collector.frames:7d} frames  {seconds:5.1f} s  reached a mean return of {GOAL:.0f}", flush=True
                )
    print(f"{collector.frames / seconds:.0f} frames/s, learning included; final mean return {mean:.1f}")
    return returns


def draw(returns: Returns, path: Path) -> None:
    """Save the learning curve as a picture."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(*zip(*returns.curve, strict=True))
    axes.axhline(GOAL, linestyle="--", color="gray")
    axes.set(xlabel="frames", ylabel="mean return of the last 100 episodes", title="PPO on CartPole-v1", ylim=(0, 510))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"learning curve: {path}")


def main() -> None:
    """Read the arguments, train and draw."""
    parser = argparse.ArgumentParser(description="PPO on CartPole, with 16 environments and AsyncCollector.")
    parser.add_argument("--seed", type=int, default=0, help="seed of environments and policy (default: 0)")
    parser.add_argument("--total-frames", type=int, default=102_400, help="steps to learn from (default: 102400)")
    parser.add_argument(
        "--output", type=Path, default=Path("async_trainer.png"), help="the picture (default: async_trainer.png)"
    )
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.exit(1, "matplotlib draws the learning curve, and is not installed: pip install 'aioenvs[examples]'\n")
    returns = asyncio.run(train(args.seed, args.total_frames))
    draw(returns, args.output)


if __name__ == "__main__":
    main()
