"""Losses of all ranks, read without stalling a GPU, and what happens when one is not finite.

Batches whose loss is not finite are written to files (`KeptBatches`), to look at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embershard.data import Batch, Target
from embershard.distributed import Ranks, complete_checkpoints
from embershard.errors import NotFiniteError
from embershard.metrics.predictions import Predicted
from embershard.models.loss import label_losses, loss_of, present
from embershard.pipeline.intake import Intake
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.part import Part, Training
from embershard.training.reports import Report
from embershard.training.steps import MicroBatches

#: After so many batches in a row without a finite loss, rows or parameters are the cause, not the data.
MOST_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True)
class _PendingLoss:
    """A step whose numbers, which are its loss, signal and sums of labels [2 + 2 H], are on their way to this host.

    Attributes:
        arrived: waits for them: those of this rank, or of all ranks [world_size, 2 + 2 H].
    """

    number: int
    batch: Batch | MicroBatches | None
    arrived: Callable[[], list[Any]]

    @classmethod
    def of(cls, number: int, batch: Batch | MicroBatches | None, values: torch.Tensor) -> _PendingLoss:
        """Return it with the copy of `values` to the host begun; a GPU goes on meanwhile."""
        if values.device.type == "cpu":
            return cls(number, batch, values.tolist)
        host, event = torch.empty(values.shape, dtype=values.dtype, pin_memory=True), torch.cuda.Event()
        host.copy_(values, non_blocking=True)
        event.record()

        def arrived() -> list[Any]:
            event.synchronize()
            return host.tolist()  # type: ignore[no-any-return]

        return cls(number, batch, arrived)


def in_float64(
    target: Target, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Return the loss [] of outputs and labels, of which `loss` [] is the rounded value; see `loss_of`.

    A mean rounded to float32 depends on how a batch is divided among ranks. A loss that is not finite is returned as it
    is.

    >>> loss = torch.tensor(0.6931472)
    >>> in_float64(Target(), loss, torch.zeros(2), torch.tensor([0.0, 1.0]), None)
    tensor(0.6931, dtype=torch.float64)
    """
    wide = None if weights is None else weights.double()
    exact = loss_of(target, outputs.detach().double(), labels.double(), wide)
    loss = loss.detach()
    return torch.where(torch.isfinite(loss), exact, loss)


def label_sums(
    target: Target, outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Return the sums of w x l of each of several labels, over its classes, and how many samples have it, float64
    [2 H] of H labels; of one label [0]."""
    heads = target.heads.values()
    if len(heads) == 1:
        return labels.new_empty(0, dtype=torch.float64)
    wide = None if weights is None else weights.double()
    means = label_losses(target, outputs.detach().double(), labels.double(), wide)
    losses = torch.stack([torch.stack(means[head.start : head.stop]).sum() for head in heads])
    # One by one: a list of columns would be copied to a GPU, whose host would wait.
    counts = torch.stack([present(labels[:, head.start]).sum() for head in heads])
    return torch.cat([losses * len(labels), counts.double()])


class LossMonitor:
    """Collects every step's losses. When a rank's loss is not finite, all ranks stop, or all skip the batch.

    Stopping costs no wait: on a GPU a loss is read when the next one is added, so the host never waits for the step in
    flight. The run then stops one step late, but names the right step. So it does where losses travel with the ranks'
    agreement on a next batch: on CPUs with that of their step, from GPUs with that of the next one. Skipping must be
    decided before the backward, which trains the rows: on a GPU the host then waits for every forward.

    Args:
        skips: skip batches whose loss is not finite, `MOST_SKIPPED_IN_A_ROW` at most.
        kept: writes such batches to files; None: they are dropped.
        before_stop: called on every rank before an error is raised.
        observe: gets the mean loss of each batch in order, NaN where it was skipped.

    Attributes:
        num_skipped: batches.
        signal: the largest number that a rank gave with a loss that was read; the same on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        skips: bool = False,
        kept: KeptBatches | None = None,
        before_stop: Callable[[], None] = lambda: None,
        observe: Callable[[float], None] = lambda loss: None,
    ) -> None:
        self._ranks, self._skips, self._kept, self._before_stop = ranks, skips, kept, before_stop
        self._observe = observe
        self._own: _PendingLoss | None = None  # of this rank, on its way from a GPU
        self._pending: _PendingLoss | None = None  # of all ranks
        self._losses: list[float] = []
        self._label_sums: list[float] = []
        self._in_a_row = self.num_skipped = self.signal = 0

    def add(
        self,
        step: int,
        loss: torch.Tensor,
        batch: Batch | MicroBatches | None = None,
        *,
        signal: int = 0,
        sums: torch.Tensor | None = None,
        carrier: Intake | None = None,
    ) -> str:
        """Add this rank's mean loss, a tensor [], before its backward, the number of the signal that asked it to
        stop, and its `label_sums`. Collective. With a `carrier` they travel with its next agreement: read them behind
        the step.

        Returns:
            Why the batch must be skipped; empty where it trains. The same on every rank.

        Raises:
            NotFiniteError: a rank's loss is not finite, and batches are not skipped, or too many were; on every rank.
        """
        loss = loss.detach().double()
        mine = torch.stack([loss, torch.full_like(loss, signal)])
        mine = mine if sums is None else torch.cat([mine, sums])
        on_cpu = mine.device.type == "cpu"
        if carrier is not None:
            self.read_travelled()
            own = _PendingLoss.of(step, batch, mine)
            there, self._own = (own, None) if on_cpu else (self._own, own)
            if there is not None:
                self._send(there, carrier)
            return ""
        self.read()
        self._pending = _PendingLoss.of(step, batch, self._ranks.all_gather(mine))
        return self.read_travelled() if on_cpu or self._skips else ""

    def _send(self, own: _PendingLoss, carrier: Intake | None = None) -> None:
        """Let numbers of a step travel; where nothing carries them, by a collective of their own."""
        numbers = own.arrived()

        def arrived() -> list[Any]:
            if carrier is not None and (found := carrier.carried()) is not None:
                return found
            values = torch.tensor(numbers, dtype=torch.float64, device=self._ranks.device)
            return self._ranks.all_gather(values).tolist()  # type: ignore[no-any-return]

        if carrier is not None:
            carrier.carry(numbers)
        self._pending = _PendingLoss(own.number, own.batch, arrived)

    def check_before_save(self, step: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Wait for the losses of all steps so far, and read the dense parameters that they left.

        Args:
            step: steps trained.
            parameters: the same on all ranks.

        Raises:
            NotFiniteError: one is not finite, so no checkpoint may have what was trained.
        """
        self.read()
        wrong = [name for name, values in parameters.items() if not bool(torch.isfinite(values).all())]
        if wrong:
            raise NotFiniteError(
                f"Step {step}: {len(wrong)} of {len(parameters)} dense parameters are not finite, {wrong[0]!r} among "
                f"them: no checkpoint is written. {self._advice()}"
            )

    def mean(self) -> float:
        """Wait for the losses since the last call and return their mean over steps and ranks; NaN without any."""
        self.read()
        losses, self._losses = self._losses, []
        return math.fsum(losses) / len(losses) if losses else math.nan

    def label_means(self) -> list[float | None]:
        """Return the same of each of several labels, over the samples that have it; None without any."""
        self.read()
        sums, self._label_sums = self._label_sums, []
        count = len(sums) // 2
        return [total / found if found else None for total, found in zip(sums[:count], sums[count:], strict=True)]

    def read(self) -> None:
        """Wait for all losses so far. Collective. Raises as `add`."""
        self.read_travelled()
        own, self._own = self._own, None
        if own is not None:
            self._send(own)
            self.read_travelled()

    def read_travelled(self) -> str:
        """Wait for the losses that are on their way from all ranks. Collective. Returns and raises as `add`."""
        step, self._pending = self._pending, None
        if step is None:
            return ""
        losses, signals, *sums = map(list, zip(*step.arrived(), strict=True))
        self.signal = max(self.signal, *map(int, signals))
        if all(map(math.isfinite, losses)):
            self._losses.append(math.fsum(losses) / len(losses))
            before = self._label_sums or [0.0] * len(sums)
            self._label_sums = [math.fsum([total, *ranks]) for total, ranks in zip(before, sums, strict=True)]
            self._observe(self._losses[-1])
            self._in_a_row = 0
            return ""
        self._in_a_row += 1
        rank = next(rank for rank, loss in enumerate(losses) if not math.isfinite(loss))
        problem = f"Step {step.number}: the loss of rank {rank} is {losses[rank]}."
        if self._kept is not None and step.batch is not None:
            own_is_finite = math.isfinite(losses[self._ranks.rank])
            problem += self._kept.keep(step.number, rank, None if own_is_finite else step.batch, losses)
        if self._skips and self._in_a_row <= MOST_SKIPPED_IN_A_ROW:
            self.num_skipped += 1
            self._observe(math.nan)
            return problem
        if self._skips:
            problem += f" So were those of the {MOST_SKIPPED_IN_A_ROW} batches before, which were skipped."
        self._before_stop()
        raise NotFiniteError(f"{problem} {self._advice()}")

    def _advice(self) -> str:
        return (
            "Lower the learning rates, clip (dense_optimizer.clip_norm), warm up (schedule.warmup_steps), or look for "
            f"bad data.{'' if self._kept is None else self._kept.newest_checkpoint()}"
        )


class Losses(Part):
    """Reads the losses of a run.

    Args:
        before_stop: called on every rank before the run ends by a loss.

    Attributes:
        monitor: since the last resume.
    """

    def __init__(self, run: Training, before_stop: Callable[[], None]) -> None:
        super().__init__(run)
        self._before_stop = before_stop
        self.monitor = self._begun()

    def _begun(self) -> LossMonitor:
        run = self.run
        kept = None if run.checkpoints is None else KeptBatches(run.checkpoints, run.ranks)
        skips = run.config.train.on_non_finite == "skip"
        return LossMonitor(
            run.ranks,
            skips=skips,
            kept=kept,
            before_stop=self._before_stop,
            observe=lambda loss: run.stream.observe(loss),  # the stream that is open by then
        )

    def exact(self, loss: torch.Tensor, predicted: Predicted) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `add` adds of a batch: its loss [], in float64 where it can be had, and its `label_sums`."""
        target, learns_weights = self.run.target, self.run.config.model.label_weighting != "fixed"
        return loss if learns_weights else in_float64(target, loss, *predicted), label_sums(target, *predicted)

    def add(
        self,
        loss: torch.Tensor,
        predicted: Predicted,
        batch: Batch | MicroBatches,
        known: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> str:
        """Add a batch before its backward, with what `exact` returned if that is known; return why it must be skipped,
        or nothing. Ranks learn here which of them must stop. Collective."""
        run = self.run
        exact, sums = self.exact(loss, predicted) if known is None else known
        signal, carrier = run.supervision.signal, run.upcoming.carrier
        problem = self.monitor.add(run.steps + 1, exact, batch, signal=signal, sums=sums, carrier=carrier)
        run.supervision.note_agreed(self.monitor.signal)
        return problem

    def after_step(self) -> Iterator[Report]:
        """Read losses that travelled, before anything is made of what they trained."""
        if self.run.upcoming.carrier is not None:
            self.monitor.read_travelled()
            self.run.supervision.note_agreed(self.monitor.signal)
        return iter(())

    def before_save(self) -> None:
        self.monitor.check_before_save(self.run.steps, self.run.optimizers.dense_parameters)

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        self.monitor = self._begun()

    def report_entries(self) -> dict[str, Any]:
        by_label = dict(zip(self.run.target.heads, self.monitor.label_means(), strict=False))
        return {"loss": self.monitor.mean(), "label_losses": by_label}

    def result(self) -> dict[str, Any]:
        return {"skipped_batches": self.monitor.num_skipped}


FOLDER = "non_finite"  # in the run's folder
MOST_FILES = 20  # per rank


class KeptBatches:
    """Writes batches to the run's folder.

    A file has a dict for `torch.load(path, weights_only=True)`: "step", "rank", "losses" (of all ranks), "features"
    (names, F), "dense_features" [B, D], "lengths" [F * B], "values" [N], "labels" [B] or [B, T], and "weights" [B] or
    None.

    Args:
        checkpoints: the run's folder of checkpoints; files go to the folder `FOLDER` beside it.
    """

    def __init__(self, checkpoints: Path, ranks: Ranks) -> None:
        self._checkpoints, self._ranks = checkpoints, ranks
        self._last_step = self._repeats = self._num_files = 0

    def keep(self, step: int, named_rank: int, batch: Batch | MicroBatches | None, losses: list[float]) -> str:
        """Write this rank's batch of a step; None: its loss is finite. Collective, for the same steps on all ranks.

        A step is repeated with the next batch where one was skipped: its files are numbered.

        Returns:
            A sentence of `named_rank` about its file, the same on all ranks. It begins with a space.
        """
        return self._ranks.all_gather_objects(self._keep(step, batch, losses))[named_rank]

    def _keep(self, step: int, batch: Batch | MicroBatches | None, losses: list[float]) -> str:
        self._repeats = self._repeats + 1 if step == self._last_step else 1
        self._last_step = step
        if batch is None or self._num_files >= MOST_FILES:
            return " Its batch was not kept."
        again = f"_batch_{self._repeats}" if self._repeats > 1 else ""
        path = self._checkpoints.parent / FOLDER / f"step_{step}{again}_rank_{self._ranks.rank}.pt"
        batch = Batch.joined(batch.taken) if isinstance(batch, MicroBatches) else batch
        ids = batch.sparse_features.to(torch.device("cpu"))
        content = {
            "step": step,
            "rank": self._ranks.rank,
            "losses": losses,
            "features": ids.keys(),
            "dense_features": batch.dense_features.cpu(),
            "lengths": ids.lengths(),
            "values": ids.values(),
            "labels": batch.labels.cpu(),
            "weights": None if batch.weights is None else batch.weights.cpu(),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:  # torch's own errors of files are RuntimeErrors
                torch.save(content, file)
        except OSError as error:
            return f" Its batch could not be written to {path} ({error.strerror})."
        self._num_files += 1
        return f" Its batch is in {path}."

    def newest_checkpoint(self) -> str:
        """Return a sentence with the newest complete checkpoint. It begins with a space."""
        complete = complete_checkpoints(self._checkpoints)
        return f" The newest checkpoint is {complete[-1]}." if complete else " There is no checkpoint."
