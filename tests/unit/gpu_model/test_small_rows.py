"""On the model of a GPU, tables with small rows in host memory train the bits of stock TorchRec's, rounded by NumPy
after each step: what `tests/gpu` compares on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.cache.gpu import small_rows as kernels
from embershard.distributed import CheckpointConfig, PublishConfig
from embershard.extras.verify.equivalence import compare_with_stock
from embershard.extras.verify.rounding import TableRounding
from embershard.training.optimizers import EmbeddingOptimizerConfig
from tests.covering import keep
from tests.ranks.small_rows import Found, compare, small_case
from tests.unit.gpu_model.cases import config_of, write_samples
from tests.unit.gpu_model.test_whole import KEPT, modelled_ranks

pytestmark = pytest.mark.slow


def found(host_dtype: str, transfer: str, **changes: Any) -> Found:
    """Of a short run, in which nothing else goes wrong."""
    full = 0.05 if host_dtype == "int8" else None
    case = small_case(steps=14, device="cuda", host_dtype=host_dtype, full_rows=full, transfer=transfer, **changes)
    with modelled_ranks(1) as (gpu, _):
        # The model is made on the host: its parameters cannot become others, as those of a GPU would.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = compare(case)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        assert gpu.problems == []
    assert outcome.evictions > 300
    assert outcome.num_rounded > 3000
    return outcome


@pytest.mark.matrix
@pytest.mark.parametrize("transfer", ["triton_uva", "staged"])
@pytest.mark.parametrize("host_dtype", ["int8", "fp16"])
def test_rows_are_those_of_rounded_stock(host_dtype: str, transfer: str) -> None:
    """Not with row-wise Adagrad: FBGEMM on a CPU adds squares of slots in another order, with fp32 rows, too."""
    assert found(host_dtype, transfer, optimizer="adagrad" if transfer == "staged" else "sgd").different == []


@pytest.mark.matrix
def test_another_rounding_is_noticed() -> None:
    with mock.patch.object(kernels, "_mixed", lambda bits: bits):
        assert found("int8", "triton_uva").different != []


@pytest.mark.matrix
@pytest.mark.parametrize("is_rounded", keep([True], [True, False]))
def test_verify_rounds_stock_on_the_device(is_rounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some tables int8, of one fp16; full rows are left alone."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = config_of(KEPT[0], write_samples(tmp_path / "samples.parquet"), tmp_path, "cuda")
    config = dataclasses.replace(
        config, embedding_optimizer=EmbeddingOptimizerConfig(kind="sgd"), checkpoint=CheckpointConfig(),
        publish=PublishConfig(), cache=dataclasses.replace(config.cache, ratio=0.3),
    )  # fmt: skip
    left_out = contextlib.nullcontext() if is_rounded else mock.patch.object(TableRounding, "after_step", _nothing)
    with modelled_ranks(1) as (gpu, ranks), left_out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = compare_with_stock(config, ranks, 12)
        assert gpu.problems == []
    assert verdict.is_equal == is_rounded, verdict
    assert sum(cache.evictions for cache in verdict.caches) > 20


def _nothing(*_: Any) -> None:
    pass
