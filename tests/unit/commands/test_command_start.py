"""How commands answer: help on one screen, settings without torch, examples by name, Tab."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from venv import EnvBuilder

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.launch import arguments
from embershard.launch.arguments import add_config_word, add_settings, make_parser
from tests.covering import keep, matrix

COMMANDS = [name for name, _, _ in cli._COMMANDS]
SUBCOMMANDS = [
    *("profile show", "profile merge", "profile compare", "plan diff", "data validate"),
    *("ckpt ls", "ckpt verify", "ckpt compact", "ckpt prune", "ckpt diff"),
]
#: What these commands do needs no tensor, so nobody waits for torch, or for libraries of tables and pictures.
LIGHT_COMMANDS = [
    ["--help"],
    ["--version"],
    ["trian"],
    *([*name.split(), "--help"] for name in [*COMMANDS, *SUBCOMMANDS]),
    ["train", "--confg"],
    ["train", "nowhere.toml"],
    ["train", "quickstart", "--set", "train.batchsize=3"],
    ["train", "quickstart", "--dry-run"],
    ["verify", "quickstart", "--set", "train.batchsize=3"],
    ["predict", "runs/nowhere", "-o", "scores.parquet"],
    ["settings", "cache"],
    ["report", "nowhere"],
    ["ckpt", "ls", "nowhere"],
    ["plan", "diff", "a.json", "b.json"],
]
HEAVY = ["torch", "torchrec", "fbgemm_gpu", "pandas", "pyarrow", "numba", "scipy", "matplotlib", "plotly"]
_RUN_ALL = """
import contextlib, io, sys
from embershard.commands.cli import main
for arguments in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(arguments)
    heavy = [name for name in {heavy!r} if name in sys.modules]
    if heavy:
        sys.exit(f"{{arguments}} imports {{heavy}}")
"""


def heavy_command(commands: list[list[str]], folder: Path) -> str:
    """Run commands in one new process; return the first that imports one of `HEAVY`, with what it imports."""
    code = _RUN_ALL.format(commands=commands, heavy=HEAVY)
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True).stderr


@pytest.mark.slow
def test_commands_without_tensors_import_no_torch(tmp_path):
    assert heavy_command(LIGHT_COMMANDS, tmp_path) == ""


@pytest.mark.matrix
@pytest.mark.slow
def test_the_probe_sees_torch(tmp_path):
    (tmp_path / "nowhere").touch()
    assert "['profile', 'show', 'nowhere']" in heavy_command([["--help"], ["profile", "show", "nowhere"]], tmp_path)


@pytest.mark.matrix
def test_a_profile_a_plan_and_a_refusal_need_neither_torchrec_nor_fbgemm(tmp_path):
    """They can be made where neither is installed; and `import torchrec` takes longer than a plan of a few tables."""
    pq.write_table(pa.table({"label": [0, 1] * 50, "user": list(range(100)), "x": [0.5] * 100}), tmp_path / "d.parquet")
    settings = 'data.kind = "parquet"\ndata.path = "d.parquet"\ndata.parquet.sparse = ["user"]\n'
    (tmp_path / "run.toml").write_text(settings + 'data.parquet.num_rows = [100]\ndata.parquet.dense = ["x"]\n')
    counted = ["profile", "run.toml", "-o", "profile.npz"]
    words = ["plan", "run.toml", "--profile", "profile.npz", "--set", "train.batch_size=10", "--ranks", "2"]
    refused = [*words, "--device-memory", "1"]
    code = "import sys; sys.modules.update(torchrec=None, fbgemm_gpu=None); from embershard.commands.cli import main"
    code = f"{code}; print(main({counted}), main({words}), main({refused}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1:] == ["0 0 2"], ran.stdout + ran.stderr


@pytest.mark.parametrize("width", keep([80], [60, 80]))
@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), *(name.split() for name in SUBCOMMANDS)])
def test_help_fits_a_screen_and_ends_with_an_example(command, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out.rstrip()
    lines = text.splitlines()
    assert len(lines) <= 40 or width < 80
    assert [line for line in lines if len(line) > width and "/docs/README.md" not in line] == []
    assert "embershard" in text.replace("\\\n", "").splitlines()[-1], "a command that is wrapped can be pasted"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "Did you mean train?"),
        (["inspect", "a.csv"], "got 'inspect', needed a command. Did you mean embershard data inspect?"),
        (["ls"], "Did you mean embershard ckpt ls or embershard publish ls?"),
        (["run.toml"], "Did you mean embershard train run.toml?"),
        (["data", "inspct", "a.csv"], "Did you mean inspect?"),
        (["train", "quickstart", "--log-format", "jsn"], "Did you mean json?"),
        (["train", "--confg", "a.toml"], "unrecognized arguments: --confg a.toml. Did you mean --config?"),
        (["train", "quickstart", "--epochs", "3"], "--epochs 3. Did you mean --set train.epochs=3?"),
        (["verify", "quickstart", "--batch-size=64"], "Did you mean --set train.batch_size=64?"),
        (["train", "--lr", "0.1"], "Did you mean --set embedding_optimizer.lr=0.1 or --set dense_optimizer.lr=0.1?"),
        (["train", "--learning-rate", "0.1"], "Did you mean --set embedding_optimizer.lr=0.1 or"),
        (["ckpt", "verify", "runs/a", "--step", "3"], "unrecognized arguments: --step 3\n"),
        (["train", "clicks.csv", "--lable", "sold"], "unrecognized arguments: --lable sold. Did you mean --label"),
        (["train", "clicks.csv", "--seperator", ";"], "Did you mean --separator?"),
        (["train", "clicks.csv", "--target", "sold"], "arguments: --target sold. Did you mean --label sold?\n"),
        (["train", "clicks.csv", "-label", "sold"], "arguments: -label sold. Did you mean --label sold?\n"),
        (["train", "clicks.csv", "--ignore", "id"], "Did you mean --drop id?\n"),
        (["train", "clicks.csv", "--gpus", "2"], "Did you mean --nproc 2?\n"),
        (["train", "clicks.csv", "--output", "new"], "Did you mean --run-dir new?\n"),
        (["train", "clicks.csv", "-f", "new"], "Did you mean --config new?\n"),
        (["train", "clicks.csv", "--device", "cpu"], "arguments: --device cpu. Did you mean --set train.device=cpu?\n"),
        (["data", "inspect", "clicks.csv", "--out", "a.toml"], "Did you mean -o a.toml?\n"),
        (["data", "clicks.csv"], "Did you mean embershard data inspect clicks.csv?\n"),
        (["train", "clicks.csv", "clicks.csv"], "arguments: clicks.csv; of several files, give the folder\n"),
        (["predict", "runs/a", "clicks.csv", "-o", "b"], "arguments: clicks.csv. Did you mean --data clicks.csv?\n"),
        (["fit", "clicks.csv"], "got 'fit', needed a command. Did you mean embershard train?\n"),
        (["test", "runs/a"], "Did you mean embershard eval?\n"),
        (["help"], "Did you mean embershard --help?\n"),
        (["clicks.csv"], "Did you mean embershard train clicks.csv?\n"),
        (["train", "train.epochs=3"], "got train.epochs=3, which is a setting. Did you mean --set train.epochs=3?"),
        (["train", "quickstart", "--set", "train.seed=1", "data.seed=2"], "Did you mean --set data.seed=2?"),
        (["predict", "runs/a", "-o", "b", "data.path=c"], "arguments: data.path=c. Did you mean --set data.path=c?"),
        (
            ["train", "quickstrat"],
            "got quickstrat: no such file, and no example is called so. Did you mean quickstart?",
        ),
    ],
)
def test_a_word_that_is_almost_right_gets_a_question(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("clicks.csv").write_text("click,user\n0,a\n1,b\n")
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "train on what? Give data, as clicks.csv; a TOML file of settings; or an example: quickstart."),
        (["plan", "clicks.csv"], "clicks.csv is data, and this command takes settings. Write them, and give run.toml:"),
        (["verify", "clicks.csv"], "embershard data inspect clicks.csv -o run.toml"),
        (["data", "validate", "clicks.csv"], "a CSV file is read as Avazu's, and its header is another one. Write its"),
        (
            ["profile", "clicks.csv", "-o", "p.npz"],
            "embershard data inspect clicks.csv -o run.toml; then give --config",
        ),
        (["predict", "clicks.csv", "-o", "a"], "Samples go behind --data: --data clicks.csv"),
        (["predict", "run", "-o", "a.csv"], "-o a.csv: scores are written as Parquet. Give -o a.parquet"),
        (["serve", "run"], "run is the folder of a run. Export it: embershard export run -o NEW; then serve NEW."),
    ],
)
def test_what_a_newcomer_may_take_for_right_is_told_apart(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("clicks.csv").write_text("click,user\n0,a\n1,b\n")
    Path("run").mkdir()
    Path("run/config.toml").touch()
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_settings_in_yaml_are_told_how_toml_has_them(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("# mine\ntrain:\n  epochs: 3\n")
    assert cli.main(["train", str(tmp_path / "run.yaml")]) == 2
    said = "It looks like YAML; in TOML, a line [train] stands above epochs = 3"
    assert said in capsys.readouterr().err
    (tmp_path / "run.toml").write_text("[train\nepochs = 3\n")
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 2
    assert "YAML" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["train", "FILE"], ["data", "inspect", "FILE"], ["profile", "show", "FILE"], ["compare", "FILE", "FILE"]],
)
def test_a_name_that_is_almost_that_of_a_file_gets_a_question(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("clicks.toml").touch()
    assert cli.main([word.replace("FILE", "clciks.toml") for word in words]) == 2
    assert capsys.readouterr().err.strip().endswith("Did you mean clicks.toml?")


def test_actions_of_commands_are_those_that_the_commands_have(capsys):
    for command, actions in cli._ACTIONS.items():
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        listed = capsys.readouterr().out.partition("  ACTION\n")[2].partition("\n\n")[0]
        assert re.findall(r"^    (\w+)", listed, re.M) == list(actions)


@pytest.mark.parametrize(
    ("called", "path", "shown"),
    [
        ("bin/embershard", "bin", "embershard"),
        ("bin/embershard", "other", "bin/embershard"),
        ("src/embershard/__main__.py", "bin", "python -m embershard"),
        ("src/embershard/__main__.py", "other", "bin/python -m embershard"),
    ],
)
def test_what_is_told_names_the_program_as_it_was_called(called, path, shown, tmp_path, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    for name in ("embershard", "python"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr("sys.argv", [called, "profile", "show", "runs/embershard train"])
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("EMBERSHARD_PROGRAM", "")  # taken back behind the test
    monkeypatch.delenv("EMBERSHARD_PROGRAM")
    assert cli.main() == 2
    assert f"Make one with `{shown} profile`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["settings", "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {shown} settings [-h]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", keep(["settings"], ["settings", "settings cache", "--help", "train quickstart --dry-run"])
)
def test_a_reader_that_has_seen_enough_ends_a_command_well(words, tmp_path):
    command = f"{sys.executable} -m embershard {words} | head -n 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("0\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("words", keep(["settings train.epochs"], ["settings", "settings train.epochs"]))
def test_an_output_that_cannot_be_written_ends_in_one_line(words, tmp_path):
    """Or in none where there is no output."""
    for redirect, code, said in ((">/dev/full", 2, ["The disk is full: free some space"]), (">&-", 0, [])):
        command = ["bash", "-c", f"{sys.executable} -m embershard {words} {redirect}"]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == code
        assert [text in line for text, line in zip(said, ran.stderr.splitlines(), strict=True)] == [True] * len(said)


@pytest.mark.slow
def test_a_reader_that_never_was_ends_a_command_well(tmp_path):
    """The output fits the buffer, so it is written at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "embershard", "settings", "train.epochs"]
    ran = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["run.toml"], "run.toml"),
        (["--config", "run.toml"], "run.toml"),
        (["--set", "data.seed=1", "run.toml"], "run.toml"),
        (["run.toml", "--set", "data.seed=1"], "run.toml"),
        ([], None),
    ],
)
def test_the_settings_may_be_named_without_an_option(words, found):
    parser = make_parser("x", "text")
    add_settings(parser)
    add_config_word(parser)
    config = parser.parse_intermixed_args(words).config
    assert (config and str(config)) == found


def test_two_files_of_settings_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "a.toml", "--config", "b.toml"])
    assert "got two files of settings, b.toml and a.toml" in capsys.readouterr().err


def test_no_settings(capsys):
    assert cli.main(["verify"]) == 2
    assert "which settings? Give a TOML file, or the name of an example: " in capsys.readouterr().err


def test_an_own_file_goes_before_an_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert arguments.config_file("quickstart.toml") == arguments.examples()["quickstart"]
    (tmp_path / "quickstart.toml").touch()
    assert arguments.config_file("quickstart.toml") == Path("quickstart.toml")
    assert arguments.config_file("no_example") == Path("no_example")
    assert arguments.config_file("folder/quickstart.toml") == Path("folder/quickstart.toml")


@pytest.mark.matrix
def test_a_wheel_works_from_an_empty_folder(project_dir, tmp_path):
    """Installed in an environment of its own, which finds all other packages in this one."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    ran = subprocess.run([*build, str(project_dir)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = tmp_path.glob("*.whl")
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    EnvBuilder(with_pip=False).create(venv)
    install = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q", "--no-deps"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([*install, "--no-index", str(wheel)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (own,) = venv.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(sysconfig.get_path("purelib"))
    given = venv / "share" / "embershard" / "examples"
    shipped = sorted(path.name for path in given.glob("*.toml"))
    assert shipped == sorted(path.name for path in arguments.examples().values())
    empty.mkdir()
    pages = given.parent / "docs"
    assert {"tracking.md", "installation.md"} < {page.name for page in pages.iterdir()}
    assert (pages / "decisions" / "README.md").is_file()
    for words, said in (
        (["--version"], "embershard 0."),
        (["--help"], str(pages / "README.md")),
        (["train", "--config", "quickstart", "--dry-run"], "[train]"),
    ):
        command = [str(venv / "bin" / "embershard"), *words]
        ran = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert (ran.returncode, said in ran.stdout) == (0, True), ran.stdout + ran.stderr
    program = [str(venv / "bin" / "python"), str(given / "dlrm_v4" / "yambda_like.py"), "--help"]
    ran = subprocess.run(program, cwd=empty, env=environment, capture_output=True, text=True)
    assert (ran.returncode, "Generates a log of music" in ran.stdout) == (0, True), ran.stdout + ran.stderr
    where = [str(venv / "bin" / "python"), "-c", "import embershard; print(embershard.__file__)"]
    ran = subprocess.run(where, cwd=empty, env=environment, capture_output=True, text=True)
    assert ran.stdout.startswith(str(own)), "the wheel ran, not the source"
    assert list(empty.iterdir()) == []
    small = ["train.max_steps=3", "data.synthetic.num_samples=20000", "data.synthetic.scale=0.001"]
    settings = [word for text in small for word in ("--set", text)]
    for words, said in (
        (["train", "quickstart", "--run-dir", "run", *settings], " in 3 steps"),
        (["report", "run"], "held-out samples"),
    ):
        command = [str(venv / "bin" / "embershard"), *words]
        ran = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert (ran.returncode, said in ran.stdout) == (0, True), ran.stdout + ran.stderr
    assert [path.name for path in empty.iterdir()] == ["run"]


def test_settings_are_found_by_section_name_and_part(capsys):
    assert cli.main(["settings", "cache", "train.seed"]) == 0
    keys = [line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert {key.partition(".")[0] for key in keys} == {"cache", "train"}
    assert "train.seed" in keys
    assert cli.main(["settings", "warmup"]) == 0
    assert "schedule.warmup_steps    integer    (default: 0)\n" in capsys.readouterr().out
    for words, key in (
        ("learning_rate", "dense_optimizer.lr"),
        ("learning-rate", "embedding_optimizer.lr"),
        ("hidden", "model.over_arch_layer_sizes"),
        ("dims", "model.embedding_dim"),
        ("epoch", "train.epochs"),
        ("workers", "data.num_workers"),
        ("patience", "train.early_stopping"),
        ("validation split", "data.eval_fraction"),
        ("lr_scheduler", "schedule.decay"),
        ("weight decay", "dense_optimizer.weight_decay"),
    ):
        assert cli.main(["settings", words]) == 0
        assert f"\n{key} " in f"\n{capsys.readouterr().out}", words
    assert cli.main(["settings", "rateo"]) == 2
    assert "Did you mean cache.ratio?" in capsys.readouterr().err


def test_all_settings_are_listed_with_their_meanings(capsys):
    assert cli.main(["settings"]) == 0
    text = capsys.readouterr().out
    for said in ("data.criteo.num_rows", "cache.ratio", "Learning rate after warm-up"):
        assert said in text


argcomplete = pytest.mark.skipif(
    importlib.util.find_spec("argcomplete") is None, reason="argcomplete, which completes commands, is not installed"
)


@argcomplete
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "found"),
    [
        matrix("embershard pl", "plan"),
        matrix("embershard train --max", "--max-restarts"),
        ("embershard train --set cache.rat", "cache.ratio="),
        matrix("embershard train quick", "quickstart"),
        matrix("embershard ckpt pru", "prune"),
        matrix("embershard plan diff mine", "mine.json"),
    ],
)
def test_tab_in_a_real_bash(line, found, tmp_path):
    (tmp_path / "mine.json").touch()
    program = tmp_path / "embershard"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m embershard "$@"\n')
    program.chmod(0o755)
    code = f"""
eval "$(embershard completion bash)"
COMP_LINE='{line}' COMP_POINT={len(line)} COMP_TYPE=9 COMP_KEY=9 COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
_python_argcomplete embershard
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found in [word.strip() for word in ran.stdout.splitlines()], ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("argcomplete") is not None, reason="argcomplete is installed")
def test_without_argcomplete_it_says_what_to_install(capsys):
    assert cli.main(["completion", "bash"]) == 2
    assert 'pip install "argcomplete>=3.1"' in capsys.readouterr().err
