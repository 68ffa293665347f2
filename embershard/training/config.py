"""All settings of a run: each section is a dataclass beside its owner, and gathered here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from embershard.cache import CacheConfig
from embershard.cache.ids.config import IdTable
from embershard.data import DataConfig, Target
from embershard.data.config import columns_of_files
from embershard.data.order.segments import READ_AHEAD
from embershard.distributed import CheckpointConfig, PublishConfig
from embershard.errors import ConfigError
from embershard.frequency.config import ProfileConfig
from embershard.lazy_names import named
from embershard.metrics.config import MetricsConfig
from embershard.metrics.figures import Judge
from embershard.models import ModelConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.resume_rules import AsGlobalBatch, Free, OfModel, OfTraining
from embershard.sharding.config import ShardingConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig, ScheduleConfig

TrackerKind = Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus", "mlperf"]

_BATCH_SIZE = 1024
#: Batches that are read, beside those of the look-ahead and those that were parsed ahead, when a loss is known.
_IN_WORK = 8
_ALL_TIMES = 1 << 32  # seconds since 1970, until 2106


def _refuse_fp16(precision: str) -> str:
    if precision == "fp16":
        raise ConfigError(
            'train.precision: got "fp16", needed "fp32", "tf32", "bf16" or "fp64". Its gradients need a scaled loss, '
            "and a step in which they overflow must train nothing; but rows are trained inside of the backward, before "
            'that is known. "bf16" is as fast, and has the range of fp32; "tf32" has the digits of fp16.'
        )
    return precision


@dataclass(frozen=True)
class TrainConfig:
    """Length, hardware and reports of the training."""

    batch_size: AsGlobalBatch[int | None] = None
    """Samples per rank and step. Default: 1024, unless `global_batch_size` is set."""

    global_batch_size: OfTraining[int | None] = None
    """Samples per step of all ranks together, a multiple of their number; in place of `batch_size`. Step k then trains
    on the same samples with any number of ranks."""

    accumulate: Free[int] = 1
    """Micro-batches of each rank's batch of a step, to be forwarded one after the other: activations take so many times
    less memory. Rows and dense layers are trained once a step, as by the whole batch. (With dropout, masks
    depend on it, and a resume compares it.)"""

    epochs: Free[int | None] = None
    """Passes over the training data. 1 when neither this nor `max_steps` is given."""

    max_steps: Free[int | None] = None
    """Steps after which training ends, unless the epochs end first."""

    ema: Free[float | None] = None
    """Decay of an exponential moving average of the dense layers' weights, for instance 0.999: after each step the
    average is `ema` times itself and 1 - `ema` times the weights; in the first steps (1 + steps) / (10 + steps), where
    that is less. Evaluations, `predict`, exports and publications use the average, and training does not. Rows of
    tables have none."""

    eval_every: Free[int | None] = None
    """Steps between evaluations on the held-out part. Without it, there is one at the end; where the best evaluation
    matters (`early_stopping`, `checkpoint.keep_best`), also one at the end of each epoch."""

    early_stopping: Free[int | None] = None
    """Patience: ends the training after so many evaluations in a row that were no better than the best one before."""

    metric: Free[str | None] = None
    """Figure of an evaluation by which the best one is known, for `early_stopping` and `checkpoint.keep_best`: "auc",
    "logloss", "ne" or "accuracy"; of regressions "rmse", "mae" or "r2"; or one of `metrics.names`; of one label as
    "auc/click", else the mean over the labels. Default: "auc", or "rmse"."""

    log_every: Free[int] = 20
    """Steps between two lines of progress, and of metrics.jsonl."""

    seed: OfTraining[int] = 0
    """Seed of the initial weights. data.seed is that of the data's order."""

    init: OfTraining[Literal["counter", "torchrec"]] = "counter"
    """Initial weights of the tables. `counter`: functions of seed, table, row and column, the same with any number of
    ranks and any plan; rows of cached tables are made when they are first touched. `torchrec`: TorchRec's own, which
    depend on the plan and are made at once."""

    precision: OfTraining[Annotated[Literal["fp32", "tf32", "bf16", "fp64"], BeforeValidator(_refuse_fp16)]] = "fp32"
    """Number format of the dense layers' arithmetic. "fp32" is without TF32; "tf32" is of GPUs, and on a CPU the same
    as "fp32"; "bf16" is automatic mixed precision. With "fp64" losses do not depend on the number of ranks, up to the
    last digits; it is slower, and takes more memory (docs/settings.md, which says why there is no "fp16")."""

    deterministic: OfTraining[bool] = False
    """Makes equal runs on equal machines train the same bits on GPUs, too, where sums else depend on which thread comes
    first; it is slower (docs/settings.md). `embershard verify` always compares in this mode."""

    cuda_graph: Free[bool] = False
    """On GPUs, captures the dense part of a step (forward, loss, gradients) once, and repeats it as a CUDA graph: the
    host starts one operation in place of about a hundred. Not for models of one's own and over histories, dropout,
    `accumulate`, "fp64". No GPU has run it."""

    on_non_finite: Free[Literal["stop", "skip"]] = "stop"
    """Reaction of all ranks to a loss that is NaN or infinite on one of them. `stop`: the run ends, and no checkpoint
    has what such a loss trained. `skip`: the batch trains nothing, as if it had not been there; the run ends when ten
    in a row were skipped and the next one must be, too. On a GPU `skip` waits for every forward."""

    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to train; "auto": on GPUs if there are any."""

    numa: Free[bool] = True
    """On GPUs, keep each rank to the CPU cores next to its GPU, by whose memory its rows then are (the NUMA node that
    the system names). False: to any core that it may run on. No GPU has run it."""

    def __post_init__(self) -> None:
        lengths = ("batch_size", "global_batch_size", "accumulate", "epochs", "max_steps")
        for name in (*lengths, "eval_every", "early_stopping", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train.{name}: got {value}, needed at least 1.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"train.ema: got {self.ema}, needed more than 0 and less than 1, for instance 0.999.")
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ConfigError(
                f"train.batch_size={self.batch_size} and train.global_batch_size={self.global_batch_size} are both "
                "set, and one of them decides. Remove the other: --set train.global_batch_size=none, or "
                "--set train.batch_size=none."
            )
        if self.init not in ("counter", "torchrec"):
            raise ConfigError(f"train.init: got {self.init!r}, needed 'counter' or 'torchrec'.")
        _refuse_fp16(self.precision)
        if self.precision not in ("fp32", "tf32", "bf16", "fp64"):
            raise ConfigError(f"train.precision: got {self.precision!r}, needed 'fp32', 'tf32', 'bf16' or 'fp64'.")
        if self.on_non_finite not in ("stop", "skip"):
            raise ConfigError(f"train.on_non_finite: got {self.on_non_finite!r}, needed 'stop' or 'skip'.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"train.device: got {self.device!r}, needed 'auto', 'cpu' or 'cuda'.")

    def rank_batch_size(self, world_size: int) -> int:
        """Return the samples per rank and step on so many ranks.

        Raises:
            ConfigError: the ranks cannot share the global batch evenly, or a batch has fewer samples than
                micro-batches.

        >>> TrainConfig(global_batch_size=4096).rank_batch_size(4), TrainConfig().rank_batch_size(4)
        (1024, 1024)
        """
        if self.global_batch_size is None:
            each, rest = self.batch_size or _BATCH_SIZE, 0
        else:
            each, rest = divmod(self.global_batch_size, world_size)
        if rest:
            raise ConfigError(
                f"train.global_batch_size: got {self.global_batch_size}, needed a multiple of the {world_size} ranks, "
                f"for instance {max(1, each) * world_size}."
            )
        if each < self.accumulate:
            raise ConfigError(
                f"train.accumulate: got {self.accumulate}, needed at most the {each} samples of a rank's batch, so "
                "that each micro-batch has one."
            )
        return each

    @property
    def num_epochs(self) -> int | None:
        """Epochs to run; None: no limit but `max_steps`."""
        return 1 if self.epochs is None and self.max_steps is None else self.epochs


@dataclass(frozen=True)
class TrackingConfig:
    """Trackers of a run, beside the files in its folder. The first rank alone tells them; one that fails is left out.

    >>> TrackingConfig(trackers=("tensorboard", "mlflow")).trackers
    ('tensorboard', 'mlflow')
    """

    trackers: Free[tuple[TrackerKind, ...]] = ("tensorboard",)
    """Who gets the run's settings, reports and result: TensorBoard, Weights & Biases, MLflow, Trackio; and Prometheus,
    which reads them from a port of this machine; and a log as MLPerf Training asks for it, of DLRMv4. Each must be
    installed. See docs/tracking.md."""
    project: Free[str] = "embershard"
    """Name under which Weights & Biases and Trackio gather runs; for MLflow, the experiment."""
    prometheus_port: Free[int] = 9464
    """Port at which Prometheus reads the newest reports."""
    prometheus_host: Free[str] = "127.0.0.1"
    """Address of that port. Anyone who can reach it can read the reports."""
    mlperf_org: Free[str] = "none"
    """Who submits, in the log for MLPerf."""

    def __post_init__(self) -> None:
        known = get_args(TrackerKind)
        for name in self.trackers:
            if name not in known:
                raise ConfigError(f"tracking.trackers: got {name!r}, needed some of {', '.join(known)}.")
        twice = [name for name in known if self.trackers.count(name) > 1]
        if twice:
            raise ConfigError(f"tracking.trackers: got {twice[0]!r} twice, needed each tracker once.")
        if not self.project:
            raise ConfigError("tracking.project: got an empty name.")
        if not 1 <= self.prometheus_port <= 65535:
            raise ConfigError(f"tracking.prometheus_port: got {self.prometheus_port}, needed 1 to 65535.")
        is_changed = (self.prometheus_port, self.prometheus_host) != (9464, "127.0.0.1")
        if is_changed and "prometheus" not in self.trackers:
            raise ConfigError('tracking.prometheus_port and prometheus_host have no effect without "prometheus".')
        if self.mlperf_org != "none" and "mlperf" not in self.trackers:
            raise ConfigError('tracking.mlperf_org has no effect without "mlperf" in tracking.trackers.')


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run.

    >>> RunConfig(train=TrainConfig(max_steps=10)).train.num_epochs is None
    True

    Raises:
        ConfigError: settings of two sections contradict each other, or one has no effect with the other.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    look_ahead: LookAheadConfig = field(default_factory=LookAheadConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    embedding_optimizer: EmbeddingOptimizerConfig = field(default_factory=EmbeddingOptimizerConfig)
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    ids: OfModel[dict[str, IdTable]] = field(default_factory=dict, hash=False)
    """Rules of tables that take any id (docs/ids.md), by a feature that looks the table up; "*" has those of all tables
    that are not named. Default: those of `IdTable`."""

    def __post_init__(self) -> None:
        self._check_evaluations()
        self._check_ids()
        if self.cache.enabled:
            self.cache.policy_for(self.has_profile)  # refuses a profile without effect
        elif self.sharding.mode != "sharded":
            raise ConfigError(
                f'cache.enabled: got false, needed true in the mode "{self.sharding.mode}", whose rows are in caches.'
            )
        packs, judges_epochs = self.sharding.mode == "hot_cold", self.judges and self.train.eval_every is None
        asked = packs, self.counts_a_profile, judges_epochs
        self.data.time.check_training(self.data.is_in_time_order, self.data.follow, self.train.epochs, *asked)
        ahead, most = self.lookahead + self.data.prefetch_batches, READ_AHEAD - _IN_WORK
        if packs and ahead > most:
            raise ConfigError(
                f"look_ahead.lookahead + data.prefetch_batches: got {ahead}, needed at most {most} in the mode "
                '"hot_cold", whose order of batches follows from losses. Lower one of them.'
            )
        self._check_small_rows()
        self._check_rows_elsewhere()
        self._check_model()

    def _check_small_rows(self) -> None:
        """Raise where rows of a small type in host memory meet settings that know only those of the slots."""
        if not self.cache.small_types:
            return
        self.cache.check_profile(self.has_profile)
        for table in self.model.table_dtypes:
            if self.model.dtype_of(table) == "fp16" and self.cache.small_type_of(table):
                raise ConfigError(
                    f'model.table_dtypes.{table}: got "fp16", needed "fp32" with cache.host_dtype: slots are rounded '
                    f'to it. Take one of them, for instance cache.host_dtypes.{table} = "fp32".'
                )
        needs = {"model.table_dtype": "slots are rounded to it", "train.init": "the seed also rounds"}
        self._check_home("cache.host_dtype", needs)

    def _check_rows_elsewhere(self) -> None:
        """Raise where rows that are not memory meet settings that know only such."""
        if self.cache.rows_are_memory or not self.cache.enabled:
            return
        self._check_home(f'cache.host = "{self.cache.host}"', {"train.init": "rows that were never written are drawn"})
        if self.cache.host == "file" and self.lookahead < 1:
            raise ConfigError(
                'look_ahead.lookahead: got 0, needed 1 or more with cache.host = "file": rows are read ahead.'
            )

    def _check_home(self, setting: str, needs: Mapping[str, str]) -> None:
        """Raise where rows that are not in host memory as they are in slots meet other settings; `needs` says why."""
        found = {"model.table_dtype": self.model.table_dtype, "train.init": self.train.init}
        needed = {"model.table_dtype": "fp32", "train.init": "counter"}
        for name, why in needs.items():
            if found[name] != needed[name]:
                raise ConfigError(f'{name}: got "{found[name]}", needed "{needed[name]}" with {setting}: {why}.')
        if self.sharding.mode != "sharded":
            raise ConfigError(
                f'sharding.mode: got "{self.sharding.mode}", needed "sharded" with {setting}: the others keep copies '
                "of host rows."
            )
        if self.data.has_ids:
            raise ConfigError(
                f"{setting}: together with tables that take any id, whose rows begin anew in memory, as fp32. Leave it "
                "out."
            )

    def _check_evaluations(self) -> None:
        for section, name in (
            ("train", "eval_every"), ("train", "early_stopping"), ("train", "metric"), ("checkpoint", "keep_best")
        ):  # fmt: skip
            if getattr(getattr(self, section), name) and not self.holds_out:
                raise ConfigError(f"{section}.{name} has no effect: nothing is held out ({self.data.why_nothing}).")
        if self.metrics == MetricsConfig() and self.train.metric is None:
            return
        is_table = self.data.has_names
        target = columns_of_files(self.data).target if is_table else Target()
        if self.metrics != MetricsConfig():
            if not self.holds_out and self.data.time.column is None:  # else windows are evaluated
                raise ConfigError(f"metrics has no effect: nothing is held out ({self.data.why_nothing}).")
            if self.metrics.columns and not is_table:
                name = "group" if self.metrics.group is not None else "slices"
                raise ConfigError(
                    f'metrics.{name}: got data.kind = "{self.data.kind}", needed "table" or "parquet", whose columns '
                    "have names. Leave it out, or read the files as a table (docs/own_data.md)."
                )
            self.metrics.check(target.tasks)
        if self.train.metric is not None:
            if not self.judges:
                raise ConfigError("train.metric has no effect without checkpoint.keep_best or train.early_stopping.")
            Judge.of(self.train.metric, target, self.metrics.more)

    def _check_ids(self) -> None:
        """Raise where tables that take any id meet settings that need to know the ids' rows."""
        if not self.data.has_ids:
            if self.ids:
                raise ConfigError(
                    f"ids.{next(iter(self.ids))} has no effect: no table takes any id. Give a feature the mapping "
                    '"ids" or "text_ids" (data.table.features), or remove it.'
                )
            return
        for name, got, needed, why in (
            ("cache.enabled", self.cache.enabled, True, "their rows come and go in caches"),
            ("sharding.mode", self.sharding.mode, "sharded", "an id's row is known to its owner alone"),
            ("sharding.exchange", self.sharding.exchange, "pooled", "an id's row is known to its owner alone"),
            ("train.init", self.train.init, "counter", "a row that gets an id draws its weights by seed and id"),
        ):
            if got != needed:
                raise ConfigError(f"{name}: got {got!r}, needed {needed!r} with tables that take any id: {why}.")
        if self.train.accumulate > 1 and self.lookahead < 1:
            raise ConfigError(
                f"look_ahead.lookahead: got 0, needed 1 or more with train.accumulate = {self.train.accumulate} and "
                "tables that take any id: ids of all micro-batches get rows together."
            )
        if self.train.device == "cuda":
            raise ConfigError(
                'train.device: got "cuda", needed "cpu": tables that take any id are on a CPU only so far.'
            )
        if self.has_profile:
            raise ConfigError(
                "a profile counts rows, and those of tables that take any id change their ids. Remove profile.path, "
                'profile.samples and cache.warmup, and choose another cache.policy than "frequency" and "static".'
            )

    def _check_model(self) -> None:
        """Raise where the model's tables cannot be placed as the settings ask for, or it has no log for MLPerf."""
        if "mlperf" in self.tracking.trackers and self.model.arch != "hstu":
            raise ConfigError(
                f'tracking.trackers has "mlperf", whose log is that of DLRMv4: needed model.arch = "hstu", got '
                f'"{self.model.arch}". Leave it out.'
            )
        if self.model.has_one_collection:
            return
        self._check_times()
        if self.train.precision == "fp64":
            raise ConfigError(
                f'train.precision: got "fp64" with the model {self.model.title!r}, needed "fp32", "tf32" or "bf16": '
                "only the layers over one EmbeddingBagCollection are widened."
            )
        for name, needed in (("mode", "sharded"), ("exchange", "pooled")):
            if (got := getattr(self.sharding, name)) != needed:
                raise ConfigError(
                    f'sharding.{name}: got "{got}" with the model {self.model.title!r}, needed "{needed}": the others '
                    "are for models with one EmbeddingBagCollection."
                )

    def _check_times(self) -> None:
        """Raise where the ids of the model's times would not be seconds."""
        setting = f"model.{self.model.arch}.times"
        if self.model.times and not self.data.has_names:
            raise ConfigError(f'{setting}: got data.kind = "{self.data.kind}", needed "parquet" or "table".')
        for name in self.model.times:
            feature = columns_of_files(self.data).of_kind("sparse").get(name)
            if feature is None:
                continue  # the model says so when it is built
            if feature.mapping not in ("none", "modulo") or feature.table_rows < _ALL_TIMES:
                raise ConfigError(
                    f'{setting}: {name!r} has the mapping "{feature.mapping}" and num_rows = '
                    f'{feature.table_rows}; needed "none" or "modulo" and at least {_ALL_TIMES:_}, so that ids are '
                    "seconds. (They look up no table, so that takes no memory.)"
                )

    def check_planned(self) -> None:
        """Raise `ConfigError` if training has no plan, which says what `sharding.exchange="auto"` comes to, and obeys
        `sharding.pin`."""
        if self.sharding.pin and self.sharding.plan is None:
            raise ConfigError(
                f"sharding.pin.{next(iter(self.sharding.pin))} has no effect without a plan. Make one with these "
                "settings (embershard plan), and train with it (--plan FILE)."
            )
        if self.sharding.exchange == "auto" and self.sharding.plan is None and self.cache.enabled:
            raise ConfigError(
                'sharding.exchange: got "auto" without a plan, needed "pooled" or "rows". To choose per table, make a '
                "plan (embershard plan --set sharding.exchange=auto) and train with it (--plan FILE)."
            )

    @property
    def holds_out(self) -> bool:
        """True if there is a held-out part to evaluate on."""
        return self.data.eval_path is not None or self.data.held_out_share > 0

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint of the best evaluation is saved and kept."""
        if self.checkpoint.keep_best is None:
            is_long = (self.train.epochs or 1) > 1 or self.train.early_stopping is not None
            return self.holds_out and self.checkpoint.at_end and is_long
        return self.checkpoint.keep_best

    @property
    def judges(self) -> bool:
        """True if it matters which evaluation is the best."""
        return self.keeps_best or self.train.early_stopping is not None

    @property
    def counts_a_profile(self) -> bool:
        """True if a profile must be counted before training."""
        is_needed = self.cache.policy in ("frequency", "static") or self.cache.warmup is True
        is_asked_for = is_needed or self.profile.samples is not None or self.sharding.mode == "hot_cold"
        return self.cache.enabled and self.profile.path is None and is_asked_for

    @property
    def has_profile(self) -> bool:
        """True if a profile is read or counted."""
        return self.profile.path is not None or self.counts_a_profile

    @property
    def num_dense_states(self) -> int:
        """States as large as the dense layers' parameters: the gradients, the optimizer's, and the average."""
        return self.dense_optimizer.num_states + (self.train.ema is not None)

    @property
    def lookahead(self) -> int:
        """Batches known ahead of the one in training; 0 without a cache."""
        return self.look_ahead.lookahead if self.cache.enabled else 0

    @property
    def row_optimizer(self) -> EmbeddingOptimizerConfig:
        """The optimizer of the rows, by whose numbers FBGEMM's kernels do what `sharding.moment_scale` asks for."""
        given, scale = self.embedding_optimizer, self.sharding.moment_scale
        found: EmbeddingOptimizerConfig = given
        if scale is not None:
            found = named("embershard.extras.groups.settings:scaled")(given, scale)
        return found

    def predicted_from(self, device: str | None, world_size: int) -> dict[str, Any]:
        """Return the settings that a plan's prediction for these ranks depends on besides the data, by name."""
        depends: dict[str, tuple[str, ...]] = {
            "cache": ("warmup", "decay", "host", "host_bytes", "slot_map", "host_dtype", "host_dtypes", "full_rows"),
            "look_ahead": ("lookahead", "prefetch"),
            "profile": ("path", "samples"),
            "model": tuple(
                field.name
                for field in dataclasses.fields(self.model)
                if field.name not in ("dropout", *self.model.sections)
            ),
            "embedding_optimizer": ("kind",),
            "dense_optimizer": ("kind",),
            "train": ("precision", "accumulate"),
            "sharding": ("forward_dtype", "backward_dtype", "mode", "hot_bytes", "groups", "sync_every", "sync_dtype"),
        }
        found = {
            f"{part}.{name}": getattr(getattr(self, part), name) for part, names in depends.items() for name in names
        }
        for arch, section in self.model.sections.items():
            found |= {f"model.{arch}.{name}": value for name, value in section.without_dropout().items()}
        if self.model.section is not None:  # how long its slowest rank takes
            found |= {f"data.{name}": getattr(self.data, name) for name in ("deal", "deal_cost", "deal_ranks")}
        found["train.batch_size"] = self.train.rank_batch_size(world_size)
        return {**found, "cache.policy": self.cache.policy or "lookahead", "train.device": device}
