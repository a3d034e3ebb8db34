"""Attributes of the envs in TorchRL's dress, before a batch runs, while it does, and after it was closed."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.envs import GymEnv

from aioenvs import SerialEnv as PlainSerialEnv
from aioenvs.errors import ClosedError, NotRunningError, WorkerStartError
from aioenvs.integrations.torchrl import ParallelEnv, SerialEnv

FACES: list[Any] = [
    (SerialEnv, {}),
    (ParallelEnv, {"backend": "thread"}),
    (ParallelEnv, {"num_processes": 1, "mp_start_method": "fork"}),
]
over_faces = pytest.mark.parametrize(("face", "options"), FACES, ids=["serial", "thread", "process"])


class Gauge:
    """Stays where it is, for its lock; what it holds does not."""

    def __init__(self) -> None:
        self.level = 0
        self.lock = threading.Lock()
        self.marks = [1, 2, 1]

    def read(self) -> int:
        self.level += 1
        return self.level

    def count(self) -> str:
        return "counted"


class Horn(Gauge):
    def __call__(self) -> str:
        return "honk"


def make() -> GymEnv:
    env = GymEnv("CartPole-v1")
    env.gauge, env.horn, env.foo = Gauge(), Horn(), [3, 3]
    env._counter = lambda start=0: start + 1
    env._number = 5
    env.get_something = lambda given: given + 1
    return env


def refuse() -> GymEnv:
    raise ValueError("no display")


@over_faces
def test_chains_of_attributes_reach_the_envs(face: Any, options: Any) -> None:
    with face(2, make, **options) as env:
        assert env.gauge.level == [0, 0]
        assert env.gauge.read() == [1, 1]
        assert env[1].gauge.read() == [2]
        assert env.gauge.level == env.gauge.level() == [1, 2]
        assert (env.horn(), env.horn.read(), env.horn.level, list(env.horn.read)) == (
            ["honk"] * 2,
            [1, 1],
            [1, 1],
            [2, 2],
        )
        assert (env.gauge.marks.count(1), env.foo.count(3), env.gauge.count()) == ([2, 2], [2, 2], ["counted"] * 2)
        assert (env._number.count(5), env._number) == (2, [5, 5])  # numbers have no `count`, but their list has
        assert (env._counter(), env._counter(start=3)) == ([1, 1], [4, 4])
        assert not hasattr(env, "_nothing")
        assert not hasattr(env.gauge, "nothing")
        assert not hasattr(env.gauge, "_level")


@over_faces
def test_attributes_of_a_batch_that_does_not_run(face: Any, options: Any) -> None:
    env = face(2, make, **options)
    for name in ("foo", "_counter"):
        assert not hasattr(env, name)
        for expected in (RuntimeError, AttributeError, NotRunningError):
            with pytest.raises(expected, match="start"):
                getattr(env, name)
    assert env.is_closed
    env.close()  # nobody has used it
    env.start()
    assert list(env.foo) == [[3, 3], [3, 3]]
    assert env.get_something(0) == [1, 1]
    view = env[1]
    env.close()
    for batch in (env, view):
        with pytest.raises(RuntimeError, match="closed"):
            _ = batch.foo
    with pytest.raises(RuntimeError, match="closed already"):
        env.close()
    own = PlainSerialEnv(2, "CartPole-v1")
    for batch in (own, own[1]):
        with pytest.raises(NotRunningError) as caught:
            _ = batch.foo
        assert (caught.value.name, caught.value.obj) == ("foo", batch)


@over_faces
def test_a_view_neither_restarts_nor_steps_what_was_closed(face: Any, options: Any) -> None:
    env = face(3, make, **options)
    view = env[1:]
    td = view.rand_action(view.reset())
    env.close()
    other = env[0]
    for use in (
        view.reset,
        view.start,
        view.__enter__,
        lambda: view.step(td),
        lambda: view.step_and_maybe_reset(td),
        lambda: view.call("render"),
        lambda: view.set_seed(0),
        other.rand_step,
        view[0].reset,
    ):
        with pytest.raises(ClosedError):
            use()
    assert env.is_closed
    assert view.is_closed
    env.reset()
    assert view.reset().batch_size == (2,)
    env.close()


def test_metadata_from_workers_starts_in_the_constructor() -> None:
    options = {"metadata_from_workers": True, "num_processes": 1, "mp_start_method": "fork"}
    with pytest.raises(ValueError, match="no display") as caught:
        ParallelEnv(2, refuse, **options)
    assert isinstance(caught.value, WorkerStartError)
    env = ParallelEnv(2, make, **options)
    assert not env.is_closed
    env.start()  # as it says for those who do
    env.close()
    assert ParallelEnv(2, refuse, metadata_from_workers=False).is_closed


def test_as_the_tutorial_on_envs_has_it() -> None:
    env = ParallelEnv(3, [make, make, make], num_processes=1, mp_start_method="fork")
    env.reset()
    assert env.rollout(max_steps=20).batch_size[0] == 3
    env.reset()
    for index, size in ((slice(1, None), 2), (0, 1), (np.array([0, 2]), 2), (torch.tensor([0, 2]), 2)):
        assert env[index].batch_size == (size,)
    selected = env[1:]
    selected.rand_step()
    selected.close(raise_if_closed=False)
    env.rand_step()
    env.close()
    assert env.set_seed(10) is not None
    env.close()
    del env
    env = ParallelEnv(3, make, num_processes=1, mp_start_method="fork")
    with contextlib.suppress(RuntimeError):
        _ = env.foo
    if env.is_closed:
        env.start()
    assert list(env.foo) == [[3, 3]] * 3
    assert env.get_something(0) == [1, 1, 1]
    env.close()
