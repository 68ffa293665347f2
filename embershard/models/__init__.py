"""Models: built from a config and a data set's schema, on one device, without knowing about ranks."""

from .config import ModelConfig
from .dlrm import build_model, table_name

__all__ = ["ModelConfig", "build_model", "table_name"]
