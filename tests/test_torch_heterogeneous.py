"""Batches of torch envs that differ, objects in both directions, and shapes that vary."""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch_batches import ByHand, Toy, differing, faces, mask_of, of_own, trajectory, trajectory_by_hand
from torch_faces import OWN_TORCH_FACES, TorchFace

from aioenvs import SerialEnv
from aioenvs.envs import EnvBase, GymEnv
from aioenvs.envs.check import check_async_env_specs, check_env_specs
from aioenvs.errors import SpecMismatchError
from aioenvs.specs import Composite, StackedComposite, Unbounded
from aioenvs.testing import (
    CountingEnv,
    DynamicShapeEnv,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    NonTensorEnv,
    StateEnv,
)

over_own_faces = pytest.mark.parametrize("face", OWN_TORCH_FACES)
over_faces = pytest.mark.parametrize("face", faces())
over_quick_own_faces = pytest.mark.parametrize("face", faces("serial", "thread", "async-packed", torchrl=False))
over_some_own_faces = pytest.mark.parametrize("face", faces("serial", "async-packed", torchrl=False))

Make = Callable[[], Any]
BATCHES: dict[str, list[Make]] = {
    "keys": [
        functools.partial(CountingEnv, 2),
        functools.partial(CountingEnv, 3, adds_up=True),
        functools.partial(CountingEnv, 2),
    ],
    "dtypes": [functools.partial(CountingEnv, 2), functools.partial(CountingEnv, 3, dtype=torch.float64)],
    "ends": [functools.partial(CountingEnv, 2), functools.partial(CountingEnv, 3, truncates=True)],
    "shapes": [functools.partial(NestedCountingEnv, 2, nested_dim=n) for n in (1, 3, 1)],
    "inner keys": [functools.partial(NestedCountingEnv, 2, name=name) for name in ("left", "right")],
    "nesting": [functools.partial(NestedCountingEnv, 2), functools.partial(CountingEnv, 3)],
    "classes": [
        functools.partial(MultiKeyCountingEnv, (4, 3, 2)),
        functools.partial(StateEnv, 3),
        functools.partial(CountingEnv, 2),
    ],
    "agents": [functools.partial(HeterogeneousCountingEnv, 2, num_agents=n) for n in (2, 3)],
    "agents' keys": [
        functools.partial(HeterogeneousCountingEnv, 2, exclusive_keys=True),
        functools.partial(HeterogeneousCountingEnv, 3),
    ],
    "objects": [functools.partial(NonTensorEnv, 2), functools.partial(CountingEnv, 3)],
    "sizes that vary": [functools.partial(DynamicShapeEnv, 2), functools.partial(CountingEnv, 3)],
    "batches": [functools.partial(CountingEnv, 2, batch_size=(4,)), functools.partial(StateEnv, 3, batch_size=(4,))],
    "gymnasium": [
        functools.partial(GymEnv, "CartPole-v1"),
        functools.partial(CountingEnv, 3),
        functools.partial(GymEnv, "CartPole-v1", categorical_action_encoding=True),
    ],
}
KINDS = ("action_keys", "reward_keys")
over_batches = pytest.mark.parametrize("makes", BATCHES.values(), ids=BATCHES.keys())


# -- envs that differ ----------------------------------------------------------------------------------------


@over_batches
@over_own_faces
@pytest.mark.every_combination
async def test_each_is_as_it_would_be_alone(face: TorchFace, makes: list[Make]) -> None:
    torch.manual_seed(0)
    envs, others = [make() for make in makes], [make() for make in makes]
    actions = [ByHand(envs).rand_action() for _ in range(5)]
    for place, env in enumerate(envs):
        if isinstance(env, GymEnv):
            env.set_seed(place)
    expected = trajectory_by_hand(ByHand(envs), [action.clone() for action in actions])
    async with face.open(len(makes), makes) as env:
        assert env.batch_size == (len(makes), *others[0].batch_size)
        for place in range(len(makes)):
            await env[place : place + 1].set_seed(place)
        found = await trajectory(env, actions)
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, LazyStackedTensorDict)
            assert differing(one, other) == []


@over_batches
@over_some_own_faces
async def test_specs_of_envs_that_differ(face: TorchFace, makes: list[Make]) -> None:
    async with face.open(len(makes), makes) as env:
        for place, make in enumerate(makes):
            single = make()
            for kind in ("observation", "reward", "done", "action", "state"):
                own = getattr(env, f"full_{kind}_spec")[place]
                assert own == getattr(single, f"full_{kind}_spec")
        assert env.output_spec.is_locked
        if face.is_async:
            await check_async_env_specs(env.env, break_when_any_done="both", seed=0)
        else:
            check_env_specs(env.env, break_when_any_done="both", seed=0)


@over_batches
@over_some_own_faces
async def test_masks_over_envs_that_differ(face: TorchFace, makes: list[Make]) -> None:
    async with face.open(len(makes), makes) as env:
        await env.set_seed(0)
        actions, rewards = ([key for make in makes for key in getattr(make(), name)] for name in KINDS)
        td = await env.step(env.rand_action(await env.reset()))
        root = face.library.step_mdp(td, action_keys=actions, reward_keys=rewards)
        before = root.clone()
        stepping = env.rand_action(root.clone())
        stepping["_step"] = mask_of(len(makes), [1], *env.batch_size[1:])
        stepped = await env.step(stepping)
        for place in range(len(makes)):
            same = differing(stepped[place]["next"].exclude(*rewards), before[place]) == []
            assert same == (place != 1)
        root = face.library.step_mdp(stepped, action_keys=actions, reward_keys=rewards)
        before = root.clone()
        root["_reset"] = mask_of(len(makes), [0], *env.batch_size[1:], 1)
        result = await env.reset(root)
        for place in range(1, len(makes)):
            assert differing(result[place], before[place]) == []
        assert differing(result[0], before[0]) != []
        request = TensorDict({"_reset": mask_of(len(makes), [1], *env.batch_size[1:], 1)}, env.batch_size)
        known = await env.reset(request)
        assert differing(known[0], result[0]) == []
        assert "_reset" not in known


@over_batches
async def test_rollouts_of_envs_that_differ(makes: list[Make]) -> None:
    lengths = [make().rollout(5).shape[-1] for make in makes]
    breaks = [({}, min(lengths)), ({"break_when_any_done": False}, 5), ({"break_when_all_done": True}, max(lengths))]
    found = []
    for param in faces("serial", "packed", "async-thread", torchrl=False):
        async with param.values[0].open(len(makes), makes) as env:
            rollouts = []
            for options, steps in breaks:
                torch.manual_seed(1)
                await env.set_seed(3)
                rollout = await env.rollout(5, return_contiguous=False, **options)
                assert rollout.batch_size == (*env.batch_size, steps)
                assert rollout.names[-1] == "time"
                rollouts.append(rollout)
            found.append(rollouts)
    for rollouts in found[1:]:
        assert [differing(*pair) for pair in zip(rollouts, found[0], strict=True)] == [[]] * len(breaks)


@over_faces
async def test_keys_that_only_some_have(face: TorchFace) -> None:
    toys = face.toys
    makes = [functools.partial(toys.CountingEnv, 3), functools.partial(toys.CountingEnv, 3, adds_up=True)]
    async with face.open(2, makes) as env:
        td = await env.rand_step(await env.reset())
        assert "total" not in td
        assert "total" in td[1]
        assert td[1]["next", "total"].shape == (1,)
        assert td["next", "observation"].flatten().tolist() == [1, 1]
        assert "total" not in env.full_observation_spec
        rollout = await env.rollout(7, break_when_any_done=False)
        assert rollout.shape == (2, 7)
        assert rollout[1]["next", "total"].shape == (7, 1)


@over_quick_own_faces
async def test_an_action_that_does_not_fit_one_of_them(face: TorchFace) -> None:
    makes = [functools.partial(NestedCountingEnv, nested_dim=n) for n in (1, 3)]
    async with face.open(2, makes) as env:
        good = env.rand_action(await env.reset())
        bad = good.clone()
        bad[1]["data"]["action"] = torch.full((3,), 0.5)
        with pytest.raises(SpecMismatchError, match=r"\('data', 'action'\).*int64.*float32"):
            await env.step(bad)
        missing = LazyStackedTensorDict(good[0].clone(), good[1].exclude(("data", "action")), stack_dim=0)
        with pytest.raises(SpecMismatchError, match="action"):
            await env.step(missing)
        td = await env.step(good)
        assert [int(td[i]["next", "data", "observation"].max()) for i in range(2)] == [1, 1]


# -- different callables, the same specs -----------------------------------------------------------------------


class OtherCountingEnv(CountingEnv):
    """Another class with the same specs."""


@over_own_faces
async def test_different_callables_with_the_same_specs_are_dense(face: TorchFace) -> None:
    makes = [lambda: CountingEnv(2), functools.partial(OtherCountingEnv, 4), CountingEnv]
    async with face.open(3, makes) as env:
        td = await env.rand_step(await env.reset())
        assert isinstance(td, TensorDict)
        assert isinstance(td["next"], TensorDict)
        assert not isinstance(env.output_spec, StackedComposite)
        assert (await env.rollout(9)).shape == (3, 2)
    async with face.open(3, makes, share_individual_td=False) as env:
        assert isinstance(await env.reset(), TensorDict)


@pytest.mark.parametrize("toy", [Toy("CountingEnv", {}), Toy("NestedCountingEnv", {"nested_dim": 2})], ids=str)
@over_own_faces
async def test_stacks_for_those_who_want_them(face: TorchFace, toy: Toy) -> None:
    async with face.open(2, toy.factory(face.toys), share_individual_td=True) as env:
        td = await env.reset()
        assert isinstance(td, LazyStackedTensorDict)
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        assert isinstance(td["next"], LazyStackedTensorDict)
        assert isinstance(root, LazyStackedTensorDict)
        assert (await env.rollout(3)).shape == (2, 3)


@over_quick_own_faces
async def test_what_cannot_be_stacked_and_must_be(face: TorchFace) -> None:
    for makes in (BATCHES["keys"], BATCHES["shapes"], BATCHES["dtypes"]):
        with pytest.raises(ValueError, match="share_individual_td"):
            async with face.open(len(makes), makes, share_individual_td=False):
                pass


@over_quick_own_faces
async def test_batch_sizes_must_agree(face: TorchFace) -> None:
    makes = [functools.partial(CountingEnv, batch_size=size) for size in ((), (2,))]
    with pytest.raises(ValueError, match=re.escape("(2,)")):
        async with face.open(2, makes):
            pass


@over_quick_own_faces
async def test_devices_that_differ(face: TorchFace) -> None:
    makes = [functools.partial(CountingEnv, device=device) for device in ("cpu", "meta")]
    with pytest.raises(ValueError, match="more than one device"):
        async with face.open(2, makes):
            pass
    makes = [functools.partial(CountingEnv, device=device) for device in ("cpu", None)]
    async with face.open(2, makes, device="cpu") as env:
        td = await env.rand_step(await env.reset())
        assert td.device == torch.device("cpu")
        assert env.device == torch.device("cpu")
        assert td["next"].device == torch.device("cpu")


# -- Gymnasium envs among them ---------------------------------------------------------------------------------


@over_own_faces
async def test_gymnasium_envs_among_torch_envs(face: TorchFace) -> None:
    makes: list[Any] = ["CartPole-v1", CountingEnv, lambda: gym.make("MountainCarContinuous-v0"), "CartPole-v1"]
    async with face.open(4, makes) as env:
        await env.set_seed(0)
        td = await env.reset()
        assert [tuple(td[i]["observation"].shape) for i in range(4)] == [(4,), (1,), (2,), (4,)]
        assert "truncated" in td[0]
        assert "truncated" not in td[1]
        rollout = await env.rollout(40, break_when_any_done=False)
        assert rollout.shape == (4, 40)
        assert rollout[1]["next", "observation"].flatten().tolist() == [1, 2, 3, 4, 5] * 8
        again = await env.rollout(3)
        assert again[2]["next", "reward"].shape == (3, 1)
        td = await env.reset()
        td["_reset"] = mask_of(4, [1], 1)
        kept = td[0]["observation"].clone()
        assert torch.equal((await env.reset(td))[0]["observation"], kept)


@over_own_faces
async def test_wrapped_gymnasium_envs(face: TorchFace) -> None:
    async with face.open(2, functools.partial(GymEnv, "CartPole-v1")) as env:
        await env.set_seed(0)
        td = await env.reset()
        assert isinstance(td, TensorDict)
        expected = [gym.make("CartPole-v1").reset(seed=seed)[0].tolist() for seed in (0, 795726461)]
        assert td["observation"].tolist() == expected
        td = env.rand_action(td)
        assert td["action"].shape == (2, 2)
        rollout = await env.rollout(60, break_when_any_done=False)
        assert rollout.shape == (2, 60)
        assert rollout["next", "done"].any()
        ended = rollout["next", "done"][:, :-1].squeeze(-1)
        assert not torch.equal(rollout["next", "observation"][:, :-1][ended], rollout["observation"][:, 1:][ended])
        going = ~ended
        assert torch.equal(rollout["next", "observation"][:, :-1][going], rollout["observation"][:, 1:][going])


# -- objects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(), (2,)], ids=str)
@over_faces
async def test_objects_go_both_ways(face: TorchFace, size: tuple[int, ...]) -> None:
    if size and not of_own(face):
        pytest.skip("TorchRL's SerialEnv stacks objects of batched envs otherwise")
    async with face.open(2, face.toys.NonTensorEnv, {"batch_size": size, "max_steps": 3}) as env:
        td = await env.reset()
        objects = [[{"move": (row, place)} for place in range(2)] if size else {"move": row} for row in range(2)]
        rows = [
            NonTensorStack(*map(NonTensorData, own), stack_dim=0) if size else NonTensorData(own) for own in objects
        ]
        td["action"] = torch.stack(rows)
        td = await env.step(td)
        records = td.get(("next", "record")).tolist()
        flat = [record for own in records for record in (own if size else [own])]
        expected = [action for own in objects for action in (own if size else [own])]
        assert flat == [{"steps": 1, "action": action} for action in expected]
        assert td.get(("next", "text")).batch_size == env.batch_size
        td, root = await env.step_and_maybe_reset(env.rand_action(face.library.step_mdp(td)))
        td, root = await env.step_and_maybe_reset(env.rand_action(root))
        texts = td.get(("next", "text")).tolist()
        assert {text for own in texts for text in (own if size else [own])} == {"step 3"}
        texts = root.get("text").tolist()
        assert {text for own in texts for text in (own if size else [own])} == {"step 0"}


class Payload:
    """An object of a class of one's own."""

    def __init__(self, number: int) -> None:
        self.number = number


@over_own_faces
async def test_objects_are_not_shared(face: TorchFace) -> None:
    async with face.open(2, functools.partial(NonTensorEnv, 9)) as env:
        td = await env.reset()
        action = {"list": [1]}
        td["action"] = NonTensorStack(NonTensorData(action), NonTensorData(action))
        td = await env.step(td)
        first = td.get(("next", "record")).tolist()
        action["list"].append(2)
        first[0]["action"]["list"].append(3)
        td = await env.rand_step(face.library.step_mdp(td))
        assert first[1]["action"]["list"] == [1]
        assert [record["action"] for record in td.get(("next", "record")).tolist()] == ["go", "go"]
        td["action"] = NonTensorStack(NonTensorData(Payload(7)), NonTensorData(None))
        td = await env.step(td)
        found = [record["action"] for record in td.get(("next", "record")).tolist()]
        assert found[0].number == 7
        assert found[1] is None


@over_own_faces
async def test_large_objects_both_ways_at_once(face: TorchFace) -> None:
    size = 1_000_000  # more than any pipe or socket holds
    async with face.open(2, functools.partial(NonTensorEnv, 2, padding=size)) as env:
        td = await env.reset()
        for _ in range(3):
            td["action"] = NonTensorStack(*[NonTensorData(letter * size) for letter in "ab"])
            td, root = await env.step_and_maybe_reset(td)
            records, texts = td.get(("next", "record")).tolist(), td.get(("next", "text")).tolist()
            assert [record["action"] for record in records] == ["a" * size, "b" * size]
            assert [len(text) for text in texts] == [size, size]
            td = root


@over_quick_own_faces
async def test_no_object_for_an_env_is_an_error(face: TorchFace) -> None:
    async with face.open(2, NonTensorEnv) as env:
        td = await env.reset()
        with pytest.raises(SpecMismatchError, match="'action'"):
            await env.step(td.clone())
        with pytest.raises(SpecMismatchError, match="'action'"):
            await env.step(td.clone().set("action", torch.zeros(2)))
        assert list((await env.step(env.rand_action(td)))["next", "text"]) == ["step 1", "step 1"]


@over_quick_own_faces
async def test_objects_in_rollouts(face: TorchFace) -> None:
    async with face.open(2, NonTensorEnv, [{"max_steps": 2}, {"max_steps": 3}]) as env:
        rollout = await env.rollout(4, break_when_any_done=False)
        texts = rollout.get(("next", "text")).tolist()
        assert texts == [["step 1", "step 2", "step 1", "step 2"], ["step 1", "step 2", "step 3", "step 1"]]
        rollout = await env.rollout(4, break_when_all_done=True)
        assert rollout.get(("next", "text")).tolist() == [
            ["step 1", "step 2", "step 2"],
            ["step 1", "step 2", "step 3"],
        ]


# -- shapes that vary ----------------------------------------------------------------------------------------------


@over_faces
async def test_sizes_that_vary(face: TorchFace) -> None:
    kwargs = [{"first_rows": rows, "max_steps": 4} for rows in (0, 2)]
    async with face.open(2, face.toys.DynamicShapeEnv, kwargs) as env:
        assert env.full_observation_spec["observation"].shape == (2, -1, 2)
        td = await env.reset()
        sizes = [tuple(td[i]["observation"].shape for i in range(2))]
        for _ in range(4):
            td, root = await env.step_and_maybe_reset(env.rand_action(td))
            sizes.append(tuple(td[i]["next", "observation"].shape for i in range(2)))
            td = root
        assert [(first[0], second[0]) for first, second in sizes] == [(1, 3), (2, 4), (3, 1), (4, 2), (1, 3)]
        assert [tuple(root[i]["observation"].shape) for i in range(2)] == [(1, 2), (3, 2)]
        assert all(not root[i]["observation"].any() for i in range(2))
        assert not root["done"].any()
        rollout = await env.rollout(6, break_when_any_done=False, return_contiguous=False)
        assert rollout.shape == (2, 6)
        assert rollout[1, 0]["next", "observation"].shape == (4, 2)


@over_quick_own_faces
async def test_masks_over_sizes_that_vary(face: TorchFace) -> None:
    async with face.open(2, DynamicShapeEnv, [{"first_rows": rows} for rows in (0, 2)]) as env:
        td = await env.rand_step(await env.reset())
        td = await env.reset(face.library.step_mdp(td).set("_reset", mask_of(2, [1], 1)))
        assert [tuple(td[i]["observation"].shape) for i in range(2)] == [(2, 2), (3, 2)]
        assert [float(td[i]["observation"].sum()) for i in range(2)] == [4.0, 0.0]
        td = await env.reset(TensorDict({"_reset": mask_of(2, [0], 1)}, [2]))
        assert [tuple(td[i]["observation"].shape) for i in range(2)] == [(1, 2), (3, 2)]


@over_quick_own_faces
async def test_buffers_for_sizes_that_vary(face: TorchFace) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with face.open(2, DynamicShapeEnv, use_buffers=True) as env:
            td = await env.rand_step(await env.reset())
            assert isinstance(td, LazyStackedTensorDict)
    assert any("use_buffers" in str(each.message) for each in caught)
    for use_buffers in (None, False):
        async with face.open(2, DynamicShapeEnv, use_buffers=use_buffers) as env:
            assert (await env.rollout(3, return_contiguous=False)).shape == (2, 3)


@pytest.mark.parametrize("use_buffers", [None, True, False])
@pytest.mark.parametrize("toy", [Toy("CountingEnv", {"max_steps": 2}), Toy("NonTensorEnv", {"max_steps": 2})], ids=str)
@over_own_faces
async def test_with_and_without_buffers(face: TorchFace, toy: Toy, use_buffers: bool | None) -> None:
    reference = ByHand([toy.factory(face.toys)() for _ in range(2)])
    actions = [reference.rand_action() for _ in range(3)]
    async with face.open(2, toy.factory(face.toys), use_buffers=use_buffers) as env:
        found = await trajectory(env, actions)
    for one, other in zip(found, trajectory_by_hand(reference, actions), strict=True):
        assert differing(one, other) == []


class VaryingActionEnv(EnvBase):
    """Takes any number of numbers, and observes their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((-1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict(observation=torch.zeros(1))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict(observation=tensordict["action"].sum(0, keepdim=True), reward=torch.ones(1))

    def _set_seed(self, seed: int | None) -> None:
        pass


@over_quick_own_faces
async def test_actions_whose_sizes_vary(face: TorchFace) -> None:
    async with face.open(2, VaryingActionEnv) as env:
        td = await env.reset()
        actions = [torch.ones(2), torch.ones(5)]
        rows = [row.clone().set("action", action) for row, action in zip(td.unbind(0), actions, strict=True)]
        td = await env.step(LazyStackedTensorDict(*rows, stack_dim=0))
        assert td["next", "observation"].flatten().tolist() == [2, 5]
        rows[1]["action"] = torch.ones(2, 2)
        with pytest.raises(SpecMismatchError, match="'action'"):
            await env.step(LazyStackedTensorDict(*rows, stack_dim=0))


# -- nobody shares objects -----------------------------------------------------------------------------------------


class ReusingEnv(NonTensorEnv):
    """Observes the same dict each time, and changes it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.only: dict[str, Any] = {}

    def _observed(self) -> dict[str, Any]:
        self.only["steps"] = int(self.steps)
        return {**super()._observed(), "record": NonTensorData(self.only)}


@over_own_faces
async def test_an_object_that_an_env_reuses_stays_as_it_was(face: TorchFace) -> None:
    async with face.open(2, ReusingEnv, {"max_steps": 2}) as env:
        td = await env.reset()
        rows = [td]
        for _ in range(3):
            td, root = await env.step_and_maybe_reset(env.rand_action(td.clone()))
            rows += [td["next"], root]
            td = root
    assert [row.get("record").tolist()[1]["steps"] for row in rows] == [0, 1, 1, 2, 0, 1, 1]


@pytest.mark.parametrize("share", [None, True])
@over_quick_own_faces
async def test_changing_a_result_changes_no_other(face: TorchFace, share: bool | None) -> None:
    async with face.open(2, NonTensorEnv, share_individual_td=share) as env:
        td = await env.step(env.rand_action(await env.reset()))
        td.get(("next", "record")).tolist()[1]["steps"] = 99
        known = await env.reset(TensorDict({"_reset": mask_of(2, [0], 1)}, [2]))
        assert known.get("record").tolist()[1] == {"steps": 1, "action": "go"}
        stepped = await env.step(env.rand_action(known).set("_step", mask_of(2, [0])))
        stepped.get(("next", "record")).tolist()[1]["steps"] = 77
        assert known.get("record").tolist()[1] == {"steps": 1, "action": "go"}
    async with face.open(2, DynamicShapeEnv) as env:
        td = await env.reset()
        td[1]["observation"].fill_(5)
        known = await env.reset(TensorDict({"_reset": mask_of(2, [0], 1)}, [2]))
        assert not known[1]["observation"].any()
        stepped = await env.step(env.rand_action(known).set("_step", mask_of(2, [0])))
        stepped[1]["next", "observation"].fill_(6)
        assert not known[1]["observation"].any()


class Uncopyable:
    """An object that neither travels nor can be copied."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock


@pytest.mark.parametrize("face", faces("serial", "async-serial", torchrl=False))
async def test_what_cannot_be_copied_is_shared_where_that_is_possible(face: TorchFace) -> None:
    async with face.open(2, NonTensorEnv) as env:
        td = await env.reset()
        one = Uncopyable(threading.Lock())
        td["action"] = NonTensorStack(NonTensorData(one), NonTensorData(None))
        td = await env.step(td)
        assert td.get(("next", "record")).tolist()[0]["action"] is one


@over_quick_own_faces
async def test_batches_of_batches_with_objects_and_more(face: TorchFace) -> None:
    request = TensorDict({"_reset": mask_of(2, [0], 2, 1)}, [2, 2])
    request["_reset"][0, 1] = False
    many = [{"max_steps": 2}, {"max_steps": 3}]
    async with face.open(2, lambda: SerialEnv(2, NonTensorEnv, create_env_kwargs=many)) as env:
        rollout = await env.rollout(3, break_when_any_done=False)
        assert rollout.get(("next", "text"))[1].tolist() == [
            ["step 1", "step 2", "step 1"],
            ["step 1", "step 2", "step 3"],
        ]
        await env.rand_step(await env.reset())
        assert (await env.reset(request.clone())).get("text").tolist() == [["step 0", "step 1"], ["step 1", "step 1"]]
    async with face.open(2, lambda: SerialEnv(2, BATCHES["keys"][:2])) as env:
        rollout = await env.rollout(7, break_when_any_done=False)
        assert rollout.shape == (2, 2, 7)
        assert rollout[0, 1]["total"].shape == (7, 1)
        await env.rand_step(await env.reset())
        assert (await env.reset(request.clone()))["observation"].squeeze(-1).tolist() == [[0, 1], [1, 1]]
    async with face.open(2, lambda: SerialEnv(2, DynamicShapeEnv)) as env:
        rollout = await env.rollout(4, break_when_any_done=False, return_contiguous=False)
        assert rollout[0, 1, 2]["observation"].shape == (3, 2)
    async with face.open(2, lambda: SerialEnv(2, HeterogeneousCountingEnv)) as env:
        rollout = await env.rollout(7, break_when_any_done=False)
        assert rollout[1, 1]["lazy"][:, 2]["observation"].shape == (7, 3)


def test_masks_that_only_some_envs_have_a_place_for_are_refused() -> None:
    make = [lambda: NestedCountingEnv(name="data"), lambda: NestedCountingEnv(name="other")]
    with SerialEnv(2, make) as env:
        td = env.reset()
        _, td = env.step_and_maybe_reset(env.rand_action(td))
        td[0].set(("data", "_reset"), torch.ones_like(td[0]["data", "done"]))
        with pytest.raises(ValueError, match="use one mask at the root"):
            env.reset(td)
        del td[0]["data", "_reset"]
        mask = torch.tensor([True, False])
        found = env.reset(td.set("_reset", mask))
        assert (found[0]["data", "observation"] == 0).all()
        assert (found[1]["other", "observation"] == 1).all()
