"""What a warm start is worth: held-out AUC by samples trained, of a model that begins with yesterday's, and of one that
begins from nothing.

    python -m benchmarks.warm_start [--path u.data]

Data: ratings in their order, user, item, rating and seconds, as MovieLens' u.data has them; without --path, generated
ones of that shape. A rating of 4 or more is a click. Yesterday: the first half, a DLRM-DCNv2 over user and item. Today:
the first four fifths of the rest, with a new column, the hour; the last fifth is held out. Both models of today have
the same settings and see the same samples in the same order.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import machine, make_parser, report, settings_of
from embershard import RunConfig, Trainer, process_group
from embershard.launch.screen import silence_libraries
from embershard.metrics.figures import main_values
from embershard.settings.decoding import decode, to_toml
from embershard.training.reports import EvalReport
from embershard.training.warm_start import WarmStart

_USERS, _ITEMS, _RATINGS, _DAY = 943, 1682, 100_000, 86_400


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--path", help="ratings: user, item, rating, seconds, between tabs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="of yesterday")
    options = parser.parse_args()
    silence_libraries()
    found = []
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as ranks:
        folder = Path(name)
        _write(folder, options.path)
        for seed in range(options.seeds):
            old = _config(folder / "yesterday.parquet", None, ("user", "item"), seed, options.epochs)
            run = folder / f"run_{seed}"
            _train(old, ranks, run / "checkpoints", None)
            (run / "config.toml").write_text(to_toml(old))
            held_out = folder / "held_out.parquet"
            new = _config(folder / "today.parquet", held_out, ("user", "item", "hour"), seed, 1)
            found.append(
                {
                    "seed": seed,
                    "warm": _train(new, ranks, None, WarmStart(run)),
                    "cold": _train(new, ranks, None, None),
                }
            )
    means = {
        kind: {step: round(float(np.mean([each[kind][step] for each in found])), 4) for step in found[0][kind]}
        for kind in ("warm", "cold")
    }
    result = {"benchmark": "warm_start", "settings": settings_of(options), "machine": machine()}
    report({**result, "auc_by_samples": means, "seeds": found}, options.output)


def _train(config: RunConfig, ranks: Any, folder: Path | None, start: WarmStart | None) -> dict[int, float | None]:
    """Train; return the held-out AUC by samples trained, from 0 on."""
    trainer, found = Trainer(config, ranks, folder, start=start), {}
    if config.holds_out:
        for part in trainer.parts[:1]:  # a start that was made is not made again
            list(part.begin())
        found[0] = main_values(trainer.evaluate().quality)["auc"]  # type: ignore[union-attr]
    for each in trainer.train():
        if isinstance(each, EvalReport):
            found[each.step * config.train.rank_batch_size(1)] = main_values(each.quality)["auc"]
    trainer.close()
    return found


def _config(path: Path, held_out: Path | None, sparse: tuple[str, ...], seed: int, epochs: int) -> RunConfig:
    features = {name: {"kind": "sparse", "num_rows": rows, "mapping": "none"} for name, rows in _rows().items()}
    table = {"label": "click", "features": {"one": {"kind": "dense"}, **{name: features[name] for name in sparse}}}
    data: dict[str, Any] = {"kind": "table", "path": str(path), "num_workers": 0, "table": table, "seed": seed}
    data |= {"eval_fraction": 0.0} if held_out is None else {"eval_path": str(held_out)}
    return decode(
        RunConfig,
        {
            "data": data,
            "model": {
                "arch": "dlrm_dcn",
                "embedding_dim": 16,
                "dense_arch_layer_sizes": [16],
                "over_arch_layer_sizes": [32, 1],
                "dropout": 0.2,
            },
            "cache": {"ratio": 0.5},
            "train": {
                "batch_size": 400,
                "epochs": epochs,
                "seed": seed,
                "device": "cpu",
                **({} if held_out is None else {"eval_every": 10}),
            },
        },
    )


def _rows() -> dict[str, int]:
    return {"user": _USERS + 1, "item": _ITEMS + 1, "hour": 24}


def _write(folder: Path, path: str | None) -> None:
    """Write the samples of both days, and the held-out ones."""
    ratings = _generated() if path is None else np.loadtxt(path, np.int64)
    ratings = ratings[np.argsort(ratings[:, 3], kind="stable")]
    half, end = len(ratings) // 2, len(ratings) * 9 // 10
    random = np.random.default_rng(0)
    parts = {"yesterday": ratings[:half], "today": random.permutation(ratings[half:end]), "held_out": ratings[end:]}
    for name, part in parts.items():
        columns = {
            "user": part[:, 0],
            "item": part[:, 1],
            "hour": part[:, 3] % _DAY // 3600,
            "one": np.ones(len(part)),
            "click": (part[:, 2] >= 4).astype(np.int64),
        }
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=4096)


def _generated() -> np.ndarray:
    """Ratings that follow from hidden properties of users, items and hours."""
    random = np.random.default_rng(1)
    users, items = (random.normal(size=(count + 1, 4)) for count in (_USERS, _ITEMS))
    user = (random.random(_RATINGS) ** 2 * _USERS).astype(np.int64) + 1
    item = (random.random(_RATINGS) ** 3 * _ITEMS).astype(np.int64) + 1
    seconds = np.sort(random.integers(0, 200 * _DAY, _RATINGS))
    hours = np.sin(seconds % _DAY / _DAY * 2 * np.pi)
    score = (users[user] * items[item]).sum(1) + items[item, 0] + hours * users[user, 0] + random.normal(size=_RATINGS)
    return np.stack([user, item, np.where(score > 0, 4, 2), seconds], axis=1)


if __name__ == "__main__":
    main()
