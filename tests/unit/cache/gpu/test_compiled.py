"""What the planning kernels are for a GPU, compiled without one: that they compile, and how wide their accesses are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import matrix

NUM_KERNELS = 42  # with their variants

# In a process of its own: in the tests' one, kernels are interpreted.
_COMPILE = r"""
import collections, json, os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from embershard.cache.gpu import counters, feature_keys, key_map, next_use, slot_map, victim_kernels
from embershard.cache.gpu import planner, victim_queue
from embershard.cache.key_map import BUCKET, HASHES

BOOLS = ["first_hits"]
INT8S = ["marks"]
FLOATS = ["scores"]
INT32S = (
    "entries missed_keys counts fill_of_id key_of_slot queue_uses next_uses score_bits last_uses next_batches "
    "following held_keys held_entries values absent"
).split()
INT64S = (
    "keys places use_stamps numbers slots order fill_keys fill_slots queue_slots worst queue_stamps queue_ranks "
    "offered ranks ascending victims kept pinned_ranks found cells tallies tally sample gathered total missed "
    "evicted_keys dirty_keys feature_ends table_of_feature table_ends ids offsets first_keys lengths"
).split()
MODULES = (slot_map, key_map, next_use, victim_kernels, counters, feature_keys, victim_queue)
CONSTANTS = {"BLOCK": 512, "FOUND": 8, "FEATURES": 32, "TABLES": 32}
HASHED = {"FACTORS": HASHES, "BUCKET": BUCKET, "SPILL": key_map.SPILL_CELLS}
ARRAY = {"FACTORS": (), "BUCKET": 0, "SPILL": 0}


def type_of(kernel, name):
    bools = {"marks": "*i1"}
    own = {"_count_plan": {"values": "*i64"}, "_advance": bools, "_mark_last": bools}
    if name in own.get(kernel.__name__, {}):
        return own[kernel.__name__][name]
    for type, names in (("*i1", BOOLS), ("*i8", INT8S), ("*fp32", FLOATS), ("*i32", INT32S), ("*i64", INT64S)):
        if name in names:
            return type
    if name == "weight":
        return "fp32"
    return "i64" if "stamp" in name or name == "oldest_pinned" else "i32"


def assembly(kernel, capability, **chosen):
    constants = {name: {**CONSTANTS, **chosen}[name] for name in kernel.arg_names if name.isupper()}
    signature = {name: "constexpr" if name.isupper() else type_of(kernel, name) for name in kernel.arg_names}
    aligned = [place for place, name in enumerate(kernel.arg_names) if name == "held_keys"]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]


def spilled_bytes(ptx):
    "What the assembler says of a kernel, as Triton calls it."
    target = re.search(r"\.target (\S+)", ptx)[1].rstrip(",")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        open(path, "w").write(ptx)
        said = subprocess.run(
            [get_ptxas(capability).path, "-v", "-arch", target, path, "-o", os.path.join(folder, "kernel.cubin")],
            capture_output=True, text=True, check=True,
        ).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def variants(kernel):
    flags = [name for name in kernel.arg_names if name in ("USES", "SCORES", "LISTED")]
    maps = {"": {}}
    if "BUCKET" in kernel.arg_names:
        maps = {"": {**HASHED, "BLOCK": key_map.BLOCK}}
        if any(name in kernel.arg_names for name in ("use_stamps", "last_uses")):
            maps[", array"] = ARRAY
    for name, chosen in maps.items():
        yield name, {**chosen, **dict.fromkeys(flags, True)}
        if flags:
            yield name + ", without", {**chosen, **dict.fromkeys(flags, False)}


found = {}
capability = int(sys.argv[1])
sources = "".join(open(each.__file__).read() for each in (*MODULES, planner))
launched = set(re.findall(r"launch\(\s*(?:kernels\.)?(\w+),", sources))
for module in MODULES[:-1]:
    for name, kernel in vars(module).items():
        if name in launched and kernel.module == module.__name__:
            for variant, chosen in variants(kernel):
                ptx = assembly(kernel, capability, **chosen)
                kinds = collections.Counter(re.findall(r"(?:ld|st|atom|red)[.\w]*\.global[.\w:]*", ptx))
                found[name + variant] = {**kinds, "spilled bytes": spilled_bytes(ptx)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=[90, matrix(80), matrix(100)], ids="sm_{}".format)
def accesses(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, project_dir: Path
) -> dict[str, dict[str, int]]:
    """How often each kernel accesses memory, by kind of access, and the bytes of its registers that it spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(project_dir)}
    command = [sys.executable, "-c", _COMPILE, str(request.param)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.matrix
@pytest.mark.slow
def test_every_kernel_compiles_without_spills_and_fences(accesses: dict[str, dict[str, int]]) -> None:
    """A kernel's own atomics need no order: the end of the kernel orders them for the next one."""
    assert len(accesses) == NUM_KERNELS
    for name, found in accesses.items():
        assert any(kind.startswith(("st", "atom", "red")) for kind in found), name
        assert not [kind for kind in found if "acq" in kind or "rel." in kind], (name, found)
        assert found["spilled bytes"] == 0, name


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["_look_up", "_claim", "_find"])
def test_looking_up_reads_half_a_bucket_at_a_time(accesses: dict[str, dict[str, int]], kernel: str) -> None:
    assert accesses[kernel]["ld.global.v4.b32"] > 0, accesses[kernel]
    assert (accesses[kernel].get("ld.volatile.global.v4.b32", 0) > 0) == (kernel == "_claim")
