"""The exchange for envs whose values cannot be stacked: by family, and then env by env."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase

from aioenvs.batched.exchange import Exchange, Rows, Values
from aioenvs.batched.inputs import Inputs
from aioenvs.batched.reader import placed
from aioenvs.engine.adapters import ResetArguments
from aioenvs.engine.host import Outcome
from aioenvs.engine.spaces import Objects
from aioenvs.transfer import Transfer
from aioenvs.trees import Key

__all__ = ["LazyExchange"]


class LazyExchange:
    """Reads and writes the rows of envs of several families, or of one whose shapes vary.

    It does what `Exchange` does, but values are a list with one mapping for each env.

    Args:
        parts: The exchange of each family, and the places of its envs in the batch, ascending.
    """

    def __init__(self, parts: Sequence[tuple[NDArray[np.intp], Exchange]]) -> None:
        self._parts = parts
        self._count = sum(len(places) for places, _ in parts)
        self._envs = {
            place: env for places, part in parts for place, env in zip(places.tolist(), part.envs, strict=True)
        }

    def elsewhere(
        self, td: TensorDictBase, _: Mapping[str, Any], holds: Callable[[torch.Tensor], bool]
    ) -> dict[Any, torch.Tensor]:
        """See `Exchange.elsewhere`; of which family each is comes first in its place."""
        return {
            (number, place): value
            for number, (own, part) in enumerate(self._split(td))
            for place, value in part.elsewhere(own, {}, holds).items()
        }

    def check_inputs(
        self,
        td: TensorDictBase,
        entries: Mapping[str, Any],
        rows: Rows,
        fetched: Mapping[Any, torch.Tensor] = {},
        *,
        arrived: bool = True,
    ) -> list[Inputs]:
        """The inputs of each family, checked; see `Exchange.check_inputs`."""
        shares: list[dict[Any, torch.Tensor]] = [{} for _ in self._parts]
        for (number, place), value in fetched.items():
            shares[number][place] = value
        return [
            part.check_inputs(own, {}, local, share, arrived=arrived)
            for (own, part), (local, _), share in zip(self._split(td), self._local(rows), shares, strict=True)
        ]

    def check_arrived(self, values: Sequence[Inputs]) -> None:
        """See `Exchange.check_arrived`."""
        for own, (_, part) in zip(values, self._parts, strict=True):
            part.check_arrived(own)

    def check_root(self, td: TensorDictBase) -> None:
        """See `Exchange.check_root`."""
        for own, part in self._split(td):
            part.check_root(own)

    def write_inputs(self, values: Sequence[Inputs], rows: Rows) -> dict[int, Objects] | None:
        """See `Exchange.write_inputs`."""
        found = [part.write_inputs(own, local) for own, (local, part) in zip(values, self._local(rows), strict=True)]
        if all(each is None for each in found):
            return None
        envs = (self._envs[row] for row in (range(self._count) if rows is None else rows.tolist()))
        loose: dict[int, Objects] = {env: {} for env in envs}
        for each in found:
            loose |= each or {}
        return loose

    def share(self, values: Sequence[Inputs], row: int) -> Inputs:
        """See `Exchange.share`."""
        for own, (places, part) in zip(values, self._parts, strict=True):
            place = np.flatnonzero(places == row)
            if len(place):
                return part.share(own, int(place[0]))
        raise IndexError(f"row {row} of {self._count}")

    def write_share(self, values: Inputs) -> dict[int, Objects] | None:
        """See `Exchange.write_share`."""
        return self._parts[0][1].write_inputs(values, None)

    def given(self, td: TensorDictBase, rows: Rows, masks: Mapping[Key, torch.Tensor]) -> dict[int, ResetArguments]:
        """See `Exchange.given`."""
        found: dict[int, ResetArguments] = {}
        for (own, part), (local, _), (places, _) in zip(self._split(td), self._local(rows), self._parts, strict=True):
            found |= part.given(own, local, {key: mask[places] for key, mask in masks.items()})
        return found

    def after_reset(self, outcome: Outcome) -> None:
        """See `Exchange.after_reset`."""
        for _, part in self._parts:
            part.after_reset(outcome)

    @property
    def takes_root(self) -> bool:
        """See `Exchange.takes_root`."""
        return any(part.takes_root for _, part in self._parts)

    def decide(self, rows: Rows, lends: bool = False, whole: bool = False) -> None:
        """See `Exchange.decide`."""
        for local, part in self._local(rows):
            part.decide(local, lends=lends, whole=whole)

    def step_result(self, rows: Rows, outcome: Outcome, *, lends: bool = False) -> list[Values]:
        """See `Exchange.step_result`."""
        return self._merged([part.step_result(local, outcome, lends=lends) for local, part in self._local(rows)])

    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Exchange.counts`."""
        steps, episodes = [0] * self._count, [0] * self._count
        for places, part in self._parts:
            for place, taken, ended in zip(places.tolist(), *part.counts(), strict=True):
                steps[place], episodes[place] = taken, ended
        return tuple(steps), tuple(episodes)

    def with_losses(
        self, following: Sequence[Values], known: Any, rows: NDArray[np.intp], outcome: Outcome
    ) -> list[Values]:
        """See `Exchange.with_losses`."""
        results = []
        for (local, part), (places, _) in zip(self._local(rows), self._parts, strict=True):
            assert local is not None
            own, before = (_columns([each[place] for place in places]) for each in (following, known))
            results.append(part.with_losses(own, before, local, outcome))
        return self._merged(results)

    def root_result(self, following: Any, outcome: Outcome, *, lends: bool = False) -> list[Values]:
        """See `Exchange.root_result`."""
        results = []
        for places, part in self._parts:
            own = _columns([following[place] for place in places])
            results.append(part.root_result(own, outcome, lends=lends))
        return self._merged(results)

    def latest(self) -> list[Values]:
        """See `Exchange.latest`."""
        return self._merged([part.latest() for _, part in self._parts])

    def random_objects(self) -> list[Objects]:
        """See `Exchange.random_objects`."""
        sampled: list[Objects] = [{} for _ in range(self._count)]
        for places, part in self._parts:
            for place, own in zip(places.tolist(), part.random_objects(), strict=True):
                sampled[place] = own
        return sampled

    def place(self, transfer: Transfer, following: Any, root: Any) -> tuple[Any, Any]:
        """See `Exchange.place`; all families go together."""
        moved = placed(transfer, following, root)
        return moved[0], moved[1]

    def _split(self, td: TensorDictBase) -> Iterator[tuple[TensorDictBase, Exchange]]:
        """Each family's share of a TensorDict."""
        own = td.unbind(0)
        for places, part in self._parts:
            yield LazyStackedTensorDict(*[own[place] for place in places], stack_dim=0), part

    def _local(self, rows: Rows) -> Iterator[tuple[Rows, Exchange]]:
        """Rows of the batch as rows of each family."""
        for places, part in self._parts:
            yield None if rows is None else np.flatnonzero(np.isin(places, rows)), part

    def _merged(self, results: Sequence[Values]) -> list[Values]:
        """The values of each env, in the order of the batch."""
        merged: list[Values] = [{} for _ in range(self._count)]
        for (places, _), values in zip(self._parts, results, strict=True):
            for key, value in values.items():
                for row, place in enumerate(places.tolist()):
                    merged[place][key] = value[row]
        return merged


def _columns(rows: Sequence[Values]) -> Values:
    """One mapping of lists instead of a list of mappings."""
    return {key: [row[key] for row in rows] for key in rows[0]}
