"""Calls beyond the commands: nothing is shared between an env and its caller, and whose the errors are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from holding_envs import Holding, HoldingGymEnv, OddEnv
from tensordict import TensorDict, TensorDictBase
from torch_faces import TorchFace, faces_called

from aioenvs import AsyncSerialEnv, ParallelEnv, SerialEnv
from aioenvs.engine.adapters.base import Call, Handling
from aioenvs.engine.adapters.copying import copied, received
from aioenvs.engine.protocol import Opcode
from aioenvs.engine.worker.env_host import EnvHost, Outcome
from aioenvs.envs.gym import GymWrapper
from aioenvs.errors import SpecMismatchError, WorkerStartError
from aioenvs.specs import Categorical, Composite
from aioenvs.tensors.done import terminated_or_truncated
from aioenvs.testing import CountingEnv

over_each_host = pytest.mark.parametrize("face", faces_called("serial", "async-serial", "async-packed", "thread"))
over_plain_hosts = pytest.mark.parametrize("face", faces_called("serial", "packed", "thread"))


class HoldingEnv(Holding, CountingEnv):
    """Of the torch kind."""


over_kinds = pytest.mark.parametrize("factory", [HoldingGymEnv, HoldingEnv], ids=["gymnasium", "torch"])


def test_what_contains_itself_is_copied_as_it_is() -> None:
    value: dict[str, Any] = {"product": torch.ones(1, requires_grad=True) * 2}
    value["all"] = [value]
    for keeps_graph in (True, False):
        for copy in (copied, received):
            kept = copy(value, keeps_graph=keeps_graph)
            assert kept["all"][0] is kept
            assert kept["product"] is not value["product"]
            assert (kept["product"].grad_fn is not None) == keeps_graph


@over_each_host
@over_kinds
async def test_what_an_env_answers_is_the_callers_own(face: TorchFace, factory: Any) -> None:
    async with face.open(2, factory) as env:
        answers = [await env.ask("give"), await env.read("things"), await env.ask("give")]
        await env.ask("add")
        assert answers == [[[1, 2], [1, 2]]] * 3
        for answer in answers:
            answer[0].append("spoilt")
        assert await env.read("things") == [[1, 2, 2], [1, 2, 2]]
        first, second = await env.ask("give_shared")
        assert first is not second


@over_each_host
@over_kinds
async def test_a_state_is_the_callers_own_and_so_is_the_envs(face: TorchFace, factory: Any) -> None:
    async with face.open(2, factory) as env:
        states = await env.state_dict()
        await env.ask("add")
        assert [state["w"].tolist() for state in states.values()] == [[0, 0]] * 2
        await env.load_state_dict(states)
        await env.ask("add")
        assert [state["w"].tolist() for state in states.values()] == [[0, 0]] * 2
        assert [state["w"].tolist() for state in (await env.state_dict()).values()] == [[1, 1]] * 2


@over_each_host
@over_kinds
async def test_what_an_env_is_given_is_its_own(face: TorchFace, factory: Any) -> None:
    async with face.open(2, factory) as env:
        mine = {"numbers": [1]}
        await env.ask("take", mine)
        await env.ask("take", given=mine)
        mine["numbers"].append(2)
        assert await env.read("given") == [{"numbers": [1]}] * 2


@pytest.mark.parametrize("face", faces_called("serial", "async-serial", "thread", "async-thread"))
@over_kinds
async def test_what_cannot_be_copied_is_shared_within_a_process(face: TorchFace, factory: Any) -> None:
    lock, numbers = threading.Lock(), [1]
    async with face.open(2, factory) as env:
        await env.ask("take", lock)
        assert await env.ask("has", lock) == [True, True]
        await env.ask("take", {"lock": lock, "numbers": numbers})  # and what is around it is not
        numbers.append(2)
        if face.keeps_grad:
            assert await env.read("given") == [{"lock": lock, "numbers": [1]}] * 2
            assert all(isinstance(each, type(lock)) for each in await env.read("lock"))


@over_plain_hosts
@over_kinds
def test_hasattr_tells_the_truth_of_what_cannot_be_sent(face: TorchFace, factory: Any) -> None:
    with face.make(2, factory) as env:
        assert hasattr(env, "lock")
        assert not hasattr(env, "key")
        if face.keeps_grad:
            assert len(env.lock) == 2
            return
        with pytest.raises(TypeError, match=r"pickle '_thread.lock'") as caught:
            env.get_attr("lock")
        assert any("env 0" in note and "'lock'" in note for note in caught.value.__notes__)
        withheld = env.lock
        assert "withheld" in repr(withheld)
        for use in (lambda: withheld[0], lambda: list(withheld), lambda: 3 in withheld):
            with pytest.raises(TypeError, match=r"pickle '_thread.lock'"):
                use()
        assert env.things == [[1, 2], [1, 2]]


async def test_a_tensor_in_a_graph_is_a_copy_in_that_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    doubled = weight * 2
    async with AsyncSerialEnv(1, HoldingEnv) as env:
        await env.call("take", {"doubled": doubled})
        (given,) = await env.get_attr("given")
        with torch.no_grad():
            given["doubled"].zero_()
            doubled.zero_()
        (again,) = await env.get_attr("given")
    assert again["doubled"].tolist() == [2, 2]
    again["doubled"].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]


def test_copies() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    product = weight * 2
    value = {"leaf": weight, "product": product, "td": TensorDict({"x": product}, []), "list": [product]}
    kept = copied(value, keeps_graph=True)
    assert kept["leaf"] is weight
    assert kept["product"] is not product
    assert all(each.grad_fn is not None for each in (kept["product"], kept["td"]["x"], kept["list"][0]))
    bare = copied(value)
    assert bare["leaf"] is not weight
    assert bare["product"].grad_fn is None
    assert bare["product"].tolist() == [2, 2]


def test_copies_around_what_cannot_be_copied() -> None:
    lock = threading.Lock()
    call = Call("call", "x", (lock, [1]), {"lock": lock})
    own = received(call)
    assert own == call
    assert own.args[1] is not call.args[1]
    loop: list[Any] = [lock]
    loop.append(loop)
    copy = received(loop)
    assert copy is not loop
    assert copy[0] is lock
    assert copy[1] is copy
    with pytest.raises(TypeError, match="lock"):
        copied(call)


def test_a_host_does_what_an_opcode_says() -> None:
    host = EnvHost(handling=Handling())
    host.build(3, HoldingGymEnv, {})
    outcome = host.execute(Opcode.CALL, (), {3: Call("call", "give")})
    assert outcome.values == {3: [1, 2]}
    host.close()


def test_outcomes_are_merged() -> None:
    error = ValueError()
    merged = Outcome.merged([Outcome(1, {0: error}, {}, {1: 2}, verdict=25), Outcome(2, {}, {2: {}}, {3: 4})])
    assert (merged.finished, merged.failures, merged.objects) == (3, {0: error}, {2: {}})
    assert (merged.values, merged.verdict) == ({1: 2, 3: 4}, 25)


# -- whose errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_an_observation_that_does_not_fit_names_its_env(cls: Any) -> None:
    kwargs = [{"size": size, "wrong": index == 3} for index, size in enumerate((1, 2, 1, 2))]
    with cls(4, OddEnv, create_env_kwargs=kwargs) as env, pytest.raises(SpecMismatchError, match=r"^env 3: expected"):
        env.reset()


def test_an_env_by_itself_is_named_by_what_it_is() -> None:
    with pytest.raises(SpecMismatchError, match=r"^GymWrapper\(env=.*\): expected float32"):
        GymWrapper(OddEnv(1, wrong=True)).reset()


class ForeignSpec:
    """As of another library, which keeps its specs in a class of its own."""


class ForeignEnv:
    """Has what a torch env has, of another library's classes."""

    output_spec = input_spec = ForeignSpec()

    def reset(self) -> None: ...

    def step(self) -> None: ...


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
@pytest.mark.slow
def test_envs_of_another_library_are_refused_in_words(cls: Any) -> None:
    with pytest.raises(WorkerStartError, match=r"ForeignEnv.*expected an aioenvs.EnvBase or a Gymnasium env") as caught:
        cls(2, lambda: ForeignEnv()).start()
    assert isinstance(caught.value.__cause__, TypeError)


# -- what is over ---------------------------------------------------------------------------------------


class LooseEnd(CountingEnv):
    """Says `truncated`, in a node of its own, without saying `done`."""

    def __init__(self) -> None:
        super().__init__()
        flags = {name: Categorical(2, (1,), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(agents=Composite(flags))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self._flagged(super()._reset(tensordict, **kwargs), over=False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._flagged(super()._step(tensordict), over=True)

    def _flagged(self, td: TensorDictBase, *, over: bool) -> TensorDictBase:
        td = td.exclude("done", "terminated", "truncated")
        for name in ("done", "terminated", "truncated"):
            td["agents", name] = torch.tensor([over and name == "truncated"])
        return td


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_an_episode_is_over_whichever_flag_says_so(cls: Any) -> None:
    with cls(2, LooseEnd) as env:
        td = env.rand_action(env.reset())
        td, root = env.step_and_maybe_reset(td)
        assert terminated_or_truncated(td["next"].clone(), env.full_done_spec)
        assert td["next", "observation"].flatten().tolist() == [1, 1]
        assert root["observation"].flatten().tolist() == [0, 0]
        assert env.statistics().episodes == (1, 1)


class Pretender(CountingEnv):
    """Has a method that batches have as well."""

    def set_attr(self, name: str, value: Any) -> None:
        raise AssertionError("this env is no batch")


def test_a_batch_is_not_told_by_its_methods() -> None:
    with SerialEnv(2, Pretender) as env:
        env.set_attr("max_steps", 3)
        assert env.get_attr("max_steps") == [3, 3]


def test_a_fork_with_threads_for_torch_is_refused() -> None:
    env = ParallelEnv(2, CountingEnv, mp_start_method="fork", num_sub_threads=2)
    with pytest.raises(ValueError, match="num_sub_threads=2 does not go with mp_start_method='fork'"):
        env.start()
    assert env.is_closed
