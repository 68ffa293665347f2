"""Training with the exchange of distinct rows beside stock TorchRec, as one rank of a pool of processes.

The gradients are dyadic rationals with few digits: their sums have no rounding, in whichever order they are added up.
So weights and states must be those of stock TorchRec bit for bit, and a gradient that is lost or scaled shows.

Means of row-wise tables: TorchRec divides by the length of a bag + 1e-6, which is no dyadic rational. Both sides divide
by the length alone here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import embeddingbag
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import LookAheadPipeline, cache_stats, flush
from embershard.distributed import row_gradients
from embershard.distributed.sent_bytes import SentBytes
from embershard.distributed.traffic import count_sent_bytes, sent_bytes
from embershard.errors import EmbershardError
from embershard.extras.hot_cold.mode import announce_hot_batches
from embershard.sharding.torchrec import freeze
from embershard.sharding.torchrec.modes.bags import Bags, DistinctIds
from embershard.sharding.torchrec.modes.rows_exchange import RowsInput
from tests.ranks import parity
from tests.ranks.look_ahead import HotBatch, message_of
from tests.ranks.parity import LinearModel, differences, snapshot
from tests.ranks.replicated_rows import division_missing
from tests.ranks.rounding import reversed_samples

Faults = dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]
Unequal = Callable[[Any], list[str]]


@dataclass(frozen=True)
class Case(parity.Case):
    """``lookahead``: batches known ahead; 0: no pipeline. ``empty_every``: every so many batches this rank has no id;
    the other rank has them, and the rank after it one batch later. ``absent_every``: the same, without a sample.
    ``hot_every``: every so many batches have hot ids only, on all ranks. ``sizes``: samples of the batches, in turn;
    none: ``batch_size``. ``seed``: of the ids."""

    exchange: str = "rows"
    steps: int = 15
    lookahead: int = 0
    empty_every: int = 0
    absent_every: int = 0
    hot_every: int = 0
    sizes: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one rank saw. ``different`` is empty when all was bitwise equal. The errors are means, as multiples of what
    stock TorchRec differs from itself by when it adds samples up in reverse."""

    different: list[str]
    num_compared: int
    evictions: int
    loss_error: float = 0.0
    weight_error: float = 0.0


def _nothing(model: Any) -> list[str]:
    return []


def batches(case: Case) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
    """Skewed ids in bags of 0, 1, 2 or 4; weights and coefficients are multiples of 1/4."""
    rank, rows = dist.get_rank(), [case.rows[int(name[1])] for name in case.features]
    width = sum(case.dims[int(name[1])] for name in case.features)
    for step in range(case.steps):
        generator = torch.Generator().manual_seed(1_000_000 * case.seed + 1000 * step + rank)
        is_absent = bool(case.absent_every) and (step + rank) % case.absent_every == 0
        size = 0 if is_absent else case.sizes[step % len(case.sizes)] if case.sizes else case.batch_size
        lengths = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (len(rows), size), generator=generator)]
        if case.empty_every and (step + rank) % case.empty_every == 0:
            lengths.zero_()
        values = []
        is_hot = bool(case.hot_every) and step % case.hot_every == case.hot_every - 1
        for num_rows, count in zip(rows, lengths.sum(dim=1).tolist(), strict=True):
            most = min(case.hot or num_rows, num_rows) if is_hot else num_rows
            values.append((torch.rand(count, generator=generator) ** 2 * most).long() * 7 % num_rows)
        ids = torch.cat(values)
        weights = torch.randint(1, 9, ids.shape, generator=generator) / 4 if case.weighted else None
        features = KeyedJaggedTensor(keys=case.features, values=ids, lengths=lengths.flatten(), weights=weights)
        features = features.to(torch.device(case.device))
        features.is_hot = is_hot
        coefficients = torch.randint(-8, 9, (size, width), generator=generator) / 4
        yield features, coefficients.to(case.device)


def train_linear(model: DistributedModelParallel, case: Case) -> KeyedJaggedTensor:
    """Train on this rank's batches; the last one's features."""
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.0)
    if not case.lookahead:
        for step, (features, coefficients) in enumerate(batches(case)):
            model(features, coefficients).backward()
            if case.evaluate_every and step % case.evaluate_every == 0:
                with torch.no_grad():
                    model(features, coefficients)
        return features
    pipeline = LookAheadPipeline(
        model, optimizer, model.device, case.lookahead, features=lambda batch: {"embeddings": batch.features}
    )
    stream = (HotBatch(*batch, batch[0].is_hot) for batch in batches(case))
    with contextlib.suppress(StopIteration):
        while True:
            with pipeline.step(stream) as batch:
                model(batch.features, batch.labels).backward()
    pipeline.detach()
    return batch.features


def compare_dyadic(case: Case, fault: str | None = None) -> Outcome:
    """Weights and states after dyadic gradients: stock TorchRec's against those of the exchange of rows."""
    (outcome,) = compare_variants(case, [(case, fault)])
    return outcome


def compare_variants(
    case: Case, variants: list[tuple[Case, str | None]], faults: Faults | None = None, unequal: Unequal = _nothing
) -> list[Outcome]:
    """:func:`compare_dyadic` for several ways to train, each with a fault or none, beside one stock run.

    ``unequal``: what differs between the ranks of a trained model.
    """
    with means_by_length():
        stock = parity.build(case, False, LinearModel)
        train_linear(stock, dataclasses.replace(case, lookahead=0))
        expected = snapshot(stock)
        return [_compared(expected, *variant, faults or FAULTS, unequal) for variant in variants]


def _compared(expected: dict[str, Tensor], case: Case, fault: str | None, faults: Faults, unequal: Unequal) -> Outcome:
    with faults[fault]() if fault else contextlib.nullcontext():
        model = parity.build(case, True, LinearModel)
        announce_hot_batches(model)
        train_linear(model, case)
        found = snapshot(model)
    different = differences(expected, found) + unequal(model)
    return Outcome(different, len(found), sum(stats.evictions for stats in cache_stats(model)))


def compare_all(cases: list[Case]) -> list[Outcome]:
    """:func:`compare_dyadic` for several cases in one call."""
    return [compare_dyadic(case) for case in cases]


def compare_real(case: Case, unequal: Unequal = _nothing) -> Outcome:
    """The same after gradients of a real loss, which are rounded."""
    trained = []
    with means_by_length():
        for is_ours, order in ((False, None), (False, reversed_samples), (True, None)):
            model = parity.build(case, is_ours)
            trained.append((parity.train(model, case, order=order), snapshot(model)))
    stock, turned, ours = trained
    rounding, errors = (_mean_errors(stock, each) for each in (turned, ours))
    dist.all_reduce(rounding, dist.ReduceOp.MAX)
    different, found = sorted(set(stock[1]) ^ set(ours[1])) + unequal(model), ours[1]
    evictions = sum(stats.evictions for stats in cache_stats(model))
    return Outcome(different, len(found), evictions, *(errors / rounding).tolist())


def _mean_errors(some: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> Tensor:
    """Of losses, and of weights. (The largest one of a weight depends on how nearly some gradient cancels out.)"""
    losses = torch.tensor(some[0]) - torch.tensor(other[0])
    weights = [(some[1][name] - other[1][name]).flatten() for name in some[1] if name.startswith("weight")]
    return torch.stack([losses.abs().mean(), torch.cat(weights).abs().mean()])


def move_between_exchanges(case: Case) -> list[str]:
    """Train with rows, load into stock TorchRec and back: what is not equal, and tables whose names changed."""
    rows, stock = parity.build(case, True, LinearModel), parity.build(case, False, LinearModel)
    back = parity.build(case, True, LinearModel)
    train_linear(rows, case)
    for source, target in ((rows, stock), (stock, back)):
        target.load_state_dict(source.state_dict())
        target.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    expected = snapshot(rows)
    different = differences(expected, snapshot(stock)) + differences(expected, snapshot(back))
    for model in (rows, stock, back):
        train_linear(model, dataclasses.replace(case, steps=5))
    return different + differences(snapshot(stock), snapshot(rows)) + differences(snapshot(stock), snapshot(back))


def sent_in_a_step(case: Case) -> tuple[SentBytes, list[list[int]]]:
    """What this rank sent in one step, and the ids of each of its features."""
    count_sent_bytes()
    model = parity.build(case, True, LinearModel)
    one = dataclasses.replace(case, steps=1)
    before = sent_bytes()
    train_linear(model, one)
    features, _ = next(batches(one))
    return sent_bytes() - before, [features[name].values().tolist() for name in case.features]


def error_of_a_step(case: Case) -> str:
    """The message of the first step."""
    try:
        train_linear(parity.build(case, True, LinearModel), dataclasses.replace(case, steps=1))
    except EmbershardError as error:
        return str(error)
    return ""


def interrupt_all(case: Case) -> list[str]:
    """Rank 0 is interrupted when it has the gradients of all ranks in the last step, before it trains rows; the others
    train them and are interrupted then. What this rank says to somebody who reads its rows."""
    model, steps = parity.build(case, True, LinearModel), list(batches(case))
    for features, coefficients in steps[:-1]:
        model(features, coefficients).backward()
    gather = row_gradients._gather

    def interrupted(*arguments: Any) -> Any:
        found = gather(*arguments)
        if not dist.get_rank():
            raise KeyboardInterrupt
        return found

    with mock.patch.object(row_gradients, "_gather", interrupted), contextlib.suppress(KeyboardInterrupt):
        features, coefficients = steps[-1]
        model(features, coefficients).backward()
        raise KeyboardInterrupt
    reads: list[Callable[[], Any]] = [lambda: snapshot(model), lambda: flush(model), lambda: freeze(model)]
    return [message_of(read) for read in reads]


@contextlib.contextmanager
def means_by_length() -> Iterator[None]:
    """Let TorchRec divide the sums of row-wise tables by the lengths of the bags alone."""
    make = embeddingbag._create_mean_pooling_divisor
    whole = lambda *args, **kwargs: make(*args, **kwargs).round().clamp(min=1)  # noqa: E731
    with mock.patch.object(embeddingbag, "_create_mean_pooling_divisor", whole):
        yield


@contextlib.contextmanager
def _one_rank_left_out() -> Iterator[None]:
    pool = Bags.pool

    def cut(self: Bags, rows: Tensor) -> Tensor:
        return pool(self, rows if dist.get_rank() else rows * 0)

    with mock.patch.object(Bags, "pool", cut):
        yield


@contextlib.contextmanager
def _means_not_divided() -> Iterator[None]:
    """Row-wise tables: by TorchRec; the others: by us."""
    with (
        mock.patch.object(embeddingbag, "_apply_mean_pooling", lambda keyed_tensor, divisor: keyed_tensor),
        mock.patch.object(RowsInput, "_scales", return_value=None),
    ):
        yield


@contextlib.contextmanager
def _repeats_dropped() -> Iterator[None]:
    """Only the last bag with a row trains it."""
    pool = Bags.pool

    def once(self: Bags, rows: Tensor) -> Tensor:
        last = torch.zeros(rows.shape[0], dtype=torch.int64)
        last[self.places] = torch.arange(self.places.numel())
        is_last = last[self.places] == torch.arange(self.places.numel())
        scales = torch.ones_like(self.places, dtype=rows.dtype) if self.scales is None else self.scales
        return pool(dataclasses.replace(self, scales=scales * is_last), rows)

    with mock.patch.object(Bags, "pool", once):
        yield


@contextlib.contextmanager
def _neighbouring_rows() -> Iterator[None]:
    """Bags read the row of the next distinct id."""
    of = DistinctIds.of

    def shifted(ids: Tensor, lengths: list[int]) -> DistinctIds:
        found = of(ids, lengths)
        return found._replace(inverse=(found.inverse + 1) % max(1, found.ids.numel()))

    with mock.patch.object(DistinctIds, "of", shifted):
        yield


FAULTS: Faults = {
    "one rank left out": _one_rank_left_out,
    "division missing": division_missing,
    "means not divided": _means_not_divided,
    "repeats dropped": _repeats_dropped,
    "neighbouring rows": _neighbouring_rows,
}
