"""`embershard compare`: does one model rank better than another, or is it chance?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.errors import ConfigError, naming_file
from embershard.launch.arguments import add_trust, make_parser, positive
from embershard.launch.quality_text import form_of, title_of
from embershard.launch.screen import make_table, say, wide_console

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from embershard.training.quality.comparison import PairedDifference, Samples

_HELP = """Compare two models on the same samples, by a paired bootstrap: the difference of each figure, the interval in
which it is, and whether chance alone explains it. A and B are runs, which score what they hold out, or files of
embershard predict with labels. With --group, all samples of a group (a user, a session) are drawn together: use it
where they are alike, or the interval is too narrow. See docs/training.md.

  embershard compare runs/mine runs/other
  embershard compare runs/mine runs/other --group user_id --metrics auc,gauc,ndcg@10
  embershard compare a.parquet b.parquet --group user_id --json
"""
_LEVEL = 0.95


def main(argv: Sequence[str]) -> int:
    """Run `embershard compare`; return 0.

    Raises:
        ConfigError: the two have not the same samples, or no labels.
    """
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        tables = [
            _scores(arguments, given, Path(folder) / f"{name}.parquet")
            for name, given in zip("ab", (arguments.a, arguments.b), strict=True)
        ]
    labels = _labels_of(arguments, *tables)
    found = {label.removeprefix("/"): _compared(arguments, label, *tables) for label in labels}
    if arguments.json:
        values = {
            label: [{**dataclasses.asdict(each), "better": each.better} for each in differences]
            for label, differences in found.items()
        }
        print(json.dumps({"samples": len(tables[0]), "level": _LEVEL, "labels": values}, indent=2, allow_nan=False))
        return 0
    console = wide_console()
    of = f", by {arguments.group}" if arguments.group else ""
    say(console, f"A: {arguments.a}. B: {arguments.b}. {len(tables[0]):,} samples{of}.")
    for label, differences in found.items():
        table = make_table(label, ["figure"], ["A", "B", "B - A", "95 % of it", "p", "better"])
        for each in differences:
            form = form_of(each.metric)
            low, high = format(each.low, f"+{form}"), format(each.high, f"+{form}")
            row = (format(each.a, form), format(each.b, form), format(each.b - each.a, f"+{form}"), f"{low} to {high}")
            verdict = (each.better or "they differ") if each.is_different else "no difference"
            table.add_row(title_of(each.metric), *row, f"{each.p_value:.3g}", verdict)
        console.print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("compare", _HELP)
    for name in "ab":
        parser.add_argument(name, type=Path, metavar=name.upper(), help="folder of a run, or a Parquet file of scores")
    parser.add_argument(
        "--metrics",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="auc, ne, logloss, accuracy, calibration; rmse, mae, r2; with --group also gauc, ndcg@10, precision@10, "
        "recall@10, with any number (default: those of the scores, gauc with a group)",
    )
    parser.add_argument("--group", metavar="COLUMN", help="column of the data with the user or session of a sample")
    parser.add_argument("--weight", metavar="COLUMN", help="column of the data with the weight of a sample")
    parser.add_argument(
        "--replicates", type=positive, default=1000, metavar="R", help="of the bootstrap (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_trust(parser)
    return parser


def _scores(arguments: argparse.Namespace, given: Path, output: Path) -> pa.Table:
    """Return the scores of a file, or of a run on what it holds out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kept = list(filter(None, (arguments.group, arguments.weight)))
    if given.is_dir():
        from embershard.launch.score import predict

        keep = ["--keep", ",".join(kept)] if kept else []
        trust = ["--trust-code"] if arguments.trust_code else []
        if predict([str(given), "-o", str(output), *keep, *trust]):
            raise ConfigError(f"{given} could not be scored; its messages stand above.")
        given = output
    try:
        with naming_file(given):
            table: pa.Table = pq.read_table(given)
    except pa.ArrowException as error:
        raise ConfigError(f"{given}: not a Parquet file of scores: {error}") from None
    for name in kept:
        if name not in table.column_names:
            raise ConfigError(
                f"{given} has no column {name!r}. Keep it when you score: embershard predict ... --keep {name}."
            )
    return table


def _labels_of(arguments: argparse.Namespace, a: pa.Table, b: pa.Table) -> list[str]:
    """Return the ends of the names of the columns of each label that both files have, as "" or "/click"."""
    names = [[name[len("score") :] for name in table.column_names if name.startswith("score")] for table in (a, b)]
    common = [name for name in names[0] if name in names[1]]
    for given, table in ((arguments.a, a), (arguments.b, b)):
        missing = [f"{kind}{name}" for name in common or [""] for kind in ("score", "label")]
        missing = [name for name in missing if name not in table.column_names]
        if missing:
            raise ConfigError(f"{given} has no column {missing[0]!r}: needed scores of samples with labels.")
    if len(a) != len(b):
        raise ConfigError(
            f"{arguments.a} has {len(a):,} samples and {arguments.b} {len(b):,}: needed the same ones. Score both on "
            "the same file (embershard predict RUN --data FILE -o SCORES)."
        )
    same = [*(f"label{name}" for name in common), *filter(None, (arguments.group, arguments.weight))]
    for name in same:
        if a[name].equals(b[name]):
            continue
        pairs = zip(a[name].to_pylist(), b[name].to_pylist(), strict=True)
        if (row := next((row for row, (x, y) in enumerate(pairs) if x != y), None)) is not None:
            raise ConfigError(
                f"{arguments.a} and {arguments.b} are not of the same samples: {name} of row {row} is "
                f"{a[name][row].as_py()!r} and {b[name][row].as_py()!r}."
            )
    return common


def _compared(arguments: argparse.Namespace, label: str, a: pa.Table, b: pa.Table) -> list[PairedDifference]:
    from embershard.training.quality import comparison
    from embershard.training.quality.quality import OF_TASK

    is_binary = f"logit{label}" in a.column_names
    metrics = arguments.metrics
    if metrics is None:
        metrics = [*OF_TASK["binary" if is_binary else "regression"]]
        metrics += ["gauc"] if is_binary and arguments.group else []
    samples = _samples(arguments, a, label)
    scores_a, scores_b = (_numbers(table, f"score{label}") for table in (a, b))
    options: dict[str, Any] = {"num_replicates": arguments.replicates, "seed": arguments.seed}
    return comparison.compare(samples, scores_a, scores_b, metrics, confidence=_LEVEL, **options)


def _samples(arguments: argparse.Namespace, table: pa.Table, label: str) -> Samples:
    import numpy as np

    from embershard.training.quality.comparison import Samples

    weights = _numbers(table, arguments.weight) if arguments.weight else None
    groups = None
    if arguments.group:
        codes = table[arguments.group].combine_chunks().dictionary_encode().indices
        groups = codes.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return Samples(_numbers(table, f"label{label}"), weights, groups)


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    import pyarrow as pa

    try:
        values: NDArray[np.float64] = table[name].cast(pa.float64()).to_numpy()
    except pa.ArrowException as error:
        raise ConfigError(f"column {name!r}: needed numbers: {error}") from None
    return values
