"""Architecture and sizes of a model. `build_model` checks what depends on the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from embershard.errors import ConfigError

Arch = Literal["dlrm", "dlrm_dcn", "deepfm"]
_DEEPFM_LAYERS = 2
_DIM_MULTIPLE = 4  # FBGEMM stores rows as vectors of four numbers


@dataclass(frozen=True)
class ModelConfig:
    """A DLRM or DeepFM: embedding tables, a dense MLP, an interaction of both, and an MLP over it.

    >>> ModelConfig(embedding_dim=32, dense_arch_layer_sizes=(64, 32)).arch
    'dlrm'
    """

    arch: Arch = "dlrm"
    """Interaction of the features: "dlrm" takes dot products of all pairs, "dlrm_dcn" a low-rank cross
    network (DLRM-DCNv2, as in MLPerf Training), "deepfm" a factorization machine beside a layer over all embeddings."""

    embedding_dim: int = 16
    """Numbers per embedding row, the same for all tables. A multiple of 4."""

    dense_arch_layer_sizes: tuple[int, ...] = (64, 16)
    """Layer widths of the MLP over the dense features. The last one must be `embedding_dim`; "deepfm" has two."""

    over_arch_layer_sizes: tuple[int, ...] = (64, 32, 1)
    """Layer widths of the MLP over the interaction. The last one must be 1: the logit. "deepfm" has two: the layer over
    all embeddings, and the logit."""

    table_dtype: Literal["fp32", "fp16"] = "fp32"
    """Number format of the embedding rows. The dense layers are always fp32."""

    dcn_num_layers: int | None = None
    """Layers of the cross network. Only for arch "dlrm_dcn"; there the default is 3."""

    dcn_low_rank_dim: int | None = None
    """Rank of each cross layer's weight. Only for arch "dlrm_dcn"; there the default is 32."""

    def __post_init__(self) -> None:
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


def _check_layers(name: str, sizes: tuple[int, ...], last: int, what: str) -> None:
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"model.{name}: got {list(sizes)}, needed at least one layer, each of width 1 or more.")
    if sizes[-1] != last:
        fixed = [*sizes[:-1], last]
        raise ConfigError(
            f"model.{name}: the last layer has width {sizes[-1]}, needed {last} ({what}). For instance {fixed}."
        )
