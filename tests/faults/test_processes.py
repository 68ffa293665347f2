"""A training whose processes are stopped, killed and asked to end is the training without all that, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from embershard.launch.ranks.hang_watch import waits_for_others
from tests.faults.processes import HANG_SECONDS, KINDS, STEPS, Fault, Training, differences, still_alive

pytestmark = pytest.mark.slow


def test_stopped_restarted_asked_to_end_and_resumed(tmp_path: Path) -> None:
    """One run with all of it: each start of ranks takes seconds. `python -m tests.faults --kills 20` has the rest."""
    whole, run = Training(tmp_path / "whole"), None
    try:
        assert whole.end() == 0, whole.text
        run = Training(tmp_path / "run", "--max-restarts", "1", "--hang-seconds", str(HANG_SECONDS))
        run.wait_for_step(20)
        before = run.ranks()
        before[1].send_signal(signal.SIGSTOP)
        run.wait_for(lambda: "Restart 1 of 1" in run.text)
        assert "embershard: rank 1 hangs (stopped by a signal)" in run.text
        healthy, stopped = (run.folder / "stacks.txt").read_text().split("rank 1\n")
        assert waits_for_others(healthy)
        assert "trainer.py" in stopped
        run.wait_for(lambda: "step 40/" in run.text)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 0, run.text
        assert still_alive(before) == []
        *_, ended, go_on = run.text.splitlines()
        assert "stopped by a signal; its state is in" in ended
        assert go_on.startswith("Go on with:")
        assert go_on.endswith(f"--run-dir {run.folder} --resume")
        assert "Traceback" not in run.text
        resumed = Training(run.folder, "--resume")
        assert resumed.end() == 0, resumed.text
        assert list(differences(resumed, whole)) == []
    finally:
        for training in (whole, run):
            if training is not None and training.process.poll() is None:
                training.process.kill()


def test_seeds_take_all_kinds_and_ranks_in_turn() -> None:
    faults = [Fault.of(seed) for seed in range(20)]
    assert {(fault.kind, fault.rank) for fault in faults} == {(kind, rank) for kind in KINDS for rank in (0, 1)}
    assert all(1 <= fault.step < STEPS for fault in faults)
