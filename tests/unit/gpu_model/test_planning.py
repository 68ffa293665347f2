"""What a plan costs the host on the model of a GPU: kernels that it launches, and waits. Of the batches of a run, those
count that come when the window and the slots are full."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from embershard.cache.gpu.planner import KernelPlanner
from embershard.cache.gpu.slot_map import KernelSlotMap
from embershard.cache.gpu.victim_queue import KernelVictimQueue
from embershard.cache.row_cache import RowCache
from tests.covering import matrix
from tests.unit.gpu_model.training import Setting, modelled, train

pytestmark = pytest.mark.slow

HITS = {"rows": (40, 5, 20), "num_slots": 63, "steps": 24, "lookahead": 4}
EVICTIONS = {"rows": (1500, 5, 900), "num_slots": 300, "steps": 28, "lookahead": 5}


@dataclass
class Cost:
    """Of a batch: launches and waits by operation, and what its plan did."""

    launches: Counter[str]
    waits: Counter[str]
    evicts: bool = False
    misses: bool = False
    refills: bool = False


def costs(setting: Setting) -> list[Cost]:
    """Costs of becoming known and of being prepared, added up batch by batch."""
    known: list[Cost] = []
    prepared: list[Cost] = []
    with modelled(setting) as (gpu, model, may_lock):
        refill = mock.patch.object(KernelVictimQueue, "_refill", autospec=True, side_effect=KernelVictimQueue._refill)

        def measured(name: str, into: list[Cost]) -> Any:
            original = getattr(RowCache, name)

            def function(self: RowCache, *args: Any, **kwargs: Any) -> Any:
                launches, waits = gpu.launches.copy(), gpu.waits.copy()
                before, num_refills = self.counters.values.inner.sum(0), refills.call_count  # type: ignore[attr-defined]
                found = original(self, *args, **kwargs)
                cost = Cost(_by_operation(gpu.launches - launches), _by_operation(gpu.waits - waits))
                added = self.counters.values.inner.sum(0) - before  # type: ignore[attr-defined]
                cost.misses, cost.evicts = bool(added[3]), bool(added[6])
                cost.refills = refills.call_count > num_refills
                if found is not None:
                    into.append(cost)
                return found

            return mock.patch.object(RowCache, name, function)

        with refill as refills, measured("know", known), measured("prepare", prepared):
            train(setting, model, may_lock)
    for one, other in zip(known, prepared, strict=bool(known)):  # nothing is known without look-ahead
        other.launches += one.launches
        other.waits += one.waits
    return prepared[setting.steps // 2 :]


def _by_operation(counts: Counter[tuple[int, str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, operation), count in counts.items():
        found[operation] += count
    return found


def check(found: list[Cost]) -> None:
    """A plan reads numbers of the device once, and once more where it ranks the slots anew."""
    for cost in found:
        assert set(cost.waits) == {"tolist"}, cost.waits
        assert cost.waits["tolist"] == 1 + cost.refills, "waits"
        if not cost.refills:
            assert cost.launches.total() <= (120 if cost.misses else 60), cost.launches


@pytest.mark.matrix
@pytest.mark.parametrize("slot_map", ["array", "hashed"])
def test_a_plan_of_hits_waits_once(slot_map: str) -> None:
    """Measured with what `know` takes: 29 launches, 42 where slots are ranked; hashed 36 and 49."""
    found = costs(Setting(kernels=True, slot_map=slot_map, **HITS))  # type: ignore[arg-type]
    check(found)
    assert sum(not cost.misses and "rank_candidates" in cost.launches for cost in found) > 3


@pytest.mark.parametrize("slot_map", [matrix("array"), "hashed"])
def test_a_plan_with_evictions_waits_once(slot_map: str) -> None:
    """Measured with what `know` takes: 74 launches, hashed 84; 21 to 29 more where the slots are ranked anew."""
    found = costs(Setting(kernels=True, slot_map=slot_map, **EVICTIONS))  # type: ignore[arg-type]
    check(found)
    assert sum(cost.evicts and not cost.refills for cost in found) > 3
    assert any(cost.refills for cost in found)


@pytest.mark.matrix
def test_a_plan_waits_once_without_look_ahead() -> None:
    found = costs(Setting(kernels=True, policy="lfu", **EVICTIONS))  # type: ignore[arg-type]
    check(found)
    assert sum(cost.evicts and not cost.refills for cost in found) > 3


def _waits_in_find(self: KernelSlotMap, keys: Any, *rest: Any) -> Any:
    keys.nonzero()
    return _FIND(self, keys, *rest)


def _reads_twice(self: KernelPlanner, numbers: Any) -> Any:
    numbers.tolist()
    return _READ(self, numbers)


def _launches_often(self: KernelSlotMap, keys: Any, *rest: Any) -> Any:
    for _ in range(50):
        keys.clone()
    return _FIND(self, keys, *rest)


_FIND, _READ = KernelSlotMap.find_missed, KernelPlanner._read


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (KernelSlotMap, "find_missed", _waits_in_find),
        matrix(KernelPlanner, "_read", _reads_twice),
        (KernelSlotMap, "find_missed", _launches_often),
    ],
)
def test_a_further_wait_or_launch_is_noticed(owner: Any, name: str, fault: Any) -> None:
    with mock.patch.object(owner, name, fault), pytest.raises(AssertionError):
        check(costs(Setting(kernels=True, **HITS)))  # type: ignore[arg-type]
