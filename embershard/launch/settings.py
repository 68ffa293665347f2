"""`embershard settings`: the settings of a run, with their types, defaults and meanings."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence

from embershard.errors import ConfigError
from embershard.launch.arguments import make_parser
from embershard.launch.config import Setting, describe
from embershard.training.config import RunConfig

_HELP = """List the settings of a run, for its TOML file and for --set: type, default and meaning.

  embershard settings
  embershard settings cache
  embershard settings train.batch_size look_ahead
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard settings`; return 0.

    Raises:
        ConfigError: no setting has a name like those that were given.
    """
    parser = make_parser("settings", _HELP)
    names = parser.add_argument("names", nargs="*", metavar="NAME", help="section, setting, or a part of its name")
    names.completer = lambda **_: [setting.key for setting in describe(RunConfig())]  # type: ignore[attr-defined]
    arguments = parser.parse_args(argv)
    settings = describe(RunConfig())
    for setting in _named(settings, arguments.names) if arguments.names else settings:
        print(f"{setting.key}    {setting.type}    (default: {setting.default})")
        print(textwrap.fill(setting.doc, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return 0


def _named(settings: Sequence[Setting], names: Sequence[str]) -> list[Setting]:
    """Return the settings that are named, or are in a section that is; else those with a name as a part of theirs."""
    found = [each for each in settings if any(f"{each.key}.".startswith(f"{name}.") for name in names)]
    found = found or [each for each in settings if any(name in each.key for name in names)]
    if not found:
        near = difflib.get_close_matches(names[0], [setting.key for setting in settings], n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else "embershard settings lists all."
        raise ConfigError(f"no setting is called like {names[0]!r}. {hint}")
    return found
