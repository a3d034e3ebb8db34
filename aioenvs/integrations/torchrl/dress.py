"""What a batch in TorchRL's dress is made of, and what it says of itself without being asked for a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase

from aioenvs.batched.forwarding import started_for_attribute
from aioenvs.batched.plain import View
from aioenvs.integrations.torchrl.attributes import Worker
from aioenvs.integrations.torchrl.known import Known
from aioenvs.integrations.torchrl.options import translated

__all__ = ["DressedEnv"]

CONSTRUCTED = ("auto_reset", "auto_reset_replace", "policy", "compile", "compile_kwargs")


class _Unstarted(type(EnvBase)):  # type: ignore[misc]
    """Makes envs without looking at their specs, which are known once they were started."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor, for those who ask for the signature of the class."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) for name in CONSTRUCTED):  # TorchRL wraps the env, for which it needs the specs
            return super().__call__(*args, **kwargs)
        for name in (*CONSTRUCTED, "spec_locked"):
            kwargs.pop(name, None)
        return type.__call__(cls, *args, **kwargs)


class DressedEnv(BatchedEnvBase, metaclass=_Unstarted):  # type: ignore[misc]
    """One of the plain faces with TorchRL's specs and attributes.

    Args:
        make: The plain face; or, for a view, what returns the plain view.
        num_workers: How many envs.
        create_env_fn: What makes an env, or a list with one for each.
        options: TorchRL's, or those of the plain face.
        whole: The batch of which it is a view; None if it is none.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        num_workers: int,
        create_env_fn: Any,
        options: Mapping[str, Any],
        whole: DressedEnv | None = None,
    ) -> None:
        self.__dict__["_envs"] = None
        self.__dict__["_whole"] = whole  # not a submodule
        self.__dict__["_make"] = make
        self.__dict__["_known"] = None
        self.__dict__["_properties_set"] = False
        self.__dict__["_implicit"] = False  # whether only a question about specs has started it
        EnvBase.__init__(self)
        self.num_workers = num_workers
        self._create_env_fn = create_env_fn
        self._dummy_env_str: str | None = None
        self._cache_in_keys = None
        self._single_task = callable(create_env_fn) or isinstance(create_env_fn, str)
        if not self._single_task and isinstance(create_env_fn, Sequence):
            self._single_task = len({id(fn) for fn in create_env_fn}) == 1
        self._build(self._translated(options))

    @classmethod
    def _translated(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the plain face, of TorchRL's or of its own."""
        return translated(options)

    def _build(self, options: dict[str, Any]) -> None:
        self.__dict__["_envs"] = self._make(self.num_workers, self._create_env_fn, **options)
        self._options = options

    @property
    def whole(self) -> Self:
        """The batch of which this is a view; itself if it is none."""
        whole: Self | None = self.__dict__["_whole"]
        return self if whole is None else whole

    # -- description ------------------------------------------------------------------------------------

    def _set_properties(self) -> None:
        """Take over what the envs say of themselves; TorchRL's base calls this when a spec is first asked for."""
        started_for_attribute(self._look)

    def _look(self) -> None:
        envs = self._envs
        if envs._env._running_scope is None:
            envs.start()
            self.whole.__dict__["_implicit"] = True
        self._adopt(Known.of(envs._env._running_scope))

    def _adopt(self, known: Known) -> None:
        self.__dict__.update(
            _known=known,
            _output_spec=known.output_spec,
            _input_spec=known.input_spec,
            _batch_size=known.output_spec.shape,
            _device=known.device,
            _dummy_env_str=known.name,
            _is_spec_locked=True,
            _properties_set=True,
            has_lazy_inputs=known.is_lazy,
        )
        self.empty_cache()

    def _forget(self) -> None:
        """Ask the envs anew when a spec is next asked for."""
        self.__dict__.update(_known=None, _properties_set=False)
        self.empty_cache()

    def _looks(self) -> Known:
        """What the envs look like, for a command."""
        if not self._properties_set:
            self._look()
        known: Known = self.__dict__["_known"]
        return known

    def _described(self) -> Known:
        """The same for an attribute."""
        if not self._properties_set:
            self._set_properties()
        return self._looks()

    def set_spec_lock_(self, mode: bool = True) -> Self:
        """Leave the specs locked, whatever `mode` is: they follow from those of the envs."""
        return self

    @property
    def is_spec_locked(self) -> bool:
        """True: the specs follow from those of the envs."""
        return True

    @is_spec_locked.setter
    def is_spec_locked(self, locked: bool) -> None:
        self.set_spec_lock_(locked)

    def _create_done_specs(self) -> None:
        """Do nothing: the envs' own are complete."""

    @property
    def is_closed(self) -> bool:
        """Whether there are no envs now: not started yet, or closed."""
        return bool(self._envs.is_closed)

    @is_closed.setter
    def is_closed(self, closed: bool) -> None:
        """Take notice: wrappers of TorchRL's say it once more after they closed it."""

    @property
    def create_env_fn(self) -> list[Any]:
        """The factory of each env."""
        given = self._create_env_fn
        return list(given) if isinstance(given, list | tuple) else [given] * self.num_workers

    @property
    def create_env_kwargs(self) -> list[dict[str, Any]]:
        """The keyword arguments of each factory."""
        if isinstance(self._envs, View):
            whole = self._envs._env._owner._config.kwargs
            return [dict(whole[env]) for env in self._envs.env_index]
        return [dict(kwargs) for kwargs in self._envs._env._config.kwargs]

    @property
    def share_individual_td(self) -> bool:
        """Whether results are lazy stacks of one TensorDict for each env."""
        return self._described().is_lazy

    @property
    def _has_dynamic_specs(self) -> bool:
        return self._described().varies

    @property
    def _use_buffers(self) -> bool:
        return self._options.get("use_buffers") is not False and not self._described().varies

    @property
    def _supports_set_state(self) -> bool:
        return self._described().supports_set_state

    @property
    def _workers(self) -> list[Worker]:
        return [Worker(pid) for pid in self._envs.pids]

    @property
    def shared_tensordict_parent(self) -> TensorDictBase:
        """The latest observations and done flags of all envs, as a copy: ours have no other buffers to be seen."""
        self._described()
        scope = self._envs._env._running_scope
        if scope is None:
            raise RuntimeError(f"{self!r} is closed; start() comes first")
        latest: TensorDictBase = scope.results.after_reset(None, None, scope.exchange.latest())
        return latest

    def __repr__(self) -> str:
        if not self.__dict__.get("_properties_set"):
            return f"{type(self).__name__}(num_workers={self.num_workers}, not started)"
        return (
            f"{type(self).__name__}(\n\tenv={self._dummy_env_str}, \n\tbatch_size={self.batch_size},"
            f"\n\tclosed={self.is_closed})"
        )
