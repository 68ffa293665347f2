"""`TrainedModel`: what a warm start takes from, a run's checkpoint or an export, opened and verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from embershard.cache.ids.config import IdTable
from embershard.data.sources.kinds import schema_of, serving_inputs
from embershard.distributed import Ranks, verify_checkpoint
from embershard.distributed.checkpoint.boxes import CheckpointSaved, Saved
from embershard.distributed.checkpoint.folder import best_checkpoint, checkpoints_for, complete_checkpoints
from embershard.distributed.checkpoint.load import SCALARS, newest_valid, read_scalars, verify_alone
from embershard.distributed.checkpoint.manifest import MANIFEST
from embershard.distributed.checkpoint.metadata import METADATA
from embershard.errors import CheckpointError, ConfigError, InvalidCheckpointError
from embershard.extras.warm_start.shapes import ModelShape, shape_of
from embershard.models import ModelTable
from embershard.settings.decoding import decode, read_toml
from embershard.settings.files import CHECKPOINTS, RUN_CONFIG
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.fit.model_size import tables_of_run
from embershard.training.warm_start import WARM_START, Step

_OPTIMIZERS = ("embedding_optimizer", "dense_optimizer")


@dataclass(frozen=True)
class TrainedModel:
    """A trained model on disk.

    Attributes:
        title: for a reader.
        saved: its tensors.
        shape: its tables and layers.
        schedule_steps, state_steps: that its schedule, and the counts beside its optimizers' states, are behind.
        optimizers: kind of each that has states here, by its section of the settings; None: unknown kinds.
        ids: rules of its tables of ids, where they are known.
        skipped: why other checkpoints were not used, as sentences without a full stop.
    """

    title: str
    saved: Saved
    shape: ModelShape
    schedule_steps: int
    state_steps: int
    optimizers: Mapping[str, str] | None = None
    ids: Mapping[str, IdTable] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    @property
    def has_states(self) -> bool:
        """It has states of optimizers, by the names of what they belong to."""
        groups = [name.split(".", 2)[:2] for name in self.saved.sizes() if name.startswith(_OPTIMIZERS)]
        return any(of not in ("state", "param_groups") for _, of in groups)


def open_model(
    path: Path,
    step: Step = None,
    ranks: Ranks | None = None,
    *,
    own_tables: Callable[[], tuple[ModelTable, ...]] = tuple,
    allow_unverified: bool = False,
) -> TrainedModel:
    """Open and verify a trained model. Collective, with the same result everywhere.

    Args:
        path: folder of a run, of its checkpoints, of one of these, or of an export.
        step: which checkpoint of a run.
        ranks: that verify together; None: this process does alone.
        own_tables: of the new model, for the features of an old model that was one's own: it is not built.
        allow_unverified: also take a checkpoint without a manifest.

    Raises:
        CheckpointError: there is none; or it is damaged (`InvalidCheckpointError`), or no module.
        ConfigError: a step of an export; or the settings of the run cannot be read.
    """
    if (path / "export.json").exists() or (path / "dense.safetensors").exists():
        return _export(path, step)
    checkpoints, candidates = _candidates(path, step)

    def check(checkpoint: Path) -> None:
        if ranks is not None:
            verify_checkpoint(checkpoint, ranks, allow_unverified=allow_unverified)
        elif (checkpoint / MANIFEST).exists() or not allow_unverified:
            verify_alone(checkpoint)

    if ranks is None and not allow_unverified and not any((each / MANIFEST).exists() for each in candidates):
        raise InvalidCheckpointError(
            f"{path}: no checkpoint with a manifest, so none can be verified. Those of torch.distributed.checkpoint "
            "have none: allow_unverified=True takes them."
        )
    used, skipped = newest_valid(candidates, check)
    if used is None:
        raise InvalidCheckpointError(
            f"No checkpoint in {checkpoints} is valid: {'; '.join(skipped) or 'there is none'}. Give another one."
        )
    best = best_checkpoint(checkpoints)[0] if step is None else None
    if best is not None and best != used[0] and best in candidates:
        skipped.append(f"{best} of the best evaluation: --step best takes it")
    return _checkpoint(used[0], tuple(skipped), own_tables)


def _candidates(path: Path, step: Step) -> tuple[Path, list[Path]]:
    """Return the folder of checkpoints, and those that may be used, oldest first."""
    if (path / METADATA).exists() or (path / MANIFEST).exists():
        if step is not None:
            raise ConfigError(f"--step has no effect: {path} is one checkpoint. Leave it out.")
        return path.parent, [path]
    checkpoints = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if not checkpoints.is_dir() or (checkpoints == path and not complete_checkpoints(path)):
        raise CheckpointError(
            f"{path}: no complete checkpoint and no export is there. Give the folder of a run (it has {CHECKPOINTS}/), "
            "of one of its checkpoints, or of an export (it has export.json)."
        )
    if step != "best":
        return checkpoints, checkpoints_for(checkpoints, step)
    best, problem = best_checkpoint(checkpoints)
    if best is None:
        why = problem or f"{checkpoints} has no best.json: the run did not judge its evaluations"
        raise CheckpointError(f"--step best: {why}. Give a step, or train with checkpoint.keep_best = true.")
    return checkpoints, [best]


def _checkpoint(
    checkpoint: Path, skipped: tuple[str, ...], own_tables: Callable[[], tuple[ModelTable, ...]]
) -> TrainedModel:
    saved = CheckpointSaved(checkpoint)
    has_scalars = (checkpoint / SCALARS).exists()  # not of a program's own
    shape, scalars = shape_of(saved.sizes()), read_scalars(checkpoint) if has_scalars else {}
    before = scalars.get(WARM_START) or {}
    trained = int(scalars.get("step", 0))
    steps = trained + int(before.get("schedule_steps", 0)), trained + int(before.get("state_steps", 0))
    settings = checkpoint.parent.parent / RUN_CONFIG
    if not settings.exists():
        return TrainedModel(str(checkpoint), saved, shape, *steps, None, {}, skipped)
    config = decode(RunConfig, read_toml(settings))
    is_own = config.model.build is not None
    schema = schema_of(config.data)
    tables = own_tables() if is_own else tables_of_run(config)
    lookups = [(feature, table.name) for table in tables for feature in table.features]
    shape = shape.with_inputs(serving_inputs(config.data), lookups, config.model.title, schema.target.labels)
    kinds = {name: getattr(config, name).kind for name in _OPTIMIZERS}
    rules = {} if is_own else id_rules(config)
    return TrainedModel(str(checkpoint), saved, shape, *steps, kinds, rules, skipped)


def _export(path: Path, step: Step) -> TrainedModel:
    if step is not None:
        raise ConfigError(f"--step has no effect: {path} is an export of one checkpoint. Leave it out.")
    from embershard.distributed.publish.exported import ExportSaved  # of a capability that may be taken out

    saved = ExportSaved(path)
    shape, inputs = shape_of(saved.sizes()), saved.inputs
    tables = {name: replace(each, has_ids=saved.ids(name) is not None) for name, each in shape.tables.items()}
    lookups = [(each["feature"], each["table"]) for each in inputs["lookups"] if each["table"]]
    about = saved.about
    labels = about["labels"] if isinstance(about["labels"], list) else [about["labels"]]
    shape = ModelShape(tables, shape.layers).with_inputs(inputs, lookups, about["arch"], labels)
    steps = int(about["step"])
    return TrainedModel(f"{path}, an export of step {steps}", saved, shape, steps, steps, {})
