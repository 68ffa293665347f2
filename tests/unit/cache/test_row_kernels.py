"""What the kernel is for a GPU, compiled without one: that it compiles, and how wide its accesses are."""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: in the tests' one, kernels are interpreted.
_COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from embershard.cache.row_kernels import _copy_rows, block_shape

types, words = json.loads(sys.argv[1])
parts = range(len(words))
rows = {"target_rows": "*i64", "source_rows": "*i64", "num_rows": "i32"}
constants = {"TARGET_STRIDES": tuple(words), "SOURCE_STRIDES": tuple(words), "WORDS": tuple(words)}
constants["BLOCKS"], constants["BLOCK_ROWS"] = block_shape(words)
signature = {"targets": tuple(types), "sources": tuple(types), **rows, **dict.fromkeys(constants, "constexpr")}
aligned = [(side, part) for side in (0, 1) for part in parts] + [(2,), (3,)]
attributes = {place: [["tt.divisibility", 16]] for place in aligned}
source = ASTSource(fn=_copy_rows, signature=signature, constexprs=constants, attrs=attributes)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])
"""


@pytest.mark.parametrize(
    ("types", "words", "wide"),
    [
        (["*i64", "*i32"], [64, 1], True),  # dim 128 in fp32, and the state of row-wise Adagrad
        (["*i64", "*i64", "*i64"], [32, 32, 32], True),  # dim 64 and Adam
        (["*i64"], [2], True),  # dim 4 in fp32, 16 bytes
        (["*i64"], [3], False),  # dim 12 in fp16: rows begin at multiples of 8 bytes only
    ],
)
def test_it_compiles_for_a_gpu_and_moves_16_bytes_at_a_time(tmp_path: Path, project_dir: Path, types, words, wide):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(project_dir)}
    command = [sys.executable, "-c", _COMPILE, json.dumps([types, words])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accesses = collections.Counter(re.findall(r"(?:ld|st)\.global[.\w:]*", done.stdout))
    assert (accesses["ld.global.v2.b64"] > 0) == (accesses["st.global.v2.b64"] > 0) == wide, accesses
