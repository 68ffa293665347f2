"""Settings of checkpoints and publications."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embershard.errors import ConfigError
from embershard.settings.resume_rules import Free


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of checkpoints: steps between them, number kept, and what a failed save means.

    >>> CheckpointConfig(every_steps=1000).keep_last
    2
    """

    every_steps: Free[int | None] = None
    """Steps between checkpoints; none in between when absent."""

    at_end: Free[bool] = True
    """Also save when training ends. A run that a signal ends saves then, too, if it saves at all."""

    full_every: Free[int] = 1
    """Of so many saves, one has all rows of the tables. The others have those that changed since the save before, and
    need it: a save with all that it needs is a chain. 1: every save is whole."""

    keep_last: Free[int] = 2
    """Complete checkpoints to keep; older ones are removed, but for that of the best evaluation, and for those that
    these need."""

    keep_best: Free[bool | None] = None
    """Save the step of every evaluation that is better than all before, by `train.metric`, and keep the newest such
    checkpoint: `predict`, `eval` and `export` use it. When absent: yes in runs that save at their end and have several
    `train.epochs`, or `train.early_stopping`. Without `train.eval_every` they evaluate at the end of each epoch."""

    asynchronous: Free[bool | None] = None
    """Write checkpoints between steps while training goes on. When absent: on a CPU yes, on a GPU no. The save at the
    end of training is waited for."""

    on_failed_save: Free[Literal["stop", "continue"]] = "stop"
    """When a save fails, for instance on a full disk: stop, or train on and try again at the next one. When the
    save at the end of training fails, "continue" still evaluates and writes the result; the exit code is 1."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "full_every", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"checkpoint.{name}: got {value}, needed at least 1.")
        if self.on_failed_save not in ("stop", "continue"):
            raise ConfigError(f"checkpoint.on_failed_save: got {self.on_failed_save!r}, needed 'stop' or 'continue'.")
        for name, is_set in (
            ("on_failed_save", self.on_failed_save == "continue"),
            ("asynchronous", self.asynchronous is not None),
            ("full_every", self.full_every > 1),
        ):
            if is_set and self.every_steps is None and not self.keep_best:
                raise ConfigError(
                    f"checkpoint.{name} has no effect without checkpoint.every_steps or checkpoint.keep_best."
                )

    def saves_last(self, step: int, is_stopped: bool) -> bool:
        """Return whether a run saves after its last step, `step`; `is_stopped`: a signal ended it.

        >>> saving = CheckpointConfig(every_steps=10, at_end=False)
        >>> saving.saves_last(15, is_stopped=True), saving.saves_last(15, is_stopped=False)
        (True, False)
        """
        return self.at_end or (self.every_steps is not None and (is_stopped or step % self.every_steps == 0))

    def num_saves(self, steps: int) -> int:
        """Return the number of checkpoints that a run of `steps` writes.

        >>> CheckpointConfig(every_steps=10).num_saves(25), CheckpointConfig(every_steps=10).num_saves(20)
        (3, 2)
        """
        every = self.every_steps or steps + 1
        return steps // every + (self.at_end and steps % every > 0)


@dataclass(frozen=True)
class PublishConfig:
    """Settings of publications: where replicas that serve find what training has learned, and how often.

    >>> PublishConfig(folder="published", every_steps=1000).keep_bases
    2
    """

    folder: Free[str | None] = None
    """Folder of the publications, of this run alone, shared by all ranks; none are made when absent. See
    docs/online.md."""

    every_steps: Free[int | None] = None
    """Steps between publications. Each checkpoint and the end of training publish, too."""

    every_seconds: Free[float | None] = None
    """Seconds between publications, in place of `every_steps`."""

    base_every: Free[int | None] = None
    """Publications between bases, which are made of the base before and its deltas; none after the first when absent,
    and no delta is ever removed."""

    keep_bases: Free[int] = 2
    """Bases to keep; older ones are removed, and the deltas up to the oldest of them that no checkpoint needs."""

    dtype: Free[Literal["fp32", "fp16"]] = "fp32"
    """Number type of the tables' rows."""

    def __post_init__(self) -> None:
        for name, least in (("every_steps", 1), ("base_every", 1), ("keep_bases", 1), ("every_seconds", 0.001)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"publish.{name}: got {value}, needed at least {least}.")
        if self.dtype not in ("fp32", "fp16"):
            raise ConfigError(f"publish.dtype: got {self.dtype!r}, needed 'fp32' or 'fp16'.")
        if self.every_steps is not None and self.every_seconds is not None:
            raise ConfigError("publish.every_steps and publish.every_seconds are both set. Remove one of them.")
        default = type(self).__dataclass_fields__
        changed = [name for name in default if getattr(self, name) != default[name].default]
        if self.folder is None and changed:
            raise ConfigError(f"publish.{changed[0]} has no effect without publish.folder.")
        if self.folder is not None and self.every_steps is None and self.every_seconds is None:
            raise ConfigError("publish.folder needs publish.every_steps or publish.every_seconds.")
        if self.base_every is None and "keep_bases" in changed:
            raise ConfigError("publish.keep_bases has no effect without publish.base_every.")
