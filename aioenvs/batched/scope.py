"""What it takes to command some envs of a running pool: all of them, or those of a view."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from aioenvs.batched.exchange import Exchange, Ledger, Rows
from aioenvs.batched.lazy import LazyExchange
from aioenvs.batched.results import DenseResults, LazyResults, Results
from aioenvs.batched.signature import Signature, common_device
from aioenvs.engine.pool import Pool, Selection
from aioenvs.envs.described import NestedKey, SpecIndex
from aioenvs.trees import region_trees

__all__ = ["Running", "Scope"]


@dataclass(frozen=True)
class Scope:
    """Some envs of a pool, in the order of their batch."""

    pool: Pool
    envs: NDArray[np.intp]
    everything: Selection
    signature: Signature
    exchange: Exchange | LazyExchange
    results: Results

    @functools.cached_property
    def mask_shapes(self) -> dict[NestedKey, torch.Size]:
        """Where the masks of a partial reset may be, and the shape of the flags beside each."""
        index = SpecIndex(self.signature.output_spec, self.signature.input_spec)
        groups = zip(index.reset_keys, index.done_keys_groups, strict=True)
        return {key: _flag_shape(index, group[0]) for key, group in groups}

    @property
    def num_seeds(self) -> dict[int, int]:
        """How many seeds of a chain each env uses up, by index, in the order of the batch."""
        return {env: self.pool.metadata[env].num_seeds for env in self.envs.tolist()}

    def rows(self, envs: Collection[int]) -> NDArray[np.intp]:
        """The rows of the batch in which these envs are, as far as they are in it."""
        return np.flatnonzero(np.isin(self.envs, list(envs)))

    def select(self, rows: Rows) -> Selection:
        """The envs in these rows of the batch."""
        return self.everything if rows is None else self.pool.select(sorted(self.envs[rows].tolist()))


class Running:
    """What there is between start and close."""

    def __init__(self, pool: Pool, device: torch.device | None, share_individual_td: bool | None) -> None:
        self.pool = pool
        self.device = common_device(pool.metadata) if device is None else device
        self._share = share_individual_td
        self._ledgers = [Ledger(family, arrays) for family, arrays in zip(pool.families, pool.arrays, strict=True)]
        self._scopes: dict[tuple[int, ...], Scope] = {}
        self.everything = self.scope(tuple(range(pool.num_envs)))

    def scope(self, envs: tuple[int, ...]) -> Scope:
        """What it takes to command these envs; worked out once for each choice of them."""
        scope = self._scopes.get(envs)
        if scope is None:
            scope = self._scopes[envs] = self._scope(envs)
        return scope

    def place(self, device: torch.device) -> None:
        """Bring results to another device from now on."""
        self.device = device
        self._scopes.clear()
        self.everything = self.scope(tuple(range(self.pool.num_envs)))

    def _scope(self, envs: tuple[int, ...]) -> Scope:
        pool = self.pool
        indices = np.array(envs, np.intp)
        ledgers = [ledger for ledger in self._ledgers if not set(ledger.family.envs).isdisjoint(envs)]
        families = [ledger.family for ledger in ledgers]
        signature = Signature.of([pool.metadata[env] for env in envs], families, self.device, self._share)
        exchange: Exchange | LazyExchange
        results: Results
        if signature.is_lazy:
            exchange, results = self._lazy(ledgers, indices)
        else:
            exchange, results = self._dense(ledgers[0], indices, signature)
        return Scope(pool, indices, pool.select(sorted(envs)), signature, exchange, results)

    def _dense(self, ledger: Ledger, envs: NDArray[np.intp], signature: Signature) -> tuple[Exchange, DenseResults]:
        specs = ledger.specs.expand(len(envs))
        trees = region_trees(specs.output_spec, specs.input_spec)
        exchange = Exchange(ledger, _members(ledger, envs), trees, self.device)
        return exchange, DenseResults(ledger.specs, signature.batch_size, trees, self.device)

    def _lazy(self, ledgers: Sequence[Ledger], envs: NDArray[np.intp]) -> tuple[LazyExchange, LazyResults]:
        parts = []
        homes: dict[int, Ledger] = {}
        for ledger in ledgers:
            places = np.flatnonzero(np.isin(envs, ledger.family.envs))
            homes.update(dict.fromkeys(places.tolist(), ledger))
            specs = ledger.specs.expand(len(places))
            trees = region_trees(specs.output_spec, specs.input_spec)
            parts.append((places, Exchange(ledger, _members(ledger, envs[places]), trees, self.device)))
        own = [homes[place] for place in range(len(envs))]
        results = LazyResults([ledger.specs for ledger in own], [ledger.trees for ledger in own], self.device)
        return LazyExchange(parts), results


def _flag_shape(index: SpecIndex, key: NestedKey) -> torch.Size:
    """The shape of a flag; its sizes are -1 where envs differ in them."""
    if not index.members:
        shape: torch.Size = index.full("done")[key].shape
        return shape
    shapes = [_flag_shape(member, key) for member in index.members]
    inner = shapes[0] if len(set(shapes)) == 1 else (-1,) * len(shapes[0])
    return torch.Size([len(shapes), *inner])


def _members(ledger: Ledger, envs: NDArray[np.intp]) -> Rows:
    """The places of these envs in their family; None for all of them, in order."""
    family = ledger.family.envs
    if tuple(envs.tolist()) == family:
        return None
    place = {env: index for index, env in enumerate(family)}
    return np.array([place[env] for env in envs.tolist()], np.intp)
