"""A warm start, from what was asked for to the filled model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from embershard.cache.ids.config import IdTable
from embershard.data import schema_of
from embershard.data.sources.kinds import serving_inputs
from embershard.distributed import Ranks
from embershard.distributed.checkpoint.boxes import Saved, parts_of
from embershard.distributed.checkpoint.load import without_known_warnings
from embershard.errors import ConfigError
from embershard.extras.warm_start.fill import fill_layers, fill_tables
from embershard.extras.warm_start.id_moves import clock_of, fill_ids
from embershard.extras.warm_start.matching import Entry, Matching, match, refusal, summary
from embershard.extras.warm_start.shapes import MODEL, ModelShape, shape_of
from embershard.extras.warm_start.source import TrainedModel, open_model
from embershard.models import ModelTable, build_model
from embershard.training.checkpoint.host_rows import load_weights, tensors_to_fill
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.fit.model_size import tables_of_run
from embershard.training.warm_start import OPTIMIZER, WarmStart, Words


@dataclass(frozen=True)
class PlannedStart:
    """A warm start that fits.

    Attributes:
        model: what is taken from.
        shape: of the new model.
        matching: without refusals.
        has_states: states of optimizers are taken.
        schedule_steps, state_steps: steps that the schedule, and the counts of the optimizers, begin with.
        ids: rules of the new model's tables of ids.
    """

    model: TrainedModel
    shape: ModelShape
    matching: Matching
    has_states: bool
    schedule_steps: int
    state_steps: int
    ids: Mapping[str, IdTable]

    def __str__(self) -> str:
        return summary(self.matching, self.model.title)


def plan_start(start: WarmStart, config: RunConfig, ranks: Ranks | None = None) -> PlannedStart:
    """Open and verify what to begin with, and match it with the model of the settings. Nothing sharded is built.
    Collective.

    Raises:
        ConfigError: something cannot be taken; all problems are in its message, a line each.
        CheckpointError: there is nothing to take from, or it is damaged.
    """
    model = open_model(start.path, start.step, ranks, own_tables=lambda: tables_of_run(config))
    kinds = {"embedding_optimizer": config.embedding_optimizer.kind, "dense_optimizer": config.dense_optimizer.kind}
    return planned(start, model, new_shape(config), kinds, id_rules(config))


def planned(
    start: WarmStart,
    model: TrainedModel,
    shape: ModelShape,
    kinds: Mapping[str, str],
    ids: Mapping[str, IdTable],
) -> PlannedStart:
    """Return the start of a new model from a trained one.

    Args:
        kinds: of the new model's optimizers, by their sections of the settings.

    Raises:
        ConfigError: as `plan_start`.
    """
    names = [name for name in start.without if name != OPTIMIZER]
    found = match(model.shape, shape, start.renames, names, start.words)
    entries = [_with_rules(entry, model, ids) for entry in found.entries]
    if start.has_states:
        entries += _optimizer_problems(model, kinds, start.words)
    notes = [*(f"Not used: {reason}." for reason in model.skipped), *found.notes]
    if start.has_states and not model.has_states:
        notes.append("It has no states of optimizers: they begin at 0.")
    found = Matching(tuple(entries), tuple(notes))
    if found.refused:
        raise ConfigError(refusal(found, model.title))
    has_states = start.has_states and model.has_states
    schedule_steps = model.schedule_steps if start.keep_steps else 0
    return PlannedStart(model, shape, found, has_states, schedule_steps, model.state_steps * has_states, ids)


def _optimizer_problems(model: TrainedModel, kinds: Mapping[str, str], words: Words) -> list[Entry]:
    anew = words.without.format(OPTIMIZER)
    return [
        Entry(
            "optimizer",
            section,
            "refused",
            section,
            was,
            kinds[section],
            f"states of one are none of the other. Set the kind back, or {anew} begins with none",
        )
        for section, was in (model.optimizers or {}).items()
        if was != kinds[section] and model.has_states
    ]


def _with_rules(entry: Entry, model: TrainedModel, ids: Mapping[str, IdTable]) -> Entry:
    """Return the entry of a table of ids that moves, where its rules are others, or those of before are not known."""
    if entry.kind != "table" or not entry.is_taken or entry.name not in ids:
        return entry
    if entry.fate == "moved" or ids[entry.name] != model.ids.get(entry.was):
        return replace(entry, fate="moved", why="ids get rows of their new buckets, and candidates begin anew")
    return entry


def new_shape(config: RunConfig) -> ModelShape:
    """Return the model of the settings, by building it on one device; random numbers stay as they are."""
    schema = schema_of(config.data)
    with torch.random.fork_rng(devices=[]):
        model = build_model(config.model, schema, torch.device("cpu"))
    return shape_of_module(model, config, tables_of_run(config))


def shape_of_module(model: nn.Module, config: RunConfig, tables: tuple[ModelTable, ...]) -> ModelShape:
    """Return the shape of a model that is not sharded, with what the settings say of its features."""
    schema, ids = schema_of(config.data), id_rules(config)
    shape = shape_of({f"{MODEL}{name}": value.shape for name, value in model.state_dict().items()})
    found = {name: replace(table, has_ids=name in ids) for name, table in shape.tables.items()}
    lookups = [(feature, table.name) for table in tables for feature in table.features]
    return ModelShape(found, shape.layers).with_inputs(
        serving_inputs(config.data), lookups, config.model.title, schema.target.labels
    )


def fill_model(
    plan: PlannedStart, model: Any, dense_optimizer: Any, tensors: Callable[[], dict[str, Any]]
) -> dict[str, tuple[int, int]]:
    """Fill a sharded model and its optimizers. Collective.

    What is new stays as it is in the model, and has states of 0. Small rows in host memory are rounded; those that are
    full are the new model's.

    Args:
        model: of DistributedModelParallel.
        dense_optimizer: of TorchRec's keyed ones; None: its states are not taken.
        tensors: of a checkpoint of the model, by group.

    Returns:
        Of each table of ids that was taken, on this rank: ids with a row, and those that found none.
    """
    has_dense_states = plan.has_states and dense_optimizer is not None
    if has_dense_states:
        init_states(dense_optimizer)
    found, saved, placed = tensors_to_fill(model, tensors), plan.model.saved, {}
    with without_known_warnings():
        fill_tables(found, saved, plan.model.shape, plan.shape, plan.matching, states=plan.has_states)
        fill_layers(found, saved, plan.matching, states=has_dense_states)
        placed = _fill_ids(plan, found, saved)
        load_weights(model, found["model"])
        if plan.has_states:
            model.fused_optimizer.load_state_dict({"state": found["embedding_optimizer"]})
    if has_dense_states:
        dense_optimizer.load_state_dict({"state": found["dense_optimizer"]})
    return placed


def _fill_ids(plan: PlannedStart, tensors: Mapping[str, Any], saved: Saved) -> dict[str, tuple[int, int]]:
    """Fill the tables of ids. All of a model's count batches from the same one on."""
    entries = {entry.name: entry for entry in plan.matching.of("table") if entry.name in plan.ids}
    placed, old = {}, plan.model.shape.tables
    for name, entry in entries.items():
        rules = plan.ids[name], plan.model.ids.get(entry.was)
        placed[name] = fill_ids(tensors, saved, old[entry.was], plan.shape.tables[name], *rules, states=plan.has_states)
    clock = max((clock_of(saved, old[entry.was]) for entry in entries.values()), default=0)
    for name in plan.ids:
        table = plan.shape.tables[name]
        bucket = plan.ids[name].buckets_of(name, table.num_rows).rows
        records = tensors["model"][f"{table.tensor.removeprefix(MODEL).removesuffix('weight')}ids"]
        for _, part in parts_of(records):
            part[::bucket, 0] = clock
    return placed


def init_states(optimizer: Any) -> None:
    """Make the states of a dense optimizer of TorchRec's, as before a first step: 0, but those that it has already.
    TorchRec makes them by a step, which may change parameters."""
    parameters = dict(optimizer.params)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    states = {
        (parameter, name): value.detach().clone()
        for parameter, found in optimizer.state_dict()["state"].items()
        for name, value in found.items()
    }
    optimizer.init_state()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
        for parameter, found in optimizer.state_dict()["state"].items():
            for name, value in found.items():
                value.copy_(states.get((parameter, name), torch.zeros_like(value)))
