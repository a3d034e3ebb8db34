from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import Any

import cloudpickle
import pytest

from aioenvs.envs.creator import EnvCreator


class Env:
    """Counts how many of its kind were made."""

    made = 0

    def __init__(self, **kwargs: Any) -> None:
        type(self).made += 1
        self.kwargs = kwargs

    def reset(self) -> None: ...

    def step(self, action: Any) -> None: ...


def test_a_call_makes_a_new_env_each_time() -> None:
    before = Env.made
    creator = EnvCreator(Env, {"size": 3}, color="red")
    assert Env.made == before
    first, second = creator(), creator()
    assert first is not second
    assert first.kwargs == second.kwargs == {"size": 3, "color": "red"}


def test_arguments_of_the_call_prevail_over_the_stored_ones() -> None:
    creator = EnvCreator(Env, {"size": 3}, size=2, color="red")
    assert creator.create_env_kwargs == {"size": 3, "color": "red"}
    assert creator(size=5, speed=1).kwargs == {"size": 5, "color": "red", "speed": 1}
    assert creator().kwargs == {"size": 3, "color": "red"}


def test_a_variant_leaves_the_original_alone() -> None:
    kwargs = {"size": 3}
    creator = EnvCreator(Env, kwargs)
    variant = creator.make_variant(size=4, color="blue")
    assert type(variant) is EnvCreator
    assert variant is not creator
    assert variant().kwargs == {"size": 4, "color": "blue"}
    assert creator().kwargs == kwargs == {"size": 3}
    kwargs["size"] = 9
    assert creator().kwargs == {"size": 3}


def test_a_creator_of_a_creator() -> None:
    assert EnvCreator(EnvCreator(Env, size=1, color="red"), size=2)().kwargs == {"size": 2, "color": "red"}


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_lambdas_and_local_functions_travel(pickler: Any) -> None:
    secret = object.__new__(type("Local", (), {"value": 7}))

    def make(**kwargs: Any) -> tuple[int, dict[str, Any]]:
        return secret.value, kwargs

    for function in (make, lambda **kwargs: make(**kwargs)):
        creator = EnvCreator(function, size=3, key=lambda x: x + 1)
        there = pickle.loads(pickler.dumps(creator))
        value, kwargs = there(color="red")
        assert type(there) is EnvCreator
        assert (value, kwargs["size"], kwargs["color"], kwargs["key"](1)) == (7, 3, "red", 2)


def test_a_subclass_travels_as_such() -> None:
    class Special(EnvCreator):
        pass

    there = pickle.loads(pickle.dumps(Special(Env, size=3)))
    assert type(there).__name__ == type(there.make_variant()).__name__ == "Special"


def test_what_cannot_be_pickled_is_said_when_it_is_sent() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(EnvCreator(Env, lock=threading.Lock()))


def test_a_creator_needs_no_torch() -> None:
    """A worker of Gymnasium envs must not load it."""
    data = pickle.dumps(EnvCreator(dict, size=3))
    code = f"import pickle, sys; made = pickle.loads({data!r})(); print(made, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'size': 3} False"


@pytest.mark.parametrize("wrong", [3, "CartPole-v1", None])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"expected a function that makes an env, found {wrong!r}"):
        EnvCreator(wrong)


def test_an_env_is_no_function_even_if_it_can_be_called() -> None:
    class CallableEnv(Env):
        def __call__(self) -> None: ...

    for env in (Env(), CallableEnv()):
        with pytest.raises(TypeError, match=r"expected a function that makes an env, found the env .*lambda"):
            EnvCreator(env)  # type: ignore[arg-type]


def test_kwargs_must_be_a_mapping() -> None:
    with pytest.raises(TypeError, match=r"expected a mapping as create_env_kwargs, found \[1\]"):
        EnvCreator(Env, [1])  # type: ignore[arg-type]


def test_share_memory_has_no_meaning() -> None:
    with pytest.raises(TypeError, match="share_memory"):
        EnvCreator(Env, share_memory=True)


def test_repr_says_what_would_be_made() -> None:
    assert repr(EnvCreator(Env, size=3, color="red")) == "EnvCreator(Env, size=3, color='red')"
    assert repr(EnvCreator(EnvCreator(Env))) == "EnvCreator(EnvCreator(Env))"
    assert "<lambda>" in repr(EnvCreator(lambda: Env()))
