"""The check of an env against its specs: what it accepts, and how it names what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from aioenvs.envs import EnvBase, GymEnv, check_async_env_specs, check_env_specs
from aioenvs.errors import SpecMismatchError
from aioenvs.specs import Bounded, Categorical, Composite, NonTensor, Unbounded


class Walk(EnvBase):
    """Has an observation at the root and one in a node, and ends after two steps."""

    def __init__(self, *batch_size: int, spoil: Callable[[TensorDictBase], Any] | None = None, **options: Any) -> None:
        super().__init__(batch_size=batch_size, **options)
        self.spoil = spoil
        self.observation_spec_unbatched = Composite(x=Bounded(0, 9, (2,)), node=Composite(y=Categorical(3, (1,))))
        self.action_spec_unbatched = Bounded(-1, 1, (1,))
        self.reward_spec_unbatched = Unbounded((1,))
        self.time = 0
        self.seed: int | None = None

    def _made(self, **more: Any) -> TensorDictBase:
        size = self.batch_size
        node = TensorDict({"y": torch.zeros(*size, 1, dtype=torch.int64)}, size)
        return TensorDict({"x": torch.full((*size, 2), float(self.time)), "node": node, **more}, size)

    def _reset(self, tensordict: Any = None) -> TensorDictBase:
        self.time = 0
        return self._made()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.time += 1
        ended = torch.full((*self.batch_size, 1), self.time >= 2)
        out = self._made(reward=torch.zeros(*self.batch_size, 1), done=ended)
        if self.spoil is not None:
            self.spoil(out)
        return out

    def _set_seed(self, seed: int | None) -> None:
        self.seed = seed


@pytest.mark.parametrize("stop", [None, True, False, "both"])
@pytest.mark.parametrize("batch_size", [(), (4,), (2, 3), (3, 0)])
def test_an_env_that_keeps_its_word_passes(batch_size: tuple[int, ...], stop: Any) -> None:
    check_env_specs(Walk(*batch_size), break_when_any_done=stop)


def test_a_gymnasium_env_passes() -> None:
    check_env_specs(GymEnv("CartPole-v1"), seed=0, break_when_any_done="both")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda td: td.set("new", torch.zeros(1)), r"missing in the specs: \[\('next', 'new'\)\]"),
        (lambda td: td.set(("node", "new"), torch.zeros(1)), r"missing in the specs: \[\('next', 'node', 'new'\)\]"),
        (lambda td: td.pop(("node", "y")), r"\('node', 'y'\): expected Categorical"),
        (lambda td: td.pop("reward"), "'reward': expected Unbounded"),
        (lambda td: td.set("x", torch.zeros(3)), r"'x': expected shape \(2,\), found \(3,\)"),
        (lambda td: td.set("x", torch.zeros(5, 2)), r"'x': expected shape \(2,\), found \(5, 2\)"),
        (lambda td: td.set("x", torch.full((2,), 10.0)), r"'x': expected elements .*, found \[10.0, 10.0\]"),
        (lambda td: td.set("x", torch.zeros(2).double()), "'x': expected dtype float32, found float64"),
        (lambda td: td.set(("node", "y"), torch.tensor([3])), r"observation, at next: \('node', 'y'\): expected"),
        (lambda td: td.set("reward", torch.zeros(1).double()), "reward, at next: 'reward': expected dtype"),
        (lambda td: td.set("done", torch.zeros(1)), r"'done': expected dtype torch\.bool"),
        (lambda td: td.set("x", NonTensorData("text")), "'x': expected"),
    ],
)
def test_the_error_names_key_expected_and_found(spoil: Any, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=message):
        check_env_specs(Walk(spoil=spoil))


def test_both_sides_of_the_difference_of_keys_are_named() -> None:
    env = Walk(spoil=lambda td: td.set("new", torch.zeros(1)))
    env.state_spec = Composite(hidden=Unbounded((1,)))
    with pytest.raises(SpecMismatchError) as caught:
        check_env_specs(env)
    assert "missing in the rollout: ['hidden']" in str(caught.value)
    assert "missing in the specs: [('next', 'new')]" in str(caught.value)
    assert "Walk(batch_size=(), device=None)" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_dtypes_may_be_left_out() -> None:
    env = Walk(spoil=lambda td: td.set("x", td["x"].double()))
    check_env_specs(env, check_dtype=False)
    env.spoil = lambda td: td.set("x", torch.zeros(3).double())
    with pytest.raises(SpecMismatchError, match="expected shape"):
        check_env_specs(env, check_dtype=False)


def test_a_wrong_batch_size_of_a_node_is_found() -> None:
    env = Walk(2)
    size = (2, 3)
    env.observation_spec = Composite(
        x=Unbounded((2, 2)), node=Composite(y=Categorical(3, (*size, 1)), shape=size), shape=(2,)
    )
    made = env._made
    env._made = lambda **more: made(  # type: ignore[method-assign]
        **{"node": TensorDict({"y": torch.zeros(*size, 1, dtype=torch.int64)}, [2]), **more}
    )
    with pytest.raises(SpecMismatchError, match=r"'node': expected batch size \(2, 3\), found \(2,\)"):
        check_env_specs(env)


def test_what_is_wrong_only_later_is_found() -> None:
    def spoil(td: TensorDictBase) -> None:
        if td["done"].any():
            td["x"] += 100

    with pytest.raises(SpecMismatchError, match="'x': expected elements"):
        check_env_specs(Walk(spoil=spoil))


def test_a_device_that_is_not_the_envs_is_found() -> None:
    env = Walk(device="cpu")
    env.to("meta")
    env._received = lambda out, shape, method: out  # type: ignore[method-assign]
    with pytest.raises((SpecMismatchError, RuntimeError, NotImplementedError)):
        check_env_specs(env)


def test_the_seed_is_for_the_env_and_for_torch_only_meanwhile() -> None:
    env = Walk()
    state = torch.get_rng_state()
    check_env_specs(env, seed=5)
    assert env.seed == 5
    assert torch.equal(torch.get_rng_state(), state)


class Free(Walk):
    batch_locked = False

    def _reset(self, tensordict: Any = None) -> TensorDictBase:
        raise AssertionError("the rollout begins with what it was given")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        node = tensordict["node"].clone()
        out = {"x": tensordict["x"].clone(), "node": node, "reward": torch.zeros(*tensordict.shape, 1)}
        return TensorDict(out, tensordict.batch_size)


@pytest.mark.parametrize("size", [(), (5,), (2, 3)])
def test_a_rollout_may_begin_with_what_is_given(size: tuple[int, ...]) -> None:
    env = Free()
    start = env.full_observation_spec.zero(size).update(env.full_done_spec.zero(size))
    keys = set(start.keys(True))
    check_env_specs(env, tensordict=start)
    assert set(start.keys(True)) == keys


def test_sizes_that_vary_and_other_things_than_tensors() -> None:
    class Ragged(Walk):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(x=Unbounded((-1, 2)), text=NonTensor((), example_data="a"))

        def _made(self, **more: Any) -> TensorDictBase:
            return TensorDict({"x": torch.zeros(self.time + 1, 2), "text": NonTensorData(str(self.time)), **more})

    check_env_specs(Ragged(), break_when_any_done="both")
    check_env_specs(Ragged(), return_contiguous=False)


def test_contiguity_can_be_chosen() -> None:
    check_env_specs(Walk(), return_contiguous=True)
    check_env_specs(Walk(), return_contiguous=False)


class AsyncWalk:
    """The same env, whose methods are coroutines."""

    def __init__(self, env: Walk) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def set_seed(self, seed: int) -> int:
        return self._env.set_seed(seed)

    async def rollout(self, max_steps: int, **options: Any) -> TensorDictBase:
        return self._env.rollout(max_steps, **options)


async def test_async_envs_are_checked_likewise() -> None:
    env = Walk()
    await check_async_env_specs(AsyncWalk(env), seed=3, break_when_any_done="both")
    assert env.seed == 3
    env.spoil = lambda td: td.set("x", torch.zeros(3))
    with pytest.raises(SpecMismatchError, match="'x': expected shape"):
        await check_async_env_specs(AsyncWalk(env))
