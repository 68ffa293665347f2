"""One pass over the training data, in several processes or on Ray: from a data source to a profile."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from embershard.cache.ids.config import Buckets
from embershard.data import DataConfig, open_source
from embershard.data.block import Block
from embershard.data.order.order import EpochOrder
from embershard.data.sources.held_out import HeldOut, alone
from embershard.errors import ConfigError, SetupError
from embershard.frequency import FrequencyProfile
from embershard.frequency.collect import Collected, Collector, CountedSamples, count_part
from embershard.frequency.compare import half_split
from embershard.frequency.curves import pooled, unseen_share
from embershard.frequency.downsampling import SampledRows
from embershard.lazy_names import named
from embershard.models import ModelConfig, model_tables

T = TypeVar("T")
#: Samples of a part, which a process counts at a time; fewer where samples have many lookups.
PART_SAMPLES = 65_536
_PART_LOOKUPS = 8_000_000
_LEAST_PART_SAMPLES = 1024
_PROBED_SAMPLES = 64
#: The least number of parts that shows how much of a sample's result is chance.
_SAMPLED_PARTS = 8
#: Share of the rows for which a sample's error is stated.
_ERROR_SHARE = 0.015


@dataclass(frozen=True)
class PassOptions:
    """Options of a pass."""

    num_workers: int = 1  # processes; 1 counts in this one
    sample: float = 1.0  # share of the training samples to read
    max_lookups: int = 4_000_000  # most lookups to keep in the trace
    memory_bytes: int = 4 << 30  # about how much memory the counts may take
    on_ray: bool = False  # in tasks of a Ray cluster, in place of processes

    def __post_init__(self) -> None:
        for name, low in (("num_workers", 1), ("max_lookups", 1000), ("memory_bytes", 1 << 20)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} = {getattr(self, name)}; needed at least {low}.")
        if not 0 < self.sample <= 1:
            raise ConfigError(f"sample = {self.sample}; needed a share of the samples in (0, 1], for instance 0.01.")


class PartReader:
    """Reads and counts ranges of positions in epoch 0's order, the order in which the trainer will read.

    Args:
        config: of the data.
        model: its tables are counted; None: a table for each feature.
        ids: buckets of the tables that take any id, by name: see `rows_of_ids`.
        held_out: of the same data, where that is known.
    """

    def __init__(
        self,
        config: DataConfig,
        model: ModelConfig | None = None,
        held_out: HeldOut | None = None,
        ids: Mapping[str, Buckets] | None = None,
    ) -> None:
        self._source = open_source(config, share=alone if held_out is None else lambda _: held_out)
        self.held_out, self.model = self._source.held_out, model or ModelConfig()
        chunks = self._source.chunks("train")
        self.num_samples = chunks.num_samples
        tables, keys = model_tables(self.model, self._source.schema), self._source.schema.keys
        self.num_rows = {table.name: table.num_rows for table in tables}
        self.ids = dict(ids or {})
        self._features = [[keys.index(feature) for feature in table.features] for table in tables]
        window = config.shuffle_window
        self._order = EpochOrder(chunks, seed=config.seed, epoch=0, shuffle=config.shuffle, window=window)

    def read(self, start: int, stop: int) -> list[Block]:
        """Read positions [start, stop)."""
        return [self._source.read("train", chunk, rows) for chunk, rows in self._order.locate(start, stop)]

    def count(self, start: int, stop: int, sampled: SampledRows | None = None) -> CountedSamples:
        """Count positions [start, stop)."""
        began = time.process_time()
        blocks = self.read(start, stop)
        seconds = time.process_time() - began
        sizes = [_bags(blocks, features) for features in self._features]
        rows = (
            _rows(blocks, features) if table not in self.ids else rows_of_ids(_rows(blocks, features), self.ids[table])
            for table, features in zip(self.num_rows, self._features, strict=True)
        )
        return count_part(list(self.num_rows.values()), rows, sizes, stop - start, sampled, seconds)

    def part_samples(self) -> int:
        """Return the number of samples per part that bounds the memory of a part."""
        probed = self.count(0, min(_PROBED_SAMPLES, self.num_samples))
        per_sample = sum(table.counts.num_lookups for table in probed.tables) / max(probed.num_samples, 1)
        size = PART_SAMPLES
        while size > _LEAST_PART_SAMPLES and size * per_sample > _PART_LOOKUPS:
            size //= 2
        return size


def profile_data(
    data: DataConfig,
    options: PassOptions,
    on_progress: Callable[[int, int], None] | None = None,
    reader: PartReader | None = None,
) -> FrequencyProfile:
    """Count the training samples of `data`; `reader` is of the same data, where they are open already.

    `on_progress` gets the number of samples counted and of those to count, after every part.

    Raises:
        DataError, ConfigError: the data or their settings are wrong.
        SetupError: a process ended by itself.
    """
    reader = reader or PartReader(data)
    ranges = part_ranges(reader.num_samples, options.sample, reader.part_samples())
    to_count = sum(stop - start for start, stop in ranges)
    in_halves = options.sample < 1
    collector = Collector(
        reader.num_rows, max_lookups=options.max_lookups, memory_bytes=options.memory_bytes, in_halves=in_halves
    )
    done = 0
    make = partial(_make_counter, dataclasses.replace(data, num_workers=0), reader.model, reader.held_out, reader.ids)
    for part in in_parts(ranges, options, make, reader.count, lambda: (collector.sampled,)):
        collector.add(part)
        done += part.num_samples
        if on_progress is not None:
            on_progress(done, to_count)
    where = "" if data.path is None else f" {data.path}"
    order = f"in the order of epoch 0, seed {data.seed}" if data.shuffle else "in the order of the files"
    estimate = f"; an estimate for {', '.join(reader.ids)}, whose ids are hashed onto rows" if reader.ids else ""
    origin = f"{data.kind} data{where}, training samples {order}{estimate}"
    collected = collector.finish(share_of_samples=to_count / max(reader.num_samples, 1), origin=origin)
    if collected.halves is not None:
        collected = _with_error(collected)
    return FrequencyProfile.of_sparse(reader.num_rows, collected.counts, collector.num_parts, collected.statistics)


def part_ranges(num_samples: int, sample: float, part_samples: int) -> list[tuple[int, int]]:
    """Return ranges [start, stop) of positions: all of them, or a share `sample` in evenly spread ranges.

    >>> part_ranges(10, 1.0, part_samples=4)
    [(0, 4), (4, 8), (8, 10)]
    """
    if sample >= 1:
        return [(start, min(start + part_samples, num_samples)) for start in range(0, num_samples, part_samples)]
    wanted = max(1, round(num_samples * sample))
    count = max(min(_SAMPLED_PARTS, wanted), -(-wanted // part_samples))
    ranges = []
    for number in range(count):
        start = number * num_samples // count
        ranges.append((start, start + wanted * (number + 1) // count - wanted * number // count))
    return ranges


def rows_of_ids(ids: NDArray[np.int64], buckets: Buckets) -> NDArray[np.int64]:
    """Return a row [N] for each id, as an estimate: of the id's bucket, as in training; which one, a hash says. In
    training it is a matter of what came before, and ids without a row share the bucket's first.

    >>> rows_of_ids(np.array([7, -7, 7]), Buckets(num_buckets=24, rows=10, reserve=2)) // 10
    array([ 4, 19,  4])
    """
    from embershard.cache.ids.id_map import mixed

    words = mixed(ids).view(np.uint64)
    bucket, rest = words % np.uint64(buckets.num_buckets), words // np.uint64(buckets.num_buckets)
    return (bucket * np.uint64(buckets.rows) + rest % np.uint64(buckets.rows - 1) + np.uint64(1)).view(np.int64)


def _bags(blocks: list[Block], features: Sequence[int]) -> int | NDArray[np.integer]:
    """Return how many rows each sample looks up in the table of these features: one number where it is the same."""
    sizes = [_bag_sizes(blocks, feature) for feature in features]
    return sizes[0] if len(sizes) == 1 else np.sum(np.broadcast_arrays(*sizes), axis=0)


def _rows(blocks: list[Block], features: Sequence[int]) -> NDArray[np.int64]:
    """Return the rows that samples look up in the table of these features, in the order of the samples."""
    rows = np.concatenate([block.values[feature] for feature in features for block in blocks])
    if len(features) == 1:
        return rows
    num_samples = sum(block.num_samples for block in blocks)
    samples = [np.repeat(np.arange(num_samples), _bag_sizes(blocks, feature)) for feature in features]
    return rows[np.argsort(np.concatenate(samples), kind="stable")]


def _bag_sizes(blocks: list[Block], feature: int) -> int | NDArray[np.integer]:
    """Return the ids per sample of a feature: one number if all samples have equally many."""
    sizes = [block.lengths[feature] for block in blocks]
    if all(isinstance(size, int) for size in sizes) and len(set(sizes)) == 1:
        return int(sizes[0])
    pairs = zip(sizes, blocks, strict=True)
    return np.concatenate([np.broadcast_to(size, block.num_samples) for size, block in pairs])


def _make_counter(
    config: DataConfig, model: ModelConfig, held_out: HeldOut, ids: Mapping[str, Buckets]
) -> Callable[[int, int, SampledRows], CountedSamples]:
    return PartReader(config, model, held_out, ids).count


_work: Callable[..., Any] | None = None


def _open(make: Callable[[], Callable[..., Any]]) -> None:
    global _work
    _work = make()


def _run(*arguments: Any) -> Any:
    assert _work is not None
    return _work(*arguments)


def in_parts(
    ranges: list[tuple[int, int]],
    options: PassOptions,
    make: Callable[[], Callable[..., T]],
    here: Callable[..., T],
    others: Callable[[], tuple[Any, ...]] = tuple,
) -> Iterator[T]:
    """Yield what a function of (start, stop) returns for each range, in their order, computed by several processes, or
    by tasks of a Ray cluster.

    At most two ranges per process are in work or wait.

    Args:
        options: where, and by how many processes.
        make: returns the function in a process of its own; both are pickled.
        here: the same function in this process, for one worker.
        others: returns further arguments, when a range is given out.

    Raises:
        SetupError: a process ended by itself.
    """
    if options.on_ray:
        yield from named("embershard.extras.sweep_engines.on_ray:in_parts_on_ray")(ranges, make, others)
        return
    num_workers = min(options.num_workers, len(ranges))
    if num_workers <= 1:
        for start, stop in ranges:
            yield here(start, stop, *others())
        return
    # Processes are forked from one that has imported the slow modules and has no threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(num_workers, context, _open, (make,))
    waiting, left = deque[Future[T]](), iter(ranges)
    try:
        while True:
            while len(waiting) < 2 * num_workers and (part := next(left, None)) is not None:
                waiting.append(pool.submit(_run, *part, *others()))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise SetupError(
            f"one of {num_workers} counting processes ended by itself, probably for lack of memory; "
            "use fewer with --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _with_error(collected: Collected) -> Collected:
    """Add to the statistics' origin how far the sample can be trusted."""
    assert collected.halves is not None
    statistics = collected.statistics
    tables = statistics.tables.values()
    rows = _ERROR_SHARE * sum(table.num_rows for table in tables)
    split = half_split(*collected.halves, rows)
    unseen = unseen_share(pooled(table.histogram for table in tables))
    said = (
        f"{statistics.origin}; a sample of {statistics.share_of_samples:.3%}. Its halves differ by "
        f"{split.difference:.2%} in the static hit rate at {_ERROR_SHARE:.1%} of the rows; rows chosen on one half "
        f"find {split.other:.2%} of the other half's lookups ({split.own:.2%} of their own). About {unseen:.2%} of "
        "further lookups go to rows that are not in the sample"
    )
    return dataclasses.replace(collected, statistics=dataclasses.replace(statistics, origin=said))
