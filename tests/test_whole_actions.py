"""Actions and states of TensorDicts whose numbers are right and whose dtype is another one than the spec's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faces import Face
from failing_envs import CountingEnv
from tensordict import TensorDict

from aioenvs import EnvBase, SerialEnv
from aioenvs.errors import SpecMismatchError
from aioenvs.specs import Composite, Unbounded


class Teller(EnvBase):
    """Observes what its action was, in its dtype.

    Args:
        size: Of its actions; -1 for any.
    """

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.observation_spec = Composite(told=Unbounded((2,), dtype=torch.int8))
        self.action_spec = Unbounded((size,), dtype=torch.int8)
        self.state_spec = Composite(memory=Unbounded((1,), dtype=torch.int64))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        return TensorDict(told=torch.zeros(2, dtype=torch.int8), memory=torch.zeros(1, dtype=torch.int64))

    def _step(self, tensordict: Any) -> TensorDict:
        assert tensordict["action"].dtype is torch.int8
        told = tensordict["action"].clone()
        return TensorDict(told=told, reward=torch.zeros(1), done=torch.zeros(1, dtype=torch.bool))

    def _set_seed(self, seed: Any) -> None:
        pass


def asked(action: torch.Tensor, memory: torch.Tensor | None = None) -> TensorDict:
    state = torch.zeros(2, 1, dtype=torch.int64) if memory is None else memory
    return TensorDict({"action": action, "memory": state}, [2])


@pytest.mark.parametrize("size", [2, -1])
async def test_numbers_that_are_whole_have_the_dtype_of_the_spec(face: Face, size: int) -> None:
    async with face.open(2, Teller, create_env_kwargs=[{"size": size}] * 2) as env:
        await face.call(env.reset)
        for dtype in (torch.float32, torch.int64):
            td = await face.call(env.step, asked(torch.tensor([[0, 1], [2, -3]], dtype=dtype)))
            assert [row["next", "told"].tolist() for row in td.unbind(0)] == [[0, 1], [2, -3]]
        for wrong in (torch.tensor([[0.5, 1], [2, 3]]), torch.tensor([[300, 1], [2, 3]])):
            with pytest.raises(SpecMismatchError, match=r"action 'action': expected .*torch.int8.*no env was stepped"):
                await face.call(env.step, asked(wrong))


def test_they_do_in_a_step_and_a_reset_of_some_envs_as_well() -> None:
    with SerialEnv(2, Teller) as env:
        td = env.reset().update(asked(torch.tensor([[5.0, 1], [2, 3]])))
        td = env.step(td.set("_step", torch.tensor([False, True])))
        assert td["next", "told"].tolist() == [[0, 0], [2, 3]]
        td = env.reset(td.set("_reset", torch.tensor([[False], [True]])))
        assert td["action"].tolist() == [[5, 1], [2, 3]]


def test_rows_that_do_not_step_may_hold_anything() -> None:
    with SerialEnv(2, CountingEnv) as env:
        td = env.reset().set("action", torch.tensor([0.5, 2])).set("_step", torch.tensor([False, True]))
        assert env.step(td)["next", "reward"].flatten().tolist() == [0, 1]


def test_a_state_is_called_one() -> None:
    with SerialEnv(2, Teller) as env:
        env.reset()
        action = torch.zeros(2, 2, dtype=torch.int8)
        with pytest.raises(SpecMismatchError, match=r"^state 'memory': expected shape \(2, 1\)"):
            env.step(asked(action, torch.zeros(2, 3, dtype=torch.int64)))
        with pytest.raises(SpecMismatchError, match=r"^state 'memory': expected dtype torch.int64"):
            env.step(asked(action, torch.full((2, 1), 0.5)))
        with pytest.raises(SpecMismatchError, match=r"^state 'memory': expected a value for every env, as a reset"):
            env.step(TensorDict({"action": action}, [2]))
