"""stable-baselines3's PPO on aioenvs: one line says what steps the environments, and the numbers stay the same.

python examples/sb3_ppo.py                        # about 20 s
python examples/sb3_ppo.py --timesteps 100000 --num-envs 16
python examples/sb3_ppo.py --runner dummy         # the same numbers on DummyVecEnv
"""

import argparse
import time

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from aioenvs.integrations.sb3 import AioVecEnv


def make_env() -> gym.Env:
    """Make one environment."""
    return Monitor(gym.make("CartPole-v1"))


def make_envs(runner: str, num_envs: int) -> VecEnv:
    """Make all environments."""
    return (DummyVecEnv if runner == "dummy" else AioVecEnv)([make_env] * num_envs)


def main() -> None:
    """Read the arguments, train, and say how good the policy is before and after."""
    parser = argparse.ArgumentParser(description="stable-baselines3's PPO on CartPole.")
    parser.add_argument("--runner", choices=("aio", "dummy"), default="aio", help="what steps the environments")
    parser.add_argument("--num-envs", type=int, default=8, help="how many environments (default: 8)")
    parser.add_argument("--timesteps", type=int, default=20_000, help="steps of all of them (default: 20000)")
    parser.add_argument("--seed", type=int, default=2, help="seed of environments and policy (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    env = make_envs(args.runner, args.num_envs)
    try:
        model = PPO("MlpPolicy", env, n_steps=128, batch_size=256, seed=args.seed, device="cpu")
        print(f"mean return before {evaluate_policy(model, env, 20)[0]:.1f}", flush=True)
        began = time.perf_counter()
        model.learn(args.timesteps)
        took = time.perf_counter() - began
        print(f"mean return after  {evaluate_policy(model, env, 20)[0]:.1f}")
        print(f"{model.num_timesteps} steps, {model.num_timesteps / took:.0f} steps/s")
    finally:
        env.close()


if __name__ == "__main__":
    main()
