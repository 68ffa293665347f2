"""`FollowedFolder`: takes the files of a folder that grows, one after another, while a run trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from embershard.data.config import DataConfig
from embershard.data.sources.held_out import HeldOut
from embershard.data.sources.input_file import Stamp, stamp_of
from embershard.distributed import Ranks
from embershard.errors import DataError
from embershard.extras.following.followed import Examined, FollowedSource, Journal, JournalFile
from embershard.run_result import FollowedFiles
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.part import Part
from embershard.training.reports import FileNotice, FileReport, Report

#: The journal of the files, in the run's folder.
JOURNAL = "files.jsonl"
#: Batches between those that are parsed and those that are known, at most.
_ENTERING = 8
#: What the first rank tells the others: the next file; or None, that the journal's coming files are dropped.
_News = tuple[JournalFile, HeldOut] | None
#: A search of the folder: the next file, if there is one; what was passed over, and why; trained files that changed.
_Found = tuple[Examined | None, dict[str, str], list[str]]
#: Trained files that a search compares with the journal.
_MOST_COMPARED = 100
#: Pause between two looks at the folder, where training waits for it.
_POLL_SECONDS = 0.5


class FolderFollower:
    """Takes files into a `FollowedSource`, the same on all ranks.

    The first rank looks for the next file and examines it in a thread, beside training. It notes the file in the
    journal, then tells the other ranks: no sample is offered of a file that the journal has not. A run that goes on
    takes the journal's files first, in its order.

    A file that cannot be read, or has a row that is no sample, is not noted. Where `data.bad_files` is "stop", training
    goes on to the last batch before it; then the file is looked at once more, since somebody may have mended it, and
    the run ends. Files of the journal that changed or vanished are dropped from it, and those behind them, if nothing
    of them has trained.

    Args:
        config: of a folder that is followed.
        journal: its file; None: the run saves nothing, and needs none.
        of_metrics: columns that evaluations need, too.

    Attributes:
        source: with the files that were taken.
    """

    def __init__(self, config: DataConfig, journal: Path | None, ranks: Ranks, of_metrics: Sequence[str] = ()) -> None:
        self._ranks, self._idle_seconds, self._skips = ranks, config.idle_seconds, config.bad_files == "skip"
        self._journal: Journal | None = None  # of the first rank

        def read(journal: Path) -> list[JournalFile]:
            self._journal = Journal(journal)
            return self._journal.files

        files = [] if journal is None else ranks.from_first(lambda: read(journal))
        self.source = FollowedSource(config, files, of_metrics)
        self._pool = ThreadPoolExecutor(1, "embershard-follow")
        self._coming: Future[_Found] | None = None  # a search for the next file
        self._num_begun = 0  # files of which something has trained, at the start
        self._has_looked_again = False  # at a bad file, before it ends the run
        self._left_out: dict[str, Stamp] = {}
        self._num_compared = 0
        self._noticed: dict[tuple[FileNotice, str], str] = {}
        self._unreported: list[tuple[FileNotice, str]] = []
        self._began_at = 0.0
        self._search_at = time.monotonic()  # when to search again
        self._busy_at = self._idle_at = 0.0  # when a file was taken or a step trained; the last search without result
        self._position = -1  # of the last step

    @property
    def outlook(self) -> str:
        """What the run will wait for, as a sentence."""
        idle = self._idle_seconds
        end = "Ctrl-C ends it" if idle is None else f"the run ends once none came for {idle:g} s"
        return f"Follows {self.source.folder}: where its files are trained, the run waits for new ones; {end}."

    @property
    def summary(self) -> str:
        """What was taken and what was not, and why no more is awaited, as sentences."""
        idle = "" if self._idle_seconds is None or self._goes_on() else f"; none came for {self._idle_seconds:g} s"
        noticed = self.result()
        lists = {
            f"{len(noticed.left_out):,} bad ones were left out": noticed.left_out,
            f"{len(noticed.passed_over):,} that are no files were passed over": noticed.passed_over,
            f"{len(noticed.taken_again):,} had the bytes of another one": noticed.taken_again,
            f"{len(noticed.changed):,} changed after they had trained": noticed.changed,
        }
        more = "".join(f" {what}: {', '.join(names)}." for what, names in lists.items() if names)
        return f"{self.source.num_files:,} files of {self.source.folder} were taken{idle}.{more}"

    def result(self) -> FollowedFiles:
        """Return what the run's result says of the files; on the first rank."""
        taken = {file.name for file in self.source.files}

        def named(notice: FileNotice) -> tuple[str, ...]:
            return tuple(sorted(name for kind, name in self._noticed if kind == notice))

        left_out = tuple(name for name in named("left_out") if name not in taken)
        return FollowedFiles(
            taken=self.source.num_files,
            bad_rows=sum(file.bad for file in self.source.files[: self.source.num_files]),
            left_out=left_out,
            passed_over=tuple(name for name in named("passed_over") if name not in taken),
            taken_again=tuple(file.name for file in self.source.files if self.source.taken_again(file) is not None),
            changed=named("changed"),
        )

    def reports(self, step: int) -> list[FileReport]:
        """Return what was noticed since the last call, each once; on the first rank."""
        new, self._unreported = self._unreported, []
        return [FileReport(step, *each, self._noticed[each]) for each in new]

    def end(self) -> None:
        """At the end of training, look at all files once more."""
        if self._ranks.is_first:
            self._note_changes(self.source.changed(range(self.source.num_trained)))

    def start_at(self, position: int) -> None:
        """Begin with the file that has the sample at `position`."""
        if self._coming is not None:
            wait([self._coming])
            self._coming = None
        self._num_begun = self.source.num_begun(position)
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
            self._take(0.0, has_batches=True)

    def wait(self) -> bool:
        """No batch is left: wait a moment for the next file, and take it if it is ready. Return False if none came for
        so long that the run ends. Collective.

        Raises:
            DataError: the next file is bad, and all before it has trained.
        """
        if self._take(_POLL_SECONDS, has_batches=False):
            self._busy_at = time.monotonic()
        return self._ranks.from_first(self._goes_on)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _goes_on(self) -> bool:
        """On the first rank: return whether to wait on."""
        return self._idle_seconds is None or self._idle_at - self._busy_at < self._idle_seconds

    def _take(self, seconds: float, *, has_batches: bool) -> bool:
        news = self._ranks.from_first(lambda: self._next(seconds, has_batches))
        for found in news:
            if found is None:
                self.source.drop_coming()
            else:
                self.source.offer(*found)
        return any(found is not None for found in news)

    def _next(self, seconds: float, has_batches: bool) -> list[_News]:
        """On the first rank: return the next file, which the journal has; nothing if it is not ready after some
        `seconds`."""
        self._search()
        if self._coming is None:
            time.sleep(seconds)
            return []
        wait([self._coming], seconds)
        if not self._coming.done():
            return []
        try:
            found, passed_over, changed = self._coming.result()
        except DataError as error:  # the folder cannot be read
            return self._hold(error, has_batches)
        for name, what in passed_over.items():
            self._notice("passed_over", name, f"{self.source.folder / name}: {what}; it is passed over: needed a file")
        self._note_changes(changed)
        if found is not None and found.problem is not None:
            return self._judge(found.path, found.problem, has_batches)
        self._coming, self._has_looked_again = None, False
        if found is None:
            self._idle_at, self._search_at = self._began_at, time.monotonic() + _POLL_SECONDS
            return []
        file = found.file
        assert file is not None, "it has no problem"
        assert found.held_out is not None, "it has no problem"
        if self.source.num_files == len(self.source.files):  # the journal has it not
            if (first := self.source.taken_again(file)) is not None:
                what = f"has the size and the checksum of {first}, which was taken before: its samples train again"
                self._notice("taken_again", file.name, f"{self.source.folder / file.name}: {what}")
            if self._journal is not None:
                self._journal.append(file)
        return [(file, found.held_out)]

    def _judge(self, path: Path, problem: DataError, has_batches: bool) -> list[_News]:
        """The next file cannot train: drop it from the journal, leave it out, or end the run."""
        number = self.source.num_files
        what = str(problem).removesuffix(".")
        if number < self._num_begun:
            size = self.source.files[number].num_bytes
            return self._hold(DataError(
                f"{what}. A part of this file has trained, up to the checkpoint, and the rest is needed: bring it back "
                f"as it was ({size:,} bytes; its time of modification may be another one), or resume from a checkpoint "
                "before it (--resume STEP)"
            ), has_batches)  # fmt: skip
        if number < len(self.source.files):
            self._coming = None
            if self._journal is not None:
                self._journal.cut(number)
            self._notice("dropped", path.name, f"{what}. Nothing of it has trained: the folder is looked at anew")
            return [None]
        if self._skips:
            with contextlib.suppress(OSError):  # it is gone
                self._left_out[path.name] = stamp_of(path.stat())
                self._notice("left_out", path.name, f"{what}. It is left out (data.bad_files)")
            self._coming = None
            return []
        return self._hold(DataError(
            f"{what}. Nothing of this file has trained, and all before it has: mend it in place or move it away, then "
            'go on with --resume. Or set data.bad_files = "skip", which leaves out such files'
        ), has_batches)  # fmt: skip

    def _hold(self, error: DataError, has_batches: bool) -> list[_News]:
        """End the run, when no batch is left to train, and a second look finds the same."""
        if not has_batches:
            if self._has_looked_again:
                raise error
            self._has_looked_again, self._coming = True, None
        return []

    def _search(self) -> None:
        """On the first rank: begin to look for the next file, unless that was done a moment ago."""
        if self._coming is None and time.monotonic() >= self._search_at:
            self._began_at = time.monotonic()
            self._coming = self._pool.submit(self._look)

    def _look(self) -> _Found:
        source, first = self.source, self._num_compared
        path, passed_over = source.find_next(self._left_out)
        self._num_compared = min(first + _MOST_COMPARED, source.num_trained)
        changed = source.changed(range(first, self._num_compared))
        if self._num_compared == source.num_trained:
            self._num_compared = 0
        if path is None:
            return None, passed_over, changed
        return source.examine(path, has_begun=source.num_files < self._num_begun), passed_over, changed

    def _note_changes(self, names: Iterable[str]) -> None:
        for name in names:
            what = "changed after it had trained: what is new in it never trains. Bring new samples as a new file"
            self._notice("changed", name, f"{self.source.folder / name}: {what}")

    def _notice(self, notice: FileNotice, name: str, what: str) -> None:
        """Note what is to be reported, once."""
        if (notice, name) not in self._noticed:
            self._unreported.append((notice, name))
            self._noticed[notice, name] = what


class FollowedFolder(Part):
    """A run of a folder that is followed.

    Attributes:
        follower: takes the files.
    """

    follower: FolderFollower
    stream_options: Mapping[str, Any] = {"epochs": None}

    def open_source(self) -> FollowedSource:
        """Open the files that the journal has."""
        run, data = self.run, self.run.config.data
        journal = run.checkpoints and run.checkpoints.parent / JOURNAL
        self.follower = FolderFollower(data, journal, run.ranks, run.config.metrics.columns)
        return self.follower.source

    def before_batch(self) -> Iterator[Report]:
        """Take the next file, before look-ahead runs out of samples."""
        run = self.run
        batches = run.config.lookahead + run.config.data.prefetch_batches + _ENTERING
        ahead = batches * global_batch(run.config, run.ranks.world_size)
        with run.input_failure.noting():
            self.follower.take(run.position.global_sample, ahead)
        yield from self.follower.reports(run.steps)

    def no_batch(self) -> Iterator[Report]:
        """Wait a moment for the next file, unless one was just taken."""
        run = self.run
        left = self.follower.source.num_samples - run.position.global_sample
        if left < global_batch(run.config, run.ranks.world_size):
            with run.input_failure.noting():
                run.has_ended = not self.follower.wait()
            yield from self.follower.reports(run.steps)

    def at_end(self) -> Iterator[Report]:
        self.follower.end()
        yield from self.follower.reports(self.run.steps)

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        self.follower.start_at(comparison.stream.global_sample)

    def close(self) -> None:
        self.follower.close()

    def notes(self) -> list[str]:
        return [self.follower.outlook]

    def summary(self) -> str:
        return self.follower.summary

    def result(self) -> dict[str, Any]:
        return {"followed": self.follower.result()}
