"""A keyword that does not exist: the message says which one may have been meant, and signatures stay visible."""

import inspect
from typing import Any

import pytest
from failing_envs import CountingEnv

import aioenvs
from aioenvs import (
    AsyncCollector,
    AsyncParallelEnv,
    AsyncSerialEnv,
    Collector,
    EnvBase,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    PettingZooWrapper,
    SerialEnv,
    check_env_specs,
    specs,
)
from aioenvs.hints import hints_at_keywords, keywords_of, meant
from aioenvs.integrations import torchrl as under_torchrl
from aioenvs.integrations.gymnasium import AioVectorEnv, make_vec, register, vector_spec
from aioenvs.integrations.sb3 import AioVecEnv

BATCHES = (AsyncParallelEnv, AsyncSerialEnv, ParallelEnv, SerialEnv)
COLLECTORS = (AsyncCollector, Collector)
VECTORS = (AioVectorEnv, AioVecEnv)
ENVS = (GymWrapper, PettingZooWrapper)
SPECS = (specs.Binary, specs.Bounded, specs.Categorical, specs.MultiCategorical, specs.NonTensor, specs.Unbounded)
FUNCTIONS = (check_env_specs, register, vector_spec)
ROLLOUTS = (AsyncParallelEnv.rollout, ParallelEnv.rollout)


def misspelt(name: str) -> str:
    """A slip of the finger: two letters changed places."""
    middle = len(name) // 2
    return name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]


@pytest.mark.parametrize(
    "called", [*BATCHES, *COLLECTORS, *VECTORS, *ENVS, *SPECS, *FUNCTIONS], ids=lambda c: c.__name__
)
def test_each_keyword_is_suggested_for_a_slip_of_it(called: Any) -> None:
    names = keywords_of(called)
    slips = [(name, misspelt(name)) for name in names if len(name) > 3 and misspelt(name) != name]
    assert slips
    for name, slip in slips:
        with pytest.raises(TypeError) as caught:
            called(**{slip: None})
        assert str(caught.value).startswith(f"{called.__name__}() got an unexpected keyword argument {slip!r}")
        assert str(caught.value).endswith(f"did you mean {name!r}?")


@pytest.mark.parametrize("called", [*BATCHES, under_torchrl.ParallelEnv, under_torchrl.SerialEnv])
def test_a_batch_is_made_with_the_others_right(called: Any) -> None:
    with pytest.raises(TypeError, match=r"'shutdown_timout'; did you mean 'shutdown_timeout'\?"):
        called(2, CountingEnv, create_env_kwargs={}, shutdown_timout=3.0)


@pytest.mark.parametrize(
    ("called", "keyword", "hint"),
    [
        (ParallelEnv, "num_envs", "did you mean 'num_workers'?"),
        (AsyncParallelEnv, "start_method", "did you mean 'mp_start_method'?"),
        (AioVectorEnv, "num_workers", "did you mean 'num_envs'?"),
        (AioVectorEnv, "start_method", "did you mean 'context'?"),
        (AioVecEnv, "num_envs", "did you mean 'n_envs'?"),
        (AioVecEnv, "create_env_fn", "did you mean 'env_fns'?"),
        (ParallelEnv, "render_mode", "what the envs take goes into create_env_kwargs={'render_mode': ...}"),
        (AioVecEnv, "render_mode", "help(AioVecEnv) lists those that there are"),
    ],
)
def test_names_of_other_libraries_and_of_the_envs(called: Any, keyword: str, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        called("CartPole-v1", **{keyword: 2})
    assert hint in str(caught.value)


def test_a_rollout_of_either_kind() -> None:
    with (
        SerialEnv(2, CountingEnv) as env,
        pytest.raises(TypeError, match=r"SerialEnv\.rollout\(\).*'break_when_any_done'"),
    ):
        env.rollout(3, brek_when_any_done=False)  # type: ignore[call-arg]


async def test_a_rollout_of_coroutines() -> None:
    assert inspect.iscoroutinefunction(AsyncSerialEnv.rollout)
    async with AsyncSerialEnv(2, CountingEnv) as env:
        with pytest.raises(TypeError, match=r"AsyncSerialEnv\.rollout\(\).*'break_when_any_done'"):
            await env.rollout(3, brek_when_any_done=False)  # type: ignore[call-arg]
        assert (await env.rollout(3, break_when_any_done=False)).shape == (2, 3)


@pytest.mark.parametrize("called", [*BATCHES, *COLLECTORS, *VECTORS, *ENVS, *FUNCTIONS, *ROLLOUTS, EnvBase.rollout])
def test_the_signature_is_there_to_see(called: Any) -> None:
    parameters = inspect.signature(called).parameters.values()
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters)
    assert any(each.default is not each.empty for each in parameters)
    assert called.__doc__ is not None


@pytest.mark.parametrize("called", [under_torchrl.ParallelEnv, under_torchrl.SerialEnv, under_torchrl.AsyncParallelEnv])
def test_the_signature_of_what_passes_options_on(called: Any) -> None:
    assert list(inspect.signature(called).parameters)[:2] == ["num_workers", "create_env_fn"]


def test_what_an_env_does_not_take_may_have_been_meant_for_the_wrapper() -> None:
    with pytest.raises(TypeError, match="frame_skpi") as caught:
        GymEnv("CartPole-v1", frame_skpi=2)
    assert caught.value.__notes__ == ["'frame_skpi' was passed on to what makes the env; did you mean 'frame_skip'?"]
    with pytest.raises(TypeError, match="gravity") as caught:
        GymEnv("CartPole-v1", gravity=2)
    assert not hasattr(caught.value, "__notes__")


def test_what_an_env_does_not_take_may_have_been_meant_for_the_vector() -> None:
    with pytest.raises(aioenvs.errors.WorkerStartError) as caught:
        make_vec("CartPole-v1", 2, num_procesess=1)
    assert any("vector_kwargs={'num_processes': ...}" in note for note in caught.value.__notes__)


def test_slips_are_told_from_other_names() -> None:
    assert meant("nmu_workers", ["num_workers", "device"]) == "num_workers"
    assert meant("colour", ["num_workers", "device"]) is None
    assert meant("n_envs", ["env_fns", "num_envs"]) == "num_envs"
    assert meant("n_envs", []) is None


def test_a_function_that_takes_any_keyword_cannot_tell() -> None:
    with pytest.raises(TypeError, match="any keyword"):
        hints_at_keywords(lambda **options: options)
