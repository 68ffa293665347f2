"""docs/torchrec.md is one program, and it runs."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, CachedEmbeddingCollectionSharder, cache_stats
from tests.ranks.commands import forked
from tests.unit.test_docs import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torchrec.md"


@pytest.mark.slow
def test_the_page_is_a_program_that_runs(capsys):
    names: dict[str, Any] = {}
    with warnings.catch_warnings(), contextlib.ExitStack() as group:
        warnings.filterwarnings("ignore", module=r"torch(rec)?\.")
        group.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        for block in blocks(PAGE.read_text(), "python"):
            exec(compile(block, str(PAGE), "exec"), names)
            if "sizes" in names and "losses" not in names:  # nothing was trained since the save
                assert torch.equal(names["table"]["model"]["past.embeddings.item.weight"], names["rows"])
        shown = capsys.readouterr().out
        stats = cache_stats(names["sharded"])
        assert [table.table for table in stats] == ["item", "user"]
        assert "('item', " in shown
        assert "('user', " in shown
        assert names["pipeline"].stats().steps == 10
        other = forked().Process(target=restore, args=(names["folder"], names["losses"]))
        other.start()
        other.join()
        assert other.exitcode == 0
        assert set(names["states"]) >= {"past.embeddings.item.weight", "bags.embedding_bags.user.weight"}

        sharders = [CachedEmbeddingBagCollectionSharder(CacheConfig()), CachedEmbeddingCollectionSharder(CacheConfig())]
        model, plan = names["Model"](), names["own_plan"]
        sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
        assert len(cache_stats(sharded)) == 2


def restore(folder: str, losses: list[float]) -> None:
    """In a process of its own: the page's program, and its restore of what another process saved."""
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch(rec)?\.")
        for block in blocks(PAGE.read_text(), "python"):
            exec(compile(block, str(PAGE), "exec"), names)
        assert names["folder"] != folder
        assert names["train"](*names["restored"](folder), range(20, 30)) == losses


@pytest.mark.slow
def test_a_sharder_that_caches_nothing_says_so():
    names: dict[str, Any] = {}
    with contextlib.ExitStack() as group:
        group.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        exec(blocks(PAGE.read_text(), "python")[0], names)
        sharders = [CachedEmbeddingBagCollectionSharder(), CachedEmbeddingCollectionSharder()]
        for tables in names["plan"].plan.values():
            for table in tables.values():
                table.compute_kernel = "fused"
        with pytest.warns(
            UserWarning, match=r"caches none of the tables \['(user|item)'\]: .*\['fused'\].*plan_sharding"
        ):
            sharded = DistributedModelParallel(
                names["Model"](), device=torch.device("cpu"), plan=names["plan"], sharders=sharders
            )
        assert cache_stats(sharded) == []
