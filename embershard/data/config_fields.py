"""Checks that the settings of every kind of data share."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from embershard.errors import ConfigError
from embershard.settings.decoding import field_types

#: Units of whole numbers that are times since 1970, and how many are a second.
TIME_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
NEEDED_FORMAT = '"s", "ms", "us", "ns", or fields of strptime (%Y %y %m %d %H %I %M %S %p %b %B %a %A %z), each column'


def is_time_format(text: str) -> bool:
    """Return whether a text says how times are written.

    >>> is_time_format("%d.%m.%Y"), is_time_format("ms"), is_time_format("%Q")
    (True, True, False)
    """
    fields = re.findall("%(.?)", text)
    return text in TIME_UNITS or (bool(fields) and set(fields) <= set("YymdHIMSpbBaAz"))


def freeze_lists(owner: Any) -> None:
    """Turn lists, which TOML gives, into tuples, so that a frozen config cannot be edited."""
    for each in fields(owner):
        value = getattr(owner, each.name)
        if isinstance(value, list):
            object.__setattr__(owner, each.name, tuple(value))


def check_fields(owner: Any, section: str, **needs: tuple[bool, str]) -> None:
    """Raise where a field has no value of its `Literal`, or does not meet its need: (is it met, the words for it).

    Args:
        section: below `data`, with a dot at its end.

    Raises:
        ConfigError: with the setting, its value and what is needed.
    """
    choices = {
        name: get_args(hint) for name, hint in field_types(owner.__class__).items() if get_origin(hint) is Literal
    }
    among = {name: (getattr(owner, name) in values, f"one of {values}") for name, values in choices.items()}
    for name, (is_met, needed) in (among | needs).items():
        if not is_met:
            value = getattr(owner, name)
            given = "is not set" if value is None else f"= {value!r}"
            raise ConfigError(f"data.{section}{name} {given}; needed {needed}")
