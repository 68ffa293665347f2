"""What the kernels are for a GPU, compiled without one: that they compile, and how wide their accesses are."""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "dim 128 in fp32, row-wise Adagrad": (["*i64", "*i32"], [64, 1], True),
    "dim 64 in fp32, Adam": (["*i64", "*i64", "*i64"], [32, 32, 32], True),
    "dim 4 in fp32": (["*i64"], [2], True),  # 16 bytes
    "dim 12 in fp16": (["*i64"], [3], False),  # rows begin at multiples of 8 bytes only
}

# In a process of its own: in the tests' one, kernels are interpreted.
_COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from embershard.cache.rows.uva_transfer import _copy_rows, block_shape


def ptx(kernel, signature, constants, aligned):
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    attributes = {place: [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


def copy_rows(types, words):
    constants = {"TARGET_STRIDES": tuple(words), "SOURCE_STRIDES": tuple(words), "WORDS": tuple(words)}
    constants["BLOCKS"], constants["BLOCK_ROWS"] = block_shape(words)
    rows = {"target_rows": "*i64", "source_rows": "*i64", "num_rows": "i32"}
    tables = [(side, part) for side in (0, 1) for part in range(len(words))]  # a batch's rows may start anywhere
    return ptx(_copy_rows, {"targets": tuple(types), "sources": tuple(types), **rows}, constants, tables)


found = {name: copy_rows(types, words) for name, (types, words, _) in json.loads(sys.argv[1]).items()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory, project_dir: Path) -> dict[str, collections.Counter[str]]:
    """How often each kernel loads and stores, by kind of access."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(project_dir)}
    command = [sys.executable, "-c", _COMPILE, json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = re.compile(r"(?:ld|st)\.global[.\w:]*")
    return {name: collections.Counter(kinds.findall(text)) for name, text in json.loads(done.stdout).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_move_16_bytes_at_a_time(ptx: dict[str, collections.Counter[str]], name: str):
    accesses, wide = ptx[name], CASES[name][2]
    assert (accesses["ld.global.v2.b64"] > 0) == (accesses["st.global.v2.b64"] > 0) == wide, accesses
