"""Models: built from a config and a data set's schema on one device; they know no rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embershard.lazy_names import lazy_names

if TYPE_CHECKING:
    from embershard.models.config import ModelConfig
    from embershard.models.dlrm import build_model, table_name
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "config": ["ModelConfig"],
            "dlrm": ["build_model", "table_name"],
        },
    )

__all__ = ["ModelConfig", "build_model", "table_name"]
