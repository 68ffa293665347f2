"""What is known of the ids of a batch: who reads a batch checks its ids once, and who looks them up need not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Bound of a feature with any ids of 64 bits but the reserved one; of others, ids are in [0, bound).
ANY_ID = math.inf
_ATTRIBUTE = "_embershard_bounds"


class _Known(NamedTuple):
    parts: tuple[Any, ...]  # keys, ids and lengths
    versions: tuple[int, ...]
    bounds: Mapping[str, float]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave copies and pickles without it: their tensors have new versions, whatever was written before."""
        return type(None), ()


def note_bounds(features: Any, bounds: Mapping[str, float]) -> None:
    """Note the bounds of the ids of a `KeyedJaggedTensor`, by feature. They hold for this object, not for others with
    the same tensors, and until torch writes to one of those."""
    parts = _parts(features)
    if not any(tensor.is_inference() for tensor in parts[1:]):  # torch does not count the writes to those
        setattr(features, _ATTRIBUTE, _Known(parts, _versions(parts), bounds))


def bounds_of(features: Any) -> Mapping[str, float]:
    """Return what is known of the ids of a `KeyedJaggedTensor`; features of which nothing is known are missing.

    >>> import torch
    >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    >>> features = KeyedJaggedTensor(["user"], torch.tensor([3]), lengths=torch.tensor([1]))
    >>> note_bounds(features, {"user": 10})
    >>> bounds_of(features)
    {'user': 10}
    >>> features.values()[0] = 99
    >>> bounds_of(features)
    {}
    """
    known: _Known | None = vars(features).get(_ATTRIBUTE)
    if known is None:
        return {}
    parts = _parts(features)
    is_same = all(one is other for one, other in zip(parts, known.parts, strict=True))
    return known.bounds if is_same and _versions(parts) == known.versions else {}


def _parts(features: Any) -> tuple[Any, ...]:
    return features.keys(), features.values(), features.lengths()


def _versions(parts: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in parts[1:])
