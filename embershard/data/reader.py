"""Reads consecutive samples of an epoch's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from embershard.data.block import Block, empty_block
from embershard.data.config import DataConfig
from embershard.data.order import EpochOrder
from embershard.data.source import RecentlyUsed, Source, Split


class SampleReader:
    """Reads samples by their positions in the order of an epoch; several threads may.

    >>> from embershard.data import open_source
    >>> config = DataConfig()
    >>> reader = SampleReader(open_source(config), "train", config)
    >>> reader.read(0, 10, 14).num_samples
    4
    """

    def __init__(self, source: Source, split: Split, config: DataConfig) -> None:
        self._source, self._split, self._config = source, split, config
        self._orders = RecentlyUsed(self._make_order, capacity=2)

    def read(self, epoch: int, start: int, stop: int) -> Block:
        """Return the samples at positions [start, stop)."""
        parts = self._orders.get(epoch).locate(start, stop)
        blocks = [self._source.read(self._split, chunk, rows) for chunk, rows in parts]
        return Block.join(blocks) if blocks else empty_block(self._source.schema)

    def blocks(self, stop: int, size: int) -> Iterator[Block]:
        """Yield the first `stop` samples of epoch 0, in order, in blocks of `size`; threads read ahead."""
        num_threads = max(1, self._config.num_workers)
        with ThreadPoolExecutor(num_threads, "embershard-data") as pool:
            ahead: deque[Future[Block]] = deque()
            for start in range(0, stop, size):
                ahead.append(pool.submit(self.read, 0, start, min(start + size, stop)))
                if len(ahead) > num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _make_order(self, epoch: int) -> EpochOrder:
        config, chunks = self._config, self._source.chunks(self._split)
        shuffle = config.shuffle and self._split == "train"
        return EpochOrder(chunks, seed=config.seed, epoch=epoch, shuffle=shuffle, window=config.shuffle_window)
