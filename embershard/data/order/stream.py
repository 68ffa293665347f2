"""The stream of one rank's batches: slices of the global order, parsed ahead of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from embershard.data.batch import Batch
from embershard.data.block import BadRow, BadRowTally, Block, empty_block
from embershard.data.config import DataConfig
from embershard.data.order.order import EpochOrder
from embershard.data.order.segments import PackedState, Ranges, SegmentSchedule, batches_of_epoch, part_of
from embershard.data.schema import Schema
from embershard.data.sources.source import GrowingSource, RecentlyUsed, Source, Split, in_threads
from embershard.errors import ConfigError, DataError
from embershard.finalizers import end_with
from embershard.stages import is_stage

if TYPE_CHECKING:
    from embershard.data.order.segments import KindOrder, SampleKinds


class SampleReader:
    """Reads samples by their positions in the order of an epoch; several threads may.

    Args:
        hot: the hot samples, which come first then; None: the plain order.

    >>> from embershard.data import open_source
    >>> config = DataConfig()
    >>> reader = SampleReader(open_source(config), "train", config)
    >>> reader.read(0, [(10, 14)]).num_samples
    4
    """

    def __init__(self, source: Source, split: Split, config: DataConfig, hot: SampleKinds | None = None) -> None:
        self._source, self._split, self._config = source, split, config
        self._hot = None if hot is None else hot.in_chunks(source.chunks(split))
        self._orders = RecentlyUsed(self._make_order, capacity=2)

    def read(self, epoch: int, ranges: Sequence[tuple[int, int]]) -> Block:
        """Return the samples at the positions of these ranges [start, stop)."""
        order = self._orders.get(epoch)
        parts = [part for start, stop in ranges for part in order.locate(start, stop)]
        blocks = [self._source.read(self._split, chunk, rows) for chunk, rows in parts]
        return Block.join(blocks) if blocks else empty_block(self._source.schema)

    @property
    def num_hot(self) -> int:
        """Hot samples of an epoch; 0 in the plain order."""
        return 0 if self._hot is None else int(self._hot.num_hot.sum())

    def hot_among_first(self, epoch: int, count: int) -> int:
        """Return how many of the first `count` samples of an epoch's plain order are hot; 0 without hot samples."""
        order: Any = self._orders.get(epoch)
        return 0 if self._hot is None else order.hot_among_first(count)

    def blocks(self, stop: int, size: int, start: int = 0) -> Iterator[Block]:
        """Yield the samples [start, stop) of epoch 0, in order, in blocks of `size`; threads read ahead."""
        ranges = ((first, min(first + size, stop)) for first in range(start, stop, size))
        yield from in_threads(lambda each: self.read(0, [each]), ranges, max(1, self._config.num_workers))

    def _make_order(self, epoch: int) -> EpochOrder | KindOrder | GrowingSource:
        if isinstance(self._source, GrowingSource) and self._split == "train":
            return self._source
        config, chunks = self._config, self._source.chunks(self._split)
        shuffle = config.shuffle and self._split == "train"
        order = EpochOrder(chunks, seed=config.seed, epoch=epoch, shuffle=shuffle, window=config.shuffle_window)
        return order if self._hot is None else self._hot.packed(order)


@dataclass(frozen=True)
class StreamState:
    """A stream's position: the next sample is number `global_sample` of `epoch`'s order.

    It says nothing of ranks or batch sizes, so a run may go on with other ones. Where hot and cold samples have batches
    of their own, `packed` says more.

    >>> StreamState(epoch=1, global_sample=4096).to_dict()
    {'epoch': 1, 'global_sample': 4096, 'seed': 0}
    """

    epoch: int = 0
    global_sample: int = 0
    seed: int = 0
    packed: PackedState | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


_Read = tuple[Batch, tuple[BadRow, ...]]


@dataclass(frozen=True)
class _GlobalBatch:
    """One global batch: the position behind it, and the ranges of positions that this rank takes."""

    behind: StreamState
    ranges: Ranges
    is_hot: bool = False


class BatchStream:
    """The batches of one rank, in order; an iterator.

    The samples of an epoch have one order, a function of (seed, epoch). Global batch k is the samples [k*G, (k+1)*G) of
    it, G = batch_size * world_size, and rank r takes its r-th slice. So every sample goes to exactly one rank, and all
    ranks see the same number of batches. A bad row that is tolerated (`DataConfig.bad_rows`) has a place in that order
    like any other: in training another sample stands there, in evaluation none. Training leaves out an end of an epoch
    that is smaller than G; evaluation gives every sample once, with smaller or empty (B = 0) last slices.

    >>> from embershard.data import open_source
    >>> config = DataConfig(num_workers=0)
    >>> place = {"rank": 1, "world_size": 8}
    >>> with BatchStream(open_source(config), batch_size=32, split="train", epochs=1, config=config, **place) as stream:
    ...     next(stream).dense_features.shape, stream.state.global_sample
    (torch.Size([32, 13]), 256)

    Args:
        source: where the samples are read from.
        batch_size: samples per rank and batch.
        rank, world_size: slice of a global batch to take.
        split: "train" (shuffled as `config` says) or "eval" (in the order of the files).
        epochs: number of epochs, counted from epoch 0; None: without end.
        config: seed, shuffling, and the number of threads that parse ahead.
        state: the position to go on from; of any world size and batch size.
        pin_memory: put batches into page-locked memory.
        hot: the hot samples of the training data: they get batches of their own, and so do the others. `observe` must
            then get the loss of each batch, `segments.READ_AHEAD` batches late at most. None: one order of all samples.
        reader: makes what reads the samples of this rank's slices, or others in their place (`embershard.extras.deal`).

    Of a `GrowingSource`, training gives all batches that are whole by now, then raises `StopIteration`; asked again, it
    goes on with samples that came meanwhile.

    Attributes:
        waits: more samples may come after `StopIteration`.
        bad_rows: counts the bad rows of the batches that this stream gave.
        schedule: of hot and cold batches; None without `hot`.

    Raises:
        ConfigError: nothing is held out and `split` is "eval"; the state is of another seed or of other hot samples;
            there is no GPU to pin for; a number is out of its range.
        DataError: the training data are smaller than a global batch. While iterating: bad input.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        split: Split,
        epochs: int | None,
        config: DataConfig,
        state: StreamState | None = None,
        pin_memory: bool = False,
        hot: SampleKinds | None = None,
        reader: Callable[[Source, Split, DataConfig], SampleReader] | None = None,
    ) -> None:
        self.schema: Schema = source.schema
        self._growing = source if isinstance(source, GrowingSource) and split == "train" else None
        self.waits = self._growing is not None
        self._num_samples = 0 if self._growing else source.chunks(split).num_samples
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._global_size = batch_size * world_size
        self._split, self._epochs, self._seed = split, epochs, config.seed
        self._start = self._state = state or StreamState(seed=config.seed)
        self.bad_rows = BadRowTally()
        self._check(pin_memory, hot)
        samples = SampleReader(source, split, config, hot) if reader is None else reader(source, split, config)
        self.schedule: SegmentSchedule | None = None
        if hot is None:
            self._steps: Iterator[_GlobalBatch | None] = self._plan(self._state)
        else:
            first = self._start_packed(samples, hot.digest)
            self.schedule = SegmentSchedule(first)
            self._steps = self._plan_packed(self.schedule, first, samples.num_hot)
        device = torch.cuda.current_device() if pin_memory else None
        self._reader = _BatchReader(samples, source.schema, device)
        self._depth = config.prefetch_batches if config.num_workers else 1
        self._ahead: deque[tuple[_GlobalBatch, Callable[[], _Read]]] = deque()
        self._pool = None
        if config.num_workers:
            # Without it, pinning in a thread would make a context on GPU 0 for every rank.
            start = None if device is None else partial(torch.cuda.set_device, device)
            self._pool = ThreadPoolExecutor(config.num_workers, "embershard-data", initializer=start)
            end_with(self, partial(self._pool.shutdown, wait=False, cancel_futures=True))

    @property
    def num_samples(self) -> int:
        """Samples of an epoch; of a source that grows, so far."""
        return self._num_samples if self._growing is None else self._growing.num_samples

    @property
    def state(self) -> StreamState:
        """Position of the next batch: a new stream that starts there goes on from here."""
        return self._state

    def observe(self, loss: float) -> None:
        """Tell the schedule of hot and cold batches, if there is one, the loss of the next trained batch over all
        ranks; NaN where the batch was skipped."""
        if self.schedule is not None:
            self.schedule.observe(loss)

    def to_save(self, state: StreamState) -> StreamState:
        """Return `state`, the position behind the last trained batch, with what the losses so far have decided."""
        if self.schedule is None or state.packed is None:
            return state
        return replace(state, packed=self.schedule.with_learned(state.packed))

    @property
    def num_steps(self) -> int | None:
        """Global batches from the position at which this stream was opened to its end; None without end."""
        if self._epochs is None:
            return None
        epochs_left = self._epochs - self._start.epoch
        if epochs_left <= 0:
            return 0
        in_first = self._steps_in(self.num_samples - self._start.global_sample)
        return in_first + (epochs_left - 1) * self._steps_in(self.num_samples)

    def ends_epoch(self, state: StreamState) -> bool:
        """Return whether the position is behind the last batch of an epoch."""
        return self._steps_in(self.num_samples - state.global_sample) == 0

    def _steps_in(self, num_samples: int) -> int:
        whole, rest = divmod(num_samples, self._global_size)
        return whole + (self._split == "eval" and rest > 0)

    def close(self) -> None:
        """Stop the threads and drop their batches; the stream gives no more. May be called twice."""
        self._steps = iter(())
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    @is_stage("input")
    def __next__(self) -> Batch:
        while len(self._ahead) < self._depth and (step := next(self._steps, None)) is not None:
            self._ahead.append((step, self._begin(step)))
        if not self._ahead:
            if not self.waits:
                self.close()
            raise StopIteration
        step, finish = self._ahead.popleft()
        try:
            batch, bad = finish()
        except BaseException:
            self.close()
            raise
        self._state = step.behind
        self.bad_rows.add(sum(stop - start for start, stop in step.ranges), bad)
        return batch

    def _begin(self, step: _GlobalBatch) -> Callable[[], _Read]:
        """Read a batch in a thread, or, without threads, when it is asked for."""
        if self._pool is None:
            return partial(self._reader.read, step)
        return self._pool.submit(self._reader.read, step).result

    def _check(self, pin_memory: bool, hot: SampleKinds | None) -> None:
        if self._batch_size < 1:
            raise ConfigError(f"batch_size = {self._batch_size}; needed at least 1 sample per rank")
        if not 0 <= self._rank < self._world_size:
            place = f"rank = {self._rank} of world_size = {self._world_size}"
            raise ConfigError(f"{place}; needed 0 <= rank < world_size")
        if self._epochs is not None and self._epochs < 1:
            raise ConfigError(f"epochs = {self._epochs}; needed at least 1, or None for no end")
        if (saved := self._state.seed) != self._seed:
            raise ConfigError(
                f"the stream's state was saved with data.seed = {saved}, but data.seed is {self._seed}: "
                f"the order of samples would differ; set data.seed = {saved}"
            )
        packed = self._state.packed
        if hot is not None and packed is not None and packed.digest != hot.digest:
            raise ConfigError(
                f"the stream's state was saved with hot samples {packed.digest[:12]}, and these are "
                f"{hot.digest[:12]}: the order of samples would differ; use the data and hot rows of before"
            )
        if pin_memory and not torch.cuda.is_available():
            raise ConfigError("pin_memory needs a CUDA device, and there is none; leave it out on CPU")
        if self._split == "eval" and self.num_samples == 0:
            raise ConfigError("nothing is held out to evaluate on; set data.eval_fraction (say 0.1) or data.eval_path")
        if self._split == "train" and self.num_samples < self._global_size and not self.waits:
            raise DataError(
                f"the training data have {self.num_samples} samples, less than one global batch: "
                f"{self._batch_size} samples x {self._world_size} ranks = {self._global_size}; "
                "use a smaller batch size or more data"
            )

    def _plan(self, state: StreamState) -> Iterator[_GlobalBatch | None]:
        """Yield the batches; None where none is whole yet."""
        epoch, start = state.epoch, state.global_sample
        size, first = self._global_size, self._rank * self._batch_size
        while self._epochs is None or epoch < self._epochs:
            total = self.num_samples
            limit = total - size + 1 if self._split == "train" else total
            while start < limit:
                begin, end = min(start + first, total), min(start + first + self._batch_size, total)
                yield _GlobalBatch(StreamState(epoch, min(start + size, total), self._seed), ((begin, end),))
                start += size
            if self.waits:
                yield None
            else:
                epoch, start = epoch + 1, 0

    def _start_packed(self, samples: SampleReader, digest: str) -> PackedState:
        """Return the position to start from. A schedule of other global batches begins anew. A position without a
        schedule is one of the plain order, whose hot and cold samples so far are the first ones of their kinds."""
        state, packed = self._state, self._state.packed
        if packed is None:
            return PackedState(digest, self._global_size, samples.hot_among_first(state.epoch, state.global_sample))
        same_batches = packed.global_batch == self._global_size
        return packed if same_batches else PackedState(digest, self._global_size, packed.hot_samples)

    def _plan_packed(self, schedule: SegmentSchedule, packed: PackedState, num_hot: int) -> Iterator[_GlobalBatch]:
        epoch, start = self._state.epoch, self._state.global_sample
        first = self._rank * self._batch_size
        while self._epochs is None or epoch < self._epochs:
            for batch in batches_of_epoch(schedule, self.num_samples, num_hot, start, packed):
                ranges = part_of(batch.ranges, first, first + self._batch_size)
                behind = StreamState(epoch, batch.stop, self._seed, batch.state)
                yield _GlobalBatch(behind, ranges, batch.kind == "hot")
            schedule.begin_epoch()
            epoch, start, packed = epoch + 1, 0, PackedState(packed.digest, self._global_size)


class _BatchReader:
    """Makes the batch of a step. Holds no stream, so that a forgotten stream is collected and threads end."""

    def __init__(self, samples: SampleReader, schema: Schema, device: int | None) -> None:
        self._samples, self._schema, self._device = samples, schema, device

    def read(self, step: _GlobalBatch) -> _Read:
        block = self._samples.read(step.behind.epoch, step.ranges)
        batch = replace(block.to_batch(self._schema), is_hot=step.is_hot)
        return batch if self._device is None else batch.pin_memory(), block.bad
