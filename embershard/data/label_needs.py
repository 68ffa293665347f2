"""What the settings of labels need: names, tasks, thresholds, means, weights and masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import get_args

import numpy as np

from embershard.data.schema import Task

#: Each class has an output, figures and curves of its own.
_MOST_CLASSES = 100


def label_needs(
    labels: Sequence[str],
    *,
    task: Task | tuple[Task, ...],
    classes: Mapping[str, Sequence[float]],
    least: float | tuple[float, ...] | None,
    mean: float | tuple[float, ...] | None,
    weights: Sequence[float],
    masks: Sequence[str],
    missing: str,
) -> dict[str, tuple[bool, str]]:
    """Return of each setting of `TableConfig` whether it is met, and the words for what is needed."""
    tasks = task if isinstance(task, tuple) else (task,)
    known = get_args(Task)
    is_task = set(tasks) <= set(known) and (isinstance(task, str) or len(tasks) == len(labels) > 1)
    each = tasks if isinstance(task, tuple) else tasks * len(labels)
    num_numbers = each.count("regression")
    is_several, one_label = len(labels) > 1, "nothing: there is one label"
    are_before = all(mask not in labels[place:] for place, mask in enumerate(masks))
    num_means = len(mean) if isinstance(mean, tuple) else 1
    return {
        "label": (
            len(labels) > 0 and all(labels) and len(set(labels)) == len(labels),
            "the name of a column, or names, each once",
        ),
        "task": (is_task, f"one of {known}{', or one each' if is_several else ''}"),
        "classes": _needed_classes(
            {name for name, own in zip(labels, each, strict=False) if own == "multiclass"}, classes
        ),
        "label_at_least": _needed_thresholds(least, each),
        "label_mean": (
            mean is None or mean == () or (num_numbers > 0 and num_means == num_numbers),
            f'{num_numbers or len(labels)} numbers with task = "regression", and nothing otherwise',
        ),
        "label_weights": (
            not weights or (is_several and len(weights) == len(labels) and all(each > 0 for each in weights)),
            f"{len(labels)} numbers above 0, one for each label" if is_several else one_label,
        ),
        "label_masks": (
            not masks or (is_several and len(masks) == len(labels) and are_before),
            f'{len(labels)} names, one for each label: of a label before it, of another column, or ""'
            if is_several
            else one_label,
        ),
        "missing_labels": (
            missing == "bad_row" or (is_several and missing == "masked"),
            '"bad_row" or "masked"' if is_several else '"bad_row": there is one label',
        ),
    }


def _needed_thresholds(least: float | tuple[float, ...] | None, tasks: Sequence[Task]) -> tuple[bool, str]:
    count = tasks.count("binary")
    is_met = least is None or (count > 0 and (not isinstance(least, tuple) or len(least) == count))
    if not count:
        others = " and ".join(f'"{task}"' for task in dict.fromkeys(tasks))
        return is_met, f"nothing: with task = {others}, labels are numbers as they are"
    return is_met, f"one number, or {count}, one for each {'binary ' if count < len(tasks) else ''}label"


def _needed_classes(labels: Set[str], classes: Mapping[str, Sequence[float]]) -> tuple[bool, str]:
    of = f" ({', '.join(sorted(labels))})" if labels else ""
    return (
        labels == set(classes) and all(map(_are_classes, classes.values())),
        f'of each label with task = "multiclass"{of} 2 to {_MOST_CLASSES} numbers, each once, and nothing otherwise',
    )


def _are_classes(numbers: Sequence[float]) -> bool:
    with np.errstate(over="ignore"):
        as_in_batches = np.asarray(numbers, np.float32).tolist()
    distinct = {each for each in as_in_batches if math.isfinite(each)}
    return len(distinct) == len(numbers) and 2 <= len(numbers) <= _MOST_CLASSES
