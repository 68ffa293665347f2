"""Compares a checkpoint with the run that goes on from it, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embershard.data import Source, StreamState
from embershard.earlier_settings import with_current_names
from embershard.errors import CheckpointError
from embershard.training.checkpoint.identity import (
    BATCH,
    ORDER,
    PLAIN,
    Change,
    changes,
    global_batch,
    refusal,
    tables_of,
)
from embershard.training.checkpoint.saved_run import SavedRun
from embershard.training.config import RunConfig


@dataclass(frozen=True)
class Comparison:
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
) -> Comparison:
    """Compare a checkpoint with the run of `config`, whose identity is `identity`; settings in `allowed` may differ.

    Raises:
        CheckpointError: the checkpoint is of a model with other tables, of a run with other settings or data, or its
            global batch cannot be shared evenly by the ranks.
    """
    saved.check_tables(checkpoint, tables_of(config, source.schema))
    was = {ORDER: PLAIN, **with_current_names(saved.identity)}  # earlier versions had no other
    kept = config
    if BATCH not in allowed:
        kept = _with_global_batch(checkpoint, config, was.get(BATCH), saved, world_size)
    now = {**identity, BATCH: global_batch(kept, world_size)}
    found = changes(was, now)
    if refused := [change for change in found if change.key not in allowed]:
        raise CheckpointError(f"{checkpoint} was saved by a run with other settings:\n{refusal(refused)}")
    same_data = not any(change.key.startswith("data.") for change in found)
    saved.check_position(checkpoint, source.chunks("train").num_samples, same_data=same_data)
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
    return Comparison(kept, now, tuple(replace(change, step=saved.step) for change in found), tuple(notes), stream)


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
