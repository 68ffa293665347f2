"""`SavedRun`: the state of a run in a checkpoint's scalars, and its comparison with the run that goes on from it.

Both are checked before anything of the checkpoint is loaded.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from embershard.data import Source, StreamState
from embershard.data.sources.followed import FollowedSource
from embershard.data.time_config import TimeConfig
from embershard.distributed import damaged_scalars, read_scalars, step_of
from embershard.errors import CheckpointError, DataError
from embershard.models.config import EARLIER_DEEPFM
from embershard.settings.decoding import decode, field_types
from embershard.training.checkpoint.identity import (
    BATCH,
    ORDER,
    PLAIN,
    SEED,
    Change,
    changes,
    global_batch,
    refusal,
    tables_of,
)
from embershard.training.config import RunConfig
from embershard.training.parts.best import EvaluationProgress

#: Of checkpoints of earlier versions, which had no other order.
_EARLIER = {
    ORDER: PLAIN,
    "data.follow": False,
    "model.activation": "relu",
    **{f"data.time.{each.name}": each.default for each in fields(TimeConfig)},
}
#: Parts of a position that every checkpoint has.
_POSITION = ("epoch", "global_sample", "seed")


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
        published: number and token of the publication of this state; None where there was none.
        followed: number and checksum of the files of a followed folder that have trained; None without one.

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
    published: dict[str, Any] | None = None
    followed: dict[str, Any] | None = None

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
        """Raise unless the position is within the training data of `source`; of a folder that is followed, within the
        files that it trained on.

        Args:
            same_data: False if the epochs before had other data.

        Raises:
            CheckpointError: with both sides.
        """
        if isinstance(source, FollowedSource):
            source.check_state(checkpoint, self.followed)
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
    """Return the config with the saved global batch, if it asks for the saved samples per rank on other ranks.

    Raises:
        CheckpointError: the ranks cannot share the batch evenly.
    """
    train = config.train
    if batch is None or ranks == saved.world_size or train.global_batch_size is not None:
        return config
    if train.rank_batch_size(ranks) != (saved.rank_batch_size or batch / saved.world_size):
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
