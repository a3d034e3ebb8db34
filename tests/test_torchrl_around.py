"""What stands around envs in TorchRL works with ours unchanged: transforms, collectors, buffers, policies, creators."""

from __future__ import annotations

import copy
import functools
import multiprocessing.resource_sharer
import pickle
from typing import Any

import cloudpickle
import pytest
import torch
from oracle import TORCHRL_MARKS, start_what_torchrl_shares
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl_envs import collectors, data, differences, modules, theirs

from aioenvs.errors import ClosedError, WorkerDiedError
from aioenvs.integrations import torchrl as ours

pytestmark = [pytest.mark.slow, *TORCHRL_MARKS, pytest.mark.timeout(120)]
COUNT = 3
cartpole = functools.partial(theirs.GymEnv, "CartPole-v1")
CLASSES = {"serial": ours.SerialEnv, "packed": functools.partial(ours.ParallelEnv, num_processes=2)}


@pytest.fixture(params=CLASSES)
def make(request: pytest.FixtureRequest) -> Any:
    return CLASSES[request.param]


@pytest.fixture(scope="module", autouse=True)
def _shared() -> None:
    start_what_torchrl_shares()


def counted(env: Any) -> Any:
    return theirs.TransformedEnv(env, theirs.Compose(theirs.StepCounter(8), theirs.RewardSum(), theirs.InitTracker()))


def seeded(env: Any) -> Any:
    env.set_seed(7)
    torch.manual_seed(7)
    return env


def linear_policy() -> Any:
    torch.manual_seed(3)
    return modules.QValueActor(torch.nn.Linear(4, 2), in_keys=["observation"], action_space="one-hot")


def assert_same(found: Any, expected: Any) -> None:
    lines = differences(found, expected)
    assert not lines, "\n".join(lines[:6])


def both(use: Any, make: Any, factory: Any = cartpole) -> None:
    """Use ours and TorchRL's in the same way, and compare what comes of it."""
    results = []
    for cls in (make, theirs.SerialEnv):
        env = cls(COUNT, factory)
        try:
            results.append(use(env))
        finally:
            env.close(raise_if_closed=False)
    assert_same(*results)


# -- what it is -------------------------------------------------------------------------------------------


def test_it_is_an_env_of_torchrl(make: Any) -> None:
    with make(COUNT, cartpole) as env:
        assert isinstance(env, theirs.EnvBase)
        assert isinstance(env, theirs.batched_envs.BatchedEnvBase)
        assert env.batch_size == torch.Size([COUNT])
        assert (env.action_keys, env.reward_keys, env.reset_keys) == (["action"], ["reward"], ["_reset"])
        assert env._single_task
        assert env._use_buffers
        assert not env._has_dynamic_specs
        theirs.check_env_specs(env)


def test_specs_of_a_device() -> None:
    with ours.SerialEnv(2, cartpole, device="cpu") as env:
        expected = theirs.SerialEnv(2, cartpole, device="cpu")
        assert env.output_spec == expected.output_spec
        assert env.device == expected.device == torch.device("cpu")
        assert env.rollout(3).device == torch.device("cpu")
        expected.close(raise_if_closed=False)


def test_different_envs(make: Any) -> None:
    factories = [functools.partial(theirs.GymEnv, name) for name in ("CartPole-v1", "Acrobot-v1")]
    expected = theirs.SerialEnv(2, factories)
    with make(2, factories) as env:
        assert env.output_spec == expected.output_spec
        assert env.input_spec == expected.input_spec
        assert not env._single_task
        for each in (env, expected):
            seeded(each)
        found = seeded(env).rollout(5, break_when_any_done=False, return_contiguous=False)
        wanted = seeded(expected).rollout(5, break_when_any_done=False, return_contiguous=False)
        for row in range(2):
            assert_same(found[row], wanted[row])
    expected.close(raise_if_closed=False)


# -- transforms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [{"break_when_any_done": False}, {}, {"break_when_all_done": True}])
def test_transforms_around_it(make: Any, stop: Any) -> None:
    both(lambda env: seeded(counted(env)).rollout(20, **stop).exclude("action"), make)


@pytest.mark.parametrize("stop", [{"break_when_any_done": False}, {}])
def test_transforms_in_the_workers(make: Any, stop: Any) -> None:
    def use(env: Any) -> Any:
        return seeded(env).rollout(20, **stop).exclude("action")

    both(use, make, lambda: counted(theirs.GymEnv("CartPole-v1")))


def test_check_env_specs_with_transforms(make: Any) -> None:
    with make(COUNT, lambda: counted(theirs.GymEnv("Pendulum-v1"))) as env:
        theirs.check_env_specs(env)
        theirs.check_env_specs(theirs.TransformedEnv(env, theirs.CatFrames(2, dim=-1, in_keys=["observation"])))


def test_a_transform_that_does_not_belong_into_a_worker() -> None:
    def masked() -> Any:
        return theirs.TransformedEnv(theirs.GymEnv("CartPole-v1"), Refusing())

    class Refusing(theirs.StepCounter):
        def _check_batched_worker_compat(self) -> None:
            raise RuntimeError("not in a worker")

    env = ours.ParallelEnv(2, masked, num_processes=1)
    with pytest.raises(RuntimeError, match="not in a worker"):
        env.start()


def test_hooks_after_a_step_run_in_the_workers(make: Any) -> None:
    class Doubled(theirs.StepCounter):
        def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
            return tensordict, tensordict_.set("step_count", tensordict_["step_count"] * 2)

    with make(COUNT, lambda: theirs.TransformedEnv(theirs.GymEnv("CartPole-v1"), Doubled())) as env:
        td, seen = env.reset(), []
        for _ in range(4):
            td = env.step_and_maybe_reset(env.rand_action(td))[1]
            seen.append(td["step_count"].tolist())
    assert seen == [[[count]] * COUNT for count in (2, 6, 14, 30)]  # as in TorchRL's ParallelEnv, not its SerialEnv


# -- policies ---------------------------------------------------------------------------------------------


def lstm_policy() -> tuple[Any, Any]:
    torch.manual_seed(5)
    lstm = modules.LSTMModule(input_size=4, hidden_size=8, in_key="observation", out_key="features")
    head = modules.QValueActor(torch.nn.Linear(8, 2), in_keys=["features"], action_space="one-hot")
    return lstm, TensorDictSequential(lstm, head)


@pytest.mark.parametrize("where", ["workers", "outside"])
@pytest.mark.parametrize("stop", [{"break_when_any_done": False}, {}])
def test_recurrent_policies(make: Any, where: str, stop: Any) -> None:
    lstm, policy = lstm_policy()

    def factory() -> Any:
        env = theirs.TransformedEnv(theirs.GymEnv("CartPole-v1"), theirs.InitTracker())
        return env.append_transform(lstm.make_tensordict_primer()) if where == "workers" else env

    def use(env: Any) -> Any:
        if where == "outside":
            env = theirs.TransformedEnv(env, lstm.make_tensordict_primer())
        with torch.no_grad():
            return seeded(env).rollout(40, policy, **stop)

    both(use, make, factory)


def test_actions_of_another_dtype_are_cast(make: Any) -> None:
    def use(env: Any) -> Any:
        td = seeded(env).reset()
        return env.step(td.set("action", torch.eye(2)[torch.tensor([0, 1, 1])]))

    both(use, make)


# -- collectors and buffers -------------------------------------------------------------------------------


def collected(env: Any, **options: Any) -> Any:
    torch.manual_seed(9)
    env.set_seed(9)
    collector = collectors.Collector(env, linear_policy(), frames_per_batch=30, total_frames=90, **options)
    try:
        return torch.stack([batch.clone() for batch in collector])
    finally:
        collector.shutdown()


@pytest.mark.parametrize("options", [{}, {"split_trajs": False, "max_frames_per_traj": 7}, {"init_random_frames": 30}])
def test_a_collector(make: Any, options: Any) -> None:
    both(lambda env: collected(env, **options), make)


def test_a_collector_of_transformed_envs(make: Any) -> None:
    both(lambda env: collected(counted(env)), make)


def test_a_collector_makes_and_closes_it() -> None:
    collector = collectors.Collector(
        lambda: ours.ParallelEnv(2, cartpole, num_processes=1), None, frames_per_batch=20, total_frames=40
    )
    env = collector.env
    assert sum(batch.numel() for batch in collector) == 40
    collector.shutdown()
    assert env.is_closed


def test_collectors_in_processes() -> None:
    def factory() -> Any:
        return counted(ours.ParallelEnv(2, cartpole, num_processes=1))

    collector = collectors.MultiSyncCollector([factory, factory], linear_policy(), frames_per_batch=40, total_frames=80)
    try:
        batches = list(collector)
    finally:
        collector.shutdown()
        multiprocessing.resource_sharer.stop()  # TorchRL's processes get tensors from it
    assert [batch.numel() for batch in batches] == [40, 40]
    assert all(batch["next", "step_count"].max() <= 8 for batch in batches)


def test_collectors_in_processes_get_a_copy_of_a_started_one() -> None:
    with ours.ParallelEnv(2, cartpole, num_processes=1) as env:
        env.reset()
        collector = collectors.MultiSyncCollector(
            [theirs.EnvCreator(lambda: copy.deepcopy(env))], None, frames_per_batch=20, total_frames=20
        )
        try:
            assert sum(batch.numel() for batch in collector) == 20
        finally:
            collector.shutdown()


def test_a_replay_buffer(make: Any) -> None:
    with make(COUNT, cartpole) as env:
        buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100), batch_size=16)
        buffer.extend(env.rollout(20, break_when_any_done=False).reshape(-1))
        sample = buffer.sample()
        assert sample["next", "observation"].shape == (16, 4)


# -- resets, steps, seeds ---------------------------------------------------------------------------------


def test_arguments_of_a_reset(make: Any) -> None:
    def use(env: Any) -> Any:
        each = [{"seed": 3}, {"seed": 3}, {"seed": 4}]
        return torch.stack(
            [env.reset(seed=5), env.reset(list_of_kwargs=each), env.reset(options={"low": 0.0, "high": 0.0})]
        )

    both(use, make)


def test_seeds(make: Any) -> None:
    expected = theirs.SerialEnv(COUNT, cartpole)
    with make(COUNT, cartpole) as env:
        assert env.set_seed(4) == expected.set_seed(4)
        assert env.set_seed(4, static_seed=True) == expected.set_seed(4, static_seed=True) == 4
        assert_same(env.reset(), expected.reset())
    expected.close(raise_if_closed=False)


def test_batches_in_workers_use_up_several_seeds(make: Any) -> None:
    def nested() -> Any:
        return theirs.SerialEnv(2, cartpole)

    def use(env: Any) -> Any:
        return seeded(env).rollout(10, break_when_any_done=False).exclude("action")

    both(use, make, nested)


def test_states_that_envs_observe_need_not_be_given(make: Any) -> None:
    """As in TorchRL's ParallelEnv; its SerialEnv fails."""
    with make(2, lambda: counted(theirs.GymEnv("CartPole-v1"))) as env:
        env.reset()
        counts = [env.rand_step()["next", "step_count"].tolist() for _ in range(3)]
    assert counts == [[[count]] * 2 for count in (1, 2, 3)]


def test_partial_steps(make: Any) -> None:
    def use(env: Any) -> Any:
        td = env.rand_action(seeded(env).reset())
        td["_step"] = torch.tensor([True, False, True])
        return env.step(td).exclude("_step")

    both(use, make)


def test_states_are_set_by_a_reset(make: Any) -> None:
    def use(env: Any) -> Any:
        td = seeded(env).reset()
        td["th"], td["thdot"] = torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3)
        return env.reset(td.clone(), set_state=True)

    both(use, make, theirs.PendulumEnv)


def test_one_that_takes_no_states_says_so(make: Any) -> None:
    with make(COUNT, cartpole) as env, pytest.raises(NotImplementedError, match="set_state"):
        env.reset(env.reset(), set_state=True)


# -- life -------------------------------------------------------------------------------------------------


def test_it_starts_when_a_spec_is_asked_for() -> None:
    env = ours.ParallelEnv(2, cartpole, num_processes=1)
    assert env.is_closed
    assert "not started" in repr(env)
    assert env.action_spec.shape == (2, 2)
    env.start()
    with pytest.raises(RuntimeError, match="started already"):
        env.start()
    env.close()
    assert env.action_spec.shape == (2, 2)
    assert env.is_closed
    with pytest.raises(ClosedError):
        env.close()
    env.close(raise_if_closed=False)
    assert env.reset().batch_size == (2,)
    env.close()


def test_options_before_the_start() -> None:
    env = ours.ParallelEnv(2, cartpole, num_processes=1)
    assert env.configure_parallel(num_threads=1, use_buffers=False, shutdown_timeout=3.0) is env
    with env:
        assert not env._use_buffers
        assert env.rollout(3).shape == (2, 3)
        with pytest.raises(RuntimeError, match="configure_parallel"):
            env.configure_parallel(num_threads=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pin_memory": True}, ValueError, "pin_memory"),
        ({"memmap": True}, RuntimeError, "mutually exclusive.*give shared_memory=False"),
        ({"num_processess": 2}, TypeError, "num_processess"),
        ({"num_threads": 0}, ValueError, "num_threads"),
    ],
)
def test_options_before_the_start_are_those_of_the_constructor(
    make: Any, options: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        make(2, cartpole, **options)
    env = make(2, cartpole)
    with pytest.raises(error, match=message):
        env.configure_parallel(**options)
    assert env.configure_parallel(metadata_from_workers=None, auto_wrap_envs=False, policy_proof=1, daemon=True) is env
    with env:  # what was refused has changed nothing
        assert env.rollout(3).shape == (2, 3)


def test_options_about_workers_before_the_start() -> None:
    env = ours.ParallelEnv(2, cartpole, num_processes=1)
    with env.configure_parallel(metadata_from_workers=True, memmap=True, shared_memory=False):
        assert env.rollout(3).shape == (2, 3)
    with pytest.raises(TypeError, match="mp_start_method"):
        ours.SerialEnv(2, cartpole).configure_parallel(mp_start_method="fork")
    with pytest.raises(TypeError, match="metadata_from_workers"):
        ours.SerialEnv(2, cartpole).configure_parallel(metadata_from_workers=True)


def test_the_options_of_torchrl() -> None:
    with ours.ParallelEnv(
        2,
        cartpole,
        create_env_kwargs={"categorical_action_encoding": True},
        metadata_from_workers=True,
        daemon=True,
        shutdown_timeout=3.0,
        share_individual_td=False,
        shared_memory=True,
        num_threads=1,
        num_sub_threads=1,
        non_blocking=False,
        consolidate=True,
        mp_start_method="spawn",
        auto_wrap_envs=False,
        policy_proof=None,
        num_processes=1,
    ) as env:
        assert env.action_spec.shape == (2,)
    with pytest.raises(ValueError, match="pin_memory"):
        ours.ParallelEnv(2, cartpole, pin_memory=True)
    with pytest.raises(RuntimeError, match="mutually exclusive"):
        ours.ParallelEnv(2, cartpole, memmap=True)
    with pytest.raises(TypeError, match="mp_start_method"):
        ours.SerialEnv(2, cartpole, mp_start_method="fork")


def test_one_env_needs_no_worker() -> None:
    env = ours.ParallelEnv(1, cartpole, serial_for_single=True, mp_start_method="spawn", num_processes=1)
    assert isinstance(env, ours.SerialEnv)
    assert isinstance(ours.ParallelEnv.make_parallel(cartpole, num_envs=2), ours.ParallelEnv)


def test_arguments_of_the_factories_can_change(make: Any) -> None:
    with make(2, cartpole) as env:
        assert env.action_spec.shape == (2, 2)
        env.update_kwargs({"categorical_action_encoding": True})
        assert env.action_spec.shape == (2,)
        assert env.rollout(3).shape == (2, 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env)), cloudpickle.loads])
def test_a_copy_is_not_started(make: Any, copied: Any) -> None:
    with make(2, lambda: theirs.GymEnv("CartPole-v1")) as env:
        env.reset()
        other = copied(cloudpickle.dumps(env) if copied is cloudpickle.loads else env)
        assert other.is_closed
        assert not env.is_closed
        assert other.action_spec == env.action_spec
        assert other.is_closed
        with other:
            assert other.rollout(3).shape == (2, 3)


def test_an_env_creator(make: Any) -> None:
    creator = theirs.EnvCreator(lambda: theirs.GymEnv("CartPole-v1"))
    with make(2, creator) as env:
        assert env.rollout(3).shape == (2, 3)


def test_views(make: Any) -> None:
    with make(4, cartpole) as env:
        td = seeded(env).reset()
        view = env[1:3]
        assert view.batch_size == (2,)
        part = view.step(env.rand_action(td)[1:3].clone())
        assert part["next", "reward"].tolist() == [[1.0], [1.0]]
        assert env[-1].reset().batch_size == (1,)
        assert (view.num_workers, view.create_env_fn, view.create_env_kwargs) == (2, [cartpole] * 2, [{}] * 2)
        view.close()
        assert not env.is_closed
        with pytest.raises(IndexError):
            env[4]
        with pytest.raises(NotImplementedError):
            env[torch.tensor([True, False, True, False])]


def test_a_view_of_a_view_knows_the_factories_of_its_own_envs(make: Any) -> None:
    factories = [functools.partial(cartpole) for _ in range(4)]
    with make(4, factories) as env:
        view = env[1:4][[2, 0]]
        assert [factories.index(factory) for factory in view.create_env_fn] == [3, 1]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda env: cloudpickle.loads(cloudpickle.dumps(env))])
def test_a_copied_view_is_a_view(make: Any, copied: Any) -> None:
    with make(4, cartpole) as env:
        env.reset()
        view = copied(env[1:4][[2, 0]])
        assert type(view) is type(env)
        assert (view._envs.env_index, view.num_workers) == ((3, 1), 2)
        assert (view.whole is env) == (copied is copy.copy)
        assert view.is_closed == (copied is not copy.copy)
        with view.whole:
            assert view.reset().batch_size == (2,)
            view.close()
            assert not view.is_closed
        assert view.is_closed
        assert env.is_closed == (copied is copy.copy)


def test_a_view_that_is_used_first_starts_the_whole(make: Any) -> None:
    view = make(3, cartpole)[1:]
    assert view.batch_size == (2,)
    view.whole.start()
    assert view.whole.reset().batch_size == (3,)
    view.whole.close()


def test_a_view_has_no_options_of_its_own(make: Any) -> None:
    view = make(3, cartpole)[1:]
    with pytest.raises(RuntimeError, match=r"is a view.* configure that"):
        view.configure_parallel(num_threads=1)
    with pytest.raises(RuntimeError, match="use update_kwargs of the envs"):
        view.update_kwargs({})


def test_a_copy_of_envs_with_new_arguments_has_not_the_old_specs(make: Any) -> None:
    with make(2, cartpole) as env:
        assert env.action_spec.shape == (2, 2)
        env.update_kwargs({"categorical_action_encoding": True})
        with copy.copy(env) as twin:
            assert twin.action_spec.shape == (2,)


def test_attributes_and_methods_of_the_envs(make: Any) -> None:
    with make(2, cartpole) as env:
        env.reset()
        assert list(env.env_name) == env.env_name() == ["CartPole-v1"] * 2
        assert len(env.read_reward(1.0)) == 2
        assert not hasattr(env, "nothing_of_this_name")
        assert env.state_dict().keys() == {"worker0", "worker1"}
        env.load_state_dict(env.state_dict())


def test_workers_are_in_sight() -> None:
    with ours.ParallelEnv(2, cartpole, num_processes=2) as env:
        td = env.reset()
        assert [worker.pid for worker in env._workers] == list(env.pids)
        assert all(worker.is_alive() for worker in env._workers)
        assert_same(env.shared_tensordict_parent, td)
        env._workers[0].kill()
        with pytest.raises(WorkerDiedError) as caught:
            env.step(env.rand_action(td))
        assert caught.value.env_index == (0,)
        assert env.reset().batch_size == (2,)


@pytest.mark.parametrize("factory", [cartpole, lambda: counted(theirs.GymEnv("CartPole-v1"))], ids=["seen", "driven"])
def test_a_worker_that_died_is_replaced(factory: Any) -> None:
    with ours.ParallelEnv(2, factory, num_processes=2, on_worker_death="restart") as env:
        td = env.rand_action(env.reset())
        env._workers[0].kill()
        td, following = env.step_and_maybe_reset(td)
        assert td["next", "truncated"].tolist() == [[True], [False]]
        assert not following["done"].any()
        assert env.rollout(3, break_when_any_done=False).shape == (2, 3)


def test_first_ready_and_the_rest_of_the_plain_face() -> None:
    with ours.ParallelEnv(3, cartpole, num_processes=2, step_timeout=20.0) as env:
        env.send(env.rand_action(env.reset()))
        td, _ = env.recv(min_get=3)
        assert sorted(td["env_index"].tolist()) == [0, 1, 2]
        assert env.statistics().steps == (1, 1, 1)
        assert (env.num_processes, len(env.pids)) == (2, 2)


def test_specs_stay_locked(make: Any) -> None:
    with make(2, cartpole) as env:
        env.set_spec_lock_(False)
        assert env.is_spec_locked
        with pytest.raises(RuntimeError, match="locked"):
            env.full_observation_spec["more"] = env.observation_spec["observation"]
        with pytest.raises(RuntimeError, match="truncated keys"):
            env.add_truncated_keys()


def test_to_another_device(make: Any) -> None:
    with make(2, cartpole) as env:
        assert env.reset().device is None
        assert env.to("cpu") is env
        assert env.rollout(2).device == env.action_spec.device == torch.device("cpu")


def test_auto_reset_of_the_constructor() -> None:
    env = ours.SerialEnv(2, cartpole, spec_locked=True)
    assert env.is_closed
    policy = TensorDictModule(
        lambda obs: torch.ones(2, 2, dtype=torch.int64), in_keys=["observation"], out_keys=["action"]
    )
    wrapped = ours.SerialEnv(2, cartpole, policy=policy)
    assert isinstance(wrapped, theirs.EnvBase)
    wrapped.close(raise_if_closed=False)


def test_gradients_flow_through_the_serial_one() -> None:
    env = ours.SerialEnv(2, theirs.PendulumEnv)
    td = env.reset()
    action = torch.zeros(2, 1, requires_grad=True)
    td["action"] = action if td.get("action", None) is None or td["action"].ndim == 2 else action.squeeze(-1)
    env.step(td)["next", "reward"].sum().backward()
    assert action.grad is not None
    env.close()


def test_other_envs_than_torchrls() -> None:
    with ours.ParallelEnv(2, "CartPole-v1", num_processes=1) as env:
        theirs.check_env_specs(env)
        assert counted(env).rollout(5).shape == (2, 5)


# -- errors -----------------------------------------------------------------------------------------------

MISTAKES: dict[str, Any] = {
    "a step of another size": lambda env: env.step(TensorDict({"action": torch.zeros(5, 2)}, [5])),
    "a reset of another size": lambda env: env.reset(TensorDict({}, [5])),
    "an output spec": lambda env: setattr(env, "output_spec", env.output_spec),
    "an input spec": lambda env: setattr(env, "input_spec", env.input_spec),
    "a second start": lambda env: (env.reset(), env.start()),
    "no key of truncation": lambda env: env.add_truncated_keys(),
    "both breaks": lambda env: env.rollout(3, break_when_any_done=True, break_when_all_done=True),
    "no beginning": lambda env: env.rollout(3, auto_reset=False),
}
MISMADE: dict[str, Any] = {
    "factories": lambda cls: cls(3, [cartpole, cartpole]),
    "keyword arguments": lambda cls: cls(3, cartpole, create_env_kwargs=[{}, {}]),
    "pinned memory": lambda cls: cls(3, cartpole, pin_memory=True),
    "steps after the end": lambda cls: cls(3, cartpole, allow_step_when_done=True),
    "two kinds of memory": lambda cls: cls(3, cartpole, memmap=True, shared_memory=True),
    "an option that is none": lambda cls: cls(3, cartpole, no_such_option=1),
}


def raised(act: Any) -> type[BaseException]:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (which one is what is compared)
        act()
    return caught.type


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_what_they_raise_in_torchrl(make: Any, name: str) -> None:
    expected = theirs.SerialEnv(COUNT, cartpole)
    with make(COUNT, cartpole) as env:
        kind = raised(lambda: MISTAKES[name](expected))
        assert issubclass(raised(lambda: MISTAKES[name](env)), kind)
        assert env.rollout(2).shape == (COUNT, 2)
    expected.close(raise_if_closed=False)


@pytest.mark.parametrize("name", MISMADE)
def test_what_cannot_be_made_raises_what_it_raises_in_torchrl(make: Any, name: str) -> None:
    assert issubclass(raised(lambda: MISMADE[name](make)), raised(lambda: MISMADE[name](theirs.SerialEnv)))
