"""`Trainer` with tables of ids: stock TorchRec with a dictionary, bit for bit; resumes, signals and scores."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from embershard.commands import cli
from embershard.settings.decoding import to_toml
from embershard.sharding.plan import Plan
from tests.covering import keep, matrix
from tests.ranks.trained_ids import (
    CAPACITY,
    STEPS,
    Maps,
    Trained,
    make_config,
    score,
    train,
    train_stock,
    write_clicks,
)
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

EVERY = 17


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clicks(tmp_path_factory.mktemp("clicks"))


def joined(runs: list[Trained]) -> Maps:
    """The ids of all ranks' shards."""
    return {table: {x: place for run in runs for x, place in run.maps.get(table, {}).items()} for table in CAPACITY}


def differences(found: Trained, expected: Trained) -> list[str]:
    """What a rank has otherwise, of losses, evaluations, and tensors; of tables of ids the rows that ids have."""
    different = [f"loss {a[0]}" for a, b in zip(found.losses, expected.losses, strict=True) if a != b]
    different += [] if found.evaluations == expected.evaluations else ["evaluations"]
    assert found.tensors.keys() == expected.tensors.keys()
    for name, values in found.tensors.items():
        table, _, first = name.split(" ") if " " in name else ("", "", "0")
        others = expected.tensors[name]
        if table in CAPACITY:
            rows = [row - int(first) for row, _, _ in found.maps.get(table, {}).values()]
            here = [row for row in rows if 0 <= row < len(values)]
            values, others = values[here], others[here]
        different += [] if torch.equal(values, others) else [name]
    return different


def is_caught(found: list[Trained], stock: list[Trained]) -> bool:
    return all(differences(a, b) != [] for a, b in zip(found, stock, strict=True))


@pytest.mark.parametrize(("pool", "kind"), [("one", "row_wise"), matrix("two", "table_wise"), ("two", "row_wise")])
def test_a_training_is_stock_s_with_a_dictionary(one_rank, two_ranks, clicks, pool, kind):
    """Losses, evaluations between steps, weights, states, and every id's row, count and last use; ids were evicted."""
    ranks: RankPool = one_rank if pool == "one" else two_ranks
    found = ranks.run(partial(train, eval_every=EVERY), clicks, None, kind)
    stock = ranks.run(partial(train_stock, eval_every=EVERY), clicks, kind)
    assert {each for run in found for each in run.sharding} == {kind}
    assert joined(found) == stock[0].maps
    assert [differences(a, b) for a, b in zip(found, stock, strict=True)] == [[]] * len(found)
    assert len(found[0].evaluations) == STEPS // EVERY + 1
    for table, totals in found[0].ids.items():
        expected = stock[0].ids[table]
        for name in ("live", "admitted", "evicted", "refused"):
            assert getattr(totals, name) == getattr(expected, name)
        assert totals.evicted > 300
        assert totals.evicted_age is not None
        assert totals.evicted_age >= 1
    assert is_caught(found, ranks.run(partial(train_stock, eval_every=EVERY, forgets=False), clicks, kind))


@pytest.mark.parametrize("kind", keep(["row_wise"], ["table_wise", "row_wise"]))
def test_a_resume_goes_on_on_any_ranks(one_rank, two_ranks, clicks, tmp_path, kind):
    """From a checkpoint in mid-run, or of a signal: on as many ranks bit for bit; on others with the same ids."""
    whole = two_ranks.run(train, clicks, tmp_path / "a", kind)
    again = two_ranks.run(partial(train, stop_after=30), clicks, tmp_path / "a2", kind)
    assert [run.losses[-1][0] for run in again] == [31, 31]
    rest = two_ranks.run(partial(train, resume=31), clicks, tmp_path / "a2", kind)
    for before, after, expected in zip(again, rest, whole, strict=True):
        assert before.losses + after.losses == expected.losses
        assert after.maps == expected.maps
        assert differences(after, _from(expected, 31)) == []
    everything = joined(whole)
    (alone,) = one_rank.run(partial(train, resume=40), clicks, _copy(tmp_path, 40), kind)
    assert alone.maps == everything
    weights = torch.cat([rows for name, rows in sorted(alone.tensors.items()) if name.startswith("t_user weight")])
    for run in whole:
        for name, rows in run.tensors.items():
            if name.startswith("t_user weight"):
                first = int(name.split(" ")[2])
                here = [row for row, _, _ in everything["t_user"].values() if first <= row < first + len(rows)]
                assert here
                torch.testing.assert_close(rows[[row - first for row in here]], weights[here], rtol=1e-3, atol=1e-4)
    other = "table_wise" if kind == "row_wise" else "row_wise"
    assert joined(two_ranks.run(partial(train, resume=20), clicks, _copy(tmp_path, 20), other)) == everything


@pytest.mark.matrix
def test_in_float64_losses_do_not_depend_on_the_number_of_ranks(one_rank, two_ranks, four_ranks, clicks):
    """Of tables placed whole, from the first step to the last; in float32 they do."""
    runs = [
        pool.run(partial(train, pooling="sum", precision="fp64"), clicks, None, "table_wise")
        for pool in (one_rank, two_ranks, four_ranks)
    ]
    alone = [loss for _, loss in runs[0][0].losses]
    assert len(alone) == STEPS
    for ranks in runs[1:]:
        assert joined(ranks) == joined(runs[0])
        assert [loss for _, loss in ranks[0].losses] == pytest.approx(alone, rel=0, abs=1e-12)
    rounded = two_ranks.run(partial(train, pooling="sum"), clicks, None, "table_wise")[0].losses
    assert [loss for _, loss in rounded] != pytest.approx(alone, rel=0, abs=1e-9)


def planned(clicks: Path, folder: Path, num_ranks: int, *more: str) -> Plan:
    """The plan of the commands, in FOLDER/plan.json, with other caches than those of the settings."""
    settings, profile, plan = (str(folder / name) for name in ("run.toml", "profile.npz", "plan.json"))
    Path(settings).write_text(to_toml(make_config(clicks)))
    assert cli.main(["profile", "--config", settings, "-o", profile]) == 0
    words = ["--config", settings, "--profile", profile, "--ratios", "0.4", "--ranks", str(num_ranks), "-o", plan]
    assert cli.main(["plan", *words, *more]) == 0
    return Plan.load(Path(plan))


@pytest.mark.parametrize(
    ("pool", "kind"), [matrix("one", "row_wise"), matrix("two", "table_wise"), ("two", "row_wise")]
)
def test_a_planned_training_is_the_same(one_rank, two_ranks, clicks, tmp_path, pool, kind, capsys):
    """With the caches of a plan, where it places the tables in the same way: all but what is cached."""
    ranks: RankPool = one_rank if pool == "one" else two_ranks
    plan = planned(clicks, tmp_path, 1 if pool == "one" else 2, "--types", kind)
    assert "Hit rates of t_user, t_item are an estimate" in " ".join(capsys.readouterr().out.split())
    expected = ranks.run(train, clicks, None, kind)
    found = ranks.run(partial(train, plan=tmp_path / "plan.json"), clicks, None, None)
    for rank, (run, other) in enumerate(zip(found, expected, strict=True)):
        assert run.sharding == other.sharding == {kind}
        pools = [pool for pool in plan.pools if pool.rank == rank and set(pool.tables) <= set(CAPACITY)]
        assert run.slots == tuple(sorted(pool.slots for pool in pools))
        assert run.maps == other.maps or kind == "table_wise"  # on ranks of their own
        assert run.losses == other.losses
    assert joined(found) == joined(expected)
    assert rows_of(found) == rows_of(expected)
    assert sum(run.evicted_rows for run in found) > 1000
    assert {run.slots for run in found} != {run.slots for run in expected}
    assert min(totals.evicted for totals in found[0].ids.values()) > 300
    assert found[0].ids == expected[0].ids


@pytest.mark.matrix
def test_a_plan_may_place_ids_as_it_likes(two_ranks, clicks, tmp_path):
    """Ids have the same rows anywhere."""
    plan = planned(clicks, tmp_path, 2)
    assert {table.kernel for table in plan.tables if table.table in CAPACITY} == {"cached"}
    found = two_ranks.run(partial(train, plan=tmp_path / "plan.json"), clicks, None, None)
    assert joined(found) == joined(two_ranks.run(train, clicks, None, "row_wise"))


def rows_of(runs: list[Trained]) -> dict[tuple[str, str, int], list[float]]:
    """What the rows of ids, and all of the city's, have: by table, kind and row, of all ranks."""
    live = {table: {row for row, _, _ in ids.values()} for table, ids in joined(runs).items()}
    found = {}
    for run in runs:
        for name, rows in run.tensors.items():
            table, kind, first = name.split(" ") if " " in name else (name, "", "0")
            for row, values in enumerate(rows.reshape(len(rows), -1).tolist(), int(first)):
                if row in live.get(table, {row}):
                    found[table, kind, row] = values
    return found


def test_scores_are_those_of_the_training(one_rank, two_ranks, clicks, tmp_path):
    """By a checkpoint, on any ranks: ids without a row get what training gave them, and nothing is counted."""
    trained = two_ranks.run(train, clicks, tmp_path, "row_wise")
    expected = trained[0].evaluations[-1]
    (alone,) = one_rank.run(score, clicks, tmp_path)
    together = two_ranks.run(score, clicks, tmp_path)
    for quality, _ in (alone, *together):
        assert quality["samples"] == expected["samples"] > 200
        assert quality == pytest.approx(expected, rel=1e-6)
    assert alone[1] == joined(trained)


def _from(run: Trained, step: int) -> Trained:
    """The run without the steps up to this one, and with its last evaluation alone."""
    losses = [loss for loss in run.losses if loss[0] > step]
    return Trained(losses, run.evaluations[-1:], run.maps, run.ids, run.tensors, run.sharding)


def _copy(folder: Path, step: int) -> Path:
    """A checkpoint of the whole run, for a run of its own."""
    name = f"step_{step}"
    shutil.copytree(folder / "a" / name, folder / f"from_{step}" / name)
    return folder / f"from_{step}"
