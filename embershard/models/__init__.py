"""Models: built from a config and a data set's schema on one device; they know no rank."""

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.models.build import build_model as build_model
    from embershard.models.config import ModelConfig as ModelConfig
    from embershard.models.dense_size import model_tables as model_tables
    from embershard.models.dense_size import num_parameters as num_parameters
    from embershard.models.schema import table_name as table_name
    from embershard.models.tables import ModelTable as ModelTable
else:
    __getattr__, __all__ = lazy_names(__name__)
