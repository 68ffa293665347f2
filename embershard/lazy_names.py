"""Names that are imported on first use: those of a room, since TorchRec takes seconds to import and settings need it
not; and those that a table has as texts, since `embershard.extras` may have been taken out."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from embershard.errors import SetupError


def lazy_names(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return the `__getattr__` and the `__all__` of a package: the first imports, one by one, the names that the
    package's file imports for type checkers, below `if TYPE_CHECKING`; where that is `*`, all public functions of a
    file.

    Args:
        package: its full name.

    >>> get, names = lazy_names("embershard.data")
    >>> get("DataConfig")().kind, names[:2]
    ('synthetic', ['AvazuConfig', 'Batch'])
    """
    module = ast.parse(inspect.getsource(sys.modules[package]))
    for_type_checkers = next(node.body for node in module.body if isinstance(node, ast.If))
    imports = [node for node in for_type_checkers if isinstance(node, ast.ImportFrom)]
    homes = {name: str(node.module) for node in imports for name in _imported(node)}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return named(f"{homes[name]}:{name}")

    return get, sorted(homes)


def _imported(node: ast.ImportFrom) -> list[str]:
    names = [name.name for name in node.names]
    if names != ["*"]:
        return names
    file = Path(__file__).parents[1].joinpath(*str(node.module).split(".")).with_suffix(".py")
    return re.findall(r"^def ([a-z]\w*)", file.read_text("utf-8"), re.MULTILINE)  # parsed, they would take 20 ms


def named(place: str) -> Any:
    """Return what a text names, as "embershard.metrics:METRICS".

    Raises:
        SetupError: it belongs to an extra that this installation is without.
    """
    try:
        return resolve_name(place)
    except ModuleNotFoundError as error:
        extra = ".".join(str(error.name).split(".")[:3])
        if not extra.startswith("embershard.extras"):
            raise
        raise SetupError(
            f"this needs {extra}, which this installation of embershard is without. Install embershard whole, or leave "
            "out what asks for it (docs/extras.md)."
        ) from error
