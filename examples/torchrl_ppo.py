"""PPO with TorchRL's losses, collector and transforms, over this library's ParallelEnv: one import is another.

It learns CartPole until episodes last 300 steps on average, in well under a minute on two cores:

    python examples/torchrl_ppo.py

It needs the extra `torchrl`. In place of the first import of `aioenvs`, TorchRL's own would do, more slowly:

    from torchrl.envs import ParallelEnv
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import deque

import torch
from tensordict.nn import TensorDictModule
from torch import nn

with warnings.catch_warnings():  # TorchRL warns of parts of its own when it is imported
    warnings.simplefilter("ignore")
    from torchrl.collectors import Collector
    from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
    from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

from aioenvs.integrations.torchrl import ParallelEnv

FRAMES_PER_BATCH = 2048
EPOCHS = 6
MINIBATCH = 128
GOAL = 300  # steps of an episode, on average over the last ones; 500 is the most


def make_env(num_envs: int) -> TransformedEnv:
    """The envs, each an unchanged GymEnv in a worker, and what counts their episodes here."""
    envs = ParallelEnv(num_envs, lambda: GymEnv("CartPole-v1"))
    return TransformedEnv(envs, Compose(RewardSum(), StepCounter()))


def network(outputs: int) -> nn.Sequential:
    """A small network from an observation to so many numbers."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def make_agent(env: TransformedEnv) -> tuple[ProbabilisticActor, ValueOperator]:
    """The policy, and the critic."""
    logits = TensorDictModule(network(2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        logits,
        spec=env.full_action_spec,
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    return actor, ValueOperator(network(1), in_keys=["observation"])


def main() -> float:
    """Train until the goal is reached; the mean length of the last episodes."""
    parser = argparse.ArgumentParser(description="TorchRL's PPO on CartPole.")
    parser.add_argument("--num-envs", type=int, default=16, help="how many environments (default: 16)")
    parser.add_argument("--frames", type=int, default=102_400, help="steps of all of them at most (default: 102400)")
    parser.add_argument("--seed", type=int, default=0, help="seed of environments and policy (default: 0)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # such small networks gain nothing by more, and the workers want the other cores
    env = make_env(options.num_envs)
    env.set_seed(options.seed)
    actor, critic = make_agent(env)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=2e-3)
    collector = Collector(
        env,
        actor,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=options.frames,
        auto_register_policy_transforms=False,
    )
    lengths: deque[float] = deque(maxlen=30)
    start, frames, mean = time.perf_counter(), 0, 0.0
    try:
        for batch in collector:
            frames += batch.numel()
            with torch.no_grad():
                advantage(batch)
            flat = batch.reshape(-1)
            for _ in range(EPOCHS):
                for rows in torch.randperm(len(flat)).split(MINIBATCH):
                    losses = loss_module(flat[rows])
                    loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                    optimizer.step()
            over = batch["next", "done"]
            lengths.extend(batch["next", "step_count"][over].tolist())
            mean = sum(lengths) / max(len(lengths), 1)
            speed = frames / (time.perf_counter() - start)
            print(f"{frames:7d} frames, {speed:6.0f} a second: the last episodes took {mean:5.1f} steps")
            if mean >= GOAL:
                break
    finally:
        collector.shutdown()  # which closes the envs
    return mean


if __name__ == "__main__":
    main()
