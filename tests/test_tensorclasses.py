"""Observations, states and actions in tensorclasses, of fixed and of varying sizes: in every face, and in specs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faces import FACES, Face
from tensorclass_envs import Message, TalkEnv, log_spec, message_spec
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack, tensorclass

from aioenvs import Collector, EnvBase, ParallelEnv, SerialEnv
from aioenvs.envs import check_env_specs
from aioenvs.specs import Composite, NonTensor, Unbounded, make_composite_from_td
from aioenvs.tensors.step_mdp import step_mdp

INDEXED = [{"index": 0}, {"index": 1}]


@pytest.fixture(params=FACES, ids=lambda face: face.name)
def any_face(request: pytest.FixtureRequest) -> Face:
    face: Face = request.param
    return face


def said(td: TensorDictBase) -> TensorDictBase:
    """What env `i` is told: one message, with a note from the second env on, and `i + 1` more."""
    rows = []
    for row, part in enumerate(td.unbind(0)):
        part = part.copy()
        part["say"] = Message(role=f"{row}", tokens=torch.full((3,), float(row)), note="psst" if row else None)
        part["more"] = torch.stack([Message(role="more", tokens=torch.ones(3)) for _ in range(row + 1)])
        rows.append(part)
    return lazy_stack(rows)


def logs(td: TensorDictBase) -> list[int]:
    assert all(type(part["log"]) is Message for part in td.unbind(0))
    return [part["log"].batch_size[0] for part in td.unbind(0)]


async def test_a_log_that_grows(any_face: Face) -> None:
    async with any_face.open(2, TalkEnv, create_env_kwargs=INDEXED) as env:
        td = await any_face.call(env.reset)
        assert logs(td) == [1, 2]
        td, root = await any_face.call(env.step_and_maybe_reset, said(td))
        assert logs(td) == [1, 2]
        assert logs(td["next"]) == logs(root) == [3, 5]
        assert list(root[1]["log"].role) == ["system", "system", "1", "more", "more"]
        assert root[1]["log"].tokens[:, 0].tolist() == [0, 0, 1, 1, 1]
        assert [message.note for message in root[1]["log"].unbind(0)] == [None, None, "psst", None, None]
        assert [root[row]["mood"].role for row in (0, 1)] == ["0", "1"]
        partial = root.copy().set("_reset", torch.tensor([[True], [False]]))
        again = await any_face.call(env.reset, partial)
        assert logs(again) == [1, 5]
        masked = await any_face.call(env.step, said(again).set("_step", torch.tensor([False, True])))
        assert logs(masked["next"]) == [1, 8]
        td, root = await any_face.call(env.step_and_maybe_reset, said(step_mdp(masked)))
        assert td["next", "done"].flatten().tolist() == [False, True]
        assert logs(td["next"]) == [3, 11]
        assert logs(root) == [3, 2]
        assert root[1]["mood"].note is None


async def test_views_and_first_ready(any_face: Face) -> None:
    async with any_face.open(2, TalkEnv, create_env_kwargs=INDEXED) as env:
        td = await any_face.call(env.reset)
        one = await any_face.call(env[1].step, said(td[1:]))
        assert logs(one["next"]) == [4]
        await any_face.call(env.send, said(td))
        ready, root = await any_face.call(env.recv, 2)
        sizes = dict(zip(ready["env_index"].tolist(), logs(root), strict=True))
        assert sizes == {0: 3, 1: 7}


async def test_one_size_is_one_tensor_for_all(any_face: Face) -> None:
    kwargs = [{"grows": False}] * 2
    async with any_face.open(2, TalkEnv, create_env_kwargs=kwargs) as env:
        td = await any_face.call(env.reset)
        assert type(td) is TensorDict
        td["say"] = lazy_stack([Message(role="ab", tokens=torch.ones(3)), Message("c", torch.zeros(3), "psst")])
        td, root = await any_face.call(env.step_and_maybe_reset, td)
        assert isinstance(root["log"], Message)
        assert list(root["log"].role) == ["ab", "c"]
        assert root["log"].tokens[:, 0].tolist() == [1, 0]
        assert [root[row]["log"].note for row in (0, 1)] == [None, "psst"]
        kept = await any_face.call(env.reset, root.copy().set("_reset", torch.tensor([[False], [True]])))
        assert list(kept["log"].role) == ["ab", "system"]
        assert [kept[row]["log"].note for row in (0, 1)] == [None, None]


@pytest.mark.parametrize("grows", [True, False])
def test_checks_rollouts_and_collectors(grows: bool) -> None:
    kwargs = [{"grows": grows, "index": index} for index in range(2)]
    with SerialEnv(2, TalkEnv, create_env_kwargs=kwargs) as env:
        check_env_specs(env)
        steps = env.rollout(5, said if grows else None, break_when_any_done=False)
        assert steps.shape == (2, 5)
        if grows:
            assert [logs(steps[:, t]) for t in range(4)] == [[1, 2], [3, 5], [5, 8], [1, 2]]
        policy: Any = (lambda td: said(td)) if grows else None
        with Collector(env, policy, frames_per_batch=8, total_frames=8) as collector:
            (batch,) = collector
        assert {type(row["next", "log"]) for row in batch.reshape(-1).unbind(0)} == {Message}


class OtherEnv(TalkEnv):
    """Knows nothing of logs, but has a speed."""

    def __init__(self) -> None:
        super().__init__(grows=False)
        self.observation_spec = Composite(mood=message_spec(), log=message_spec(), speed=Unbounded((2,)))

    def _observed(self, mood: Any) -> TensorDict:
        return super()._observed(mood).set("speed", torch.ones(2))


def test_envs_that_differ() -> None:
    with SerialEnv(2, [OtherEnv, TalkEnv], create_env_kwargs=[{}, {"grows": False}]) as env:
        td = env.rand_step(env.reset())
        assert isinstance(td, LazyStackedTensorDict)
        assert [type(td[row]["next", "log"]) for row in (0, 1)] == [Message, Message]
        assert td[0]["next", "speed"].tolist() == [1, 1]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_class_of_a_function_is_one_class(method: str) -> None:
    @tensorclass
    class Note:
        text: str

        def shout(self) -> str:
            return self.text.upper()

    def spec() -> Composite:
        return Composite(note=Composite(text=NonTensor(()), data_cls=Note))

    class NoteEnv(EnvBase):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec, self.action_spec, self.reward_spec = spec(), spec(), Unbounded((1,))

        def _reset(self, tensordict: Any = None) -> Any:
            return TensorDict(note=Note(text="hello"))

        def _step(self, tensordict: Any) -> Any:
            raise NotImplementedError

        def _set_seed(self, seed: Any) -> None:
            pass

    before = dict(vars(Note))
    with ParallelEnv(2, NoteEnv, mp_start_method=method) as env:
        td = env.reset()
        assert type(td) is TensorDict
        assert type(td["note"]) is Note
        assert td[1]["note"].shout() == "HELLO"
    assert all(vars(Note)[name] is value for name, value in before.items())


def make_own_class() -> EnvBase:
    """An env whose class no other process can know."""

    @tensorclass
    class Own:
        tokens: torch.Tensor

    class OwnEnv(EnvBase):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(own=Composite(tokens=Unbounded((2,)), data_cls=Own))
            self.action_spec = self.reward_spec = Unbounded((1,))

        def _reset(self, tensordict: Any = None) -> Any:
            return TensorDict(own=Own(tokens=torch.ones(2)))

        def _step(self, tensordict: Any) -> Any:
            raise NotImplementedError

        def _set_seed(self, seed: Any) -> None:
            pass

    return OwnEnv()


def test_classes_that_each_worker_makes_are_one() -> None:
    with ParallelEnv(2, make_own_class, mp_start_method="fork") as env:
        td = env.reset()
        assert type(td) is TensorDict
        assert type(td["own"]).__qualname__.endswith("Own")
        assert td["own"].tokens.tolist() == [[1, 1], [1, 1]]


def test_an_empty_log() -> None:
    class Silent(TalkEnv):
        def _observed(self, mood: Any) -> TensorDict:
            empty = Message(role="", tokens=torch.zeros(3)).unsqueeze(0)[:0]
            return super()._observed(mood).set("log", empty)

    with SerialEnv(2, Silent) as env:
        td = env.reset()
        assert logs(td) == [0, 0]
        assert td[0]["log"].tokens.shape == (0, 3)


def test_specs_speak_of_tensorclasses() -> None:
    spec = message_spec()
    drawn = spec.rand()
    assert isinstance(drawn, Message)
    assert spec.is_in(drawn)
    assert not spec.is_in(TensorDict(role="a", tokens=torch.zeros(3), note=None))
    assert isinstance(spec.project(drawn), Message)
    encoded = spec.encode({"role": "a", "tokens": [1, 2, 3], "note": "b"})
    assert isinstance(encoded, Message)
    assert encoded.tokens.tolist() == [1, 2, 3]
    for other in (spec.clone(), spec.to(None), spec.expand(2)[0], torch.stack([spec, spec])[1]):
        assert other == spec
        assert other.data_cls is Message
    assert spec != message_spec(None)
    assert isinstance(torch.stack([spec, spec]).zero(), Message)
    assert torch.stack([spec, spec]).unsqueeze(0).squeeze(0).data_cls is Message
    assert Composite(a=spec).select(("a", "role"))["a"].data_cls is Message
    assert isinstance(log_spec().zero(), Message)
    assert "Message" in repr(spec)
    assert make_composite_from_td(TensorDict(a=drawn))["a"].data_cls is Message
    assert "expected a Message, found TensorDict" in spec.differences(TensorDict(tokens=torch.zeros(3)))[0]


def test_a_tensorclass_under_next_takes_the_place_of_the_former() -> None:
    new, old = Message(role="b", tokens=torch.ones(3)), Message(role="a", tokens=torch.zeros(3), note="old")
    root = step_mdp(TensorDict(log=old, next=TensorDict(log=new)))
    assert isinstance(root["log"], Message)
    assert (root["log"].role, root["log"].note) == ("b", None)
