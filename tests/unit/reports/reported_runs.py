"""Folders of runs and sweeps as embershard leaves them, with made-up figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embershard.settings.decoding import to_toml
from embershard.settings.files import load_config
from embershard.sharding.plan import Plan
from embershard.sweeps.outcomes import Outcome, Status, run_folder
from embershard.training.config import RunConfig
from tests.unit.planning.runs import predicted_plan, result_of

Lines = Sequence[dict[str, Any]]


def write_run(
    folder: Path,
    plan: Plan | None,
    result: dict[str, Any],
    checkpoints: tuple[int, ...] = (),
    reports: Lines = ({"kind": "train", "step": 20},),
) -> Path:
    """A run's folder as training leaves it."""
    folder.mkdir(exist_ok=True, parents=True)
    config = folder / "given.toml"
    config.write_text("[train]\nbatch_size = 128\n[cache]\npolicy = 'lfu'\n[model]\nover_arch_layer_sizes = [8, 1]\n")
    (folder / "config.toml").write_text(to_toml(load_config(RunConfig, config)))
    (folder / "result.json").write_text(json.dumps(result))
    lines = [*reports, *({"kind": "checkpoint", "step": step} for step in checkpoints)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if plan is not None:
        plan.save(folder / "plan.json")
    return folder


def reports(steps: Sequence[int], samples: int = 256) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, a step a second, with an evaluation at the end."""
    kinds = ("ids", "embeddings", "gradients", "dense_all_reduce", "other")
    names = ("loss", "auc", "hit_rate_unique", "hit_rate_lookups", *(f"sent_bytes_{kind}" for kind in kinds))
    numbers = {**dict.fromkeys(names, 0.5), "fills": 30.0, "write_backs": 20.0, "samples_per_second": 1e3}
    times = [f"2026-01-01T00:{step // 60:02}:{step % 60:02}.000Z" for step in steps]
    lines = [
        {"kind": "train", "time": time, "step": step, "samples": samples * step, **numbers}
        for step, time in zip(steps, times, strict=True)
    ]
    return [*lines, {"kind": "eval", "step": steps[-1], "logloss": 0.4, "auc": 0.7}]


def write_sweep(folder: Path) -> Path:
    """A sweep's folder: two cache sizes on 1, 2 and 4 ranks, two repeats each; one run failed. On 4 ranks it is 3 times
    as fast as on one."""
    for ratio in (0.1, 0.2):
        for ranks, speed in ((1, 1000.0), (2, 1900.0), (4, 3000.0)):
            for repeat in (0, 1):
                failed = (ratio, ranks, repeat) == (0.2, 2, 1)
                _write_outcome(folder, ranks, ratio, repeat, "failed" if failed else "finished")
                if not failed:
                    plan = predicted_plan(world_size=ranks)
                    result = result_of(plan, samples_per_second=speed + 100 * repeat - 50)
                    name = f"ratio={ratio}-{ranks}-{repeat}"
                    write_run(run_folder(folder, name), None, result, reports=reports([10, 20]))
    return folder


def _write_outcome(folder: Path, ranks: int, ratio: float, repeat: int, status: Status) -> None:
    reason = "ConfigError: <i>no room</i>" if status == "failed" else ""
    outcome = Outcome(
        name=f"ratio={ratio}-{ranks}-{repeat}",
        digest=f"{ratio}{ranks}",
        repeat=repeat,
        ranks=ranks,
        varied={"ranks": ranks, "cache.ratio": ratio},
        status=status,
        reason=reason,
        seconds=1.5,
        started_at=f"2026-01-01T00:00:0{repeat}+00:00",
        attempt=1,
    )
    (folder / "states").mkdir(parents=True, exist_ok=True)
    (folder / "states" / f"{outcome.name}.json").write_text(json.dumps(dataclasses.asdict(outcome)))
