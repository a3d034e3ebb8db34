"""Envs that deal in tensorclasses; in a module of their own, since workers import it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack, tensorclass

from aioenvs import EnvBase
from aioenvs.specs import Composite, NonTensor, Unbounded

__all__ = ["Message", "TalkEnv", "log_spec", "message_spec"]


@tensorclass
class Message:
    """One of a conversation; only some have a note."""

    role: str
    tokens: torch.Tensor
    note: str | None = None


def message_spec(data_cls: Any = Message) -> Composite:
    return Composite(
        role=NonTensor((), example_data="?"), tokens=Unbounded((3,)), note=NonTensor(()), data_cls=data_cls
    )


def log_spec(data_cls: Any = Message) -> Composite:
    shape = (-1,)
    entries = {"role": NonTensor(shape, example_data="?"), "tokens": Unbounded((-1, 3)), "note": NonTensor(shape)}
    return Composite(entries, shape=shape, data_cls=data_cls)


class TalkEnv(EnvBase):
    """Hears a Message, and as many more as are in a log; shows all there were, and keeps one of its own as a state.

    Args:
        index: How many messages more than one there are at the beginning.
        ends: After how many steps it does.
        grows: Whether it deals in logs, whose sizes vary, rather than in the last message alone.
    """

    def __init__(self, index: int = 0, ends: int = 3, grows: bool = True) -> None:
        super().__init__()
        self.index, self.ends, self.grows = index, ends, grows
        self.observation_spec = Composite(mood=message_spec(), log=log_spec() if grows else message_spec())
        self.action_spec = Composite(say=message_spec(), more=log_spec()) if grows else Composite(say=message_spec())
        self.state_spec = Composite(mood=message_spec())
        self.reward_spec = Unbounded((1,))

    def _observed(self, mood: Any) -> TensorDict:
        log = lazy_stack(self.log) if self.grows else self.log[-1]
        return TensorDict(mood=mood, log=log)

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        self.log = [Message(role="system", tokens=torch.zeros(3)) for _ in range(1 + self.index)]
        return self._observed(Message(role="", tokens=torch.zeros(3)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        said, mood = tensordict["say"], tensordict["mood"]
        assert isinstance(said, Message), said
        assert isinstance(mood, Message), mood
        self.log.append(said.copy())
        if self.grows:
            more = tensordict["more"]
            assert isinstance(more, Message), more
            self.log += more.unbind(0)
        mood = Message(role=mood.role + said.role[0], tokens=mood.tokens + 1, note=said.note)
        done = len(mood.role) >= self.ends
        return self._observed(mood).update({"reward": torch.ones(1), "done": torch.tensor([done])})

    def _set_seed(self, seed: int | None) -> None:
        pass
