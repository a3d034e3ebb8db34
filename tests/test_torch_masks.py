"""Resets and steps of some torch envs, and of parts of them: what begins anew, what stays, and what the others keep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch_batches import Toy, differing, faces, mask_of, of_own
from torch_faces import OWN_TORCH_FACES, Driver, TorchFace

from aioenvs.errors import SpecMismatchError
from aioenvs.testing import CountingEnv, HeterogeneousCountingEnv, MultiKeyCountingEnv, NestedCountingEnv

SIZES = ((), (1,), (4,), (32, 5))
over_sizes = pytest.mark.parametrize("size", SIZES, ids=str)
over_faces = pytest.mark.parametrize("face", faces())
over_own_faces = pytest.mark.parametrize("face", OWN_TORCH_FACES)
over_quick_faces = pytest.mark.parametrize("face", faces("serial", "thread", "async-packed"))
over_quick_own_faces = pytest.mark.parametrize("face", faces("serial", "thread", "async-packed", torchrl=False))


async def stepped(env: Driver, face: TorchFace, steps: int) -> TensorDictBase:
    """The root after a reset and so many steps."""
    td = await env.reset()
    for _ in range(steps):
        td = face.library.step_mdp(
            await env.step(env.rand_action(td)), action_keys=env.action_keys, reward_keys=env.reward_keys
        )
    return td


def counts(td: TensorDictBase) -> Any:
    return td["observation"].squeeze(-1).tolist()


class CallsEnv(CountingEnv):
    """Counts how often it was reset and stepped, and keeps the masks that it was shown."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.resets, self.steps_taken = 0, 0
        self.masks: list[Any] = []

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.resets += 1
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.masks.append(mask if mask is None else mask.tolist())
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps_taken += 1
        return super()._step(tensordict)


# -- resets of some ----------------------------------------------------------------------------------------


@over_sizes
@over_quick_faces
async def test_rows_that_a_mask_names_begin_anew(face: TorchFace, size: tuple[int, ...]) -> None:
    async with face.open(3, face.toys.CountingEnv, {"batch_size": size, "max_steps": 90}) as env:
        td = await stepped(env, face, 3)
        td["observation"] += 100  # what the td says is what stays
        td["mine"] = torch.arange(3).reshape(3, *[1] * len(size)).expand(3, *size)
        mask = torch.zeros(3, *size, 1, dtype=torch.bool)
        mask[1] = True
        if size:
            mask[0].view(-1)[0] = True
        td["_reset"] = mask
        expected = torch.where(mask, 0, td["observation"])
        root = await env.reset(td)
        assert torch.equal(root["observation"], expected)
        assert root["observation"].shape == (3, *size, 1)
        assert "_reset" not in root
        assert torch.equal(root["mine"], td["mine"])
        assert root.batch_size == env.batch_size
        after = (await env.rand_step(root))["next", "observation"]
        assert torch.equal(after, torch.where(mask, 1, 4))


@pytest.mark.parametrize("shape", [(), (1,)], ids=["batch", "done"])
@over_sizes
@over_quick_own_faces
async def test_absent_keys_keep_what_is_known(face: TorchFace, size: tuple[int, ...], shape: tuple[int, ...]) -> None:
    async with face.open(3, CountingEnv, {"batch_size": size, "max_steps": 90, "adds_up": True}) as env:
        td = await stepped(env, face, 2)
        total = td["total"]
        mask = mask_of(3, [2], *size, *shape)
        root = await env.reset(TensorDict({"_reset": mask}, (3, *size)))
        whole = mask.reshape(3, *size, 1)
        assert torch.equal(root["observation"], torch.where(whole, 0, 2))
        assert torch.equal(root["total"], torch.where(whole, 0, total))
        assert not root["done"].any()
        assert set(root.keys()) == {"observation", "total", "done", "terminated"}
        root, _ = await env.step_and_maybe_reset(env.rand_action(root))
        again = await env.reset(TensorDict({"_reset": mask_of(3, [0], *size, *shape)}, (3, *size)))
        assert torch.equal(again["observation"][1:], root["next", "observation"][1:])


@over_quick_own_faces
async def test_only_those_are_called_each_with_its_part_of_the_mask(face: TorchFace) -> None:
    async with face.open(3, CallsEnv, {"batch_size": (2,), "max_steps": 90}) as env:
        td = await stepped(env, face, 1)
        td["_reset"] = torch.tensor([[[False], [True]], [[False], [False]], [[True], [True]]])
        td = await env.reset(td)
        assert await env.get_attr("resets") == [2, 1, 2]
        assert (await env.get_attr("masks"))[0][1] == [[False], [True]]
        assert counts(td) == [[1, 0], [1, 1], [0, 0]]
        before = td.clone()
        td["_reset"] = torch.zeros(3, 2, 1, dtype=torch.bool)
        result = await env.reset(td)
        assert await env.get_attr("resets") == [2, 1, 2]
        assert differing(result.exclude("_reset"), before) == []
        assert "_reset" not in result
        td["_reset"] = torch.ones(3, 2, 1, dtype=torch.bool)
        assert counts(await env.reset(td)) == [[0, 0]] * 3
        assert await env.get_attr("resets") == [3, 2, 3]


@over_faces
async def test_a_mask_of_none_changes_nothing(face: TorchFace) -> None:
    async with face.open(2, face.toys.CountingEnv) as env:
        td = await stepped(env, face, 2)
        td["_reset"] = torch.zeros(2, 1, dtype=torch.bool)
        root = await env.reset(td)
        assert counts(root) == [2, 2]
        assert counts((await env.rand_step(root))["next"]) == [3, 3]


@over_faces
async def test_kwargs_go_to_those_that_are_reset(face: TorchFace) -> None:
    async with face.open(3, face.toys.CountingEnv, {"max_steps": 90}) as env:
        td = await stepped(env, face, 1)
        td["_reset"] = mask_of(3, [0, 2], 1)
        each = [{"start": 10}, {"start": 20}, {"start": 30}]
        assert counts(await env.reset(td, list_of_kwargs=each)) == [10, 1, 30]
        assert each == [{"start": 10}, {"start": 20}, {"start": 30}]
        assert counts(await env.reset(start=5)) == [5, 5, 5]


def nested_mask(env: Driver, chosen: Sequence[tuple[int, ...]]) -> TensorDictBase:
    """A request to reset some elements of a NestedCountingEnv."""
    mask = torch.zeros(*env.full_done_spec["data", "done"].shape, dtype=torch.bool)
    for place in chosen:
        mask[place] = True
    data = TensorDict({"_reset": mask}, env.full_done_spec["data"].shape)
    return TensorDict({"data": data}, env.batch_size)


@pytest.mark.parametrize("size", [(), (1,), (4,)], ids=str)
@over_quick_own_faces
async def test_nested_masks(face: TorchFace, size: tuple[int, ...]) -> None:
    async with face.open(2, NestedCountingEnv, {"nested_dim": 3, "batch_size": size, "max_steps": 90}) as env:
        assert env.reset_keys == [("data", "_reset")]
        td = await stepped(env, face, 2)
        request = nested_mask(env, [(1, *[0] * len(size), 2)])
        mask = request["data", "_reset"]
        td["data", "observation"] += 50
        root = await env.reset(td.clone().update(request))
        assert torch.equal(root["data", "observation"], torch.where(mask, 0, 52))
        assert ("data", "_reset") not in root.keys(True)
        td = await env.rand_step(root)
        known = torch.where(mask, 1, 3)
        assert torch.equal(td["next", "data", "observation"], known)
        other = nested_mask(env, [(0, *[0] * len(size), 1)])
        root = await env.reset(other)
        assert torch.equal(root["data", "observation"], torch.where(other["data", "_reset"], 0, known))


@over_quick_own_faces
async def test_many_masks_all_or_none(face: TorchFace) -> None:
    async with face.open(2, MultiKeyCountingEnv, {"max_steps": 90, "root_done": False}) as env:
        assert env.reset_keys == [("left", "_reset"), ("right", "deep", "_reset")]
        td = await stepped(env, face, 2)
        td["left", "_reset"] = torch.zeros(2, 2, 1, dtype=torch.bool)
        td["left", "_reset"][0, 1] = True
        with pytest.raises(ValueError, match=r"\('right', 'deep', '_reset'\)"):
            await env.reset(td.clone())
        td["right", "deep", "_reset"] = torch.zeros(2, 3, 1, dtype=torch.bool)
        td["right", "deep", "_reset"][0, 2] = True
        td = await env.reset(td)
        assert td["left", "observation"].squeeze(-1).tolist() == [[2, 0], [2, 2]]
        assert td["right", "deep", "observation"].squeeze(-1).tolist() == [[2, 2, 0], [2, 2, 2]]
        assert not any("_reset" in key for key in td.keys(True))
        td = (await env.rand_step(td))["next"]
        assert td["left", "observation"].squeeze(-1).tolist() == [[3, 1], [3, 3]]
    async with face.open(2, MultiKeyCountingEnv, {"max_steps": 90}) as env:
        assert env.reset_keys == ["_reset", ("left", "_reset"), ("right", "deep", "_reset")]
        td = await stepped(env, face, 2)
        td["_reset"] = mask_of(2, [1], 1)
        td = await env.reset(td)
        assert td["observation"].flatten().tolist() == [2, 0]
        assert td["left", "observation"].squeeze(-1).tolist() == [[2, 2], [0, 0]]
        td = (await env.rand_step(td))["next"]
        assert td["right", "deep", "observation"].squeeze(-1).tolist() == [[3, 3, 3], [1, 1, 1]]


@over_quick_own_faces
async def test_agents_with_masks_of_their_own(face: TorchFace) -> None:
    async with face.open(2, HeterogeneousCountingEnv, {"max_steps": 90, "nest_done": True}) as env:
        assert env.reset_keys == [("lazy", "_reset")]
        td = await stepped(env, face, 2)
        td["lazy", "_reset"] = mask_of(2, [1], 3, 1)
        td = await env.reset(td)
        assert [[float(agent["observation"][0]) for agent in own.unbind(0)] for own in td["lazy"].unbind(0)] == [
            [2.0] * 3,
            [0.0] * 3,
        ]


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (3, 4, 2, 1), (4,)], ids=str)
@over_quick_own_faces
async def test_masks_of_another_shape_are_refused(face: TorchFace, shape: tuple[int, ...]) -> None:
    async with face.open(3, CallsEnv, {"batch_size": (4,)}) as env:
        td = await stepped(env, face, 1)
        for mask in (torch.ones(shape, dtype=torch.bool), torch.ones(3, 4, 1)):
            bad = TensorDict(dict(td.items()), [])
            bad["_reset"] = mask
            bad = TensorDict._new_unsafe(dict(bad.items()), batch_size=td.batch_size)
            with pytest.raises((ValueError, RuntimeError)):
                await env.reset(bad)
        assert await env.get_attr("resets") == [1, 1, 1]
        assert counts((await env.rand_step(td))["next"]) == [[2] * 4] * 3


class DoneAtOnceEnv(CountingEnv):
    """Its second episode is over when it begins."""

    began = 0

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super()._reset(tensordict, **kwargs)
        self.began += 1
        if self.began == 2:
            out["done"].fill_(True)
        return out


@pytest.mark.parametrize("partial", [False, True])
@over_quick_own_faces
async def test_done_after_a_reset_is_an_error(face: TorchFace, partial: bool) -> None:
    async with face.open(2, [CountingEnv, DoneAtOnceEnv]) as env:
        td = await stepped(env, face, 1)
        if partial:
            td["_reset"] = mask_of(2, [1], 1)
        with pytest.raises(RuntimeError, match=re.escape("(partially) True after a call to reset")):
            await env.reset(td)
        assert counts(await env.reset()) == [0, 0]


@over_quick_own_faces
async def test_rows_that_are_not_reset_may_be_done(face: TorchFace) -> None:
    async with face.open(2, CountingEnv, [{"max_steps": 1}, {"max_steps": 9}]) as env:
        td = await stepped(env, face, 1)
        assert td["done"].flatten().tolist() == [True, False]
        td["_reset"] = mask_of(2, [1], 1)
        td = await env.reset(td)
        assert td["done"].flatten().tolist() == [True, False]
        assert counts(td) == [1, 0]


@pytest.mark.parametrize("key", ["observation", "done"])
@over_quick_own_faces
async def test_values_to_keep_must_fit(face: TorchFace, key: str) -> None:
    async with face.open(2, CallsEnv) as env:
        td = await stepped(env, face, 1)
        for bad in (td[key].float(), td[key].unsqueeze(-1)):
            for mask, command in (("_reset", "reset"), ("_step", "step")):
                given = env.rand_action(td.clone()).set(key, bad).set(mask, mask_of(2, [0], 1))
                with pytest.raises(SpecMismatchError, match=key):
                    await getattr(env, command)(given)
        assert await env.get_attr("resets") == [1, 1]
        assert await env.get_attr("steps_taken") == [1, 1]


# -- steps of some ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["(N,)", "batch", "done"])
@over_sizes
@over_quick_own_faces
async def test_only_some_step(face: TorchFace, size: tuple[int, ...], shape: str) -> None:
    sizes = {"(N,)": (), "batch": size, "done": (*size, 1)}[shape]
    if shape == "(N,)" and size:
        pytest.skip("a TensorDict has no entry of fewer dims than it has itself")
    async with face.open(3, CallsEnv, {"batch_size": size, "max_steps": 90}) as env:
        td = env.rand_action(await stepped(env, face, 2))
        td["observation"] += 100
        td["_step"] = mask_of(3, [0, 2], *sizes)
        td = await env.step(td)
        assert await env.get_attr("steps_taken") == [3, 2, 3]
        assert [set(row) for row in td["next", "observation"].reshape(3, -1).tolist()] == [{3}, {102}, {3}]
        assert [set(row) for row in td["next", "reward"].reshape(3, -1).tolist()] == [{1.0}, {0.0}, {1.0}]
        assert td["next", "reward"].shape == (3, *size, 1)
        assert not td["next", "done"].any()


@over_faces
async def test_all_or_none_step(face: TorchFace) -> None:
    async with face.open(2, face.toys.CountingEnv, {"max_steps": 3}) as env:
        td = env.rand_action(await env.reset())
        td = await env.step(td.set("_step", torch.ones(2, dtype=torch.bool)))
        assert counts(td["next"]) == [1, 1]
        assert td["next", "reward"].flatten().tolist() == [1, 1]
        td = env.rand_action(face.library.step_mdp(td))
        if not of_own(face):
            return
        td["done"][1] = True
        td = await env.step(td.set("_step", torch.zeros(2, dtype=torch.bool)))
        assert counts(td["next"]) == [1, 1]
        assert td["next", "reward"].flatten().tolist() == [0, 0]
        assert td["next", "done"].flatten().tolist() == [False, True]
        assert counts((await env.rand_step(await env.reset()))["next"]) == [1, 1]


@over_quick_own_faces
async def test_a_mask_of_parts_of_an_env_is_refused(face: TorchFace) -> None:
    async with face.open(2, CallsEnv, {"batch_size": (3,)}) as env:
        td = env.rand_action(await env.reset())
        td["_step"] = torch.tensor([[True, True, True], [True, False, False]])
        with pytest.raises(ValueError, match=r"whole envs.*env 1"):
            await env.step(td)
        td["_step"] = torch.ones(2, 3)
        with pytest.raises(ValueError, match="_step"):
            await env.step(td)
        assert await env.get_attr("steps_taken") == [0, 0]


MANY = [
    Toy("NestedCountingEnv", {"nested_dim": 2, "max_steps": 9}),
    Toy("NestedCountingEnv", {"nested_dim": 2, "max_steps": 9, "batch_size": (4,)}),
    Toy("MultiKeyCountingEnv", {"max_steps": 9}),
    Toy("MultiKeyCountingEnv", {"max_steps": 9, "root_done": False, "batch_size": (4,)}),
    Toy("HeterogeneousCountingEnv", {"max_steps": 9, "exclusive_keys": True}),
    Toy("HeterogeneousCountingEnv", {"max_steps": 9, "nest_done": True, "batch_size": (4,)}),
    Toy("NonTensorEnv", {"max_steps": 9}),
    Toy("NonTensorEnv", {"max_steps": 9, "batch_size": (4,)}),
    Toy("DynamicShapeEnv", {"max_steps": 9}),
    Toy("StateEnv", {"max_steps": 9}),
]


def rewards(td: TensorDictBase, keys: Sequence[Any]) -> list[float]:
    """All rewards of one env."""
    found: list[float] = []
    for key in keys:
        node = td
        for name in key[:-1] if isinstance(key, tuple) else ():
            node = node.get(name)
        parts = node.unbind(node.stack_dim) if hasattr(node, "tensordicts") else [node]
        for part in parts:
            found += part.get(key[-1] if isinstance(key, tuple) else key).flatten().tolist()
    return found


@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset"])
@pytest.mark.parametrize("toy", MANY, ids=str)
@over_quick_own_faces
async def test_who_does_not_step_repeats_all_that_it_has(face: TorchFace, toy: Toy, command: str) -> None:
    async with face.open(3, toy.factory(face.toys)) as env:
        td = await stepped(env, face, 1)
        before = td.clone()
        td = env.rand_action(td)
        td["_step"] = mask_of(3, [0], *env.batch_size[1:])
        td = await getattr(env, command)(td)
        td, root = (td, None) if command == "step" else td
        keys = [*env.observation_keys, *env.done_keys]
        for row in (1, 2):
            kept, following = before[row], td["next"][row].exclude(*env.reward_keys)
            assert differing(following, kept) == []
            assert not any(rewards(td["next"][row], env.reward_keys))
            if root is not None:
                assert differing(root[row], kept) == []
        assert differing(td["next"][0].exclude(*env.reward_keys), before[0]) != []
        assert keys
        assert td["next"].batch_size == env.batch_size


# -- resets after the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@over_sizes
@over_quick_own_faces
async def test_the_true_last_observation_and_a_new_root(face: TorchFace, size: tuple[int, ...], in_place: bool) -> None:
    kwargs = [{"max_steps": n, "in_place": in_place, "batch_size": size} for n in (2, 3)]
    async with face.open(2, CountingEnv, kwargs) as env:
        td = await env.reset()
        results = []
        for _ in range(4):
            td, root = await env.step_and_maybe_reset(env.rand_action(td))
            results.append((td["next"], root.copy()))
            td = root
    for row, (ends, begins) in enumerate([([1, 2, 1, 2], [1, 0, 1, 0]), ([1, 2, 3, 1], [1, 2, 0, 1])]):
        for (following, root), end, begin in zip(results, ends, begins, strict=True):
            assert (following["observation"][row] == end).all()
            assert (root["observation"][row] == begin).all()
            assert (following["done"][row] == (end == (2, 3)[row])).all()
            assert not root["done"].any()
            assert not root["terminated"].any()
            assert set(root.keys()) == {"observation", "done", "terminated"}


@over_own_faces
async def test_a_part_of_an_env_ends_alone(face: TorchFace) -> None:
    async with face.open(2, CountingEnv, {"max_steps": 3, "batch_size": (2,)}) as env:
        td = await stepped(env, face, 1)
        td["_reset"] = torch.tensor([[[True], [False]], [[False], [False]]])
        td = await env.reset(td)
        assert counts(td) == [[0, 1], [1, 1]]
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        td, root = await env.step_and_maybe_reset(env.rand_action(root))
        assert counts(td["next"]) == [[2, 3], [3, 3]]
        assert td["next", "done"].squeeze(-1).tolist() == [[False, True], [True, True]]
        assert counts(root) == [[2, 0], [0, 0]]
        assert not root["done"].any()
        td, root = await env.step_and_maybe_reset(env.rand_action(root))
        assert counts(td["next"]) == [[3, 1], [1, 1]]
        assert counts(root) == [[0, 1], [1, 1]]


@over_own_faces
async def test_nested_ends_without_one_at_the_root(face: TorchFace) -> None:
    toy = Toy("MultiKeyCountingEnv", {"max_steps": (90, 3, 2), "root_done": False})
    async with face.open(2, toy.factory(face.toys)) as env:
        td = await env.reset()
        rows = []
        for _ in range(3):
            td, root = await env.step_and_maybe_reset(env.rand_action(td))
            rows.append((td["next"], root))
            td = root
        lefts = [(n["left", "observation"][0, 0].item(), r["left", "observation"][0, 0].item()) for n, r in rows]
        deep = ("right", "deep", "observation")
        rights = [(n[deep][1, 2].item(), r[deep][1, 2].item()) for n, r in rows]
        assert lefts == [(1, 1), (2, 2), (3, 0)]
        assert rights == [(1, 1), (2, 0), (1, 1)]
        assert "_reset" not in rows[-1][1]["left"]


@over_faces
async def test_a_root_without_an_end_hides_those_inside(face: TorchFace) -> None:
    toy = Toy("MultiKeyCountingEnv", {"max_steps": (3, 1, 2)})
    async with face.open(2, toy.factory(face.toys)) as env:
        td = await env.reset()
        for step in (1, 2):
            td, root = await env.step_and_maybe_reset(env.rand_action(td))
            assert td["next", "left", "done"].all()
            assert (root["left", "observation"] == step).all()
            td = root
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        assert (td["next", "left", "observation"] == 3).all()
        assert not root["left", "observation"].any()
        assert not root["right", "deep", "done"].any()


@over_quick_own_faces
async def test_text_under_masks(face: TorchFace) -> None:
    async with face.open(3, face.toys.NonTensorEnv, {"max_steps": 2}) as env:
        td = await stepped(env, face, 1)
        td["text"] = NonTensorStack("mine 0", "mine 1", "mine 2")
        td["_reset"] = mask_of(3, [1], 1)
        td = await env.reset(td)
        assert list(td["text"]) == ["mine 0", "step 0", "mine 2"]
        assert [record["steps"] for record in td["record"]] == [1, 0, 1]
        td = await env.reset(TensorDict({"_reset": mask_of(3, [0], 1)}, [3]))
        assert list(td["text"]) == ["step 0", "step 0", "step 1"]
        td, root = await env.step_and_maybe_reset(env.rand_action(td))
        assert list(td["next", "text"]) == ["step 1", "step 1", "step 2"]
        assert list(root["text"]) == ["step 1", "step 1", "step 0"]
        assert [record["action"] for record in root["record"]] == ["go", "go", None]
