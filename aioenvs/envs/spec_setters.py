"""The specs of a single env, which its author sets: as a leaf or a Composite, with or without the batch dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar, cast

import torch

from aioenvs.envs.described import Described
from aioenvs.envs.spec_index import INPUTS, OUTPUTS
from aioenvs.errors import shown
from aioenvs.specs import Categorical, Composite, TensorSpec

__all__ = ["SettableSpecs"]

S = TypeVar("S", bound=TensorSpec)
PARTS = {"_output_spec": OUTPUTS, "_input_spec": INPUTS}


class _Settable(Generic[S]):
    """A spec of one kind that can be read and set."""

    def __init__(self, kind: str, *, full: bool = True, unbatched: bool = False) -> None:
        self._kind = kind
        self._full = full
        self._unbatched = unbatched
        what = "a Composite" if full else "the leaf if it is the only one and has the default name, else the Composite"
        self.__doc__ = f"The {kind} spec, {what}{', without the batch dims' if unbatched else ''}; can be set."

    def __get__(self, env: SettableSpecs | None, owner: type | None = None) -> S:
        if env is None:
            return cast(S, self)
        spec: Any = env._index.full(self._kind) if self._full else env._index.leaf(self._kind)
        return cast(S, env._without_batch(spec) if self._unbatched else spec)

    def __set__(self, env: SettableSpecs, spec: Any) -> None:
        if self._unbatched and isinstance(spec, TensorSpec):
            spec = spec.expand(*env.batch_size, *spec.shape)
        env._set_spec(self._kind, spec)


class SettableSpecs(Described):
    """Specs that can be set while they are locked, but not be changed behind the env's back."""

    observation_spec = _Settable[Composite]("observation")
    full_observation_spec = _Settable[Composite]("observation")
    action_spec = _Settable[TensorSpec]("action", full=False)
    full_action_spec = _Settable[Composite]("action")
    reward_spec = _Settable[TensorSpec]("reward", full=False)
    full_reward_spec = _Settable[Composite]("reward")
    done_spec = _Settable[Composite]("done")
    full_done_spec = _Settable[Composite]("done")
    state_spec = _Settable[Composite]("state")
    full_state_spec = _Settable[Composite]("state")

    observation_spec_unbatched = _Settable[Composite]("observation", unbatched=True)
    full_observation_spec_unbatched = _Settable[Composite]("observation", unbatched=True)
    action_spec_unbatched = _Settable[TensorSpec]("action", full=False, unbatched=True)
    full_action_spec_unbatched = _Settable[Composite]("action", unbatched=True)
    reward_spec_unbatched = _Settable[TensorSpec]("reward", full=False, unbatched=True)
    full_reward_spec_unbatched = _Settable[Composite]("reward", unbatched=True)
    done_spec_unbatched = _Settable[Composite]("done", unbatched=True)
    full_done_spec_unbatched = _Settable[Composite]("done", unbatched=True)
    state_spec_unbatched = _Settable[Composite]("state", unbatched=True)
    full_state_spec_unbatched = _Settable[Composite]("state", unbatched=True)

    @property
    def output_spec(self) -> Composite:
        """`full_observation_spec`, `full_reward_spec` and `full_done_spec`."""
        spec: Composite = self.__dict__["_output_spec"]
        return spec

    @output_spec.setter
    def output_spec(self, spec: Composite) -> None:
        self._set_parts("_output_spec", spec)

    @property
    def input_spec(self) -> Composite:
        """`full_action_spec` and `full_state_spec`."""
        spec: Composite = self.__dict__["_input_spec"]
        return spec

    @input_spec.setter
    def input_spec(self, spec: Composite) -> None:
        self._set_parts("_input_spec", spec)

    @property
    def output_spec_unbatched(self) -> Composite:
        """`output_spec` without the batch dims; can be set."""
        return cast(Composite, self._without_batch(self.output_spec))

    @output_spec_unbatched.setter
    def output_spec_unbatched(self, spec: Composite) -> None:
        self.output_spec = spec.expand(*self.batch_size, *spec.shape)

    @property
    def input_spec_unbatched(self) -> Composite:
        """`input_spec` without the batch dims; can be set."""
        return cast(Composite, self._without_batch(self.input_spec))

    @input_spec_unbatched.setter
    def input_spec_unbatched(self, spec: Composite) -> None:
        self.input_spec = spec.expand(*self.batch_size, *spec.shape)

    @property
    def is_spec_locked(self) -> bool:
        """Whether the specs can be changed by setting them as a whole only; can be set, as by `set_spec_lock_`."""
        locked: bool = self.__dict__.get("_is_spec_locked", False)
        return locked

    @is_spec_locked.setter
    def is_spec_locked(self, locked: bool) -> None:
        self.set_spec_lock_(locked)

    def set_spec_lock_(self, mode: bool = True) -> Self:
        """Lock the specs, or unlock them; returns the env.

        Args:
            mode: Whether they shall be locked.
        """
        self.__dict__.pop("_known_index", None)
        for name in PARTS:
            spec: Composite = self.__dict__[name]
            spec.lock_() if mode else spec.unlock_()
        self.__dict__["_is_spec_locked"] = mode
        return self

    def add_truncated_keys(self) -> Self:
        """Declare `truncated` beside each `done`; returns the env."""
        spec = self._index.full("done").clone()
        for key in self._index.keys("done"):
            name, other = (key, "truncated") if isinstance(key, str) else (key[-1], (*key[:-1], "truncated"))
            if name == "done" and other not in spec:
                spec[other] = spec[key].clone()
        self._set_spec("done", spec)
        return self

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        locked = self.is_spec_locked
        self.set_spec_lock_(False)
        try:
            yield
        finally:
            self.set_spec_lock_(locked)

    def _without_batch(self, spec: TensorSpec) -> TensorSpec:
        one: TensorSpec = spec[(0,) * self.batch_dims] if self.batch_dims else spec
        return one

    def _set_parts(self, name: str, spec: Composite) -> None:
        if not isinstance(spec, Composite):
            raise TypeError(f"expected a Composite for {name[1:]}, found {shown(spec)}")
        known = [f"full_{kind}_spec" for kind in PARTS[name]]
        if unknown := [key for key in spec if key not in known]:
            raise ValueError(f"expected {known!r} in {name[1:]}, found also {shown(unknown)}")
        for kind in PARTS[name]:
            if (part := spec.get(f"full_{kind}_spec")) is not None:
                self._set_spec(kind, part)

    def _set_spec(self, kind: str, spec: TensorSpec | Mapping[Any, Any] | None) -> None:
        full = self._as_full(kind, spec)
        parent: Composite = self.__dict__["_output_spec" if kind in OUTPUTS else "_input_spec"]
        name, before = f"full_{kind}_spec", parent.get(f"full_{kind}_spec")
        if parent.device is not None:
            full = full.to(parent.device)
        with self._unlocked():
            parent[name] = complete_done_spec(full) if kind == "done" else full
            if self.__dict__.get("_is_set_up"):
                try:
                    self._check_collisions()
                except RuntimeError:
                    parent[name] = before
                    raise

    def _as_full(self, kind: str, spec: Any) -> Composite:
        """A spec as the env keeps it: a Composite of its own, with the batch size."""
        batch_size = self.batch_size
        if spec is None and kind == "state":
            return Composite(shape=batch_size)
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=batch_size)
        if not isinstance(spec, TensorSpec) or (kind == "state" and not isinstance(spec, Composite)):
            wanted, found = "a Composite" if kind == "state" else "a spec", type(spec)
            raise TypeError(
                f"expected {wanted} of aioenvs.specs as {kind}_spec, found {shown(spec)[:60]} "
                f"({found.__module__}.{found.__qualname__}); import specs from aioenvs.specs"
            )
        if spec.shape[: len(batch_size)] != batch_size:
            raise ValueError(
                f"expected a {kind}_spec whose shape starts with the env's batch size {tuple(batch_size)}, found "
                f"{tuple(spec.shape)}; set {kind}_spec_unbatched for a spec without batch dims"
            )
        full = spec.clone() if isinstance(spec, Composite) else Composite({kind: spec.clone()}, shape=batch_size)
        if kind in ("reward", "done"):
            for key, leaf in full.items(include_nested=True, leaves_only=True):
                if leaf is not None and not leaf.ndim:
                    raise RuntimeError(f"expected at least one dim for {key!r} in {kind}_spec, such as (1,), found ()")
        return full

    def _check_collisions(self) -> None:
        for kinds in PARTS.values():
            owners: dict[Any, str] = {}
            for kind in kinds:
                for key in self._index.keys(kind):
                    if key in owners:
                        raise RuntimeError(
                            f"the key {key!r} collides: it is in {owners[key]}_spec and in {kind}_spec; rename one"
                        )
                    owners[key] = kind
        flags = self._index.keys("done")
        for key in self._index.keys("action"):
            if key in flags:
                raise RuntimeError(
                    f"the key {key!r} collides: it is in action_spec and in done_spec; rename the action"
                )


def complete_done_spec(spec: Composite) -> Composite:
    """Give each done node `done` and `terminated`, like the one it has; an empty one gets both.

    Raises:
        ValueError: If flags of one node differ in their shape.
    """
    leaves = {name: leaf for name, leaf in spec.items() if not isinstance(leaf, Composite)}
    if len({leaf.shape for leaf in leaves.values()}) > 1:
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        raise ValueError(f"expected done flags of one shape beside each other, found {shapes!r}")
    for name, other in (("done", "terminated"), ("terminated", "done")):
        if name not in leaves and other in leaves:
            spec[name] = leaves[other].clone()
    for name in list(spec):
        if isinstance(inner := spec[name], Composite):
            spec[name] = complete_done_spec(inner)
    if spec.is_empty():
        for name in ("done", "terminated"):
            spec[name] = Categorical(2, (*spec.shape, 1), device=spec.device, dtype=torch.bool)
    return spec
