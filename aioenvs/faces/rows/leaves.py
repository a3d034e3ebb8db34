"""The requirements of each input of a step, worked out once for the envs of a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDictBase

from aioenvs.engine.adapters.spaces import integer_range, is_outside
from aioenvs.engine.rows import RowIndex
from aioenvs.errors import SpecMismatchError, shown
from aioenvs.specs import TensorSpec
from aioenvs.tensors.storage import array_of, cast_exactly, is_convertible
from aioenvs.tensors.trees import ABSENT, Key, Parts, Tree, is_loose, nested_key, objects_of, plain

UNSIGNED = {np.dtype(f"i{size}"): np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
Place = Key | tuple[Key, int]  # of an input of all envs, or of one of them, by its row


class Bounds(NamedTuple):
    """Between which the integers of some envs must be.

    Attributes:
        low: The lowest.
        high: One past the highest.
        alike: Whether they are those of each env, rather than one for each.
        span: How many numbers there may be, all from 0 on and the same for all; 0 where that is not so.
    """

    low: NDArray[Any]
    high: NDArray[Any]
    alike: bool
    span: int = 0

    @classmethod
    def of(cls, spaces: Sequence[Any], ndim: int) -> Bounds | None:
        """Return the bounds of values with so many dims, of envs with these spaces; None where anything goes."""
        ranges = [None if space is None else integer_range(space) for space in spaces]
        if any(each is None for each in ranges):
            return None
        low, high = (np.stack([np.asarray(each[end]) for each in ranges if each is not None]) for end in (0, 1))
        if (low == low[0]).all() and (high == high[0]).all():
            from_zero = not low.any() and (high == high.flat[0]).all() and high.flat[0] > 0
            return cls(low[0], high[0], True, int(high.flat[0]) if from_zero else 0)
        low, high = (each.reshape(len(spaces), *each.shape[1:], *[1] * (ndim - each.ndim + 1)) for each in (low, high))
        return cls(low, high, False)

    def select(self, members: RowIndex) -> Bounds:
        """Return the bounds of some of the envs."""
        return self if self.alike or members is None else Bounds(self.low[members], self.high[members], False)


class EnvsOfFamily(NamedTuple):
    """Some envs of one family, as far as their inputs depend on it.

    Attributes:
        envs: Their indices.
        members: Which of the family's they are; None for all.
        tree: Where the inputs are in a TensorDict of theirs.
    """

    envs: Sequence[int]
    members: RowIndex
    tree: Tree

    def asked(self, rows: RowIndex) -> Sequence[int]:
        """These rows, or all."""
        return range(len(self.envs)) if rows is None else rows.tolist()


class InputLeaf:
    """The requirements of one input of the envs of a family, worked out once.

    Args:
        key: Its path.
        kind: Whether it is an "action" or a "state".
        spec: What it must be for one env.
        bounds: Between which its integers must be; None where anything goes.
        target: The array that it goes to; None if it travels as an object.
        device: From where it may come, besides the CPU.
        free: Whether it may be missing, or of another form: it is then brought into that of the array, or, without one,
            goes as it is.
        ships: Whether what travels as an object is sent to another process, rather than handed over.
    """

    def __init__(
        self,
        key: Key,
        kind: str,
        spec: TensorSpec,
        bounds: Bounds | None,
        target: NDArray[Any] | None,
        device: torch.device | None,
        *,
        free: bool,
        ships: bool,
    ) -> None:
        self.key = key
        self.free = free
        self._kind = kind
        self._name = key[0] if len(key) == 1 else ""
        self._varies = -1 in spec.shape
        self._form = spec.shape
        self._dtype = spec.dtype
        self._device = device
        self._ships = ships
        self._target = None if target is None else target.dtype
        self._native = target is not None and torch.from_numpy(np.zeros(0, target.dtype)).dtype is spec.dtype
        self._bounds = bounds

    def given(self, batch: EnvsOfFamily, td: TensorDictBase, entries: Mapping[str, Any]) -> dict[Place, Any]:
        """Return the given value, whatever it is; nothing of what is handed over as it is.

        Args:
            batch: Of which envs.
            td: What the step was given.
            entries: Its entries.
        """
        if self._target is None and not self._ships:
            return {}
        if self._varies:
            return {(self.key, row): batch.tree.get(part, self.key) for row, part in enumerate(td.unbind(0))}
        value = entries.get(self._name)
        return {self.key: batch.tree.get(td, self.key) if value is None else value}

    def check(
        self,
        batch: EnvsOfFamily,
        td: TensorDictBase,
        entries: Mapping[str, Any],
        rows: RowIndex,
        fetched: Mapping[Any, torch.Tensor],
        arrived: bool,
    ) -> Any:
        """The value for all envs: an array if it has a place in the block, else a list with one for each.

        Args:
            batch: Of which envs.
            td: What the step was given.
            entries: Its entries.
            rows: Which envs are to step.
            fetched: What was elsewhere, by what `given` calls it.
            arrived: Whether that is here; else it is only looked at by `check_arrived`.

        Raises:
            SpecMismatchError: If it is missing, or has the wrong shape, dtype, device or range.
        """
        if self.free:
            return self._check_free(batch, td, fetched)
        if self._varies:
            asked = batch.asked(rows)
            return [
                self._alone(self._check_one(batch.tree, part, fetched.get((self.key, row)))) if row in asked else None
                for row, part in enumerate(td.unbind(0))
            ]
        own = fetched.get(self.key) if fetched else None
        value = entries.get(self._name) if own is None else own
        if value is None:
            value = batch.tree.get(td, self.key)
        if not isinstance(value, torch.Tensor):
            raise missing(td, self.key, value, self._kind)
        shape, form, count = value.shape, self._form, len(batch.envs)
        if len(shape) != len(form) + 1 or shape[0] != count or (form and shape[1:] != form):
            raise self._mismatch(f"shape {(len(batch.envs), *self._form)}", f"shape {tuple(shape)}")
        if value.dtype is not self._dtype:
            if own is not None and not arrived and self._target is not None and is_convertible(value, self._dtype):
                return array_of(value)  # which changes as it is stored, once `check_arrived` has looked at it
            value = self._converted(value, rows)
        if self._target is None:
            return [self._alone(part) for part in value.unbind(0)]
        if not value.is_cpu:
            value = self._fetched(value)
        if not self._native:
            return array_of(value)
        if value.requires_grad or value.is_neg() or value.is_conj():
            return array_of(value)  # integers, which alone have bounds, are none of these
        array: NDArray[Any] = value.numpy()
        if self._bounds is not None and array.size and (arrived or own is None):
            self._check_range(batch, array, self._bounds, rows)
        return array

    def _alone(self, value: Any) -> Any:
        """One env's part of an input, without the rest of the memory that it is in, which would be sent along."""
        return value.clone() if self._ships and isinstance(value, torch.Tensor) else value

    def check_arrived(self, batch: EnvsOfFamily, value: Any) -> None:
        """Check what could not be looked at before, of all envs.

        Args:
            batch: Of which envs.
            value: What `check` returned.

        Raises:
            SpecMismatchError: If it has the wrong range, or numbers of another dtype that are not whole.
        """
        if isinstance(value, np.ndarray) and value.dtype != self._target:
            value = array_of(self._converted(torch.from_numpy(value)))
        if self._bounds is not None and isinstance(value, np.ndarray) and value.size:
            self._check_range(batch, value, self._bounds, None)

    def _check_free(self, batch: EnvsOfFamily, td: TensorDictBase, fetched: Mapping[Any, torch.Tensor]) -> Any:
        """The value of a free input for all envs, as far as there is one."""
        tree = batch.tree
        if self._varies:
            parts = enumerate(td.unbind(0))
            return [self._alone(fetched.get((self.key, row), tree.get(part, self.key))) for row, part in parts]
        value = fetched.get(self.key, tree.get(td, self.key))
        if value is None:
            return value
        if self._target is None:
            return [self._alone(part) for part in value]
        shape = (len(batch.envs), *self._form)
        try:
            return array_of(torch.broadcast_to(value.detach().to("cpu", self._dtype), shape))
        except (AttributeError, RuntimeError) as error:
            raise self._mismatch(f"a tensor that can be broadcast to shape {shape}", _found(value)) from error

    def _check_one(self, tree: Tree, td: TensorDictBase, fetched: torch.Tensor | None) -> Any:
        value = tree.get(td, self.key) if fetched is None else fetched
        if value is ABSENT or isinstance(value, Parts):
            return value
        if not isinstance(value, torch.Tensor):
            raise missing(td, self.key, value, self._kind)
        sizes = zip(self._form, value.shape, strict=False)
        if value.ndim != len(self._form) or any(a not in (b, -1) for a, b in sizes):
            expected = f"{self._dtype} of shape {tuple(self._form)}"
            raise self._mismatch(expected, f"{value.dtype} of shape {tuple(value.shape)}")
        return value if value.dtype is self._dtype else self._converted(value)

    def _converted(self, value: torch.Tensor, rows: RowIndex = None) -> torch.Tensor:
        """The value in the dtype of the spec, if no number in these rows changes by it, as that of 1.0 for 1."""
        if cast_exactly(value if rows is None else value[rows], self._dtype) is None:
            raise self._mismatch(f"dtype {self._dtype}", f"dtype {value.dtype}")
        return value.detach().to(self._dtype)

    def _mismatch(self, expected: str, found: str) -> SpecMismatchError:
        return mismatch(self.key, expected, found, self._kind)

    def _fetched(self, value: torch.Tensor) -> torch.Tensor:
        if self._device is None or self._device.type != value.device.type:
            raise self._mismatch(f"a tensor on {self._device or 'the cpu'}", f"one on {value.device}")
        return value.cpu()

    def _check_range(self, batch: EnvsOfFamily, array: NDArray[Any], bounds: Bounds, rows: RowIndex) -> None:
        # Negative numbers are large ones without their sign, so that one comparison tells of both ends.
        unsigned = UNSIGNED.get(array.dtype) if bounds.span else None
        if unsigned is not None and np.maximum.reduce(array.view(unsigned), axis=None) < bounds.span:
            return
        low, high, *_ = bounds.select(batch.members)
        outside = (array < low) | (array >= high)
        if not outside.any():
            return
        wrong = np.unique(np.argwhere(outside)[:, 0])
        for row in wrong if rows is None else np.intersect1d(wrong, rows):
            lowest, highest = (_told(np.broadcast_to(bound, array.shape)[row]) for bound in (low, high - 1))
            raise self._mismatch(f"integers from {lowest} to {highest}", f"{array[row]} for env {batch.envs[row]}")


class InputObjects:
    """The requirements of one input of the envs of a family that travels as an object, worked out once.

    Args:
        key: Its path.
        spaces: The space of each env; None where anything goes.
        free: Whether they may be missing.
    """

    def __init__(self, key: Key, spaces: Sequence[Any], *, free: bool) -> None:
        self.key = key
        self._free = free
        self._spaces = spaces

    def check(self, batch: EnvsOfFamily, td: TensorDictBase, rows: RowIndex) -> list[Any] | None:
        """The objects, one for each env; None if they are missing and may be.

        Args:
            batch: Of which envs.
            td: What the step was given.
            rows: Which envs are to step.

        Raises:
            SpecMismatchError: If they are missing, or of another number, or one is outside of its space.
        """
        tree, count = batch.tree, len(batch.envs)
        value = tree.get(td, self.key) if tree.is_direct(self.key) else objects_of(tree, td, self.key)
        if value is None and self._free:
            return None
        if value is None:
            raise missing(td, self.key, value)
        shared = value.data if isinstance(value, NonTensorData) else None
        if isinstance(value, torch.Tensor) or (isinstance(shared, tuple | np.ndarray) and len(shared) == count):
            found = value if shared is None else shared
            expected = f"{count} objects, one per env, as NonTensorStack(*objects)"
            raise mismatch(self.key, expected, f"the {type(found).__name__} {shown(found)}")
        objects = value if isinstance(value, list) else plain(value)
        if not isinstance(objects, list) or len(objects) != count:
            raise mismatch(self.key, f"{count} values, one per env", shown(objects))
        for row in batch.asked(rows):
            space = self._spaces[row if batch.members is None else batch.members[row]]
            if objects[row] is not ABSENT and is_outside(space, objects[row]):
                raise mismatch(self.key, f"a value of {space}", f"{shown(objects[row])} for env {batch.envs[row]}")
        return objects


def _found(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _told(bounds: NDArray[Any]) -> Any:
    """Bounds for a message: one number where it is the same everywhere."""
    return bounds.flat[0] if (bounds == bounds.flat[0]).all() else bounds


def check_fits(
    td: TensorDictBase, tree: Tree, leaves: Mapping[Key, TensorSpec], count: int, *, whole: bool = False
) -> None:
    """Refuse entries for a region that its rows could not keep; those that are missing are no matter.

    Args:
        td: What was given.
        tree: Where the leaves are in it.
        leaves: What each must be for one env.
        count: How many envs there are.
        whole: Whether another dtype will do if no number changes by it, as in a step.

    Raises:
        SpecMismatchError: If one has another kind, shape or dtype.
    """
    for key, spec in leaves.items():
        if is_loose(spec):
            continue
        value = tree.get(td, key)
        if value is None:
            continue
        expected = _form(spec.dtype, (count, *spec.shape))
        found = _form(value.dtype, value.shape) if isinstance(value, torch.Tensor) else None
        if found is None:
            raise SpecMismatchError(f"{nested_key(key)!r}: expected {expected}, found {type(value).__name__}")
        if found == expected:
            continue
        if not whole or value.shape != (count, *spec.shape) or cast_exactly(value, spec.dtype) is None:
            raise SpecMismatchError(f"{nested_key(key)!r}: expected {expected}, found {found}; no env was asked")


def _form(dtype: Any, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def missing(td: TensorDictBase, key: Key, value: Any, kind: str = "action") -> SpecMismatchError:
    """The error for an input that is not there, or not a tensor."""
    found = f"the keys {sorted(map(str, td.keys(True, True)))!r}" if value is None else type(value).__name__
    source = "rand_action(td) would set" if kind == "action" else "a reset or the step before gives"
    return mismatch(key, f"a value for every env, as {source}", found, kind)


def mismatch(key: Key, expected: str, found: str, kind: str = "action") -> SpecMismatchError:
    """The error for an input that does not fit."""
    return SpecMismatchError(f"{kind} {nested_key(key)!r}: expected {expected}, found {found}; no env was stepped")
