"""`SavedRun`: the state of a run in a checkpoint's scalars, and its comparison with the run that goes on from it.

Both are checked before anything of the checkpoint is loaded.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from embershard.data import Source, StreamState
from embershard.data.sources.source import GrowingSource
from embershard.distributed import damaged_scalars, read_scalars, step_of
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.errors import CheckpointError, DataError
from embershard.metrics.figures import Judge
from embershard.models.config import EARLIER_DEEPFM
from embershard.settings.decoding import decode, field_types
from embershard.training.checkpoint.identity import (
    BATCH,
    ORDER,
    PLAIN,
    RULES,
    SEED,
    Change,
    changes,
    global_batch,
    refusal,
    tables_of,
    value_of,
)
from embershard.training.config import RunConfig

#: Of checkpoints of earlier versions, which had no other order.
_EARLIER = {
    ORDER: PLAIN,
    "model.activation": "relu",
    **{key: value_of(RunConfig(), key) for key in RULES if key.startswith(("data.follow", "data.time."))},
}
#: The entry of a source that grows: what of it has trained.
SOURCE_STATE = "followed"
#: Parts of a position that every checkpoint has.
_POSITION = ("epoch", "global_sample", "seed")


@dataclass(frozen=True)
class EvaluationProgress:
    """What the evaluations so far have shown. Checkpoints have it, so that a resumed run decides as one that was not
    interrupted.

    Attributes:
        metric: the figure that decides.
        step: of the last evaluation; None so far.
        best: the first of the best ones; None while the figure was undefined.
        num_worse: evaluations after it.
    """

    metric: str
    step: int | None = None
    best: BestEvaluation | None = None
    num_worse: int = 0

    def after(self, evaluation: BestEvaluation | int, judge: Judge) -> EvaluationProgress:
        """Return the progress after one more evaluation, given by its step alone where its figure is undefined.

        >>> first = EvaluationProgress("auc").after(BestEvaluation(10, "auc", 0.7), Judge("auc"))
        >>> second = first.after(BestEvaluation(20, "auc", 0.7), Judge("auc")).after(30, Judge("auc"))
        >>> second.best.step, second.num_worse, second.step
        (10, 2, 30)
        """
        if isinstance(evaluation, int):
            return EvaluationProgress(self.metric, evaluation, self.best, self.num_worse + 1)
        if judge.is_better(evaluation.value, None if self.best is None else self.best.value):
            return EvaluationProgress(self.metric, evaluation.step, evaluation)
        return EvaluationProgress(self.metric, evaluation.step, self.best, self.num_worse + 1)


@dataclass(frozen=True)
class SavedRun:
    """State of a saved run, and its setup.

    Attributes:
        step, samples: trained by then.
        stream: the position in the data.
        tables: rows and dim of every sparse feature's table.
        settings: those that are compared on a resume; of earlier versions, some of them.
        world_size: number of ranks.
        rng: the states of each rank's random number generators, in base64, by device.
        changes: settings that were changed on request by earlier resumes.
        rank_batch_size: samples per rank and step that the settings asked for, though resumes on other ranks may have
            kept the samples per step; None where they gave these, and in earlier versions.
        evaluations: what those up to this step have shown; None in earlier versions.
        of_parts: entries of other parts of the run, by name.

    Raises:
        CheckpointError: a number is out of its range, or a generator's state is missing or damaged.
    """

    step: int
    samples: int
    stream: StreamState
    tables: dict[str, tuple[int, int]]
    settings: dict[str, Any]
    world_size: int
    rng: tuple[dict[str, str], ...]
    changes: tuple[Change, ...] = ()
    rank_batch_size: int | None = None
    evaluations: EvaluationProgress | None = None
    of_parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {"step": self.step, "samples": self.samples, "world_size": self.world_size}
        numbers |= {f"stream.{name}": getattr(self.stream, name) for name in _POSITION}
        for name, value in numbers.items():
            least = 1 if name == "world_size" else 0
            _need(value >= least, name, value, f"at least {least}")
        _need(self.samples < 2**63, "samples", self.samples, "less than 2^63")
        if packed := self.stream.packed:
            most = self.stream.global_sample
            _need(packed.hot_samples <= most, "stream.packed.hot_samples", packed.hot_samples, f"at most {most}")
        for name in ("step", "stream.epoch"):  # each takes a sample at least
            _need(numbers[name] <= self.samples, name, numbers[name], f"at most {self.samples} (samples)")
        _need(len(self.rng) == self.world_size, "rng", f"{len(self.rng)} ranks", f"{self.world_size} (world_size)")
        for rank, states in enumerate(self.rng):
            _need("cpu" in states, f"rng[{rank}]", list(states), "a state for 'cpu'")
            for device, text in states.items():
                _need(_is_state(device, text), f"rng[{rank}].{device}", text, "a generator's state in base64")

    @staticmethod
    def read(checkpoint: Path) -> SavedRun:
        """Read the scalars of a checkpoint.

        Raises:
            InvalidCheckpointError: the scalars cannot be read, or an entry of them is missing or wrong.
            CheckpointError: they are of a model that is no more.
        """
        scalars = read_scalars(checkpoint)
        values = {name: scalars[name] for name in field_types(SavedRun) if name in scalars}
        values["of_parts"] = {
            key: value for key, value in scalars.items() if key not in values and isinstance(value, dict)
        }
        try:
            if isinstance(stream := values.get("stream"), dict):  # no part of a position has a default
                for name in _POSITION:
                    _need(name in stream, f"stream.{name}", "nothing", "integer")
            saved = decode(SavedRun, values, CheckpointError)
            _need(saved.step == step_of(checkpoint), "step", saved.step, f"that of {checkpoint.name}")
        except (CheckpointError, DataError) as error:
            raise damaged_scalars(checkpoint, str(error)) from error
        if saved.settings.get("model.arch") == "deepfm" and "model.activation" not in saved.settings:
            raise CheckpointError(f"{checkpoint}: {EARLIER_DEEPFM}")
        return saved

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that are compared, by name."""
        return {SEED: self.stream.seed, **self.settings}

    def check_tables(self, checkpoint: Path, tables: dict[str, tuple[int, int]]) -> None:
        """Raise unless the tensors of the checkpoint fit these tables.

        Raises:
            CheckpointError: with both sides.
        """
        different = (name for name in sorted(self.tables.keys() | tables) if self.tables.get(name) != tables.get(name))
        if (name := next(different, None)) is not None:
            sizes = (found.get(name) for found in (self.tables, tables))
            was, now = (f"{size[0]} rows x {size[1]}" if size else "no table" for size in sizes)
            raise CheckpointError(
                f"{checkpoint} does not fit: feature {name!r} has {was} in it, {now} in this run. "
                "Resume with the config and data it was written with."
            )

    def check_position(self, checkpoint: Path, source: Source, *, same_data: bool = True) -> None:
        """Raise unless the position is within the training data of `source`; of one that grows, within what of it the
        run trained on.

        Args:
            same_data: False if the epochs before had other data.

        Raises:
            CheckpointError: with both sides.
        """
        if isinstance(source, GrowingSource):
            source.check_state(checkpoint, self.of_parts.get(SOURCE_STATE))
        num_samples = source.chunks("train").num_samples
        at, most = self.stream.global_sample, self.stream.epoch * num_samples + self.stream.global_sample
        if at > num_samples or (same_data and self.samples > most):
            raise CheckpointError(
                f"{checkpoint} does not fit: it was saved after {self.samples} samples, at sample {at} of epoch "
                f"{self.stream.epoch}, and the training data have {num_samples} samples. Resume with its own data."
            )


@dataclass(frozen=True)
class SettingsComparison:
    """A checkpoint's settings beside those of the run that goes on from it.

    Attributes:
        config: of the run, with the checkpoint's global batch where only the number of ranks is another.
        identity: of the run with this config.
        changes: differences that were allowed.
        notes: what the reader should know of the comparison, as sentences.
        stream: the position to go on from.
    """

    config: RunConfig
    identity: dict[str, Any]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    stream: StreamState


def compare(
    checkpoint: Path,
    saved: SavedRun,
    config: RunConfig,
    identity: Mapping[str, Any],
    source: Source,
    world_size: int,
    allowed: Collection[str],
) -> SettingsComparison:
    """Compare a checkpoint with the run of `config`, whose identity is `identity`; settings in `allowed` may differ.

    Raises:
        CheckpointError: the checkpoint is of a model with other tables, of a run with other settings or data, or its
            global batch cannot be shared evenly by the ranks.
    """
    saved.check_tables(checkpoint, tables_of(config, source.schema))
    was = {**_EARLIER, **saved.identity}
    kept = config
    if BATCH not in allowed:
        kept = _with_global_batch(checkpoint, config, was.get(BATCH), saved, world_size)
    now = {**identity, BATCH: global_batch(kept, world_size)}
    found = changes(was, now)
    if refused := [change for change in found if change.key not in allowed]:
        raise CheckpointError(f"{checkpoint} was saved by a run with other settings:\n{refusal(refused)}")
    same_data = not any(change.key.startswith("data.") for change in found)
    saved.check_position(checkpoint, source, same_data=same_data)
    notes = [f"Changed, as allowed: {change.key} was {change.saved} and is {change.now} now." for change in found]
    if kept != config:
        notes.append(
            f"The samples per step stay {now[BATCH]}, now on {world_size} ranks instead of {saved.world_size}: "
            f"{now[BATCH] // world_size} per rank."
        )
    is_other_kind = any(change.key == "data.kind" for change in found)  # whose settings the checkpoint does not need
    if not is_other_kind and (missing := sorted(now.keys() - was.keys())):
        notes.append(
            f"{checkpoint} was written by an earlier version, without {len(missing)} settings that are compared now "
            f"({', '.join(missing[:3])}, ...): whether they changed is not known."
        )
    is_same_order, position = was[ORDER] == now[ORDER], saved.stream
    is_inside = 0 < position.global_sample <= source.chunks("train").num_samples - now[BATCH]
    if is_inside and not is_same_order and was[ORDER] != PLAIN:
        notes.append(
            f"{checkpoint} is {position.global_sample:,} samples into an epoch of hot and cold batches, and the rest "
            "of the epoch is in another order: some samples come twice in it, and others not at all. Later epochs have "
            "every sample once. To avoid it, go on from a checkpoint at the end of an epoch."
        )
    stream = replace(saved.stream, seed=config.data.seed, packed=saved.stream.packed if is_same_order else None)
    return SettingsComparison(
        kept, now, tuple(replace(change, step=saved.step) for change in found), tuple(notes), stream
    )


def _with_global_batch(
    checkpoint: Path, config: RunConfig, batch: int | None, saved: SavedRun, ranks: int
) -> RunConfig:
    """Return the config with the saved global batch, if it asks for the samples per rank of the run's settings: a
    resume on other ranks kept the global batch, and so does one that goes on from there.

    Raises:
        CheckpointError: the ranks cannot share the batch evenly.
    """
    train = config.train
    if batch is None or train.global_batch_size is not None:
        return config
    asked = train.rank_batch_size(ranks)
    if asked != (saved.rank_batch_size or batch / saved.world_size) or asked * ranks == batch:
        return config
    if batch % ranks:
        raise CheckpointError(
            f"{checkpoint} was saved with {batch} samples per step on {saved.world_size} ranks, and {ranks} ranks "
            f"cannot share them evenly. Use a number of ranks that divides {batch}, or another batch: --set "
            f"train.batch_size=none --set train.global_batch_size={batch // ranks * ranks or ranks} "
            f"--allow-change {BATCH}"
        )
    return replace(config, train=replace(train, batch_size=None, global_batch_size=batch))


def _need(holds: bool, key: str, got: object, needed: str) -> None:
    if not holds:
        raise CheckpointError(f"{key}: got {got!r:.60}, needed {needed}")


def _is_state(device: str, text: str) -> bool:
    try:
        state = base64.b64decode(text, validate=True)
    except ValueError:
        return False
    if device != "cpu":
        return bool(state)
    try:
        torch.Generator().set_state(torch.tensor(list(state), dtype=torch.uint8))
    except RuntimeError:
        return False
    return True
