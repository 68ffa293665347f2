"""Several forwards and backwards in `accumulating`, beside stock TorchRec with one batch of their samples.

The gradients are dyadic rationals with few digits: their sums have no rounding, in whichever order they are added up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import LookAheadPipeline, accumulating, cache_stats
from embershard.cache.row_cache import RowCache
from embershard.cache.tickets import InFlight
from embershard.extras.accumulation import HeldLookups, _DenseGradients
from embershard.extras.hot_cold.mode import announce_hot_batches
from embershard.sharding.torchrec import cached_embeddings
from tests.ranks import parity, rows_exchange
from tests.ranks.look_ahead import HotBatch
from tests.ranks.parity import LinearModel, differences, snapshot
from tests.unit.cache import faults

Batches = list[tuple[KeyedJaggedTensor, Tensor]]


@dataclass(frozen=True)
class Case(rows_exchange.Case):
    """``pieces``: micro-batches of an update. ``is_cached``: False: TorchRec's own tables are held. ``prefetch``,
    ``worker``: of the pipeline. ``between``: what happens between two micro-batches."""

    pieces: int = 3
    is_cached: bool = True
    prefetch: int = 2
    worker: bool | None = None
    between: Literal["", "evaluate", "write back", "stats"] = ""
    steps: int = 24
    ratio: float = 0.4


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: what differs, of how much; evictions; most tickets that were held at once; the iterations that
    FBGEMM counted, in stock's tables and in ours; how often a cache grew while a batch was held."""

    different: list[str]
    num_compared: int
    evictions: int
    most_held: int
    counts: tuple[set[int], set[int]]
    held_growths: int = 0


class SequenceModel(parity._Model):
    """The sum of the rows of each bag, times coefficients [B, F * D]."""

    def forward(self, features: KeyedJaggedTensor, coefficients: Tensor) -> Tensor:
        """Its loss."""
        found = self.embeddings(features)
        total = 0 * self.dense.bias.sum()
        for name, own in zip(self.names, coefficients.split(16, dim=1), strict=True):
            rows = found[name]
            total = total + (rows.values() * own.repeat_interleave(rows.lengths(), dim=0)).sum()
        return total


def joined(pieces: Batches) -> tuple[KeyedJaggedTensor, Tensor]:
    """One batch of the samples of several, one after the other."""
    keys = pieces[0][0].keys()
    by_piece = [features.to_dict() for features, _ in pieces]
    parts = [found[key] for key in keys for found in by_piece]
    weights = None if pieces[0][0].weights_or_none() is None else torch.cat([part.weights() for part in parts])
    lengths = torch.cat([part.lengths() for part in parts])
    features = KeyedJaggedTensor(keys, torch.cat([part.values() for part in parts]), weights, lengths)
    return features, torch.cat([coefficients for _, coefficients in pieces])


def compare(case: Case, fault: str | None = None) -> Outcome:
    """Train with micro-batches, with a fault or none, beside stock with one batch for each group of them."""
    make: Any = SequenceModel if case.sequence else LinearModel
    is_ours = case.host_dtype != "fp32" or case.host_bytes is not None  # nobody else has such rows
    with rows_exchange.means_by_length(), _held_growths() as held_growths:
        whole = dataclasses.replace(case, ratio=1.0, host_dir=None, host_bytes=None) if is_ours else case
        stock = parity.build(whole, is_ours or bool(case.replicated), make)  # copies have other names than shards
        groups = _groups(case)
        for group in groups:
            stock(*joined(group)).backward()
        expected = _snapshot(stock, is_ours)
        model = parity.build(case, case.is_cached, make)
        announce_hot_batches(model)
        most_held = train(model, case, groups, fault)
        found = _snapshot(model, is_ours)
    counts = _counts(stock), _counts(model)
    different = differences(expected, found)
    return Outcome(different, len(found), _evictions(model), most_held, counts, len(held_growths))


def _snapshot(model: DistributedModelParallel, is_ours: bool) -> dict[str, Tensor]:
    """What stock has, too; or what the caches have, wherever their rows are."""
    if not is_ours:
        return snapshot(model)
    found = dict[str, Tensor]()
    for pool in cached_embeddings(model):
        pool.cache.write_back()
        every = torch.arange(pool.host.num_rows)
        states = pool.host.select(every)[1:]
        for shard in pool.shards:
            own = slice(shard.first_key, shard.first_key + shard.num_rows)
            for number, part in enumerate((pool.cache.read(every), *states)):
                found[f"{number}/{shard.table}/{shard.first_row}/{shard.column}"] = part[own].clone()
    return found


@contextlib.contextmanager
def _held_growths() -> Iterator[list[RowCache]]:
    """The caches that grow while they hold a batch."""
    grow, found = RowCache._grow, list[RowCache]()

    def noted(self: RowCache, shortage: Any) -> None:
        grow(self, shortage)
        if any(ticket.held for ticket in self._in_flight.tickets):
            found.append(self)

    with mock.patch.object(RowCache, "_grow", noted):
        yield found


def train(model: DistributedModelParallel, case: Case, groups: list[Batches], fault: str | None = None) -> int:
    """Train a model by groups of micro-batches; the most tickets that were held at once."""
    pipeline, stream, held = None, (HotBatch(*each, each[0].is_hot) for group in groups for each in group), [0]
    if case.lookahead:
        optimizer = torch.optim.SGD(model.module.parameters(), lr=0.0)
        pipeline = LookAheadPipeline(
            model,
            optimizer,
            model.device,
            case.lookahead,
            min(case.prefetch, case.lookahead),
            features=lambda batch: {"embeddings": batch.features},
            worker=case.worker,
        )
    for group in groups:
        context = contextlib.nullcontext() if fault == "k updates" else accumulating(model)
        with FAULTS[fault]() if fault in FAULTS else contextlib.nullcontext(), context:
            for features, coefficients in group:
                if pipeline is None:
                    model(features, coefficients).backward()
                else:
                    with pipeline.step(stream) as batch:
                        model(batch.features, batch.labels).backward()
                _between(model, case.between, features, coefficients)
            held.append(max((pool.updates.num_held for pool in cached_embeddings(model)), default=0))
    if pipeline is not None:
        pipeline.detach()
    assert not any(pool.cache._in_flight.tickets for pool in cached_embeddings(model)), "pins are left"
    return max(held)


def _between(model: DistributedModelParallel, what: str, features: KeyedJaggedTensor, coefficients: Tensor) -> None:
    if what == "evaluate":
        with torch.no_grad():
            model(features, coefficients)
    elif what == "write back":
        for pool in cached_embeddings(model):
            pool.cache.write_back()
    elif what == "stats":
        cache_stats(model)


def compare_all(cases: list[Case]) -> list[Outcome]:
    """:func:`compare` for several cases in one call."""
    return [compare(case) for case in cases]


def dense_gradients(case: Case, fault: str | None = None) -> list[str]:
    """Dense gradients after micro-batches that are further from those of one batch, by stock DDP, than rounding is."""
    batches = list(parity.batches(case, dist.get_rank(), case.pieces))
    found = []
    for is_one in (True, False):
        model = parity.build(case, True)
        with contextlib.ExitStack() as stack:
            if not is_one:
                stack.enter_context(FAULTS[fault]() if fault else contextlib.nullcontext())
                stack.enter_context(accumulating(model))
            for features, labels in [joined(batches)] if is_one else batches:
                (model(features, labels) / (1 if is_one else case.pieces)).backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    one, several = found
    assert one.keys() == several.keys()
    return [name for name in one if not torch.allclose(one[name], several[name], rtol=1e-5, atol=1e-8)]


def resumed(case: Case) -> list[str]:
    """Dense gradients of an update that differ in a bit between a model that has trained and one that is loaded from
    its state, for which it is the first update."""
    found = iter(parity.batches(case, dist.get_rank()))
    first, second = (list(itertools.islice(found, case.pieces)) for _ in range(2))
    model, loaded = (parity.build(case, True) for _ in range(2))
    _gradients(model, first)
    loaded.load_state_dict(model.state_dict())
    one, other = _gradients(model, second), _gradients(loaded, second)
    assert one.keys() == other.keys() != set()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _gradients(model: DistributedModelParallel, group: Batches) -> dict[str, Tensor]:
    model.zero_grad()
    with accumulating(model):
        for features, labels in group:
            (model(features, labels) / len(group)).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@dataclass(frozen=True)
class Interrupted:
    """What an exception in an update left: rows that differ from before; whether pins are left; and what is wrong in
    rows and dense gradients after that update came again, and after a step without micro-batches."""

    different: list[str]
    is_pinned: bool
    wrong: list[str]
    wrong_plain: list[str]


def interrupted(case: Case, at: str, is_first: bool = False) -> Interrupted:
    """An update is interrupted on all ranks, behind another one or as the first that the model sees."""
    model = parity.build(case, True, DenseModel)
    first, second, third, *_ = _groups(case)
    before = [] if is_first else [first]
    train(model, case, before)
    rows = snapshot(model)
    with contextlib.suppress(KeyboardInterrupt), _interrupt(at), accumulating(model):
        for number, (features, coefficients) in enumerate(second):
            with _interrupt_in_forward() if at == f"in forward {number}" else contextlib.nullcontext():
                loss = model(features, coefficients)
            if at == f"after forward {number}":
                raise KeyboardInterrupt
            if at == f"in backward {number}":
                loss.register_hook(_raise)
            loss.backward()
            if at == f"after backward {number}":
                raise KeyboardInterrupt
    is_pinned = any(pool.cache._in_flight.tickets for pool in cached_embeddings(model))
    if at.startswith("end"):
        return Interrupted([], is_pinned, [rows_exchange.message_of(lambda: snapshot(model))], [])
    different = differences(rows, snapshot(model))
    train(model, case, [second])
    wrong = differences(_trained(case, [*before, second]), snapshot(model)) + _wrong_bias(model, [second])
    model.zero_grad()
    features, coefficients = joined(third)
    model(features, coefficients).backward()
    plain = differences(_trained(case, [*before, second, third]), snapshot(model)) + _wrong_bias(model, [third])
    return Interrupted(different, is_pinned, wrong, plain)


class DenseModel(LinearModel):
    """The gradient of its bias is the sum of the coefficients."""

    def forward(self, features: KeyedJaggedTensor, coefficients: Tensor) -> Tensor:
        """Its loss."""
        return super().forward(features, coefficients) + self.dense.bias.sum() * coefficients.sum()


def _wrong_bias(model: DistributedModelParallel, groups: list[Batches]) -> list[str]:
    """The bias, if its gradient is not that of these updates."""
    expected = torch.stack([coefficients.sum() for group in groups for _, coefficients in group]).sum()
    dist.all_reduce(expected)
    (bias,) = (each for name, each in model.named_parameters() if name.endswith("dense.bias"))
    assert bias.grad is not None
    return [] if bias.grad.item() == expected.item() / dist.get_world_size() else [f"bias: {bias.grad}, not {expected}"]


def _raise(*_: Any) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _interrupt_in_forward() -> Iterator[None]:
    with mock.patch.object(parity.LinearModel, "forward", _raise):
        yield


def _trained(case: Case, groups: list[Batches]) -> dict[str, Tensor]:
    stock = parity.build(case, False, LinearModel)
    for group in groups:
        stock(*joined(group)).backward()
    return snapshot(stock)


@contextlib.contextmanager
def _interrupt(at: str) -> Iterator[None]:
    train_table, calls = HeldLookups.train, itertools.count()

    def raising(self: HeldLookups) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        train_table(self)

    with mock.patch.object(HeldLookups, "train", raising) if at == "end" else contextlib.nullcontext():
        yield


def _groups(case: Case) -> list[Batches]:
    found = iter(rows_exchange.batches(case))
    groups = []
    while group := list(itertools.islice(found, case.pieces)):
        groups.append(group)
    return groups


def _evictions(model: Any) -> int:
    return sum(stats.evictions for stats in cache_stats(model))


def _counts(model: Any) -> set[int]:
    """Iterations of all FBGEMM tables of pooled and sequence lookups."""
    found = set()
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            for kernel in lookup._emb_modules:
                table = kernel.emb_module
                slots = getattr(getattr(table, "rows", table), "slots", None)
                found.add(int((table if slots is None else slots.tbe).iter.item()))
    return found


# -- faults


@contextlib.contextmanager
def _piece_dropped() -> Iterator[None]:
    train_table = HeldLookups.train

    def without_first(self: HeldLookups) -> None:
        del self._lookups[:1]
        train_table(self)

    with mock.patch.object(HeldLookups, "train", without_first):
        yield


@contextlib.contextmanager
def _slots_not_held() -> Iterator[None]:
    """The slots of a batch may be given away before its rows have trained."""
    with mock.patch.object(RowCache, "hold", RowCache.release):
        yield


@contextlib.contextmanager
def _never_averaged() -> Iterator[None]:
    with mock.patch.object(_DenseGradients, "average", return_value=None):
        yield


@contextlib.contextmanager
def _each_counts() -> Iterator[None]:
    """FBGEMM counts an iteration for each micro-batch."""

    def read(self: Any, held: Any, arguments: Any) -> Tensor:
        return self._look_up(held.ids, held.offsets, **arguments).detach()  # type: ignore[no-any-return]

    with mock.patch.object(HeldLookups, "read", read):
        yield


@contextlib.contextmanager
def _growth_unpins_checked() -> Iterator[None]:
    check = InFlight.check_victims
    with faults.FAULTS["growth_unpins"](), mock.patch.object(InFlight, "check_victims", check):
        yield


FAULTS: dict[str | None, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "growth unpins": faults.FAULTS["growth_unpins"],
    "growth unpins, checked": _growth_unpins_checked,
    "a piece dropped": _piece_dropped,
    "slots not held": _slots_not_held,
    "never averaged": _never_averaged,
    "each counts": _each_counts,
}
