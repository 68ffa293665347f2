"""Every rank may plan for itself, so a plan must not depend on the process's string hash seed.

Before 1.9, TorchRec's planner intersects options as sets: with seeds 0 and 2 it used to build different plans from this
model, and ranks with different plans wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLANS = """
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, plan_sharding
from embershard.planning.make_plan import make_plan
from embershard.planning.request import Budget
from tests.unit.planning.requests import make_request

rows = [1000, 3, 3, 50000, 50000, 100, 100, 100, 700000]
tables = [
    EmbeddingBagConfig(name=f"t{i}", embedding_dim=32, num_embeddings=n, feature_names=[f"f{i}"])
    for i, n in enumerate(rows)
]
model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
sharders = [CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1))]
for device in ("cpu", "cuda"):
    plan = plan_sharding(model, sharders, world_size=4, local_world_size=2, device=device)
    for name, param in plan.plan["0"].items():
        print(device, name, param.sharding_type, param.compute_kernel, param.ranks)
rows, dims = (3000, 3, 3, 20000, 20000, 100, 100, 9000), (64, 128) * 4
print(make_plan(make_request(Budget(ratio=0.1), rows=rows, dims=dims, world_size=4, ranks_per_node=2)).to_text())
"""


@pytest.mark.matrix
def test_plans_do_not_depend_on_the_hash_seed(project_dir: Path) -> None:
    """Of this process, and another one: by `plan_sharding`, and by `embershard plan`."""
    command = [sys.executable, "-W", "ignore", "-c", PLANS + "print(hash('t0'))"]
    places = os.pathsep.join([str(project_dir), os.environ.get("PYTHONPATH", "")])  # of this TorchRec, too
    environment = {**os.environ, "PYTHONHASHSEED": "2", "PYTHONPATH": places}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    with contextlib.redirect_stdout(io.StringIO()) as own:
        exec(PLANS, {})
    assert int(said.pop()) != hash("t0"), "the same seed"
    assert own.getvalue().count("\ncpu ") + own.getvalue().count("\ncuda ") == 17
    assert own.getvalue().count('"sharding"') > 8
    assert said == own.getvalue().splitlines()
