"""Models: built from a config and a data set's schema on one device; they know no rank."""

from embershard.models.config import ModelConfig
from embershard.models.dlrm import build_model, table_name

__all__ = ["ModelConfig", "build_model", "table_name"]
