"""What the tests of the data package share: a source that counts, and files to make others from."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embershard.data import Batch, BatchStream, DataConfig, Schema, SparseFeature
from embershard.data.block import Block
from embershard.data.order.order import ChunkTable
from embershard.data.sample_bits import SampleBits
from embershard.data.sources.held_out import HeldOut
from embershard.data.sources.source import Split, SplitChunks


class CountingSource:
    """Sample g has the dense value g, and in its one sparse feature a bag of g % 3 times the id g."""

    def __init__(
        self, file_rows: list[int], chunk_rows: int, eval_fraction: float = 0.0, chosen: SampleBits | None = None
    ) -> None:
        self.schema = Schema(("number",), (SparseFeature("bag", 1 << 40),))
        parts = [
            (file, min(chunk_rows, rows - start))
            for file, rows in enumerate(file_rows)
            for start in range(0, rows, chunk_rows)
        ]
        self.sizes = np.array([size for _, size in parts])
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.split = SplitChunks(
            [file for file, _ in parts], self.sizes, [eval_fraction] * len(file_rows), HeldOut("", chosen)
        )
        self.reads: list[int] = []
        self.poison: int | None = None

    def chunks(self, split: Split) -> ChunkTable:
        return self.split.table(split)

    def read(self, split: Split, chunk: int, rows: NDArray[np.int64]) -> Block:
        self.reads.append(chunk)
        if chunk == self.poison:
            raise ValueError(f"chunk {chunk} is poisoned")
        physical, members = self.split.place(split, chunk)
        assert len(members) == self.split.table(split).rows[chunk]
        numbers = self.starts[physical] + members[rows]
        lengths = (numbers % 3).astype(np.int32)
        dense = numbers[:, None].astype(np.float32)
        return Block(dense, np.zeros(len(rows), np.float32), (np.repeat(numbers, lengths),), lengths[None])


def numbers_of(batch: Batch) -> list[int]:
    """The numbers of a batch's samples; checks that the bags are those of the same samples."""
    numbers = batch.dense_features[:, 0].long()
    bags = batch.sparse_features["bag"]
    assert torch.equal(bags.lengths().long(), numbers % 3)
    assert torch.equal(bags.values(), numbers.repeat_interleave(numbers % 3))
    return numbers.tolist()


@pytest.fixture(scope="session")
def counting_source() -> type[CountingSource]:
    return CountingSource


@pytest.fixture(scope="session")
def numbers() -> Callable[[Batch], list[int]]:
    return numbers_of


@pytest.fixture
def open_stream() -> Iterator[Callable[..., BatchStream]]:
    """BatchStream with defaults; closed at the end of the test."""
    streams: list[BatchStream] = []

    def make(source: object, config: DataConfig, **settings: object) -> BatchStream:
        settings = {"rank": 0, "world_size": 1, "split": "train", "epochs": 1} | settings
        streams.append(BatchStream(source, config=config, **settings))  # type: ignore[arg-type]
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


@pytest.fixture(scope="session")
def criteo_text(criteo_sample: Path) -> bytes:
    """The lines of the real sample."""
    return gzip.decompress(next(criteo_sample.glob("day_*.gz")).read_bytes())


@pytest.fixture
def criteo_line() -> Callable[..., str]:
    """A line of Criteo's format; settings replace its cells, as in ``criteo_line(I3="", C1="ff")``."""
    names = ["label", *(f"I{i + 1}" for i in range(13)), *(f"C{i + 1}" for i in range(26))]

    def make(**cells: str) -> str:
        line = dict.fromkeys(names, "68fd1e64") | dict.fromkeys(names[1:14], "3") | {"label": "1"}
        return "\t".join((line | cells).values())

    return make
