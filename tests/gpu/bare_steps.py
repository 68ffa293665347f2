"""The steps of the first ten minutes (`tests.gpu.ten_minutes`): what a GPU alone can tell, on a machine that has torch,
Triton, numba and pytest, and neither FBGEMM nor TorchRec.

Imports that need torch are inside of the steps, which note a fact as soon as they have it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu.hour_steps import Place, Step, machine, quickstart, run_tests, waits

_GIB = 1 << 30
#: Rows of the tables of a plan's step, slots of their cache, ids of a batch, batches ahead, steps; and at toy size.
_PLANNED = (204_000_000, 3_060_000, 26 * 65_536, 8, 60)
_PLANNED_TOY = (5000, 600, 200, 3, 12)


def _wait(place: Place) -> None:
    import torch

    if place.num_gpus:
        torch.cuda.synchronize()


def timed(place: Place, what: Callable[[], Any], turns: int = 7) -> dict[str, float]:
    """Return median milliseconds of a call: of the host, and until the GPU is done; the first call does not count."""
    what()
    host, whole = [], []
    for _ in range(turns if place.num_gpus else 1):
        _wait(place)
        started = time.perf_counter()
        what()
        host.append(time.perf_counter() - started)
        _wait(place)
        whole.append(time.perf_counter() - started)
    return {"host_ms": round(1e3 * statistics.median(host), 4), "all_ms": round(1e3 * statistics.median(whole), 4)}


def launches(place: Place) -> None:
    """Microseconds of the host for a launch of a planning kernel, and for an operation of torch beside it."""
    import torch

    from embershard.cache.gpu import slot_map
    from embershard.cache.gpu.key_map import PlacedHashedMap
    from embershard.cache.gpu.launch import launch

    held, count = PlacedHashedMap(10_000, 1000, torch.device(place.device)), 500 if place.num_gpus else 2
    keys = torch.arange(100, device=place.device)
    rooms = [torch.zeros(size, dtype=torch.int64, device=place.device) for size in (2000, 9, 100)]
    arguments = (keys, *held.table, *rooms, 5 << 32, 10_000)

    def find() -> None:
        for _ in range(count):
            launch(slot_map._find, 100, *arguments, **held.constants)

    def add() -> None:
        for _ in range(count):
            keys.add_(1)

    for name, what in (("of Triton", find), ("of torch", add)):
        place.note(f"microseconds of a launch {name}", round(1e3 * timed(place, what)["host_ms"] / count, 3))


def rounding(place: Place) -> None:
    """Rows that the GPU rounds otherwise than the CPU's loop where a batch has each of them hundreds of times, so that
    many programs claim each."""
    import torch

    from embershard.cache.homes.small_rows import SmallRows
    from embershard.cache.rows.initial_weights import ShardWeights

    rows, uses, turns = (2000, 1_700_000, 150) if place.num_gpus else (64, 200, 1)
    places = torch.arange(1, rows + 1)
    for small_type, dim in (("int8", 128), ("fp16", 128), ("int8", 32), ("int8", 16)):
        weights, full = [ShardWeights("t", 7, dim, -0.5, 0.5)], torch.empty(0, dtype=torch.int64)
        small = SmallRows(small_type, [rows], weights, dim, full, lambda numel, dtype: torch.zeros(numel, dtype=dtype))  # type: ignore[arg-type]
        slots, wrong, ends_at = small.slots_on(torch.device(place.device)), 0, time.monotonic() + place.left / 5
        for turn in range(turns):
            generator = torch.Generator().manual_seed(turn)
            given = torch.rand(rows + 1, dim, generator=generator) - 0.5
            used = (torch.rand(uses, generator=generator) ** 3 * rows).long()
            used[:rows] = places - 1
            on_device = given.to(place.device, copy=True)
            slots.attach(on_device)
            slots.round(on_device, (used + 1).to(place.device), used.to(place.device))
            expected = given.clone()
            small.round(expected, places, places - 1, are_distinct=True)
            wrong += int((on_device.cpu() != expected).any(1).sum())
            if time.monotonic() > ends_at:
                break
        _wait(place)
        slots.check()
        place.note(f"{small_type}, dim {dim}", {"turns": turn + 1, "rows": rows, "uses": uses, "wrong rows": wrong})
        place.failed = place.failed or wrong > 0


def plans(place: Place) -> None:
    """Milliseconds to know, plan and admit batches of 26 features and 65,536 samples over 204 million rows, and the
    memory that a new ranking takes for a moment."""
    import torch

    from embershard.cache.config import CachePolicy
    from embershard.cache.gpu.next_use import KernelNextUseIndex
    from embershard.cache.gpu.planner import KernelPlanner
    from embershard.cache.gpu.slot_map import KernelSlotMap
    from embershard.cache.policies import make_scores
    from embershard.cache.slot_state import SlotState

    num_rows, num_slots, num_ids, lookahead, steps = _PLANNED if place.num_gpus else _PLANNED_TOY
    device = torch.device(place.device)
    slot_map = KernelSlotMap(num_rows, num_slots, device, "hashed")
    index = KernelNextUseIndex(slot_map)
    planner = KernelPlanner(SlotState(slot_map, make_scores(CachePolicy("lru"), num_rows, num_slots, device), index))
    generator = torch.Generator(device=device).manual_seed(1)
    rankings, rank = [0], planner._victims._refill
    milliseconds, known, peak_bytes = defaultdict[str, list[dict[str, float]]](list), list[Any](), 0

    def refill(*given: Any) -> Any:
        rankings[0] += 1
        return rank(*given)

    planner._victims._refill = refill  # type: ignore[method-assign]
    for batch in range(1, steps + 1):
        while len(known) < lookahead:
            keys = (torch.rand(num_ids, generator=generator, device=device) ** 6 * num_rows).long()
            with clocked(place, milliseconds["know"]):
                token = index.know(keys)
            known.append((keys, token))
        keys, token = known.pop(0)
        rankings[0] = 0
        if place.num_gpus:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        took: list[dict[str, float]] = []
        with clocked(place, took):
            plan = planner.plan(keys, batch, batch)
        milliseconds["plan, slots ranked anew" if rankings[0] else "plan"] += took
        if place.num_gpus and rankings[0]:
            peak_bytes = max(peak_bytes, torch.cuda.max_memory_allocated() - before)
        with clocked(place, milliseconds["admit"]):
            planner.evict(plan)
            planner.note_filled(plan, token)
    for name, each in milliseconds.items():
        of = {kind: round(statistics.median(one[kind] for one in each[2:] or each), 3) for kind in each[0]}
        place.note(f"milliseconds to {name}", {**of, "of": len(each)})
    place.note("bytes a slot of a new ranking", round(peak_bytes / num_slots, 1))


@contextlib.contextmanager
def clocked(place: Place, into: list[dict[str, float]]) -> Iterator[None]:
    """Add the body's milliseconds to a list: of the host, and until the GPU is done."""
    _wait(place)
    started = time.perf_counter()
    yield
    host = time.perf_counter() - started
    _wait(place)
    into.append({"host_ms": 1e3 * host, "all_ms": 1e3 * (time.perf_counter() - started)})


def link(place: Place) -> None:
    """Seconds to page-lock a GiB, and GB/s of rows that a kernel moves over the link, each way: by kind of pages, bytes
    of a row and programs of a launch."""
    import torch

    from embershard.cache.rows import memory, uva_transfer
    from embershard.cache.rows.page_lock import lock_for

    host_bytes, count = (8 * _GIB, 400_000) if place.num_gpus else (1 << 20, 64)
    for pages in ("huge", "small"):
        host = memory.zeros(host_bytes // 4, torch.float32, whole_pages=True, small_pages=pages == "small")
        lock = None
        if place.num_gpus:
            started = time.perf_counter()
            lock = lock_for(torch.device("cuda", 0), [host])
            lock.wait()
            place.note(f"seconds to lock a GiB of {pages} pages", (time.perf_counter() - started) * _GIB / host_bytes)
        for width, programs in _copies(pages == "huge" and place.num_gpus > 0):
            num_rows = host.numel() // width
            table = host[: num_rows * width].view(num_rows, width)
            kernel = uva_transfer.RowKernel([torch.zeros(count + 1, width, device=place.device)], [table])
            keys = torch.randperm(num_rows)[:count].to(place.device)
            slots = torch.arange(1, count + 1, device=place.device)
            ways = {"fill": (kernel.to_tables, slots, keys), "write back": (kernel.to_others, keys, slots)}
            uva_transfer._MOST_PROGRAMS = programs
            for way, (copy, to, of) in ways.items():
                took = timed(place, functools.partial(copy, to, of))["all_ms"]
                name = f"GB/s, {pages} pages, rows of {4 * width} bytes, {programs} programs, {way}"
                place.note(name, round(count * width * 4 / took / 1e6, 2))
        del lock


def _copies(all_programs: bool) -> Iterator[tuple[int, int]]:
    """Words of a row, and programs of a launch."""
    for width in (16, 32, 128):
        yield from ((width, programs) for programs in ((64, 128, 256) if all_programs else (128,)))


def kernels(place: Place) -> None:
    """Transfers, maps and plans by kernels, against loops (`tests/gpu`, by pytest)."""
    run_tests(place, "transfers", "key_map", "plans", options=("--noconftest",))


def training(place: Place) -> None:
    """The quickstart, short: waits of each step, losses beside those of a CPU, and those of its dense part as a CUDA
    graph. Where FBGEMM has no kernels for the GPU, its CPU build declares the operations, and torch's compute them
    (`tests/gpu/torch_tables.py`)."""
    if find_spec("torchrec") is None or find_spec("fbgemm_gpu") is None:
        place.note("skipped", "TorchRec and FBGEMM's CPU build are not here: docs/first_hour.md says how to carry them")
        return
    from tests.gpu.torch_tables import register

    runs = place.out / place.name
    words = ["none", "train", "quickstart", "--run-dir", str(runs / "cpu")]
    words += quickstart(place, **{"train.device": "cpu", "train.log_every": 10})
    place.command("cpu", [sys.executable, "-m", "tests.gpu.torch_tables", *words], share=0.5)
    import fbgemm_gpu

    is_of_gpus = place.num_gpus and getattr(fbgemm_gpu, "__variant__", "cpu") != "cpu"
    kept = None if is_of_gpus else register(place.device)
    waits(place, **{"train.log_every": 10})
    del kept
    ours, theirs = (_losses(runs / name / "metrics.jsonl") for name in ("run", "cpu"))
    place.note("losses", ours)
    place.note("farthest from the CPU's", max(abs(each - theirs[step]) for step, each in ours.items()))
    if place.num_gpus:
        words = ["none" if is_of_gpus else place.device, "train", "quickstart", "--run-dir", str(runs / "graph")]
        words += quickstart(place, **{"train.log_every": 10, "train.cuda_graph": "true"})
        place.command("graph", [sys.executable, "-m", "tests.gpu.torch_tables", *words])
        place.note("losses with train.cuda_graph", _losses(runs / "graph" / "metrics.jsonl"))


def _losses(metrics: Path) -> dict[int, float]:
    """By step."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


#: Most valuable first.
BARE_STEPS = (
    Step(machine, 0.5, value=9),
    Step(rounding, 1.5, value=8),
    Step(kernels, 2, num_gpus=1, value=7),
    Step(plans, 1.5, value=6),
    Step(launches, 0.5, value=5),
    Step(link, 2.5, value=4),
    Step(training, 1.5, value=3),
)
