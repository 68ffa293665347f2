"""Messages about vectors from files, exports and checkpoints that a run begins with, and about damaged ones."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.commands.conftest import Trained
from tests.unit.commands.remedies.table import FILES, Remedy, cases, check

_VECTORS = np.ones((3, 8), np.float32)
_NOT_FINITE = np.where(np.arange(24).reshape(3, 8) == 11, np.nan, _VECTORS)


def _parquet(**columns: Any) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.table({name: [*map(np.ndarray.tolist, map(np.asarray, each))] for name, each in columns.items()}),
        written)  # fmt: skip
    return written.getvalue()


def _npz(**arrays: Any) -> bytes:
    written = io.BytesIO()
    np.savez(written, **arrays)
    return written.getvalue()


FILES |= {
    "sound.parquet": _parquet(user=[1, 2, 3], row=[0, 1, 2], embedding=_VECTORS, short=_VECTORS[:, :7]),
    "repeated.parquet": _parquet(user=[1, 1, 3], embedding=_VECTORS),
    "bags.parquet": _parquet(user=[[1], [1, 2], [3]], embedding=_VECTORS),
    "text.npz": "1, 0.5",
    "not_finite.npz": _npz(user=[1, 2, 3], embedding=_NOT_FINITE),
    "words.npz": _npz(user=["a", "b", "c"], embedding=_VECTORS),
    "beyond.npz": _npz(row=[0, 1, 99], embedding=_VECTORS),
    "ids.npz": _npz(row=[0, 1], embedding=_VECTORS[:2, :4]),
    "halves.npz": _npz(row=[0.5, 1.0, 2.0], embedding=_VECTORS),
}
_NEW = "train run/config.toml --set train.max_steps=1 --run-dir"
_RIGHT = "two --set model.pretrained.user.file=sound.parquet --set model.pretrained.user.values=user"


def _of_vectors(words: str, said: str, tried: str = _RIGHT) -> Remedy:
    settings = " ".join(f"--set model.pretrained.{each}" for each in words.split())
    return Remedy((_NEW,), "", f"one {settings}", said, tried, True)


OF_VECTORS = [
    _of_vectors("user.file=sound.parquet user.values=user user.vectors=short", r"needed (\[3, 8\])"),
    _of_vectors("user.file=sound.parquet user.values=usr", "it has (user), row"),
    _of_vectors("user.file=words.npz user.values=user", "(Give a value) as the feature 'user' has them"),
]
MORE_OF_VECTORS = [
    _of_vectors("user.file=repeated.parquet user.values=user", "(Give each value once)"),
    _of_vectors("user.file=not_finite.npz user.values=user", "(Remove the row)"),
    _of_vectors("user.file=beyond.npz user.rows=row", r"needed a row in (0\.\.39)"),
    _of_vectors("user.file=sound.parquet", "(name of one column)"),
    _of_vectors("user.file=sound.parquet user.values=user user.rows=row", "(name of one column)"),
    _of_vectors("user.file=vectors.csv user.values=user", r"ends with (\.parquet)"),
    _of_vectors("user.file=sound.parquet user.values=user user.vectors=vectors", "it has user, row, (embedding)"),
    _of_vectors("user.file=halves.npz user.rows=row", "needed (whole numbers)"),
    _of_vectors("user.file=bags.parquet user.values=user", "(Give a value) as the feature"),
    _of_vectors("user.file=text.npz user.values=user", "(Give a Parquet file), or an npz"),
    _of_vectors("user.file=nowhere.parquet user.values=user", "(Give a Parquet file)"),
    Remedy(("train tiny.toml --run-dir",), "",
        "one --set model.pretrained.C1.file=ids.npz --set model.pretrained.C1.values=row",
        "Give row numbers: (rows) = NAME",
        "two --set model.pretrained.C1.file=ids.npz --set model.pretrained.C1.rows=row", True),
    _of_vectors("usr.file=sound.parquet usr.values=user", "a table or a feature of one: (t_user)",
        _RIGHT.replace(".user.", ".t_user.")),
]  # fmt: skip


def _damage(_: str = "") -> None:
    Path("run/checkpoints/step_12/manifest.json").write_text("{}")


_EXPORT = "export run -o EXPORT"
_FILED = "--set cache.host=file --set cache.host_bytes=10000000"
_MAPPED = "--set cache.policy=none --set cache.ratio=0.9 --set cache.host_dir=rows"
OF_EXPORTS = [
    Remedy((_NEW,), "", f"one --from run {_MAPPED} {_FILED}", "(--resume --set cache.host=file --set cache.host_bytes)",
        f"two {_MAPPED} --set train.max_steps=2 --resume {_FILED}", True,
        first=f"{_NEW} two --from run {_MAPPED} --set cache.host=mmap"),
    Remedy((_NEW,), "", "one --from TABLES",
        r'model.pretrained.TABLE = {file = "\S*(TABLES/tables)/TABLE.parquet", rows = "row"}',
        "two --set model.pretrained.t_user.file=TABLES/tables/t_user.parquet --set model.pretrained.t_user.rows=row",
        True),
    Remedy((_NEW,), "", "one --from TABLES", "(Export it as a module)", "two --from EXPORT", True, first=_EXPORT),
    Remedy((_NEW,), "", "one --from MODULE --step 12", "(Leave it out)", "two --from MODULE", True),
    Remedy((_NEW,), "", "one --set model.frozen=[user] --set cache.enabled=false", "needed (cached tables)",
        "two --set model.frozen=[user]", True),
    Remedy(("eval run",), "", "--set data.parquet.id_mapping=modulo", "(Leave data.meaning.id_mapping|Leave \\S+) as",
        "--step last", True),
]  # fmt: skip
#: Of a run whose only checkpoint is damaged, or has no manifest.
OF_DAMAGE = [
    Remedy(("ckpt prune run --keep 1",), "", "", "(Remove folders by hand)",
        done=lambda _: shutil.rmtree("run/checkpoints/step_12"), leads_to="no checkpoints there"),
    Remedy(("train run/config.toml --set train.max_steps=13",), "", "--run-dir run --resume",
        "Start again with another (--run-dir)", "--run-dir two", True),
    Remedy(("predict -o out.parquet",), "", "run", "(Train the run again)", "two", True, first=f"{_NEW} two"),
    Remedy((_NEW,), "", "one --from run", "(Give another one)", "three --from two", True, first=f"{_NEW} two"),
]  # fmt: skip


@pytest.fixture
def run(trained: Trained, one_rank_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has a trained run, and its data."""
    monkeypatch.setattr("embershard.commands.train.run.lock_run_dir", lambda _: None)  # it holds until a process ends
    shutil.copytree(trained.run_dir, "run")
    shutil.copy(trained.data, "clicks.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), [*cases(OF_VECTORS), *cases(MORE_OF_VECTORS, pytest.mark.matrix)])
def test_what_is_advised_of_vectors_helps(row: Remedy, command: str, run: None, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


@pytest.fixture(scope="module")
def exports(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from embershard.commands import cli

    folder = tmp_path_factory.mktemp("exports")
    assert cli.main(["export", str(trained.run_dir), "-o", str(folder / "MODULE")]) == 0
    assert cli.main(["export", str(trained.run_dir), "-o", str(folder / "TABLES"), "--format", "parquet"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), [*cases(OF_EXPORTS[:2]), *cases(OF_EXPORTS[2:], pytest.mark.matrix)])
def test_what_is_advised_of_exports_helps(
    row: Remedy, command: str, run: None, exports: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(exports, ".", dirs_exist_ok=True)
    check(row, command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), [*cases(OF_DAMAGE[:2]), *cases(OF_DAMAGE[2:], pytest.mark.matrix)])
def test_what_is_advised_of_damaged_checkpoints_helps(
    row: Remedy, command: str, run: None, capsys: pytest.CaptureFixture[str]
):
    _damage()
    check(row, command, capsys)


@pytest.mark.slow
def test_a_checkpoint_without_a_manifest_is_used_as_it_says(run: None, capsys: pytest.CaptureFixture[str]):
    Path("run/checkpoints/step_12/manifest.json").unlink()
    resume = "train run/config.toml --run-dir run --set train.max_steps=13 --resume"
    check(Remedy((resume,), "", "", "is used with (--unverified)"), resume, capsys)
