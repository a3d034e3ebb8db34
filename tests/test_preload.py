"""What is imported before workers are forked, by what the factories refer to."""

from __future__ import annotations

import functools
import sys
import threading
import types
from typing import Any

import gymnasium
import pytest
import talking_envs
import torch
from tensordict import TensorDict

import aioenvs
from aioenvs import ParallelEnv, SerialEnv
from aioenvs.engine.preload import modules_to_preload
from aioenvs.envs import EnvCreator, GymEnv
from aioenvs.testing import CountingEnv

NAMES = ("torch", "tensordict", "aioenvs.envs.unwrapping")
WEIGHT = torch.ones(2)
limit = 500


class NoEnv:
    """Has nothing to do with torch."""

    def __init__(self, size: int = 1) -> None:
        self.size = size


class Derived(CountingEnv):
    """Has to do with torch by its base only."""


class HoldsTorch:
    """Is called to make an env, and holds a tensor."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self) -> Any:
        return NoEnv()


def makes_nothing_of_torch() -> Any:
    return NoEnv(limit)


def makes_by_a_global() -> Any:
    return CountingEnv()


def makes_by_another_function() -> Any:
    return makes_by_a_global()


def makes_by_a_lambda_within() -> Any:
    return (lambda: next(makes_by_another_function() for _ in range(1)))()


def makes_itself(depth: int = 0) -> Any:
    return makes_itself(depth + 1) if depth < 3 else NoEnv()


def makes_of_a_tensor() -> Any:
    return WEIGHT.sum()


def imports_torch() -> Any:
    import torch as library

    return NoEnv(library.get_num_threads())


def imports_from_the_package() -> Any:
    from aioenvs import GymEnv as Made

    return Made("CartPole-v1")


def imports_from_a_module() -> Any:
    from talking_envs import TalkingEnv

    return TalkingEnv()


def imports_what_is_plain() -> Any:
    from aioenvs import Anything

    return Anything()


def enclosing(value: Any) -> Any:
    """A function with something in its closure."""
    return lambda: value


REFER = {
    "a class": CountingEnv,
    "a derived class": Derived,
    "a function with a global": makes_by_a_global,
    "a function with a function": makes_by_another_function,
    "a function with a lambda": makes_by_a_lambda_within,
    "a function with a tensor": makes_of_a_tensor,
    "a function that imports": imports_torch,
    "a function that imports from the package": imports_from_the_package,
    "a function that imports from a module": imports_from_a_module,
    "a lambda": lambda: CountingEnv(),
    "a lambda with the package": lambda: aioenvs.GymEnv("CartPole-v1"),
    "a lambda with a module of envs": lambda: talking_envs.TalkingEnv(),
    "a lambda with a module": lambda: torch.zeros(1),
    "a partial": functools.partial(CountingEnv, start=1),
    "a partial of a lambda": functools.partial(lambda start: CountingEnv(start=start), start=1),
    "a creator": EnvCreator(CountingEnv),
    "a creator of a lambda": EnvCreator(lambda: CountingEnv()),
    "a batch": lambda: SerialEnv(2, "CartPole-v1"),
    "a gymnasium env in tensors": lambda: GymEnv("CartPole-v1"),
    "a closure": enclosing(CountingEnv),
    "a closure with a tensor": enclosing(WEIGHT),
    "a closure with a TensorDict": enclosing(TensorDict({"a": WEIGHT}, [2])),
    "a callable with a tensor": HoldsTorch(WEIGHT),
    "a callable with a class": HoldsTorch([CountingEnv]),
    "a bound method": CountingEnv(custom_attr=1).custom_method,
}
DO_NOT = {
    "a class": NoEnv,
    "a function": makes_nothing_of_torch,
    "a recursive function": makes_itself,
    "a function that imports": imports_what_is_plain,
    "a lambda with gymnasium": lambda: gymnasium.make("CartPole-v1"),
    "a lambda with a wrapper": lambda: gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 5),
    "a lambda with the package": lambda: aioenvs.Anything(),
    "a lambda": lambda: NoEnv(limit),
    "a partial": functools.partial(NoEnv, 3),
    "a creator's function": enclosing(NoEnv),
    "a callable": HoldsTorch([1, "a"]),
    "a function of gymnasium": lambda: __import__("gymnasium").make("CartPole-v1"),
    "an unpicklable one": enclosing(threading.Lock()),
    "a builtin": dict,
}


@pytest.mark.parametrize("factory", REFER.values(), ids=REFER)
def test_factories_that_refer_to_torch(factory: Any) -> None:
    assert set(NAMES) <= set(modules_to_preload([factory]))
    assert set(NAMES) <= set(modules_to_preload([NoEnv, factory]))


@pytest.mark.parametrize("factory", DO_NOT.values(), ids=DO_NOT)
def test_factories_that_do_not(factory: Any) -> None:
    assert not set(NAMES) & set(modules_to_preload([factory]))


def test_what_stable_baselines_wraps_needs_that() -> None:
    from stable_baselines3.common.monitor import Monitor

    assert modules_to_preload([lambda: Monitor(gymnasium.make("CartPole-v1"))]) == (
        "gymnasium",
        "torch",
        "stable_baselines3",
    )


def test_ids_need_gymnasium_only() -> None:
    assert modules_to_preload(["CartPole-v1"]) == ("gymnasium",)


def test_gymnasium_is_only_imported_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gymnasium", raising=False)
    assert modules_to_preload([NoEnv]) == ()
    assert modules_to_preload([NoEnv, "CartPole-v1"]) == ("gymnasium",)
    assert modules_to_preload([CountingEnv]) == NAMES


def test_modules_of_the_users_are_never_imported_before() -> None:
    names = modules_to_preload([*REFER.values(), *DO_NOT.values(), "CartPole-v1"])
    assert {name.partition(".")[0] for name in names} <= {"gymnasium", "torch", "tensordict", "aioenvs"}


def test_a_script_that_imports_torch_for_something_else() -> None:
    script = types.ModuleType("__main__")
    lines = ["import torch", "net = torch.nn.Linear(1, 1)", "class Env: pass"]
    source = "\n".join([*lines, "make = lambda: Env()", "use = lambda: net(Env())"])
    exec(source, script.__dict__)
    assert not set(NAMES) & set(modules_to_preload([script.make]))
    assert set(NAMES) <= set(modules_to_preload([script.use]))


class Counted:
    """Counts how often it is pickled."""

    looked = 0

    def __call__(self) -> Any:
        return NoEnv()

    def __reduce__(self) -> Any:
        type(self).looked += 1
        return Counted, ()


def test_each_factory_is_looked_at_once() -> None:
    modules_to_preload([Counted()] * 50)
    assert Counted.looked == 1


def test_a_worker_without_torch_has_none() -> None:
    def modules() -> Any:
        import gymnasium

        class Telling(gymnasium.Wrapper):
            def has_torch(self) -> bool:
                return "torch" in __import__("sys").modules

        return Telling(gymnasium.make("CartPole-v1"))

    with ParallelEnv(1, modules) as env:
        assert env.has_torch() == [False]
