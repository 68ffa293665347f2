"""What every home keeps, the example of docs/architecture.md among them: rows that leave their slots are read, copied,
frozen and put back bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embershard.cache.config import CachePolicy
from embershard.cache.homes.choose import HOMES as CHOSEN
from embershard.cache.homes.choose import HomeRequest, choose_home, parts_of
from embershard.cache.homes.home import Home
from embershard.cache.homes.shape import PoolShape
from embershard.cache.homes.shared import CELLS_PER_RANK, Barriers, NodeShare
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError

ROWS, DIM, SLOTS, BATCH = (40, 3, 21), 8, 16, 6
NUM_ROWS = sum(ROWS)
STATES = [("momentum", torch.Size([]), torch.float32), ("square", torch.Size([DIM]), torch.float32)]
SHAPE = PoolShape(
    ROWS, DIM, torch.float32, STATES, [ShardWeights(f"t{t}", 7, DIM, -0.5, 0.5) for t in range(len(ROWS))]
)
PAGE = Path(__file__).parents[4] / "docs" / "architecture.md"


def _zlib(_: Path) -> Home:
    (block,) = re.findall(r"```python\n(import zlib\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names["ZlibRows"](SHAPE)  # type: ignore[no-any-return]


def _shared(_: Path) -> Home:
    cells = torch.zeros(2, 1, CELLS_PER_RANK, dtype=torch.int64)
    own = [(0, rows) for rows in ROWS]
    share = NodeShare(lambda numel, dtype: torch.zeros(numel, dtype=dtype), own, *(Barriers(each, 0) for each in cells))
    return choose_home(HomeRequest(SHAPE, share=share))


def _chosen(folder: Path, is_in_folder: bool = False, **asked: Any) -> Home:
    return choose_home(HomeRequest(SHAPE, folder=str(folder) if is_in_folder else None, **asked))


HOMES: dict[str, Callable[[Path], Home]] = {
    "memory": _chosen,
    "mapped": partial(_chosen, is_in_folder=True, host="mmap"),
    "shared": _shared,
    "quantised": partial(_chosen, small_type="int8", full_keys=torch.tensor([2, 41])),
    "quantised, fp16, mapped": partial(_chosen, is_in_folder=True, host="mmap", small_type="fp16"),
    "filed": partial(_chosen, is_in_folder=True, host="file", num_places=40),
    "zlib": _zlib,
}
every_home = pytest.mark.parametrize("make", HOMES.values(), ids=HOMES)


class Training:
    """A cache over a home; `rows` [R, ...] are what each row should be."""

    def __init__(self, home: Home) -> None:
        self.home, self._random = home, torch.Generator().manual_seed(3)
        self.slots = [torch.zeros(SLOTS + 1, *size, dtype=dtype) for size, dtype in SHAPE.parts]
        self.cache = RowCache(
            tables=["t0", "t1", "t2"],
            host=home,
            device_payload=lambda _: self.slots,
            num_slots=SLOTS,
            table_of_feature=[0],
            policy=CachePolicy("lru"),
            device=torch.device("cpu"),
        )
        self.cache.parts = parts_of(home, self.cache.state.scores.of_rows, is_on_gpu=False)
        home.make(torch.arange(NUM_ROWS))
        self.rows = home.select(torch.arange(NUM_ROWS))

    def steps(self, count: int) -> None:
        for _ in range(count):
            keys = torch.randperm(NUM_ROWS, generator=self._random)[:BATCH]
            ticket = self.cache.prepare(keys, torch.tensor([BATCH]))
            assert ticket is not None
            self._train(keys, ticket)

    def _train(self, keys: Tensor, ticket: Ticket) -> None:
        self.cache.wait(ticket)
        at = ticket.slots
        assert_same([part[at] for part in self.slots], [part[keys] for part in self.rows])
        self.cache.begin_update(ticket)
        for part in self.slots:
            part[at] += torch.rand(part[at].shape, generator=self._random)
        self.cache.release(ticket)  # which rounds, where the home does
        for part, slots in zip(self.rows, self.slots, strict=True):
            part[keys] = slots[at]

    def written_back(self) -> Home:
        self.cache.write_back()
        return self.home


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), number


def test_every_kind_that_can_be_chosen_is_here() -> None:
    assert {name.partition(",")[0] for name in HOMES} == {*CHOSEN, "zlib"}


@every_home
def test_rows_that_left_their_slots_are_what_was_trained(make: Any, tmp_path: Path) -> None:
    training = Training(make(tmp_path))
    first = [part.clone() for part in training.rows]
    assert all(not part.any() for part in first[1:])
    assert len(first[0].unique(dim=0)) == NUM_ROWS
    training.steps(30)
    home, keys = training.written_back(), torch.tensor([50, 3, 41, 2, 63])
    assert_same(home.select(torch.arange(NUM_ROWS)), training.rows)
    assert_same(home.select(keys), [part[keys] for part in training.rows])
    assert_same([home.read(keys)], [training.rows[0][keys]])
    assert sum(stats.evictions for stats in training.cache.stats()) > 100
    assert home.host_bytes > 0


@every_home
def test_frozen_rows_are_those_of_the_moment_while_training_goes_on(make: Any, tmp_path: Path) -> None:
    training = Training(make(tmp_path))
    training.steps(5)
    frozen = training.written_back().freeze()
    expected = [part.clone() for part in training.rows]
    views = training.home.views.tensors
    for first in range(0, NUM_ROWS, 20):
        training.steps(3)
        parts = [frozen.read(rows[first : first + 20]) for rows in views]
        assert_same(parts, [part[first : first + 20] for part in expected])
    frozen.close()
    frozen = training.written_back().freeze()
    expected, some = [part.clone() for part in training.rows], torch.tensor([2, 20, 41, 60])
    training.steps(6)
    assert_same(frozen.select(some), [part[some] for part in expected])
    frozen.close()
    assert_same(training.written_back().select(torch.arange(NUM_ROWS)), training.rows)


@every_home
def test_views_are_the_rows_or_say_that_they_are_not(make: Any, tmp_path: Path) -> None:
    training = Training(make(tmp_path))
    training.steps(8)
    home = training.written_back()
    views, part = home.views, home.views.table_weights()[2][4:9]
    assert views.place_of(part) == (0, sum(ROWS[:2]) + 4)
    assert views.place_of(torch.zeros(3)) is None
    if views.are_rows:
        home.check_views()
        home.make_all()
        assert_same(views.tensors, training.rows)
        assert home.read_part(part) is None
        return
    with pytest.raises(CacheError, match="they would read as zeros"):
        home.check_views()
    found = home.read_part(part)
    assert found is not None
    assert_same([found], [training.rows[0][47:52]])
    assert not part.any()


@every_home
def test_rows_of_a_checkpoint_are_put_back(make: Any, tmp_path: Path) -> None:
    training = Training(make(tmp_path))
    training.steps(8)
    home = training.written_back()
    before = home.select(torch.arange(10, 30))
    training.steps(8)
    training.written_back()
    if home.takes_blocks:
        home.put_block(10, before)
    elif home.rounds:
        home.put(torch.arange(10, 30), before[0])
        before = before[:1]
    else:
        for rows, part in zip(home.views.tensors, before, strict=True):
            rows.data[10:30] = part
    assert_same(home.select(torch.arange(10, 30))[: len(before)], before)


def replaced(training: Training) -> Tensor:
    """Give every third row other contents, whether it is in a slot or not; `rows` are what the home makes of them."""
    cache, home = training.cache, training.home
    keys = torch.arange(1, NUM_ROWS, 3)
    rows = [part + torch.rand(part.shape) for part in cache.select(keys)]
    cache.replace(keys, rows)
    if home.rounds:
        home.round(rows[0], torch.arange(len(keys)), keys)
    for part, values in zip(training.rows, rows, strict=True):
        part[keys] = values
    return keys


@every_home
def test_rows_that_are_replaced_are_so_in_slots_and_home(make: Any, tmp_path: Path) -> None:
    training = Training(make(tmp_path))
    for _ in range(4):
        training.steps(5)
        keys = replaced(training)
        slots = training.cache.state.map.lookup(keys)
        assert 0 < int((slots > 0).sum()) < len(keys)  # both kinds of rows
        assert_same(
            [part[slots[slots > 0]] for part in training.slots], [part[keys[slots > 0]] for part in training.rows]
        )
        assert_same(training.cache.select(torch.arange(NUM_ROWS)), training.rows)
    training.steps(10)  # which compares each row that comes to a slot
    assert_same(training.written_back().select(torch.arange(NUM_ROWS)), training.rows)


@every_home
@pytest.mark.parametrize("is_told", [True, False])
def test_rows_that_are_replaced_stay_in_frozen_ones(make: Any, tmp_path: Path, is_told: bool) -> None:
    """Control: where the home is not told before it is written to, who reads frozen rows gets a mix."""
    training = Training(make(tmp_path))
    training.steps(5)
    frozen, expected = training.written_back().freeze(), [part.clone() for part in training.rows]
    with nullcontext() if is_told else mock.patch.object(type(training.home), "before_write"):
        replaced(training)
    weights = training.home.views.tensors[0]
    found = torch.cat([frozen.read(weights[first : first + 20]).clone() for first in range(0, NUM_ROWS, 20)])
    frozen.close()
    assert torch.equal(found, expected[0]) == is_told
