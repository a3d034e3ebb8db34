"""Whole trajectories, key by key the same as those of TorchRL's own batched envs over the same toys and actions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from oracle import DIFFERENCES, TORCHRL_MARKS
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase
from torch_faces import EVERY_TORCH_FACE, Driver, TorchFace

from aioenvs import SerialEnv, testing

pytestmark = [*TORCHRL_MARKS, pytest.mark.slow, pytest.mark.every_combination]
COUNT = 3
STEPS = 7
FACES = {param.id: param.values[0] for param in EVERY_TORCH_FACE}
OWN = [FACES[name] for name in ("serial", "async-serial", "packed", "thread")]
SELECTED = torch.tensor([True, False, True])

Trajectory = list[tuple[str, Any]]


@dataclass(frozen=True)
class Case:
    """Some toys: a class, and keyword arguments for each of the envs, or for all."""

    toy: str
    kwargs: Any = field(default_factory=dict, hash=False)
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.toy

    @property
    def varies(self) -> bool:
        """Whether sizes differ from env to env, and from step to step."""
        return self.toy == "DynamicShapeEnv"

    def each(self) -> list[Mapping[str, Any]]:
        return list(self.kwargs) if isinstance(self.kwargs, list) else [self.kwargs] * COUNT


def lengths(*steps: int, **options: Any) -> list[dict[str, Any]]:
    return [{"max_steps": length, **options} for length in steps]


CASES = [
    Case("CountingEnv", lengths(2, 3, 5), "counting"),
    Case("CountingEnv", lengths(2, 3, 5, batch_size=(2,), adds_up=True, truncates=True), "batched"),
    Case("CountingEnv", lengths(2, 3, 9, dtype=torch.float16, adds_up=True), "half"),
    Case("CountingEnv", lengths(3, 3, 3, batch_size=(0,)), "empty"),
    Case("NestedCountingEnv", lengths(2, 3, 5, nested_dim=2), "nested"),
    Case("NestedCountingEnv", lengths(2, 3, 5, nested_dim=2, nest=("observation", "action")), "nested-some"),
    Case("NestedCountingEnv", lengths(2, 3, 5, nested_dim=2, batch_size=(2,)), "nested-batched"),
    Case("MultiKeyCountingEnv", {"max_steps": (4, 3, 2)}, "multi"),
    Case("MultiKeyCountingEnv", lengths(2, 3, 5), "multi-lengths"),
    Case("MultiKeyCountingEnv", {"max_steps": 3, "root_done": False}, "multi-rootless"),
    Case("HeterogeneousCountingEnv", lengths(2, 3, 5), "hetero"),
    Case("HeterogeneousCountingEnv", lengths(2, 3, 5, exclusive_keys=True, discrete=True), "hetero-exclusive"),
    Case("HeterogeneousCountingEnv", lengths(3, 3, 3, nest_done=True), "hetero-done"),
    Case("StateEnv", lengths(2, 3, 5), "state"),
    Case("NonTensorEnv", lengths(2, 3, 5, object_action=False), "non-tensor"),
    Case("NonTensorEnv", lengths(2, 3, 5), "non-tensor-action"),
    Case("DynamicShapeEnv", lengths(2, 3, 5), "dynamic"),
]
DIFFERING: Mapping[str, Collection[tuple[str, str]]] = {
    "beside a nested done": [("multi-rootless", manner) for manner in ("stepping", "resetting", "on-and-on")],
    "exclusive keys": [("hetero-exclusive", manner) for manner in ("stepping", "resetting", "until-any", "on-and-on")],
    "nobody": [("empty", "until-all")],
    "some steps": [
        *[(name, "until-all") for name in ("nested", "nested-batched", "multi-lengths", "multi-rootless")],
        *[(name, "until-all") for name in ("hetero", "hetero-exclusive", "hetero-done", "dynamic")],
        *[(name, "choosing") for name in ("hetero", "hetero-exclusive", "hetero-done", "dynamic")],
    ],
}
REASONS = {cell: DIFFERENCES[how] for how, cells in DIFFERING.items() for cell in cells}
PARALLEL = [case for case in CASES if case.name in ("batched", "nested", "multi", "hetero", "state", "non-tensor")]


@functools.cache
def actions_of(case: Case) -> Sequence[TensorDictBase]:
    """The actions of each step: random ones, the same for whoever asks."""
    toy = getattr(testing, case.toy)
    torch.manual_seed(3)
    with warnings.catch_warnings(), SerialEnv(COUNT, toy, create_env_kwargs=case.each()) as env:
        return [env.rand_action() for _ in range(STEPS)]


class Script:
    """A policy that does what was written down."""

    def __init__(self, case: Case) -> None:
        self.case, self.step = case, 0

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        td.update(actions_of(self.case)[self.step].clone())
        self.step += 1
        return td


# -- what is done ---------------------------------------------------------------------------------------


async def stepping(face: TorchFace, env: Driver, case: Case) -> Trajectory:
    """Step and reset what is over."""
    act, seen = Script(case), Log()
    td = seen("reset", await env.reset())
    for _ in range(STEPS):
        td, following = await env.step_and_maybe_reset(act(td))
        seen("step", td)
        seen("root", following.exclude(*env.action_keys) if face.library.differs("last actions") else following)
        td = following
    return seen.entries


async def resetting(face: TorchFace, env: Driver, case: Case) -> Trajectory:
    """Reset one env in between, and all in the end."""
    act, seen = Script(case), Log()
    td = await env.reset()
    for _ in range(2):
        td = seen("step", await env.step(act(td)))
        td = seen("root", advanced(face, env, td))
        for key in env.reset_keys:
            mask = torch.zeros_like(td[done_beside(key)])
            mask[1] = True
            td[key] = mask
        td = seen("partial", await env.reset(td))
    seen("reset", await env.reset())
    seen("given", await env.reset(td))
    return seen.entries


def advanced(face: TorchFace, env: Driver, td: TensorDictBase) -> TensorDictBase:
    """The root of the next step, without anything of this one."""
    keys = {f"{kind}_keys": getattr(env, f"{kind}_keys") for kind in ("reward", "done", "action")}
    root: TensorDictBase = face.library.step_mdp(td, exclude_reward=True, exclude_action=True, **keys)
    return root


def done_beside(key: Any) -> Any:
    return "done" if isinstance(key, str) else (*key[:-1], "done")


async def choosing(face: TorchFace, env: Driver, case: Case) -> Trajectory:
    """Step only some of the envs."""
    act, seen = Script(case), Log()
    td = await env.reset()
    seen("first", await env.step(act(td)))
    td = advanced(face, env, td)
    for mask in (SELECTED, ~SELECTED, torch.ones_like(SELECTED)):
        td = act(td).set("_step", mask.clone().reshape(-1, *[1] * (td.ndim - 1)).expand(td.shape))
        td = seen("step", (await env.step(td)).exclude("_step"))
        td = seen("root", advanced(face, env, td))
    return seen.entries


def rolling(**options: Any) -> Callable[..., Any]:
    async def roll(face: TorchFace, env: Driver, case: Case) -> Trajectory:
        seen = Log()
        rollout = await env.rollout(STEPS, Script(case), return_contiguous=not case.varies, **options)
        assert rollout.names[-1] == "time"
        for td in rollout.unbind(-1):
            seen("step", td)
        return seen.entries

    return roll


MANNERS: dict[str, Any] = {
    "stepping": stepping,
    "resetting": resetting,
    "choosing": choosing,
    "until-any": rolling(),
    "until-all": rolling(break_when_all_done=True, break_when_any_done=False),
    "on-and-on": rolling(break_when_any_done=False),
    "truncated": rolling(break_when_any_done=False, set_truncated=True),
}


# -- what is seen ---------------------------------------------------------------------------------------


class Log:
    """Keeps what things were like."""

    def __init__(self) -> None:
        self.entries: Trajectory = []

    def __call__(self, name: str, td: TensorDictBase) -> TensorDictBase:
        self.entries.append((name, [plain(own) for own in td.unbind(0)]))
        return td


def plain(value: Any) -> Any:
    """Any entry as shapes, dtypes and values."""
    if isinstance(value, NonTensorData | NonTensorStack):
        return "objects", tuple(value.batch_size), value.tolist()
    if isinstance(value, LazyStackedTensorDict):
        return (
            "stack",
            tuple(value.batch_size),
            value.stack_dim,
            [plain(each) for each in value.unbind(value.stack_dim)],
        )
    if isinstance(value, TensorDictBase):
        return tuple(value.batch_size), {key: plain(value.get(key)) for key in sorted(value.keys())}
    return str(value.dtype), tuple(value.shape), value.tolist()


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two plain entries differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        lines = [f"{path}: only here {key}" for key in sorted(found.keys() - expected.keys())]
        lines += [f"{path}: only there {key}" for key in sorted(expected.keys() - found.keys())]
        for key in sorted(found.keys() & expected.keys()):
            lines += differences(found[key], expected[key], f"{path}.{key}")
        return lines
    if isinstance(found, tuple | list) and type(found) is type(expected) and len(found) == len(expected):
        if not any(isinstance(part, tuple | list | dict) for part in found):
            return [] if found == expected else [f"{path}: {found} here, {expected} there"]
        return [line for a, b in zip(found, expected, strict=True) for line in differences(a, b, path)]
    return [] if found == expected else [f"{path}: {found!r} here, {expected!r} there"]


async def run(face: TorchFace, case: Case, manners: Sequence[str]) -> dict[str, Trajectory]:
    """What comes of each manner, one after the other with the same envs."""
    toy = getattr(face.toys, case.toy)
    async with face.open(COUNT, toy, [dict(kwargs) for kwargs in case.each()]) as env:
        return {manner: await MANNERS[manner](face, env, case) for manner in manners}


KNOWN: dict[tuple[str, str, tuple[str, ...]], dict[str, Trajectory]] = {}


async def known(name: str, case: Case, manners: Sequence[str]) -> dict[str, Trajectory]:
    """The trajectories of the face of this name, made once."""
    key = name, case.name, tuple(manners)
    if key not in KNOWN:
        KNOWN[key] = await run(FACES[name], case, manners)
    return KNOWN[key]


def manners_of(case: Case, *, agreed: bool) -> list[str]:
    """In what manners TorchRL's envs do the same; or in what others they do not."""
    meaningful = [manner for manner in MANNERS if manner != "truncated" or case.name == "batched"]
    return [manner for manner in meaningful if ((case.name, manner) not in REASONS) == agreed]


def assert_same(found: Mapping[str, Trajectory], wanted: Mapping[str, Trajectory]) -> None:
    lines = []
    for manner, entries in found.items():
        others = wanted[manner]
        assert [name for name, _ in entries] == [name for name, _ in others], manner
        for index, ((name, own), (_, other)) in enumerate(zip(entries, others, strict=True)):
            lines += differences(own, other, f"{manner} {index} {name}")
    assert not lines, "\n".join(lines[:12])


@pytest.mark.parametrize("face", OWN, ids=repr)
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_same_as_torchrl(face: TorchFace, case: Case) -> None:
    manners = manners_of(case, agreed=True)
    assert_same(await run(face, case, manners), await known("torchrl-serial", case, manners))


@pytest.mark.parametrize("face", OWN[1:], ids=repr)
@pytest.mark.parametrize("case", [case for case in CASES if manners_of(case, agreed=False)], ids=str)
async def test_the_same_as_each_other(face: TorchFace, case: Case) -> None:
    """Where TorchRL differs, or fails."""
    manners = manners_of(case, agreed=False)
    assert_same(await run(face, case, manners), await known("serial", case, manners))


@pytest.mark.parametrize("case", PARALLEL, ids=str)
async def test_the_same_as_torchrls_processes(case: Case) -> None:
    face, manners = FACES["torchrl-parallel"].but(mp_start_method="fork"), manners_of(case, agreed=True)
    assert_same(await known("serial", case, manners), await run(face, case, manners))
