"""`TimeConfig`: the settings of training in time order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from embershard.errors import ConfigError
from embershard.settings.resume_rules import OfTraining

TimeFiles = Literal["together", "in_turn"]
_MOST_SECONDS = 10**11
#: Kinds of data whose columns have names.
WITH_NAMES = ("table", "parquet")


@dataclass(frozen=True)
class TimeConfig:
    """Training in time order, window by window (docs/data.md). Of kinds "table" and "parquet".

    >>> TimeConfig(column="clicked_at", window=3600).files
    'together'
    """

    column: OfTraining[str | None] = None
    """Name of a column of times, seconds since 1970, or texts that are times: samples train window by window. Each
    window but the first is evaluated before it trains, and nothing else of `path` is held out."""
    window: OfTraining[int | None] = None
    """Seconds of a window: 3600 is an hour, 86400 a day. Hours and days begin as in UTC."""
    files: OfTraining[TimeFiles] = "together"
    """"together": the rows of all files are put in order, and none is late. "in_turn": files come one after another, in
    the natural order of their names. A row is late where an earlier file has a row of a later window: it trains, and is
    evaluated, with the newest window so far."""

    def __post_init__(self) -> None:
        if self.files not in get_args(TimeFiles):
            raise ConfigError(f"data.time.files = {self.files!r}; needed one of {get_args(TimeFiles)}")
        if self.column is None:
            for name, value, default in (("window", self.window, None), ("files", self.files, "together")):
                if value != default:
                    raise ConfigError(
                        f"data.time.{name} = {value!r}; needed nothing: it has no effect without data.time.column"
                    )
            return
        if not self.column:
            raise ConfigError("data.time.column = ''; needed the name of a column")
        if self.window is None or self.window < 1:
            given = "is not set" if self.window is None else f"= {self.window}"
            raise ConfigError(
                f"data.time.window {given}; needed a number of seconds, at least 1; 3600 is an hour, 86400 a day"
            )
        if self.window > _MOST_SECONDS:
            raise ConfigError(
                f"data.time.window = {self.window}; needed at most {_MOST_SECONDS:,} seconds, 3,169 years: times are "
                "no further than that from 1970"
            )

    def check_with(self, kind: str, split: str, eval_fraction: float, usual_fraction: float) -> None:
        """Raise `ConfigError` where other settings of the data contradict time order, or have no effect in it."""
        if self.column is None:
            return
        until = "each window is held out until it trains (data.time.column)"
        if kind not in WITH_NAMES:
            raise ConfigError(
                f'data.kind = "{kind}"; needed "table" or "parquet" in time order: their columns have names'
            )
        if split != "tail":
            raise ConfigError(f'data.split = "{split}"; needed "tail", the default: {until}')
        if eval_fraction not in (0, usual_fraction, 1):
            raise ConfigError(
                f"data.eval_fraction = {eval_fraction}; needed {usual_fraction}, the default, or 0: {until}. For "
                "held-out samples beside the windows, set data.eval_path"
            )

    def check_training(
        self, in_order: bool, follow: bool, epochs: int | None, packs: bool, counts_a_profile: bool, judges_epochs: bool
    ) -> None:
        """Raise `ConfigError` where a training needs what samples in time order, or files yet to come, have not.

        Args:
            in_order: samples train window by window.
            follow: files are yet to come.
            epochs: of the training.
            packs: its batches are packed of hot and cold samples.
            counts_a_profile: all samples are counted before the first step.
            judges_epochs: the ends of epochs are evaluated, and the best one matters.
        """
        if in_order and packs:
            raise ConfigError(
                'sharding.mode: got "hot_cold" with data.time.column, and each has an order of its own. Remove one of '
                "them: --set sharding.mode=sharded --set sharding.hot_bytes=none, or --set data.time.column=none --set "
                "data.time.window=none."
            )
        if in_order and (epochs or 1) > 1:
            raise ConfigError(
                f"train.epochs: got {epochs}, needed 1 in time order (data.time.column): a second pass has no window "
                "that was not trained on before."
            )
        if follow and counts_a_profile:
            raise ConfigError(
                "data.follow: the data are not there before training, and a profile of them would be counted. Count "
                "what is there (embershard profile --config RUN.toml -o profile.npz) and set profile.path; or choose "
                "another cache.policy, without profile.samples and cache.warmup."
            )
        if follow and judges_epochs:
            raise ConfigError(
                "train.early_stopping and checkpoint.keep_best need train.eval_every with data.follow: no epoch ends."
            )

    def check_following(self, follow: bool, idle_seconds: float | None, bad_files: str) -> None:
        """Raise `ConfigError` where a folder cannot be followed, or a setting of that has no effect."""
        if not follow and idle_seconds is not None:
            raise ConfigError(
                f"data.idle_seconds = {idle_seconds}; needed nothing: no folder is followed (data.follow)"
            )
        if bad_files not in (("stop", "skip") if follow else ("stop",)):
            needed = '"stop" or "skip"' if follow else 'nothing, or "stop": no folder is followed (data.follow)'
            raise ConfigError(f'data.bad_files = "{bad_files}"; needed {needed}')
        if follow and self.column is None:
            raise ConfigError(
                "data.follow = true; needed data.time.column and data.time.window, too: a folder is followed in time "
                "order (docs/data.md)"
            )
        if idle_seconds is not None and idle_seconds <= 0:
            raise ConfigError(f"data.idle_seconds = {idle_seconds}; needed more than 0 seconds")
