"""Compiles every kernel for a GPU, without one, and prints what its code has, as JSON. Run in a process of its own (in
the tests' one, kernels are interpreted):

    python -m tests.unit.cache.gpu.compile_kernels 90      # sm_90
"""

from __future__ import annotations

import collections
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import ASTSource

from embershard.cache.gpu import (
    counters,
    feature_keys,
    key_map,
    next_use,
    planner,
    slot_map,
    small_rows,
    victim_kernels,
    victim_queue,
)
from embershard.cache.key_map import BUCKET, HASHES
from embershard.cache.rows import uva_transfer

PLANNING = (slot_map, key_map, next_use, victim_kernels, counters, feature_keys)
HASHED = {"FACTORS": HASHES, "BUCKET": BUCKET, "SPILL": key_map.SPILL_CELLS}
ARRAY = {"FACTORS": (), "BUCKET": 0, "SPILL": 0}
#: By name of an argument; the others are counts, `i32`.
TYPES = {
    "*i1": "first_hits",
    "*i8": "marks codes",
    "*i16": "steps halfs",
    "*fp32": "scores rows full",
    "*i32": "entries missed_keys counts ends digits fill_of_id key_of_slot queue_uses next_uses score_bits last_uses "
    "next_batches later held_keys held_entries values absent words",
    "*i64": "keys places use_stamps numbers slots order fill_keys fill_slots queue_slots worst queue_stamps "
    "queue_ranks offered ranks ascending victims kept picks found cells tallies tally sample gathered total "
    "missed evicted_keys dirty_keys feature_ends table_of_feature table_ends ids offsets first_keys lengths tables "
    "target_rows source_rows",
    "fp32": "weight",
}
TYPE_OF = {name: type for type, names in TYPES.items() for name in names.split()}
#: Where a name means something else.
OWN_TYPES = {
    "_count_plan": {"values": "*i64"},
    "_advance": {"marks": "*i1"},
    "_mark_last": {"marks": "*i1"},
    "_round_to_codes": {"marks": "*i32"},
    "_round_to_halfs": {"marks": "*i32"},
    "claim_control": {"marks": "*i32"},
}
#: Row sizes in words of each table, and their types.
COPIES = {
    "dim 128 in fp32, row-wise Adagrad": (("*i64", "*i32"), (64, 1)),
    "dim 64 in fp32, Adam": (("*i64",) * 3, (32, 32, 32)),
    "dim 4 in fp32": (("*i64",), (2,)),  # 16 bytes
    "dim 12 in fp16": (("*i64",), (3,)),  # rows begin at multiples of 8 bytes only
}
_OF_PROGRAMS = ("tt.get_program_id", "tt.get_num_programs")
_HANDED_ON = (
    *("arith.ext", "arith.addi", "arith.subi", "arith.muli", "arith.select"),
    *("tt.splat", "tt.expand_dims", "tt.broadcast"),
)


def compiled(
    kernel: Any,
    capability: int,
    constants: dict[str, Any],
    aligned: tuple[str, ...] = (),
    fusion: bool = True,
    tables: tuple[str, ...] = (),
) -> dict[str, int]:
    """Return how often the kernel's code has each instruction, and the facts of `facts`."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {**TYPE_OF, **OWN_TYPES.get(kernel.__name__, {}), **dict.fromkeys(constants, "constexpr")}
    signature, places = {}, []
    for at, name in enumerate(kernel.arg_names):
        if name in ("targets", "sources"):
            signature[name] = tables  # type: ignore[assignment]
            places += [(at, part) for part in range(len(tables))]
            continue
        is_stamp = "stamp" in name or name == "oldest_pinned"
        signature[name] = types.get(name, "i64" if is_stamp else "i32")
        places += [(at,)] if name in aligned else []
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, "enable_fp_fusion": fusion}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    return facts(made["ptx"], made["ttir"], capability)


def facts(ptx: str, ttir: str, capability: int) -> dict[str, int]:
    """Of one kernel: how often it has each instruction; the bytes of registers that it spills; addresses that are both
    loaded and changed by an atomic; barriers behind branches on such a number, which threads may load otherwise; and
    addresses that come from products of 32 bits."""
    lines = [line.strip() for line in ptx.splitlines()]
    words = [re.sub(r"^@\S+\s+", "", line).split("\t")[0].split(" ")[0].rstrip(";") for line in lines]
    address = r"\.global\S*\s[^\[]*\[\s*(%\w+)"
    loaded, changed = (set(re.findall(rf"\b{kind}" + address, ptx)) for kind in (r"ld(?!\.volatile)", "atom"))
    branches = [
        branch[2]
        for each in loaded & changed
        if (branch := re.search(rf"\bld\.global[^\[]*\[\s*{each}\b.*?@%p\d+ bra\s+(\$\w+);(.*?)\1:", ptx, re.DOTALL))
    ]
    return {
        **collections.Counter(word for word in words if re.match(r"[a-z]+\.", word)),
        "spilled bytes": spilled_bytes(ptx, capability),
        "read and changed": len(loaded & changed),
        "barriers behind": sum(each.count("bar.sync") for each in branches),
        "narrow addresses": narrow_addresses(ttir),
    }


def narrow_addresses(ttir: str) -> int:
    """Addresses computed from a product of 32 bits: of a row's number and a width it would overflow. Not of a program's
    number, which counts items of int32, and not of a small constant."""
    found, products, harmless = 0, set[str](), set[str]()
    for line in ttir.splitlines():
        harmless |= set(re.findall(r"(%c\d_i32\S*) =", line))
        if (parts := re.match(r"\s*(%\S+) = (\S+) (.*)", line)) is None:
            continue
        result, operation, rest = parts.groups()
        operands = re.findall(r"%[\w#]+", rest)
        is_product = operation == "arith.muli" and re.search(r"\bi32|xi32>", rest) and not harmless & set(operands)
        if operation in _OF_PROGRAMS or (operation == "arith.subi" and operands[0] in harmless):
            harmless.add(result)
        elif operation == "tt.addptr":
            found += operands[1] in products
        elif is_product or (operation.startswith(_HANDED_ON) and products & set(operands)):
            products.add(result)
    return found


def spilled_bytes(ptx: str, capability: int) -> int:
    """What the assembler says, called as Triton calls it."""
    target = re.search(r"\.target (\S+)", ptx)[1].rstrip(",")  # type: ignore[index]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", "-arch", target, path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def planning(capability: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Every planning kernel that is launched, by each kind of map, with and without what it may have."""
    sources = "".join(Path(each.__file__).read_text() for each in (*PLANNING, planner, victim_queue))
    launched = set(re.findall(r"launch\(\s*(?:kernels\.)?(\w+),", sources))
    sizes = {"BLOCK": 512, "DIGITS": 256, "FEATURES": 32, "TABLES": 32}
    for module in PLANNING:
        for name, kernel in vars(module).items():
            if name not in launched or kernel.module != module.__name__:
                continue
            maps = {"": {**HASHED, "BLOCK": key_map.BLOCK} if "BUCKET" in kernel.arg_names else {}}
            if "BUCKET" in kernel.arg_names and {"use_stamps", "last_uses"} & set(kernel.arg_names):
                maps[", array"] = ARRAY
            flags = [flag for flag in ("USES", "SCORES", "LISTED") if flag in kernel.arg_names]
            for map_name, map_constants in maps.items():
                for has in (True, False) if flags else (True,):
                    constants = {**sizes, **map_constants, **dict.fromkeys(flags, has)}
                    found = compiled(kernel, capability, constants, ("held_keys",))
                    yield name + map_name + ("" if has else ", without"), found


def rows(capability: int) -> Iterator[tuple[str, dict[str, int]]]:
    """The kernels that move rows."""
    for name in [
        "_round_to_codes",
        "_round_to_halfs",
        "_narrow_to_codes",
        "_widen_codes",
        "_narrow_to_halfs",
        "_widen_halfs",
    ]:
        for dim, by_key in ((12, True), (16, False), (128, True)):
            columns = triton.next_power_of_2(dim)
            sizes = {"DIM": dim, "COLUMNS": columns, "STRIDE": dim, "BLOCK": max(1, 2048 // columns)}
            constants = {**sizes, "TABLES": 26, "STEPS": 5, "BY_KEY": by_key}
            aligned = ("rows", "codes", "full", "halfs")
            kernel = getattr(small_rows, name)
            yield f"{name}, {dim}", compiled(kernel, capability, constants, aligned, fusion=False)
    for name, (types, words) in COPIES.items():
        blocks, block_rows = uva_transfer.block_shape(words)
        strides = {"TARGET_STRIDES": words, "SOURCE_STRIDES": words}
        constants = {**strides, "WORDS": words, "BLOCKS": blocks, "BLOCK_ROWS": block_rows}
        yield f"_copy_rows, {name}", compiled(uva_transfer._copy_rows, capability, constants, tables=types)


@triton.jit
def claim_control(marks, number, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a claim must not be: a mark is read beside its atomic."""
    at = tl.arange(0, BLOCK)
    is_left = tl.load(marks + at) != number
    before = tl.atomic_xchg(marks + at, tl.zeros_like(at) + number, mask=is_left, sem="relaxed")
    tl.store(marks + 1000 + at, (is_left & (before != number)).to(tl.int32))


@triton.jit
def arithmetic_control(rows, full, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a row's arithmetic must not be: fused, and divided with an error."""
    at = tl.arange(0, BLOCK)
    weight, step = tl.load(rows + at), tl.load(full + at)
    tl.store(rows + at, tl.floor(weight) + weight / step)
    tl.store(full + at, weight * step + step)


@triton.jit
def place_control(rows, entries, full, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What an address must not be: the product of a row's number and its width in 32 bits."""
    row = tl.load(entries + tl.arange(0, BLOCK))
    tl.store(full + tl.arange(0, BLOCK), tl.load(rows + row * DIM))


@triton.jit
def barrier_control(cells, tallies, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a branch must not be: on a number that others change, with a sum of all threads behind it."""
    at = tl.arange(0, BLOCK)
    tl.atomic_add(tallies, 1, sem="relaxed")
    if tl.load(tallies) > 0:
        tl.atomic_add(cells + tl.sum(tl.load(cells + at)), 1, sem="relaxed")


def controls(capability: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Kernels with each fault."""
    for kernel in (claim_control, arithmetic_control, place_control, barrier_control):
        sizes = {"BLOCK": 16 if kernel is claim_control else 512, "DIM": 12}
        yield kernel.__name__, compiled(kernel, capability, sizes)


def _not_assembled(*_: Any) -> bytes:
    """In place of Triton's assembling: `spilled_bytes` does it, and reads what is said."""
    return b""


if __name__ == "__main__":
    CUDABackend.make_cubin = _not_assembled  # type: ignore[method-assign]
    capability = int(sys.argv[1])
    made = {"planning": planning, "rows": rows, "controls": controls}
    print(json.dumps({kind: dict(make(capability)) for kind, make in made.items()}))
