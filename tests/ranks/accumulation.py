"""Several forwards and backwards in `accumulating`, beside stock TorchRec with one batch of their samples.

The gradients are dyadic rationals with few digits: their sums have no rounding, in whichever order they are added up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import LookAheadPipeline, accumulating, cache_stats
from embershard.cache.row_cache import RowCache
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.accumulation import HeldLookups, _DenseGradients
from embershard.sharding.torchrec.modes.hot_cold import announce_hot_batches
from tests.ranks import parity, rows_exchange
from tests.ranks.look_ahead import HotBatch
from tests.ranks.parity import LinearModel, differences, snapshot

Batches = list[tuple[KeyedJaggedTensor, Tensor]]


@dataclass(frozen=True)
class Case(rows_exchange.Case):
    """``pieces``: micro-batches of an update. ``is_cached``: False: TorchRec's own tables are held."""

    pieces: int = 3
    is_cached: bool = True
    steps: int = 24
    ratio: float = 0.4


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: what differs, of how much; evictions; most tickets that were held at once; the iterations that
    FBGEMM counted, in stock's tables and in ours."""

    different: list[str]
    num_compared: int
    evictions: int
    most_held: int
    counts: tuple[set[int], set[int]]


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
    with rows_exchange.means_by_length():
        stock = parity.build(case, bool(case.replicated), make)  # copies have other names than stock's shards
        groups = _groups(case)
        for group in groups:
            stock(*joined(group)).backward()
        expected = snapshot(stock)
        model = parity.build(case, case.is_cached, make)
        announce_hot_batches(model)
        most_held = train(model, case, groups, fault)
        found = snapshot(model)
    counts = _counts(stock), _counts(model)
    return Outcome(differences(expected, found), len(found), _evictions(model), most_held, counts)


def train(model: DistributedModelParallel, case: Case, groups: list[Batches], fault: str | None = None) -> int:
    """Train a model by groups of micro-batches; the most tickets that were held at once."""
    pipeline, stream, held = None, (HotBatch(*each, each[0].is_hot) for group in groups for each in group), [0]
    if case.lookahead:
        optimizer = torch.optim.SGD(model.module.parameters(), lr=0.0)
        pipeline = LookAheadPipeline(
            model, optimizer, model.device, case.lookahead, features=lambda batch: {"embeddings": batch.features}
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
            held.append(max((len(pool._held or ()) for pool in cached_embeddings(model)), default=0))
    if pipeline is not None:
        pipeline.detach()
    assert not any(pool.cache._in_flight.tickets for pool in cached_embeddings(model)), "pins are left"
    return max(held)


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


def interrupted(case: Case, at: str) -> tuple[list[str], bool, list[str]]:
    """An update is interrupted: rows that differ from before, whether pins are left, and what a further update says."""
    model = parity.build(case, True, LinearModel)
    first, second, *_ = _groups(case)
    train(model, dataclasses.replace(case, lookahead=0), [first])
    before = snapshot(model)
    with contextlib.suppress(KeyboardInterrupt), _interrupt(at), accumulating(model):
        for number, (features, coefficients) in enumerate(second):
            loss = model(features, coefficients)
            if at == f"after forward {number}":
                raise KeyboardInterrupt
            loss.backward()
            if at == f"after backward {number}":
                raise KeyboardInterrupt
    is_pinned = any(pool.cache._in_flight.tickets for pool in cached_embeddings(model))
    if at.startswith("end"):
        return [], is_pinned, [rows_exchange.message_of(lambda: snapshot(model))]
    different = differences(before, snapshot(model))
    train(model, dataclasses.replace(case, lookahead=0), [second])
    return different, is_pinned, differences(_trained(case, [first, second]), snapshot(model))


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


FAULTS: dict[str | None, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "a piece dropped": _piece_dropped,
    "slots not held": _slots_not_held,
    "never averaged": _never_averaged,
    "each counts": _each_counts,
}
