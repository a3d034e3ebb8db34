"""The env on tensors, written once for the classes and the specs of either library."""

from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

__all__ = ["counting_env"]


def counting_env(base: type, specs: ModuleType) -> Any:
    """Make an env that counts its steps, 100 to an episode.

    Args:
        base: `EnvBase` of a library.
        specs: The module that has its specs.
    """

    class CountingEnv(base):
        def __init__(self) -> None:
            super().__init__(batch_size=torch.Size([]))
            self.observation_spec = specs.Composite(observation=specs.Unbounded((4,)))
            self.action_spec = specs.Unbounded((1,))
            self.reward_spec = specs.Unbounded((1,))
            self.count = 0

        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            self.count = 0
            return TensorDict({"observation": torch.zeros(4)})

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            self.count += 1
            return TensorDict(
                {
                    "observation": torch.full((4,), float(self.count)),
                    "reward": tensordict["action"],
                    "done": torch.tensor([self.count >= 100]),
                }
            )

        def _set_seed(self, seed: int | None) -> None:
            pass

    return CountingEnv()
