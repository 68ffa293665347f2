"""Settings of the look-ahead."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.errors import ConfigError
from embershard.settings.resume_rules import Free


@dataclass(frozen=True)
class LookAheadConfig:
    """Numbers of batches that are known, and resident, ahead of the one in training.

    >>> LookAheadConfig(lookahead=16).prefetch
    2
    """

    lookahead: Free[int] = 64
    """Batches whose ids are known ahead of the one in training; 0 looks at no batch before its step."""

    prefetch: Free[int] = 2
    """The most batches whose rows are on the device ahead of the one in training. On a CPU as few as keep steps from
    waiting, from 1 on; fewer where they do not fit."""

    def __post_init__(self) -> None:
        if self.lookahead < 0 or self.prefetch < 1:
            raise ConfigError(
                f"look_ahead.lookahead={self.lookahead}, look_ahead.prefetch={self.prefetch}: needed 0 or more, and at "
                "least 1."
            )
        if 0 < self.lookahead < self.prefetch:
            raise ConfigError(
                f"look_ahead.prefetch={self.prefetch} is more than look_ahead.lookahead={self.lookahead}: only rows of "
                "known batches can be brought in. Lower the one or raise the other."
            )
