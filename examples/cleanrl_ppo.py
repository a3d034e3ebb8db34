"""PPO in a single file, in the style of CleanRL: everything that happens is on this page. It learns CartPole.

What steps the environments is one line, in ``make_envs``; ``--runner`` puts Gymnasium's own in its place, and the
numbers stay the same.

    python examples/cleanrl_ppo.py                            # about 20 s
    python examples/cleanrl_ppo.py --total-timesteps 300000 --num-envs 16
    python examples/cleanrl_ppo.py --runner async             # gymnasium.vector.AsyncVectorEnv
"""

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

from aioenvs.integrations.gymnasium import AioVectorEnv

NUM_STEPS = 128  # of each environment between two updates
UPDATE_EPOCHS = 4
NUM_MINIBATCHES = 4
LEARNING_RATE = 1e-3
GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.2
ENTROPY_WEIGHT = 0.01
VALUE_WEIGHT = 0.5
MAX_GRAD_NORM = 0.5


def make_env() -> gym.Env:
    """Make one environment; its info has the return of an episode when that ends."""
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))


def make_envs(runner: str, num_envs: int) -> VectorEnv:
    """Make all environments; a finished one begins its next episode within the same step."""
    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    if runner == "sync":
        return SyncVectorEnv([make_env] * num_envs, **options)
    if runner == "async":
        return AsyncVectorEnv([make_env] * num_envs, **options)
    return AioVectorEnv([make_env] * num_envs, **options)


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """Return a linear layer with orthogonal weights."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Chooses actions, and values states, of shape ``(batch, 4)``."""

    def __init__(self, envs: VectorEnv) -> None:
        """Build two networks for what the environments observe and take."""
        super().__init__()
        size = int(np.prod(envs.single_observation_space.shape))
        self.critic = nn.Sequential(layer(size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        number = int(envs.single_action_space.n)
        self.actor = nn.Sequential(layer(size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, number, 0.01))

    def value(self, observation: Tensor) -> Tensor:
        """Return the value of each state."""
        return self.critic(observation).squeeze(-1)

    def act(self, observation: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return an action, its log-probability, the entropy of the choice, and the state's value."""
        choice = Categorical(logits=self.actor(observation))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.value(observation)


def advantages_of(rewards: Tensor, values: Tensor, dones: Tensor, last_value: Tensor) -> Tensor:
    """Return the generalized advantages, of shape ``(steps, envs)``; ``dones[t]`` is the end with step t."""
    advantages = torch.zeros_like(rewards)
    following, next_value = torch.zeros_like(last_value), last_value
    for step in reversed(range(len(rewards))):
        goes_on = 1 - dones[step]
        delta = rewards[step] + GAMMA * next_value * goes_on - values[step]
        advantages[step] = following = delta + GAMMA * GAE_LAMBDA * goes_on * following
        next_value = values[step]
    return advantages


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
    """Improve the agent by what it has seen: observations, actions, log-probabilities, advantages and returns."""
    size = len(batch[0])
    for _ in range(UPDATE_EPOCHS):
        for rows in torch.randperm(size).split(size // NUM_MINIBATCHES):
            observations, actions, old_log_probs, advantages, returns = (values[rows] for values in batch)
            _, log_probs, entropy, values = agent.act(observations, actions)
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            ratio = (log_probs - old_log_probs).exp()
            policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
            value_loss = 0.5 * ((values - returns) ** 2).mean()
            loss = policy_loss + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def train(envs: VectorEnv, seed: int, total_timesteps: int) -> None:
    """Train an agent, and print the mean return of the episodes that ended in each tenth of the time."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    iterations = max(1, total_timesteps // (NUM_STEPS * envs.num_envs))
    began, episodes = time.perf_counter(), []
    observation = torch.as_tensor(envs.reset(seed=seed)[0])
    for iteration in range(1, iterations + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (iteration - 1) / iterations)
        seen: list[tuple[Tensor, ...]] = []
        for _ in range(NUM_STEPS):
            with torch.no_grad():
                action, log_prob, _, value = agent.act(observation)
            following, reward, terminated, truncated, infos = envs.step(action.numpy())
            ended = torch.as_tensor(terminated | truncated, dtype=torch.float32)
            reward = torch.as_tensor(reward, dtype=torch.float32)
            if "final_info" in infos:
                episode = infos["final_info"]["episode"]
                episodes += episode["r"][episode["_r"]].tolist()
            seen.append((observation, action, log_prob, value, reward, ended))
            observation = torch.as_tensor(following)
        observations, actions, log_probs, values, rewards, dones = map(torch.stack, zip(*seen, strict=True))
        with torch.no_grad():
            advantages = advantages_of(rewards, values, dones, agent.value(observation))
        batch = (observations, actions, log_probs, advantages, advantages + values)
        update(agent, optimizer, [each.flatten(0, 1) for each in batch])
        if iteration % max(1, iterations // 10) == 0 and episodes:
            steps = iteration * NUM_STEPS * envs.num_envs
            speed = steps / (time.perf_counter() - began)
            print(f"step {steps:7d}  mean return {np.mean(episodes):6.1f}  steps/s {speed:6.0f}", flush=True)
            episodes.clear()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description="PPO on CartPole, in the style of CleanRL.")
    parser.add_argument("--runner", choices=("aio", "sync", "async"), default="aio", help="what steps the environments")
    parser.add_argument("--num-envs", type=int, default=8, help="how many environments (default: 8)")
    parser.add_argument("--total-timesteps", type=int, default=60_000, help="steps of all of them (default: 60000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of environments and agent (default: 1)")
    args = parser.parse_args()
    envs = make_envs(args.runner, args.num_envs)
    try:
        train(envs, args.seed, args.total_timesteps)
    finally:
        envs.close()


if __name__ == "__main__":
    main()
