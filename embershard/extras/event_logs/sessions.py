"""A generated log of users' events, in sessions, with interests that drift: something to learn for sequence models.

Everything about a user is a function of (seed, user), so a log can be made in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.data.hashing import Ids, make_key, mix64, random_words, unit_floats
from embershard.errors import ConfigError
from embershard.extras.event_logs.windows import BEHAVIOURS, need_at_least

_FAVOURITES = 3
_MOST_EVENTS = 60  # of a user
_FIRST_SECOND, _SECONDS = 1_511_539_200, 9 * 86_400  # nine days from 2017-11-25, as in UserBehavior.csv
_USERS_AT_ONCE = 4096
_LENGTH, _FAVOURITE, _SESSION, _INTEREST, _REPLACED, _NEW, _ITEM, _NEXT, _BEHAVIOUR, _START, _GAP = range(11)
_VIEWS = 0.9  # of the behaviours


@dataclass(frozen=True)
class SessionOptions:
    """A log of sessions.

    Attributes:
        num_users, num_items, num_categories: numbered from 1. An item's category is its number modulo the categories.
        session_end: probability that a session ends with an event; the next one has another interest.
        drift: probability that one of a user's three favourite categories is replaced when a session begins.
        follow: probability that the next event of a session is of the item "after" the last one, which is a fixed
            neighbour of it.
        seed: of everything.

    >>> SessionOptions(num_users=10).num_categories
    50

    Raises:
        ConfigError: a number is out of its range.
    """

    num_users: int = 10_000
    num_items: int = 5_000
    num_categories: int = 50
    session_end: float = 0.25
    drift: float = 0.1
    follow: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        need_at_least(self, num_users=1, num_items=1, num_categories=1)
        if self.num_items < self.num_categories:
            raise ConfigError(f"num_items: got {self.num_items}, needed at least the {self.num_categories} categories.")
        for name in ("session_end", "drift", "follow"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, needed a share in [0, 1].")


def session_log(options: SessionOptions) -> Iterator[str]:
    """Yield the lines of the log, some thousand users at a time: user,item,category,behaviour,time.

    >>> next(session_log(SessionOptions(num_users=1))).splitlines()[0].count(",")
    4
    """
    names = np.array(BEHAVIOURS)
    for first in range(1, options.num_users + 1, _USERS_AT_ONCE):
        users = np.arange(first, min(first + _USERS_AT_ONCE, options.num_users + 1))
        columns = _Events(options, users).columns()
        rows = zip(*(column.tolist() for column in (*columns[:3], names[columns[3]], columns[4])), strict=True)
        yield "".join(
            f"{user},{item},{category},{behaviour},{time}\n" for user, item, category, behaviour, time in rows
        )


class _Events:
    """The events of some users, made step by step for all of them at once."""

    def __init__(self, options: SessionOptions, users: Ids) -> None:
        self._options, self._users = options, users

    def columns(self) -> tuple[Ids, Ids, Ids, Ids, Ids]:
        """Return user, item, category, behaviour (a number) and second of all events, by user and time."""
        options, users = self._options, self._users
        lengths = 3 + (self._draw(_LENGTH) ** 2 * (_MOST_EVENTS - 3)).astype(np.int64)
        favourites = np.stack([self._category(_FAVOURITE, number) for number in range(_FAVOURITES)], axis=1)
        every = np.arange(len(users))
        interest, items = favourites[:, 0].copy(), np.zeros(len(users), np.int64)
        is_new = np.ones(len(users), bool)
        seconds = _FIRST_SECOND + (self._draw(_START) * _SECONDS / 2).astype(np.int64)
        found: list[NDArray[np.int64]] = []
        for step in range(_MOST_EVENTS):
            replaced = is_new & (self._draw(_REPLACED, step) < options.drift)
            favourites[replaced, step % _FAVOURITES] = self._category(_NEW, step)[replaced]
            chosen = favourites[every, (self._draw(_INTEREST, step) * _FAVOURITES).astype(np.int64)]
            interest = np.where(is_new, chosen, interest)
            follows = ~is_new & (self._draw(_NEXT, step) < options.follow)
            items = np.where(follows, self._after(items), self._item(interest, self._draw(_ITEM, step)))
            gap = np.where(is_new, 6 * 3600, 120)
            seconds = seconds + 1 + (self._draw(_GAP, step) * gap).astype(np.int64)
            others = self._draw(_BEHAVIOUR, step)
            behaviour = np.where(others < _VIEWS, 0, 1 + ((others - _VIEWS) / (1 - _VIEWS) * 3).astype(np.int64))
            found.append(np.stack([users, items, self._category_of(items), behaviour, seconds]))
            is_new = self._draw(_SESSION, step) < options.session_end
        kept = np.arange(_MOST_EVENTS) < lengths[:, None]
        return tuple(np.stack([each[row] for each in found], axis=1)[kept] for row in range(5))  # type: ignore[return-value]

    def _draw(self, stream: int, step: int = 0) -> NDArray[np.float64]:
        """Return a uniform number in [0, 1) for each user."""
        return unit_floats(random_words(make_key(self._options.seed, stream, step), self._users))

    def _category(self, stream: int, step: int) -> Ids:
        """Return a category for each user; low ones are popular."""
        return (self._draw(stream, 1000 + step) ** 2 * self._options.num_categories).astype(np.int64)

    def _category_of(self, items: Ids) -> Ids:
        return items % self._options.num_categories + 1

    def _item(self, category: Ids, uniform: NDArray[np.float64]) -> Ids:
        """Return an item of each category; low ones are popular."""
        options = self._options
        of_category = (options.num_items - category - 1) // options.num_categories + 1
        return category + options.num_categories * (uniform**3 * of_category).astype(np.int64)

    def _after(self, items: Ids) -> Ids:
        """Return each item's fixed neighbour, of the same category."""
        options = self._options
        category = items % options.num_categories
        of_category = (options.num_items - category - 1) // options.num_categories + 1
        place = mix64(items.astype(np.uint64)) % of_category.astype(np.uint64)
        return category + options.num_categories * place.astype(np.int64)
