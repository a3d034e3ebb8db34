"""Steps written into one batch as they come: the same as stacking them, whatever they consist of."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, assert_close

import aioenvs
from aioenvs.tensors.rollout import LARGE
from aioenvs.tensors.storage import StepStorage, name_time, size_of

N, T = 3, 4


def plain(step: int) -> TensorDictBase:
    following = TensorDict({"seen": torch.full((N, 5), step + 1), "done": torch.zeros(N, 1, dtype=torch.bool)}, [N])
    return TensorDict({"seen": torch.full((N, 5), step), "action": torch.rand(N), "next": following}, [N])


def with_text(step: int) -> TensorDictBase:
    return plain(step).set("text", NonTensorStack(*(f"{step} of {env}" for env in range(N))))


def with_one_text(step: int) -> TensorDictBase:
    return plain(step).set("text", NonTensorData(str(step), batch_size=[N]))


def only_text(step: int) -> TensorDictBase:
    return TensorDict({"text": NonTensorStack(*(f"{step} of {env}" for env in range(N)))}, [N])


def with_lazy_node(step: int) -> TensorDictBase:
    parts = [TensorDict({"x": torch.full((env + 1,), step)}) for env in range(N)]
    return plain(step).set("agents", LazyStackedTensorDict(*parts, stack_dim=0))


def lazy(step: int) -> TensorDictBase:
    return LazyStackedTensorDict(*[TensorDict({"x": torch.full((env + 1,), step)}) for env in range(N)], stack_dim=0)


def growing(step: int) -> TensorDictBase:
    return plain(step) if step < 2 else plain(step).set("more", torch.ones(N))


def shrinking(step: int) -> TensorDictBase:
    return plain(step) if step < 2 else plain(step).exclude(("next", "done"))


def resized(step: int) -> TensorDictBase:
    return plain(step).set("seen", torch.full((N, 5 + step // 2), step))


def retyped(step: int) -> TensorDictBase:
    return plain(step) if step < 2 else plain(step).set("action", torch.zeros(N, dtype=torch.int64))


STEPS = [plain, with_text, with_one_text, only_text, with_lazy_node, lazy, growing, shrinking, resized, retyped]


def same(found: TensorDictBase, expected: TensorDictBase) -> None:
    assert found.batch_size == expected.batch_size
    assert found.names == expected.names
    for one, other in zip(found.unbind(0), expected.unbind(0), strict=True):
        for left, right in zip(one.unbind(0), other.unbind(0), strict=True):
            own, others = left.to_dict(), right.to_dict()
            assert set(own) == set(others)
            assert_close(left.select(*_tensors(left)), right.select(*_tensors(right)))
            assert own.get("text") == others.get("text")


def _tensors(td: TensorDictBase) -> list[Any]:
    return [key for key, value in td.items(True, True) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("make", STEPS)
def test_steps_of_all_envs_are_stacked_along_time(make: Callable[[int], TensorDictBase]) -> None:
    storage = StepStorage(T, None)
    steps = [make(step) for step in range(T)]
    for left, step in zip(range(T, 0, -1), steps, strict=True):
        assert storage.left == left
        storage.write(step)
    assert storage.left == 0
    same(storage.finish(), name_time(LazyStackedTensorDict.maybe_dense_stack(steps, 1), 1))


@pytest.mark.parametrize("make", STEPS)
def test_steps_of_single_envs_stand_in_their_order(make: Callable[[int], TensorDictBase]) -> None:
    storage = StepStorage(T * N, None, flat=True)
    rows = []
    for step in range(T):
        td = make(step)
        rows += list(td.unbind(0))
        storage.write(td[:1])
        storage.write(td[1:])
    assert storage.left == 0
    found, expected = storage.finish(), LazyStackedTensorDict.maybe_dense_stack(rows, 0)
    same(found.unsqueeze(0), expected.unsqueeze(0))


def test_what_was_written_stays_when_the_step_changes() -> None:
    storage, step = StepStorage(2, None), plain(7)
    storage.write(step)
    step.get("seen").zero_()
    storage.write(step)
    assert storage.finish()["seen"][:, 0].eq(7).all()


@pytest.mark.parametrize("make", [growing, shrinking, resized])
def test_where_one_tensor_for_each_key_is_asked_for_others_are_an_error(make: Callable[[int], TensorDictBase]) -> None:
    storage = StepStorage(T, None)
    for step in range(T):
        storage.write(make(step))
    with pytest.raises(RuntimeError):
        storage.finish(contiguous=True)


def test_a_graph_is_kept_where_it_is_asked_for_and_only_there() -> None:
    weight = torch.ones(N, requires_grad=True)
    for keeps_graph in (True, False):
        storage = StepStorage(2, None, keeps_graph=keeps_graph)
        storage.write(plain(0))
        storage.write(plain(1).set("action", weight * 3))
        action = storage.finish()["action"]
        assert action.requires_grad is keeps_graph
        assert action[:, 1].eq(3).all()
    weight_of = torch.autograd.grad(weight.mul(2).sum(), weight)[0]
    assert weight_of.eq(2).all()


def test_the_size_of_a_step_counts_what_has_a_fixed_one() -> None:
    assert size_of(plain(0)) == N * (5 * 8 + 4 + 5 * 8 + 1)
    assert size_of(with_text(0)) == size_of(plain(0)) == size_of(with_lazy_node(0))
    assert size_of(lazy(0)) == 0


# -- rollouts of large steps ----------------------------------------------------------------------------


class Frames(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 255, (LARGE,), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length: int) -> None:
        self._length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return np.full(LARGE, 100, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        return np.full(LARGE, self._count, np.uint8), float(action), self._count >= self._length, False, {}


@pytest.mark.parametrize("storing_device", [None, "cpu"])
@pytest.mark.parametrize("contiguous", [None, True])
def test_a_rollout_of_large_steps_is_one_of_small_steps(contiguous: bool | None, storing_device: str | None) -> None:
    seen = []

    def note(_: Any, row: TensorDictBase) -> None:
        row.set("noted", torch.full((2,), len(seen)))
        seen.append(row)

    with aioenvs.SerialEnv(2, lambda: Frames(3)) as env:
        rollout = env.rollout(
            7,
            callback=note,
            break_when_any_done=False,
            return_contiguous=contiguous,
            set_truncated=True,
            storing_device=storing_device,
        )
    assert rollout.shape == (2, 7)
    assert rollout.names == [None, "time"]
    assert type(rollout) is TensorDict
    assert rollout["observation"][0, :, 0].tolist() == [100, 1, 2, 100, 1, 2, 100]
    assert rollout["next", "observation"][1, :, -1].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert rollout["next", "terminated"].flatten().tolist() == [False, False, True] * 2 + [False] + [
        False,
        False,
        True,
    ] * 2 + [False]
    assert rollout["next", "truncated"][:, :, 0].any(0).tolist() == [False] * 6 + [True]
    assert rollout["noted"][0].tolist() == list(range(7))
    assert torch.equal(rollout["next", "reward"][..., 0], rollout["action"].float())
    assert rollout["observation"].is_contiguous()


def test_a_rollout_of_large_steps_whose_keys_differ_says_what_to_do() -> None:
    def note(_: Any, row: TensorDictBase) -> None:
        if not row["observation"].eq(100).all():
            row.set("extra", torch.zeros(2))

    with aioenvs.SerialEnv(2, lambda: Frames(9)) as env:
        lazily = env.rollout(3, callback=note, break_when_any_done=False)
        assert isinstance(lazily, LazyStackedTensorDict)
        assert lazily.shape == (2, 3)
        with pytest.raises(RuntimeError) as caught:
            env.rollout(3, callback=note, break_when_any_done=False, return_contiguous=True)
    assert any("return_contiguous=False" in note for note in caught.value.__notes__)
