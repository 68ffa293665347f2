"""Check that a step's forward gets the features that were announced for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import CacheError
from embershard.sharding.torchrec.compat import batch_sizes


class Announced:
    """A module's input in the batch that trains: ids, lengths and weights as they were announced.

    The forward usually gets the same object, or another one over the same memory. Otherwise contents are compared; on a
    GPU the host waits for that.
    """

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self._features = features
        self._parts = _parts(features)
        self._versions = _versions(self._parts)

    def check(self, given: KeyedJaggedTensor | None) -> None:
        """Compare what a forward gets with what was announced.

        Raises:
            CacheError: they differ; the message says in what.
        """
        if _versions(self._parts) != self._versions:
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


def _versions(parts: Mapping[str, torch.Tensor]) -> list[int | None]:
    return [None if part.is_inference() else part._version for part in parts.values()]


def features_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> KeyedJaggedTensor | None:
    """Return the features among a forward's arguments, or None."""
    return next((value for value in [*args, *kwargs.values()] if isinstance(value, KeyedJaggedTensor)), None)
