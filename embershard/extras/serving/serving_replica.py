"""A replica: an exported model that takes what a run publishes while it answers. Needs torch, numpy, and the files
beside it.

    sys.path.insert(0, "published/base_0")         # any base: the newest one is found
    from replica import Replica

    replica = Replica("published")                 # the newest base, and the deltas after it
    replica.follow()                               # takes what comes, in a thread
    logits = replica(*replica.encode([{"age": 31, "item": 4711}]))

A delta is verified before anything changes. A program that starts again loads base and deltas again. What fails is
told, and tried again: a replica goes on to answer from the state that it has.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from embershard.distributed.changed_rows import NO_ID
from embershard.distributed.publish.published import (
    DENSE,
    MANIFEST,
    DamagedError,
    GoneError,
    MissingDeltaError,
    OtherChainError,
    Publication,
    PublicationError,
    StaleLifeError,
    check_next,
    ids_behind,
    published,
    read_files,
    read_publication,
    verify,
)
from embershard.extras.serving.serving_model import IdPlaces, Model, load, set_weights, table_names, weights_of

T = TypeVar("T")
_TRIES = 5  # while publications come and go
_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, eq=False)
class _WritesOfDelta:
    """All that a delta writes, prepared.

    Attributes:
        rows: tables, places in them, and the new rows there.
        ids: of tables of ids: where ids are, the ids, and their rows.
        dense: weights around the tables, by name.
        served: what is served behind it.
    """

    rows: list[tuple[np.ndarray, tuple[np.ndarray, slice], np.ndarray]]
    ids: list[tuple[IdPlaces, Tensor, Tensor]]
    dense: dict[str, Tensor]
    served: _Served


@dataclass(frozen=True, eq=False)
class _Served:
    """What is served.

    Attributes:
        model: its weights are those of `have`, unless a change has begun.
        written_at: seconds since 1970, by the clock of the file system.
        change: that has begun, and did not end.
    """

    model: Model
    have: Publication
    written_at: float
    change: _WritesOfDelta | None = None


class Replica:
    """The model in a folder of publications, at the newest state that is there.

    Several threads may ask and apply: an answer is that of one published state.

    Args:
        folder: of the publications.

    Attributes:
        problem: of `follow`: why what is served may not be the newest, as a sentence; empty where it is.
        failures, failures_in_row: of `follow`: tries to take what is there that failed, in all and since the last one
            that did not.

    Raises:
        PublicationError: no base is whole, or what is newer cannot be taken, as for `update`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.problem, self.failures, self.failures_in_row = Path(folder), "", 0, 0
        self._lock = threading.Lock()
        self._taking_lock = threading.Lock()  # one thread at a time takes publications
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        served = self._while_it_changes(lambda: self._newest_base(None))
        assert served is not None
        self._served = served
        self.update()

    # -- answers

    def __call__(self, dense: Tensor, ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        """Return the model's outputs, as `Model` does."""
        with self.state() as (model, _), torch.no_grad():
            outputs: Tensor = model(dense, ids, offsets)
        return outputs

    def encode(self, samples: Sequence[dict[str, Any]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the inputs of the model for samples of raw values, as `Model.encode` does."""
        return self._served.model.encode(samples)

    @property
    def columns(self) -> list[str]:
        """The keys of a sample, as `Model.columns`."""
        return self._served.model.columns

    @property
    def have(self) -> Publication:
        """The publication whose state is served."""
        return self._served.have

    @property
    def age_seconds(self) -> float:
        """Seconds since it was written, by its file's time; 0 where that is in the future of this machine's clock."""
        return max(0.0, time.time() - self._served.written_at)

    @contextmanager
    def state(self) -> Iterator[tuple[Model, Publication]]:
        """Return a context in which the model stays as it is, with the publication whose state it has.

        Where the change to this state failed half-way, it is made whole first, or what prevents that is raised.
        """
        with self._lock:
            self._end_change()
            yield self._served.model, self._served.have

    # -- publications

    def apply(self, delta: str | Path) -> None:
        """Take the delta in this folder, which follows the state that is served; or change nothing.

        Raises:
            MissingDeltaError, OutOfOrderError: one before it was not applied.
            AlreadyAppliedError: its state, or a later one, is served.
            OtherChainError: it is of another run, or does not follow this state.
            StaleLifeError: it is of a life of the run that has ended.
            DamagedError: it is not what was written.
        """
        path = Path(delta)
        with self._taking_lock:
            self._end_failed_change()
            publication = read_publication(path)
            check_next(publication, self.have, path.parent)
            change = self._prepare(path, publication)
            for table, place, _ in change.rows:
                table[place] = table[place]  # the same bits: pages become this process's own before answers wait
            with self._lock:
                self._served = replace(self._served, change=change)
                self._end_change()

    def _prepare(self, path: Path, publication: Publication) -> _WritesOfDelta:
        """Return what a delta changes, verified."""
        model = self._served.model
        files = read_files(path, publication)
        self._check(path, publication, files.get(DENSE, {}))
        pairs = zip(table_names(model.inputs), model.places, strict=True)
        places = {name: place for name, place in pairs if isinstance(place, IdPlaces)}
        found = ids_behind({name: (own.ids, own.rows) for name, own in places.items()}, path, publication, files)
        ids = [(places[name], own, of_ids) for name, (own, of_ids) in found.items()]
        served = _Served(model, publication, _written_at(path))
        return _WritesOfDelta(list(self._rows(publication, files)), ids, files[DENSE], served)

    def _end_failed_change(self) -> None:
        """Make a change whole that failed half-way, if there is one."""
        if self._served.change is not None:
            with self._lock:
                self._end_change()

    def _end_change(self) -> None:
        """Make a change whole that has begun. Needs the lock. Where a write fails (no memory), the next call writes all
        of it again: these are whole values, whatever was there."""
        if (change := self._served.change) is None:
            return
        for table, place, new in change.rows:
            table[place] = new
        for places, ids, rows in change.ids:
            places.ids, places.rows = ids, rows
        set_weights(change.served.model.dense, change.dense)
        self._served = change.served

    def _rows(
        self, publication: Publication, files: dict[str, dict[str, Tensor]]
    ) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, slice], np.ndarray]]:
        """Yield for each part of a delta the table, the place in it, and the new rows."""
        stores = [table.get_buffer("stored").numpy() for table in self._served.model.tables]
        tables = dict(zip(table_names(self._served.model.inputs), stores, strict=True))
        for part in publication.parts:
            keys, rows = (files[part.file][f"{part.place}.{name}"].numpy() for name in ("keys", "rows"))
            if (changed := part.changed(files[part.file])) is not None:
                dead = changed.rows[changed.new == NO_ID].numpy()
                yield tables[part.table], (dead, slice(None)), np.zeros((), rows.dtype)
            yield tables[part.table], (keys, slice(part.first_column, part.first_column + part.num_columns)), rows

    def _check(self, path: Path, publication: Publication, dense: dict[str, Tensor]) -> None:
        """Raise unless the model has the tables and the weights of a verified delta."""
        names = set(table_names(self._served.model.inputs))
        if unknown := sorted({part.table for part in publication.parts} - names):
            raise OtherChainError(f"{path}: it has rows of {unknown[0]}, which the model has not")
        for name, weight in weights_of(self._served.model.dense).items():
            if name not in dense or dense[name].shape != weight.shape:
                raise DamagedError(f"{path / DENSE}: needed {name} of shape {list(weight.shape)}")

    def update(self) -> int:
        """Take all that is newer in the folder, and return how many publications that were.

        Where a delta is gone or damaged, a newer base is taken in its place.

        Raises:
            PublicationError: what comes next cannot be taken, and there is no newer base; or what is served is not the
                newest, and nothing leads there: the folder is gone, or of another run, or lacks a delta.
        """
        taken = 0
        while self._while_it_changes(self._take_next):
            taken += 1
        return taken

    def _while_it_changes(self, take: Callable[[], T]) -> T:
        """Return `take()`; again where it failed and the folder has changed, as when a base takes the place of others
        while it is read."""
        for _ in range(_TRIES - 1):
            there = self._there()
            try:
                return take()
            except Exception:
                if self._there() == there:
                    raise
        return take()

    def _there(self) -> list[tuple[int, Path]]:
        """Return numbers and folders of what is published, the newest last. Bases are looked for behind the deltas that
        go when one is there."""
        deltas = published(self.folder, "delta")
        return sorted([*deltas, *published(self.folder, "base")], key=lambda found: found[0])

    def _take_next(self) -> bool:
        """Take the delta that follows, or else a newer base; return whether one was there."""
        self._end_failed_change()
        following = self.folder / f"delta_{self.have.seq + 1}"
        try:
            if following.exists():
                self.apply(following)
                return True
        except Exception:
            if not self._take_base():
                raise
            return True
        if self._take_base():
            return True
        self._check_newest()
        return False

    def _take_base(self) -> bool:
        """Take the newest base, if it has a newer state; return whether it was taken."""
        with self._taking_lock:
            base = self._newest_base(self.have)
            if base is not None:
                with self._lock:
                    self._served = base
            return base is not None

    def _newest_base(self, have: Publication | None) -> _Served | None:
        """Return the newest base that is whole, loaded; None where there is none behind the state `have`."""
        problems = []
        for seq, path in reversed(published(self.folder, "base")):
            if have is not None and seq <= have.seq:
                break
            try:
                base = read_publication(path)
                if have is not None and base.run_id != have.run_id:
                    raise OtherChainError(f"{path}: it is of run {base.run_id[:8]}, needed {have.run_id[:8]}")
                if have is not None and base.life < have.life:
                    raise StaleLifeError(f"{path}: it is of life {base.life}, needed {have.life} or later")
                base, written_at = verify(path), _written_at(path)
                try:
                    model = load(path)
                except Exception as error:
                    raise PublicationError(f"{path}: cannot be loaded ({type(error).__name__}: {error})") from error
                if read_publication(path) != base:
                    raise DamagedError(f"{path}: it was replaced while it was loaded")
                return _Served(model, base, written_at)
            except DamagedError as error:
                problems.append(str(error))
        if problems or have is None:
            raise DamagedError("; ".join(problems) or f"{self.folder}: no base is there")
        return None

    def _check_newest(self) -> None:
        """Raise unless what is served is the newest state in the folder."""
        have, there = self.have, self._there()
        last = f"{have.name} (step {have.step}) of run {have.run_id[:8]} is served"
        if not there:
            try:
                os.listdir(self.folder)
            except OSError as error:
                raise GoneError(f"{self.folder}: {error.strerror}; {last}") from error
            raise GoneError(f"{self.folder}: no publications are there any more; {last}")
        seq, path = there[-1]
        newest = read_publication(path)
        if newest.run_id != have.run_id:
            raise OtherChainError(f"{path}: it is of run {newest.run_id[:8]}; {last}")
        if seq > have.seq:
            raise MissingDeltaError(f"{path}: delta_{have.seq + 1} before it is missing; {last}")
        if seq < have.seq:
            raise MissingDeltaError(f"{path}: it is the newest there, and older: {last}")
        if newest.link != have.link:
            raise OtherChainError(f"{path}: it is another state of this number; {last}")

    def follow(self, every_seconds: float = 1.0) -> None:
        """Take what comes, in a thread, until `close`. What cannot be taken is in `problem`, and tried again, with
        pauses that grow to half a minute."""

        def take() -> None:
            pause = every_seconds
            while not self._is_over.wait(pause):
                with suppress(Exception):  # to tell it takes memory, too
                    self._try()
                longest = max(every_seconds, _LONGEST_PAUSE_SECONDS)
                pause = min(longest, every_seconds * 2 ** min(self.failures_in_row, 20))

        self._thread = threading.Thread(target=take, name="replica", daemon=True)
        self._thread.start()

    def _try(self) -> None:
        try:
            self.update()
            self.problem, self.failures_in_row = "", 0
        except Exception as error:
            self.failures, self.failures_in_row = self.failures + 1, self.failures_in_row + 1
            what = str(error) if isinstance(error, PublicationError) else f"{type(error).__name__}: {error}"
            is_named = str(self.folder) in what
            where = f"{self.folder}: delta_{self.have.seq + 1}, or a newer base, cannot be taken"
            self.problem = what if is_named else f"{where} ({what})"

    def close(self) -> None:
        """End `follow`; what it takes now is taken first."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()


def _written_at(path: Path) -> float:
    try:
        return (path / MANIFEST).stat().st_mtime
    except OSError:  # it has gone since it was read
        return time.time()
