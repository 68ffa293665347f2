"""`Publishing`: publishes what a run has learned, while it trains."""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard.distributed import PublishConfig, Ranks
from embershard.distributed.changed_rows import BehindRows, TouchedRows
from embershard.distributed.checkpoint.folder import complete_checkpoints
from embershard.distributed.checkpoint.load import read_scalars
from embershard.distributed.publish.published import (
    FORMAT,
    IDS,
    ROW_TYPES,
    Publication,
    PublicationError,
    file_entries,
    published,
)
from embershard.distributed.ranks import keep_to_one_core
from embershard.errors import CheckpointError, ConfigError, FailedPublicationError, os_problem
from embershard.extras.publications import compact, write
from embershard.extras.publications.sources import ComparedTable, PublishedPool, RowSource
from embershard.models import ModelTable
from embershard.run_result import PublishedState
from embershard.sharding.torchrec import cached_embeddings, without_flushes
from embershard.training.checkpoint.run_state import PreparedSave
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.config import RunConfig
from embershard.training.fit.machine_limits import disk_of, nearest_folder
from embershard.training.fit.model_size import model_size, table_rows, tables_of_run
from embershard.training.parts.part import Export, Part
from embershard.training.reports import PublicationReport, Report
from embershard.units import size
from embershard.whole_file import whole_file


@dataclass(frozen=True)
class _Beginning:
    """Where a run begins in a folder of publications.

    Attributes:
        seq, life: of its first publication, should that be a base.
        run_id: its id.
        name: that no other life has.
        have: the newest publication, if the run goes on with its chain.
        touched: rows of each table that may differ between that and the run.
        problem: why it does not go on.
    """

    seq: int
    life: int
    run_id: str
    name: str
    have: Publication | None = None
    touched: dict[str, BehindRows] = field(default_factory=dict)
    problem: str = ""


@dataclass
class _Writing:
    """A delta that a thread writes.

    Attributes:
        touched: of each source of rows of this rank, the tables and rows in it.
        since: when the publication before was cut, in seconds of `time.monotonic`: its updates are newer.
        stall_seconds: for which training waited.
        ended: when it was complete.
    """

    delta: Publication
    touched: list[list[TouchedRows]]
    since: float
    stall_seconds: float = 0.0
    thread: threading.Thread | None = None
    done: Publication | None = None
    failure: BaseException | None = None
    seconds: float = 0.0
    ended: float = 0.0


class Publisher:
    """Publishes a run: a base before its first step, then deltas. All ranks call its methods in the same steps.

    Rows count as touched once an update of them begins, whatever lookups, fills and evictions do. At a cut, between two
    steps, the training thread copies the touched rows and the dense weights; a thread writes them.

    A run that goes on from a checkpoint publishes, with its next delta, the rows of all deltas after the checkpoint's
    state: those are the only ones in which a replica can differ from it (decision 0064).

    Args:
        checkpoints: folder of the run's checkpoints, which say which deltas a resume needs.
        export: writes the first base.
        served: while it lasts, the model has the dense weights to publish.
        is_replica: the first group of ranks has what this rank has of the tables, too, and publishes it.

    Raises:
        ConfigError: nobody can export.
    """

    def __init__(
        self,
        config: PublishConfig,
        model: DistributedModelParallel,
        tables: tuple[ModelTable, ...],
        ranks: Ranks,
        checkpoints: Path | None,
        export: Export | None,
        served: Callable[[], AbstractContextManager[None]] = nullcontext,
        is_replica: bool = False,
    ) -> None:
        self._config, self._model, self._tables, self._ranks, self._served = config, model, tables, ranks, served
        self._checkpoints, self._export = checkpoints, export
        assert config.folder is not None, "nothing is published"
        self._folder = Path(config.folder)
        self._is_replica = is_replica
        self._sources: list[RowSource] = [PublishedPool(pool) for pool in cached_embeddings(model) if not is_replica]
        if export is None:
            raise ConfigError("publish.folder: make the trainer with `export`, as `embershard train` does.")
        self.starts_again = False  # a resume found no checkpoint
        self._compares = False
        self._have: Publication | None = None  # the newest that is complete
        self._resumed: str | None = None  # token of the checkpoint that the run goes on from
        self._is_changed = False
        self._life, self._name, self._num_cuts = 0, "", 0
        self._cut_step: int | None = None
        self._newest = {"seq": -1, "token": ""}  # of the last cut
        self._cut_at = self._since = time.monotonic()  # of the last cut; and of the last that is not to be repeated
        self._writing: _Writing | None = None
        self._compacting: threading.Thread | None = None
        self._base_seq = 0
        self._own_group: Ranks | None = None
        self._failure = ""
        self._claimed: IO[str] | None = None  # of the first rank
        self._reports: list[PublicationReport] = []

    # -- where a run begins

    def resume(self, token: str | None, is_changed: bool) -> None:
        """Note that the run goes on from a checkpoint.

        Args:
            token: of the publication of its state; None: it has none.
            is_changed: settings were changed that serving may depend on: a base must follow.
        """
        self.wait()
        self._resumed, self._is_changed, self._have, self._cut_step = token, is_changed, None, None

    def begin(self, run_id: str, step: int, prepare: Callable[[Path], PreparedSave]) -> str:
        """Go on with the chain in the folder, or write a base, before the first step. Return the id of the run.

        Args:
            run_id: of the run. Where no checkpoint was left, it is that of the folder from now on.
            prepare: prepares a checkpoint, in a folder.

        Raises:
            ConfigError: the folder has publications of another run, or another one begins there.
        """
        if self._have is not None:
            return run_id
        found = self._ranks.from_first(lambda: self._look(run_id))
        if not self._compares:  # what no cache knows
            self._compares, state = True, self._state()
            own = [pool.cache.tables for pool in cached_embeddings(self._model)]
            cached = {name for pools in self._ranks.all_gather_objects(own) for names in pools for name in names}
            for other in self._tables:
                if other.name not in cached and not self._is_replica:
                    self._sources.append(ComparedTable.of(other.name, state[other.tensor], self._ranks.is_first))
        for source in self._sources:
            source.forget()
        self._life, self._name, have = found.life, found.name, found.have
        if have is None:
            tables = {table.name: (table.num_rows, table.dim) for table in self._tables}
            place = ("base", found.seq, found.run_id, found.life, found.name, step, "")
            have = self._write_base(Publication(*place, self._config.dtype, tables, {}), prepare)
            if found.problem:
                self._reports.append(PublicationReport(step, "", 0, 0, 0.0, 0.0, found.problem))
        for table, behind in found.touched.items():
            for source in self._sources:
                source.touch(table, behind)
        self._have, self._newest = have, {"seq": have.seq, "token": have.token}
        if found.have is None or have.token == self._resumed:
            self._cut_step = step
        self._since = time.monotonic()
        return found.run_id

    def _look(self, run_id: str) -> _Beginning:
        """On the first rank: look where the run begins in the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._claimed = self._claimed or write.claim(self._folder)
        if self._claimed is None:  # nothing of it may be removed
            raise ConfigError(
                f"publish.folder: {self._folder} is in use by another run, which has perhaps published nothing yet. "
                "Give each run a folder of its own."
            )
        write.remove_leftovers(self._folder)
        seq, life, known = write.next_place(self._folder)
        if known and run_id not in known:
            ours = json.loads(self._note.read_text()) if self.starts_again and self._note.exists() else ""
            if ours not in known:
                raise ConfigError(
                    f"publish.folder: {self._folder} has publications of another run ({sorted(known)[0][:8]}). "
                    "Give an empty folder, or remove it."
                )
            run_id = ours  # no checkpoint was left: the run starts again
        if self._checkpoints is not None:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self._note) as partial:
                partial.write_text(json.dumps(run_id))
        beginning = _Beginning(seq, life, run_id, uuid.uuid4().hex)
        if seq:
            try:
                if self._resumed is None:
                    raise PublicationError(f"{self._folder}: the run does not go on from a state that was published")
                have, bases = write.newest(self._folder), published(self._folder, "base")
                assert have is not None, "the folder is not empty"
                if not bases:
                    raise PublicationError(f"{self._folder}: the base is gone")
                if self._is_changed or have.dtype != self._config.dtype:
                    raise PublicationError(f"{self._folder}: settings were changed")
                touched = write.touched_since(self._folder, self._resumed)
                self._base_seq = bases[-1][0]
                return replace(beginning, have=have, touched=touched)
            except (PublicationError, OSError) as error:
                return replace(beginning, problem=f"{str(error).rstrip('. ')}: a new base was written")
        return beginning

    @property
    def _note(self) -> Path:
        """File beside the checkpoints: which run publishes, should no checkpoint be left."""
        assert self._checkpoints is not None, "only runs with checkpoints start again"
        return self._checkpoints.parent / "publishes.json"

    def _write_base(self, base: Publication, prepare: Callable[[Path], PreparedSave]) -> Publication:
        """Write a base from a checkpoint that is made for it. Training waits."""
        started = time.perf_counter()
        partial = self._folder / f"{base.name}{write.PARTIAL}"
        temporary = self._folder / f"{base.name}.checkpoint{write.PARTIAL}"
        checkpoint = prepare(temporary).write(self._ranks)

        def export() -> Publication:
            assert self._export is not None
            self._export(checkpoint, base.dtype, partial)
            write.sync_files(partial)
            files = file_entries(partial)
            is_new = any(name.endswith(IDS) for name in files)
            complete = replace(base, files=files, format=FORMAT if is_new else base.format)
            write.finish(partial, self._folder / base.name, complete)
            write.remove_leftovers(self._folder)
            return complete

        done = self._ranks.from_first(export)
        self._base_seq = done.seq
        seconds = time.perf_counter() - started
        self._reports.append(PublicationReport(done.step, done.name, 0, done.num_bytes, seconds, seconds))
        return done

    # -- while it trains

    def is_due(self, step: int) -> bool:
        """Return whether a publication follows this step. Collective."""
        if self._config.every_steps is not None:
            return step % self._config.every_steps == 0
        elapsed = torch.tensor(time.monotonic() - self._cut_at)
        waited = self._ranks.all_gather(elapsed)[0]  # by the first rank's clock
        return bool(waited >= (self._config.every_seconds or 0))

    def cut(self, step: int) -> None:
        """Publish the state after `step`, unless it is. A delta that is being written ends before."""
        if self._cut_step == step:
            return
        started = time.perf_counter()
        self.wait()
        assert self._have is not None, "`begin` comes first"
        self._num_cuts += 1
        delta = write.next_delta(self._have, self._life, f"{self._name}.{self._num_cuts}", step)
        dtype = ROW_TYPES[self._config.dtype]
        touched = [[replace(found, rows=found.rows.to(dtype)) for found in source.take()] for source in self._sources]
        dense = self._dense()
        if self._own_group is None:
            self._own_group = self._ranks.with_own_group()
        writing = self._writing = _Writing(delta, touched, self._since)
        began, threads = threading.Event(), torch.get_num_threads()
        writing.thread = threading.Thread(
            target=self._write, args=(writing, dense, self._own_group, began), name="embershard-publish", daemon=True
        )
        writing.thread.start()
        began.wait()
        torch.set_num_threads(threads)  # `keep_to_one_core` also told MKL, which has one number for all threads
        self._cut_step, self._cut_at = step, time.monotonic()
        self._since = self._cut_at
        self._newest = {"seq": delta.seq, "token": delta.token}
        writing.stall_seconds = time.perf_counter() - started

    def before_save(self, step: int) -> Callable[[], None]:
        """Publish the state after `step`, which a checkpoint is about to have. Return what waits until the publication
        is there: a checkpoint that is complete has its publication."""
        self.cut(step)
        thread = None if self._writing is None else self._writing.thread
        return (lambda: None) if thread is None else thread.join

    @property
    def newest(self) -> dict[str, Any] | None:
        """Number and token of the publication that was cut last; None before the first one."""
        return None if self._have is None else dict(self._newest)

    def _state(self) -> dict[str, Any]:
        """Return references to the model's weights, by name."""
        with without_flushes(self._model):
            state: dict[str, Any] = self._model.state_dict()
        return state

    def _dense(self) -> dict[str, Tensor]:
        """Return copies of the weights around the tables, by name."""
        tables = {table.tensor.rpartition(".")[0] for table in self._tables}  # with rows, and whose they are
        with self._served():
            found = {name: weight for name, weight in self._state().items() if name.rpartition(".")[0] not in tables}
            return {name: weight.detach().to("cpu", copy=True) for name, weight in found.items()}

    def _write(self, writing: _Writing, dense: dict[str, Tensor], ranks: Ranks, began: threading.Event) -> None:
        keep_to_one_core()
        began.set()
        started = time.perf_counter()
        try:
            every = [found for touched in writing.touched for found in touched]
            writing.done = write.write_delta(self._folder, writing.delta, every, dense, ranks)
        except BaseException as error:  # told by `wait`
            writing.failure = error
        writing.seconds, writing.ended = time.perf_counter() - started, time.monotonic()

    def close(self) -> None:
        """Wait for what is being written, and let other runs have the folder."""
        self.wait()
        if self._claimed is not None:
            self._claimed.close()
            self._claimed = None

    def wait(self) -> None:
        """Wait for the delta that is being written. Where it failed, its rows are published with the next one."""
        writing = self._writing
        if writing is None:
            return
        assert writing.thread is not None
        writing.thread.join()
        self._writing = None
        failure, delta = writing.failure, writing.done or writing.delta
        seconds = writing.seconds, writing.stall_seconds
        report = PublicationReport(delta.step, delta.name, delta.num_rows, delta.num_bytes, *seconds)
        report = replace(report, delay_seconds=writing.ended - writing.since)
        if failure is None:
            self._have = writing.done
            every = self._config.base_every
            is_busy = self._compacting is not None and self._compacting.is_alive()
            if every is not None and self._ranks.is_first and not is_busy and delta.seq - self._base_seq >= every:
                self._base_seq = delta.seq
                self._compacting = threading.Thread(
                    target=self._compact, args=(delta,), name="embershard-base", daemon=True
                )
                self._compacting.start()
        elif isinstance(failure, OSError):
            for source, touched in zip(self._sources, writing.touched, strict=True):
                for found in touched:
                    source.touch(found.table, BehindRows.of(found))
            self._cut_step, self._since = None, writing.since
            report = replace(
                report, name="", delay_seconds=0.0, problem=f"{delta.name} could not be written: {os_problem(failure)}"
            )
        else:
            raise failure
        self._failure = report.problem
        self._reports.append(report)

    @property
    def published(self) -> Publication:
        """The newest publication."""
        assert self._have is not None, "`begin` comes first"
        return self._have

    @property
    def failure(self) -> str:
        """Why what was cut last is not published; empty where it is."""
        return self._failure

    def reports(self) -> Iterator[PublicationReport]:
        """Yield reports of publications that ended. Not collective: bases are the first rank's."""
        writing = self._writing
        if writing is not None and writing.thread is not None and not writing.thread.is_alive():
            self.wait()
        while self._reports:
            yield self._reports.pop(0)

    def end(self, step: int) -> Iterator[PublicationReport]:
        """Publish the state after `step`, unless it is, and wait for all that is being written; yield its reports."""
        self.cut(step)
        self.wait()
        if self._compacting is not None:
            self._compacting.join()
        yield from self.reports()

    def _compact(self, delta: Publication) -> None:
        """Make a base of the deltas up to this one, and remove what nobody needs; on the first rank, in a thread."""
        keep_to_one_core()
        started, what = time.perf_counter(), f"base_{delta.seq} was not made"
        try:
            base = compact.make_base(self._folder, delta.seq)
            seconds = time.perf_counter() - started
            self._reports.append(PublicationReport(delta.step, base.name, 0, base.num_bytes, seconds, 0.0))
            what = "older ones were not removed"
            states = []  # of checkpoints
            for checkpoint in complete_checkpoints(self._checkpoints) if self._checkpoints else ():
                with suppress(CheckpointError):
                    states.append(read_scalars(checkpoint).get("published"))
            needed_from = min((int(state["seq"]) for state in states if state is not None), default=None)
            write.prune(self._folder, self._config.keep_bases, needed_from)
        except (OSError, PublicationError) as error:
            reason = os_problem(error) if isinstance(error, OSError) else str(error)
            self._reports.append(PublicationReport(delta.step, "", 0, 0, 0.0, 0.0, f"{what}: {reason}"))


def check_disk_for_bases(config: RunConfig, folder: Path, ranks: Ranks) -> None:
    """Raise unless the bases of a run can be written to a folder. Collective.

    Raises:
        ConfigError: on all ranks, with the figures.
    """

    def check() -> None:
        try:
            needed, free = bytes_of_bases(config, folder), shutil.disk_usage(nearest_folder(folder)).free
        except OSError as error:
            raise ConfigError(f"publish.folder: {os_problem(error)}; choose another folder.") from error
        if needed > free:
            changes = {"publish.dtype = fp16": replace(config.publish, dtype="fp16")}
            if config.publish.base_every is not None:
                changes["publish.keep_bases = 1"] = replace(config.publish, keep_bases=1)
            sizes = {text: bytes_of_bases(replace(config, publish=each), folder) for text, each in changes.items()}
            fitting = [text for text, num_bytes in sizes.items() if num_bytes <= free]
            also = f", or set {' or '.join(fitting)}" if fitting else ""
            raise ConfigError(
                f"publish.folder: {folder} needs {size(needed)} more for bases, beside deltas, and {size(free)} are "
                f"free. Free some, choose a folder on a larger disk{also}."
            )

    ranks.from_first(check)


def bytes_of_bases(config: RunConfig, folder: Path) -> int:
    """Return how many bytes more than those in the folder bases, and the checkpoint that the first one is made of, take
    at one time; below 0 where there are more."""
    model, publish = model_size(config, table_rows(config)), config.publish
    number_bytes = 2 if publish.dtype == "fp16" else 4
    base = number_bytes * sum(table.rows * table.dim for table in model.tables) + model.dense_parameter_bytes
    count = 1 if publish.base_every is None else publish.keep_bases + 1
    files = (path for _, found in published(folder, "base") for path in found.rglob("*"))
    there = sum(path.stat().st_size for path in files if path.is_file())
    return max(count * base, base + model.table_bytes + model.dense_state_bytes) - there


class Publishing(Part):
    """A run that publishes.

    Attributes:
        publisher: writes the publications.
    """

    publisher: Publisher

    @property
    def _folder(self) -> Path:
        assert self.run.config.publish.folder is not None, "nothing is published"
        return Path(self.run.config.publish.folder)

    def check(self) -> None:
        check_disk_for_bases(self.run.config, self._folder, self.run.ranks)

    def disk_bytes(self, disk: int) -> int:
        is_there = disk_of(self._folder) == disk
        return max(0, bytes_of_bases(self.run.config, self._folder)) if is_there else 0

    def after_build(self) -> None:
        """Track which rows train from now on."""
        run = self.run
        what, is_replica = (run.config.publish, run.model, tables_of_run(run.config)), run.state.is_replica
        self.publisher = Publisher(*what, run.ranks, run.checkpoints, run.export, run.served, is_replica)

    def start_again(self) -> None:
        """Go on in the folder of the run that left no checkpoint."""
        self.publisher.starts_again = True

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        published = saved.of_parts.get("published", {})
        self.publisher.resume(published.get("token"), is_changed=bool(comparison.changes))

    def begin(self) -> Iterator[Report]:
        state, publisher = self.run.state, self.publisher
        state.run_id = publisher.begin(state.run_id, self.run.steps, self.run.prepare_save)
        yield from publisher.reports()

    def after_step(self) -> Iterator[Report]:
        if self.is_time(self.publisher.is_due(self.run.steps)):
            self.publisher.cut(self.run.steps)
        yield from self.publisher.reports()

    def no_batch(self) -> Iterator[Report]:
        """Publish if it is due: updates are not to wait for samples."""
        return self.after_step()

    def before_save(self) -> Callable[[], None]:
        return self.publisher.before_save(self.run.steps)

    def state(self) -> dict[str, Any]:
        newest = self.publisher.newest
        return {} if newest is None else {"published": newest}

    def at_end(self) -> Iterator[Report]:
        return self.publisher.end(self.run.steps)

    def finish(self) -> Iterator[Report]:
        """Publish it again, where that failed."""
        return self.publisher.end(self.run.steps)

    def close(self) -> None:
        self.publisher.close()

    def raise_failure(self, go_on: str) -> None:
        if failure := self.publisher.failure:
            have = self.publisher.published
            raise FailedPublicationError(
                f"step {self.run.steps} is not published: {failure.rstrip('.')}. Replicas have {have.name}, of step "
                f"{have.step}. Publish it with:    {go_on}"
            )

    def result(self) -> dict[str, Any]:
        have = self.publisher.published
        return {"published": PublishedState(have.name, have.step, self.publisher.failure)}
