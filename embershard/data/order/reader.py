"""Reads consecutive samples of an epoch's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from embershard.data.block import Block, empty_block
from embershard.data.config import DataConfig
from embershard.data.order.hot_samples import HotChunks, HotSamples
from embershard.data.order.order import EpochOrder
from embershard.data.order.packed_order import PackedOrder
from embershard.data.sources.source import RecentlyUsed, Source, Split


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

    def __init__(self, source: Source, split: Split, config: DataConfig, hot: HotSamples | None = None) -> None:
        self._source, self._split, self._config = source, split, config
        self._hot = None if hot is None else HotChunks(hot, source.chunks(split))
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
        order = self._orders.get(epoch)
        return order.hot_among_first(count) if isinstance(order, PackedOrder) else 0

    def blocks(self, stop: int, size: int, start: int = 0) -> Iterator[Block]:
        """Yield the samples [start, stop) of epoch 0, in order, in blocks of `size`; threads read ahead."""
        num_threads = max(1, self._config.num_workers)
        with ThreadPoolExecutor(num_threads, "embershard-data") as pool:
            ahead: deque[Future[Block]] = deque()
            for first in range(start, stop, size):
                ahead.append(pool.submit(self.read, 0, [(first, min(first + size, stop))]))
                if len(ahead) > num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _make_order(self, epoch: int) -> EpochOrder | PackedOrder:
        config, chunks = self._config, self._source.chunks(self._split)
        shuffle = config.shuffle and self._split == "train"
        order = EpochOrder(chunks, seed=config.seed, epoch=epoch, shuffle=shuffle, window=config.shuffle_window)
        return order if self._hot is None else PackedOrder(order, self._hot)
