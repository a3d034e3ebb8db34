"""Gradients flow through envs of this process as through the envs themselves, and through no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from faces import masked
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch_faces import GRAD_TORCH_FACES, OWN_TORCH_FACES, TorchFace, over_own_torch_faces

from aioenvs import AsyncParallelEnv, SerialEnv
from aioenvs.testing import CountingEnv, DifferentiableEnv, ParameterEnv

SIZE = 3
OPTIONS = {"decay": 0.8, "gain": 0.5, "size": SIZE}

over_faces_with_grad = pytest.mark.parametrize("face", GRAD_TORCH_FACES)
over_faces_without_grad = pytest.mark.parametrize(
    "face", [param for param in OWN_TORCH_FACES if not param.values[0].keeps_grad]
)


def single(face: TorchFace, count: int, **options: Any) -> list[Any]:
    """The envs that are run one by one."""
    return [face.toys.DifferentiableEnv(**{**OPTIONS, **options}) for _ in range(count)]


def actions(steps: int, count: int) -> torch.Tensor:
    """Different ones for each env and step; a leaf."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(steps, count, SIZE, generator=generator).requires_grad_()


def policy() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(SIZE, SIZE)


def module(net: nn.Module) -> TensorDictModule:
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def gradients(loss: torch.Tensor, inputs: Any) -> Sequence[torch.Tensor]:
    return torch.autograd.grad(loss, inputs)


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert any(gradient.any() for gradient in expected)
    torch.testing.assert_close(tuple(found), tuple(expected))


def apart(envs: Sequence[Any], steps: int, act: Callable[[int, int, TensorDictBase], Any]) -> torch.Tensor:
    """The sum of all rewards and last observations of envs that are run one by one, restarting at their ends."""
    total = torch.zeros(())
    for index, env in enumerate(envs):
        td = env.reset()
        for step in range(steps):
            td, following = env.step_and_maybe_reset(td.set("action", act(step, index, td)))
            total = total + td["next", "reward"].sum() + td["next", "observation"].sum()
            td = following
    return total


# -- the same as through the envs -----------------------------------------------------------------------


@over_faces_with_grad
async def test_through_steps(face: TorchFace) -> None:
    given = actions(4, 2)
    expected = apart(single(face, 2), 4, lambda step, index, td: given[step, index])
    async with face.open(2, face.toys.DifferentiableEnv, OPTIONS) as env:
        td, loss = await env.reset(), torch.zeros(())
        for step in range(4):
            td = await env.step(td.set("action", given[step]))
            loss = loss + td["next", "reward"].sum() + td["next", "observation"].sum()
            td = face.library.step_mdp(td)
    assert torch.allclose(loss, expected)
    assert_same(gradients(loss, given), gradients(expected, given))


@over_faces_with_grad
async def test_through_steps_with_resets(face: TorchFace) -> None:
    face.library.skip_if_differs("grad at a reset")
    given = actions(5, 2)
    lengths = [2, 3]
    envs = [single(face, 1, max_steps=length)[0] for length in lengths]
    expected = apart(envs, 5, lambda step, index, td: given[step, index])
    kwargs = [{**OPTIONS, "max_steps": length} for length in lengths]
    async with face.open(2, face.toys.DifferentiableEnv, kwargs) as env:
        td, loss = await env.reset(), torch.zeros(())
        for step in range(5):
            td, following = await env.step_and_maybe_reset(td.set("action", given[step]))
            loss = loss + td["next", "reward"].sum() + td["next", "observation"].sum()
            td = following
    assert torch.allclose(loss, expected)
    assert_same(gradients(loss, given), gradients(expected, given))


@over_faces_with_grad
@pytest.mark.parametrize("break_when_any_done", [True, False])
async def test_through_a_rollout_with_a_policy(face: TorchFace, break_when_any_done: bool) -> None:
    if not break_when_any_done:
        face.library.skip_if_differs("grad at a reset")
    steps = 3 if break_when_any_done else 7
    net = policy()
    expected = apart(single(face, 2, max_steps=3), steps, lambda step, index, td: net(td["observation"]))
    async with face.open(2, face.toys.DifferentiableEnv, {**OPTIONS, "max_steps": 3}) as env:
        rollout = await env.rollout(steps, module(net), break_when_any_done=break_when_any_done)
    assert rollout.shape == (2, steps)
    loss = rollout["next", "reward"].sum() + rollout["next", "observation"].sum()
    assert torch.allclose(loss, expected)
    assert_same(gradients(loss, list(net.parameters())), gradients(expected, list(net.parameters())))


@over_faces_with_grad
async def test_a_partial_reset_cuts_only_the_gradients_of_those_that_it_resets(face: TorchFace) -> None:
    face.library.skip_if_differs("grad at a reset")
    given = actions(4, 2)
    stays, restarts = single(face, 2)
    total = torch.zeros(())
    for index, env in enumerate((stays, restarts)):
        td = env.reset()
        for step in range(4):
            if step == 2 and env is restarts:
                td = env.reset()
            td = face.library.step_mdp(env.step(td.set("action", given[step, index])))
        total = total + td["observation"].square().sum()
    async with face.open(2, face.toys.DifferentiableEnv, OPTIONS) as env:
        td = await env.reset()
        for step in range(4):
            if step == 2:
                td = await env.reset(td.set("_reset", torch.tensor([[False], [True]])))
            td = face.library.step_mdp(await env.step(td.set("action", given[step])))
        loss = td["observation"].square().sum()
    found, expected = gradients(loss, given)[0], gradients(total, given)[0]
    assert_same([found], [expected])
    assert found[:2, 0].all()
    assert not found[:2, 1].any()


@over_faces_with_grad
async def test_a_step_of_some_reaches_only_their_actions(face: TorchFace) -> None:
    given = actions(1, 3)
    async with face.open(3, face.toys.DifferentiableEnv, OPTIONS) as env:
        td = (await env.reset()).set("action", given[0]).set("_step", torch.tensor([True, False, True]))
        td = await env.step(td)
    (found,) = gradients(td["next", "observation"].sum() + td["next", "reward"].sum(), given)
    assert found[0, 0].all()
    assert found[0, 2].all()
    assert not found[0, 1].any()


def of_size(size: int) -> Callable[[], DifferentiableEnv]:
    return lambda: DifferentiableEnv(**{**OPTIONS, "size": size})


@pytest.mark.parametrize("face", [param for param in GRAD_TORCH_FACES if "torchrl" not in param.id])
async def test_through_heterogeneous_envs(face: TorchFace) -> None:
    sizes = [2, 3]
    given = [torch.randn(size, requires_grad=True) for size in sizes]
    expected = torch.zeros(())
    for action, size in zip(given, sizes, strict=True):
        env = of_size(size)()
        td = env.reset()
        for _ in range(3):
            td = face.library.step_mdp(env.step(td.set("action", action)))
        expected = expected + td["observation"].square().sum()
    async with face.open(2, [of_size(size) for size in sizes]) as env:
        td = await env.reset()
        for _ in range(3):
            for own, action in zip(td.tensordicts, given, strict=True):
                own.set("action", action)
            td = face.library.step_mdp(await env.step(td))
        loss = sum(own["observation"].square().sum() for own in td.tensordicts)
    assert_same(gradients(loss, given), gradients(expected, given))


@over_faces_with_grad
async def test_through_parameters_of_the_envs(face: TorchFace) -> None:
    face.library.skip_if_differs("grad at a reset")
    shared = face.toys.ParameterEnv(gain=2.0)
    envs = iter([shared])
    async with face.open(1, lambda: next(envs)) as env:
        rollout = await env.rollout(3)
    (found,) = gradients(rollout["next", "observation"].sum(), shared.gain)
    assert torch.equal(found, torch.full((3,), 1.0 + 2 + 3))


async def test_through_nested_envs() -> None:
    given = actions(2, 4)

    def pair() -> SerialEnv:
        return SerialEnv(2, DifferentiableEnv, create_env_kwargs=OPTIONS)

    face = GRAD_TORCH_FACES[0].values[0]
    expected = apart(single(face, 4), 2, lambda step, index, td: given[step, index])
    with SerialEnv(2, pair) as env:
        td, loss = env.reset(), torch.zeros(())
        for step in range(2):
            td, following = env.step_and_maybe_reset(td.set("action", given[step].reshape(2, 2, SIZE)))
            loss = loss + td["next", "reward"].sum() + td["next", "observation"].sum()
            td = following
    assert_same(gradients(loss, given), gradients(expected, given))


# -- as torch does it -----------------------------------------------------------------------------------


@over_faces_with_grad
async def test_a_second_backward_fails_as_it_does_for_one_env(face: TorchFace) -> None:
    given = actions(1, 2)
    async with face.open(2, face.toys.DifferentiableEnv, OPTIONS) as env:
        td = await env.step((await env.reset()).set("action", given[0]))
        loss = td["next", "reward"].sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@over_faces_with_grad
async def test_under_no_grad_there_are_none(face: TorchFace) -> None:
    given = actions(1, 2)
    async with face.open(2, face.toys.DifferentiableEnv, OPTIONS) as env:
        with torch.no_grad():
            td = await env.step((await env.reset()).set("action", given[0]))
            assert not requiring(td["next"])
        td = await env.step((await env.reset()).set("action", given[0]))
        assert requiring(td["next"]) == {"observation", "reward"}


@over_faces_with_grad
async def test_results_do_not_change_later(face: TorchFace) -> None:
    given = actions(3, 2)
    async with face.open(2, face.toys.DifferentiableEnv, OPTIONS) as env:
        td = await env.step((await env.reset()).set("action", given[0]))
        first = td["next", "observation"]
        copy = first.detach().clone()
        for step in (1, 2):
            td = await env.step(face.library.step_mdp(td).set("action", given[step]))
        await env.reset()
        assert torch.equal(first, copy)
    assert gradients(first.sum(), given)[0].sum() == pytest.approx(0.5 * 2 * SIZE)


def requiring(td: TensorDictBase) -> set[Any]:
    """The keys of tensors that require grad."""
    return {key for key, value in td.items(True, True) if value.requires_grad}


# -- and nowhere else -----------------------------------------------------------------------------------


@over_faces_without_grad
@pytest.mark.parametrize("cls", [DifferentiableEnv, ParameterEnv, CountingEnv])
@pytest.mark.parametrize("use_buffers", [None, False])
async def test_workers_give_no_gradients(face: TorchFace, cls: Any, use_buffers: bool | None) -> None:
    async with face.open(2, cls, use_buffers=use_buffers) as env:
        td = env.rand_action(await env.reset())
        if td["action"].is_floating_point():
            td["action"].requires_grad_()
        td, following = await env.step_and_maybe_reset(td)
        assert not requiring(td["next"])
        assert not requiring(following)
        assert not requiring(await env.reset(masked("_reset", 2, [0])))
        assert not requiring(await env.rollout(3))


@over_own_torch_faces
async def test_actions_that_require_grad_are_accepted(face: TorchFace) -> None:
    given = actions(1, 2)
    async with face.open(2, DifferentiableEnv, OPTIONS) as env:
        td = await env.step((await env.reset()).set("action", given[0] * 2))
        assert torch.allclose(td["next", "observation"], 0.8 + 0.5 * 2 * given[0])
        assert td["action"].requires_grad
        td, following = await env.step_and_maybe_reset(td.set("action", given[0]))
        assert bool(requiring(following)) == face.keeps_grad


@over_own_torch_faces
async def test_lazily_stacked_actions_that_require_grad_are_accepted(face: TorchFace) -> None:
    async with face.open(2, [of_size(2), of_size(3)]) as env:
        td = await env.reset()
        for size, own in zip([2, 3], td.tensordicts, strict=True):
            own.set("action", torch.ones(size, requires_grad=True) * 2)
        td = await env.step(td)
        for own in td["next"].tensordicts:
            assert torch.allclose(own["observation"], torch.tensor(1.8))
            assert bool(requiring(own)) == face.keeps_grad


@over_own_torch_faces
async def test_a_reset_that_is_given_tensors_that_require_grad(face: TorchFace) -> None:
    async with face.open(2, DifferentiableEnv, OPTIONS) as env:
        td = await env.reset()
        td = td.set("observation", torch.ones(2, SIZE, requires_grad=True) * 3)
        td = await env.reset(td.set("_reset", torch.tensor([[False], [True]])))
        assert td["observation"].tolist() == [[3.0] * SIZE, [1.0] * SIZE]


@over_faces_without_grad
async def test_a_policy_learns_from_what_workers_give(face: TorchFace) -> None:
    net = policy()
    async with face.open(2, DifferentiableEnv, OPTIONS) as env:
        rollout = await env.rollout(3, module(net))
    assert requiring(rollout) == {"action"}
    rollout["action"].sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.any()


async def test_worker_keeps_no_graph() -> None:
    async with AsyncParallelEnv(1, GraphEnv) as env:
        for _ in range(3):
            td = env.rand_action(await env.reset())
            td["action"].requires_grad_()
            await env.step(td)
        assert await env.get_attr("has_graph") == [False]
        assert await env.call("compute") == [False]


class GraphEnv(DifferentiableEnv):
    """Says whether what it has, or computes, has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        following = super()._step(tensordict)
        self.current = self.current * self.weight
        return following

    @property
    def has_graph(self) -> bool:
        return self.current.requires_grad

    def compute(self) -> bool:
        return bool((self.weight * 2).requires_grad)


# -- arguments that have gradients ----------------------------------------------------------------------


class PushedEnv(DifferentiableEnv):
    """Can be pushed, with a force in a dict, by a method and at its reset."""

    def push(self, push: dict[str, torch.Tensor]) -> None:
        self.current = self.current + push["force"]

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        super()._reset(tensordict)
        if "push" in kwargs:
            self.push(kwargs["push"])
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({"observation": self.current, "done": done, "terminated": done.clone()})


@over_own_torch_faces
async def test_arguments_of_a_reset_and_of_a_call_keep_theirs(face: TorchFace) -> None:
    force = torch.ones(SIZE, requires_grad=True)
    push = {"force": force * 2}
    async with face.open(2, PushedEnv, OPTIONS) as env:
        td = await env.reset(push=push)
        assert td["observation"].tolist() == [[3.0] * SIZE] * 2
        await env.call("push", push)
        td = await env.step(td.set("action", torch.zeros(2, SIZE)))
        assert torch.allclose(td["next", "observation"], torch.tensor(0.8 * 5))
    if face.keeps_grad:
        (found,) = gradients(td["next", "observation"].sum(), force)
        assert torch.allclose(found, torch.tensor(0.8 * 2 * 2 * 2))
    else:
        assert not requiring(td["next"])
