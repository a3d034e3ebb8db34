"""Batches as TorchRL's `EnvBase`: a thin dress over the plain faces, which do the work."""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import cloudpickle
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase

from aioenvs.engine.portal import documented_by
from aioenvs.errors import AioEnvsError
from aioenvs.faces.forwarding import started_for_attribute
from aioenvs.faces.sync_envs import ParallelEnv, View
from aioenvs.hints import no_writeback
from aioenvs.integrations.torchrl.batch_specs import TorchRLSpecs
from aioenvs.integrations.torchrl.options import Values, Worker, found_at, translated
from aioenvs.tensors.done import done_mask

REGISTERED = ("_parameters", "_buffers", "_modules")  # where a torch.nn.Module has attributes besides its __dict__
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


class BatchedEnv(BatchedEnvBase, metaclass=_Unstarted):  # type: ignore[misc]
    """Many envs as one of TorchRL's: one of the plain faces in its dress; see `ParallelEnv` and `SerialEnv`.

    It starts when its specs are first asked for, or by its first command. `make` is the plain face or, for a view, what
    returns the plain view; `options` are TorchRL's, or those of the plain face; `whole` is the batch of which it is a
    view, None if it is none.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        num_workers: int,
        create_env_fn: Any,
        options: Mapping[str, Any],
        whole: BatchedEnv | None = None,
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

    @property
    def _async_envs(self) -> Any:
        """The coroutines behind the plain face."""
        return self._envs._env

    def _look(self) -> None:
        if self._async_envs._running_scope is None:
            self._envs.start()
            self.whole.__dict__["_implicit"] = True
        self._adopt(TorchRLSpecs.of(self._async_envs._running_scope))

    def _adopt(self, known: TorchRLSpecs) -> None:
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

    def _looks(self) -> TorchRLSpecs:
        """Return the specs of the envs, for a command."""
        if not self._properties_set:
            self._look()
        known: TorchRLSpecs = self.__dict__["_known"]
        return known

    def _described(self) -> TorchRLSpecs:
        """Return the specs of the envs, for an attribute."""
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
            kwargs = self._async_envs._owner._config.kwargs
            return [dict(kwargs[env]) for env in self._envs.env_index]
        return [dict(each) for each in self._async_envs._config.kwargs]

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
        scope = self._async_envs._running_scope
        if scope is None:
            raise RuntimeError(f"{self!r} is closed; start() comes first")
        latest: TensorDictBase = scope.results.after_reset(None, None, scope.latest())
        return latest

    def __repr__(self) -> str:
        if not self.__dict__.get("_properties_set"):
            return f"{type(self).__name__}(num_workers={self.num_workers}, not started)"
        return (
            f"{type(self).__name__}(\n\tenv={self._dummy_env_str}, \n\tbatch_size={self.batch_size},"
            f"\n\tclosed={self.is_closed})"
        )

    # -- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and build the envs.

        Raises:
            RuntimeError: If that was done already, other than by a question about specs.
            WorkerStartError: If a factory raised, hung or ended its process.
        """
        if self.__dict__["_implicit"]:
            self.__dict__["_implicit"] = False
            return
        self._envs.start()
        self._looks()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all envs and end the workers, within `shutdown_timeout`, whatever state they are in.

        The next command starts new ones.

        Args:
            raise_if_closed: Whether to complain if it is closed already.

        Raises:
            RuntimeError: If it was closed before, unless `raise_if_closed` is False.
        """
        self.__dict__["_implicit"] = False
        self._envs.close(raise_if_closed=raise_if_closed and self._async_envs._was_closed)

    def __enter__(self) -> Self:
        if self.is_closed:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close(raise_if_closed=False)

    @documented_by(ParallelEnv.to)
    def to(self, device: torch.device | str | int) -> Self:
        self._envs.to(device)
        self._options["device"] = self._envs.device
        self.__dict__["_device"] = self._envs.device
        if self._properties_set:
            self._adopt(self._looks().to(self._envs.device))
        return self

    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Change the keyword arguments of the factories, before the envs are started; where they run, restart them.

        Args:
            kwargs: A dict for all envs, or a list with one for each; entries that it does not have stay.

        Raises:
            RuntimeError: If the list has another length than there are envs.
        """
        if not self.is_closed:
            self.close()
        self._envs.update_kwargs(kwargs)
        self._options["create_env_kwargs"] = self.create_env_kwargs
        self._forget()

    def configure_parallel(self, **options: Any) -> Self:
        """Change options of the constructor before the envs are started.

        Args:
            **options: `use_buffers`, `shared_memory`, `memmap`, `mp_start_method`, `num_threads`, `num_sub_threads`,
                `non_blocking`, `daemon`, `shutdown_timeout`, or any other; None for what shall stay.

        Returns:
            The same object.

        Raises:
            RuntimeError: If they are started, or this is a view.
            TypeError: If there is no such option.
            ValueError: If it cannot have this value.
        """
        if self.whole is not self:
            raise AioEnvsError(f"{self!r} is a view, and its envs have the options of the whole: configure that")
        if not self.is_closed:
            raise RuntimeError(
                "configure_parallel() cannot be called after the environment has started: close() first, or call it "
                "before specs are asked for"
            )
        changes = {name: value for name, value in options.items() if value is not None}
        self._build(self._translated({**self._options, **changes}))
        self._forget()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the same envs, not started; lambdas and local functions travel with it.

        That of a view is a view: of the same whole, or, if deep or of a pickle, of a copy of that.
        """
        if self.whole is not self:
            return operator.getitem, (self.whole, list(self._envs.env_index))
        state = (type(self), self._make, self.num_workers, self._create_env_fn, self._options, self.__dict__["_known"])
        return _unpickled, (cloudpickle.dumps(state),)

    @documented_by(ParallelEnv.__getitem__)
    def __getitem__(self, index: Any) -> Self:
        view: Self = _dressed(type(self), self.whole, self._envs[index])
        return view

    __setitem__ = no_writeback

    # -- commands ---------------------------------------------------------------------------------------

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take one step in all envs, or in those that a mask names; see `aioenvs.ParallelEnv.step`."""
        known = self._looks()
        given = self._usable(tensordict, known)
        carried = known.handed_on(tensordict)
        self._envs.step(given)
        if given is not tensordict:
            tensordict.set("next", given.get("next"))
        if carried:
            _hand_on(tensordict.get("next"), carried)
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take one step, and reset the envs whose episode ended, in the same round trip."""
        known = self._looks()
        if tensordict.device != known.device and known.device is not None:
            tensordict = tensordict.to(known.device)
        given = self._usable(tensordict, known)
        carried = known.handed_on(tensordict)
        _, root = self._envs.step_and_maybe_reset(given)
        if given is not tensordict:
            tensordict.set("next", given.get("next"))
        if carried:
            following = tensordict.get("next")
            _hand_on(following, carried)
            over = done_mask(following, self.done_keys)
            _hand_on(root, {key: _where(over, root.get(key), value) for key, value in carried.items()})
        if known.is_dense:
            for key in known.lasting:
                root.set(key, tensordict.get(key))
        else:
            root.update(tensordict.select(*known.lasting, strict=False))
        return tensordict, root

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        return self.step_and_maybe_reset(tensordict)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The outcome of a step, for whoever wraps the batch; nothing of it is put into the argument."""
        known = self._looks()
        mask = tensordict.get("_step", None)
        if known.shows_root:
            given = tensordict.exclude("next", *(known.unfit(tensordict) if mask is not None else ()))
        else:
            given = tensordict.select(*known.actions, *known.states, strict=False)
        if mask is not None and not known.shows_root:
            given.update(known.fitting(tensordict)).set("_step", mask)
        given = self._usable(given, known)
        self._envs.step(given)
        following: TensorDictBase = given.get("next")
        _hand_on(following, known.handed_on(tensordict))
        return following

    def _usable(self, td: TensorDictBase, known: TorchRLSpecs) -> TensorDictBase:
        """Return a TensorDict for a step: actions of the right dtypes."""
        return known.castable(td)

    def reset(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Begin new episodes in all envs, or in those that a mask names; see TorchRL's `EnvBase.reset`."""
        self._looks()  # before TorchRL asks for an attribute that needs it, which may not raise an AttributeError
        root: TensorDictBase = super().reset(*args, **kwargs)
        return root

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """The observations and flags after a reset of all envs, or of those that a mask names."""
        known = self._looks()
        self.__dict__["_implicit"] = False
        each = kwargs.pop("list_of_kwargs", None)
        if each is not None or kwargs:
            each = [{**own, **kwargs} for own in (each or [{}] * self.num_workers)]
        given = None if tensordict is None else known.given(tensordict, self.reset_keys)
        root = self._envs.reset(given, list_of_kwargs=each)
        return root.select(*known.root, strict=False) if given is not None else root

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed all envs, each with the next seed of TorchRL's chain.

        Args:
            seed: The first env's; None to draw one.
            static_seed: Give the same seed to all.

        Returns:
            The next seed of the chain; `seed` itself if static.
        """
        following: int | None = self._envs.set_seed(seed, static_seed)
        return following

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        """The state of every env, under `worker0`, `worker1`, ..."""
        states: OrderedDict[str, Any] = self._envs.state_dict()
        return states

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Give every env its state.

        Args:
            state_dict: What `state_dict` returned; or the state of one env, for all.
            strict: As for a torch module.
            assign: As for a torch module.
        """
        if "worker0" not in state_dict:
            state_dict = OrderedDict((f"worker{row}", state_dict) for row in range(self.num_workers))
        self._envs.load_state_dict(state_dict, strict, assign)

    def __getattr__(self, name: str) -> Any:
        """Return the plain face's attribute, else the envs': a list of values, or a method of theirs.

        Raises:
            AttributeError: If there is none.
            NotRunningError: If only envs could have it, which are not running; an AttributeError as well.
        """
        envs = self.__dict__.get("_envs")
        if envs is None or name.startswith("__") or any(name in self.__dict__.get(kind, ()) for kind in REGISTERED):
            return super(BatchedEnvBase, self).__getattr__(name)
        if name.startswith("_"):
            if any(name in vars(cls) for cls in type(self).__mro__):  # a property that has raised
                return super(BatchedEnvBase, self).__getattr__(name)
            return found_at(envs, name)
        if name in envs.__dict__ or hasattr(type(envs), name):
            found = getattr(envs, name)
            return Values(found) if type(found) is list else found
        return found_at(envs, name)


def _hand_on(td: TensorDictBase, carried: Mapping[Any, Any]) -> None:
    for key, value in carried.items():
        td.set(key, value)


def _where(rows: torch.Tensor, new: Any, old: torch.Tensor) -> torch.Tensor:
    """The new values in these rows, the old ones in the others."""
    return torch.where(rows.reshape(rows.shape + (1,) * (old.ndim - rows.ndim)), new, old)


def _unpickled(data: bytes) -> BatchedEnv:
    """A copy, of a pickle or in memory: the same envs, not started."""
    cls, make, num_workers, create_env_fn, options, known = cloudpickle.loads(data)
    env: BatchedEnv = cls.__new__(cls)
    BatchedEnv.__init__(env, make, num_workers, create_env_fn, options)
    if known is not None:
        env._adopt(known)
    return env


def _dressed(cls: Any, whole: BatchedEnv, envs: View) -> Any:
    """A view in the dress of the whole."""
    view: BatchedEnv = cls.__new__(cls)
    factories = whole.create_env_fn
    chosen = [factories[row] for row in envs.env_index]
    BatchedEnv.__init__(view, lambda *_, **__: envs, len(envs), chosen, whole._options, whole)
    return view
