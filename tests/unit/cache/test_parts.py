"""A part of a pool hears of every stage of its batches, and of the rows that move, whatever comes of the move."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from embershard.cache import MemoryRows, PoolShape
from embershard.cache.config import CachePolicy
from embershard.cache.guards import ChangeGuard
from embershard.cache.next_use import KnownBatch
from embershard.cache.parts.changed import ChangedKeys
from embershard.cache.parts.part import PoolPart, PoolParts
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.transfer import PlainTransfer
from embershard.errors import CacheError

Heard = tuple[str, list[int]]


class Listener(PoolPart):
    """Notes what it hears, and follows which rows are in slots."""

    num_coming, hears_moves = 3, True

    def __init__(self) -> None:
        self.heard, self.on_device = list[Heard](), set[int]()

    def _note(self, stage: str, keys: Tensor) -> list[int]:
        self.heard.append((stage, sorted(keys.tolist())))
        return self.heard[-1][1]

    def known(self, keys: Tensor, feature_lengths: Tensor, known: KnownBatch) -> None:
        self._note("known", keys)

    def coming(self, keys: Tensor, known: KnownBatch | None) -> bool:
        self._note("coming", keys)
        return True

    def entering(self, keys: Tensor, known: KnownBatch | None) -> None:
        self.on_device.update(self._note("entering", keys))

    def left(self, keys: Tensor) -> None:
        self.on_device.difference_update(self._note("left", keys))

    def skipped(self, keys: Tensor, known: KnownBatch) -> None:
        self._note("skipped", keys)

    def forgotten(self) -> None:
        self.heard.append(("forgotten", []))


class FailingTransfer(PlainTransfer):
    """Fails to fill, once, when it is told to."""

    fails = False

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        if FailingTransfer.fails:
            FailingTransfer.fails = False
            raise OSError("no row came")
        super().fill(keys, slots)


def made(num_slots: int = 3) -> tuple[RowCache, Listener]:
    host = MemoryRows(PoolShape([9], dim=2))
    cache = RowCache(
        tables=["users"],
        host=host,
        device_payload=lambda slots: [torch.zeros(slots + 1, 2)],
        num_slots=num_slots,
        table_of_feature=[0],
        policy=CachePolicy(),
        device=torch.device("cpu"),
        transfer=FailingTransfer,
    )
    part = Listener()
    cache.parts = PoolParts([part])
    return cache, part


def known(cache: RowCache, keys: Sequence[int]) -> tuple[Tensor, Tensor, KnownBatch]:
    batch = torch.tensor(keys), torch.tensor([len(keys)])
    found = cache.know(*batch)
    assert found is not None
    return *batch, found


def trained(cache: RowCache, keys: Tensor, lengths: Tensor, batch: KnownBatch) -> None:
    ticket = cache.prepare(keys, lengths, known=batch)
    assert ticket is not None
    cache.begin_update(ticket)
    cache.release(ticket)


def in_slots(cache: RowCache) -> set[int]:
    return set(cache.contents().rows.tolist())


def test_a_batch_goes_through_its_stages() -> None:
    cache, part = made()
    first, second, third = known(cache, [5, 1, 5]), known(cache, [2, 7]), known(cache, [4])
    trained(cache, *first)
    trained(cache, *second)
    cache.skip(third[0], third[2])
    cache.forget()
    left = sorted({5, 1, 2, 7} - in_slots(cache))
    assert part.heard == [
        *(("known", keys) for keys in ([1, 5, 5], [2, 7], [4])),
        *(("coming", [1, 5, 5]), ("entering", [1, 5]), ("left", [])),
        *(("coming", [2, 7]), ("entering", [2, 7]), ("left", left)),
        *(("skipped", [4]), ("forgotten", [])),
    ]
    assert len(left) == 1
    assert part.on_device == in_slots(cache)


def test_after_a_copy_that_failed_a_part_knows_which_rows_are_in_slots() -> None:
    cache, part = made()
    trained(cache, *known(cache, [5, 1]))
    batch = known(cache, [2, 7, 8])
    FailingTransfer.fails = True
    with pytest.raises(OSError, match="no row came"):
        trained(cache, *batch)
    assert part.on_device == in_slots(cache) <= {5, 1}
    trained(cache, *batch)
    assert part.on_device == in_slots(cache) == {2, 7, 8}


def test_all_parts_hear_and_the_one_that_looks_ahead_most_decides() -> None:
    class Full(PoolPart):
        num_coming, knows_most, known_bytes = 5, True, 40  # type: ignore[assignment]

        def coming(self, keys: Tensor, known: KnownBatch | None) -> bool:
            return False

    both = PoolParts([Listener(), Full()])
    assert (both.num_coming, both.knows_most, both.known_bytes) == (5, True, 40)
    assert not both.coming(torch.tensor([1]), None)
    assert (PoolParts().num_coming, PoolParts().knows_most, PoolParts().known_bytes) == (0, False, 0)
    assert PoolParts().coming(torch.tensor([1]), None)


def test_rows_that_a_part_trains_beside_the_slots_count_as_changed_and_its_guard_refuses_all() -> None:
    class Beside(PoolPart):
        guard = ChangeGuard("tables users")

        def written_back(self) -> Tensor:
            return torch.tensor([7, 2])

    marks = ChangedKeys(MemoryRows(PoolShape([9], dim=2)), torch.device("cpu"))
    parts = PoolParts([Listener(), Beside(), marks])
    parts.check()
    parts.written_back()
    assert marks.take().tolist() == [2, 7]
    with pytest.raises(OSError, match="lost"), Beside.guard.change("training"):
        raise OSError("lost")
    with pytest.raises(CacheError, match="tables users: training did not end"):
        parts.check()


def test_slots_have_what_a_part_wrote_beside_them() -> None:
    """A row in a slot is read from there, also where a part trains it elsewhere: hot rows of a table that is whole on
    the device were published as they were when they came to their slots."""
    cache, _ = made()

    class Beside(PoolPart):
        def written_back(self) -> Tensor:
            cache.host.parts[0].data[4] = 7.0
            return torch.tensor([4, 1])

    cache.parts.add(Beside())
    keys, lengths, batch = known(cache, [4, 5])
    trained(cache, keys, lengths, batch)
    cache.write_back()
    cache.write_back_parts()
    assert {4, 5} <= in_slots(cache)
    assert cache.read(torch.tensor([4])).unique().tolist() == [7.0]
    assert torch.equal(cache.read(torch.tensor([5, 1])), cache.host.read(torch.tensor([5, 1])))
