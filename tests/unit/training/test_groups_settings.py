"""Settings of groups: what goes with them, and what `moment_scale` is to FBGEMM's kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from embershard.cache import CacheConfig
from embershard.errors import ConfigError, ShardingError
from embershard.extras.groups.settings import check_run
from embershard.launch.launcher import planned_ranks
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import TablePlacement
from embershard.training.config import RunConfig
from embershard.training.optimizers import EmbeddingOptimizerConfig
from tests.small_runs import small_run
from tests.unit.sharding.plans import make_plan

pytestmark = pytest.mark.extra


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"groups": 0}, "needed 1 group or more"),
        ({"groups": 2, "sync_every": 0}, "1 step or more"),
        ({"groups": 2, "sync_every": 2, "sync_delay": 3}, "needed 0 to sync_every=2 steps"),
        ({"sync_delay": 1, "sync_every": 2}, "sharding.sync_every has no effect with one group"),
        ({"sync_delay": 1}, "sharding.sync_delay has no effect with one group"),
        ({"sync_dtype": "fp16"}, "sharding.sync_dtype has no effect with one group"),
        ({"groups": 2, "sync_dtype": "int8"}, "sharding.sync_dtype: got 'int8', needed one of fp32, fp16"),
        ({"groups": 2, "moment_scale": 1.5}, "a factor above 0 and up to 1"),
        ({"sync_every": 4}, "sharding.sync_every has no effect with one group"),
        ({"moment_scale": 0.5}, "sharding.moment_scale has no effect with one group"),
        ({"groups": 2, "mode": "hot_cold", "hot_bytes": 9}, "rows of the others have copies on all ranks"),
        ({"groups": 2, "mode": "data_parallel"}, "rows of the others have copies on all ranks"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        ShardingConfig(**given)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            small_run(
                sharding=ShardingConfig(groups=2, moment_scale=0.5), embedding_optimizer=EmbeddingOptimizerConfig("sgd")
            ),
            'sharding.moment_scale: got embedding_optimizer.kind = "sgd"',
        ),
    ],
)
def test_runs_that_groups_cannot_have_are_refused(config: RunConfig, said: str):
    with pytest.raises(ConfigError) as raised:
        check_run(config)
    assert said in str(raised.value)


def test_a_run_with_groups_is_accepted():
    check_run(small_run(sharding=ShardingConfig(groups=2, sync_every=4, moment_scale=0.5)))


def trained(optimizer: EmbeddingOptimizerConfig, steps: list[Tensor]) -> Tensor:
    """Rows [4, 8] that begin at 0, by FBGEMM's kernel with the gradients [4, 8] of some steps."""
    kinds = {"adagrad": EmbOptimType.EXACT_ADAGRAD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=kinds[optimizer.kind],
        learning_rate=optimizer.lr,
        eps=optimizer.eps or 1e-8,
    )
    (weights,) = table.split_embedding_weights()
    weights.zero_()
    for gradient in steps:
        (table(torch.arange(4), torch.arange(5)) * gradient).sum().backward()
    return weights.detach().clone()


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("eps", [None, 0.1])
def test_a_factor_on_sums_of_squares_is_another_rate_and_epsilon(kind: Any, eps: float | None):
    scale, lr = 0.3, 0.05
    steps = list(torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1)))
    run = small_run(
        sharding=ShardingConfig(groups=2, moment_scale=scale),
        embedding_optimizer=EmbeddingOptimizerConfig(kind, lr=lr, eps=eps),
    )
    rows, squares = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)
    for gradient in (each.double() for each in steps):
        own = gradient.square()
        squares += own if kind == "adagrad" else own.mean(1, keepdim=True)
        rows -= lr * gradient / ((scale * squares).sqrt() + (1e-8 if eps is None else eps))
    found = trained(run.row_optimizer, steps).double()
    assert torch.allclose(found, rows, rtol=1e-5, atol=1e-7)
    plain = trained(dataclasses.replace(run.embedding_optimizer), steps).double()
    assert not torch.allclose(plain, rows, rtol=1e-2)


def test_a_plan_of_a_group_starts_the_ranks_of_all(tmp_path: Path):
    plan = make_plan([TablePlacement("t_a", 40, 8, "fp32", "row_wise", "device", (0, 1))], 2, 2)
    plan.save(tmp_path / "plan.json")
    config = small_run(sharding=ShardingConfig(plan=str(tmp_path / "plan.json"), groups=2), cache=CacheConfig())
    assert planned_ranks(config, None) == 4
    assert planned_ranks(config, 4) == 4
    with pytest.raises(ShardingError, match="the plan is for 2 ranks"):
        planned_ranks(config, 2)
