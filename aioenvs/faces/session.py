"""The session of a batch: its pool, its specs, and selections of its envs (all of them, or those of a view)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from aioenvs.engine.pools.pool import Lease, Pool, Selection
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.envs.spec_properties import SpecIndex
from aioenvs.faces.batch_specs import Signature, common_device
from aioenvs.faces.first_ready import PendingSteps
from aioenvs.faces.requests import index_of
from aioenvs.faces.rows.exchange import Exchange, Rows, Values
from aioenvs.faces.rows.reader import Ledger, placed
from aioenvs.faces.rows.tensordicts import DenseResults, LazyExchange, LazyResults, Results
from aioenvs.tensors.device import DeviceBackend, Fence, Transfer, backend_of, checked_device
from aioenvs.tensors.step_mdp import NestedKey
from aioenvs.tensors.trees import Tree, exchanged, region_trees, tensors_of

__all__ = ["BatchSpec", "EnvSelection", "Session"]

logger = logging.getLogger("aioenvs")

T = TypeVar("T")
MAX_SCOPES = 1024  # choices of envs, and looks of a batch, that are remembered


@dataclass(frozen=True)
class BatchSpec:
    """The specs and trees that all batches of envs with the same specs, in the same order, share."""

    signature: Signature
    mask_shapes: dict[NestedKey, torch.Size]
    trees: list[dict[str, Tree]]  # of each family
    results: Results


@dataclass(frozen=True)
class EnvSelection:
    """Some envs of a pool, in the order of their batch.

    Attributes:
        mask_shapes: Where the masks of a partial reset may be, and the shape of the flags beside each.
    """

    whole: Session
    envs: NDArray[np.intp]
    everything: Selection
    exchange: Exchange | LazyExchange
    signature: Signature
    mask_shapes: dict[NestedKey, torch.Size]
    results: Results

    @property
    def pool(self) -> Pool:
        """The pool."""
        return self.whole.pool

    @property
    def num_seeds(self) -> dict[int, int]:
        """How many seeds of a chain each env uses up, by index, in the order of the batch."""
        return {env: self.pool.metadata[env].num_seeds for env in self.envs.tolist()}

    def rows(self, envs: Collection[int]) -> NDArray[np.intp]:
        """The rows of the batch in which these envs are, as far as they are in it."""
        return np.flatnonzero(np.isin(self.envs, list(envs)))

    def read_step(
        self, rows: Rows, outcome: Outcome, known: Any, *, maybe_reset: bool, lends: bool = False
    ) -> tuple[Any, Any]:
        """The outcome of a step, and the root for the next one if that is wanted.

        Args:
            rows: Which envs were stepped.
            outcome: What came of the command.
            known: What was known of them before, where some may be lost.
            maybe_reset: Whether finished ones were reset.
            lends: Whether the values may be looked at where they are, as was said when the inputs were written.
        """
        exchange = self.exchange
        following: Any = exchange.step_result(rows, outcome, lends=lends)
        if outcome.lost:
            following = exchange.with_losses(following, known, self.rows(outcome.lost), outcome)
        return following, exchange.root_result(following, outcome, lends=lends) if maybe_reset else None

    def fetch(self, td: TensorDictBase, entries: Mapping[str, Any]) -> tuple[dict[Any, torch.Tensor], Fence] | None:
        """Begin to bring those inputs of a step here that are on the device of the results.

        Returns:
            What they will be when the fence has passed, as `Exchange.check_inputs` takes them; None if none is there.
        """
        crossing, exchange = self.whole.crossing, self.exchange
        if crossing is None:
            return None
        assert crossing.backend is not None
        there = exchange.elsewhere(td, entries, crossing.backend.holds)
        if not there:
            return None
        tensors, fence = crossing.fetch(list(there.values()))
        return dict(zip(there, tensors, strict=True)), fence

    async def at_home(self, td: TensorDictBase) -> TensorDictBase:
        """A TensorDict of results on the host: in one copy, as far as there is one tensor for each key.

        Cancelling it loses nothing.
        """
        crossing = self.whole.crossing
        if crossing is None or type(td) is not TensorDict:
            host: TensorDictBase = td.to("cpu")
            return host
        own = tensors_of(td)
        tensors, fence = crossing.home(own)
        await self.pool.passed([fence])
        here = {id(old): new for old, new in zip(own, tensors, strict=True)}
        return exchanged(td, here, torch.device("cpu"), torch.device("cpu"))

    def placed(self, *results: Any) -> tuple[Any, ...]:
        """Results where the caller wants them, of which the envs have no part any more."""
        transfer = self.whole.crossing
        return results if transfer is None else placed(transfer, *results)

    def select(self, rows: Rows) -> Selection:
        """The envs in these rows of the batch."""
        return self.everything if rows is None else self.pool.select(sorted(self.envs[rows].tolist()))


class Session:
    """The session of a batch, from start to close.

    Args:
        pool: The envs; they run.
        device: Where results go; None for where they are.
        share_individual_td: Whether they are lazy stacks; None where they have to be.
        pin_memory: Whether the block is pinned; None where results go to a device that gains by it.
        non_blocking: Whether results are returned while they still cross, if in order; False for when they are there.

    Attributes:
        transfer: What crosses between the envs' memory and a device.
        crossing: The same if results cross; None if they stay.
    """

    def __init__(
        self,
        pool: Pool,
        device: torch.device | DeviceBackend | None,
        share_individual_td: bool | None,
        pin_memory: bool | None = None,
        non_blocking: bool | None = None,
    ) -> None:
        self.pool = pool
        self.device: torch.device | None
        self._waits = non_blocking is False
        backend = self._backend(common_device(pool.metadata) if device is None else device)
        self._share = share_individual_td
        self._ledgers = [
            Ledger(family, arrays, buffers, [pool.metadata[env] for env in family.envs])
            for family, arrays, buffers in zip(pool.families, pool.arrays, pool.buffers, strict=True)
        ]
        self._home = {env: ledger for ledger in self._ledgers for env in ledger.family.envs}
        firsts: dict[int, int] = {}  # for each env the first that says the same of itself, which it looks like
        self._models = [firsts.setdefault(id(own), env) for env, own in enumerate(pool.metadata)]
        self.transfer = Transfer(torch.from_numpy(self._ledgers[0].memory), backend, pin_memory, _pinning(pin_memory))
        self.crossing = self.transfer if backend is not None else None
        pool.fenced = backend is not None
        self._scopes: OrderedDict[tuple[int, ...], EnvSelection] = OrderedDict()
        self._looks: OrderedDict[tuple[int, ...], BatchSpec] = OrderedDict()
        self.everything = self.scope(tuple(range(pool.num_envs)))
        self.outbox = PendingSteps(pool, reads_at_once=pool.restarts or self.everything.signature.is_lazy)

    def scope(self, envs: tuple[int, ...]) -> EnvSelection:
        """Return the selection of these envs, worked out once for each choice of them."""
        return _remembered(self._scopes, envs, self._scope)

    def _backend(self, device: torch.device | DeviceBackend | None) -> DeviceBackend | None:
        """Return the backend that brings results to a device, which is theirs from now on."""
        backend = backend_of(device)
        self.device = checked_device(device) if backend is None else backend.device
        return backend

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor on the host, if possible without waiting for a device."""
        return self.transfer.here(tensor)

    def index(self, envs: Sequence[int], batch_size: torch.Size) -> torch.Tensor:
        """The `env_index` of rows of these envs where results go, from where `read` knows it."""
        index = index_of(envs, batch_size)
        if self.crossing is None:
            return index
        (placed,) = self.crossing.place([index])
        self.crossing.know(placed, index)
        return placed

    async def arrived(self, lease: Lease | None = None) -> None:
        """Wait for what crosses, if the caller wants it to be there in any case rather than for its own stream.

        Args:
            lease: For what.

        Raises:
            WorkerTimeoutError: If that takes longer than it may.
        """
        if self._waits and self.transfer.pending:
            await self.pool.passed(self.transfer.pending, lease)

    async def finish(self) -> None:
        """Wait for what crosses, as long as closing may take, and also while being cancelled; then `discard`."""
        pending, seconds = self.transfer.pending, self.pool.timeouts.close
        over = False
        try:
            over = not pending or await self.pool.fence_waiter.outlasted(pending, seconds)
            if not over:
                logger.warning(
                    "copies between %d envs and %s were not done within %s s (close_timeout): the memory is kept, and "
                    "pinned, until they are",
                    self.pool.num_envs,
                    self.device,
                    seconds,
                )
        finally:
            self.discard(over=over)

    def discard(self, *, over: bool = False) -> None:
        """Give back what crossing takes, from any thread; for what is still under way that is kept until it is done.

        Args:
            over: Whether it is known that nothing is.
        """
        fence_waiter = self.pool.fence_waiter
        if not over and self.transfer.pending:
            fence_waiter.afterwards(self.transfer.pending, lambda _: self.transfer.close())
        else:
            self.transfer.close()
        fence_waiter.close()
        # Scopes refer to this, and to the memory: without them it goes with the last result that looks into it.
        self._scopes.clear()
        self.__dict__.pop("everything", None)

    def place(self, device: torch.device | DeviceBackend) -> None:
        """Bring results to another device from now on."""
        backend = self._backend(device)
        self.transfer.turn_to(backend, _pinning(self.transfer.wanted))
        self.crossing = self.transfer if backend is not None else None
        self.pool.fenced = True  # from now on, since what was begun before may be under way
        self._scopes.clear()
        self._looks.clear()
        self.everything = self.scope(tuple(range(self.pool.num_envs)))

    def _scope(self, envs: tuple[int, ...]) -> EnvSelection:
        indices = np.array(envs, np.intp)
        look, ships = self.look(envs), self.pool.ships
        parts = [
            (places, Exchange(ledger, _members(ledger, indices[places].tolist()), trees, self.device, ships=ships))
            for (ledger, places), trees in zip(self._families(envs), look.trees, strict=True)
        ]
        exchange = LazyExchange(parts) if look.signature.is_lazy else parts[0][1]
        everything = self.pool.select(sorted(envs))
        return EnvSelection(self, indices, everything, exchange, look.signature, look.mask_shapes, look.results)

    def look(self, envs: Sequence[int]) -> BatchSpec:
        """Return the specs of a batch of these envs."""
        return _remembered(self._looks, tuple(self._models[env] for env in envs), self._look)

    def last_step(self, envs: Sequence[int], look: BatchSpec) -> tuple[Values, Values]:
        """Return the results of the last step of some envs of one family, and the root for the next one.

        Args:
            envs: Which envs.
            look: Of them.
        """
        ledger = self._home[envs[0]]
        return Exchange(ledger, _members(ledger, envs), look.trees[0], self.device).last_step()

    def _look(self, models: tuple[int, ...]) -> BatchSpec:
        """Return the specs of a batch of envs that look like these."""
        families = self._families(models)
        metadata = [self.pool.metadata[env] for env in models]
        signature = Signature.of(metadata, [ledger.family for ledger, _ in families], self.device, self._share)
        index = SpecIndex(signature.output_spec, signature.input_spec)
        groups = zip(index.reset_keys, index.done_keys_groups, strict=True)
        masks = {key: _flag_shape(index, group[0]) for key, group in groups}
        expanded = [ledger.specs.expand(len(places)) for ledger, places in families]
        trees = [region_trees(specs.output_spec, specs.input_spec) for specs in expanded]
        results: Results
        if signature.is_lazy:
            own = [self._home[env] for env in models]
            results = LazyResults([each.specs for each in own], [each.trees for each in own], self.device)
        else:
            results = DenseResults(families[0][0].specs, signature.batch_size, trees[0], self.device)
        return BatchSpec(signature, masks, trees, results)

    def _families(self, envs: Sequence[int]) -> list[tuple[Ledger, NDArray[np.intp]]]:
        """The families that these envs are of, and the places of each in the batch."""
        homes = [self._home[env] for env in envs]
        chosen = [ledger for ledger in self._ledgers if ledger in homes]
        return [(ledger, np.array([place for place, home in enumerate(homes) if home is ledger])) for ledger in chosen]


def _pinning(pin_memory: bool | None) -> DeviceBackend | None:
    """Return the backend that can pin memory whose results stay on the host."""
    return backend_of(torch.device("cuda")) if pin_memory and torch.cuda.is_available() else None


def _remembered(
    known: OrderedDict[tuple[int, ...], T], key: tuple[int, ...], make: Callable[[tuple[int, ...]], T]
) -> T:
    """Return the value made of a key; those used longest ago are forgotten."""
    value = known.get(key)
    if value is None:
        while len(known) >= MAX_SCOPES:
            known.popitem(last=False)
        value = known[key] = make(key)
    else:
        known.move_to_end(key)
    return value


def _flag_shape(index: SpecIndex, key: NestedKey) -> torch.Size:
    """The shape of a flag; its sizes are -1 where envs differ in them."""
    if not index.members:
        shape: torch.Size = index.full("done")[key].shape
        return shape
    shapes = [_flag_shape(member, key) for member in index.members]
    inner = shapes[0] if len(set(shapes)) == 1 else (-1,) * len(shapes[0])
    return torch.Size([len(shapes), *inner])


def _members(ledger: Ledger, envs: Sequence[int]) -> Rows:
    """The places of these envs in their family; None for all of them, in order."""
    if tuple(envs) == ledger.family.envs:
        return None
    return np.array([ledger.place[env] for env in envs], np.intp)
