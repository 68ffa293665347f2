"""Samples: their sources, their order, and the batches made of them. See docs/data.md."""

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.data.batch import Batch as Batch
    from embershard.data.config import AvazuConfig as AvazuConfig
    from embershard.data.config import CriteoConfig as CriteoConfig
    from embershard.data.config import DataConfig as DataConfig
    from embershard.data.config import ParquetConfig as ParquetConfig
    from embershard.data.config import TableConfig as TableConfig
    from embershard.data.config import TableFeature as TableFeature
    from embershard.data.order.stream import BatchStream as BatchStream
    from embershard.data.order.stream import StreamState as StreamState
    from embershard.data.schema import Schema as Schema
    from embershard.data.schema import SparseFeature as SparseFeature
    from embershard.data.schema import Target as Target
    from embershard.data.sources.kinds import kind_of_files as kind_of_files
    from embershard.data.sources.kinds import open_source as open_source
    from embershard.data.sources.kinds import schema_of as schema_of
    from embershard.data.sources.source import Source as Source
    from embershard.data.sources.table.parquet_files import write_samples as write_samples
    from embershard.data.synthetic_config import SyntheticConfig as SyntheticConfig
else:
    __getattr__, __all__ = lazy_names(__name__)
