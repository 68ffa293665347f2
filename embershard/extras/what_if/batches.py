"""Samples of a step: as many for each rank (weak scaling), or as many for all ranks together (strong scaling)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from embershard.commands.plan.run import Setup
from embershard.errors import ConfigError
from embershard.training.config import TrainConfig

_MOST_SAMPLES = 2**30  # of a step


@dataclass(frozen=True)
class StepBatch:
    """The samples of a step, on any number of ranks.

    >>> weak, strong = StepBatch(1024), StepBatch(65536, is_global=True)
    >>> [each.of_all(8) for each in (weak, strong)], [each.of_rank(8) for each in (weak, strong)]
    ([8192, 65536], [1024, 8192])

    Attributes:
        samples: of each rank.
        is_global: `samples` are those of all ranks together.
    """

    samples: int
    is_global: bool = False

    @classmethod
    def of(cls, train: TrainConfig) -> StepBatch:
        """Return the batch of a run's settings."""
        if train.global_batch_size is not None:
            return cls(train.global_batch_size, is_global=True)
        return cls(train.rank_batch_size(1))

    def __str__(self) -> str:
        return f"{self.samples:,} samples {'together' if self.is_global else 'each'}"

    @property
    def scaling(self) -> str:
        """What changes with the number of ranks: the samples of a step, or those of a rank."""
        return "strong" if self.is_global else "weak"

    def of_all(self, num_ranks: int) -> int:
        """Return the samples of a step of all ranks."""
        return self.samples if self.is_global else self.samples * num_ranks

    def of_rank(self, num_ranks: int) -> int:
        """Return the samples of a step of each rank, of which a global batch has as many for all of them."""
        return self.samples // num_ranks if self.is_global else self.samples

    def problem(self, num_ranks: int, pieces: int, most: int | None) -> str | None:
        """Return which cases these are that are not planned, of so many ranks with this batch; None: they are.

        Args:
            pieces: micro-batches of a rank (`train.accumulate`), each with a sample or more.
            most: samples of a step that still train well; None: any number.
        """
        if most is not None and self.of_all(num_ranks) > most:
            return f"with more than {most:,} samples a step (--most-batch)"
        if self.of_all(num_ranks) % num_ranks:
            return f"whose ranks cannot share {self.samples:,} samples evenly"
        if self.of_rank(num_ranks) < pieces:
            return f"with fewer samples a rank than micro-batches (train.accumulate = {pieces})"
        return None

    def given_to(self, setup: Setup) -> Setup:
        """Return the settings with this batch in place of their own."""
        each, together = (None, self.samples) if self.is_global else (self.samples, None)
        train = replace(setup.config.train, batch_size=each, global_batch_size=together)
        return replace(setup, config=replace(setup.config, train=train))

    def overrides(self, train: TrainConfig) -> list[str]:
        """Return the overrides with which a run of these settings trains this batch."""
        other = "batch_size" if self.is_global else "global_batch_size"  # both at once are refused
        without = [] if getattr(train, other) is None else [f"train.{other}=none"]
        return [*without, f"train.{self._setting}={self.samples}"]

    @property
    def _setting(self) -> str:
        return "global_batch_size" if self.is_global else "batch_size"


def asks_for_batches(arguments: argparse.Namespace) -> bool:
    """Return whether the command line compares batches, or limits them."""
    return any((arguments.batches, arguments.global_batches, arguments.most_batch))


def batches_of(setup: Setup) -> Sequence[StepBatch]:
    """Return the batches that the command line asks for, else that of the settings.

    Raises:
        ConfigError: one is larger than any step.
    """
    arguments = setup.arguments
    asked = [StepBatch(each) for each in arguments.batches or ()]
    asked += [StepBatch(each, is_global=True) for each in arguments.global_batches or ()]
    for each in asked:
        if each.samples > _MOST_SAMPLES:
            raise ConfigError(f"--batches, --global-batches: got {each.samples}, needed at most {_MOST_SAMPLES}.")
    return list(dict.fromkeys(asked)) or [StepBatch.of(setup.config.train)]
