"""`MetricsConfig`: which figures an evaluation gives, and of which parts of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embershard.data.schema import Task
from embershard.errors import ConfigError
from embershard.metrics.figures import METRICS, check_name, known_row, names_of
from embershard.settings.own_code import names_function
from embershard.settings.resume_rules import Free

_MOST_SLICES = 20


@dataclass(frozen=True)
class MetricsConfig:
    """What evaluations on held-out samples say beside the figures of the task (AUC, NE, logloss, accuracy, calibration;
    or RMSE, MAE, R2). Reports on training samples have those of the task alone.

    >>> MetricsConfig(names=("gauc", "ndcg@10"), group="user", slices=("country",)).columns
    ('user', 'country')
    """

    names: Free[tuple[str, ...]] = ()
    """Figures of all samples, beside those of the task, and of every slice: "auc", "ne", "recalibrated_ne", "logloss",
    "accuracy", "calibration"; with a group "gauc", "ndcg@10", "precision@10", "recall@10" (any number); of a regression
    "rmse", "mae", "r2". Default: auc, ne, calibration (rmse, mae), and with a group gauc. "module:function" is a figure
    of your own: the function gets scores, labels and weights of all N held-out samples, arrays [N], and returns the
    figure, or [N] numbers, whose mean by weights it is. More is better."""
    group: Free[str | None] = None
    """Column of the data whose values, for instance users or sessions, are groups: in each of them samples are ranked.
    Samples without a value are in no group."""
    slices: Free[tuple[str, ...]] = ()
    """Columns of the data, for instance a country, whose values have figures of their own."""
    most_slices: Free[int] = _MOST_SLICES
    """Values of each of `slices` that have figures of their own: those with most samples. The others are one slice."""
    recalibration: Free[float | None] = None
    """For "recalibrated_ne": the factor of the odds p / (1 - p) of each prediction, above 0. Where training has seen
    only a tenth of the samples with label 0, and the held-out ones are all of them: 0.1."""
    folder: Free[str | None] = None
    """Folder in which modules of figures of your own are looked up, besides the Python path; default: that of the file
    of these settings."""

    def __post_init__(self) -> None:
        for name in ("names", "slices"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            given = getattr(self, name)
            twice = [each for each in given if given.count(each) > 1]
            if twice or "" in given:
                raise ConfigError(f"metrics.{name}: got {list(given)}, needed names, each once.")
        if self.group == "":
            raise ConfigError("metrics.group: got an empty text, needed the name of a column.")
        for name in self.names:
            check_name(name, "metrics.names")
            if known_row(name).is_of_groups and self.group is None:
                raise ConfigError(
                    f"metrics.names: {name} is a mean over groups of samples. Say which column has them: metrics.group "
                    '= "user_id", for instance.'
                )
        if self.folder is not None and not self.own:
            raise ConfigError('metrics.folder has no effect without "module:function" in metrics.names.')
        if self.most_slices < 1:
            raise ConfigError(f"metrics.most_slices: got {self.most_slices}, needed at least 1.")
        if self.most_slices != _MOST_SLICES and not self.slices:
            raise ConfigError("metrics.most_slices has no effect without metrics.slices.")
        if self.recalibration is not None and not self.recalibration > 0:
            raise ConfigError(f"metrics.recalibration: got {self.recalibration}, needed a number above 0.")
        if (self.recalibration is None) == ("recalibrated_ne" in self.names):
            raise ConfigError('metrics.recalibration and "recalibrated_ne" in metrics.names need each other.')

    @property
    def own(self) -> tuple[str, ...]:
        """Those of the names that are of functions of one's own."""
        return tuple(filter(names_function, self.names))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data that are needed, each once."""
        return tuple(dict.fromkeys((*([] if self.group is None else [self.group]), *self.slices)))

    def of_task(self, task: Task) -> tuple[str, ...]:
        """Return the names of the figures of slices, of a label with this task.

        >>> MetricsConfig(group="user").of_task("binary")
        ('auc', 'ne', 'calibration', 'gauc')
        """
        if self.names:
            return tuple(name for name in self.names if task in known_row(name).of)
        names = names_of(task, with_groups=self.group is not None)
        return tuple(name for name in names if METRICS[name].is_in("slices"))

    def more(self, task: Task) -> tuple[str, ...]:
        """Return those that an evaluation has beside the figures of the task."""
        return tuple(name for name in self.of_task(task) if name not in names_of(task))

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise `ConfigError` where no label has such a figure.

        Args:
            tasks: of the labels.
        """
        wrong = next((name for name in self.names if known_row(name).of.keys().isdisjoint(tasks)), None)
        if wrong is not None:
            [task] = set(tasks)  # labels of both tasks have all figures
            needed = 'task = "regression"' if task == "binary" else 'task = "binary" (data.table.label_at_least)'
            raise ConfigError(
                f"metrics.names: got {wrong!r} for labels of a {task} task, needed {', '.join(names_of(task))}. Leave "
                f"it out, or make it a task that has it: {needed}."
            )
        chosen = [known_row(name) for task in tasks for name in self.of_task(task)]
        if self.group is not None and not any(metric.is_of_groups for metric in chosen):
            why = 'add "gauc", for instance' if "binary" in tasks else "labels that are numbers have no such figure"
            raise ConfigError(f"metrics.group has no effect without a figure of groups in metrics.names: {why}.")
