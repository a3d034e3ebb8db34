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

from aioenvs.engine.layout import ROOT
from aioenvs.engine.pools.pool import Pool
from aioenvs.engine.pools.requests import Lease, Selection
from aioenvs.engine.rows import RowIndex, Rows, Values
from aioenvs.engine.worker.env_host import Outcome
from aioenvs.envs.spec_properties import SpecIndex
from aioenvs.faces.batch_specs import Signature, common_device
from aioenvs.faces.first_ready import PendingSteps
from aioenvs.faces.requests import index_of
from aioenvs.faces.rows.inputs import BatchInputs, FamilyInputs
from aioenvs.faces.rows.tensordicts import DenseResults, LazyResults, Results
from aioenvs.faces.rows.tensors import BatchTensors, FamilyTensors, placed
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


class EnvSelection:
    """Some envs of a pool, in the order of their batch.

    Args:
        whole: The session.
        envs: Which.

    Attributes:
        everything: All of them, as the pool is asked for them.
        rows: Their rows.
        inputs: What they are given, on its way there.
        tensors: What they answer, as tensors.
        spec: What is known of batches of such envs: signature, masks, how results are assembled.
    """

    def __init__(self, whole: Session, envs: tuple[int, ...]) -> None:
        self.whole = whole
        self.pool: Pool = whole.pool
        self.envs: NDArray[np.intp] = np.array(envs, np.intp)
        self.everything: Selection = self.pool.select(sorted(envs))
        self.spec = spec = whole.spec_of(envs)
        self.signature = spec.signature
        self.mask_shapes = spec.mask_shapes
        self.results = spec.results
        self.rows, families = whole.rows_of(envs)
        self.tensors = BatchTensors(self.rows, families, is_lazy=spec.signature.is_lazy)
        self.inputs = BatchInputs(self.rows, whole.inputs_of(families), spec.trees, is_lazy=spec.signature.is_lazy)

    @property
    def num_seeds(self) -> dict[int, int]:
        """How many seeds of a chain each env uses up, by index, in the order of the batch."""
        return {env: self.pool.metadata[env].num_seeds for env in self.envs.tolist()}

    def places(self, envs: Collection[int]) -> NDArray[np.intp]:
        """The rows of the batch in which these envs are, as far as they are in it."""
        return np.flatnonzero(np.isin(self.envs, list(envs)))

    def read_step(
        self,
        rows: RowIndex,
        outcome: Outcome,
        known: Sequence[Values] | None,
        *,
        maybe_reset: bool,
        lends: bool = False,
        apart: bool = False,
    ) -> tuple[Any, Any]:
        """Return the outcome of a step, and the root for the next one if that is wanted; see `Rows.step`."""
        read = self.rows.step(rows, outcome, known, maybe_reset=maybe_reset, lends=lends, apart=apart)
        return self.tensors.step(*read)

    def latest(self) -> Any:
        """Return the latest values of every env: those after its last step or reset."""
        return self.tensors.of(ROOT, self.rows.latest())

    def fetch(self, td: TensorDictBase, entries: Mapping[str, Any]) -> tuple[dict[Any, torch.Tensor], Fence] | None:
        """Begin to bring those inputs of a step here that are on the device of the results.

        Returns:
            What they will be when the fence has passed, as `BatchInputs.check` takes them; None if none is there.
        """
        crossing = self.whole.crossing
        if crossing is None:
            return None
        assert crossing.backend is not None
        there = self.inputs.elsewhere(td, entries, crossing.backend.holds)
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

    def select(self, rows: RowIndex) -> Selection:
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
        self._families = [FamilyTensors(*own) for own in zip(pool.families, pool.arrays, pool.buffers, strict=True)]
        self._home = {env: family for family in self._families for env in family.rows.family.envs}
        firsts: dict[int, int] = {}  # for each env the first that says the same of itself, which it looks like
        self._models = [firsts.setdefault(id(own), env) for env, own in enumerate(pool.metadata)]
        self.transfer = Transfer(
            torch.from_numpy(self._families[0].rows.memory), backend, pin_memory, _pinning(pin_memory)
        )
        self.crossing = self.transfer if backend is not None else None
        pool.fenced = backend is not None
        self._scopes: OrderedDict[tuple[int, ...], EnvSelection] = OrderedDict()
        self._specs: OrderedDict[tuple[int, ...], BatchSpec] = OrderedDict()
        self._inputs = self._make_inputs()
        self.everything = self.scope(tuple(range(pool.num_envs)))
        self.outbox = PendingSteps(self)

    def scope(self, envs: tuple[int, ...]) -> EnvSelection:
        """Return the selection of these envs, worked out once for each choice of them."""
        return _remembered(self._scopes, envs, lambda chosen: EnvSelection(self, chosen))

    def rows_of(self, envs: Sequence[int]) -> tuple[Rows, list[FamilyTensors]]:
        """Return the rows of these envs, and what makes tensors of those of each part."""
        rows = Rows(envs, [family.rows for family in self._families])
        return rows, [self._home[part.envs[0]] for part in rows.parts]

    def inputs_of(self, families: Sequence[FamilyTensors]) -> list[FamilyInputs]:
        """Return what is required of the inputs of each of these families."""
        return [self._inputs[id(family)] for family in families]

    def last_step(self, envs: Sequence[int]) -> tuple[Any, Any]:
        """Return the outcome of the last step of some envs, which was counted, and the root for the next one."""
        rows, families = self.rows_of(envs)
        tensors = BatchTensors(rows, families, is_lazy=self.spec_of(envs).signature.is_lazy)
        return tensors.step(*rows.last_step())

    def joined(self, envs: Sequence[int], values: Sequence[Any]) -> Any:
        """Return the values of envs each of which was read alone, as those of a batch."""
        return self.spec_of(envs).results.joined(values)

    def _make_inputs(self) -> dict[int, FamilyInputs]:
        """Return what is required of the inputs of each family, by its id."""
        metadata, ships = self.pool.metadata, self.pool.ships
        return {
            id(family): FamilyInputs(
                family.rows,
                family.specs,
                [metadata[env] for env in family.rows.family.envs],
                self.device,
                ships=ships,
            )
            for family in self._families
        }

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
        # These refer to this, and to the memory: without them it goes with the last result that looks into it.
        self._scopes.clear()
        for name in ("everything", "outbox"):
            self.__dict__.pop(name, None)

    def place(self, device: torch.device | DeviceBackend) -> None:
        """Bring results to another device from now on."""
        backend = self._backend(device)
        self.transfer.turn_to(backend, _pinning(self.transfer.wanted))
        self.crossing = self.transfer if backend is not None else None
        self.pool.fenced = True  # from now on, since what was begun before may be under way
        self._scopes.clear()
        self._specs.clear()
        self._inputs = self._make_inputs()
        self.everything = self.scope(tuple(range(self.pool.num_envs)))

    def spec_of(self, envs: Sequence[int]) -> BatchSpec:
        """Return what is known of batches of envs such as these."""
        return _remembered(self._specs, tuple([self._models[env] for env in envs]), self._spec)

    def _spec(self, models: tuple[int, ...]) -> BatchSpec:
        """Return what is known of a batch of envs that look like these."""
        homes = [self._home[env] for env in models]
        families = [family for family in self._families if family in homes]
        metadata = [self.pool.metadata[env] for env in models]
        signature = Signature.of(metadata, [family.rows.family for family in families], self.device, self._share)
        index = SpecIndex(signature.output_spec, signature.input_spec)
        groups = zip(index.reset_keys, index.done_keys_groups, strict=True)
        masks = {key: _flag_shape(index, group[0]) for key, group in groups}
        expanded = [family.specs.expand(homes.count(family)) for family in families]
        trees = [region_trees(specs.output_spec, specs.input_spec) for specs in expanded]
        results: Results
        if signature.is_lazy:
            results = LazyResults([each.specs for each in homes], [each.trees for each in homes], self.device)
        else:
            results = DenseResults(families[0].specs, signature.batch_size, trees[0], self.device)
        return BatchSpec(signature, masks, trees, results)


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
