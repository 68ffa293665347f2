"""Tables, parameters and costs of a model that is not built yet: of a built-in one from its settings, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from embershard.data.schema import Schema
from embershard.models.arch_section import FLOPS_PER_MULTIPLY_ADD, mlp_parameters
from embershard.models.config import (
    DCN_LOW_RANK_DIM,
    DCN_NUM_LAYERS,
    FACTORIZED,
    HISTORY_LAYER_SIZES,
    WITH_HISTORY,
    WITH_TOWERS,
    Arch,
    ModelConfig,
)
from embershard.models.tables import ModelTable, built_in_tables


@dataclass(frozen=True)
class DenseSize:
    """The dense part of a model over F pooled embeddings of dim D: of a DLRM the MLP over dense features, interaction,
    MLP over it; of those with a weight per id, that of factorization.py.

    >>> DenseSize("dlrm", num_dense=1, num_features=1, dim=4, dense_layers=(4,), over_layers=(1,)).parameter_bytes
    56

    Attributes:
        arch: see `ModelConfig`; with towers, that of the interaction.
        num_dense: dense features of a sample.
        num_features, dim: F and D.
        dense_layers, over_layers: layer widths of the two MLPs; with a weight per id there is no first one, and with
            "fm" the second one is the outputs alone.
        cross_layers, cross_rank: of the cross network of "dlrm_dcn"; otherwise 0.
        number_bytes: of a weight, and of a number that layers pass on.
        tower_layers: with towers, input and output width of the layers of experts, gates and towers; `over_layers` is
            then empty. (Mixing the experts' outputs costs little beside them, and is left out.)
    """

    arch: Arch
    num_dense: int
    num_features: int
    dim: int
    dense_layers: Sequence[int]
    over_layers: Sequence[int]
    cross_layers: int = 0
    cross_rank: int = 0
    number_bytes: int = 4
    tower_layers: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(
        cls, config: ModelConfig, num_dense: int, num_features: int, number_bytes: int = 4, widths: Sequence[int] = (1,)
    ) -> DenseSize:
        """The dense part of the model that `build_model` builds from `config`; `widths`: outputs of each label."""
        cross = (0, 0)
        if config.crossing == "dlrm_dcn":
            cross = (config.dcn_num_layers or DCN_NUM_LAYERS, config.dcn_low_rank_dim or DCN_LOW_RANK_DIM)
        over = () if config.arch in WITH_TOWERS else config.over_layers(sum(widths))
        layers = (() if config.arch in FACTORIZED else config.dense_arch_layer_sizes, over)
        if config.arch == "fm":
            layers = ((), over[-1:])
        size = cls(config.crossing, num_dense, num_features, config.embedding_dim, *layers, *cross, number_bytes)
        if over:
            return size
        return replace(size, tower_layers=tuple(_tower_layers(config, size._interaction_width, widths)))

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of forward and backward: 3 x 2 per multiply-add."""
        multiply_adds = sum(a * b for a, b in self._layers)
        if self.arch == "dlrm_dcn":
            multiply_adds += 2 * self.cross_layers * self.cross_rank * self._crossed
        elif self.arch in FACTORIZED:  # sum and sum of squares
            multiply_adds += self._own_weights + (0 if self.arch == "wide_deep" else 2 * self._crossed)
        else:
            multiply_adds += self._features**2 * self.dim
        return float(FLOPS_PER_MULTIPLY_ADD * multiply_adds)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights and biases."""
        mlps = sum((a + 1) * b for a, b in self._layers)
        mlps += self._own_weights + (self._outputs if self.arch == "fm" else 0)
        return self.number_bytes * (mlps + self.cross_layers * (2 * self.cross_rank + 1) * self._crossed)

    @property
    def activation_bytes_per_sample(self) -> float:
        """Bytes held when the backward goes through the interaction, the point of most memory: what the forward kept
        for it, and the interaction's gradients."""
        numbers = self.num_dense + sum(self.dense_layers) + sum(self.over_layers)
        numbers += sum(width for _, width in self.tower_layers)
        if self.arch == "dlrm_dcn":  # two kept per layer, and one; the gradients of first and present input
            numbers += (2 * self.cross_layers + 3) * self._crossed + self.cross_layers * self.cross_rank
        elif self.arch in FACTORIZED:  # the fields, the input of the MLP, and their gradients
            numbers += 4 * self._crossed
        else:
            numbers += 2 * (self._crossed + self._features**2 + self._interaction_width)
        return float(self.number_bytes * numbers)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Input and output width of each layer that multiplies by a matrix of weights."""
        crossed = [(self._crossed, self.cross_rank), (self.cross_rank, self._crossed)]
        return (*self._layers, *crossed * self.cross_layers)

    @property
    def passes(self) -> tuple[float, ...]:
        """Numbers of a sample that each kernel reads and writes which is no such product, forward and backward.

        Of a layer: its ReLU, the ReLU's gradient, and the bias' gradient. Of the interaction: the kernels of
        TorchRec's `InteractionArch` and `LowRankCrossNet`, operator by operator; an FM's sums.
        """
        found = [float(times * outputs) for _, outputs in self._layers for times in (2, 3, 1)]
        all_fields, pairs = float(self._crossed), float(self._features**2)
        if self.arch == "dlrm_dcn":  # bias, product, sum; gradients of both factors and of the bias, and sums of them
            return (*found, 2 * all_fields, *[n * all_fields for n in (2, 3, 3, 3, 3, 3, 3, 1)] * self.cross_layers)
        if self.arch in FACTORIZED:
            return (*found, *(n * all_fields for n in (2, 2, 2, 3, 3)))
        width = 2.0 * self._interaction_width
        of_fields = [n * all_fields for n in (2, 3, 2)]  # put together; sum of two gradients; taken apart
        of_pairs = [2 * all_fields + pairs] * 3 + [2 * pairs, 3 * pairs]  # products; the upper triangle, and back
        return (*found, *of_fields, *of_pairs, width, width)

    @property
    def _features(self) -> int:
        if self.arch in FACTORIZED:
            return self.num_features + (0 if self.arch == "wide_deep" else self.num_dense)
        return self.num_features + 1

    @property
    def _outputs(self) -> int:
        """Outputs, of a model with a weight per id, whose rows have one for each."""
        return self.over_layers[-1] if self.arch in FACTORIZED else 0

    @property
    def _crossed(self) -> int:
        return self._features * (self.dim - self._outputs)

    @property
    def _own_weights(self) -> int:
        """Weights of a model with one per id, beside its MLP: of dense features, and of several outputs' products."""
        if self.arch == "wide_deep":
            return self.num_dense * self._outputs
        mixed = self._outputs * (self.dim - self._outputs) if self._outputs > 1 else 0
        return mixed + (self.num_dense * self.dim if self.arch in FACTORIZED else 0)

    @property
    def _interaction_width(self) -> int:
        if self.arch in ("wide_deep", "deepfm"):
            return self.num_features * (self.dim - self._outputs) + self.num_dense
        if self.arch == "dlrm_dcn":
            return self._crossed
        return self.dim + self._features * (self._features - 1) // 2

    @property
    def _layers(self) -> list[tuple[int, int]]:
        """Input and output width of every layer of both MLPs."""
        if self.arch == "fm":
            return []
        widths = (self.num_dense, *self.dense_layers), (self._interaction_width, *self.over_layers)
        return [*(layer for mlp in widths for layer in pairwise(mlp)), *self.tower_layers]


def _tower_layers(config: ModelConfig, width: int, widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield input and output width of every layer over an interaction of `width` numbers."""
    is_ple, num_labels = config.arch == "ple", len(widths)
    num_shared = 1 if config.arch == "shared_bottom" else config.experts
    num_own = config.label_experts if is_ple else 0
    num_levels = config.levels if is_ple else 1
    for level in range(num_levels):
        inputs = config.expert_layers[-1] if level else width
        yield from list(pairwise((inputs, *config.expert_layers))) * (num_shared + num_labels * num_own)
        if config.arch != "shared_bottom":
            yield from [(inputs, num_shared + num_own)] * num_labels
        if level < num_levels - 1:
            yield inputs, num_shared + num_labels * num_own
    for outputs in widths:
        yield from pairwise((config.expert_layers[-1], *config.over_arch_layer_sizes[:-1], outputs))


def built_in_parameters(config: ModelConfig, schema: Schema) -> int:
    """Return the number of weights and biases of the dense layers of a built-in model."""
    num_dense, num_sparse, num_labels = len(schema.dense), len(schema.sparse), len(schema.target.labels)
    widths = [*map(len, schema.target.heads.values())]
    learned = len(widths) if config.label_weighting == "uncertainty" else 0
    if config.arch not in WITH_HISTORY:
        size = DenseSize.of(config, num_dense, num_sparse, number_bytes=1, widths=widths)
        return size.parameter_bytes + learned
    events, dim, over = len(config.target), config.embedding_dim, config.over_layers(num_labels)
    others = num_sparse - len(config.event_features) + (num_dense > 0)
    sizes = config.history_layer_sizes or HISTORY_LAYER_SIZES
    dense = learned + (mlp_parameters(num_dense, *config.dense_arch_layer_sizes) if num_dense else 0)
    if config.section is not None:
        return dense + config.section.num_parameters(len(config.history), dim) + mlp_parameters(dim, *over)
    if config.arch == "din":
        slopes = len(sizes) + len(over) - 1 if config.activation == "prelu" else 0
        unit = mlp_parameters(4 * events * dim, *sizes, 1)
        return dense + slopes + unit + mlp_parameters((3 * events + others) * dim, *over)
    vectors = events + others
    step = mlp_parameters(vectors * dim + vectors * (vectors - 1) // 2, *sizes)
    return dense + step + 1 + mlp_parameters(3 * sizes[-1], *over)


def model_tables(config: ModelConfig, schema: Any) -> tuple[ModelTable, ...]:
    """Return the tables of the model that `build_model` builds, in the order of its modules. Errors as there.

    >>> from embershard.data import Schema, SparseFeature
    >>> schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 100),))
    >>> [(table.name, table.num_rows, table.features) for table in model_tables(ModelConfig(), schema)]
    [('t_C1', 100, ('C1',))]
    """
    return built_in_tables(config, schema) if config.build is None else _of_own(config, schema)[0]


def num_parameters(config: ModelConfig, schema: Any) -> int:
    """Return the number of weights and biases of the dense layers of the model that `build_model` builds.

    >>> from embershard.data import Schema, SparseFeature
    >>> schema = Schema(dense=("I1",), sparse=(SparseFeature("C1", 100),))
    >>> num_parameters(ModelConfig(dense_arch_layer_sizes=(32, 16), over_arch_layer_sizes=(8, 1)), schema)
    745
    """
    return built_in_parameters(config, schema) if config.build is None else _of_own(config, schema)[1]


@lru_cache(maxsize=16)
def _of_own(config: ModelConfig, schema: Any) -> tuple[tuple[ModelTable, ...], int]:
    """Return the tables and the dense parameters of a model of one's own, which is built for it and thrown away."""
    import torch

    from embershard.models.build import build_model
    from embershard.models.table_modules import tables_in

    with torch.random.fork_rng(devices=[]):
        model = build_model(config, schema, torch.device("cpu"))
    dense = sum(parameter.numel() for parameter in model.parameters() if parameter.device.type != "meta")
    return tuple(tables_in(model)), dense
