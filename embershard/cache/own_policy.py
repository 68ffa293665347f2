"""Policies of one's own, `cache.policy = "my_policy:make"`: found, made, and checked while they score."""

from __future__ import annotations

import torch
from torch import Tensor

from embershard.cache.policies import SlotScores
from embershard.errors import ConfigError
from embershard.settings.own_code import load_function, place_of


class OwnScores(SlotScores):
    """The scores of a policy of one's own, whose shape and values are checked: they index slots in compiled code.

    Args:
        build: "module:function"; the function takes the rows and the slots of a pool and the device of the slots, and
            returns `SlotScores`.
        folder: in which the module is looked up, besides the Python path.

    Raises:
        ConfigError: the function is not found, fails, or returns something else.
    """

    def __init__(self, build: str, folder: str | None, num_rows: int, num_slots: int, device: torch.device) -> None:
        self._name = f"cache.policy = {build!r}"
        make = load_function("cache.policy", build, folder)
        try:
            own = make(num_rows, num_slots, device)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self._name} failed: {type(error).__name__}: {error} ({place_of(error)}).") from error
        if not isinstance(own, SlotScores):
            raise ConfigError(f"{self._name} returned {type(own).__name__}; needed embershard.cache.SlotScores.")
        self._own, self._num_slots, self._device = own, num_slots, device
        if (scores := self.of_slots()) is not None:
            self._check_values(scores)

    @property
    def device_bytes(self) -> int:
        return self._own.device_bytes

    @property
    def host_bytes(self) -> int:
        return self._own.host_bytes

    def of_slots(self) -> Tensor | None:
        scores, needed = self._own.of_slots(), (self._num_slots + 1,)
        if scores is None:
            return None
        got = (scores.dtype, tuple(scores.shape), scores.device.type, scores.is_contiguous())
        if got != (torch.float32, needed, self._device.type, True):
            raise ConfigError(
                f"{self._name}: of_slots() returned {scores.dtype} {list(scores.shape)} on {scores.device}; needed "
                f"contiguous float32 {list(needed)} on {self._device}, or None. After grow(n) there are n + 1 of them."
            )
        if scores.is_cpu:  # on a GPU every look would wait for all that is queued
            self._check_values(scores)
        return scores

    def _check_values(self, scores: Tensor) -> None:
        if not bool((scores >= 0).all()):  # nor is NaN
            slot = int((~(scores >= 0)).nonzero()[0])
            raise ConfigError(f"{self._name}: slot {slot} has the score {float(scores[slot])}; needed 0 or more.")

    def counted(self, slots: Tensor) -> Tensor:
        return self._own.counted(slots)

    def restore(self, keys: Tensor, counted: Tensor) -> None:
        self._own.restore(keys, counted)

    def used(self, slots: Tensor, first_hits: Tensor, fill_slots: Tensor) -> None:
        self._own.used(slots, first_hits, fill_slots)

    def admit(self, keys: Tensor, slots: Tensor) -> None:
        self._own.admit(keys, slots)

    def evict(self, keys: Tensor, slots: Tensor) -> None:
        self._own.evict(keys, slots)

    def grow(self, num_slots: int) -> None:
        self._own.grow(num_slots)
        self._num_slots = num_slots
