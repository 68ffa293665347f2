"""`load_from`: a warm start of a TorchRec program's model, by the names and sizes of its tables and layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from embershard.cache.ids.config import IdTable
from embershard.distributed.checkpoint.load import without_known_warnings
from embershard.errors import ConfigError
from embershard.extras.warm_start.shapes import MODEL, shape_of
from embershard.extras.warm_start.source import TrainedModel, open_model
from embershard.extras.warm_start.start import PlannedStart, fill_model, init_states, planned
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training.checkpoint.host_rows import taking_references
from embershard.training.warm_start import IN_PROGRAM, Step, WarmStart

_ROW_STATES, _DENSE_STATES = "embedding_optimizer", "dense_optimizer"


def load_from(
    model: DistributedModelParallel,
    path: str | Path,
    *,
    step: Step = None,
    renames: Mapping[str, str] = {},
    without: Iterable[str] = (),
    dense_optimizer: KeyedOptimizer | None = None,
    allow_unverified: bool = False,
) -> PlannedStart:
    """Fill a sharded model that has not trained from a trained one. All ranks call it.

    Tables are matched by name, and may have more rows; layers by their name in the state dict, of equal sizes. What
    only the new model has stays as it is.

    Args:
        model: with cached sharders or TorchRec's own.
        path: folder of a run, of an export, or of a checkpoint, which has the model's state dict as "model", and
            states of its optimizers as "embedding_optimizer" and "dense_optimizer".
        step: of a run's checkpoint; "best": that of the best evaluation; None: the newest valid one.
        renames: by an old name the new one, of tables, layers, or of what names of layers begin with.
        without: such names that begin anew; "optimizer": the states of both optimizers do.
        dense_optimizer: of the dense layers, keyed by their names; None: its states begin anew.
        allow_unverified: also take a checkpoint without a manifest, as torch.distributed.checkpoint saves it.

    Returns:
        What was taken; as text, a line for everything that is not as it was.

    Raises:
        ConfigError: something cannot be taken: all of it is in the message, and nothing was changed.
        CheckpointError: there is nothing to take from, or it is damaged.

    >>> import torch.distributed.checkpoint as dcp
    >>> _ = dcp.save({"model": model.state_dict()}, checkpoint_id="saved")  # a sharded model
    >>> print(load_from(model, "saved", allow_unverified=True))
    From saved: 1 table taken; 2 layers taken.
    ...
    """
    if dense_optimizer is not None and not isinstance(dense_optimizer, KeyedOptimizer):
        raise ConfigError(f"dense_optimizer: got {type(dense_optimizer).__name__}, needed a KeyedOptimizerWrapper.")
    start = WarmStart(Path(path), step, tuple(renames.items()), tuple(without), words=IN_PROGRAM)
    trained = open_model(start.path, step, allow_unverified=allow_unverified)
    if dense_optimizer is not None and start.has_states and trained.has_states:
        init_states(dense_optimizer)
    _refuse_files(model)
    tensors = partial(_tensors, model, dense_optimizer)
    with taking_references(model):  # only sizes are read
        plan = _planned(start, trained, tensors(), _id_rules(model), has_dense=dense_optimizer is not None)
    fill_model(plan, model, dense_optimizer, tensors)
    return plan


def _refuse_files(model: DistributedModelParallel) -> None:
    if any(pool.host.takes_blocks for pool in cached_embeddings(model)):
        raise ConfigError(
            'cache.host: got "file", needed "memory" or "mmap" for a model that is filled from a trained one. Fill it '
            'with cache.host = "mmap", save it by save_program, and load that by load_program where rows are in a file'
        )


def _tensors(model: DistributedModelParallel, dense_optimizer: KeyedOptimizer | None) -> dict[str, Any]:
    """Return the tensors of a checkpoint of the model, by group."""
    dense = {} if dense_optimizer is None else dense_optimizer.state_dict()["state"]
    rows = model.fused_optimizer.state_dict()["state"]
    return {"model": model.state_dict(), _ROW_STATES: rows, _DENSE_STATES: dense}


def _planned(
    start: WarmStart, trained: TrainedModel, tensors: Mapping[str, Any], ids: Mapping[str, IdTable], *, has_dense: bool
) -> PlannedStart:
    """Return the start of a model with these tensors, whose optimizers are known by the names of their states."""
    with without_known_warnings():
        shape = shape_of({f"{MODEL}{name}": value.size() for name, value in tensors["model"].items()})
    tables = {name: replace(table, has_ids=name in ids) for name, table in shape.tables.items()}
    groups = [_ROW_STATES, *([_DENSE_STATES] if has_dense else [])]
    kinds = {group: _kinds(name for states in tensors[group].values() for name in states) for group in groups}
    return planned(start, _with_kinds(trained, groups), replace(shape, tables=tables), kinds, ids)


def _with_kinds(trained: TrainedModel, groups: Iterable[str]) -> TrainedModel:
    """Return the model with the names of its states, by group, in place of the kinds of their optimizers."""
    names = list(trained.saved.sizes())
    found = {group: _kinds(name for name in names if name.startswith(f"{group}.")) for group in groups}
    return replace(trained, optimizers=found)


def _kinds(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "no states"


def _id_rules(model: nn.Module) -> dict[str, IdTable]:
    """Return the rules of the tables of ids of all ranks, by name. Collective."""
    from embershard.sharding.torchrec.ids.id_tables import maps_of  # of a capability that may be taken out

    mine = {ids.table: ids.config for pool in cached_embeddings(model) for ids in maps_of(pool)}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {table: rules for of_rank in found for table, rules in of_rank.items()}
