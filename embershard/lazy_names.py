"""Public names of a room that are imported on first use: TorchRec takes seconds to import, and settings need it not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its full name.
        names: of each of its modules, the names that the package exports.

    >>> get = lazy_names("embershard.data", {"config": ["DataConfig"]})
    >>> get("DataConfig")().kind
    'synthetic'
    """
    homes = {name: f"{package}.{module}" for module, exported in names.items() for name in exported}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get
