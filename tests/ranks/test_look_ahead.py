"""With the look-ahead pipeline, training gives bit for bit what stock TorchRec gives without a cache.

Every case asserts that rows were evicted, hundreds of times. Where P batches fit beside the one in training, it asserts
that no step after the first waited for a row. The negative controls break the safety rule, and the comparison fails.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from embershard.sharding.memory_model import known_together
from tests.covering import combinations, covering, keep, matrix
from tests.ranks import faults, look_ahead_events
from tests.ranks.look_ahead import Case, Outcome, Run, compare
from tests.ranks.workers import RankPool
from tests.unit.sharding.plans import SHARDED as SHARDINGS

pytestmark = pytest.mark.ranks

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
DEPTHS = [(lookahead, prefetch) for lookahead in (1, 4, 64) for prefetch in (1, 2, 3) if prefetch <= lookahead]


def _runs(sharding: str, optimizer: str) -> list[Run]:
    """Three of the depths, so that each meets every sharding type and every optimizer; with the slots for P batches and
    for P + 1; with the worker and without."""
    s, o = SHARDINGS.index(sharding), OPTIMIZERS.index(optimizer)
    runs = []
    for number in range(3):
        lookahead, prefetch = DEPTHS[(3 * o + number + s) % len(DEPTHS)]
        runs.append(
            Run(
                lookahead,
                prefetch,
                working_set_of=prefetch + (s + number) % 2,
                even_if_crowded=(s + number) % 3 > 0,
                worker=(s + o) % 2 == 0,
            )
        )
    return runs


def _check(outcomes: list[Outcome], run: Run, evictions: int = 500) -> None:
    """Nothing differs on any rank; rows were evicted and written back; nothing was late if P + 1 batches fit."""
    assert [o.different for o in outcomes] == [[] for _ in outcomes], run
    assert sum(o.num_compared for o in outcomes) >= 4
    evicted = sum(o.evictions for o in outcomes)
    assert evicted >= evictions, f"{run}: only {evicted} evictions, the case proves nothing"
    assert sum(o.write_backs for o in outcomes) >= evicted // 2
    for outcome in outcomes:
        steps = len(outcome.late)
        assert outcome.pipeline.steps == steps
        assert outcome.pipeline.lookahead_min == (run.lookahead if run.lookahead < steps - 1 else None), run
    if run.working_set_of is None:
        return
    depths = [o.pipeline.prefetch_min for o in outcomes]
    if run.working_set_of + min(run.extra_slots, 0) > run.prefetch:
        assert [sum(o.late[1:]) for o in outcomes] == [0 for _ in outcomes], run
        least = run.prefetch if run.even_if_crowded or run.policy != "lookahead" else 1
        assert all(least <= depth <= run.prefetch for depth in depths), run
    else:
        assert min(depths) < run.prefetch, run


def _check_all(pool: RankPool, case: Case, runs: list[Run], evictions: int = 500) -> list[list[Outcome]]:
    by_rank = pool.run(compare, case, runs)
    for number, run in enumerate(runs):
        _check([outcomes[number] for outcomes in by_rank], run, evictions)
    return by_rank


# -- bit for bit


#: The other shardings differ from these only on several nodes: `test_four_ranks_on_two_nodes`.
ON_ONE_NODE = [*zip(("table_wise", "row_wise", "column_wise"), OPTIMIZERS, strict=True)]


@pytest.mark.parametrize(("sharding", "optimizer"), combinations(ON_ONE_NODE, SHARDINGS, OPTIMIZERS))
def test_every_sharding_type_optimizer_and_depth(two_ranks: RankPool, sharding: str, optimizer: str) -> None:
    case = Case(sharding=sharding, optimizer=optimizer, steps=9)
    _check_all(two_ranks, case, _runs(sharding, optimizer), 300)


def test_the_depths_meet_everything() -> None:
    """All pairs of the test above."""
    met = set()
    for sharding, optimizer in itertools.product(SHARDINGS, OPTIMIZERS):
        for run in _runs(sharding, optimizer):
            depth, fits = (run.lookahead, run.prefetch), run.working_set_of != run.prefetch
            met |= {(sharding, depth), (optimizer, depth), (depth, run.worker), (depth, fits)}
            met |= {(sharding, fits), (sharding, run.worker)}
    depths = itertools.product(DEPTHS, [*SHARDINGS, *OPTIMIZERS])
    assert {(other, depth) for depth, other in depths} <= met
    both = (True, False)
    assert {*itertools.product(DEPTHS, both), *itertools.product(SHARDINGS, both)} <= met


@pytest.mark.parametrize("optimizer", keep(["adagrad"], OPTIMIZERS))
def test_one_rank(one_rank: RankPool, optimizer: str) -> None:
    _check_all(one_rank, Case(sharding="row_wise", optimizer=optimizer), [Run(1, 1, 1), Run(4, 3, 4), Run(64, 2, 3)])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("optimizer", "run"),
    [
        ("rowwise_adagrad", Run(64, 3, 3, 0, True, worker=False, delays=1)),
        ("sgd", Run(4, 2, 3)),
        ("adagrad", Run(1, 1, 2)),
    ],
    ids=str,
)
def test_four_ranks_on_two_nodes(four_ranks: RankPool, optimizer: str, run: Run) -> None:
    """Two ranks are a node here: only then grid and table-row-wise differ from their parts."""
    sharding = ("row_wise", "table_row_wise", "grid_shard", "table_wise")
    case = Case(sharding=sharding, local_world_size=2, batch_size=8, steps=10, optimizer=optimizer)
    _check_all(four_ranks, case, [run])


@pytest.mark.parametrize(
    ("sharding", "optimizer"),
    [matrix("column_wise", "adagrad"), matrix("table_wise", "sgd"), matrix("row_wise", "rowwise_adagrad")],
)
def test_embedding_collection(two_ranks: RankPool, sharding: str, optimizer: str) -> None:
    case = Case(sequence=True, sharding=sharding, optimizer=optimizer)
    _check_all(two_ranks, case, [Run(1, 1, 1), Run(4, 2, 3), Run(64, 3, 4, worker=False, delays=2)])


DEEP_AND_NOT = (Run(4, 2, 3), Run(64, 3, 3, worker=False, delays=3))
MIXED = ("row_wise", "table_wise", "column_wise", "data_parallel")
VARIANTS = {
    "pooled and sequence": Case(modules=(("pooled", 2), ("sequence", 2)), sharding="row_wise"),
    "two pooled": Case(modules=(("pooled", 2), ("pooled", 2)), sharding=MIXED, optimizer="adagrad"),
    "three modules": Case(modules=(("sequence", 1), ("pooled", 2), ("sequence", 1)), dims=(16, 8, 8, 32)),
    "mixed plan": Case(sharding=MIXED, cached=(0, 2), optimizer="sgd"),
    "mixed plan of sequences": Case(sharding=(*MIXED[:3], "row_wise"), cached=(0, 1), sequence=True),
    "shared table": Case(shared=True, optimizer="adagrad"),
    "weighted and shared": Case(weighted=True, shared=True, sharding="grid_shard"),
    "mean": Case(mean=True, sharding="row_wise"),
    "fp16 beside fp32": Case(fp16=(0, 2), optimizer="sgd"),
    "different dims": Case(dims=(16, 8, 16, 32), sharding="row_wise"),
    "batches without ids": Case(empty_every=4, sharding="row_wise", weighted=True),
    "int32 ids": Case(int32_ids=True, sharding=MIXED, cached=(0, 2)),
}
#: What others have, too.
COMBINED = [
    matrix(name, run)
    for name in (
        "two pooled",
        "mixed plan of sequences",
        "weighted and shared",
        "mean",
        "different dims",
        "three modules",
        "shared table",
        "fp16 beside fp32",
    )
    for run in DEEP_AND_NOT
]
SINGLE = tuple(name for name in VARIANTS if name not in {case.values[0] for case in COMBINED})


@pytest.mark.parametrize(("name", "run"), covering(SINGLE, DEEP_AND_NOT) + COMBINED, ids=str)
def test_variants(two_ranks: RankPool, name: str, run: Run) -> None:
    _check_all(two_ranks, VARIANTS[name], [run])


@pytest.mark.matrix
@pytest.mark.parametrize("sharding", ["row_wise", matrix("column_wise")])
def test_variable_batch_sizes(two_ranks: RankPool, sharding: str) -> None:
    runs = [Run(4, 2), Run(64, 3, worker=False)]
    case = Case(sharding=sharding, ratio=0.2)
    assert two_ranks.run(look_ahead_events.variable_batch_sizes, case, runs) == [[[], []], [[], []]]


def test_tables_that_stay_on_the_device(two_ranks: RankPool) -> None:
    case = Case(rows=(1000, 30, 2000, 9), ratio=0.27, sharding="row_wise")
    for outcomes in _check_all(two_ranks, case, [Run(4, 1), Run(64, 2, worker=False)], 300):
        assert [sum(outcome.late[1:]) for outcome in outcomes] == [0, 0]


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", keep(["adagrad"], OPTIMIZERS))
def test_every_transfer(two_ranks: RankPool, optimizer: str) -> None:
    """What a GPU uses, with a CPU in its place."""
    runs = [Run(64, 3, 3, transfer="staged"), Run(4, 2, 3, transfer="triton_uva", worker=False)]
    _check_all(two_ranks, Case(sharding="row_wise", optimizer=optimizer), runs)


@pytest.mark.matrix
def test_every_policy(two_ranks: RankPool) -> None:
    """And knowing pays: fewer rows come in, the more batches are known."""
    policies = [("lookahead", False), ("lookahead", True), ("frequency", True), ("lfu", False), ("lru", False)]
    runs = [Run(64, 2, 4, policy=policy, profile=profile) for policy, profile in policies]
    runs += [Run(64, 2, 4, policy=policy, worker=False) for policy in ("lookahead", "lfu", "lru")]
    runs += [Run(2, 2, 4)]
    for outcomes in _check_all(two_ranks, Case(sharding="row_wise", steps=24), runs):
        fills = [outcome.fills for outcome in outcomes]
        assert fills[0] == fills[5], "which rows leave does not depend on the timing"
        assert fills[3:5] == fills[6:8]
        assert fills[0] < fills[-1] < min(fills[3:5])


@pytest.mark.matrix
def test_a_long_window(two_ranks: RankPool) -> None:
    """Longer than L = 64, so that the window is full for many steps."""
    case = Case(sharding="row_wise", steps=80, batch_size=4, optimizer="adagrad")
    _check_all(two_ranks, case, [Run(64, 2, 3)])


# -- slots


@pytest.mark.parametrize("prefetch", [1, matrix(2), matrix(3)])
def test_slots_of_exactly_the_working_set(two_ranks: RankPool, prefetch: int) -> None:
    """Of P batches, a slot less and a slot more; and of P + 1, a slot less: then P shrinks, at least once."""
    sizes = [(prefetch, -1), (prefetch, 0), (prefetch, 1), (prefetch + 1, -1), (prefetch + 1, 0)]
    overflow = "grow" if prefetch == 1 else "raise"  # a slot less than one batch needs
    runs = [Run(4, prefetch, size, extra, True, overflow=overflow, worker=extra == 0) for size, extra in sizes]
    for outcomes in _check_all(two_ranks, Case(sharding="row_wise"), runs):
        assert [o.growths for o in outcomes] == ([1, 0, 0, 0, 0] if prefetch == 1 else [0, 0, 0, 0, 0])


@pytest.mark.parametrize("worker", keep([True], [True, False]))
def test_a_batch_that_does_not_fit(two_ranks: RankPool, worker: bool) -> None:
    """``grow`` warns and stays exact, several times; ``raise`` says what is missing. Nothing moves in between."""
    case = Case(sharding="row_wise", ratio=0.02)
    for result in two_ranks.run(look_ahead_events.overflow, case, Run(4, 2, overflow="grow", worker=worker)):
        assert result["different"] == []
        assert result["growths"] >= 2
        assert len(result["warnings"]) == result["growths"]
        assert all("the cache grows to" in text and "0 in flight" in text for text in result["warnings"])
    for rank, result in enumerate(two_ranks.run(look_ahead_events.overflow, case, Run(4, 2, worker=worker))):
        assert result["error"].startswith(
            f"CacheOverflowError: rank {rank}, tables t0, t1, t2, t3: batch 1 and 0 in flight"
        )


# -- timing


@pytest.mark.matrix
def test_where_planning_runs_decides_nothing(two_ranks: RankPool) -> None:
    """Beside the training, in its thread, or in turns as the trial has it: the same rows are filled and evicted."""
    runs = [Run(8, 1, 3, worker=worker) for worker in (None, True, False)]
    for tried, beside, inline in _check_all(two_ranks, Case(sharding="row_wise", steps=40), runs):
        for other in (beside, inline):
            for name in ("fills", "evictions", "write_backs", "late", "slots"):
                assert getattr(tried, name) == getattr(other, name), name
        assert (beside.pipeline.uses_worker, inline.pipeline.uses_worker) == (True, False)


@pytest.mark.parametrize("worker", keep([True], [True, False]))
@pytest.mark.parametrize("sequence", keep([True], [True, False]))
def test_random_delays_in_every_stage(two_ranks: RankPool, worker: bool, sequence: bool) -> None:
    depths = [Run(1, 1, 2, delays=11), Run(4, 3, 4, 0, True, delays=12), Run(64, 2, 2, delays=13)]
    case = Case(sequence=True) if sequence else Case(sharding="row_wise", optimizer="adagrad")
    _check_all(two_ranks, case, [dataclasses.replace(run, worker=worker) for run in depths])


def test_every_stage_is_delayed(two_ranks: RankPool) -> None:
    for waits in two_ranks.run(look_ahead_events.delayed_stages, Case(), Run(4, 2, 3, delays=2)):
        assert len(waits) >= 11
        assert min(waits.values()) >= 2, waits


DISTANCES = [1, 2, 3, 5]
ONE_TABLE = Case(batch_size=6, rows=(1,), dims=(16,), steps=14)


@pytest.mark.parametrize("distances", [DISTANCES[:2], matrix(DISTANCES)], ids=len)
@pytest.mark.parametrize(
    "run",
    [
        matrix(Run(1, 1, working_set_of=2, even_if_crowded=True)),
        matrix(Run(64, 3, working_set_of=4, even_if_crowded=True, worker=False)),
        matrix(Run(4, 2, working_set_of=1, even_if_crowded=True)),
        Run(64, 3, working_set_of=2, even_if_crowded=True),
    ],
    ids=str,
)
def test_evict_then_reuse(two_ranks: RankPool, run: Run, distances: list[int]) -> None:
    """A row is put out, and comes back 1 to 5 batches later."""
    assert run.working_set_of is not None
    size, steps = ONE_TABLE.batch_size, ONE_TABLE.steps
    for results in two_ranks.run(look_ahead_events.evict_then_reuse, ONE_TABLE, run, distances, 0.003):
        for result in results:
            assert result == {
                "different": [],
                "fills": steps * size,  # every use of a row found it put out
                "evictions": (steps - run.working_set_of) * size,
                "slots": run.working_set_of * size,
                "prefetch_min": run.working_set_of - 1,
            }


@pytest.mark.matrix
@pytest.mark.parametrize("worker", keep([True], [True, False]))
@pytest.mark.parametrize("fault", keep(["evicted_one_batch_early"], ("evicted_one_batch_early", *faults.FAULTS)))
def test_the_comparison_fails_when(two_ranks: RankPool, fault: str, worker: bool) -> None:
    run = Run(4, 2, working_set_of=3, even_if_crowded=True, worker=worker)
    outcomes = two_ranks.run(faults.look_ahead_with_fault, Case(sharding="row_wise"), run, fault)
    assert any(outcome.different for outcome in outcomes), f"{fault} went unnoticed"
    assert sum(outcome.evictions for outcome in outcomes) >= 500


@pytest.mark.parametrize("worker", keep([True], [True, False]))
def test_the_comparison_fails_when_rows_are_read_before_they_landed(two_ranks: RankPool, worker: bool) -> None:
    run, fault = Run(4, 2, 3, 0, True, transfer="staged", worker=worker), "read_before_the_write_back_landed"
    results = two_ranks.run(faults.evict_then_reuse_with_fault, ONE_TABLE, run, [1], 0.0, fault)
    for by_distance in zip(*results, strict=True):
        assert any(result["different"] for result in by_distance), f"{fault} went unnoticed"


# -- the wrong batch


@pytest.mark.parametrize(("where", "worker"), covering(("between two steps", "in a step"), (True, False)))
def test_another_batch_than_the_prefetched_one_is_refused(two_ranks: RankPool, where: str, worker: bool) -> None:
    case = Case(sharding="row_wise", ratio=0.4)
    for result in two_ranks.run(look_ahead_events.other_batch, case, Run(4, 2, worker=worker), where):
        assert result["error"].startswith("CacheError")
        assert ("not the one prefetched" if where == "between two steps" else "that step() gives") in result["error"]
        assert result["different"] == []


# -- the ends of the data


@pytest.mark.parametrize("run", [Run(2, 1), *map(matrix, (Run(4, 2), Run(1, 1, worker=False), Run(64, 3)))], ids=str)
def test_every_batch_trains_once(two_ranks: RankPool, run: Run) -> None:
    """0, 1, P, L, L + 1 and 3 L batches, twice each; then ranks with different numbers."""
    even = {0, 1, run.prefetch, run.lookahead, run.lookahead + 1, 3 * run.lookahead}
    lengths = [*((n, n) for n in sorted(even) if n <= 12), (5, 3), (1, 7), (0, 4), (4, 0)]
    case = Case(ratio=0.4, batch_size=4)
    for different in two_ranks.run(look_ahead_events.uneven_data, case, run, lengths):
        assert different == [[] for _ in lengths]


ENDS = ((2, False), (9, True), (0, True), (5, True), (9, False))


@pytest.mark.parametrize("failing", keep([1], [0, 1]))
@pytest.mark.parametrize("ends", [ENDS[:2], matrix(ENDS)], ids=len)
def test_an_iterator_that_fails(two_ranks: RankPool, ends: tuple[tuple[int, bool], ...], failing: int) -> None:
    """All ranks raise before the same step; the batches that were taken before can still train."""
    for after, worker in ends:
        case, run = Case(ratio=0.4, batch_size=8), Run(4, 2, worker=worker)
        results = two_ranks.run(look_ahead_events.failing_iterator, case, run, failing, after)
        assert [result["different"] for result in results] == [[], []]
        # It is asked for batch `after` when the window, the batch in training and the two under way are full.
        assert [result["trained"] for result in results] == [max(0, after - run.lookahead - 2)] * 2
        assert results[failing]["error"] == f"OSError: the disk of rank {failing} is gone"
        assert results[1 - failing]["error"].startswith(f"DataError: the input of rank {failing} failed")


# -- in the middle of the window


RUNS = (Run(4, 2, 3), Run(64, 3, 3, 0, True, worker=False, delays=4))


@pytest.mark.parametrize(
    ("event", "run"),
    combinations(
        [(event, RUNS[number % 2]) for number, event in enumerate(("evaluation", "checkpoints", "loads"))],
        tuple(look_ahead_events.BETWEEN_STEPS),
        RUNS,
    ),
    ids=str,
)
def test_between_two_steps(two_ranks: RankPool, event: str, run: Run) -> None:
    for different in two_ranks.run(look_ahead_events.between_steps, Case(sharding="row_wise"), [run], event):
        assert different == [[]]


@pytest.mark.parametrize("worker", keep([True], [True, False]))
@pytest.mark.parametrize("at", keep(["in the middle"], ["the end", "in the middle"]))
def test_evaluation_through_the_pipeline(two_ranks: RankPool, at: str, worker: bool) -> None:
    case, run = Case(sharding="row_wise", steps=16), Run(4, 2, 3, worker=worker)
    for result in two_ranks.run(look_ahead_events.evaluate_through_the_pipeline, case, run, at):
        assert result["different"] == []
        assert result["untouched"]
        assert result["late"][0] > 0
        assert sum(result["late"][1:]) == 0, "after an evaluation the pipeline looks ahead again"
        assert result["known_at_the_end"] == [0]


@pytest.mark.parametrize("worker", [True, matrix(False)])
def test_evaluation_through_another_pipeline(two_ranks: RankPool, worker: bool) -> None:
    case, run = Case(sharding="row_wise"), Run(4, 2, 3, worker=worker)
    for result in two_ranks.run(look_ahead_events.evaluate_through_another_pipeline, case, run):
        assert result == {"different": [], "late": 0, "still_known": True, "known_at_the_end": [0]}


@pytest.mark.parametrize("run", [Run(4, 2), matrix(Run(4, 2, worker=False)), matrix(Run(64, 3))], ids=str)
def test_detached_in_the_middle(two_ranks: RankPool, run: Run) -> None:
    """Training goes on without the pipeline, and then with it again."""
    for result in two_ranks.run(look_ahead_events.detach_and_go_on, Case(sharding="row_wise", ratio=0.4), run, 5):
        assert result["different"] == []
        assert result["lost"] == min(run.lookahead + 3, 12 - 5)
        assert result["own_forward"]
        assert result["pins"] == 0


@pytest.mark.parametrize("when", keep(["after the forward"], ["before the forward", "after the forward"]))
def test_a_body_that_raises(two_ranks: RankPool, when: str) -> None:
    for run in (Run(4, 2, 3), Run(4, 2, 3, worker=False), Run(64, 1, 1)):
        assert two_ranks.run(look_ahead_events.raising_body, Case(sharding="row_wise"), run, when) == [[], []]


# -- copies that fail


@pytest.mark.parametrize(("copy", "worker"), covering(("fill", "write_back"), (True, False)))
def test_a_copy_that_fails(two_ranks: RankPool, copy: str, worker: bool) -> None:
    """Its error stops the training before the next step; the cache took the plan back, and nothing is lost."""
    case, run = Case(sharding="row_wise"), Run(4, 2, 3, worker=worker)
    for result in two_ranks.run(look_ahead_events.failing_copy, case, run, copy, 7):
        assert result["calls"] >= 7
        assert result["error"] == f"OSError: {copy} failed"
        assert (result["saving"], result["evaluating"]) == ("", "")
        assert (result["then"], result["later"]) == ([], [])


@pytest.mark.matrix
@pytest.mark.parametrize("worker", [True, matrix(False)])
def test_batches_become_known_several_at_a_time(two_ranks: RankPool, worker: bool) -> None:
    """With a long look-ahead; `_check` asserts that no fewer than it were known at any step."""
    case, run = Case(sharding="row_wise", steps=70), Run(48, 2, 3, worker=worker)
    assert known_together(run.lookahead) == 3
    for outcome in itertools.chain.from_iterable(_check_all(two_ranks, case, [run])):
        assert outcome.pipeline.lookahead_mean is not None
        assert run.lookahead + 0.5 < outcome.pipeline.lookahead_mean < run.lookahead + 2


# -- memory


@pytest.mark.matrix
@pytest.mark.parametrize(("share", "worker"), [(3, True), matrix(6, False)])
def test_known_batches_take_bounded_memory(two_ranks: RankPool, share: int, worker: bool) -> None:
    """With less memory fewer batches are known, from the first step on; when they have trained, nothing is left of
    them."""
    case, run = Case(sharding="row_wise", steps=40), Run(30, 2, 3)
    free = [outcome for (outcome,) in two_ranks.run(compare, case, [run])]
    a_batch = max(outcome.pipeline.max_known_bytes for outcome in free) / run.lookahead
    bound = int(run.lookahead * a_batch / share)
    less = dataclasses.replace(run, max_known_bytes=bound, worker=worker)
    for (outcome,) in two_ranks.run(compare, case, [less]):
        assert outcome.different == []
        assert sum(outcome.late[1:]) == 0
        assert outcome.pipeline.lookahead_min is not None
        assert run.prefetch <= outcome.pipeline.lookahead_min < 1.5 * run.lookahead / share
        chains = outcome.known_bytes[-1]  # what links the batches keeps its size
        assert chains < bound
        assert bound / 3 < outcome.pipeline.max_known_bytes <= bound + 2 * a_batch + chains


# -- finding the inputs


def test_a_model_that_cannot_be_traced(two_ranks: RankPool) -> None:
    case, run = Case(sharding="row_wise", ratio=0.4, modules=(("pooled", 3), ("sequence", 1))), Run(4, 2)
    for message in two_ranks.run(look_ahead_events.untraceable, case, run, "none"):
        assert message.startswith("ShardingError: the inputs of the sharded modules could not be traced")
        assert "features=lambda batch: {" in message
    for message in two_ranks.run(look_ahead_events.untraceable, case, run, "one is missing"):
        assert message.startswith("ShardingError: features(batch) gives inputs for ['parts.0']; ")
        assert message.endswith("the sharded modules are ['parts.0', 'parts.1']")
    for different, late in two_ranks.run(look_ahead_events.untraceable, case, run, "all"):
        assert different == []
        assert late < 250  # those of the first batch


def test_a_module_that_is_called_twice(two_ranks: RankPool) -> None:
    """It cannot be told which input is whose: it looks nothing ahead, and stays exact."""
    run = Run(4, 2)
    assert two_ranks.run(look_ahead_events.module_that_is_called_twice, Case(ratio=0.5), run) == [[], []]


def test_a_loop_of_ones_own(two_ranks: RankPool) -> None:
    """It may evaluate and save inside of a step, while a thread brings in the next rows."""
    for run in (Run(4, 2, 4, delays=5), Run(4, 3, 4, delays=6), Run(1, 1, 2, worker=False)):
        assert two_ranks.run(look_ahead_events.own_loop, Case(sharding="row_wise"), run) == [[], []]


def test_depths_that_make_no_sense(one_rank: RankPool) -> None:
    for lookahead, prefetch in ((1, 2), (4, 0), (0, 0)):
        (message,) = one_rank.run(look_ahead_events.wrong_depths, Run(lookahead, prefetch))
        assert message == (
            f"ConfigError: got lookahead={lookahead}, prefetch={prefetch}; needed 1 <= prefetch <= lookahead"
        )
