"""What the planning kernels are for a GPU, compiled without one: that they compile, and how wide their accesses are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: in the tests' one, kernels are interpreted.
_COMPILE = r"""
import collections, json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from embershard.cache.gpu import key_map, next_use, slot_map, victim_kernels
from embershard.cache.key_map import BUCKET, HASHES

BOOLS = "first_hits marks".split()
INT32S = (
    "entries missed_keys is_new running fill_of_id key_of_slot queue_uses next_uses flags score_bits last_uses "
    "next_batches following held_keys held_entries values"
).split()
INT64S = (
    "keys places use_stamps numbers slots order fill_keys fill_slots queue_slots worst queue_stamps queue_ranks "
    "offered ranks ascending victims kept pinned_ranks found cells tallies"
).split()
CONSTANTS = {"BLOCK": 512, "FACTORS": HASHES, "BUCKET": BUCKET, "SPILL": key_map.SPILL_CELLS}


def type_of(name):
    for type, names in (("*i1", BOOLS), ("*i32", INT32S), ("*i64", INT64S)):
        if name in names:
            return type
    return "i64" if "stamp" in name or name == "oldest_pinned" else "i32"


def ptx(kernel, **chosen):
    constants = {**CONSTANTS, **chosen}
    constants = {name: constants[name] for name in kernel.arg_names if name.isupper()}
    signature = {name: "constexpr" if name.isupper() else type_of(name) for name in kernel.arg_names}
    aligned = [place for place, name in enumerate(kernel.arg_names) if name == "held_keys"]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return collections.Counter(re.findall(r"(?:ld|st|atom)[.\w]*\.global[.\w:]*|atom\.global[.\w]*", text))


found = {}
for module in (slot_map, key_map, next_use, victim_kernels):
    for name, kernel in vars(module).items():
        if isinstance(kernel, triton.JITFunction) and "BLOCK" in kernel.arg_names and kernel.module == module.__name__:
            flags = [name for name in kernel.arg_names if name in ("USES", "SCORES", "LISTED")]
            chosen = {"BLOCK": 128} if "BUCKET" in kernel.arg_names else {}
            found[name] = ptx(kernel, **dict.fromkeys(flags, True), **chosen)
            if flags:
                found[name + ", without"] = ptx(kernel, **dict.fromkeys(flags, False), **chosen)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def accesses(tmp_path_factory: pytest.TempPathFactory, project_dir: Path) -> dict[str, dict[str, int]]:
    """How often each kernel accesses memory, by kind of access."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(project_dir)}
    done = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.matrix
@pytest.mark.slow
def test_every_kernel_compiles(accesses: dict[str, dict[str, int]]) -> None:
    assert len(accesses) == 26
    assert all(any(kind.startswith(("st", "atom")) for kind in found) for found in accesses.values())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["_look_up", "_claim"])
def test_looking_up_reads_half_a_bucket_at_a_time(accesses: dict[str, dict[str, int]], kernel: str) -> None:
    assert accesses[kernel]["ld.global.v4.b32"] > 0, accesses[kernel]
    assert (accesses[kernel].get("ld.volatile.global.v4.b32", 0) > 0) == (kernel == "_claim")
