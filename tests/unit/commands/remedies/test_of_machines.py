"""Messages about machines: their memory, their disks, what started a process, and comparisons with stock TorchRec."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from embershard.launch import launcher, rank, run_dir
from embershard.launch.rank import Job
from embershard.launch.rank_group import Ended
from embershard.launch.run_dir import lock_run_dir
from embershard.machine import HostMemory, MapLimit
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from embershard.training.fit import machine_limits
from embershard.training.fit.memory_needs import RanksHere, memory_needs
from embershard.training.fit.model_size import table_rows
from tests.covering import matrix
from tests.unit.commands.remedies.table import FILES, LEFT_OUT, Remedy, cases, check, said_by

_LARGE = """
[model]
embedding_dim = 16
[profile]
samples = 20
[train]
batch_size = 8
max_steps = 1
"""
FILES |= {
    "user.toml": "[tables.t_user_id]\n",
    "large.toml": FILES["city.toml"].replace("num_rows = 99", "num_rows = 200000") + _LARGE,  # type: ignore[union-attr, operator]
}
_TRAIN = "train city.toml --nproc 1 --run-dir new --set train.batch_size=8 --set train.max_steps=1"
_LARGE_TRAIN = "train large.toml --nproc 1 --run-dir new"
_AT_ONCE = f"{_LARGE_TRAIN} --set train.init=torchrec"
_SYNTHETIC = f"{_TRAIN.replace('city', 'tiny')} --set train.init=torchrec"
_ROWS = "--set data.table.features.user_id.num_rows="
_IN_FILE = "--set cache.host=file --set cache.host_dir=rows --set cache.host_bytes="
_MAPPED = "--set cache.host=mmap --set cache.host_dir="
_FITS = r"Each of these fits: .*"


class Small(NamedTuple):
    """A row on a machine that has less memory than the run needs."""

    less_bytes: int
    row: Remedy


OF_MEMORY = [
    Small(6_000_000, Remedy((_AT_ONCE,), "", "", rf"{_FITS}(--set cache\.host=mmap --set cache\.host_dir=)FOLDER",
        "{}rows")),
    Small(6_000_000, Remedy((_AT_ONCE,), "", "", rf"{_FITS}than 1\d\d,000 rows \((data.table.features.)NAME.num_rows",
        "--set {}user_id.num_rows=100000")),
    *(
        Small(6_000_000, Remedy((_LARGE_TRAIN,), "", "", rf"If all are, .*{_FITS}(--set cache\.host_dtype={kind})",
            wrong_code=0, leads_to="^(?!.*If all are)"))
        for kind in ("int8", "fp16")
    ),
]  # fmt: skip
MORE_OF_MEMORY = [
    Small(6_000_000, Remedy((_AT_ONCE,), "", "", rf"{_FITS}(--set model\.table_dtype=fp16)")),
    Small(2_000_000, Remedy((_LARGE_TRAIN,), "", "--set cache.ratio=1.0", rf"{_FITS}(--set cache\.ratio=\S+);",
        instead=True)),
    Small(1_000_000, Remedy((_SYNTHETIC,), "", "--set data.synthetic.scale=0.02",
        rf"{_FITS}(--set data\.synthetic\.scale=\S+)", instead=True)),
]  # fmt: skip
#: The disk of the folder "rows" has a few bytes left.
OF_DISKS = [
    Remedy((_TRAIN,), "", f"{_MAPPED}rows", rf"{_FITS}(--set cache\.host=memory --set \S+=none)"),
]  # fmt: skip
MORE_OF_DISKS = [
    Remedy((_TRAIN,), "", f"{_IN_FILE}6000", rf"{_FITS}(--set cache\.host=memory --set \S+=none --set \S+=none)"),
    Remedy((_TRAIN,), "", f"{_MAPPED}rows", "(Choose a folder on another disk)", f"{_MAPPED}other", True),
]  # fmt: skip
OF_SIZES = [
    Remedy((_TRAIN,), "", "--set sharding.device_bytes=50000", rf"{_FITS}(--set sharding\.device_bytes=\d+)",
        instead=True),
    Remedy((_TRAIN,), "", "--set cache.device_bytes=50", r"give rank 0 at least (\d+) bytes",
        "--set cache.device_bytes={}", True),
    Remedy((_TRAIN,), "", f"{_MAPPED}city.csv/rows", r"(check the path)", f"{_MAPPED}rows", True),
]  # fmt: skip
_OVERFULL = f"train tiny.toml --nproc 1 --set cache.ratio=0.01 {_IN_FILE}20000"
MORE_OF_SIZES = [
    Remedy((_OVERFULL,), "", "--run-dir full --set train.batch_size=200", r"set a larger (cache\.host_bytes), or",
        "--run-dir new --set train.batch_size=200 --set {}=40000", True),
    Remedy((_OVERFULL,), "", "--run-dir full --set train.batch_size=200", "or (a smaller batch)",
        "--run-dir new --set train.batch_size=20", True),
    Remedy((_TRAIN,), "", f"{_IN_FILE}50", r"Give rank 0 at least (\d+) bytes", f"{_IN_FILE}{{}}", True),
    Remedy((_TRAIN,), "", f"{_IN_FILE}3000 --set cache.ratio=0.9", "or (a smaller cache)",
        f"{_IN_FILE}3000 --set cache.ratio=0.1", True),
    Remedy((_TRAIN,), "", "--set cache.transfer=triton_uva", 'set "(plain)" or leave it out',
        "--set cache.transfer={}", True),
    Remedy((_TRAIN,), "", "--set cache.transfer=triton_uva", 'set "plain" or (leave it out)', LEFT_OUT, True),
]  # fmt: skip
_PLAN = "plan city.toml --tables user.toml --ranks 1 -o mine.json"
_VERIFY = "verify city.toml --nproc 1 --steps 2 --set train.batch_size=8"
_NOWHERE = _TRAIN.replace("--run-dir new", "")
_NO_FOLDER = _TRAIN.replace("--nproc 1 --run-dir new", "")
_IDS = "--set data.table.features.user_id.num_rows=192 --set data.table.features.user_id.mapping=ids"
OF_COMPARISONS = [
    Remedy((_VERIFY,), "", "--set model.frozen=[user_id]", r"Compare with `(--set model\.frozen=\[\])`"),
    Remedy((f"{_VERIFY} --plan mine.json",), "", "", r"\((embershard plan) without --replicate-rows\)", LEFT_OUT,
        first=_PLAN),
    Remedy((_VERIFY,), "", _IDS, r"let ids share rows: (--set \S+)"),
    Remedy(("verify tiny.toml --nproc 1 --set cache.ratio=0.05",), "", "--steps 1",
        r"Compare more steps \((--steps)\)", "{} 40", True, wrong_code=0,
        leads_to="^(?!.*No pin mattered)"),
]  # fmt: skip
MORE_OF_COMPARISONS = [
    Remedy((_VERIFY,), "", "--set cache.enabled=false", "Set it to (true)", "--set cache.enabled={}", True),
    Remedy((_VERIFY,), "", "--set sharding.mode=data_parallel", 'Compare in mode "(sharded)"',
        "--set sharding.mode={}", True),
    Remedy(("profile --config city.toml -o out.npz --hot 4KiB",), "", _IDS, r"let ids share rows: (--set \S+)"),
]  # fmt: skip


class _Group:
    """In place of ranks as processes: one does its job here, several are only counted."""

    has_trained = False

    def __init__(self, num_ranks: int, command: object, address: object, asked: object, hang: object, stacks: object,
                 job: Job) -> None:  # fmt: skip
        self._num_ranks, self._job = num_ranks, job

    def run(self) -> Ended:
        if self._num_ranks == 1:
            return Ended(rank.do(lambda: self._job, stops_in_order=self._job.stops_in_order))
        print(f"{self._num_ranks} ranks were started")
        return Ended(0)


@pytest.fixture(autouse=True)
def started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(folder: Path) -> None:  # a lock holds until a process ends
        lock_run_dir(folder)
        run_dir._held_locks.pop().close()

    monkeypatch.setattr(launcher, "RankGroup", _Group)
    monkeypatch.setattr("embershard.commands.train.run.lock_run_dir", check)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("small", "command"),
    [
        (OF_MEMORY[0], OF_MEMORY[0].row.commands[0]),
        *(matrix(small, small.row.commands[0]) for small in [*OF_MEMORY[1:], *MORE_OF_MEMORY]),
    ],
)
def test_what_is_advised_of_memory_helps(
    small: Small, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = f"{command} {small.row.words}".split()
    settings = [setting for option, setting in itertools.pairwise(words) if option == "--set"]
    config = load_config(RunConfig, Path(words[1]), settings)
    needs = memory_needs(config, table_rows(config), RanksHere(1, 1, "cpu"), None)
    taken = needs.start_bytes if small.row.wrong_code else needs.host_bytes
    has = HostMemory(1 << 40, taken - small.less_bytes)
    monkeypatch.setattr(machine_limits, "host_memory", lambda: has)
    check(small.row, command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), [*cases(OF_DISKS), *cases(MORE_OF_DISKS, pytest.mark.matrix)])
def test_what_is_advised_of_disks_helps(
    row: Remedy, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    usage, here = shutil.disk_usage, Path.cwd()

    def few_bytes(folder: Path) -> Any:
        return usage(here)._replace(free=1000 if Path(folder).absolute() == here / "rows" else 1 << 40)

    Path("rows").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", few_bytes)
    check(row, command, capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::embershard.cache.planner.CacheGrowthWarning")
@pytest.mark.parametrize(
    ("row", "command"),
    [*cases([*OF_SIZES, *OF_COMPARISONS]), *cases([*MORE_OF_SIZES, *MORE_OF_COMPARISONS], pytest.mark.matrix)],
)
def test_what_is_advised_of_sizes_and_comparisons_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    if "mine.json" in command:
        assert said_by(shlex.split(f"{_PLAN} --replicate-rows 999"), capsys)[0] == 0
    check(row, command, capsys)


_AS_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class Started(NamedTuple):
    """A row of a process with variables of the environment."""

    variables: Mapping[str, str]
    row: Remedy


def _unset(names: str) -> None:
    for name in names.split():
        del os.environ[name]


OF_STARTS = [
    Started(_AS_RANK, Remedy((_TRAIN.replace("--nproc 1", ""),), "", "--nproc 1", "Leave (--nproc) out", LEFT_OUT,
        True)),
    Started(_AS_RANK, Remedy((_TRAIN,), "", "", "to start ranks here: unset ([A-Z_ ]+)", done=_unset)),
    Started({"RANK": "1", "WORLD_SIZE": "4"}, Remedy((_TRAIN,), "", "", r"unset ([A-Z_ ]+)", done=_unset)),
    Started({"TORCHELASTIC_RUN_ID": "mine"}, Remedy((_TRAIN,), "", "", "Call this command (without torchrun)",
        done=lambda _: _unset("TORCHELASTIC_RUN_ID"))),
    Started(_AS_RANK, Remedy(("train",), "", "city.csv --run-dir new",
        r"Write the settings once: embershard (data inspect .* -o run\.toml)\; then give", "run.toml --run-dir new "
        "--set train.max_steps=1", True, wrong_code=1, first="{}")),
    Started({}, Remedy((_TRAIN.replace("--nproc 1", ""),), "", "--nproc 999", r"Use (--nproc \d+) ", instead=True,
        wrong_code=0, leads_to="^(?!.*Use --nproc)")),
]  # fmt: skip
MORE_OF_STARTS = [
    Started({**_AS_RANK, "TORCHELASTIC_MAX_RESTARTS": "3"}, Remedy((_NO_FOLDER,), "", "",
        r"Give (--run-dir), or", "--run-dir new", wrong_code=1)),
    Started({**_AS_RANK, "TORCHELASTIC_MAX_RESTARTS": "3"}, Remedy((_NO_FOLDER,), "", "",
        "or give torchrun (--rdzv-id)", wrong_code=1, done=lambda _: os.environ.update(TORCHELASTIC_RUN_ID="mine"))),
    Started({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, Remedy((_TRAIN,), "", "", r"or (unset it)", wrong_code=0,
        done=lambda _: _unset("TORCH_DISTRIBUTED_DEBUG"), leads_to="^(?!.*or unset it)")),
    Started({}, Remedy(("train city.toml --nproc 1 --set train.batch_size=8 --set train.max_steps=1",), "",
        "--run-dir city.csv/new", "Use another (--run-dir)", "{} new", True)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started", "command"),
    [
        *((started, started.row.commands[0]) for started in OF_STARTS[::3]),
        *(
            matrix(started, started.row.commands[0])
            for started in [*OF_STARTS[1::3], *OF_STARTS[2::3], *MORE_OF_STARTS]
        ),
    ],
)
def test_what_is_advised_of_starts_helps(started: Started, command: str, capsys: pytest.CaptureFixture[str]):
    with mock.patch.dict(os.environ, started.variables):
        check(started.row, command, capsys)


_LIMITED = [
    Remedy((_AT_ONCE,), "", "", "Raise (the limit)", done=lambda _: mock.patch.stopall()),
    Remedy((_LARGE_TRAIN,), "", f"{_ROWS}200000", r"(make tables) or dims smaller", f"{_ROWS}2000", True),
    Remedy((_AT_ONCE,), "", "", r"(cache\.host = \"mmap\") keeps rows in files", f"{_MAPPED}rows"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), [*cases(_LIMITED[:1]), *cases(_LIMITED[1:], pytest.mark.matrix)])
def test_what_is_advised_of_the_memory_of_a_process_helps(
    row: Remedy, command: str, capsys: pytest.CaptureFixture[str]
):
    """As with a limit of a process that its other memory leaves little of."""
    take = mmap.mmap

    class Limited:
        """Memory in large pieces could not be had; of files it could."""

        def __new__(cls, file: int, num_bytes: int, *words: Any, **options: Any) -> Any:
            if file == -1 and num_bytes > 5_000_000:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return take(file, num_bytes, *words, **options)

    with mock.patch.object(mmap, "mmap", take):  # in place again behind the test, whatever stops the other one
        mock.patch.object(mmap, "mmap", Limited).start()
        check(row, command, capsys)


@pytest.mark.slow
def test_what_is_advised_of_the_memory_that_may_be_mapped_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    limits = [MapLimit("ulimit -v", 10**9, 0)]
    monkeypatch.setattr(launcher, "limits_of_maps", lambda: limits)
    row = Remedy((_TRAIN,), "", "", r"Raise it: (ulimit -v unlimited)", done=lambda _: limits.clear())
    check(row, _TRAIN, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        Remedy((_NOWHERE,), "", "--run-dir new", "or use another (--run-dir)", "{} other", True),
        Remedy((_NOWHERE,), "", "--run-dir new", "(Wait for it)", done=lambda _: run_dir._held_locks.pop().close()),
    ],
)
def test_what_is_advised_of_a_folder_in_use_helps(row: Remedy, capsys: pytest.CaptureFixture[str]):
    lock_run_dir(Path("new"))
    check(row, _NOWHERE, capsys)
