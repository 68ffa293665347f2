"""The gauge of the training thread: what a part does on the host is seen, and what would be a kernel is not."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import host_clock, host_thread
from embershard.cache import loops


class Clock:
    """Stands for a thread's processor time: work says what it takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        """As `time.thread_time`."""
        return self.now

    def work(self, milliseconds: float) -> None:
        """Take so long."""
        self.now += milliseconds / 1e3


CLOCK = Clock()


@torch.library.custom_op("embershard_tests::work", mutates_args=())
def operation(numbers: torch.Tensor) -> torch.Tensor:
    """An operation of torch that takes a millisecond for each number."""
    CLOCK.work(len(numbers))
    return numbers.clone()


class Step:
    """Parts of a step: one works on the host, the others leave that to operations and compiled loops."""

    def outer(self) -> None:
        """Work for 2 ms, and have the others work."""
        CLOCK.work(2)
        self.inner()
        operation(torch.zeros(40))
        loops.find()
        threading.Thread(target=self.inner).start()

    def inner(self) -> None:
        """Work for 3 ms; elsewhere that is another thread's."""
        if threading.current_thread() is threading.main_thread():
            CLOCK.work(3)


@pytest.fixture
def measured(monkeypatch) -> Callable[[bool], tuple[dict[str, float], Any]]:
    def loop() -> None:
        CLOCK.work(500)
        loops.fill()

    monkeypatch.setattr(host_clock, "time", CLOCK)
    monkeypatch.setattr(loops, "find", loop)
    monkeypatch.setattr(loops, "fill", lambda: CLOCK.work(7))
    step = Step()

    def program() -> None:
        CLOCK.work(1)
        step.outer()

    def measure(sees_operations: bool) -> tuple[dict[str, float], Any]:
        functions = {name: [(Step, name)] for name in ("outer", "inner")}
        return host_clock.HostClock(functions, sees_operations=sees_operations).step(program)

    return measure


def test_a_part_is_its_own_work_on_the_host(measured):
    milliseconds, operations = measured(True)
    assert milliseconds == pytest.approx({"rest": 1, "outer": 2, "inner": 3})
    assert operations["outer"] >= 2  # zeros, and ours


def test_without_operations_everything_counts(measured):
    milliseconds, operations = measured(False)
    assert milliseconds == pytest.approx({"rest": 1, "outer": 2 + 40 + 500 + 7, "inner": 3})
    assert operations == Counter()


def test_what_is_ours_is_what_stock_does_not_take():
    ours = {
        "fixed_ms": {"plan": 1.0, "report": 50.0, "ids": 2.5},
        "grows_ms": {"plan": 40.0, "ids": 0.5, "rest": -0.25},
    }
    stock = {"fixed_ms": {"rest": 2.0}, "grows_ms": {"rest": 30.0}}
    found = host_thread.beside_stock({"ours": ours, "stock": stock})
    assert found == {"beside_stock": {"fixed_ms": 1.5, "grows_ms": 0.25, "all_ms": 1.75}, "over_stock": 1.875}


def test_who_waits_follows_from_both_sides():
    ours = {
        "fixed_ms": {"ids": 4.0, "plan": 9.0},
        "grows_ms": {"ids": 2.0, "forward": 99.0},
        "operations": {"ids": 100},
    }
    found = {each["precision"]: each for each in host_thread.estimates({"ours": ours}, 65_536)}
    assert found["bf16"]["of_it_python_ms"] == 6.0
    assert found["bf16"]["host_ms"] == pytest.approx(6 + 0.3 + 0.558 + 1.6)
    assert [found[name]["waits"] for name in ("fp32", "tf32", "bf16")] == ["host", "host", "GPU"]


def toy_run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(host_thread, "keep_memory", lambda: None)  # it is of the whole process
    arguments = "--modes pooled --batch-size 64 --small 8 --steps 2 --warmup 4 --scale 0.001 --quality-sizes 100"
    words = ["host_thread", *arguments.split(), *options, "--output", str(folder / "found.json")]
    monkeypatch.setattr("sys.argv", words)
    threads = torch.get_num_threads()
    try:
        host_thread.main()
    finally:
        torch.set_num_threads(threads)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_a_toy_run(tmp_path, monkeypatch):
    found = toy_run(monkeypatch, tmp_path)
    pooled = found["modes"]["pooled"]
    assert set(host_thread.PARTS) | {"forward", "backward", "optimizer", "rest"} == set(pooled["ours"]["fixed_ms"])
    assert pooled["stock"]["operations"]["rest"] > 50
    assert [each["batch_size"] for each in found["estimate"]] == [8192] * 3 + [65_536] * 3
    stand_in = toy_run(monkeypatch, tmp_path, "--stand-in")["modes"]["pooled"]
    assert stand_in["ours"]["operations"]["forward"] < pooled["ours"]["operations"]["forward"] / 2
    assert stand_in["stock"]["operations"] == pooled["stock"]["operations"]
