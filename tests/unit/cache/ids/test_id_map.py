"""`IdMap` against dictionaries, whatever comes: rows, counts, candidates, after batches known, undone and trained."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache.ids import loops
from embershard.cache.ids.config import Buckets, IdTable
from embershard.cache.ids.id_map import IdMap, mixed
from embershard.errors import CacheError, ConfigError
from tests.covering import covering, keep, matrix
from tests.oracle.id_dictionary import IdDictionary, mix

CAPACITY = 48
SEED = 5
EXTREMES = (0, 1, -1, 2**63 - 1, -(2**63) + 1)
TABLES = st.builds(
    IdTable,
    admit_after=st.sampled_from((1, 2, 5)),
    eviction=st.just("lfu"),
    half_life=st.sampled_from((None, 1, 3)),
    ttl_steps=st.sampled_from((None, 2, 6)),
    unadmitted=st.sampled_from(("shared", "zero")),
    buckets=st.sampled_from((1, 2, 3, 6)),
    quarantine=st.integers(1, 4),
    reserve=st.sampled_from((0.05, 0.3, 0.7)),
) | st.builds(
    IdTable,
    admit_probability=st.sampled_from((None, 0.2, 0.9)),
    eviction=st.just("lru"),
    buckets=st.sampled_from((1, 2, 3, 6)),
    quarantine=st.integers(1, 4),
)
BATCH = st.lists(st.integers(0, 90) | st.sampled_from(EXTREMES), max_size=30)
EVENTS = st.lists(
    st.tuples(st.just("resolve"), BATCH) | st.tuples(st.sampled_from(("commit", "undo", "load")), st.just([]))
)


def make(config: IdTable, **place: int) -> IdMap:
    return IdMap("t", config, config.buckets_of("t", CAPACITY), SEED, **place)


def rows_of(found: dict[int, int | None], ids: np.ndarray) -> list[int]:
    return [-1 if found[x] is None else found[x] for x in ids.tolist()]


def check(ids: IdMap, oracle: IdDictionary) -> None:
    """The state that is saved is the oracle's."""
    tensors = ids.tensors()
    records = tensors["records"]
    live = np.flatnonzero(records[:, 1] >= 0)
    words = {
        int(records[row, 0]): (int(row), int(records[row, 1] >> 32), int(records[row, 1] & 0xFFFFFFFF)) for row in live
    }
    assert words == oracle.live()
    waiting = {int(x): int(uses >> 32) for x, uses in tensors["candidates"] if uses}
    assert waiting == oracle.waiting()
    counts = ids.counts
    assert (counts.live, counts.admitted, counts.evicted) == (len(words), oracle.admitted, oracle.evicted)
    assert counts.refused == oracle.refused


def compare(config: IdTable, events: list[tuple[str, list[int]]], everything: np.ndarray) -> IdMap:
    """Resolve ahead, take back, commit, save and load; compare with dictionaries behind every event."""
    ids, head = make(config), IdDictionary("t", config, CAPACITY, SEED)
    committed, ahead = head.copy(), deque[IdDictionary]()
    for what, batch in events:
        if what == "resolve":
            xs = mixed(np.array(batch, np.int64))
            found, born = head.resolve(xs.tolist())
            ahead.append(head.copy())
            resolved = ids.resolve(xs)
            assert resolved.rows.tolist() == rows_of(found, xs)
            assert dict(zip(resolved.born.tolist(), resolved.ids.tolist(), strict=True)) == born
            assert resolved.evicted_in <= ids.head - config.quarantine or resolved.evicted_in == 0
        elif what == "commit" and ahead:
            committed = ahead.popleft()
            ids.commit()
        elif what == "undo":
            ids.undo()
            head = committed.copy()
            ahead.clear()
        elif what == "load":
            other = make(config)
            other.load(ids.tensors())
            assert other.committed == ids.committed
            other.counts = dataclasses.replace(ids.counts)
            ids, head = other, committed.copy()
            ahead.clear()
        assert ids.find(everything).tolist() == rows_of(committed.find(everything.tolist()), everything)
        check(ids, committed)
    return ids


@pytest.mark.slow
@given(TABLES, EVENTS, st.permutations(range(96)))
def test_it_does_what_dictionaries_do(config: IdTable, events: list, order: list[int]) -> None:
    compare(config, events, mixed(np.array([*range(91), *EXTREMES], np.int64)[order]))


LONG = [
    IdTable(buckets=1, quarantine=1, half_life=4, reserve=0.3),
    IdTable(buckets=3, admit_after=2, ttl_steps=9, unadmitted="zero"),
    IdTable(buckets=2, eviction="lru", quarantine=3, reserve=0.6),
    IdTable(buckets=6, admit_probability=0.4, ttl_steps=5, half_life=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", LONG)
def test_it_does_what_dictionaries_do_for_long(config: IdTable) -> None:
    """Hundreds of ids lose their rows, those of batches that are taken back among them."""
    random, events = np.random.default_rng(1), []
    for step in range(160):
        events.append(("resolve", (random.zipf(1.3, 25) % 99 + step // 2).tolist()))
        events.append((("commit", "commit", "commit", "undo", "load", "none")[min(random.integers(0, 40), 5)], []))
        events += [("commit", [])] * int(random.integers(0, 3))
    assert compare(config, events, mixed(np.arange(0, 180))).counts.evicted > 150


def drift(steps: int, seed: int = 0, size: int = 40, spread: int = 150) -> list[np.ndarray]:
    """Ids that come, are popular and go."""
    random = np.random.default_rng(seed)
    return [mixed((random.zipf(1.3, size) % spread) + 3 * step) for step in range(steps)]


@pytest.mark.parametrize(("ranks", "admit_after"), covering((1, 2, 3, 6), (1, 3)))
def test_parts_of_a_table_do_what_the_whole_does(ranks: int, admit_after: int) -> None:
    """Whole buckets on any rank: the same rows, births, evictions, bit for bit."""
    config = IdTable(buckets=6, quarantine=2, admit_after=admit_after, half_life=5, reserve=0.3)
    whole = make(config)
    parts = [make(config, first_bucket=rank * 6 // ranks, num_buckets=6 // ranks) for rank in range(ranks)]
    for batch in drift(60):
        expected = whole.resolve(batch)
        owner = (batch.view(np.uint64) % np.uint64(6)).astype(int) // (6 // ranks)
        born = []
        for rank, part in enumerate(parts):
            found = part.resolve(batch[owner == rank])
            first = rank * CAPACITY // ranks
            assert (found.rows + first).tolist() == expected.rows[owner == rank].tolist()
            born += (found.born + first).tolist()
            part.commit()
        assert sorted(born) == sorted(expected.born.tolist())
        whole.commit()
    assert whole.counts.evicted > 150
    saved = {name: [part.tensors()[name] for part in parts] for name in ("records", "candidates")}
    for name, tensors in saved.items():
        assert np.array_equal(np.concatenate(tensors), whole.tensors()[name])


def test_buckets_are_no_function_of_the_ranks() -> None:
    """The negative control of the test above: with as many buckets as ranks, ids get other rows."""
    found = [[make(IdTable(buckets=number)).resolve(batch).rows.tolist() for batch in drift(3)] for number in (2, 3)]
    assert found[0] != found[1]


def lemma(quarantine: int, prefetch: int, seed: int) -> list[str]:
    """Train batches whose rows are written to when they are prepared, ``prefetch`` steps ahead; what goes wrong."""
    config = IdTable(buckets=1, quarantine=quarantine, reserve=0.5, eviction="lru")
    ids = IdMap("t", config, Buckets(1, 24, 8), SEED)
    random, lookahead, problems = np.random.default_rng(seed), 16, []
    resolved = {n: ids.resolve(mixed(random.integers(0, 61, random.integers(1, 6)))) for n in range(1, lookahead)}
    content: dict[int, int] = {}
    prepared = 0
    for step in range(1, 200):
        n = step + lookahead - 1
        resolved[n] = ids.resolve(mixed(random.integers(0, 61, random.integers(1, 6))))
        while prepared < step + prefetch:
            prepared += 1
            in_flight = {row for k in range(step, prepared) for row in resolved[k].rows.tolist()}
            for row, x in zip(resolved[prepared].born.tolist(), resolved[prepared].ids.tolist(), strict=True):
                if row in in_flight and row:
                    problems.append("pinned")
                content[row] = x
        ids.commit()
        records = ids.tensors()["records"]
        if any(content.get(row) != records[row, 0] for row in np.flatnonzero(records[:, 1] >= 0)):
            problems.append("overwritten")
    assert ids.counts.evicted > 100
    return problems


@pytest.mark.slow
@pytest.mark.parametrize(("quarantine", "prefetch"), [(1, 1), matrix(2, 2), matrix(2, 1), matrix(3, 2), matrix(4, 3)])
def test_a_quarantine_as_long_as_the_prefetch_keeps_every_state(quarantine: int, prefetch: int) -> None:
    assert [lemma(quarantine, prefetch, seed) for seed in range(10)] == [[]] * 10


@pytest.mark.parametrize(("quarantine", "prefetch"), [(1, 2), matrix(1, 3), matrix(2, 3)])
def test_a_shorter_quarantine_is_caught(quarantine: int, prefetch: int) -> None:
    assert any("overwritten" in lemma(quarantine, prefetch, seed) for seed in range(10))


def test_ties_go_by_the_id() -> None:
    """Ids of one use in one batch: the lowest mixed ones leave, whatever their order in the batch."""
    config = IdTable(buckets=1, quarantine=1, reserve=0.3)
    layout = Buckets(1, 11, 4)
    first = mixed(np.arange(9))
    for order in (first, first[::-1].copy()):
        ids = IdMap("t", config, layout, SEED)
        ids.resolve(order)
        ids.resolve(mixed(np.array([100])))
        ids.commit(), ids.commit()
        assert ids.counts.evicted == 4
        assert sorted(x for x in first.tolist() if ids.find(np.array([x]))[0] == 0) == sorted(first.tolist())[:4]


def test_a_full_bucket_refuses_the_largest_ids_and_counts_them() -> None:
    config = IdTable(buckets=1, quarantine=1)
    ids = IdMap("t", config, Buckets(1, 8, 2), SEED)
    batch = np.sort(mixed(np.arange(10)))
    assert ids.resolve(batch[::-1].copy()).rows.tolist() == [0, 0, 0, 7, 6, 5, 4, 3, 2, 1]
    ids.commit()
    assert (ids.counts.refused, ids.counts.admitted, ids.counts.evicted) == (3, 7, 0), "all were used in this batch"


@pytest.mark.slow
@pytest.mark.parametrize(("quarantine", "reserve"), [(4, 1 / 16), matrix(8, 1 / 8)])
@pytest.mark.parametrize(
    ("new", "low", "high"),
    [matrix(0.5, 0.0, 0.0), (0.75, 0.0, 0.001), (1.0, 0.005, 0.03), matrix(2.0, 0.3, 1)],
)
def test_a_reserve_is_enough_for_twice_the_quarantine(quarantine, reserve, new, low, high) -> None:
    """Shares of new ids that are refused, by how many come per batch: as docs/ids.md says."""
    capacity, config = 240_000, IdTable(quarantine=quarantine, reserve=reserve)
    ids, per_batch = (
        IdMap("t", config, config.buckets_of("t", capacity), SEED),
        int(new * reserve * capacity / 2 / quarantine),
    )
    full, refused = capacity // per_batch + 5, 0
    for step in range(full + 100):
        refused = ids.counts.refused if step == full else refused
        ids.resolve(mixed(np.arange(step * per_batch, (step + 1) * per_batch)))
        ids.commit()
    assert low <= (ids.counts.refused - refused) / (100 * per_batch) <= high
    assert ids.counts.evicted > 50 * per_batch


def test_an_id_that_comes_back_begins_anew() -> None:
    """dynamicemb's reclaimed slots kept their frequency: such an id would never leave again."""
    config = IdTable(buckets=1, quarantine=1, reserve=0.5)
    layout = Buckets(1, 8, 4)

    def counts(keeps: bool) -> int:
        oracle = IdDictionary("t", config, 8, SEED, fault="counts kept" if keeps else "")
        for batch in ([1] * 9, *([n] * 20 for n in range(2, 9)), [1]):
            oracle.resolve(mixed(np.array(batch)).tolist())
        return oracle.live()[mix(1)][1]

    ids = IdMap("t", config, layout, SEED)
    for batch in ([1] * 9, *([n] * 20 for n in range(2, 9)), [1]):
        ids.resolve(mixed(np.array(batch)))
        ids.commit()
    records = ids.tensors()["records"]
    (row,) = ids.find(mixed(np.array([1]))).tolist()
    assert records[row, 1] >> 32 == 1 == counts(keeps=False)
    assert counts(keeps=True) == 10


def test_one_coin_per_id_and_batch() -> None:
    """dynamicemb tossed one per occurrence: an id that occurs often in a batch was admitted more often."""
    config = IdTable(buckets=1, admit_probability=0.3)
    batch = mixed(np.arange(600))
    layout = Buckets(1, 1024, 64)
    once, often = (IdMap("t", config, layout, SEED).resolve(np.repeat(batch, times)) for times in (1, 7))
    assert set(once.ids.tolist()) == set(often.ids.tolist())
    assert 130 < len(once.ids) < 230
    other = IdMap("u", config, layout, SEED).resolve(batch)
    assert set(other.ids.tolist()) != set(once.ids.tolist()), "another table has other coins"


#: What others did, or a rule that depends on ranks; and settings under which it shows.
FAULTS = {
    "counts kept": IdTable(buckets=1, quarantine=1, reserve=0.3),
    "ties by row": IdTable(buckets=1, quarantine=1, reserve=0.3, eviction="lru"),
    "a coin per occurrence": IdTable(buckets=1, admit_probability=0.3),
    "coins in order of arrival": IdTable(buckets=1, admit_probability=0.3),
}


@pytest.mark.parametrize("fault", keep(["counts kept"], FAULTS))
def test_faults_are_caught(fault: str) -> None:
    def differing(planted: str) -> int:
        ids, oracle = make(FAULTS[fault]), IdDictionary("t", FAULTS[fault], CAPACITY, SEED, planted)
        found = [(ids.resolve(batch), oracle.resolve(batch.tolist())[0], batch) for batch in drift(60)]
        return sum(mine.rows.tolist() != rows_of(theirs, batch) for mine, theirs, batch in found)

    assert differing("") == 0
    assert differing(fault) > 5


def test_an_interrupt_in_a_batch_refuses_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = make(IdTable(buckets=1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ids, "_evict", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ids.resolve(mixed(np.array([1])))
    for call in (lambda: ids.find(mixed(np.array([1]))), ids.tensors, lambda: ids.resolve(mixed(np.array([1])))):
        with pytest.raises(
            CacheError, match=r"ids of table t: resolving the ids of batch 1 did not end .*KeyboardInterrupt"
        ):
            call()


def test_a_state_of_another_size_is_refused() -> None:
    small = IdMap("t", IdTable(buckets=1), Buckets(1, 8, 2), SEED)
    with pytest.raises(CacheError, match=r"got records \[8, 2\], needed \[48, 2\]"):
        make(IdTable(buckets=1)).load(small.tensors())


def test_a_state_of_other_buckets_is_refused() -> None:
    ids = make(IdTable(buckets=6))
    ids.resolve(mixed(np.arange(30)))
    ids.commit()
    with pytest.raises(CacheError, match="the state is not one of 3 buckets of 16 rows"):
        make(IdTable(buckets=3)).load(ids.tensors())
    with pytest.raises(CacheError, match=r"got candidates \[0, 2\], needed \[48, 2\]"):
        make(IdTable(buckets=6, admit_after=2)).load(ids.tensors())


def test_memory_is_what_it_promises() -> None:
    """28 bytes per row; 44 where ids wait for their rows."""
    for admit_after, most in ((1, 28.1), (2, 44.1)):
        config = IdTable(buckets=60, admit_after=admit_after)
        ids = IdMap("t", config, config.buckets_of("t", 61_440), SEED)
        assert ids.num_bytes / ids.num_rows < most


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"admit_after": 0}, "admit_after: got 0, needed a whole number from 1 to 2147483647"),
        ({"admit_after": 2**31}, "admit_after: got 2147483648, needed a whole number from 1 to 2147483647"),
        ({"half_life": 10**30}, "half_life: got 1000000000000000000000000000000, needed a whole number from 1"),
        ({"quarantine": True}, "quarantine: got True"),
        ({"admit_after": 2, "admit_probability": 0.5}, "admit_after=2 and admit_probability=0.5: one of them"),
        ({"admit_probability": 1.0}, "admit_probability: got 1.0, needed a number between 0 and 1"),
        ({"eviction": "lru", "half_life": 3}, 'half_life=3 has no effect with eviction="lru"'),
        ({"eviction": "fifo"}, "eviction: got 'fifo', needed one of lfu, lru"),
        ({"reserve": 0.0}, "reserve: got 0.0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        IdTable(**settings)
    assert message in str(error.value)


LEAST = 2.0**-53


@pytest.mark.parametrize("probability", [1e-17, 5e-324, LEAST * (1 - 2**-52)])
def test_a_probability_of_no_coin_is_refused(probability: float) -> None:
    """Rounded to no coin at all it would admit every id."""
    with pytest.raises(ConfigError, match=rf"admit_probability: got {probability!r}, needed at least 2\^-53"):
        IdTable(admit_probability=probability)


@pytest.mark.parametrize(
    ("settings", "most_born"),
    [
        ({"admit_probability": LEAST}, 0),
        ({"admit_probability": 1e-9}, 0),
        ({"admit_after": 2**31 - 1}, 0),
        ({"half_life": 2**31 - 1}, 20),
        ({"ttl_steps": 2**31 - 1}, 20),
        ({"quarantine": 2**31 - 1}, 20),
        ({"reserve": 5e-324}, 20),
        ({"reserve": 1 - 2**-53}, 20),
    ],
    ids=str,
)
def test_the_smallest_and_largest_settings_mean_what_they_say(settings: dict, most_born: int) -> None:
    config = IdTable(buckets=1, **settings)
    ids = IdMap("t", config, config.buckets_of("t", 64), SEED)
    assert len(ids.resolve(mixed(np.arange(20))).born) == most_born
    assert (ids.resolve(mixed(np.arange(20))).rows > 0).sum() == most_born


@pytest.mark.parametrize("rows", [8, 2**29, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_every_id_has_a_cell_in_the_largest_table_too(rows: int) -> None:
    """As Python's integers say it, for all that a table may have: no memory is taken for it."""
    cells, words = 2 * rows + 1, [*EXTREMES, *np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200).tolist()]
    found = [int(loops._cell(np.int64(x), np.int64(cells))) for x in words]
    spread = [(x * loops._SPREAD % 2**64) >> 32 for x in words]
    assert found == [high * cells >> 32 for high in spread]
    assert all(0 <= cell < cells for cell in found)


def test_most_rows_of_a_table() -> None:
    assert IdTable(buckets=1).buckets_of("t", 2**31 - 1).rows == 2**31 - 1
    with pytest.raises(ConfigError, match=r"got 2147483648 rows in 1 buckets.*to 2147483647"):
        IdTable(buckets=1).buckets_of("t", 2**31)


def test_buckets_of_a_table() -> None:
    assert [IdTable().buckets_of("t", rows).num_buckets for rows in (240, 61_440, 122_880, 240 * 1024)] == [
        24,
        60,
        120,
        240,
    ]
    with pytest.raises(ConfigError, match=r"table 't': got 1000 rows in 24 buckets.*Give the table 1008 rows"):
        IdTable().buckets_of("t", 1000)
    with pytest.raises(ConfigError, match="Give the table 192 rows"):
        IdTable().buckets_of("t", 24)
