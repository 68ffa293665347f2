"""Several labels in one model beside a model for each: `python -m benchmarks.tasks`

Trains on the generated data of examples/tasks.py, whose labels are related: clicks, and purchases and minutes of the
clicked ones. A DLRM for each label alone trains on the samples that have it, and "dlrm", "shared_bottom", "mmoe" and
"ple" train all three; all with one seed after another, for the same epochs, on the CPU without caches. The figures are
held-out AUCs and the RMSE of minutes; of each label those of the last epoch, mean over the seeds. Target: MMoE is no
worse than the single models by twice the standard error of their difference over the seeds.
"""

from __future__ import annotations

import math
import runpy
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.common import machine, make_parser, report, settings_of
from embershard.cache import CacheConfig
from embershard.distributed import process_group
from embershard.models import ModelConfig
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from embershard.training.reports import EvalReport
from embershard.training.trainer import Trainer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: Each label, its task, and the figure by which it is judged; more is better but for the RMSE.
LABELS = {"click": ("binary", "auc"), "bought": ("binary", "auc"), "minutes": ("regression", "rmse")}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=40_000, help="of the data (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="(default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [figures(Path(folder), seed, options.rows, options.epochs) for seed in range(options.seeds)]
    means = {
        name: {label: round(statistics.fmean(each[name][label] for each in found), 4) for label in LABELS}
        for name in found[0]
    }
    gains = {label: gain(label, found) for label in LABELS}
    is_met = all(mean >= -2 * error for mean, error in gains.values())
    report(
        {"settings": settings_of(options), "machine": machine(), "means": means, "mmoe_over_single": gains,
         "seeds": found, "is_met": is_met},
        options.output,
    )  # fmt: skip


def gain(label: str, found: list[dict[str, dict[str, float]]]) -> tuple[float, float]:
    """Return how much better MMoE is than a model for this label, and the standard error over the seeds."""
    sign = -1 if LABELS[label][1] == "rmse" else 1
    each = [sign * (figures["mmoe"][label] - figures["single"][label]) for figures in found]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    return round(statistics.fmean(each), 4), round(error, 4)


def figures(folder: Path, seed: int, rows: int, epochs: int) -> dict[str, dict[str, float]]:
    """Return the figure of each label by each model."""
    path = folder / "all.parquet"
    runpy.run_path(str(EXAMPLES / "tasks.py"))["main"](str(path), rows, seed)
    whole = pq.read_table(path)
    cut = rows * 9 // 10
    parts = {"train": whole.slice(0, cut), "eval": whole.slice(cut)}
    config = load_config(RunConfig, EXAMPLES / "tasks.toml")
    train = replace(config.train, epochs=epochs, seed=seed, device="cpu")
    config = replace(config, cache=CacheConfig(enabled=False), train=train)
    config = replace(config, checkpoint=replace(config.checkpoint, at_end=False, keep_best=False))
    found: dict[str, dict[str, float]] = {"single": {}}
    for label, (task, figure) in LABELS.items():
        own = {name: part.filter(pc.is_valid(part[label])) for name, part in parts.items()}
        alone: dict[str, Any] = {"label": label, "task": task, "label_masks": (), "label_weights": ()}
        if task == "binary":
            alone["label_mean"] = None
        single = of_files(config, folder, own, **alone)
        found["single"][label] = quality(replace(single, model=one_tower(config.model, "dlrm")))[figure]
    for arch in ("dlrm", "shared_bottom", "mmoe", "ple"):
        together = replace(of_files(config, folder, parts), model=one_tower(config.model, arch))
        values = quality(together)
        found[arch] = {label: values[f"{figure}/{label}"] for label, (_, figure) in LABELS.items()}
    return found


def one_tower(model: ModelConfig, arch: Any) -> ModelConfig:
    """Return the example's model, as another architecture whose way to a label has the same layers."""
    if arch == "dlrm":
        over = (*(model.expert_layer_sizes or ()), *model.over_arch_layer_sizes)
        return replace(model, arch=arch, expert_layer_sizes=None, num_experts=None, over_arch_layer_sizes=over)
    return replace(model, arch=arch, num_experts=None if arch == "shared_bottom" else model.num_experts)


def of_files(config: RunConfig, folder: Path, parts: dict[str, pa.Table], **table: Any) -> RunConfig:
    """Return settings that train and evaluate on these tables, which are written to files."""
    for name, part in parts.items():
        pq.write_table(part, folder / f"{name}.parquet", row_group_size=4096, write_page_checksum=True)
    paths = {"path": str(folder / "train.parquet"), "eval_path": str(folder / "eval.parquet")}
    return replace(config, data=replace(config.data, **paths, table=replace(config.data.table, **table)))


def quality(config: RunConfig) -> dict[str, Any]:
    """Train; return the last held-out figures."""
    with process_group("cpu") as ranks:
        trainer = Trainer(config, ranks)
        evaluations = [each for each in trainer.train() if isinstance(each, EvalReport)]
        trainer.close()
    return evaluations[-1].quality


if __name__ == "__main__":
    main()
