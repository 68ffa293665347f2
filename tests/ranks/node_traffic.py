"""Bytes within nodes and between them, counted at the calls of torch.distributed, beside the predicted ones."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from embershard.distributed import traffic
from embershard.sharding.plan import Plan
from embershard.training.trainer import Trainer
from tests.ranks import planned
from tests.ranks.predicted_traffic import STEPS, Case

#: Of `StepWork`, by kind and place.
PREDICTED = {
    (kind, place): f"{prefix}_{name}_bytes"
    for place, prefix in (("within", "sent"), ("between", "network"))
    for kind, name in (("ids", "id"), ("embeddings", "embedding"), ("gradients", "gradient"))
}


def train(case: Case, plan: Path) -> dict[tuple[str, str], float]:
    """Bytes that this rank sent in a step for the tables, on average, by kind and place. Runs on a rank."""
    trainer = Trainer(case.config(plan), planned.here())
    with _counted() as found:
        for _ in trainer.train():
            pass
    trainer.close()
    return {key: found[key] / STEPS for key in PREDICTED}


def as_predicted(plan: Plan) -> dict[tuple[str, str], float]:
    """The same by the plan, the mean of the ranks."""
    assert plan.prediction is not None
    ranks = plan.prediction.ranks
    return {key: fmean(rank.work[name] for rank in ranks) for key, name in PREDICTED.items()}


@contextmanager
def _counted() -> Iterator[Counter[tuple[str, str]]]:
    found: Counter[tuple[str, str]] = Counter()
    local, rank = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_rank()

    def add(name: str, value: Tensor, group: Any, to_each: Callable[[list[int]], dict[int, float]]) -> None:
        if traffic._only.get() == "other":  # no part of training
            return
        kind = traffic._kind(name, value.dtype in (torch.int32, torch.int64))
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        for other, count in to_each(ranks).items():
            place = "within" if other // local == rank // local else "between"
            found[kind, place] += count

    def around(num_bytes: float) -> Callable[[list[int]], dict[int, float]]:
        """A ring of each of a node's cards: of what goes around, what leaves the node leaves it by one rank of L."""

        def to_each(ranks: list[int]) -> dict[int, float]:
            here = [each for each in ranks if each // local == rank // local]
            others = [each for each in ranks if each not in here]
            sent = num_bytes * (len(ranks) - 1)
            away = sent / len(here) if others else 0.0
            next_here = [each for each in here if each != rank][:1]
            return {**dict.fromkeys(next_here, sent - away), **({others[0]: away} if others else {})}

        return to_each

    def wrapped(call: Callable[..., Any], name: str, part: str, way: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(call)

        def counting(*args: Any, **more: Any) -> Any:
            given = signature.bind(*args, **more).arguments
            add(name, given[part], given.get("group"), way(given))
            return call(*args, **more)

        return counting

    def to_all(given: dict[str, Any]) -> Callable[[list[int]], dict[int, float]]:
        value, splits = given["input"], given.get("input_split_sizes")

        def to_each(ranks: list[int]) -> dict[int, float]:
            counts, each = splits or [len(value) // len(ranks)] * len(ranks), value.nbytes / max(1, len(value))
            return {other: count * each for other, count in zip(ranks, counts, strict=True) if other != rank}

        return to_each

    def of_group(group: dist.ProcessGroup, got: Tensor, sent: Tensor, of_got: Any, of_sent: Any, *rest: Any) -> Any:
        """The call of a route; the functions of torch.distributed make another one."""
        add("alltoall", sent, group, to_all({"input": sent, "input_split_sizes": of_sent}))
        return call(group, got, sent, of_got, of_sent, *rest)

    call = dist.ProcessGroup.alltoall_base
    calls = {
        "all_to_all_single": ("alltoall", "input", to_all),
        "reduce_scatter": ("reduce_scatter", "output", lambda given: around(given["output"].nbytes)),
        "reduce_scatter_tensor": ("reduce_scatter", "output", lambda given: around(given["output"].nbytes)),
        "all_gather": ("allgather", "tensor", lambda given: around(given["tensor"].nbytes)),
        "all_gather_into_tensor": ("allgather", "input_tensor", lambda given: around(given["input_tensor"].nbytes)),
    }
    patched = {name: wrapped(getattr(dist, name), *how) for name, how in calls.items()}
    with mock.patch.multiple(dist, **patched), mock.patch.object(dist.ProcessGroup, "alltoall_base", of_group):
        yield found
