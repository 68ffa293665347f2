"""Parts that several benchmarks use: options, a process group of one rank, a sharded model, timing, the report."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from embershard import plan_sharding
from embershard.data import BatchStream, DataConfig, SyntheticConfig, open_source


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--output`; its help shows the description as it is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="also write the JSON to this file")
    return parser


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that decide what is measured."""
    return {name: value for name, value in vars(options).items() if name != "output"}


@contextlib.contextmanager
def single_process() -> Iterator[torch.device]:
    """Start a process group of one rank, and end it. Yields the device to train on."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            yield device
        finally:
            dist.destroy_process_group()


def shard(model: nn.Module, sharder: ModuleSharder, device: torch.device, sharding: str) -> DistributedModelParallel:
    """Return `model` with all its tables sharded in one way over the group."""
    tables = sharder.shardable_parameters(next(m for m in model.modules() if type(m) is sharder.module_type))
    constraints = {table: ParameterConstraints(sharding_types=[sharding]) for table in tables}
    plan = plan_sharding(model, [sharder], world_size=1, local_world_size=1, device=device, constraints=constraints)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=[sharder])


def interleaved(
    variants: dict[str, Callable[[int], Any]], indices: Sequence[int], device: torch.device
) -> dict[str, list[float]]:
    """Call the variants in turn with each index, in alternating order; return each variant's seconds per call."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn, index in enumerate(indices):
        for name in list(variants) if turn % 2 == 0 else list(variants)[::-1]:
            synchronize(device)
            started = time.perf_counter()
            variants[name](index)
            synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def generated_stream(scale: float, batch_size: int, rank: int = 0, world_size: int = 1) -> BatchStream:
    """Return a rank's endless stream of generated batches like Criteo Kaggle's, whose row counts are multiplied."""
    config = DataConfig(kind="synthetic", synthetic=SyntheticConfig(scale=scale))
    return BatchStream(
        open_source(config),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        split="train",
        epochs=None,
        config=config,
    )


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return round(statistics.median(seconds) * 1e3, 3)


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median of `a[i] / b[i]`. Each pair was measured side by side: a slow moment affects both."""
    return round(statistics.median(x / y for x, y in zip(a, b, strict=True)), 3)


def machine() -> dict[str, Any]:
    """Describe this machine, for readers of its figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def embershard(arguments: Sequence[str]) -> None:
    """Run a command of `embershard`; end with its output if it fails."""
    command = [sys.executable, "-m", "embershard.commands.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"embershard {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def report(result: dict[str, Any], output: str | None) -> None:
    """Print the result as JSON, and write it to `output` when given."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        Path(output).write_text(text + "\n")
