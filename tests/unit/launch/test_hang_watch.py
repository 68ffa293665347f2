"""When ranks hang, and which: from looks at them, without processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import embershard
from embershard.launch.rank_group import HangWatch, Look, hanging_ranks, waits_for_others

IDLE = Look(beats=7, cpu_seconds=3.0, disk_bytes=100, state="sleeping")
COLLECTIVE = 'File "/env/torch/distributed/distributed_c10d.py", line 4287 in all_gather'
READER = 'File "/app/reader.py", line 3 in read'


def seconds_until_hang(looks: list[dict[int, Look]], hang_seconds: float = 10.0, most: int = 100) -> int | None:
    """The last look stays."""
    watch = HangWatch(hang_seconds)
    for second in range(1, most):
        if watch.add(1.0, looks[min(second, len(looks)) - 1]):
            return second
    return None


def look(**changes: object) -> Look:
    return Look(**{**IDLE.__dict__, **changes})  # type: ignore[arg-type]


def test_ranks_that_do_nothing_hang():
    assert seconds_until_hang([{0: IDLE, 1: IDLE}]) == 12  # the first look shows no time that passed


@pytest.mark.parametrize(
    "change",
    [
        lambda n: {"beats": n},
        lambda n: {"disk_bytes": n},
        lambda n: {"state": "tracing-stop"},  # in a debugger
    ],
)
def test_one_rank_that_works_is_enough(change):
    assert seconds_until_hang([{0: look(**change(n)), 1: IDLE} for n in range(100)]) is None


@pytest.mark.parametrize("change", [lambda n: {"cpu_seconds": 0.5 * n}, lambda _: {"state": "disk-sleep"}])
def test_set_up_may_take_any_time(change):
    assert seconds_until_hang([{0: look(beats=0, **change(n)), 1: look(beats=0)} for n in range(100)]) is None


def test_work_without_a_step_ends_later():
    """An endless loop, collectives that spin."""
    assert seconds_until_hang([{0: look(cpu_seconds=n), 1: IDLE} for n in range(100)]) == 52


def test_the_time_that_ran_out_is_named():
    watch = HangWatch(10.0)
    said = [watch.add(1.0, {0: look(cpu_seconds=second)}) for second in range(53)]
    assert said[-1] == "for 50 s a rank worked, and none ended a step (5 times --hang-seconds)"
    assert set(said[:-2]) == {""}


def test_processor_time_of_idle_threads_is_no_work():
    assert seconds_until_hang([{0: look(cpu_seconds=0.01 * n)} for n in range(100)]) == 12


def test_a_stopped_rank_hangs_even_while_others_work():
    looks = [{0: look(beats=n), 1: look(state="stopped")} for n in range(100)]
    assert seconds_until_hang(looks) == 11
    paused = [{0: look(beats=n), 1: look(state="stopped" if n < 5 else "sleeping")} for n in range(100)]
    assert seconds_until_hang(paused) is None


def test_a_rank_that_ended_is_progress():
    assert seconds_until_hang([{0: IDLE, 1: IDLE}] * 8 + [{0: IDLE}]) == 20


@pytest.mark.parametrize(
    ("looks", "stacks", "hanging"),
    [
        ({0: IDLE, 1: look(state="stopped")}, {0: READER, 1: COLLECTIVE}, [1]),
        ({0: IDLE, 1: IDLE}, {0: COLLECTIVE, 1: READER}, [1]),
        ({0: IDLE, 1: IDLE}, {0: READER, 1: COLLECTIVE}, [0]),
        ({0: IDLE, 1: IDLE, 2: IDLE}, {0: READER, 1: COLLECTIVE, 2: ""}, [0, 2]),
        ({0: IDLE, 1: look(beats=6)}, {0: COLLECTIVE, 1: COLLECTIVE}, [1]),
        ({0: IDLE, 1: IDLE}, {0: COLLECTIVE, 1: COLLECTIVE}, []),
    ],
)
def test_the_rank_that_others_wait_for_is_named(looks, stacks, hanging):
    traces = {rank: f"Current thread 0x1 (most recent call first):\n  {text}" for rank, text in stacks.items()}
    assert hanging_ranks(looks, traces) == hanging


def test_the_main_thread_decides():
    """It is the last; other threads may wait for anything."""
    threads = [f"Thread 0x{n} (most recent call first):\n  {text}\n" for n, text in enumerate((COLLECTIVE, READER))]
    assert not waits_for_others("\n".join(threads))
    assert waits_for_others("\n".join(reversed(threads)))


#: A collective of a process group, or the wait for one, without a function of `torch.distributed`.
_DIRECT = re.compile(r"group\.(alltoall|allreduce|allgather|broadcast)\w*\(|_?works?(\.pop\(0\))?\.wait\(")


def _waits_directly() -> list[Path]:
    package = Path(embershard.__file__).parent
    found = [path for path in sorted(package.rglob("*.py")) if _DIRECT.search(path.read_text(encoding="utf-8"))]
    return [path for path in found if path.parent.name != "file"]  # those wait for a disk


def test_a_rank_in_a_process_group_of_its_own_call_waits_for_others():
    """These have no frame of torch's."""
    assert {"routes.py", "dense_call.py"} <= {path.name for path in _waits_directly()}
    for path in _waits_directly():
        assert waits_for_others(f'Current thread 0x1 (most recent call first):\n  File "{path}", line 3 in backward'), (
            path
        )
    other = Path(embershard.__file__).parent / "training" / "trainer.py"
    assert not waits_for_others(f'Current thread 0x1 (most recent call first):\n  File "{other}", line 3 in step')


_SAVE = """rank 0
Thread 0x01 (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 3151 in broadcast
  File "/embershard/training/checkpoint/background_save.py", line 81 in _write

Thread 0x02 (most recent call first):
  File "/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker

Current thread 0x03 (most recent call first):
  File "{}", line 1139 in {}
  File "/embershard/training/checkpoint/background_save.py", line 61 in wait
"""


def test_a_rank_that_waits_for_its_save_waits_for_those_that_save():
    assert waits_for_others(_SAVE.format("/lib/python3.11/threading.py", "_wait_for_tstate_lock"))
    assert not waits_for_others(_SAVE.format("/app/reader.py", "read"))
    alone = _SAVE.replace("/env/torch/distributed/distributed_c10d.py", "/embershard/whole_file.py")
    assert not waits_for_others(alone.format("/lib/python3.11/threading.py", "_wait_for_tstate_lock"))
