"""How raw values become a model's inputs, as JSON: a program that serves must read them as the training did."""

from __future__ import annotations

from typing import Any

from embershard.data.config import DataConfig
from embershard.data.kinds import schema_of


def serving_inputs(config: DataConfig) -> dict[str, Any]:
    """Return the columns of a sample in their order, and how their values become numbers and rows.

    `dense_transform` is that of the dense columns. Of a sparse column, `id_base` is 16 where ids are hexadecimal texts,
    and `mapping` is "modulo", "hash" or "none" (`map_ids`), or "avazu": as `AvazuSource` makes rows of texts. A missing
    id is row 0, a missing number 0 before the transform.

    >>> serving_inputs(DataConfig(kind="criteo"))["sparse"][0]
    {'name': 'C1', 'num_rows': 100000, 'mapping': 'modulo', 'id_base': 16}
    """
    mapping, transform, id_base = "none", "none", 10
    if config.kind == "criteo":
        mapping, transform, id_base = config.criteo.id_mapping, config.criteo.dense_transform, 16
    elif config.kind == "avazu":
        mapping = "avazu"
    elif config.kind == "parquet":
        mapping, transform = config.parquet.id_mapping, config.parquet.dense_transform
    schema = schema_of(config)
    sparse = [
        {"name": feature.name, "num_rows": feature.num_rows, "mapping": mapping, "id_base": id_base}
        for feature in schema.sparse
    ]
    return {"dense": list(schema.dense), "dense_transform": transform, "sparse": sparse}
