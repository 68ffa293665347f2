"""A sharding plan as a value: places of the tables, sizes of the caches, and a prediction; its checks and its file.

The file is JSON that people read, compare and edit: one entry to a line, checked when it is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from embershard.errors import ShardingError, naming_file
from embershard.settings.decoding import decode
from embershard.sharding.sharding_types import ROWS_TYPES, SHARDING_TYPES
from embershard.sharding.shards import (
    COLUMN_MULTIPLE,
    Pool,
    PoolPlacement,
    Shard,
    TablePlacement,
    largest_pool_problem,
    pools_of,
    shards_of,
)

__all__ = [
    "Plan",
    "PlanBound",
    "Pool",
    "PoolPlacement",
    "Prediction",
    "RankPrediction",
    "Shard",
    "TablePlacement",
    "TablePrediction",
    "pools_of",
    "shards_of",
]

FORMAT = 1  # of a plan's file
_GIVE_A_PLAN = "Give a file that embershard plan wrote."
MOST_RANKS = 65_536  # checks per rank must end
#: Of sums, in other orders.
_ROUNDING = 1e-9
#: Fields that a prediction depends on.
_PREDICTED_FROM = ("world_size", "ranks_per_node", "batch_size", "device", "settings", "tables", "pools")


@dataclass(frozen=True)
class TablePrediction:
    """Prediction for one table on one rank: counts per step, bytes in all.

    Attributes:
        hit_rate_unique, hit_rate_lookups: over the predicted steps; None without lookups.
        device_bytes: of the cache's slots and maps, or of all rows where there is no cache.
        first_touches: those of `unique_ids` that miss because the cache never had their rows before, whatever its size.
        long_run_hit_rate: an estimate of `hit_rate_lookups` on new data after a long training; None: not estimated.
        long_run_range: its least and most, by what such estimates were off in the profile; None: not tried; (0, 1):
            counts do not tell.
        moved_row_bytes: of a row between slots and host memory; None in plans of earlier versions.
    """

    table: str
    rank: int
    lookups: float
    unique_ids: float
    fills: float
    write_backs: float
    hit_rate_unique: float | None
    hit_rate_lookups: float | None
    device_bytes: int
    host_bytes: int
    first_touches: float = 0.0
    long_run_hit_rate: float | None = None
    long_run_range: tuple[float, float] | None = None
    moved_row_bytes: float | None = None

    @property
    def misses(self) -> float:
        """Those of `unique_ids` that are not on the device."""
        return self.unique_ids * (1.0 - (self.hit_rate_unique or 0.0))


def long_run_range(tables: Sequence[TablePrediction]) -> tuple[float, float] | None:
    """Return the least and the most hits per lookup of all these in the long run; None where one is not estimated."""
    found, lookups = [], sum(table.lookups for table in tables)
    for table in tables:
        if table.lookups:
            if table.long_run_hit_rate is None:
                return None
            low, high = table.long_run_range or (table.long_run_hit_rate, table.long_run_hit_rate)
            found.append((table.lookups / lookups * low, table.lookups / lookups * high))
    return (sum(low for low, _ in found), sum(high for _, high in found)) if found else None


@dataclass(frozen=True)
class RankPrediction:
    """Prediction for one rank.

    Attributes:
        device_bytes: by use: "slots", "maps", "device_tables", "replicated", "dense", "activations",
            "input_buffers"; in the mode "hot_cold" also "hot_rows"; on a GPU "rankings" of slots, "plans" of
            batches, and "reserve", which is left free.
        host_bytes: "rows" and "scores"; "id_maps" and "file_maps" where there are some.
        work: work of one step, by the fields of `StepWork`.
        seconds: parts of one step, if nothing ran at the same time.
        step_seconds: of a step, without waiting for slower ranks.
        bottleneck: the part that takes the most of `step_seconds`.
        files: with rows in a file, "rows_read", "pages_read", "rows_written", "pages_written" of a step; else empty.
    """

    rank: int
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    work: dict[str, float]
    seconds: dict[str, float]
    step_seconds: float
    bottleneck: str
    files: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def cache_device_bytes(self) -> int:
        """What a run's result counts as device memory: slots and maps of the caches, and copies of hot rows."""
        return sum(self.device_bytes.get(name, 0) for name in ("slots", "maps", "hot_rows"))

    @property
    def total_device_bytes(self) -> int:
        """All of the rank's device memory: caches, other tables, dense layers, activations, buffers, the reserve."""
        return sum(self.device_bytes.values())

    @property
    def total_host_bytes(self) -> int:
        """All of the rank's host memory."""
        return sum(self.host_bytes.values())


@dataclass(frozen=True)
class Prediction:
    """Prediction of a plan's hit rates, memory and speed.

    Attributes:
        method: source of the hit rates: a replay of real lookups, or counts alone.
        num_steps: steps over which the hit rates are means.
        step_seconds, samples_per_second: of all ranks together, which wait for each other.
        bottleneck: of the slowest rank.
        tables: per table and rank.
    """

    method: Literal["replay", "counts"]
    num_steps: int
    step_seconds: float
    samples_per_second: float
    bottleneck: str
    tables: tuple[TablePrediction, ...]
    ranks: tuple[RankPrediction, ...]

    @property
    def first_touch_share(self) -> float:
        """Share of the misses that are first touches: all say nothing of the caches' sizes."""
        misses = sum(table.misses for table in self.tables)
        return min(1.0, sum(table.first_touches for table in self.tables) / misses) if misses else 0.0

    @property
    def hit_rate_lookups(self) -> float | None:
        """Share of all lookups that hit; None without lookups."""
        lookups = sum(table.lookups for table in self.tables)
        hits = sum(table.lookups * (table.hit_rate_lookups or 0.0) for table in self.tables)
        return hits / lookups if lookups else None

    @property
    def planning_seconds(self) -> float:
        """Of a step, in which the slowest rank finds slots in its caches."""
        return max((rank.seconds.get("planning", 0.0) for rank in self.ranks), default=0.0)

    @property
    def most_device_bytes(self) -> int:
        """Device memory of the fullest rank."""
        return max((rank.total_device_bytes for rank in self.ranks), default=0)

    def most_host_bytes(self, ranks_per_node: int) -> int:
        """Return the host memory of the fullest node."""
        hosts = [rank.total_host_bytes for rank in self.ranks]
        return max(sum(hosts[first : first + ranks_per_node]) for first in range(0, len(hosts), ranks_per_node))


@dataclass(frozen=True)
class PlanBound:
    """How far a plan can be from the best one under its cost model; from counts alone.

    >>> bound = PlanBound(0.0102, 0.01, 0.004, rank=3, stage="embedding", change="")
    >>> bound.sentence.partition(",")[0], bound.is_valid
    ('Within 2.0 % of the best plan of the allowed sharding types', True)

    Attributes:
        step_seconds: of the plan.
        least_seconds: no plan of these tables, ranks and sharding types, with these copies, takes less.
        fixed_seconds: of a step without sharded tables.
        rank, stage: the slowest rank, and what takes most of its step.
        change: of the machine, the smallest that makes a step 5 % shorter; empty: none does, or it is not known.
        own_gap: on GPUs, how much longer they take than the least that they could, beside a host that takes no time;
            None: on a CPU, and in plans of earlier versions.
    """

    step_seconds: float
    least_seconds: float
    fixed_seconds: float
    rank: int
    stage: str
    change: str
    own_gap: float | None = None

    @property
    def is_valid(self) -> bool:
        """False where the bound is above the plan, by more than sums are rounded."""
        return self.least_seconds <= self.step_seconds * (1 + _ROUNDING)

    @property
    def sentence(self) -> str:
        """The gaps, in percent; that the bound is none where it is above the plan."""
        if not self.is_valid:
            return (
                f"The bound is not valid here: no plan should take less than {self.least_seconds * 1e3:.4g} ms a step, "
                f"and this one takes {self.step_seconds * 1e3:.4g} ms. That is a mistake of embershard: please report "
                "it with this plan's file."
            )
        over, of_tables = max(0.0, self.step_seconds - self.least_seconds), self.least_seconds - self.fixed_seconds
        part = f" ({100 * over / of_tables:.1f} % of what depends on the tables)" if of_tables > 0 else ""
        gap = 100 * over / self.least_seconds if self.least_seconds > 0 else 0.0
        within = f"Within {gap:.1f} % of the best plan of the allowed sharding types, under this cost model{part}."
        if self.own_gap is None or 100 * self.own_gap < 100 * gap + 0.1:
            return within
        return f"{within} That is beside the host's thread: the GPUs' own work is within {100 * self.own_gap:.1f} %."


@dataclass(frozen=True)
class Plan:
    """Places of all tables and sizes of all caches, for one number of ranks.

    >>> table = TablePlacement("t0", 100, 16, "fp32", "table_wise", "cached", (0,))
    >>> pools = tuple(pool.with_slots(10) for pool in pools_of([table], ranks_per_node=1))
    >>> plan = Plan(1, 1, 512, "cpu", None, None, {}, (table,), pools)
    >>> plan.check_model({"t0": (100, 16, "fp32")})

    Attributes:
        batch_size: samples per rank and step.
        device_memory_bytes: budget of one rank, if there is one; of the rank with most, where they differ.
        host_memory_bytes: budget of one node, if there is one.
        settings: settings of the run that the prediction assumed, by name.
        pools: one per cache of every rank.
        notes: warnings and advice.
        prediction: None when unknown, or when the plan was edited since.
        made_from: the files and the command.
        bound: None for one rank, where it is not known, and where the plan was edited.
        memory_bytes_by_rank: budget of each rank, [ranks], where they differ; else empty.
        format: of the file.
    """

    world_size: int
    ranks_per_node: int
    batch_size: int
    device: Literal["cpu", "cuda"]
    device_memory_bytes: int | None
    host_memory_bytes: int | None
    settings: dict[str, Any]
    tables: tuple[TablePlacement, ...]
    pools: tuple[PoolPlacement, ...]
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None
    made_from: dict[str, str] = dataclasses.field(default_factory=dict)
    bound: PlanBound | None = None
    memory_bytes_by_rank: tuple[int, ...] = ()
    format: int = FORMAT

    def memory_bytes_of(self, rank: int) -> int | None:
        """Return the budget of a rank; None: there is none."""
        return self.memory_bytes_by_rank[rank] if self.memory_bytes_by_rank else self.device_memory_bytes

    @property
    def device_limits(self) -> tuple[int, ...]:
        """Budget of each rank's device, [ranks]; empty: there is none."""
        if self.memory_bytes_by_rank or self.device_memory_bytes is None:
            return self.memory_bytes_by_rank
        return (self.device_memory_bytes,) * self.world_size

    @property
    def digest(self) -> str:
        """Hash of everything that a prediction depends on: placement, slots, sizes, settings."""
        return _hash({name: getattr(self, name) for name in _PREDICTED_FROM})

    def save(self, path: Path | str) -> None:
        """Write the JSON file, one table, pool or prediction to a line.

        Raises:
            ShardingError: the plan contradicts itself.
        """
        check_plan(self)
        with naming_file(path):
            Path(path).write_text(self.to_text(), encoding="utf-8")

    def to_text(self) -> str:
        """Return the contents of the file."""
        values = {"format": self.format, **vars(self)}
        del values["prediction"]  # the longest part comes last
        if self.prediction is not None:
            own = {"digest": self.digest, "contents": _hash([self.prediction, self.bound])}
            values["prediction"] = {**own, **vars(self.prediction)}
        return to_text(values)

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read and check a file that `save` or a person wrote.

        A prediction that does not belong to the rest of the file, or that was edited itself, is dropped with its bound,
        with a note. Files of older versions have no hash of what they predict: it is taken as it is.

        Raises:
            ShardingError: naming the file, the entry and the remedy.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ShardingError(f"{path}: cannot be read ({reason}). {_GIVE_A_PLAN}") from error
        try:
            values = from_text(text)
            prediction = values.get("prediction")
            digest = contents = None
            if isinstance(prediction, dict):
                digest, contents = prediction.pop("digest", None), prediction.pop("contents", None)
            is_as_made = contents is None or contents == _hash([prediction, values.get("bound")])
            plan = decode(cls, values, ShardingError)
            check_plan(plan)
        except ShardingError as error:
            raise ShardingError(f"{path}: {error}") from error
        if plan.prediction is None:
            return dataclasses.replace(plan, bound=None)
        if digest == plan.digest and is_as_made:
            return plan
        what = "the plan" if is_as_made else "what it predicts"
        note = f"The prediction was dropped: {what} was edited after it was made. Plan again to predict."
        return dataclasses.replace(plan, prediction=None, bound=None, notes=(*plan.notes, note))

    def check_model(self, tables: Mapping[str, tuple[int, int, str]]) -> None:
        """Raise unless the plan is for a model with these tables: name -> rows, dim and dtype ("fp32", "fp16").

        Raises:
            ShardingError: with both sides.
        """
        placed = {t.table: (t.rows, t.dim, t.dtype) for t in self.tables}
        for what, names in (
            ("places tables that the model does not have", placed.keys() - tables.keys()),
            ("does not place tables of the model", tables.keys() - placed.keys()),
        ):
            if names:
                shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                raise ShardingError(f"the plan {what}: {shown}. Plan again with this run's config and data.")
        different = [name for name in sorted(placed) if placed[name] != tuple(tables[name])]
        if different:
            name = different[0]
            more = f" ({len(different)} tables differ)" if len(different) > 1 else ""
            raise ShardingError(
                f"table {name!r} has {_shape(placed[name])} in the plan and {_shape(tables[name])} in the model{more}. "
                "Plan again with this run's config and data."
            )

    def check_ranks(self, world_size: int, ranks_per_node: int) -> None:
        """Raise unless the plan is for so many ranks.

        Raises:
            ShardingError: with both sides.
        """
        if (world_size, ranks_per_node) != (self.world_size, self.ranks_per_node):
            raise ShardingError(
                f"the plan is for {self.world_size} ranks, {self.ranks_per_node} to a node; this run has {world_size}, "
                f"{ranks_per_node} to a node. Start as many as it says, or plan for {world_size} (embershard plan "
                f"--ranks {world_size} --ranks-per-node {ranks_per_node})."
            )

    def other_settings(self, settings: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each of a run's settings that differs from the prediction's."""
        return [
            f"{name} is {_plain(settings[name])!r}; the plan's prediction assumed {_plain(assumed)!r}"
            for name, assumed in sorted({**self.settings, "train.batch_size": self.batch_size}.items())
            if name in settings and _plain(settings[name]) != _plain(assumed)
        ]


def _hash(values: Any) -> str:
    """Return a hash of values as a file has them."""
    text = json.dumps(values, sort_keys=True, allow_nan=False, default=described)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return a setting as JSON reads it."""
    if dataclasses.is_dataclass(value):
        return {name: _plain(each) for name, each in vars(value).items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _shape(shape: tuple[int, int, str]) -> str:
    return f"{shape[0]:,} rows x {shape[1]} {shape[2]}"


def check_plan(plan: Plan) -> None:
    """Raise unless tables and pools fit each other and the ranks.

    Raises:
        ShardingError: naming the entry.
    """
    if plan.format != FORMAT:
        raise ShardingError(f"format: got {plan.format}, needed {FORMAT}. Plan again with this version.")
    for name in ("world_size", "ranks_per_node", "batch_size", "device_memory_bytes", "host_memory_bytes"):
        value = getattr(plan, name)
        if value is not None and value < 1:
            raise ShardingError(f"{name}: got {value}, needed at least 1{', or null' if 'memory' in name else ''}.")
    by_rank = plan.memory_bytes_by_rank
    if by_rank and (len(by_rank) != plan.world_size or max(by_rank) != plan.device_memory_bytes or min(by_rank) < 1):
        raise ShardingError(
            f"memory_bytes_by_rank: got {list(by_rank)}, needed none, or {plan.world_size} numbers from 1 to "
            f"device_memory_bytes ({plan.device_memory_bytes}), the largest of them equal to it."
        )
    if not plan.tables:
        raise ShardingError("tables: got none, needed the model's. Plan again.")
    if plan.world_size > MOST_RANKS:
        raise ShardingError(f"world_size: got {plan.world_size}, needed at most {MOST_RANKS}.")
    if plan.world_size % plan.ranks_per_node:
        raise ShardingError(
            f"ranks_per_node: got {plan.ranks_per_node}, needed a divisor of world_size {plan.world_size}."
        )
    seen: dict[str, int] = {}
    for number, table in enumerate(plan.tables):
        entry = f"tables[{number}] ({table.table!r})"
        if table.table in seen:
            raise ShardingError(f"{entry}: is the same table as tables[{seen[table.table]}]. Remove one of them.")
        seen[table.table] = number
        if problem := _table_problem(table, plan.world_size, plan.ranks_per_node):
            raise ShardingError(f"{entry}: {problem}")
    _check_pools(plan)


def _table_problem(table: TablePlacement, world_size: int, ranks_per_node: int) -> str:
    if table.rows < 1:
        return f"rows: got {table.rows}, needed at least 1."
    if table.dim < 1 or table.dim % COLUMN_MULTIPLE:
        return f"dim: got {table.dim}, needed a multiple of {COLUMN_MULTIPLE}."
    if (table.kernel == "replicated") != (table.sharding == "data_parallel"):
        return (
            f'kernel "{table.kernel}" with sharding "{table.sharding}": "replicated" and "data_parallel" go together. '
            "Set both, or neither."
        )
    if table.exchange == "rows" and table.sharding not in ROWS_TYPES:
        return f'exchange "rows" with sharding "{table.sharding}"; needed one of {", ".join(ROWS_TYPES)}, or "pooled".'
    if table.columns and (not SHARDING_TYPES[table.sharding].cuts_columns or table.exchange == "rows"):
        return (
            f'columns: got {list(table.columns)} with sharding "{table.sharding}", exchange "{table.exchange}"; needed '
            'a type that cuts columns, with exchange "pooled": tables that exchange rows are grouped by columns.'
        )
    outside = [rank for rank in table.ranks if not 0 <= rank < world_size]
    if outside:
        return f"ranks: got rank {outside[0]}, needed ranks from 0 to {world_size - 1}."
    if problem := SHARDING_TYPES[table.sharding].ranks_problem(table.ranks, world_size, ranks_per_node):
        return problem
    blocks = table.ranks[:: SHARDING_TYPES[table.sharding].row_blocks(world_size, ranks_per_node)]
    if table.columns and len(set(blocks)) < len(blocks):
        return f"columns: got {list(table.columns)} on ranks {list(table.ranks)}; needed blocks on ranks of their own."
    try:
        shards_of(table, ranks_per_node)
    except ShardingError as error:
        return str(error)
    return ""


def _check_pools(plan: Plan) -> None:
    if problem := largest_pool_problem(plan.tables, plan.ranks_per_node):
        raise ShardingError(f"pools: {problem}. Move tables to other ranks, cut them by rows, or use more ranks.")
    expected = pools_of(plan.tables, plan.ranks_per_node)
    of_table = {(pool.rank, table): pool for pool in expected for table in pool.tables}
    found: dict[tuple[int, tuple[str, ...]], int] = {}
    for number, placed in enumerate(plan.pools):
        entry = f"pools[{number}] (rank {placed.rank}, {placed.sharding}, dim {placed.dim})"
        problem = _pool_problem(placed, of_table)
        key = (placed.rank, placed.tables)
        if not problem and key in found:
            problem = f"is the same pool as pools[{found[key]}]. Remove one of them."
        if problem:
            raise ShardingError(f"{entry}: {problem}")
        found[key] = number
    for pool in expected:
        if (pool.rank, pool.tables) not in found:
            raise ShardingError(
                f"pools: the cached {pool.sharding} shards of {list(pool.tables)} on rank {pool.rank}, of {pool.dim} "
                f"columns each, are in no pool. Add one for them, with 1 to {max(1, pool.rows)} slots."
            )


def _pool_problem(placed: PoolPlacement, of_table: dict[tuple[int, str], Pool]) -> str:
    if not placed.tables:
        return "tables: got none. Remove the pool."
    pools = []
    for table in placed.tables:
        pool = of_table.get((placed.rank, table))
        if pool is None:
            return f"tables: {table!r} has no cached shard on rank {placed.rank}. Remove it from the pool."
        if (pool.sharding, pool.dim) != (placed.sharding, placed.dim):
            return (
                f"tables: the shard of {table!r} on rank {placed.rank} is {pool.sharding} with {pool.dim} columns. "
                "Say so, or move the table to that pool."
            )
        pools.append(pool)
    pool = pools[0]
    if pool.tables != placed.tables:
        return (
            f"tables: got {list(placed.tables)}, needed {list(pool.tables)}: shards of a rank with the same sharding "
            "type, columns, dtype, exchange and group share one pool."
        )
    if not 1 <= placed.slots <= max(1, pool.rows):
        return f"slots: got {placed.slots}, needed 1 to {max(1, pool.rows)}, the rows of its shards."
    return ""


def to_text(values: Mapping[str, Any]) -> str:
    """Return JSON in which every entry of a list has a line, and numbers share one. Dataclasses become objects."""
    return "\n".join(_object_lines(values, "")) + "\n"


def from_text(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    >>> from_text('{"slots": 1, "slots": 2}')
    Traceback (most recent call last):
    embershard.errors.ShardingError: key 'slots' is twice in one object ({"slots": 2}...). Remove one.

    Raises:
        ShardingError: the text is not JSON, a key is there twice, or a number is not finite.
    """

    def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ShardingError(f"key {twice!r} is twice in one object ({_one_line(values)[:80]}...). Remove one.")
        return values

    def no_constant(name: str) -> Any:
        raise ShardingError(f"holds {name}, which is no number. Replace it.")

    try:
        values = json.loads(text, object_pairs_hook=no_key_twice, parse_constant=no_constant)
    except ShardingError:
        raise
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and endless nesting
        raise ShardingError(f"is not JSON: {error}. {_GIVE_A_PLAN}") from error
    if not isinstance(values, dict):
        raise ShardingError(f"is not a plan: needed one JSON object. {_GIVE_A_PLAN}")
    return values


def _object_lines(values: Mapping[str, Any], indent: str) -> list[str]:
    lines = [f"{indent}{{"]
    for number, (key, value) in enumerate(values.items()):
        *above, last = _value_lines(value, f"{indent}  ")
        comma = "," if number + 1 < len(values) else ""
        first = above[0] if above else last
        head = f"{indent}  {json.dumps(key)}: {first.lstrip()}"
        lines += [head, *above[1:], f"{last}{comma}"] if above else [f"{head}{comma}"]
    return [*lines, f"{indent}}}"]


def _value_lines(value: Any, indent: str) -> list[str]:
    if isinstance(value, Mapping) and value:
        return _object_lines(value, indent)
    if isinstance(value, (list, tuple)) and any(not isinstance(entry, (int, float)) for entry in value):
        entries = [f"{indent}  {_one_line(entry)}" for entry in value]
        return [f"{indent}[", *(f"{entry}," for entry in entries[:-1]), entries[-1], f"{indent}]"]
    return [indent + _one_line(value)]


def _one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=described)


def described(value: Any) -> Mapping[str, Any]:
    """Return a dataclass as a JSON object."""
    return value.described if isinstance(value, TablePlacement) else vars(value)
