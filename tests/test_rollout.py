"""Rollouts: when they end, what chooses the actions, and what they return."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faces import FACES, Face, acting
from failing_envs import CountingEnv, numbered
from space_envs import MarkedEnv
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

import aioenvs
from aioenvs import ParallelEnv, SerialEnv

NUM_ENVS = 3
N = (NUM_ENVS,)
LENGTHS = numbered(NUM_ENVS, {0: {"length": 3}, 1: {"length": 5}, 2: {"length": 4}})
ENDLESS = numbered(NUM_ENVS)

one_of_each = pytest.mark.parametrize("face", [FACES[1], FACES[2]], ids=lambda face: face.name)


async def roll(face: Face, *args: Any, kwargs: Any = LENGTHS, cls: Any = CountingEnv, **options: Any) -> TensorDictBase:
    async with face.open(NUM_ENVS, cls, create_env_kwargs=kwargs) as env:
        return await face.call(env.rollout, *args, **options)


def steps(td: TensorDictBase) -> list[list[int]]:
    """The step that each env observed, for each time."""
    return td["observation"][..., 2].tolist()


# -- when it ends ----------------------------------------------------------------------------------------


async def test_it_ends_with_the_first_episode(face: Face) -> None:
    td = await roll(face, 100)
    assert (td.batch_size, td.names) == (torch.Size([NUM_ENVS, 3]), [None, "time"])
    assert steps(td) == [[0, 1, 2]] * NUM_ENVS
    assert steps(td["next"]) == [[1, 2, 3]] * NUM_ENVS
    assert td["next", "done"][..., 0].tolist() == [[False, False, True], [False] * 3, [False] * 3]
    assert not td["done"].any()
    assert td["next", "reward"][..., 0].tolist() == [[1.0, 2.0, 3.0]] * NUM_ENVS
    assert (td["next", "reward"].shape, td["next", "reward"].dtype) == ((NUM_ENVS, 3, 1), torch.float32)


async def test_it_ends_with_the_last_episode(face: Face) -> None:
    td = await roll(face, 100, break_when_any_done=False, break_when_all_done=True)
    assert (td.batch_size, td.names) == (torch.Size([NUM_ENVS, 5]), [None, "time"])
    assert steps(td) == [[0, 1, 2, 2, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 3]]
    assert steps(td["next"]) == [[1, 2, 3, 3, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 4]]
    assert not td["done"].any()
    assert td["next", "terminated"][..., 0].sum(dim=1).tolist() == [3, 1, 2]
    assert td["next", "reward"][0, :, 0].tolist() == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert td["action"][0, 2:].unique().numel() == 1
    assert (td["next", "observation"][..., 1] == 1).all()
    assert not {"_step", "_reset"} & {*td.keys(), *td["next"].keys()}


async def test_it_goes_on_with_new_episodes(face: Face) -> None:
    td = await roll(face, 7, break_when_any_done=False)
    assert (td.batch_size, td.names) == (torch.Size([NUM_ENVS, 7]), [None, "time"])
    assert steps(td) == [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    assert steps(td["next"]) == [[1, 2, 3, 1, 2, 3, 1], [1, 2, 3, 4, 5, 1, 2], [1, 2, 3, 4, 1, 2, 3]]
    assert td["observation"][..., 1].tolist() == [[1, 1, 1, 2, 2, 2, 3], [1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 2, 2, 2]]
    assert not td["done"].any()


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)], ids=str)
async def test_it_has_at_most_max_steps(face: Face, flags: tuple[bool, bool]) -> None:
    for max_steps in (1, 2):
        td = await roll(face, max_steps, break_when_any_done=flags[0], break_when_all_done=flags[1])
        assert td.batch_size == (NUM_ENVS, max_steps)


@one_of_each
async def test_both_flags_exclude_each_other(face: Face) -> None:
    with pytest.raises(TypeError, match="Cannot have both break_when_all_done and break_when_any_done"):
        await roll(face, 5, break_when_any_done=True, break_when_all_done=True)


@one_of_each
@pytest.mark.parametrize(
    ("max_steps", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)]
)
async def test_max_steps_is_a_positive_integer(face: Face, max_steps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_steps must be"):
        await roll(face, max_steps)


# -- what chooses the actions ----------------------------------------------------------------------------


def double(observation: torch.Tensor) -> torch.Tensor:
    """Each env's id and step, as one number."""
    return observation[..., 0] * 100 + observation[..., 2]


class Doubling(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return double(observation)


class DoublingTensorDict(torch.nn.Module):
    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("action", double(tensordict["observation"]))


def on_td(td: Any) -> Any:
    td["action"] = double(td["observation"])
    return td


def annotated(batch: TensorDictBase) -> TensorDictBase:
    return batch.clone().set("action", double(batch["observation"]))


async def later_on_td(td: Any) -> Any:
    await asyncio.sleep(0)
    return on_td(td)


async def later(observation: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return double(observation)


POLICIES: dict[str, Callable[..., Any]] = {
    "TensorDictModule": TensorDictModule(Doubling(), in_keys=["observation"], out_keys=["action"]),
    "nn.Module": Doubling(),
    "nn.Module on td": DoublingTensorDict(),
    "function": double,
    "lambda": lambda obs: double(obs),
    "function on td": on_td,
    "annotated function": annotated,
}


@pytest.mark.parametrize("name", POLICIES)
async def test_policies(face: Face, name: str) -> None:
    td = await roll(face, 4, POLICIES[name], break_when_any_done=False)
    assert td["action"].equal(double(td["observation"]))
    assert td["next", "observation"][..., 3].tolist() == [[0, 1, 3, 0], [100, 201, 303, 406], [200, 401, 603, 806]]


@pytest.mark.parametrize("policy", [later, later_on_td])
@pytest.mark.parametrize("face", [FACES[0], *FACES[2:]], ids=lambda face: face.name)
async def test_coroutine_functions_are_policies(face: Face, policy: Any) -> None:
    td = await roll(face, 4, policy, break_when_any_done=False)
    assert td["action"].equal(double(td["observation"]))


@one_of_each
async def test_without_a_policy_actions_are_random(face: Face) -> None:
    td = await roll(face, 20, kwargs=ENDLESS)
    assert td["action"].unique().numel() > 20
    assert td["action"].cumsum(dim=1).equal(td["next", "observation"][..., 3])


@one_of_each
async def test_a_policy_gets_the_observations_in_the_order_of_their_keys(face: Face) -> None:
    def policy(*observations: Any) -> torch.Tensor:
        step, word, count = observations
        assert word.tolist() == [f"{env}.1.{number}" for env, number in enumerate(count[:, 0].tolist())]
        assert step[:, 2].tolist() == count[:, 0].tolist()
        return torch.zeros(N, dtype=torch.int64)

    async with face.open(NUM_ENVS, MarkedEnv, create_env_kwargs=ENDLESS) as env:
        assert env.observation_keys == ["observation", "word", ("agent", "count")]
        td = await face.call(env.rollout, 3, policy)
    assert td["agent", "count"][0, :, 0].tolist() == [0, 1, 2]
    assert td["word"] == [[f"{env}.1.{step}" for step in range(3)] for env in range(NUM_ENVS)]


@one_of_each
async def test_a_policy_must_be_callable(face: Face) -> None:
    with pytest.raises(TypeError, match="expected a policy that can be called, got 'left'"):
        await roll(face, 3, "left")


def test_a_policy_that_took_observations_for_a_tensordict_is_told_so() -> None:
    with SerialEnv(2, "CartPole-v1") as env, pytest.raises(KeyError) as caught:
        env.rollout(3, lambda x: {"a": x}["action"])
    (note,) = (note for note in caught.value.__notes__ if "policy" in note)
    assert "['observation']" in note
    assert "tensordict" in note


@one_of_each
async def test_an_error_in_the_policy_leaves_the_envs_usable(face: Face) -> None:
    def policy(td: Any) -> Any:
        raise ZeroDivisionError("mine")

    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        with pytest.raises(ZeroDivisionError, match="mine"):
            await face.call(env.rollout, 3, policy)
        assert (await face.call(env.rollout, 3)).batch_size == (NUM_ENVS, 3)


@one_of_each
@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)], ids=str)
async def test_recurrent_state_goes_from_next_to_the_root(face: Face, flags: tuple[bool, bool]) -> None:
    def policy(td: Any) -> Any:
        td["next", "hidden"] = td["hidden"] + 1
        return on_td(td)

    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        start = (await face.call(env.reset)).set("hidden", torch.zeros(NUM_ENVS, 1))
        options = {"break_when_any_done": flags[0], "break_when_all_done": flags[1]}
        td = await face.call(env.rollout, 4, policy, auto_reset=False, tensordict=start, **options)
    assert td["hidden"][..., 0].tolist() == [[0.0, 1.0, 2.0, 3.0]] * NUM_ENVS
    assert td["next", "hidden"][..., 0].tolist() == [[1.0, 2.0, 3.0, 4.0]] * NUM_ENVS


# -- what it begins with, reports and returns ------------------------------------------------------------


@one_of_each
async def test_the_callback_sees_the_env_and_every_step(face: Face) -> None:
    seen: list[Any] = []
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=LENGTHS) as env:
        await face.call(env.rollout, 3, double, lambda *args: seen.append(args))
        assert [caller is env for caller, _ in seen] == [True] * 3
    assert [td["next", "observation"][0, 2].item() for _, td in seen] == [1, 2, 3]


@one_of_each
async def test_it_can_go_on_from_a_tensordict(face: Face) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        first = await face.call(env.rollout, 2)
        following = (
            aioenvs.step_mdp.step_mdp(first[:, -1])
            if not callable(aioenvs.step_mdp)
            else aioenvs.step_mdp(first[:, -1])
        )
        second = await face.call(env.rollout, 2, auto_reset=False, tensordict=following)
        assert steps(second) == [[2, 3]] * NUM_ENVS
        assert (second["observation"][..., 1] == 1).all()
        third = await face.call(env.rollout, 2, tensordict=TensorDict({"mine": torch.arange(3)}, N))
    assert steps(third) == [[0, 1]] * NUM_ENVS
    assert third["mine"].tolist() == [[0, 0], [1, 1], [2, 2]]


@one_of_each
async def test_without_a_reset_it_needs_a_tensordict(face: Face) -> None:
    with pytest.raises(RuntimeError, match="auto_reset=False needs the tensordict"):
        await roll(face, 2, auto_reset=False)


@one_of_each
async def test_a_partial_reset_at_the_beginning(face: Face) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        await face.call(env.rollout, 2)
        mask = TensorDict({"_reset": torch.tensor([True, False, False])}, N)
        td = await face.call(env.rollout, 2, tensordict=mask)
    assert steps(td) == [[0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("restart", [True, False])
async def test_the_last_step_can_be_marked_as_truncated(face: Face, restart: bool) -> None:
    options = {"break_when_any_done": False, "break_when_all_done": not restart}
    td = await roll(face, 3, set_truncated=True, **options)
    following = td["next"]
    assert following["done"][..., 0].tolist() == [[False, False, True]] * NUM_ENVS
    assert following["terminated"][..., -1, 0].tolist() == [True, False, False]
    assert following["truncated"][..., -1, 0].tolist() == [False, True, True]
    assert not following["truncated"][:, :-1].any()


@one_of_each
async def test_out_is_filled_and_returned(face: Face) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        out = (await face.call(env.rollout, 3)).clone().zero_()
        td = await face.call(env.rollout, 3, double, out=out)
    assert td is out
    assert steps(out) == [[0, 1, 2]] * NUM_ENVS
    assert out["action"].equal(double(out["observation"]))
    assert out.names == [None, "time"]


@one_of_each
@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)], ids=str)
async def test_it_can_be_stacked_lazily(face: Face, flags: tuple[bool, bool]) -> None:
    options = {"break_when_any_done": flags[0], "break_when_all_done": flags[1]}
    lazy = await roll(face, 4, double, return_contiguous=False, **options)
    dense = await roll(face, 4, double, **options)
    assert isinstance(lazy, LazyStackedTensorDict)
    assert not isinstance(dense, LazyStackedTensorDict)
    assert lazy.names == dense.names == [None, "time"]
    assert (lazy.contiguous() == dense).all()


@one_of_each
async def test_text_is_stacked_too(face: Face) -> None:
    td = await roll(face, 4, cls=MarkedEnv, break_when_any_done=False)
    assert td["word"][0] == ["0.1.0", "0.1.1", "0.1.2", "0.2.0"]
    assert td["next", "word"][0] == ["0.1.1", "0.1.2", "0.1.3", "0.2.1"]
    td = await roll(face, 5, cls=MarkedEnv, break_when_any_done=False, break_when_all_done=True)
    assert td["next", "word"][0] == ["0.1.1", "0.1.2", "0.1.3", "0.1.3", "0.1.3"]


async def test_what_was_returned_stays_as_it_was(face: Face) -> None:
    env = face.make(NUM_ENVS, MarkedEnv, create_env_kwargs=LENGTHS)
    td = await face.call(env.reset)
    held: list[tuple[TensorDict, TensorDict]] = [(td.copy(), td.clone())]
    for number in range(6):
        td.update(acting([number] * NUM_ENVS, only=None if number % 2 else [0, 2]))
        step, td = await face.call(env.step_and_maybe_reset, td)
        held += [(result, result.clone()) for result in (step.copy(), td.copy())]
    partial = await face.call(env.reset, TensorDict({"_reset": torch.tensor([True, False, False])}, N))
    held.append((partial, partial.clone()))
    rollout = await face.call(env.rollout, 4, return_contiguous=False)
    held.append((rollout, rollout.clone()))
    await face.call(env.reset)
    await face.call(env.close)
    for found, expected in held:
        assert (found.exclude("word", ("next", "word")) == expected.exclude("word", ("next", "word"))).all()
        assert found["word"] == expected["word"]


@one_of_each
async def test_changing_what_was_returned_changes_nothing_else(face: Face) -> None:
    async with face.open(NUM_ENVS, CountingEnv, create_env_kwargs=ENDLESS) as env:
        td = await face.call(env.reset)
        td["observation"].fill_(-5)
        td = await face.call(env.step, acting([1, 1, 1]))
        expected = td["next", "observation"].tolist()
        td["next", "observation"].fill_(-5)
        root = await face.call(env.reset, TensorDict({"_reset": torch.tensor([True, False, False])}, N))
    assert root["observation"].tolist() == [[0, 2, 0, 0], *expected[1:]]


def test_step_mdp_is_a_function_of_the_package() -> None:
    td = TensorDict({"action": torch.ones(2), "next": {"observation": torch.zeros(2)}}, [2])
    assert set(aioenvs.step_mdp(td).keys()) == {"observation"}


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_results_need_no_grad(cls: Any) -> None:
    policy = torch.nn.Linear(4, 2)
    with cls(2, "CartPole-v1") as env:
        td = env.rollout(3, lambda obs: policy(obs).argmax(-1), break_when_any_done=False)
    assert not any(leaf.requires_grad for leaf in td.values(True, True))
