"""What our errors say holds the words of the peers' in the same situations, for those who look for them."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv
from tensordict import TensorDict
from torchrl.testing.mocking_classes import CountingBatchedEnv, CountingEnv
from torchrl_envs import theirs

import aioenvs
from aioenvs.integrations import torchrl as dress
from aioenvs.integrations.gymnasium import AioVectorEnv
from aioenvs.integrations.sb3 import AioVecEnv

make: Callable[[], Any] = functools.partial(theirs.GymEnv, "CartPole-v1")
make_gym: Callable[[], Any] = functools.partial(gym.make, "CartPole-v1")


class Case(NamedTuple):
    """A situation in which a peer raises, and so do we.

    Attributes:
        words: Of the peer's error, for ours to have.
        kind: What is raised.
        act: Gets there with one of the classes.
    """

    words: str
    kind: type[Exception]
    act: Callable[[Any], Any]


def error_of(case: Case, cls: Any) -> str:
    with pytest.raises(case.kind) as caught:
        case.act(cls)
    return str(caught.value)


def error_of_peer(case: Case, cls: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return error_of(case, cls)


def named(case: Any) -> str:
    return case.words.replace(" ", "-") if isinstance(case, Case) else ""


# -- TorchRL --------------------------------------------------------------------------------------------


def started(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What is done with two envs that were reset."""

    def act_on(cls: Any) -> Any:
        env = cls(2, make)
        try:
            env.reset()
            return act(env)
        finally:
            env.close(raise_if_closed=False)

    return act_on


def used_late(env: Any) -> None:
    view = env[0]
    env.close()
    view.reset()


def closed_twice(env: Any) -> None:
    env.close()
    env.close()


def put_back(env: Any) -> None:
    env[0] = make()


def stepped_by_one(env: Any) -> None:
    env.step(TensorDict({"action": env.action_spec.rand()[:1]}, [1]))


def stepped_in_part(cls: Any) -> None:
    env = cls(2, functools.partial(CountingBatchedEnv, max_steps=torch.tensor([5, 5]), batch_size=[2]))
    try:
        env.step(env.rand_action(env.reset()).set("_step", torch.tensor([[True, True], [True, False]])))
    finally:
        env.close(raise_if_closed=False)


def cut_off(cls: Any) -> None:
    env = cls(2, CountingEnv)
    try:
        env.rollout(2, set_truncated=True)
    finally:
        env.close(raise_if_closed=False)


def stacked(cls: Any) -> None:
    env = cls(2, [CountingEnv, make], share_individual_td=False)
    try:
        env.reset()
    finally:
        env.close(raise_if_closed=False)


TORCHRL = [
    Case("len(create_env_fn) and num_workers mismatch", RuntimeError, lambda cls: cls(4, [make, make])),
    Case(
        "len(create_env_kwargs) and num_workers mismatch",
        RuntimeError,
        lambda cls: cls(4, make, create_env_kwargs=[{}, {}]),
    ),
    Case("len(kwargs) and num_workers mismatch", RuntimeError, lambda cls: cls(2, make).update_kwargs([{}])),
    Case("allow_step_when_done is deprecated", ValueError, lambda cls: cls(2, make, allow_step_when_done=True)),
    Case(
        "memmap and shared memory are mutually exclusive features",
        RuntimeError,
        lambda cls: cls(2, make, memmap=True, shared_memory=True),
    ),
    Case(
        "Boolean masks are not supported for batched envs",
        NotImplementedError,
        started(lambda env: env[torch.tensor([True, False])]),
    ),
    Case("Empty batched env indexing is not supported", IndexError, started(lambda env: env[2:])),
    Case("index 2 is out of bounds for 2 envs", IndexError, started(lambda env: env[2])),
    Case("Batched env indices must be scalar or 1D", IndexError, started(lambda env: env[torch.zeros(1, 1).long()])),
    Case("parent environment has been closed", RuntimeError, started(used_late)),
    Case("trying to close a closed environment", RuntimeError, started(closed_twice)),
    Case("attribute telepathy not found in ", AttributeError, started(lambda env: env.telepathy)),
    Case("not support snapshot writeback", NotImplementedError, started(put_back)),
    Case("Expected a tensordict with shape==env.batch_size, ", RuntimeError, started(stepped_by_one)),
    Case(
        "Cannot have both break_when_all_done and break_when_any_done True at the same time",
        TypeError,
        started(lambda env: env.rollout(2, break_when_all_done=True, break_when_any_done=True)),
    ),
    Case("set_truncated was set to True but no truncated key could be found", RuntimeError, cut_off),
    Case("_step mask must select whole workers", ValueError, stepped_in_part),
    Case(
        "share_individual_td=False was provided but share_individual_td must be True to accommodate non-stackable",
        ValueError,
        stacked,
    ),
]


@pytest.mark.parametrize("cls", [aioenvs.SerialEnv, dress.SerialEnv], ids=["own", "dress"])
@pytest.mark.parametrize("case", TORCHRL, ids=named)
def test_torchrls_words(case: Case, cls: Any) -> None:
    assert case.words in error_of_peer(case, theirs.SerialEnv)
    assert case.words in error_of(case, cls)


@pytest.mark.parametrize(
    "case",
    [
        Case(
            "Cannot use mp_start_method=spawn with envs of type",
            TypeError,
            lambda cls: cls(2, make, mp_start_method="spawn"),
        ),
        Case(
            "metadata_from_workers=True is only supported by ParallelEnv",
            TypeError,
            lambda cls: cls(2, make, metadata_from_workers=True),
        ),
    ],
    ids=named,
)
def test_those_of_torchrls_options(case: Case) -> None:
    assert case.words in error_of_peer(case, theirs.SerialEnv)
    assert case.words in error_of(case, dress.SerialEnv)


def asked_too_early(cls: Any) -> None:
    env = cls(2, make, mp_start_method="fork")
    try:
        env.telepathy  # noqa: B018
    finally:
        env.close(raise_if_closed=False)


@pytest.mark.parametrize("cls", [aioenvs.ParallelEnv, dress.ParallelEnv], ids=["own", "dress"])
def test_those_of_a_batch_that_does_not_run(cls: Any) -> None:
    case = Case("Trying to access attributes of closed/non started environments", RuntimeError, asked_too_early)
    assert case.words in error_of_peer(case, theirs.ParallelEnv)
    assert case.words in error_of(case, cls)


# -- Gymnasium ------------------------------------------------------------------------------------------


class Bounded(gym.Env[Any, Any]):
    """Has these spaces."""

    def __init__(self, high: int = 9, shape: tuple[int, ...] = (2,), choices: int = 2) -> None:
        self.observation_space = spaces.Box(-high, high, shape, np.float32)
        self.action_space = spaces.Discrete(choices)


class Continuous(Bounded):
    """Has another kind of actions."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(0, 1, (2,), np.float32)


def differing(**second: Any) -> list[Callable[[], Any]]:
    return [Bounded, functools.partial(Bounded, **second)]


@contextlib.contextmanager
def two(cls: Any) -> Iterator[Any]:
    envs = cls([make_gym] * 2, context="fork") if cls is AsyncVectorEnv else cls([make_gym] * 2)
    try:
        yield envs
    finally:
        envs.close()


def having(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What is done with two envs that were reset."""

    def act_on(cls: Any) -> Any:
        with two(cls) as envs:
            envs.reset()
            return act(envs)

    return act_on


def masked(mask: Any) -> Callable[[Any], Any]:
    return having(lambda envs: envs.reset(options={"reset_mask": mask}))


def while_stepping(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def act_on(envs: Any) -> Any:
        envs.step_async(np.zeros(2, np.int64))
        try:
            return act(envs)
        finally:
            envs.step_wait()

    return having(act_on)


def used_closed(envs: Any) -> None:
    envs.close()
    envs.reset()


def envs_of(makes: list[Any], **options: Any) -> Callable[[Any], Any]:
    return lambda cls: cls(makes, **options)


BOTH = [
    Case(
        "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation space, "
        "actual got invalid",
        ValueError,
        envs_of([make_gym], observation_mode="invalid"),
    ),
    Case(
        "Expected both elements of observation_mode to be Spaces, got ",
        TypeError,
        envs_of([make_gym], observation_mode=(1, 2)),
    ),
    Case("VectorEnv(..., observation_mode='same') however ", RuntimeError, envs_of(differing(high=8))),
    Case("the sub-environments observation spaces are not equivalent. ", RuntimeError, envs_of(differing(high=8))),
    Case("If this is intentional, use `observation_mode='different'`", RuntimeError, envs_of(differing(high=8))),
    Case("the sub-environments observation spaces are not equivalent. ", RuntimeError, envs_of(differing(shape=(3,)))),
    Case(
        "observation spaces do not share a common shape and dtype",
        RuntimeError,
        envs_of(differing(shape=(3,)), observation_mode=(spaces.Box(-9, 9, (2, 2)), spaces.Box(-9, 9, (2,)))),
    ),
    Case("'later' is not a valid AutoresetMode", ValueError, envs_of([make_gym], autoreset_mode="later")),
    Case(
        "If seeds are passed as a list the length must match num_envs=2 but got length=3",
        ValueError,
        having(lambda envs: envs.reset(seed=[1, 2, 3])),
    ),
    Case("`options['reset_mask']` must be a numpy array, got ", TypeError, masked([True, False])),
    Case("`options['reset_mask']` must have shape `(2,)`, got (3,)", ValueError, masked(np.ones(3, bool))),
    Case("`options['reset_mask']` must have shape `(2,)`, got (3,)", ValueError, masked(np.ones(3, np.int64))),
    Case("`options['reset_mask']` must have `dtype=np.bool_`, got int64", TypeError, masked(np.ones(2, np.int64))),
    Case(
        "`options['reset_mask']` must contain a boolean array with at least one True value, "
        "got reset_mask=[False False]",
        ValueError,
        masked(np.zeros(2, bool)),
    ),
    Case("Unable to iterate over the following elements: 0", TypeError, having(lambda envs: envs.step(0))),
    Case(
        "Values must be a list or tuple with length equal to the number of environments. Got `3` values for 2 "
        "environments",
        ValueError,
        having(lambda envs: envs.set_attr("level", [1, 2, 3])),
    ),
]
PROCESSES = [
    Case("Some environments have an action space different from ", RuntimeError, envs_of(differing(choices=3))),
    Case("the action spaces from all environments must be equal", RuntimeError, envs_of(differing(choices=3))),
    Case("Some environments have an action space different from ", RuntimeError, envs_of([Bounded, Continuous])),
    Case("`max_concurrency` must be an integer or None, got ", ValueError, envs_of([make_gym], max_concurrency="2")),
    Case("`max_concurrency` must be a positive ", ValueError, envs_of([make_gym], max_concurrency=0)),
    Case("cannot find context for 'thread'", ValueError, envs_of([make_gym], context="thread")),
    Case(
        "Trying to call function `reset` with `call`, use `reset` directly instead",
        ValueError,
        having(lambda envs: envs.call("reset")),
    ),
    Case(
        "Calling `step_wait` without any prior call to `step_async`",
        NoAsyncCallError,
        having(lambda envs: envs.step_wait()),
    ),
    *(
        Case(f"Calling `{name}` while waiting for a pending call to `step` to complete", AlreadyPendingCallError, act)
        for name, act in {
            "step_async": while_stepping(lambda envs: envs.step(np.zeros(2, np.int64))),
            "reset_async": while_stepping(lambda envs: envs.reset()),
            "call_async": while_stepping(lambda envs: envs.call("spec")),
            "set_attr": while_stepping(lambda envs: envs.set_attr("level", 1)),
        }.items()
    ),
    Case("VectorEnv`, after a call to `close()`", ClosedEnvironmentError, having(used_closed)),
]


@pytest.mark.parametrize(
    ("case", "peer"),
    [*((case, SyncVectorEnv) for case in BOTH), *((case, AsyncVectorEnv) for case in PROCESSES)],
    ids=named,
)
def test_gymnasiums_words(case: Case, peer: Any) -> None:
    ours = AioVectorEnv if "context" in case.words else functools.partial(AioVectorEnv, backend="serial")
    assert case.words in error_of_peer(case, peer)
    assert case.words in error_of(case, ours)


# -- SB3 ------------------------------------------------------------------------------------------------


def shared(cls: Any) -> None:
    with contextlib.closing(make_gym()) as env:
        cls([lambda: env] * 2)


def no_images(cls: Any) -> Any:
    envs = cls([make_gym])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return envs.get_images()
    finally:
        envs.close()


@pytest.mark.parametrize(
    "case",
    [
        Case(
            "You tried to create multiple environments, but the function to create them returned the same instance "
            "instead of creating different objects",
            ValueError,
            shared,
        ),
        Case("index out of range", IndexError, having(lambda envs: envs.get_attr("spec", indices=5))),
        Case(
            "The render mode is None, but this method assumes it is `rgb_array` to obtain images",
            UserWarning,
            no_images,
        ),
    ],
    ids=named,
)
def test_sb3s_words(case: Case) -> None:
    assert case.words in error_of_peer(case, DummyVecEnv)
    assert case.words in error_of(case, functools.partial(AioVecEnv, backend="serial"))


# -- names of options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (functools.partial(aioenvs.ParallelEnv, 2), {"mp_start_method": "thread"}, "mp_start_method must be one of"),
        (AioVectorEnv, {"mp_start_method": "thread"}, "mp_start_method must be one of"),
        (AioVectorEnv, {"context": "thread"}, "context must be one of"),
        (AioVectorEnv, {"context": "spawn", "backend": "serial"}, "context='spawn' has no meaning"),
        (AioVecEnv, {"start_method": "thread"}, "start_method must be one of"),
        (AioVecEnv, {"start_method": "spawn", "backend": "serial"}, "start_method='spawn' has no meaning"),
        (AioVectorEnv, {"num_envs": 65536}, "num_envs must be between"),
        (AioVecEnv, {"n_envs": 65536}, "n_envs must be between"),
    ],
)
def test_options_have_the_names_that_the_caller_knows(cls: Any, options: dict[str, Any], words: str) -> None:
    makes = [make_gym] * options.pop("num_envs", options.pop("n_envs", 2))
    with pytest.raises((ValueError, TypeError), match=rf"(^|: ){words}"):
        cls(makes, **options)


@pytest.mark.parametrize(
    ("cls", "name"),
    [(functools.partial(aioenvs.ParallelEnv, 2), "create_env_fn"), (AioVectorEnv, "env_fns"), (AioVecEnv, "env_fns")],
)
def test_so_have_factories(cls: Any, name: str) -> None:
    with contextlib.closing(make_gym()) as env:
        for thing, words in ((env, "must make an env"), (3, "must be a callable")):
            with pytest.raises(TypeError, match=f"^{name} {words}"):
                cls([thing, thing])
