"""What a step's forward may be given: the very features that were sent ahead for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import CacheError


class Announced:
    """A module's input in the batch that trains: the ids, lengths and weights that were sent ahead.

    Usually the forward gets the same object, or one of the same memory. Otherwise its contents are compared; on a GPU
    the host waits for that.
    """

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self._features = features
        self._parts = _parts(features)
        self._versions = [None if part.is_inference() else part._version for part in self._parts.values()]

    def check(self, given: KeyedJaggedTensor | None) -> None:
        """Whether a forward that gets ``given`` means what was sent.

        Raises:
            CacheError: it does not, with what differs.
        """
        versions = [None if part.is_inference() else part._version for part in self._parts.values()]
        if versions != self._versions:
            raise CacheError(
                "the batch of this step was written to in place after it was announced: the ids, lengths and weights "
                "that train are those from before. Change batches before the pipeline takes them"
            )
        different = "no KeyedJaggedTensor" if given is None else self._difference(given)
        if different:
            raise CacheError(
                f"the forward got a batch with {different}; the batch of this step is another one, with "
                f"{self._features.values().numel()} ids. In a step, forward the batch that step() gives, as it is"
            )

    def _difference(self, given: KeyedJaggedTensor) -> str:
        if given is self._features:
            return ""
        if list(given.keys()) != list(self._features.keys()):
            return f"the keys {list(given.keys())}"
        if batch_sizes(given) != batch_sizes(self._features):
            return "other batch sizes per feature"
        parts = _parts(given)
        if parts.keys() != self._parts.keys():
            return "other tensors: weights in one of the two"
        for name, part in parts.items():
            expected = self._parts[name]
            if part.shape != expected.shape:
                return f"{part.numel()} {name}"
            if part.data_ptr() != expected.data_ptr() and not torch.equal(part, expected):
                return f"other {name}"
        return ""


def _parts(features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    parts = {"ids": features.values(), "lengths": features.lengths()}
    weights = features.weights_or_none()
    return parts if weights is None else {**parts, "weights": weights}


def features_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> KeyedJaggedTensor | None:
    """The features among a forward's arguments; None without any."""
    return next((value for value in [*args, *kwargs.values()] if isinstance(value, KeyedJaggedTensor)), None)


def batch_sizes(features: KeyedJaggedTensor) -> list[list[int]] | None:
    """Samples per feature and rank, where features differ in them; else None."""
    return features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
