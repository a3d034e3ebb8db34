"""How a worker drives an env of TorchRL: as a TensorDict env, or, where that is all there is to it, a Gymnasium one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import torch
import torchrl.envs
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.gym_like import GymLikeEnv
from torchrl.envs.transforms import Compose, TensorDictPrimer, Transform

from aioenvs.engine.adapters.base import Call, Handling, ResetArguments
from aioenvs.engine.adapters.copying import received
from aioenvs.engine.adapters.gymnasium import GymAdapter
from aioenvs.engine.layout import INPUT, NEXT, ROOT, EnvMetadata, Key
from aioenvs.envs.adapter import TensorDictAdapter
from aioenvs.envs.unwrapping import NO_NAMES, Converter, UnwrappingAdapter, has_values_of
from aioenvs.errors import shown
from aioenvs.integrations.torchrl.specs import from_torchrl
from aioenvs.specs import Composite, OneHot, TensorSpec
from aioenvs.tensors.storage import tensor_of

PIXELS: Mapping[Key, Key] = {("observation",): ("pixels",)}  # what TorchRL calls observations that look like images
DONE: Key = ("done",)
READERS = ("read_action", "read_done", "read_obs", "read_reward")
COMMANDS = ("step", "_step", "reset", "_reset", "set_seed", "_set_seed", "maybe_reset", "step_and_maybe_reset")


@dataclasses.dataclass(eq=False)
class Native:
    """The metadata of a TorchRL env in TorchRL's own terms; sent to the parent with the rest.

    `carried` has the keys of states that the policy hands on from step to step under `next`, and the env only begins.
    """

    output_spec: Any
    input_spec: Any
    supports_set_state: bool
    carried: tuple[Key, ...]
    name: str

    def __eq__(self, other: object) -> bool:
        """Whether both are envs of TorchRL; the specs are compared as they were converted."""
        return isinstance(other, Native) and self.carried == other.carried

    __hash__ = None  # type: ignore[assignment]


class TorchRLAdapter(TensorDictAdapter):
    """Drives a `torchrl.envs.EnvBase`: its reset, step and maybe_reset, in the order in which TorchRL calls them.

    A transform that does not belong into a worker raises its RuntimeError.
    """

    def __init__(self, env: Any, env_index: int, handling: Handling) -> None:
        super().__init__(env, env_index, handling)
        transforms = list(_transforms(env))
        for transform in transforms:
            transform._check_batched_worker_compat()
        env.set_spec_lock_()
        self._is_batch = False
        self._seeds_at_reset = isinstance(_innermost(env), GymLikeEnv)
        self._supports_set_state = bool(getattr(env, "_supports_set_state", False))
        self._in_one = _steps_in_one(env, transforms)
        self._others: TensorDictBase | None = (
            None  # what else came of the last step or reset, which transforms may read
        )
        # TorchRL looks at `done` alone where the root has it and `terminated`.
        self._done_keys = (DONE,) if env._simple_done else self.metadata.done_keys
        self._named = {key[0] for region in (INPUT, NEXT) for key in self._trees[region].leaves}

    @property
    def core(self) -> Any:
        return _innermost(self.env) if self.env.batch_locked else None

    def _specs_of(self, env: Any, env_index: int) -> tuple[Composite, Composite]:
        output_spec: Any = from_torchrl(env.output_spec)
        input_spec: Any = from_torchrl(env.input_spec)
        # A state that is an observation as well has the form of that, as in TorchRL's buffers, whatever a transform
        # such as `Stack` says of it.
        observed, states = output_spec["full_observation_spec"], input_spec["full_state_spec"]
        for key in set(observed.keys(True, True)) & set(states.keys(True, True)):
            if states[key].shape != observed[key].shape or states[key].dtype != observed[key].dtype:
                states[key] = observed[key].clone()
        return output_spec, input_spec

    def _describe(self) -> EnvMetadata:
        env = self.env
        primers = (transform for transform in _transforms(env) if isinstance(transform, TensorDictPrimer))
        carried = tuple(
            (key,) if isinstance(key, str) else tuple(key)
            for primer in primers
            for key in primer.primers.keys(True, True)
        )
        native = Native(
            env.output_spec.clone(),
            env.input_spec.clone(),
            bool(getattr(env, "_supports_set_state", False)),
            carried,
            _told(env),
        )
        described = super()._describe()
        return dataclasses.replace(described, specs={**described.specs, "torchrl": native}, free_states=True)

    def _num_seeds(self) -> int:
        env = _innermost(self.env)
        return int(env.num_seeds if hasattr(type(env), "num_seeds") else _num_workers(env))

    def reset(self, arguments: ResetArguments) -> None:
        kwargs = received(dict(arguments.kwargs), keeps_graph=self._keeps_grad)
        seed = kwargs.get("seed")
        if seed is not None:
            self._begin_streams(seed)
        self.needs_reset = True
        with self._streams, self._grads:
            if seed is not None and not self._seeds_at_reset:
                self.env.set_seed(kwargs.pop("seed"))
            given = self._given(arguments)
            if given is not None and self._supports_set_state and "set_state" not in kwargs:
                kwargs["set_state"] = self.env._input_td_has_state(given)
            root = self.env.reset(given, **kwargs)
            self._write(ROOT, root)
            self._keep_others(root)
        self.needs_reset = False

    def step(self, maybe_reset: bool) -> bool:
        self._begin_step()
        with self._streams, self._grads:
            td = self._placed(self._root_of_step())
            following = None
            if maybe_reset and self._in_one:
                td, following = self.env.step_and_maybe_reset(td)
            else:
                td = self.env.step(td)
            outcome = td.get("next")
            written = self._write(NEXT, outcome)
            done = any(bool(written[key].any()) for key in self._done_keys)
            if done and maybe_reset and following is None:
                following = self.env.maybe_reset(self.env.step_mdp(td))
            if following is not None:
                self._write(ROOT, following)
            else:
                self._keep_root(written)
            self._keep_others(outcome if following is None else following)
        self._settle_streams()
        self.needs_reset = False
        return done or (maybe_reset and self._in_one)

    def _checked(self, region: str, key: Key, td: TensorDictBase, value: Any) -> Any:
        """Return the checked outcome; the dtype is not looked at, as in TorchRL's own workers."""
        spec = self._trees[region].leaves[key]
        if isinstance(value, torch.Tensor) and value.dtype is not spec.dtype and spec.dtype is not None:
            value = value.to(spec.dtype)
        return super()._checked(region, key, td, value)

    def _root_of_step(self) -> TensorDictBase:
        root = super()._root_of_step()
        return root if self._others is None else self._others.copy().update(root)

    def _keep_others(self, td: TensorDictBase) -> None:
        """Keep what has no place among the specs, for the next step."""
        others = [name for name in list(td.keys()) if name not in self._named]
        self._others = td.select(*others) if others else None

    def perform(self, call: Call) -> Any:
        if call.kind == "call" and "." in call.name:
            *path, name = call.name.split(".")
            owner = self.env
            for part in path:
                owner = getattr(owner, part)
            with self._streams, self._grads:
                found = getattr(owner, name)
                return found(*call.args, **call.kwargs) if callable(found) else found
        return super().perform(call)

    def close(self) -> None:
        if not (isinstance(_innermost(self.env), BatchedEnvBase) and self.env.is_closed):
            self.env.close()


class TorchRLGymAdapter(UnwrappingAdapter, TorchRLAdapter):
    """Drives the Gymnasium env inside a `GymEnv` of TorchRL's for which `can_see_through` holds."""

    def _decoder(self, key: Key, spec: TensorSpec, row: NDArray[Any], target: NDArray[Any]) -> Converter:
        value = tensor_of(row, spec.dtype)

        def decode() -> None:
            target[0] = value.numpy()

        def decode_one() -> None:
            target[0] = row.argmax()  # TorchRL does not look at more either

        return decode_one if isinstance(spec, OneHot) else decode

    def seed(self, seed: int) -> None:
        """Reset the env with the seed at once, as TorchRL's `set_seed` does; the next reset is its second one."""
        self.reset(ResetArguments({"seed": seed}))


def adapted(env: Any, env_index: int, handling: Handling) -> TensorDictAdapter:
    """The adapter for an env of TorchRL. The engine finds this function by its name."""
    if can_see_through(env):
        gym = GymAdapter(env._env, env_index, generators=handling.generators)
        names = PIXELS if env.from_pixels else NO_NAMES
        adapter = TorchRLGymAdapter(env, env_index, handling, gym, names)
        if has_values_of(gym.metadata, adapter.output_spec, adapter.input_spec, names, encodes=True):
            return adapter
    return TorchRLAdapter(env, env_index, handling)


def can_see_through(env: Any) -> bool:
    """Whether an env is TorchRL's own `GymEnv` or `GymWrapper`, as it was written, around a single Gymnasium env.

    One with info readers, a frame skip, a device, or anything that was put in the place of its methods is not.
    """
    if type(env) not in (torchrl.envs.GymEnv, torchrl.envs.GymWrapper):
        return False
    gym = env._env
    return (
        isinstance(gym, gymnasium.Env)
        and not env._is_batched
        and not env.batch_size
        and not env.info_dict_reader
        and (env.device is None or env.device.type == "cpu")
        and env.wrapper_frame_skip == 1
        and env._convert_actions_to_numpy
        and not env.run_type_checks
        and not env.__dict__.keys() & {*COMMANDS, *READERS, "_torchrl_native_autoreset"}
        and all(_is_theirs(getattr(type(env), name)) for name in (*COMMANDS, *READERS))
        and not _has_starts(gym.action_space)
    )


def _is_theirs(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("torchrl.")


def _has_starts(space: Any) -> bool:
    """Whether there are several actions, or integers that do not begin at 0, which TorchRL takes for other ones."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return bool(space.start != 0)
    return not isinstance(space, gymnasium.spaces.Box)


# -- what an env consists of ------------------------------------------------------------------------------


def _told(env: Any) -> str:
    """Return an env's name for itself, if it has one."""
    try:
        return shown(env, str)
    except Exception:  # it is for messages only
        return f"{type(env).__name__}()"


def _innermost(env: Any) -> Any:
    while isinstance(env, torchrl.envs.TransformedEnv):
        env = env.base_env
    return env


def _transforms(env: Any) -> Iterator[Transform]:
    """The transforms of an env, those in a Compose one by one."""
    while isinstance(env, torchrl.envs.TransformedEnv):
        yield from _taken_apart(env.transform)
        env = env.base_env


def _taken_apart(transform: Any) -> Iterator[Transform]:
    if isinstance(transform, Compose):
        for part in transform.transforms:
            yield from _taken_apart(part)
    else:
        yield transform


def _num_workers(env: Any) -> int:
    """How many envs there are in an env, counted as TorchRL's chain of seeds counts them."""
    return int(env.num_workers) if isinstance(env, BatchedEnvBase) else 1


def _steps_in_one(env: Any, transforms: list[Transform]) -> bool:
    """Whether an env steps and resets in a way of its own, so that the next root does not follow from the outcome."""
    base = torchrl.envs.EnvBase
    inner = _innermost(env)
    hooks = (type(each)._post_step_mdp_hooks is not Transform._post_step_mdp_hooks for each in transforms)
    return (
        any(hooks)
        or getattr(inner, "_post_step_mdp_hooks", None) is not None
        or any(
            getattr(type(each), name) is not getattr(base, name)
            for each in (env, inner)
            for name in ("step_and_maybe_reset", "_step_and_maybe_reset", "maybe_reset")
            if not isinstance(each, BatchedEnvBase)
        )
        or any("_compiled_step_and_maybe_reset" in each.__dict__ for each in (env, inner))
        or any(each.__dict__.get("_torchrl_native_autoreset") for each in (env, inner))
    )
