"""What can be agreed about envs with Gymnasium's signatures: the dtype of rewards, infos, and who resets when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from failing_envs import CountingEnv
from vector_envs import Careless, Informer

from aioenvs.engine.adapters.base import INFO, Call, GymRules, Handling, ResetArguments
from aioenvs.engine.adapters.copying import received_dict
from aioenvs.engine.adapters.gymnasium import REWARD_KEY, GymAdapter
from aioenvs.engine.layout import INPUT, NEXT, ROOT, form_families
from aioenvs.engine.memory import own_memory
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.worker.env_host import EnvHost
from aioenvs.errors import SpecMismatchError


def hosted(rules: GymRules, *factories: Any) -> tuple[EnvHost, dict[str, Any]]:
    """A host with envs, which were reset, and their rows."""
    host = EnvHost(handling=Handling(rules=rules))
    for env, factory in enumerate(factories):
        host.build(env, factory, {})
    (family,) = form_families(host.metadata)
    buffer = own_memory(family.layout.end)
    host.attach([(family.envs, family.layout)], buffer)
    host.execute(Opcode.RESET, (), None)
    return host, family.layout.arrays(buffer)


def test_by_default_no_info_travels() -> None:
    host, _ = hosted(GymRules(), Informer)
    assert host.execute(Opcode.STEP, (), None).objects == {}


def test_infos_travel_where_there_are_any() -> None:
    host, _ = hosted(GymRules(reports_infos=True), CountingEnv)
    assert host.execute(Opcode.STEP, (), None).objects == {}
    assert host.execute(Opcode.RESET, (), None).objects == {}
    host, _ = hosted(GymRules(reports_infos=True), Informer)
    outcome = host.execute(Opcode.STEP, (), None)
    assert outcome.objects[0].keys() == {NEXT}
    assert outcome.objects[0][NEXT].keys() == {INFO}
    assert outcome.objects[0][NEXT][INFO]["count"] == 1
    host.execute(Opcode.STEP, (), None)
    outcome = host.execute(Opcode.STEP_AND_MAYBE_RESET, (), None)
    assert (outcome.finished, outcome.objects[0].keys()) == (1, {NEXT, ROOT})
    assert outcome.objects[0][NEXT][INFO]["count"] == 3
    assert outcome.objects[0][ROOT][INFO]["began"] is True


def test_an_info_is_a_copy() -> None:
    host, _ = hosted(GymRules(reports_infos=True), Careless)
    first = host.execute(Opcode.STEP, (), None).objects[0][NEXT][INFO]
    host.execute(Opcode.STEP, (), None)
    assert first["steps"] == 1
    assert first["array"].tolist() == [1, 1]


class BadInfo(CountingEnv):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], [1])


def test_an_info_must_be_a_dict() -> None:
    host, _ = hosted(GymRules(reports_infos=True), BadInfo)
    with pytest.raises(SpecMismatchError, match=r"env 0: expected a dict as info, found \[1\]"):
        host.execute(Opcode.STEP, (), None).raise_failure()


def test_the_step_after_the_last_begins_anew() -> None:
    rules = GymRules(resets_next=True)
    host, arrays = hosted(rules, lambda: CountingEnv(0, length=2), lambda: CountingEnv(1))
    seen = []
    for _ in range(4):
        arrays[INPUT]["action",][:] = 5
        host.execute(Opcode.STEP, (), None)
        following = arrays[NEXT]
        seen.append((following["observation",][:, 1:].tolist(), following[REWARD_KEY][:, 0].tolist()))
        assert following["done",][:, 0].tolist() == [len(seen) == 2, False]
    assert seen == [
        ([[1, 1, 5], [1, 1, 5]], [1, 1]),
        ([[1, 2, 10], [1, 2, 10]], [2, 2]),
        ([[2, 0, 0], [1, 3, 15]], [0, 3]),
        ([[2, 1, 5], [1, 4, 20]], [1, 4]),
    ]


class Paying(CountingEnv):
    pay: Any = 0

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return (observation, self.pay, *rest)


@pytest.mark.parametrize("pay", [0.1, 1e300, -1e300, float("inf"), np.float32(0.1), np.array([2.5]), 7])
def test_rewards_of_float64(pay: Any) -> None:
    host, arrays = hosted(GymRules("<f8"), Paying)
    host.execute(Opcode.CALL, (), {0: Call("set", "pay", (pay,))})
    host.execute(Opcode.STEP, (), None).raise_failure()
    assert arrays[NEXT][REWARD_KEY].dtype == np.float64
    assert arrays[NEXT][REWARD_KEY].item() == float(np.asarray(pay).item())


@pytest.mark.parametrize(
    ("dtype", "pay", "words"),
    [
        ("<f4", 1e300, "a number that float32 can hold"),
        ("<f4", 10**400, "a number that float32 can hold"),
        ("<f8", 10**400, "a number that float64 can hold"),
        ("<f8", "much", "a number as reward"),
    ],
)
def test_rewards_that_cannot_be(dtype: str, pay: Any, words: str) -> None:
    host, _ = hosted(GymRules(dtype), Paying)
    host.execute(Opcode.CALL, (), {0: Call("set", "pay", (pay,))})
    with pytest.raises(SpecMismatchError, match=words):
        host.execute(Opcode.STEP, (), None).raise_failure()


def test_a_function_can_be_applied_to_an_env() -> None:
    host, _ = hosted(GymRules(), Informer)
    call = Call("apply", "", (lambda env, a, b: (env.level, a, b), 1), {"b": 2})
    assert host.execute(Opcode.CALL, (), {0: call}).values == {0: (7, 1, 2)}


def test_a_reset_of_ones_own_is_not_done_again() -> None:
    host, arrays = hosted(GymRules(resets_next=True), lambda: CountingEnv(0, length=1))
    host.execute(Opcode.STEP, (), None)
    host.execute(Opcode.RESET, (), {0: ResetArguments()})
    host.execute(Opcode.STEP, (), None)
    assert arrays[NEXT]["observation",][0, 1:3].tolist() == [2, 1]


def test_dicts_are_received_whole() -> None:
    array, nested = np.zeros(2), [1]
    own = received_dict({"a": array, "n": None, "x": np.float32(1), "s": "text"})
    array[:] = 5
    assert own["a"].tolist() == [0, 0]
    own = received_dict({"nested": nested, "array": array})
    nested.append(2)
    array[:] = 6
    assert own["nested"] == [1]
    assert own["array"].tolist() == [5, 5]


def test_an_adapter_follows_the_plain_rules_by_itself() -> None:
    assert GymAdapter(CountingEnv(), 0).metadata.leaves[NEXT][1].dtype == "<f4"
