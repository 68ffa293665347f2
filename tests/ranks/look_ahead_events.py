"""What happens around the look-ahead pipeline's steps: ends, errors, evaluation, checkpoints, faults of the copies."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import LookAheadPipeline, cache_stats, flush
from embershard.cache.planner import CacheGrowthWarning
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.transfer import PlainTransfer
from embershard.sharding.torchrec import cached_embeddings
from tests.ranks.delays import random_delays, slow_landings
from tests.ranks.look_ahead import (
    Batch,
    Case,
    Model,
    Run,
    UntraceableModel,
    as_run,
    batches,
    build,
    differs,
    features_of,
    late_fills,
    message_of,
    only_our_warnings_raise,
    pipeline,
    plain,
    reference,
    train,
)
from tests.ranks.parity import differences, snapshot


def _unequal(expected: list[Any], found: list[Any]) -> list[str]:
    """Positions at which two records of a training differ, with what differs there."""
    different = [] if len(expected) == len(found) else [f"{len(found)} records for {len(expected)}"]
    for number, (a, b) in enumerate(zip(expected, found, strict=False)):
        if isinstance(a, dict):
            different += [f"record {number}: {name}" for name in differences(a, b)]
        elif a != b:
            different.append(f"record {number}: {a} and {b}")
    return different


# -- between two steps


def _evaluation(model: nn.Module, case: Case) -> Callable[[int], Any]:
    def after(step: int) -> Any:
        if step % 3 != 1:
            return None
        before = _cache_contents(model)
        with torch.no_grad():
            loss, _ = model(batches(case, 1, seed=1000 + step)[0].to(model.device))
        return loss.item() if before == _cache_contents(model) else "the evaluation changed the cache"

    return after


def _cache_contents(model: nn.Module) -> list[Any]:
    """Who is cached where, and the counters that the cache's behaviour shows in."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()  # maps are read past the cache, which would wait for the streams that write them
    maps = [pool.cache.state.map.key_of_slot.tolist() for pool in cached_embeddings(model)]
    counted = [(s.lookups, s.fills, s.evictions, s.write_backs) for s in cache_stats(model)]
    return [maps, counted]


def _checkpoints(model: nn.Module, case: Case) -> Callable[[int], Any]:
    return lambda step: snapshot(model, states_first=step % 4 == 2) if step % 4 in (1, 2) else None


def _flushes(model: nn.Module, case: Case) -> Callable[[int], Any]:
    def after(step: int) -> Any:
        if step % 4 != 1:
            return None
        flush(model)
        with mock.patch.object(RowCache, "flush", return_value=None):  # it has been done
            return snapshot(model)

    return after


def _loads(model: nn.Module, case: Case, states: bool = True) -> Callable[[int], Any]:
    donor = build(case, cached=False)
    train(plain(donor), batches(case, 5, seed=5))

    def after(step: int) -> Any:
        if step not in (4, 9):
            return None
        model.load_state_dict(donor.state_dict())
        if states:
            model.fused_optimizer.load_state_dict(donor.fused_optimizer.state_dict())
        return snapshot(model)

    return after


def _loads_weights(model: nn.Module, case: Case) -> Callable[[int], Any]:
    return _loads(model, case, states=False)


def _learning_rates(model: nn.Module, case: Case) -> Callable[[int], Any]:
    def after(step: int) -> None:
        for group in model.fused_optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        model.fused_optimizer.step()

    return after


BETWEEN_STEPS: dict[str, Callable[[nn.Module, Case], Callable[[int], Any]]] = {
    "evaluation": _evaluation,
    "checkpoints": _checkpoints,
    "flushes": _flushes,
    "loads": _loads,
    "loads_weights": _loads_weights,
    "learning_rates": _learning_rates,
}


def between_steps(case: Case, runs: list[Run], event: str) -> list[list[str]]:
    """The same events between the steps of stock and of every run; what differed."""
    only_our_warnings_raise()
    stock = build(case, cached=False)
    data = batches(case)
    expected = train(plain(stock), data, BETWEEN_STEPS[event](stock, case))
    final, results = snapshot(stock), []
    for run in runs:
        with as_run(case, run) as (model, loop):
            found = train(loop, data, BETWEEN_STEPS[event](model, case))
            results.append(_unequal(expected, found) + differences(final, snapshot(model)))
            results[-1] += [] if loop.stats().steps == case.steps else [f"{loop.stats().steps} steps"]
    return results


def evaluate_through_the_pipeline(case: Case, run: Run, at: str) -> dict[str, Any]:
    """Train, evaluate with the same pipeline under no_grad, train on. ``at``: evaluate at the end of the training data
    (with an iterator of its own), or in the middle (with the next batches of the same iterator)."""
    only_our_warnings_raise()
    data, unseen = batches(case), batches(case, 10, seed=50)
    results = {}
    for name in ("stock", "ours"):
        with contextlib.ExitStack() as stack:
            if name == "ours":
                model, loop = stack.enter_context(as_run(case, run))
            else:
                model = build(case, cached=False)
                loop = plain(model)
            iterator = iter(data[:8] + (unseen if at == "in the middle" else []) + data[8:])
            losses = _progress(loop, iterator, 8 if at == "in the middle" else None)
            model.eval()
            before = _cache_contents(model)
            with torch.no_grad():
                losses += _progress(loop, iterator if at == "in the middle" else iter(unseen), len(unseen))
                if at != "in the middle":
                    losses += _progress(loop, iter([]), None)
            untouched = before == _cache_contents(model)
            model.train()
            late, rest = [late_fills(model)], iterator if at == "in the middle" else iter(data[8:])
            losses += train(loop, rest, lambda step: late.append(late_fills(model)))  # noqa: B023
            known = loop.stats().known_bytes if name == "ours" else 0
            results[name] = (losses, snapshot(model), untouched, late, known, _num_known(model))
    stock, ours = results["stock"], results["ours"]
    return {
        "different": _unequal(stock[0], ours[0]) + differences(stock[1], ours[1]),
        "untouched": ours[2],
        "late": [b - a for a, b in zip(ours[3], ours[3][1:], strict=False)],
        "known_bytes": ours[4],
        "known_at_the_end": ours[5],
    }


def evaluate_through_another_pipeline(case: Case, run: Run) -> dict[str, Any]:
    """Train with one pipeline, and in the middle of its window evaluate with another one, as TorchRec's examples do."""
    only_our_warnings_raise()
    data, unseen = batches(case), batches(case, 6, seed=50)
    stock = build(case, cached=False)
    ordinary = plain(stock)
    expected = _progress(ordinary, iter(data), 5)
    with torch.no_grad():
        stock.eval()
        expected += train(ordinary, unseen)
        stock.train()
    expected += train(ordinary, data[5:])
    with as_run(case, run) as (model, loop):
        iterator = iter(data)
        found = _progress(loop, iterator, 5)
        evaluation, known = pipeline(model, run), _num_known(model)
        with torch.no_grad():
            model.eval()
            found += train(evaluation, unseen)
            model.train()
        late, known_after = late_fills(model), _num_known(model)
        found += train(loop, iterator)
        evaluation.detach()
        return {
            "different": _unequal(expected, found) + differences(snapshot(stock), snapshot(model)),
            "late": late_fills(model) - late,
            "still_known": known_after == known != [0],
            "known_at_the_end": _num_known(model),
        }


def _num_known(model: nn.Module) -> list[int]:
    """Batches that each cache knows and that were not prepared yet."""
    return [len(p.cache.next_use_index._known) for p in cached_embeddings(model) if p.cache.next_use_index is not None]


def _progress(loop: Any, iterator: Iterator[Batch], steps: int | None) -> list[float]:
    """So many outputs, or all there are."""
    if steps is None:
        return train(loop, iterator)
    return [loop.progress(iterator).item() for _ in range(steps)]


# -- the ends of the data


def uneven_data(case: Case, run: Run, lengths: list[tuple[int, ...]]) -> list[list[str]]:
    """Ranks with different numbers of batches, then a second iterator with as many; what differs from stock on the
    batches that all ranks have."""
    only_our_warnings_raise()
    results = []
    for by_rank in lengths:
        common = min(by_rank)
        first, second = batches(case, by_rank[dist.get_rank()]), batches(case, by_rank[dist.get_rank()], seed=3)
        stock = build(case, cached=False)
        expected = train(plain(stock), first[:common] + second[:common])
        with as_run(case, run) as (model, loop):
            found = train(loop, first)
            halfway = len(found)
            ends_again = message_of(lambda: loop.progress(iter([])))
            found += train(loop, second)
            different = _unequal(expected, found) + differences(snapshot(stock), snapshot(model))
            different += [] if halfway == common else [f"{halfway} steps of {common} with the first iterator"]
            different += [] if ends_again.startswith("StopIteration") else [f"no end: {ends_again}"]
        results.append(different)
    return results


def failing_iterator(case: Case, run: Run, failing: int, after: int) -> dict[str, Any]:
    """The iterator of one rank raises after some batches. Then all ranks go on: with what is left in the window."""
    only_our_warnings_raise()
    data = batches(case)

    def broken() -> Iterator[Batch]:
        yield from data[:after]
        raise OSError(f"the disk of rank {dist.get_rank()} is gone")

    outputs: list[float] = []

    def go() -> None:
        while True:
            outputs.append(loop.progress(iterator).item())

    with as_run(case, run) as (model, loop):
        iterator = broken() if dist.get_rank() == failing else iter(data)
        error = message_of(go)
        trained = loop.stats().steps
        different = differs(case, trained, model, outputs)
        outputs += train(loop, iterator)
        different += differs(case, after, model, outputs)
    return {"error": error, "trained": trained, "different": different}


# -- giving up


def detach_and_go_on(case: Case, run: Run, after: int) -> dict[str, Any]:
    """Some steps through the pipeline, then it is detached; ordinary steps; then the pipeline again, and to the end."""
    only_our_warnings_raise()
    data = batches(case)
    taken = 0

    def counted() -> Iterator[Batch]:
        nonlocal taken
        for batch in data:
            taken += 1
            yield batch

    iterator = counted()
    with as_run(case, run) as (model, loop):
        found = _progress(loop, iterator, after)
        loop.detach()
        lost = taken - after
        own = all("forward" not in vars(part) or not hasattr(part.forward, "start") for part in model.module.parts)
        found += train(plain(model), itertools.islice(iterator, 3))
        found += train(loop, iterator)
        stock = build(case, cached=False)
        expected = train(plain(stock), data[:after] + data[after + lost :])
        pins = sum(len(pool.cache._in_flight) for pool in cached_embeddings(model))
        different = _unequal(expected, found) + differences(snapshot(stock), snapshot(model))
    return {"different": different, "lost": lost, "own_forward": own, "pins": pins}


def raising_body(case: Case, run: Run, when: str) -> list[str]:
    """The body of some steps raises before its forward, or between forward and backward; what differs from stock,
    where those batches do not train either."""
    only_our_warnings_raise()
    skipped = (0, 3, 4, 9)
    data = batches(case)
    stock = build(case, cached=False)
    loop_of_stock, expected = plain(stock), []
    for step, batch in enumerate(data):
        if step not in skipped:
            expected.append(loop_of_stock.progress(iter([batch])).item())
        elif when == "after the forward":
            stock(batch)
    found = []
    with as_run(case, run) as (model, loop):
        optimizer, iterator = loop._optimizer, iter(data)
        for step in range(case.steps):
            with contextlib.suppress(InterruptedError), loop.step(iterator) as batch:
                if step in skipped and when == "before the forward":
                    raise InterruptedError
                optimizer.zero_grad()
                loss, output = model(batch)
                if step in skipped:
                    del loss, output  # as the end of a training function would; what they hold is pinned
                    raise InterruptedError
                loss.backward()
                optimizer.step()
                found.append(output.item())
        over = message_of(lambda: loop.progress(iterator))
        different = _unequal(expected, found) + differences(snapshot(stock), snapshot(model))
    return different + ([] if over.startswith("StopIteration") else [f"did not end: {over}"])


def other_batch(case: Case, run: Run, where: str) -> dict[str, Any]:
    """Rows are resident for the next batches, but another batch is trained: between two steps, or in a step in the
    place of the pipeline's. Then the pipeline goes on."""
    only_our_warnings_raise()
    data, other = batches(case), batches(case, 1, seed=9)[0]
    with as_run(case, run) as (model, loop):
        iterator = iter(data)
        outputs = _progress(loop, iterator, 4)

        def in_a_step() -> None:
            with loop.step(iterator):
                model(other)[0].backward()

        left_out = 4 if where == "in a step" else None
        error = message_of(in_a_step if left_out is not None else lambda: model(other)[0].backward())
        outputs += train(loop, iterator)
        if left_out is None:
            return {"error": error, "different": differs(case, case.steps, model, outputs)}
        stock = build(case, cached=False)
        expected = train(plain(stock), [batch for number, batch in enumerate(data) if number != left_out])
        return {
            "error": error,
            "different": _unequal(expected, outputs) + differences(snapshot(stock), snapshot(model)),
        }


# -- copies that fail


def failing_copy(case: Case, run: Run, copy: str, number: int) -> dict[str, Any]:
    """The ``number``-th call of a transfer's ``copy`` raises. What was trained until then is compared with stock, and
    so is the rest of the training where the cache goes on."""
    only_our_warnings_raise()
    data, unseen = batches(case), batches(case, 1, seed=77)[0]
    original, calls = getattr(PlainTransfer, copy), 0

    def broken(self: PlainTransfer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(f"{copy} failed")
        return original(self, *args)

    found: list[float] = []
    with as_run(case, run) as (model, loop), mock.patch.object(PlainTransfer, copy, broken):
        iterator = iter(data)

        def go() -> None:
            while True:
                found.append(loop.progress(iterator).item())

        error, trained = message_of(go), loop.stats().steps
        saving = message_of(lambda: snapshot(model))
        evaluating = message_of(lambda: _evaluate(model, unseen))
        result: dict[str, Any] = {"error": error, "saving": saving, "evaluating": evaluating, "calls": calls}
        if saving:
            result["going_on"] = message_of(go)
            return result
        result["then"] = differs(case, trained, model, found)
        found += train(loop, iterator)
        result["later"] = differs(case, case.steps, model, found)
    return result


def _evaluate(model: nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        return model(batch.to(model.device))[1].item()


# -- evict, then use again


def evict_then_reuse(case: Case, run: Run, distances: list[int], land_seconds: float) -> list[dict[str, Any]]:
    """Streams in which every row is used, put out, and brought back a fixed number of batches after it was put out.

    A batch has ``case.batch_size`` rows of its own on each of two shards, and the slots hold exactly
    ``run.working_set_of`` batches: planning a batch must put out all rows of the one so many places before it, whatever
    the policy. Rows come in a cycle, so each returns ``distance`` batches later.
    """
    only_our_warnings_raise()
    assert run.working_set_of is not None
    results = []
    for distance in distances:
        cycle = run.working_set_of + distance
        stream = dataclasses.replace(case, rows=(2 * cycle * case.batch_size,), sharding="row_wise", cycle=cycle)
        with as_run(stream, run) as (model, loop), slow_landings(land_seconds):
            found = train(loop, batches(stream))
            (stats,) = cache_stats(model)
            results.append(
                {
                    "different": differs(stream, stream.steps, model, found),
                    "fills": stats.fills,
                    "evictions": stats.evictions,
                    "slots": stats.slots,
                    "prefetch_min": loop.stats().prefetch_min,
                }
            )
    return results


# -- finding the inputs


def untraceable(case: Case, run: Run, features: str) -> Any:
    """A model that cannot be traced, without and with ``features``: the error, or what differs from stock."""
    only_our_warnings_raise()
    stock = build(case, cached=False, make_model=UntraceableModel)
    data = batches(case)
    expected = train(plain(stock), data)

    def given(batch: Batch) -> Any:
        inputs = dict(features_of(model)(batch))
        if features == "one is missing":
            inputs.popitem()
        return inputs

    arguments = {} if features == "none" else {"features": given}
    with as_run(case, run, UntraceableModel, **arguments) as (model, loop):
        if features != "all":
            return message_of(lambda: loop.progress(iter(data)))
        found = train(loop, data)
        late = late_fills(model)
        return _unequal(expected, found) + differences(snapshot(stock), snapshot(model)), late


class TwiceModel(Model):
    """Reads its only embedding module twice in one forward."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of both readings."""
        found = self.parts[0](batch.features).values() + self.parts[0](batch.others).values()
        loss = ((self.dense(found).squeeze(1) - batch.labels) ** 2).mean()
        return loss, loss.detach()


@dataclasses.dataclass
class TwiceBatch(Batch):
    """A batch with two sets of features."""

    others: KeyedJaggedTensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> TwiceBatch:
        """A copy."""
        return TwiceBatch(self.features.to(device), self.labels.to(device), self.others.to(device))


def module_that_is_called_twice(case: Case, run: Run) -> list[str]:
    """What differs from stock."""
    only_our_warnings_raise()
    pairs = zip(batches(case), batches(case, seed=4), strict=True)
    data = [TwiceBatch(a.features, a.labels, b.features) for a, b in pairs]
    stock = build(case, cached=False, make_model=TwiceModel)
    expected = train(plain(stock), data)
    with as_run(case, run, TwiceModel) as (model, loop):
        return _unequal(expected, train(loop, data)) + differences(snapshot(stock), snapshot(model))


def own_loop(case: Case, run: Run) -> list[str]:
    """A loop of the user's own around :meth:`step`, which evaluates and saves inside of some steps, after the update,
    while the rows of the next batches come in; what differs from stock."""
    only_our_warnings_raise()
    unseen = batches(case, 1, seed=60)[0]
    stock = build(case, cached=False)

    def evaluate(step: int) -> float | None:
        return _evaluate(stock, unseen) if step % 3 == 0 else None

    expected = train(plain(stock), batches(case), evaluate)
    found, saved, losses = [], [], []
    with as_run(case, run) as (model, loop):
        optimizer, iterator = loop._optimizer, iter(batches(case))
        for step in itertools.count():
            try:
                with loop.step(iterator) as batch:
                    optimizer.zero_grad()
                    loss, _ = model(batch)
                    (2 * loss / 2).backward()
                    optimizer.step()
                    found.append(loss.item())
                    losses.append(loss.item())
                    if step % 3 == 0:
                        found.append(_evaluate(model, unseen))
                    if step % 3 == 1:
                        saved += differences(reference(case).after[step + 1], snapshot(model))
            except StopIteration:
                return _unequal(expected, found) + saved + differs(case, case.steps, model, losses)
    return ["it never ends"]


def variable_batch_sizes(case: Case, runs: list[Run]) -> list[list[str]]:
    """Another number of bags for each feature, of which several samples share one; what differs from stock."""
    only_our_warnings_raise()
    data = [_batch_of_variable_sizes(case, step) for step in range(case.steps)]
    stock, results = build(case, cached=False), []
    expected = train(plain(stock), data)
    for run in runs:
        with as_run(case, run) as (model, loop):
            found = train(loop, data)
            results.append(_unequal(expected, found) + differences(snapshot(stock), snapshot(model)))
            evictions = sum(stats.evictions for stats in cache_stats(model))
            results[-1] += [] if evictions >= 100 else [f"only {evictions} evictions"]
    return results


def _batch_of_variable_sizes(case: Case, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    sizes = [case.batch_size, 5 + step % 3, 7, case.batch_size][: len(case.rows)]
    lengths = [torch.randint(0, 5, (size,), generator=generator) for size in sizes]
    ids = [
        torch.randint(0, rows, (int(n.sum()),), generator=generator) for rows, n in zip(case.rows, lengths, strict=True)
    ]
    bag_of_sample = torch.stack([torch.randint(0, size, (case.batch_size,), generator=generator) for size in sizes])
    features = KeyedJaggedTensor(
        keys=case.features,
        values=torch.cat(ids),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(case.features, bag_of_sample),
    )
    return Batch(features, torch.rand(case.batch_size, generator=generator))


def wrong_depths(run: Run) -> str:
    """What the pipeline says about its arguments."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    return message_of(lambda: LookAheadPipeline(model, optimizer, "cpu", run.lookahead, run.prefetch))


def delayed_stages(case: Case, run: Run) -> dict[str, int]:
    """How often each stage was delayed."""
    assert run.delays is not None
    with (
        as_run(case, dataclasses.replace(run, delays=None)) as (_, loop),
        random_delays(run.delays, dist.get_rank()) as waits,
    ):
        train(loop, batches(case))
    return waits


def overflow(case: Case, run: Run) -> dict[str, Any]:
    """Slots for less than a batch: what was warned of and what differs; or the error."""
    only_our_warnings_raise()
    with as_run(case, run) as (model, loop), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheGrowthWarning)
        found: list[float] = []
        error = message_of(lambda: found.extend(train(loop, batches(case))))
        if error:
            return {"error": error}
        growths = sum(stats.overflow_growths for stats in cache_stats(model))
        texts = [str(warning.message) for warning in caught if issubclass(warning.category, CacheGrowthWarning)]
        return {"different": differs(case, case.steps, model, found), "growths": growths, "warnings": texts}
