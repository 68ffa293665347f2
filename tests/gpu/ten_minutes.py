"""The first ten minutes on one GPU: what only a GPU can tell, most valuable first, on a machine without FBGEMM,
TorchRec and a network.

    python -m tests.gpu.ten_minutes                               # ten minutes; writes ten_minutes/
    python -m tests.gpu.ten_minutes --minutes 4 --out /tmp/found

It needs torch, Triton, numba, numpy, psutil and pytest; `scripts/carry.py` makes a folder of what a machine lacks. As
in the first hour (docs/first_hour.md), each step (tests/gpu/bare_steps.py) is a process of its own, and each fact is
written as it is found. Without a GPU the steps run at toy size, kernels in Triton's interpreter.
"""

from __future__ import annotations

import os
import sys

from tests.gpu.bare_steps import BARE_STEPS
from tests.gpu.first_hour import count_gpus, main

if __name__ == "__main__":
    if not count_gpus():
        os.environ["TRITON_INTERPRET"] = "1"
    sys.exit(main(sys.argv[1:], "tests.gpu.ten_minutes", __doc__ or "", BARE_STEPS))
