"""The settings in `examples/`: in the source tree, or where an installed wheel put them."""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path

from embershard.errors import ConfigError

_IN_WHEEL = "share/embershard/examples"  # as setup.cfg says


def examples() -> dict[str, Path]:
    """Return the TOML files of settings that come with embershard, by name.

    >>> examples()["quickstart"].name
    'quickstart.toml'
    """
    source = Path(__file__).parents[2] / "examples"
    if (source / "quickstart.toml").is_file():
        found = list(source.glob("*.toml"))
    else:
        try:
            installed = metadata.files("embershard") or []
        except metadata.PackageNotFoundError:
            installed = []
        found = [Path(str(each.locate())).resolve() for each in installed if _IN_WHEEL in each.as_posix()]
    return {path.stem: path for path in sorted(found)}


def config_file(text: str) -> Path:
    """Return the file of settings with this name: that file, else the example that is called so; a type for argparse.

    >>> config_file("quickstart") == config_file("quickstart.toml") == examples()["quickstart"]
    True
    """
    path = Path(text)
    if path.exists() or len(path.parts) != 1 or path.suffix not in ("", ".toml"):
        return path
    return examples().get(path.stem, path)


def needed_config(arguments: argparse.Namespace) -> Path:
    """Return the file of settings that the arguments name.

    Raises:
        ConfigError: they name none.
    """
    if arguments.config is None:
        raise ConfigError(f"which settings? Give a TOML file, or the name of an example: {', '.join(examples())}.")
    path: Path = arguments.config
    return path
