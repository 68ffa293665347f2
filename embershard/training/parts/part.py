"""`Part`: what a run may have beside its steps. `Training`: what a part knows of the run that it belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard.data import BatchStream, Source, StreamState, Target
from embershard.distributed import Ranks, Supervision
from embershard.frequency import FrequencyProfile
from embershard.pipeline import LookAheadPipeline
from embershard.sharding.plan import Plan
from embershard.training.build import features_of
from embershard.training.checkpoint.run_state import PreparedSave, RunState
from embershard.training.checkpoint.save_chain import SaveChain
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.config import RunConfig
from embershard.training.optimizers import Optimizers
from embershard.training.reports import EvalReport, Report, TrainReport
from embershard.training.steps import InputFailure, Steps

#: Writes an export of a checkpoint to a new folder: checkpoint, number type of the tables, folder.
Export = Callable[[Path, str, Path], None]
P = TypeVar("P", bound="Part")


class Training(ABC):
    """Where a training stands, and what belongs to it: all that its parts know of it.

    Attributes:
        checkpoints: folder of its checkpoints; None: it saves none.
        export: writes an export of a checkpoint, if anything does.
        plan: places the tables; None: TorchRec's planner does.
        source, stream: the data, and its batches for this rank.
        steps, samples: trained so far.
        step_seconds: of each step that this process has trained.
        first_step: of this process, which may go on from a checkpoint.
        saved_step: the newest one that this process saved.
        has_ended: nothing more comes to train on, though no epoch ended.
        input_failure: the error by which the input of all ranks ended.
        parts: what the run has beside its steps, in the order in which they act.
    """

    config: RunConfig
    ranks: Ranks
    checkpoints: Path | None
    supervision: Supervision
    export: Export | None
    plan: Plan | None
    source: Source
    stream: BatchStream
    model: DistributedModelParallel
    optimizers: Optimizers
    state: RunState
    parts: list[Part]

    def __init__(self) -> None:
        self.steps = self.samples = self.first_step = 0
        self.step_seconds = array("d")
        self.saved_step: int | None = None
        self.has_ended = False
        self.input_failure = InputFailure()
        self._upcoming: Steps | None = None

    @abstractmethod
    def report(self) -> TrainReport:
        """Return loss, quality, speed, and what caches and links moved, since the last report. Collective."""

    @abstractmethod
    def evaluate(self) -> EvalReport | None:
        """Return the quality on the held-out part: each sample counts once, with any number of ranks.

        None: a rank was asked to stop meanwhile.
        """

    @property
    @abstractmethod
    def stop_reason(self) -> str:
        """Why the training ends before its last step, as a sentence; empty where it goes on."""

    def part(self, kind: type[P]) -> P | None:
        """Return the part of this kind; None where the run has none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def of_parts(self, entries: Callable[[Part], Mapping[str, Any]]) -> dict[str, Any]:
        """Return what all parts have, by name."""
        return {name: value for part in self.parts for name, value in entries(part).items()}

    @property
    def target(self) -> Target:
        """What is predicted of a sample."""
        return self.source.schema.target

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, those before a resume included; None: nobody knows yet."""
        left = self.stream.num_steps
        limits = [self.config.train.max_steps, None if left is None else self.first_step + left]
        return self.steps if self.has_ended else min((limit for limit in limits if limit is not None), default=None)

    @property
    def is_last(self) -> bool:
        """True after the last step that was planned."""
        return self.total_steps is not None and self.steps >= self.total_steps

    @property
    def is_over(self) -> bool:
        """True after the last step of the whole run, which may be an earlier one than planned."""
        return self.is_last or bool(self.stop_reason)

    @property
    def is_settled(self) -> bool:
        """True behind steps that may be saved and evaluated: see `Part.is_settled`."""
        return all(part.is_settled for part in self.parts)

    @property
    def is_report_due(self) -> bool:
        """True if a line of progress follows this step."""
        return self.is_last or self.steps % self.config.train.log_every == 0

    @property
    def upcoming(self) -> Steps:
        """The steps that are left."""
        if self._upcoming is None:
            depths, micro_batches, device = self.config.look_ahead, self.config.train.accumulate, self.ranks.device
            pipeline = None
            if self.config.lookahead:
                heads, train = len(self.target.heads), self.config.train
                are_late = train.on_non_finite == "stop" and micro_batches == 1 and self.ranks.world_size > 1
                num_carried = 2 + 2 * heads * (heads > 1) if are_late else 0  # losses that travel (decision 0147)
                ahead, held = (micro_batches * depth for depth in (depths.lookahead, depths.prefetch))
                args = (self.model, self.optimizers.dense, device, ahead, held)
                given: dict[str, Any] = {"features": features_of(self.model), "num_carried": num_carried}
                pipeline = LookAheadPipeline(*args, micro_batches=micro_batches, **given)
            left = None if self.total_steps is None else self.total_steps - self.steps
            self._upcoming = Steps(self.stream, left, device, pipeline, self.input_failure, micro_batches)
        return self._upcoming

    @property
    def position(self) -> StreamState:
        """Position in the training data behind the last trained batch."""
        return self.upcoming.state

    @contextmanager
    def served(self) -> Iterator[None]:
        """While it lasts, the model has the weights that everybody gets who uses it, instead of those it trains."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.served())
            yield

    def prepare_save(self, folder: Path, copy_bytes: int = 0, chain: SaveChain | None = None) -> PreparedSave:
        """Return the state of the run and of its parts, to be written to a folder, with copies of up to so many bytes
        of what changes in place; as a link of a chain, or whole and in none."""
        of_parts, tensors = self.of_parts(lambda part: part.state()), self.of_parts(lambda part: part.tensors())
        place = (folder, self.steps, self.samples, self.position)
        return self.state.prepare_save(*place, of_parts, tensors, copy_bytes, chain)


class Part:
    """A part of a run. Each method is called at one place of `Trainer`, for all parts in the order of
    `embershard.training.parts.order`, on all ranks together; here, each does nothing.

    Attributes:
        sharder_options: for the sharder of the tables, set by `before_build`.
        stream_options: for the stream of training batches, set by `before_build`.
        is_settled: what was trained so far is the same on all ranks that have it; else a save or an evaluation waits.
        is_late: what this part does between two steps was due, and waits for `is_settled` of all parts.
        identity: settings that are compared on a resume, beside those of the config; set by `before_build`.
    """

    sharder_options: Mapping[str, Any] = {}
    stream_options: Mapping[str, Any] = {}
    identity: Mapping[str, Any] = {}
    is_settled = True
    is_late = False

    def __init__(self, run: Training) -> None:
        self.run = run

    def is_time(self, is_due: bool) -> bool:
        """Return True if what is due behind this step, or `is_late`, may be done now: all parts are settled."""
        is_due |= self.is_late
        self.is_late = is_due and not self.run.is_settled
        return is_due and not self.is_late

    # -- before the first step

    def open_source(self) -> Source | None:
        """Open the data, where they are not those that the settings name."""

    def check(self) -> None:
        """The data are open, and nothing is built: raise `ConfigError` where the run cannot have this part."""

    def before_build(self, profile: FrequencyProfile | None) -> None:
        """The profile is counted: find out what the model and the stream are built with."""

    def disk_bytes(self, disk: int) -> int:
        """Return the bytes that the part will take on a file system, by its number (`os.stat_result.st_dev`)."""
        return 0

    def after_build(self) -> None:
        """The model and its optimizers are built, and no batch is read."""

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        """The run goes on from a checkpoint, whose tensors are loaded; the stream is not open yet."""

    def start_again(self) -> None:
        """The run was to go on, and no checkpoint was left."""

    def notes(self) -> list[str]:
        """Return what to say before training, as sentences."""
        return []

    # -- while it trains

    def begin(self) -> Iterable[Report]:
        """Training begins."""
        return ()

    def before_batch(self) -> Iterable[Report]:
        """A batch is about to be taken, and all steps before it are trained."""
        return ()

    def after_step(self) -> Iterable[Report]:
        """A step was trained."""
        return ()

    def no_batch(self) -> Iterable[Report]:
        """No batch is whole yet: training waits for samples."""
        return ()

    def report_entries(self) -> dict[str, Any]:
        """Return entries of a line of progress, fields of `TrainReport` by name, since the last one. Collective."""
        return {}

    # -- checkpoints

    def before_save(self) -> Callable[[], None] | None:
        """A checkpoint is about to be prepared. Return what waits until it may be complete, if anything must."""

    def state(self) -> dict[str, Any]:
        """Return entries of a checkpoint's scalars, as JSON values by name."""
        return {}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return groups of a checkpoint's tensors, by names that no other part has; equal on all ranks."""
        return {}

    def read_tensors(self, checkpoint: Path) -> None:
        """The run goes on from a checkpoint, whose other tensors are loaded: load those of this part. Collective."""

    # -- what others get of the model

    def served(self) -> AbstractContextManager[None]:
        """While it lasts, the model has the weights for all that uses it, if those that it trains are others."""
        return nullcontext()

    # -- the end

    def at_end(self) -> Iterable[Report]:
        """The last step was trained: end what runs beside training, and save."""
        return ()

    def evaluate_at_end(self) -> Iterable[Report]:
        """Evaluate what was trained. It is saved: a rank may die in here."""
        return ()

    def finish(self) -> Iterable[Report]:
        """All parts were evaluated. Here the last part of the order comes first."""
        return ()

    def close(self) -> None:
        """End threads, wait for what they write, and let others have what this part holds. Called in any state of a
        run, perhaps twice."""

    def raise_failure(self, go_on: str) -> None:
        """The run is closed: raise what it failed in, though all was trained. `go_on` is the command of a resume."""

    def summary(self) -> str:
        """Return what to say of the part when the run ended, as sentences; on the first rank."""
        return ""

    def result(self) -> dict[str, Any]:
        """Return entries of the run's result, fields of `RunResult` by name; those of the first rank count.
        Collective."""
        return {}
