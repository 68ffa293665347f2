"""What planning costs the host on the model of a GPU: kernels that it launches, and waits. Of the steps of a run, those
count that come when the window and the slots are full."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList

from embershard.cache.gpu import counters, victim_kernels
from embershard.cache.gpu.planner import KernelPlanner
from embershard.cache.gpu.slot_map import KernelSlotMap
from embershard.cache.gpu.victim_queue import KernelVictimQueue
from embershard.cache.tickets import Ticket
from embershard.pipeline.look_ahead import LookAheadPipeline
from embershard.pipeline.staged_batch import StagedBatch
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from tests.unit.gpu_model import training
from tests.unit.gpu_model.device import HOST, Gpu
from tests.unit.gpu_model.training import Setting, modelled, train, written_by

pytestmark = pytest.mark.slow

HITS = {"rows": (140, 5, 60), "num_slots": 203, "steps": 18, "lookahead": 4}
EVICTIONS = {"rows": (1500, 5, 900), "num_slots": 300, "steps": 28, "lookahead": 5}
CRITEO = {"rows": (900, 700, 3, 5, 7, 9, 11, 13) + (150,) * 18, "num_slots": 1600, "steps": 24, "lookahead": 5}
#: TorchRec's waits, when it splits a batch among pools: the number of ids of each feature.
SPLITS = Counter({"copy to the host": 1, "synchronize": 1})


class Pools(training.Module):
    """Several pools, each with all features."""

    def __init__(self, pools: list[CachedTableBatchedEmbeddings], rows: tuple[int, ...]) -> None:
        super().__init__(pools[0], rows)
        self.pools, self.tickets = pools, list[Ticket]()
        kernels = [SimpleNamespace(emb_module=pool) for pool in pools]
        self._lookups = [SimpleNamespace(_emb_modules=[each], _feature_splits=[len(rows)]) for each in kernels]

    def input_dist(self, context: Any, features: Any) -> Any:
        """Once for each lookup; the host knows the lengths, as behind TorchRec's all-to-all."""
        arriving = super().input_dist(context, features)

        def received() -> KJTList:
            return KJTList([each.sync() for each in arriving.wait().wait()] * len(self.pools))

        return SimpleNamespace(wait=lambda: SimpleNamespace(wait=received))

    def compute_and_output_dist(self, context: Any, received: KJTList) -> Tensor:
        """All forwards."""
        return sum(pool(each.values(), each.offsets()) for pool, each in zip(self.pools, received, strict=True))  # type: ignore[return-value]

    def keep(self, cache: Any, ticket: Ticket, output: Tensor, zeros: Any) -> None:
        """For `backward`."""
        self.tickets.append(ticket)

    def backward(self, step: int) -> None:
        """Train one pool after the other."""
        tickets, self.tickets = self.tickets, []
        for pool, ticket in zip(self.pools, tickets, strict=True):
            self.pool, self.trained = pool, ticket
            super().backward(step)


@dataclass
class Cost:
    """Of a step: launches and waits by operation, but those of forward and backward; where the waits came, and what
    its plans did."""

    launches: Counter[str]
    waits: Counter[str]
    waits_before_backward: int = 0
    evicts: bool = False
    misses: bool = False
    refills: bool = False


def costs(setting: Setting, num_pools: int = 1) -> list[Cost]:
    """Costs of the steps of a run."""
    found: list[Cost] = []
    refill = mock.patch.object(KernelVictimQueue, "_refill", autospec=True, side_effect=KernelVictimQueue._refill)
    with several(setting, num_pools), modelled(setting) as (gpu, model, may_lock), refill as refills:
        pools = getattr(model, "pools", [model.pool])

        def numbers() -> tuple[Counter[str], Counter[str], Any, int]:
            counters = sum(pool.cache.counters.values.inner.sum(0) for pool in pools)
            return beside(gpu), by_operation(gpu.waits), counters, refills.call_count

        step, last = LookAheadPipeline.step, [numbers()]

        def counted(self: LookAheadPipeline, batches: Iterator[Any]) -> Any:
            return measured(step(self, batches))

        @contextlib.contextmanager
        def measured(body: Any) -> Iterator[Any]:
            with body as batch:
                yield batch
                in_body = (by_operation(gpu.waits) - last[0][1] - SPLITS).total()
            before, now = last[0], numbers()
            last[0] = now
            added = now[2] - before[2]
            did = (bool(added[6]), bool(added[3]), now[3] > before[3])
            found.append(Cost(now[0] - before[0], now[1] - before[1] - SPLITS, in_body, *did))

        with mock.patch.object(LookAheadPipeline, "step", counted):
            train(setting, model, may_lock)
        assert gpu.problems == []
    return found[setting.steps // 2 : -setting.lookahead]


@contextlib.contextmanager
def several(setting: Setting, num_pools: int) -> Iterator[None]:
    """Models are made with so many pools."""
    if num_pools == 1:
        yield
        return

    def made(pool: CachedTableBatchedEmbeddings, rows: tuple[int, ...], elsewhere: bool) -> Pools:
        more = (training._pool(setting, Gpu.active(), folder) for _ in range(num_pools - 1))
        return Pools([pool, *more], rows)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(training, "Module", made):
        yield


def beside(gpu: Gpu) -> Counter[str]:
    """Launches on other streams than that of the training."""
    return by_operation({each: count for each, count in gpu.launches.items() if each[0] not in (0, HOST)})


def by_operation(counts: dict[tuple[int, str], int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, operation), count in counts.items():
        found[operation] += count
    return found


def check(found: list[Cost], num_pools: int = 1, further: int = 0) -> None:
    """All plans of a step read numbers of the device once, behind the backward; and once more where slots are ranked
    anew. `further`: launches of a step beside those of plain rows."""
    for cost in found:
        assert cost.waits == {"tolist": 1 + cost.refills}, cost.waits
        assert cost.waits_before_backward == 0
        bound = 80 if cost.refills else 55 if cost.misses else 40
        assert cost.launches.total() <= bound * num_pools + further, (cost.launches.total(), cost.launches)


@pytest.mark.matrix
@pytest.mark.parametrize("slot_map", ["array", "hashed"])
def test_a_plan_of_hits_waits_once(slot_map: str) -> None:
    found = costs(Setting(kernels=True, slot_map=slot_map, **HITS))  # type: ignore[arg-type]
    check(found)
    assert any(not cost.misses for cost in found)


@pytest.mark.matrix  # the next test counts the waits of such plans, too
@pytest.mark.parametrize("slot_map", ["array", "hashed"])
def test_a_plan_with_evictions_waits_once(slot_map: str) -> None:
    found = costs(Setting(kernels=True, slot_map=slot_map, **EVICTIONS))  # type: ignore[arg-type]
    check(found)
    assert sum(cost.evicts and not cost.refills for cost in found) > 2
    assert any(cost.refills for cost in found)


@pytest.mark.matrix
@pytest.mark.parametrize("transfer", ["triton_uva", "staged"])
def test_small_rows_are_narrowed_and_widened_by_one_launch_each(transfer: str) -> None:
    """Beside the launches for states and scores. No wait is added."""
    setting = Setting(kernels=True, small="int8", transfer=transfer, slot_map="hashed", **EVICTIONS)  # type: ignore[arg-type]
    found = costs(setting)
    if transfer == "triton_uva":
        check(found, further=2)
    assert any(cost.refills for cost in found)
    for cost in found:
        assert cost.launches["_widen_codes"] == cost.misses
        assert cost.launches["_narrow_to_codes"] <= cost.evicts
    assert sum(cost.launches["_narrow_to_codes"] for cost in found) > 2


@pytest.mark.matrix
@pytest.mark.parametrize("num_pools", [1, 3])
def test_all_pools_wait_together(num_pools: int) -> None:
    """Of 26 tables each."""
    found = costs(Setting(kernels=True, slot_map="hashed", **CRITEO), num_pools)  # type: ignore[arg-type]
    check(found, num_pools)
    assert any(cost.evicts and cost.refills for cost in found)


@pytest.mark.matrix
def test_a_plan_waits_once_without_look_ahead() -> None:
    found = costs(Setting(kernels=True, policy="lfu", **EVICTIONS))  # type: ignore[arg-type]
    check(found)
    assert sum(cost.evicts and not cost.refills for cost in found) > 2


@pytest.mark.matrix
def test_rows_in_a_file_make_a_plan_wait_for_its_keys_once() -> None:
    """And for those of its scores, which are in host memory, three times more."""
    for cost in costs(Setting(kernels=True, filed=700, **EVICTIONS)):  # type: ignore[arg-type]
        assert cost.waits["copy to the host"] == 4, cost.waits
        assert cost.waits["tolist"] == 1 + cost.refills


def _waits_in_find(self: KernelSlotMap, keys: Any, *rest: Any) -> Any:
    keys.nonzero()
    return _FIND(self, keys, *rest)


def _reads_twice(self: KernelPlanner, numbers: Any) -> Any:
    numbers.tolist()
    return (yield from _READ(self, numbers))


def _launches_often(self: KernelSlotMap, keys: Any, *rest: Any) -> Any:
    for _ in range(50):
        keys.clone()
    return _FIND(self, keys, *rest)


def _at_once(self: StagedBatch, critical_path: bool) -> Any:
    begun = _BEGIN(self, critical_path)
    self.end_resident(begun)
    return begun


_FIND, _READ, _BEGIN = KernelSlotMap.find_missed, KernelPlanner._read, StagedBatch.begin_resident


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (KernelSlotMap, "find_missed", _waits_in_find),
        (KernelPlanner, "_read", _reads_twice),
        (KernelSlotMap, "find_missed", _launches_often),
        (StagedBatch, "begin_resident", _at_once),
    ],
)
def test_a_further_wait_or_launch_is_noticed(owner: Any, name: str, fault: Any) -> None:
    with mock.patch.object(owner, name, fault), pytest.raises(AssertionError):
        check(costs(Setting(kernels=True, **HITS)))  # type: ignore[arg-type]


def test_what_a_kernel_writes_is_known_through_its_functions_and_pointers() -> None:
    assert written_by(counters._count_plan) == {"values"}
    assert "counts" in written_by(victim_kernels.mark_victims)
