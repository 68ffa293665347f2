"""Milliseconds of the training thread in a step, by part, beside those of TorchRec's: what a GPU would wait for.

    python -m benchmarks.host_thread [--modes pooled rows ...] [--batch-size 65536]

No GPU needed: 26 tables, one rank, or those of `torchrun`, whose collectives are operations, too. For each mode two
programs step in turn: ours, which is the trainer of `embershard train` with the cache, planning on the thread that
trains as on a GPU; and stock, TorchRec's `TrainPipelineSparseDist` over the same model with all rows resident, its
profiler's marks and its own `SparseArch`. Counted is the processor time of the thread:

    grows_ms      per step, by part: what the host does for a batch of --batch-size samples beyond what it does for one
                  of --small. Operations of torch, FBGEMM's look-ups and the caches' compiled loops do not count: on a
                  GPU they are kernels
    fixed_ms      per step, by part, of a batch of --small samples: Python, and operations on tiny tensors
    operations    of torch, by part: about as many kernels on a GPU, but for plans
    quality_ms    of a report's figures of quality, by batch size

`beside_stock` is ours beyond stock: what is fixed, and what grows in parts where a GPU's host would do the same (not in
plans, forward and backward, where a CPU does more than operations show). `estimate` is a model, not a measurement: who
waits for whom on an H100, by the fixed and growing milliseconds of this machine, a plan's launches on the model of a
GPU, and a GPU's datasheet.

With `--stand-in` the dense part of a step, recorded once, is repeated by a function that computes nothing, as the host
does with a CUDA graph (`train.cuda_graph`): what is left of its time, but for the start of the graph. Losses are then
those of one batch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd import profiler
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import InteractionArch, SparseArch

from benchmarks.common import machine, make_parser, median_ms, report, settings_of
from benchmarks.host_clock import REST, HostClock, keep_memory, medians
from embershard import process_group
from embershard.data import BatchStream, Target
from embershard.distributed import Ranks
from embershard.extras.dense_graph import DenseGraph
from embershard.extras.networks import factorization
from embershard.launch.screen import silence_libraries
from embershard.metrics.predictions import Predicted, PredictionWindow
from embershard.models import build
from embershard.pipeline import LookAheadPipeline
from embershard.pipeline.staged_batch import StagedBatch
from embershard.settings.files import load_config
from embershard.sharding.torchrec import compat
from embershard.sharding.torchrec.modules import CachedModule
from embershard.training import trainer as trainer_module
from embershard.training.config import RunConfig
from embershard.training.dense_call import Computed
from embershard.training.parts import counts
from embershard.training.parts import part as part_module
from embershard.training.parts.counts import StepMetrics
from embershard.training.parts.loss_monitor import Losses
from embershard.training.trainer import Trainer

#: The shape of MLPerf's DLRM, with narrow layers: their operations do not count, or should take no time.
_MODEL = """
[model]
embedding_dim = 4
over_arch_layer_sizes = [8, 8, 8, 8, 1]
[train]
log_every = 1
device = "cpu"
[look_ahead]
lookahead = 4
[embedding_optimizer]
kind = "rowwise_adagrad"
lr = 0.01
[dense_optimizer]
kind = "sgd"
lr = 0.01
[checkpoint]
at_end = false
[data]
kind = "synthetic"
[cache]
ratio = 0.9
"""
_STOCK = {"cache.enabled": False, "look_ahead.lookahead": 0}
MODES: dict[str, dict[str, Any]] = {
    "pooled": {},
    "two pools": {"model.arch": "deepfm"},
    "rows": {"sharding.exchange": "rows"},
    "ids": {"data.synthetic.id_rows": 96_000},
    "static": {"cache.policy": "static", "look_ahead.lookahead": 0, "profile.samples": 20_000},
    "hot_cold": {"sharding.mode": "hot_cold", "sharding.hot_bytes": 200_000, "profile.samples": 20_000},
    "data_parallel": {"sharding.mode": "data_parallel"},
}
PARTS: dict[str, list[tuple[Any, str]]] = {
    "input": [(BatchStream, "__next__")],
    "ids": [(CachedModule, "check_ids")],
    "inputs": [(StagedBatch, name) for name in ("__init__", "send", "receive", "begin")],
    "plan": [(StagedBatch, name) for name in ("know", "make_resident", "close")],
    "quality": [(PredictionWindow, "add")],
    "report of quality": [(PredictionWindow, "quality")],
    "report": [(StepMetrics, "report")],
    "loss": [(Losses, "add")],
}
_REPORTS = ("report of quality", "report")  # at every step here, and at every 20th by default
_ON_HOST = ("input", "ids", "inputs", "quality", "loss", REST)  # others have work of kernels that no operation shows


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--small", type=int, default=64)
    parser.add_argument("--scale", type=float, default=0.02, help="rows of the tables relative to Criteo Kaggle")
    parser.add_argument("--warmup", type=int, default=4, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=7, help="measured steps")
    parser.add_argument("--stand-in", action="store_true", help="compute the dense part of ours once, as a CUDA graph")
    parser.add_argument("--quality-sizes", type=int, nargs="+", default=[16_384, 65_536, 524_288], metavar="SAMPLES")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    silence_libraries()
    result: dict[str, Any] = {"benchmark": "host_thread", "settings": settings_of(options), "machine": machine()}
    with process_group("cpu") as ranks:
        options.output = None if ranks.rank else options.output
        result["quality_ms"] = {str(size): quality_ms(size, ranks) for size in options.quality_sizes}
        for mode in options.modes:
            result.setdefault("modes", {})[mode] = measure(mode, options, ranks)
            if options.output:  # a mode takes a minute: what is measured stays
                Path(options.output).write_text(json.dumps(result, indent=2) + "\n")
    if "pooled" in result["modes"]:
        result["estimate"] = [each for size in (8192, 65_536) for each in estimates(result["modes"]["pooled"], size)]
    report(result, options.output)


def measure(mode: str, options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Return the figures of a mode."""
    (large,) = Steps(mode, options.batch_size, options, ranks).run([True])
    small, fixed = Steps(mode, options.small, options, ranks).run([True, False])
    found: dict[str, Any] = {}
    for who in ("ours", "stock"):
        names = dict.fromkeys([*large[who].host_ms, *small[who].host_ms])
        grows = {name: large[who].host_ms.get(name, 0.0) - small[who].host_ms.get(name, 0.0) for name in names}
        operations = {name: round(count) for name, count in large[who].operations.items() if count >= 1}
        found[who] = {"grows_ms": rounded(grows), "fixed_ms": rounded(fixed[who].host_ms), "operations": operations}
    return {**found, **beside_stock(found)}


def stand_in(compute: Callable[[], Computed]) -> tuple[Computed, Callable[[], None]]:
    """In place of a CUDA graph's capture: what it computed once stays."""
    return compute(), lambda: None


def beside_stock(found: dict[str, Any]) -> dict[str, Any]:
    """Return what ours takes beyond stock, of a step that does not report. Of what grows with the batch, only parts
    count in which a CPU does nothing that a GPU's kernels would do."""
    ours, stock = (
        sum(value for part, value in found[who]["fixed_ms"].items() if part not in _REPORTS)
        for who in ("ours", "stock")
    )
    grows = sum(found["ours"]["grows_ms"].get(part, 0.0) for part in _ON_HOST)
    more = {"fixed_ms": ours - stock, "grows_ms": grows, "all_ms": ours - stock + grows}
    return {"beside_stock": rounded(more), "over_stock": round((ours + grows) / stock, 3)}


def quality_ms(batch_size: int, ranks: Ranks) -> float:
    """Return the milliseconds of a report's figures of quality, behind batches of a size."""
    window = PredictionWindow(Target(), ranks.world_size)
    for number in range(20):
        generator = torch.Generator().manual_seed(number)
        outputs, labels = torch.randn(batch_size, generator=generator), torch.rand(batch_size, generator=generator)
        window.add(Predicted(outputs, (labels < 0.25).float()))
    seconds = []
    for _ in range(21):
        began = time.thread_time()
        window.quality(ranks)
        seconds.append(time.thread_time() - began)
    return median_ms(seconds)


# -- who waits for whom on an H100: a model, not a measurement

#: Milliseconds of an H100 for a step of 65,536 samples of MLPerf's DLRM on Criteo 1TB: the 0.93 TFLOP of its MLPs at
#: 77, 63 and 47 % of the datasheet's rates (67, 494 and 989 TFLOP/s), and 8 ms of activations, interaction and
#: embeddings (5 in bf16). Assumed, and taken as linear in the batch.
GPU_MS = {"fp32": 26.0, "tf32": 11.0, "bf16": 7.0}
#: A plan's kernels beside the training, at 65,536 samples, assumed: the host reads their result once a step.
PLAN_MS = 1.6
#: Kernels of a plan of 26 tables that evicts and ranks slots anew, on the model of a GPU (tests/unit/gpu_model).
PLAN_LAUNCHES = 62
#: Milliseconds of the host: of a kernel of ours, 6 us of Python (`benchmarks.launches`) and 3 of the driver, assumed;
#: and what a kernel costs more than an operation on a CPU, assumed.
LAUNCH_MS, MORE_MS = 0.009, 0.003


def estimates(found: dict[str, Any], batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield, for each precision, what host and GPU take for a step of the standard path, and who waits."""
    ours = found["ours"]
    fixed = sum(value for part, value in ours["fixed_ms"].items() if part not in (*_REPORTS, "plan"))
    grows = sum(max(0.0, ours["grows_ms"].get(part, 0.0)) for part in _ON_HOST) * batch_size / 65_536
    operations = sum(count for part, count in ours["operations"].items() if part not in (*_REPORTS, "plan"))
    launches = operations * MORE_MS + PLAN_LAUNCHES * LAUNCH_MS
    wait = PLAN_MS * batch_size / 65_536
    host = fixed + grows + launches + wait
    for precision, milliseconds in GPU_MS.items():
        gpu = milliseconds * batch_size / 65_536
        parts = {
            "host_ms": host,
            "of_it_python_ms": fixed + grows,
            "of_it_launches_ms": launches,
            "of_it_wait_ms": wait,
        }
        who = "host" if host < gpu else "GPU"
        yield {
            "batch_size": batch_size,
            "precision": precision,
            "gpu_ms": round(gpu, 1),
            **rounded(parts),
            "waits": who,
        }


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Return milliseconds to three digits."""
    return {name: round(value, 3) for name, value in values.items()}


class Figures:
    """Medians over steps, by part."""

    def __init__(self, steps: list[tuple[dict[str, float], Any]]) -> None:
        self.host_ms = medians([times for times, _ in steps])
        self.operations = medians([dict(counts) for _, counts in steps])


class Steps:
    """Both programs of a mode at a batch size, which step in turn."""

    def __init__(self, mode: str, batch_size: int, options: argparse.Namespace, ranks: Ranks) -> None:
        self._mode, self._batch_size, self._options, self._ranks = mode, batch_size, options, ranks

    def run(self, sees_operations: list[bool]) -> list[dict[str, Figures]]:
        """Return, for each kind of clock, the figures of ours and of stock."""
        with contextlib.ExitStack() as stack:
            programs = {"ours": self._ours(stack), "stock": self._stock(stack)}
            return [self._watch(programs, HostClock(PARTS, sees_operations=each)) for each in sees_operations]

    def _watch(self, programs: dict[str, Callable[[], Any]], clock: HostClock) -> dict[str, Figures]:
        steps: dict[str, list[Any]] = {name: [] for name in programs}
        with mock.patch.object(trainer_module, "stage", clock.part):
            for number in range(self._options.warmup + self._options.steps):
                for name in list(programs)[:: -1 if number % 2 else 1]:
                    with _as_torchrec() if name == "stock" else contextlib.nullcontext():
                        found = clock.step(programs[name])
                    if number >= self._options.warmup:
                        steps[name].append(found)
        return {name: Figures(found) for name, found in steps.items()}

    def _ours(self, stack: contextlib.ExitStack) -> Callable[[], Any]:
        trainer = self._trainer(stack, MODES[self._mode])
        if self._options.stand_in:
            trainer.dense_call.by = DenseGraph(trainer.dense_call, stand_in)
        reports = trainer.train()
        return lambda: next(reports)

    def _stock(self, stack: contextlib.ExitStack) -> Callable[[], Any]:
        model = {name: value for name, value in MODES[self._mode].items() if name.startswith("model.")}
        with contextlib.ExitStack() as own:  # TorchRec's own layers, too
            own.enter_context(mock.patch.object(build, "Interactions", InteractionArch))
            for layers in (build, factorization):
                own.enter_context(mock.patch.object(layers, "PooledRows", SparseArch))
            trainer = self._trainer(stack, {**model, **_STOCK})
        pipeline: Any = TrainPipelineSparseDist(trainer.model, trainer.optimizers.dense, self._ranks.device)
        batches = iter(trainer.stream)
        return lambda: pipeline.progress(batches)

    def _trainer(self, stack: contextlib.ExitStack, settings: dict[str, Any]) -> Trainer:
        options = self._options
        count = 2 * self._ranks.world_size * (options.warmup + options.steps + 8) * self._batch_size
        own = {"train.batch_size": self._batch_size, "data.synthetic.num_samples": count}
        own |= {"data.synthetic.scale": options.scale, **settings}
        if "model.arch" not in own:
            own["model.dense_arch_layer_sizes"] = [8, 8, 4]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "run.toml").write_text(_MODEL)
        config = load_config(
            RunConfig, folder / "run.toml", [f"{name}={json.dumps(value)}" for name, value in own.items()]
        )
        on_thread = functools.partial(LookAheadPipeline, worker=False)  # as on a GPU
        stack.enter_context(mock.patch.object(part_module, "LookAheadPipeline", on_thread))
        with mock.patch.object(counts, "count_sent_bytes"):  # kernels that stock has not, and ours need not
            trainer = Trainer(config, self._ranks)
        stack.callback(trainer.close)
        return trainer


@contextlib.contextmanager
def _as_torchrec() -> Iterator[None]:
    """While it lasts, TorchRec's modules name their work, as they do in a program without ours."""
    modules: list[Any] = [each for name, each in list(sys.modules.items()) if name.startswith("torchrec.")]
    ours = [each for each in modules if getattr(each, "record_function", None) is compat._named_work]
    for module in ours:
        module.record_function = profiler.record_function
    try:
        yield
    finally:
        for module in ours:
            module.record_function = compat._named_work


if __name__ == "__main__":
    main()
