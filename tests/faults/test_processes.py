"""A training whose processes are stopped, killed and asked to end is the training without all that, bit for bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from embershard.commands.train.run import train_run
from embershard.distributed import Supervision, process_group
from embershard.launch.rank_group import waits_for_others
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from tests.faults.endurance import Usage, endure, growth
from tests.faults.processes import (
    KINDS,
    SAVE_EVERY,
    SETTINGS,
    STEPS,
    TORCHRUN,
    Fault,
    Training,
    differences,
    still_alive,
)
from tests.ranks import commands

pytestmark = pytest.mark.slow


def test_a_stopped_rank_is_named_restarted_and_asked_to_end(tmp_path: Path) -> None:
    """In one run: each start of ranks takes seconds. `python -m tests.faults --kills 20` tries all kinds."""
    run = Training(tmp_path / "run", "--max-restarts", "1", "--hang-seconds", "6")
    try:
        run.wait_for_step(2 * SAVE_EVERY - 2)
        run.wait_for(lambda: (run.folder / "checkpoints" / f"step_{SAVE_EVERY}").is_dir())
        first = run.ranks()
        first[1].send_signal(signal.SIGSTOP)
        run.wait_for(lambda: "Restart 1 of 1" in run.text)
        before = run.losses()
        assert "embershard: rank 1 hangs (stopped by a signal)" in run.text
        healthy, stopped = (run.folder / "stacks.txt").read_text().split("rank 1\n")
        assert waits_for_others(healthy), healthy
        assert "trainer.py" in stopped
        run.wait_for(lambda: f"step {2 * SAVE_EVERY + 6}/" in run.text.rpartition("Restart 1 of 1")[2])
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        run.process.send_signal(signal.SIGTERM if is_nohup else signal.SIGHUP)  # a terminal was closed
        assert run.end() == 0, run.text
        assert still_alive(first) == []
        *_, ended, go_on = run.text.splitlines()
        last = int(run.text.rpartition("saved ")[2].split()[0].rpartition("step_")[2])
        assert f"step {last}: stopped by a signal; its state is in" in ended
        assert go_on.startswith("Go on with:")
        assert go_on.endswith(f"--run-dir {run.folder} --resume")
        assert "Traceback" not in run.text
        after = run.losses()
        assert list(after) == list(range(1, last + 1))
        # Later saves may be quicker than the signal.
        assert any(f"step_{step} at step {step}" in run.text for step in range(SAVE_EVERY, STEPS, SAVE_EVERY))
        again = before.keys() - set(range(SAVE_EVERY + 1))
        assert len(again) >= SAVE_EVERY - 2
        assert {step: after[step] for step in before} == before
    finally:
        run.process.kill()


@pytest.mark.extra
@pytest.mark.matrix
def test_a_restart_changes_no_bit_of_an_accumulated_training(tmp_path: Path) -> None:
    settings = [*SETTINGS, "train.accumulate=2", "cache.ratio=0.3"]
    whole = Training(tmp_path / "whole", settings=settings)
    run = Training(tmp_path / "run", "--max-restarts", "1", settings=settings)
    try:
        run.wait_for((run.folder / "checkpoints" / f"step_{SAVE_EVERY}").is_dir)  # saves are beside training
        run.wait_for_step(SAVE_EVERY + 2)
        run.ranks()[1].kill()
        assert (whole.end(), run.end()) == (0, 0), whole.text + run.text
        assert "rank 1 failed first" in run.text
        assert "Restart 1 of 1" in run.text
        assert "Continuing from " in run.text
        assert list(differences(run, whole)) == []
    finally:
        whole.process.kill()
        run.process.kill()


@pytest.mark.matrix
def test_a_killed_rank_and_ctrl_c_under_torchrun(tmp_path: Path) -> None:
    """A run with steps 12 and 24 goes on from step 12, and a rank is killed after its own step 24: the restart goes on
    from there, not from step 12 again. Ctrl-C then ends the ranks with one line, which says how to go on."""
    settings = [*SETTINGS, "train.batch_size=none", "train.global_batch_size=32"]
    quickstart = commands.PROJECT / "examples" / "quickstart.toml"
    config = load_config(RunConfig, quickstart, [*settings, "train.max_steps=24"])
    given = {"resume": None, "unverified": False, "changes": (), "same_run": "", "go_on": ""}
    with process_group("cpu") as ranks:
        train_run(config, ranks, tmp_path / "before", supervision=Supervision(), **given)
    shutil.copytree(tmp_path / "before", tmp_path / "run")  # the lock of the former lasts as long as this process
    settings.append("train.max_steps=30000")
    run = Training(tmp_path / "run", "--resume", "12", settings=settings, launcher=TORCHRUN)
    try:
        run.wait_for_step(26)
        run.wait_for((run.folder / "checkpoints" / "step_24").is_dir)  # that of before is set aside
        assert run.text.count("Continuing from ") == 1
        assert "step_12 at step 12." in run.text
        before = run.losses()
        run.ranks()[1].kill()
        run.wait_for(lambda: run.text.count("Continuing from ") == 2)
        went_on = int(run.text.rpartition(" at step ")[2].partition(".")[0])
        assert went_on % SAVE_EVERY == 0
        assert went_on >= 24
        run.wait_for(lambda: f"step {went_on + 2}/" in run.text.rpartition("Continuing from ")[2])
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 1, "torchrun's own exit code"
        text = run.text.rpartition("Continuing from ")[2]
        last = int(text.partition("saved ")[2].split()[0].rpartition("step_")[2])
        assert len([line for line in text.splitlines() if "Go on with:" in line and line.endswith("--resume")]) == 1
        of_ranks = text.partition("stopped by a signal; its state is in")[0]
        assert "Traceback" not in of_ranks
        assert "gloo" not in text.lower()
        after = run.losses()
        assert list(after)[: went_on + 2] == list(range(1, went_on + 3)), "each step once"
        assert last >= went_on
        shared = before.keys() & after.keys()
        assert {step: after[step] for step in shared} == {step: before[step] for step in shared}
    finally:
        run.process.kill()


def test_seeds_take_all_kinds_and_ranks_in_turn() -> None:
    faults = [Fault.of(seed) for seed in range(20)]
    assert {(fault.kind, fault.rank) for fault in faults} == {(kind, rank) for kind in KINDS for rank in (0, 1)}
    assert all(1 <= fault.step < STEPS for fault in faults)


def test_what_grows_is_named() -> None:
    usages = [Usage(step, 500 << 20, 3000 + 2 * step, 40 + step % 2, 20 + step // 70) for step in range(100)]
    assert [problem.split(" between")[0] for problem in growth(usages)] == [
        "tensors grew from 3048 to 3198",
        "threads grew from 20 to 21",
    ]


@pytest.mark.matrix
def test_a_short_endurance(tmp_path: Path) -> None:
    """Files, processes and exit codes; whether memory grows takes more steps (`python -m tests.faults.endurance`)."""
    assert list(endure(tmp_path / "run", steps=60, saves=6, restarts=1, scale=0.001)) == []
