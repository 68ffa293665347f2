"""Writes the folder of an export: files of tables, the module, and the error of rounded tables on samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embershard.cache.ids.config import IdTable
from embershard.data import DataConfig, Target, open_source
from embershard.data.block import Block
from embershard.data.order.stream import SampleReader
from embershard.data.sources.kinds import schema_of, serving_inputs
from embershard.distributed import changed_rows, process_group, tensors_file
from embershard.distributed.checkpoint.load import saved_rows
from embershard.distributed.publish import published
from embershard.distributed.publish.published import IDS
from embershard.distributed.tensors_file import safetensors, safetensors_header
from embershard.errors import naming_file
from embershard.extras.serving import serving_model, serving_replica, serving_values
from embershard.extras.serving.dense_program import DenseLayers, dense_layers, dense_program
from embershard.extras.serving.serving_model import IdPlaces, Model, StoredTable, table_names
from embershard.launch.versions import versions
from embershard.metrics.figures import main_values
from embershard.metrics.predictions import Predicted, judge
from embershard.models import ModelTable
from embershard.training.checkpoint.saved_run import SavedRun
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.fit.model_size import tables_of_run
from embershard.training.trained_run import TrainedRun, open_trained
from embershard.whole_file import whole_folder


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    Attributes:
        config: settings of the run; its held-out samples are those to measure the error on.
        checkpoints: folder of the run's checkpoints.
        step: of the checkpoint, as for `open_trained`.
        is_module: write the module; False: the tables alone, as Parquet.
        dtype: number type of the module's tables.
        num_samples: most samples to measure the error on, 0 for none; none are read for fp32.
    """

    config: RunConfig
    checkpoints: Path
    step: int | Literal["last"] | None
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
    with whole_folder(folder) as partial:
        error = _write(request, trained, partial)
    yield f"Exported to {folder}: {trained.title}."
    if error is not None:
        yield (
            f"Error of {request.dtype} on {error['samples']:,} samples: scores differ by {error['score_max']:.2g} at "
            f"most, and by {error['score_mean']:.2g} in the mean (export.json)."
        )


def export_base(config: RunConfig, checkpoint: Path, dtype: TableDtype, folder: Path) -> None:
    """Write an export of a checkpoint of the run `config` to the new folder `folder`, with the program of a replica.
    One rank calls it; random numbers stay as they are.

    Raises:
        ConfigError: torch.export cannot record the model.
    """
    request = ExportRequest(config, checkpoint.parent, None, is_module=True, dtype=dtype, num_samples=0)
    with torch.random.fork_rng():
        _write(request, TrainedRun(config, checkpoint, SavedRun.read(checkpoint)), folder)
    _ship(published, folder / "published.py")
    _ship(changed_rows, folder / "changed_rows.py")
    _ship(tensors_file, folder / "tensors_file.py")
    _ship(serving_replica, folder / "replica.py")


#: Names of modules in this package, and beside an exported model.
_SHIPPED = {
    serving_values.__name__: "model_values",
    serving_model.__name__: "model",
    published.__name__: "published",
    changed_rows.__name__: "changed_rows",
    tensors_file.__name__: "tensors_file",
}


def _ship(module: ModuleType, path: Path) -> None:
    """Copy a module into an export, so that it needs no embershard."""
    program = Path(str(module.__file__)).read_text(encoding="utf-8")
    for name, new in _SHIPPED.items():
        program = program.replace(f"from {name} import", f"from {new} import")
    path.write_text(program, encoding="utf-8")


def _write(request: ExportRequest, trained: TrainedRun, folder: Path) -> dict[str, Any] | None:
    """Write all files; return the error of the tables' rounding, None for none."""
    with naming_file(folder):
        (folder / "tables").mkdir(parents=True)
    config, schema = request.config, schema_of(request.config.data)
    inputs, tables = serving_inputs(config.data), tables_of_run(config)
    inputs["lookups"] = [
        {"feature": feature, "table": table.name, "dim": table.dim, "pooling": table.pooling}
        for table in tables
        for feature in table.features
    ]
    inputs["lookups"] += [{"feature": name, "table": None, "pooling": ""} for name in config.model.times]
    about = {
        "run": str(request.checkpoints.parent.absolute()),
        "step": trained.saved.step,
        "format": "module" if request.is_module else "parquet",
        "arch": config.model.title,
        "labels": schema.target.labels,
        "task": schema.target.task,
        "classes": schema.target.classes,
        "dtype": request.dtype,
        "versions": versions(),
    }
    rules = id_rules(config)
    ids = {
        table.name: SavedIds.read(trained.checkpoint, _tensor(table), table.name, rules[table.name])
        for table in tables
        if table.name in rules
    }
    if ids:
        inputs["id_tables"] = {name: {"buckets": own.num_buckets} for name, own in ids.items()}
    _write_json(folder / "inputs.json", inputs)
    _write_json(folder / "export.json", about)
    if not request.is_module:
        for table in tables:
            rows = saved_rows(trained.checkpoint, _tensor(table))
            write_parquet(folder / "tables" / f"{table.name}.parquet", rows, ids.get(table.name))
        return None
    layers = dense_layers(config.model, schema, trained.checkpoint)
    with naming_file(folder / "dense.pt2"):
        torch.export.save(dense_program(layers, schema.num_dense), folder / "dense.pt2")
    _ship(serving_model, folder / "model.py")
    _ship(serving_values, folder / "model_values.py")
    error = _write_tables(request, trained.checkpoint, folder, inputs, tables, ids, layers)
    _write_json(folder / "export.json", {**about, "error": error})
    return error


def _write_tables(
    request: ExportRequest,
    checkpoint: Path,
    folder: Path,
    inputs: dict[str, Any],
    tables: Sequence[ModelTable],
    ids: Mapping[str, SavedIds],
    layers: DenseLayers,
) -> dict[str, Any] | None:
    """Write the module's tables; return their error on samples, None for none."""
    sample = None
    if request.dtype != "fp32" and request.num_samples:
        places = {name: own.places() for name, own in ids.items()}
        sample = RoundingSample(request.config.data, request.num_samples, inputs, places)
    for table in tables:
        blocks, own = saved_rows(checkpoint, _tensor(table)), ids.get(table.name)
        if own is not None:
            blocks = own.cleared(blocks)
            with naming_file(folder), (folder / "tables" / f"{table.name}{IDS}").open("wb") as file:
                file.writelines(safetensors(own.tensors()))
        if sample is not None:
            blocks = sample.kept[table.name].watch(blocks)
        path = folder / "tables" / f"{table.name}.safetensors"
        write_safetensors(path, blocks, table.num_rows, request.dtype)
    return None if sample is None else sample.error(serving_model.load(folder), layers)


def _tensor(table: ModelTable) -> str:
    return f"model.{table.tensor}"  # in the checkpoint's group of the model


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with naming_file(path):
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, eq=False)
class SavedIds:
    """Which id has which row of a table.

    Attributes:
        num_buckets: of the table.
        ids: int64 [n], ascending, as data have them.
        rows: int32 [n], of each.
        is_used: bool [R], rows that an id has, or ids without a row share.
    """

    num_buckets: int
    ids: Tensor
    rows: Tensor
    is_used: Tensor

    @classmethod
    def of_records(cls, table: str, rules: IdTable, records: Tensor) -> SavedIds:
        """Return what the tensor [R, 2] of ids in a state dict says (`IdMap.tensors`)."""
        from embershard.cache.ids.id_map import unmixed  # of a capability that may be taken out

        buckets = rules.buckets_of(table, len(records))
        is_used = records[:, 1] >= 0
        rows = is_used.nonzero().flatten()
        ids, order = torch.from_numpy(unmixed(records[rows, 0].numpy())).sort()
        if rules.unadmitted == "shared":
            is_used[:: buckets.rows] = True
        return cls(buckets.num_buckets, ids, rows[order].int(), is_used)

    @classmethod
    def read(cls, checkpoint: Path, tensor: str, table: str, rules: IdTable) -> SavedIds:
        """Read those of a verified checkpoint.

        Args:
            tensor: name of the table's weights in it.

        Raises:
            CheckpointError: it has none.
        """
        records = torch.cat(list(saved_rows(checkpoint, f"{tensor.removesuffix('weight')}ids")))
        return cls.of_records(table, rules, records)

    def cleared(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield blocks of the table's rows, with zeros in those that nobody uses: they hold what an id left, or what
        one will begin with."""
        first = 0
        for block in blocks:
            is_used = self.is_used[first : first + len(block)]
            yield block.where(is_used.unsqueeze(1), block.new_zeros(()))
            first += len(block)

    def places(self) -> IdPlaces:
        """Return where each id is, as an exported model has it."""
        return IdPlaces(self.ids, self.rows, len(self.is_used), self.num_buckets)

    def owners(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the ids of rows `first` to `first + count`, and which of them none has."""
        ids, has_none = np.zeros(len(self.is_used), np.int64), np.ones(len(self.is_used), np.bool_)
        ids[self.rows], has_none[self.rows] = self.ids, False
        return ids[first : first + count], has_none[first : first + count]

    def tensors(self) -> dict[str, Tensor]:
        """Return what an export's file has."""
        return {"ids": self.ids, "rows": self.rows}


_BATCH = 1024


class RoundingSample:
    """Held-out samples, and the rows of the trained tables that they look up.

    Args:
        config: of the data; the first held-out samples are read.
        most_samples: to read.
        inputs: of the exported model.
        places: in tables of ids, by name, where each id is.

    Attributes:
        kept: of each table, by its name, the rows to keep while the table is written.
    """

    def __init__(
        self, config: DataConfig, most_samples: int, inputs: dict[str, Any], places: Mapping[str, IdPlaces]
    ) -> None:
        source = open_source(config, needs_labels=False)
        count = min(most_samples, source.chunks("eval").num_samples)
        self._blocks = list(SampleReader(source, "eval", config).blocks(count, _BATCH))
        self._schema, self._inputs, self._places = source.schema, inputs, places
        looked_up: dict[str, list[Tensor]] = {name: [] for name in table_names(inputs)}
        for lookup in inputs["lookups"]:
            if not lookup["table"]:
                continue
            feature = source.schema.keys.index(lookup["feature"])
            looked_up[lookup["table"]] += [torch.from_numpy(block.values[feature]) for block in self._blocks]
        rows = {name: torch.cat(ids) for name, ids in looked_up.items()}
        rows |= {name: own(rows[name]) for name, own in places.items()}
        self.kept = {name: KeptRows(each.unique()) for name, each in rows.items()}

    def error(self, model: nn.Module, layers: nn.Module) -> dict[str, Any]:
        """Return the error of the exported `model` on the samples, as JSON values.

        The distances of logits and of scores from the trained model's are the largest and the mean one; the AUCs, or
        RMSEs, are None where labels are missing or do not define them.

        Args:
            layers: of the trained model, around its tables.
        """
        trained = Model([_KeptTable(kept) for kept in self.kept.values()], layers, self._inputs, self._places)
        with torch.no_grad():
            pairs = [self._score(block, trained, model) for block in self._blocks]
        before, after, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        weights = [torch.from_numpy(block.weights) for block in self._blocks if block.weights is not None]
        of_samples = torch.cat(weights) if weights else None
        target = self._schema.target
        found: dict[str, Any] = {"samples": len(before), **_score_distances(target, before, after)}
        is_missing = labels.isnan().all(dim=0) if target.may_be_missing else labels.isnan()
        has_labels = not is_missing.any() and (of_samples is None or not of_samples.isnan().any())
        for what, outputs in (("trained", before), ("exported", after)):
            values = main_values(judge(target, Predicted(outputs, labels, of_samples)))
            found |= {f"{name}_{what}": value if has_labels else None for name, value in values.items()}
        return found

    def _score(self, block: Block, trained: nn.Module, exported: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        batch = block.to_batch(self._schema)
        bags = [batch.sparse_features[key] for key in self._schema.keys]
        offsets = [bag.offsets().long() for bag in bags]
        ids = [bag.values() for bag in bags]
        dense = batch.dense_features
        return trained(dense, ids, offsets), exported(dense, ids, offsets), batch.labels


def _score_distances(target: Target, before: Tensor, after: Tensor) -> dict[str, float]:
    scores = {"score": (before, after)}
    if "binary" in target.tasks:
        are_numbers = torch.tensor([task == "regression" for task in target.tasks])
        probabilities = [each.where(are_numbers, each.sigmoid()) for each in (before, after)]
        scores = {"logit": (before, after), "score": (probabilities[0], probabilities[1])}
    found: dict[str, float] = {}
    for name, (one, other) in scores.items():
        distance = (other - one).abs()
        found |= {f"{name}_max": float(distance.max()), f"{name}_mean": float(distance.mean())}
    return found


class _KeptTable(StoredTable):
    """A trained table, of which some rows were kept."""

    def __init__(self, kept: KeptRows) -> None:
        super().__init__(kept.rows, "fp32")
        self._wanted = kept.wanted

    def rows(self, ids: Tensor) -> Tensor:
        return super().rows(torch.searchsorted(self._wanted, ids))


TableDtype = Literal["fp32", "fp16", "int8", "int4"]


def stored(rows: Tensor, dtype: TableDtype) -> Tensor:
    """Return rows [R, dim] as they are stored.

    int8: [R, dim + 8] bytes, a number each and the row's scale and offset as float32. int4: [R, dim / 2 + 4] bytes, two
    numbers each (the first in the low bits), and scale and offset as float16. The numbers are those of torch's
    `embedding_bag_byte_prepack` and `embedding_bag_4bit_prepack`.

    >>> stored(torch.zeros(3, 16), "int4").shape
    torch.Size([3, 12])
    """
    if dtype == "int8":
        return torch.ops.quantized.embedding_bag_byte_prepack(rows.float())
    if dtype == "int4":
        return torch.ops.quantized.embedding_bag_4bit_prepack(rows.float())
    return rows.to(torch.float16 if dtype == "fp16" else torch.float32)


def write_safetensors(path: Path, blocks: Iterable[Tensor], num_rows: int, dtype: TableDtype) -> None:
    """Write a table of `num_rows` rows as the tensor "rows" of a safetensors file.

    Args:
        blocks: its rows in order, [r, dim].
    """
    iterator = iter(blocks)
    first = stored(next(iterator), dtype)
    with naming_file(path), path.open("wb") as file:
        file.write(safetensors_header({"rows": (first.dtype, (num_rows, first.shape[1]))}))
        file.write(first.contiguous().numpy().data)
        for rows in iterator:
            file.write(stored(rows, dtype).contiguous().numpy().data)


def write_parquet(path: Path, blocks: Iterable[Tensor], ids: SavedIds | None = None) -> None:
    """Write a table as a Parquet file with the columns `row` (int64) and `embedding` (a list of dim numbers, fp32).

    Args:
        blocks: its rows in order, [r, dim].
        ids: of a table of ids: the rows that are used are written, with the column `id`, which a row has not that
            ids share.
    """
    first_row, writer = 0, None
    try:
        for rows in blocks:
            numbers = pa.FixedSizeListArray.from_arrays(pa.array(rows.float().reshape(-1).numpy()), rows.shape[1])
            numbered = pa.array(range(first_row, first_row + len(rows)), pa.int64())
            table = pa.table({"row": numbered, "embedding": numbers})
            if ids is not None:
                owners, has_none = ids.owners(first_row, len(rows))
                is_used = pa.array(ids.is_used[first_row : first_row + len(rows)].numpy())
                table = table.add_column(1, "id", pa.array(owners, mask=has_none)).filter(is_used)
            with naming_file(path):
                writer = writer or pq.ParquetWriter(path, table.schema, write_page_checksum=True)
                writer.write_table(table)
            first_row += len(rows)
    finally:
        if isinstance(writer, AbstractContextManager):
            writer.__exit__(None, None, None)


class KeptRows:
    """Keeps some rows of a table that passes by in blocks.

    >>> kept = KeptRows(torch.tensor([1, 4]))
    >>> for block in kept.watch(torch.arange(10.0).view(5, 2).split(3)): pass
    >>> kept.rows.tolist()
    [[2.0, 3.0], [8.0, 9.0]]

    Args:
        wanted: row numbers [n], sorted, each once.

    Attributes:
        rows: [n, dim], once all blocks passed.
    """

    def __init__(self, wanted: Tensor) -> None:
        self.wanted, self._parts = wanted, list[Tensor]()

    def watch(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the blocks."""
        first_row = 0
        for rows in blocks:
            start, stop = torch.searchsorted(self.wanted, torch.tensor([first_row, first_row + len(rows)])).tolist()
            self._parts.append(rows[self.wanted[start:stop] - first_row])
            first_row += len(rows)
            yield rows

    @property
    def rows(self) -> Tensor:
        return torch.cat(self._parts)
