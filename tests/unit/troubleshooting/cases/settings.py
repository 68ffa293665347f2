"""Settings that are refused before anything starts."""

from tests.unit.troubleshooting.case import Case, command

TITLE = "Settings"
_TRAIN = ("train", "--config", "run.toml", "--dry-run")
_EMPTY = {"run.toml": ""}

CASES = [
    Case(
        "The settings file does not exist",
        command("train", "--config", "nowhere.toml"),
        "embershard: nowhere.toml: cannot be read (No such file or directory). Give an existing file.",
        "Check the path; a relative one starts from the current folder.",
    ),
    Case(
        "A key is misspelt",
        command(*_TRAIN, "--set", "train.batchsize=3", files=_EMPTY),
        "embershard: train.batchsize: unknown key. Did you mean train.batch_size?",
        "Correct the key; `embershard train --help` lists all.",
    ),
    Case(
        "`--resume` without the folder of the run",
        command("train", "--config", "run.toml", "--resume", files=_EMPTY),
        "embershard: --resume needs --run-dir, the folder of the run to continue.",
        "Give `--run-dir`.",
    ),
    Case(
        "The folder holds a run already",
        command("train", "--config", "run.toml", "--run-dir", "mine", files=_EMPTY | {"mine/metrics.jsonl": ""}),
        "embershard: mine holds a run already. Use another --run-dir, or --resume to continue it.",
        "Choose another folder, or continue the run.",
    ),
]
