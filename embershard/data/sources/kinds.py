"""The kinds of data: the only place that maps `data.kind` to a source, and to the inputs that a server must make."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from embershard.data.config import CONSTANT, DataConfig, DataKind, columns_of_files
from embershard.data.schema import Schema
from embershard.data.sources.avazu import AvazuSource
from embershard.data.sources.criteo import CriteoSource
from embershard.data.sources.held_out import Share, alone
from embershard.data.sources.input_file import need_path
from embershard.data.sources.source import Source
from embershard.data.sources.synthetic import SyntheticSource
from embershard.data.sources.table.source import TableSource


class _SourceClass(Protocol):
    def __call__(self, config: DataConfig, *, share: Share = alone) -> Source: ...

    def schema_of(self, config: DataConfig) -> Schema: ...


_SOURCES: dict[DataKind, _SourceClass] = {
    "synthetic": SyntheticSource,
    "criteo": CriteoSource,
    "avazu": AvazuSource,
    "parquet": TableSource,
    "table": TableSource,
}


def open_source(config: DataConfig, *, needs_labels: bool = True, share: Share = alone) -> Source:
    """Open the source that `config` describes.

    Args:
        needs_labels: False: labels are NaN where files of "parquet" or "table" have no column of labels.
        share: finds what is held out where that takes a pass over all samples. `Ranks.from_first`: one rank makes it
            for all, which then open the source together.

    >>> open_source(DataConfig(kind="synthetic")).chunks("train").num_samples
    900000

    Raises:
        ConfigError: a setting that this kind of source needs is missing.
        DataError: files are missing, empty, or damaged.
    """
    need_path(config)
    if config.has_names:
        return TableSource(config, needs_labels=needs_labels, share=share)
    return _SOURCES[config.kind](config, share=share)


def schema_of(config: DataConfig) -> Schema:
    """Return the schema of a config's samples from the settings alone, without opening a file.

    >>> schema_of(DataConfig(kind="criteo")).num_dense
    13

    Raises:
        ConfigError: the settings name no sparse column, or a column twice.
    """
    return _SOURCES[config.kind].schema_of(config)


def kind_of_files(path: Path) -> DataKind:
    """Guess the kind of data in a file or folder from names.

    >>> kind_of_files(Path("clicks.parquet")), kind_of_files(Path("train.csv"))
    ('parquet', 'avazu')
    """
    names = [each.name for each in path.iterdir()] if path.is_dir() else [path.name]
    if any(name.endswith(".parquet") for name in names):
        return "parquet"
    return "avazu" if any(name.endswith((".csv", ".csv.gz")) for name in names) else "criteo"


def serving_inputs(config: DataConfig) -> dict[str, Any]:
    """Return the features of a sample in their order, and how the values of columns become numbers and rows.

    Of a dense feature, `scale` is as in `TableFeature`, with its numbers; or "constant": 1 in every sample. Of a sparse
    one, `id_base` is 16 where ids are hexadecimal texts; `mapping`, `separator` and `stripped` are as in
    `TableFeature`, or "avazu": as `AvazuSource` makes rows of texts. `null_values` are texts that are missing values,
    and `format` and `decimal` are as in `TableConfig`. A missing number is 0 after scaling, and 0.5 after "quantile"
    without `mean`; a missing id is row 0, and `MISSING_ID` where a table takes any id.

    >>> serving_inputs(DataConfig(kind="criteo"))["sparse"][0]
    {'name': 'C1', 'column': 'C1', 'num_rows': 100000, 'mapping': 'modulo', 'id_base': 16}
    """
    schema = schema_of(config)
    rows = {feature.name: feature.num_rows for feature in schema.sparse}
    if config.has_names:
        settings = columns_of_files(config)
        dense = [
            {"name": name, "column": feature.column, "scale": feature.scale}
            | {key: value for key in ("mean", "std", "quantiles") if (value := getattr(feature, key)) not in (None, ())}
            for name, feature in settings.of_kind("dense").items()
        ]
        sparse = [
            {"name": name, "column": feature.column, "num_rows": rows[name], "mapping": feature.mapping, "id_base": 10}
            | ({} if feature.separator is None else {"separator": feature.separator})
            | ({"stripped": True} if feature.stripped else {})
            for name, feature in settings.of_kind("sparse").items()
        ]
        dense = dense or [{"name": CONSTANT, "column": CONSTANT, "scale": "constant"}]
        written = {key: value for key in ("format", "decimal") if (value := getattr(settings, key))}
        return {"dense": dense, "sparse": sparse, "null_values": settings.null_values, **written}
    mapping, scale, id_base = "none", "none", 10
    if config.kind == "criteo":
        mapping, scale, id_base = config.criteo.id_mapping, config.criteo.dense_transform, 16
    elif config.kind == "avazu":
        mapping, scale = "avazu", "constant"
    else:  # rather than an export that maps ids as training does not
        assert config.kind == "synthetic", f"no inputs for data of kind {config.kind!r}"
    return {
        "dense": [{"name": name, "column": name, "scale": scale} for name in schema.dense],
        "sparse": [
            {
                "name": feature.name,
                "column": feature.name,
                "num_rows": feature.num_rows,
                "mapping": "ids" if feature.takes_ids else mapping,
                "id_base": id_base,
            }
            for feature in schema.sparse
        ],
    }
