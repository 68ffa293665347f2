"""Modes of training that are refused, or that a run cannot change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from embershard.cache.config import CacheConfig
from embershard.errors import ConfigError
from embershard.extras.data_parallel.mode import share_of
from embershard.extras.data_parallel.node_memory import NodeMemory
from tests.unit.troubleshooting.case import Case, Provoke, command, outcome_of

TITLE = "Modes of training"
_FILES = {"run.toml": '[sharding]\nmode = "data_parallel"\n'}
_DRY = ("train", "--config", "run.toml", "--dry-run", "--set")
_NO_EFFECT = "has no effect with sharding.mode='data_parallel': no table is placed, and no embedding travels. " + (
    "Remove one of the two."
)


def _in_rank(call: Callable[[], object]) -> Provoke:
    """Return a function that shows the error of `call` as a rank does: these need GPUs, or two machines."""

    def run() -> int:
        try:
            call()
        except ConfigError as error:
            print(f"[rank0]: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        return 0

    return lambda: outcome_of(run)


def _on_a_gpu() -> None:
    share_of([], cast(Any, None), torch.device("cuda", 0), CacheConfig())


def _on_two_machines() -> None:
    NodeMemory(cast(Any, SimpleNamespace(all_gather_objects=lambda _: [("node0", "a"), ("node1", "b")])))


CASES = [
    Case(
        "Data-parallel tables on GPUs",
        _in_rank(_on_a_gpu),
        '[rank<number>]: ConfigError: mode "data_parallel" on <device>: its ranks share host memory that transfers to '
        'a GPU do not know yet. Train on the CPU (train.device = "cpu"), or use mode "sharded"',
        'Set `train.device = "cpu"`, or another `sharding.mode`.',
        code=1,
    ),
    Case(
        "Data-parallel tables on several machines, or in several containers",
        _in_rank(_on_two_machines),
        '[rank<number>]: ConfigError: mode "data_parallel" keeps one copy of the tables in memory that all ranks map, '
        "so all ranks must be on one machine (and in one container); got rank 0 on <machine>, rank 1 on <machine>. "
        'Start them on one machine, or use mode "sharded"',
        "Start all ranks on one machine, or set another `sharding.mode`.",
        code=1,
    ),
    Case(
        "A plan for data-parallel tables",
        command(*_DRY, 'sharding.plan="plan.json"', files=_FILES),
        f"embershard: sharding.plan='plan.json' {_NO_EFFECT}",
        "Train without the plan, or set another `sharding.mode`.",
    ),
    Case(
        "An exchange of rows between data-parallel tables",
        command(*_DRY, "sharding.exchange=rows", files=_FILES),
        f"embershard: sharding.exchange='rows' {_NO_EFFECT}",
        "Leave `sharding.exchange` out, or set another `sharding.mode`.",
    ),
    Case(
        "A mode without caches",
        command(*_DRY, "cache.enabled=false", files=_FILES),
        'embershard: cache.enabled: got false, needed true in the mode "data_parallel", whose rows are in caches.',
        'Set `cache.enabled = true`, or `sharding.mode = "sharded"`.',
    ),
    Case(
        "A run is to go on in another mode, or with other hot rows (`data.order`)",
        command(
            *("train", "--config", "run.toml", "--run-dir", "mine", "--resume", "--allow-change", "sharding.mode"),
            files=_FILES,
        ),
        "embershard: --allow-change sharding.mode: it is compared as data.order. Allow that.",
        '`data.order` is the order of the samples: "plain", or packed of hot and cold ones, with the digest of the hot '
        "samples. Give `--allow-change data.order`; some samples of that epoch then come twice, and some not at all.",
    ),
]
