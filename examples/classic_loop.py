"""A classic training loop on ``ParallelEnv``: REINFORCE on CartPole.

Each iteration collects one rollout of every environment, computes the discounted rewards that followed
each action, and makes the actions that did better than average more likely.

    python examples/classic_loop.py --seed 1 --iterations 60
"""

import argparse

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical

from aioenvs import ParallelEnv

NUM_WORKERS = 16
ROLLOUT_STEPS = 200
DISCOUNT = 0.98
LEARNING_RATE = 0.01


class Policy(nn.Module):
    """Maps observations of shape ``(*batch, 4)`` to a distribution over the two actions."""

    def __init__(self) -> None:
        """Build a network with one hidden layer."""
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: Tensor) -> Categorical:
        """Return the distribution of the action, given what is observed."""
        return Categorical(logits=self.net(observation))

    def act(self, td: TensorDict) -> TensorDict:
        """Sample an action for every environment: this is what ``rollout`` calls before each step."""
        return td.set("action", self(td["observation"]).sample())


def rewards_to_go(reward: Tensor, done: Tensor, discount: float) -> Tensor:
    """Sum the discounted rewards from each step to the end of its episode.

    Args:
        reward: The rewards, of shape ``(num_envs, steps)``.
        done: Whether the episode ended with that step, of the same shape.
        discount: How much a reward loses in value for each step it lies ahead.

    Returns:
        The sums, of the same shape. Episodes that the rollout cut off are summed up to there.
    """
    result = torch.zeros_like(reward)
    following = torch.zeros_like(reward[:, 0])
    for step in reversed(range(reward.shape[1])):
        following = reward[:, step] + discount * following * ~done[:, step]
        result[:, step] = following
    return result


def loss_of(policy: Policy, rollout: TensorDict) -> Tensor:
    """Return the REINFORCE loss of a rollout of batch size ``(num_envs, steps)``."""
    reward = rollout["next", "reward"].squeeze(-1)
    done = rollout["next", "done"].squeeze(-1)
    to_go = rewards_to_go(reward, done, DISCOUNT)
    # The average over environments at the same step is the baseline: it cancels what all of them lose
    # because the rollout ends.
    advantage = to_go - to_go.mean(dim=0, keepdim=True)
    advantage = advantage / (advantage.std() + 1e-6)
    log_prob = policy(rollout["observation"]).log_prob(rollout["action"])
    return -(log_prob * advantage).mean()


def mean_return(rollout: TensorDict) -> float:
    """Return the mean return of the rollout's episodes; each environment's last one may be cut off."""
    reward, done = rollout["next", "reward"], rollout["next", "done"]
    num_episodes = reward.shape[0] + done[:, :-1].sum().item()
    return reward.sum().item() / num_episodes


def train(seed: int, iterations: int) -> None:
    """Train a policy and print the mean return of each iteration."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the network is small: more threads would only wait for each other
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    with ParallelEnv(NUM_WORKERS, lambda: gym.make("CartPole-v1")) as env:
        env.set_seed(seed)
        for iteration in range(1, iterations + 1):
            rollout = env.rollout(ROLLOUT_STEPS, policy.act, break_when_any_done=False)
            loss = loss_of(policy, rollout)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"iteration {iteration:3d}  mean return {mean_return(rollout):6.1f}", flush=True)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description="REINFORCE on CartPole, with 16 environments in parallel.")
    parser.add_argument("--seed", type=int, default=0, help="seed of environments and policy (default: 0)")
    parser.add_argument("--iterations", type=int, default=60, help="rollouts to learn from (default: 60)")
    args = parser.parse_args()
    train(args.seed, args.iterations)


if __name__ == "__main__":
    main()
