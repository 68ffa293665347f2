"""Two trainings of a sharded model, compared bit by bit, and the first step after which they differ."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard.distributed import Ranks
from embershard.sharding.plan import Plan
from embershard.sharding.torchrec import cache_stats, cached_embeddings, flush
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.training.checkpoint.host_rows import taking_references

_SHOWN = 8  # differences


class TensorPart(NamedTuple):
    """A rank's part of a tensor, the number of its first row in the whole one, and whether it is of a table."""

    first_row: int
    tensor: Tensor
    of_table: bool


#: A rank's parts of all tensors, by name.
Tensors = dict[str, TensorPart]


@dataclass(frozen=True)
class Difference:
    """A tensor that differs on one rank.

    Attributes:
        tensor: name of the parameter, or of the optimizer's state.
        rank: that holds the part which differs.
        row: the first one that differs, in the whole tensor; 0 for a number.
        num_rows: rows of this part that differ.
        cached, stock: the first value that differs, with the cache and without.
        of_table: whether it is a row of a table, not a layer's.
    """

    tensor: str
    rank: int
    row: int
    num_rows: int
    cached: float
    stock: float
    of_table: bool


@dataclass(frozen=True)
class CachedRun:
    """What the caches did in a compared run, on all ranks.

    Attributes:
        slots: of all caches.
        rows: of all cached tables.
        evictions: of cached rows.
        passed_over: slots that would have been evicted but for their pins, counted once per plan. Without any, the
            comparison would not notice a cache that ignores pins.
    """

    slots: int
    rows: int
    evictions: int
    passed_over: int


@dataclass(frozen=True)
class Equivalence:
    """Result of a comparison.

    Attributes:
        steps: that were trained.
        caches: of the size in the settings, then ever smaller ones. Where something differs, the last one differs.
        num_tensors: compared on all ranks, parts of one tensor on several ranks counted each.
        loss_step: the first step whose loss differs; None where all are equal.
        step: the first step after which a tensor differs, 0 for the initial weights; None where all are equal.
        differences: after that step, of tables first.
        num_ranks: that trained.
    """

    steps: int
    caches: tuple[CachedRun, ...]
    num_tensors: int
    loss_step: int | None
    step: int | None
    differences: tuple[Difference, ...]
    num_ranks: int = 1

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return self.loss_step is None and self.step is None

    def __str__(self) -> str:
        return "\n".join(self.lines("Compare more batches, or larger ones, or with a smaller cache."))

    def lines(self, more_pins: str) -> Iterator[str]:
        """Yield the verdict for the screen; `more_pins`: what to do where no pin mattered."""
        trained = f"{self.steps} steps on {self.num_ranks} {'rank' if self.num_ranks == 1 else 'ranks'}"
        if not self.is_equal:
            yield f"DIFFERENT within {trained}, with the cache and with stock TorchRec."
        else:
            yield (
                f"EQUAL: {trained}, with the cache and with stock TorchRec: all losses and {self.num_tensors} tensors "
                f"of weights and optimizer states, bit for bit."
            )
        for number, cache in enumerate(self.caches, 1):
            result = "different" if number == len(self.caches) and not self.is_equal else "equal"
            yield (
                f"  {cache.slots:,} slots: {result}; {cache.evictions:,} rows were evicted, and "
                f"{cache.passed_over:,} times a slot was passed over because a batch pinned it"
            )
        if self.is_equal:
            if not self.caches[-1].evictions:
                yield "No row was evicted, so this says little about the cache."
            if not self.caches[-1].passed_over:
                yield (
                    "No pin mattered, in no size of the cache that was tried: a cache that evicts rows in use would "
                    f"have been equal, too. {more_pins}"
                )
            return
        if self.loss_step is not None:
            yield f"The first loss that differs is that of step {self.loss_step}."
        if self.step is None:
            yield "All weights and optimizer states are equal: the forward reads other rows than it trains."
            return
        when = "before the first step" if self.step == 0 else f"after step {self.step}"
        yield f"Weights or optimizer states differ first {when}, in {len(self.differences)} tensors:"
        for found in self.differences[:_SHOWN]:
            yield (
                f"  {found.tensor}, row {found.row:,} on rank {found.rank}: {found.cached!r} with the cache, "
                f"{found.stock!r} with stock TorchRec ({found.num_rows:,} rows differ)"
            )
        if len(self.differences) > _SHOWN:
            yield f"  and {len(self.differences) - _SHOWN} more"


class Comparison(abc.ABC):
    """A pair of trainings, with the cache and without, that is run as often as needed. All ranks have one."""

    def __init__(self, ranks: Ranks, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        self._caches: list[CachedRun] = []
        self._num_tensors = 0

    @abc.abstractmethod
    def _train(self, steps: int) -> tuple[tuple[list[float], Tensors], tuple[list[float], Tensors]]:
        """Train so many steps from the start, with the cache and with stock TorchRec; return the losses of both, and
        `tensors_of` both. Notes what the caches did (`_note_caches`)."""

    @abc.abstractmethod
    def _halve(self) -> None:
        """Halve the caches for the next training."""

    @property
    def _has_shown_pins(self) -> bool:
        """True if pins mattered as often as there were steps, or if the last training's caches grew back."""
        last = self._caches[-1]
        grew_back = len(self._caches) > 1 and last.slots >= self._caches[-2].slots
        return last.passed_over >= self._steps or grew_back

    def verdict(self) -> Equivalence:
        """Train all steps, with smaller caches until pins mattered; where something differs, find the first step."""
        loss_step, differences = self._compare(self._steps)
        while loss_step is None and not differences and not self._has_shown_pins:
            self._halve()
            loss_step, differences = self._compare(self._steps)
        caches, num_tensors = tuple(self._caches), self._num_tensors
        step = self._steps if differences else None
        if loss_step not in (None, step):
            _, found = self._compare(loss_step)
            if found:
                step, differences = loss_step, found
        equal = -1
        while step is not None and step - equal > 1:
            middle = (equal + step) // 2
            _, found = self._compare(middle)
            if found:
                step, differences = middle, found
            else:
                equal = middle
        return Equivalence(
            self._steps, caches, num_tensors, loss_step, step, tuple(differences), self._ranks.world_size
        )

    def _compare(self, steps: int) -> tuple[int | None, list[Difference]]:
        """Train so many steps with both; return the first step whose loss differs, and all tensors that do."""
        (losses, tensors), (stock_losses, stock) = self._train(steps)
        pairs = enumerate(zip(losses, stock_losses, strict=True), 1)
        loss_step = next((number for number, (a, b) in pairs if repr(a) != repr(b)), None)
        differences = list(differences_of(tensors, stock, self._ranks.rank))
        self._num_tensors = self._sum(len(tensors))
        gathered: list[tuple[int | None, list[Difference]]] = self._ranks.all_gather_objects((loss_step, differences))
        steps_of_losses = [step for step, _ in gathered if step is not None]
        found = [difference for _, on_rank in gathered for difference in on_rank]
        return min(steps_of_losses, default=None), sorted(found, key=lambda difference: not difference.of_table)

    def _note_caches(self, model: DistributedModelParallel, passed_over: int) -> None:
        """Note what the caches of a model did in a training; `passed_over`: slots, on this rank."""
        stats = cache_stats(model)
        counts = [sum(getattr(table, name) for table in stats) for name in ("slots", "rows", "evictions")]
        self._caches.append(CachedRun(*map(self._sum, [*counts, passed_over])))

    def _sum(self, number: int) -> int:
        return int(self._ranks.all_gather(torch.tensor(float(number), dtype=torch.float64)).sum())


def with_halved_caches(plan: Plan) -> Plan:
    """Return the plan with half the slots, and without its prediction, which is of others."""
    pools = tuple(replace(pool, slots=max(1, pool.slots // 2)) for pool in plan.pools)
    return replace(plan, pools=pools, prediction=None)


def tensors_of(model: DistributedModelParallel, dense: Mapping[str, Any]) -> Tensors:
    """Return this rank's part of all weights and optimizer states. Trained rows are written back before.

    Args:
        model: with caches, or stock TorchRec's.
        dense: the "state" of the dense optimizer's state dict, by names of layers.
    """
    pools = list(cached_embeddings(model))
    return {name: part._replace(tensor=contents(part.tensor, pools)) for name, part in parts_of(model, dense).items()}


def contents(part: Tensor, pools: Sequence[CachedTableBatchedEmbeddings]) -> Tensor:
    """Return rows in place of the memory that stands for them; others as they are."""
    return next((rows for pool in pools if (rows := pool.host.read_part(part)) is not None), part)


def parts_of(model: DistributedModelParallel, dense: Mapping[str, Any]) -> Tensors:
    """Return `tensors_of` a model, with memory that stands for rows that are elsewhere."""
    with taking_references(model):
        flush(model)
        states = {
            **model.fused_optimizer.state_dict()["state"],
            **{f"{name} (dense)": values for name, values in dense.items()},
        }
        groups: list[dict[str, Any]] = [model.state_dict()]
        groups += [{f"{of}: {name}": value for name, value in values.items()} for of, values in states.items()]
        return {name: part for group in groups for key, value in group.items() for name, part in _parts(key, value)}


def _parts(name: str, value: Any) -> Iterator[tuple[str, TensorPart]]:
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            first = shard.metadata.shard_offsets
            place = f"{name} from {tuple(first)}" if any(first[1:]) else name
            yield place, TensorPart(first[0], shard.tensor.detach(), of_table=True)
    elif isinstance(value, Tensor):
        yield name, TensorPart(0, value.detach(), of_table=False)


def differences_of(cached: Tensors, stock: Tensors, rank: int) -> Iterator[Difference]:
    """Yield what differs in any bit, by name. On a GPU cached rows are in host memory, and stock's are not."""
    assert cached.keys() == stock.keys(), f"not of one model: {sorted(cached.keys() ^ stock.keys())[:5]}"
    for name, part in sorted(cached.items()):
        ours, theirs = part.tensor.cpu(), stock[name].tensor.cpu()
        is_other = (_bits(ours) != _bits(theirs)).any(dim=1)
        rows = is_other.nonzero().flatten().tolist()
        if rows:
            row = (tensor.reshape(len(is_other), -1)[rows[0]].tolist() for tensor in (ours, theirs))
            pairs = list(zip(*row, strict=True))
            ours, theirs = next(
                ((a, b) for a, b in pairs if repr(a) != repr(b)), pairs[0]
            )  # two NaNs may have other bits
            yield Difference(name, rank, part.first_row + rows[0], len(rows), ours, theirs, part.of_table)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes [R, ...] of a tensor's rows; a number is one row."""
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1).contiguous().view(torch.uint8)
