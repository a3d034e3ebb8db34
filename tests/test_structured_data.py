"""Text, ragged and structured observations and actions: per env, both ways, in every face."""

from typing import Any

import cloudpickle
import numpy as np
import pytest
import structured_envs
import torch
from faces import FACES, Face
from structured_envs import BulkEnv, ChatEnv, TensorChatEnv, TextEnv
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from aioenvs import Anything, AsyncParallelEnv
from aioenvs.errors import SpecMismatchError

cloudpickle.register_pickle_by_value(structured_envs)

MB = 1 << 20
SAID: list[Any] = [{"role": "user", "content": ["Hi", {"n": 1}]}, None, [{"tool": "search", "hits": []}, 2.5]]
KINDS = pytest.mark.parametrize("make", [ChatEnv, TensorChatEnv], ids=["gymnasium", "tensors"])


@pytest.fixture(params=FACES, ids=lambda face: face.name)
def any_face(request: pytest.FixtureRequest) -> Face:
    face: Face = request.param
    return face


def system(index: int) -> dict[str, str]:
    return {"role": "system", "content": f"You are env {index}."}


def saying(td: TensorDictBase, *actions: Any) -> TensorDictBase:
    return td.set("action", NonTensorStack(*actions))


def conversations(td: TensorDictBase) -> list[Any]:
    return [td[env]["messages"] for env in range(len(td))]


def shapes(td: TensorDictBase) -> list[Any]:
    return [None if (image := td[env]["image"]) is None else image.shape for env in range(len(td))]


def indexed(count: int) -> list[dict[str, int]]:
    return [{"index": index} for index in range(count)]


@KINDS
async def test_a_conversation(any_face: Face, make: Any) -> None:
    async with any_face.open(3, make, create_env_kwargs=indexed(3)) as env:
        td = await any_face.call(env.reset)
        assert conversations(td) == [[system(0)], [system(1)], [system(2)]]
        td, after = await any_face.call(env.step_and_maybe_reset, saying(td, *SAID))
        expected = [[system(index), said] for index, said in enumerate(SAID)]
        assert conversations(td["next"]) == expected
        assert conversations(after) == expected
        assert conversations(td) == [[system(0)], [system(1)], [system(2)]]
        assert shapes(td["next"]) == [None, (2, 3), (2, 4)]
        assert td["next", "length"].tolist() == [[2], [2], [2]]
        assert td["next", "reward"].tolist() == [[2.0], [2.0], [2.0]]


@KINDS
async def test_first_ready_views_and_partial_resets(any_face: Face, make: Any) -> None:
    async with any_face.open(3, make, create_env_kwargs=indexed(3)) as env:
        td = await any_face.call(env.reset)
        for _ in range(3):
            await any_face.call(env.send, saying(td, *SAID))
            _, td = await any_face.call(env.recv, 3)
            order = td["env_index"].argsort()
            td = torch.stack([td[int(row)] for row in order])
        assert conversations(td) == [[system(index), said, said, said] for index, said in enumerate(SAID)]
        one = await any_face.call(env[1].step, saying(TensorDict(batch_size=[1]), "last"))
        assert conversations(one["next"]) == [[system(1), None, None, None, "last"]]
        assert one["next", "done"].item()
        mask = TensorDict({"_reset": torch.tensor([False, True, False])}, batch_size=[3])
        again = await any_face.call(env.reset, mask)
        assert [len(each) for each in conversations(again)] == [4, 1, 4]


@KINDS
async def test_final_observations_outlive_the_reset(any_face: Face, make: Any) -> None:
    async with any_face.open(2, make, create_env_kwargs=indexed(2)) as env:
        after = await any_face.call(env.reset)
        for number in range(4):
            td, after = await any_face.call(env.step_and_maybe_reset, saying(after, number, str(number)))
        assert conversations(td["next"]) == [[system(0), 0, 1, 2, 3], [system(1), "0", "1", "2", "3"]]
        assert shapes(td["next"]) == [None, (5, 3)]
        assert conversations(after) == [[system(0)], [system(1)]]
        assert shapes(after) == [None, (1, 3)]


@KINDS
async def test_what_came_is_the_callers_own(any_face: Face, make: Any) -> None:
    async with any_face.open(2, make, create_env_kwargs=indexed(2)) as env:
        td = await any_face.call(env.reset)
        said = {"text": ["a"]}
        td = await any_face.call(env.step, saying(td, said, said))
        said["text"].append("changed afterwards")
        first, second = conversations(td["next"])
        first[1]["text"].append("by the caller")
        assert second[1] == {"text": ["a"]}
        after = await any_face.call(env.step, saying(td["next"].select("length"), 1, 2))
        assert conversations(after["next"]) == [[system(0), {"text": ["a"]}, 1], [system(1), {"text": ["a"]}, 2]]


async def test_random_actions_are_among_the_examples(any_face: Face) -> None:
    async with any_face.open(4, ChatEnv, create_env_kwargs=indexed(4)) as env:
        td = await any_face.call(env.rollout, 5, break_when_any_done=False)
        assert td.batch_size == (4, 5)
        chosen = [td[env, time]["action"] for env in range(4) for time in range(5)]
        assert all(action in ChatEnv.action_space.examples for action in chosen)
        assert len({str(action) for action in chosen}) > 1


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
async def test_eight_megabytes_in_both_directions_at_once(processes: int) -> None:
    payloads = [bytes([index + 1]) * (8 * MB) + bytes([index]) for index in range(4)]
    async with AsyncParallelEnv(4, BulkEnv, create_env_kwargs=indexed(4), num_processes=processes) as env:
        td = await env.reset()
        for _ in range(2):
            td = await env.step(saying(td, *payloads))
            for row, payload in enumerate(payloads):
                assert td["next"][row]["observation"] == payload[::-1]
        env.send(saying(td.select("observation"), *payloads))
        results, _ = await env.recv(4)
        for index, payload in enumerate(payloads):
            row = results["env_index"].tolist().index(index)
            assert results["next"][row]["observation"] == payload[::-1]
        assert await env.call("has_torch") == [False] * 4


def test_anything_is_a_space() -> None:
    space = Anything([{"a": [1]}, "b"], seed=3)
    first = space.sample()
    assert first in [{"a": [1]}, "b"]
    assert object() in space
    assert space == Anything()
    assert space != 3
    assert not space.is_np_flattenable
    space.seed(3)
    assert space.sample() == first
    drawn = next(each for each in iter(space.sample, 1) if isinstance(each, dict))
    drawn["a"].append(2)
    assert space.examples[0] == {"a": [1]}


@pytest.mark.parametrize("examples", [[], "text", 3])
def test_examples_must_be_a_list(examples: Any) -> None:
    with pytest.raises(ValueError, match="expected a list of objects to sample from as examples"):
        Anything(examples)


@pytest.mark.parametrize("wrong", [("a", "b"), np.array(["a", "b"]), torch.zeros(2, 2)], ids=lambda value: type(value))
async def test_a_collection_in_place_of_one_action_each(any_face: Face, wrong: Any) -> None:
    async with any_face.open(2, ChatEnv, create_env_kwargs=indexed(2)) as env:
        td = await any_face.call(env.reset)
        td["action"] = wrong
        with pytest.raises(SpecMismatchError, match=r"expected 2 objects, one per env, as NonTensorStack\(\*objects\)"):
            await any_face.call(env.step, td)
        td = await any_face.call(env.step, saying(td, [1, 2], ("a", "b")))
        assert conversations(td["next"]) == [[system(0), [1, 2]], [system(1), ("a", "b")]]


async def test_texts_that_their_space_does_not_contain(any_face: Face) -> None:
    async with any_face.open(2, TextEnv) as env:
        td = await any_face.call(env.reset)
        for wrong in ("toolong!", None, 3):
            with pytest.raises(
                SpecMismatchError, match=r"expected a value of Text\(1, 3.*for env 1; no env was stepped"
            ):
                await any_face.call(env.step, saying(td, "abc", wrong))
        td = await any_face.call(env.step, saying(td, "abc", "d"))
        assert [row["observation"] for row in td["next"].unbind(0)] == ["abc", "d"]


async def test_random_actions_for_what_was_received(any_face: Face) -> None:
    makers = [lambda: TextEnv(1), lambda: TextEnv(3), lambda: TextEnv(7)]
    async with any_face.open(3, makers) as env:
        td = await any_face.call(env.reset)
        await any_face.call(env.send, env.rand_action(td))
        for _ in range(6):
            _, td = await any_face.call(env.recv, 1, 2)
            await any_face.call(env.send, env.rand_action(td))
        await any_face.call(env.recv, len(env.outstanding))
