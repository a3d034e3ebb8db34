"""The rows of a batch: what one env is, and may be given, is not what another is; and what is known of each."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from faces import Face
from gymnasium import spaces
from space_envs import ChoiceEnv, EchoEnv
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch_faces import TorchFace, over_own_torch_faces

from aioenvs import AsyncParallelEnv, EnvBase, GymWrapper, ParallelEnv, SerialEnv
from aioenvs.errors import SpecMismatchError
from aioenvs.specs import Categorical, Composite, Unbounded
from aioenvs.testing import NonTensorEnv


class GivenEnv(EnvBase):
    """Begins where the reset says: at the state `s`."""

    def __init__(self, dtype: torch.dtype = torch.int64, value: int = 7) -> None:
        super().__init__()
        self.observation_spec = Composite(o=Unbounded((1,), dtype=dtype))
        self.state_spec = Composite(s=Unbounded((1,), dtype=torch.int64))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))
        self.dtype, self.value = dtype, value

    def _reset(self, tensordict: Any) -> TensorDict:
        start = None if tensordict is None else tensordict.get("s", None)
        value = torch.full((1,), self.value) if start is None else start
        return TensorDict(o=value.to(self.dtype), s=value)

    def _step(self, tensordict: Any) -> TensorDict:
        return TensorDict(o=tensordict["s"].to(self.dtype), reward=torch.ones(1), done=torch.zeros(1, dtype=torch.bool))

    def _set_seed(self, seed: int) -> None:
        pass


async def test_each_env_has_its_own_range_of_choices(face: Face) -> None:
    async with face.open(2, [lambda: ChoiceEnv(2), lambda: ChoiceEnv(5)]) as env:
        td = await face.call(env.reset)
        td["action"] = torch.tensor([1, 4])
        await face.call(env.step, td)
        assert td["next", "observation"][:, 0].tolist() == [1, 4]
        td["action"] = torch.tensor([4, 4])
        with pytest.raises(SpecMismatchError, match="from 0 to 1, found 4 for env 0"):
            await face.call(env.step, td)


async def test_actions_of_envs_that_do_not_step_do_not_matter(face: Face) -> None:
    async with face.open(2, ChoiceEnv) as env:
        td = await face.call(env.reset)
        td["action"] = torch.tensor([1, -1])
        td["_step"] = torch.tensor([True, False])
        await face.call(env.step, td)
        assert td["next", "observation"].tolist() == [[1, 1], [100, 0]]


async def test_a_view_names_the_env_and_not_its_row(face: Face) -> None:
    async with face.open(4, ChoiceEnv) as env:
        view = env[3]
        td = await face.call(view.reset)
        td["action"] = torch.tensor([7])
        with pytest.raises(SpecMismatchError, match="found 7 for env 3"):
            await face.call(view.step, td)


async def test_random_texts_are_of_each_envs_own_space(face: Face) -> None:
    make = [lambda: EchoEnv(spaces.Text(9, min_length=3, charset="ab")), lambda: EchoEnv(spaces.Text(9, charset="xy"))]
    async with face.open(2, make) as env:
        await face.call(env.reset, list_of_kwargs=[{"options": {"value": "a"}}, {"options": {"value": "x"}}])
        for _ in range(5):
            first, second = env.rand_action()["action"]
            assert set(first) <= set("ab")
            assert set(second) <= set("xy")


@pytest.mark.parametrize("make", [SerialEnv, ParallelEnv])
def test_random_texts_of_wrapped_envs(make: Any) -> None:
    with make(2, lambda: GymWrapper(EchoEnv(spaces.Text(9, min_length=1, charset="ab")))) as env:
        assert all(set(text) <= set("ab") for text in env.rand_action()["action"])


def test_random_actions_leave_the_envs_own_space_alone() -> None:
    drawn = []
    for seed in (1, 2):
        with SerialEnv(1, lambda: EchoEnv(spaces.Text(9, min_length=9))) as env:
            torch.manual_seed(seed)
            env.reset(options={"value": "x"})
            space = env.get_attr("action_space")[0]
            space.seed(0)
            env.rand_action()
            drawn.append(space.sample())
    assert drawn[0] == drawn[1]


@over_own_torch_faces
@pytest.mark.parametrize(
    "given", [torch.full((2, 1), 0.5), torch.full((2, 1), 2.0**63), torch.ones(2, 2, dtype=torch.int64)]
)
async def test_states_given_to_a_reset_are_checked(face: TorchFace, given: torch.Tensor) -> None:
    async with face.open(2, GivenEnv) as env:
        with pytest.raises(SpecMismatchError, match=r"'s': expected int64 of shape \(2, 1\)"):
            await env.reset(TensorDict({"s": given}, [2]))
        td = await env.reset(TensorDict({"s": torch.tensor([[3], [4]])}, [2]))
        assert td["o"].tolist() == [[3], [4]]


@over_own_torch_faces
async def test_dtypes_that_are_kept_alike_are_not_stacked(face: TorchFace) -> None:
    kwargs = [{"dtype": torch.int16}, {"dtype": torch.bfloat16}]
    async with face.open(2, GivenEnv, create_env_kwargs=kwargs) as env:
        td = await env.reset()
        assert [(part["o"].dtype, part["o"].item()) for part in td.unbind(0)] == [(torch.int16, 7), (torch.bfloat16, 7)]


async def test_what_is_known_of_an_env_under_way_is_its_last_result() -> None:
    async with AsyncParallelEnv(2, ChoiceEnv, num_processes=2) as env:
        td = await env.reset()
        stepping = asyncio.ensure_future(env[1].step(env[1].rand_action(td[1:])))
        await asyncio.sleep(0)
        mask = TensorDict({"_reset": torch.tensor([[True], [False]])}, [2])
        known = (await env.reset(mask))["observation"]
        await stepping
        assert known[1].tolist() in ([100, 0], stepping.result()["next", "observation"][0].tolist())


@pytest.mark.parametrize("maybe_reset", [False, True])
async def test_a_failed_first_step_leaves_what_the_reset_gave(face: Face, maybe_reset: bool) -> None:
    async with face.open(2, [lambda: ChoiceEnv(9), lambda: ChoiceEnv(9)]) as env:
        td = await face.call(env.reset)
        await face.call(env[1:].set_attr, "steps", [None])
        td["action"] = torch.tensor([1, 1])
        with pytest.raises(TypeError):
            await face.call(env.step_and_maybe_reset if maybe_reset else env.step, td)
        mask = TensorDict({"_reset": torch.zeros(2, 1, dtype=torch.bool)}, [2])
        assert (await face.call(env.reset, mask))["observation"].tolist() == [[1, 1], [100, 0]]


class PartlyResetEnv(EnvBase):
    """Three counters; its reset begins all of them anew, whatever the mask says."""

    def __init__(self) -> None:
        super().__init__(batch_size=(3,))
        self.observation_spec = Composite(count=Unbounded((3, 1), dtype=torch.int64), shape=(3,))
        self.action_spec = Categorical(2, shape=(3,))
        self.reward_spec = Unbounded((3, 1))

    def _reset(self, tensordict: Any) -> TensorDict:
        self.count = torch.zeros(3, 1, dtype=torch.int64)
        return TensorDict(count=self.count.clone(), batch_size=(3,))

    def _step(self, tensordict: Any) -> TensorDict:
        self.count += 1
        done = torch.zeros(3, 1, dtype=torch.bool)
        return TensorDict(count=self.count.clone(), reward=torch.ones(3, 1), done=done, batch_size=(3,))

    def _set_seed(self, seed: int) -> None:
        pass


@over_own_torch_faces
async def test_parts_that_are_not_reset_keep_their_last_known_values(face: TorchFace) -> None:
    async with face.open(2, PartlyResetEnv) as env:
        td = await env.reset()
        _, td = await env.step_and_maybe_reset(env.rand_action(td))
        mask = torch.tensor([[False, True, False], [False, False, False]])
        for given in (TensorDict({"_reset": mask}, [2, 3]), td.clone().set("_reset", mask)):
            found = await env.reset(given)
            assert found["count"][0].flatten().tolist() == [1, 0, 1]
            assert found["count"][1].flatten().tolist() == [1, 1, 1]


@over_own_torch_faces
async def test_an_array_as_object_action_arrives_as_an_array(face: TorchFace) -> None:
    async with face.open(2, NonTensorEnv) as env:
        td = await env.reset()
        given = [np.arange(3), np.zeros((2, 2))]
        td["action"] = NonTensorStack(*map(NonTensorData, given))
        td = await env.step(td)
        for record, array in zip(td["next"].get("record").tolist(), given, strict=True):
            assert isinstance(record["action"], np.ndarray)
            assert np.array_equal(record["action"], array)
            assert record["action"] is not array


class FedRewardEnv(EnvBase):
    """Adds its last reward, which it gets as an input, to the action."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(o=Unbounded((1,)))
        self.state_spec = Composite(reward=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: Any) -> TensorDict:
        return TensorDict(o=torch.zeros(1), reward=torch.ones(1))

    def _step(self, tensordict: Any) -> TensorDict:
        reward = tensordict["reward"] + tensordict["action"]
        return TensorDict(o=reward, reward=reward, done=torch.zeros(1, dtype=torch.bool))

    def _set_seed(self, seed: int) -> None:
        pass


@over_own_torch_faces
async def test_a_reward_that_is_an_input_goes_on_to_the_next_step(face: TorchFace) -> None:
    async with face.open(2, FedRewardEnv) as env:
        td = (await env.reset()).set("reward", torch.ones(2, 1))
        alone = FedRewardEnv().reset().set("reward", torch.ones(1))
        for step in range(1, 4):
            td, root = await env.step_and_maybe_reset(td.set("action", torch.ones(2, 1)))
            _, alone = FedRewardEnv().step_and_maybe_reset(alone.set("action", torch.ones(1)))
            assert set(root.keys()) == set(alone.keys())
            assert root["reward"].flatten().tolist() == [alone["reward"].item()] * 2 == [1.0 + step] * 2
            td = root
