"""Small folders of publications: a base with two tables and a linear layer, and deltas after it."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from embershard.distributed.changed_rows import TouchedRows
from embershard.distributed.publish.published import Publication, file_entries
from embershard.distributed.ranks import Ranks
from embershard.distributed.tensors_file import safetensors
from embershard.extras.publications import write

TABLES = {"t_user": (20, 4), "t_item": (30, 4)}
INPUTS = {
    "dense": [{"name": "one", "column": "one", "scale": "constant"}],
    "sparse": [
        {"name": name, "column": name, "mapping": "none", "id_base": 10, "num_rows": 20} for name in ("user", "item")
    ],
    "lookups": [
        {"feature": name, "table": f"t_{name}", "dim": 4, "pooling": "sum"} for name in ("user", "item")
    ],
}  # fmt: skip


#: Of an export, as the model of these publications has it.
ABOUT = {"dtype": "fp32", "format": "module", "run": "runs/r1", "arch": "dlrm", "task": "binary", "labels": ["click"]}


class Layers(nn.Module):
    """As the layers around the tables are exported: the model is called `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 1)

    def forward(self, dense: Tensor, found: list[Tensor]) -> Tensor:
        return self.model(torch.cat(found, dim=1)).squeeze(-1)


def program() -> bytes:
    """Return the layers around the tables, as a base has them."""
    rows, file = {0: torch.export.Dim.DYNAMIC}, io.BytesIO()
    example = torch.zeros(4, 1), [torch.zeros(4, 4), torch.zeros(4, 4)]
    torch.export.save(torch.export.export(Layers(), example, dynamic_shapes=(rows, [rows, rows])), file)
    return file.getvalue()


class OneRank(Ranks):
    """A rank without a process group."""

    def __init__(self) -> None:
        super().__init__(0, 1, 0, 1, torch.device("cpu"))

    def from_first(self, make):
        return make()

    def all_gather(self, value):
        return value.unsqueeze(0)

    def all_gather_objects(self, value):
        return [value]


@dataclass
class Run:
    """A run that publishes, without a training: its weights change as a test says.

    Attributes:
        tables, dense: the weights.
    """

    folder: Path
    run_id: str = "r1"
    life: int = 0
    seed: int = 0
    tables: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        self.tables = {name: torch.randn(shape, generator=self._random) for name, shape in TABLES.items()}
        self.dense = {"weight": torch.randn(1, 8, generator=self._random), "bias": torch.zeros(1)}

    def base(self, seq: int = 0, program: bytes = b"") -> Publication:
        """Write a base; with the bytes of a program it can be loaded."""
        partial = self.folder / f"base_{seq}.partial"
        (partial / "tables").mkdir(parents=True)
        for name, rows in self.tables.items():
            (partial / "tables" / f"{name}.safetensors").write_bytes(b"".join(safetensors({"rows": rows})))
        (partial / "dense.safetensors").write_bytes(b"".join(safetensors(self.dense)))
        (partial / "dense.pt2").write_bytes(program)
        (partial / "inputs.json").write_text(json.dumps(INPUTS))
        (partial / "export.json").write_text(json.dumps({**ABOUT, "step": seq * 10}))
        place = ("base", seq, self.run_id, self.life, f"{self.life}.{seq}", seq * 10, "", "fp32", TABLES)
        base = Publication(*place, file_entries(partial))
        write.finish(partial, self.folder / base.name, base)
        return base

    def train(self) -> list[TouchedRows]:
        """Change some rows, and all dense weights; return the rows."""
        touched = []
        for name, rows in self.tables.items():
            keys = torch.randperm(len(rows), generator=self._random)[:5].sort().values
            rows[keys] += torch.randn(5, 4, generator=self._random)
            half = rows[keys]
            # As two ranks would have them that share the columns.
            touched += [TouchedRows(name, 0, keys, half[:, :2].clone())]
            touched += [TouchedRows(name, 2, keys, half[:, 2:].clone())]
        self.dense = {name: weight + 1 for name, weight in self.dense.items()}
        return touched

    def delta(self, have: Publication, touched: list[TouchedRows] | None = None) -> Publication:
        """Train, and write the delta that follows `have`."""
        seq = have.seq + 1
        delta = write.next_delta(have, self.life, f"{self.life}.{seq}", seq * 10)
        touched = self.train() if touched is None else touched
        return write.write_delta(self.folder, replace(delta, run_id=self.run_id), touched, self.dense, OneRank())


def chain(folder: Path, count: int, program: bytes = b"", **given: object) -> tuple[Run, list[Publication]]:
    """Write a base and some deltas; return the run with its last weights, and the publications."""
    run = Run(folder, **given)
    found = [run.base(program=program)]
    for _ in range(count):
        found.append(run.delta(found[-1]))
    return run, found
