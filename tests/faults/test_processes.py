"""A training whose processes are stopped, killed and asked to end is the training without all that, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from embershard.launch.ranks.hang_watch import waits_for_others
from tests.faults.endurance import endure
from tests.faults.processes import KINDS, SAVE_EVERY, STEPS, Fault, Training, still_alive

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
        assert waits_for_others(healthy)
        assert "trainer.py" in stopped
        run.wait_for_step(2 * SAVE_EVERY + 6)
        run.process.send_signal(signal.SIGTERM)
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


def test_seeds_take_all_kinds_and_ranks_in_turn() -> None:
    faults = [Fault.of(seed) for seed in range(20)]
    assert {(fault.kind, fault.rank) for fault in faults} == {(kind, rank) for kind in KINDS for rank in (0, 1)}
    assert all(1 <= fault.step < STEPS for fault in faults)


def test_a_short_endurance(tmp_path: Path) -> None:
    """Files, processes and exit codes; whether memory grows takes more steps (`python -m tests.faults.endurance`)."""
    assert list(endure(tmp_path / "run", steps=60, saves=6, restarts=1)) == []
