"""`save_program` and `load_program`: checkpoints of a TorchRec program, wherever its rows are."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from embershard.distributed import (
    Ranks,
    TensorBlocks,
    load_tensors,
    read_scalars,
    save_checkpoint,
    saved_sizes,
    saved_tensors,
    set_aside,
    step_of,
    verify_checkpoint,
    without_empty,
)
from embershard.distributed.checkpoint.folder import checkpoint_at, checkpoints_for
from embershard.distributed.checkpoint.load import SCALARS, newest_valid, verify_alone, without_known_warnings
from embershard.distributed.checkpoint.manifest import METADATA
from embershard.errors import CheckpointError, ConfigError, InvalidCheckpointError
from embershard.sharding.torchrec import cached_embeddings, freeze, without_flushes
from embershard.sharding.torchrec.checkpoints import RowStates
from embershard.training.checkpoint.blocks_of_rows import (
    check_all_parts,
    load_rows_elsewhere,
    without_rows_elsewhere,
)
from embershard.training.checkpoint.host_rows import load_weights, taking_references

_MODEL, _OPTIMIZER, _STATES = "model", "optimizer", "optimizer.state"


def save_program(
    folder: str | Path,
    step: int,
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer,
    *,
    scalars: Mapping[str, Any] | None = None,
    keep_last: int = 2,
) -> Path:
    """Write the checkpoint `folder/step_<step>` of a program and return it. All ranks call it, between two steps.

    Rows are read block by block where they are, on the device, in memory or in a file (`cache.host = "file"`), and stay
    there. The checkpoint is one of torch.distributed.checkpoint with the state dicts of `model` and `optimizer`, by
    these names, and a manifest of checksums: it is complete, or not there.

    Args:
        folder: of the checkpoints; all ranks can write there.
        step: steps trained so far.
        optimizer: with the states of the tables and of the dense layers: a `CombinedOptimizer` of
            `model.fused_optimizer` and the program's own.
        scalars: JSON values, the same on all ranks, which `load_program` returns.
        keep_last: complete checkpoints to keep in the folder, this one included.

    Raises:
        ConfigError: rows are small, or those of groups differ, or the optimizer has no states of tables whose rows are
            in files.
        CheckpointError: a sound checkpoint of this step is there, or something in a state dict is no tensor.
        FailedSaveError: on all ranks: a rank could not write; earlier checkpoints are as they were.

    >>> save_program("saved_program", 1, model, model.fused_optimizer).name  # a sharded model
    'step_1'
    """
    _refuse_rounded(model)
    if not getattr(model, "rows_are_equal", True):
        raise ConfigError("rows of the groups differ since their last average; save behind one (model.sync() makes it)")
    ranks, rows = _ranks(model), freeze(model)
    with ExitStack() as closing:
        for frozen in rows:
            closing.callback(frozen.close)
        with without_flushes(model), without_known_warnings():  # written back already; made as they are read
            tensors = {_MODEL: model.state_dict(), _OPTIMIZER: optimizer.state_dict()}
        check_all_parts(model, tensors)
        run_id = ranks.from_first(lambda: uuid.uuid4().hex)
        ranks.from_first(lambda: _set_aside(Path(folder), step))
        blocks = TensorBlocks(without_empty(tensors), rows)
        return save_checkpoint(
            Path(folder), step, blocks, dict(scalars or {}), ranks, keep_last=keep_last, run_id=run_id
        )


def load_program(
    folder: str | Path,
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer,
    *,
    step: int | None = None,
    allow_unverified: bool = False,
) -> dict[str, Any]:
    """Load a program's checkpoint, and return its scalars, "step" among them. All ranks call it, between two steps.

    Any number of ranks may have written it, with any plan, and with rows in memory or in a file.

    Args:
        folder: as for `save_program`, of which the newest sound checkpoint is loaded; or one checkpoint in it.
        optimizer: as for `save_program`. Optimizers of dense layers have their states first: `init_state()`.
        step: only the checkpoint of this step.
        allow_unverified: also take one without a manifest: what torch.distributed.checkpoint saved as
            `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`. It has no scalars.

    Raises:
        ConfigError: as `save_program`; or a step of what is one checkpoint.
        InvalidCheckpointError: on all ranks: a file of each checkpoint is missing or damaged. Nothing was changed.
        CheckpointError: there is none; or it is of another model, or has states that the optimizer has not.

    >>> saved = save_program("loaded_program", 1, model, model.fused_optimizer)  # a sharded model
    >>> load_program("loaded_program", model, model.fused_optimizer)["step"]
    1
    """
    _refuse_rounded(model)
    ranks = _ranks(model)
    path = _newest_sound(Path(folder), step, ranks, allow_unverified)
    for pool in cached_embeddings(model):
        pool.write_back()  # trained rows would be lost unseen, and count as such
    with taking_references(model), without_known_warnings():
        tensors = {_MODEL: model.state_dict(), _OPTIMIZER: optimizer.state_dict()}
    check_all_parts(model, tensors)
    saved, others = saved_tensors(path), {k: v for k, v in tensors[_OPTIMIZER].items() if k != "state"}
    _check_states(path, saved_sizes(saved, _STATES), tensors[_OPTIMIZER]["state"], ranks)
    with without_known_warnings():
        sizes = {name: value.size(0) for name, value in tensors[_MODEL].items() if isinstance(value, ShardedTensor)}
        in_memory = without_rows_elsewhere(model, tensors)
        states = RowStates(in_memory[_OPTIMIZER].get("state", {}), saved_sizes(saved, _STATES), sizes)
        wanted = {_MODEL: in_memory[_MODEL], _OPTIMIZER: {**others, "state": states.to_load}}
        load_tensors(path, without_empty(wanted))
        states.spread()
    load_rows_elsewhere(model, path, tensors)
    load_weights(model, in_memory[_MODEL])
    with without_known_warnings():
        optimizer.load_state_dict(tensors[_OPTIMIZER])
    return ranks.from_first(lambda: read_scalars(path) if (path / SCALARS).exists() else {})


def _newest_sound(folder: Path, step: int | None, ranks: Ranks, allow_unverified: bool) -> Path:
    """Return the checkpoint to load; all ranks have verified it together."""
    verify = partial(verify_checkpoint, ranks=ranks, allow_unverified=allow_unverified)
    if step_of(folder) is not None or ranks.from_first((folder / METADATA).exists):
        if step is not None:
            raise ConfigError(f"step={step} has no effect: {folder} is one checkpoint. Leave it out.")
        verify(folder)
        return folder
    candidates = ranks.from_first(lambda: checkpoints_for(folder, step))
    used, skipped = newest_valid(candidates, verify)
    if used is None and skipped:
        raise InvalidCheckpointError(f"{folder}: no checkpoint is sound: {'; '.join(skipped)}.")
    if used is None:
        raise CheckpointError(f"{folder}: no complete checkpoint is there; needed one that save_program wrote.")
    if skipped and ranks.is_first:
        warnings.warn(f"{used[0].name} is loaded, as newer ones are damaged: {'; '.join(skipped)}.", stacklevel=3)
    return used[0]


def _ranks(model: DistributedModelParallel) -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, size, rank, size, model.device)


def _set_aside(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps, and a damaged one of this step: a program went on from an older one."""
    first = step
    if (same := checkpoint_at(folder, step)).exists():
        try:
            verify_alone(same)
        except InvalidCheckpointError:
            first = step - 1
    if names := set_aside(folder, first):
        warnings.warn(f"{folder}: checkpoints from step {step} on are renamed to {', '.join(names)}.", stacklevel=5)


def _refuse_rounded(model: DistributedModelParallel) -> None:
    rounded = {table for pool in cached_embeddings(model) if pool.host.rounds for table in pool.cache.tables}
    if rounded:
        raise ConfigError(
            f'cache.host_dtype: got small rows for tables {sorted(rounded)}, needed "fp32" where a program saves and '
            "loads its rows. embershard train saves small rows"
        )


def _check_states(checkpoint: Path, saved: Mapping[str, Any], states: Mapping[str, Any], ranks: Ranks) -> None:
    mine = {f"{name}.{state}" for name, values in states.items() for state in values}
    own = set[str]().union(*ranks.all_gather_objects(mine))  # a rank has the states of its shards only
    left = sorted(name for name in saved if not any(name == each or name.startswith(f"{each}.") for each in own))
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise CheckpointError(
            f"{checkpoint} has states that the optimizer has not: {', '.join(left[:3])}{more}. Give the optimizer that "
            "was saved; one of dense layers makes its states by init_state(), which comes first"
        )
