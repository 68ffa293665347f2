"""What groups send for their averages, as plans predict it and as runs count it; and runs that obey a group's plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from embershard.commands import cli
from embershard.commands.plan.inputs import make_workload
from embershard.extras.groups.model import GroupedModelParallel
from embershard.extras.groups.predicted import sync_work
from embershard.planning.cost.rates import StepWork
from embershard.settings.decoding import to_toml
from embershard.sharding.config import SyncDtype
from embershard.sharding.plan import Plan
from embershard.sharding.sizes import PlacedShard
from embershard.training.config import RunConfig
from embershard.training.parts.counts import StepMetrics
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.ranks import groups
from tests.ranks.planned import here
from tests.ranks.predicted_traffic import profile_of
from tests.ranks.test_groups_training import config_of, train
from tests.ranks.workers import RankError, RankPool
from tests.small_runs import small_data

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.extra]

STEPS = 12


def sent_for_averages(config: RunConfig) -> tuple[int, int, int, list[dict[str, int | float]]]:
    """On this rank: averages, bytes of the rows of all groups, and of this rank's keys; and what result.json has of
    each rank's bytes."""
    with groups.envs_are_kept():
        trainer = Trainer(config, here())
        for _ in trainer.train():
            pass
        assert isinstance(trainer.model, GroupedModelParallel)
        counts = trainer.model.sync_counts
        found = trainer.of_parts(lambda part: part.result() if isinstance(part, StepMetrics) else {})
        trainer.close()
    return counts.syncs, counts.row_bytes, counts.key_bytes, list(found["sent_bytes"].ranks)


def planned(config: RunConfig, world_size: int) -> StepWork:
    """Of all ranks of a group together, wherever its tables are."""
    statistics = profile_of(config.data).statistics
    assert statistics is not None
    workload = make_workload(config, statistics, world_size, ranks_per_node=world_size, device="cpu")
    places = [PlacedShard(each, 0, 0, each.rows, each.dim, "table_wise", "cached") for each in workload.model.tables]
    return sync_work(workload, places)


@pytest.mark.parametrize(
    ("num_groups", "sync_every", "dtype"),
    [(2, 3, "fp32"), (2, 3, "fp16"), matrix(4, 4, "fp32"), matrix(2, 1, "fp32"), matrix(2, 12, "fp16")],
)
def test_averages_send_what_plans_predict(
    four_ranks: RankPool, num_groups: int, sync_every: int, dtype: SyncDtype
) -> None:
    """Rows and keys within 5 %, and so are a result's bytes; those of averages twice as often are not."""
    config = config_of(num_groups, sync_every, steps=STEPS, data=small_data(6000, scale=0.001))
    config = dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, sync_dtype=dtype))
    found = four_ranks.run(sent_for_averages, config)
    size = 4 // num_groups
    assert {syncs for syncs, *_ in found} == {STEPS // sync_every}
    assert len({rows for _, rows, *_ in found[::size]}) == 1, "replicas average the same rows"
    share = 2 * (num_groups - 1) / num_groups
    counted = sum(share * rows + (num_groups - 1) * keys for _, rows, keys, _ in found[:size]) / STEPS
    assert counted == pytest.approx(planned(config, 4).sent_sync_bytes, rel=0.05)
    sent = sum(rank["sync"] for rank in found[0][-1][:size]) / STEPS
    assert sent == pytest.approx(counted, rel=0.02), "what result.json says"
    assert sent == pytest.approx(planned(config, 4).sent_sync_bytes, rel=0.05)
    if dtype == "fp16":
        in_full = dataclasses.replace(config.sharding, sync_dtype="fp32")
        assert planned(dataclasses.replace(config, sharding=in_full), 4).sent_sync_bytes > 1.3 * counted
    if sync_every > 1:
        oftener = dataclasses.replace(config.sharding, sync_every=sync_every // 2)
        assert planned(dataclasses.replace(config, sharding=oftener), 4).sent_sync_bytes > 1.1 * counted


def test_groups_obey_a_plan(two_ranks: RankPool, tmp_path: Path) -> None:
    """The command makes it for the ranks of a group; one for all ranks is refused."""
    config, run = config_of(), str(tmp_path / "run.toml")
    Path(run).write_text(to_toml(config))
    made = []
    alone = ["--set", "sharding.groups=1", "--set", "sharding.sync_every=1"]
    for name, changes in {"groups": [], "one": alone}.items():
        plan = str(tmp_path / f"{name}.json")
        assert cli.main(["profile", "--config", run, "-o", f"{tmp_path}/p.npz"]) == 0
        asked = ["--profile", f"{tmp_path}/p.npz", "--topology", "cpu", "--ranks", "2", *changes, "-o", plan]
        assert cli.main(["plan", "--config", run, *asked]) == 0
        made.append((Plan.load(plan), dataclasses.replace(config.sharding, plan=plan)))
    (of_group, ours), (of_all, other) = made
    assert (of_group.world_size, of_all.world_size) == (1, 2)
    assert of_group.prediction is not None
    assert of_group.prediction.ranks[0].work["sent_sync_bytes"] > 0
    speeds = [each.prediction.samples_per_second for each, _ in made if each.prediction is not None]
    assert 0.5 < speeds[0] / speeds[1] < 2, "samples of all groups count"
    found = two_ranks.run(train, dataclasses.replace(config, sharding=ours), tmp_path / "run")
    assert found[0].losses == found[1].losses
    assert min(each.evictions for each in found) > 100
    with pytest.raises(RankError, match="the plan is for 2 ranks"):
        two_ranks.run(train, dataclasses.replace(config, sharding=other), tmp_path / "refused")
