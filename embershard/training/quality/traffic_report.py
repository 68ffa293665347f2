"""Reports on the bytes between ranks: while training, and the totals of a run."""

from __future__ import annotations

from dataclasses import asdict, astuple
from typing import Any

import torch

from embershard.distributed import Ranks
from embershard.distributed.traffic import SentBytes, count_sent_bytes, sent_bytes


class TrafficReader:
    """Reads what all ranks have sent since it was made. Its methods are collective, and their own messages count as
    `other`."""

    def __init__(self, ranks: Ranks) -> None:
        if ranks.world_size > 1:  # one rank sends nothing, and need not pay for the counting
            count_sent_bytes()
        self._ranks = ranks
        self._first = self._last = sent_bytes()

    def since_last(self) -> SentBytes:
        """Return what all ranks sent since the last call, together."""
        now = sent_bytes()
        mine = torch.tensor(astuple(now - self._last), dtype=torch.float64, device=self._ranks.device)
        self._last = now
        return SentBytes(*self._ranks.all_gather(mine).sum(dim=0).tolist())

    def totals(self) -> dict[str, Any]:
        """Return the bytes of the run's record: of all ranks by kind, and of each rank."""
        per_rank: list[SentBytes] = self._ranks.all_gather_objects(sent_bytes() - self._first)
        total = SentBytes(*map(sum, zip(*map(astuple, per_rank), strict=True)))
        return {**asdict(total), "ranks": [{"rank": rank, **asdict(sent)} for rank, sent in enumerate(per_rank)]}
