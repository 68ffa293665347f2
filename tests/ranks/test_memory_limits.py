"""A plan at the smallest memory that planning accepts trains in it, and takes what it was predicted to take."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from embershard.commands.plan.inputs import budget, make_workload
from embershard.commands.profile.data_pass import PartReader, PassOptions, profile_data
from embershard.errors import ShardingError
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import make_plan
from embershard.planning.request import PlanRequest
from embershard.settings.decoding import decode
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import Plan, RankPrediction
from embershard.sharding.torchrec import cache_stats
from embershard.sharding.torchrec.compat import lookups_of
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.covering import keep, matrix
from tests.ranks.planned import here
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

STEPS = 14


@dataclass(frozen=True)
class Taken:
    """Bytes of tensors that a rank holds behind its last step, with what its caches did.

    Attributes:
        tables: rows and optimizer states of slots and of tables without a cache.
        maps: of the caches, and what they keep per slot.
        dense: parameters, gradients and optimizer states of the dense layers.
        known: most ids of known batches.
    """

    tables: int
    maps: int
    dense: int
    known: int
    evictions: int
    growths: int


def taken(config: RunConfig, plan: Path) -> Taken:
    """Train some steps by a plan; return what this rank took."""
    trainer = Trainer(dataclasses.replace(config, sharding=ShardingConfig(plan=str(plan))), here())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # growth is what is counted
        for _ in range(STEPS):
            with trainer.upcoming.next() as batch:
                trainer.step(batch)
    look_ahead = trainer.upcoming.stats()
    state = trainer.optimizers.dense.state_dict()["state"]
    dense = trainer.optimizers.dense_parameters.values()
    stats = cache_stats(trainer.model)
    found = Taken(
        tables=_bytes(_rows(trainer.model)),
        maps=sum(pool.cache.state.device_bytes for pool in cached_embeddings(trainer.model)),
        dense=_bytes([*dense, *(each.grad for each in dense if each.grad is not None), *_tensors(state)]),
        known=0 if look_ahead is None else look_ahead.max_known_bytes,
        evictions=sum(table.evictions for table in stats),
        growths=sum(table.overflow_growths for table in stats),
    )
    trainer.close()
    return found


def _rows(model: nn.Module) -> Iterator[Tensor]:
    """Yield FBGEMM's tensors of rows and states: of caches their slots, of other tables all rows."""
    for module in model.modules():
        for lookup in lookups_of(module):
            for table in lookup.modules():
                if isinstance(table, SplitTableBatchedEmbeddingBagsCodegen):
                    named = [*table.named_parameters(recurse=False), *table.named_buffers(recurse=False)]
                    yield from (each for name, each in named if name.endswith(("_dev", "_host", "_uvm")))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind these tensors, each once."""
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


PROJECT = Path(__file__).resolve().parents[2]
CLOSE = 0.01  # FBGEMM has some counters beside the rows
ALL: dict[str, dict[str, Any]] = {
    "cache": {"warmup": False},
    "look_ahead": {"lookahead": 4, "prefetch": 1},
    "train": {"batch_size": 32, "max_steps": 60, "device": "cpu"},
}
DLRM = {"embedding_dim": 16, "dense_arch_layer_sizes": [16], "over_arch_layer_sizes": [16, 1]}
OWN = {"build": "own_model:build", "folder": str(PROJECT / "examples"), "options": {"dim": 32, "hidden": 16}}
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"model": DLRM, "embedding_optimizer": {"kind": "rowwise_adagrad"}},
    "fp16, lfu": {
        "model": {**DLRM, "table_dtype": "fp16"},
        "embedding_optimizer": {"kind": "adagrad"},
        "dense_optimizer": {"kind": "sgd"},
        "cache": {"policy": "lfu"},
    },
    "two dims, sequences": {"model": OWN, "embedding_optimizer": {"kind": "sgd"}},
    "distinct rows": {"model": DLRM, "sharding": {"exchange": "rows"}},
}
ROWS = (12, 40, 900, 2500, 4000, 9000, 15_000, 30_000)
BAGS = (1, 1, 1, 6, 1, 3, 1, 2)
SAMPLES = 4096


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Skewed ids of tables of several sizes, in bags, as settings of the data."""
    folder, rng = tmp_path_factory.mktemp("samples"), np.random.default_rng(5)
    columns: dict[str, Any] = {"dense": rng.random(SAMPLES), "label": rng.integers(0, 2, SAMPLES)}
    for number, (rows, bag) in enumerate(zip(ROWS, BAGS, strict=True)):
        drawn = (rows * rng.random(SAMPLES * bag) ** 3).astype(int)
        ids = pa.FixedSizeListArray.from_arrays(pa.array(rng.permutation(rows)[drawn]), bag)
        columns[f"f{number}"] = ids.cast(pa.list_(pa.int64()))
    pq.write_table(pa.table(columns), folder / "samples.parquet")
    names = [name for name in columns if name.startswith("f")]
    parquet = {"dense": ["dense"], "sparse": names, "num_rows": list(ROWS), "id_mapping": "none"}
    return {"kind": "parquet", "path": str(folder), "eval_fraction": 0.0, "num_workers": 0, "parquet": parquet}


def request_of(name: str, ranks: int, data: dict[str, Any]) -> tuple[RunConfig, PlanRequest]:
    values = {"data": data, **{section: dict(own) for section, own in ALL.items()}}
    for section, own in MODELS[name].items():
        values.setdefault(section, {}).update(own)
    config = decode(RunConfig, values)
    reader = PartReader(config.data, config.model)
    found = profile_data(config.data, PassOptions(), reader=reader).need_statistics()
    nodes = min(ranks, 2)
    workload = make_workload(config, found, world_size=ranks, ranks_per_node=nodes, device="cpu")
    rates = load_topology("cpu").rates_for(ranks)
    settings = config.predicted_from("cpu", ranks)
    return config, PlanRequest(workload, rates, budget(config, 1, None), settings=settings)


def with_memory(request: PlanRequest, device_bytes: int) -> PlanRequest:
    return dataclasses.replace(request, budget=dataclasses.replace(request.budget, device_bytes=device_bytes))


def smallest(request: PlanRequest) -> int:
    """The smallest memory that fits, as the refusal says."""
    with pytest.raises(ShardingError) as refused:
        make_plan(request)
    told = re.search(r"--device-memory (\d+)", str(refused.value))
    assert told, refused.value
    return int(told[1])


def check(predicted: RankPrediction, found: Taken, limit: int) -> None:
    """What a CPU can count is as predicted; with the rest as predicted, it fits."""
    parts: Mapping[str, int] = predicted.device_bytes
    countable = parts["slots"] + parts["maps"] + parts["device_tables"] + parts["dense"]
    counted = found.tables + found.maps + found.dense
    print(f"predicted {countable:,} found {counted:,}, in all {predicted.total_device_bytes:,} of {limit:,}; {found}")
    assert counted == pytest.approx(countable, rel=CLOSE)
    assert found.dense == pytest.approx(parts["dense"], rel=CLOSE)
    assert found.known <= parts["input_buffers"]
    assert predicted.total_device_bytes <= limit
    assert found.growths == 0


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("dlrm", 2), *(matrix(*case) for case in itertools.product(MODELS, (1, 2, 4)) if case != ("dlrm", 2))],
)
def test_a_plan_at_its_limit_trains_within_it(name, ranks, data, request, tmp_path) -> None:
    """Models with caches whose rows are evicted: nothing that starts takes more, and what is refused would."""
    pool: RankPool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[ranks])
    config, asked = request_of(name, ranks, data)
    least = smallest(asked)
    for limit in (least, int(1.3 * least)):
        plan: Plan = make_plan(with_memory(asked, limit))
        plan.save(tmp_path / f"{limit}.json")
        assert plan.prediction is not None
        found = pool.run(taken, config, tmp_path / f"{limit}.json")
        for predicted, of_rank in zip(plan.prediction.ranks, found, strict=True):
            check(predicted, of_rank, limit)
        if limit == least:
            assert plan.prediction.most_device_bytes >= 0.95 * limit
            assert sum(of_rank.evictions for of_rank in found) > 100


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", keep([1], [1, 2]))
def test_the_memory_that_a_refusal_names_is_accepted(ranks: int, data: dict[str, Any]) -> None:
    """And a byte less is not."""
    _, asked = request_of("dlrm", ranks, data)
    least = smallest(asked)
    with pytest.raises(ShardingError):
        make_plan(with_memory(asked, least - 1))
    assert make_plan(with_memory(asked, least)).prediction is not None
