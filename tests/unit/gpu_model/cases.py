"""Settings of whole runs on the modelled GPU: a covering matrix of what decides which operations a GPU runs.

`CASES` are columns of values, each of which `covering` puts beside others; `config_of` makes settings of them. A value
that has no effect, or is refused, with the others of its case gives way to the default: `test_whole.py` looks at the
settings that come out, and fails where a value of a setting is in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embershard.cache import CacheConfig
from embershard.cache.config import TransferKind
from embershard.data import DataConfig
from embershard.data.config import TableConfig, TableFeature
from embershard.distributed import CheckpointConfig, PublishConfig
from embershard.frequency.config import ProfileConfig
from embershard.models import ModelConfig
from embershard.models.config import WITH_HISTORY, WITH_TOWERS, Arch
from embershard.models.hstu_config import HstuConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import TablePlacement
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.model_size import table_groups, tables_of_run
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from tests.unit.data.targets import FEATURES, TARGETS, write_targets
from tests.unit.sharding.plans import make_plan

STEPS, BATCH = 4, 8
_ROWS = 200
_SUMS_FROM = 10  # number of the first case without means
_TIMES = TableFeature("sparse", num_rows=1 << 32, mapping="none")
_ITEMS = TableFeature("sparse", num_rows=300, mapping="modulo")
_EVENTS = {"item": _ITEMS, "past": _ITEMS, "time": _TIMES, "past_time": _TIMES}
MODES = ("pooled", "rows", "hot_cold", "planned")
_AXES: dict[str, tuple[Any, ...]] = {
    "arch": get_args(Arch),
    "target": ("plain", "several", "classes", "weighted regression", "tasks"),
    "optimizer": ("rowwise_adagrad", "sgd", "adagrad"),
    "policy": ("lookahead", "static", "lru", "frequency", "lfu"),
    "transfer": get_args(TransferKind)[::-1],
    "dtype": ("fp32", "fp16"),
    "num_ranks": (1, 2),
    "dense": ("adam", "sgd", "adagrad", "adamw"),
}


@dataclass(frozen=True)
class Case:
    """Values of a run. `mode`: "pooled", "rows" or "hot_cold"; or "planned", with a table of every kernel. Settings
    with two values, or few, take turns by `number`."""

    mode: str
    number: int
    arch: Any
    target: str
    optimizer: Any
    policy: Any
    transfer: Any
    dtype: Any
    num_ranks: int
    dense: Any

    def __str__(self) -> str:
        return "-".join(map(str, (self.mode, self.arch, self.target, self.policy, f"{self.num_ranks}_ranks")))

    def turn(self, *values: Any) -> Any:
        """One of the values."""
        return values[self.number % len(values)]


def _case(mode: str, number: int) -> Case:
    case = Case(mode, number, **{name: each[number % len(each)] for name, each in _AXES.items()})
    # TorchRec asks all ranks for the shards of tables of sequences.
    return replace(case, num_ranks=1) if case.arch in WITH_HISTORY else case


def cases() -> tuple[list[Case], list[Case]]:
    """Cases that have every value once, and those that have every value with every mode."""
    longest = max(map(len, _AXES.values()))
    by_mode = {mode: [_case(mode, row + shift) for row in range(longest)] for shift, mode in enumerate(MODES)}
    kept = [next(c for c in by_mode[_mode_for(arch, row)] if c.arch == arch) for row, arch in enumerate(_AXES["arch"])]
    return kept, [case for each in by_mode.values() for case in each if case not in kept]


def _mode_for(arch: str, row: int) -> str:
    return MODES[row % len(MODES)] if arch not in WITH_HISTORY else "planned" if arch == "tbsm" else "pooled"


def write_samples(path: Path) -> Path:
    """Write the samples of `write_targets`, with a user's past events."""
    table = pq.read_table(write_targets(path, _ROWS))
    draw, first = np.random.default_rng(3), 1_500_000_000
    lengths = draw.integers(0, 5, _ROWS)
    times = first + draw.integers(0, 10**6, _ROWS)
    past_times = [sorted((time - draw.integers(1, 10**5, n)).tolist()) for time, n in zip(times, lengths, strict=True)]
    table = table.append_column("past", pa.array([draw.integers(0, 280, n).tolist() for n in lengths]))
    table = table.append_column("time", pa.array(times)).append_column("past_time", pa.array(past_times))
    pq.write_table(table, path, row_group_size=100, write_page_checksum=True)
    return path


def config_of(case: Case, samples: Path, folder: Path, device: str) -> RunConfig:
    """The settings of a case, for a run in a folder."""
    has_history, is_hot = case.arch in WITH_HISTORY, case.mode == "hot_cold" and case.arch not in WITH_HISTORY
    small_rows = _small_rows(case)
    needs_profile = is_hot or case.policy in ("static", "frequency") or bool(small_rows)
    config = RunConfig(
        data=DataConfig("table", str(samples), num_workers=0, eval_fraction=0.08, table=_table(case)),
        model=_model(case),
        cache=CacheConfig(
            ratio=0.6,
            policy=case.policy,
            transfer=case.transfer if device == "cuda" else None,
            slot_map=case.turn("array", "hashed"),
            overflow=case.turn("grow", "raise"),
            host="mmap" if case.transfer == "staged" else "memory",
            host_dir=str(folder) if case.transfer == "staged" else None,
            **small_rows,
        ),
        look_ahead=LookAheadConfig(lookahead=2, prefetch=1) if case.number % 3 < 2 else LookAheadConfig(0),
        profile=ProfileConfig(samples=100) if needs_profile else ProfileConfig(),
        sharding=ShardingConfig(
            exchange="rows" if case.mode == "rows" and not has_history else "pooled",
            mode="hot_cold" if is_hot else "sharded",
            hot_bytes=3000 if is_hot else None,
        ),
        embedding_optimizer=EmbeddingOptimizerConfig(kind=case.optimizer),
        dense_optimizer=DenseOptimizerConfig(kind=case.dense),
        train=TrainConfig(
            batch_size=BATCH,
            max_steps=STEPS,
            accumulate=case.turn(1, 1, 1, 2),
            log_every=STEPS,
            device=device,
            init="counter" if case.mode == "planned" else case.turn("counter", "torchrec"),
            on_non_finite=case.turn("stop", "stop", "skip"),
        ),
    )
    if case.num_ranks == 1:
        publish = PublishConfig(str(folder / "published"), every_steps=2, dtype=case.turn("fp32", "fp16"))
        config = replace(config, checkpoint=CheckpointConfig(at_end=True), publish=publish)
    if case.mode != "planned":
        return config
    plan = folder / "plan.json"
    _plan(config, case.num_ranks, device).save(plan)
    return replace(config, cache=replace(config.cache, ratio=None), sharding=ShardingConfig(plan=str(plan)))


def _small_rows(case: Case) -> dict[str, Any]:
    """Settings of host rows of a small type, where the case's others allow them."""
    is_sharded = case.mode in ("pooled", "rows") and case.turn("counter", "torchrec") == "counter"
    if not is_sharded or case.dtype != "fp32" or case.transfer == "plain":
        return {}
    if case.transfer == "staged":
        return {"host_dtype": "fp16", "host_dtypes": {"t_user": "int8", "t_item": "fp32"}, "full_rows": 0.1}
    return {"host_dtype": "int8", "host_dtypes": {"t_tags": "fp16"}, "full_rows": 0.1}


def _table(case: Case) -> TableConfig:
    target = dict(TARGETS[_target(case)])
    if case.number % 2 and len(target["label"]) > 1 and not isinstance(target["label"], str):
        target.pop("label_weights", None)
    if case.arch in WITH_HISTORY:
        times = ("time", "past_time") if case.arch == "hstu" else ()
        names = ("price", "user", "tags", "item", "past", *times)
        return TableConfig({name: _EVENTS.get(name) or FEATURES[name] for name in names}, **target)
    features = FEATURES
    if case.mode == "hot_cold":
        features = {**FEATURES, "seen": replace(FEATURES["seen"], table=None)}
    if case.number >= _SUMS_FROM:
        features = {name: replace(feature, pooling="sum") for name, feature in features.items()}
    return TableConfig(features, **target)


def _target(case: Case) -> str:
    return "tasks" if case.arch in WITH_TOWERS else case.target


def _model(case: Case) -> ModelConfig:
    layers: dict[str, Any] = {"dense_arch_layer_sizes": (8,), "over_arch_layer_sizes": (6, 1)}
    if case.arch in ("fm", "deepfm", "wide_deep"):
        layers = {} if case.arch == "fm" else {"over_arch_layer_sizes": (6, 1)}
    if case.arch in WITH_TOWERS:
        layers |= {"expert_layer_sizes": (8, 6), "interaction": case.turn("dlrm", "dlrm_dcn")}
    if case.arch in WITH_HISTORY:
        layers |= {"target": ("item",), "history": ("past",)}
    if case.arch == "din":
        layers["activation"] = "prelu"
    if case.arch == "hstu":
        layers["hstu"] = HstuConfig(max_events=6, head_dim=4, times=("time", "past_time"))
    target = TARGETS[_target(case)]
    learns = not isinstance(target["label"], str) and case.number % 2
    weighting = "uncertainty" if learns else "fixed"
    other = "fp32" if case.dtype == "fp16" else "fp16"
    # Beside tables of the case's type. Of hot rows a further group copies its features' places at first: waits.
    types = {} if _small_rows(case) or case.mode == "hot_cold" else {"t_user": other}
    return ModelConfig(case.arch, 8, table_dtype=case.dtype, table_dtypes=types, label_weighting=weighting, **layers)


def _plan(config: RunConfig, num_ranks: int, device: str) -> Any:
    """Tables of every kernel: of those that add up, one is replicated and one on the device; those of means exchange
    rows; others, as those of sequences, are cached."""
    tables, num_bags, groups = [], 0, table_groups(config)
    for table in tables_of_run(config):
        kernel, sharding, exchange = "cached", "row_wise", "pooled"
        if table.pooling == "mean":
            sharding, exchange = "table_wise", "rows"
        elif table.pooling:
            kernel = ("replicated", "device", "cached")[num_bags % 3]
            sharding = ("data_parallel", "table_wise", "row_wise")[num_bags % 3]
            num_bags += 1
        ranks = {"data_parallel": (), "table_wise": (0,), "row_wise": tuple(range(num_ranks))}[sharding]
        place = (table.name, table.num_rows, table.dim, table.dtype, sharding, kernel, ranks)
        tables.append(TablePlacement(*place, exchange=exchange, group=groups[table.name]))  # type: ignore[arg-type]
    return make_plan(tables, num_ranks, num_ranks, batch_size=BATCH, device=device)
