"""Runs that begin with a checkpoint, as one rank of a pool of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embershard.data import StreamState
from embershard.distributed import CheckpointConfig
from embershard.distributed.checkpoint.boxes import CheckpointSaved
from embershard.settings.decoding import to_toml
from embershard.sharding.torchrec import cached_embeddings
from embershard.training.checkpoint.identity import ORDER
from embershard.training.trainer import Trainer
from embershard.training.warm_start import WarmStart
from tests.ranks.planned import here
from tests.ranks.resharding import Layout, config_of
from tests.small_rounding import round_fp16, round_int8, seed_of

SAVED_AT, MORE = 6, 4


def train(layout: Layout, folder: Path) -> None:
    """A run in `folder / "run"` that is saved at its end."""
    config = config_of(replace(layout, steps=SAVED_AT), folder)
    config = replace(config, checkpoint=CheckpointConfig())
    trainer = Trainer(config, here(), folder / "run" / "checkpoints")
    list(trainer.train())
    trainer.close()
    here().from_first(lambda: (folder / "run" / "config.toml").write_text(to_toml(config)))


def go_on(layout: Layout, folder: Path, copy: Path, *, how: str, control: str = "") -> None:
    """Train `MORE` steps on the samples from the first one on, and save at the end.

    Args:
        how: "start": begin with the run; "resume": go on from it, and forget the position in the data.
        control: "states": a start forgets them.
    """
    resumes = how == "resume"
    config = config_of(replace(layout, steps=MORE + SAVED_AT * resumes), folder)
    config = replace(config, checkpoint=CheckpointConfig())
    without = ("optimizer",) if control == "states" else ()
    begin = WarmStart(folder / "run", without=without, keep_steps=True)
    options: dict[str, Any] = {} if resumes else {"start": begin}
    trainer = Trainer(config, here(), copy, **options)
    if resumes:
        changes = {ORDER, "cache.host_dtype", "cache.full_rows"}
        trainer.resume(folder / "run" / "checkpoints" / f"step_{SAVED_AT}", allow_changes=changes)
        trainer.stream.close()
        trainer.stream = trainer._open_stream(StreamState(seed=config.data.seed))
    list(trainer.train())
    trainer.close()


def shards_not_rounded(layout: Layout, folder: Path) -> tuple[list[str], int]:
    """Begin with the run; return the shards on this rank whose small rows are not the saved ones, as NumPy rounds them,
    and how many shards were compared."""
    config = config_of(replace(layout, steps=MORE), folder)
    trainer = Trainer(config, here(), start=WarmStart(folder / "run"))
    list(trainer.parts[0].begin())
    saved, found, count = CheckpointSaved(folder / "run" / "checkpoints" / f"step_{SAVED_AT}"), [], 0
    names = {name.split(".")[-2]: name for name in saved.sizes() if name.endswith(".weight") and ".t_" in name}
    oracle = round_int8 if layout.host_dtype == "int8" else round_fp16
    for pool in cached_embeddings(trainer.model):
        for shard in pool.shards:
            table, first, column = shard.table, shard.first_row, shard.column
            key, num_rows = shard.first_key, shard.num_rows
            whole, numbers = saved.whole(names[table]), np.arange(first, first + num_rows)
            rows = whole[first : first + num_rows, column : column + pool.host.dim].contiguous().numpy()
            seed = seed_of(table, config.train.seed)
            expected = torch.from_numpy(oracle(rows, numbers, seed, column))
            count += 1
            if not torch.equal(pool.cache.read(torch.arange(key, key + num_rows)), expected):
                found.append(f"{table} from row {first}, column {column}")
    trainer.close()
    return found, count
