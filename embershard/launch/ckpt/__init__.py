"""`embershard ckpt`: the checkpoints of a run."""
