"""A few steps through the look-ahead pipeline on a GPU, with every transfer, compared with stock: for sanitizers, under
which everything takes many times as long.

    compute-sanitizer --tool memcheck python -m tests.gpu.short_run
    TORCH_CUDA_SANITIZER=1 python -m tests.gpu.short_run

Torch's sanitizer knows tensors, not rows: it would take staged copies for races with the training of other rows, and
looks at the kernel's runs only, whose accesses to rows it does not see.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch.distributed as dist

from tests.ranks.look_ahead import Case, Run, compare

RUNS = [
    Run(4, 2, 3, transfer="triton_uva"),
    Run(4, 2, 3, transfer="triton_uva", slot_map="hashed"),
    Run(4, 2, 3, transfer="staged"),
]


def main() -> None:
    """Train; leave with 1 when a run differs from stock."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        runs = [run for run in RUNS if run.transfer == "triton_uva" or "TORCH_CUDA_SANITIZER" not in os.environ]
        outcomes = compare(Case(device="cuda", steps=6, rows=(300, 20, 500), dims=(16,) * 3), runs)
        dist.destroy_process_group()
    for run, outcome in zip(runs, outcomes, strict=True):
        print(f"{run.transfer}, {run.slot_map}: {outcome.evictions} evictions, different: {outcome.different}")
    sys.exit(any(outcome.different or not outcome.evictions for outcome in outcomes))


if __name__ == "__main__":
    main()
