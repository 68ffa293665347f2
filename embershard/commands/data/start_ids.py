"""`embershard data ids`: the start of a run with tables of ids from one that hashed these ids onto rows."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.cache import loops
from embershard.cache.ids.config import IdTable
from embershard.data import open_source
from embershard.data.hashing import MISSING_ID, Ids, map_ids
from embershard.data.order.stream import SampleReader
from embershard.data.sources.kinds import serving_inputs
from embershard.distributed import load_tensors, process_group, saved_sizes, saved_tensors, without_empty
from embershard.distributed.checkpoint.load import saved_rows
from embershard.errors import ConfigError, naming_file
from embershard.launch.run_dir import check_run_dir
from embershard.launch.screen import plain_console, say, silence_libraries
from embershard.settings.decoding import to_record
from embershard.settings.files import CHECKPOINTS, RUN_CONFIG, load_config
from embershard.sharding.torchrec.checkpoints import RowStates
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.fit.model_size import tables_of_run
from embershard.training.trained_run import open_trained
from embershard.training.trainer import Trainer

_BLOCK = 1 << 16
_STATES = "embedding_optimizer"
_MOST_COUNT = 2**31 - 1


def start_ids(arguments: argparse.Namespace) -> int:
    """Run `embershard data ids`; return 0.

    Raises:
        EmbershardError: the runs do not fit, or something cannot be read or written.
    """
    if arguments.config is None:
        raise ConfigError("what are the new run's settings? Give --config.")
    check_run_dir(arguments.output, resume=False)
    silence_libraries()
    old = load_config(RunConfig, arguments.run_dir / RUN_CONFIG, run_dir=arguments.run_dir)
    config = load_config(RunConfig, arguments.config, arguments.overrides)
    mappings = _mappings(old, config)
    with process_group("cpu") as ranks:
        trained = open_trained(old, arguments.run_dir / CHECKPOINTS, ranks, arguments.step)
        trainer = Trainer(config, ranks, arguments.output / CHECKPOINTS)
        try:
            given = _fill(trainer, trained.checkpoint, mappings)
            trainer.save()
            with naming_file(arguments.output / RUN_CONFIG):
                (arguments.output / RUN_CONFIG).write_text(to_record(config), encoding="utf-8")
        finally:
            trainer.close()
    go_on = f"embershard train --config {arguments.config} --run-dir {arguments.output} --resume"
    say(plain_console(), *(f"{table}: {text}." for table, text in given.items()), f"Go on: {go_on}")
    return 0


def _mappings(old: RunConfig, config: RunConfig) -> dict[str, tuple[str, int]]:
    """Return of each table of ids the mapping of its ids onto rows in the old run, and the number of these."""
    was = {feature["name"]: feature for feature in serving_inputs(old.data)["sparse"]}
    now = {feature["name"]: feature["mapping"] for feature in serving_inputs(config.data)["sparse"]}
    found, rules = {}, id_rules(config)
    if not rules:
        raise ConfigError('the new run has no table of ids. Give a feature the mapping "ids" or "text_ids".')
    for table in tables_of_run(config):
        for feature in table.features if table.name in rules else ():
            before = was.get(feature, {"mapping": "nothing", "id_base": 10})
            fitting = ("text",) if now[feature] == "text_ids" else ("hash", "modulo")
            if before["mapping"] not in fitting or before["id_base"] != 10:
                raise ConfigError(
                    f"feature {feature!r} has the mapping {now[feature]!r} and had {before['mapping']!r}; needed "
                    f"{' or '.join(fitting)} in the old run, of the same values."
                )
            found[table.name] = before["mapping"], before["num_rows"]
    return found


def _fill(trainer: Trainer, checkpoint: Path, mappings: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Give a run that has not begun the model in a checkpoint; return of each table of ids what it got, as text."""
    config, dense = trainer.config, trainer.optimizers.dense
    dense.init_state()  # its tensors must exist to be loaded into
    dense.zero_grad()
    tensors, rules, said = trainer.state.tensors(), id_rules(config), {}
    tables = {table.tensor.rpartition(".")[0]: table for table in tables_of_run(config) if table.name in mappings}
    rest = {
        group: {name: value for name, value in values.items() if name.rpartition(".")[0] not in tables}
        for group, values in tensors.items()
    }
    num_rows = {name: value.size(0) for name, value in rest["model"].items() if value.dim()}
    states = RowStates(rest[_STATES], saved_sizes(saved_tensors(checkpoint), _STATES), num_rows)
    load_tensors(checkpoint, without_empty({**rest, _STATES: states.to_load}))
    states.spread()
    counted = _count(config, [table.features for table in tables.values()])
    for (place, table), (ids, counts) in zip(tables.items(), counted, strict=True):
        records, rows, given = _records(table.name, table.num_rows, rules[table.name], ids, counts)
        whole(tensors["model"][f"{place}.ids"]).copy_(records)
        old = hashed_rows(given, *mappings[table.name])
        values = {f"model.{table.tensor}": tensors["model"][table.tensor]}
        values |= {f"{_STATES}.{table.tensor}.{name}": value for name, value in tensors[_STATES][table.tensor].items()}
        for name, value in values.items():
            _copy_rows(checkpoint, name, mappings[table.name][1], old, rows, whole(value))
        said[table.name] = f"{len(given):,} of {len(ids):,} ids have a row"
    trainer.model.load_state_dict(tensors["model"])
    trainer.model.fused_optimizer.load_state_dict({"state": tensors[_STATES]})
    dense.load_state_dict({"state": tensors["dense_optimizer"]})
    return said


def whole(value: ShardedTensor) -> Tensor:
    """Return a table's tensor, which the one rank has whole."""
    (shard,) = value.local_shards()
    return shard.tensor.detach()


def _copy_rows(checkpoint: Path, name: str, num_rows: int, old: Ids, rows: Ids, into: Tensor) -> None:
    """Copy rows `old` of a saved tensor to the `rows` of a new one; the others get the mean of all, or a state of 0."""
    saved = torch.cat(list(saved_rows(checkpoint, name)))
    if saved.dim() == 1:
        saved = saved.view(-1, num_rows).mean(0)  # one per row and shard of its columns
    into[:] = saved.mean(0) if name.startswith("model.") else 0
    into[torch.from_numpy(rows)] = saved[torch.from_numpy(old)]


def _count(config: RunConfig, tables: Sequence[Sequence[str]]) -> list[tuple[Ids, Ids]]:
    """Return the ids that features of each table have in the samples to train on, ascending, and how often."""
    source = open_source(config.data)
    keys, found = source.schema.keys, [(np.empty(0, np.int64), np.empty(0, np.int64)) for _ in tables]
    for block in SampleReader(source, "train", config.data).blocks(source.chunks("train").num_samples, _BLOCK):
        for number, features in enumerate(tables):
            new = np.concatenate([block.values[keys.index(feature)] for feature in features])
            ids, places = np.unique(np.concatenate([found[number][0], new]), return_inverse=True)
            counts = np.zeros(len(ids), np.int64)
            np.add.at(counts, places, np.concatenate([found[number][1], np.ones(len(new), np.int64)]))
            found[number] = ids, counts
    return found


def hashed_rows(ids: Ids, mapping: str, num_rows: int) -> Ids:
    """Return the rows that ids had in a run which hashed them.

    >>> import numpy as np
    >>> hashed_rows(np.array([-(2**63) + 1, 5, 25]), "modulo", 11)  # a missing value; two ids of one row
    array([0, 6, 6])
    """
    rows = map_ids(ids, num_rows, "hash" if mapping == "hash" else "modulo")
    return np.where(ids == MISSING_ID, 0, rows)


def _records(table: str, num_rows: int, rules: IdTable, ids: Ids, counts: Ids) -> tuple[Tensor, Ids, Ids]:
    """Return a table's ids as a state dict has them before the first batch, and the rows that were given, with their
    ids: of each bucket the most frequent ones, as far as there is room."""
    from embershard.cache.ids.id_map import mixed  # of a capability that may be taken out

    layout, words, buckets = rules.buckets_of(table, num_rows), mixed(ids), np.empty(len(ids), np.int64)
    loops.buckets_of_ids(words, layout.num_buckets, buckets)
    order = np.lexsort((words, -counts, buckets))
    ranks = np.arange(len(ids)) - np.searchsorted(buckets[order], buckets[order])
    given = order[ranks < layout.rows - 1 - layout.reserve]
    rows = buckets[given] * layout.rows + 1 + ranks[ranks < layout.rows - 1 - layout.reserve]
    records = np.zeros((num_rows, 2), np.int64)
    records[:, 1] = -1
    records[rows, 0], records[rows, 1] = words[given], np.minimum(counts[given], _MOST_COUNT) << 32
    return torch.from_numpy(records), rows, ids[given]
