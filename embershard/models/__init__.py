"""Models: built from a config and a data set's schema on one device; they know no rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.models.build import build_model
    from embershard.models.config import ModelConfig
    from embershard.models.dense_size import model_tables, num_parameters
    from embershard.models.schema import table_name
    from embershard.models.tables import ModelTable
else:
    __getattr__ = lazy_names(__name__)

__all__ = ["ModelConfig", "ModelTable", "build_model", "model_tables", "num_parameters", "table_name"]
