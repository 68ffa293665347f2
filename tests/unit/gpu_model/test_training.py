"""Without a GPU: on a model of one, training through the pipeline has no race, gives no memory away too early, and does
not wait for the step in training. Negative controls take one wait away at a time, and the model notices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.cache import key_map as key_entries
from embershard.cache import next_use as next_use_index
from embershard.cache.file.file_part import FilePart
from embershard.cache.file.filed_rows import FiledRows
from embershard.cache.gpu.small_rows import SmallSlots
from embershard.cache.guards import StreamOrder
from embershard.cache.planner import CacheGrowthWarning
from embershard.cache.row_cache import RowCache
from embershard.cache.rows import memory, transfer
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.transfer import Buffer, StagedTransfer
from embershard.cache.rows.uva_transfer import UvaTransfer
from embershard.errors import CacheError
from embershard.pipeline.look_ahead import LookAheadPipeline
from embershard.pipeline.module_input import ModuleInput
from embershard.pipeline.staged_batch import Streams
from tests.covering import combinations, keep, matrix
from tests.unit.gpu_model import training
from tests.unit.gpu_model.device import GpuTensor
from tests.unit.gpu_model.training import Setting, batches, expected, host_rows, initial_rows, modelled, train

pytestmark = pytest.mark.slow

EVENTS = {2: "flush", 4: "evaluate", 6: "state", 8: "stats", 9: "evaluate", 11: "flush"}
SETTINGS = {
    "default": Setting(),
    "hashed map": Setting(slot_map="hashed"),
    "hashed map that grows": Setting(slot_map="hashed", num_slots=36, rows=(300, 5, 200), lookahead=20),
    "staged": Setting(transfer="staged"),
    "staged in many small buffers": Setting(transfer="staged", buffer_bytes=60),
    "plain": Setting(transfer="plain"),
    "locked later": Setting(locked_at=11),
    "never locked": Setting(locked_at=None),
    "lfu": Setting(policy="lfu"),
    "lru": Setting(policy="lru"),
    "one ahead": Setting(lookahead=1, prefetch=1),
    "a thread plans at once": Setting(worker="at once"),
    "a thread plans at the end": Setting(worker="at the end", slot_map="hashed", transfer="staged"),
    "evaluations": Setting(evaluated=(4, 9, 10)),
    "evaluations first": Setting(evaluated=tuple(range(8)), lookahead=2, rows=(200, 5, 100)),
    "plain steps": Setting(num_slots=60, plain=6, rows=(200, 5, 100)),
    "plain steps, staged": Setting(num_slots=60, plain=6, rows=(200, 5, 100), policy="lfu", transfer="staged"),
    "abandoned forwards": Setting(abandoned=(3, 4, 11), prefetch=1),
    "left early": Setting(left_after=15, num_slots=36),
    "three ahead": Setting(num_slots=60, prefetch=3, rows=(200, 100)),
    "pool that grows": Setting(num_slots=20, overflow="grow"),
    "staged pool that grows": Setting(num_slots=20, overflow="grow", transfer="staged", slot_map="hashed"),
    "int8 rows": Setting(small="int8"),
    "fp16 rows, staged in many small buffers": Setting(small="fp16", transfer="staged", buffer_bytes=60),
    "int8 rows, locked later": Setting(small="int8", locked_at=7),
    "int8 rows in a pool that grows": Setting(small="int8", num_slots=20, overflow="grow"),
    "int8 rows, plain steps, staged": Setting(
        num_slots=60, plain=6, rows=(200, 5, 100), policy="lfu", transfer="staged", small="int8"
    ),
}
_FILED = Setting(rows=(200, 5, 100), steps=40, lookahead=16, filed=100, is_quick=True)
#: Rows are in a file, and read from it.
FILED = {
    "file": _FILED,
    "file, ids arrive late": dataclasses.replace(_FILED, is_quick=False, steps=30),
    "file, evaluations": dataclasses.replace(_FILED, evaluated=(4, 5, 9, *range(20, 28))),
    "file, evaluations first": dataclasses.replace(_FILED, evaluated=tuple(range(12))),
    "file, left early": dataclasses.replace(_FILED, left_after=20),
    "file, a thread plans": dataclasses.replace(_FILED, worker="at the end"),
    "file, abandoned forwards": dataclasses.replace(_FILED, prefetch=1, abandoned=(3, 4, 11)),
}
SETTINGS |= FILED


def problems_of(setting: Setting) -> list[str]:
    """What goes wrong in a run; its rows are right, whatever the streams do, and many were evicted."""
    with (
        mock.patch.object(next_use_index, "_LEAST_CHAIN", 64),
        mock.patch.object(transfer, "_MOST_BUFFERS", 3),
        pytest.warns(CacheGrowthWarning) if setting.overflow == "grow" else contextlib.nullcontext(),
        modelled(setting) as (gpu, model, may_lock),
    ):
        wanted = expected(setting, initial_rows(setting, model))
        train(setting, model, may_lock)
        evictions = sum(stats.evictions for stats in model.pool.stats())
        in_the_end = host_rows(model)
        found = list(dict.fromkeys(gpu.problems))
        for rows, right in zip(in_the_end, wanted, strict=True):
            assert torch.equal(rows, right)
        assert evictions > 30
        if setting.filed is not None:
            assert model.pool.host.counts.rows_read > 100
    return found


#: Other tests of this file run "default", "hashed map that grows", "pool that grows" and "file".
_KEPT = {
    *("a thread plans at once", "evaluations first", "plain steps, staged", "left early", "staged pool that grows"),
    "abandoned forwards",
}


@pytest.mark.parametrize("name", keep(_KEPT, SETTINGS))
def test_nothing_goes_wrong(name: str) -> None:
    assert problems_of(dataclasses.replace(SETTINGS[name], between=EVENTS)) == []


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["hashed map that grows", "pool that grows"])
def test_nothing_goes_wrong_with_plans_by_kernels(name: str) -> None:
    """Elsewhere torch's operations plan: they take a tenth of the time of Triton's interpreter."""
    assert problems_of(dataclasses.replace(SETTINGS[name], between=EVENTS, kernels=True, steps=9)) == []


@pytest.mark.parametrize(
    ("transfer", "locked_at"),
    [
        *(matrix("triton_uva", 11), matrix("triton_uva", 0), matrix("triton_uva", None)),
        *(matrix("staged", 11), matrix("staged", 0), matrix("staged", None)),
        *(matrix("plain", 11), matrix("plain", 0), ("plain", None)),
    ],
)
def test_nothing_goes_wrong_with_rows_made_when_touched(transfer: str, locked_at: int | None) -> None:
    """The kernel starts when all rows are locked, which makes them; until then the CPU makes what it copies."""
    between = {4: "evaluate", 8: "stats", 11: "flush"}
    assert problems_of(Setting(transfer=transfer, locked_at=locked_at, between=between, lazy=True)) == []


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("default", False), matrix("hashed map", False), matrix("default", True), ("int8 rows", False)],
)
def test_the_host_never_waits_for_the_step_in_training(name: str, kernels: bool) -> None:
    setting = dataclasses.replace(SETTINGS[name], kernels=kernels)
    with modelled(setting) as (gpu, model, may_lock):
        waits = train(setting, model, may_lock)
        assert (waits.late, waits.for_training, waits.for_events, gpu.problems) == ([], 0, 0, [])
        assert gpu.launches[0, "_round_to_codes"] == (setting.steps if setting.small else 0)


@pytest.mark.parametrize(
    ("transfer", "copy"),
    combinations([(StagedTransfer, "fill")], (UvaTransfer, StagedTransfer), ("write_back", "fill")),
)
def test_nothing_goes_wrong_when_copies_fail(copy: str, transfer: Any) -> None:
    """Their plans are taken back; what was queued for them before goes on."""
    original, failing, calls = getattr(transfer, copy), range(3, 25, 3), itertools.count(1)

    def fails(self: Any, *rows: Any) -> None:
        moves_rows = transfer is StagedTransfer or len(self._kernel.tables) == 2  # not the scores
        if moves_rows and next(calls) in failing:
            raise OSError(f"{copy} failed")
        original(self, *rows)

    setting = Setting(transfer="staged" if transfer is StagedTransfer else None, steps=18)
    with mock.patch.object(transfer, copy, fails):
        assert problems_of(setting) == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("owner", "name", "is_done"),
    [
        *((FilePart, "known", False), matrix(FilePart, "known", True)),
        *(matrix(FiledRows, "know", False), matrix(FiledRows, "know", True)),
        *(matrix(RowCache, "know", False), matrix(RowCache, "know", True)),
    ],
    ids=lambda each: {False: "before it", True: "behind it"}.get(each, getattr(each, "__name__", each)),
)
def test_nothing_goes_wrong_when_a_batch_fails_to_become_known(owner: Any, name: str, is_done: bool) -> None:
    original, calls = getattr(owner, name), itertools.count(1)

    def fails(self: Any, *given: Any) -> Any:
        is_last = next(calls) % 5 == 0
        if is_last and not is_done:
            raise OSError(f"{name} failed")
        found = original(self, *given)
        if is_last:
            raise OSError(f"{name} failed")
        return found

    with mock.patch.object(owner, name, fails):
        assert problems_of(dataclasses.replace(FILED["file"], steps=24)) == []
    assert next(calls) > 10


@pytest.mark.parametrize("waits", keep([True], [True, False]))
def test_cached_tables_that_are_on_other_ranks(waits: bool) -> None:
    """Without a pool, no plan and no copy comes between a batch's ids and the training that reads them."""
    setting = Setting(elsewhere=True)
    fault = contextlib.nullcontext() if waits else mock.patch.object(Streams, "give", _nothing)
    with fault, modelled(setting) as (gpu, model, may_lock):
        train(setting, model, may_lock)
        assert waits == (gpu.problems == [])
        assert waits or any("stream 0" in problem and "module_input.py" in problem for problem in gpu.problems)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A mock would keep its arguments, and so their memory."""


def _without(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, _nothing)


def _round_behind_the_end(self: RowCache, ticket: Any) -> None:
    if not ticket.released:
        self._copies.trained()
        self._updates.end()
        self._copies.round(ticket)
        ticket.cancel()


@contextlib.contextmanager
def _own_turn(self: StreamOrder) -> Any:
    yield


CONTROLS: dict[str, tuple[Callable[[], Any], str, Setting, str]] = {
    "copies do not follow the training": (
        _without(RowCopies, "wait_for_training"),
        "copy rows",
        Setting(prefetch=1),
        "what was written by",
    ),
    "a buffer is used while a copy reads it": (
        _without(Buffer, "wait"),
        "the CPU",
        Setting(transfer="staged", num_slots=40),
        "before copy",
    ),
    "a buffer of small rows is used while a kernel reads it": (
        _without(Buffer, "wait"),
        "the CPU",
        Setting(transfer="staged", num_slots=40, small="fp16"),
        "before _widen_halfs",
    ),
    "rows are rounded when their training is over": (
        lambda: mock.patch.object(RowCache, "release", _round_behind_the_end),
        "_narrow_to_codes",
        Setting(prefetch=1, small="int8"),
        "what was written by _round_to_codes",
    ),
    "what was written back is read at once": (
        _without(UvaTransfer, "finish"),
        "the CPU",
        Setting(between={3: "state", 9: "state"}),
        "before copy rows",
    ),
    "nobody notes that a forward reads": (
        _without(RowCache, "read_by_forward"),
        "copy rows",
        Setting(abandoned=tuple(range(1, 20, 2)), prefetch=1, lookahead=1),
        "writes what is read by",
    ),
    "streams take no turns": (
        lambda: mock.patch.object(StreamOrder, "next", _own_turn),
        "statistics.py",
        Setting(between=EVENTS),
        "what was written by",
    ),
    "inputs are not recorded": (
        _without(ModuleInput, "record_stream"),
        "is given away while",
        Setting(),
        "memory of stream",
    ),
    "old maps are given up at once": (
        _without(memory, "record_stream"),
        "is given away while",
        SETTINGS["pool that grows"],
        "slot_map.py",
    ),
    "an old hash table is given up at once": (
        _without(memory, "record_stream"),
        "is given away while",
        SETTINGS["hashed map that grows"],
        "key_map.py",
    ),
    "an old ring is given up at once": (
        _without(memory, "record_stream"),
        "is given away while",
        Setting(lookahead=12),
        "next_use.py",
    ),
    "an evaluation does not wait for the inputs": (
        _without(Streams, "give"),
        "stream 0",
        SETTINGS["evaluations first"],
        "reads what was written by",
    ),
    "the training does not wait for the inputs": (
        _without(Streams, "give"),
        "is given away while stream 0",
        Setting(),
        "module_input.py",
    ),
}


#: A race of streams, and memory that is given away.
_KEPT_CONTROLS = {"copies do not follow the training", "inputs are not recorded"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", keep(_KEPT_CONTROLS, CONTROLS))
def test_the_model_notices_when(name: str) -> None:
    fault, what, setting, how = CONTROLS[name]
    with fault():
        found = problems_of(setting)
    assert any(what in problem and how in problem for problem in found), found


def _forget_marks(self: SmallSlots, rows: Any) -> None:
    if self._marks.shape[0] != rows.shape[0]:
        self._marks = torch.zeros(0, dtype=torch.int32, device=rows.device)
    _attach(self, rows)


_attach = training._attach


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("owner", "name", "fault", "setting"),
    [
        (SmallSlots, "round", _nothing, "int8 rows"),
        (training, "_attach", _forget_marks, "int8 rows in a pool that grows"),
    ],
)
def test_small_rows_without_a_rounding_or_a_mark_are_noticed(owner: Any, name: str, fault: Any, setting: str) -> None:
    with mock.patch.object(owner, name, fault), pytest.raises((AssertionError, CacheError)):
        problems_of(SETTINGS[setting])


@pytest.mark.matrix
def test_the_settings_meet_what_they_are_for() -> None:
    grow = key_entries.HashedKeyMap._grow
    with mock.patch.object(key_entries.HashedKeyMap, "_grow", autospec=True, side_effect=grow) as growths:
        assert problems_of(dataclasses.replace(SETTINGS["hashed map that grows"], between=EVENTS)) == []
    assert growths.call_count >= 1


def test_a_batch_goes_to_the_device_once() -> None:
    """Also one that is only evaluated."""
    setting = Setting(evaluated=(4, 9))
    with modelled(setting) as (gpu, model, may_lock):
        data = batches(setting)
        gpu.sent_bytes.clear()  # of what was sent before, and whose memory the batches may have
        with mock.patch.object(training, "batches", return_value=data):
            train(setting, model, may_lock)
        tensors = [each for batch in data for each in (batch.values(), batch.lengths())]
        assert [gpu.sent_bytes[each.untyped_storage().data_ptr()] for each in tensors] == [t.nbytes for t in tensors]
        assert gpu.problems == []


def _device_bytes() -> int:
    """Of all memory that is allocated on the modelled device."""
    gc.collect()
    of_tensors = [each.inner.untyped_storage() for each in gc.get_objects() if type(each) is GpuTensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in of_tensors}.values())


@dataclasses.dataclass
class Taken:
    """By the batches ahead and what is known of them: device memory, as the model counts it and as the pipeline does,
    and host memory of what the places know."""

    device_bytes: int
    known_bytes: int
    known_host_bytes: int


def taken_after_two_steps(lookahead: int) -> Taken:
    """With a full window in front of rows in a file."""
    setting = Setting((3000, 52, 2000), 400, lookahead + 12, lookahead, filed=1000, left_after=1)
    loops, found, make = [], [], training._pipeline

    def make_pipeline(*given: Any) -> LookAheadPipeline:
        loops.append(make(*given))
        return loops[-1]

    def measure(*_: Any) -> None:
        (part,) = model.pool.cache.parts._parts
        of_places = part.known_host_bytes
        found.append(Taken(_device_bytes() - before, loops[0].stats().known_bytes, of_places))

    with modelled(setting) as (_, model, may_lock):
        before = _device_bytes()
        with mock.patch.object(training, "_pipeline", make_pipeline), mock.patch.object(training, "_between", measure):
            train(setting, model, may_lock)
    assert len(found) == 2
    return found[1]


@pytest.mark.matrix
@pytest.mark.parametrize("lookahead", [64, matrix(2000)])
def test_known_batches_of_rows_in_a_file_take_what_is_counted(lookahead: int) -> None:
    """On the device the copies of batches, their modules' inputs, and known uses with their links; in host memory the
    ids, and what the places know."""
    few, many = taken_after_two_steps(32), taken_after_two_steps(lookahead)
    assert many.device_bytes > 0.8 * lookahead / 32 * few.device_bytes
    assert many.known_bytes == pytest.approx(many.device_bytes, rel=0.05)
    assert many.known_host_bytes > few.known_host_bytes + (lookahead - 32) * 36 * 8  # ids


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("most", "is_cut", "filed"),
    [(5_000, True, 100), matrix(10**6, False, None), matrix(5_000, True, None), matrix(10**6, False, 100)],
)
def test_a_window_that_memory_cuts_says_so_once(
    most: int, is_cut: bool, filed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    setting = Setting(lookahead=10, steps=20) if filed is None else dataclasses.replace(_FILED, lookahead=10, steps=20)
    pipeline = functools.partial(LookAheadPipeline, max_known_bytes=most)
    with mock.patch.object(training, "LookAheadPipeline", pipeline), modelled(setting) as (_, model, may_lock):
        train(setting, model, may_lock)
    told = [record.message for record in caplog.records if "of lookahead=10 batches are known" in record.message]
    assert len(told) == is_cut


def test_a_window_whose_uses_could_be_mixed_up_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Of rows in memory, too: about 36 uses a batch, half of 512 numbers."""
    setting = Setting(lookahead=10, steps=20)
    with mock.patch.object(next_use_index, "_WRAP", 512):
        assert problems_of(setting) == []
    (told,) = [record.message for record in caplog.records if "of lookahead=10 batches are known" in record.message]
    assert "no more uses of rows can be told apart" in told


def test_ids_are_received_a_step_after_they_were_sent() -> None:
    """They are sent behind the collectives of a backward pass: received at once, they would make the host wait for
    it."""
    events: list[tuple[str, ModuleInput]] = []

    def noted(name: str) -> Any:
        original = getattr(ModuleInput, name)

        def function(self: ModuleInput, *args: Any) -> Any:
            events.append((name, self))
            return original(self, *args)

        return mock.patch.object(ModuleInput, name, function)

    with noted("send"), noted("receive"), noted("forward"), modelled(Setting()) as (_, model, may_lock):
        train(Setting(), model, may_lock)
    names = [name for name, _ in events]
    started = [number for number, name in enumerate(names) if name == "forward"][2]  # the window is filled by then
    received = [(number, each) for number, (name, each) in enumerate(events) if name == "receive" and number > started]
    assert len(received) > 2
    for number, each in received:
        assert "forward" in names[events.index(("send", each)) : number]
