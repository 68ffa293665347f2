"""Differences of two plans as text: settings, placements, slots and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from embershard.sharding.plan import Plan, PoolPlacement, Prediction, TablePlacement
from embershard.units import size

_SIZES = ("world_size", "ranks_per_node", "batch_size", "device", "device_memory_bytes", "host_memory_bytes")


def diff_lines(before: Plan, after: Plan) -> list[str]:
    """Return one line per difference: sizes, settings, tables, pools, predictions, in this order."""
    return [
        *_values((name, getattr(before, name), getattr(after, name)) for name in _SIZES),
        *_settings(before, after),
        *_tables(before.tables, after.tables),
        *_pools(before.pools, after.pools),
        *_predictions(before.prediction, after.prediction),
    ]


def _values(values: Iterable[tuple[str, object, object]]) -> list[str]:
    return [f"{name}: {_or_none(old)} -> {_or_none(new)}" for name, old, new in values if old != new]


def _settings(before: Plan, after: Plan) -> list[str]:
    old, new = before.settings_by_name, after.settings_by_name
    return _values((name, old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys()))


def _tables(before: Sequence[TablePlacement], after: Sequence[TablePlacement]) -> Iterator[str]:
    old, new = ({table.table: table for table in tables} for tables in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            yield f"table {name}: removed (was {_placement(old[name])})"
        elif name not in old:
            yield f"table {name}: added, {_placement(new[name])}"
        elif old[name] != new[name]:
            pairs = [(say(old[name]), say(new[name])) for say in (_placement, _size)]
            yield f"table {name}: " + ", ".join(f"{was} -> {now}" for was, now in pairs if was != now)


def _placement(table: TablePlacement) -> str:
    rows = " exchanging rows" if table.exchange == "rows" else ""
    return f"{table.kernel} {table.sharding}{rows}" + (f" on {_ranks(table.ranks)}" if table.ranks else "")


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
    for what, old, new, say in values:
        if old != new:
            yield f"predicted {what}: {say(old)} -> {say(new)} ({_change(old, new)})"
    yield from _values([("predicted bottleneck", before.bottleneck, after.bottleneck)])


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
