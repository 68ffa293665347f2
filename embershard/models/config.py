"""Architecture and sizes of a model, or where one's own is. `build_model` checks what depends on the data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from embershard.errors import ConfigError
from embershard.own_code import names_function
from embershard.resume_rules import Free, OfModel, OfTraining

Arch = Literal["dlrm", "dlrm_dcn", "deepfm", "din", "tbsm"]
#: Those that look at a user's history.
WITH_HISTORY = ("din", "tbsm")
#: Defaults of the cross network, which "dlrm_dcn" has.
DCN_NUM_LAYERS = 3
DCN_LOW_RANK_DIM = 32
#: Default of the layers that see an event of a history.
HISTORY_LAYER_SIZES = (32, 16)
_DEEPFM_LAYERS = 2
_DIM_MULTIPLE = 4  # FBGEMM stores rows as vectors of four numbers


@dataclass(frozen=True)
class ModelConfig:
    """A DLRM or DeepFM: embedding tables, a dense MLP, an interaction of both, and an MLP over it. Or a model with
    attention over a user's history (DIN, TBSM), or one of one's own.

    >>> ModelConfig(embedding_dim=32, dense_arch_layer_sizes=(64, 32)).arch
    'dlrm'
    """

    arch: OfModel[Arch] = "dlrm"
    """Interaction of the features: "dlrm" takes dot products of all pairs, "dlrm_dcn" a low-rank cross
    network (DLRM-DCNv2, as in MLPerf Training), "deepfm" a factorization machine beside a layer over all embeddings.
    "din" and "tbsm" have attention over a user's history, by the item that is scored: DIN over the history's
    embeddings, TBSM over the outputs of a DLRM for each event."""

    embedding_dim: OfModel[int] = 16
    """Numbers per embedding row, the same for all tables. A multiple of 4."""

    dense_arch_layer_sizes: OfModel[tuple[int, ...]] = (64, 16)
    """Layer widths of the MLP over the dense features. The last one must be `embedding_dim`; "deepfm" has two."""

    over_arch_layer_sizes: OfModel[tuple[int, ...]] = (64, 32, 1)
    """Layer widths of the MLP over the interaction. The last one must be 1, the logit; of several labels, the
    model has as many. "deepfm" has two: the layer over all embeddings, and the logit."""

    table_dtype: OfModel[Literal["fp32", "fp16"]] = "fp32"
    """Number format of the embedding rows. The dense layers are always fp32."""

    dcn_num_layers: OfModel[int | None] = None
    """Layers of the cross network. Only for arch "dlrm_dcn"; there the default is 3."""

    dcn_low_rank_dim: OfModel[int | None] = None
    """Rank of each cross layer's weight. Only for arch "dlrm_dcn"; there the default is 32."""

    target: OfModel[tuple[str, ...]] = ()
    """Sparse features of the item that is scored: one id each. Only for arch "din" and "tbsm", which need them."""

    history: OfModel[tuple[str, ...]] = ()
    """Sparse features of the user's history, oldest event first: the same property as the feature at the same place in
    `target`, and in the same table. All have an id for each event. Only for arch "din" and "tbsm"."""

    history_layer_sizes: OfModel[tuple[int, ...] | None] = None
    """Layer widths of the MLP that sees one event of the history: DIN's activation unit (before its layer of width 1),
    or the MLP over the interaction of a time step of TBSM, whose last width is that of a step's vector. Only for arch
    "din" and "tbsm"; there the default is [32, 16]."""

    dropout: OfTraining[float] = 0.0
    """Probability with which training leaves out each output of the hidden layers in `over_arch_layer_sizes`. Masks are
    functions of `train.seed`, step and rank."""

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
        if self.table_dtype not in ("fp32", "fp16"):
            raise ConfigError(f"model.table_dtype: got {self.table_dtype!r}, needed 'fp32' or 'fp16'.")
        dim = self.embedding_dim
        if dim < 1 or dim % _DIM_MULTIPLE:
            needed = max(_DIM_MULTIPLE, -(-dim // _DIM_MULTIPLE) * _DIM_MULTIPLE)
            raise ConfigError(
                f"model.embedding_dim: got {dim}, needed a multiple of {_DIM_MULTIPLE}. The next one is {needed}."
            )
        _check_layers("dense_arch_layer_sizes", self.dense_arch_layer_sizes, self.embedding_dim, "embedding_dim")
        _check_layers("over_arch_layer_sizes", self.over_arch_layer_sizes, 1, "one logit per sample")
        for name in ("dense_arch_layer_sizes", "over_arch_layer_sizes"):
            sizes = getattr(self, name)
            if self.arch == "deepfm" and len(sizes) != _DEEPFM_LAYERS:
                fixed = [sizes[0], sizes[-1]]
                raise ConfigError(f'model.{name}: got {list(sizes)}, arch="deepfm" needs two layers: {fixed}.')
        for name in ("dcn_num_layers", "dcn_low_rank_dim"):
            value = getattr(self, name)
            if value is not None and self.arch != "dlrm_dcn":
                raise ConfigError(
                    f"model.{name}: got {value} with arch={self.arch!r}, where it has no effect. "
                    'Remove it, or set model.arch = "dlrm_dcn".'
                )
            if value is not None and value < 1:
                raise ConfigError(f"model.{name}: got {value}, needed at least 1.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout: got {self.dropout}, needed a probability from 0 to below 1.")
        if self.dropout and len(self.over_arch_layer_sizes) == 1:
            raise ConfigError("model.dropout has no effect: model.over_arch_layer_sizes has no hidden layer.")
        self._check_history()

    def _check_history(self) -> None:
        given = [name for name in ("target", "history", "history_layer_sizes") if getattr(self, name)]
        if self.arch not in WITH_HISTORY:
            if given:
                raise ConfigError(
                    f"model.{given[0]} has no effect with arch={self.arch!r}. Remove it, or set model.arch to "
                    '"din" or "tbsm".'
                )
            return
        if not self.target or len(self.target) != len(self.history):
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
            if each.name not in ("build", "folder", "options") and getattr(self, each.name) != each.default:
                raise ConfigError(
                    f"model.{each.name} has no effect with model.build, whose function gets model.options. Remove one."
                )

    @property
    def is_torchrecs(self) -> bool:
        """TorchRec has the architecture: one EmbeddingBagCollection, with a table for each feature."""
        return self.build is None and self.arch not in WITH_HISTORY

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
