"""Every rank may plan for itself, so a plan must not depend on the process's string hash seed.

TorchRec's planner intersects options as sets: with seeds 0 and 2 it used to build different plans from this model, and
ranks with different plans wait for each other for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PLAN = """
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, plan_sharding

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
"""


def _plan(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAN], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_a_plan_does_not_depend_on_the_hash_seed() -> None:
    first, second = _plan("0"), _plan("2")
    assert first.count("\n") == 18
    assert first == second
