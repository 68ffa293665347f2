"""Tables of ids for long, and interrupted: stock TorchRec and dictionaries agree all the time, and memory stays.

    python -m tests.ranks.id_endurance [--steps N] [--seed S]

Ten times as many ids come as there are rows, on one rank, with batches known and prepared ahead. Every step's loss is
that of stock; every hundredth of the way, memory and tensors are counted, and every tenth, maps, weights, optimizer
states and what was counted are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import psutil
import torch

from embershard.cache.homes.memory import MemoryRows
from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import IdMap
from embershard.cache.row_cache import RowCache
from embershard.errors import CacheError
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.ids.id_tables import PoolIdMaps
from tests.faults.endurance import Usage, growth
from tests.ranks import look_ahead
from tests.ranks.id_tables import Case, Outcome, Stock, batch_of, build, outcome_of
from tests.ranks.workers import RankPool

ROWS, TIMES = 1200, 10
_LONG = 5000  # steps in which so many ids come, and after which memory says something
#: Table 0: its least used ids leave; table 1: those unused for longest, and those of the last but hundred batches.
RULES = (
    IdTable(buckets=12, reserve=0.3, half_life=50),
    IdTable(buckets=12, reserve=0.3, admit_after=2, eviction="lru", ttl_steps=100, unadmitted="zero"),
    None,
)


def long_case(steps: int, seed: int = 0) -> Case:
    """Ids that come and go; in all steps `TIMES` as many as rows, and a few more that are drawn at last."""
    popular = 4 * ROWS
    return Case(
        rows=(ROWS, ROWS, ROWS), rules=RULES, policy="lookahead", lookahead=8, ratio=0.3, steps=steps,
        popular=popular, new=1 + (TIMES * ROWS - popular // 2) // steps, optimizer="adagrad",
        evaluate_every=0, seed=seed,
    )  # fmt: skip


def endure(steps: int, seed: int = 0) -> tuple[list[str], Outcome]:
    """What went wrong, and the end. On one rank, in a group."""
    look_ahead.only_our_warnings_raise()
    case = long_case(steps, seed)
    stock, model = Stock(case), build(case, cached=True)
    gc.collect()
    gc.freeze()  # what is here stays, and counts are quick
    loop: Any = look_ahead.pipeline(model, look_ahead.Run(lookahead=case.lookahead, prefetch=case.prefetch))
    iterator = (batch_of(case, 0, step) for step in range(steps))
    problems, usages, seen = list[str](), list[Usage](), {name: set[int]() for name in stock.tables}
    for step in range(1, steps + 1):
        loss = loop.progress(iterator).item()
        stock.step(step - 1)
        expected = stock.losses.pop()
        problems += [f"step {step}: loss {loss}, stock's {expected}"] if loss != expected else []
        for name, ids in seen.items():
            ids.update(stock.ids_of(batch_of(case, 0, step - 1), name))
        if step % max(1, steps // 100) == 0:
            usages.append(_usage(step))
        if step % max(1, steps // 10) == 0:
            outcome = outcome_of(stock, model, [])
            problems += [f"step {step}: {each}" for each in _problems(outcome)]
            print(f"step {step}: {outcome.counts}, {usages[-1].memory_bytes >> 20} MiB, {usages[-1].tensors} tensors")
        if problems:
            break
    loop.detach()
    gc.unfreeze()
    few = {name: len(ids) for name, ids in seen.items() if len(ids) < TIMES * ROWS}
    print({name: len(ids) for name, ids in seen.items()}, "ids")
    problems += [f"only {few} ids came, for {ROWS} rows"] if few and steps >= _LONG else []
    return problems + (list(growth(usages[len(usages) // 5 :])) if steps >= _LONG else []), outcome


def _problems(outcome: Outcome) -> Iterator[str]:
    """What differs, and counters that do not add up."""
    yield from outcome.different
    if outcome.counts != outcome.oracle_counts:
        yield f"counted {outcome.counts}, by the dictionaries {outcome.oracle_counts}"
    for name, (live, admitted, evicted, _) in outcome.counts.items():
        if not live == admitted - evicted == len(outcome.maps[name]):
            yield f"{name}: {live} live, {admitted} admitted, {evicted} evicted, {len(outcome.maps[name])} in the map"


def _usage(step: int) -> Usage:
    gc.collect()
    this = psutil.Process()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    return Usage(step, this.memory_full_info().uss, tensors, this.num_fds(), this.num_threads())


# -- interrupts

#: Where an interrupt comes: what belongs to tables of ids, and what it calls.
PLACES: dict[str, tuple[Any, str]] = {
    "resolve": (IdMap, "resolve"),
    "count": (IdMap, "_admit"),
    "evict": (IdMap, "_evict"),
    "commit": (IdMap, "commit"),
    "begin": (PoolIdMaps, "begin"),
    "know": (RowCache, "know"),
    "prepare": (RowCache, "prepare"),
    "births": (MemoryRows, "reinitialise"),
    "reinitialise": (RowCache, "reinitialise"),
}


def interrupted(case: Case, place: str, is_late: bool, every: int) -> Outcome | None:
    """Interrupt every so many calls before, or after, their work; each time another pipeline goes on where the training
    was. What differs at the end; None: the cache refused. A forward that had begun is a step without update."""
    look_ahead.only_our_warnings_raise()
    model, losses, cut_off = build(case, cached=True), list[float](), list[int]()
    run, calls = look_ahead.Run(lookahead=case.lookahead, prefetch=case.prefetch, worker=False), 0
    owner, name = PLACES[place]
    call = getattr(owner, name)

    def interrupting(self: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        found = call(self, *arguments, **more) if is_late or calls % every else None
        if calls % every == 0:
            raise KeyboardInterrupt
        return found

    (maps,) = {pool.keys for pool in cached_embeddings(model) if isinstance(pool.keys, PoolIdMaps)}
    try:
        while (step := maps.maps[0].committed) < case.steps:
            iterator = (batch_of(case, 0, number) for number in range(step, case.steps))
            loop = look_ahead.pipeline(model, run)
            with contextlib.suppress(KeyboardInterrupt), mock.patch.object(owner, name, interrupting):
                for _ in range(step, case.steps):
                    losses.append(loop.progress(iterator).item())
            loop.detach()
            cut_off += range(len(losses) + len(cut_off), maps.maps[0].committed)
    except CacheError as error:
        if "KeyboardInterrupt" in str(error):
            return None
        raise
    stock = Stock(case)
    for step in range(case.steps):
        stock.step(step, updates=step not in cut_off)
    stock.losses = [loss for step, loss in enumerate(stock.losses) if step not in cut_off]
    assert calls > 3 * every, "too few interrupts"
    return outcome_of(stock, model, losses)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.id_endurance", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pool = RankPool(1, timeout_seconds=1e5)
    ((problems, _),) = pool.run(endure, options.steps, options.seed)
    pool.close()
    print("\n".join(problems) or "nothing differed, and nothing grew")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
