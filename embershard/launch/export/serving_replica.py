"""A replica: an exported model that takes what a run publishes while it answers. Needs torch, numpy, and the files
beside it.

    sys.path.insert(0, "published/base_0")         # any base: the newest one is found
    from replica import Replica

    replica = Replica("published")                 # the newest base, and the deltas after it
    replica.follow()                               # takes what comes, in a thread
    logits = replica(*replica.encode([{"age": 31, "item": 4711}]))

A delta is verified before anything changes. A program that starts again loads base and deltas again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embershard.distributed.publish.published import (
    DENSE,
    DamagedError,
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
from embershard.distributed.publish.published_ids import NO_ID
from embershard.launch.export.serving_model import IdPlaces, Model, load, set_weights, table_names, weights_of


class Replica:
    """The model in a folder of publications, at the newest state that is there.

    Several threads may ask and apply: an answer is that of one published state.

    Args:
        folder: of the publications.

    Attributes:
        have: the publication whose state is served.
        problem: why nothing newer is served, as a sentence; empty where nothing is wrong. Of `follow`.

    Raises:
        PublicationError: no base is whole, or a delta after it is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.problem = Path(folder), ""
        self._lock = threading.Lock()
        self._taking = threading.Lock()  # one thread at a time takes publications
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        problems = []
        for _, path in reversed(published(self.folder, "base")):
            try:
                self.have, self._model = verify(path), load(path)
                break
            except DamagedError as error:
                problems.append(str(error))
        else:
            raise DamagedError("; ".join(problems) or f"{self.folder}: no base is there")
        self.update()

    # -- answers

    def __call__(self, dense: Tensor, ids: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        """Return the model's outputs, as `Model` does."""
        with self.state() as (model, _), torch.no_grad():
            outputs: Tensor = model(dense, ids, offsets)
        return outputs

    def encode(self, samples: Sequence[dict[str, Any]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the inputs of the model for samples of raw values, as `Model.encode` does."""
        return self._model.encode(samples)

    @contextmanager
    def state(self) -> Iterator[tuple[Model, Publication]]:
        """Return a context in which the model stays as it is, with the publication whose state it has."""
        with self._lock:
            yield self._model, self.have

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
        with self._taking:
            publication = read_publication(path)
            check_next(publication, self.have, path.parent)
            files = read_files(path, publication)
            self._check(path, publication, files.get(DENSE, {}))
            places = self._places()
            ids = ids_behind({name: (own.ids, own.rows) for name, own in places.items()}, path, publication, files)
            rows = list(self._rows(publication, files))
            for table, place, _ in rows:  # the same bits again: pages become this process's own before answers wait
                table[place] = table[place]
            with self._lock:
                for table, place, new in rows:
                    table[place] = new
                for name, (own, of_ids) in ids.items():
                    places[name].ids, places[name].rows = own, of_ids
                set_weights(self._model.dense, files[DENSE])
                self.have = publication

    def _places(self) -> dict[str, IdPlaces]:
        """Return where the ids of each table of ids are."""
        pairs = zip(table_names(self._model.inputs), self._model.places, strict=True)
        return {name: places for name, places in pairs if isinstance(places, IdPlaces)}

    def _rows(
        self, publication: Publication, files: dict[str, dict[str, Tensor]]
    ) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, slice], np.ndarray]]:
        """Yield for each part of a delta the table, the place in it, and the new rows."""
        stores = [table.get_buffer("stored").numpy() for table in self._model.tables]
        tables = dict(zip(table_names(self._model.inputs), stores, strict=True))
        for part in publication.parts:
            keys, rows = (files[part.file][f"{part.place}.{name}"].numpy() for name in ("keys", "rows"))
            if (changed := part.changed(files[part.file])) is not None:
                dead = changed.rows[changed.new == NO_ID].numpy()
                yield tables[part.table], (dead, slice(None)), np.zeros((), rows.dtype)
            yield tables[part.table], (keys, slice(part.first_column, part.first_column + part.num_columns)), rows

    def _check(self, path: Path, publication: Publication, dense: dict[str, Tensor]) -> None:
        """Raise unless the model has the tables and the weights of a verified delta."""
        names = set(table_names(self._model.inputs))
        if unknown := sorted({part.table for part in publication.parts} - names):
            raise OtherChainError(f"{path}: it has rows of {unknown[0]}, which the model has not")
        for name, weight in weights_of(self._model.dense).items():
            if name not in dense or dense[name].shape != weight.shape:
                raise DamagedError(f"{path / DENSE}: needed {name} of shape {list(weight.shape)}")

    def update(self) -> int:
        """Take all that is newer in the folder, and return how many publications that were.

        Where a delta is gone or damaged, a newer base is taken in its place.

        Raises:
            PublicationError: what comes next cannot be taken, and there is no newer base.
        """
        taken = 0
        while True:
            following = self.folder / f"delta_{self.have.seq + 1}"
            try:
                if following.exists():
                    self.apply(following)
                elif not self._take_base():
                    return taken
            except PublicationError:
                if not self._take_base():
                    raise
            taken += 1

    def _take_base(self) -> bool:
        """Take the newest base, if it has a newer state; return whether it was taken."""
        with self._taking:
            for seq, path in reversed(published(self.folder, "base")):
                if seq <= self.have.seq:
                    return False
                base = read_publication(path)
                if base.run_id != self.have.run_id:
                    raise OtherChainError(f"{path}: it is of run {base.run_id[:8]}, needed {self.have.run_id[:8]}")
                if base.life < self.have.life:
                    raise StaleLifeError(f"{path}: it is of life {base.life}, needed {self.have.life} or later")
                try:
                    verify(path)
                    model = load(path)
                except DamagedError:
                    continue
                with self._lock:
                    self._model, self.have = model, base
                return True
            return False

    def follow(self, every_seconds: float = 1.0) -> None:
        """Take what comes, in a thread, until `close`. What cannot be taken is in `problem`, and tried again."""

        def take() -> None:
            while not self._is_over.wait(every_seconds):
                try:
                    self.update()
                    self.problem = ""
                except (PublicationError, OSError) as error:
                    self.problem = str(error)

        self._thread = threading.Thread(target=take, name="replica", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End `follow`."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
