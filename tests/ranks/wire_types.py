"""Trainings whose embeddings travel as bytes, beside one process that encodes and decodes by itself.

A model whose gradients of pooled embeddings are given: nothing of it depends on the order in which an all-reduce adds.
"""

from __future__ import annotations

import dataclasses
import gc
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.wire_types import measure
from embershard import cache_stats, plan_sharding
from embershard.data import DataConfig, SyntheticConfig
from embershard.distributed.sent_bytes import SentBytes
from embershard.distributed.traffic import count_sent_bytes, sent_bytes
from embershard.errors import EmbershardError
from embershard.extras.wire_types import WireTypes
from embershard.extras.wire_types.encoding import WIRE_TYPES
from embershard.pipeline.pipelined_forward import sharded_modules
from embershard.sharding.torchrec import sharders
from embershard.training.config import TrainConfig
from tests.ranks import parity, planned
from tests.ranks.parity import OPTIMIZERS, Case, LinearModel, batches, build, differences, losses_of, snapshot
from tests.small_runs import small_run

__all__ = ["Reference", "WireCase", "benchmarked", "differences", "exchanges_left", "losses_of", "message_of", "train"]

#: What a reference does wrong.
Fault = Literal["", "scale of another row", "added in another order", "not divided"]


class KeptRows(LinearModel):
    """Keeps the pooled embeddings of its newest batch."""

    def forward(self, features: KeyedJaggedTensor, coefficients: Tensor) -> Tensor:
        found = self.embeddings(features).to_dict()
        pooled = torch.cat([found[name] for name in self.names], dim=1)
        self.pooled = pooled.detach().clone()
        return (pooled * coefficients).sum() + 0 * self.dense.bias.sum()


@dataclass(frozen=True)
class WireCase(Case):
    """``uneven``: so many more samples has each rank than the one before it."""

    uneven: int = 0


@dataclass(frozen=True)
class Trained:
    """What a rank saw. ``pooled``: of each step, [B, sum of D]. ``shards``: by table its type, and of each shard the
    rank, the first row and column, and the numbers of both."""

    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    pooled: list[Tensor]
    shards: dict[str, tuple[str, list[tuple[int, int, int, int, int]]]]
    evictions: int
    sent: SentBytes


def steps(case: WireCase, rank: int) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
    """A rank's batches, and the gradients of their embeddings: of one row a thousand times those of another."""
    width = sum(case.dims[int(name[1])] for name in case.features)
    case = dataclasses.replace(case, batch_size=case.batch_size + rank * case.uneven)
    for step, (features, _) in enumerate(batches(case, rank)):
        generator = torch.Generator().manual_seed(7000 * step + rank)
        of_row = 10.0 ** -(3 * torch.rand(case.batch_size, 1, generator=generator))
        yield features, of_row * torch.randn(case.batch_size, width, generator=generator)


def train(case: WireCase, cached: bool = True) -> Trained:
    """Train on this rank."""
    count_sent_bytes()
    model = build(case, cached, KeptRows)
    kept = next(part for part in model.modules() if isinstance(part, KeptRows))
    (sharded,) = sharded_modules(model).values()
    plan: Any = sharded.module_sharding_plan
    shards = {
        table: (
            placed.sharding_type,
            [(each.placement.rank(), *each.shard_offsets, *each.shard_sizes) for each in placed.sharding_spec.shards],
        )
        for table, placed in plan.items()
    }
    initial, before, pooled = snapshot(model), sent_bytes(), []
    for features, coefficients in steps(case, dist.get_rank()):
        model(features, coefficients).backward()
        pooled.append(kept.pooled)
    evicted = sum(each.evictions for each in cache_stats(model))
    return Trained(initial, snapshot(model), pooled, shards, evicted, sent_bytes() - before)


def through(kind: str, rows: Tensor, fault: Fault = "") -> Tensor:
    """What arrives of rows [N, D]."""
    if kind == "fp16":
        return rows.half().float()
    if kind == "fp32":
        return rows
    largest = 127.0 if kind == "int8" else 448.0
    scales = rows.abs().max(dim=1, keepdim=True).values / largest
    numbers = torch.where(scales > 0, rows / scales, 0.0)
    numbers = numbers.round() if kind == "int8" else numbers.to(torch.float8_e4m3fn).float()
    return numbers * (scales.roll(1, 0) if fault == "scale of another row" else scales)


class Reference:
    """The same training in one process, of the ranks' first weights.

    Args:
        trained: of each rank.
    """

    def __init__(self, case: WireCase, trained: list[Trained], fault: Fault = "") -> None:
        self._case, self._fault, self._ranks = case, fault, len(trained)
        self._local = case.local_world_size or len(trained)
        self.weights = {
            name: value for each in trained for name, value in each.initial.items() if "/embeddings" in name
        }
        self._shards = trained[0].shards
        self._tables = {
            (table, *shard): self._table(table, *shard)
            for table, (_, shards) in self._shards.items()
            for shard in shards
        }

    def _table(self, table: str, _: int, row: int, column: int, rows: int, columns: int) -> Any:
        features = [name for name in self._case.features if name[1] == table[1]]
        found = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, columns, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            feature_table_map=[0] * len(features),
            optimizer=OPTIMIZERS[self._case.optimizer],
            learning_rate=0.1,
            eps=1e-6,
        )
        key = f"weight/embeddings.embedding_bags.{table}.weight/{(row, column)}"
        found.split_embedding_weights()[0].copy_(self.weights[key])
        return found

    def step(self, given: list[tuple[KeyedJaggedTensor, Tensor]]) -> Tensor:
        """Train on all ranks' batches; return the pooled embeddings of their samples, [W B, sum of D]."""
        pooled, names = [torch.zeros_like(coefficients) for _, coefficients in given], self._case.features
        starts = dict(zip(names, accumulate((self._case.dims[int(n[1])] for n in names), initial=0), strict=False))
        for table, (kind, shards) in self._shards.items():
            own_names = [name for name in names if name[1] == table[1]]
            in_two = kind in ("table_row_wise", "grid_shard") and self._local < self._ranks
            nodes = self._ranks // self._local  # ids of such tables come from all nodes' first ranks, then their second
            order = [r + n * self._local for r in range(self._local) for n in range(nodes)]
            order = order if in_two else list(range(self._ranks))
            for column in sorted({shard[2] for shard in shards}):
                own = [shard for shard in shards if shard[2] == column and shard[3]]
                firsts = [starts[name] + column for name in own_names]
                places = [slice(first, first + own[0][4]) for first in firsts]
                parts = [self._look_up(table, shard, own_names, [given[rank][0] for rank in order]) for shard in own]
                back = []
                for number, place in enumerate(places):
                    rows = self._arrived([part[number] for part in parts], in_two)
                    for rank, of_rank in zip(order, rows.split([len(given[r][1]) for r in order]), strict=True):
                        pooled[rank][:, place] = of_rank
                    back.append(self._back(torch.cat([given[rank][1][:, place] for rank in order]), in_two))
                for part in parts:
                    torch.autograd.backward(part, [rows.clone() for rows in back])
        return torch.cat(pooled)

    def _look_up(self, table: str, shard: Any, names: list[str], given: list[KeyedJaggedTensor]) -> list[Tensor]:
        """A shard's part of the rows of each feature, for the samples of all ranks."""
        ids, lengths = [], []
        for name in names:
            for features in given:
                jagged = features[name]
                is_own = (jagged.values() >= shard[1]) & (jagged.values() < shard[1] + shard[3])
                of_bag = torch.repeat_interleave(torch.arange(len(jagged.lengths())), jagged.lengths())
                ids.append(jagged.values()[is_own] - shard[1])
                lengths.append(torch.bincount(of_bag[is_own], minlength=len(jagged.lengths())))
        offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
        rows = self._tables[(table, *shard)](torch.cat(ids), offsets)  # [W B, features x columns]
        return list(rows.split(shard[4], dim=1))

    def _arrived(self, parts: list[Tensor], in_two: bool) -> Tensor:
        """The sum of a feature's parts; where it is ``in_two`` steps, within a node and then between nodes."""
        sent = [through(self._case.comm[0], part.detach(), self._fault) for part in parts]
        if self._fault == "added in another order":
            sent.reverse()
        total = sent[0]
        for part in sent[1:]:
            total = total + part
        return through(self._case.comm[0], total, self._fault) if in_two else total

    def _back(self, gradients: Tensor, in_two: bool) -> Tensor:
        """The gradients that a feature's parts get."""
        ranks = 1 if self._fault == "not divided" else self._ranks
        rows = through(self._case.comm[1], gradients, self._fault)
        if in_two:
            return through(self._case.comm[1], rows / (ranks / self._local), self._fault) / self._local
        return rows / ranks

    def differences(self, trained: list[Trained]) -> list[str]:
        """Train all steps; return what is not equal, bit for bit."""
        found = []
        for number, given in enumerate(zip(*(steps(self._case, rank) for rank in range(self._ranks)), strict=True)):
            expected = self.step(list(given))
            got = torch.cat([each.pooled[number] for each in trained])
            found += [] if torch.equal(expected, got) else [f"pooled embeddings of step {number}"]
        final = {name: value for each in trained for name, value in each.final.items()}
        for (table, rank, *place), tbe in self._tables.items():
            at = tuple(place[:2])
            weights, states = tbe.split_embedding_weights()[0], tbe.split_optimizer_states()
            if not torch.equal(final[f"weight/embeddings.embedding_bags.{table}.weight/{at}"], weights):
                found.append(f"weights of {table} {at}")
            for state in states[0] if states else ():
                name = f"state/embeddings.embedding_bags.{table}.weight"
                of_shard = [v for n, v in trained[rank].final.items() if n.startswith(name)]
                if not any(v.shape == state.shape and torch.equal(v, state) for v in of_shard):
                    found.append(f"state of {table} {at}")
        return found


def with_torchrec_s(
    case: Case, types: Sequence[tuple[str, str]], cached: bool, is_checked: bool
) -> dict[tuple[str, str], str | list[float]]:
    """By types of embeddings and gradients: losses of a training with TorchRec's registry for a CPU, or what it says.

    Args:
        is_checked: by our sharders, as in a program.
    """
    found: dict[tuple[str, str], str | list[float]] = {}
    unchecked = mock.patch.object(sharders, "check_codecs")
    for pair in types:
        config = QCommsConfig(*map(CommType, pair))
        registry = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
        given = mock.patch.object(parity, "comm_codecs", return_value=registry)
        with nullcontext() if is_checked else unchecked, given:
            try:
                found[pair] = parity.train(build(case, cached), case)
            except (EmbershardError, AssertionError, RuntimeError) as error:
                found[pair] = f"{type(error).__name__}: {error}"
    return found


def exchanges_left(case: WireCase) -> int:
    """How many batches' exchanges are left of a training, without a search for garbage."""
    model = build(case, True, KeptRows)
    gc.collect()
    gc.disable()
    try:
        for features, coefficients in steps(case, dist.get_rank()):
            model(features, coefficients).backward()
        del features, coefficients
        return sum(type(each).__name__ == "_Exchanged" for each in gc.get_objects())
    finally:
        gc.enable()


def benchmarked(types: list[str]) -> dict[str, Any]:
    """What the benchmark finds in a small run, of one seed."""
    data = DataConfig(synthetic=SyntheticConfig(num_samples=3000, scale=0.0001), num_workers=0, eval_fraction=0.2)
    config = small_run(data=data, train=TrainConfig(batch_size=64, device="cpu", eval_every=100))
    before = dict(WIRE_TYPES)
    found = measure(config, planned.here(), Namespace(types=types, seeds=1))
    assert before == WIRE_TYPES
    return found


def message_of(problem: str) -> str:
    """What a training says that has this problem; empty: nothing."""
    case = WireCase(comm=("int8", "int8"), steps=1)
    try:
        if problem == "data_parallel":
            build(dataclasses.replace(case, mode="data_parallel", sharding="row_wise", init_seed=3), True)
        elif problem == "TorchRec's own sharder":
            model: Any = KeptRows(case)
            device = torch.device("cpu")
            stock = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=WireTypes("int8", "int8"))]
            plan = plan_sharding(model, stock, world_size=2, local_world_size=2, device="cpu")
            model = DistributedModelParallel(model, device=device, plan=plan, sharders=stock)
            model(*next(steps(case, dist.get_rank())))
        else:
            features, coefficients = next(steps(case, dist.get_rank()))
            sizes = [[case.batch_size - (number == 0)] for number, _ in enumerate(case.features)]
            lengths = [features[name].lengths()[: size[0]] for name, size in zip(case.features, sizes, strict=True)]
            ids = [features[name].values()[: int(own.sum())] for name, own in zip(case.features, lengths, strict=True)]
            bags = torch.stack([torch.arange(case.batch_size).clamp(max=size[0] - 1) for size in sizes])
            uneven = KeyedJaggedTensor(
                case.features,
                torch.cat(ids),
                lengths=torch.cat(lengths),
                stride_per_key_per_rank=sizes,
                inverse_indices=(case.features, bags),
            )
            build(case, True, KeptRows)(uneven, coefficients)
    except EmbershardError as error:
        return str(error)
    return ""
