"""`MachineLimits`: the memory and the disk space that a run can take, and changes of its settings that make it fit."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from embershard.distributed import Ranks, check_disk
from embershard.errors import ConfigError
from embershard.machine import HostMemory, host_memory
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.fit.memory_needs import MemoryNeeds, RanksHere, memory_needs
from embershard.training.fit.model_size import model_size, table_rows
from embershard.units import size


@dataclass(frozen=True)
class MachineLimits:
    """What a run can take on this machine.

    Attributes:
        device_bytes: free memory of a rank's GPU; None without one.
        disk_bytes: free space in `cache.host_dir`; None where there is no such folder in the settings.
        by_rank: device memory that each rank here may use, [ranks here]; empty: all that there is.
    """

    host: HostMemory
    device_bytes: int | None = None
    disk_bytes: int | None = None
    by_rank: tuple[int, ...] = ()

    @classmethod
    def here(cls, config: RunConfig, ranks: Ranks, plan: Plan | None) -> MachineLimits:
        """Return what this machine has left for a rank, and what the settings or the plan let each rank here use. (GPU
        memory was never read on a GPU yet.)

        Raises:
            ConfigError: the settings' limits are for other ranks.
        """
        device, first = ranks.device, ranks.rank - ranks.local_rank
        limits = config.sharding.device_limits(ranks.world_size) or (plan.device_limits if plan else ())
        is_gpu, folder = device.type == "cuda", config.cache.host_dir
        return cls(
            host_memory(),
            torch.cuda.mem_get_info(device)[0] if is_gpu else None,
            None if folder is None else shutil.disk_usage(nearest_folder(Path(folder))).free,
            limits[first : first + ranks.local_world_size],
        )

    def has_room_for(self, needs: MemoryNeeds) -> bool:
        """Return True if everything fits, all rows used."""
        return (
            needs.host_bytes <= self.host.available_bytes
            and (self.device_bytes is None or needs.device_bytes <= self.device_bytes)
            and (self.disk_bytes is None or needs.disk_bytes <= self.disk_bytes)
            and self.short_rank(needs) is None
        )

    def short_rank(self, needs: MemoryNeeds) -> int | None:
        """Return the rank here, from 0, that needs most above what it may use of its device; None: all have enough."""
        pairs = zip(needs.bytes_by_rank, self.by_rank, strict=True) if self.by_rank else ()
        excess = [taken - limit for taken, limit in pairs]
        most = max(excess, default=0)
        return excess.index(most) if most > 0 else None


def larger_limit(config: RunConfig, ranks: Ranks, plan: Plan | None) -> str:
    """Return the setting, with a blank before it, by which a rank here may use what a run needs; empty where it may."""
    needs = memory_needs(config, table_rows(config), RanksHere.of(ranks), plan)
    is_short = MachineLimits.here(config, ranks, plan).short_rank(needs) is not None
    return f" --set sharding.device_bytes={max(needs.bytes_by_rank)}" if is_short else ""


def disk_of(folder: Path) -> int:
    """Return the number of the file system that a folder is on, or will be."""
    return nearest_folder(folder).stat().st_dev


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))


_MOST_MACHINES = 16
_HALVINGS = 24


class MemoryChanges:
    """Finds changes each of which makes a run fit, all its rows used."""

    def __init__(
        self, config: RunConfig, rows: Mapping[str, int], ranks: RanksHere, machine: MachineLimits, plan: Plan | None
    ) -> None:
        self._config, self._rows, self._ranks, self._machine, self._plan = config, rows, ranks, machine, plan

    def text(self) -> str:
        """Return all of them in a sentence, those first that change no result."""
        found = list(self._all())
        fitting = (
            f"Each of these fits: {'; '.join(found)}." if found else "No single change of the settings makes it fit."
        )
        if self._plan is not None:  # it decides the rest
            fitting += " Or plan for this machine: embershard plan --host-memory, --device-memory."
        return fitting

    def _all(self) -> Iterator[str]:
        config, cache = self._config, self._config.cache
        if cache.enabled and cache.host == "memory" and cache.transfer != "triton_uva":
            yield from self._in_files()
        if cache.host != "memory":
            yield from self._in_memory()
        yield from self._with_larger_limits()
        depths = config.look_ahead
        if config.lookahead > depths.prefetch and (most := self._most(self._with_lookahead, depths.lookahead)):
            yield f"--set look_ahead.lookahead={self._with_lookahead(most).lookahead}"
        if self._plan is not None:
            return
        if cache.device_bytes is None and (ratio := self._most(self._with_ratio, cache.slot_ratio or 1.0)):
            yield f"--set cache.ratio={ratio:g}" + ("" if cache.enabled else " --set cache.enabled=true")
        yield from self._smaller_rows()
        yield from self._fewer_rows()
        if (machines := self._machines()) is not None:
            yield f"{machines} machines like this one"

    def _in_memory(self) -> Iterator[str]:
        """Yield settings by which rows are in memory, and not on a disk, where that fits."""
        cache = replace(self._config.cache, host="memory", host_dir=None, host_bytes=None)
        if self._machine.has_room_for(self._needs(replace(self._config, cache=cache))):
            in_front = " --set cache.host_bytes=none" if self._config.cache.host_bytes is not None else ""
            yield f"--set cache.host=memory --set cache.host_dir=none{in_front}"

    def _with_larger_limits(self) -> Iterator[str]:
        """Yield the device memory that each rank needs, where no more than a setting or the plan limits it."""
        needs = self._needs(self._config)
        is_short = self._machine.short_rank(needs) is not None
        if is_short and replace(self._machine, by_rank=()).has_room_for(needs):
            yield f"--set sharding.device_bytes={max(needs.bytes_by_rank)}"

    def _in_files(self) -> Iterator[str]:
        """Yield settings by which rows are on a disk, where the rest fits."""
        config, needs = self._config, self._needs(self._config)
        rows_bytes = needs.host["weights"] + needs.host["optimizer_states"]
        of_file = {"host_bytes": max(1, rows_bytes // 4 // self._ranks.ranks_per_node)}
        changes: list[dict[str, Any]] = [{"host": "file", **of_file}, {"host": "mmap"}]
        for changed in changes:
            with suppress(ConfigError):  # with other settings of the run
                needs = self._needs(replace(config, cache=replace(config.cache, host_dir=".", **changed)))
                if self._machine.has_room_for(needs):
                    settings = " ".join(f"--set cache.{name}={value}" for name, value in changed.items())
                    yield f"{settings} --set cache.host_dir=FOLDER, on a disk with {size(needs.disk_bytes)} free"
                    return

    def _smaller_rows(self) -> Iterator[str]:
        """Yield settings by which rows take fewer bytes, where these fit."""
        config = self._config
        if config.model.table_dtype != "fp32" or config.cache.rounds_rows:
            return
        for part, name, value in (
            ("cache", "host_dtype", "int8"), ("cache", "host_dtype", "fp16"), ("model", "table_dtype", "fp16")
        ):  # fmt: skip
            if part == "cache" and (self._ranks.device != "cpu" or not config.cache.enabled):
                continue
            with suppress(ConfigError):  # with other settings of the run; int8 needs a profile
                changed = replace(config, **{part: replace(getattr(config, part), **{name: value})})
                if self._machine.has_room_for(self._needs(changed)):
                    yield f"--set {part}.{name}={value}"

    def _fewer_rows(self) -> Iterator[str]:
        data = self._config.data
        if data.kind == "synthetic":
            if data.has_ids:  # by the scale, other tables would take ids
                return
            if scale := self._most(self._with_scale, data.synthetic.scale):
                total = sum(table_rows(self._with_scale(scale)).values())
                yield f"--set data.synthetic.scale={scale:g} ({total:,} of {sum(self._rows.values()):,} rows)"
        elif most := self._most(self._with_most_rows, max(self._rows.values())):
            of_features = "features.NAME." if data.kind == "table" else ""
            yield f"no table with more than {int(most):,} rows (data.{data.kind}.{of_features}num_rows)"

    def _machines(self) -> int | None:
        """Return the least number of machines that fits, of those whose ranks can share the batch; else None."""
        ranks = self._ranks
        if self._config.sharding.mode == "data_parallel":  # runs on one
            return None
        if isinstance(self._config.sharding.device_bytes, tuple):  # they are for these ranks
            return None
        for count in range(ranks.world_size // ranks.ranks_per_node + 1, _MOST_MACHINES + 1):
            more = replace(ranks, world_size=count * ranks.ranks_per_node, first=0)
            try:
                needs = memory_needs(self._config, self._rows, more, None)
            except ConfigError:
                continue
            if self._machine.has_room_for(needs):
                return count
        return None

    def _most(self, changed: Callable[[float], RunConfig | Mapping[str, int]], now: float) -> float:
        """Return the largest number that fits: `now`, or one below it, of two digits; 0 if none does. `changed` returns
        a config with it, or tables' rows."""
        if self._machine.has_room_for(self._needs(changed(now))):
            return now
        low, high = 0.0, now
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._machine.has_room_for(self._needs(changed(middle))):
                low = middle
            else:
                high = middle
        if not low:
            return 0.0
        digit = 10.0 ** (math.floor(math.log10(low)) - 1)
        return math.floor(low / digit) * digit

    def _with_ratio(self, ratio: float) -> RunConfig:
        return replace(self._config, cache=replace(self._config.cache, enabled=True, ratio=ratio))

    def _with_lookahead(self, lookahead: float) -> RunConfig:
        depths = self._config.look_ahead
        known = max(depths.prefetch, int(lookahead))
        return replace(self._config, look_ahead=replace(depths, lookahead=known))

    def _with_scale(self, scale: float) -> RunConfig:
        data = self._config.data
        return replace(self._config, data=replace(data, synthetic=replace(data.synthetic, scale=scale)))

    def _with_most_rows(self, most: float) -> Mapping[str, int]:
        return {name: max(2, min(count, int(most))) for name, count in self._rows.items()}

    def _needs(self, changed: RunConfig | Mapping[str, int]) -> MemoryNeeds:
        if isinstance(changed, RunConfig):
            rows = self._rows if changed.data is self._config.data else table_rows(changed)
            return memory_needs(changed, rows, self._ranks, self._plan)
        return memory_needs(self._config, changed, self._ranks, self._plan)


#: Row, age and score of a cached row.
_CACHED_ROW_BYTES = 16


def check_disk_for_run(
    config: RunConfig, plan: Plan | None, folder: Path, total_steps: int | None, ranks: Ranks, of_parts: int = 0
) -> None:
    """Raise unless all checkpoints of a run of so many steps, or of steps without end, can be written to `folder`.
    Collective.

    Args:
        of_parts: bytes that the run's parts will take on the same disk.

    Raises:
        CheckpointError: with the space that is needed, and that there is.
    """
    total_steps = sys.maxsize if total_steps is None else total_steps
    num_saves = total_steps if config.keeps_best else config.checkpoint.num_saves(total_steps)
    if not num_saves:
        return
    rows = table_rows(config)
    size = model_size(config, rows)
    delta_bytes = size.dense_state_bytes  # gradients are not saved, parameters are
    if config.cache.enabled:
        ratio = config.cache.slot_ratio or 1
        slots = round(size.num_rows * ratio) if plan is None else sum(pool.slots for pool in plan.pools)
        delta_bytes += slots * _CACHED_ROW_BYTES
    save_bytes = delta_bytes + size.table_bytes
    save_bytes += sum(rules.saved_row_bytes * rows[table] for table, rules in id_rules(config).items())
    mapped_bytes, rows_folder = of_parts, config.cache.host_dir
    if rows_folder is not None and disk_of(Path(rows_folder)) == disk_of(folder):
        mapped_bytes += memory_needs(config, rows, RanksHere.of(ranks), plan).disk_bytes
    checkpoint = config.checkpoint
    check_disk(
        folder,
        save_bytes,
        num_saves,
        checkpoint.keep_last,
        ranks,
        mapped_bytes=mapped_bytes,
        full_every=checkpoint.full_every,
        delta_bytes=delta_bytes,
        keeps_best=config.keeps_best,
    )
