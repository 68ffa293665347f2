"""Compiled loops and torch's operations (`torch_operations.py`) do the same, to the bit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba.core import caching
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError
from torch import Tensor

from embershard.cache import NextUseIndex, SlotMap, eviction, loops, next_use
from embershard.cache.config import Policy
from embershard.cache.gpu import counters
from embershard.cache.loops import compiled, initial_rows, next_uses, slots, victims
from embershard.cache.loops import rows as looped_rows
from embershard.cache.planner import CachePlan
from tests.covering import examples, keep, matrix
from tests.unit.cache.harness import Operation, Pool, random_operations, run, windowed_operations
from tests.unit.cache.torch_operations import count_plan, torch_planning

NUM_ROWS = 30
LOOPS = [
    name
    for module in (next_uses, looped_rows, slots, victims)
    for name, loop in vars(module).items()
    if isinstance(loop, Dispatcher) and not name.startswith("_") and name != "copy_rows"
]

rows = st.lists(st.integers(0, NUM_ROWS - 1), max_size=8).map(tuple)
which = st.tuples(st.integers(0, 3))
operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["know", "know", "prepare"]), rows),
        st.tuples(st.just("know"), st.lists(st.integers(0, 5), max_size=16).map(tuple)),
        st.tuples(st.sampled_from(["prepare_known", "train"]), which),
        st.tuples(st.sampled_from(["prepare_known", "train"]), which),
        st.tuples(st.sampled_from(["prepare_if_it_fits", "load", "load_unseen"]), rows),
        st.tuples(st.sampled_from(["skip_known", "fail_known", "abandon", "cancel", "flush", "forget"]), which),
        st.tuples(st.sampled_from(["freeze_pins", "unfreeze_pins"]), which),
    ),
    max_size=60,
)


@contextlib.contextmanager
def without_loops() -> Iterator[None]:
    """Inside, tensors are not on a CPU; a loop that runs all the same fails."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False))
        stack.enter_context(mock.patch.object(counters, "count_plan", count_plan))
        for name in LOOPS:
            stack.enter_context(mock.patch.object(loops, name, side_effect=AssertionError(f"{name} ran")))
        yield


class Recorded(Pool):
    """A pool that records its plans, and everything that they depend on after every operation."""

    def __init__(self, *args: Any, is_checked: bool = True, **kwargs: Any) -> None:
        self.history: list[dict[str, Any]] = []
        self._is_checked = is_checked
        super().__init__(*args, **kwargs)
        self._plans: list[CachePlan] = []
        plan = self.cache._planner.plan

        def record(*arguments: Any) -> Any:
            self._plans.append(plan(*arguments))
            return self._plans[-1]

        self.cache._planner.plan = record  # type: ignore[method-assign]

    def check(self) -> None:
        if self._is_checked:
            super().check()
        self.history.append(self._state())
        self._plans.clear()

    def _state(self) -> dict[str, Any]:
        """The null slot and the cell that belongs to no use are nobody's."""
        index, queue, scores = self.cache.next_use_index, self.cache._planner._queue, self.cache.state.scores
        found = {
            **self.observed(),
            "use_stamps": self.map.use_stamp[1:],
            "row_scores": getattr(scores, "_row_scores", None),
            "plans": [vars(plan) for plan in self._plans],
            "queue": vars(queue._queue),
            "cursor": (queue._cursor, queue._worst, queue._worst_next_use),
            "offered": [(batch, vars(part)) for batch, part in queue._offered],
        }
        if index is not None:
            found["last_uses"], found["next_batches"] = index._last_use[1:], index._next_batch[:-1]
            found["known"] = [vars(batch) for batch in index._known]
        return _values(found)


def _values(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.tolist()
    if isinstance(found, dict):
        return {name: _values(value) for name, value in found.items()}
    return [_values(each) for each in found] if isinstance(found, (list, tuple)) else found


def compare(operations: Sequence[Operation], most_known_uses: int = 10**9, **settings: Any) -> Recorded:
    """Run the operations with compiled loops and with torch operations; compare the state after each one. Return the
    pool of the loops."""
    looped = Recorded(**settings)
    with torch_planning():
        plain = Recorded(**settings)
    looped.most_known_uses = plain.most_known_uses = most_known_uses
    run(looped, operations)
    with without_loops():
        run(plain, operations)
    assert len(looped.history) == len(plain.history)
    for step, (found, expected) in enumerate(zip(looped.history, plain.history, strict=True)):
        for name, value in expected.items():
            assert found[name] == value, f"{name} after {[*operations, 'finish'][step]}, operation {step}"
    return looped


@pytest.mark.slow
@given(
    operations,
    st.sampled_from(get_args(Policy)),
    st.integers(3, 16),
    st.sampled_from(["grow", "raise"]),
    st.sampled_from([None, 0.9, 1e-3]),
    st.sampled_from([None, "counts", "warmup"]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([1, 8]),
)
@examples(150)
def test_loops_do_what_the_torch_operations_do(
    operations, policy, num_slots, overflow, decay, profile, pinned_table, queue_share
):
    """Rings start with 4 cells and use numbers start again after 64. All but two slots rank by a sample."""
    small_ring = mock.patch.multiple(next_use, _LEAST_CHAIN=4, _WRAP=64)
    small_queue = mock.patch.multiple(eviction, _QUEUE_SHARE=queue_share, _SAMPLE=2)
    with small_ring, small_queue:
        compare(
            operations,
            most_known_uses=64,
            policy=policy,
            num_slots=num_slots + (0 if pinned_table is None else (17, 1)[pinned_table]),
            overflow=overflow,
            decay=decay if policy in ("lfu", "lookahead") else None,
            profile=[(7 * k) % 23 for k in range(NUM_ROWS)] if profile else None,
            warmup=profile == "warmup",
            pinned_table=pinned_table,
        )


@pytest.mark.slow
@pytest.mark.parametrize("pinned_table", [matrix(None), 1])
def test_loops_do_what_the_torch_operations_do_with_batches_of_several_blocks(pinned_table):
    """And with more slots than are ranked one by one. Threads would choose among repeats in any order."""
    operations = windowed_operations(seed=1, steps=22, num_rows=9010, batch_size=1500, lookahead=4)
    tables = {"rows_per_table": (3000, 10, 6000), "num_slots": 4500, "pinned_table": pinned_table}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pool = compare(operations, policy="lookahead", overflow="grow", is_checked=False, **tables)
    finally:
        torch.set_num_threads(threads)
    assert pool.map.num_used > eviction._SAMPLE
    assert pool.expected["evictions"].sum() > 2000


def check_fixed() -> None:
    """What the negative controls run."""
    with mock.patch.object(eviction, "_QUEUE_SHARE", 2):
        compare(windowed_operations(seed=3, steps=80), num_slots=18, policy="lookahead", pinned_table=1)
    compare(random_operations(seed=0, steps=30), num_slots=12, policy="lfu", decay=0.9)


@pytest.mark.matrix
def test_the_negative_controls_pass_without_a_fault():
    check_fixed()


def _changed(name: str, number: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The loop with another value of its argument `number`."""
    loop = getattr(loops, name)

    def changed(*arguments: Any) -> Any:
        return loop(*arguments[:number], change(arguments[number]), *arguments[number + 1 :])

    return changed


def _less_one(value: int) -> int:
    return value - 1


FAULTS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "find": (2, _less_one),
    "bind": (5, _less_one),
    "know": (8, lambda batch: batch + 1),
    "arrive": (3, _less_one),
    "take_traces": (5, lambda soon: soon + 1),
    "offer": (3, lambda next_use: next_use + 1),
    "candidates": (8, _less_one),
    "choose": (4, _less_one),
    "lowest_ranks": (4, _less_one),
    "fill": (1, lambda numbers: numbers[::-1].copy()),
    "count_uses": (4, lambda weight: weight * 1.5),
    "count_plan": (9, lambda is_critical: not is_critical),
    "settle_ties": (1, np.zeros_like),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", keep(["choose"], FAULTS))
def test_one_different_argument_of_a_loop_is_noticed(name):
    with mock.patch.object(loops, name, _changed(name, *FAULTS[name])), pytest.raises(AssertionError):
        check_fixed()


# -- arguments that would break a loop: loops check nothing ---------------------------------------------------------


@pytest.mark.parametrize("key", [NUM_ROWS, -1, 2**40, -(2**40)])
@pytest.mark.parametrize("position", [0, 700])
def test_a_key_out_of_range_raises_and_changes_nothing(key, position):
    """Beyond the first block, too. Batches planned or known next are not disturbed."""
    pool = Pool(num_slots=25, policy="lookahead")
    pool.know([1, 2, 3])
    pool.step([4, 5])
    before = pool.observed()
    keys = torch.arange(1000) % NUM_ROWS
    keys[position] = key
    with pytest.raises(IndexError, match=f"key {key} at position {position}, needed 0 to 29"):
        pool.cache.prepare(keys, torch.tensor([1000, 0, 0, 0]))
    with pytest.raises(IndexError, match=f"key {key} at position {position}, needed 0 to 29"):
        pool.cache.next_use_index.know(keys, torch.tensor([1000, 0, 0, 0]))
    assert pool.observed() == before
    pool.batch += 1
    pool.know([2, 7])
    pool.known.rotate()
    pool.known.rotate()
    for _ in range(2):
        pool.release(pool.prepare_known())
        pool.check()


def test_without_the_check_a_key_is_read_as_another():
    index = NextUseIndex(SlotMap(10, 4))
    with mock.patch.object(loops, "out_of_range", return_value=-1):
        index.know(torch.tensor([-1]))
    assert index.know(torch.tensor([9])).num_rows == 1
    assert index._map.slot_of_key.tolist() == [0] * 9 + [-2]
    assert index._next_batch[1] == 2, "the use of key -1 is followed by that of key 9"


@pytest.mark.parametrize("lengths", [[2, 0, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0], [3, 0, 0], [3, 0, 0, 0, 0]])
def test_lengths_that_do_not_fit_the_batch_are_a_bug(lengths):
    keys = torch.tensor([1, 2, 3])
    pool = Pool(num_slots=8, policy="lookahead")
    with pytest.raises((AssertionError, IndexError), match=r"ids in the batch|features|boolean index"):
        pool.cache.next_use_index.know(keys, torch.tensor(lengths))
    with pytest.raises(AssertionError, match=r"ids in the batch|features"):
        pool.cache.prepare(keys, torch.tensor(lengths))


@pytest.mark.parametrize("policy", get_args(Policy))
def test_strided_arguments_are_as_good(policy):
    ids, lengths = torch.tensor([3, 3, 5, 18, 29, 4]), torch.tensor([2, 1, 1, 2])
    pools = [Pool(num_slots=9, policy=policy) for _ in range(2)]
    for pool, step in zip(pools, (1, 3), strict=True):
        given_ids, given_lengths = ids.repeat_interleave(step)[::step], lengths.repeat_interleave(step)[::step]
        known = pool.cache.know(given_ids, given_lengths)
        pool.cache.release(pool.cache.prepare(given_ids, given_lengths, known=known))
    assert pools[0].observed() == pools[1].observed()


def test_nothing_at_all():
    """No ids, and no features."""
    slot_map = SlotMap(10, 4)
    index, none = NextUseIndex(slot_map), torch.empty(0, dtype=torch.int64)
    known = index.know(none, none)
    assert known.num_rows == 0
    assert [found.tolist() for found in slot_map.find(none, 1)] == [[], [], []]
    assert index.arrive(known, none) is not None


def test_the_arrays_for_loops_are_the_tensors_themselves_after_growth_too():
    slot_map = SlotMap(10, 4)
    index = NextUseIndex(slot_map)
    sizes = set()
    for more in (8, 16):
        for array, tensor in (
            (slot_map.keys_array, slot_map.key_of_slot),
            (slot_map.stamps_array, slot_map.use_stamp),
            (index.next_use_array, index.next_use),
            (index._last_use_array, index._last_use),
            (index._next_batch_array, index._next_batch),
        ):
            assert (array.ctypes.data, array.size) == (tensor.data_ptr(), tensor.numel())
            sizes.add(array.size)
        slot_map.grow(more)
        index.grow(more)
        index.know(torch.arange(10).repeat(1000))  # needs a larger ring
    assert sizes == {5, 9, 1025, 16385}


def test_a_default_device_is_not_the_planning_device():
    slot_map, keys = SlotMap(10, 4), torch.tensor([3, 3])
    index = NextUseIndex(slot_map)
    with torch.device("meta"):
        known = index.know(keys)
        found = slot_map.find(keys, 1)
        arrived = index.arrive(known, found[0] + 1)
    assert {tensor.device.type for tensor in (*found, *arrived, known.uses)} == {"cpu"}


def test_keys_that_are_not_int64_are_refused_before_anything_changes():
    slot_map = SlotMap(10, 4)
    with pytest.raises(TypeError, match="int32"):
        slot_map.find(torch.tensor([1, 2], dtype=torch.int32), 1)


# -- where compiled loops are kept ---------------------------------------------------------


def _doubled(number: int) -> int:
    return 2 * number


@pytest.fixture
def warned_before(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    monkeypatch.setattr(compiled, "_failures", [])
    return compiled._failures


@pytest.mark.slow
def test_loops_work_where_nothing_can_be_written(monkeypatch, warned_before):
    """Neither beside the file nor in the user's folder: they are compiled, and one warning says so."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.warns(RuntimeWarning, match=r"cannot be kept \(RuntimeError: .*Set NUMBA_CACHE_DIR"):
        assert compiled.compiled(_doubled)(4) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled.compiled(_doubled)(5) == 10
    assert len(warned_before) == 2


@pytest.mark.slow
def test_a_broken_file_is_written_again(monkeypatch, tmp_path, warned_before):
    monkeypatch.setattr(caching.config, "CACHE_DIR", str(tmp_path))
    compiled.compiled(_doubled)
    (kept,) = tmp_path.rglob("*.nbc")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:5])
    assert compiled.compiled(_doubled)(4) == 8
    assert len(kept.read_bytes()) == len(whole)
    assert not warned_before


def test_a_full_disk_costs_time_and_nothing_else(monkeypatch, tmp_path, warned_before):
    monkeypatch.setattr(caching.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.warns(RuntimeWarning, match="cannot be kept.*No space left"):
        assert compiled.compiled_when_called()(_doubled)(4) == 8
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("files", [compiled.ResultFiles, caching.IndexDataCacheFile])
def test_processes_that_compile_at_once_do_not_mix_their_results(files, tmp_path):
    """Each finds its own types and its own source, whoever writes first. Numba's own files are the control."""
    for other_stamp, other_key in [("source", "half"), ("edited source", "float")]:
        folder = tmp_path / other_stamp
        folder.mkdir()
        one, other = files(str(folder), "loop", "source"), files(str(folder), "loop", other_stamp)
        with mock.patch.object(other, "_load_index", return_value={}):  # read before the one wrote
            one.save("float", "result of one")
            other.save(other_key, "result of the other")
        one._save_index({"float": "loop.1.nbc"})  # the one's index is written last
        found = one.load("float")
        is_right = found in ("result of one", None)  # None: it is compiled again
        assert is_right == (files is compiled.ResultFiles), (other_stamp, found)
        assert other.load(other_key) == "result of the other" or files is not compiled.ResultFiles


@pytest.mark.slow
def test_results_of_an_older_source_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(caching.config, "CACHE_DIR", str(tmp_path))
    for stamp in [1, 2]:
        for locator in caching.CacheImpl._locator_classes:
            monkeypatch.setattr(locator, "get_source_stamp", lambda _, stamp=stamp: stamp)
        compiled.compiled(_doubled)
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_a_loop_uses_nothing_of_another_file():
    """A change of that file would not be noticed: the kept result has the stamp of the loop's own file."""
    modules = (initial_rows, next_uses, looped_rows, slots, victims)
    found = {id(loop): loop for each in modules for loop in vars(each).values() if isinstance(loop, Dispatcher)}
    assert len(found) > 20
    for loop in found.values():
        used = [loop.py_func.__globals__.get(name) for name in loop.py_func.__code__.co_names]
        others = [each for each in used if getattr(each, "__module__", "").startswith("embershard")]
        assert {each.__module__ for each in others} <= {loop.py_func.__module__}


def test_a_loop_that_is_wrong_is_not_taken_for_a_folder_that_is(warned_before):
    def wrong(number: int) -> int:
        return number.nothing  # type: ignore[attr-defined]

    with pytest.raises(NumbaError, match="nothing"):
        compiled.compiled(wrong)
    assert not warned_before
