"""result.json as a type: what was written is read, also by an earlier version; what is wrong in it is named."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from embershard.errors import ConfigError
from embershard.reports import run_folder, sweep_tables
from embershard.reports.run_tables import show_run
from embershard.reports.tracking.trackers import _numbers
from embershard.run_result import FORMAT, RESULT, RunResult
from embershard.sweeps import spread
from embershard.units import Row, ShownTable
from tests.unit.planning.runs import predicted_plan, result_of

#: Of a run on two ranks with tables in a cache, by the last version that wrote no format; tables were left out by hand.
OLD = Path(__file__).parent / "reports" / "result_without_format.json"


def entries(**changes: Any) -> dict[str, Any]:
    return result_of(predicted_plan(), **changes)


def test_what_was_written_is_read(tmp_path: Path):
    result = RunResult.of(entries())
    result.write(tmp_path)
    assert RunResult.read(tmp_path) == result == RunResult.find(tmp_path)
    written = json.loads((tmp_path / RESULT).read_text())
    assert (written["format"], written["auc"]) == (FORMAT, 0.5), "figures of quality stand beside the other entries"
    assert written.items() >= json.loads(json.dumps(entries(cache=written["cache"]))).items()


#: What later versions added, as a file without it is read.
NEW = {
    "other_programs": None,
    "ids": {},
    "label_losses": {},
    "slices": {},
    "windows": [],
    "held_out": None,
    "best": None,
    "keeps_best": False,
    "stopped_early": False,
    "was_improving": False,
    "published": None,
    "followed": None,
    "deal": {},
    "threads": None,
    "memory": [],
}


def test_a_result_of_the_version_before_formats_is_read(tmp_path: Path):
    (tmp_path / RESULT).write_text(OLD.read_text())
    old, result = json.loads(OLD.read_text()), RunResult.read(tmp_path)
    assert result.cache.ranks[1].tables["t_C1"].lookups == old["cache"]["ranks"][1]["tables"]["t_C1"]["lookups"] > 0
    assert result.quality["auc"] == old["auc"]
    inside = {"look_ahead": {**old["look_ahead"], "files": None}, "sent_bytes": {**old["sent_bytes"], "sync": 0}}
    expected = {**old, **NEW, **inside}
    assert json.loads(json.dumps(result.to_dict())) == expected, "nothing of it is lost"


@pytest.mark.parametrize("missing", ["measured_steps", "plan", "cache", "step_ms", "sent_bytes"])
def test_a_result_names_what_it_lacks(missing: str):
    result = entries()
    del result[missing]
    with pytest.raises(ConfigError, match=f"{missing}: is missing, needed"):
        RunResult.of(result)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step_ms": 7}, "step_ms: got 7, needed section"),
        ({"cache": {"ranks": [{"rank": 0, "tables": []}]}}, "is missing"),
        ({"auc": "good"}, "quality.auc: got 'good', needed number | none"),
        ({"format": 2}, "got format 2, this version reads 1"),
        ({"steps": True}, "steps: got True, needed integer"),
    ],
)
def test_a_malformed_result_says_what_is_wrong(changes: dict[str, Any], says: str, tmp_path: Path):
    (tmp_path / RESULT).write_text(json.dumps(entries(**changes)))
    with pytest.raises(ConfigError) as error:
        RunResult.read(tmp_path)
    assert says in str(error.value)
    assert str(tmp_path / RESULT) in str(error.value)
    assert RunResult.find(tmp_path) is None


def test_memory_is_that_of_the_fullest_rank():
    ranks = [
        {"rank": rank, "host_bytes": host << 20, "host_bytes_before": 300 << 20, "device_bytes": device}
        for rank, host, device in ((0, 512, 5 << 30), (1, 768, 3 << 30))
    ]
    rows = list(RunResult.of(entries(memory=ranks)).closing_rows())
    at = rows.index(
        ("memory", "768.00 MiB host", "the most that the process of a rank had; 300.00 MiB before the model")
    )
    assert rows[at + 1] == ("", "5.00 GiB device", "the most that tensors of a rank took")
    on_cpu = RunResult.of(entries(memory=[{**each, "device_bytes": None} for each in ranks]))
    assert len(list(on_cpu.closing_rows())) == len(rows) - 1
    assert not [row for row in RunResult.of(entries()).closing_rows() if row[0] == "memory"], "earlier versions"


def test_averages_of_groups_are_a_kind_of_bytes_where_there_are_groups():
    def between_ranks(**sent: float) -> list[Row]:
        found = RunResult.of(entries(sent_bytes={**entries()["sent_bytes"], **sent}))
        return [row for row in found.closing_rows() if row[0] == "between ranks"]

    ((_, alone, kinds),) = between_ranks()
    ((_, with_groups, more),) = between_ranks(sync=RunResult.of(entries()).parts * 4096)
    assert "averages" not in kinds
    assert more == f"{kinds}, 4.00 KiB averages of groups"
    assert (alone, with_groups) == ("4.88 KiB", "8.88 KiB")


@pytest.mark.slow
def test_a_field_is_found_wherever_entries_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its line in `RunResult` is all that an entry needs: a test adds one."""

    def rows(spilled: int, run: RunResult) -> list[Row]:
        return [("spilled", f"{spilled:,} rows", f"in {run.steps:,} steps")]

    def tables(spilled: int, run: RunResult, top: int) -> list[ShownTable]:
        return [ShownTable("Spilled", ("what",), ("rows",), [("all", str(spilled))])]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(RunResult):
        spilled: int = dataclasses.field(default=0, metadata={"rows": rows, "tables": tables})

    for module in (run_folder, sweep_tables, spread):
        monkeypatch.setattr(module, "RunResult", Wider)
    assert Wider.of(entries()).spilled == 0, "an old file is read"
    Wider.of(entries(spilled=1234)).write(tmp_path)
    result = Wider.read(tmp_path)
    assert result.spilled == 1234
    (tmp_path / "config.toml").write_text("[train]\n")
    screen = io.StringIO()
    show_run(run_folder.RunFolder.read(tmp_path), result, Console(file=screen, width=140), 12)
    assert re.search(r"spilled +│ 1,234 rows +│ in 100 steps", screen.getvalue()), "the closing table"
    assert re.search(r"Spilled\s.*all +1234", screen.getvalue(), re.DOTALL), "a table of its own"
    from embershard.extras.report_page.write import write_page

    write_page([tmp_path], tmp_path / "page.html")
    assert "1,234 rows" in (tmp_path / "page.html").read_text()
    assert _numbers("result", result.to_dict())["result/spilled"] == 1234, "trackers"
    assert spread.figures_of(result)["spilled"] == 1234, "sweeps"
