"""Which samples are held out, as `data.split` says: a function of the settings and the files alone.

It does not depend on how files are cut into chunks, on ranks, threads or epochs. Where it follows from the values of
columns, one pass over these columns finds it, before training (`embershard/data/sources/table/split.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from embershard.data.config import DataConfig
from embershard.data.hashing import make_key, random_words, unit_floats
from embershard.data.sample_bits import SampleBits

if TYPE_CHECKING:
    from embershard.data.order.time_windows import TimeWindows

_RANDOM = 10  # a stream of random words of its own
_SAMPLES_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Which samples are held out.

    Attributes:
        how: what they are, in words.
        samples: their bits are 1; None: every file has a share of them, at its end.
        windows: of the others, in time order: each is held out until it trains.
    """

    how: str
    samples: SampleBits | None = None
    windows: TimeWindows | None = None

    def sentence(self, num_held_out: int, num_samples: int) -> str:
        """Return a sentence for the user, with how many samples are held out of all."""
        return f"Held out: {self.how}: {num_held_out:,} of {num_samples:,} samples."


#: Calls a function, or has another rank call it, and returns what it returned: `Ranks.from_first`.
Share = Callable[[Callable[[], HeldOut]], HeldOut]


def alone(find: Callable[[], HeldOut]) -> HeldOut:
    """Find by oneself what is held out: the `Share` of a program without ranks."""
    return find()


def hold_out(
    config: DataConfig, num_samples: int, share: Share, by_column: Callable[[], HeldOut] | None = None
) -> HeldOut:
    """Return which of the samples of a source are held out.

    Args:
        num_samples: of all files.
        share: is given what takes a pass over all samples.
        by_column: makes that pass where columns decide.
    """
    fraction = config.eval_fraction
    if config.is_in_time_order:
        assert by_column is not None, "only tables have a column of times"
        return share(by_column)
    if config.eval_path is not None:
        return HeldOut(f"all of {config.eval_path}")
    if fraction in (0, 1):
        return HeldOut("all" if fraction else "nothing")
    if config.split == "tail":
        whole = "all samples" if config.kind == "synthetic" else "every file"
        return HeldOut(f"the last {100 * fraction:g}% of {whole}")
    if config.split == "random":
        return share(lambda: _at_random(config, num_samples))
    assert by_column is not None, f"no columns for data.split = {config.split!r}"
    return share(by_column)


def _at_random(config: DataConfig, num_samples: int) -> HeldOut:
    key, fraction = make_key(config.split_seed, _RANDOM), config.eval_fraction
    numbers = (
        np.arange(start, min(start + _SAMPLES_AT_ONCE, num_samples))
        for start in range(0, num_samples, _SAMPLES_AT_ONCE)
    )
    bits = SampleBits.of(unit_floats(random_words(key, each)) < fraction for each in numbers)
    return HeldOut(f"{100 * fraction:g}% by chance (data.split_seed {config.split_seed})", bits)
