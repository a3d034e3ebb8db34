"""Roots and states of TorchRL's envs: what a step sees of them in our classes is what it sees in TorchRL's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import TORCHRL_MARKS, start_what_torchrl_shares
from tensordict import TensorDict, TensorDictBase
from torchrl_envs import data, theirs

import aioenvs
from aioenvs.errors import SpecMismatchError
from aioenvs.integrations import torchrl as ours

pytestmark = [*TORCHRL_MARKS, pytest.mark.timeout(120)]
PAIRS: dict[str, tuple[Any, Any]] = {
    "serial": (ours.SerialEnv, theirs.SerialEnv),
    "packed": (functools.partial(ours.ParallelEnv, num_processes=1), theirs.ParallelEnv),
}


@pytest.fixture(scope="module", autouse=True)
def _shared() -> None:
    start_what_torchrl_shares()


class Moving(theirs.EnvBase):
    """Adds its action to the position in its root, changes that in place, and has a state and an observed state."""

    def __init__(self) -> None:
        super().__init__(batch_size=())
        self.observation_spec = data.Composite(position=data.Unbounded((2,)), pace=data.Unbounded((2,)))
        self.state_spec = data.Composite(pace=data.Unbounded((2,)), memory=data.Unbounded((2,)))
        self.action_spec = data.Unbounded((2,))
        self.reward_spec = data.Unbounded((1,))
        self.kept = torch.zeros(2)

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.kept = torch.zeros(2)
        return TensorDict(position=self.kept, pace=torch.ones(2))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        memory = tensordict.get("memory", torch.full((2,), -1.0)).float().sum(-1, keepdim=True)
        position = tensordict["position"] + tensordict["pace"] * tensordict["action"]
        self.kept.fill_(50)  # what it handed over stands where it went
        out = TensorDict(position=position, pace=tensordict["pace"] + 1, reward=memory)
        return out.update({"done": torch.zeros(1, dtype=torch.bool)})


def stacked() -> Any:
    stack = theirs.Stack(["position", "pace"], "both", in_key_inv="both", out_keys_inv=["position", "pace"], dim=-2)
    return theirs.TransformedEnv(Moving(), stack)


def told(td: TensorDictBase) -> dict[str, Any]:
    """What came of a step, but for flags."""
    following = td.get("next")
    return {key: following[key].tolist() for key in ("position", "pace", "both", "reward") if key in following.keys()}  # noqa: SIM118


def course(env: Any, changes: list[Callable[[TensorDictBase], Any]]) -> list[Any]:
    """What came of steps, each with a root that was changed before."""
    found: list[Any] = []
    root = env.reset()
    for change in changes:
        root["action"] = torch.full((2, 2), 0.5)
        change(root)
        td, root = env.step_and_maybe_reset(root)
        found.append(told(td))
        root = root.exclude("_step")
    return found


def setting(name: str, value: Any) -> Callable[[TensorDictBase], Any]:
    return lambda td: td.set(name, value)


STATES: dict[str, Callable[[TensorDictBase], Any]] = {
    "missing": lambda td: td.pop("memory", None),
    "as it should be": setting("memory", torch.full((2, 2), 2.0)),
    "integers": setting("memory", torch.full((2, 2), 3)),
    "doubles": setting("memory", torch.full((2, 2), 4.0, dtype=torch.float64)),
    "narrower": setting("memory", torch.full((2, 1), 5.0)),
    "missing again": lambda td: td.pop("memory", None),
}


@pytest.mark.parametrize("factory", [Moving, stacked])
@pytest.mark.parametrize("pair", PAIRS)
def test_states_and_roots_are_those_of_torchrl(pair: str, factory: Any) -> None:
    def some(td: TensorDictBase) -> Any:
        return STATES["as it should be"](td).set("_step", torch.tensor([True, False]))

    def changed(td: TensorDictBase) -> Any:
        name = "position" if factory is Moving else "both"
        return td.set(
            name, td[name] + 10
        )  # one of these is a state, so that what the caller says counts in workers, too

    results = []
    for cls in PAIRS[pair]:
        env = cls(2, factory)
        before = acting() if pair == "packed" else env.reset().update(acting())  # nobody can say what is not there
        first = told(env.step(before))
        results.append([first, *course(env, [*STATES.values(), changed, some])])
        env.close()
    assert results[0] == results[1]


def acting() -> TensorDict:
    return TensorDict(action=torch.ones(2, 2), batch_size=[2])


class Smooth(Moving):
    """The same for gradients."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict(position=torch.zeros(2), pace=torch.ones(2))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        position = tensordict["position"].tanh() + tensordict["action"]
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(position=position, pace=tensordict["pace"], reward=position.square().sum(-1), done=done)


def test_gradients_through_several_steps() -> None:
    results = []
    for cls in PAIRS["serial"]:
        env = cls(2, Smooth)
        root, weight = env.reset(), torch.full((2, 2), 0.3, requires_grad=True)
        first = torch.full((2, 2), 0.7, requires_grad=True)
        root["position"], total = root["position"] + first, torch.zeros(())
        for _ in range(3):
            root["action"] = weight * root["position"]
            td, root = env.step_and_maybe_reset(root)
            total = total + td["next", "reward"].sum()
        results.append(torch.stack(torch.autograd.grad(total, (weight, first))))
        env.close()
    assert results[0].tolist() == results[1].tolist()
    assert results[0].all()


def test_a_wrapped_serial_batch_sees_what_its_transform_made_of_the_root() -> None:
    results = []
    for cls in PAIRS["serial"]:
        env = theirs.TransformedEnv(cls(2, Moving), theirs.ObservationNorm(5.0, 2.0, in_keys=["position"]))
        results.append(course(env, [lambda td: None] * 3))
        env.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("cls", [aioenvs.SerialEnv, functools.partial(aioenvs.ParallelEnv, num_processes=1)])
def test_actions_are_checked_all_the_same(cls: Any) -> None:
    with cls(2, Moving) as env:
        root = env.reset()
        with pytest.raises(SpecMismatchError, match="action"):
            env.step(root)
        with pytest.raises(SpecMismatchError, match="action"):
            env.step(root.clone().set("action", torch.ones(2, 1)))
        root["action"] = torch.ones(2, 2)
        env.send(root[[1]].set("env_index", torch.tensor([1])))  # without its memory
        assert env.recv()[0]["next", "pace"].tolist() == [[2, 2]]
        assert env[0].step(root[:1])["next", "pace"].tolist() == [[2, 2]]


def test_a_state_that_no_row_could_keep_is_refused() -> None:
    with aioenvs.ParallelEnv(2, Moving, num_processes=1) as env:
        root = env.reset().set("action", torch.ones(2, 2)).set("memory", torch.ones(2, 5))
        with pytest.raises(SpecMismatchError, match=r"'memory': expected .*shape \(2, 2\), found shape \(2, 5\)"):
            env.step(root)
        assert env.step(root.exclude("memory"))["next", "reward"].tolist() == [[0], [0]]
