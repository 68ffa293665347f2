"""All ranks call the collectives of each group in one order, and only the training's thread and its backward call those
of the training's group: with NCCL, another order hangs. In every mode, with saves and publications beside
the training, evaluations and accumulation, and with waits before the calls that are others on each rank."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from embershard.cache import CacheConfig
from embershard.distributed import CheckpointConfig, PublishConfig, Ranks
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ExchangeChoice, Mode, ShardingConfig
from embershard.training.config import RunConfig
from embershard.training.reports import EvalReport, PublicationReport, SaveReport, TrainReport
from embershard.training.trainer import Trainer
from tests.covering import keep, matrix
from tests.ranks import following, planned, test_trained_ids, time_order
from tests.ranks.noted_calls import Call, disorder, noted_calls
from tests.ranks.planned import here, mixed_plan
from tests.ranks.workers import RankPool
from tests.unit.gpu_model.cases import Case, cases, config_of, write_samples

pytestmark = pytest.mark.ranks

_STEPS = 4


@dataclass(frozen=True)
class Life:
    """What a rank did: its calls, its reports by kind, losses of steps, and figures of evaluations."""

    default: str
    calls: list[Call]
    reports: dict[str, int]
    losses: list[float]
    figures: list[str]


def _export(checkpoint: Path, dtype: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "base").touch()


def live(config: RunConfig, folder: Path, seed: int | None, fault: str = "") -> Life:
    """Train, evaluate, save and publish, as one rank."""
    warnings.simplefilter("ignore")
    with noted_calls(seed) as calls, _planted(fault):
        default = dist.group.WORLD.group_name  # type: ignore[union-attr]
        trainer = Trainer(config, here(), folder / "checkpoints", export=_export)
        reports = list(trainer.train())
        trainer.close()
    kinds = (TrainReport, EvalReport, SaveReport, PublicationReport)
    counts = {kind.__name__: sum(isinstance(report, kind) for report in reports) for kind in kinds}
    losses = [report.loss for report in reports if isinstance(report, TrainReport)]
    figures = [str(report.quality) for report in reports if isinstance(report, EvalReport)]
    return Life(default, calls, counts, losses, figures)


@contextlib.contextmanager
def _planted(fault: str) -> Iterator[None]:
    """A fault in each step: a collective of another thread, in the same place on all ranks; or two that the ranks call
    in another order, of as many bytes."""
    gather = Ranks.all_gather

    def beside(self: Ranks, value: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=gather, args=(self, value), name="beside")
        thread.start()
        thread.join()
        return gather(self, value)

    def turned(self: Ranks, value: torch.Tensor) -> torch.Tensor:
        for dtype in (torch.float32, torch.int32)[:: 1 if self.is_first else -1]:
            dist.all_reduce(torch.ones(2, dtype=dtype))
        return gather(self, value)

    faults = {"another thread": beside, "another order": turned}
    with mock.patch.object(Ranks, "all_gather", faults[fault]) if fault else contextlib.nullcontext():
        yield


def _of_case(folder: Path, case: Case) -> RunConfig:
    return config_of(replace(case, num_ranks=2), write_samples(folder / "samples.parquet"), folder, "cpu")


def _data_parallel(folder: Path) -> RunConfig:
    config = _of_case(folder, CASES["pooled, dlrm"])
    cache = CacheConfig(ratio=0.6)
    return replace(config, sharding=ShardingConfig(mode="data_parallel"), cache=cache, look_ahead=LookAheadConfig(4, 1))


def _ids(folder: Path) -> RunConfig:
    return test_trained_ids.make_config(test_trained_ids.write_clicks(folder))


def _filed(folder: Path) -> RunConfig:
    config = _of_case(folder, CASES["pooled, dlrm"])
    cache = CacheConfig(ratio=0.3, host="file", host_dir=str(folder), host_bytes=16_000)
    return replace(config, cache=cache, train=replace(config.train, init="counter"))


def _by_nodes(folder: Path) -> RunConfig:
    """For four ranks on two nodes, each of which has a group, as have the ranks of all nodes with one number."""
    mixed_plan(["table_row_wise", "grid_shard", "table_column_wise"], 4, 2).save(folder / "plan.json")
    return planned.make_config(folder / "plan.json")


CASES = {
    f"{case.mode}, {case.arch}": case for found in cases() for case in found if case.arch in ("dlrm", "din", "mmoe")
}
MAKERS: dict[str, Callable[[Path], RunConfig]] = {
    **{name: partial(_of_case, case=case) for name, case in CASES.items()},
    "data-parallel": _data_parallel,
    "tables of ids": _ids,
    "rows in a file": _filed,
}
#: All modes and exchanges, without accumulation and with it.
KEPT = ("rows, dlrm", "hot_cold, dlrm", "planned, din", "data-parallel", "tables of ids")


def busy(config: RunConfig, folder: Path, accumulate: int) -> RunConfig:
    """The settings, with all that a run may do beside its steps."""
    return replace(
        config,
        cache=replace(config.cache, overflow="grow"),
        train=replace(config.train, max_steps=_STEPS, eval_every=2, log_every=1, accumulate=accumulate),
        checkpoint=CheckpointConfig(every_steps=2, full_every=2, keep_last=9),
        publish=PublishConfig(str(folder / "published"), every_steps=2),
    )


def _check(pool: RankPool, config: RunConfig, folder: Path, accumulate: int) -> None:
    """Waits before the calls, others on each rank, change no order and no number."""
    numbers = []
    for seed in (None, 5):
        (place := folder / f"seed_{seed}").mkdir()
        lives = pool.run(live, busy(config, place, accumulate), place, seed)
        assert disorder([life.calls for life in lives], lives[0].default) == []
        for life in lives:
            assert all(life.reports.values()), life.reports
            assert len(life.calls) > 20 * _STEPS
            assert {"embershard-save", "embershard-publish"} < {call.thread for call in life.calls}
        numbers.append((lives[0].losses, lives[0].figures))
    assert numbers[0] == numbers[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", keep(["rows, dlrm"], MAKERS))
def test_ranks_call_in_one_order(name: str, two_ranks: RankPool, tmp_path: Path) -> None:
    _check(two_ranks, MAKERS[name](tmp_path), tmp_path, accumulate=1 + [*MAKERS].index(name) % 2)


def follow(files: list[Path], folder: Path, seed: int | None) -> Life:
    """Train what comes to a folder, as one rank."""
    warnings.simplefilter("ignore")
    with noted_calls(seed) as calls:
        default = dist.group.WORLD.group_name  # type: ignore[union-attr]
        trained, losses = following.run(files, folder / "came", folder / "run", 5)
    return Life(default, calls, {}, losses, [str(window) for window in trained.windows])


@pytest.mark.matrix
def test_ranks_that_wait_for_files_call_in_one_order(two_ranks: RankPool, tmp_path: Path) -> None:
    """The first rank looks for them, and the ranks ask each other as long as there is none."""
    files, numbers = sorted(time_order.write_clicks(tmp_path / "clicks").iterdir())[:2], []
    for seed in (None, 5):
        (folder := tmp_path / f"seed_{seed}").mkdir()
        lives = two_ranks.run(follow, files, folder, seed)
        assert disorder([life.calls for life in lives], lives[0].default) == []
        assert {"embershard-save", "MainThread"} <= {call.thread for call in lives[0].calls}
        assert lives[0].figures
        numbers.append((lives[0].losses, lives[0].figures))
    assert numbers[0] == numbers[1]


@pytest.mark.matrix
def test_ranks_of_two_nodes_call_in_one_order(four_ranks: RankPool, tmp_path: Path) -> None:
    _check(four_ranks, _by_nodes(tmp_path), tmp_path, accumulate=1)


def test_every_mode_is_there(tmp_path: Path) -> None:
    found = [MAKERS[name](tmp_path).sharding for name in KEPT]
    assert {each.mode for each in found} == set(get_args(Mode))
    assert {each.exchange for each in found} | {"auto"} == set(get_args(ExchangeChoice)), '"auto" is for planning'
    assert {[*MAKERS].index(name) % 2 for name in KEPT} == {0, 1}, "with accumulation, and without"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        matrix("another thread", "thread 'beside' calls _allgather_base of .* in the group of the training"),
        ("another order", r"call \d+: allreduce of float32\[2\] \| allreduce of int32\[2\]"),
    ],
)
def test_planted_faults_are_noticed(fault: str, said: str, two_ranks: RankPool, tmp_path: Path) -> None:
    config = busy(MAKERS["rows, dlrm"](tmp_path), tmp_path, accumulate=1)
    lives = two_ranks.run(live, config, tmp_path, None, fault)
    found = disorder([life.calls for life in lives], lives[0].default)
    assert re.search(said, found[0])


def test_partners_exchange_the_same_numbers() -> None:
    """Of an all-to-all between ranks that call in one order."""
    one, other = (
        Call("0", "alltoall_base", "MainThread", True, (("torch.float32", ()),), sizes)
        for sizes in (((8, 16), (8, 24)), ((24, 0), (16, 0)))
    )
    assert disorder([[one], [other]], "0") == []
    assert disorder([[one], [replace(other, sizes=((16, 0), (16, 0)))]], "0") != []
    assert disorder([[one], []], "0") != []
