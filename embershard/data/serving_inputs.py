"""How raw values become a model's inputs, as JSON: a program that serves must read them as the training did."""

from __future__ import annotations

from typing import Any

from embershard.data.config import DataConfig
from embershard.data.sources.kinds import schema_of
from embershard.data.sources.table.config import CONSTANT, settings_of


def serving_inputs(config: DataConfig) -> dict[str, Any]:
    """Return the features of a sample in their order, and how the values of columns become numbers and rows.

    Of a dense feature, `scale` is as in `TableFeature`, with its numbers; or "constant": 1 in every sample. Of a sparse
    one, `id_base` is 16 where ids are hexadecimal texts, and `mapping` is as in `TableFeature`, or "avazu": as
    `AvazuSource` makes rows of texts. `separator` is that of the values in a text, and `null_values` are texts that
    are missing values. A missing id is row 0, a missing number 0 after scaling, and 0.5 after "quantile".

    >>> serving_inputs(DataConfig(kind="criteo"))["sparse"][0]
    {'name': 'C1', 'column': 'C1', 'num_rows': 100000, 'mapping': 'modulo', 'id_base': 16}
    """
    schema = schema_of(config)
    rows = {feature.name: feature.num_rows for feature in schema.sparse}
    if config.kind in ("parquet", "table"):
        settings = settings_of(config)
        dense = [
            {"name": name, "column": feature.column, "scale": feature.scale}
            | {key: value for key in ("mean", "std", "quantiles") if (value := getattr(feature, key)) not in (None, ())}
            for name, feature in settings.of_kind("dense").items()
        ]
        sparse = [
            {"name": name, "column": feature.column, "num_rows": rows[name], "mapping": feature.mapping, "id_base": 10}
            | ({} if feature.separator is None else {"separator": feature.separator})
            for name, feature in settings.of_kind("sparse").items()
        ]
        dense = dense or [{"name": CONSTANT, "column": CONSTANT, "scale": CONSTANT}]
        return {"dense": dense, "sparse": sparse, "null_values": settings.null_values}
    mapping, scale, id_base = "none", "none", 10
    if config.kind == "criteo":
        mapping, scale, id_base = config.criteo.id_mapping, config.criteo.dense_transform, 16
    elif config.kind == "avazu":
        mapping, scale = "avazu", CONSTANT
    return {
        "dense": [{"name": name, "column": name, "scale": scale} for name in schema.dense],
        "sparse": [
            {"name": name, "column": name, "num_rows": num_rows, "mapping": mapping, "id_base": id_base}
            for name, num_rows in rows.items()
        ],
    }
