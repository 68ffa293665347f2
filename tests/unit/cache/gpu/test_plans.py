"""Plans by kernels, in Triton's interpreter, are those of the loops on a CPU, to the slot; `test_loops.py` compares the
loops with torch's operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embershard.cache import eviction, next_use, row_cache
from embershard.cache.gpu import key_map, victim_queue
from embershard.cache.gpu import next_use as known_kernels
from embershard.cache.gpu.key_map import PlacedHashedMap
from embershard.cache.gpu.planner import KernelPlanner
from embershard.cache.gpu.readback import ReadTogether
from embershard.cache.gpu.victim_queue import KernelVictimQueue
from embershard.cache.planning_classes import kernel_classes, planning_classes
from tests.covering import keep
from tests.unit.cache.harness import Operation, Pool, held_operations, random_operations, run, windowed_operations
from tests.unit.training.order_of_sums import Refused

pytestmark = pytest.mark.slow

COMPARED = ("key_of_slot", "last_batch", "scores", "next_uses", "counters", "in_flight")


class PlannedPool(Pool):
    """A pool that records its plans, and what they depend on after every operation; or compares them with `expected`
    ones."""

    def __init__(self, by_kernels: bool, expected: Sequence[dict[str, Any]] | None = None, **settings: Any) -> None:
        classes = kernel_classes() if by_kernels else planning_classes(torch.device("cpu"))
        with mock.patch.object(row_cache, "planning_classes", return_value=classes):
            super().__init__(**settings)
        assert isinstance(self.cache._planner, KernelPlanner) == by_kernels
        self.history: list[dict[str, Any]] = []
        self._expected, self._plans = expected, list[dict[str, Any]]()
        self.refused = Refused()
        planner = self.cache._planner
        plan, plan_with_reads = planner.plan, planner.plan_with_reads

        def note(made: Any) -> Any:
            self._plans.append({name: _plain(name, value) for name, value in vars(made).items()})
            return made

        def record(*arguments: Any) -> Any:
            return note((yield from plan_with_reads(*arguments)))

        if by_kernels:  # of which each plan has reads
            planner.plan_with_reads = record  # type: ignore[method-assign]
        else:
            planner.plan = lambda *arguments: note(plan(*arguments))  # type: ignore[method-assign]

    def check(self) -> None:
        super().check()
        observed = self.observed()
        num_known = [known.num_rows for known, _ in self.known if known is not None]
        state = {name: observed[name] for name in COMPARED}
        self.history.append({"plans": self._plans, "known": num_known, **state})
        self._plans = []
        if self._expected is not None:
            step = len(self.history) - 1
            for name, value in self._expected[step].items():
                assert self.history[step][name] == value, f"{name} after operation {step}"


def _plain(name: str, value: Any) -> Any:
    found = value.tolist() if isinstance(value, Tensor) else value
    return sorted(found) if name == "missed" else found


@contextlib.contextmanager
def small(wrap: int, share: int) -> Iterator[None]:
    """Rings start with 4 cells, use numbers start again after `wrap`, and more than 8 slots are ranked by a sample. A
    refill ranks one of `share` slots."""
    with (
        mock.patch.multiple(next_use, _LEAST_CHAIN=4, _WRAP=wrap),
        mock.patch.multiple(eviction, _QUEUE_SHARE=share, _SAMPLE=8),
        mock.patch.object(victim_queue, "_LEAST_WIDTH", 4),
    ):
        yield


def compare(
    operations: Sequence[Operation], kind: Any = "array", wrap: int = 256, share: int = 4, **settings: Any
) -> PlannedPool:
    """Run the operations with both; compare the plans and the state after each one. Return the pool of the kernels."""
    history = None
    with small(wrap, share):
        for by_kernels in (False, True):
            chosen = {"kind": kind} if by_kernels else {}
            pool = PlannedPool(by_kernels, history, **chosen, **settings)
            pool.most_known_uses = wrap // 2
            with Refused() as pool.refused:
                run(pool, operations)
            history = pool.history
    return pool


CASES: dict[str, tuple[Callable[[], list[Operation]], dict[str, Any]]] = {
    "look-ahead": (
        lambda: windowed_operations(seed=3, steps=30, lookahead=4),
        {"num_slots": 18, "policy": "lookahead", "pinned_table": 1},
    ),
    "look-ahead over many batches, hashed, growing": (
        lambda: windowed_operations(seed=2, steps=22, lookahead=10, batch_size=9),
        {"num_slots": 9, "policy": "lookahead", "kind": "hashed", "overflow": "grow"},
    ),
    "a long ranking": (
        lambda: windowed_operations(seed=2, steps=34, num_rows=200, batch_size=16, lookahead=12),
        {"rows_per_table": (100, 10, 90), "num_slots": 120, "policy": "lookahead", "share": 2, "wrap": 1024},
    ),
    "batches of several blocks": (
        lambda: windowed_operations(seed=1, steps=9, num_rows=3910, batch_size=700, lookahead=3),
        {"rows_per_table": (1900, 10, 2000), "num_slots": 1600, "policy": "lookahead", "wrap": 8192},
    ),
    "held and growing": (
        lambda: held_operations(seed=2, steps=5, is_known=True),
        {"num_slots": 6, "policy": "lookahead", "overflow": "grow"},
    ),
    "held and growing, static": (
        lambda: held_operations(seed=1, steps=7),
        {"num_slots": 6, "policy": "static", "kind": "hashed", "overflow": "grow"},
    ),
    "lfu": (lambda: random_operations(seed=0, steps=14), {"num_slots": 12, "policy": "lfu", "decay": 0.9}),
    "lru, hashed": (lambda: random_operations(seed=1, steps=14), {"num_slots": 14, "policy": "lru", "kind": "hashed"}),
    "frequency": (lambda: random_operations(seed=2, steps=14), {"num_slots": 12, "policy": "frequency"}),
    "static": (lambda: random_operations(seed=2, steps=14), {"num_slots": 14, "policy": "static", "kind": "hashed"}),
}


_IN_THE_MATRIX = {"look-ahead", "look-ahead over many batches, hashed, growing", "lfu", "frequency", "static"}
_IN_THE_MATRIX |= {"held and growing", "held and growing, static", "lru, hashed", "batches of several blocks"}


@pytest.mark.parametrize("case", keep(CASES.keys() - _IN_THE_MATRIX, CASES))
def test_plans_by_kernels_are_those_of_the_loops(case: str) -> None:
    operations, settings = CASES[case]
    with mock.patch.object(KernelVictimQueue, "_trim", autospec=True, side_effect=KernelVictimQueue._trim) as trims:
        pool = compare(operations(), **settings)
    assert ("long" in case) == trims.called
    assert pool.refused.found == set()  # on a GPU with `train.deterministic`
    assert pool.expected["evictions"].sum() > 20


def _later(*arguments: Any) -> Tensor:
    return _ADVANCE(*arguments[:-1], arguments[-1] + 1)


_ADVANCE, _TAKE = known_kernels.advance, KernelVictimQueue._take
FAULTS: dict[str, Callable[[], Any]] = {
    "a batch's slots are not offered": lambda: mock.patch.object(KernelVictimQueue, "offer"),
    "pinned slots are not offered": lambda: mock.patch.object(KernelVictimQueue, "_offer_pinned"),
    "next uses are those of other positions": lambda: mock.patch.object(known_kernels, "advance", _later),
    "a pinned slot is taken": lambda: mock.patch.object(
        KernelVictimQueue, "_take", lambda self, *given: _TAKE(self, *given[:-1], given[-1] + 1)
    ),
}


@pytest.mark.parametrize("fault", keep(["next uses are those of other positions"], FAULTS))
def test_a_fault_is_noticed(fault: str) -> None:
    operations, settings = CASES["look-ahead"]
    with FAULTS[fault](), pytest.raises(AssertionError):
        compare(operations(), **settings)


@pytest.mark.matrix
def test_keys_whose_buckets_are_full_are_found_and_the_map_grows() -> None:
    """Two buckets for all keys: the others go behind these until the next plan has been read."""
    num_spilled = []

    def note(self: PlacedHashedMap, tallies: list[int]) -> None:
        num_spilled.append(tallies[1])
        _NOTE(self, tallies)

    crowded = mock.patch.multiple(PlacedHashedMap, _allocate=_crowded, note_tallies=note)
    with crowded, mock.patch.object(key_map, "LOAD", 100):
        operations = random_operations(seed=1, steps=8, batch_size=12)
        pool = compare(operations, num_slots=26, policy="lru", kind="hashed")
    assert max(num_spilled) > 0
    assert pool.map._entries._num_cells > 16


def _crowded(self: PlacedHashedMap, num_cells: int, device: torch.device) -> None:
    _ALLOCATE(self, 16 if not hasattr(self, "_keys") else num_cells, device)


_ALLOCATE, _NOTE = PlacedHashedMap._allocate, PlacedHashedMap.note_tallies


def test_a_key_that_is_no_row_is_refused() -> None:
    pool = PlannedPool(True, policy="lookahead")
    pool.step([3, 4])
    for key in (-1, pool.num_rows):
        with pytest.raises(IndexError, match=f"1 keys are out of range, needed 0 to {pool.num_rows - 1}"):
            pool.cache._planner.plan(torch.tensor([3, key, 4]), 9, 9)


_CHANGES: dict[str, Callable[[PlannedPool], Any]] = {
    "nothing": lambda pool: None,
    "known batches are forgotten": lambda pool: pool.cache.forget(),
    "rows are written back": lambda pool: pool.cache.write_back(),
    "another batch is prepared": lambda pool: pool.cache.prepare(*pool.split_by_feature([9])).cancel(),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_plan_is_dropped_if_the_cache_changes_before_its_numbers_are_read(change: str) -> None:
    """Its numbers are of another state. The batch is planned again; nothing is lost."""
    pool = PlannedPool(True, policy="lookahead")
    pool.step([3, 4])
    begun = ReadTogether([pool.cache.preparing(*pool.split_by_feature([5, 4]), False, None, True)])
    assert begun.is_waiting
    _CHANGES[change](pool)
    (ticket,) = begun.end()
    assert (ticket is not None) == (change == "nothing")
    if ticket is None:
        ticket = pool.cache.prepare(*pool.split_by_feature([5, 4]))
    assert pool.map.keys(ticket.slots).tolist() == [5, 4]
