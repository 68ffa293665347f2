"""Rows that each policy fills, over the fewest that any cache can fill (the offline optimum).

    python -m benchmarks.fill_optimality STREAM [--path FILE_OR_FOLDER] [--config RUN.toml]

STREAM is `criteo` (click logs at --path, in the file's order), `steady` (generated, the same rows popular
throughout), `drift` (generated, popularity moves to other rows), `all` of these, or `run` (the data and tables of
--config, in the order in which it trains, on one rank).

Every figure comes from running the cache itself, which starts empty, over all tables of the stream in one pool. Each
batch adds one to its rows, and at the end every row of the host tier must hold the number of batches that used it.
With look-ahead L and prefetch depth P, L batches beyond the one in training are known and P of them are resident. P
is 1 here, as in training while no step waits (decision 0018).

The optimum (embershard/planning/simulate/hit_rate_curve.py) knows the whole stream and holds one batch at a time. More
references explain the difference: `holds 1` and `holds 2` are the optimum of a cache that also holds 1 or 2 batches
ahead (the cost of holding them, for any rule for victims); `rule` is the look-ahead rule with the newest ranking for
every victim (it adds the cost of not knowing more than L batches). Fills beyond `rule` are due to the cache.

Target, with the smallest L below that is at least 16 times the capacity in batches, and at least 128: from 8 batches
on, at most 1.03 of the optimum's fills; at 4, at most 0.5 % of the optimum's fills more than the optimum that holds one
batch ahead. After the first batch no fill is late.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import machine, make_parser, report, settings_of
from embershard.cache import MemoryRows, RowCache, Ticket
from embershard.cache.config import CachePolicy, Scoring
from embershard.cache.homes.shape import PoolShape
from embershard.data import BatchStream, CriteoConfig, DataConfig, SyntheticConfig, open_source
from embershard.extras.profile_picture.hit_rate_curve import look_ahead_rule, offline_optimum
from embershard.frequency import FrequencyProfile
from embershard.models import model_tables
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

LOOKAHEADS = (8, 32, 128, 256)
TARGET = 1.03
TARGET_BATCHES = 8
SMALL_TARGET_BATCHES = 4
SMALL_TARGET_OVER_HOLDING = 0.005
HELD = (1, 2)
_PLAIN: tuple[Scoring, ...] = get_args(Scoring)
_CPU = torch.device("cpu")
_DIM = 4


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("stream", choices=["criteo", "steady", "drift", "all", "run"])
    parser.add_argument("--path", help="criteo: a file or a folder of click logs")
    parser.add_argument("--config", help="run: a run's settings")
    parser.add_argument("--criteo-rows", type=int, default=20_000, help="rows of each of the 26 tables")
    parser.add_argument("--criteo-batch-sizes", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--scale", type=float, default=0.01, help="generated: rows relative to Criteo Kaggle")
    parser.add_argument("--drift", type=float, default=0.5, help="drift: share of popularity ranks that change hands")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256], help="generated, or of a run")
    parser.add_argument("--batches", type=int, default=600, help="generated; of a run, at most")
    parser.add_argument("--capacities", type=float, nargs="+", default=[2, 4, 8, 16], help="in batches' unique ids")
    parser.add_argument("--prefetch", type=int, default=1)
    options = parser.parse_args()
    if options.stream in ("criteo", "all") and not options.path:
        parser.error(f"stream {options.stream} needs --path: a file of Criteo click logs, or a folder of them")
    if options.stream == "run" and options.config is None:
        parser.error("stream run needs --config: the settings of a run, as TOML")
    torch.set_num_threads(1)
    print(_HEADER, file=sys.stderr)
    points = []
    for stream in open_streams(options):
        for capacity in options.capacities:
            points.append(measure(stream, capacity, options.prefetch))
            print(_line(points[-1]), file=sys.stderr, flush=True)
    result = {
        "benchmark": "fill_optimality",
        "settings": settings_of(options),
        "target": f"over_optimum <= {TARGET} from {TARGET_BATCHES} batches' capacity on; at {SMALL_TARGET_BATCHES} <= "
        f"holding_over_optimum[1] + {SMALL_TARGET_OVER_HOLDING}; no late fills; with the `aim` of each point",
        "points": [asdict(point) for point in points],
        "machine": machine(),
    }
    report(result, options.output)


# -- streams


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches of keys (table offset + id), int64 [N] each, feature after feature as TorchRec gives them.

    Attributes:
        lengths: ids per feature of each batch, int64 [F]; by default one per sample.
        table_of: the table of each feature; by default each has its own.
    """

    name: str
    batch_size: int
    rows_per_table: list[int]
    batches: list[Tensor]
    lengths: list[Tensor] = field(default_factory=list)
    table_of: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each batch's keys and ids per feature."""
        one_each = torch.full((len(self.rows_per_table),), self.batch_size)
        yield from zip(self.batches, self.lengths or [one_each] * len(self.batches), strict=True)

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(self.rows_per_table)

    def uses(self) -> Tensor:
        """Return the number of batches in which each row occurs, int64 [R]."""
        uses = torch.zeros(self.num_rows, dtype=torch.int64)
        for batch in self.batches:
            uses[batch.unique()] += 1
        return uses


def open_streams(options: argparse.Namespace) -> Iterator[Stream]:
    """Yield the streams of the options."""
    if options.stream == "run":
        config = load_config(RunConfig, Path(options.config))
        yield from (read_run(config, batch_size, options.batches) for batch_size in options.batch_sizes)
        return
    names = ("criteo", "steady", "drift") if options.stream == "all" else (options.stream,)
    for name in names:
        for batch_size in options.criteo_batch_sizes if name == "criteo" else options.batch_sizes:
            config = DataConfig(eval_fraction=0.0, shuffle=False, num_workers=0)
            if name == "criteo":
                criteo = CriteoConfig(num_rows=options.criteo_rows)
                config = replace(config, kind="criteo", path=options.path, criteo=criteo)
            else:
                drift = options.drift if name == "drift" else 0.0
                synthetic = SyntheticConfig(batch_size * options.batches, options.scale, drift=drift)
                config = replace(config, synthetic=synthetic)
            yield read_stream(name, batch_size, config)


def read_stream(name: str, batch_size: int, config: DataConfig) -> Stream:
    """Read one epoch of the data in the files' order."""
    source = open_source(config)
    rows = [feature.num_rows for feature in source.schema.sparse]
    offsets = (torch.tensor(rows).cumsum(0) - torch.tensor(rows))[:, None]
    with BatchStream(
        source, batch_size=batch_size, rank=0, world_size=1, split="train", epochs=1, config=config
    ) as batches:
        keys = [(batch.sparse_features.values().view(len(rows), -1) + offsets).flatten() for batch in batches]
    return Stream(name, batch_size, rows, keys)


def read_run(config: RunConfig, batch_size: int, most: int) -> Stream:
    """Read what a run would train on one rank, `most` batches of it."""
    source = open_source(config.data)
    tables = model_tables(config.model, source.schema)
    table_of = {name: number for number, table in enumerate(tables) for name in table.features}
    offsets = [0, *itertools.accumulate(table.num_rows for table in tables)]
    keys, lengths = [], []
    with BatchStream(
        source, batch_size=batch_size, rank=0, world_size=1, split="train", epochs=1, config=config.data
    ) as batches:
        for batch in itertools.islice(batches, most):
            ids = {name: each.values() for name, each in batch.sparse_features.to_dict().items() if name in table_of}
            keys.append(torch.cat([values + offsets[table_of[name]] for name, values in ids.items()]))
            lengths.append(torch.tensor([values.numel() for values in ids.values()]))
    order = [table_of[name] for name in ids]
    return Stream("run", batch_size, [table.num_rows for table in tables], keys, lengths, order)


# -- one point: a stream and a capacity


@dataclass
class Point:
    """The figures of one capacity. The policy `lookahead L` knows L batches."""

    stream: str
    batch_size: int
    batches: int
    mean_unique_ids: float
    capacity_batches: float
    slots: int
    share_of_rows: float
    distinct_rows: int
    """Rows that occur: each of them is filled at least once."""
    optimum_fills: int
    holding_over_optimum: dict[int, float | None]
    """By the number of batches held ahead; None where they do not fit somewhere in the stream."""
    aim: str
    """The policy to which the target applies."""
    rule_over_optimum: dict[str, float | None] = field(default_factory=dict)
    fills: dict[str, int] = field(default_factory=dict)
    over_optimum: dict[str, float] = field(default_factory=dict)
    late_fills: dict[str, int] = field(default_factory=dict)
    """Critical-path fills after the first batch."""
    mean_prefetch: dict[str, float] = field(default_factory=dict)
    """Batches resident beyond the one in training, without the stream's last batches, which have fewer after them."""
    reached: bool | None = None
    """Whether the target was reached; None where the capacity is too small for a target."""


def measure(stream: Stream, capacity_batches: float, prefetch: int) -> Point:
    """Run all policies with slots for the unique ids of `capacity_batches` batches that share no id."""
    batches = [batch.unique().numpy() for batch in stream.batches]
    mean_unique_ids = float(np.mean([batch.size for batch in batches]))
    slots = min(round(capacity_batches * mean_unique_ids), stream.num_rows)
    optimum = offline_optimum(batches, slots)
    if optimum is None:
        raise SystemExit(f"{slots} slots do not hold every batch of {stream.name}; raise --capacities")
    point = Point(
        stream=stream.name,
        batch_size=stream.batch_size,
        batches=len(batches),
        mean_unique_ids=round(mean_unique_ids, 1),
        capacity_batches=capacity_batches,
        slots=slots,
        share_of_rows=round(slots / stream.num_rows, 5),
        distinct_rows=int((stream.uses() > 0).sum()),
        optimum_fills=optimum,
        holding_over_optimum={held: _ratio(offline_optimum(batches, slots, held), optimum) for held in HELD},
        aim=f"lookahead {next((each for each in LOOKAHEADS[2:] if each >= 16 * capacity_batches), LOOKAHEADS[-1])}",
    )
    for policy in _PLAIN:
        run = Run(stream, slots, policy)
        run.one_by_one()
        point.fills[policy] = run.finish()
    for lookahead in LOOKAHEADS:
        run = Run(stream, slots, "lfu", look_ahead=True)
        name = f"lookahead {lookahead}"
        point.late_fills[name], point.mean_prefetch[name] = run.ahead(lookahead, prefetch)
        point.fills[name] = run.finish()
        point.rule_over_optimum[name] = _ratio(look_ahead_rule(batches, slots, lookahead, prefetch), optimum)
    point.over_optimum = {name: round(fills / optimum, 4) for name, fills in point.fills.items()}
    point.reached = _is_reached(point)
    return point


def _is_reached(point: Point) -> bool | None:
    if point.capacity_batches < SMALL_TARGET_BATCHES:
        return None
    limit, holding = TARGET, point.holding_over_optimum[1]
    if point.capacity_batches < TARGET_BATCHES:
        limit = (holding or 1.0) + SMALL_TARGET_OVER_HOLDING
    return point.over_optimum[point.aim] <= limit and not point.late_fills[point.aim]


def _ratio(fills: int | None, optimum: int) -> float | None:
    return None if fills is None else round(fills / optimum, 4)


class Run:
    """A cache that starts empty, with plain tensors as its slots and host tier."""

    def __init__(self, stream: Stream, num_slots: int, scoring: Scoring, look_ahead: bool = False) -> None:
        self._stream = stream
        self._host = MemoryRows(PoolShape(stream.rows_per_table, _DIM))
        counts = None
        if scoring == "frequency":
            batches = ({"pool": batch} for batch in stream.batches)
            counts = FrequencyProfile.count(batches, {"pool": stream.num_rows}).sparse("pool")
        tables = range(len(stream.rows_per_table))
        self._cache = RowCache(
            [f"t{table}" for table in tables],
            self._host,
            self._device_payload,
            num_slots,
            stream.table_of or tables,
            CachePolicy(scoring, by_next_use=look_ahead),
            _CPU,
            row_counts=counts,
            overflow="raise",
        )

    def _device_payload(self, num_slots: int) -> list[Tensor]:
        self._weights = torch.zeros(num_slots + 1, _DIM)
        return [self._weights]

    def one_by_one(self) -> None:
        """Train without look-ahead: a batch becomes known when it is needed."""
        for batch, lengths in self._stream:
            self._train(self._cache.prepare(batch, lengths))

    def ahead(self, lookahead: int, prefetch: int) -> tuple[int, float]:
        """Train as the pipeline does: batches become known, then resident, then train.

        Returns:
            Critical-path fills after the first batch, and the mean number of batches resident beyond the one in
            training.
        """
        cache = self._cache
        unknown, known, resident = deque(self._stream), deque[tuple[Tensor, Tensor, Any]](), deque[Ticket | None]()
        first_fills, depths = None, []
        for _ in self._stream.batches:
            while unknown and len(resident) + len(known) <= lookahead:
                known.append((*unknown[0], cache.know(*unknown.popleft())))
            if not resident:  # training waits
                batch, lengths, ids = known.popleft()
                resident.append(cache.prepare(batch, lengths, known=ids))
                first_fills = self._late_fills() if first_fills is None else first_fills
            while known and len(resident) <= prefetch:
                batch, lengths, ids = known[0]
                ticket = cache.prepare(batch, lengths, critical_path=False, known=ids, if_it_fits=True)
                if ticket is None:
                    break
                resident.append(ticket)
                known.popleft()
            if len(resident) > prefetch or known:
                depths.append(len(resident) - 1)
            self._train(resident.popleft())
        return self._late_fills() - (first_fills or 0), round(float(np.mean(depths or [0])), 3)

    def finish(self) -> int:
        """Return the number of fills.

        Raises:
            RuntimeError: a row does not hold the number of batches that used it.
        """
        self._cache.flush()
        if not torch.equal(self._host.weights[:, 0].long(), self._stream.uses()):
            raise RuntimeError("the cache lost updates: its figures mean nothing")
        return sum(stats.fills for stats in self._cache.stats())

    def _train(self, ticket: Ticket | None) -> None:
        assert ticket is not None, "None is for batches that were to be resident only if they fit"
        self._cache.wait(ticket)
        # Repeats of a slot read the same old value and write the same new one.
        self._weights.index_copy_(0, ticket.slots, self._weights.index_select(0, ticket.slots) + 1)
        self._cache.release(ticket)

    def _late_fills(self) -> int:
        return sum(stats.critical_path_fills for stats in self._cache.stats())


# -- for people

_NAMES = (*_PLAIN, *(f"lookahead {lookahead}" for lookahead in LOOKAHEADS))
_HEADER = (
    f"{'':6} batch capacity of rows  optimum |"
    + "".join(f" {policy[:6]:>6}" for policy in _PLAIN)
    + "".join(f" {f'L={lookahead}':>6}" for lookahead in LOOKAHEADS)
    + "".join(f" | holds {held}" for held in HELD)
    + "   rule | late fills, prefetch, target"
)


def _line(point: Point) -> str:
    verdict = {None: "", True: "reached", False: "MISSED"}[point.reached]
    references = [*point.holding_over_optimum.values(), point.rule_over_optimum[point.aim]]
    ratios = "".join(f" {'-' if ratio is None else f'{ratio:.3f}':>9}" for ratio in references)
    return (
        f"{point.stream:6} {point.batch_size:5} {point.capacity_batches:8g} {point.share_of_rows:7.2%}"
        f" {point.optimum_fills:8} |"
        + " ".join(f"{point.over_optimum[name]:6.3f}" for name in _NAMES)
        + f" |{ratios} | {point.late_fills[point.aim]:10} {point.mean_prefetch[point.aim]:9.2f}  {verdict}"
    )


if __name__ == "__main__":
    main()
