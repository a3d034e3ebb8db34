"""What the tests of the vector faces, Gymnasium's and SB3's, have in common."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from failing_envs import CountingEnv, Gate

from aioenvs.errors import ClosedError, ConcurrencyError

__all__ = ["HOSTS", "closed_in_the_middle_of_a_step", "counting"]

COUNT = 3
HOSTS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread"},
    "packed": {"num_processes": COUNT - 1},
    "one each": {"num_processes": COUNT},
}


def counting(each: dict[int, dict[str, Any]] | None = None, **common: Any) -> list[Callable[[], Any]]:
    """What makes three envs that count, some of them with more arguments than the others."""
    return [functools.partial(CountingEnv, env, **common, **(each or {}).get(env, {})) for env in range(COUNT)]


def closed_in_the_middle_of_a_step(make: Callable[[list[Callable[[], Any]]], Any], actions: Any, gate: Gate) -> None:
    """Whoever closes while another thread steps is told so, and can close later.

    Args:
        make: Makes the envs.
        actions: For a step.
        gate: Where one of them waits in its first step.
    """
    envs = make(counting({1: {"fault": gate.wait, "at": (1, 1)}}))
    envs.reset()
    stepped: list[Any] = []
    thread = threading.Thread(target=lambda: stepped.append(envs.step(actions)))
    thread.start()
    try:
        gate.wait_for_arrival()
        with pytest.raises(ConcurrencyError, match="in the middle of a call from another thread"):
            envs.close()
    finally:
        gate.open()
        thread.join()
    assert len(stepped) == 1
    envs.step(actions)
    envs.close()
    with pytest.raises(ClosedError):
        envs.step(actions)
