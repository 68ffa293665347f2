"""`embershard predict`, `eval`, `export` and `serve`: what they are given, and what they refuse."""

from typing import Any

from tests.unit.troubleshooting.case import Case, Files, command

TITLE = "Using a trained model"
_RUN: Files = {"mine/config.toml": "[data]\neval_fraction = 0.1\n", "mine/checkpoints/.keep": ""}


def _case(cause: str, words: tuple[str, ...], message: str, remedy: str, **given: Any) -> Case:
    return Case(cause, command(*words, **given), f"embershard: {message}", remedy)


CASES = [
    _case(
        "The folder is not that of a run",
        ("predict", "mine", "-o", "scores.parquet"),
        "mine has no config.toml; give the folder of a run of embershard train.",
        "Give the folder that `embershard train` named.",
    ),
    _case(
        "The file for the scores is there already",
        ("predict", "mine", "-o", "scores.parquet"),
        "scores.parquet exists and is not overwritten; give another file, or remove it.",
        "Use another file, or remove this one.",
        files={**_RUN, "scores.parquet": ""},
    ),
    _case(
        "A setting of the training is given to a trained model",
        ("eval", "mine", "--set", "dense_optimizer.lr=0.1"),
        "--set dense_optimizer.lr has no effect here: the model is trained. Leave it out.",
        "Only settings of data, cache and batch have an effect.",
        files=_RUN,
    ),
    _case(
        "Samples to score have not the columns of those that the run trained on",
        ("predict", "mine", "--data", "new.csv", "-o", "scores.parquet"),
        "new.csv: no column 'user'; did you mean 'usr'?",
        "Rename the column. Types, and the values of the first rows, are looked at before any rank starts, too.",
        files={
            "mine/config.toml": '[data]\nkind = "table"\npath = "old.csv"\n\n[data.table.features.user]\n'
            'kind = "sparse"\nmapping = "hash"\nnum_rows = 10\n',
            "new.csv": "usr\n1\n",
        },
    ),
    _case(
        "The run holds nothing out",
        ("eval", "mine", "--set", "data.eval_fraction=0"),
        "The run holds nothing out (data.eval_fraction is 0). Give the samples: --data PATH.",
        "Give samples with `--data`.",
        files=_RUN,
    ),
    _case(
        "The run has no checkpoint",
        ("export", "mine", "-o", "exported"),
        "mine/checkpoints: no complete checkpoint.",
        "Train with `checkpoint.at_end = true`, the default.",
        files=_RUN,
    ),
    _case(
        "The folder for the export is there already",
        ("export", "mine", "-o", "mine"),
        "mine exists; give the name of a new folder in a folder that exists.",
        "Choose a new folder.",
        files=_RUN,
    ),
    _case(
        "The folder to serve is no export",
        ("serve", "mine"),
        "mine is the folder of a run. Export it: embershard export mine -o NEW; then serve NEW.",
        "Export the run: `embershard export mine -o exported`, then `embershard serve exported`.",
        files=_RUN,
    ),
    _case(
        "No base of the folder to serve is whole",
        ("serve", "published"),
        "published/base_0: manifest.json cannot be read (No such file or directory). `embershard publish verify "
        "published` tells what is whole.",
        "Wait for a base of the run, or copy a whole one.",
        files={"published/base_0/export.json": '{"format": "module"}'},
    ),
]
