"""Input that is damaged on one rank, or changes under all: the run saves, and every rank ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from embershard.cache import CacheConfig
from embershard.data import CriteoConfig, DataConfig, TableConfig, TableFeature, open_source
from embershard.data.sources.table import source
from embershard.distributed import CheckpointConfig, complete_checkpoints
from embershard.errors import DataError
from embershard.pipeline.config import LookAheadConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import BadRowsReport, EvalReport, TrainReport
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.ranks.planned import here, make_config
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

GLOBAL_BATCH = 20
LINES = 400


def write_clicks(path: Path, bad: tuple[int, ...] = ()) -> None:
    """Lines with ids that differ, of which those number `bad` have a wrong last cell."""
    lines = []
    for row in range(LINES):
        ids = [f"{(row * 7919 + table * 31) % 997:x}" for table in range(25)]
        lines.append("\t".join([str(row % 2), *["3"] * 13, *ids, "zebra" if row in bad else f"{row:x}"]))
    path.write_text("\n".join(lines) + "\n")


def config(path: Path, lookahead: int, **data: Any) -> RunConfig:
    """A run over the clicks, in the files' order, with global batches of 20."""
    rows = CriteoConfig(num_rows=(1, *[40] * 25), dense_transform="none")
    given = {"shuffle": False, "chunk_rows": 10, "num_workers": 0, "criteo": rows, **data}
    return make_config(
        None,
        data=DataConfig("criteo", str(path), **given),
        cache=CacheConfig(ratio=0.5, policy="lru"),
        look_ahead=LookAheadConfig(lookahead=lookahead, prefetch=min(lookahead, 2)) if lookahead else NO_LOOK_AHEAD,
        train=TrainConfig(global_batch_size=GLOBAL_BATCH, batch_size=None, log_every=1, max_steps=18, device="cpu"),
        checkpoint=CheckpointConfig(at_end=False),
    )


def what_is_held_out(data: DataConfig) -> tuple[int, list[bool], str]:
    """How often this rank passed over the columns that decide, what is held out then, and the error if it failed."""
    with mock.patch.object(source, "hold_out_by_column", wraps=source.hold_out_by_column) as made:
        try:
            bits = open_source(data, share=here().from_first).held_out.samples
        except DataError as error:
            return made.call_count, [], str(error)
    return made.call_count, bits.between(0, bits.num_samples).tolist(), ""


NO_LOOK_AHEAD = LookAheadConfig(lookahead=0)


def train(run: RunConfig, folder: Path, resume: bool = False, truncate_at: int | None = None) -> dict[str, Any]:
    """Train; at step `truncate_at` the first rank cuts the data in half. What the rank saw, until an error ended it."""
    ranks = here()
    trainer = Trainer(run, ranks, folder)
    if resume:
        trainer.resume(complete_checkpoints(folder)[-1])
    found: dict[str, Any] = {"losses": [], "bad": 0, "rows": set(), "held_out": None, "error": ""}
    try:
        for report in trainer.train():
            if isinstance(report, TrainReport):
                found["losses"].append(report.loss)
                if report.step == truncate_at and ranks.is_first:
                    os.truncate(run.data.path, os.stat(run.data.path).st_size // 2)
                dist.barrier()
            elif isinstance(report, BadRowsReport):
                found["bad"] = report.num_bad
                found["rows"] |= {row.row for row in report.rows}
            elif isinstance(report, EvalReport):
                found["held_out"] = report.quality["samples"]
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["steps"] = trainer.steps
    found["saved"] = [path.name for path in complete_checkpoints(folder)]
    trainer.close()
    return found


@pytest.mark.parametrize("lookahead", [matrix(0), 4])
def test_a_bad_row_of_one_rank_ends_all_after_a_checkpoint(two_ranks: RankPool, tmp_path: Path, lookahead: int):
    write_clicks(tmp_path / "day_0", bad=(251,))  # the second half of global batch 12
    run = config(tmp_path / "day_0", lookahead)
    first, second = two_ranks.run(train, run, tmp_path / "saved")
    assert first["steps"] == second["steps"]
    assert first["steps"] in range(12 - lookahead - 2, 13)
    assert first["saved"] == [f"step_{first['steps']}"]
    assert "day_0:252 C26='zebra'" in second["error"]
    assert first["error"].startswith("DataError: the input of rank 1 failed, so all ranks stop")


@pytest.mark.matrix
@pytest.mark.parametrize("lookahead", [matrix(0), 4])
def test_a_truncated_file_ends_the_run_and_a_repaired_one_lets_it_go_on(two_ranks, tmp_path, lookahead):
    path = tmp_path / "day_0"
    write_clicks(path)
    run, whole, status = config(path, lookahead), path.read_bytes(), path.stat()
    wanted = two_ranks.run(train, run, tmp_path / "whole")[0]
    assert (len(wanted["losses"]), wanted["error"]) == (18, "")
    stopped = two_ranks.run(train, run, tmp_path / "saved", False, 3)
    steps = stopped[0]["steps"]
    for found in stopped:
        assert (found["steps"], found["saved"]) == (steps, [f"step_{steps}"])
        assert 3 <= steps < 18
        assert "day_0: changed while it was read, at byte" in found["error"] or "input of rank" in found["error"]
    path.write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    resumed = two_ranks.run(train, run, tmp_path / "saved", True)[0]
    assert stopped[0]["losses"] + resumed["losses"] == wanted["losses"]


def test_bad_rows_are_dropped_alike_on_one_rank_and_on_two(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path):
    path, bad = tmp_path / "day_0", (3, 100, 101, 250, 350, 399)
    write_clicks(path, bad)
    run = config(path, lookahead=4, bad_rows=0.1, shuffle=True)
    alone = one_rank.run(train, run, tmp_path / "alone")[0]
    together = two_ranks.run(train, run, tmp_path / "together")[0]
    assert alone["error"] == together["error"] == ""
    assert together["losses"] == pytest.approx(alone["losses"], rel=0, abs=loss_rounding(18, GLOBAL_BATCH))
    for found in (alone, together):
        assert (found["bad"], found["rows"], found["held_out"]) == (6, {row + 1 for row in bad}, 39)
    other = tmp_path / "other"
    write_clicks(other)
    clean = two_ranks.run(train, config(other, lookahead=4, shuffle=True), tmp_path / "clean")[0]
    assert clean["losses"] != together["losses"]


@pytest.mark.matrix
def test_too_many_bad_rows_end_all_ranks_at_the_same_step(two_ranks: RankPool, tmp_path: Path):
    write_clicks(tmp_path / "day_0", bad=tuple(range(100, 300, 20)))
    run = config(tmp_path / "day_0", lookahead=0, bad_rows=0.01)
    first, second = two_ranks.run(train, run, tmp_path / "saved")
    assert first["error"] == second["error"]
    assert "4 bad rows in 360 samples (1.11%) of the training data; data.bad_rows = 0.01 allows 1.00%" in first["error"]
    assert first["steps"] == second["steps"] == 9
    assert first["saved"] == second["saved"] == ["step_9"]


def test_one_rank_passes_over_the_columns_for_all(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path):
    lines = [f"{n % 2},{n},u{n % 7},{(n * 37) % 50}" for n in range(100)]
    (tmp_path / "a.csv").write_text("\n".join(["label,item,user,time", *lines]) + "\n")
    table = TableConfig({"item": TableFeature("sparse", num_rows=50)})
    data = DataConfig("table", str(tmp_path / "a.csv"), table=table, split="last", split_column="user")
    ((_, alone, _),) = one_rank.run(what_is_held_out, data)
    assert two_ranks.run(what_is_held_out, data) == [(1, alone, ""), (0, alone, "")]
    assert [number for number, is_held_out in enumerate(alone) if is_held_out] == list(range(93, 100))
    (tmp_path / "a.csv").write_text("\n".join(["label,item,user,time", *lines, "0,1"]) + "\n")
    first, second = two_ranks.run(what_is_held_out, data)
    assert first[2] == second[2] != ""
    assert "a.csv:102 has 2 comma-separated columns" in second[2]


def test_a_run_trains_on_the_others_and_evaluates_on_those_held_out(two_ranks: RankPool, tmp_path: Path):
    write_clicks(tmp_path / "day_0", bad=(3, 100, 101))
    run = config(tmp_path / "day_0", lookahead=4, bad_rows=0.1, split="random", chunk_rows=50)
    first, second = two_ranks.run(train, run, tmp_path / "saved")
    assert first["error"] == second["error"] == ""
    assert first["losses"] == second["losses"]
    samples = open_source(run.data).held_out.samples
    held_out = samples.between(0, LINES).tolist()
    assert first["held_out"] == sum(held_out) - sum(held_out[row] for row in (3, 100, 101))
