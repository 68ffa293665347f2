"""Settings of earlier versions: what they are called now, and which are gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embershard.errors import ConfigError

#: Old name -> the name now.
RENAMED = {
    "cache.lookahead": "look_ahead.lookahead",
    "cache.prefetch": "look_ahead.prefetch",
    "cache.profile": "profile.path",
    "cache.profile_samples": "profile.samples",
}
#: Old name -> the value that means what there is now, and why the setting went.
RETIRED: dict[str, tuple[Any, str]] = {
    "cache.background": (False, "copies in threads of their own gained nothing. Remove it.")
}


def with_names_of_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, as a plan holds them, under the names of this version.

    >>> with_names_of_now({"cache.lookahead": 8, "cache.policy": "lru"})
    {'look_ahead.lookahead': 8, 'cache.policy': 'lru'}
    """
    return {RENAMED.get(name, name): value for name, value in settings.items()}


def refuse_earlier(key: str) -> None:
    """Raise `ConfigError` when `key`, as `section.name`, is a setting of earlier versions only."""
    if key in RENAMED:
        raise ConfigError(f"{key} is called {RENAMED[key]} now. Use that name.")
    if key in RETIRED:
        raise ConfigError(f"{key} is no setting any more: {RETIRED[key][1]}")


def bring_up_to_date(values: dict[str, Any], *, rename: bool) -> None:
    """Change the nested settings of a file in place to those of this version.

    Args:
        values: the settings, by section and name.
        rename: accept old names, as in a file that an earlier version wrote.

    Raises:
        ConfigError: a setting is gone, or an old name is not accepted.
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
