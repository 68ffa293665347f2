"""What the kernels are for a GPU, compiled without one: that they compile, what they compute with, how wide their
accesses are, and where threads could see different numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.matrix  # seconds of a compiler; what a day changed is first in continuous integration

#: By kind and name of a kernel: how often it has each instruction, and more (`compile_kernels.facts`).
Compiled = dict[str, dict[str, dict[str, int]]]

NUM_PLANNING_KERNELS = 49  # with their variants
#: What they load beside an atomic on it: whether a key has spilled, which sends no key of this launch another way; and
#: entries, of which only the sign is asked, that the atomics keep.
READ_AND_CHANGED = {"_claim": 1, "_append": 1, "_append, array": 4, "_number_last": 4}


@pytest.fixture(scope="module", params=[90, 80, 100], ids="sm_{}".format)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, project_dir: Path) -> Compiled:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.unit.cache.gpu.compile_kernels", str(request.param)]
    done = subprocess.run(command, cwd=project_dir, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_every_kernel_compiles_without_spills_and_fences(compiled: Compiled) -> None:
    """A kernel's own atomics need no order: the end of the kernel orders them for the next one."""
    assert len(compiled["planning"]) == NUM_PLANNING_KERNELS
    for name, found in {**compiled["planning"], **compiled["rows"]}.items():
        assert any(kind.startswith(("st.global", "atom", "red")) for kind in found), name
        assert not [kind for kind in found if "acq" in kind or ".rel." in kind], (name, found)
        assert found["spilled bytes"] == 0, name


def test_rows_are_addressed_with_64_bits(compiled: Compiled) -> None:
    """The number of a row times its width passes 2**31 in a table of 4 GiB."""
    assert compiled["controls"]["place_control"]["narrow addresses"] == 1
    narrow = {
        name: found["narrow addresses"]
        for name, found in {**compiled["planning"], **compiled["rows"]}.items()
        if found["narrow addresses"]
    }
    assert narrow == {}


def test_nothing_is_read_beside_an_atomic_on_it(compiled: Compiled) -> None:
    """Where a program has fewer rows than threads, several warps have a row, and must agree on who rounds it; and all
    warps must come to a barrier."""
    controls = compiled["controls"]
    assert controls["claim_control"]["read and changed"] == 1
    assert controls["barrier_control"]["barriers behind"] > 0
    kernels = {**compiled["planning"], **compiled["rows"]}
    beside = {name: found["read and changed"] for name, found in kernels.items() if found["read and changed"]}
    assert beside == READ_AND_CHANGED
    assert {name for name, found in kernels.items() if found["barriers behind"]} == set()
    for name, found in compiled["rows"].items():
        atomics = sum(count for kind, count in found.items() if kind.startswith("atom."))
        assert (atomics > 0) == name.startswith("_round"), name


@pytest.mark.parametrize("kernel", ["_look_up", "_claim", "_find"])
def test_looking_up_reads_half_a_bucket_at_a_time(compiled: Compiled, kernel: str) -> None:
    found = compiled["planning"][kernel]
    assert found["ld.global.v4.b32"] > 0, found
    assert (found.get("ld.volatile.global.v4.b32", 0) > 0) == (kernel == "_claim")


def inexact(found: dict[str, int]) -> list[str]:
    """Instructions whose results are not those of IEEE 754, each rounded to nearest by itself."""
    of_floats = [each for each in found if "f32" in each and each.split(".")[0] in ("add", "sub", "mul", "div", "fma")]
    wrong = [each for each in of_floats if not re.fullmatch(r"(add|sub|mul|div)\.rn\.f32(x2)?", each)]
    return wrong + [each for each in found if ".ftz" in each or ".approx" in each or "fma" in each]


def test_small_rows_are_computed_as_the_loops_do(compiled: Compiled) -> None:
    control = inexact(compiled["controls"]["arithmetic_control"])
    assert {each.split(".")[0] for each in control} >= {"div", "fma", "cvt"}
    for name, found in compiled["rows"].items():
        assert inexact(found) == [], name
        assert ("div.rn.f32" in found) == ("codes" in name and "widen" not in name), name


@pytest.mark.parametrize("kernel", ["_round_to_codes", "_narrow_to_codes", "_widen_codes", "_widen_halfs"])
def test_small_rows_are_read_and_written_16_bytes_at_a_time(compiled: Compiled, kernel: str) -> None:
    found = compiled["rows"][f"{kernel}, 128"]
    assert found["ld.global.v4.b32"] > 0
    assert found["st.global.v4.b32"] > 0


@pytest.mark.parametrize(
    ("rows", "is_wide"),
    [
        ("dim 128 in fp32, row-wise Adagrad", True),
        ("dim 64 in fp32, Adam", True),
        ("dim 4 in fp32", True),  # 16 bytes
        ("dim 12 in fp16", False),  # rows begin at multiples of 8 bytes only
    ],
)
def test_rows_move_16_bytes_at_a_time(compiled: Compiled, rows: str, is_wide: bool) -> None:
    found = compiled["rows"][f"_copy_rows, {rows}"]
    wide = [found.get(f"{kind}.global.v2.b64", 0) > 0 for kind in ("ld", "st")]
    assert wide == [is_wide, is_wide], found
