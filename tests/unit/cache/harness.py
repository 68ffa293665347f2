"""A row cache beside plain tensors that get the same updates: no row may ever differ."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from embershard.cache import CacheGrowthWarning, KnownBatch, MemoryRows, RowCache, Ticket
from embershard.cache.config import CachePolicy, MapKind, Policy, TransferKind
from embershard.cache.homes.mapped import MappedRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows import lazy_rows
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.transfer import MakeTransfer
from embershard.errors import CacheOverflowError
from embershard.frequency.counts import RowCounts

DIM = 4
STATES = [("momentum", torch.Size([]), torch.float32), ("square", torch.Size([DIM]), torch.float32)]


class Pool:
    """A `RowCache` over random rows, its reference model, and the checks of both.

    `rows` [R, ...] hold the truth: plain tensors, updated as the slots are. `last_batch` is when
    each row was last looked up, `counts` what `lfu` should count, `expected` the counters per table.
    `known` are the batches known and not prepared, `guessed` the rows whose next use may be a guess.
    `pinned_table` is one whose rows never leave. `best_victims` asks for the best victims that there are: what
    look-ahead promises as long as all batches were known, and no other policy but `lru`.
    """

    def __init__(
        self,
        rows_per_table: Sequence[int] = (17, 1, 12),
        num_slots: int = 10,
        policy: Policy = "lfu",
        *,
        overflow: str = "raise",
        decay: float | None = None,
        profile: Sequence[int] | None = None,
        warmup: bool = False,
        mmap_dir: Path | None = None,
        pinned_table: int | None = None,
        best_victims: bool = False,
        kind: MapKind = "array",
        transfer: TransferKind | MakeTransfer = "plain",
        lazy: bool = False,
    ) -> None:
        place = ("mmap", str(mmap_dir)) if mmap_dir else ("memory", None)
        self.host, self.rows = _lazy_host(rows_per_table, place) if lazy else _random_host(rows_per_table, place)
        self.num_rows = self.host.num_rows
        self.policy, self.overflow, self.decay, self.warmup = policy, overflow, decay, warmup
        # Two features look into the first table, one into each other: positions alternate between tables.
        self.table_of_feature = [0, 0, *range(1, len(rows_per_table))]
        self.num_tables = len(rows_per_table)
        self.bounds = np.cumsum(rows_per_table)
        initial = None if profile is None else torch.tensor(profile)
        if policy in ("frequency", "static") and initial is None:
            initial = torch.arange(self.num_rows) * 7 % 23
        self.scoring: Policy = policy
        if policy == "lookahead":
            self.scoring = "lfu" if initial is None or decay is not None else "frequency"
        if policy == "static":
            self.scoring, self.warmup = "frequency", True
        self.pinned_rows: set[int] = set()
        if pinned_table is not None:
            self.pinned_rows = set(
                range(self.bounds[pinned_table] - rows_per_table[pinned_table], self.bounds[pinned_table])
            )
        self.slots: list[Tensor] = []
        self.cache = RowCache(
            [f"t{t}" for t in range(self.num_tables)],
            self.host,
            self._device_payload,
            num_slots,
            self.table_of_feature,
            CachePolicy(self.scoring, policy == "lookahead", self.warmup, decay, policy == "static"),
            torch.device("cpu"),
            row_counts=None if initial is None else RowCounts.of_dense(initial),
            overflow=overflow,
            pinned_keys=torch.tensor(sorted(self.pinned_rows)) if self.pinned_rows else None,
            transfer=transfer,
            kind=kind,
        )
        self.map = self.cache.state.map
        self.batch = 0
        self.tickets: dict[int, tuple[Ticket, Tensor]] = {}
        self.last_batch: dict[int, int] = {}
        self.clean_through = 0
        self.trained: set[int] = set()
        self.counts = np.zeros(self.num_rows) if initial is None else initial.double().numpy().copy()
        self.weight = 1.0
        self.initial = self.counts.copy()
        self.best_victims = best_victims
        self.warm = not self.warmup
        self.passing: set[int] = set()  # of a static cache, rows that batches brought in
        self.preloaded = False
        self.known: deque[tuple[KnownBatch | None, tuple[int, ...]]] = deque()
        self.rows_of_known: dict[int, int] = {}  # distinct rows of each known batch that was prepared
        self.most_known_uses = 10**9
        self.guessed: set[int] = set()
        self.held_pin: int | None = None
        self.held_through = self.frozen_held = 0  # batches up to this one do not keep known ones out
        self.expected = {
            name: np.zeros(self.num_tables, dtype=np.int64)
            for name in (
                "lookups",
                "unique_ids",
                "hits_unique",
                "hits_lookups",
                "fills",
                "critical_path_fills",
                "write_backs",
                "evictions",
                "overflow_growths",
            )
        }

    def _device_payload(self, num_slots: int) -> list[Tensor]:
        new = [torch.full((num_slots + 1, *t.shape[1:]), float("nan")) for t in self.host.parts]
        for grown, old in zip(new, self.slots, strict=False):
            grown[: old.shape[0]] = old
        self.slots = new
        return new

    # -- what a batch is ---------------------------------------------------------

    def table_of(self, keys: Iterable[int]) -> np.ndarray:
        return np.searchsorted(self.bounds, np.fromiter(keys, dtype=np.int64), side="right")

    def split_by_feature(self, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys in feature order, as TorchRec hands them over, and the ids per feature."""
        tables = self.table_of(keys)
        of_table = [[k for k, t in zip(keys, tables, strict=True) if t == table] for table in range(self.num_tables)]
        half = len(of_table[0]) // 2
        features = [of_table[0][:half], of_table[0][half:], *of_table[1:]]
        return (
            torch.tensor([k for feature in features for k in feature], dtype=torch.int64),
            torch.tensor([len(feature) for feature in features], dtype=torch.int64),
        )

    # -- the operations ---------------------------------------------------------

    def know(self, keys: Sequence[int]) -> None:
        """The batch will be prepared, after those that are known already."""
        self._warm_up()
        known = self.cache.know(*self.split_by_feature(keys))
        assert (known is None) == (self.policy != "lookahead")
        self.known.append((known, tuple(keys)))

    def prepare_known(self, critical_path: bool = False, if_it_fits: bool = False) -> int | None:
        """The oldest known batch."""
        known, keys = self.known[0]
        number = self.prepare(keys, critical_path, known, if_it_fits)
        if number is not None:
            self.known.popleft()
            self.guessed -= set(keys)
        return number

    def skip_known(self) -> None:
        """The oldest known batch will not come."""
        known, keys = self.known.popleft()
        if known is not None:
            self.cache.skip(self.split_by_feature(keys)[0], known)
        self.guessed -= set(keys)

    def prepare(
        self, keys: Sequence[int], critical_path: bool = True, known: KnownBatch | None = None, if_it_fits: bool = False
    ) -> int | None:
        """Number of the batch, or None when it must not fit and the cache said so."""
        ids, lengths = self.split_by_feature(keys)
        distinct = set(ids.tolist())
        self._warm_up()
        if known is not None and if_it_fits and self._would_crowd(distinct):
            before = self.observed()
            assert self.cache.prepare(ids, lengths, critical_path, known, if_it_fits) is None
            assert self.observed() == before, "a batch that stays out left traces"
            return None
        resident = self.resident()
        self.batch += 1
        oldest = self._oldest_pinned()
        leaving = self._leave(oldest)
        resident -= leaving
        pinned, fits = self._fits(distinct)
        for key in distinct & resident:
            self.last_batch[key] = self.batch
        dirty = {k for k in resident if self._is_dirty(k)}
        slots_before = self.map.num_slots
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                ticket = self.cache.prepare(ids, lengths, critical_path, known, if_it_fits)
            except CacheOverflowError:
                assert not fits, f"{len(pinned | distinct)} rows fit {self.map.num_slots} slots"
                assert self.overflow == "raise" or not self._are_held, "grows when nothing else is in flight"
                assert not (if_it_fits and self._may_fit_later(critical_path)), "may fit when those are released"
                assert self.resident() == resident
                return None
        if ticket is None:
            assert not fits, f"{len(pinned | distinct)} rows fit {self.map.num_slots} slots"
            assert if_it_fits, "it must be prepared"
            assert self._may_fit_later(critical_path), "nothing to wait for"
            assert self.resident() == resident
            assert not caught
            return None
        if known is not None:
            self.rows_of_known[self.batch] = len(distinct - self.pinned_rows)
        growths = [w for w in caught if issubclass(w.category, CacheGrowthWarning)]
        assert len(growths) == len(caught) == (0 if fits else 1), [str(w.message) for w in caught]
        assert (self.map.num_slots > slots_before) == (not fits)
        self.last_batch.update(dict.fromkeys(distinct, self.batch))
        self._came_in(distinct - resident)
        self.passing |= distinct - resident if self.policy == "static" else set()
        self.counts[list(distinct)] += self.weight
        self.weight /= self.decay or 1.0
        evicted = resident - self.resident()
        self._check_victims(evicted, (resident | distinct) - evicted, oldest)
        self._count(ids.tolist(), resident, evicted, evicted & dirty, critical_path, not fits)
        self.trained -= evicted
        self.tickets[self.batch] = (ticket, ids)
        return self.batch

    def fail_known(self, direction: str) -> None:
        """The oldest known batch, but a copy fails: its missing rows are not cached after all, and no row is lost. The
        batch is as known as before."""
        known, keys = self.known[0]
        ids, lengths = self.split_by_feature(keys)
        self._warm_up()
        if not self._fits(set(keys))[1]:
            return
        self.batch += 1
        before, dirty = self.resident(), {k for k in self.resident() if self._is_dirty(k)}
        copy = getattr(self.cache._copies.transfer, direction)

        def fail(*arguments: Tensor) -> None:
            copy(*arguments)  # as far as it came
            raise OSError("copy")

        with mock.patch.object(self.cache._copies.transfer, direction, fail):
            try:
                self.cache.prepare(ids, lengths, known=known)
            except OSError:
                pass
            else:
                raise AssertionError("a copy that failed was not noticed")
        hits, evicted = before & set(keys), before - self.resident()
        assert self.resident() == before - evicted, "its missing rows are not cached"
        assert not evicted or direction == "fill", "before the first fill the victims stay"
        self.last_batch.update(dict.fromkeys(hits, self.batch))
        self.trained -= evicted
        for name, rows in (("evictions", evicted), ("write_backs", evicted & dirty)):
            np.add.at(self.expected[name], self.table_of(rows), 1)

    def freeze_pins(self) -> None:
        """Batches in flight stay pinned, released or not."""
        self.cache.freeze_pins()
        self.held_pin, self.frozen_held = min(self.tickets, default=None), self.held_through

    def hold(self) -> None:
        """The batches in flight train together, and with later ones (`train_held`)."""
        for ticket, _ in self.tickets.values():
            self.cache.hold(ticket)
        self.held_through = max(self.tickets, default=self.held_through)

    def train_held(self) -> None:
        """Train the batches that are held."""
        held = [number for number, (ticket, _) in self.tickets.items() if ticket.held]
        with self.cache.training([self.tickets[number][0] for number in held]):
            for number in held:
                self.train(number)
        for number in held:
            del self.tickets[number]

    def next_piece(self) -> None:
        """A step of a pipeline: its batch, if it was not prepared early, and beside its forward the next one early."""
        if self.known and self._are_held:
            assert self.prepare_known(critical_path=True, if_it_fits=True) or self.overflow == "raise"
        self.freeze_pins()
        self.hold()
        if self.known:
            self.prepare_known(if_it_fits=True)
        self.unfreeze_pins()

    @property
    def _are_held(self) -> bool:
        return all(ticket.held for ticket, _ in self.tickets.values())

    def _may_fit_later(self, critical_path: bool) -> bool:
        in_flight = bool(self.tickets or self.held_pin)
        return in_flight and not (critical_path and self.held_pin is None and self._are_held)

    def unfreeze_pins(self) -> None:
        """As usual again."""
        self.cache.unfreeze_pins()
        self.held_pin = None

    def _leave(self, oldest: int) -> set[int]:
        """Rows of a static cache that batches brought in, and that no batch from `oldest` on uses: they leave."""
        leaving = {k for k in self.passing & self.resident() if self.last_batch[k] < oldest}
        for name, rows in (("evictions", leaving), ("write_backs", {k for k in leaving if self._is_dirty(k)})):
            np.add.at(self.expected[name], self.table_of(rows), 1)
        self.passing -= leaving
        self.trained -= leaving
        return leaving

    def _would_crowd(self, distinct: set[int]) -> bool:
        """Two known batches or more are pinned, and with this one they would take more than half of the slots."""
        oldest = self._oldest_pinned() if self.tickets or self.held_pin else self.batch + 1
        held = self.frozen_held if self.held_pin else self.held_through
        pinned = [count for batch, count in self.rows_of_known.items() if batch >= max(oldest, held + 1)]
        room = (self.map.num_slots - len(self.pinned_rows)) // 2
        return len(pinned) >= 2 and sum(pinned) + len(distinct - self.pinned_rows) > room

    def _oldest_pinned(self) -> int:
        return self.held_pin or min(self.tickets, default=self.batch)

    def _fits(self, distinct: set[int]) -> tuple[set[int], bool]:
        """Rows that are pinned, and whether those of a batch fit beside them."""
        oldest = self._oldest_pinned() if self.tickets or self.held_pin else self.batch + 1
        pinned = self.pinned_rows | {k for k in self.resident() if self.last_batch.get(k, 0) >= oldest}
        return pinned, len(pinned | distinct) <= self.map.num_slots

    def _warm_up(self) -> None:
        """What the cache does before the first batch, and after a drop for the rows that stay."""
        before = self.resident()
        self.cache._warm_up()
        brought = self.resident() - before
        if not brought and self.warm:
            assert self.pinned_rows <= before
            return
        self.preloaded = True
        self._came_in(brought)
        self.last_batch.update(dict.fromkeys(brought, 0))
        np.add.at(self.expected["fills"], self.table_of(brought), 1)
        assert self.pinned_rows <= before | brought, "the rows that stay are there"
        best = brought - self.pinned_rows
        if self.warm:
            assert not best, "only before the first batch"
            return
        self.warm = True
        frequent = int((np.delete(self.counts, list(self.pinned_rows)) > 0).sum())
        assert len(best) == min(self.map.num_slots - len(self.pinned_rows), frequent)
        others = [self.counts[k] for k in range(self.num_rows) if k not in brought]
        assert max(others, default=0) <= min((self.counts[k] for k in best), default=0), "not the most frequent"

    def _came_in(self, keys: set[int]) -> None:
        """Of the known uses of a row that was not cached, only the last one is remembered."""
        self.guessed = (self.guessed - keys) | (keys & set(self.next_uses()))

    def _is_dirty(self, key: int) -> bool:
        return self.last_batch.get(key, 0) > self.clean_through

    def _check_victims(self, evicted: set[int], stayed: set[int], oldest: int) -> None:
        assert not any(self.last_batch.get(k, 0) >= oldest for k in evicted), "a pinned row was evicted"
        assert not evicted & self.pinned_rows, "a row of a pinned table was evicted"
        if not evicted or not (self.policy == "lru" or self.best_victims):
            return
        next_uses = self.next_uses()
        worst = max(self._rank(k, next_uses) for k in evicted)
        free_to_go = [k for k in stayed - self.pinned_rows if self.last_batch.get(k, 0) < oldest]
        assert all(worst <= self._rank(k, next_uses) for k in free_to_go), "not the best victims"

    def _rank(self, key: int, next_uses: dict[int, int]) -> tuple[float, ...]:
        """What leaves first: no known use, then the lowest score, then the longest unused; else the furthest use."""
        if key in next_uses:
            return (1, -next_uses[key])
        score = 0.0 if self.scoring == "lru" else float((self.counts if self.scoring == "lfu" else self.initial)[key])
        return (0, score, self.last_batch.get(key, 0))

    def _count(
        self, ids: list[int], resident: set[int], evicted: set[int], written: set[int], critical_path: bool, grew: bool
    ) -> None:
        """The slow reference of the counters: one id at a time."""
        found = self.expected
        distinct = set(ids)
        for name, keys in (
            ("lookups", ids),
            ("unique_ids", distinct),
            ("hits_unique", distinct & resident),
            ("hits_lookups", [k for k in ids if k in resident]),
            ("fills", distinct - resident),
            ("critical_path_fills", distinct - resident if critical_path else ()),
            ("write_backs", written),
            ("evictions", evicted),
        ):
            np.add.at(found[name], self.table_of(keys), 1)
        if grew:
            misses = np.bincount(self.table_of(distinct - resident), minlength=self.num_tables)
            found["overflow_growths"][misses.argmax()] += 1

    def train(self, batch: int) -> None:
        """Update the batch's rows, in their slots and in the reference; the batch stays in flight."""
        ticket, keys = self.tickets[batch]
        self.cache.wait(ticket)
        slots, distinct = ticket.slots.unique(), keys.unique()
        for payload, rows in ((self.slots, slots), (self.rows, distinct)):
            weights, momentum, square = (tensor[rows] for tensor in payload)
            momentum = momentum * 0.5 + weights.sum(1)
            square = square + weights * weights + batch
            weights = weights - 0.1 * momentum[:, None] / (square + 1)
            for tensor, new in zip(payload, (weights, momentum, square), strict=True):
                tensor[rows] = new
        self.trained |= set(distinct.tolist())

    def release(self, batch: int) -> None:
        ticket, _ = self.tickets.pop(batch)
        self.cache.release(ticket)

    def cancel(self, batch: int) -> None:
        """The batch does not train."""
        ticket, _ = self.tickets.pop(batch)
        ticket.cancel()

    def abandon(self, batch: int) -> None:
        """Nobody holds the ticket any more; without a cycle, the reference count alone frees it."""
        del self.tickets[batch]

    def step(self, keys: Sequence[int]) -> None:
        """One batch on its own."""
        batch = self.prepare(keys)
        if batch is not None:
            self.train(batch)
            self.release(batch)

    def flush(self) -> None:
        dirty = {k for k in self.resident() if self._is_dirty(k)}
        self.cache.flush()
        np.add.at(self.expected["write_backs"], self.table_of(dirty), 1)
        self.clean_through = min(self.tickets, default=self.batch + 1) - 1
        self.trained = {k for k in self.trained if self._is_dirty(k)}

    def load(self, keys: Sequence[int], value: float, in_place: bool = True) -> None:
        """Somebody writes to host rows. Flush first; the next use of the cache notices if torch counts the write."""
        for tensor in (*self.host.parts, *self.rows):
            (tensor if in_place else tensor.data)[list(keys)] = value
        if in_place:
            self.cache.read(torch.empty(0, dtype=torch.int64))
            fetched = self.resident()
            self.clean_through = min(self.tickets, default=self.batch + 1) - 1
        else:
            self.cache.host_rows_changed(torch.tensor(keys, dtype=torch.int64))
            fetched = self.resident() & set(keys)
        for name in ("evictions", "fills"):
            np.add.at(self.expected[name], self.table_of(fetched), 1)
        self.preloaded = True

    def forget(self) -> None:
        """The known batches will not come."""
        self.cache.forget()
        self.known.clear()
        self.guessed.clear()

    def read(self, keys: Sequence[int]) -> None:
        before = self.observed()
        assert torch.equal(self.cache.read(torch.tensor(keys, dtype=torch.int64)), self.rows[0][list(keys)])
        assert self.observed() == before, "reading left traces"

    # -- what must hold at all times ---------------------------------------------------------

    def resident(self) -> set[int]:
        return set((self.map.slot_of_key > 0).nonzero().flatten().tolist())

    def in_flight(self) -> list[int]:
        return [ticket.batch for ticket in self.cache._in_flight.tickets]

    @property
    def known_bytes(self) -> int:
        """Memory of the batches that are known and not prepared, with their chains."""
        index = self.cache.next_use_index
        return 0 if index is None else index.chain_bytes + sum(batch.num_bytes for batch in index._known)

    def next_uses(self) -> dict[int, int]:
        """Number of the first known batch that holds each row, by looking through all of them."""
        found: dict[int, int] = {}
        for known, keys in self.known:
            if known is not None:
                for key in set(keys) - self.pinned_rows:
                    found.setdefault(key, known.number)
        return found

    def observed(self) -> dict[str, object]:
        """Everything that planning depends on, and the counters."""
        scores = self.cache.state.scores.of_slots()
        return {
            "slot_of_key": self.map.slot_of_key.tolist(),
            "key_of_slot": self.map.key_of_slot.tolist(),
            "last_batch": self.map.last_batch(torch.arange(1, self.map.num_slots + 1)).tolist(),
            "scores": None if scores is None else scores[1:].tolist(),
            "next_uses": None if self.cache.next_use_index is None else self.cache.next_use_index.next_use[1:].tolist(),
            "known_bytes": self.known_bytes,
            "counters": self.cache.counters.values.tolist(),
            "in_flight": self.in_flight(),
            "device_bytes": self.cache.device_bytes,
        }

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds."""
        self.cache._copies.finish()
        self._check_map()
        self._check_next_uses()
        self.check_rows()
        self._check_pins()
        self._check_counters()
        if self.scoring == "lfu":
            self._check_counts()

    def _check_map(self) -> None:
        slots = self.map.used_slots()
        keys = self.map.keys(slots)
        held = self.map.num_slots - self.map.num_free  # num_used, but for slots that a failed copy left empty
        assert int((self.map.slot_of_key > 0).sum()) == held == slots.numel()
        assert held <= self.map.num_used <= self.map.num_slots
        assert torch.equal(self.map.lookup(keys), slots), "slot -> key -> slot"
        assert (self.map.key_of_slot[self.map.num_used + 1 :] == -1).all()
        assert self.map.key_of_slot[0] == -1

    def _check_next_uses(self) -> None:
        """Every slot knows when its row is used next; a row without a slot left a trace if a known batch uses it."""
        next_use_index, true = self.cache.next_use_index, self.next_uses()
        if next_use_index is None:
            assert int(self.map.slot_of_key.min()) >= 0, "a trace without an index of next uses"
            return
        entries, found = self.map.slot_of_key.tolist(), next_use_index.next_use.tolist()
        for key, entry in enumerate(entries):
            if entry <= 0:
                assert (entry < 0) == (key in true), f"row {key} is not cached: trace {entry}"
            elif key in self.guessed and key in true:
                assert 0 < found[entry] <= true[key], f"row {key}: the guess {found[entry]} is not safe"
            else:
                assert found[entry] == true.get(key, 0), f"row {key} is not next used by batch {found[entry]}"

    def check_rows(self) -> None:
        """A cached row is right in its slot; any other, and any that is clean, in the host tier."""
        slots = self.map.slot_of_key.clamp_min(0).long()
        cached = slots > 0
        made = made_rows(self.host)
        assert not self.host.weights[~made].any(), "a row that nobody asked for was written"
        in_host = made.clone()
        in_host[list(self.trained)] = False
        for held, host, truth in zip(self.slots, self.host.parts, self.rows, strict=True):
            assert torch.equal(held[slots[cached]], truth[cached]), "a cached row is wrong in its slot"
            assert torch.equal(host[in_host], truth[in_host]), "a row in the host tier is wrong"

    def _check_pins(self) -> None:
        for ticket, keys in self.tickets.values():
            assert torch.equal(self.map.keys(ticket.slots), keys), "a row in flight lost its slot"
        assert self.pinned_rows <= self.resident() or not self.map.num_used

    def _check_counters(self) -> None:
        stats = self.cache.stats()
        for name, values in self.expected.items():
            assert [getattr(s, name) for s in stats] == values.tolist(), name
        for s in stats:
            assert 0 <= s.hits_unique <= s.unique_ids
            assert s.unique_ids - s.hits_unique == s.fills or self.preloaded
            assert s.bytes_to_device == s.fills * self.host.row_bytes
            assert s.bytes_to_host == s.write_backs * self.host.row_bytes
        totals = {
            name: sum(getattr(s, name) for s in stats) for name in vars(stats[0]) if name not in ("table", "module")
        }
        assert totals["fills"] - totals["evictions"] == self.map.num_slots - self.map.num_free
        assert totals["slots"] == self.map.num_slots
        assert totals["device_bytes"] == self.cache.device_bytes
        assert totals["rows"] == self.num_rows
        held = np.bincount(self.table_of(self.resident()), minlength=self.num_tables)
        assert (np.array([s.fills - s.evictions for s in stats]) == held).all()
        assert self.in_flight() == list(self.tickets)

    def _check_counts(self) -> None:
        """A row's count is beside its slot, or beside the row: history survives eviction."""
        scores = self.cache.state.scores
        rows, slots = scores._row_scores.double(), scores.of_slots().double()
        found = torch.where(self.map.slot_of_key > 0, slots[self.map.slot_of_key.clamp_min(0).long()], rows).numpy()
        if self.decay is None:
            assert (found == self.counts).all()
        else:
            np.testing.assert_allclose(found / scores._weight, self.counts / self.weight, rtol=1e-4, atol=1e-12)

    def finish(self) -> None:
        """Flush and compare the host tier with the reference, bit for bit."""
        for batch in list(self.tickets):
            self.abandon(batch)
        self.flush()
        self.check()
        assert not self.trained
        for host, truth in zip(self.host.parts, self.rows, strict=True):
            assert torch.equal(host, truth)


def _random_host(rows_per_table: Sequence[int], place: tuple[str, str | None]) -> tuple[MemoryRows, list[Tensor]]:
    """A host tier of random rows, and a copy of them."""
    host = _host(PoolShape(rows_per_table, DIM, torch.float32, STATES), place)
    generator = torch.Generator().manual_seed(3)
    for tensor in host.parts:
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return host, [tensor.clone() for tensor in host.parts]


def _lazy_host(rows_per_table: Sequence[int], place: tuple[str, str | None]) -> tuple[MemoryRows, list[Tensor]]:
    """A host tier that makes rows two at a time, and all of its rows."""
    tables = [ShardWeights(f"t{t}", 5, DIM, 0.5, 1.0) for t in range(len(rows_per_table))]
    with mock.patch.object(lazy_rows, "BLOCK_BYTES", 2 * 4 * DIM):
        host = _host(PoolShape(rows_per_table, DIM, torch.float32, STATES, tables), place)
    rows = [torch.zeros(tensor.shape) for tensor in host.parts]
    for table, weights in zip(tables, rows[0].split(list(rows_per_table)), strict=True):
        table.write(weights)
    return host, rows


def _host(shape: PoolShape, place: tuple[str, str | None]) -> MemoryRows:
    kind, folder = place
    return MemoryRows(shape) if kind == "memory" else MappedRows(shape, str(folder))


def made_rows(host: MemoryRows) -> Tensor:
    """Which rows have their initial weights: bool [R]."""
    if host._lazy is None:
        return torch.ones(host.num_rows, dtype=torch.bool)
    return torch.from_numpy(np.repeat(host._lazy._made, 1 << host._lazy._shift)[: host.num_rows])


# -- scenarios ---------------------------------------------------------

Operation = tuple[str, tuple[int, ...]]


def run(pool: Pool, operations: Iterable[Operation]) -> None:
    """Apply operations that make sense in the pool's state, and check every invariant after each."""
    for name, arguments in operations:
        flying = list(pool.tickets)
        one = flying[arguments[0] % len(flying)] if flying and arguments else None
        if name == "know":
            if len(arguments) + sum(len(keys) for _, keys in pool.known) <= pool.most_known_uses:
                pool.know(arguments)
        elif name == "prepare":
            pool.prepare(arguments, critical_path=len(arguments) % 2 == 0)
        elif name == "prepare_if_it_fits":
            pool.prepare(arguments, if_it_fits=True)
        elif name == "prepare_known" and pool.known:
            pool.prepare_known(if_it_fits=arguments[0] % 2 == 0)
        elif name == "fail_known" and pool.known:
            pool.fail_known(("write_back", "fill")[arguments[0] % 2])
        elif name == "freeze_pins":
            pool.freeze_pins()
        elif name == "unfreeze_pins":
            pool.unfreeze_pins()
        elif name == "skip_known" and pool.known:
            pool.skip_known()
        elif name == "forget":
            pool.forget()
        elif name == "train" and one and not pool.tickets[one][0].held:
            pool.train(one)
            pool.release(one)
        elif name in ("train", "train_held"):
            pool.train_held()
        elif name == "hold":
            pool.hold()
        elif name == "next_piece":
            pool.next_piece()
        elif name == "cancel" and one:
            pool.cancel(one)
        elif name == "abandon" and one:
            pool.abandon(one)
        elif name == "flush":
            pool.flush()
        elif name == "read":
            pool.read(arguments)
        elif name in ("load", "load_unseen"):
            pool.flush()
            pool.load(arguments, float(len(arguments)), in_place=name == "load")
        pool.check()
    pool.finish()


def windowed_operations(
    seed: int, steps: int, num_rows: int = 30, batch_size: int = 6, lookahead: int = 6, prefetch: int = 2
) -> list[Operation]:
    """Batches known ahead, prepared in their order while earlier ones are in flight; some were never known."""
    rng = np.random.default_rng(seed)
    operations: list[Operation] = []
    for step in range(steps):
        keys = tuple(int(k) for k in ((rng.random(batch_size) ** 2 * num_rows).astype(int) * 7 + step // 9) % num_rows)
        operations.append(("know", keys))
        if step >= lookahead:
            operations.append(("prepare_known", (1,)))
        if rng.random() < 0.1:
            operations.append(("prepare", keys[:3]))
        if step >= lookahead + prefetch or rng.random() < 0.3:
            operations.append(("train", (0,)))
        if rng.random() < 0.1:
            operations.append((str(rng.choice(["abandon", "flush", "read", "skip_known"])), (0,)))
        if step % 9 == 8:
            operations.append(("fail_known", (step // 9,)))
        if step % 40 == 35:
            operations.append(("forget", (0,)))
    return operations


def held_operations(
    seed: int, steps: int, num_rows: int = 30, batch_size: int = 7, pieces: int = 4, is_known: bool = False
) -> list[Operation]:
    """Batches of unequal size that train together, a few at a time; with `is_known`, two are known ahead."""
    rng = np.random.default_rng(seed)
    operations: list[Operation] = []
    for _ in range(steps):
        for _ in range(int(rng.integers(1, pieces + 1))):
            size = int(rng.integers(1, batch_size + 1))
            keys = tuple(int(k) for k in (rng.random(size) ** 2 * num_rows).astype(int) * 7 % num_rows)
            operations += [("know", keys), ("next_piece", ())] if is_known else [("prepare", keys), ("hold", ())]
        operations.append(("train_held", ()))
        if rng.random() < 0.2:
            operations.append((str(rng.choice(["abandon", "flush", "read", "cancel"])), (0,)))
    return [*([("know", (1, 2)), ("know", (3,))] if is_known else []), *operations]


def random_operations(
    seed: int, steps: int, num_rows: int = 30, batch_size: int = 7, growing: bool = False
) -> list[Operation]:
    """A fixed mix that evicts a lot, with up to three batches in flight."""
    rng = np.random.default_rng(seed)
    operations: list[Operation] = []
    for step in range(steps):
        size = batch_size * (step + 1) // steps if growing else batch_size
        keys = tuple(int(k) for k in (rng.random(size) ** 2 * num_rows).astype(int) * 7 % num_rows)
        operations.append(("prepare", keys))
        if rng.random() < 0.9:
            operations.append(("train", (int(rng.integers(3)),)))
        if rng.random() < 0.1:
            operations.append((str(rng.choice(["abandon", "flush", "read"])), (0,)))
    return operations
