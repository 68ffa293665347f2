"""Models of one's own, `model.build = "my_module:function"`: made, and checked."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embershard.data.schema import Schema, Target
from embershard.errors import ConfigError
from embershard.models.config import ModelConfig
from embershard.models.loss import class_logits, loss_of
from embershard.models.table_modules import collections_of, tables_in
from embershard.settings.own_code import load_function, note_batch, place_of


class OwnModel(nn.Module):
    """A model of one's own, with the loss.

    Its forward takes a batch and returns `(loss [], (loss [], outputs, labels))`, as `WithLoss` does.

    Args:
        model: from a batch to outputs [B] or [B, 1], of several labels [B, T], of which `loss_of` gives the loss; or to
            `(loss [], outputs)`. Outputs of classes are those before the softmax.

    Attributes:
        target: what is predicted of a sample.
    """

    def __init__(self, model: nn.Module, name: str, target: Target) -> None:
        super().__init__()
        self.model, self._name, self.target = model, name, target

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss, and loss, outputs and labels without gradients."""
        try:
            found, labels = self.model(batch), batch.labels
        except Exception as error:
            note_batch(error, batch)
            raise
        loss, outputs = found if isinstance(found, tuple) and len(found) == 2 else (None, found)
        self._check(loss, outputs, labels)
        outputs = class_logits(self.target, outputs.reshape(labels.shape))
        if loss is None:
            loss = loss_of(self.target, outputs, labels.to(outputs.dtype), batch.weights)
        return loss, (loss.detach(), outputs.detach(), labels.detach())

    def _check(self, loss: Any, logits: Any, labels: Tensor) -> None:
        is_right = isinstance(logits, Tensor) and logits.numel() == labels.numel()
        is_right = is_right and (labels.dim() == 1 or logits.shape == labels.shape)
        if not is_right or not (loss is None or (isinstance(loss, Tensor) and loss.numel() == 1)):
            shapes = [list(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in (loss, logits)]
            got = shapes[1] if loss is None else shapes
            raise ConfigError(
                f"{self._name}: the model's forward returned {got} for {len(labels)} samples; needed logits "
                f"{list(labels.shape)}, or (loss [], logits {list(labels.shape)})."
            )


def build_own(config: ModelConfig, schema: Schema, device: torch.device) -> OwnModel:
    """Build the model of `config.build`: see `build_model`.

    Raises:
        ConfigError: the function is not found, fails, or returns something else than such a model.
    """
    name = f"model.build = {config.build!r}"
    function = load_function("model.build", config.build or "", config.folder)
    with device:
        try:
            model = function(schema, dict(config.options))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{name} failed: {type(error).__name__}: {error} ({place_of(error)}).") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} returned {type(model).__name__}; needed a torch.nn.Module.")
    own = OwnModel(model, name, schema.target)
    _check_tables(own, schema, name)
    return own


def source_digest(config: ModelConfig) -> str:
    """Return the SHA-256 of the file that defines `config.build`, in hexadecimal; of modules that it imports nothing.

    Raises:
        ConfigError: the function is not found.
    """
    file = inspect.getsourcefile(inspect.unwrap(load_function("model.build", config.build or "", config.folder)))
    return "no file" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _check_tables(model: nn.Module, schema: Schema, name: str) -> None:
    """Raise unless there are tables, where they can be placed, and tables and features fit each other."""
    collections = list(collections_of(model))
    if not collections:
        raise ConfigError(
            f"{name} returned a model without tables; needed a torchrec EmbeddingBagCollection or EmbeddingCollection "
            "in it."
        )
    for path, module in collections:
        if torch.device(module.device).type != "meta":
            raise ConfigError(
                f"{name}: {path.partition('.')[2]} is on {module.device}; make it with "
                'device=torch.device("meta"): its rows get their memory where they are placed.'
            )
        if hasattr(module, "is_weighted") and module.is_weighted():
            raise ConfigError(
                f"{name}: {path.partition('.')[2]} is weighted, and batches have no weights of ids; make it with "
                "is_weighted=False."
            )
    rows = {feature.name: feature.num_rows for feature in schema.sparse}
    seen: dict[str, str] = {}
    for table in tables_in(model):
        if table.name in seen:
            raise ConfigError(
                f"{name}: two tables are named {table.name!r} (in {seen[table.name].partition('.')[2]} and "
                f"{table.module.partition('.')[2]}); plans and checkpoints know tables by name, so rename one."
            )
        seen[table.name] = table.module
        if table.dim % 4:
            raise ConfigError(f"{name}: table {table.name!r} has dim {table.dim}; needed a multiple of 4.")
        for feature in table.features:
            if feature not in rows:
                raise ConfigError(
                    f"{name}: table {table.name!r} looks up the feature {feature!r}, which the data do not have; they "
                    f"have {', '.join(rows)}."
                )
            if table.num_rows < rows[feature]:
                raise ConfigError(
                    f"{name}: table {table.name!r} has {table.num_rows} rows, and its feature {feature!r} has ids up "
                    f"to {rows[feature] - 1}; needed at least {rows[feature]} rows (feature.num_rows)."
                )
    unread = set(rows) - {feature for table in tables_in(model) for feature in table.features}
    if unread:
        raise ConfigError(
            f"{name}: no table looks up the feature {sorted(unread)[0]!r}. Give it one, or leave it out of the data's "
            "settings."
        )
