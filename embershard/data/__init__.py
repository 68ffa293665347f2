"""Samples: their sources, their order, and the batches made of them. See docs/data.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.data.batch import Batch
    from embershard.data.config import (
        AvazuConfig,
        CriteoConfig,
        DataConfig,
        ParquetConfig,
        TableConfig,
        TableFeature,
    )
    from embershard.data.order.stream import BatchStream, StreamState
    from embershard.data.schema import Schema, SparseFeature, Target
    from embershard.data.sources.kinds import kind_of_files, open_source, schema_of
    from embershard.data.sources.source import Source
    from embershard.data.sources.table.parquet_files import write_samples
    from embershard.data.synthetic_config import SyntheticConfig
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "AvazuConfig",
    "Batch",
    "BatchStream",
    "CriteoConfig",
    "DataConfig",
    "ParquetConfig",
    "Schema",
    "Source",
    "SparseFeature",
    "StreamState",
    "SyntheticConfig",
    "TableConfig",
    "TableFeature",
    "Target",
    "kind_of_files",
    "open_source",
    "schema_of",
    "write_samples",
]
