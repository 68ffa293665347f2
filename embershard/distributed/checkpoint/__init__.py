"""Checkpoints: tensors by torch.distributed.checkpoint, scalars as JSON, and a manifest that binds both.

checkpoints/
  step_200/              complete: it gets this name after every rank has written and synced its part
    *.distcp .metadata   tensors, written by all ranks
    scalars.json         position in the data, tables, settings, random number generators
    manifest.json        step, run, and size and checksums of every file above; written last, checked first
  step_300.tmp/          being written or removed, or left by a run that died; never read
  step_300.aside/        invalid, or newer than the checkpoint that the run was resumed from; never read
"""
