"""TorchRL's own envs with tensorclasses and chat histories, in the dress."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl_envs import collectors, theirs

from aioenvs.integrations.torchrl import ParallelEnv, SerialEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data.llm import History
    from torchrl.envs.llm import ChatEnv
    from torchrl.modules.llm.policies.common import ChatHistory
    from torchrl.testing import mocking_classes as mocks

pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = pytest.mark.parametrize(
    ("cls", "options"),
    [(SerialEnv, {}), (ParallelEnv, {"num_processes": 1}), (ParallelEnv, {"backend": "thread"})],
    ids=["serial", "packed", "thread"],
)


def with_tensorclass() -> Any:
    return mocks.EnvWithTensorClass(max_steps=3)


def with_history() -> Any:
    return theirs.TransformedEnv(mocks.CountingEnv(max_steps=3), mocks.HistoryTransform())


@BATCHES
@pytest.mark.parametrize(
    ("make", "key", "kind"),
    [(with_tensorclass, "tc", mocks.TC), (with_history, "history", mocks.History)],
    ids=["tensorclass", "history"],
)
def test_their_envs_run_in_the_dress(cls: Any, options: Any, make: Any, key: str, kind: type) -> None:
    with cls(2, make, **options) as env:
        theirs.check_env_specs(env)
        steps = env.rollout(4, break_when_any_done=False, return_contiguous=False)
        assert {type(row[key]) for row in steps.reshape(-1).unbind(0)} == {kind}
        if kind is mocks.History:
            assert [steps[0, t][key].batch_size[0] for t in (0, 1)] == [2, 3]
        batches = collectors.Collector(env, frames_per_batch=6, total_frames=6)
        (batch,) = batches
        assert batch.shape == (2, 3)


def answered(td: TensorDictBase) -> TensorDictBase:
    """A policy of a chat: it adds one message to each conversation."""
    rows = []
    for part in td.unbind(0):
        prompt = part["history"].prompt
        full = [lazy_stack([*own.unbind(0), History("assistant", f"reply {len(own)}")]) for own in prompt.unbind(0)]
        rows.append(part.copy().set("history", ChatHistory(prompt=prompt, full=lazy_stack(full), batch_size=[1])))
    return lazy_stack(rows)


@BATCHES
def test_a_chat(cls: Any, options: Any) -> None:
    def make() -> Any:
        return ChatEnv(batch_size=(1,), system_prompt="Be kind.", input_mode="history")

    with cls(2, make, **options) as env:
        td = env.reset(TensorDict(query=[["Hello."], ["Good bye."]], batch_size=(2, 1)))
        assert type(td[0]["history"]) is ChatHistory
        assert type(td[0]["history"].prompt) is History
        assert td[1]["history"].prompt.batch_size == torch.Size([1, 2])
        td = env.step_mdp(env.step(answered(td)))
        assert td[1]["history"].full is None
        td, root = env.step_and_maybe_reset(answered(td))
        assert [list(own[0].content) for own in (root[1]["history"].prompt, td[1]["history"].full)] == [
            ["Be kind.", "Good bye.", "reply 2", "reply 3"]
        ] * 2
        assert root[1]["history"].full is None
        assert root[1]["history"].prompt.tool_calls is None
