"""Ids without a bound: bit for bit what stock TorchRec trains where a plain dictionary says which id has which row."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from embershard.cache.ids.config import IdTable
from tests.covering import keep, matrix
from tests.ranks.id_endurance import PLACES, endure, interrupted
from tests.ranks.id_tables import (
    Case,
    Outcome,
    compare,
    loaded_maps,
    refusal,
    resume,
    save,
    warnings_of,
    with_rules,
    without_ids,
)
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankError, RankPool

pytestmark = pytest.mark.ranks

LFU, LATER = IdTable(buckets=6, reserve=0.4), IdTable(buckets=12, reserve=0.4, admit_after=2, half_life=6)


def check(
    outcomes: list[Outcome], evicted_ids: int = 1000, evicted_rows: int = 1000, counts_anew: bool = False
) -> None:
    """Nothing differs on any rank, nor what ranks counted, and both ids and slots were really evicted."""
    assert [outcome.different for outcome in outcomes] == [[]] * len(outcomes)
    assert sum(outcome.num_compared for outcome in outcomes) > 300
    assert sum(outcome.evicted_ids for outcome in outcomes) > evicted_ids
    assert sum(outcome.evicted_rows for outcome in outcomes) > evicted_rows
    if not counts_anew:
        assert counts(outcomes) == outcomes[0].oracle_counts


def counts(outcomes: list[Outcome]) -> dict[str, tuple[int, ...]]:
    """Live, admitted, evicted and refused ids of all ranks, by table."""
    tables = sorted({name for outcome in outcomes for name in outcome.counts})
    of_ranks = {name: [outcome.counts[name] for outcome in outcomes if name in outcome.counts] for name in tables}
    return {name: tuple(np.sum(found, axis=0).tolist()) for name, found in of_ranks.items()}


def maps(outcomes: list[Outcome]) -> dict[str, dict[int, tuple[int, int, int]]]:
    """Row, count and last use of every id, by table."""
    return {
        name: {x: place for outcome in outcomes for x, place in outcome.maps.get(name, {}).items()}
        for name in ("t0", "t1")
    }


AHEAD = Case(policy="lookahead", lookahead=8)
ONE_RANK = {
    "plain": Case(optimizer="sgd"),
    "known_ahead": dataclasses.replace(AHEAD, optimizer="adagrad"),
    "zeros": with_rules(dataclasses.replace(AHEAD, optimizer="adagrad", lookahead=3, prefetch=3), unadmitted="zero"),
    "row_wise_lru": Case(sharding="row_wise", rules=(IdTable(buckets=6, reserve=0.4, eviction="lru"), LATER, None)),
}
TWO_RANKS = {
    "table_wise": Case(optimizer="sgd"),
    "row_wise": Case(sharding="row_wise", optimizer="adagrad"),
    "both": Case(sharding=("row_wise", "table_wise", "row_wise")),
    "known_ahead": dataclasses.replace(AHEAD, sharding="row_wise", prefetch=1),
    "far_ahead_beside": dataclasses.replace(AHEAD, lookahead=64, prefetch=3, worker=True, optimizer="adagrad"),
    "two_features": dataclasses.replace(AHEAD, sharding="row_wise", shared=True),
    "two_features_weighted": Case(sharding="row_wise", shared=True, weighted=True, optimizer="adagrad"),
    "mean": dataclasses.replace(AHEAD, mean=True, sharding="row_wise", lookahead=1, prefetch=1),
    "mean_table_wise": Case(mean=True),
    "sequence": dataclasses.replace(AHEAD, sequence=True, dims=(8, 8, 8)),
    "sequence_row_wise": Case(sequence=True, dims=(8, 8, 8), sharding="row_wise", optimizer="adagrad"),
    "zeros": with_rules(dataclasses.replace(AHEAD, sharding="row_wise", weighted=True), unadmitted="zero"),
    "coins_and_ttl": Case(
        sharding="row_wise",
        rules=(
            IdTable(buckets=6, reserve=0.4, admit_probability=0.6, ttl_steps=6),
            dataclasses.replace(LFU, ttl_steps=3, buckets=2),
            None,
        ),
    ),
}


#: In so many steps ids and rows are evicted in every case.
STEPS = 45


@functools.cache
def sound(pool: RankPool, case: Case) -> list[Outcome]:
    """What a case gives, which tests share."""
    return pool.run(compare, case)


@pytest.mark.parametrize("name", keep(["zeros", "row_wise_lru"], ONE_RANK))
def test_one_rank(one_rank: RankPool, name: str) -> None:
    outcomes = sound(one_rank, dataclasses.replace(ONE_RANK[name], steps=STEPS))
    check(outcomes, evicted_ids=250, evicted_rows=250)
    assert (outcomes[0].zeros > 200) == (name == "zeros")


#: Ids that come early and late, and rules for them; how they are looked up, others have, too.
KEPT = ["far_ahead_beside", "coins_and_ttl"]


@pytest.mark.parametrize("name", keep(KEPT, TWO_RANKS))
def test_two_ranks(two_ranks: RankPool, name: str) -> None:
    check(two_ranks.run(compare, dataclasses.replace(TWO_RANKS[name], steps=STEPS)), evicted_ids=250, evicted_rows=250)


@pytest.mark.matrix
def test_every_sharding_has_the_same_map(two_ranks: RankPool) -> None:
    """Rows, counts and last uses, of all ranks together; a full bucket refuses the same ids."""
    found = []
    for case in (Case(), dataclasses.replace(AHEAD, sharding="row_wise", prefetch=3)):
        outcomes = two_ranks.run(compare, with_rules(dataclasses.replace(case, steps=STEPS), reserve=0.05))
        check(outcomes, evicted_ids=150, evicted_rows=250)
        assert sum(refused for *_, refused in counts(outcomes).values()) > 100
        found.append((maps(outcomes), counts(outcomes)))
    assert found[0] == found[1]
    assert min(len(ids) for ids in found[0][0].values()) > 150


@pytest.mark.matrix  # two ranks have it, too
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_four_ranks_have_the_map_of_one(four_ranks: RankPool, one_rank: RankPool, sharding: str) -> None:
    """And the counts of what was admitted, evicted and refused. Each equals stock on as many ranks; losses differ by
    the order of sums."""
    case = with_rules(dataclasses.replace(AHEAD, sharding=sharding, optimizer="adagrad", steps=STEPS), buckets=12)
    four, one = four_ranks.run(compare, case), one_rank.run(compare, dataclasses.replace(case, shares=4))
    check(four), check(one)
    assert (maps(four), counts(four)) == (maps(one), counts(one))
    means = np.mean([outcome.losses for outcome in four], axis=0)
    assert means.tolist() == pytest.approx(one[0].losses, rel=0, abs=loss_rounding(case.steps, 4 * case.batch_size))
    assert len(set(means.tolist())) > 0.8 * case.steps


@pytest.mark.parametrize(
    "case",
    [
        matrix(dataclasses.replace(AHEAD, handovers=(20, 21, 38))),
        with_rules(dataclasses.replace(AHEAD, reload_every=9, optimizer="adagrad"), unadmitted="zero"),
        matrix(dataclasses.replace(AHEAD, failing=(5, 33, 34, 38))),
        dataclasses.replace(AHEAD, interrupted=(5, 33, 34, 38), lookahead=1, prefetch=1),
    ],
    ids=["another pipeline", "a state is loaded", "a step fails", "a step is interrupted"],
)
def test_batches_that_are_taken_back_are_resolved_again(one_rank: RankPool, case: Case) -> None:
    """Those known and those prepared, whose rows had begun anew: of eight batches ahead, every time."""
    outcomes = one_rank.run(compare, dataclasses.replace(case, steps=STEPS))
    check(outcomes, evicted_ids=250, evicted_rows=250, counts_anew=bool(case.reload_every))


#: Where an interrupt leaves maps changed in part.
REFUSES = ("resolve", "count", "evict", "commit")


@pytest.mark.parametrize("place", keep(["commit", "births"], PLACES))
@pytest.mark.parametrize("is_late", [True, matrix(False)])
def test_interrupts_refuse_or_change_nothing(one_rank: RankPool, place: str, is_late: bool) -> None:
    """Before the work of a call, and after it. With maps of a pool at different batches, training would go on wrong."""
    case = dataclasses.replace(AHEAD, optimizer="adagrad", evaluate_every=0, ratio=0.6)
    (outcome,) = one_rank.run(interrupted, case, place, is_late, 23)
    assert (outcome is None) == (place in REFUSES)
    if outcome is not None:
        check([outcome])


@pytest.mark.matrix
def test_for_long(one_rank: RankPool) -> None:
    """Whether memory grows takes more steps: `python -m tests.ranks.id_endurance`."""
    ((problems, outcome),) = one_rank.run(endure, 80)
    assert problems == []
    assert outcome.counts["t0"][2] > 300


@pytest.mark.matrix  # test_trained_ids.py resumes on other ranks, too
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_a_checkpoint_goes_on_anywhere(one_rank, two_ranks, four_ranks, sharding, tmp_path) -> None:
    """Saved with eight batches known ahead: what it has is the state of its step, and on any ranks and shardings it
    goes on as stock does from a checkpoint of its own."""
    case = with_rules(dataclasses.replace(AHEAD, sharding=sharding, optimizer="adagrad", batch_size=8), buckets=12)
    case = dataclasses.replace(case, steps=STEPS)
    saved = two_ranks.run(save, dataclasses.replace(case, shares=2), STEPS // 2, str(tmp_path))
    everything = {name: {**saved[0].get(name, {}), **saved[1].get(name, {})} for name in case.ids}
    assert one_rank.run(loaded_maps, case, str(tmp_path)) == [everything]
    other = dataclasses.replace(case, sharding="row_wise" if sharding == "table_wise" else "table_wise")
    found = []
    for ranks, resumed, shares in (
        (one_rank, case, 4),
        (two_ranks, case, 2),
        (two_ranks, other, 2),
        (four_ranks, case, 1),
    ):
        outcomes = ranks.run(resume, dataclasses.replace(resumed, shares=shares), STEPS // 2, str(tmp_path))
        check(outcomes, evicted_ids=150, evicted_rows=150, counts_anew=True)
        found.append(maps(outcomes))
    assert found[0] == found[1] == found[2] == found[3]


def test_rows_without_their_ids_are_not_loaded(one_rank: RankPool) -> None:
    (said,) = one_rank.run(without_ids, Case())
    assert "CheckpointError: the state dict has the rows of table 't0', and not whose they are" in said


@pytest.mark.parametrize("sharding", keep(["row_wise"], ["table_wise", "row_wise"]))
@pytest.mark.parametrize("lookahead", keep([4], [0, 4]))
def test_no_id_is_called_out_of_range(two_ranks: RankPool, sharding: str, lookahead: int) -> None:
    """Any id has a place in these tables."""
    case = Case(sharding=sharding, lookahead=lookahead, steps=2, evaluate_every=0)
    assert two_ranks.run(warnings_of, case) == [[], []]


REFUSED = {
    "column_wise": (Case(sharding="column_wise"), "table 't0' takes any id and is sharded column_wise; needed one of"),
    "grid": (Case(sharding="table_row_wise"), "is sharded table_row_wise; needed one of table_wise, row_wise"),
    "data_parallel": (Case(sharding="data_parallel"), "is sharded data_parallel; needed one of"),
    "no cache": (Case(cached=()), "table 't0' takes any id and has the compute kernel 'fused'; needed a cache"),
    "odd buckets": (with_rules(Case(sharding="row_wise"), buckets=3), "3 buckets of 80 rows, and 2 ranks; needed as"),
    "capacity": (Case(rows=(241, 480, 360)), "table 't0': got 241 rows in 6 buckets, needed a multiple of 6"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(two_ranks: RankPool, name: str) -> None:
    case, message = REFUSED[name]
    for said in two_ranks.run(refusal, case):
        assert message in said
        assert said.startswith(("ConfigError", "ShardingError"))


#: A planted fault, and a case in which it changes what is trained or read.
FAULTS = {
    "states kept": Case(optimizer="adagrad"),
    "weights by row": Case(optimizer="sgd"),
    "overwritten too early": with_rules(dataclasses.replace(AHEAD, prefetch=3, evaluate_every=1), quarantine=1),
    "slots of the dead found": AHEAD,
    "born as zeros": Case(),
    "evaluation from the head": AHEAD,
    "save from the head": dataclasses.replace(AHEAD, reload_every=9),
    "zero trained": with_rules(Case(), unadmitted="zero"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(one_rank: RankPool, name: str) -> None:
    """Each case passes without its fault."""
    case = dataclasses.replace(FAULTS[name], steps=STEPS)
    check(sound(one_rank, case), evicted_ids=150, evicted_rows=150, counts_anew=bool(case.reload_every))
    faulty = dataclasses.replace(case, fault=name)
    if name == "overwritten too early":  # the cache notices a row that is still in use
        with pytest.raises(RankError, match="is to be reinitialised while batch"):
            one_rank.run(compare, faulty)
    else:
        (outcome,) = one_rank.run(compare, faulty)
        assert outcome.different
