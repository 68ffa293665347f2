"""Architecture and sizes of a model, or where one's own is. `build_model` checks what depends on the data."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from math import inf
from typing import Any, Literal, get_args

from embershard.data.schema import Target
from embershard.errors import ConfigError
from embershard.models.arch_section import ArchSection
from embershard.models.hstu_config import HstuConfig
from embershard.settings.own_code import names_function
from embershard.settings.resume_rules import Free, OfModel, OfTraining

Arch = Literal["dlrm", "dlrm_dcn", "fm", "deepfm", "wide_deep", "din", "tbsm", "hstu", "shared_bottom", "mmoe", "ple"]
#: Those with a weight per id beside its embedding.
FACTORIZED = ("fm", "deepfm", "wide_deep")
#: Those that look at a user's history.
WITH_HISTORY = ("din", "tbsm", "hstu")
#: Those with a tower for each of several labels.
WITH_TOWERS = ("shared_bottom", "mmoe", "ple")
#: Defaults of the cross network, which "dlrm_dcn" has.
DCN_NUM_LAYERS = 3
DCN_LOW_RANK_DIM = 32
#: Default of the layers that see an event of a history.
HISTORY_LAYER_SIZES = (32, 16)
#: Default of the layers below the towers, and of the counts of experts and levels.
EXPERT_LAYER_SIZES = (64, 32)
_NUM_EXPERTS, _NUM_LABEL_EXPERTS, _NUM_LEVELS = 4, 2, 2
#: What to say of the other model that "deepfm" was.
EARLIER_DEEPFM = (
    'The "deepfm" of earlier versions was TorchRec\'s SimpleDeepFMNN, which is another model. Train such a run again, '
    "or use the version that trained it."
)
_DIM_MULTIPLE = 4  # FBGEMM stores rows as vectors of four numbers
_VECTOR_FILES = (".parquet", ".npz")


@dataclass(frozen=True)
class PretrainedTable:
    """A file of vectors, one of each value.

    >>> PretrainedTable("items.parquet", values="item_id").vectors
    'embedding'

    Raises:
        ConfigError: the file is of another kind, or both of `values` and `rows` are given, or none.
    """

    file: OfTraining[str]
    """A Parquet file, or an npz of numpy: a column, or an array, of values or rows, and one of vectors."""

    values: OfTraining[str | None] = None
    """Name of the column of values, as the data have them in the feature's column: they become rows in the same way."""

    rows: OfTraining[str | None] = None
    """In place of `values`: name of the column of row numbers, as exports of tables have it ("row")."""

    vectors: OfTraining[str] = "embedding"
    """Name of the column of vectors: lists of as many numbers as the table's rows have, or an array [N, dim]."""

    def __post_init__(self) -> None:
        if not self.file.endswith(_VECTOR_FILES):
            raise ConfigError(f"file: got {self.file!r}, needed a name that ends with {' or '.join(_VECTOR_FILES)}.")
        if (self.values is None) == (self.rows is None):
            got = "both" if self.values is not None else "neither"
            raise ConfigError(f"values and rows: got {got}; needed the name of one column that says whose vectors.")


@dataclass(frozen=True)
class ModelConfig:
    """A DLRM: embedding tables, a dense MLP, an interaction of both, and an MLP over it. Or a factorization machine, a
    model with attention over a user's history (DIN, TBSM, HSTU), or one of one's own.

    >>> ModelConfig(embedding_dim=32, dense_arch_layer_sizes=(64, 32)).arch
    'dlrm'
    """

    arch: OfModel[Arch] = "dlrm"
    """Interaction of the features: "dlrm" takes dot products of all pairs, "dlrm_dcn" a low-rank cross
    network (DLRM-DCNv2, as in MLPerf Training, but for its rank: `dcn_low_rank_dim`). "fm" is a factorization machine,
    "deepfm" adds an MLP over embeddings and numbers to it, and "wide_deep" adds an MLP to a linear model; these three
    have a first-order weight per id.
    "din" and "tbsm" have attention over a user's history, by the item that is scored: DIN over the history's
    embeddings, TBSM over the outputs of a DLRM for each event. "hstu" has layers of attention among the events
    (`hstu`). "shared_bottom", "mmoe" and "ple" are for several labels: a tower for each one, over one MLP, or over
    experts that each label mixes by a gate of its own; in "ple" some experts are of one label."""

    embedding_dim: OfModel[int] = 16
    """Numbers per embedding row, the same for all tables. A multiple of 4. With "fm", "deepfm" and "wide_deep", the
    last one is an id's first-order weight; of several labels or classes, as many as there are."""

    dense_arch_layer_sizes: OfModel[tuple[int, ...]] = (64, 16)
    """Layer widths of the MLP over the dense features: hidden layers, and the last one, which must be `embedding_dim`.
    Not for arch "fm", "deepfm" and "wide_deep"."""

    over_arch_layer_sizes: OfModel[tuple[int, ...]] = (64, 32, 1)
    """Layer widths of the MLP over the interaction; of "deepfm" and "wide_deep", over embeddings and numbers: hidden
    layers, and the last one, which must be 1, the logit; of several labels, the model has as many. With towers: those
    of each. Not for arch "fm"."""

    init_range: OfTraining[float | None] = None
    """Embedding rows begin uniform in +-init_range. Default: 1 / sqrt(rows of their table), so that the rows of small
    tables begin large."""

    table_dtype: OfModel[Literal["fp32", "fp16"]] = "fp32"
    """Number format of the embedding rows. The dense layers are always fp32."""

    table_dtypes: OfModel[dict[str, Literal["fp32", "fp16"]]] = field(default_factory=dict, hash=False)
    """The same of some tables, by their names, in place of `table_dtype`."""

    dcn_num_layers: OfModel[int | None] = None
    """Layers of the cross network. Only for arch or interaction "dlrm_dcn"; there the default is 3."""

    dcn_low_rank_dim: OfModel[int | None] = None
    """Rank of each cross layer's weight. Only for arch or interaction "dlrm_dcn"; there the default is 32, and MLPerf
    Training has 512."""

    interaction: OfModel[Literal["dlrm", "dlrm_dcn"] | None] = None
    """What is below the towers. Only for arch "shared_bottom", "mmoe" and "ple"; there the default is "dlrm"."""

    expert_layer_sizes: OfModel[tuple[int, ...] | None] = None
    """Layer widths of the MLP that the towers share ("shared_bottom"), or of each expert. Only for arch
    "shared_bottom", "mmoe" and "ple"; there the default is [64, 32]."""

    num_experts: OfModel[int | None] = None
    """Experts that all labels share; of "ple" in each level. Only for arch "mmoe" and "ple"; there the default is 4."""

    num_label_experts: OfModel[int | None] = None
    """Experts of each label in each level. Only for arch "ple"; there the default is 2."""

    num_levels: OfModel[int | None] = None
    """Levels of experts. Only for arch "ple"; there the default is 2."""

    funnel: OfModel[tuple[str, ...]] = ()
    """Labels of which each happens only after the one before it, as ["click", "buy"]: the score of one is the product
    of the score before it and of its own probability under that condition (ESMM). Only for arch "shared_bottom", "mmoe"
    and "ple"."""

    label_weighting: OfModel[Literal["fixed", "uncertainty"]] = "fixed"
    """How the losses of several labels are added: "fixed", by `data.table.label_weights`; "uncertainty", by weights
    that are learned: each label's loss is divided by a variance, whose logarithm is added."""

    target: OfModel[tuple[str, ...]] = ()
    """Sparse features of the item that is scored: one id each. Only for arch "din", "tbsm" and "hstu", which need
    them."""

    history: OfModel[tuple[str, ...]] = ()
    """Sparse features of the user's history, oldest event first: the same property as the feature at the same place in
    `target`, and in the same table. All have an id for each event. Only for arch "din", "tbsm" and "hstu"; with "hstu"
    more may follow, which events have and the scored item does not (what the user did, say)."""

    history_layer_sizes: OfModel[tuple[int, ...] | None] = None
    """Layer widths of the MLP that sees one event of the history: DIN's activation unit (before its layer of width 1),
    or the MLP over the interaction of a time step of TBSM, whose last width is that of a step's vector. Only for arch
    "din" and "tbsm"; there the default is [32, 16]."""

    activation: OfModel[Literal["relu", "prelu"]] = "relu"
    """Of the hidden layers of DIN's activation unit and of its last MLP: "prelu" learns a slope below 0 for each
    layer. Only for arch "din"."""

    hstu: HstuConfig = field(default_factory=HstuConfig)
    """Sizes and masks of HSTU."""

    dropout: OfTraining[float] = 0.0
    """Probability with which training leaves out each output of the hidden layers in `over_arch_layer_sizes`, and of
    those in `expert_layer_sizes`. Masks are functions of `train.seed`, step and rank."""

    frozen: OfTraining[tuple[str, ...]] = ()
    """Tables that are looked up and not trained, each named as itself ("t_item") or by a feature that looks it up.
    Needs a cache, and sharding.mode "sharded" without exchanged rows."""

    pretrained: OfTraining[dict[str, PretrainedTable]] = field(default_factory=dict, hash=False)
    """Rows that tables of a new run begin with, by a table or by a feature that looks it up (docs/warm_start.md). Other
    rows are as of the seed. A table that --from fills is not read from its file."""

    build: OfModel[str | None] = None
    """A model of one's own, "module:function": the function takes the schema and `model.options`, and returns a module
    with TorchRec's embedding collections. No other setting of the model then has an effect."""

    folder: Free[str | None] = None
    """Folder in which `build`'s module is looked up besides the Python path. Default: that of the settings' file. A run
    records it as an absolute path; what is inside of a run's folder is imported only with --trust-code."""

    options: OfModel[dict[str, Any]] = field(default_factory=dict, hash=False)
    """Settings of one's own, which `build`'s function gets: any names and values."""

    def __post_init__(self) -> None:
        self._check_own()
        if self.arch not in get_args(Arch):
            raise ConfigError(f"model.arch: got {self.arch!r}, needed one of {', '.join(map(repr, get_args(Arch)))}.")
        of_tables = {f"table_dtypes.{table}": dtype for table, dtype in self.table_dtypes.items()}
        for name, dtype in {"table_dtype": self.table_dtype, **of_tables}.items():
            if dtype not in ("fp32", "fp16"):
                raise ConfigError(f"model.{name}: got {dtype!r}, needed 'fp32' or 'fp16'.")
        dim = self.embedding_dim
        if dim < 1 or dim % _DIM_MULTIPLE:
            needed = max(_DIM_MULTIPLE, -(-dim // _DIM_MULTIPLE) * _DIM_MULTIPLE)
            raise ConfigError(
                f"model.embedding_dim: got {dim}, needed a multiple of {_DIM_MULTIPLE}. The next one is {needed}."
            )
        if self.init_range is not None and not 0 < self.init_range < inf:
            raise ConfigError(f"model.init_range: got {self.init_range}, needed a number above 0.")
        if self.arch not in FACTORIZED:
            _check_layers("dense_arch_layer_sizes", self.dense_arch_layer_sizes, self.embedding_dim, "embedding_dim")
        _check_layers("over_arch_layer_sizes", self.over_arch_layer_sizes, 1, "one logit per sample")
        self._check_layers_used()
        for name in ("dcn_num_layers", "dcn_low_rank_dim"):
            value = getattr(self, name)
            if value is not None and self.crossing != "dlrm_dcn":
                raise ConfigError(
                    f"model.{name}: got {value} with arch={self.arch!r}, where it has no effect. "
                    'Remove it, or set model.arch = "dlrm_dcn".'
                )
            if value is not None and value < 1:
                raise ConfigError(f"model.{name}: got {value}, needed at least 1.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout: got {self.dropout}, needed a probability from 0 to below 1.")
        if self.dropout and len(self.over_arch_layer_sizes) == 1 and self.arch not in WITH_TOWERS:
            raise ConfigError("model.dropout has no effect: model.over_arch_layer_sizes has no hidden layer.")
        self._check_history()
        self._check_towers()

    def _check_layers_used(self) -> None:
        unused = ["dense_arch_layer_sizes"] if self.arch in FACTORIZED else []
        unused += ["over_arch_layer_sizes", "dropout"] if self.arch == "fm" else []
        unused += ["activation"] if self.arch != "din" else []
        for name in unused:
            value, default = getattr(self, name), getattr(ModelConfig, name)
            if value != default:
                value, default = (list(each) if isinstance(each, tuple) else each for each in (value, default))
                raise ConfigError(
                    f"model.{name}: got {value!r} with arch={self.arch!r}, where it has no effect. Leave it out, which "
                    f"is {default!r}."
                    f"{f' {EARLIER_DEEPFM}' if self.arch == 'deepfm' else ''}"
                )
        if self.activation not in ("relu", "prelu"):
            raise ConfigError(f"model.activation: got {self.activation!r}, needed 'relu' or 'prelu'.")

    def _check_towers(self) -> None:
        allowed = {
            "interaction": WITH_TOWERS,
            "expert_layer_sizes": WITH_TOWERS,
            "funnel": WITH_TOWERS,
            "num_experts": ("mmoe", "ple"),
            "num_label_experts": ("ple",),
            "num_levels": ("ple",),
        }
        for name, archs in allowed.items():
            if (value := getattr(self, name)) and self.arch not in archs:
                value = list(value) if isinstance(value, tuple) else value
                raise ConfigError(
                    f"model.{name}: got {value!r} with arch={self.arch!r}, where it has no effect. Remove it, or set "
                    f"model.arch to {' or '.join(map(repr, archs))}."
                )
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"model.{name}: got {value}, needed at least 1.")
        for name, hint in (("interaction", ("dlrm", "dlrm_dcn")), ("label_weighting", ("fixed", "uncertainty"))):
            if getattr(self, name) not in (*hint, *([None] if name == "interaction" else [])):
                raise ConfigError(f"model.{name}: got {getattr(self, name)!r}, needed one of {hint}.")
        if (sizes := self.expert_layer_sizes) is not None and (not sizes or min(sizes) < 1):
            raise ConfigError(f"model.expert_layer_sizes: got {list(sizes)}, needed layers of width 1 or more.")
        if self.funnel and (len(self.funnel) < 2 or len(set(self.funnel)) < len(self.funnel)):
            raise ConfigError(
                f'model.funnel: got {list(self.funnel)}, needed two labels or more, each once: ["click", "buy"].'
            )

    def check_target(self, target: Target) -> None:
        """Raise `ConfigError` where a setting does not fit what is predicted."""
        of_task = {
            name: target.tasks[head.start] if len(head) == 1 else "multiclass" for name, head in target.heads.items()
        }
        labels, weights = list(of_task), target.label_weights
        if self.arch in FACTORIZED and (count := len(target.labels)) >= self.embedding_dim:
            raise ConfigError(
                f"model.embedding_dim: got {self.embedding_dim} with arch={self.arch!r} and {count} outputs, whose "
                f"weights take as many numbers of each row. Needed at least {-(-(count + 1) // 4) * 4}."
            )
        needs_several = f"arch = {self.arch!r}" if self.arch in WITH_TOWERS else ""
        if not needs_several and self.label_weighting != "fixed":
            needs_several = f"label_weighting = {self.label_weighting!r}"
        if needs_several and len(labels) < 2:
            raise ConfigError(
                f"model.{needs_several} needs several labels, the data have {labels[0]!r} alone. Name more in "
                "data.table.label, or leave it out."
            )
        if weights and self.label_weighting != "fixed":
            raise ConfigError(
                f"data.table.label_weights = {list(weights)} has no effect with model.label_weighting = "
                f"{self.label_weighting!r}, which learns them. Remove one."
            )
        for name in self.funnel:
            if of_task.get(name) != "binary":
                found = "no such label" if name not in of_task else f"its task is {of_task[name]!r}"
                raise ConfigError(f"model.funnel: {name!r}: {found}; needed binary labels among {', '.join(labels)}.")

    def _check_history(self) -> None:
        given = [name for name in ("target", "history", "history_layer_sizes") if getattr(self, name)]
        for name, section in self.sections.items():
            if name != self.arch and (changed := section.changed()):
                raise ConfigError(
                    f"model.{name}.{changed[0]} has no effect with arch={self.arch!r}. Remove it, or set model.arch to "
                    f'"{name}".'
                )
        if self.arch not in WITH_HISTORY:
            if given:
                raise ConfigError(
                    f"model.{given[0]} has no effect with arch={self.arch!r}. Remove it, or set model.arch to "
                    '"din", "tbsm" or "hstu".'
                )
            return
        if self.section is not None and self.history_layer_sizes is not None:
            raise ConfigError(f'model.history_layer_sizes has no effect with arch="{self.arch}". Remove it.')
        more = len(self.history) - len(self.target)
        if not self.target or more < 0 or (more and self.section is None):
            raise ConfigError(
                f'model.target and model.history: got {list(self.target)} and {list(self.history)}, arch="{self.arch}" '
                "needs a feature of the history for each of the target, at least one. For instance "
                'target = ["item"], history = ["hist_item"].'
            )
        sizes = self.history_layer_sizes
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise ConfigError(f"model.history_layer_sizes: got {list(sizes)}, needed layers of width 1 or more.")

    def _check_own(self) -> None:
        if self.build is None:
            given = [name for name in ("folder", "options") if getattr(self, name)]
            if given:
                raise ConfigError(f"model.{given[0]} has no effect without model.build. Remove it, or set model.build.")
            return
        if not names_function(self.build):
            raise ConfigError(
                f'model.build: got {self.build!r}, needed "module:function", for instance "my_model:build" for the '
                "function build in my_model.py."
            )
        for each in fields(self):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if (
                each.name not in ("build", "folder", "options", "frozen", "pretrained")
                and getattr(self, each.name) != default
            ):
                raise ConfigError(
                    f"model.{each.name} has no effect with model.build, whose function gets model.options. Remove one."
                )

    def dtype_of(self, table: str) -> Literal["fp32", "fp16"]:
        """Return the number format of a table's rows."""
        return self.table_dtypes.get(table, self.table_dtype)

    @property
    def crossing(self) -> Arch:
        """The architecture whose interaction the model has."""
        return (self.interaction or "dlrm") if self.arch in WITH_TOWERS else self.arch

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """`expert_layer_sizes`, or its default."""
        return self.expert_layer_sizes or EXPERT_LAYER_SIZES

    @property
    def experts(self) -> int:
        """`num_experts`, or its default."""
        return self.num_experts or _NUM_EXPERTS

    @property
    def label_experts(self) -> int:
        """`num_label_experts`, or its default."""
        return self.num_label_experts or _NUM_LABEL_EXPERTS

    @property
    def levels(self) -> int:
        """`num_levels`, or its default."""
        return self.num_levels or _NUM_LEVELS

    @property
    def has_one_collection(self) -> bool:
        """All tables are in one EmbeddingBagCollection, and `DenseSize` knows the layers over it."""
        return self.build is None and self.arch not in WITH_HISTORY

    @property
    def drops(self) -> bool:
        """Training leaves out some numbers by chance."""
        return bool(self.dropout) or (self.section is not None and self.section.drops)

    @property
    def sections(self) -> dict[str, ArchSection]:
        """The settings that are of one architecture each, by its name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, ArchSection)}

    @property
    def section(self) -> ArchSection | None:
        """The settings of this architecture alone."""
        return self.sections.get(self.arch)

    @property
    def times(self) -> tuple[str, ...]:
        """Two features whose ids are seconds and look up no table: of the sample, and of the history's events."""
        return () if self.section is None else tuple(self.section.times)

    @property
    def event_features(self) -> set[str]:
        """The features of the scored item and of the history's events."""
        return {*self.target, *self.history, *self.times}

    def over_layers(self, num_labels: int) -> tuple[int, ...]:
        """Return `over_arch_layer_sizes` with an output for each label."""
        return (*self.over_arch_layer_sizes[:-1], num_labels)

    @property
    def title(self) -> str:
        """The model in a few words."""
        return self.build or self.arch


def _check_layers(name: str, sizes: tuple[int, ...], last: int, what: str) -> None:
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"model.{name}: got {list(sizes)}, needed at least one layer, each of width 1 or more.")
    if sizes[-1] != last:
        fixed = [*sizes[:-1], last]
        raise ConfigError(
            f"model.{name}: the last layer has width {sizes[-1]}, needed {last} ({what}). For instance {fixed}."
        )
