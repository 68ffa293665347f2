"""A policy of one's own: rows that were used in one batch leave before those that came again.

embershard train quickstart --set cache.policy=own_policy:make --set cache.policy_folder=examples
"""

import torch
from torch import Tensor

from embershard.cache import SlotScores


class UsedAgain(SlotScores):
    """Scores: 1 for a row that one batch used, 2 for one that several did. Equals leave by their last use."""

    def __init__(self, num_rows: int, num_slots: int, device: torch.device) -> None:
        self._of_rows = torch.zeros(num_rows)  # of rows that are not cached: in host memory
        self._of_slots = torch.zeros(num_slots + 1, device=device)  # slots are numbered from 1

    @property
    def device_bytes(self) -> int:
        return self._of_slots.nbytes

    @property
    def host_bytes(self) -> int:
        return self._of_rows.nbytes

    def of_slots(self) -> Tensor:
        return self._of_slots

    def admit(self, keys: Tensor, slots: Tensor) -> None:
        self._of_slots[slots] = self._of_rows[keys.cpu()].to(slots.device)

    def evict(self, keys: Tensor, slots: Tensor) -> None:
        self._of_rows[keys.cpu()] = self._of_slots[slots].cpu()

    def used(self, slots: Tensor, first_hits: Tensor, fill_slots: Tensor) -> None:
        distinct = slots.unique()
        self._of_slots[distinct] = (self._of_slots[distinct] + 1).clamp(max=2)

    def grow(self, num_slots: int) -> None:
        more = num_slots + 1 - len(self._of_slots)
        self._of_slots = torch.cat([self._of_slots, self._of_slots.new_zeros(more)])


def make(num_rows: int, num_slots: int, device: torch.device) -> SlotScores:
    """Make the scores of one pool of tables on one rank: `num_rows` rows in host memory, `num_slots` on `device`."""
    return UsedAgain(num_rows, num_slots, device)
