"""Which runs may deal their samples: what a dry run refuses, and a run at its start, in the same words."""

from __future__ import annotations

from torch import device
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, SyncBatchNorm

from embershard.data import Schema, schema_of
from embershard.errors import ConfigError
from embershard.extras.deal.reader import SampleCost
from embershard.models import build_model
from embershard.training.config import RunConfig

_LEAVE = "--set data.deal=order"


def check_run(config: RunConfig, ranks: int | None) -> None:
    """Check all that is known before ranks start, their number only if it is; of a model of one's own its layers, for
    which it is built, without memory for its tables.

    Raises:
        ConfigError: as `check_settings` and `check_layers`; or the model cannot be built.
    """
    schema = schema_of(config.data)
    check_settings(config, schema, ranks)
    if config.model.build is not None:
        check_layers(config, build_model(config.model, schema, device("cpu")))


def check_settings(config: RunConfig, schema: Schema, ranks: int | None) -> SampleCost:
    """Return what a sample costs.

    Raises:
        ConfigError: nothing says it, or samples cannot be dealt to these ranks.
    """
    if config.sharding.mode == "hot_cold":
        raise ConfigError(
            'data.deal: got "cost" in the mode "hot_cold", whose batches are packed by hot rows; needed "order" '
            f"or the mode sharded: {_LEAVE}, or --set sharding.mode=sharded --set sharding.hot_bytes=none."
        )
    together = config.data.deal_ranks
    if together is not None and (together < 1 or (ranks is not None and ranks % together)):
        divisors = [count for count in range(2, ranks + 1) if not ranks % count] if ranks else []
        raise ConfigError(
            f"data.deal_ranks: got {together}, needed a divisor of the {f'{ranks} ' if ranks else ''}ranks"
            f"{f': {divisors}' if divisors else ', 1'}. Or leave it out: all ranks share their slices then."
        )
    return cost_of(config, schema)


def check_layers(config: RunConfig, model: Module) -> None:
    """Refuse layers for which it matters which samples a rank has together.

    Raises:
        ConfigError: the model has such a layer.
    """
    refused: tuple[type, ...] = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
    if config.train.accumulate > 1:
        refused += (SyncBatchNorm,)  # else it sees all of the global batch
    for name, layer in model.named_modules():
        if isinstance(layer, refused):
            raise ConfigError(
                f'data.deal: got "cost" with a model that has {type(layer).__name__} ({name}): it normalizes by '
                "the samples that a rank has together, and these would be chosen by their cost. Use LayerNorm, or "
                f"leave samples in their order: {_LEAVE}."
            )


def cost_of(config: RunConfig, schema: Schema) -> SampleCost:
    """Return what a sample of a run costs: as the settings say, else by the events of the model's history.

    Raises:
        ConfigError: neither says it, or the settings name no feature.
    """
    model, given = config.model, config.data.deal_cost
    if given is not None:
        feature, a, b = given
        if feature not in schema.keys or min(a, b) < 0 or max(a, b) < 1:
            raise ConfigError(
                f"data.deal_cost: got {[*given]}, needed a sparse feature ({', '.join(schema.keys)}) and two integers "
                "of 0 or more, a and b: a sample with T ids of it costs a T + b T^2."
            )
        return SampleCost(feature, a, b)
    if not model.history:
        raise ConfigError(
            f'data.deal: got "cost" with the model {model.title!r}, of which nothing says what a sample costs. Name a '
            "feature whose ids it grows with, T of them cost a T + b T^2: data.deal_cost = "
            f'["{schema.keys[0]}", 1, 0], say. Or leave samples in their order: {_LEAVE}.'
        )
    a, b = (1, 0) if model.section is None else model.section.token_costs(len(model.history), model.embedding_dim)
    beside = len(schema.sparse) - len(model.event_features) + (schema.num_dense > 0)
    return SampleCost(model.history[0], a, b, more=beside + 1)
