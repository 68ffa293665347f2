"""Scoring rules of the policies. The slot with the lowest score is evicted first; ties go to the longest unused.

A score follows its row: it is kept beside the slot while the row is cached, and beside the row in host memory
otherwise. So the device holds 4 bytes per slot, not per row, and history survives eviction.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.config import CachePolicy, TransferKind
from embershard.cache.rows import memory
from embershard.cache.rows.choose_transfer import scores_transfer_maker
from embershard.cache.rows.transfer import MakeTransfer
from embershard.frequency.counts import RowCounts

_RESCALE_AT = 2.0**64  # float32 reaches 2**127: room for a full count on top of this


class SlotScores:
    """Scores that a policy gives to slots; none by default. Slots are int64 [M], keys int64 [M].

    Slots are numbered from 1. A batch is planned, `evict` and `admit` tell which rows leave and which come in (`admit`
    before the first batch, too), and `used` which slots it used. A policy changes which rows stay, never their values.

    >>> SlotScores().of_slots() is None  # the slot that is unused for longest is evicted
    True
    """

    @property
    def device_bytes(self) -> int:
        """Device memory of the slots' scores, in bytes."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Host memory of the rows' scores, in bytes."""
        return 0

    def of_slots(self) -> Tensor | None:
        """Return the score of every slot, non-negative float32 [S + 1]; None if only recency counts."""
        return None

    def of_rows(self) -> Tensor | None:
        """Return the scores of all rows that are in no slot, float32 [R] in host memory; None without scores."""
        return None

    def counted(self, slots: Tensor) -> Tensor:
        """Return the scores of `slots`, for a checkpoint: float32 [M], with the newest use as 1; 0 without scores."""
        return torch.zeros(len(slots))

    def restore(self, keys: Tensor, counted: Tensor) -> None:
        """Set the scores of rows that are not cached (float32 [M]): to those of a checkpoint, or to 0 where rows are
        reinitialised."""

    def used(self, slots: Tensor, first_hits: Tensor, fill_slots: Tensor) -> None:
        """Count a batch that used `slots` (int64 [N], with repeats): see `CachePlan`."""

    def admit(self, keys: Tensor, slots: Tensor) -> None:
        """Fetch the scores of rows that were just bound to these slots."""

    def evict(self, keys: Tensor, slots: Tensor) -> None:
        """Keep the scores of rows about to be evicted from these slots."""

    def grow(self, num_slots: int) -> None:
        """Add slots, up to `num_slots` in all."""


class RecencyScores(SlotScores):
    """`lru`: no score, so the tie-break (longest unused first) decides alone."""


class FrequencyScores(SlotScores):
    """`frequency`: the row's count in a profile, which never changes.

    Args:
        row_scores: float32 [R] in host memory.
        make_transfer: makes the transfer that moves scores between rows and slots.
    """

    def __init__(self, row_scores: Tensor, num_slots: int, device: torch.device, make_transfer: MakeTransfer) -> None:
        self._row_scores = row_scores
        self._make_transfer = make_transfer
        self._attach(torch.zeros(num_slots + 1, dtype=torch.float32, device=device))

    def _attach(self, slot_scores: Tensor) -> None:
        self._slot_scores = slot_scores
        self._transfer = self._make_transfer([slot_scores], [self._row_scores])

    @property
    def device_bytes(self) -> int:
        return self._slot_scores.nbytes

    @property
    def host_bytes(self) -> int:
        return self._row_scores.nbytes

    def of_slots(self) -> Tensor | None:
        return self._slot_scores

    def of_rows(self) -> Tensor | None:
        return self._row_scores

    def counted(self, slots: Tensor) -> Tensor:
        return self._slot_scores[slots].cpu()

    def admit(self, keys: Tensor, slots: Tensor) -> None:
        self._transfer.fill(keys.to(self._transfer.key_device), slots)

    def grow(self, num_slots: int) -> None:
        extra = num_slots + 1 - self._slot_scores.numel()
        self._transfer.finish()
        memory.record_stream(self._slot_scores)
        self._attach(torch.cat([self._slot_scores, self._slot_scores.new_zeros(extra)]))


class LfuScores(FrequencyScores):
    """`lfu`: the number of batches that used the row, plus its count in a profile if there is one.

    With `decay`, a use n batches ago counts `decay ** n`. Instead of shrinking every count with every batch, the weight
    of a new use grows by `1 / decay` per batch; long before float32 overflows, all counts are scaled back.
    """

    def __init__(
        self, row_scores: Tensor, num_slots: int, device: torch.device, make_transfer: MakeTransfer, decay: float | None
    ) -> None:
        super().__init__(row_scores, num_slots, device, make_transfer)
        self._decay = decay
        self._weight = 1.0

    def counted(self, slots: Tensor) -> Tensor:
        return super().counted(slots) / self._weight

    def restore(self, keys: Tensor, counted: Tensor) -> None:
        self._transfer.finish()
        self._row_scores[keys] = counted * self._weight

    def used(self, slots: Tensor, first_hits: Tensor, fill_slots: Tensor) -> None:
        scores = self._slot_scores
        if scores.is_cpu:
            arrays = (slots.numpy(), first_hits.numpy(), fill_slots.numpy())
            loops.count_uses(scores.numpy(), *arrays, self._weight)
        else:
            from embershard.cache.gpu.counters import count_uses

            count_uses(scores, slots, first_hits, fill_slots, self._weight)
        if self._decay is not None:
            self._weight /= self._decay
            if self._weight > _RESCALE_AT:
                self._transfer.finish()
                self._slot_scores /= self._weight
                self._row_scores /= self._weight
                self._weight = 1.0

    def evict(self, keys: Tensor, slots: Tensor) -> None:
        self._transfer.write_back(slots, keys.to(self._transfer.key_device))


def make_scores(
    policy: CachePolicy,
    num_rows: int,
    num_slots: int,
    device: torch.device,
    row_counts: RowCounts | None = None,
    transfer: TransferKind | MakeTransfer = "plain",
) -> SlotScores:
    """Make the scores of `policy` for `num_slots` empty slots.

    Args:
        row_counts: the rows' counts in a profile; None without a profile.
        transfer: the pool's transfer of rows.

    >>> scores = make_scores(CachePolicy("lfu"), num_rows=9, num_slots=3, device=torch.device("cpu"))
    >>> slots, first_hits = torch.tensor([1, 1, 2]), torch.tensor([True, False, True])
    >>> scores.used(slots, first_hits, fill_slots=slots[:0])
    >>> scores.of_slots().tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    if policy.scoring == "lru":
        return RecencyScores()
    scores = memory.zeros(num_rows, torch.float32, whole_pages=device.type == "cuda")
    if row_counts is not None:
        scores[torch.from_numpy(row_counts.rows)] = torch.from_numpy(row_counts.hits).float()
    make_transfer = scores_transfer_maker(transfer, device, scores)
    if policy.scoring == "frequency":
        assert row_counts is not None, "the frequency policy needs a profile"
        return FrequencyScores(scores, num_slots, device, make_transfer)
    assert policy.scoring == "lfu", f"no scores for policy {policy.scoring!r}"
    return LfuScores(scores, num_slots, device, make_transfer, policy.decay)


def most_frequent(counts: RowCounts, pinned_keys: Tensor, num_rows: int) -> Tensor:
    """Return the rows to warm a cache of `num_rows` up with, besides those that are pinned: int64 [<= num_rows]."""
    return torch.from_numpy(np.sort(counts.without(pinned_keys.numpy()).top(num_rows)))
