"""`RunState`: what a checkpoint holds of a run, written and read."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard.data import Source, StreamState
from embershard.data.sources.source import GrowingSource
from embershard.distributed import (
    Ranks,
    TensorBlocks,
    load_tensors,
    rng_state,
    save_checkpoint,
    saved_sizes,
    saved_tensors,
    set_rng_state,
    without_empty,
)
from embershard.distributed.checkpoint.boxes import CheckpointSaved, fill
from embershard.distributed.checkpoint.load import empty_group, without_known_warnings
from embershard.distributed.checkpoint.save import NewLink
from embershard.sharding.torchrec import FrozenRows, freeze, without_flushes
from embershard.sharding.torchrec.checkpoints import RowStates, restore_contents, saved_contents
from embershard.training.checkpoint.blocks_of_rows import load_rows_elsewhere, without_rows_elsewhere
from embershard.training.checkpoint.host_rows import (
    MARKED_ROWS,
    load_weights,
    restore_marks,
    rounded_tables,
    saved_marks,
    taking_references,
    without_rounded_rows,
)
from embershard.training.checkpoint.identity import Change, identity_of, tables_of
from embershard.training.checkpoint.save_chain import SaveChain
from embershard.training.checkpoint.saved_run import SOURCE_STATE, SavedRun, SettingsComparison, compare
from embershard.training.checkpoint.table_shards import MODEL, STATES
from embershard.training.config import RunConfig
from embershard.training.optimizers import Optimizers
from embershard.training.warm_start import WARM_START

#: Group of a checkpoint's tensors: the cached rows.
_CACHE = "cache"


@dataclass
class PreparedSave:
    """A checkpoint that was not written yet. The rows of cached tables are frozen until it is written or closed.

    Attributes:
        chain: of which the checkpoint is a link, if of any; it learns what became of it.
        waits: each waits for what must be there before the checkpoint is.
    """

    folder: Path
    step: int
    tensors: TensorBlocks
    frozen: Sequence[FrozenRows]
    scalars: dict[str, Any]
    keep_last: int
    run_id: str
    link: NewLink | None = None
    chain: SaveChain | None = None
    waits: Sequence[Callable[[], None]] = ()

    @property
    def why_whole(self) -> str:
        """Why it is whole, where it might be a delta."""
        return "" if self.link is None else self.link.why_whole

    def write(self, ranks: Ranks, before_block: Callable[[], None] = lambda: None) -> Path:
        """Write the checkpoint and return it. All ranks call it together.

        Args:
            before_block: see `TensorBlocks`.

        Raises:
            CheckpointError: one of this step exists.
            FailedSaveError: it could not be written.
        """
        self.tensors.before_block = before_block
        path = None
        try:
            for wait in self.waits:
                wait()
            what = self.folder, self.step, self.tensors, self.scalars, ranks
            path = save_checkpoint(*what, keep_last=self.keep_last, run_id=self.run_id, link=self.link)
            return path
        finally:
            if self.chain is not None:
                self.chain.failed() if path is None else self.chain.written(self.step)
            self.tensors.before_block = lambda: None  # its owner may hold this object: no cycle may keep the copies
            self.close()

    def close(self) -> None:
        """Release the rows."""
        for rows in self.frozen:
            rows.close()


class RunState:
    """The state of a run on one rank. All ranks call its methods together.

    Args:
        identity: entries that are compared on a resume, beside those of the settings.

    Attributes:
        changes: settings that were changed on request by resumes so far.
        run_id: of the run, in the manifests of its checkpoints; of the first part of a run that was resumed.
        is_replica: the first group of ranks has what this rank has of the tables, too, and saves it.
    """

    def __init__(
        self,
        config: RunConfig,
        source: Source,
        model: DistributedModelParallel,
        optimizers: Optimizers,
        ranks: Ranks,
        identity: Mapping[str, Any],
    ) -> None:
        self.model, self._optimizers = model, optimizers
        self._config, self._source, self._ranks = config, source, ranks
        self.is_replica = ranks.rank >= config.sharding.group_shape(ranks.world_size, 1)[0]
        self._identity = ranks.from_first(lambda: {**identity_of(config, ranks.world_size), **identity})
        self.changes: tuple[Change, ...] = ()
        self.run_id = ranks.from_first(lambda: uuid.uuid4().hex)
        # Of the settings: a resume on other ranks keeps the samples per step instead.
        self._rank_batch_size = (
            config.train.rank_batch_size(ranks.world_size) if config.train.global_batch_size is None else None
        )

    def prepare_save(
        self,
        folder: Path,
        steps: int,
        samples: int,
        position: StreamState,
        of_parts: Mapping[str, Any],
        tensors_of_parts: Mapping[str, Mapping[str, Tensor]],
        copy_bytes: int,
        chain: SaveChain | None = None,
    ) -> PreparedSave:
        """Return the state of a run that has trained so far, to be written to `folder/step_<steps>`.

        Args:
            of_parts: entries of the run's parts.
            tensors_of_parts: their groups of tensors.
            copy_bytes: most bytes to copy of what changes in place.
            chain: that the checkpoint continues; None: it is whole, and in no chain.
        """
        scalars = {
            "samples": samples,
            "stream": position.to_dict(),
            **({WARM_START: self._optimizers.begun} if self._optimizers.begun else {}),
            **of_parts,
            "tables": tables_of(self._config, self._source.schema),
            "settings": self._identity,
            "changes": [asdict(change) for change in self.changes],
            "world_size": self._ranks.world_size,
            "rank_batch_size": self._rank_batch_size,
            "rng": self._ranks.all_gather_objects(rng_state(self._ranks.device)),
        }
        if isinstance(self._source, GrowingSource):
            scalars[SOURCE_STATE] = self._source.state_at(position.global_sample)
        frozen, link = freeze(self.model), None
        with ExitStack() as on_error:
            for rows in frozen:
                on_error.callback(rows.close)
            with without_flushes(self.model):  # rows are written back already, and made while they are written
                tensors = without_empty({**self.tensors(), **tensors_of_parts})
            if not self.is_replica and (full := saved_marks(self.model, self._ranks.rank)):
                tensors[MARKED_ROWS] = full
            if not self.is_replica and (contents := saved_contents(self.model, self._ranks.rank)):
                tensors[_CACHE] = contents
            if chain is not None:
                tensors, link = chain.cut(tensors, frozen)
            blocks = TensorBlocks(tensors, frozen, copy_bytes)
            on_error.pop_all()
        keep_last = self._config.checkpoint.keep_last
        return PreparedSave(folder, steps, blocks, frozen, scalars, keep_last, self.run_id, link, chain)

    def read(self, checkpoint: Path, allowed: Collection[str]) -> tuple[SavedRun, SettingsComparison]:
        """Return the state in a verified checkpoint, without its tensors, and its comparison; nothing changes.

        Args:
            allowed: settings that may have changed.

        Raises:
            CheckpointError: the run may not go on from it; see `compare`.
        """
        saved = self._ranks.from_first(lambda: SavedRun.read(checkpoint))
        place = (self._config, self._identity, self._source, self._ranks.world_size)
        return saved, compare(checkpoint, saved, *place, allowed)

    def load(self, checkpoint: Path, saved: SavedRun, comparison: SettingsComparison) -> None:
        """Load the tensors of model and optimizers and the random number generators, and warm the caches up."""
        dense_optimizer = self._optimizers.dense
        dense_optimizer.init_state()  # its tensors must exist to be loaded into
        dense_optimizer.zero_grad()
        with taking_references(self.model):
            tensors = self.tensors()
        there = saved_tensors(checkpoint)
        groups = {group: empty_group(there, group) for group in (MARKED_ROWS, _CACHE)}
        with without_known_warnings():
            num_rows = {name: value.size(0) for name, value in tensors[MODEL].items() if value.dim()}
            in_memory = without_rows_elsewhere(self.model, tensors)
            states = RowStates(in_memory[STATES], saved_sizes(there, STATES), num_rows)
            in_memory[MODEL] = without_rounded_rows(self.model, in_memory[MODEL])
            load_tensors(checkpoint, without_empty({**in_memory, STATES: states.to_load, **groups}))
            states.spread()
        changed = {change.key for change in comparison.changes}
        if not changed & {"cache.host_dtype", "cache.host_dtypes", "cache.full_rows"}:
            restore_marks(self.model, groups[MARKED_ROWS])
        load_rows_elsewhere(self.model, checkpoint, {name: tensors[name] for name in (MODEL, STATES)})
        load_weights(self.model, in_memory[MODEL])
        for name, rows in rounded_tables(self.model).items():
            fill(rows, CheckpointSaved(checkpoint), f"{MODEL}.{name}")
        self.model.fused_optimizer.load_state_dict({"state": tensors[STATES]})
        dense_optimizer.load_state_dict({"state": tensors["dense_optimizer"]})
        self._optimizers.begin_behind(saved.of_parts.get(WARM_START, {}), saved.step)
        if saved.world_size == self._ranks.world_size:
            set_rng_state(saved.rng[self._ranks.rank], self._ranks.device)
        restore_contents(self.model, groups[_CACHE])
        self._config, self._identity = comparison.config, comparison.identity
        self.changes = (*saved.changes, *comparison.changes)

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of a checkpoint, by group: references, which a load fills."""
        return {
            MODEL: self.model.state_dict(),
            STATES: self.model.fused_optimizer.state_dict()["state"],
            "dense_optimizer": self._optimizers.dense.state_dict()["state"],
        }
