"""Without a GPU: whole runs of every mode, architecture, task and table type on a model of one, from the first batch to
scores. Operands are on the device, streams wait for each other, memory is not given away too early, what comes out is
what a CPU computes, and in a step the host waits at as few lines as `most_waits` says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import batched_embedding_kernel, model_parallel

from embershard.cache import CacheConfig
from embershard.cache.gpu import launch as kernel_launch
from embershard.cache.gpu.small_rows import SmallSlots
from embershard.cache.homes import small_sizes as sizes
from embershard.cache.rows import choose_transfer
from embershard.cache.rows.uva_transfer import RowKernel
from embershard.commands.plan.command import main as plan_command
from embershard.commands.profile.command import main as profile_command
from embershard.data import open_source
from embershard.data.schema import Pooling, Task
from embershard.distributed import Ranks, Supervision
from embershard.distributed.publish.published import published, read_files, read_publication
from embershard.errors import ConfigError
from embershard.extras import accumulation
from embershard.extras.hot_cold.hot_tables import HotTables
from embershard.extras.length_groups.sizes import MOST_PADDING
from embershard.extras.publications.sources import PublishedPool
from embershard.extras.verify.equivalence import _tensors_of
from embershard.models import table_modules
from embershard.models.config import WITH_HISTORY, PretrainedTable
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.decoding import to_toml
from embershard.settings.files import RUN_CONFIG
from embershard.sharding.config import ShardingConfig
from embershard.sharding.pins import TablePin
from embershard.sharding.plan import Plan
from embershard.sharding.shards import Kernel
from embershard.sharding.torchrec import slots
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training import trainer as trainer_module
from embershard.training.config import RunConfig
from embershard.training.parts.order import parts_of
from embershard.training.parts.part import Part
from embershard.training.reports import TrainReport
from embershard.training.steps import Steps
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from embershard.training.warm_start import WarmStart
from tests.covering import keep, matrix
from tests.ranks import parity, rows_exchange
from tests.ranks.parity import snapshot
from tests.ranks.small_rows import snapshot as small_snapshot
from tests.unit.cache.torch_operations import torch_planning
from tests.unit.data.targets import FEATURES
from tests.unit.gpu_model.cases import STEPS, Case, cases, config_of, write_samples
from tests.unit.gpu_model.collectives import mirrored_ranks
from tests.unit.gpu_model.device import CUDA, Gpu
from tests.unit.gpu_model.fbgemm import ModelledTables, slice_of
from tests.unit.gpu_model.training import _copy_rows, compute_launch, watch_marks

pytestmark = pytest.mark.slow


@dataclass
class Life:
    """`losses`: of the batches and labels; `rows`: weights and states in the end, rows that were published, and scores,
    by name."""

    losses: list[float]
    rows: dict[str, Tensor]

    def different(self, other: Life) -> list[str]:
        """Names of what differs, by more than sums in another order do: on a CPU FBGEMM is told of small tables."""
        mine, others = ({"losses": torch.tensor(life.losses), **life.rows} for life in (self, other))
        common = sorted(mine.keys() & others.keys())
        return sorted(mine.keys() ^ others.keys()) + [name for name in common if not _same(mine[name], others[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    rtol = 1e-2 if one.dtype == torch.float16 else 1e-4
    return torch.allclose(one.double(), other.double(), rtol=rtol, atol=rtol / 10, equal_nan=True)


def live(config: RunConfig, ranks: Ranks, folder: Path, goes_on: bool) -> Life:
    """Train, publish, evaluate and save; if it `goes_on`, resume from the checkpoint, and score by it. Of two ranks
    only the first one is there, so their checkpoints would not be whole: they train and evaluate, and tell which rows
    were touched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _alone(config, ranks, folder, goes_on) if ranks.world_size == 1 else _first_of_two(config, ranks)


def _alone(config: RunConfig, ranks: Ranks, folder: Path, goes_on: bool) -> Life:
    checkpoints = folder / "checkpoints"
    life = _train(Trainer(config, ranks, checkpoints, export=_export))
    for _, path in published(folder / "published", "delta"):
        for file, tensors in read_files(path, read_publication(path)).items():
            life.rows.update({f"{path.name}/{file}/{name}": tensor for name, tensor in tensors.items()})
    if not goes_on:
        return life
    longer = replace(config, train=replace(config.train, max_steps=(config.train.max_steps or 0) + 1))
    trainer = Trainer(longer, ranks, checkpoints, export=_export)
    trainer.resume(checkpoints / f"step_{config.train.max_steps}")
    resumed = _train(trainer)
    trained = open_trained(config, checkpoints, ranks, config.train.max_steps)
    scorer = Scorer(trained, open_source(config.data), ranks, Supervision())
    life.rows["scores"] = torch.cat([each.columns() for each in scorer.scores()])
    life.rows.update({f"resumed/{name}": tensor for name, tensor in resumed.rows.items()})
    return replace(life, losses=[*life.losses, *resumed.losses])


def _first_of_two(config: RunConfig, ranks: Ranks) -> Life:
    trainer = Trainer(config, ranks)
    sources = [PublishedPool(pool) for pool in cached_embeddings(trainer.model)]
    life = _train(trainer)
    for number, source in enumerate(sources):
        for part in source.take():
            name = f"touched/{number}/{part.table}/{part.first_column}"
            life.rows.update({f"{name}/keys": part.keys, f"{name}/rows": part.rows})
    return life


def _train(trainer: Trainer) -> Life:
    losses: list[float] = []
    for report in trainer.train():
        if isinstance(report, TrainReport):
            losses += [report.loss, *(math.nan if each is None else each for each in report.label_losses.values())]
    if trainer.config.cache.host == "file":
        rows = _filed_snapshot(trainer)
    else:
        rows = (small_snapshot if trainer.config.cache.small_types else snapshot)(trainer.model)
    trainer.close()
    return Life(losses, rows)


def _filed_snapshot(trainer: Trainer) -> dict[str, Tensor]:
    """As `snapshot`, with rows of files in place of the memory that stands for them."""
    return {f"{name}/{part.first_row}": part.tensor.cpu().clone() for name, part in _tensors_of(trainer).items()}


def _export(checkpoint: Path, dtype: str, folder: Path) -> None:
    """In place of the base's programs, which are made of a checkpoint, on a CPU."""
    folder.mkdir()
    (folder / "base").touch()


class _Alike(DistributedDataParallel):
    """In place of DDP: its gradients are those of all ranks."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.parameters_to_ignore: set[str] = set()
        self.process_group = settings.get("process_group")
        self.require_backward_grad_sync, self.static_graph = True, False
        self._has_rebuilt_buckets, ignored = True, module._ddp_params_and_buffers_to_ignore
        own = [each for name, each in module.named_parameters() if each.requires_grad and name not in ignored]
        memory = torch.cat([torch.zeros_like(each).flatten() for each in own])
        for parameter, view in zip(own, memory.split([each.numel() for each in own]), strict=True):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._move, view.view_as(parameter)))

    @staticmethod
    def _move(view: Tensor, parameter: Tensor) -> None:
        """Let a gradient be a view of a bucket, as DDP does."""
        assert parameter.grad is not None
        parameter.grad = view.copy_(parameter.grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _lock_at_once(device: torch.device, tensors: Sequence[Tensor], before: Any = None) -> Any:
    """In place of the thread that locks host rows."""
    gpu = Gpu.active()
    for tensor in tensors:
        if tensor.numel():
            gpu.watch_rows(tensor)
        if before is not None:
            before(tensor.data_ptr(), tensor.nbytes)
        gpu.lock(tensor.untyped_storage().data_ptr())
    return SimpleNamespace(is_done=True)


@contextlib.contextmanager
def modelled_ranks(num_ranks: int = 1) -> Iterator[tuple[Gpu, Ranks]]:
    """A GPU, and the first of so many ranks on it."""
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mirrored_ranks(num_ranks))
        gpu = stack.enter_context(Gpu())
        table_modules._order.cache_clear()  # of another model of a GPU
        for owner, name, stand_in in (
            (slots, "SplitTableBatchedEmbeddingBagsCodegen", ModelledTables),
            (batched_embedding_kernel, "SplitTableBatchedEmbeddingBagsCodegen", ModelledTables),
            (accumulation, "SplitTableBatchedEmbeddingBagsCodegen", ModelledTables),
            (batched_embedding_kernel, "TableBatchedEmbeddingSlice", slice_of),
            (model_parallel, "DistributedDataParallel", _Alike),
            (choose_transfer, "lock_for", _lock_at_once),
            (RowKernel, "_launch", _copy_rows),
            (SmallSlots, "attach", watch_marks),
            (sizes, "SMALL_TABLE_ROWS", 20),  # larger tables have small rows
            (kernel_launch, "_run", compute_launch),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "mem_get_info", lambda device=None: (80 << 30, 80 << 30)),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
            (torch.cuda, "set_rng_state", lambda state, device=None: None),
            (torch.cuda, "synchronize", lambda device=None: gpu.wait_for_stream("synchronize")),
            (torch.cuda, "device", lambda device=None: contextlib.nullcontext()),
            (Ranks, "with_own_group", lambda self: self),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(torch_planning())
        yield gpu, Ranks(0, num_ranks, 0, num_ranks, CUDA)


KEPT, OTHERS = cases()
#: One of each mode, which `make test` trains.
_OF_MODES = list({case.mode: case for case in reversed(KEPT)}.values())
_CHECKS_IDS = "modules.py"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples") / "samples.parquet")


@dataclass
class OnModel:
    """A life on the modelled GPU; `waits` are those of training steps, by line, of all code but TorchRec's, and the
    cache's, in which torch's operations plan in place of kernels (`test_planning.py` counts theirs). `dense`: fused
    kernels that trained dense layers, by name."""

    life: Life
    problems: list[str]
    waits: Counter[str]
    dense: dict[str, int]

    @property
    def waiting_lines(self) -> set[str]:
        """Lines at which the host waited in every step but one: lists that are copied to the device for the first batch
        are no such lines. Not counted are what `modules.py` waits for, as ids are checked on the device without
        look-ahead, and the copy of hot rows before the first batch."""
        return {line for line, count in self.waits.items() if count >= STEPS - 1}


def life_on_model(case: Case, samples: Path, folder: Path, goes_on: bool = False) -> OnModel:
    folder.mkdir()
    begin, step, before, waits = Steps.next, Trainer.step, Counter[str](), Counter[str]()

    def begin_counted(self: Steps) -> Any:
        nonlocal before
        before = gpu.waits_at.copy()
        return begin(self)

    def step_counted(self: Trainer, batch: Any) -> Any:
        found = step(self, batch)
        for key, count in (gpu.waits_at - before).items():
            line = key.partition("(")[2].partition(" ")[0].rstrip(")")
            is_first_life = self.config.train.max_steps == STEPS
            if is_first_life and key.startswith("embershard: ") and not line.startswith(_CHECKS_IDS):
                waits[line] += count
        return found

    def load_uncounted(self: HotTables) -> None:
        counted = gpu.waits_at.copy()
        load(self)
        gpu.waits_at = counted

    load = HotTables.load
    with contextlib.ExitStack() as stack:
        gpu, ranks = stack.enter_context(modelled_ranks(case.num_ranks))
        for owner, name, function in (
            (Steps, "next", begin_counted), (Trainer, "step", step_counted), (HotTables, "load", load_uncounted)
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(mock.patch.dict(MOST_PADDING, cuda=0))
        life = live(config_of(case, samples, folder, "cuda"), ranks, folder, goes_on)
        dense = {name: count for (_, name), count in gpu.launches.items() if name.startswith("aten::_fused_")}
        return OnModel(life, list(dict.fromkeys(gpu.problems)), waits, dense)


def life_on_cpu(case: Case, samples: Path, folder: Path, goes_on: bool = False) -> Life:
    folder.mkdir()
    with (
        mirrored_ranks(case.num_ranks),
        mock.patch.object(sizes, "SMALL_TABLE_ROWS", 20),
        mock.patch.dict(MOST_PADDING, cpu=0),
    ):
        ranks = Ranks(0, case.num_ranks, 0, case.num_ranks, torch.device("cpu"))
        return live(config_of(case, samples, folder, "cpu"), ranks, folder, goes_on)


def most_waits(case: Case) -> int:
    """Lines at which the host waits in a step: for the sizes of what a mode sends or splits, or for the longest history
    of the batch. On two ranks the backward of copies waits for two more sizes, which no rank knows before."""
    by_mode = {"pooled": 0, "rows": 1, "hot_cold": 1, "planned": 1 if case.num_ranks > 1 else 0}[case.mode]
    if case.arch in WITH_HISTORY:
        by_mode = 1
    if case.num_ranks > 1:
        by_mode += {"hot_cold": 3, "planned": 2}.get(case.mode, 0)  # hot rows are found among the ids before
    return by_mode + (case.turn("stop", "stop", "skip") == "skip")


@pytest.mark.parametrize("case", keep(_OF_MODES, (*KEPT, *OTHERS)), ids=str)
def test_a_life_on_the_device(case: Case, samples: Path, tmp_path: Path) -> None:
    """Of those that `make test` runs, some go on from their checkpoint, and are compared with a CPU's."""
    is_whole = case in OTHERS or KEPT.index(case) % 8 == 0
    found = life_on_model(case, samples, tmp_path / "gpu", is_whole)
    assert found.problems == []
    assert len(found.waiting_lines) <= most_waits(case), found.waits
    # A life that goes on makes the states of a resume by a step, and trains one more.
    assert found.dense == {f"aten::_fused_{case.dense}_": STEPS + 2 * (is_whole and case.num_ranks == 1)}
    if is_whole:
        assert found.life.different(life_on_cpu(case, samples, tmp_path / "cpu", is_whole)) == []


def _with_vectors(config: RunConfig) -> RunConfig:
    """The rows of a table begin with those of a file, and stay as they are."""
    file = str(Path(config.publish.folder or "").with_name("vectors.npz"))
    np.savez(file, row=np.arange(150), embedding=np.random.default_rng(3).random((150, 8), np.float32))
    return replace(
        config, model=replace(config.model, frozen=("user",), pretrained={"user": PretrainedTable(file, rows="row")})
    )


def _in_a_file(config: RunConfig, folder: str) -> RunConfig:
    return replace(
        config,
        cache=CacheConfig(ratio=0.3, host="file", host_dir=folder, host_bytes=16_000),
        look_ahead=LookAheadConfig(2, 1),
        train=replace(config.train, init="counter"),
    )


#: What no choice among values turns on, each beside the settings of a case.
TURNED_ON: dict[str, Callable[[RunConfig], RunConfig]] = {
    "average": lambda config: replace(config, train=replace(config.train, ema=0.9)),
    "saves of what changed": lambda config: replace(
        config, checkpoint=replace(config.checkpoint, every_steps=1, full_every=4, keep_last=9)
    ),
    "a frozen table": _with_vectors,
    "rows in a file": lambda config: _in_a_file(config, config.publish.folder or ""),
}
#: The case beside which something is turned on.
_PLAIN = next(each for each in KEPT if each.mode == "pooled" and each.num_ranks == 1)


def _lives_on_the_device(samples: Path, folder: Path) -> None:
    """`_PLAIN` goes on from its checkpoint, waits in no step for more than without what is turned on, and is as on a
    CPU."""
    found = life_on_model(_PLAIN, samples, folder / "gpu", goes_on=True)
    assert found.problems == []
    assert len(found.waiting_lines) <= most_waits(_PLAIN), found.waits
    assert found.life.different(life_on_cpu(_PLAIN, samples, folder / "cpu", goes_on=True)) == []


_config_of = config_of


def _turn_on(monkeypatch: pytest.MonkeyPatch, change: Callable[[RunConfig], RunConfig]) -> None:
    monkeypatch.setitem(globals(), "config_of", lambda *args: change(_config_of(*args)))


_TOGETHER = ("average", "saves of what changed", "a frozen table")


@pytest.mark.parametrize(
    "names", [matrix(_TOGETHER), ("rows in a file",), *(matrix((name,)) for name in _TOGETHER)], ids=str
)
def test_what_is_turned_on_lives_on_the_device(samples, tmp_path, monkeypatch, names) -> None:
    _turn_on(monkeypatch, lambda config: functools.reduce(lambda found, name: TURNED_ON[name](found), names, config))
    _lives_on_the_device(samples, tmp_path)


@pytest.mark.extra
def test_a_warm_start_lives_on_the_device(samples, tmp_path, monkeypatch) -> None:
    """Tables have more rows or are new, and a layer has more columns."""
    before, runs = tmp_path / "before", list[Trainer]()
    _turn_on(monkeypatch, lambda config: _with_items(config, 300, "user"))
    life_on_cpu(_PLAIN, samples, before)
    (before / RUN_CONFIG).write_text(to_toml(config_of(_PLAIN, samples, before, "cpu")))

    def begun(run: Trainer, *others: Any) -> list[Part]:
        runs.append(run)
        return parts_of(run, *others[:-1], WarmStart(before))

    monkeypatch.setattr(trainer_module, "parts_of", begun)
    _turn_on(monkeypatch, lambda config: _with_items(config, 340))
    _lives_on_the_device(samples, tmp_path)
    assert [run.optimizers.begun["state_steps"] for run in runs] == [STEPS] * 4


@pytest.mark.extra
@pytest.mark.parametrize("mode", ["planned", matrix("pooled"), matrix("rows")])
def test_rows_by_wire_types_live_on_the_device(samples, tmp_path, monkeypatch, mode) -> None:
    """Of two ranks; the host waits for no more than with rows in fp32."""
    case = next(each for each in (*KEPT, *OTHERS) if each.mode == mode and each.num_ranks == 2)

    def in_bytes(config: RunConfig) -> RunConfig:
        return replace(config, sharding=replace(config.sharding, forward_dtype="int8", backward_dtype="fp8"))

    whole = life_on_model(case, samples, tmp_path / "fp32")
    _turn_on(monkeypatch, in_bytes)
    found = life_on_model(case, samples, tmp_path / "gpu")
    assert found.problems == []
    assert found.waiting_lines <= whole.waiting_lines, found.waits
    assert found.life.losses != whole.life.losses, "the control: rows in bytes train other weights"
    if mode == "planned":  # without a plan a CPU's tables have other places
        assert found.life.different(life_on_cpu(case, samples, tmp_path / "cpu")) == []


def _with_items(config: RunConfig, num_rows: int, *without: str) -> RunConfig:
    items = {name: replace(FEATURES[name], num_rows=num_rows, mapping="none") for name in ("item", "seen")}
    found = {name: each for name, each in {**FEATURES, **items}.items() if name not in without}
    return replace(config, data=replace(config.data, table=replace(config.data.table, features=found)))


@pytest.mark.matrix  # cases without the mark train by plans with every kernel
def test_a_plan_with_pins_lives_on_the_device(samples, tmp_path, monkeypatch) -> None:
    pins = {
        "t_user": TablePin(kernel="device"),
        "t_item": TablePin("table_wise", slots=180),
        "t_tags": TablePin(slots=40),
    }
    (tmp_path / "made").mkdir()
    config = config_of(_PLAIN, samples, tmp_path / "made", "cuda")
    pinned = ShardingConfig(pin=pins)
    files = {name: str(tmp_path / name) for name in ("run.toml", "profile.npz", "plan.json")}
    Path(files["run.toml"]).write_text(to_toml(replace(config, sharding=pinned)))
    assert profile_command(["--config", files["run.toml"], "-o", files["profile.npz"]]) == 0
    words = ["--topology", "h100x8", "--ranks", "1", "--profile", files["profile.npz"], "-o", files["plan.json"]]
    assert plan_command([files["run.toml"], *words]) == 0
    _turn_on(
        monkeypatch,
        lambda config: replace(
            config,
            cache=replace(config.cache, ratio=None),
            sharding=replace(pinned, plan=files["plan.json"]),
        ),
    )
    _lives_on_the_device(samples, tmp_path)


#: Settings of which no value, or not these, chooses what a GPU does, or whose operations nothing here stands in for.
_FROM_THE_HOST = "what batches are made of, or what is written, is the host's work"
NOT_HERE: dict[str, tuple[str, ...]] = {
    _FROM_THE_HOST: (
        *(
            "data.kind",
            "data.split",
            "data.table.decimal",
            "data.time.files",
            "data.bad_files",
            "data.deal",
            "data.criteo.id_mapping",
        ),
        *("data.criteo.dense_transform", "data.parquet.id_mapping", "data.parquet.dense_transform"),
        *("schedule.decay", "checkpoint.on_failed_save", "tracking.trackers"),
    ),
    "beside a plain case: `TURNED_ON`": ("cache.host=file",),
    "refused on a GPU, or for planning only": (
        *("train.device", "sharding.mode=data_parallel", "sharding.exchange=auto"),
    ),
    "FBGEMM has them on GPUs only: no table on a CPU can stand in": (
        *("embedding_optimizer.kind=adam", "embedding_optimizer.kind=partial_rowwise_adam"),
        *("embedding_optimizer.kind=lamb", "embedding_optimizer.kind=partial_rowwise_lamb"),
    ),
    "a kernel of another package, for GPUs only": ("model.hstu.kernel=fbgemm",),
    "torch casts by the device that it knows, and takes the model's tensors for those of a CPU": ("train.precision",),
    "TorchRec's codecs are FBGEMM's kernels": ("sharding.forward_dtype", "sharding.backward_dtype"),
    "of groups of ranks, which need two processes": ("sharding.sync_dtype",),
}


def values_of(config: Any, prefix: str = "") -> Iterator[tuple[str, frozenset[Any], Any]]:
    """Every setting with a choice: name, choices, value."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from values_of(value, f"{name}.")
        elif choices := frozenset(_choices(hints[field.name])):
            yield name, choices, value


def _choices(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for each in get_args(hint):
            yield from _choices(each)


def test_every_value_of_a_setting_is_run(samples: Path, tmp_path: Path) -> None:
    left: dict[str, set[Any]] = {}
    poolings, kernels, tasks = set(get_args(Pooling)), set(get_args(Kernel)), set(get_args(Task))
    for case in KEPT:
        (folder := tmp_path / str(case)).mkdir()
        config = config_of(case, samples, folder, "cuda")
        for name, choices, value in values_of(config):
            values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
            left.setdefault(name, set(choices)).difference_update(values)
        poolings -= {feature.pooling for feature in config.data.table.features.values()}
        tasks -= {config.data.table.task} if isinstance(config.data.table.task, str) else set(config.data.table.task)
        if config.sharding.plan is not None:
            kernels -= {table.kernel for table in Plan.load(Path(config.sharding.plan)).tables}
    excused = {name for names in NOT_HERE.values() for name in names}
    missing = {f"{name}={value}" for name, values in left.items() if name not in excused for value in values}
    assert missing - excused == set(), "a value of a setting that no run on the model of a GPU has: tell cases.py of it"
    assert (poolings, kernels, tasks) == (set(), set(), set())


def test_rows_that_ranks_share_are_refused(samples: Path, tmp_path: Path) -> None:
    config = config_of(KEPT[0], samples, tmp_path, "cuda")
    config = dataclasses.replace(config, sharding=ShardingConfig(mode="data_parallel"), cache=CacheConfig(ratio=0.6))
    with modelled_ranks(2) as (_, ranks), pytest.raises(ConfigError, match="Train on the CPU"):
        Trainer(config, ranks, tmp_path / "checkpoints", export=lambda *_: None)


_lookup = ModelledTables.forward
#: With a weight for each id, which the trainer's data do not have; gradients are dyadic, so no sum is rounded.
WEIGHTED: dict[str, dict[str, Any]] = {
    "pooled": {"exchange": "pooled"},
    "rows": {"exchange": "rows"},
    "hot_cold": {"exchange": "pooled", "hot": 40, "hot_every": 3},
    "replicated": {"exchange": "pooled", "replicated": (1, 3), "cached": (0, 2)},
}
_FURTHER_WEIGHTED = [matrix(*each) for each in itertools.product(WEIGHTED, ((), (0, 1))) if each != ("pooled", ())]


@pytest.mark.parametrize(("mode", "fp16"), [("pooled", ()), *_FURTHER_WEIGHTED])
def test_weighted_bags(mode: str, fp16: tuple[int, ...]) -> None:
    """With the mask that keeps FBGEMM from the gradients of weights that need none."""
    settings = {**WEIGHTED[mode], "weighted": True, "fp16": fp16, "policy": "lookahead", "lookahead": 2, "ratio": 0.6}
    case = rows_exchange.Case(steps=4, init_seed=5, **settings)

    def trained(device: str) -> dict[str, torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = parity.build(dataclasses.replace(case, device=device), True, parity.LinearModel)
            rows_exchange.train_linear(model, dataclasses.replace(case, device=device))
            return parity.snapshot(model)

    with mirrored_ranks(1):
        expected = trained("cpu")
    with modelled_ranks(1) as (gpu, _), mock.patch.object(ModelledTables, "forward", autospec=True) as lookups:
        lookups.side_effect = _lookup
        # The model is made on the host: its parameters cannot become others, as those of a GPU would.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            found = trained("cuda")
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        assert gpu.problems == []
    assert all(call.kwargs["feature_requires_grad"] is not None for call in lookups.call_args_list)
    assert parity.differences(found, expected) == []
