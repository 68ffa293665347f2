"""Differences of two plans as text: settings, placements, slots and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from embershard.sharding.plan import Plan, PoolPlacement, Prediction, TablePlacement
from embershard.sharding.shards import shards_of
from embershard.units import size

_SIZES = (
    "world_size",
    "ranks_per_node",
    "batch_size",
    "device",
    "device_memory_bytes",
    "memory_bytes_by_rank",
    "host_memory_bytes",
)
_MOST_RENAMED = 16
#: What moves in a step, of all ranks: the kinds of work that it is the sum of, and how it is written.
_MOVED: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("fills a step", ("fills",), "{:,.1f}".format),
    ("write-backs a step", ("write_backs",), "{:,.1f}".format),
    ("bytes between host and devices a step", ("bytes_to_device", "bytes_to_host"), size),
    (
        "bytes between ranks a step, for tables",
        tuple(f"{where}_{kind}_bytes" for where in ("sent", "network") for kind in ("id", "embedding", "gradient")),
        size,
    ),
)


def diff_lines(before: Plan, after: Plan) -> list[str]:
    """Return one line per difference: sizes, settings, tables, pools, predictions, in this order. Where the ranks have
    the same shards under other numbers, one line says so in place of one for each table and pool."""
    of_rank = renamed_ranks(before, after)
    tables = [replace(table, ranks=tuple(of_rank[rank] for rank in table.ranks)) for table in before.tables]
    pools = [replace(pool, rank=of_rank[pool.rank]) for pool in before.pools]
    moved = [f"{old} -> {new}" for old, new in of_rank.items() if old != new]
    renamed = ", ".join(moved[:_MOST_RENAMED]) + (", ..." if len(moved) > _MOST_RENAMED else "")
    was, now = before.settings, after.settings
    return [
        *_values((name, getattr(before, name), getattr(after, name)) for name in _SIZES),
        *_values((name, was.get(name), now.get(name)) for name in sorted(was.keys() | now.keys())),
        *([f"the same placement, ranks renamed: {renamed}"] if moved else []),
        *_tables(tables, after.tables),
        *_pools(pools, after.pools),
        *_predictions(before.prediction, after.prediction),
        *_values([("bound", before.bound and before.bound.sentence, after.bound and after.bound.sentence)]),
    ]


def renamed_ranks(before: Plan, after: Plan) -> dict[int, int]:
    """Return for each rank of a plan the rank that has the same shards in the other one: itself, unless all ranks have
    a counterpart, and those of a node are on one node there, too."""
    same = {rank: rank for rank in range(before.world_size)}
    if (before.world_size, before.ranks_per_node) != (after.world_size, after.ranks_per_node):
        return same
    old, new = _ranks_by_node(before), _ranks_by_node(after)
    if [[rank.shards for rank in node] for node in old] != [[rank.shards for rank in node] for node in new]:
        return same
    pairs = [pair for nodes in zip(old, new, strict=True) for pair in zip(*nodes, strict=True)]
    return dict(sorted((one.rank, other.rank) for one, other in pairs))


class _RankContent(NamedTuple):
    """What a rank holds; ranks are sorted by it, those that hold the same by their caches' sizes, then by number."""

    shards: list[tuple[str | int, ...]]
    pools: list[tuple[str | int, ...]]
    rank: int


def _ranks_by_node(plan: Plan) -> list[list[_RankContent]]:
    """Return the ranks of every node; both in the order of what they hold."""
    ranks = [_RankContent([], [], rank) for rank in range(plan.world_size)]
    for table in plan.tables:
        placement = tuple(value for name, value in vars(table).items() if name != "ranks")
        for shard in shards_of(table, plan.ranks_per_node):
            part = (shard.first_row, shard.rows, shard.first_column, shard.columns)
            ranks[shard.rank].shards.append((*placement, *part))
    for pool in plan.pools:
        ranks[pool.rank].pools.append((pool.sharding, pool.dim, *pool.tables, pool.slots))
    for rank in ranks:
        rank.shards.sort()
        rank.pools.sort(key=str)
    nodes = [ranks[first : first + plan.ranks_per_node] for first in range(0, plan.world_size, plan.ranks_per_node)]
    return sorted((sorted(node) for node in nodes), key=lambda node: [rank.shards for rank in node])


def _values(values: Iterable[tuple[str, object, object]]) -> list[str]:
    return [f"{name}: {_or_none(old)} -> {_or_none(new)}" for name, old, new in values if old != new]


def _tables(before: Sequence[TablePlacement], after: Sequence[TablePlacement]) -> Iterator[str]:
    old, new = ({table.table: table for table in tables} for tables in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            yield f"table {name}: removed (was {placement_of(old[name])})"
        elif name not in old:
            yield f"table {name}: added, {placement_of(new[name])}"
        elif old[name] != new[name]:
            pairs = [(say(old[name]), say(new[name])) for say in (placement_of, _size)]
            yield f"table {name}: " + ", ".join(f"{was} -> {now}" for was, now in pairs if was != now)


def placement_of(table: TablePlacement) -> str:
    """Return a place in words: `cached row_wise on ranks 0-7`."""
    rows = " exchanging rows" if table.exchange == "rows" else ""
    columns = f" of {'+'.join(map(str, table.columns))} columns" if table.columns else ""
    return f"{table.kernel} {table.sharding}{columns}{rows}" + (f" on {_ranks(table.ranks)}" if table.ranks else "")


def _size(table: TablePlacement) -> str:
    return f"{table.rows} rows x {table.dim} {table.dtype}"


def _pools(before: Sequence[PoolPlacement], after: Sequence[PoolPlacement]) -> list[str]:
    """Compare pools with the same tables by their slots. If each side has one more pool of a kind, its tables changed.
    The same change on several ranks is one line."""
    old, new = (_by_kind(pools) for pools in (before, after))
    ranks_of: dict[str, list[int]] = {}
    for kind in sorted(old.keys() | new.keys()):
        for line in _pool_changes(old.get(kind, {}), new.get(kind, {})):
            ranks_of.setdefault(f"{kind[1]} pool of dim {kind[2]}{line}", []).append(kind[0])
    return [f"{_ranks(ranks)}: {line}" for line, ranks in ranks_of.items()]


def _by_kind(pools: Sequence[PoolPlacement]) -> dict[tuple[int, str, int], dict[tuple[str, ...], int]]:
    """Rank, sharding type and columns -> tables -> slots."""
    kinds: dict[tuple[int, str, int], dict[tuple[str, ...], int]] = {}
    for pool in pools:
        kinds.setdefault((pool.rank, pool.sharding, pool.dim), {})[pool.tables] = pool.slots
    return kinds


def _pool_changes(old: dict[tuple[str, ...], int], new: dict[tuple[str, ...], int]) -> Iterator[str]:
    for tables in sorted(old.keys() & new.keys()):
        if old[tables] != new[tables]:
            yield f" ({_tables_of(tables)}): {_slots(old[tables], new[tables])}"
    gone, come = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if len(gone) == len(come) == 1:
        lost, got = (sorted(set(a) - set(b)) for a, b in ((gone[0], come[0]), (come[0], gone[0])))
        moves = [f"+{name}" for name in got] + [f"-{name}" for name in lost]
        yield f": {' '.join(moves)}, {_slots(old[gone[0]], new[come[0]])}"
        return
    for tables in gone:
        yield f" ({_tables_of(tables)}): removed (was {old[tables]:,} slots)"
    for tables in come:
        yield f" ({_tables_of(tables)}): added, {new[tables]:,} slots"


def _tables_of(tables: Sequence[str]) -> str:
    return ", ".join(tables) if len(tables) <= 3 else f"{tables[0]}, {tables[1]} and {len(tables) - 2} more"


def _slots(old: int, new: int) -> str:
    return f"{old:,} -> {new:,} slots ({_change(old, new)})" if old != new else f"{old:,} slots"


def _predictions(before: Prediction | None, after: Prediction | None) -> Iterator[str]:
    if before is None or after is None:
        if (before is None) != (after is None):
            yield f"predictions: only the {'second' if before is None else 'first'} plan has them"
        return
    values: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("step", before.step_seconds, after.step_seconds, lambda seconds: f"{seconds * 1e3:,.2f} ms"),
        ("samples per second", before.samples_per_second, after.samples_per_second, "{:,.2f}".format),
        ("device memory of the fullest rank", before.most_device_bytes, after.most_device_bytes, size),
        ("host memory of all ranks", _host_bytes(before), _host_bytes(after), size),
    ]
    values += [(what, _sum(before, names), _sum(after, names), say) for what, names, say in _MOVED]
    for what, old, new, say in values:
        if old != new:
            yield f"predicted {what}: {say(old)} -> {say(new)} ({_change(old, new)})"
    was, now = before.hit_rate_lookups, after.hit_rate_lookups
    if was != now:
        points = "" if was is None or now is None else f" ({100 * (now - was):+.2f} points)"
        pair = ["none" if rate is None else f"{rate:.2%}" for rate in (was, now)]
        yield f"predicted hits of lookups: {pair[0]} -> {pair[1]}{points}"
    yield from _values([("predicted bottleneck", before.bottleneck, after.bottleneck)])


def _sum(prediction: Prediction, names: Sequence[str]) -> float:
    """Return the work of all ranks in a step, of these kinds."""
    return sum(rank.work.get(name, 0.0) for rank in prediction.ranks for name in names)


def _host_bytes(prediction: Prediction) -> int:
    return sum(rank.total_host_bytes for rank in prediction.ranks)


def _change(old: float, new: float) -> str:
    return f"{(new - old) / old:+.1%}" if old else "was none"


def _or_none(value: object) -> str:
    return "none" if value is None else str(value)


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7`, `ranks 1, 4`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks)
