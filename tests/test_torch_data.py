"""What the batched faces over torch envs give: specs, keys, shapes and values, and that nobody shares memory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch_batches import ByHand, Toy, differing, faces, mask_of, of_own, trajectory, trajectory_by_hand
from torch_faces import OWN_TORCH_FACES, Driver, TorchFace, faces_called, over_every_torch_face

from aioenvs.envs import EnvBase, check_env_specs
from aioenvs.envs.check import check_async_env_specs
from aioenvs.errors import SpecMismatchError
from aioenvs.specs import Composite, Unbounded
from aioenvs.testing import CountingEnv, NestedCountingEnv, StateEnv, UnlockedStateEnv

NUM_ENVS = 3
SIZES = ((), (1,), (4,), (32, 5), (32, 0))
KINDS = ("observation", "action", "reward", "done")
NESTS = [nest for count in range(len(KINDS) + 1) for nest in itertools.combinations(KINDS, count)]

TOYS = [
    *(Toy("CountingEnv", {"max_steps": 2, "batch_size": size, "adds_up": True}) for size in SIZES),
    Toy("CountingEnv", {"max_steps": 2, "truncates": True, "in_place": True, "dtype": torch.float32}),
    *(Toy("NestedCountingEnv", {"max_steps": 2, "nested_dim": 3, "batch_size": size}) for size in SIZES),
    Toy("NestedCountingEnv", {"max_steps": 2, "nested_dim": None, "batch_size": (4,)}),
    *(Toy("MultiKeyCountingEnv", {"max_steps": (4, 3, 2), "batch_size": size}) for size in ((), (4,))),
    Toy("MultiKeyCountingEnv", {"max_steps": (4, 3, 2), "root_done": False}),
    Toy("MultiKeyCountingEnv", {"max_steps": (4, 3, 2), "root_done": False, "batch_size": (4,)}),
    Toy("HeterogeneousCountingEnv", {"max_steps": 2}),
    Toy("HeterogeneousCountingEnv", {"max_steps": 2, "discrete": True, "exclusive_keys": True, "batch_size": (4,)}),
    Toy("HeterogeneousCountingEnv", {"max_steps": 2, "nest_done": True, "discrete": True}),
    *(Toy("StateEnv", {"max_steps": 2, "batch_size": size}) for size in ((), (1,), (4,))),
    Toy("UnlockedStateEnv", {"max_steps": 2}),
    Toy("ParameterEnv", {"max_steps": 2, "gain": 2.0}),
    Toy("DifferentiableEnv", {"max_steps": 2, "batch_size": (4,)}),
    *(Toy("NonTensorEnv", {"max_steps": 2, "batch_size": size}) for size in ((), (3,))),
    Toy("NonTensorEnv", {"max_steps": 2, "object_action": False}),
    Toy("DynamicShapeEnv", {"max_steps": 2}),
]
over_toys = pytest.mark.parametrize("toy", TOYS, ids=str)
over_faces = pytest.mark.parametrize("face", faces())
over_quick_faces = pytest.mark.parametrize("face", faces("serial", "thread", "async-packed"))
over_quick_own_faces = pytest.mark.parametrize("face", faces("serial", "thread", "async-packed", torchrl=False))
over_own_faces = pytest.mark.parametrize("face", OWN_TORCH_FACES)


def reference(face: TorchFace, toy: Toy, count: int = NUM_ENVS) -> ByHand:
    return ByHand([toy.factory(face.toys)() for _ in range(count)])


def leaves(td: TensorDictBase, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """All tensors, also in lazy stacks."""
    if hasattr(td, "tensordicts") and not isinstance(td, NonTensorStack):
        for index, part in enumerate(td.tensordicts):
            yield from leaves(part, (*path, index))
        return
    for name, value in td.items():
        if isinstance(value, torch.Tensor):
            yield (*path, name), value
        elif isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
            yield from leaves(value, (*path, name))


# -- specs and keys --------------------------------------------------------------------------------------


@over_toys
@pytest.mark.parametrize("face", faces("serial", "async-packed", torchrl=False))
async def test_specs_are_those_of_the_envs_with_the_batch_in_front(face: TorchFace, toy: Toy) -> None:
    single = toy.factory(face.toys)()
    async with face.open(NUM_ENVS, toy.factory(face.toys)) as env:
        assert env.batch_size == (NUM_ENVS, *single.batch_size)
        assert env.output_spec == single.output_spec.expand(NUM_ENVS, *single.batch_size)
        assert env.input_spec == single.input_spec.expand(NUM_ENVS, *single.batch_size)
        for kind in ("observation", "reward", "done", "action", "state"):
            full = getattr(env, f"full_{kind}_spec")
            assert full.shape == env.batch_size
            assert full == getattr(single, f"full_{kind}_spec").expand(NUM_ENVS, *single.batch_size)
            assert getattr(env, f"{kind}_keys") == getattr(single, f"{kind}_keys")
            assert isinstance(getattr(env, f"{kind}_spec"), type(getattr(single, f"{kind}_spec")))
        assert env.reset_keys == single.reset_keys
        assert env.done_keys_groups == single.done_keys_groups
        assert env.output_spec.is_locked
        assert env.input_spec.is_locked


@over_toys
@pytest.mark.parametrize("face", faces("serial", "async-packed", torchrl=False))
async def test_results_are_what_the_specs_say(face: TorchFace, toy: Toy) -> None:
    async with face.open(NUM_ENVS, toy.factory(face.toys)) as env:
        if face.is_async:
            await check_async_env_specs(env.env, break_when_any_done="both", seed=0)
        else:
            check_env_specs(env.env, break_when_any_done="both", seed=0)
        fake = env.fake_tensordict()
        td = await env.rand_step(await env.reset())
        assert fake.batch_size == env.batch_size
        shapes = {key: (leaf.dtype, leaf.shape) for key, leaf in leaves(fake)}
        if toy.name != "DynamicShapeEnv":
            assert shapes == {key: (leaf.dtype, leaf.shape) for key, leaf in leaves(td)}
        assert td["next"].batch_size == env.batch_size


@over_toys
@pytest.mark.parametrize("face", faces_called("torchrl-serial"))
async def test_keys_and_sizes_are_torchrls(face: TorchFace, toy: Toy) -> None:
    if 0 in toy.kwargs.get("batch_size", ()):
        face.library.skip_if_differs("empty bounds")
    own = OWN_TORCH_FACES[0].values[0]
    async with face.open(2, toy.factory(face.toys)) as theirs, own.open(2, toy.factory(own.toys)) as ours:
        for kind in ("observation", "reward", "done", "action", "state", "reset"):
            assert getattr(ours, f"{kind}_keys") == getattr(theirs, f"{kind}_keys")
        for name in ("output_spec", "input_spec"):
            found = {
                lib: {key: tuple(spec.shape) for key, spec in getattr(lib, name).items(True, True)}
                for lib in (ours, theirs)
            }
            assert found[ours] == found[theirs]
        layouts = [
            {key: (leaf.dtype, leaf.shape) for key, leaf in leaves(env.fake_tensordict())} for env in (ours, theirs)
        ]
        if toy.name != "DynamicShapeEnv":
            assert layouts[0] == layouts[1]


@over_quick_own_faces
async def test_a_leaf_or_a_composite(face: TorchFace) -> None:
    async with face.open(2, CountingEnv) as env:
        assert env.action_spec is env.full_action_spec["action"]
        assert env.reward_spec is env.full_reward_spec["reward"]
        assert env.action_key == "action"
        assert env.done_key == "done"
        for kind in ("observation", "done", "state"):
            assert isinstance(getattr(env, f"{kind}_spec"), Composite)
        with pytest.raises(RuntimeError, match="lock"):
            env.observation_spec["more"] = Unbounded((2, 1))
    async with face.open(2, face.toys.MultiKeyCountingEnv) as env:
        assert env.action_spec is env.full_action_spec
        with pytest.raises(KeyError, match="left"):
            _ = env.action_key
        with pytest.raises(KeyError, match="left"):
            _ = env.reset_key


@pytest.mark.parametrize(
    ("face", "size"),
    [
        pytest.param(*param.values, size, id=f"{param.id}-{size}")
        for param in faces("async-serial", "packed", torchrl=False)
        for size in ((), (4,), (32, 0))
        if size == (4,) or not param.values[0].in_processes
    ],
)
@pytest.mark.parametrize("nest", NESTS, ids="-".join)
async def test_nested_entries_have_the_batch_size_of_their_node(
    face: TorchFace, nest: tuple[str, ...], size: tuple[int, ...]
) -> None:
    toy = Toy("NestedCountingEnv", {"nest": nest, "nested_dim": 2, "batch_size": size, "max_steps": 2})
    whole, inner = torch.Size((2, *size)), torch.Size((2, *size, 2))
    async with face.open(2, toy.factory(face.toys)) as env:
        td = await env.reset()
        for _ in range(3):
            td, root = await env.step_and_maybe_reset(env.rand_action(td))
            for part, kinds in (
                (td, ("observation", "action", "done")),
                (td["next"], ("observation", "reward", "done")),
            ):
                assert part.batch_size == whole
                for kind in kinds:
                    node = part["data"] if kind in nest else part
                    assert node.batch_size == (inner if kind in nest else whole)
                    assert node[kind].shape == node.batch_size + (() if kind == "action" else (1,))
            td = root
        assert set(td.keys(True, True)) == {*env.observation_keys, *env.done_keys}


# -- values ----------------------------------------------------------------------------------------------


@over_toys
@pytest.mark.parametrize("face", faces("serial", "thread", "async-packed"))
@pytest.mark.every_combination
async def test_a_batch_is_its_envs_one_by_one(face: TorchFace, toy: Toy) -> None:
    if "done" not in toy.factory(face.toys)().done_keys:
        face.library.skip_if_differs("beside a nested done")
    if toy.kwargs.get("in_place") or "exclusive_keys" in toy.kwargs:
        face.library.skip_if_differs("final observation")
    if toy.name == "ParameterEnv":
        face.library.skip_if_differs("grad at a reset")
    torch.manual_seed(0)
    actions = [reference(face, toy).rand_action() for _ in range(5)]
    with torch.no_grad():
        expected = trajectory_by_hand(reference(face, toy), actions)
        async with face.open(NUM_ENVS, toy.factory(face.toys)) as env:
            found = await trajectory(env, actions)
    for one, other in zip(found, expected, strict=True):
        assert differing(one, other) == []


BREAKS = [{}, {"break_when_any_done": False}, {"break_when_any_done": False, "break_when_all_done": True}]


def at_different_times(face: TorchFace, toy: Toy) -> list[Any]:
    """Factories of the same env with episodes of different lengths."""
    lengths = [2, 4, 3]
    if isinstance(toy.kwargs["max_steps"], tuple):
        return [toy._replace(kwargs={**toy.kwargs, "max_steps": (5, n, 2)}).factory(face.toys) for n in lengths]
    return [toy._replace(kwargs={**toy.kwargs, "max_steps": n}).factory(face.toys) for n in lengths]


@pytest.mark.parametrize("toy", [toy for toy in TOYS if toy.kwargs.get("batch_size") not in ((1,), (32, 5))], ids=str)
@pytest.mark.slow
async def test_rollouts_are_the_same_everywhere(toy: Toy) -> None:
    found = []
    for param in faces("serial", "packed", "async-thread", torchrl=False):
        face = param.values[0]
        async with face.open(NUM_ENVS, at_different_times(face, toy)) as env:
            rollouts = []
            for breaks in BREAKS:
                torch.manual_seed(0)
                rollout = await env.rollout(7, return_contiguous=False, **breaks)
                assert rollout.batch_size[:-1] == env.batch_size
                assert rollout.names == [None] * env.batch_dims + ["time"]
                rollouts.append(rollout.detach())
            found.append(rollouts)
    for rollouts in found[1:]:
        assert [differing(*pair) for pair in zip(rollouts, found[0], strict=True)] == [[]] * len(BREAKS)


@pytest.mark.parametrize("size", SIZES, ids=str)
@over_quick_faces
async def test_how_long_a_rollout_is(face: TorchFace, size: tuple[int, ...]) -> None:
    kwargs = [{"max_steps": n, "batch_size": size} for n in (2, 4, 3)]
    # of nothing nobody ends, so that none of any has ended, and all of them have at once
    lengths = (6, 6, None) if 0 in size else (2, 6, 4)
    async with face.open(NUM_ENVS, face.toys.CountingEnv, kwargs) as env:
        for breaks, length in zip(BREAKS, lengths, strict=True):
            if length is None:
                continue
            rollout = await env.rollout(6, **breaks)
            assert rollout.shape == (NUM_ENVS, *size, length)
            assert rollout.names == [*[None] * (1 + len(size)), "time"]
            assert rollout["action"].shape == rollout.shape
            assert rollout["next", "reward"].shape == (*rollout.shape, 1)


@over_every_torch_face
async def test_what_comes_after_an_end(face: TorchFace) -> None:
    kwargs = [{"max_steps": n} for n in (2, 4, 3)]
    async with face.open(NUM_ENVS, face.toys.CountingEnv, kwargs) as env:
        rollout = await env.rollout(6, **BREAKS[1])
        counts = rollout["next", "observation"].squeeze(-1).tolist()
        assert counts == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 1, 2], [1, 2, 3, 1, 2, 3]]
        rollout = await env.rollout(6, **BREAKS[2])
        counts = rollout["next", "observation"].squeeze(-1).tolist()
        assert counts == [[1, 2, 2, 2], [1, 2, 3, 4], [1, 2, 3, 3]]
        assert rollout["next", "done"].squeeze(-1).tolist() == [
            [False, True, True, True],
            [False, False, False, True],
            [False, False, True, True],
        ]
        with pytest.raises(TypeError):
            await env.rollout(2, break_when_any_done=True, break_when_all_done=True)


@over_faces
async def test_truncations_at_different_horizons(face: TorchFace) -> None:
    kwargs = [{"max_steps": n, "truncates": True} for n in (20, 30, 40)]
    async with face.open(NUM_ENVS, face.toys.CountingEnv, kwargs) as env:
        rollout = await env.rollout(100, break_when_any_done=False)
    truncated = rollout["next", "truncated"].squeeze(-1)
    assert truncated.sum(-1).tolist() == [5, 3, 2]
    assert torch.equal(truncated, rollout["next", "done"].squeeze(-1))
    assert not rollout["next", "terminated"].any()
    assert rollout["observation"].squeeze(-1)[truncated].tolist() == [19] * 5 + [29] * 3 + [39] * 2
    assert rollout["next", "observation"].squeeze(-1)[truncated].tolist() == [20] * 5 + [30] * 3 + [40] * 2
    begins = torch.cat([torch.ones(NUM_ENVS, 1, dtype=torch.bool), truncated[:, :-1]], 1)
    assert not rollout["observation"].squeeze(-1)[begins].any()


@over_faces
async def test_many_ends_in_one_env(face: TorchFace) -> None:
    toy = Toy("MultiKeyCountingEnv", {"max_steps": (4, 3, 2)})
    async with face.open(2, toy.factory(face.toys)) as env:
        rollout = await env.rollout(9)
        assert rollout.shape == (2, 4)
        assert rollout["next", "right", "deep", "observation"].shape == (2, 4, 3, 1)
        rollout = await env.rollout(9, break_when_any_done=False)
        assert rollout.shape == (2, 9)
        assert rollout["next", "observation"][0].flatten().tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1]
        for path, action, reward in (((), "action", "reward"), (("left",), "move", "prize")):
            assert torch.equal(rollout["next", *path, reward].squeeze(-1), rollout[(*path, action)].float())


# -- states, and what passes through -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [(), (4,)], ids=str)
@over_faces
async def test_a_state_is_what_the_td_says(face: TorchFace, size: tuple[int, ...]) -> None:
    async with face.open(2, face.toys.StateEnv, {"batch_size": size, "max_steps": 90}) as env:
        assert env.state_keys == ["count", ("memory", "total")]
        td = await env.reset()
        td["action"] = torch.ones(2, *size, dtype=torch.int64)
        td["count"] = td["count"] + 10
        td["memory", "total"] = torch.arange(2).reshape(2, *[1] * (len(size) + 1)).expand(2, *size, 1).clone()
        td = await env.step(td)
        assert (td["next", "count"] == 11).all()
        assert td["next", "memory", "total"].reshape(2, -1)[:, 0].tolist() == [1, 2]
        td, root = await env.step_and_maybe_reset(env.rand_action(face.library.step_mdp(td)))
        assert (root["count"] == 12).all()
        assert torch.equal(root["memory", "total"], td["next", "memory", "total"])


@over_faces
async def test_entries_under_next_pass_through(face: TorchFace) -> None:
    async with face.open(2, face.toys.CountingEnv, {"max_steps": 1}) as env:
        td = env.rand_action(await env.reset())
        td["next"] = TensorDict({"hidden": torch.ones(2, 5), "deep": {"er": torch.zeros(2)}}, [2])
        td["mine"] = torch.full((2, 1), 7)
        same = await env.step(td)
        assert same is td
        assert td["next", "hidden"].shape == (2, 5)
        assert td["next", "deep", "er"].shape == (2,)
        assert "mine" not in td["next"]
        td = env.rand_action(await env.reset())
        td["next"] = TensorDict({"hidden": torch.ones(2, 5)}, [2])
        td["mine"] = torch.full((2, 1), 7)
        td, root = await env.step_and_maybe_reset(td)
        assert (td["next", "hidden"] == 1).all()
        if of_own(face):
            assert (root["hidden"] == 1).all()
            assert "action" not in root
        assert (root["mine"] == 7).all()
        assert "reward" not in root


@over_faces
async def test_a_batch_of_envs_without_a_lock_has_one(face: TorchFace) -> None:
    async with face.open(2, face.toys.UnlockedStateEnv) as env:
        assert env.batch_size == (2,)
        with pytest.raises(RuntimeError, match=re.escape("Expected a tensordict with shape==env.batch_size, got")):
            await env.step(TensorDict({"action": torch.zeros(3, 2)}, [3, 2]))


# -- nobody shares memory ----------------------------------------------------------------------------------


def memories(td: TensorDictBase) -> dict[int, tuple[Any, ...]]:
    """The addresses of all tensors that have one."""
    return {leaf.data_ptr(): path for path, leaf in leaves(td) if leaf.numel()}


@pytest.mark.parametrize(
    "toy",
    [
        Toy("CountingEnv", {"in_place": True, "max_steps": 2}),
        Toy("CountingEnv", {"in_place": True, "max_steps": 2, "batch_size": (4,), "adds_up": True}),
        Toy("NestedCountingEnv", {"max_steps": 2, "batch_size": (4,)}),
        Toy("StateEnv", {"max_steps": 2}),
        Toy("HeterogeneousCountingEnv", {"max_steps": 2}),
        Toy("DynamicShapeEnv", {"max_steps": 2}),
        Toy("NonTensorEnv", {"max_steps": 2}),
    ],
    ids=str,
)
@over_own_faces
async def test_what_was_returned_stays_as_it_was(face: TorchFace, toy: Toy) -> None:
    async with face.open(2, toy.factory(face.toys)) as env:
        td = await env.reset()
        kept = [(td, td.clone())]
        for _ in range(5):
            td = env.rand_action(td.clone())
            td, root = await env.step_and_maybe_reset(td)
            kept += [(td, td.clone()), (root, root.clone())]
            td = root
        td = await env.step(env.rand_action(td.clone()))
        kept.append((td, td.clone()))
        kept.append((partial := await env.reset(partly(env)), partial.clone()))
        await env.reset()
    for returned, before in kept:
        assert differing(returned, before) == []


def partly(env: Driver) -> TensorDictBase:
    """A request to reset the first env."""
    td = TensorDict({}, env.batch_size)
    for key in env.reset_keys:
        path = key[:-1] if isinstance(key, tuple) else ()
        td[key] = torch.zeros_like(env.full_done_spec[(*path, "done")].zero())
        td[key][0] = True
    return td


@pytest.mark.parametrize("toy", [Toy("CountingEnv", {"in_place": True, "max_steps": 2}), TOYS[7], TOYS[16]], ids=str)
@over_own_faces
async def test_results_share_nothing_with_earlier_ones(face: TorchFace, toy: Toy) -> None:
    async with face.open(2, toy.factory(face.toys)) as env:
        td = await env.reset()
        seen, kept = memories(td), [td]
        for step in range(4):
            td, root = await env.step_and_maybe_reset(env.rand_action(td.clone()))
            own, begun = memories(td["next"]), memories(root)
            assert not seen.keys() & (own.keys() | begun.keys())
            if step % 2:  # all began anew
                assert not own.keys() & begun.keys()
            seen |= own | begun
            kept += [td, root]
            td = root


class GreedyEnv(CountingEnv):
    """Changes the actions that it is given, and keeps them; overwrites what it returned."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"].fill_(1)
        out = super()._step(tensordict)
        if hasattr(self, "last"):
            self.last["observation"].fill_(-7)
            self.last["reward"].fill_(-7)
        self.last = out
        return out


@pytest.mark.parametrize("command", ["step", "step_and_maybe_reset"])
@over_own_faces
async def test_an_env_changes_nothing_of_its_callers(face: TorchFace, command: str) -> None:
    async with face.open(2, GreedyEnv, {"batch_size": (2,)}) as env:
        td = await env.reset()
        actions = torch.zeros(2, 2, dtype=torch.int64)
        kept = []
        for _ in range(3):
            td["action"] = actions
            result = await getattr(env, command)(td)
            kept.append(result["next"] if command == "step" else result[0]["next"])
            td = await env.reset() if command == "step" else result[1]
        assert not actions.any()
        assert [int(each["reward"].min()) for each in kept] == [1, 1, 1]
        assert min(int(each["observation"].min()) for each in kept) > 0


# -- dtypes and layouts -----------------------------------------------------------------------------------

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64,
]  # fmt: skip


SHAPES = [(2,), (), (0,), (3, 0)]


class EchoEnv(EnvBase):
    """Observes its last actions, of all dtypes and shapes."""

    def __init__(self, dtypes: list[torch.dtype], shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        kinds = {f"{dtype}{shape}": (dtype, shape) for dtype in dtypes for shape in shapes}
        leaves = {name: Unbounded(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
        self.observation_spec = Composite(seen=Composite(leaves))
        self.action_spec = Composite(say=Composite(leaves))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.observation_spec.zero()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict(seen=tensordict["say"].clone(), reward=torch.ones(1))

    def _set_seed(self, seed: int | None) -> None:
        pass


def numbers(spec: Composite) -> TensorDictBase:
    leaves = {
        key: (1 + torch.arange(leaf.shape.numel()) % 100).reshape(leaf.shape).to(leaf.dtype)
        for key, leaf in spec.items()
    }
    return TensorDict(leaves, spec.shape)


@over_own_faces
async def test_every_dtype_and_shape_goes_both_ways(face: TorchFace) -> None:
    async with face.open(2, EchoEnv, {"dtypes": DTYPES, "shapes": SHAPES}) as env:
        td = await env.reset()
        actions = numbers(env.full_action_spec["say"])
        td, root = await env.step_and_maybe_reset(td.set("say", actions))
        assert len(actions.keys()) == len(DTYPES) * len(SHAPES)
        assert differing(td["next", "seen"], actions) == []
        assert differing(root["seen"], actions) == []
        root["_reset"] = mask_of(2, [0])
        root = await env.reset(root)
        assert differing(root["seen"][1], actions[1]) == []
        assert differing(root["seen"][0], actions[0].clone().zero_()) == []
        root["_step"], root["say"] = mask_of(2, [0]), actions.clone().apply(lambda value: value.flip(0))
        td = await env.step(root)
        assert differing(td["next", "seen"], torch.stack([actions[1], actions[1]])) == []


@over_quick_own_faces
async def test_any_layout_of_an_action_will_do(face: TorchFace) -> None:
    whole, ones = torch.arange(48.0).reshape(3, 16), torch.ones(4, 3, dtype=torch.complex64)
    grown = whole[:, :4].clone().requires_grad_()
    layouts = {
        torch.float32: [
            whole[:, ::4].t(),
            torch.ones(1, 3).expand(4, 3),
            grown.t(),
            (grown * 2).t(),
            ones.conj().imag,
            ones.imag,
        ],
        torch.complex64: [ones.conj(), (ones * 2j).t().reshape(4, 3), (grown.t() * 1j).conj()],
    }
    for dtype, actions in layouts.items():
        key = f"{dtype}(3,)"
        async with face.open(4, EchoEnv, {"dtypes": [dtype], "shapes": [(3,)]}) as env:
            for action in actions:
                td = await env.step((await env.reset()).set(("say", key), action))
                assert torch.equal(td["next", "seen", key], action)
                assert td["say", key] is action
                assert td["next", "seen", key].requires_grad == (action.requires_grad and face.keeps_grad)


# -- what is refused ---------------------------------------------------------------------------------------

Spoil = Callable[[TensorDictBase], Any]
BAD_ACTIONS: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda td: td.exclude("action"), "'action'.*rand_action"),
    "dtype": (lambda td: td.set("action", td["action"] + 0.5), "torch.int64.*torch.float32"),
    "shape": (lambda td: td.set("action", td["action"].unsqueeze(-1)), r"\(3,\).*\(3, 1\)"),
    "object": (lambda td: td.set("action", NonTensorStack(*map(NonTensorData, "abc"))), "NonTensor"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_ACTIONS.values(), ids=BAD_ACTIONS.keys())
@over_quick_own_faces
async def test_a_bad_action_is_refused_before_anything_is_sent(face: TorchFace, spoil: Spoil, message: str) -> None:
    async with face.open(3, CountingEnv) as env:
        good = env.rand_action(await env.reset())
        for command in (env.step, env.step_and_maybe_reset):
            with pytest.raises(SpecMismatchError, match=message) as caught:
                await command(spoil(good.clone()))
            assert "action" in str(caught.value)
            assert "no env was stepped" in str(caught.value)
        td = await env.step(good)
        assert td["next", "observation"].flatten().tolist() == [1, 1, 1]


@over_quick_own_faces
async def test_a_bad_nested_action_or_state_is_named(face: TorchFace) -> None:
    async with face.open(2, face.toys.MultiKeyCountingEnv) as env:
        td = env.rand_action(await env.reset())
        with pytest.raises(SpecMismatchError, match=r"\('left', 'move'\)"):
            await env.step(td.clone().set(("left", "move"), torch.full((2, 2), 0.5)))
        with pytest.raises(SpecMismatchError, match=r"\('right', 'deep', 'action'\)"):
            await env.step(td.exclude(("right", "deep", "action")))
        assert (await env.step(td))["next", "observation"].flatten().tolist() == [1, 1]
    async with face.open(2, StateEnv) as env:
        td = env.rand_action(await env.reset())
        with pytest.raises(SpecMismatchError, match=r"\('memory', 'total'\)"):
            await env.step(td.exclude(("memory", "total")))


@over_faces
async def test_another_batch_size_is_refused(face: TorchFace) -> None:
    async with face.open(2, face.toys.CountingEnv) as env:
        text = re.escape("Expected a tensordict with shape==env.batch_size, got")
        with pytest.raises(RuntimeError, match=text):
            await env.reset(TensorDict({}, [3]))
        with pytest.raises(RuntimeError, match=text):
            await env.step(TensorDict({"action": torch.zeros(3, dtype=torch.int64)}, [3]))
        if of_own(face):
            with pytest.raises(RuntimeError, match=text):
                await env.step_and_maybe_reset(TensorDict({"action": torch.zeros(2, 1, dtype=torch.int64)}, [2, 1]))
        assert (await env.rand_step(await env.reset()))["next", "observation"].flatten().tolist() == [1, 1]


class LyingEnv(CountingEnv):
    """Returns something else than it says, from its second step or reset on."""

    def __init__(self, lie: Callable[[TensorDictBase], Any], where: str) -> None:
        super().__init__(max_steps=None)
        self.lie, self.where, self.calls = lie, where, 0

    def _lied(self, out: TensorDictBase, where: str) -> Any:
        if where == self.where:
            self.calls += 1
            if self.calls == 2:
                return self.lie(out)
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self._lied(super()._reset(tensordict, **kwargs), "reset")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._lied(super()._step(tensordict), "step")


LIES: dict[str, tuple[Callable[[TensorDictBase], Any], str]] = {
    "shape": (lambda td: td.set("observation", torch.zeros(3, dtype=torch.int64)), "observation"),
    "dtype": (lambda td: td.set("observation", torch.zeros(1)), "observation"),
    "missing": (lambda td: td.exclude("observation"), "observation"),
    "object": (lambda td: td.set("observation", NonTensorData("seven")), "observation"),
    "done shape": (lambda td: td.set("done", torch.zeros(2, dtype=torch.bool)), "done"),
}
REWARD_LIES: dict[str, tuple[Callable[[TensorDictBase], Any], str]] = {
    "reward dtype": (lambda td: td.set("reward", torch.zeros(1, dtype=torch.float64)), "reward"),
    "reward missing": (lambda td: td.exclude("reward"), "reward"),
    "reward shape": (lambda td: td.set("reward", torch.zeros(2)), "reward"),
}


@pytest.mark.parametrize(("lie", "key"), (LIES | REWARD_LIES).values(), ids=(LIES | REWARD_LIES).keys())
@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("face", faces("serial", "async-packed", torchrl=False))
async def test_an_env_that_lies_is_named(
    face: TorchFace, lie: Callable[[TensorDictBase], Any], key: str, where: str
) -> None:
    if key == "reward" and where == "reset":
        pytest.skip("a reset gives no reward")
    factories = [CountingEnv, lambda: LyingEnv(lie, where)]
    async with face.open(2, factories) as env:
        td = await env.rand_step(await env.reset())
        with pytest.raises(SpecMismatchError) as caught:
            await (env.reset() if where == "reset" else env.rand_step(face.library.step_mdp(td)))
        text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert f"{key!r}" in text
        assert "expected" in text
        assert "found" in text
        assert "env 1" in text
        assert (await env.rand_step(await env.reset()))["next", "observation"].flatten().tolist() == [1, 1]


# -- step_mdp ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", [TOYS[0], TOYS[7], TOYS[12], TOYS[16], TOYS[17], TOYS[20]], ids=str)
@pytest.mark.parametrize("face", faces("serial", "packed"))
async def test_step_mdp_takes_what_the_faces_give(face: TorchFace, toy: Toy) -> None:
    async with face.open(2, toy.factory(face.toys)) as env:
        td = env.rand_action(await env.reset()).set("mine", torch.ones(2, *env.batch_size[1:]))
        td = (await env.step(td)).clone()
        kinds = ("observation", "reward", "done", "action")
        keys = {kind: getattr(env, f"{kind}_keys") for kind in kinds}
    names = {f"{kind}_keys": keys[kind] for kind in kinds[1:]}
    for keep_other, reward, done, action in itertools.product([False, True], repeat=4):
        excluded = {"exclude_reward": reward, "exclude_done": done, "exclude_action": action}
        root = face.library.step_mdp(td, keep_other=keep_other, **excluded, **names)
        expected = {*keys["observation"], *(["mine"] if keep_other else [])}
        for kind in kinds[1:]:
            expected |= set() if excluded[f"exclude_{kind}"] else set(keys[kind])
        assert root.batch_size == td.batch_size
        assert set(root.keys(True, True)) == expected
        assert differing(root.select(*keys["observation"]), td["next"].select(*keys["observation"])) == []


# -- a batch as an env of a batch --------------------------------------------------------------------------


@over_quick_own_faces
async def test_a_batch_of_batches(face: TorchFace) -> None:
    from aioenvs import SerialEnv

    async with face.open(2, lambda: SerialEnv(3, NestedCountingEnv, create_env_kwargs={"max_steps": 2})) as env:
        assert env.batch_size == (2, 3)
        rollout = await env.rollout(5, break_when_any_done=False)
        assert rollout["next", "data", "observation"][1, 2].flatten().tolist() == [1, 2, 1, 2, 1]
        td = await env.reset()
        td["data", "_reset"] = torch.zeros(2, 3, 1, 1, dtype=torch.bool)
        td = await env.step(env.rand_action(await env.reset()))
        root = face.library.step_mdp(td, action_keys=env.action_keys, reward_keys=env.reward_keys)
        root["data", "_reset"] = torch.zeros(2, 3, 1, 1, dtype=torch.bool)
        root["data", "_reset"][1, 2] = True
        root = await env.reset(root)
        assert root["data", "observation"].reshape(2, 3).tolist() == [[1, 1, 1], [1, 1, 0]]


def test_an_unlocked_env_is_one() -> None:
    assert not UnlockedStateEnv().batch_locked


@over_quick_own_faces
async def test_names_of_dims_stay(face: TorchFace) -> None:
    async with face.open(2, NestedCountingEnv, {"nest": ("observation",)}) as nested, face.open(2, CountingEnv) as env:
        for each in (nested, env):
            td = (await each.reset()).refine_names("env")
            td, root = await each.step_and_maybe_reset(each.rand_action(td))
            assert [td.names, td["next"].names, root.names] == [["env"]] * 3
            root["_reset"] = mask_of(2, [0], 1)
            assert (await each.reset(root)).names == ["env"]
