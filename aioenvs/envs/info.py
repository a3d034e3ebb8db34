"""Readers of the info dict of a Gymnasium env: its entries become entries of the TensorDict."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_non_tensor

from aioenvs.engine.adapters.gymnasium import MAX_DEPTH, endless_info
from aioenvs.engine.layout import Key, find_collision
from aioenvs.envs.spec_properties import SettableSpecs
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.specs import Composite, NonTensor, TensorSpec, Unbounded
from aioenvs.specs.inferred import encoded
from aioenvs.specs.mapping import NestedKey
from aioenvs.tensors.step_mdp import flat_key

Info = Mapping[str, Any]
InfoReader = Callable[[Info, TensorDictBase], TensorDictBase | None]
"""Writes what it wants of an info into a TensorDict, and may return it (or another)."""

MISSING = object()


class BaseInfoDictReader(ABC):
    """An `InfoReader` that says what it writes.

    >>> from tensordict import TensorDict
    >>> class ReadsFuel(BaseInfoDictReader):
    ...     info_spec = Composite(fuel=Unbounded(1))
    ...
    ...     def __call__(self, info_dict, tensordict):
    ...         return tensordict.set("fuel", torch.tensor([info_dict["fuel_in_ml"] / 1000]))
    >>> ReadsFuel()({"fuel_in_ml": 500}, TensorDict())["fuel"]
    tensor([0.5000])
    """

    @abstractmethod
    def __call__(self, info_dict: Info, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Write what is read from an info into a TensorDict, in place; or return another one."""

    @property
    @abstractmethod
    def info_spec(self) -> Composite | Mapping[str, TensorSpec] | None:
        """The specs of what is written; None if they are not known before it is."""


class default_info_dict_reader(BaseInfoDictReader):
    """Copies entries of the info dict; those that an info does not have are zeros.

    Args:
        keys: Which entries, a nested one as a tuple; by default those of the spec, else all that are numbers, bools
            or arrays of them, or dicts of such, and whose shape does not change.
        spec: The spec of each, by key or in the order of the keys; `NonTensor` for what is no number. By default it
            is learned from a reset and a step, when an env takes the reader.
        ignore_private: Learn no entries whose names begin with an underscore.

    Raises:
        ValueError: The spec does not say something of each key, and of no other.

    >>> from tensordict import TensorDict
    >>> reader = default_info_dict_reader(["speed"], spec=[Unbounded(())])
    >>> reader({"speed": 3.5, "name": "x"}, TensorDict())["speed"]
    tensor(3.5000)
    """

    def __init__(
        self,
        keys: Sequence[NestedKey] | None = None,
        spec: Composite | Mapping[str, TensorSpec] | Sequence[TensorSpec] | None = None,
        ignore_private: bool = True,
    ) -> None:
        self.keys = None if keys is None else list(keys)
        self.ignore_private = ignore_private
        self._info_spec = None if spec is None else _matched(self.keys, spec)

    @property
    def info_spec(self) -> Composite | None:
        """The specs of what is written; None until they are learned."""
        return self._info_spec

    def learn(self, infos: Sequence[Info], taken: Sequence[Key]) -> None:
        """Work out the spec from infos.

        Args:
            infos: Those of a reset and of a step.
            taken: Keys that are the env's own; without `keys`, entries there are not learned.

        Raises:
            ValueError: An entry among `keys` is no number, or its shape changes.
        """
        spec = Composite()
        for path in self._candidates(infos, taken):
            values = [value for info in infos if (value := _entry(info, path)) is not MISSING]
            leaf = _learned(values)
            if leaf is not None:
                spec[path] = leaf
            elif self.keys is not None:
                raise ValueError(
                    f"expected numbers of one shape at {path!r} in the info, found {shown(values)}; "
                    "give the reader the entry's spec (NonTensor() for what is no number)"
                )
        self._info_spec = spec

    def _candidates(self, infos: Sequence[Info], taken: Sequence[Key]) -> list[Key]:
        if self.keys is None:
            found = dict.fromkeys(path for info in infos for path in _leaves(info, self.ignore_private))
            return [path for path in found if find_collision([path], taken) is None]
        paths: dict[Key, None] = {}
        for key in map(flat_key, self.keys):
            inside = [
                (*key, *rest)
                for info in infos
                if isinstance(entry := _entry(info, key), Mapping)
                for rest in _leaves(entry, self.ignore_private)
            ]
            paths.update(dict.fromkeys(inside or [key]))
        return list(paths)

    def __call__(self, info_dict: Info, tensordict: TensorDictBase) -> TensorDictBase:
        """Copy the entries of an info into a TensorDict, in place.

        Args:
            info_dict: What `reset` or `step` returned.
            tensordict: Of batch size ().

        Raises:
            SpecMismatchError: An entry does not fit its spec.
        """
        if self._info_spec is None:
            self.learn([info_dict], [])
        spec = self._info_spec or Composite()
        for key, leaf in spec.items(True, True):
            path = flat_key(key)
            value = _entry(info_dict, path)
            if value is not MISSING:
                if isinstance(leaf, NonTensor):
                    value = copy.deepcopy(value)  # the env may reuse it
                tensordict.set(key, encoded(leaf, value, path))
        _fill_missing(tensordict, spec)
        return tensordict

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.keys!r})"


class ReadsInfo(SettableSpecs):
    """An env with info dicts, which readers turn into observations.

    >>> from aioenvs.envs.gym import GymEnv
    >>> env = GymEnv("FrozenLake-v1").auto_register_info_dict()
    >>> env.reset()["prob"]
    tensor(1., dtype=torch.float64)
    """

    @property
    def info_dict_reader(self) -> list[InfoReader]:
        """The readers that were set."""
        return [reader for reader, _ in self._readers]

    @property
    def _readers(self) -> list[tuple[InfoReader, Composite]]:
        readers: list[tuple[InfoReader, Composite]] = self.__dict__.setdefault("_info_readers", [])
        return readers

    @abstractmethod
    def _probe(self) -> list[Info]:
        """The infos of a reset and of a step, which the caller will follow with a reset."""

    def _with_info(self, tensordict: TensorDictBase, info: Info) -> TensorDictBase:
        for reader, spec in self._readers:
            tensordict = _read(reader, info, tensordict)
            _fill_missing(tensordict, spec)
        return tensordict

    def set_info_dict_reader(self, info_dict_reader: InfoReader | None = None, ignore_private: bool = True) -> Self:
        """Add a reader, which turns entries of the info dict into observations; the env needs a reset then.

        Entries that an info does not have, such as that of a reset, are zeros. A reader that does not know its specs
        yet learns them here, from a reset and a step of the env. A seed that was set stays for the next reset.

        Args:
            info_dict_reader: `default_info_dict_reader`, another `BaseInfoDictReader`, or a function of the info
                and the TensorDict of the result that writes into the latter; None for all numbers in the info.
            ignore_private: Whether entries whose names begin with an underscore are left out, where
                `info_dict_reader` is None.

        Returns:
            This env.

        Raises:
            SpecMismatchError: The reader writes where the env already has something.
            ValueError: It cannot learn a spec.
        """
        reader = info_dict_reader
        if reader is None:
            reader = default_info_dict_reader(ignore_private=ignore_private)
        taken = [("action",), ("next",), *self._keys_taken()]
        spec = self._spec_of(reader, taken)
        collision = find_collision([flat_key(key) for key in spec.keys(True, True)], taken)
        if collision is not None:
            raise SpecMismatchError(
                f"{self!r} already has something at {collision!r}; {shown(reader)} must write elsewhere"
            )
        placed = spec if self.device is None else spec.to(self.device)
        self.observation_spec = self.observation_spec.clone().update(placed)
        self._readers.append((reader, spec))
        return self

    def auto_register_info_dict(
        self, ignore_private: bool = True, *, info_dict_reader: InfoReader | None = None
    ) -> Self:
        """Make all numbers in the info dict observations, as `set_info_dict_reader` does.

        Args:
            ignore_private: Whether entries whose names begin with an underscore are left out.
            info_dict_reader: Another reader to add instead.

        Returns:
            This env.

        Raises:
            RuntimeError: There is a reader already.
        """
        if self._readers:
            raise RuntimeError(f"{self!r} already has the info readers {shown(self.info_dict_reader)}")
        return self.set_info_dict_reader(info_dict_reader, ignore_private)

    def _keys_taken(self) -> list[Key]:
        return [flat_key(key) for key in (*self.observation_keys, *self.reward_keys, *self.done_keys)]

    def _spec_of(self, reader: InfoReader, taken: list[Key]) -> Composite:
        if isinstance(reader, default_info_dict_reader) and reader.info_spec is None:
            reader.learn(self._probe(), taken)
        if isinstance(reader, BaseInfoDictReader) and reader.info_spec is not None:
            return Composite(reader.info_spec)
        return _written_spec(reader, self._probe(), self.fake_tensordict()["next"])


def _fill_missing(tensordict: TensorDictBase, spec: Composite) -> None:
    """Set the entries of a spec that a TensorDict does not have to zeros."""
    for key, leaf in spec.items(True, True):
        if key not in tensordict.keys(True):
            tensordict.set(key, leaf.zero())


def _written_spec(reader: InfoReader, infos: Sequence[Info], result: TensorDictBase) -> Composite:
    """The spec of what a reader adds to a step's result, learned from what it makes of some infos."""
    spec = Composite()
    for info in infos:
        for key, value in _read(reader, info, result.clone()).items(True, True, is_leaf=_is_leaf):
            if key not in result.keys(True):
                spec[key] = NonTensor(()) if is_non_tensor(value) else _any_like(value)
    return spec


def _any_like(value: torch.Tensor) -> TensorSpec:
    return Unbounded(value.shape, dtype=value.dtype, device="cpu")


def _read(reader: InfoReader, info: Info, tensordict: TensorDictBase) -> TensorDictBase:
    result = reader(info, tensordict)
    return tensordict if result is None else result


def _is_leaf(cls: type) -> bool:
    return is_non_tensor(cls) or not issubclass(cls, TensorDictBase)


def _matched(keys: list[NestedKey] | None, spec: Any) -> Composite:
    """The specs as a Composite of exactly these keys."""
    if isinstance(spec, Composite | Mapping):
        composite = Composite(spec) if isinstance(spec, Mapping) else spec.clone()
        found = {flat_key(key) for key in composite.keys(True)}
        missing = [key for key in keys or [] if flat_key(key) not in found]
        if missing or (keys is not None and len(composite) > len({flat_key(key)[0] for key in keys})):
            raise ValueError(f"expected a spec of each key of {keys!r}, found {list(composite.keys(True))!r}")
        return composite
    if keys is None or len(spec) != len(keys):
        raise ValueError(f"expected a spec for each key of {keys!r}, in their order, found {shown(spec)}")
    composite = Composite()
    for key, leaf in zip(keys, spec, strict=True):
        composite[key] = leaf
    return composite


def _entry(info: Any, path: Key) -> Any:
    """Return the entry of an info under a path, `MISSING` if there is none."""
    for name in path:
        if not isinstance(info, Mapping) or name not in info:
            return MISSING
        info = info[name]
    return info


def _leaves(info: Info, ignore_private: bool, path: Key = (), around: tuple[int, ...] = ()) -> Iterator[Key]:
    """The paths of what is no dict in a dict of nested ones, which is at `path`, within those of `around`.

    Raises:
        SpecMismatchError: A dict contains itself.
    """
    around = (*around, id(info))
    for name, value in info.items():
        if not isinstance(name, str) or (ignore_private and name.startswith("_")):
            continue
        own = (*path, name)
        if not isinstance(value, Mapping):
            yield own
        elif id(value) in around or len(own) > MAX_DEPTH:
            raise endless_info("an info reader", own)
        else:
            yield from _leaves(value, ignore_private, own, around)


def _learned(values: Sequence[Any]) -> TensorSpec | None:
    """The spec of an entry that had these values; None if they are no numbers, or of several shapes."""
    if not values:  # seen in no info yet; TorchRL's guess
        return Unbounded((), dtype=torch.float32, device="cpu")
    arrays = [_numbers(value) for value in values]
    shapes = {None if array is None else array.shape for array in arrays}
    if len(shapes) > 1 or None in shapes:
        return None
    dtype = np.result_type(*(array.dtype for array in arrays if array is not None)).newbyteorder("=")
    return Unbounded(shapes.pop() or (), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device="cpu")


def _numbers(value: Any) -> NDArray[Any] | None:
    """The value as an array of numbers or bools, if it is one."""
    try:
        array = np.asarray(value)
    except (RuntimeError, TypeError, ValueError):  # ragged, or on another device
        return None
    known = array.dtype.kind in "biuf" and array.dtype.itemsize <= 8
    return array if known else None
