"""Averages whose weights travel as fp16, and the same by `DMPCollection` with a hook that rounds by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embershard.extras.groups import row_sync
from tests.ranks import groups, late_groups
from tests.ranks.late_groups import Later
from tests.ranks.look_ahead import Case

#: What a hook does wrong.
Fault = Literal["", "copies are not rounded", "means are not rounded", "states are rounded", "all rows are rounded"]


class Rounded(Later):
    """Rounds weights of rows whose copies differ; of rows that nobody trained all copies are equal.

    Args:
        has_states: the optimizer's are averaged behind the weights.
    """

    def __init__(self, num_groups: int, has_states: bool, fault: Fault = "") -> None:
        super().__init__(num_groups)
        self._has_states, self._fault, self._is_weights = has_states, fault, not has_states

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        self._is_weights = not (self._has_states and self._is_weights)
        super().__call__(tensors)

    def mean_of(self, copies: Tensor) -> Tensor:
        if not self._is_weights and self._fault != "states are rounded":
            return super().mean_of(copies)
        sent = copies.numpy()
        if self._fault != "copies are not rounded":
            sent = sent.astype(np.float16).astype(np.float32)
        total = sent[0].copy()
        for other in sent[1:]:
            total += other
        mean = np.where((sent == sent[0]).all(0), sent[0], total / np.float32(len(sent)))
        if self._fault != "means are not rounded":
            mean = mean.astype(np.float16).astype(np.float32)
        rows = (copies != copies[0]).any(0).view(copies.shape[1], -1).any(1)
        rows |= self._fault == "all rows are rounded"
        return torch.where(rows.view(-1, *[1] * (copies.ndim - 2)), torch.from_numpy(mean), copies[0])


def compare(case: Case, every: int, delay: int = 0, lookahead: int = 0, fault: Fault = "") -> groups.Outcome:
    """Ours in two groups beside stock; what differed on this rank."""
    hook = Rounded(2, case.optimizer != "sgd", fault)
    return late_groups.compare(case, 2, every, delay, lookahead, hook=hook, sync_dtype="fp16")


def states_and_weights(optimizer: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of a table: weights and states that both replicas give it, what they are behind an average, and what an average
    of halved states would be."""
    model = groups.build_ours(groups.group_case(optimizer=optimizer), 2, 1, cached=False, sync_dtype="fp16")
    rows: Any = model._row_sync._rows[0]
    keys = torch.arange(8)
    weights, *states = rows.select(keys)
    weights[0], weights[1], weights[2] = 70_000.0, float("nan"), 1e-9
    states = [torch.logspace(-12, 12, state.numel()).view(state.shape) for state in states]
    rows.replace(keys, [weights, *states])
    rows._marks[keys] = True
    model.sync()
    group = model._row_sync._group
    halved = row_sync.mean_over(group, states, [True] * len(states))
    return [weights, *states], rows.select(keys), halved


def replicas(case: Case, every: int, dtype: Any) -> tuple[dict[str, list[Tensor]], row_sync.SyncCounts, float]:
    """This rank's weights and states behind a training of two groups and its last average; and bytes of averages."""
    from embershard.distributed.traffic import count_sent_bytes, sent_bytes

    count_sent_bytes()
    model = groups.build_ours(case, 2, every, sync_dtype=dtype)
    before = sent_bytes()
    groups.train_ours(model, case)
    model.sync()
    return groups.snapshot(model), model.sync_counts, (sent_bytes() - before).sync
