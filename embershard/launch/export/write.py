"""Writes the folder of an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embershard.data.sources.kinds import schema_of, serving_inputs
from embershard.distributed import process_group
from embershard.distributed.checkpoint.rows import saved_rows
from embershard.errors import naming_file
from embershard.launch.export import serving_model, serving_values
from embershard.launch.export.dense_program import DenseLayers, dense_layers, dense_program
from embershard.launch.export.rounding import RoundingSample
from embershard.launch.export.tables import TableDtype, write_parquet, write_safetensors
from embershard.launch.versions import versions
from embershard.models import ModelTable
from embershard.training.checkpoint.trained_run import TrainedRun, open_trained
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import tables_of_run


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    Attributes:
        config: settings of the run; its held-out samples are those to measure the error on.
        checkpoints: folder of the run's checkpoints.
        step: of the checkpoint; None: the newest valid one.
        is_module: write the module; False: the tables alone, as Parquet.
        dtype: number type of the module's tables.
        num_samples: most samples to measure the error on; none are read for fp32.
    """

    config: RunConfig
    checkpoints: Path
    step: int | None
    is_module: bool
    dtype: TableDtype
    num_samples: int


def write_export(request: ExportRequest, folder: Path) -> Iterator[str]:
    """Write the new folder `folder`, which gets its name when it is complete. Yields what the user should know.

    Raises:
        CheckpointError: no checkpoint is valid, or it is of another model.
        DataError: the samples cannot be read.
    """
    with process_group("cpu") as ranks:
        trained = open_trained(request.config, request.checkpoints, ranks, request.step)
    yield from (f"Not used: {reason}." for reason in trained.skipped)
    partial = folder.with_name(folder.name + ".partial")
    try:
        with naming_file(partial):
            (partial / "tables").mkdir(parents=True)
        error = _write(request, trained, partial)
        with naming_file(folder):
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    yield f"Exported {trained.checkpoint} to {folder}."
    if error is not None:
        yield (
            f"Error of {request.dtype} on {error['samples']:,} samples: scores differ by {error['score_max']:.2g} at "
            f"most, and by {error['score_mean']:.2g} in the mean (export.json)."
        )


def _write(request: ExportRequest, trained: TrainedRun, folder: Path) -> dict[str, Any] | None:
    """Write all files; return the error of the tables' rounding, None for none."""
    config, schema = request.config, schema_of(request.config.data)
    inputs, tables = serving_inputs(config.data), tables_of_run(config)
    inputs["lookups"] = [
        {"feature": feature, "table": table.name, "dim": table.dim, "pooling": table.pooling}
        for table in tables
        for feature in table.features
    ]
    about = {
        "run": str(request.checkpoints.parent.absolute()),
        "step": trained.saved.step,
        "format": "module" if request.is_module else "parquet",
        "arch": config.model.title,
        "labels": schema.target.labels,
        "task": schema.target.task,
        "dtype": request.dtype,
        "versions": versions(),
    }
    _write_json(folder / "inputs.json", inputs)
    _write_json(folder / "export.json", about)
    if not request.is_module:
        for table in tables:
            rows = saved_rows(trained.checkpoint, _tensor(table))
            write_parquet(folder / "tables" / f"{table.name}.parquet", rows)
        return None
    layers = dense_layers(config.model, schema, trained.checkpoint)
    with naming_file(folder / "dense.pt2"):
        torch.export.save(dense_program(layers, schema.num_dense), folder / "dense.pt2")
    program = Path(str(serving_model.__file__)).read_text(encoding="utf-8")
    (folder / "model.py").write_text(program.replace(serving_values.__name__, "model_values"), encoding="utf-8")
    shutil.copyfile(str(serving_values.__file__), folder / "model_values.py")
    error = _write_tables(request, trained.checkpoint, folder, inputs, tables, layers)
    _write_json(folder / "export.json", {**about, "error": error})
    return error


def _write_tables(
    request: ExportRequest,
    checkpoint: Path,
    folder: Path,
    inputs: dict[str, Any],
    tables: Sequence[ModelTable],
    layers: DenseLayers,
) -> dict[str, Any] | None:
    """Write the module's tables; return their error on samples, None for none."""
    sample = None
    if request.dtype != "fp32":
        sample = RoundingSample(request.config.data, request.num_samples, inputs)
    for table in tables:
        blocks = saved_rows(checkpoint, _tensor(table))
        if sample is not None:
            blocks = sample.kept[table.name].watch(blocks)
        path = folder / "tables" / f"{table.name}.safetensors"
        write_safetensors(path, blocks, table.num_rows, request.dtype)
    return None if sample is None else sample.error(serving_model.load(folder), layers)


def _tensor(table: ModelTable) -> str:
    """Return the name of a table's weights in a checkpoint, in the group of the model."""
    return f"model.{table.tensor}"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with naming_file(path):
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
