"""`FolderFollower`: takes the files of a folder that grows, one after another, while a run trains."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from embershard.data.config import DataConfig
from embershard.data.sources.followed import FollowedSource
from embershard.data.sources.held_out import HeldOut
from embershard.data.sources.journal import Journal, JournalFile
from embershard.data.sources.source import WindowAhead
from embershard.distributed import Ranks
from embershard.errors import DataError

_Examined = tuple[JournalFile, HeldOut]
#: Pause between two looks at the folder, where training waits for it.
_POLL_SECONDS = 0.5


class FolderFollower:
    """Takes files into a `FollowedSource`, the same on all ranks.

    The first rank looks for the next file and examines it in a thread, beside training. It notes the file in the
    journal, then tells the other ranks: no sample is offered of a file that the journal has not. A run that goes on
    takes the journal's files first, in its order.

    Args:
        config: of a folder that is followed.
        journal: its file; None: the run saves nothing, and needs none.

    Attributes:
        source: with the files that were taken.
    """

    def __init__(self, config: DataConfig, journal: Path | None, ranks: Ranks) -> None:
        self._ranks, self._idle_seconds = ranks, config.idle_seconds
        self._journal: Journal | None = None  # of the first rank
        self.source = FollowedSource(config, [] if journal is None else ranks.from_first(lambda: self._read(journal)))
        self._pool = ThreadPoolExecutor(1, "embershard-follow")
        self._coming: Future[_Examined | None] | None = None  # a search for the next file
        self._began_at = 0.0
        self._search_at = time.monotonic()  # when to search again
        self._busy_at = self._idle_at = 0.0  # when a file was taken or a step trained; the last search without result
        self._position = -1  # of the last step

    @property
    def outlook(self) -> str:
        """What the run will wait for, as a sentence."""
        end = (
            "Ctrl-C ends it"
            if self._idle_seconds is None
            else f"the run ends once none came for {self._idle_seconds:g} s"
        )
        return f"Follows {self.source.folder}: where its files are trained, the run waits for new ones; {end}."

    @property
    def summary(self) -> str:
        """What was taken, and why no more is awaited, as a sentence."""
        idle = "" if self._idle_seconds is None or self._goes_on() else f"; none came for {self._idle_seconds:g} s"
        return f"{self.source.num_files:,} files of {self.source.folder} were taken{idle}."

    def start_at(self, position: int) -> None:
        """Begin with the file that has the sample at `position`."""
        if self._coming is not None:
            wait([self._coming])
            self._coming = None
        self._search_at = time.monotonic()
        self.source.start_at(position)

    def take(self, position: int, ahead: int) -> None:
        """Take the next file, if it is ready and fewer than `ahead` samples behind `position` are there. Collective."""
        self.source.forget(position)
        if position != self._position:
            self._position, self._busy_at = position, time.monotonic()
        if self._ranks.is_first:
            self._search()
        if self.source.num_samples - position < ahead:
            self._take(0.0)

    def wait(self) -> bool:
        """Wait a moment for the next file, and take it if it is ready. Return False if none came for so long that the
        run ends. Collective."""
        if self._take(_POLL_SECONDS):
            self._busy_at = time.monotonic()
        return self._ranks.from_first(self._goes_on)

    def windows_between(self, start: int, stop: int) -> list[WindowAhead]:
        """Return the windows whose first sample is at one of the positions [start, stop). Collective if there are some.

        Raises:
            DataError: on all ranks, where a file cannot be read on one.
        """
        if not self.source.has_window(start, stop):
            return []
        error, found = None, list[WindowAhead]()
        try:
            found = list(self.source.windows_between(start, stop))
        except DataError as failed:
            error = failed
        for each in self._ranks.all_gather_objects(error):
            if each is not None:
                raise each
        return found

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _goes_on(self) -> bool:
        """On the first rank: return whether to wait on."""
        return self._idle_seconds is None or self._idle_at - self._busy_at < self._idle_seconds

    def _take(self, seconds: float) -> bool:
        found = self._ranks.from_first(lambda: self._next(seconds))
        if found is not None:
            self.source.offer(*found)
        return found is not None

    def _next(self, seconds: float) -> _Examined | None:
        """On the first rank: return the next file, which the journal has; None if it is not ready after some
        `seconds`."""
        self._search()
        if self._coming is None:
            time.sleep(seconds)
            return None
        wait([self._coming], seconds)
        if not self._coming.done():
            return None
        search, self._coming = self._coming, None
        if (found := search.result()) is None:
            self._idle_at, self._search_at = self._began_at, time.monotonic() + _POLL_SECONDS
            return None
        file, _ = found
        if self._journal is not None and len(self._journal.files) == self.source.num_files:
            self._journal.append(file)
        return found

    def _search(self) -> None:
        """On the first rank: begin to look for the next file, unless that was done a moment ago."""

        def search() -> _Examined | None:
            path = self.source.find_next()
            return None if path is None else self.source.examine(path)

        if self._coming is None and time.monotonic() >= self._search_at:
            self._began_at = time.monotonic()
            self._coming = self._pool.submit(search)

    def _read(self, journal: Path) -> list[JournalFile]:
        self._journal = Journal(journal)
        return self._journal.files
