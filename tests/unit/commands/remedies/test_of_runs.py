"""Messages about runs and plans; about vectors, exports and checkpoints that a run begins with, and damaged ones."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.covering import matrix
from tests.unit.commands.conftest import Trained
from tests.unit.commands.remedies.table import FILES, LEFT_OUT, Remedy, cases, check, said_by


def _sample(kind: int | str) -> bytes:
    """A file of one sample, with a column that is not of the same type in all files."""
    written = io.BytesIO()
    pq.write_table(pa.table({"user": [1], "items": [[1, 2]], "age": [2.5], "click": [1], "kind": [kind]}), written)
    return written.getvalue()


FILES |= {"several/a.parquet": _sample(1), "several/b.parquet": _sample("new")}
#: Of a run on Parquet files with columns user, items, age and click.
OF_RUNS = [
    Remedy(("eval run",), "", "--set train.epochs=3", "(Leave it out)", "--step last", True),
    Remedy(("eval run",), "", "--step 9", "there is step_(12)", "--step 12", True),
    Remedy(("eval run",), "", "--set data.eval_fraction=0", "(--data PATH)", "--data clicks.parquet"),
    Remedy(("predict run -o out.parquet",), "", "--set train.batch_sise=3", r"Did you mean (train\.batch_size)",
        "--set train.batch_size=3", True),
    Remedy(("predict run -o out.parquet",), "", "--keep usr", "did you mean ('user')", "--keep user", True),
    Remedy(("predict run -o out.parquet",), "", "--keep label", "(Leave it out)", "--step last", True),
    Remedy(("compare run run",), "", "--metrics gauc", "(--group COLUMN)", "--group user"),
    Remedy(("compare run run",), "", "--group usr", "did you mean ('user')", "--group user", True),
    Remedy(("report run run",), "", "", "or (--format)", "--format csv"),
    Remedy(("report run run",), "", "", "need (-o FILE.html)", "-o out.html"),
    Remedy(("report run",), "", "--json --top 3", "(--top) has no effect", "--json", True),
    Remedy(("report run",), "", "--topology cpu", "without (--recalibrate)", "--json", True),
    Remedy(("report",), "", "run/result.json", r"give its folder: (\S+)\.", instead=True),
    Remedy(("ckpt prune run",), "", "", "required: (--keep)", "--keep 1"),
    Remedy(("export run -o out.d",), "", "--format parquet --dtype int8", "(Leave it out)", "--format parquet", True),
    Remedy(("export run -o out.d",), "", "--samples 9", "(Leave it out)", "--format parquet", True),
    Remedy(("export",), "", "run -o run", "give another (name|folder|file)|give the name of a (new folder)",
        "run --format parquet -o out.d", True),
    Remedy(("predict run",), "", "-o out.csv", r"Give (-o out\.parquet)", instead=True),
    Remedy(("eval",), "", "clicks.parquet", r"give the folder of a run.*(--data clicks\.parquet)",
        "run --data clicks.parquet", True),
    Remedy(("eval",), "", "rnu", "(give the folder of a run)", "run", True),
    Remedy(("serve",), "", "run", r"embershard (export run -o NEW); then serve NEW", "NEW --port 99999", True,
        first="export run -o NEW", leads_to="choose another port, or 0"),
    Remedy(("publish ls",), "", "run", "(give the publish.folder) of a run", "nowhere", True,
        leads_to="no publications|not"),
    Remedy(("compare",), "", "run nowhere", "needed (a run), a sweep", "run run", True),
    Remedy(("compare run run",), "", "--metrics recalibrated_ne", "(Leave it out)", LEFT_OUT, True),
    Remedy(("compare run run",), "", "--weight agee", "did you mean ('age')", "--weight age", True,
        leads_to="embershard: |A|missing"),
    Remedy(("compare",), "", "run:cache.ratio=1 run", "(needed one) before the settings|(not the folder of a sweep)",
        "run run", True),
    Remedy(("compare run",), "", "clicks.parquet", r"needed (scores)", "run", True),
    Remedy(("data ids run",), "", "-o new", r"Give (--config)", "-o new --config run/config.toml", True,
        leads_to='Give a feature the mapping "ids"'),
    Remedy(("report run",), "", "-o out.pdf", r"ends in (\.html)", "-o out.html", True),
    Remedy(("report run",), "", "--format csv --json", "(> FILE)", "--format csv", True),
    Remedy(("report run",), "", "-o out.html --json", "--json (has no effect) with -o", "-o out.html", True),
    Remedy(("report run",), "", "--plan plan.json", "without (--predicted)", LEFT_OUT, True),
    Remedy(("report run",), "", "--predicted", r"or name a plan .*(--plan FILE)", "--plan run/config.toml",
        leads_to="is not JSON"),
    Remedy(("report run",), "", "--recalibrate out.txt", r"ends in (\.toml)", "--recalibrate out.toml", True,
        leads_to="trained without a plan"),
    Remedy(("report",), "", "nowhere", "(Give the folder of a run) that ended", "run", True),
    Remedy(("serve",), "", "nowhere", "give a folder that (embershard export) wrote", "NEW --port 99999", True,
        first="export run -o NEW", leads_to="or 0 for any"),
    Remedy(("serve",), "", "NEW", "or a publish.folder|give a folder that (embershard export) wrote",
        "tables --port 1", True, first="export run -o tables --format parquet",
        leads_to="export it with --format module"),
    Remedy(("report run",), "", "--topology cpu --predicted", "without (--recalibrate)", LEFT_OUT, True),
    Remedy(("report",), "", "clicks.parquet --format csv", "give (runs) and sweeps", "run --format csv", True),
    Remedy(("compare run run",), "", "--metrics gauc --group items", "(one value)|(--group)",
        "--metrics gauc --group user", True),
    Remedy(("eval run",), "", "--set metrics.group=items", "(Choose another column)", "--set metrics.group=user", True),
    Remedy(("train bad.toml --run-dir bad --set train.batch_size=8",), "", "--set data.bad_rows=0.001",
        r"go on from the newest checkpoint: (--resume --set data\.bad_rows=[\d.]+)"),
    Remedy(("ckpt ls",), "", "clicks.parquet", "(give the folder of a run)", "run", True),
    Remedy(("ckpt verify run",), "", "9", "step_(12)", "12", True),
    Remedy(("ckpt compact run",), "", "9", "step_(12)", "12", True),
    Remedy(("ckpt prune run",), "", "--keep 0", "(1) or more", "--keep 1", True),
    Remedy(("predict run -o out.parquet",), "", "--data several --keep kind", "(leave them out)", "--data several",
        True),
]  # fmt: skip
_AGAIN = "train run/config.toml --run-dir run --resume --set train.max_steps=13"
_NEW = "train run/config.toml --run-dir new --set train.max_steps=1"
_WARM = "train run/config.toml --run-dir new --from run --dry-run"
#: Of the same run: to go on with it, and to begin others from it.
OF_LIVES = [
    Remedy((_AGAIN,), "", "--set data.seed=5", "(--set data.seed=0)"),
    Remedy((_AGAIN,), "", "--set data.seed=5", "or allow it: (--allow-change data.seed)"),
    Remedy((_AGAIN,), "", "--set train.batch_size=32",
        r"\((--set train.batch_size=none --set train.global_batch_size=64)\)"),
    Remedy((_AGAIN,), "", "--set train.batch_size=32", "(--allow-change train.global_batch_size)"),
    Remedy((_AGAIN,), "", "--set dense_optimizer.lr=0.5 --set schedule.warmup_steps=3",
        r"Set back .*\((.*)\), or allow", ""),
    Remedy((_AGAIN,), "", "--set data.parquet.num_rows=[40,80]", "(Resume with the config)", LEFT_OUT, True),
    Remedy((_AGAIN,), "", "--set model.embedding_dim=4 --set model.dense_arch_layer_sizes=[16,4]",
        "(Resume with the config)", LEFT_OUT, True),
    Remedy((_AGAIN,), "", "--allow-change train.batch_size", r"compared as (train.global_batch_size)\. Allow that",
        "--allow-change train.global_batch_size", True),
    Remedy((_AGAIN,), "", "--allow-change cache.ratio", "(Leave it out)", LEFT_OUT, True),
    Remedy((_AGAIN,), "", "--from run", "(Leave --from out)", LEFT_OUT, True),
    Remedy(("train run/config.toml --set train.max_steps=1",), "", "--run-dir run --resume --from run",
        "or give --from a new (--run-dir)", "--run-dir new --from run", True),
    Remedy(("train run/config.toml --run-dir run",), "", "", "(--resume) to continue it"),
    Remedy(("train run/config.toml --set train.max_steps=1",), "", "--run-dir run", "Use another (--run-dir)",
        "--run-dir new", True),
    Remedy(("train run/config.toml --run-dir run --set train.max_steps=13",), "", "--resume 9", "step_(12)",
        "--resume 12", True),
    Remedy((_NEW + " --dry-run",), "", "--step 12", "without (--from)", "--from run"),
    Remedy((_WARM,), "", "--step 9", "step_(12)", "--step 12", True),
    Remedy((_WARM,), "", "--step best", "(Give a step)", "--step 12", True),
    Remedy((_WARM,), "", "--step bets", "or (best)", "--step 12", True),
    Remedy((_WARM,), "", "--map user", "for instance (item=product)", "--map user=user", True),
    Remedy((_WARM,), "", "--map usr=user", "It has .*(user)", "--map user=user", True),
    Remedy((_WARM,), "", "--without usr", "The new one has .*(user)", "--without user", True),
    Remedy((_WARM,), "", "--set data.parquet.num_rows=[40,80]", r"or (--without \S+) begins it anew"),
    Remedy((_WARM,), "", "--set data.parquet.num_rows=[40,80]", "hash onto (70) rows.* Set the mapping back",
        "--set data.parquet.num_rows=[40,70]"),
    Remedy((_WARM,), "", "--set data.parquet.num_rows=[40,60]", r"or (--without \S+) begins it anew"),
    Remedy((_WARM,), "", "--set data.parquet.dense_transform=none",
        r"Set the scale back, or (--without \S+) begins it anew"),
    Remedy((_WARM,), "", "--set data.parquet.id_mapping=modulo", r"Set the mapping back, or (--without \S+) begins",
        "--without t_user --without t_items"),
    Remedy((_WARM,), "", "--set embedding_optimizer.kind=adam", r"Set the kind back, or (--without \S+) begins"),
    Remedy((_WARM,), "", "--set model.embedding_dim=4 --set model.dense_arch_layer_sizes=[16,4]",
        "(Keep the dim), or", "--set model.embedding_dim=8 --set model.dense_arch_layer_sizes=[16,8]"),
    Remedy((_NEW + " --dry-run", ), "", "--from run/checkpoints/step_12 --step 12", "(Leave it out)",
        "--from run/checkpoints/step_12", True),
    Remedy((_WARM,), "", "--map user=items --map items=items", "(Map it once|Map one of them)", "--map items=items",
        True),
    Remedy((_NEW + " --dry-run",), "", "--from clicks.parquet", "(Give the folder of a run)", "--from run", True),
    Remedy((_NEW + " --dry-run", ), "", "--from run --freeze usr", r"needed a table .*: .*(user)",
        "--from run --freeze user", True),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), cases([*OF_LIVES, *OF_RUNS]))
def test_what_is_advised_of_runs_helps(
    row: Remedy,
    command: str,
    trained: Trained,
    one_rank_here: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("embershard.commands.train.run.lock_run_dir", lambda _: None)  # it holds until a process ends
    shutil.copytree(trained.run_dir, "run")
    shutil.copy(trained.data, "clicks.parquet")
    check(row, command, capsys)


OF_RESOURCES = (
    ("--device-memory 1kB", r"that fits: (--device-memory \d+)", ""),
    ("--topology h100x8x2 --ranks 8", r"or (--set train.device=auto)\.", ""),
    ("--host-memory 1kB", r"that fits: (--host-memory \d+)", ""),
    ("--device-memory 1GB,2GB,3GB", r"(or one for each of 2 ranks)", "--device-memory 1GB,2GB"),
    ("--ranks 2,4", r"give (one number of --ranks)", "--ranks 2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("step", [matrix(5), matrix(1)])
def test_what_is_advised_of_plans_helps(step: int, capsys: pytest.CaptureFixture[str]):
    """The profile that is missing is made by the command that is named, and given as it says."""
    code, said = said_by(["plan", "tiny.toml"], capsys)
    found = re.search(r"give it as (--profile \S+): embershard (profile .*\.npz)", said)
    assert code == 2, said
    assert found is not None, said
    assert said_by(shlex.split(found[2]), capsys)[0] == 0
    plan = f"plan tiny.toml {found[1]} --ranks 2 -o out.json"
    for words, remedy, tried in OF_RESOURCES[::step]:
        check(Remedy((plan,), "", words, remedy, tried), plan, capsys)


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
_BEGIN = "train run/config.toml --set train.max_steps=1 --run-dir"
_RIGHT = "two --set model.pretrained.user.file=sound.parquet --set model.pretrained.user.values=user"


def _of_vectors(words: str, said: str, tried: str = _RIGHT) -> Remedy:
    settings = " ".join(f"--set model.pretrained.{each}" for each in words.split())
    return Remedy((_BEGIN,), "", f"one {settings}", said, tried, True)


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
    Remedy((_BEGIN,), "", f"one --from run {_MAPPED} {_FILED}",
        "(--resume --set cache.host=file --set cache.host_bytes)",
        f"two {_MAPPED} --set train.max_steps=2 --resume {_FILED}", True,
        first=f"{_BEGIN} two --from run {_MAPPED} --set cache.host=mmap"),
    Remedy((_BEGIN,), "", "one --from TABLES",
        r'model.pretrained.TABLE = {file = "\S*(TABLES/tables)/TABLE.parquet", rows = "row"}',
        "two --set model.pretrained.t_user.file=TABLES/tables/t_user.parquet --set model.pretrained.t_user.rows=row",
        True),
    Remedy((_BEGIN,), "", "one --from TABLES", "(Export it as a module)", "two --from EXPORT", True, first=_EXPORT),
    Remedy((_BEGIN,), "", "one --from MODULE --step 12", "(Leave it out)", "two --from MODULE", True),
    Remedy((_BEGIN,), "", "one --set model.frozen=[user] --set cache.enabled=false", "needed (cached tables)",
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
    Remedy(("predict -o out.parquet",), "", "run", "(Train the run again)", "two", True, first=f"{_BEGIN} two"),
    Remedy((_BEGIN,), "", "one --from run", "(Give another one)", "three --from two", True, first=f"{_BEGIN} two"),
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
