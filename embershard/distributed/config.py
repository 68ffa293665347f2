"""Settings of a run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.errors import ConfigError


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of checkpoints: steps between them, and number kept.

    >>> CheckpointConfig(every_steps=1000).keep_last
    2
    """

    every_steps: int | None = None
    """Steps between checkpoints; none in between when absent."""

    at_end: bool = True
    """Also save when training ends."""

    keep_last: int = 2
    """Complete checkpoints to keep; older ones are removed."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"checkpoint.{name}: got {value}, needed at least 1.")
