"""What users do in and around a step is either as in stock TorchRec, bit for bit, or refused with a sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import cache_stats, flush, host_rows_changed
from embershard.cache.rows.transfer import PlainTransfer
from embershard.pipeline import left_steps
from embershard.pipeline.worker import CacheWorker
from embershard.sharding.torchrec import cached_embeddings
from tests.covering import combinations, keep, matrix
from tests.ranks.commands import Process, forked, print_to
from tests.ranks.look_ahead import (
    Batch,
    Case,
    Run,
    as_run,
    batches,
    build,
    differs,
    message_of,
    only_our_warnings_raise,
    plain,
    reference,
    train,
)
from tests.ranks.parity import differences, snapshot
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def losses_until(loop: Any, iterator: Iterator[Batch], steps: int) -> list[float]:
    """Of so many steps."""
    return [loop.progress(iterator).item() for _ in range(steps)]


# -- host rows that change


def load_in_place_between_steps(case: Case, runs: list[Run], folder: str) -> list[list[str]]:
    """`dcp.load` into the model's own tensors after some steps, with rows resident for later ones; stock does the same.
    What differs."""
    only_our_warnings_raise()
    donor = build(case, cached=False)
    train(plain(donor), batches(case, 5, seed=5))
    dcp.save({"model": donor.state_dict()}, checkpoint_id=folder)

    def load(model: nn.Module) -> Callable[[int], Any]:
        def after(step: int) -> Any:
            if step not in (3, 4, 8):
                return None
            dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
            return snapshot(model)

        return after

    stock, results = build(case, cached=False), []
    expected = train(plain(stock), batches(case), load(stock))
    for run in runs:
        with as_run(case, run) as (model, loop):
            found = train(loop, batches(case), load(model))
            different = [n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if _unequal(a, b)]
            results.append([f"record {n}" for n in different] + differences(snapshot(stock), snapshot(model)))
    return results


def _unequal(a: Any, b: Any) -> bool:
    return bool(differences(a, b)) if isinstance(a, dict) else a != b


def write_past_torch(case: Case, run: Run, how: str, announce: bool) -> list[str]:
    """Between two steps every table is halved where torch does not count it, in stock and in ours; what differs.
    ``how``: through ``data``, through ``numpy``, or only some ``rows`` of one table."""
    only_our_warnings_raise()

    def halve(model: nn.Module) -> Callable[[int], None]:
        def after(step: int) -> None:
            if step not in (2, 6):
                return
            flush(model)
            for name, value in model.state_dict().items():
                if "embedding" in name or ".t" in name:
                    for shard in value.local_shards():
                        _halve(shard, name, how)
            if announce and how == "rows":
                host_rows_changed(model, "t2", torch.arange(0, case.rows[2], 2))
            elif announce:
                host_rows_changed(model)

        return after

    stock = build(case, cached=False)
    expected = train(plain(stock), batches(case), halve(stock))
    with as_run(case, run) as (model, loop):
        found = train(loop, batches(case), halve(model))
        different = [f"loss {n}" for n, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
        return different + differences(snapshot(stock), snapshot(model))


def _halve(shard: Any, name: str, how: str) -> None:
    rows, first = shard.tensor, shard.metadata.shard_offsets[0]
    if how == "data":
        rows.data.mul_(0.5)
    elif how == "numpy":
        rows.detach().numpy()[:] *= 0.5
    elif ".t2." in name:
        rows.data[first % 2 :: 2] *= 0.5  # the even rows of the whole table


# -- steps that are left


def failing_metric(case: Case, run: Run, failing: int) -> list[str]:
    """Rank ``failing`` raises in some steps after its update, and catches it outside of the step; what differs."""
    only_our_warnings_raise()
    reference(case)
    losses = []
    with as_run(case, run) as (model, loop):
        iterator = iter(batches(case))
        for step in range(case.steps):
            with contextlib.suppress(ZeroDivisionError), loop.step(iterator) as batch:
                loop._optimizer.zero_grad()
                loss, output = model(batch)
                loss.backward()
                loop._optimizer.step()
                losses.append(output.item())
                if dist.get_rank() == failing and step % 3 == 1:
                    _ = 1 / 0
        over = message_of(lambda: loop.progress(iterator))
        different = differs(case, case.steps, model, losses)
    return different + ([] if over.startswith("StopIteration") else [f"did not end: {over}"])


def left_before_its_backward(case: Case, run: Run, catches: bool) -> None:
    """Rank 1 raises before its backward; alone in its process, which ends. Prints what this rank raised."""
    torch.set_num_threads(1)
    with as_run(case, run) as (model, loop), mock.patch.object(left_steps, "GRACE", left_steps.GRACE / 20):
        iterator = iter(batches(case))

        def go() -> None:
            for step in range(case.steps):
                with loop.step(iterator) as batch:
                    if dist.get_rank() == 1 and step == 2:
                        raise KeyError("no such metric")
                    loss, _ = model(batch)
                    loss.backward()

        print(f"rank {dist.get_rank()} got", message_of(go), flush=True)
        if catches and dist.get_rank() == 1:
            print("then", message_of(lambda: loop.progress(iterator)), flush=True)


def left_at_different_collectives() -> str:
    """Rank 0 leaves a step behind the begin of a collective, the others before it; what each is told."""
    left, rank = left_steps.LeftSteps(), dist.get_rank()
    begun = None if rank else dist.all_reduce(torch.ones(1), async_op=True)
    left.say(3, KeyError(f"of rank {rank}"))
    message = message_of(left.check)
    if begun is None:
        dist.all_reduce(torch.ones(1))
    else:
        begun.wait()
    return message


def left_at_the_same_collective() -> str:
    """All ranks leave a step behind the begin of a collective; what each is told."""
    left = left_steps.LeftSteps()
    begun = dist.all_reduce(torch.ones(1), async_op=True)
    left.say(3, KeyError("of all"))
    message = message_of(left.check)
    begun.wait()
    return message


# -- what was announced


def change_the_batch(case: Case, run: Run, how: str) -> dict[str, Any]:
    """In one step the forward gets another KeyedJaggedTensor than the pipeline's; the error, and what differs from
    stock on the other batches."""
    only_our_warnings_raise()
    data, changed = batches(case), 4
    stock = build(case, cached=False)
    expected = train(plain(stock), [batch for n, batch in enumerate(data) if n != changed or how == "the same"])
    losses = []
    with as_run(case, run) as (model, loop):
        iterator, error = iter(data), ""

        def step(number: int) -> None:
            with loop.step(iterator) as batch:
                loop._optimizer.zero_grad()
                loss, output = model(_changed(batch, how) if number == changed else batch)
                loss.backward()
                loop._optimizer.step()
                losses.append(output.item())

        for number in range(case.steps):
            said = message_of(lambda: step(number))  # noqa: B023
            error = error or said
        different = [f"loss {n}" for n, (a, b) in enumerate(zip(expected, losses, strict=True)) if a != b]
        return {"error": error, "different": different + differences(snapshot(stock), snapshot(model))}


def _changed(batch: Batch, how: str) -> Batch:
    features = batch.features
    lengths, weights, values = features.lengths().clone(), features.weights_or_none(), features.values()
    if how == "lengths":  # one id moves from its sample to a neighbour of the same feature
        size = len(lengths) // len(features.keys())
        place = next(n for n in range(len(lengths) - 1) if lengths[n] and (n + 1) % size)
        lengths[place], lengths[place + 1] = lengths[place] - 1, lengths[place + 1] + 1
    elif how == "weights":
        weights = torch.flip(weights, (0,))  # type: ignore[arg-type]
    elif how == "in place":
        values[0] = (values[0] + 1) % 300
        return batch
    elif how == "lengths in place":
        features.lengths().copy_(torch.flip(lengths, (0,)))
        return batch
    return dataclasses.replace(
        batch, features=KeyedJaggedTensor(features.keys(), values.clone(), lengths=lengths, weights=weights)
    )


def second_forward(case: Case, run: Run, step: int) -> dict[str, Any]:
    """The model is called twice with gradients in one step; the error, and what differs from stock without it. Other
    calls, under no_grad, are as without a pipeline."""
    only_our_warnings_raise()
    data = batches(case)
    stock = build(case, cached=False)
    expected = train(plain(stock), [batch for number, batch in enumerate(data) if number != step])
    losses = []
    with as_run(case, run) as (model, loop):
        iterator = iter(data)
        losses += losses_until(loop, iterator, step)

        def twice() -> None:
            with loop.step(iterator) as batch:
                with torch.no_grad():
                    before = model(batch)[1].item()
                assert before == model(batch)[1].item()
                time.sleep(0.05)  # the thread beside the step has brought in the next batch by now
                model(batch)

        error = message_of(twice)
        losses += train(loop, iterator)
        different = [f"loss {n}" for n, (a, b) in enumerate(zip(expected, losses, strict=True)) if a != b]
        return {"error": error, "different": different + differences(snapshot(stock), snapshot(model))}


# -- flushes in another thread


def flush_beside_a_backward(case: Case, run: Run) -> dict[str, Any]:
    """A thread flushes all the time, slowly, while steps train. At the end the host tier is stock's; and every flush
    wrote whole rows: the weights of a row and its optimizer state are of the same step."""
    only_our_warnings_raise()
    over, count = threading.Event(), [0]
    write_back = PlainTransfer.write_back

    def slow(self: PlainTransfer, *arguments: Any) -> None:
        write_back(self, *arguments)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)  # an update may begin and end before the flush does

    with as_run(case, run) as (model, loop), mock.patch.object(PlainTransfer, "write_back", slow):
        losses: list[float] = []
        errors: list[str] = []

        def go() -> None:
            try:
                while not over.is_set():
                    for pool in cached_embeddings(model):
                        pool.flush()
                    count[0] += 1
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=go)
        thread.start()
        try:
            losses += train(loop, batches(case))
        finally:
            over.set()
            thread.join()
        return {"different": differs(case, case.steps, model, losses), "errors": errors, "flushes": count[0]}


def update_that_ends_during_a_flush(case: Case) -> list[str]:
    """A backward that runs exactly between a flush's copy and its end, from another thread; what differs at the end."""
    only_our_warnings_raise()
    reference(case)
    model = build(case, cached=True)
    loop, data = plain(model), batches(case)
    pools = list(cached_embeddings(model))
    losses = losses_until(loop, iter(data[:3]), 3)
    loop._optimizer.zero_grad()
    loss, output = model(data[3])
    write_back = type(pools[0].cache._copies).write_back

    def then_train(self: Any, *arguments: Any) -> None:
        write_back(self, *arguments)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join(0.3)  # it ends here, or waits until the flush is over
        threads.append(thread)

    threads: list[threading.Thread] = []
    with mock.patch.object(type(pools[0].cache._copies), "write_back", then_train):
        pools[0].flush()
    for thread in threads:
        thread.join()
    loop._optimizer.step()
    losses.append(output.item())
    losses += losses_until(loop, iter(data[4:]), case.steps - 4)
    return differs(case, case.steps, model, losses)


# -- how far ahead rows are held


def depth_of(case: Case, run: Run, late_steps: int) -> dict[str, Any]:
    """Train with a worker that is late in the first ``late_steps`` steps on rank 1 alone; the depths after each step,
    and what differs."""
    only_our_warnings_raise()
    reference(case)
    join, depths, steps = CacheWorker.join, [], itertools.count()

    def late(self: CacheWorker) -> float:
        waited = join(self)
        is_late = next(steps) < late_steps and dist.get_rank() == 1 and loop._depth.depth == 1
        return waited + 10.0 if is_late else 0.0

    with as_run(case, run) as (model, loop), mock.patch.object(CacheWorker, "join", late):
        losses = train(loop, batches(case), lambda step: depths.append(loop.stats().prefetch_depth))
        evictions = sum(stats.evictions for stats in cache_stats(model))
        return {
            "different": differs(case, case.steps, model, losses),
            "depths": depths,
            "late": sum(stats.critical_path_fills for stats in cache_stats(model)),
            "evictions": evictions,
        }


RUNS = [Run(4, 2, 3), Run(4, 3, 4, 0, True, worker=False)]


# -- host rows that change


def test_loading_in_place_between_steps_reaches_rows_that_are_resident(two_ranks: RankPool, tmp_path: Path) -> None:
    case = Case(sharding="row_wise", dims=(16, 8, 16, 8))
    for different in two_ranks.run(load_in_place_between_steps, case, RUNS, str(tmp_path)):
        assert different == [[], []]


@pytest.mark.parametrize("sharding", keep(["column_wise"], ["row_wise", "column_wise"]))
@pytest.mark.parametrize("how", keep(["rows"], ["data", "numpy", "rows"]))
def test_writes_past_torch_are_read_once_they_are_announced(two_ranks: RankPool, how: str, sharding: str) -> None:
    case, run = Case(sharding=sharding), Run(4, 2, 3)
    assert two_ranks.run(write_past_torch, case, run, how, True) == [[], []]


def test_writes_past_torch_go_unnoticed_otherwise(two_ranks: RankPool) -> None:
    """The control of the test above, and what the documentation says."""
    case = Case(sharding="row_wise")
    assert all(two_ranks.run(write_past_torch, case, Run(4, 2, 3), "data", False))


# -- steps that are left


@pytest.mark.parametrize(("failing", "worker"), combinations([(1, True)], (0, 1), (True, False)))
def test_a_rank_that_raises_after_its_update_trains_on_with_the_others(two_ranks, failing, worker) -> None:
    case, run = Case(sharding="row_wise"), Run(4, 2, 3, worker=worker)
    assert two_ranks.run(failing_metric, case, run, failing) == [[], []]


def leave(rank: int, folder: Path, catches: bool) -> None:
    """Be one of two ranks, in a process of its own."""
    print_to(folder / f"rank_{rank}.txt")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    left_before_its_backward(Case(sharding="row_wise", batch_size=4), Run(4, 2, 3), catches)
    sys.stdout.flush()
    os._exit(0)  # as a process that an exception ends: without a farewell


@pytest.mark.parametrize("then", [matrix("ends"), "catches"])
def test_a_rank_that_leaves_a_step_before_its_backward_stops_all_with_its_message(tmp_path: Path, then: str) -> None:
    """Its process ends, or it goes on as if nothing had happened: then it is refused."""
    ranks = [Process(forked().Process(target=leave, args=(rank, tmp_path, then == "catches"))) for rank in (0, 1)]
    try:
        for rank in ranks:
            rank.wait(600)
    finally:
        for rank in ranks:
            rank.kill()
    first, second = ((tmp_path / f"rank_{rank}.txt").read_text() for rank in (0, 1))
    assert "rank 1 got KeyError: 'no such metric'" in second, first + second
    assert "rank 0 got StepError: rank 1 left step 2, so no rank goes on. It raised KeyError: 'no such" in first
    refused = "then StepError: rank 1 left step 2 before the end of its backward pass (KeyError: 'no such metric')"
    assert (refused in second) == (then == "catches"), second


def test_ranks_that_left_at_different_collectives_do_not_go_on(two_ranks: RankPool) -> None:
    """The next collective of one would meet an earlier one of the other: wrong data, if the sizes are the same."""
    first, second = two_ranks.run(left_at_different_collectives)
    assert "StepError: rank 0 left step 3 when it had begun" in first
    assert "StepError: rank 1 left step 3 when it had begun" in second
    assert "(KeyError: 'of rank 0')" in first
    assert "(KeyError: 'of rank 0')" in second
    assert two_ranks.run(left_at_the_same_collective) == ["", ""]


# -- what was announced


#: How a batch was changed, and what is said.
CHANGES = (
    ("lengths", "a batch with other lengths"),
    ("weights", "a batch with other weights"),
    ("in place", "was written to in place after it was announced"),
    ("lengths in place", "was written to in place after it was announced"),
    ("the same", ""),
)


@pytest.mark.parametrize("worker", keep([True], [True, False]))
@pytest.mark.parametrize("change", keep([CHANGES[1], CHANGES[2], CHANGES[4]], CHANGES))
def test_a_forward_of_anything_else_than_what_was_announced_is_refused(two_ranks, change, worker) -> None:
    how, says = change
    case, run = Case(sharding="row_wise", weighted=True), Run(4, 2, 3, worker=worker)
    for result in two_ranks.run(change_the_batch, case, run, how):
        assert result["different"] == []
        assert (says in result["error"]) if says else not result["error"]


@pytest.mark.parametrize(
    ("step", "worker"),
    [(7, False), *(matrix(*each) for each in itertools.product((0, 2, 5, 7), (True, False)))],
)
def test_a_second_forward_of_a_step_is_always_refused(two_ranks: RankPool, step: int, worker: bool) -> None:
    case, run = Case(sharding="row_wise"), Run(4, 2, 3, worker=worker)
    for result in two_ranks.run(second_forward, case, run, step):
        assert result["error"].startswith("CacheError: a second forward of one step's batch")
        assert result["different"] == []


# -- flushes in another thread


def test_flushing_beside_the_training_loses_no_update(one_rank: RankPool) -> None:
    case, run = Case(sharding="row_wise", steps=40, optimizer="adagrad"), Run(4, 2, 3)
    (result,) = one_rank.run(flush_beside_a_backward, case, run)
    assert result["errors"] == []
    assert result["different"] == []
    assert result["flushes"] >= 5


def test_an_update_that_ends_while_a_flush_copies_is_not_taken_for_written(one_rank: RankPool) -> None:
    assert one_rank.run(update_that_ends_during_a_flush, Case(sharding="row_wise")) == [[]]


# -- how far ahead rows are held


def test_one_batch_is_held_ahead_where_no_step_waits(two_ranks: RankPool) -> None:
    case, run = Case(sharding="row_wise", steps=24, batch_size=8), Run(8, 3, 4, 0, True, adaptive=True, worker=True)
    for result in two_ranks.run(depth_of, case, run, 0):
        assert result["different"] == []
        assert result["evictions"] > 300
        assert set(result["depths"]) == {1}


def test_all_ranks_hold_more_where_one_of_them_waits(two_ranks: RankPool) -> None:
    case, run = Case(sharding="row_wise", steps=44, batch_size=8), Run(8, 3, 4, 0, True, adaptive=True, worker=True)
    results = two_ranks.run(depth_of, case, run, 40)
    assert results[0]["depths"] == results[1]["depths"]
    assert sorted(set(results[0]["depths"])) == [1, 2]
    assert results[0]["depths"][-1] == 2, "waiting ended with it, so it stays"
    for result in results:
        assert result["different"] == []
        assert result["evictions"] > 300
