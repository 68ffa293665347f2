"""Train with stock TorchRec and through the look-ahead pipeline, on the same batches, and compare every bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from embershard import LookAheadPipeline, cache_stats
from embershard.cache import CacheGrowthWarning
from embershard.cache.row_cache import RowCache
from embershard.cache.tickets import InFlight
from embershard.pipeline import look_ahead
from embershard.pipeline.look_ahead import LookAheadStats
from embershard.pipeline.module_input import ModuleInput
from embershard.pipeline.worker import PrefetchDepth
from embershard.sharding.torchrec import cached_embeddings, embeddings
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.spec import CacheSpec
from tests.ranks import parity
from tests.ranks.delays import random_delays
from tests.ranks.parity import differences, snapshot


@dataclass(frozen=True)
class Case(parity.Case):
    """``modules``: kind (pooled or sequence) and number of tables of each embedding module; () for a single one.
    ``empty_every``: every so many batches have no id at all. ``cycle``: a batch has rows of its own, and so many
    batches later they come again. ``dyadic``: there is no dense layer, and
    gradients are dyadic rationals, whose sums have the same bits in any order.
    ``hot_every``: every so many batches have ids of ``hot`` rows only, on all ranks. ``uneven_every``: in every so many
    batches each rank has other numbers of samples."""

    steps: int = 12
    modules: tuple[tuple[str, int], ...] = ()
    empty_every: int = 0
    int32_ids: bool = False
    cycle: int = 0
    dyadic: bool = False
    hot_every: int = 0
    uneven_every: int = 0

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Kind and number of tables of every module."""
        return self.modules or (("sequence" if self.sequence else "pooled", len(self.rows)),)


@dataclass(frozen=True)
class Run:
    """One way to train a case through the pipeline.

    With ``working_set_of`` the slots of each pool hold exactly the most distinct rows that so many consecutive
    batches have, plus ``extra_slots``; otherwise the case's ratio decides. ``even_if_crowded``: batches are held as far
    ahead as they fit, though the cache would rather keep half of its slots for other rows. ``delays`` is a seed.
    ``adaptive``: the pipeline holds as few batches as keep steps from waiting; else always ``prefetch``.
    """

    lookahead: int = 4
    prefetch: int = 2
    working_set_of: int | None = None
    extra_slots: int = 0
    even_if_crowded: bool = False
    policy: str = "lookahead"
    profile: bool = False
    transfer: str | None = None
    slot_map: str = "array"
    worker: bool | None = None
    overflow: str = "raise"
    delays: int | None = None
    max_known_bytes: int = 2**30
    adaptive: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a run. ``different`` is empty when everything was bitwise equal; ``late`` are the
    critical-path fills of every step, ``slots`` the sizes of the pools."""

    different: list[str]
    num_compared: int
    fills: int
    evictions: int
    write_backs: int
    growths: int
    late: list[int]
    slots: list[int]
    pipeline: LookAheadStats
    known_bytes: list[int]


@dataclass
class Batch(Pipelineable):
    """Features and labels [B]."""

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy, as a batch that comes from a loader's memory is."""
        return Batch(self.features.to(device, non_blocking), self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """As TorchRec's batches."""
        self.features.record_stream(stream)
        self.labels.record_stream(stream)


@dataclass
class HotBatch(Batch):
    """A batch that may have hot ids only, on all ranks."""

    is_hot: bool

    def to(self, device: torch.device, non_blocking: bool = False) -> HotBatch:
        """A copy, as a batch that comes from a loader's memory is."""
        return HotBatch(*vars(super().to(device, non_blocking)).values(), self.is_hot)


class Model(nn.Module):
    """One or several embedding modules and a dense layer. TorchRec's tracer can follow its forward."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._is_dyadic = case.dyadic
        self._names: list[list[str]] = []
        self._sequence = [kind == "sequence" for kind, _ in case.parts]
        parts: list[nn.Module] = []
        first, meta = 0, torch.device("meta")
        for kind, num_tables in case.parts:
            tables = range(first, first + num_tables)
            first += num_tables
            common: list[dict[str, Any]] = [
                {
                    "name": f"t{t}",
                    "embedding_dim": case.dims[t],
                    "num_embeddings": case.rows[t],
                    "feature_names": [name for name in case.features if name[1] == str(t)],
                    "data_type": DataType.FP16 if t in case.fp16 else DataType.FP32,
                }
                for t in tables
            ]
            self._names.append([name for table in common for name in table["feature_names"]])
            if kind == "sequence":
                parts.append(EmbeddingCollection(tables=[EmbeddingConfig(**c) for c in common], device=meta))
            else:
                pooling = PoolingType.MEAN if case.mean else PoolingType.SUM
                configs = [EmbeddingBagConfig(**c, pooling=pooling) for c in common]
                parts.append(EmbeddingBagCollection(tables=configs, device=meta, is_weighted=case.weighted))
        self.parts = nn.ModuleList(parts)
        if not case.dyadic:
            self.dense = nn.Linear(sum(case.dims[int(name[1])] for name in case.features), 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss, and the loss again as the output."""
        pooled: list[Tensor] = []
        for part, names, is_sequence in zip(self.parts, self._names, self._sequence, strict=True):
            found = part(batch.features)
            if is_sequence:
                pooled += [
                    torch.segment_reduce(found[n].values(), "sum", lengths=found[n].lengths(), unsafe=True)
                    for n in names
                ]
            else:  # not all at once: their order depends on how tables are grouped
                pooled += [found[n] for n in names]
        x = torch.cat(pooled, dim=1)
        if self._is_dyadic:
            loss = (x * batch.labels.unsqueeze(1)).sum()
        else:
            loss = ((self.dense(x).squeeze(1) - batch.labels) ** 2).mean()
        return loss, loss.detach()


class UntraceableModel(Model):
    """The same model with a branch that depends on the labels."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As the traceable model's."""
        if batch.labels.sum() < 0:
            raise ValueError("labels are probabilities")
        return super().forward(batch)


class Plain:
    """A training loop without a pipeline: what the pipeline must equal."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def progress(self, batches: Iterator[Batch]) -> Tensor:
        """One step; in evaluation mode the forward alone."""
        batch = next(batches).to(self._model.device)  # type: ignore[arg-type]
        if self._model.training:
            self._optimizer.zero_grad()
        loss, output = self._model(batch)
        if self._model.training:
            loss.backward()
            self._optimizer.step()
        return output


AfterStep = Callable[[int], Any]


def batches(case: Case, steps: int | None = None, seed: int = 0) -> list[Batch]:
    """This rank's batches."""
    steps = case.steps if steps is None else steps
    if case.cycle:
        return [_cyclic_batch(case, step) for step in range(steps)]
    made = parity.batches(case, dist.get_rank(), steps, seed) if steps else ()
    found: list[Batch] = []
    for step, (features, labels) in enumerate(made):
        is_hot = bool(case.hot_every) and step % case.hot_every == case.hot_every - 1
        labels = (labels * 16).floor() / 4 - 2 if case.dyadic else labels
        if case.uneven_every and step % case.uneven_every == 1:
            features, labels = _first_samples(features, labels, case.batch_size - 2 * dist.get_rank() - 1)
        found.append(HotBatch(_features(case, step, features, is_hot), labels, is_hot))
    return found


def _features(case: Case, step: int, features: KeyedJaggedTensor, is_hot: bool) -> KeyedJaggedTensor:
    values, lengths = features.values(), features.lengths()
    if is_hot:  # the rows of parity.hot_rows
        rows = [case.rows[int(name[1])] for name in case.features]
        parts = zip(values.split(features.length_per_key()), rows, strict=True)
        values = torch.cat([part % min(case.hot or 0, count) * 7 % count for part, count in parts])
    if case.empty_every and step % case.empty_every == 1:
        values, lengths = values[:0], torch.zeros_like(lengths)
    values = values.int() if case.int32_ids else values
    return KeyedJaggedTensor(features.keys(), values, lengths=lengths, weights=_weights(features, values.numel()))


def _first_samples(features: KeyedJaggedTensor, labels: Tensor, count: int) -> tuple[KeyedJaggedTensor, Tensor]:
    lengths = features.lengths().view(len(features.keys()), -1)
    is_first = (torch.arange(lengths.shape[1]) < count).expand_as(lengths)
    ids = features.values()[is_first.flatten().repeat_interleave(lengths.flatten())]
    return KeyedJaggedTensor(features.keys(), ids, lengths=lengths[:, :count].flatten()), labels[:count]


def _cyclic_batch(case: Case, step: int) -> Batch:
    """One bag of two rows per sample: one in each half of the only table. The same rows on every rank."""
    half, size = case.rows[0] // 2, case.batch_size
    first = step % case.cycle * size + torch.arange(size)
    ids = torch.stack([first, first + half], dim=1).flatten()
    features = KeyedJaggedTensor(keys=["f0"], values=ids, lengths=torch.full((size,), 2))
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return Batch(features, torch.rand(size, generator=generator))


def _weights(features: KeyedJaggedTensor, count: int) -> Tensor | None:
    weights = features.weights_or_none()
    return None if weights is None else weights[:count]


def build(case: Case, cached: bool, make_model: Callable[[Any], nn.Module] = Model) -> DistributedModelParallel:
    """The sharded model, from seed 7, on this rank; on a GPU, which draws other numbers, the cached one starts from
    stock's."""
    model = parity.build(case, cached, make_model)
    if cached and case.device != "cpu":
        parity.start_from(model, reference(case).after[0])
    return model


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD for what is not an embedding table."""
    parameters = [p for name, p in model.named_parameters() if "dense" in name]
    return torch.optim.SGD(parameters or [nn.Parameter(torch.empty(0))], lr=0.05)


def plain(model: nn.Module) -> Plain:
    """The loop without a pipeline."""
    return Plain(model, dense_optimizer(model))


def pipeline(model: nn.Module, run: Run, **arguments: Any) -> LookAheadPipeline:
    """The pipeline of a run."""

    def depth(most: int, is_adaptive: bool) -> PrefetchDepth:
        return PrefetchDepth(most, is_adaptive and run.adaptive)

    with mock.patch.object(look_ahead, "PrefetchDepth", depth):
        return LookAheadPipeline(
            model,
            dense_optimizer(model),
            model.device,  # type: ignore[arg-type]
            lookahead=run.lookahead,
            prefetch=run.prefetch,
            max_known_bytes=run.max_known_bytes,
            worker=run.worker,
            **arguments,
        )


def train(loop: Any, data: Iterable[Batch], after_step: AfterStep = lambda step: None) -> list[Any]:
    """Every step's output until the data ends, each followed by what ``after_step`` returns, if anything."""
    iterator, seen = iter(data), []
    for step in range(10_000):
        try:
            seen.append(loop.progress(iterator).item())
        except StopIteration:
            return seen
        extra = after_step(step)
        seen += [] if extra is None else [extra]
    raise AssertionError("the pipeline never ends")


@dataclass(frozen=True)
class Reference:
    """Stock TorchRec on a case's batches: the loss of every step, and the model ``after`` so many steps."""

    losses: list[float]
    after: list[dict[str, Tensor]]


def reference(case: Case) -> Reference:
    """Trained once for several tests in a row. Collective."""
    return _reference(
        dataclasses.replace(case, policy="lfu", profile=False, transfer=None, slot_map="array", ratio=1.0, cached=None)
    )


@functools.lru_cache(maxsize=4)
def _reference(case: Case) -> Reference:
    stock = build(case, cached=False)
    after = [snapshot(stock)]
    losses = train(plain(stock), batches(case), lambda step: after.append(snapshot(stock)))
    return Reference(losses, after)


def differs(case: Case, steps: int, model: nn.Module, losses: Sequence[float]) -> list[str]:
    """What differs from stock after so many of the case's batches."""
    expected = reference(case)
    found = [f"loss {i}" for i, (a, b) in enumerate(zip(expected.losses, losses, strict=False)) if a != b]
    if len(losses) != steps:
        found.append(f"{len(losses)} losses for {steps} batches")
    return found + differences(expected.after[steps], snapshot(model))


def compare(case: Case, runs: Sequence[Run]) -> list[Outcome]:
    """Stock once, then every run; what differed on this rank."""
    only_our_warnings_raise()
    return [_compare(case, run) for run in runs]


def _compare(case: Case, run: Run) -> Outcome:
    initial = reference(case).after[0]
    with as_run(case, run) as (model, loop):
        different = [f"initial {name}" for name in differences(initial, snapshot(model))]
        late, known = [0], []

        def note(step: int) -> None:
            late.append(late_fills(model))
            known.append(loop.stats().known_bytes)

        losses = train(loop, batches(case), note)
        stats = cache_stats(model)
        return Outcome(
            different=different + differs(case, case.steps, model, losses),
            num_compared=len(initial),
            fills=sum(s.fills for s in stats),
            evictions=sum(s.evictions for s in stats),
            write_backs=sum(s.write_backs for s in stats),
            growths=sum(s.overflow_growths for s in stats),
            late=[b - a for a, b in itertools.pairwise(late)],
            slots=[pool.cache.num_slots for pool in cached_embeddings(model)],
            pipeline=loop.stats(),
            known_bytes=known,
        )


@contextlib.contextmanager
def as_run(
    case: Case, run: Run, make_model: Callable[[Any], nn.Module] = Model, **arguments: Any
) -> Iterator[tuple[DistributedModelParallel, LookAheadPipeline]]:
    """The cached model and its pipeline as ``run`` wants them; its delays are in force."""
    settings = dataclasses.replace(
        case,
        policy=run.policy,
        profile=run.profile,
        transfer=run.transfer,
        slot_map=run.slot_map,
        overflow=run.overflow,
    )
    with contextlib.ExitStack() as stack:
        sizes = None
        if run.working_set_of is not None:
            sizes = [largest_union(keys, run.working_set_of) + run.extra_slots for keys in working_sets(case)]
        with pools_made(sizes):
            model = build(settings, cached=True, make_model=make_model)
        loop = pipeline(model, run, **arguments)
        if run.even_if_crowded:
            stack.enter_context(mock.patch.object(InFlight, "would_crowd", return_value=False))
        if run.delays is not None:
            stack.enter_context(random_delays(run.delays, dist.get_rank(), on_gpu=case.device != "cpu"))
        yield model, loop
        loop.detach()


def late_fills(model: nn.Module) -> int:
    """Critical-path fills so far."""
    return sum(stats.critical_path_fills for stats in cache_stats(model))


def message_of(function: Callable[[], Any]) -> str:
    """Type and text of what the function raises; "" when it raises nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def only_our_warnings_raise() -> None:
    """As in the exactness tests; the growth of a cache is checked where it is expected."""
    warnings.simplefilter("error", category=UserWarning)
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", module="torchrec")
    warnings.filterwarnings("ignore", category=CacheGrowthWarning)


# -- slots at exactly a working set


def working_sets(case: Case) -> list[list[Tensor]]:
    """For each pool of this rank, in the order in which they are made, the distinct keys of every batch. Collective."""
    return _working_sets(dataclasses.replace(case, policy="lookahead", ratio=0.01, optimizer="sgd"))


@functools.lru_cache(maxsize=4)
def _working_sets(case: Case) -> list[list[Tensor]]:
    data = batches(case)
    with pools_made() as caches:
        model = build(case, cached=True)
    found: dict[int, list[Tensor]] = {id(cache): [] for cache in caches}
    know = RowCache.know

    def note(self: RowCache, keys: Tensor, *args: Any) -> Any:
        found[id(self)].append(keys.unique())
        return know(self, keys, *args)

    loop = pipeline(model, Run(lookahead=len(data) + 1, prefetch=1))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(RowCache, "know", note))
        stack.enter_context(mock.patch.object(ModuleInput, "make_resident", return_value=True))
        stack.enter_context(loop.step(iter(data)))
    loop.detach()
    num_cold = sum(not getattr(batch, "is_hot", False) for batch in data)
    assert all(len(keys) == num_cold for keys in found.values())
    return list(found.values())


def largest_union(keys: Sequence[Tensor], num_batches: int) -> int:
    """The most distinct keys of ``num_batches`` consecutive batches."""
    starts = range(max(1, len(keys) - num_batches + 1))
    return max(torch.cat(list(keys[start : start + num_batches])).unique().numel() for start in starts)


@contextlib.contextmanager
def pools_made(num_slots: Sequence[int] | None = None) -> Iterator[list[RowCache]]:
    """The caches that are made meanwhile, in order, each with its number of slots."""
    made: list[RowCache] = []
    make_cache = CachedTableBatchedEmbeddings._make_cache

    def sized(self: CachedTableBatchedEmbeddings, *args: Any, **named: Any) -> Any:
        if num_slots is None:
            found = make_cache(self, *args, **named)
        else:
            size = num_slots[len(made)]
            with mock.patch.object(CacheSpec, "num_slots", return_value=size):
                found = make_cache(self, *args, **named)
            assert found[0].num_slots == size
        made.append(found[0])
        return found

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(CachedTableBatchedEmbeddings, "_make_cache", sized))
        if num_slots is not None:  # tables that stay would take slots beyond the working set
            stack.enter_context(mock.patch.object(embeddings, "pinned_tables", return_value={}))
        yield made


def features_of(model: nn.Module) -> Callable[[Batch], Mapping[str, Any]]:
    """Each sharded module's input, by name."""
    return lambda batch: {f"parts.{number}": batch.features for number in range(len(model.module.parts))}
