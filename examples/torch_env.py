"""An env written with torch: checked against its specs, trained through by gradients, then stepped in processes.

A cart on a line is to be brought to rest at 0. The env is differentiable, so `SerialEnv` lets the gradient of the
return reach the policy through the steps themselves. `ParallelEnv` steps the same env in worker processes and gives the
same numbers.

Run it by ``python examples/torch_env.py``; it takes a few seconds.
"""

import argparse

import torch
from tensordict import TensorDict, TensorDictBase

from aioenvs import EnvBase, ParallelEnv, SerialEnv, check_env_specs
from aioenvs.specs import Bounded, Composite, Unbounded

NUM_WORKERS = 8
HORIZON = 30
DT = 0.1


class Cart(EnvBase):
    """A frictionless cart: observes position and speed, is pushed by the action, pays for being off 0."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Bounded(-1, 1, shape=(1,))
        self.reward_spec = Unbounded((1,))
        self.generator = torch.Generator()

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDict:
        self.state = 2 * torch.rand(2, generator=self.generator) - 1
        self.steps = 0
        return TensorDict(observation=self.state)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        position, speed = self.state
        speed = speed + DT * 3 * tensordict["action"].squeeze(-1)
        position = position + DT * speed
        self.state = torch.stack([position, speed])
        self.steps += 1
        cost = position**2 + 0.1 * speed**2
        return TensorDict(
            observation=self.state, reward=-cost.unsqueeze(-1), done=torch.tensor([self.steps >= HORIZON])
        )

    def _set_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)


def train(policy: torch.nn.Module, iterations: int) -> list[float]:
    """Follow the gradient of the mean return through the envs; returns the mean return of each iteration."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    returns = []
    with SerialEnv(NUM_WORKERS, Cart) as env:
        env.set_seed(0)
        for _ in range(iterations):
            rollout = env.rollout(HORIZON, policy)
            mean_return = rollout["next", "reward"].sum(-2).mean()
            optimizer.zero_grad()
            (-mean_return).backward()
            optimizer.step()
            returns.append(mean_return.item())
    return returns


def main() -> None:
    """Check, train, compare."""
    parser = argparse.ArgumentParser(description="An env written with torch, in one process and in several.")
    parser.add_argument("--iterations", type=int, default=30, help="training steps (default: 30)")
    iterations = parser.parse_args().iterations
    check_env_specs(Cart())

    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Tanh())
    returns = train(policy, iterations)
    print(f"mean return: {returns[0]:.2f} before training, {returns[-1]:.2f} after")

    rollouts = []
    for make in (SerialEnv, ParallelEnv):
        with make(NUM_WORKERS, Cart) as env, torch.no_grad():
            env.set_seed(1)
            rollouts.append(env.rollout(HORIZON, policy))
    serial, parallel = rollouts
    print("serial and parallel rollouts are equal:", bool((serial == parallel).all()))


if __name__ == "__main__":
    main()
