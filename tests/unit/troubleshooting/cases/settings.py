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
        "Correct the key; `embershard settings` lists all.",
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
    Case(
        "A number is infinite",
        command(*_TRAIN, "--set", "dense_optimizer.lr=inf", files=_EMPTY),
        "embershard: dense_optimizer.lr: got inf, needed a finite number.",
        "Give a finite number.",
    ),
    Case(
        "A weight decay that the optimizer would ignore",
        command(*_TRAIN, "--set", "embedding_optimizer.weight_decay=0.01", files=_EMPTY),
        "embershard: embedding_optimizer.weight_decay has no effect with kind='rowwise_adagrad': TorchRec sets no mode "
        "of it, and in any mode FBGEMM decays on a CPU only tables that several features share: a cache's slots would "
        "decay, and the same tables without a cache would not. Rows decay with adam, partial_rowwise_adam, lamb, "
        "partial_rowwise_lamb, which FBGEMM has on GPUs. Against overfitting there are model.dropout, "
        "train.early_stopping and dense_optimizer.weight_decay.",
        "Remove it. A run that had it goes on with `--allow-change embedding_optimizer.weight_decay`.",
    ),
    Case(
        "A number in a plan is too large (1e999)",
        command(
            "train", "--config", "run.toml", "--plan", "plan.json", files=_EMPTY | {"plan.json": '{"format": 1e999}'}
        ),
        "embershard: plan.json: format: got inf, needed a finite number.",
        "Correct the plan, or plan again.",
    ),
    Case(
        "A column cannot name a table",
        command(
            *("data", "validate", "a.parquet", "--set", 'data.parquet.sparse=["../../x"]'),
            *("--set", "data.parquet.num_rows=[9]"),
            files={"a.parquet": "x"},
        ),
        "embershard: sparse feature '../../x': needed a name without dot, slash, backslash and control characters, "
        "since modules, tensors and files are named after it; rename the column",
        "Rename the column in the files and in `data.parquet.sparse`.",
    ),
    Case(
        "A path looks like the markup of a terminal",
        command("ckpt", "ls", "a[/x]b", files={"a[/x]b/y": ""}),
        "embershard: a[/x]b: no checkpoints there; give the folder of a run that saved some.",
        "Such names are allowed; give the right folder.",
    ),
]
