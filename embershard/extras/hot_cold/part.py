"""What a run in the mode "hot_cold" finds out before it starts: its hot rows, and which samples need no others."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embershard.data import Source
from embershard.data.order.stream import SampleReader
from embershard.distributed import Ranks
from embershard.errors import ConfigError, DataError
from embershard.extras.hot_cold.hot_samples import Bits, HotRowsFilter, HotSamples
from embershard.extras.hot_cold.mode import announce_hot_batches
from embershard.frequency import FrequencyProfile, HotRows
from embershard.run_result import HotColdTotals
from embershard.training.checkpoint.identity import ORDER, identity_of
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import model_size, table_rows, tables_of_run
from embershard.training.parts.part import Part
from embershard.units import size

FILE = "hot_samples.npz"  # in the run's folder
#: Samples that are read at a time; a multiple of 8, so that their bits fill bytes.
_READ_AT_ONCE = 8192


@dataclass(frozen=True, eq=False)
class HotSet:
    """The hot rows of a run, and the training samples that look up no others."""

    rows: HotRows
    samples: HotSamples

    def describe(self) -> str:
        """Return a sentence for the first lines of a run."""
        return (
            f"Hot rows: {self.rows.total:,}, each looked up at least {self.rows.threshold:,} times in the profile "
            f"({size(self.rows.num_bytes)} on every rank). {self.samples.share:.1%} of the training samples look up no "
            "others."
        )


class HotCold(Part):
    """The mode "hot_cold": copies of the hot rows on every rank, and batches of their own for samples that need no
    others."""

    hot: HotSet | None = None

    def before_build(self, profile: FrequencyProfile | None) -> None:
        """Find the hot rows and samples."""
        run = self.run
        folder = run.checkpoints and run.checkpoints.parent
        self.hot = hot = find_hot_set(run.config, profile, run.source, run.ranks, folder)
        if hot is not None:
            rows = {table: torch.from_numpy(rows) for table, rows in hot.rows.rows.items()}
            self.sharder_options, self.stream_options = {"hot_rows": rows}, {"hot": hot.samples}
            self.identity = {ORDER: f"hot_cold {hot.samples.digest[:12]}"}

    def after_build(self) -> None:
        """Have the tables take rows of hot batches from their copies."""
        if self.hot is not None:
            announce_hot_batches(self.run.model)

    def notes(self) -> list[str]:
        return [] if self.hot is None else [self.hot.describe()]

    def report_entries(self) -> dict[str, Any]:
        schedule = self.run.stream.schedule
        return {} if schedule is None else {"batches": dict(schedule.num_trained)}

    def result(self) -> dict[str, Any]:
        hot, schedule = self.hot, self.run.stream.schedule
        if hot is None or schedule is None:
            return {}
        found = HotColdTotals(
            threshold=hot.rows.threshold,
            hot_rows=hot.rows.total,
            hot_bytes=hot.rows.num_bytes,
            hot_samples=hot.samples.share,
            batches=dict(schedule.num_trained),
            rate=schedule.rate,
        )
        return {"hot_cold": found}


def find_hot_rows(config: RunConfig, profile: FrequencyProfile, most_bytes: int) -> HotRows:
    """Choose the hot rows of a run's model.

    Raises:
        ConfigError: the profile is of other tables, or not even the most frequent rows fit.
    """
    if any(len(table.features) > 1 or table.is_sequence for table in tables_of_run(config)):
        raise ConfigError(
            f"hot rows of the model {config.model.title!r}: got tables of several features, or of sequences; needed a "
            "model with one table of bags for each feature."
        )
    rows = table_rows(config)
    for table, count in rows.items():
        profile.shard(table, count, 0, 0)  # refuses another table
    row_bytes = {table.table: table.row_bytes() for table in model_size(config, rows).tables}
    return HotRows.choose(profile, row_bytes, most_bytes)


def find_hot_set(
    config: RunConfig, profile: FrequencyProfile | None, source: Source, ranks: Ranks, run_dir: Path | None
) -> HotSet | None:
    """Find the hot rows and samples of a run; None in other modes. The same on every rank. Collective.

    Ranks share the samples. The file of an earlier part of the run is used if it is of the same data and hot rows.

    Args:
        run_dir: folder of the run, shared by all ranks; None: nothing is kept.

    Raises:
        ConfigError: see `find_hot_rows`.
        DataError: the data cannot be read, by this rank or by another one; or a folder is where the file belongs.
    """
    if config.sharding.hot_bytes is None or profile is None:
        return None
    rows = find_hot_rows(config, profile, config.sharding.hot_bytes)

    def make_digest() -> str:
        identity = identity_of(config, ranks.world_size)
        data = {key: value for key, value in identity.items() if key.startswith("data.")}
        return hashlib.sha256(json.dumps([data, rows.digest], sort_keys=True).encode()).hexdigest()

    digest = ranks.from_first(make_digest)
    path = None if run_dir is None else run_dir / FILE
    if path is not None and ranks.from_first(lambda: _is_of(path, digest)):
        return HotSet(rows, HotSamples.load(path))
    bits = _all_bits(config, source, ranks, HotRowsFilter(list(rows.rows.values())))
    samples = HotSamples(bits, source.chunks("train").num_samples, digest)
    if path is not None:
        ranks.from_first(lambda: samples.save(path))
    return HotSet(rows, samples)


def _is_of(path: Path, digest: str) -> bool:
    try:
        return path.exists() and HotSamples.load(path).digest == digest
    except DataError:
        if path.is_dir():  # which no file replaces
            raise
        return False  # it is made again


def _all_bits(config: RunConfig, source: Source, ranks: Ranks, rows: HotRowsFilter) -> Bits:
    total = source.chunks("train").num_samples
    of_rank = -(-total // (8 * ranks.world_size)) * 8
    start = min(total, ranks.rank * of_rank)

    def own_bits() -> Bits:
        reader = SampleReader(source, "train", replace(config.data, shuffle=False))  # in the order of the files
        blocks = reader.blocks(min(total, start + of_rank), _READ_AT_ONCE, start)
        return np.concatenate([np.empty(0, np.uint8), *(np.packbits(rows.hot_samples(block)) for block in blocks)])

    mine = torch.from_numpy(ranks.together(own_bits, DataError))
    return ranks.all_gather_rows(mine.to(ranks.device)).cpu().numpy()
