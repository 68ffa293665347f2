"""`choose_home`: the home that settings ask for. `HOMES` names every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from embershard.cache.config import HostKind
from embershard.cache.homes.home import Home
from embershard.cache.homes.mapped import MappedRows
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.homes.shared import NodeShare, SharedRows
from embershard.cache.homes.small_sizes import SmallType
from embershard.cache.parts.part import PoolParts
from embershard.lazy_names import named


@dataclass(frozen=True, eq=False)
class HomeRequest:
    """What the home of a pool follows from.

    Attributes:
        shape: of the pool.
        host: `cache.host`.
        folder: `cache.host_dir`; None with rows in plain memory.
        is_locked: the rows' memory will be locked for a GPU.
        share: in rows that the ranks of a machine share; None: all rows are this rank's.
        small_type: of the weights; None: as in slots.
        full_keys: of int8, rows that stay float32.
        num_places: rows in memory, in front of a file.
    """

    shape: PoolShape
    host: HostKind = "memory"
    folder: str | None = None
    is_locked: bool = False
    share: NodeShare | None = None
    small_type: SmallType | None = None
    full_keys: Tensor | None = None
    num_places: int = 0


def _shared(request: HomeRequest) -> Home | None:
    return None if request.share is None else SharedRows(request.shape, request.share)


def _quantised(request: HomeRequest) -> Home | None:
    if request.small_type is None:
        return None
    where = {"folder": request.folder, "whole_pages": request.is_locked}
    home = named("embershard.cache.homes.quantised:QuantisedRows")
    made: Home = home(request.shape, request.small_type, request.full_keys, **where)
    return made


def _filed(request: HomeRequest) -> Home | None:
    if request.host != "file":
        return None
    assert request.folder is not None, "the settings were checked"
    home = named("embershard.cache.file.filed_rows:FiledRows")
    made: Home = home(request.shape, request.num_places, request.folder)
    return made


def _mapped(request: HomeRequest) -> Home | None:
    return None if request.folder is None else MappedRows(request.shape, request.folder)


def _memory(request: HomeRequest) -> Home | None:
    fills_all = request.shape.initial is None
    return MemoryRows(request.shape, whole_pages=request.is_locked, fills_all=fills_all)


#: Every kind of home, as what makes it where a request asks for it: the first that does is taken.
HOMES: dict[str, Callable[[HomeRequest], Home | None]] = {
    "shared": _shared,
    "quantised": _quantised,
    "filed": _filed,
    "mapped": _mapped,
    "memory": _memory,
}


def choose_home(request: HomeRequest) -> Home:
    """Return the home that a request asks for.

    >>> type(choose_home(HomeRequest(PoolShape([3], dim=4), "mmap", folder="."))).__name__
    'MappedRows'
    """
    return next(home for make in HOMES.values() if (home := make(request)) is not None)


#: What a home adds to its pool, by the name of the home's class: made of the home, of what returns the scores [R] of
#: rows, and of whether the pool plans on a GPU.
PARTS = {"FiledRows": "embershard.cache.file.file_part:FilePart"}


def parts_of(home: Home, scores: Callable[[], Tensor | None], is_on_gpu: bool) -> PoolParts:
    """Return the parts of a pool that its home needs.

    >>> parts_of(MemoryRows(PoolShape([3], dim=4)), lambda: None, is_on_gpu=False).num_coming
    0
    """
    place = PARTS.get(type(home).__name__)
    return PoolParts([] if place is None else [named(place)(home, scores, is_on_gpu)])
