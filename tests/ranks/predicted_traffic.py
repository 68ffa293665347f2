"""Bytes between ranks as predicted and as counted: `python -m tests.ranks.predicted_traffic`; some minutes.

{pooled, rows, auto} x {table-wise, row-wise, column-wise} x {one id per feature, MLPerf's bags} x {2, 4 ranks}, and
pooled with copies of the small tables on every rank: a profile of generated data, a prediction from it, and a run of
the trainer on the same data. Prints a line per combination: predicted and counted bytes of a rank and step, by kind.
Ends with 1 where one differs by more than 2 %, or "auto" sent more than another.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from embershard.cache.statistics import CacheReport
from embershard.commands.plan.inputs import make_workload
from embershard.commands.profile.data_pass import PassOptions, profile_data
from embershard.data import DataConfig
from embershard.data.config import SyntheticConfig
from embershard.data.sources.synthetic import MLPERF_BAG_SIZES
from embershard.distributed.sent_bytes import SentBytes
from embershard.frequency import FrequencyProfile
from embershard.planning.cost.rates import Rates
from embershard.planning.cost.topology import load_topology
from embershard.planning.predict import predict
from embershard.planning.verify.compare import PROMISED_SENT_BYTES, SENT_KINDS, Pair
from embershard.planning.workload import Layout, Workload
from embershard.sharding.config import CommDtype, ExchangeChoice, ShardingConfig
from embershard.sharding.memory_model import planned_slots
from embershard.sharding.plan import Plan, TablePlacement, pools_of
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.trainer import Trainer
from tests.ranks import planned
from tests.ranks.workers import RankPool
from tests.small_runs import small_model
from tests.unit.sharding.plans import make_plan, ranks_for

BAGS = {"one-hot": (), "MLPerf": MLPERF_BAG_SIZES}
STEPS = 16
MOST_COPIED_ROWS = 300
SHARDINGS = ("table_wise", "row_wise", "column_wise")


@dataclass(frozen=True)
class Case:
    """A run to predict. ``scale`` is that of the data's row counts, ``num_samples`` are those of an epoch. Tables of at
    most ``replicate_rows`` have a copy on every rank. A step has ``accumulate`` pieces; caches have a slot for one of
    ``rows_per_slot`` rows. Tables have ``dim`` columns, in blocks of ``columns`` where these differ. ``comm``: types of
    embeddings and gradients between ranks."""

    sharding: str = "row_wise"
    exchange: ExchangeChoice = "rows"
    bags: str = "one-hot"
    batch_size: int = 64
    num_samples: int = 6000
    scale: float = 0.003
    replicate_rows: int = 0
    accumulate: int = 1
    rows_per_slot: int = 2
    dim: int = planned.DIM
    columns: tuple[int, ...] = ()
    comm: tuple[CommDtype, CommDtype] = ("fp32", "fp32")

    @property
    def data(self) -> DataConfig:
        """Its data."""
        generated = SyntheticConfig(num_samples=self.num_samples, scale=self.scale, bag_sizes=BAGS[self.bags])
        return DataConfig(synthetic=generated, num_workers=0)

    def config(self, plan: Path | None = None) -> RunConfig:
        """The settings of the run; to be planned for without a plan."""
        place: Any = {"plan": str(plan)} if plan else {"exchange": self.exchange}
        sharding = ShardingConfig(forward_dtype=self.comm[0], backward_dtype=self.comm[1], **place)
        train = TrainConfig(batch_size=self.batch_size, max_steps=STEPS, device="cpu", accumulate=self.accumulate)
        parts = {"data": self.data, "train": train, "sharding": sharding, "model": small_model(self.dim)}
        return planned.make_config(None, **parts)


@lru_cache(maxsize=4)
def profile_of(data: DataConfig) -> FrequencyProfile:
    """Of all samples."""
    return profile_data(data, PassOptions())


def workload_of(case: Case, world_size: int, local: int) -> Workload:
    """The run, with what is known of its data."""
    statistics = profile_of(case.data).statistics
    assert statistics is not None
    return make_workload(case.config(), statistics, world_size, ranks_per_node=local, device="cpu")


def plan_of(
    case: Case, world_size: int, ranks_per_node: int | None = None, ranks: tuple[int, ...] | None = None
) -> Plan:
    """Every table with this sharding type, in a cache of half its rows or more, and a prediction; on these ranks."""
    local = ranks_per_node or world_size
    workload = workload_of(case, world_size, local)
    tables = []
    for number, size in enumerate(workload.model.tables):
        has_copies = size.rows <= case.replicate_rows
        sharding, kernel = ("data_parallel", "replicated") if has_copies else (case.sharding, "cached")
        own = ranks or ranks_for(sharding, number, world_size, local, column_shards=len(case.columns) or 2)
        kinds: Any = (sharding, kernel, own)
        placed = TablePlacement(size.table, size.rows, size.dim, size.dtype, *kinds, columns=case.columns)
        tables.append(workload.with_exchange(placed))
    pools = tuple(pool.with_slots(max(1, -(-pool.rows // case.rows_per_slot))) for pool in pools_of(tables, local))
    rates: Rates = load_topology("cpu").rates_for(world_size)
    layout = Layout(workload, tables)
    prediction = predict(layout, planned_slots(pools, layout.pools), rates)
    return make_plan(
        tables, world_size, local, batch_size=case.batch_size, pools=pools, prediction=prediction, settings={}
    )


def train(case: Case, plan: Path) -> tuple[SentBytes, CacheReport]:
    """What this rank sent in a step, on average, and what its caches counted in one. Runs on a rank."""
    trainer = Trainer(case.config(plan), planned.here())
    for _ in trainer.train():
        pass
    totals = next(own for own in trainer.metrics.traffic_reader.totals().ranks if own["rank"] == trainer.ranks.rank)
    caches = CacheReport.total(stats for pool in cached_embeddings(trainer.model) for stats in pool.cache.stats())
    trainer.close()
    sent = SentBytes(**{field.name: totals[field.name] for field in fields(SentBytes)})
    return sent.over(STEPS), caches.scaled(1 / STEPS)


def sent_as_predicted(plan: Plan) -> dict[str, float]:
    """Bytes of a rank and step by kind, the mean of the ranks."""
    ranks = plan.prediction.ranks
    kinds = {kind: names for kind, names in SENT_KINDS.items() if kind != "sync"}  # which is of groups
    return {kind: fmean(sum(rank.work[n] for n in names) for rank in ranks) for kind, names in kinds.items()}


def compared(pool: RankPool, case: Case, world_size: int) -> tuple[Plan, dict[str, Pair]]:
    """The plan, and predicted and counted bytes by kind, each the mean of the ranks."""
    plan, pairs, _ = with_hits(pool, case, world_size)
    return plan, pairs


def with_hits(pool: RankPool, case: Case, world_size: int) -> tuple[Plan, dict[str, Pair], list[CacheReport]]:
    """As `compared`, and what each rank's caches counted in a step."""
    plan = plan_of(case, world_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        plan.save(path)
        by_rank: list[tuple[SentBytes, CacheReport]] = pool.run(train, case, path)
    predicted = sent_as_predicted(plan).items()
    pairs = {kind: Pair(number, fmean(getattr(sent, kind) for sent, _ in by_rank)) for kind, number in predicted}
    return plan, pairs, [caches for _, caches in by_rank]


def is_close(pairs: dict[str, Pair]) -> bool:
    """Whether every kind is as promised."""
    return all(abs(pair.relative_error or 0.0) <= PROMISED_SENT_BYTES for pair in pairs.values())


def _text(item: tuple[str, Pair]) -> str:
    kind, pair = item
    return f"{kind} {pair.predicted:,.0f} / {pair.measured:,.0f} ({100 * (pair.relative_error or 0):+.2f} %)"


def main() -> int:
    """Run all combinations."""
    failed = 0
    for world_size in (2, 4):
        pool = RankPool(world_size)
        for bags in BAGS:
            totals: dict[str, float] = {}
            for sharding in SHARDINGS:
                for exchange, copies in (("pooled", 0), ("rows", 0), ("auto", 0), ("pooled", MOST_COPIED_ROWS)):
                    case = Case(sharding, exchange, bags, replicate_rows=copies)  # type: ignore[arg-type]
                    plan, pairs = compared(pool, case, world_size)
                    failed += not is_close(pairs)
                    num_rows = sum(table.exchange == "rows" for table in plan.tables)
                    num_copied = sum(table.kernel == "replicated" for table in plan.tables)
                    words = f"{exchange} ({num_rows} tables of rows, {num_copied} with copies)"
                    totals["copies" if copies else exchange] = sum(p.measured or 0.0 for p in pairs.values())
                    names = f"{world_size} ranks, {bags}, {sharding}, {words}"
                    print(f"{names}: {'; '.join(map(_text, pairs.items()))}", flush=True)
                print(f"    counted, all kinds: {', '.join(f'{k} {v:,.0f}' for k, v in totals.items())}", flush=True)
                failed += totals["auto"] > min(totals["pooled"], totals["rows"])
        pool.close()
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
