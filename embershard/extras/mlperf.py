"""A run's log as MLPerf Training asks for it, of its benchmark DLRMv4 (rules 6.1)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

import embershard
from embershard.reports.tracking.run import TrackedRun

#: The log, in the run's folder.
MLPERF_LOG = "mlperf.log"
#: AUC at which a run of the benchmark has succeeded.
TARGET_AUC = 0.75

_FORMATS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "fp16", "fp64": "fp64"}
#: Of what ranks send, from the fewest bits on.
_SENT_FORMATS = {"int8": "int8", "fp8": "fp8", "fp16": "fp16", "bf16": "bfloat16", "fp32": "fp32"}
#: What the benchmark's rules call these optimizers.
_OPTIMIZERS = {"adam": "Adam", "rowwise_adagrad": "RowWiseAdagrad"}


class MlperfTracker:
    """`mlperf.log` in the run's folder: lines of `mlperf_logging`, which its compliance checker reads.

    It says what was, in the division "open": settings that differ from the benchmark's, or data that are not its data,
    fail the checker's rules about them. A run that was stopped and goes on adds to its log.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlperf_logging.mllog.mllog import MLLogger

        path = run.folder / MLPERF_LOG
        self._once_keys = _keys(path)
        self._handler = logging.FileHandler(path)
        logger = logging.Logger("embershard.mlperf", logging.INFO)  # of its own: the shared one prints
        logger.addHandler(self._handler)
        self._log = MLLogger(logger, root_dir=str(Path(embershard.__file__).parents[1]))
        self._run, self._step, self._samples = run, run.resumed_at or 0, (run.resumed_at or 0) * run.global_batch_size
        self._best: float | None = None
        self._has_ended = False
        self._begin()

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        if "train/samples" in numbers:
            self._step, self._samples = step, int(numbers["train/samples"])
        for kind in ("eval", "window"):
            if f"{kind}/samples" in numbers:
                self._evaluated(step, {name: numbers.get(f"{kind}/{name}") for name in ("samples", "auc", "seconds")})

    def finish(self, result: Mapping[str, float]) -> None:
        self._end()

    def close(self) -> None:
        if not self._has_ended:
            self._end()
        self._handler.close()

    def _begin(self) -> None:
        began = int(psutil.Process().create_time() * 1e3)
        # Caches of files are left as they are: emptying them takes a right that a training has not.
        self._once("cache_clear", value=False)
        if "init_start" not in self._once_keys:
            self._log.start("init_start", time_ms=began)
        for key, value in self._facts().items():
            self._once(key, value)
        if "init_stop" not in self._once_keys:
            self._log.end("init_stop")
            self._log.start("run_start")
        self._log.start("block_start", metadata=self._at(self._samples))

    def _facts(self) -> dict[str, Any]:
        """Return what is known before the first step, by the rules' names; the batch first, since others are judged
        by it."""
        run, settings = self._run, self._run.settings
        batch, evaluated = run.global_batch_size, settings["train.eval_every"]
        sent = [settings["sharding.forward_dtype"], settings["sharding.backward_dtype"]]
        number = _FORMATS[settings["train.precision"]]
        betas = settings["dense_optimizer.betas"] or (0.9, 0.999)
        dense, sparse = settings["dense_optimizer.kind"], settings["embedding_optimizer.kind"]
        return {
            "submission_benchmark": "dlrmv4",
            "submission_division": "open",
            "submission_org": run.config.mlperf_org,
            "submission_platform": run.platform,
            "submission_status": "research",
            "seed": settings["train.seed"],
            "global_batch_size": batch,
            "micro_batch_size": batch // run.world_size,
            "gradient_accumulation_steps": 1,
            "train_samples": run.train_samples,
            "max_sequence_length": settings["model.hstu.max_events"],  # most events of a history
            "lowest_numerical_precision_in_linear": number,
            "lowest_numerical_precision_in_attn": number,  # products; scores and sums stay float32
            "lowest_numerical_precision_in_comm": lowest_format(sent),
            **dict.fromkeys([f"{kind}_parallelism" for kind in ("tensor", "pipeline", "context", "expert")], 1),
            "config_filename": "config.toml",
            "opt_name": _OPTIMIZERS.get(dense, dense),
            "opt_base_learning_rate": settings["dense_optimizer.lr"],
            "opt_adam_beta_1": betas[0],
            "opt_adam_beta_2": betas[1],
            "opt_adam_epsilon": settings["dense_optimizer.eps"] or 1e-8,
            "opt_weight_decay": settings["dense_optimizer.weight_decay"] or 0.0,
            "opt_gradient_clip_norm": settings["dense_optimizer.clip_norm"],
            "opt_sparse_name": _OPTIMIZERS.get(sparse, sparse),
            "opt_sparse_base_learning_rate": settings["embedding_optimizer.lr"],
            "opt_learning_rate_warmup_steps": settings["schedule.warmup_steps"],
            "opt_learning_rate_warmup_start_lr": 0.0,
            "eval_every_data_pct": evaluated * batch / run.train_samples if evaluated and run.train_samples else None,
        }

    def _evaluated(self, step: int, numbers: Mapping[str, float | None]) -> None:
        at = self._at(self._samples + (step - self._step) * self._run.global_batch_size)
        now, auc = int(time.time() * 1e3), numbers["auc"]
        self._once("eval_samples", numbers["samples"])
        began = now - int((numbers["seconds"] or 0.0) * 1e3)
        self._log.end("block_stop", metadata=at, time_ms=began)
        self._log.start("eval_start", metadata=at, time_ms=began)
        if auc is not None:  # of one class only there is none
            self._log.event("eval_accuracy", auc, metadata=at, time_ms=now)
            self._best = auc if self._best is None else max(self._best, auc)
        self._log.end("eval_stop", metadata=at, time_ms=now)
        self._log.start("block_start", metadata=at, time_ms=now)

    def _end(self) -> None:
        self._has_ended = True
        self._log.end("block_stop", metadata=self._at(self._samples))
        reached = self._best is not None and self._best >= TARGET_AUC
        self._log.end("run_stop", metadata={"status": "success" if reached else "aborted"})

    def _at(self, samples: int) -> dict[str, int]:
        return {"samples_count": samples}

    def _once(self, key: str, value: Any) -> None:
        if key not in self._once_keys:
            self._log.event(key, value)
            self._once_keys.add(key)


def _keys(path: Path) -> set[str]:
    """Return the keys that a log has, and take a last line away that was cut off where the run was killed."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return {json.loads(line.removeprefix(":::MLLOG "))["key"] for line in whole.splitlines()}


def lowest_format(kinds: Collection[str]) -> str:
    """Return MLPerf's name of the type with the fewest bits.

    >>> lowest_format(["fp16", "fp8"]), lowest_format(["fp32", "bf16"]), lowest_format(["fp32", "fp32"])
    ('fp8', 'bfloat16', 'fp32')
    """
    return next(name for kind, name in _SENT_FORMATS.items() if kind in kinds)
