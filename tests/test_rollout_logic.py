"""Rollouts of single envs: batch shapes, nested keys, agents that differ, text, gradients; and the generator itself."""

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from aioenvs.tensors.done import done_mask
from aioenvs.tensors.rollout import RolloutOptions, drive, rollout, settle
from aioenvs.testing import (
    CountingEnv,
    DifferentiableEnv,
    DynamicShapeEnv,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    NonTensorEnv,
)


def options(**flags: Any) -> RolloutOptions:
    return RolloutOptions(flags.pop("max_steps", 20), **flags)


def roll(env: Any, policy: Any = None, callback: Any = None, start: Any = None, **flags: Any) -> TensorDictBase:
    """What `EnvBase.rollout` does, with the generator and the driver at hand."""
    out = flags.pop("out", None)
    return drive(rollout(env, options(**flags), policy, callback, start, out))


class Staggered(CountingEnv):
    """A counting env of which each element has a length of its own, and episodes that end by truncation."""

    def __init__(self, lengths: torch.Tensor) -> None:
        super().__init__(max_steps=1, batch_size=lengths.shape, truncates=True)
        self.max_steps = lengths.unsqueeze(-1)  # type: ignore[assignment]


class StaggeredWhole(Staggered):
    """The same, but the elements of a row can only be stepped together."""

    step_dims = 1


LENGTHS = torch.tensor([[2, 4], [3, 1]])


def seen(td: TensorDictBase) -> Any:
    return td["observation"][..., 0].tolist()


# -- batch shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (1,), (2,), (2, 3), (2, 0)])
@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)], ids=str)
def test_any_batch_shape(batch: tuple[int, ...], flags: tuple[bool, bool]) -> None:
    env = CountingEnv(max_steps=3, batch_size=batch)
    td = roll(env, max_steps=3, break_when_any_done=flags[0], break_when_all_done=flags[1])
    length = 1 if 0 in batch and flags[1] else 3  # of no elements, all are done
    assert td.batch_size == torch.Size([*batch, length])
    assert td.names == [*[None] * len(batch), "time"]
    assert td["next", "reward"].shape == (*batch, length, 1)


def test_it_ends_with_the_first_element() -> None:
    td = roll(Staggered(LENGTHS))
    assert td.batch_size == (2, 2, 1)
    assert td["next", "done"][..., 0, 0].tolist() == [[False, False], [False, True]]


def test_it_ends_with_the_last_element() -> None:
    td = roll(Staggered(LENGTHS), break_when_all_done=True)
    assert seen(td) == [[[0, 1, 1, 1], [0, 1, 2, 3]], [[0, 1, 2, 2], [0, 0, 0, 0]]]
    assert seen(td["next"]) == [[[1, 2, 2, 2], [1, 2, 3, 4]], [[1, 2, 3, 3], [1, 1, 1, 1]]]
    assert td["next", "done"].sum().item() == 3 + 1 + 2 + 4
    assert not td["done"].any()
    assert not {"_step", "_reset"} & {*td.keys(), *td["next"].keys()}


def test_elements_that_cannot_be_stepped_apart_go_on_together() -> None:
    td = roll(StaggeredWhole(LENGTHS), break_when_all_done=True)
    assert seen(td) == [[[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 1, 2, 2], [0, 1, 2, 2]]]
    assert seen(td["next"]) == [[[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 3, 3], [1, 2, 3, 3]]]


def test_only_what_still_goes_on_is_stepped() -> None:
    masks = []

    class Watched(Staggered):
        def step(self, tensordict: TensorDictBase) -> TensorDictBase:
            masks.append(tensordict.get("_step", None))
            return super().step(tensordict)

    roll(Watched(torch.tensor([1, 3])), break_when_all_done=True)
    assert masks[0] is None
    assert [mask.tolist() for mask in masks[1:]] == [[False, True], [False, True]]


def test_finished_elements_begin_anew() -> None:
    td = roll(Staggered(torch.tensor([2, 3])), max_steps=5, break_when_any_done=False)
    assert seen(td) == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]]
    assert seen(td["next"]) == [[1, 2, 1, 2, 1], [1, 2, 3, 1, 2]]


def test_the_break_flag_that_is_not_given_follows_from_the_other() -> None:
    assert options().break_when_any_done is True
    assert options(break_when_all_done=True).break_when_any_done is False
    with pytest.raises(TypeError, match="Cannot have both"):
        options(break_when_any_done=True, break_when_all_done=True)


# -- nested keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)], ids=str)
def test_nested_keys(flags: tuple[bool, bool]) -> None:
    env = NestedCountingEnv(max_steps=3, nested_dim=2, batch_size=(2,))
    td = roll(env, max_steps=3, break_when_any_done=flags[0], break_when_all_done=flags[1])
    assert td.batch_size == (2, 3)
    assert td["data"].batch_size == (2, 3, 2)
    assert td["next", "data", "done"][..., 0].tolist() == [[[False] * 2, [False] * 2, [True] * 2]] * 2
    assert ("data", "reward") not in td.keys(True)


def test_several_keys_at_several_depths() -> None:
    env = MultiKeyCountingEnv(max_steps=(4, 2, 3), root_done=True)
    td = roll(env)
    assert td.batch_size == (4,)
    assert td["action"].shape == (4,)
    assert td["right", "deep", "action"].shape == (4, 3)
    assert td["next", "right", "deep", "reward"].flatten().tolist() == td["right", "deep", "action"].flatten().tolist()
    assert not {"reward", ("left", "prize"), ("right", "deep", "reward")} & set(td.keys(True))


@pytest.mark.parametrize(("all_done", "length"), [(False, 2), (True, 3)])
def test_several_nodes_that_end_apart(all_done: bool, length: int) -> None:
    """An env whose nodes end apart is over with the first of them, or goes on until each has ended."""
    env = MultiKeyCountingEnv(max_steps=(9, 2, 3), root_done=False)
    td = roll(env, break_when_any_done=not all_done, break_when_all_done=all_done)
    assert td.batch_size == (length,)
    assert done_mask(td["next"], env.done_keys).tolist() == [False, True, True][:length]


def test_what_a_policy_writes_into_a_node_stays_in_its_own_step() -> None:
    env = NestedCountingEnv(max_steps=9, nested_dim=2)

    def policy(td: Any) -> Any:
        td["data", "action"] = td["data", "observation"][..., 0] % 2
        return td

    td = roll(env, policy, max_steps=4)
    assert td["data", "action"].tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert ("next", "data", "action") not in td.keys(True)


# -- agents that differ ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("contiguous", [None, True, False])
@pytest.mark.parametrize("nest_done", [False, True])
def test_agents_that_differ(batch: tuple[int, ...], contiguous: bool | None, nest_done: bool) -> None:
    env = HeterogeneousCountingEnv(max_steps=3, exclusive_keys=True, batch_size=batch, nest_done=nest_done)
    td = roll(env, return_contiguous=contiguous)
    assert td.batch_size == (*batch, 3)
    agents = td[..., 1]["next"].get("lazy").unbind(len(batch))
    assert [agent["observation"].shape for agent in agents] == [(*batch, size) for size in (1, 2, 3)]
    assert ["agent_2" in agent for agent in agents] == [False, False, True]
    assert (agents[2]["agent_2"] == 2).all()


def test_envs_that_differ_are_stacked_as_they_are() -> None:
    """A lazily stacked root, as of heterogeneous envs, of which each element keeps its keys in the rollout."""

    class Pair:
        """Two envs of different lengths, stacked lazily; only one has a key of its own."""

        batch_size = torch.Size([2])
        done_keys = ("done", "terminated")
        action_keys = ("action",)
        reward_keys = ("reward",)
        observation_keys = ("observation",)

        def __init__(self) -> None:
            self.envs = [CountingEnv(max_steps=2, adds_up=True), CountingEnv(max_steps=4)]

        def stacked(self, parts: list[TensorDictBase]) -> TensorDictBase:
            return LazyStackedTensorDict(*parts, stack_dim=0)

        def rand_action(self, td: TensorDictBase) -> TensorDictBase:
            return self.stacked([env.rand_action(part) for env, part in zip(self.envs, td.unbind(0), strict=True)])

        def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
            return self.stacked([env.reset() for env in self.envs])

        def step(self, td: TensorDictBase) -> TensorDictBase:
            for env, part in zip(self.envs, td.unbind(0), strict=True):
                env.step(part)
            return td

    td = roll(Pair(), break_when_all_done=True)
    assert isinstance(td, LazyStackedTensorDict)
    assert (td.batch_size, td.names, td.stack_dim) == (torch.Size([2, 4]), [None, "time"], 0)
    assert seen(td["next"]) == [[1, 2, 2, 2], [1, 2, 3, 4]]
    assert ["total" in part for part in td.tensordicts] == [True, False]


def test_agents_that_differ_begin_anew() -> None:
    env = HeterogeneousCountingEnv(max_steps=2, nest_done=True, exclusive_keys=True)
    start = env.step_mdp(roll(env)[-1])
    td = roll(env, auto_reset=False, start=start)
    assert [td[step].get("lazy")[0]["observation"].item() for step in range(2)] == [0, 1]
    assert not td[0].get("lazy")["done"].any()


# -- no fixed shape ----------------------------------------------------------------------------------------


def test_what_varies_in_shape_is_stacked_lazily() -> None:
    for contiguous in (None, False):
        td = roll(DynamicShapeEnv(), max_steps=3, return_contiguous=contiguous)
        assert isinstance(td, LazyStackedTensorDict)
        assert td.names == ["time"]
        assert [row["observation"].shape[0] for row in td.unbind(0)] == [1, 2, 3]
    with pytest.raises(RuntimeError) as caught:
        roll(DynamicShapeEnv(), max_steps=3, return_contiguous=True)
    assert caught.value.__notes__ == [
        "keys or shapes differ from step to step: call rollout with return_contiguous=False"
    ]


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)], ids=str)
def test_text(flags: tuple[bool, bool]) -> None:
    td = roll(NonTensorEnv(max_steps=3), max_steps=3, break_when_any_done=flags[0], break_when_all_done=flags[1])
    assert td["text"] == ["step 0", "step 1", "step 2"]
    assert td["next", "text"] == ["step 1", "step 2", "step 3"]
    assert td["action"] == ["go"] * 3
    assert td[1]["text"] == "step 1"
    td = roll(NonTensorEnv(max_steps=3, batch_size=(2,)), max_steps=3, break_when_any_done=flags[0])
    assert td["next", "text"] == [["step 1", "step 2", "step 3"]] * 2


def test_text_of_finished_elements_is_repeated() -> None:
    class Apart(NonTensorEnv):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            td = super()._step(tensordict)
            over = td["observation"] >= torch.tensor([[1], [3]])
            return td.update({"done": over, "terminated": over.clone()})

    td = roll(Apart(batch_size=(2,)), break_when_all_done=True)
    assert td["text"] == [["step 0"] * 3, ["step 0", "step 1", "step 2"]]
    assert td["next", "text"] == [["step 1"] * 3, ["step 1", "step 2", "step 3"]]


# -- policies ----------------------------------------------------------------------------------------------


def test_a_policy_may_return_the_action_alone() -> None:
    td = roll(
        CountingEnv(batch_size=(2,)), lambda td: TensorDict({"action": td["observation"][..., 0] % 2}, [2]), max_steps=3
    )
    assert td["action"].tolist() == [[0, 1, 0]] * 2
    assert seen(td) == [[0, 1, 2]] * 2


def test_modules_are_policies() -> None:
    module = TensorDictModule(lambda x: x[..., 0] % 2, in_keys=["observation"], out_keys=["action"])
    td = roll(CountingEnv(batch_size=(2,)), module, max_steps=3)
    assert td["action"].tolist() == [[0, 1, 0]] * 2


def test_without_a_policy_every_action_key_is_filled() -> None:
    td = roll(MultiKeyCountingEnv(num_actions=50, batch_size=(3,)), max_steps=4)
    for key in ("action", ("left", "move"), ("right", "deep", "action")):
        assert td[key].unique().numel() > 1


@pytest.mark.parametrize("auto_cast", [False, True])
def test_gradients_flow_through_a_rollout(auto_cast: bool) -> None:
    policy = torch.nn.Linear(2, 2)
    td = roll(DifferentiableEnv(size=2, batch_size=(3,)), policy, max_steps=4, auto_cast_to_device=auto_cast)
    td["next", "reward"].sum().backward()
    assert policy.weight.grad is not None
    assert policy.weight.grad.abs().sum() > 0


def test_the_data_goes_to_the_device_of_the_policy() -> None:
    devices = []

    class Watching(torch.nn.Linear):
        def forward(self, tensordict: Any) -> Any:
            devices.append(tensordict.device)
            return tensordict.set("action", torch.zeros(2, dtype=torch.int64))

    td = roll(CountingEnv(batch_size=(2,)), Watching(1, 1), max_steps=2, auto_cast_to_device=True)
    assert devices == [torch.device("cpu")] * 2
    assert td.device is None


def test_coroutine_functions_need_an_async_env() -> None:
    async def policy(td: Any) -> Any:
        return td

    with pytest.raises(TypeError, match=r"returned <coroutine object .*, which has to be awaited; use an async env"):
        roll(CountingEnv(), policy)


# -- beginnings, ends, reports -----------------------------------------------------------------------------


def test_it_can_go_on_where_another_ended() -> None:
    env = Staggered(torch.tensor([2, 5]))
    first = roll(env, max_steps=2, break_when_any_done=False)
    second = roll(env, max_steps=3, break_when_any_done=False, auto_reset=False, start=env.step_mdp(first[:, -1]))
    assert seen(second) == [[0, 1, 0], [2, 3, 4]]
    assert not second["done"].any()


def test_the_beginning_is_not_changed_by_a_reset_of_finished_elements() -> None:
    env = Staggered(torch.tensor([1, 5]))
    start = env.step_mdp(roll(env)[:, -1])
    before = start.clone()
    roll(env, max_steps=2, auto_reset=False, start=start)
    assert set(start.keys()) - {"action"} == set(before.keys()) - {"action"}
    assert (start["done"] == before["done"]).all()


def test_a_nested_end_at_the_beginning_is_reset() -> None:
    env = NestedCountingEnv(max_steps=2, nested_dim=2)
    start = env.step_mdp(roll(env)[-1])
    assert start["data", "done"].all()
    td = roll(env, auto_reset=False, start=start)
    assert td["data", "observation"][..., 0].tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)], ids=str)
def test_the_last_step_is_marked_as_truncated(flags: tuple[bool, bool]) -> None:
    env = Staggered(torch.tensor([3, 9]))
    td = roll(env, max_steps=3, set_truncated=True, break_when_any_done=flags[0], break_when_all_done=flags[1])
    assert td["next", "truncated"][..., 0].tolist() == [[False, False, True]] * 2
    assert td["next", "done"][..., 0].tolist() == [[False, False, True]] * 2


def test_terminated_elements_are_not_truncated() -> None:
    class Terminating(Staggered):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            td = super()._step(tensordict)
            return td.update({"terminated": td["truncated"], "truncated": td["terminated"]})

    td = roll(Terminating(torch.tensor([2, 9])), max_steps=2, set_truncated=True)
    assert td["next", "truncated"][:, -1, 0].tolist() == [False, True]
    assert td["next", "done"][:, -1, 0].tolist() == [True, True]


def test_nested_flags_are_marked_as_truncated() -> None:
    class Truncating(NestedCountingEnv):
        def __init__(self) -> None:
            super().__init__(max_steps=9, nested_dim=2)
            done = self.full_done_spec.clone()
            done["data", "truncated"] = done["data", "done"].clone()
            self.done_spec = done

    td = roll(Truncating(), max_steps=3, set_truncated=True)
    assert td["next", "data", "truncated"][..., 0].tolist() == [[False] * 2] * 2 + [[True] * 2]
    assert td["next", "data", "done"][..., 0].tolist() == [[False] * 2] * 2 + [[True] * 2]


def test_truncation_needs_a_key_and_says_so_before_anything_is_stepped() -> None:
    env = CountingEnv()
    with pytest.raises(
        RuntimeError, match=r"set_truncated .* needs envs that declare the key 'truncated', and their done"
    ):
        roll(env, set_truncated=True)
    assert env.custom_property == 0


def test_a_reward_that_is_an_input_too_stays_at_the_root() -> None:
    class Fed(CountingEnv):
        state_keys = ("reward",)  # type: ignore[assignment]

    assert ["reward" in row for row in roll(Fed(), max_steps=3).unbind(0)] == [False, True, True]
    assert ["reward" in row for row in roll(CountingEnv(), max_steps=3).unbind(0)] == [False] * 3


def test_the_callback_gets_the_env_and_each_row() -> None:
    env, calls = CountingEnv(), []
    td = roll(env, callback=lambda *args: calls.append(args), max_steps=3)
    assert [caller is env for caller, _ in calls] == [True] * 3
    assert torch.stack([row["next", "observation"] for _, row in calls]).equal(td["next", "observation"])


def test_out_is_filled() -> None:
    out = roll(CountingEnv(batch_size=(2,)), max_steps=3).clone().zero_()
    assert roll(CountingEnv(batch_size=(2,)), max_steps=3, out=out) is out
    assert seen(out) == [[0, 1, 2]] * 2


# -- the generator -----------------------------------------------------------------------------------------


async def later(value: Any) -> Any:
    return value


def test_only_what_has_to_be_awaited_is_yielded() -> None:
    for value in (None, 3, TensorDict(), (TensorDict(), TensorDict())):
        with pytest.raises(StopIteration) as stopped:
            next(settle(value))
        assert stopped.value.value is value
    pending = later(3)
    steps = settle(pending)
    assert next(steps) is pending
    with pytest.raises(StopIteration) as stopped:
        steps.send(3)
    assert stopped.value.value == 3
    pending.close()


async def test_an_env_of_coroutines_is_awaited() -> None:
    class Later(CountingEnv):
        def reset(self, *args: Any, **kwargs: Any) -> Any:
            return later(super().reset(*args, **kwargs))

        def step(self, *args: Any) -> Any:
            return later(super().step(*args))

    async def policy(td: Any) -> Any:
        return td.set("action", torch.tensor(0))

    async def call_back(env: Any, td: TensorDictBase) -> None:
        awaited.append("callback")

    awaited: list[str] = []
    steps = rollout(Later(max_steps=3), options(), policy, call_back, None, None)
    pending, td = next(steps), None
    while td is None:
        awaited.append(pending.__name__)
        try:
            pending = steps.send(await pending)
        except StopIteration as stop:
            td = stop.value
    assert awaited == ["later", *["policy", "later", "call_back", "callback"] * 3]
    assert seen(td) == [0, 1, 2]
