"""The request for a plan: a model, its data and its run, the machine, the budget, and limits on the placement."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from embershard.errors import ConfigError
from embershard.planning.cost.rates import RankRates, Rates, changed
from embershard.planning.cost.topology import Topology
from embershard.planning.workload import Workload
from embershard.sharding.pins import TablePin
from embershard.sharding.sharding_types import COPIES, SHARDING_TYPES, Sharding, sharding_type
from embershard.sharding.shards import (
    COLUMN_MULTIPLE,
    LEAST_COLUMNS,
    Kernel,
    TablePlacement,
    columns_problem,
    even_columns,
)
from embershard.sharding.sizes import TableSize

#: Of sequences, where none of the types that were asked for can shard them.
_OF_SEQUENCES = ("table_wise", "row_wise")
#: Of tables that take any id, whose shards have whole buckets; by rows where the ranks divide the buckets.
_OF_IDS = ("table_wise", "row_wise")


def cached(table: TableSize, sharding: str, ranks: Sequence[int]) -> TablePlacement:
    """Return the placement of a cached table; `ranks` are its shards' in TorchRec's order."""
    kind = cast(Sharding, sharding)
    return TablePlacement(
        table.table, table.rows, table.dim, table.dtype, kind, "cached", tuple(ranks), group=table.group
    )


@dataclass(frozen=True)
class Budget:
    """Memory that may be used. The caches' size follows from `ratio`, or from `cache_bytes`, or is the rest of
    `device_bytes`.

    >>> Budget(device_bytes=80 * 10**9).rank_bytes
    80000000000

    Attributes:
        device_bytes: of one rank, for everything: slots, states, maps, resident tables, dense model, activations,
            buffers. A hard limit. Of the rank that may use most, where ranks differ.
        cache_bytes: of one rank, for slots, states and maps alone; excludes the two others.
        ratio: slots as a share of a pool's rows.
        host_bytes: of one node, for the rows in host memory; None: not limited.
        less_bytes: how much less than `device_bytes` each rank may use, [ranks]; empty: all may use as much.
    """

    device_bytes: int | None = None
    cache_bytes: int | None = None
    ratio: float | None = None
    host_bytes: int | None = None
    less_bytes: tuple[int, ...] = ()

    @property
    def rank_bytes(self) -> int | None:
        """Device memory that one rank may use, for everything or for its caches alone; None: not limited."""
        return self.cache_bytes if self.device_bytes is None else self.device_bytes

    @property
    def may_mix(self) -> bool:
        """Whether tables may be whole on the devices, too: the budget is not one of caches."""
        return self.device_bytes is not None and self.ratio is None

    def less(self, rank: int) -> int:
        """Return how much less than `rank_bytes` a rank may use."""
        return self.less_bytes[rank] if self.less_bytes else 0

    @property
    def by_rank(self) -> tuple[int, ...]:
        """The `device_bytes` of each rank, [ranks], where they differ; else empty."""
        return tuple((self.device_bytes or 0) - less for less in self.less_bytes)

    def alone(self, rank: int) -> Budget:
        """Return the budget of one rank as if all had as much."""
        return replace(self, device_bytes=self.by_rank[rank], less_bytes=()) if self.less_bytes else self

    def of_rank(self, count: int) -> Budget:
        """Return this budget with other `rank_bytes`: of the rank that may use most."""
        return replace(self, cache_bytes=count) if self.device_bytes is None else replace(self, device_bytes=count)

    def __post_init__(self) -> None:
        given = [name for name in ("device_bytes", "cache_bytes", "ratio") if getattr(self, name) is not None]
        if not given or (self.cache_bytes is not None and len(given) > 1):
            raise ConfigError(
                f"a budget needs device_bytes, ratio, both, or cache_bytes alone; got {' and '.join(given) or 'none'}"
            )
        if self.less_bytes and (self.device_bytes is None or min(self.less_bytes)):
            raise ConfigError(
                f"less_bytes: got {list(self.less_bytes)} with device_bytes={self.device_bytes}; needed device_bytes, "
                "and numbers from 0, one of them 0"
            )


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a plan depends on.

    Attributes:
        workload: model, data and run.
        rates: of a rank of the machine; of each rank where they differ.
        budget: bytes per rank and node.
        types: sharding types that may be used, "data_parallel" for copies beside others; None: all that make sense on
            so many nodes, without copies.
        only: sharding types of single tables; overrides `types`.
        pins: what is decided of single tables' places.
        replicate_rows: tables with at most so many rows are replicated.
        most_ranks_per_node: devices of a node; None: not limited.
        settings, made_from, notes: for the plan's file.
        effort: the search takes so many times as long.
        on_ranks: makes the request for another number of ranks of such machines, or says why there is none
            (EmbershardError); None: a rank and a node have as much memory and as many samples as in this one.
        on_change: makes the request with another value of a setting ("look_ahead.lookahead"), or with other limits of
            the ranks' devices ("device_memory"), or says why there is none (EmbershardError); None: changes are not
            tried.
        topology: the machine, for a note on the error of its predicted speed; None: no note.
    """

    workload: Workload
    rates: RankRates
    budget: Budget
    types: Sequence[str] | None = None
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pins: Mapping[str, TablePin] = field(default_factory=dict)
    replicate_rows: int = 0
    most_ranks_per_node: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    made_from: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    topology: Topology | None = None
    effort: float = 1.0
    on_ranks: Callable[[int], PlanRequest] | None = field(default=None, compare=False)
    on_change: Callable[[str, Any], PlanRequest] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for pins that no plan can have, and limits that are not of these ranks."""
        of_ranks, world_size = len(self.budget.less_bytes), self.workload.shape.world_size
        if not isinstance(self.rates, Rates) and len(self.rates) != world_size:
            raise ConfigError(f"rates of {len(self.rates)} ranks, {world_size} ranks: needed those of each, or of any")
        if of_ranks not in (0, world_size):
            raise ConfigError(
                f"a budget for {of_ranks} ranks, {world_size} ranks: give one --device-memory, or one for each"
            )
        tables = {table.table: table for table in self.workload.model.tables}
        for name, pin in self.pins.items():
            if name not in tables:
                near = difflib.get_close_matches(name, tables, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Tables are {', '.join(list(tables)[:5])}, ..."
                raise ConfigError(f"sharding.pin.{name}: the model has no such table. {hint}")
            if pin.columns is not None:
                if problem := columns_problem(pin.columns, tables[name].dim):
                    raise ConfigError(f"sharding.pin.{name}.{problem}")
                if not self.may_be_uneven(tables[name]):
                    raise ConfigError(
                        f"sharding.pin.{name}.columns: got {list(pin.columns)}, which differ; TorchRec cuts sequences "
                        'evenly, and tables that exchange rows (sharding.exchange = "rows") are grouped by columns. '
                        "Leave columns out."
                    )
            if pin.kind == "device" and not self.may_mix:
                raise ConfigError(
                    f'sharding.pin.{name}: kernel "device" needs a limit on all of a device\'s memory '
                    "(--device-memory), no size of caches, and tables that take no id of any kind."
                )
        if COPIES in (self.types or ()) and not self.may_mix:
            raise ConfigError(
                f"--types {COPIES}: copies of whole tables need a limit on all of a device's memory (--device-memory), "
                "no size of caches, and tables that take no id of any kind. --replicate-rows N has copies of small "
                "tables whatever the budget."
            )

    def for_ranks(self, num_ranks: int) -> PlanRequest:
        """Return the request for another number of ranks.

        Raises:
            EmbershardError: so many do not fill nodes.
        """
        if self.on_ranks is not None:
            return self.on_ranks(num_ranks)
        if not isinstance(self.rates, Rates):
            raise ConfigError(f"{num_ranks} ranks: the speeds of {len(self.rates)} ranks are known.")
        per_node = min(num_ranks, self.most_ranks_per_node or num_ranks)
        if num_ranks % per_node:
            raise ConfigError(f"{num_ranks} ranks: needed a multiple of {per_node}, the ranks per node.")
        shape = replace(self.workload.shape, world_size=num_ranks, ranks_per_node=per_node)
        return replace(self, workload=replace(self.workload, shape=shape))

    @property
    def host_seconds(self) -> float:
        """Seconds of a host's thread for each piece of a step, the slowest one's."""
        own = (self.rates,) if isinstance(self.rates, Rates) else self.rates
        return max(each.step_overhead_seconds for each in own)

    @property
    def without_host(self) -> PlanRequest:
        """The request without the time of the hosts' threads."""
        return replace(self, rates=changed(self.rates, lambda own: replace(own, step_overhead_seconds=0.0)))

    @property
    def node_bytes(self) -> int | None:
        """Host memory of a node for what grows with its cached tables."""
        limit, shape = self.budget.host_bytes, self.workload.shape
        return None if limit is None else shape.home.left_of(limit, min(shape.ranks_per_node, shape.world_size))

    @property
    def sharded(self) -> list[TableSize]:
        """Tables that are placed on ranks, not replicated."""
        return [table for table in self.workload.model.tables if not self._is_replicated(table)]

    def _is_replicated(self, table: TableSize) -> bool:
        is_asked = table.rows <= self.replicate_rows or self.only.get(table.table) == [COPIES]
        return is_asked and table.table not in self.pins and not table.is_sequence and not table.buckets

    @property
    def may_mix(self) -> bool:
        """Whether tables may be whole on the devices, too: the budget is not one of caches, and no table takes any id,
        which needs a cache."""
        return self.budget.may_mix and not any(table.buckets for table in self.workload.model.tables)

    @property
    def allowed(self) -> dict[str, list[str]]:
        """Sharding types that each sharded table may have."""
        shape = self.workload.shape
        is_one_node = shape.world_size <= shape.ranks_per_node
        tried = [each.name for each in SHARDING_TYPES.values() if each.tried in ("any", "" if is_one_node else "nodes")]
        types = [sharding_type(name) for name in self.types or tried if name != COPIES]
        found = {}
        for table in self.sharded:
            is_cut = bool(self._even_cuts(table, shape.world_size))  # else it is table-wise by another name
            own = [each for each in types if is_cut or not each.cuts_columns]
            if table.is_sequence:
                own = [each for each in own if each.has_sequences] or [SHARDING_TYPES[name] for name in _OF_SEQUENCES]
            if table.buckets:
                fit = [SHARDING_TYPES[name] for name in _OF_IDS[: 1 if table.buckets % shape.world_size else 2]]
                own = [each for each in own if each in fit] or fit
            if shape.exchange == "rows" and self.types is None:
                own = [each for each in own if each.exchanges_rows]
            names = [name for name in self.only.get(table.table, ()) if name != COPIES]
            names = names or [each.name for each in own or types]
            if (pin := self.pins.get(table.table)) is not None:
                try:
                    names = pin.types(names, shape.world_size, shape.ranks_per_node)
                except ConfigError as error:
                    raise ConfigError(f"sharding.pin.{table.table}.{error}") from error
            found[table.table] = names
        return found

    def column_cuts(self, table: TableSize, sharding: str, *, more: bool = False) -> list[tuple[int, ...]]:
        """Return the ways to cut a table's columns with a sharding type, by the columns of each block, those of fewest
        blocks first: blocks are as even as they can be, and not narrow, unless ranks or columns are pinned.

        Args:
            more: into more blocks than there are ranks, or nodes, for one each.
        """
        kind, pin, shape = SHARDING_TYPES[sharding], self.pins.get(table.table), self.workload.shape
        if not kind.cuts_columns:
            return [(table.dim,)]
        if pin is not None and pin.columns is not None:
            return [pin.columns]
        if pin is not None and pin.ranks is not None:
            _, count = kind.blocks(len(pin.ranks), min(shape.ranks_per_node, len(pin.ranks)))
            even = even_columns(table.dim, count)
            return [even if self.may_be_uneven(table) else (table.dim // count,) * count]
        most = shape.world_size if more else kind.most_column_blocks(shape.world_size, shape.ranks_per_node)
        return self._even_cuts(table, most) or [(table.dim,)]

    def _even_cuts(self, table: TableSize, most: int) -> list[tuple[int, ...]]:
        """Return the equal cuts into up to so many blocks; where there are none, the most even ones."""
        counts = range(2, min(most, table.dim // LEAST_COLUMNS) + 1) if table.dim % COLUMN_MULTIPLE == 0 else ()
        cuts = [even_columns(table.dim, count) for count in counts]
        return [cut for cut in cuts if cut[0] == cut[-1]] or (cuts if self.may_be_uneven(table) else [])

    def may_be_uneven(self, table: TableSize) -> bool:
        """Return whether blocks of a table's columns may differ: not of sequences, which TorchRec cuts evenly, nor of
        tables that exchange rows, which are grouped by columns."""
        return not table.is_sequence and self.workload.shape.exchange != "rows"

    def may_be_copied(self, table: TableSize) -> bool:
        """Return whether each rank may have a copy of a sharded table in place of its shards."""
        is_asked = self.may_mix and COPIES in self.only.get(table.table, self.types or ())
        return is_asked and table.table not in self.pins and not table.is_sequence and not table.buckets

    def pinned(self, tables: Sequence[TablePlacement]) -> tuple[TablePlacement, ...]:
        """Return the placements with what is pinned of them."""
        return tuple(self.pins[each.table].placed(each) if each.table in self.pins else each for each in tables)

    def placed(self, placements: Sequence[TablePlacement]) -> tuple[TablePlacement, ...]:
        """Return the placements of all tables of the model, in its order: these, and the replicated ones; with what is
        pinned."""
        found = {placement.table: placement for placement in (*self.replicated, *placements)}
        return self.pinned([found[size.table] for size in self.workload.model.tables])

    def without_caches(self, tables: Sequence[TablePlacement]) -> tuple[TablePlacement, ...]:
        """Return the same places with all rows on the devices, but for tables that are pinned to caches."""
        return self.pinned([table.without_cache for table in tables])

    @property
    def may_be_resident(self) -> bool:
        """False if all rows cannot be on the devices, whatever the placement."""
        budget, needed = self.budget, sum(table.rows * table.row_bytes() for table in self.sharded)
        together = (budget.device_bytes or 0) * self.workload.shape.world_size - sum(budget.less_bytes)
        return self.may_mix and needed <= together

    def kernels(self, table: str, *, resident: bool, cached: bool) -> list[Kernel]:
        """Return the kernels that a table may have: the pinned one, or those of the asked."""
        pin = self.pins.get(table)
        if pin is not None and pin.kind is not None:
            return [pin.kind]
        asked: list[tuple[Kernel, bool]] = [("device", resident), ("cached", cached)]
        return [kernel for kernel, is_asked in asked if is_asked]

    @property
    def replicated(self) -> list[TablePlacement]:
        """Placements of the tables that every rank has a copy of."""
        return [
            TablePlacement(table.table, table.rows, table.dim, table.dtype, COPIES, "replicated", (), group=table.group)
            for table in self.workload.model.tables
            if self._is_replicated(table)
        ]
