"""What the documentation shows must work: every command in a bash block, every import, every link.

A command is run as a dry run, or parsed by the program it calls. One that is neither needs an entry in
``TAKEN_ON_TRUST``, with the reason. A command of an unknown program fails.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from embershard.launch import cli
from embershard.launch.doctor import command as doctor

PROJECT = Path(__file__).resolve().parents[2]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]

# First words of a command -> why it is not checked here.
TAKEN_ON_TRUST = {
    "cd": "changes the reader's folder",
    "export": "sets the reader's variables",
    "source": "activates the reader's environment",
    "git clone": "needs a network",
    "tensorboard": "a server; another project's",
    "pip config": "shows the reader's settings",
}


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The commands of a bash block: comments dropped, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", block)
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def check_make(words: list[str]) -> None:
    """make's own dry run, without the set-up."""
    dry = ["make", "--dry-run", "PYTHON=python3", *words[1:]]
    run = subprocess.run(dry, cwd=PROJECT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    makefile = (PROJECT / "Makefile").read_text()
    for variable in (word.partition("=")[0] for word in words[1:] if "=" in word):
        known = rf"^({variable} \?=|ifdef {variable}$)"
        assert re.search(known, makefile, re.MULTILINE), f"the Makefile does not read {variable}"
    help_text = subprocess.run(["make", "help"], cwd=PROJECT, capture_output=True, text=True).stdout
    for target in (word for word in words[1:] if "=" not in word):
        assert re.search(rf"^{target}\s", help_text, re.MULTILINE), f"make help does not show {target}"


def check_embershard(words: list[str]) -> None:
    """The real command line, and the real settings: train with --dry-run, doctor without its checks."""
    name, *arguments = words[1:]
    if "--help" in arguments or name in ("--help", "--version"):
        with pytest.raises(SystemExit) as leaves:
            cli.main([name, *arguments])
        assert leaves.value.code == 0
    elif name == "train":
        assert cli.main([name, *_without_plan(arguments), "--dry-run"]) == 0
    elif name in ("profile", "plan", "report"):
        check_arguments(name, arguments)
    else:
        assert name == "doctor", f"embershard has no command {name}"
        assert doctor.main(arguments, lambda timeout_seconds: iter(())) == 0


def _without_plan(arguments: list[str]) -> list[str]:
    """A plan in a text is not there yet; tests/ranks/test_planning_workflow.py trains by one."""
    if "--plan" not in arguments:
        return arguments
    place = arguments.index("--plan")
    return arguments[:place] + arguments[place + 2 :]


def check_arguments(name: str, arguments: list[str]) -> None:
    """The command's own parser takes them; tests/ranks/test_planning_workflow.py runs the commands."""
    stopped = mock.Mock(side_effect=_ParsedError)
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: object) -> argparse.Namespace:
        parse(parser, *args)  # type: ignore[arg-type]
        return stopped()

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop), pytest.raises(_ParsedError):
        cli.main([name, *arguments])


class _ParsedError(Exception):
    """The arguments were parsed."""


def check_torchrun(words: list[str]) -> None:
    """torchrun's own parser, then the settings of the module that it starts."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words[1:])
    if parsed.training_script.endswith(".py"):
        text = (PROJECT / parsed.training_script).read_text()
        ast.parse(text)
        assert all(word in text for word in parsed.training_script_args if word.startswith("--")), parsed
        return
    assert parsed.module, "torchrun starts a module of ours: -m embershard.launch.train.command"
    assert parsed.training_script == "embershard.launch.train.command"
    check_embershard(["embershard", "train", *parsed.training_script_args])


def check_pip(words: list[str]) -> None:
    """Requirements parse; extras of ours exist; versions are those that belong together."""
    config = configparser.ConfigParser()
    config.read(PROJECT / "setup.cfg")
    extras = config["options.extras_require"]
    for word in (word for word in words[2:] if not word.startswith("-")):
        ours = re.fullmatch(r"(?:embershard|\.)(?:\[([\w,]+)\])?", word)
        if ours:
            assert set(filter(None, (ours[1] or "").split(","))) <= set(extras), f"{word}: setup.cfg has no such extra"
            continue
        requirement = Requirement(word)
        pins = re.findall(rf"^{requirement.name}==(.+)$", extras["cuda"] + extras["cpu"], re.MULTILINE)
        if requirement.specifier and pins:
            assert requirement.specifier.contains(pins[0]), f"{word}, but setup.cfg has {pins[0]}"


def check_python(words: list[str]) -> None:
    """The script compiles, or the module exists."""
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]), f"no module {words[2]}"
    else:
        ast.parse((PROJECT / words[1]).read_text())


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "embershard": check_embershard,
    "torchrun": check_torchrun,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
}


def check(command: str) -> None:
    """Checks one command line, or raises."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # VARIABLE=value in front of a command
        words.pop(0)
    for path in (word for word in words if re.match(r"(examples|docs|benchmarks|scripts|tests)/", word)):
        assert (PROJECT / path.partition("::")[0]).exists(), f"{path} does not exist"
    if words[0] in TAKEN_ON_TRUST or " ".join(words[:2]) in TAKEN_ON_TRUST:
        return
    program = Path(words[0]).name if words[0].startswith(".venv/bin/") else words[0]
    assert program in CHECKS, f"nothing here checks `{command}`: add a check, or TAKEN_ON_TRUST with a reason"
    CHECKS[program](words)


def shown(language: str) -> list[object]:
    """Every block of a language: (page, block) as a parameter set."""
    return [
        pytest.param(block, id=f"{page.relative_to(PROJECT)}#{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page.read_text(encoding="utf-8"), language), 1)
    ]


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)


@pytest.mark.parametrize("block", shown("bash"))
def test_the_commands_work(block: str):
    for command in commands(block):
        check(command)


@pytest.mark.parametrize("block", shown("python"))
def test_the_imports_work(block: str):
    """The block compiles, and its imports run."""
    imports = [node for node in ast.parse(block).body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, type_ignores=[]), "<documentation>", "exec"), {})


def test_the_readme_s_snippet_has_the_real_arguments():
    """The names of the keyword arguments in README.md's TorchRec snippet."""
    import inspect

    import embershard

    (block,) = blocks((PROJECT / "README.md").read_text(encoding="utf-8"), "python")
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    ours = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in embershard.__all__]
    assert len(ours) == 4
    for call in ours:
        assert isinstance(call.func, ast.Name)
        signature = inspect.signature(getattr(embershard, call.func.id))
        signature.bind(*call.args, **{word.arg: word.value for word in call.keywords if word.arg})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_the_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    "command",
    [
        "make fly",
        "make train SPEED=9",
        "embershard fly",
        "embershard train --config examples/none.toml",
        "embershard train --config examples/quickstart.toml --set no.such=1",
        "embershard train --config examples/quickstart.toml --fast",
        "embershard doctor --cure",
        "torchrun --nproc_per_node 2 -m embershard.launch.fly --config examples/quickstart.toml",
        "torchrun --nproc_per_node 2 -m embershard.launch.train.command --config examples/none.toml",
        'pip install ".[tpu]"',
        "pip install torchrec==1.9.0",
        "python scripts/none.py",
        "python -m embershard.none",
        "curl example.org",
    ],
)
def test_a_wrong_command_is_noticed(command: str):
    with pytest.raises((AssertionError, SystemExit, FileNotFoundError)):
        check(command)
