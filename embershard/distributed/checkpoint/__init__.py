"""Checkpoints: tensors by torch.distributed.checkpoint, scalars as JSON, and a manifest that binds both.

checkpoints/
  step_200/              complete: it gets this name after every rank has written and synced its part
    *.distcp .metadata   tensors, written by all ranks
    scalars.json         position in the data, tables, settings, random number generators
    manifest.json        step, run, and size and checksums of every file above; written last, checked first
  step_300.tmp/          being written or removed, or left by a run that died; never read
  step_300.aside/        invalid, or newer than the checkpoint that the run was resumed from; never read
"""

from embershard.distributed.checkpoint.disk import check_disk
from embershard.distributed.checkpoint.folder import complete_checkpoints, prune, set_aside, step_of
from embershard.distributed.checkpoint.load import damaged_scalars, load_tensors, read_scalars, verify_checkpoint
from embershard.distributed.checkpoint.manifest import Manifest
from embershard.distributed.checkpoint.rng import rng_state, set_rng_state
from embershard.distributed.checkpoint.save import save_checkpoint, without_empty

__all__ = [
    "Manifest",
    "check_disk",
    "complete_checkpoints",
    "damaged_scalars",
    "load_tensors",
    "prune",
    "read_scalars",
    "rng_state",
    "save_checkpoint",
    "set_aside",
    "set_rng_state",
    "step_of",
    "verify_checkpoint",
    "without_empty",
]
