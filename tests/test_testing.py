"""The toy envs of aioenvs.testing: they are what they say, and run on TorchRL with nothing but imports changed."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from oracle import AIOENVS, DIFFERENCES, TORCHRL, TORCHRL_MARKS, Library, over_libraries, switched
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch_faces import EVERY_TORCH_FACE, GRAD_TORCH_FACES, TorchFace

from aioenvs import testing

BATCHES = ((), (1,), (4,), (3, 2), (3, 0))
Make = Callable[..., Any]

SIZED: dict[str, Make] = {
    "counting": lambda toys, size: toys.CountingEnv(batch_size=size),
    "counting-more": lambda toys, size: toys.CountingEnv(
        batch_size=size, truncates=True, adds_up=True, in_place=True, start=3, step=-2, dtype=torch.float32
    ),
    "nested": lambda toys, size: toys.NestedCountingEnv(batch_size=size, nested_dim=3),
    "multi": lambda toys, size: toys.MultiKeyCountingEnv(batch_size=size),
    "multi-rootless": lambda toys, size: toys.MultiKeyCountingEnv(batch_size=size, root_done=False),
    "discrete-agents": lambda toys, size: toys.HeterogeneousCountingEnv(batch_size=size, discrete=True, nest_done=True),
    "state": lambda toys, size: toys.StateEnv(batch_size=size),
    "parameter": lambda toys, size: toys.ParameterEnv(gain=2.0, batch_size=size),
    "differentiable": lambda toys, size: toys.DifferentiableEnv(batch_size=size, max_steps=4),
    "random-own": lambda toys, size: toys.RandomEnv("own", size=2, batch_size=size),
}
TOYS: dict[str, Make] = {}
for at, (name, make_sized) in enumerate(SIZED.items()):
    for size in (BATCHES[at % 5], BATCHES[(at + 1 + at // 5) % 5]):  # each with two of the sizes, each size with four
        TOYS[f"{name}-{size}"] = functools.partial(make_sized, size=size)
for size in ((), (3, 2)):
    TOYS[f"agents-{size}"] = lambda toys, size=size: toys.HeterogeneousCountingEnv(batch_size=size)
for size in ((), (3,)):
    TOYS[f"text-{size}"] = lambda toys, size=size: toys.NonTensorEnv(batch_size=size)
TOYS["text-by-index-(1,)"] = lambda toys: toys.NonTensorEnv(batch_size=(1,), object_action=False)
NESTS = ((), ("observation",), ("action",), ("reward",), ("done",), ("reward", "done"))
for nest, dim in zip(NESTS, (1, 2, None, None, 2, 1), strict=True):
    TOYS[f"nested-{'-'.join(nest)}-{dim}"] = lambda toys, nest=nest, dim=dim: toys.NestedCountingEnv(
        nest=nest, nested_dim=dim, batch_size=(2,), name="here"
    )
for source in ("torch", "numpy", "random"):
    TOYS[f"random-{source}"] = lambda toys, source=source: toys.RandomEnv(source, batch_size=(2,))
TOYS |= {
    "unlocked": lambda toys: toys.UnlockedStateEnv(),
    "growing": lambda toys: toys.DynamicShapeEnv(),
    "failing": lambda toys: toys.FailingEnv(at=100),
    "dying": lambda toys: toys.DyingEnv(at=100),
    "slow": lambda toys: toys.SlowEnv(0),
    "printing": lambda toys: toys.PrintingEnv(80),
}
over_toys = pytest.mark.parametrize("make", TOYS.values(), ids=TOYS.keys())


def trajectory(env: Any, steps: int = 8) -> TensorDictBase:
    """A seeded rollout over the ends of episodes, with random actions."""
    state = torch.get_rng_state()
    torch.manual_seed(3)
    env.set_seed(5)
    rollout = env.rollout(steps, break_when_any_done=False, return_contiguous=False)
    torch.set_rng_state(state)
    return rollout


def replayed(env: Any, actions: Sequence[TensorDictBase]) -> TensorDictBase:
    """A seeded rollout over the ends of episodes, with these actions."""
    env.set_seed(5)
    following = iter(actions)
    return env.rollout(
        len(actions), lambda td: td.update(next(following)), break_when_any_done=False, return_contiguous=False
    )


def differing(one: Any, other: Any, key: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys (and places in a stack) at which two TensorDicts differ."""
    if isinstance(one, TensorDictBase):
        if one.batch_size != other.batch_size:
            return [(*key, "batch_size")]
        if hasattr(one, "tensordicts"):
            pairs = zip(one.unbind(one.stack_dim), other.unbind(one.stack_dim), strict=True)
            return [found for at, (a, b) in enumerate(pairs) for found in differing(a, b, (*key, at))]
        names = set(one.keys())
        found = [(*key, name) for name in names ^ set(other.keys())]
        for name in names & set(other.keys()):
            found += differing(one.get(name), other.get(name), (*key, name))
        return found
    equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one.tolist() == other.tolist()
    return [] if equal else [key]


def count(env: Any, td: TensorDictBase, library: Library, steps: int) -> TensorDictBase:
    """The root that follows after so many random steps."""
    for _ in range(steps):
        td = library.step_mdp(env.rand_step(td))
    return td


# -- all of them ----------------------------------------------------------------------------------------


@over_libraries
@over_toys
def test_specs_are_true(library: Library, make: Make) -> None:
    env = make(library.toys)
    assert isinstance(env, library.EnvBase)
    library.check_env_specs(env)


@over_libraries
@over_toys
def test_trajectories_are_determined_by_seeds_and_actions(library: Library, make: Make) -> None:
    env, twin = make(library.toys), make(library.toys)
    first = trajectory(env)
    assert first.batch_size == (*env.batch_size, 8)
    assert differing(trajectory(twin), first) == []
    assert differing(trajectory(env), first) == []


@over_libraries
@over_toys
def test_a_pickle_is_the_same_env(library: Library, make: Make) -> None:
    env = make(library.toys)
    copy = cloudpickle.loads(cloudpickle.dumps(env))
    assert type(copy).__name__ == type(env).__name__
    assert differing(trajectory(copy), trajectory(env)) == []


@pytest.mark.parametrize("make", [pytest.param(make, id=name, marks=TORCHRL_MARKS) for name, make in TOYS.items()])
def test_both_libraries_give_the_same_trajectory(make: Make) -> None:
    env = make(AIOENVS.toys)
    if getattr(env, "in_place", False) and TORCHRL.differs("final observation"):
        pytest.skip(DIFFERENCES["final observation"])
    actions = [td.select(*env.action_keys) for td in trajectory(env).unbind(-1)]
    ours, theirs = (replayed(make(library.toys), actions) for library in (AIOENVS, TORCHRL))
    if TORCHRL.differs("beside a nested done") and "done" not in env.done_keys:
        ours, theirs = ours.exclude("observation"), theirs.exclude("observation")
    assert differing(ours, theirs) == []


@pytest.mark.parametrize("make", [pytest.param(make, id=name, marks=TORCHRL_MARKS) for name, make in TOYS.items()])
@pytest.mark.slow
def test_both_libraries_give_the_same_trajectory_of_two(make: Make) -> None:
    single = make(AIOENVS.toys)
    if isinstance(single, testing.ParameterEnv) and TORCHRL.differs("grad at a reset"):
        pytest.skip(DIFFERENCES["grad at a reset"])
    if isinstance(single, testing.RandomEnv) and single.source != "own" and TORCHRL.differs("seeded workers"):
        pytest.skip(DIFFERENCES["seeded workers"])
    results, actions = [], None
    for library in (AIOENVS, TORCHRL):
        env = library.SerialEnv(2, functools.partial(make, library.toys))
        try:
            if actions is None:
                actions = [td.select(*env.action_keys) for td in trajectory(env).unbind(-1)]
            results.append(replayed(env, actions))
        finally:
            env.close()
    ours, theirs = results
    if TORCHRL.differs("beside a nested done") and "done" not in single.done_keys:
        ours, theirs = ours.exclude("observation"), theirs.exclude("observation")
    assert differing(ours, theirs) == []


def test_every_toy_is_tried() -> None:
    tried = {type(make(testing)).__name__ for make in TOYS.values()}
    assert tried == {name for name in testing.__all__ if name != "check_env_specs"}


# -- counting -------------------------------------------------------------------------------------------


@over_libraries
def test_it_counts(library: Library) -> None:
    rollout = library.toys.CountingEnv(max_steps=3, start=5, step=10).rollout(100)
    assert rollout["observation"].flatten().tolist() == [5, 15, 25]
    assert rollout["next", "observation"].flatten().tolist() == [15, 25, 35]
    assert rollout["next", "reward"].flatten().tolist() == [1, 1, 1]
    assert rollout["next", "terminated"].flatten().tolist() == [False, False, True]


@over_libraries
def test_each_element_is_reset_alone(library: Library) -> None:
    env = library.toys.CountingEnv(max_steps=3, batch_size=(2, 2))
    td = count(env, env.reset(), library, 2)
    td["_reset"] = torch.tensor([[[True], [False]], [[False], [True]]])
    td = count(env, env.reset(td), library, 1)
    assert td["observation"].squeeze(-1).tolist() == [[1, 3], [3, 1]]
    assert td["done"].squeeze(-1).tolist() == [[False, True], [True, False]]


@over_libraries
def test_an_argument_of_a_reset_is_observed(library: Library) -> None:
    env = library.toys.CountingEnv(start=1)
    assert env.reset(start=40)["observation"].tolist() == [40]
    assert count(env, env.reset(start=40), library, 2)["observation"].tolist() == [42]
    assert env.reset()["observation"].tolist() == [1]


@over_libraries
def test_the_end_can_be_a_truncation(library: Library) -> None:
    env = library.toys.CountingEnv(max_steps=2, truncates=True)
    ends = env.rollout(9)["next"]
    assert ends["truncated"].flatten().tolist() == ends["done"].flatten().tolist() == [False, True]
    assert not ends["terminated"].any()


@over_libraries
def test_endless_episodes(library: Library) -> None:
    assert library.toys.CountingEnv(max_steps=None).rollout(12).shape == (12,)


@over_libraries
def test_the_sum_of_actions_is_observed(library: Library) -> None:
    rollout = library.toys.CountingEnv(num_actions=7, adds_up=True).rollout(4)
    assert rollout["next", "total"].flatten().tolist() == rollout["action"].cumsum(0).tolist()
    assert library.toys.CountingEnv(num_actions=7).action_spec.space.n == 7


@over_libraries
def test_in_place_means_one_tensor(library: Library) -> None:
    careless, careful = library.toys.CountingEnv(in_place=True), library.toys.CountingEnv()
    for env, kept in ((careless, 1), (careful, 0)):
        td = env.reset()
        env.rand_step(td.copy())
        assert td["observation"].tolist() == [kept]


@over_libraries
def test_there_is_something_to_forward(library: Library) -> None:
    env = library.toys.CountingEnv(custom_attr={"a": 1})
    env.set_seed(17)
    env.rollout(2)
    assert env.custom_method(1, b=2) == ({"a": 1}, (1,), {"b": 2})
    assert (env.custom_property, env.seed) == (2, 17)
    assert not hasattr(env, "custom_nothing")


# -- nested ---------------------------------------------------------------------------------------------


@over_libraries
def test_nested_elements_have_their_own_episodes(library: Library) -> None:
    env = library.toys.NestedCountingEnv(nested_dim=3, max_steps=4)
    td = count(env, env.reset(), library, 2)
    td["data", "_reset"] = torch.tensor([[False], [True], [False]])
    td = count(env, env.reset(td), library, 2)
    assert td["data", "observation"].flatten().tolist() == [4, 2, 4]
    assert td["data", "done"].flatten().tolist() == [True, False, True]


@over_libraries
def test_what_is_nested_where(library: Library) -> None:
    env = library.toys.NestedCountingEnv(nest=("action", "done"), nested_dim=None, batch_size=(2,), name="x")
    assert env.full_action_spec["x"].shape == (2,)
    assert set(env.rollout(2).keys(True, True)) >= {
        "observation",
        ("x", "action"),
        ("x", "done"),
        ("next", "reward"),
        ("next", "x", "terminated"),
    }
    with pytest.raises(ValueError, match=r"nest must be some of .*, found \['rewards'\]"):
        library.toys.NestedCountingEnv(nest=("rewards",))


@over_libraries
def test_each_of_many_rewards_is_its_action(library: Library) -> None:
    env = library.toys.MultiKeyCountingEnv(num_actions=9, batch_size=(4,))
    td = env.rand_step(env.reset())
    for action, reward in zip(env.action_keys, env.reward_keys, strict=True):
        assert torch.equal(td[action].float().unsqueeze(-1), td["next"][reward])
    assert td["next", "left", "prize"].shape == (4, 2, 1)
    assert td["next", "right", "deep", "observation"].shape == (4, 3, 1)


@over_libraries
def test_many_dones_are_reset_one_by_one(library: Library) -> None:
    env = library.toys.MultiKeyCountingEnv(root_done=False, max_steps=(9, 9, 3), batch_size=(2,))
    td = count(env, env.reset(), library, 2)
    td["left", "_reset"] = torch.tensor([[[True], [False]], [[True], [True]]])
    td["right", "deep", "_reset"] = torch.tensor([[[False]] * 3, [[True]] * 3])
    td = count(env, env.reset(td), library, 1)
    assert td["left", "observation"].squeeze(-1).tolist() == [[1, 3], [1, 1]]
    assert td["right", "deep", "done"].squeeze(-1).tolist() == [[True] * 3, [False] * 3]
    assert int(env.steps[1]) == 1  # all around it was reset
    assert int(env.steps[0]) == 3


@over_libraries
def test_a_root_done_stands_for_all(library: Library) -> None:
    env = library.toys.MultiKeyCountingEnv(max_steps=(3, 2, 9), batch_size=(2,))
    td = count(env, env.reset(), library, 1)
    td["_reset"] = torch.tensor([[True], [False]])
    env.reset(td)
    assert [env.steps.flatten().tolist(), env.steps_left[..., 0, 0].tolist()] == [[0, 1], [0, 1]]


@over_libraries
def test_agents_differ(library: Library) -> None:
    env = library.toys.HeterogeneousCountingEnv(num_agents=3, exclusive_keys=True, batch_size=(2,))
    td = env.rand_step(env.reset())
    agents = td["next", "lazy"].unbind(1)
    assert [agent["observation"].shape for agent in agents] == [(2, 1), (2, 2), (2, 3)]
    exclusive = [set(agent.keys()) - {"observation", "reward"} for agent in agents]
    assert exclusive == [{"agent_0"}, {"agent_1"}, {"agent_2"}]
    assert [action.shape for action in (agent["action"] for agent in td["lazy"].unbind(1))] == [(2, 1), (2, 2), (2, 3)]
    assert env.action_spec["lazy"][:, 2]["action"].shape == (2, 3)


@over_libraries
def test_agents_end_together(library: Library) -> None:
    env = library.toys.HeterogeneousCountingEnv(nest_done=True, max_steps=2)
    assert env.rollout(9)["next", "lazy", "done"].squeeze(-1).tolist() == [[False] * 3, [True] * 3]


# -- state ----------------------------------------------------------------------------------------------


@over_libraries
def test_state_travels_in_the_tensordict(library: Library) -> None:
    env, stranger = library.toys.StateEnv(), library.toys.StateEnv()
    td = env.rand_action(count(env, env.reset(), library, 3))
    expected = env.step(td.clone())["next"]
    assert differing(stranger.step(td.clone())["next"], expected) == []
    assert expected["count"].tolist() == [4]
    assert env.state_keys == ["count", ("memory", "total")]
    assert not list(env.state_dict())


@over_libraries
def test_any_batch_size_where_it_is_not_locked(library: Library) -> None:
    env = library.toys.UnlockedStateEnv(max_steps=2)
    assert (env.batch_size, env.batch_locked, library.toys.StateEnv().batch_locked) == ((), False, True)
    for size in ((), (3,), (2, 5)):
        td = env.reset(TensorDict(batch_size=size))
        td["count"] += 1
        assert env.rand_step(td)["next", "done"].all()
        assert td["next", "observation"].shape == (*size, 1)


@over_libraries
def test_a_state_dict_carries_parameters_and_buffers(library: Library) -> None:
    env, other = library.toys.ParameterEnv(gain=2.0, offset=1.0), library.toys.ParameterEnv()
    assert set(env.state_dict()) == {"gain", "offset", "steps", "head.weight", "head.bias"}
    td = count(env, env.reset(), library, 2)
    other.load_state_dict(env.state_dict())
    assert torch.equal(other.rand_step(td)["next", "observation"], torch.tensor([7.0, 7.0, 7.0]))
    assert td["next", "reward"].tolist() == [21.0]
    assert [name for name, _ in env.named_parameters()] == ["gain", "head.weight", "head.bias"]


# -- what has no fixed shape ----------------------------------------------------------------------------


@over_libraries
def test_objects_go_both_ways(library: Library) -> None:
    env = library.toys.NonTensorEnv(batch_size=(2,), padding=20)
    td = env.reset()
    td["action"] = NonTensorStack("run", {"jump": [1, 2]})
    after = env.step(td)["next"]
    assert after.get("text").tolist() == ["step 1".ljust(20)] * 2
    assert after.get("record").tolist() == [
        {"steps": 1, "action": "run"},
        {"steps": 1, "action": {"jump": [1, 2]}},
    ]
    with pytest.raises(ValueError, match="at most one dim"):
        library.toys.NonTensorEnv(batch_size=(2, 2))


@over_libraries
def test_text_is_reset_with_its_element(library: Library) -> None:
    env = library.toys.NonTensorEnv(batch_size=(2,), object_action=False)
    td = count(env, env.reset(), library, 1)
    td["_reset"] = torch.tensor([[False], [True]])
    assert env.reset(td).get("text").tolist() == ["step 1", "step 0"]


@over_libraries
def test_rows_come_and_go(library: Library) -> None:
    env = library.toys.DynamicShapeEnv(first_rows=1, max_rows=3, size=4)
    steps = env.rollout(4, return_contiguous=False).unbind(0)
    assert [td["next", "observation"].shape for td in steps] == [(3, 4), (1, 4), (2, 4), (3, 4)]
    assert steps[2]["next", "observation"].unique().tolist() == [3.0]


# -- gradients and random numbers -----------------------------------------------------------------------


@over_libraries
def test_gradients_reach_every_action(library: Library) -> None:
    env = library.toys.DifferentiableEnv(decay=0.5, gain=2.0, start=0.0, size=1)
    actions = [torch.ones(1, requires_grad=True) for _ in range(3)]
    td = env.reset()
    for action in actions:
        td = library.step_mdp(env.step(td.set("action", action)))
    grads = torch.autograd.grad(td["observation"].sum(), actions)
    assert [float(grad) for grad in grads] == [0.5, 1.0, 2.0]


@over_libraries
def test_a_reset_cuts_the_graph(library: Library) -> None:
    env = library.toys.DifferentiableEnv(batch_size=(2,))
    action = torch.zeros(2, 3, requires_grad=True)
    td = library.step_mdp(env.step(env.reset().set("action", action)))
    td["_reset"] = torch.tensor([[True], [False]])
    env.reset(td)
    (grad,) = torch.autograd.grad(env.current.sum(), action)
    assert grad.tolist() == [[0.0] * 3, [1.0] * 3]


@over_libraries
@pytest.mark.parametrize("source", ["torch", "numpy", "random"])
def test_random_numbers_come_from_the_global_generators(library: Library, source: str) -> None:
    env = library.toys.RandomEnv(source)
    env.set_seed(4)
    seen = float(env.reset()["observation"])
    seeds = {"torch": torch.manual_seed, "numpy": np.random.seed, "random": random.seed}
    draws = {
        "torch": lambda: torch.rand(1, dtype=torch.float64).item(),
        "numpy": np.random.random,
        "random": random.random,
    }
    seeds[source](4)
    assert draws[source]() == seen
    assert draws[source]() == float(env.set_seed(4) is not None and _second(env))


def _second(env: Any) -> float:
    env.reset()
    return float(env.reset()["observation"])


@over_libraries
def test_an_own_generator_leaves_the_others_alone(library: Library) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    env, other = library.toys.RandomEnv("own"), library.toys.RandomEnv("own")
    assert env.reset()["observation"] != other.reset()["observation"]
    env.set_seed(1)
    env.set_seed(None)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    with pytest.raises(ValueError, match=r"source must be one of .*, found 'dice'"):
        library.toys.RandomEnv("dice")


# -- trouble --------------------------------------------------------------------------------------------


@over_libraries
def test_it_fails_when_told_and_lives_on(library: Library) -> None:
    env = library.toys.FailingEnv(at=3, error=KeyError, message="valve")
    td = count(env, env.reset(), library, 2)
    with pytest.raises(KeyError, match="valve"):
        env.rand_step(td)
    assert env.rand_step(env.reset())["next", "observation"].tolist() == [1]
    env = library.toys.FailingEnv("reset", at=2)
    env.reset()
    with pytest.raises(RuntimeError, match="this env was told to fail"):
        env.reset()
    with pytest.raises(OSError, match="no licence"):
        library.toys.FailingEnv("init", error=OSError, message="no licence")
    always = library.toys.FailingEnv("reset", at=None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="told"):
            always.reset()
    with pytest.raises(ValueError, match=r"where must be one of .*, found 'close'"):
        library.toys.FailingEnv("close")


@over_libraries
def test_it_dies_when_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "kill", lambda *what: deaths.append(what))
    monkeypatch.setattr(os, "_exit", lambda code: deaths.append((code,)))
    env = library.toys.DyingEnv(at=2)
    td = env.rand_step(env.reset())
    assert deaths == []
    env.rand_step(td)
    assert deaths == [(os.getpid(), signal.SIGKILL)]
    library.toys.DyingEnv("init", signum=signal.SIGTERM)
    library.toys.DyingEnv("init", exit_code=0)
    assert deaths[1:] == [(os.getpid(), signal.SIGTERM), (0,)]


@over_libraries
def test_it_prints_what_it_was_told(library: Library, capfd: pytest.CaptureFixture[str]) -> None:
    library.toys.PrintingEnv(1000, "reset", streams=("stderr",)).reset()
    out, err = capfd.readouterr()
    assert (out, len(err), err.count("\n")) == ("", 1040, 13)
    library.toys.PrintingEnv(80).rollout(2)
    assert [len(text) for text in capfd.readouterr()] == [160, 160]


@over_libraries
def test_it_takes_its_time(library: Library) -> None:
    waits: list[float] = []
    library.toys.SlowEnv((1, 2), sleep=waits.append).rollout(3)
    library.toys.SlowEnv(7, "reset", at=2, sleep=waits.append).reset()
    assert waits == [1.0, 2.0, 1.0]


# -- the faces ------------------------------------------------------------------------------------------


# TorchRL's own ParallelEnv takes most of a minute to start
@pytest.mark.parametrize(
    "face",
    [
        pytest.param(
            *face.values, id=face.id, marks=[*face.marks, *[pytest.mark.slow] * (face.id == "torchrl-parallel")]
        )
        for face in EVERY_TORCH_FACE
    ],
)
async def test_one_body_drives_every_face(face: TorchFace) -> None:
    kwargs = [{"max_steps": 2 + i, "start": 10 * i, "custom_attr": i} for i in range(3)]
    async with face.open(3, face.toys.CountingEnv, kwargs) as env:
        assert env.batch_size == (3,)
        td = await env.reset()
        assert td["observation"].flatten().tolist() == [0, 10, 20]
        for _ in range(2):
            td, following = await env.step_and_maybe_reset(env.rand_action(td))
            ended, td = td, following
        assert ended["next", "observation"].flatten().tolist() == [2, 12, 22]
        assert td["observation"].flatten().tolist() == [0, 12, 22]
        rollout = await env.rollout(4, break_when_any_done=False)
        assert rollout["next", "observation"].squeeze(-1).tolist() == [[1, 2, 1, 2], [11, 12, 13, 11], [21, 22, 23, 24]]
        assert await env.ask("custom_method", 5) == [(i, (5,), {}) for i in range(3)]
        assert await env.read("custom_attr") == [0, 1, 2]
    assert env.is_closed


@pytest.mark.parametrize("face", GRAD_TORCH_FACES)
async def test_a_driver_keeps_the_grad_mode(face: TorchFace) -> None:
    async with face.open(2, face.toys.DifferentiableEnv, {"size": 1}) as env:
        td = await env.reset()
        td["action"] = torch.ones(2, 1, requires_grad=True)
        assert (await env.step(td))["next", "reward"].requires_grad
        td = await env.reset()
        td["action"] = torch.ones(2, 1, requires_grad=True)
        with torch.no_grad():
            assert not (await env.step(td))["next", "reward"].requires_grad


# -- the switch of imports ------------------------------------------------------------------------------


def test_only_imports_are_switched() -> None:
    source = "from aioenvs.envs import EnvBase\nfrom aioenvs.specs import Bounded\nimport aioenvs.testing\n"
    expected = "from torchrl.envs import EnvBase\nfrom torchrl.data import Bounded\nimport torchrl_toys\n"
    assert switched(source) == expected
    with pytest.raises(ImportError, match=r"found \['aioenvs.faces'\]"):
        switched("def f():\n    from aioenvs.faces import sync_envs\n")


def test_a_difference_has_a_reason_and_a_name() -> None:
    assert all(reason.startswith("TorchRL") for reason in DIFFERENCES.values())
    assert TORCHRL.differs("entropy")
    assert not AIOENVS.differs("entropy")
    with pytest.raises(KeyError, match="whatever"):
        AIOENVS.differs("whatever")


def _modules() -> list[str]:
    tree = ast.parse(Path(testing.__file__).read_text())
    return sorted(node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)


@pytest.mark.parametrize("module", [pytest.param(name, marks=TORCHRL_MARKS) for name in _modules()])
def test_the_examples_hold_for_torchrl(module: str) -> None:
    assert TORCHRL.toys.CountingEnv.__mro__[1] is TORCHRL.EnvBase
    result = doctest.testmod(importlib.import_module(f"{TORCHRL.toys.__name__}.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
