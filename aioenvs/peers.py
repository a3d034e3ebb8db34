"""What other libraries ask an env for, and which of the classes here has it. Pure."""

from __future__ import annotations

from typing import Any, NoReturn

from aioenvs.errors import shown

__all__ = ["FOR_TORCHRL", "hint_at", "lacking", "not_for_transforms"]

FOR_TORCHRL = (
    "TorchRL's transforms, collectors and checks take the ParallelEnv and SerialEnv of aioenvs.integrations.torchrl"
)
FOR_GYMNASIUM = "the vector env for Gymnasium is aioenvs.integrations.gymnasium.AioVectorEnv"
FOR_SB3 = "the VecEnv for stable-baselines3 is aioenvs.integrations.sb3.AioVecEnv"

ASKED_FOR = {
    FOR_TORCHRL: (
        *("_has_dynamic_specs", "_simple_done", "_step_mdp", "_supports_set_state"),
        *("append_transform", "insert_transform", "register_gym", "set_missing_tolerance", "transform"),
        *("batch_size", "device", "rand_action", "rollout", "step_and_maybe_reset"),
        *("action_spec", "input_spec", "observation_spec", "output_spec", "reward_spec"),
    ),
    FOR_GYMNASIUM: (
        *("call_async", "call_wait", "reset_async", "reset_wait", "step_async", "step_wait"),
        *("num_envs", "single_action_space", "single_observation_space"),
    ),
    FOR_SB3: (
        *("env_is_wrapped", "env_method", "get_images", "has_attr", "reset_infos", "seed", "set_options"),
        *("num_envs", "step_async", "step_wait"),
    ),
}


def hint_at(name: str) -> str:
    """What to add to the error where an attribute is missing that one of the libraries asks for; else nothing."""
    return "".join(f"; {hint}" for hint, names in ASKED_FOR.items() if name in names)


def lacking(owner: Any, name: str, hint: str = "") -> AttributeError:
    """The error for an attribute that an object does not have, with what there is to say of it besides."""
    return AttributeError(
        f"{type(owner).__name__!r} object has no attribute {name!r}{hint}{hint_at(name)}", name=name, obj=owner
    )


def _refuse(env: Any, value: Any) -> NoReturn:
    raise TypeError(f"{shown(env)} is no env of TorchRL's: {FOR_TORCHRL}")


not_for_transforms = property(None, _refuse)
"""The `_inplace_update` of what is no env of TorchRL's: a `TransformedEnv` sets it in what it is put around."""
