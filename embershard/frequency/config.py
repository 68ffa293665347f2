"""Settings of a run's frequency profile."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.errors import ConfigError
from embershard.settings.resume_rules import Free

#: Samples that are counted for a profile when a policy needs one and none is given.
DEFAULT_SAMPLES = 200_000
#: Samples that are counted at a time.
COUNTED_BATCH = 1024


@dataclass(frozen=True)
class ProfileConfig:
    """Source of a run's frequency profile: a file, or the run's own first samples.

    >>> ProfileConfig(samples=500).num_counted(available=10_000)
    500
    """

    path: Free[str | None] = None
    """File of a frequency profile. Without it, one is counted from the training data if `cache.policy` needs it."""

    samples: Free[int | None] = None
    """Samples to count for a profile; 200000 when one is needed. Not together with `path`."""

    def __post_init__(self) -> None:
        if self.path is not None and self.samples is not None:
            raise ConfigError(
                "profile.path and profile.samples are both set: a profile is read or counted. Drop one "
                "(--set profile.samples=none)."
            )
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"profile.samples: got {self.samples}, needed at least 1.")

    def num_counted(self, available: int) -> int:
        """Return how many of `available` samples are counted: whole batches."""
        samples = self.samples or DEFAULT_SAMPLES
        batch = max(1, min(COUNTED_BATCH, samples, available))
        return min(-(-samples // batch), available // batch) * batch
