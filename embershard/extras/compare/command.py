"""`embershard compare`: do models rank better than the first one, or is it chance?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from embershard.errors import ConfigError
from embershard.extras.compare.compared import ComparedModel, Scores, read_pairs, seeds_text
from embershard.launch.arguments import add_trust, make_parser, positive
from embershard.launch.screen import make_table, say, wide_console
from embershard.metrics.figures import ETA, METRICS, form_of, names_of, title_of

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from embershard.extras.compare.comparison import PairedDifference, Samples

    _Floats = NDArray[np.float64]
    _Found = tuple[int, list[PairedDifference]]

_HELP = """Compare models with the first one, A, on the same samples, by a paired bootstrap: the difference of each
figure, its interval, and whether chance alone explains it. Each is a run, which scores what it holds out, a file of
embershard predict with labels, or a configuration of a sweep, whose runs are paired by their seeds. With --group, all
samples of a group (a user, a session) are drawn together: use it where they are alike, or the interval is too narrow.
See docs/training.md.

  embershard compare runs/mine runs/other runs/third
  embershard compare runs/mine runs/other --group user_id --metrics auc,gauc
  embershard compare a.parquet b.parquet --group user_id --json
  embershard compare sweeps/models:model.arch=dlrm sweeps/models:model.arch=din
"""
_LEVEL = 0.95
_Pairs = Sequence[tuple[Scores, Scores]]


class _Comparison(NamedTuple):
    """The first model, A, and another one: what was found of each label."""

    models: tuple[ComparedModel, ComparedModel]
    pairs: _Pairs
    weight: str | None
    found: dict[str, _Found]


def main(argv: Sequence[str]) -> int:
    """Run `embershard compare`; return 0.

    Raises:
        ConfigError: two have not the same samples, or no labels.
    """
    arguments = _parser().parse_args(argv)
    if arguments.metrics:
        from embershard.extras.compare.comparison import check_metric  # it loads torch

        for metric in arguments.metrics:  # before runs are scored
            check_metric(metric, has_groups=arguments.group is not None)
    first, *others = map(ComparedModel.of, (arguments.a, *arguments.b))
    with tempfile.TemporaryDirectory() as folder:
        found = [_compare(arguments, (first, each), Path(folder)) for each in others]
    if arguments.json:
        values = [_as_json(each) for each in found]
        named = [{"a": arguments.a, "b": name, **each} for name, each in zip(arguments.b, values, strict=True)]
        print(json.dumps(values[0] if len(values) == 1 else {"comparisons": named}, indent=2, allow_nan=False))
        return 0
    for number, each in enumerate(found, 1):
        _show(arguments, string.ascii_uppercase[number] if number < 26 else str(number + 1), each)
    if len(found) > 1:
        say(wide_console(), "p is of each pair alone: of twenty models that are alike, one differs at 0.05 by chance.")
    return 0


def _compare(arguments: argparse.Namespace, models: tuple[ComparedModel, ComparedModel], folder: Path) -> _Comparison:
    """Compare two models; `folder` keeps the scores of runs."""
    keep = [*filter(None, (arguments.group, arguments.weight))]
    pairs = read_pairs(models, folder, keep, trust_code=arguments.trust_code)
    weight = arguments.weight
    if not weight and not arguments.no_weight and _have_weights(models, pairs):
        weight = "weight"
        keep.append("weight")
    options = argparse.Namespace(**vars(arguments) | {"weight": weight})
    labels = _labels_of(keep, pairs)
    found = {label.removeprefix("/"): _compared(options, label, pairs) for label in labels}
    for label, own in _classes(labels, pairs).items():
        if (of_classes := _with_classes(options, own, pairs))[1]:
            found[label] = of_classes
    return _Comparison(models, pairs, weight, found)


def _as_json(comparison: _Comparison) -> dict[str, Any]:
    found, pairs = comparison.found, comparison.pairs
    values = {
        label: [{**dataclasses.asdict(each), "better": each.better} for each in differences]
        for label, (_, differences) in found.items()
    }
    of: dict[str, Any] = {"samples": len(pairs[0][0].table), "seeds": len(pairs), "level": _LEVEL}
    return {**of, "samples_of": {label: count for label, (count, _) in found.items()}, "labels": values}


def _show(arguments: argparse.Namespace, letter: str, comparison: _Comparison) -> None:
    console, (models, pairs, weight, found) = wide_console(), comparison
    count = len(pairs[0][0].table)
    of = f", by {arguments.group}" if arguments.group else ""
    of += f", weighted by {weight}" if weight else ""
    a, b = (each.given for each in models)
    say(console, f"A: {a}. {letter}: {b}. {count:,} samples{of}.", *seeds_text(models, len(pairs)))
    for label, (own, differences) in found.items():
        title = f"{label}: {own:,} samples have it" if own != count else label
        table = make_table(title, ["figure"], ["A", letter, f"{letter} - A", "95 % of it", "p", "better"])
        for each in differences:
            form = form_of(each.metric)
            low, high = format(each.low, f"+{form}"), format(each.high, f"+{form}")
            row = (format(each.a, form), format(each.b, form), format(each.b - each.a, f"+{form}"), f"{low} to {high}")
            better = letter if each.better == "B" else each.better
            verdict = (better or "they differ") if each.is_different else "no difference"
            table.add_row(title_of(each.metric), *row, f"{each.p_value:.3g}", verdict)
        console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("compare", _HELP)
    metrics = [name for name, each in METRICS.items() if not each.is_of_groups and not each.is_recalibrated]
    of_groups = [f"{name}@10" if each.has_place else name for name, each in METRICS.items() if each.is_of_groups]
    text = "folder of a run, a Parquet file of scores, or SWEEP:SETTING=VALUE, a configuration of a sweep"
    parser.add_argument("a", metavar="A", help=text)
    parser.add_argument("b", nargs="+", metavar="B", help="another such model, or several: each is compared with A")
    parser.add_argument(
        "--metrics",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help=f"{', '.join(metrics)}; with --group also {', '.join(of_groups)}, with any number (default: those of the "
        "scores, gauc with a group)",
    )
    parser.add_argument("--group", metavar="COLUMN", help="column of the data with the user or session of a sample")
    weights = parser.add_mutually_exclusive_group()
    text = "column of the data with the weight of a sample (default: the weights of the runs' data)"
    weights.add_argument("--weight", metavar="COLUMN", help=text)
    weights.add_argument("--no-weight", action="store_true", help="let every sample count once")
    text = "of the bootstrap (default: %(default)s)"
    parser.add_argument("--replicates", type=positive, default=1000, metavar="R", help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_trust(parser)
    return parser


def _have_weights(models: tuple[ComparedModel, ComparedModel], pairs: _Pairs) -> bool:
    """Return whether the samples of both models have weights.

    Raises:
        ConfigError: those of one model have.
    """
    of_models = [all("weight" in each.table.column_names for each in model) for model in zip(*pairs, strict=True)]
    if any(of_models) and not all(of_models):
        with_weights, without = (models[of_models.index(has)].given for has in (True, False))
        raise ConfigError(
            f"{with_weights} has weights of its samples, and {without} has none. Say what counts for both: --weight "
            "COLUMN, or --no-weight."
        )
    return all(of_models)


def _labels_of(keep: Sequence[str], pairs: _Pairs) -> list[str]:
    """Return the ends of the names of the columns of each label that all scores have, as "" or "/click"."""
    first, *others = [each for pair in pairs for each in pair]
    names = [name[len("score") :] for name in first.table.column_names if name.startswith("score")]
    columns = [{*each.table.column_names} for each in (first, *others)]
    common = [name for name in names if all({f"score{name}", f"label{name}"} <= own for own in columns)]
    if not common:
        wanted = [f"{kind}{name}" for name in names or [""] for kind in ("score", "label")]
        lacking = (
            (each, name)
            for each, own in zip((first, *others), columns, strict=True)
            for name in wanted
            if name not in own
        )
        each, name = next(lacking)
        raise ConfigError(f"{each.name} has no column {name!r}: needed scores of samples with labels.")
    for each in others:
        if len(first.table) != len(each.table):
            raise ConfigError(
                f"{first.name} has {len(first.table):,} samples and {each.name} {len(each.table):,}: needed the same "
                "ones. Score both on the same file (embershard predict RUN --data FILE -o SCORES)."
            )
        for name in [*(f"label{name}" for name in common), *keep]:
            _check_same(name, first, each)
    return common


def _classes(labels: Sequence[str], pairs: _Pairs) -> dict[str, list[str]]:
    """Return the labels that are classes of one, as "/stars=4", by its name: a sample that has it has one of them."""
    import numpy as np

    found: dict[str, list[str]] = {}
    for label in labels:
        found.setdefault(label.removeprefix("/").rpartition("=")[0], []).append(label)
    for name in [*found]:
        numbers = [_numbers(pairs[0][0].table, f"label{label}") for label in found[name]]
        total = np.sum(numbers, axis=0)
        if not name or len(numbers) < 2 or not (np.isnan(total) | (total == 1)).all():
            del found[name]
    return found


def _check_same(name: str, first: Scores, other: Scores) -> None:
    if first.table[name].equals(other.table[name]):
        return
    a, b = (each.table[name].to_pylist() for each in (first, other))
    for row, (x, y) in enumerate(zip(a, b, strict=True)):
        both_are_missing = isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y)
        if x != y and not both_are_missing:
            raise ConfigError(
                f"{first.name} and {other.name} are not of the same samples: {name} of row {row} is {x!r} and {y!r}."
            )


def _compared(arguments: argparse.Namespace, label: str, pairs: _Pairs) -> _Found:
    import numpy as np

    first = pairs[0][0].table
    labels = _numbers(first, f"label{label}")
    there = ~np.isnan(labels)  # the samples that have the label
    is_binary = f"logit{label}" in first.column_names
    metrics = arguments.metrics
    if metrics is None:
        metrics = names_of("binary" if is_binary else "regression", with_groups=bool(arguments.group))
    a, b = (
        np.stack([_numbers(each.table, f"score{label}")[there] for each in model]) for model in zip(*pairs, strict=True)
    )
    return int(there.sum()), _differences(arguments, _samples(arguments, first, labels[there], there), a, b, metrics)


def _with_classes(arguments: argparse.Namespace, labels: Sequence[str], pairs: _Pairs) -> _Found:
    """Compare the figures of a label with classes, whose own labels these are."""
    import numpy as np

    def columns(table: pa.Table, kind: str) -> _Floats:
        return np.stack([_numbers(table, f"{kind}{label}") for label in labels], axis=1)

    table = pairs[0][0].table
    own = columns(table, "label")
    there = ~np.isnan(own[:, 0])
    shares = [
        [np.clip(columns(each.table, "score")[there], ETA, 1 - ETA) for each in model]
        for model in zip(*pairs, strict=True)
    ]
    a, b = (np.log(model / (1 - np.array(model))) for model in shares)
    metrics = [name for name in names_of("multiclass") if arguments.metrics is None or name in arguments.metrics]
    return int(there.sum()), _differences(arguments, _samples(arguments, table, own[there], there), a, b, metrics)


def _differences(
    arguments: argparse.Namespace, samples: Samples, a: _Floats, b: _Floats, metrics: Sequence[str]
) -> list[PairedDifference]:
    from embershard.extras.compare import comparison

    options: dict[str, Any] = {"num_replicates": arguments.replicates, "seed": arguments.seed}
    return comparison.compare(samples, a, b, metrics, confidence=_LEVEL, **options)


def _samples(arguments: argparse.Namespace, table: pa.Table, labels: _Floats, there: NDArray[np.bool_]) -> Samples:
    import numpy as np
    import pyarrow as pa

    from embershard.extras.compare.comparison import Samples
    from embershard.metrics.evaluation import value_numbers

    weights = _numbers(table, arguments.weight)[there] if arguments.weight else None
    if weights is not None and not (weights >= 0).all():
        row = np.flatnonzero(there)[np.argmin(weights >= 0)]
        raise ConfigError(f"{arguments.weight} of row {row} is {weights.min()}: needed a weight of at least 0.")
    groups = None
    if arguments.group:
        own = table.select([arguments.group]).filter(pa.array(there))
        groups = value_numbers([own], [arguments.group])[arguments.group].numbers
    return Samples(labels, weights, groups)


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    import pyarrow as pa

    try:
        values: NDArray[np.float64] = table[name].cast(pa.float64()).to_numpy()
    except pa.ArrowException as error:
        raise ConfigError(f"column {name!r}: needed numbers: {error}") from None
    return values
