"""A plan at the smallest memory that planning accepts trains in it, and takes what it was predicted to take."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands.plan.inputs import budget, make_workload
from embershard.commands.profile.data_pass import PartReader, PassOptions, profile_data
from embershard.errors import ShardingError
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import make_plan
from embershard.planning.request import PlanRequest
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan, RankPrediction
from embershard.training.config import RunConfig
from tests.covering import keep, matrix
from tests.ranks import memory_limits
from tests.ranks.memory_limits import Taken
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

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


def check(predicted: RankPrediction, taken: Taken, limit: int) -> None:
    """What a CPU can count is as predicted; with the rest as predicted, it fits."""
    parts: Mapping[str, int] = predicted.device_bytes
    countable = parts["slots"] + parts["maps"] + parts["device_tables"] + parts["dense"]
    counted = taken.tables + taken.maps + taken.dense
    print(f"predicted {countable:,} taken {counted:,}, in all {predicted.total_device_bytes:,} of {limit:,}; {taken}")
    assert counted == pytest.approx(countable, rel=CLOSE)
    assert taken.dense == pytest.approx(parts["dense"], rel=CLOSE)
    assert taken.known <= parts["input_buffers"]
    assert predicted.total_device_bytes <= limit
    assert taken.growths == 0


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("dlrm", 2), *(matrix(*case) for case in itertools.product(MODELS, (1, 2, 4)) if case != ("dlrm", 2))],
)
def test_a_plan_at_its_limit_trains_within_it(
    name: str, ranks: int, data: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Models with caches whose rows are evicted: nothing that starts takes more, and what is refused would."""
    pool: RankPool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[ranks])
    config, asked = request_of(name, ranks, data)
    least = smallest(asked)
    for limit in (least, int(1.3 * least)):
        plan: Plan = make_plan(with_memory(asked, limit))
        plan.save(tmp_path / f"{limit}.json")
        assert plan.prediction is not None
        found = pool.run(memory_limits.taken, config, tmp_path / f"{limit}.json")
        for predicted, taken in zip(plan.prediction.ranks, found, strict=True):
            check(predicted, taken, limit)
        if limit == least:
            assert plan.prediction.most_device_bytes >= 0.95 * limit
            assert sum(taken.evictions for taken in found) > 100


@pytest.mark.slow
@pytest.mark.parametrize("ranks", keep([1], [1, 2]))
def test_the_memory_that_a_refusal_names_is_accepted(ranks: int, data: dict[str, Any]) -> None:
    """And a byte less is not."""
    _, asked = request_of("dlrm", ranks, data)
    least = smallest(asked)
    with pytest.raises(ShardingError):
        make_plan(with_memory(asked, least - 1))
    assert make_plan(with_memory(asked, least)).prediction is not None
