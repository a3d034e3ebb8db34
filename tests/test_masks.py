"""Resets and steps of some envs: what the others keep, and what passes through."""

from typing import Any

import failing_envs as faults
import pytest
import torch
from faces import FACES, Face, acting, masked, observed
from failing_envs import CountingEnv, numbered
from space_envs import MarkedEnv
from tensordict import NonTensorData, NonTensorStack, TensorDict

from aioenvs import step_mdp

NUM_ENVS = 3
N = (NUM_ENVS,)
ACTIONS = [10, 20, 30]
SHAPES = [(NUM_ENVS,), (NUM_ENVS, 1)]
FLAGS = ("done", "terminated", "truncated")
LENGTHS = numbered(NUM_ENVS, {0: {"length": 2}, 2: {"length": 3}})

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
one_of_each = pytest.mark.parametrize("face", [FACES[1], FACES[2]], ids=lambda face: face.name)


def stamp(td: TensorDict) -> TensorDict:
    """A root with values that no env gave."""
    td = td.clone()
    td["observation"] = td["observation"] + 500
    td["agent", "count"] = td["agent", "count"] + 500
    td["word"] = NonTensorStack(*[NonTensorData(f"stamped {word}") for word in td["word"]])
    return td.exclude("next")


def rows(td: TensorDict) -> list[tuple[list[int], int, str]]:
    """All that a `MarkedEnv` observed, for each env."""
    return list(zip(td["observation"].tolist(), td["agent", "count"][:, 0].tolist(), td["word"], strict=True))


def flags(td: TensorDict) -> list[list[bool]]:
    return [td[flag].reshape(-1).tolist() for flag in FLAGS]


# -- reset -----------------------------------------------------------------------------------------------


@shapes
async def test_only_masked_envs_are_reset_and_the_others_keep_what_the_td_says(face: Face, shape: Any) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=LENGTHS) as env:
        td = await face.call(env.step, (await face.call(env.reset)).update(acting(ACTIONS)))
        root = stamp(step_mdp(td))
        root["done"][0] = root["terminated"][0] = True
        root["_reset"] = torch.tensor([False, True, False]).reshape(shape)
        before = root.clone()
        result = await face.call(env.reset, root)
    expected = rows(before)
    expected[1] = ([1, 2, 0, 0], 0, "1.2.0")
    assert rows(result) == expected
    assert flags(result) == [[True, False, False], [True, False, False], [False] * 3]
    assert (root == before).all()
    assert rows(root) == rows(before)


@shapes
async def test_keys_that_are_absent_keep_the_latest_values(face: Face, shape: Any) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=LENGTHS) as env:
        td = await face.call(env.reset)
        for _ in range(2):
            td = step_mdp(await face.call(env.step, td.update(acting(ACTIONS))))
        mask = TensorDict({"_reset": torch.tensor([False, True, False]).reshape(shape)}, N)
        result = await face.call(env.reset, mask)
        assert rows(result) == [([0, 1, 2, 20], 2, "0.1.2"), ([1, 2, 0, 0], 0, "1.2.0"), ([2, 1, 2, 60], 2, "2.1.2")]
        assert flags(result) == [[True, False, False], [True, False, False], [False] * 3]
        result = await face.call(env.reset, masked("_reset", NUM_ENVS, [0]))
        assert rows(result) == [([0, 2, 0, 0], 0, "0.2.0"), ([1, 2, 0, 0], 0, "1.2.0"), ([2, 1, 2, 60], 2, "2.1.2")]
        assert not any(map(any, flags(result)))


@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset"])
async def test_the_latest_values_are_known_after_a_failed_step_too(face: Face, command: str) -> None:
    kwargs = numbered(NUM_ENVS, {0: {"length": 2}, 1: {"fault": faults.raise_value_error, "at": (1, 2)}})
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=kwargs) as env:
        td = step_mdp(await face.call(env.step, (await face.call(env.reset)).update(acting(ACTIONS))))
        with pytest.raises(ValueError, match="hot"):
            await face.call(getattr(env, command), td.update(acting(ACTIONS)))
        result = await face.call(env.reset, masked("_reset", NUM_ENVS, [1]))
    first = ([0, 1, 2, 20], 2, "0.1.2") if command == "step" else ([0, 2, 0, 0], 0, "0.2.0")
    assert rows(result) == [first, ([1, 2, 0, 0], 0, "1.2.0"), ([2, 1, 2, 60], 2, "2.1.2")]
    assert flags(result)[0] == [command == "step", False, False]


@shapes
async def test_a_mask_of_all_envs_is_a_plain_reset(face: Face, shape: Any) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        td = await face.call(env.reset)
        td["observation"] += 500
        td["_reset"] = torch.ones(shape, dtype=torch.bool)
        result = await face.call(env.reset, td)
    assert observed(result) == [[number, 2, 0, 0] for number in range(NUM_ENVS)]
    assert set(result.keys()) == {"observation", *FLAGS}


@shapes
async def test_a_mask_of_no_env_returns_the_input_and_calls_nobody(face: Face, shape: Any) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        root = await face.call(env.reset)
        root["observation"] += 500
        root["mine"] = torch.ones(N)
        root["done"][1] = True
        given = root.clone().set("_reset", torch.zeros(shape, dtype=torch.bool))
        result = await face.call(env.reset, given)
        assert set(result.keys()) == set(root.keys())
        assert (result == root).all()
        again = await face.call(env.reset)
    assert [episode for _, episode, _, _ in observed(again)] == [2] * NUM_ENVS


BAD_MASKS = {
    "too long": torch.ones(NUM_ENVS + 1, dtype=torch.bool),
    "two columns": torch.ones(NUM_ENVS, 2, dtype=torch.bool),
    "a dim too many": torch.ones(NUM_ENVS, 1, 1, dtype=torch.bool),
    "integers": torch.ones(NUM_ENVS, dtype=torch.int64),
    "floats": torch.ones(NUM_ENVS, 1),
    "no tensor": NonTensorStack(*"abc"),
}


@one_of_each
@pytest.mark.parametrize("kind", BAD_MASKS)
async def test_masks_of_another_shape_or_dtype(face: Face, kind: str) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        root = await face.call(env.reset)
        mask = BAD_MASKS[kind]
        values = {"_reset": mask, "_step": mask} if kind != "too long" else {}
        if not values:  # a TensorDict of this size cannot hold it, except as an object
            values = {name: NonTensorData(mask, batch_size=N) for name in ("_reset", "_step")}
        with pytest.raises(ValueError, match=r"'_reset' must be a bool tensor of shape \(3,\) or \(3, 1\), got"):
            await face.call(env.reset, root.clone().set("_reset", values["_reset"]))
        for command in (env.step, env.step_and_maybe_reset):
            with pytest.raises(ValueError, match=r"'_step' must be a bool tensor of shape \(3,\) or \(3, 1\), got"):
                await face.call(command, acting(ACTIONS).set("_step", values["_step"]))
        td = await face.call(env.step, acting(ACTIONS))
    assert observed(td) == [[0, 1, 1, 10], [1, 1, 1, 20], [2, 1, 1, 30]]


@one_of_each
@pytest.mark.parametrize("size", [(2,), (4,), (), (3, 1)])
async def test_another_batch_size(face: Face, size: tuple[int, ...]) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        td = TensorDict({"action": torch.zeros(size, dtype=torch.int64)}, size)
        for command in (env.reset, env.step, env.step_and_maybe_reset):
            with pytest.raises(RuntimeError, match=r"Expected a tensordict with shape==env\.batch_size, got"):
                await face.call(command, td)
        with pytest.raises(TypeError, match="expected a TensorDict"):
            await face.call(env.step, {"action": td["action"]})


# -- step ------------------------------------------------------------------------------------------------


@shapes
async def test_only_masked_envs_step_and_the_others_repeat_the_root(face: Face, shape: Any) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        root = stamp(await face.call(env.reset))
        root["done"][2] = root["truncated"][2] = True
        expected = rows(root)
        expected[1] = ([1, 1, 1, 20], 1, "1.1.1")
        td = root.clone().update(acting(ACTIONS))
        td["_step"] = torch.tensor([False, True, False]).reshape(shape)
        result = await face.call(env.step, td)
        assert result is td
        assert rows(td["next"]) == expected
        assert flags(td["next"]) == flags(root) == [[False, False, True], [False] * 3, [False, False, True]]
        assert td["next", "reward"].tolist() == [[0.0], [1.0], [0.0]]
        td = await face.call(env.step, acting(ACTIONS))
    assert observed(td) == [[0, 1, 1, 10], [1, 1, 2, 40], [2, 1, 1, 30]]


@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset"])
async def test_a_root_without_observations_repeats_the_latest(face: Face, command: str) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        await face.call(env.reset)
        await face.call(env.step, acting(ACTIONS))
        td = acting(ACTIONS, only=[0])
        await face.call(getattr(env, command), td)
    assert rows(td["next"]) == [([0, 1, 2, 20], 2, "0.1.2"), ([1, 1, 1, 20], 1, "1.1.1"), ([2, 1, 1, 30], 1, "2.1.1")]


@shapes
async def test_a_step_mask_of_all_envs_is_a_plain_step(face: Face, shape: Any) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        td = (await face.call(env.reset)).update(acting(ACTIONS))
        td["observation"] += 500
        td["_step"] = torch.ones(shape, dtype=torch.bool)
        await face.call(env.step, td)
    assert observed(td) == [[0, 1, 1, 10], [1, 1, 1, 20], [2, 1, 1, 30]]
    assert td["next", "reward"].tolist() == [[1.0]] * NUM_ENVS


@shapes
@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset"])
async def test_a_step_mask_of_no_env_calls_nobody(face: Face, shape: Any, command: str) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        root = stamp(await face.call(env.reset))
        root["done"][1] = root["terminated"][1] = True
        td = root.clone().set("_step", torch.zeros(shape, dtype=torch.bool))
        result = await face.call(getattr(env, command), td)
        assert rows(td["next"]) == rows(root)
        assert flags(td["next"]) == flags(root)
        assert not td["next", "reward"].any()
        if command == "step_and_maybe_reset":
            assert rows(result[1]) == rows(root)
        again = await face.call(env.step, acting(ACTIONS))
    assert observed(again) == [[0, 1, 1, 10], [1, 1, 1, 20], [2, 1, 1, 30]]


async def test_of_the_masked_envs_the_finished_ones_are_reset(face: Face) -> None:
    kwargs = numbered(NUM_ENVS, length=1)
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=kwargs) as env:
        root = stamp(await face.call(env.reset))
        root["done"][2] = root["terminated"][2] = True
        td = root.clone().update(acting(ACTIONS, only=[0]))
        td, following = await face.call(env.step_and_maybe_reset, td)
        assert rows(td["next"]) == [([0, 1, 1, 10], 1, "0.1.1"), *rows(root)[1:]]
        assert flags(td["next"]) == [[True, False, True], [True, False, True], [False] * 3]
        assert rows(following) == [([0, 2, 0, 0], 0, "0.2.0"), *rows(root)[1:]]
        assert flags(following) == [[False, False, True], [False, False, True], [False] * 3]
        again = await face.call(env.reset, masked("_reset", NUM_ENVS, [1]))
    assert observed(again) == [[0, 2, 0, 0], [1, 2, 0, 0], [2, 1, 0, 0]]


async def test_resetting_by_hand_is_the_same_as_automatically(face: Face) -> None:
    async def follow(*, by_hand: bool) -> list[Any]:
        async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=LENGTHS) as env:
            td, seen = await face.call(env.reset), []
            for _ in range(7):
                seen.append((rows(td), flags(td)))
                td.update(acting(ACTIONS))
                if by_hand:
                    td = step_mdp(await face.call(env.step, td))
                    td = await face.call(env.reset, td.set("_reset", td["done"].clone()))
                else:
                    _, td = await face.call(env.step_and_maybe_reset, td)
            return seen

    seen = await follow(by_hand=True)
    assert seen == await follow(by_hand=False)
    assert [row[0][0][1] for row, _ in seen] == [1, 1, 2, 2, 3, 3, 4]


# -- what passes through ---------------------------------------------------------------------------------


@one_of_each
@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset"])
async def test_masks_are_not_in_the_output(face: Face, command: str) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        td = await face.call(env.reset, masked("_reset", NUM_ENVS, [0, 1, 2]))
        assert "_reset" not in td
        assert "_reset" not in await face.call(env.reset, masked("_reset", NUM_ENVS, [1]))
        for only in ([0, 1, 2], [1], []):
            td = td.update(acting(ACTIONS, only=only))
            td["_step"] = masked("_step", NUM_ENVS, only)["_step"]
            result = await face.call(getattr(env, command), td)
            assert "_step" not in td["next"]
            assert command == "step" or "_step" not in result[1]


@pytest.mark.parametrize("mask", [None, [0, 1, 2], [1], []], ids=str)
async def test_other_entries_pass_through_a_reset(face: Face, mask: list[int] | None) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        td = await face.call(env.reset)
        td["mine"] = torch.arange(NUM_ENVS)
        td["own", "deep"] = torch.arange(NUM_ENVS) + 20
        td["note"] = NonTensorStack(*"abc")
        if mask is not None:
            td.update(masked("_reset", NUM_ENVS, mask))
        result = await face.call(env.reset, td)
    assert result["mine"].tolist() == [0, 1, 2]
    assert result["own", "deep"].tolist() == [20, 21, 22]
    assert result["note"] == ["a", "b", "c"]


@pytest.mark.parametrize("only", [None, [1], []], ids=str)
async def test_other_entries_pass_through_a_step(face: Face, only: list[int] | None) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        td = (await face.call(env.reset)).update(acting(ACTIONS, only))
        td["mine"] = torch.arange(NUM_ENVS)
        td["hidden"] = torch.zeros(NUM_ENVS, 2)
        td["next", "hidden"] = torch.ones(NUM_ENVS, 2)
        td["next", "observation"] = torch.full((NUM_ENVS, 4), 77)
        td, following = await face.call(env.step_and_maybe_reset, td)
    assert td["mine"].tolist() == following["mine"].tolist() == [0, 1, 2]
    assert not td["hidden"].any()
    assert td["next", "hidden"].all()
    assert following["hidden"].all()
    assert "mine" not in td["next"]
    assert not (td["next", "observation"] == 77).any()
    assert not {"action", "reward", "next"} & set(following.keys())


@one_of_each
async def test_other_entries_pass_through_among_the_members_of_an_observation(face: Face) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        td = await face.call(env.reset)
        td["agent", "mine"] = torch.arange(NUM_ENVS)
        td["next", "agent", "hidden"] = torch.arange(NUM_ENVS) + 10
        td, following = await face.call(env.step_and_maybe_reset, td.update(acting(ACTIONS)))
        assert td["next", "agent", "hidden"].tolist() == following["agent", "hidden"].tolist() == [10, 11, 12]
        assert following["agent", "mine"].tolist() == [0, 1, 2]
        again = await face.call(env.reset, following.update(masked("_reset", NUM_ENVS, [1])))
    assert again["agent", "mine"].tolist() == [0, 1, 2]
    assert again["agent", "count"].tolist() == [[1], [0], [1]]


async def test_what_an_earlier_step_left_under_next_is_replaced(face: Face) -> None:
    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=numbered(NUM_ENVS)) as env:
        td = (await face.call(env.reset)).update(acting(ACTIONS))
        first = (await face.call(env.step, td))["next"].clone()
        await face.call(env.step, td)
    assert rows(first)[0] == ([0, 1, 1, 10], 1, "0.1.1")
    assert rows(td["next"])[0] == ([0, 1, 2, 20], 2, "0.1.2")
