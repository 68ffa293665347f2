"""The steps of the first hour on a GPU (`tests.gpu.first_hour`): a table of them, and a function for each.

Nothing here is imported at the start but the standard library: the hour goes on where torch is broken.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

PROJECT = Path(__file__).resolve().parents[2]
EMBERSHARD = (sys.executable, "-m", "embershard.commands.cli")
#: Of the environment, what explains figures. Other variables may hold secrets.
_SENT_VARIABLES = ("CUDA", "NCCL", "OMP_", "TORCH", "PYTORCH", "TRITON", "MKL_", "NVIDIA", "GLOO", "CUBLAS")
_GIB = 1 << 30
_NOT_OURS = ("warnings.py", Path(__file__).name)  # of those that wait


@dataclass
class Place:
    """Where a step runs, and what it found.

    Attributes:
        name: of the step.
        out: folder of the hour.
        seconds: that the step may take.
        num_gpus: that torch sees; 0: the step runs at toy size.
    """

    name: str
    out: Path
    seconds: float
    num_gpus: int
    found: dict[str, Any] = field(default_factory=dict)
    failed: bool = False
    _started: float = field(default_factory=time.monotonic)
    _writing: Any = field(default_factory=threading.Lock)

    @property
    def device(self) -> str:
        """The kind of device that it runs on."""
        return "cuda" if self.num_gpus else "cpu"

    @property
    def left(self) -> float:
        """Seconds that are left, but for a few to write down what was found."""
        return max(1.0, 0.95 * self.seconds - (time.monotonic() - self._started))

    def note(self, name: str, value: Any) -> None:
        """Write down what was found, at once: the step may be ended."""
        with self._writing:
            self.found[name] = value
            (self.out / f"{self.name}.json").write_text(json.dumps(self.found, indent=2, default=str), encoding="utf-8")

    def command(self, name: str, words: Sequence[str], share: float = 1.0, may_fail: bool = False, **more: str) -> int:
        """Run a command, for at most a share of the seconds that are left; note its exit code and its last lines.

        A command that fails, is not there or takes too long makes the step fail, unless it may; the step goes on.
        """
        folder, started = self.out / self.name, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}.txt"
        limit = max(1.0, share * self.left)
        try:
            code = _run(words, file, limit, {**os.environ, **more})
        except OSError as error:
            file.write_text(f"{error}\n")
            code = 127
        except subprocess.TimeoutExpired:
            code = 124
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        self.note(name, {"code": code, "seconds": round(time.monotonic() - started, 2), "last": lines[-5:]})
        print(f"{name}: exit code {code}", flush=True)
        self.failed = self.failed or (code != 0 and not may_fail)
        return code


def _run(words: Sequence[str], file: Path, seconds: float, environment: dict[str, str]) -> int:
    from embershard.distributed.supervision import end_with_parent  # it loads numpy

    with file.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            words, cwd=PROJECT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=end_with_parent,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def machine(place: Place) -> None:
    """Versions, topology, memory, settings of the system."""
    from embershard.launch.versions import git_commit, versions

    place.note("versions", {**versions(), "commit": git_commit(), "platform": platform.platform()})
    sent = {name: value for name, value in os.environ.items() if name.startswith(_SENT_VARIABLES)}
    place.note("environment", dict(sorted(sent.items())))
    for name, path in (
        ("thp", "/sys/kernel/mm/transparent_hugepage/enabled"),
        ("numa", "/sys/devices/system/node/online"),
        ("driver", "/proc/driver/nvidia/version"),
        ("memory", "/proc/meminfo"),
        ("limits", "/proc/self/limits"),
    ):
        with contextlib.suppress(OSError):
            place.note(name, Path(path).read_text(encoding="utf-8").splitlines()[:60])
    programs = {
        "gpus": ["nvidia-smi"],
        "gpus_in_full": ["nvidia-smi", "-q"],
        "topology": ["nvidia-smi", "topo", "-m"],
        "cpu": ["lscpu"],
        "compiler": ["gcc", "--version"],
        "toolkit": ["nvcc", "--version"],
        "disks": ["df", "-h"],
        "packages": [sys.executable, "-m", "pip", "list"],
    }
    for name, words in programs.items():
        place.command(name, words, share=0.3, may_fail=True)


def doctor(place: Place) -> None:
    """`embershard doctor`."""
    place.command("doctor", [*EMBERSHARD, "doctor", "--json"])


def lookup(place: Place) -> None:
    """FBGEMM's forward, backward and update of 26 tables beside plain torch; whether two equal trainings are equal with
    thousands of uses of a row; its time."""
    from tests.gpu.machine_checks import is_same_twice, lookup_differences, seconds_of_a_lookup

    place.note("different", lookup_differences(place.device))
    is_same = {"deterministic": is_same_twice(place.device, True), "default": is_same_twice(place.device, False)}
    place.note("is_same_twice", is_same)
    place.failed = bool(place.found["different"]) or not is_same["deterministic"]
    rows, batch = (100_000, 65_536) if place.num_gpus else (1000, 512)
    place.note("milliseconds", round(seconds_of_a_lookup(place.device, rows, batch) * 1e3, 3))


def lock(place: Place) -> None:
    """Page-lock host memory while kernels are launched: how long a GiB takes, and how long a launch waits."""
    from embershard.machine import host_memory
    from tests.gpu.machine_checks import launches_while_locking

    num_bytes = min(16 * _GIB, host_memory().available_bytes // 4)
    place.note("found", launches_while_locking(num_bytes))


def run_tests(place: Place, *files: str, options: Sequence[str] = ()) -> None:
    """Run files of tests of this folder, each as a command."""
    for number, file in enumerate(files):
        command = [sys.executable, "-m", "pytest", "-q", "-rs", *options, f"tests/gpu/test_{file}.py"]
        place.command(file, command, share=1 / (len(files) - number))


def kernels(place: Place) -> None:
    """Transfers, small rows, maps and plans by kernels, against loops."""
    run_tests(place, "transfers", "small_rows", "key_map", "plans")


def exactness(place: Place) -> None:
    """Training beside stock TorchRec: look-ahead, modes, models, more than 1,024 uses of a row."""
    run_tests(place, "exactness", "look_ahead", "modes", "runs", "train_cli")


def sanitizers(place: Place) -> None:
    """compute-sanitizer, and torch's search for races between streams."""
    run_tests(place, "sanitizers")


def quickstart(place: Place, **settings: Any) -> list[str]:
    """Return settings of a short quickstart."""
    given: dict[str, Any] = {"train.device": place.device, "train.max_steps": 60, "checkpoint.every_steps": "none"}
    given["train.eval_every"] = "none"
    if not place.num_gpus:
        given |= {"data.synthetic.num_samples": 20_000, "data.synthetic.scale": 0.002, "train.batch_size": 64}
        given |= {"profile.samples": 2000, "cache.ratio": 0.2}
    return [word for name, value in (given | settings).items() for word in ("--set", f"{name}={value}")]


def waits(place: Place, **settings: Any) -> None:
    """Waits of the training thread for the GPU, by the line that waits, in a short training."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(here, MASTER_PORT=port)
    from embershard.commands import cli

    run_dir = place.out / place.name / "run"
    with counted_waits(first_step=20) as counted:
        code = cli.main(["train", "quickstart", "--run-dir", str(run_dir), *quickstart(place, **settings)])
    place.failed = code != 0 or not counted.num_steps
    place.note("steps", counted.num_steps)
    place.note("waits_per_step", {line: count / counted.num_steps for line, count in counted.lines.most_common()})


@dataclass
class Waits:
    """Steps that were watched, and how often each line waited for the GPU: for an operation's result, which torch's
    sync debug mode tells, or for an event or a stream, also one that was done already."""

    num_steps: int = 0
    lines: Counter[str] = field(default_factory=Counter)

    def add(self, message: Any, *_: Any, **__: Any) -> None:
        """Count a warning of torch's sync debug mode, if it is one; shows no warning."""
        if "synchroniz" in str(message):
            self.count()

    def around(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits, and is counted."""

        def counted(*given: Any) -> Any:
            self.count()
            return wait(*given)

        return counted

    def count(self) -> None:
        """Count a wait, by the last lines of ours and of anybody."""
        stack = [frame for frame in traceback.extract_stack()[:-2] if Path(frame.filename).name not in _NOT_OURS]
        ours = [frame for frame in stack if "/embershard/" in frame.filename] or stack
        places = dict.fromkeys(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in (ours[-1], stack[-1]))
        self.lines[" <- ".join(places)] += 1


@contextlib.contextmanager
def counted_waits(first_step: int) -> Iterator[Waits]:
    """Count the waits of all steps of `LookAheadPipeline` from the first one on."""
    import torch

    from embershard.pipeline import LookAheadPipeline

    counted, number, step = Waits(), 0, LookAheadPipeline.step
    on_gpu = torch.cuda.is_available()

    def watched(pipeline: LookAheadPipeline, batches: Any) -> Any:
        nonlocal number
        number += 1
        if number == first_step:
            warnings.resetwarnings()
            warnings.simplefilter("always")
            warnings.showwarning = counted.add
            for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
                patches.enter_context(mock.patch.object(owner, "synchronize", counted.around(owner.synchronize)))
            if on_gpu:
                torch.cuda.set_sync_debug_mode("warn")
        found = step(pipeline, batches)  # raises after the last batch
        counted.num_steps += number >= first_step
        return found

    with warnings.catch_warnings(), contextlib.ExitStack() as patches:
        LookAheadPipeline.step = watched  # type: ignore[method-assign]
        try:
            yield counted
        finally:
            LookAheadPipeline.step = step  # type: ignore[method-assign]
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")


def trace(place: Place) -> None:
    """The quickstart, with a trace of three steps."""
    run_dir = place.out / place.name / "run"
    words = ["train", "quickstart", "--run-dir", str(run_dir), "--profile-steps", "30:32", *quickstart(place)]
    place.command("train", [*EMBERSHARD, *words])
    for file in sorted(run_dir.glob("profile/*.stages.json")):
        place.note(file.name, json.loads(file.read_text(encoding="utf-8")))


#: Settings of short trainings, beside the quickstart's. The pytest files have the others: models, labels, means.
MODES: dict[str, dict[str, Any]] = {
    "pooled": {},
    "staged": {"cache.transfer": "staged"},
    "rows": {"sharding.exchange": "rows"},
    "hot_cold": {"sharding.mode": "hot_cold", "sharding.hot_bytes": 1_000_000},
    "static": {"cache.policy": "static", "look_ahead.lookahead": 0},
    "fp16": {"model.table_dtype": "fp16"},
    "small_rows": {"cache.host_dtype": "int8"},
    "resident": {"cache.enabled": "false"},
}


def switches() -> dict[str, dict[str, Any]]:
    """Return settings of all precisions, and of the deterministic mode, as far as this version has them."""
    from embershard.training.config import TrainConfig

    kinds = get_type_hints(TrainConfig)
    found: dict[str, dict[str, Any]] = {name: {"train.precision": name} for name in get_args(kinds["precision"])}
    if "deterministic" in kinds:
        found["deterministic"] = {"train.deterministic": "true"}
    return {name: settings for name, settings in found.items() if name != "fp32"}


def modes(place: Place) -> None:
    """Every mode and switch for 60 steps, and `embershard verify`."""
    cases = MODES | switches()
    if place.num_gpus:
        cases["cuda_graph"] = {"train.cuda_graph": "true"}
    for number, (name, settings) in enumerate(cases.items()):
        words = ["train", "quickstart", "--run-dir", str(place.out / place.name / "runs" / name)]
        share = 1 / (len(cases) + 2 - number)
        place.command(name, [*EMBERSHARD, *words, *quickstart(place, **settings), "--nproc", "1"], share)
    for name, settings in (("verify", {}), ("verify_small_rows", MODES["small_rows"])):
        words = ["verify", "quickstart", "--steps", "20", "--nproc", "1", *quickstart(place, **settings)]
        place.command(name, [*EMBERSHARD, *words], 0.5)


def figures(place: Place) -> None:
    """Steps beside FBGEMM's own cache and all rows in the GPU's memory, at three precisions, with and without a thread
    that plans. The tables are smaller than Criteo's. (No switch changes the atomics of the kernels.)"""
    cases = [("kaggle", 16_384, precision) for precision in ("fp32", "tf32", "bf16")]
    cases += [("terabyte", 65_536, precision) for precision in ("bf16", "tf32")]
    sizes: dict[str, dict[str, Any]] = {
        "kaggle": {"scale": 0.25},
        "terabyte": {"max-rows": 2_000_000},
    }  # to be built within the time
    if not place.num_gpus:
        cases = [("kaggle", 64, "bf16")]
        sizes["kaggle"] = {"scale": 0.0005, "dim": 16, "blocks": 2, "block-steps": 2, "warmup-steps": 2, "lookahead": 4}
    for number, (tables, batch, precision) in enumerate(cases):
        name, share = f"{tables}_{precision}", 1 / (len(cases) - number)
        words = ["--tables", tables, "--batch-size", str(batch), "--precision", precision, "--ratios", "0.015"]
        words += ["--variants", "embershard lookahead", "uvm caching lru", "--output", str(place.out / f"{name}.json")]
        words += [word for name, value in sizes[tables].items() for word in (f"--{name}", str(value))]
        words += ["--link-dims", *(["128"] if place.num_gpus and number == 0 else [])]
        place.command(name, [sys.executable, "-m", "benchmarks.gpu_compare", *words], share)


def nsys(place: Place) -> None:
    """A few steps under Nsight Systems."""
    program = shutil.which("nsys")
    if program is None:
        place.note("skipped", "nsys is not installed; the step `trace` has torch's profiler")
        return
    target = str(place.out / place.name / "steps")
    words = [program, "profile", "-t", "cuda,nvtx,osrt", "-o", target, "--force-overwrite", "true"]
    words += [*EMBERSHARD, "train", "quickstart", "--nproc", "1", *quickstart(place, **{"train.max_steps": 30})]
    place.command("nsys", [*words, "--run-dir", str(place.out / place.name / "run")])


def several(place: Place) -> None:
    """Several ranks: memory on each GPU, and how long it takes to end after one is killed, or stopped."""
    from tests.gpu.machine_checks import seconds_to_end

    num_ranks = place.num_gpus or 2
    words = ["--nproc", str(num_ranks), *quickstart(place, **{"train.max_steps": 60})]
    place.command(
        "train", [*EMBERSHARD, "train", "quickstart", "--run-dir", str(place.out / "several/run"), *words], 0.3
    )
    words = ["--nproc", str(num_ranks), *quickstart(place, **{"train.max_steps": 1_000_000, "train.epochs": 1000})]
    for name in ("SIGTERM", "SIGKILL", "SIGSTOP"):
        run_dir = place.out / place.name / name
        command = [*EMBERSHARD, "train", "quickstart", "--run-dir", str(run_dir), "--hang-seconds", "10", *words]
        place.note(name, seconds_to_end(command, run_dir, signal.Signals[name], place.left / 2))


def resume(place: Place) -> None:
    """Two nodes of a rank each on this machine (torchrun), and the run goes on with one rank."""
    if place.num_gpus == 1:
        place.note("skipped", "needs two GPUs, or none")
        return
    run_dir = str(place.out / place.name / "run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    agent += ["--rdzv_backend", "c10d", "--rdzv_endpoint", address, "-m", "embershard", "train", "quickstart"]
    samples = {"train.global_batch_size": 128, "train.batch_size": "none"}
    given = quickstart(place, **samples)
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(place.num_gpus)))).split(",")
    nodes = []
    for number in range(2):
        visible = {"CUDA_VISIBLE_DEVICES": gpus[number]} if place.num_gpus else {}
        words = (f"node_{number}", [*agent, "--run-dir", run_dir, *given], 0.6)
        nodes.append(threading.Thread(target=place.command, args=words, kwargs=visible))
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    words = ["train", "quickstart", "--run-dir", run_dir, "--resume", "--nproc", "1"]
    place.command("resume", [*EMBERSHARD, *words, *quickstart(place, **{"train.max_steps": 90, **samples})])
    result = Path(run_dir, "result.json")
    place.note("steps", json.loads(result.read_text(encoding="utf-8"))["steps"] if result.is_file() else None)
    place.failed = place.failed or place.found["steps"] != 90


@dataclass(frozen=True)
class Step:
    """A step of the hour.

    Attributes:
        minutes: that it may take.
        num_gpus: that it needs; with 0 it runs on a CPU, too.
        value: where time is short, steps of higher value are taken.
    """

    run: Callable[[Place], None]
    minutes: float
    num_gpus: int = 0
    value: int = 0

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.run.__name__


STEPS = (
    Step(machine, 1, value=10),
    Step(doctor, 3, value=4),
    Step(lookup, 1.5, value=7),
    Step(lock, 2, num_gpus=1, value=5),
    Step(kernels, 3, num_gpus=1, value=9),
    Step(waits, 3, value=6),
    Step(exactness, 10, num_gpus=1, value=8),
    Step(trace, 2.5, value=3),
    Step(modes, 8, value=4),
    Step(figures, 10, value=5),
    Step(sanitizers, 4, num_gpus=1, value=2),
    Step(nsys, 2, num_gpus=1, value=1),
    Step(several, 6, value=2),
    Step(resume, 4, value=1),
)
