"""`check_memory`: refuses a run that does not fit the machine, and says which change would make it fit."""

from __future__ import annotations

from collections.abc import Mapping

from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig
from embershard.training.fit.machine_limits import MachineLimits, MemoryChanges
from embershard.training.fit.memory_needs import MemoryNeeds, RanksHere, memory_needs
from embershard.training.fit.model_size import model_size, table_rows
from embershard.units import size

_USES = {
    "weights": "weights",
    "optimizer_states": "optimizer states",
    "rows_in_memory": "rows in front of files",
    "file_maps": "maps of rows in files",
    "scores": "scores of rows",
    "id_maps": "rows of ids",
    "slots": "slots of the caches",
    "maps": "maps of the caches",
    "rankings": "rankings of slots, for a moment",
    "device_tables": "tables without a cache",
    "replicated": "replicated tables",
    "hot_rows": "copies of hot rows",
    "marks": "marks of rows that changed (publish, checkpoint.full_every, sharding.groups)",
    "compared": "copies of tables without a cache (publish)",
    "dense": "dense layers",
    "activations": "activations",
    "input_buffers": "known batches",
    "publication": "blocks of rows on their way to files (publish)",
    "read_ahead": "batches read ahead",
    "known_batches": "known batches, not on the device",
    "runtime": "libraries at work",
    "reserve": "left free for the driver and torch",
}
_LEAST_SHOWN = 0.005  # of a sum


def check_memory(
    config: RunConfig, rows: Mapping[str, int], ranks: RanksHere, machine: MachineLimits, plan: Plan | None = None
) -> str:
    """Compare the memory that a run takes, with so many `rows` of each table, with what the machine has.

    The rule: what is taken at the start must fit, or the run is refused. Rows that are made when they are first used
    (`train.init = "counter"`) count only for the warning.

    Returns:
        A warning where the run fits only as long as not all rows are used; else an empty string.

    Raises:
        ConfigError: host memory, GPU memory or disk space does not suffice, or is more than a rank may use: with
            figures, and changes that fit.

    >>> from embershard.machine import HostMemory
    >>> ranks, machine = RanksHere(2, 2, "cpu"), MachineLimits(HostMemory(24 << 30, 20 << 30))
    >>> check_memory(RunConfig(), table_rows(RunConfig()), ranks, machine)
    ''
    """
    needs = memory_needs(config, rows, ranks, plan)
    who, need = _who(ranks.ranks_per_node)
    fitting = MemoryChanges(config, rows, ranks, machine, plan)
    has = machine.host
    left = f"{size(has.available_bytes)} of {size(has.total_bytes)} are available ({has.limit})"
    if needs.start_bytes > has.available_bytes:
        at_start = " before any row is used" if needs.lazy_bytes else ""
        raise ConfigError(
            f"This run does not fit: its {who} {need} {size(needs.start_bytes)} of host memory{at_start}"
            f", and {left}. {_figures(needs.host, config, rows)}. {fitting.text()}"
        )
    _check_devices(config, rows, ranks, machine, needs, fitting)
    if machine.disk_bytes is not None and needs.disk_bytes > machine.disk_bytes:
        raise ConfigError(
            f"This run does not fit: the rows of its {who} need {size(needs.disk_bytes)} of disk in "
            f"cache.host_dir={config.cache.host_dir!r}, and {size(machine.disk_bytes)} are free there. Choose a folder "
            f"on another disk. {fitting.text()}"
        )
    if needs.host_bytes > has.available_bytes:
        return (
            f"Rows take memory when they are first used. If all are, the {who} {need} {size(needs.host_bytes)}, and "
            f"{left}: the system would end the run. {_figures(needs.host, config, rows)}. {fitting.text()}"
        )
    return ""


def _who(count: int) -> tuple[str, str]:
    return (f"{count} ranks on this machine", "need") if count > 1 else ("one rank on this machine", "needs")


def _check_devices(
    config: RunConfig,
    rows: Mapping[str, int],
    ranks: RanksHere,
    machine: MachineLimits,
    needs: MemoryNeeds,
    fitting: MemoryChanges,
) -> None:
    if machine.device_bytes is not None and needs.device_bytes > machine.device_bytes:
        raise ConfigError(
            f"This run does not fit: a rank needs {size(needs.device_bytes)} of GPU memory, and "
            f"{size(machine.device_bytes)} are free. {_figures(needs.device, config, rows)}. {fitting.text()}"
        )
    if (short := machine.short_rank(needs)) is not None:
        limit = "sharding.device_bytes" if config.sharding.device_bytes is not None else "its plan"
        need = size(needs.bytes_by_rank[short])
        raise ConfigError(
            f"This run does not fit: rank {ranks.first + short} needs {need} of device memory, and may use "
            f"{size(machine.by_rank[short])} ({limit}). {_figures(needs.by_rank[short], config, rows)}. "
            f"{fitting.text()}"
        )


def check_memory_for_run(config: RunConfig, plan: Plan | None, ranks: Ranks) -> str:
    """Call `check_memory` on every rank, for its own machine. Collective.

    Returns:
        The first warning of a rank; the same on every rank.

    Raises:
        ConfigError: on every rank, if a machine does not suffice.
        ShardingError: the plan is for another model.
    """
    if plan is not None:
        tables = model_size(config, table_rows(config)).tables
        plan.check_model({table.table: (table.rows, table.dim, table.dtype) for table in tables})

    def check() -> str:
        machine = MachineLimits.here(config, ranks, plan)
        return check_memory(config, table_rows(config), RanksHere.of(ranks), machine, plan)

    warning = ranks.together(check, ConfigError)
    return next(filter(None, ranks.all_gather_objects(warning)), "")


def _figures(parts: Mapping[str, int], config: RunConfig, rows: Mapping[str, int]) -> str:
    """Return what the memory is for, the largest part first, and the largest table."""
    least = _LEAST_SHOWN * sum(parts.values())
    shown = sorted(((count, _USES[use]) for use, count in parts.items() if count >= least), reverse=True)
    largest = max(model_size(config, rows).tables, key=lambda table: table.rows * table.row_bytes())
    return (
        f"It is for {', '.join(f'{use} {size(count)}' for count, use in shown)}; the largest table is "
        f"{largest.table!r} with {largest.rows:,} rows of {largest.row_bytes()} bytes"
    )
