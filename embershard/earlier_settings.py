"""Settings of earlier versions: their current names, and those that were removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embershard.errors import ConfigError

#: Earlier name -> current name.
RENAMED = {
    "cache.lookahead": "look_ahead.lookahead",
    "cache.prefetch": "look_ahead.prefetch",
    "cache.profile": "profile.path",
    "cache.profile_samples": "profile.samples",
}
#: Earlier name -> the value that stands for the current behaviour, and the reason of the removal.
RETIRED: dict[str, tuple[Any, str]] = {
    "cache.background": (False, "copies in threads of their own gained nothing. Remove it.")
}


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, as a plan holds them, under their current names.

    >>> with_current_names({"cache.lookahead": 8, "cache.policy": "lru"})
    {'look_ahead.lookahead': 8, 'cache.policy': 'lru'}
    """
    return {RENAMED.get(name, name): value for name, value in settings.items()}


def refuse_earlier(key: str) -> None:
    """Raise `ConfigError` if `key`, as `section.name`, is a setting of earlier versions only."""
    if key in RENAMED:
        raise ConfigError(f"{key} is called {RENAMED[key]} now. Use that name.")
    if key in RETIRED:
        raise ConfigError(f"{key} is no setting any more: {RETIRED[key][1]}")


def bring_up_to_date(values: dict[str, Any], *, rename: bool) -> None:
    """Bring the nested settings of a file up to date, in place.

    Args:
        values: the settings, by section and name.
        rename: accept earlier names, as in a file that an earlier version wrote.

    Raises:
        ConfigError: a setting was removed, or an earlier name is not accepted.
    """
    for old in (*RETIRED, *RENAMED):
        section, name = old.split(".")
        inside = values.get(section)
        if not isinstance(inside, dict) or name not in inside:
            continue
        value = inside.pop(name)
        if rename and old in RENAMED:
            section, name = RENAMED[old].split(".")
            values.setdefault(section, {})[name] = value
        elif old not in RETIRED or value != RETIRED[old][0]:
            refuse_earlier(old)
