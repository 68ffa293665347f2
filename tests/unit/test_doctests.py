"""The examples in docstrings work, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, plan_sharding
from embershard.distributed import process_group

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class Clicks(nn.Module):
    """One table of 1000 rows; returns losses and output, as train pipelines expect."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="clicks", embedding_dim=8, num_embeddings=1000, feature_names=["click"])
        self.tables = EmbeddingBagCollection([table], device=torch.device("meta"))
        self.over = nn.Linear(8, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        output = self.over(self.tables(batch).values()).squeeze(1)
        return output.square().mean().unsqueeze(0), output


def names() -> dict[str, Any]:
    """``model``, which trained one batch of ids 7, 8 and 9, its ``optimizer``, and 8 batches in ``loader``. Needs a
    process group of one rank."""
    sharders: Any = [CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1))]
    model = Clicks()
    plan = plan_sharding(model, sharders, world_size=1, local_world_size=1, device=CPU)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)
    loader = [
        KeyedJaggedTensor(["click"], torch.arange(3) + 7 + step, lengths=torch.ones(3, dtype=torch.int64))
        for step in range(8)
    ]
    losses, _ = sharded(loader[0])
    losses.sum().backward()
    optimizer = torch.optim.SGD(sharded.module.over.parameters(), lr=0.1)
    return {"model": sharded, "optimizer": optimizer, "loader": loader}


PROJECT = Path(__file__).resolve().parents[2]
FILES = sorted([*(PROJECT / "embershard").rglob("*.py"), *(PROJECT / "examples" / "dlrm_v4").glob("*.py")])
ROOMS = [file for file in FILES if file.name == "__init__.py" and "__all__" in file.read_text(encoding="utf-8")]


def module_name(file: Path) -> str:
    parts = file.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def examples(file: Path) -> int:
    return len(re.findall(r"^\s*>>> ", file.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture
def one_rank() -> Iterator[None]:
    with process_group("cpu"):
        yield


@pytest.mark.parametrize("file", [file for file in FILES if examples(file)], ids=module_name)
def test_the_examples_work(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """In an empty folder. No example escapes: doctest finds as many as the file shows."""
    monkeypatch.chdir(tmp_path)
    given = {}
    of_programs = {"torchrec", "pipeline", "accumulation.py", "program.py", "host_rows.py", "blocks_of_rows.py"}
    if of_programs & set(file.parts) and "(model" in file.read_text(encoding="utf-8"):
        request.getfixturevalue("one_rank")
        given = names()
    tests = doctest.DocTestFinder().find(importlib.import_module(module_name(file)), extraglobs=given)
    assert sum(len(test.examples) for test in tests) == examples(file)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    output: list[str] = []
    for test in tests:
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


@pytest.mark.parametrize("file", ROOMS, ids=module_name)
def test_every_public_name_has_an_example(file: Path):
    """Constants and warnings excepted."""
    room = importlib.import_module(module_name(file))
    without = []
    for name in room.__all__:
        thing = getattr(room, name)
        is_excepted = not callable(thing) or (isinstance(thing, type) and issubclass(thing, Warning))
        if not is_excepted and ">>> " not in (thing.__doc__ or ""):
            without.append(f"{room.__name__}.{name}")
    assert without == []
