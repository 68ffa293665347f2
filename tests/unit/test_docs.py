"""What the documentation shows must work: every command in a bash block, every import, every link, every path and name.
Its prose keeps to the line length.

A command is run as a dry run, or parsed by the program it calls. One that is neither needs an entry in
`TAKEN_ON_TRUST`, with the reason. A command of an unknown program fails.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import functools
import importlib.util
import pkgutil
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement

from embershard.commands import cli
from embershard.commands.doctor import command as doctor

PROJECT = Path(__file__).resolve().parents[2]
PAGES = [
    PROJECT / "README.md",
    PROJECT / "CONTRIBUTING.md",
    PROJECT / "SECURITY.md",
    PROJECT / "benchmarks" / "README.md",
    PROJECT / "tests" / "README.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
]
FOLDERS = ("embershard", "tests", "docs", "benchmarks", "examples", "scripts", ".ci")
LOG = PROJECT / "docs" / "LOG.md"
LOG_PAGES = sorted((PROJECT / "docs" / "log").glob("*.md"))
ARCHITECTURE = PROJECT / "docs" / "architecture.md"
USER_PAGES = [PROJECT / "README.md", *sorted({*(PROJECT / "docs").glob("*.md")} - {ARCHITECTURE, LOG})]
LINE_LENGTH = 120  # as in the code

# First words of a command -> why it is not checked here.
TAKEN_ON_TRUST = {
    "cd": "changes the reader's folder",
    "export": "sets the reader's variables",
    "source": "activates the reader's environment",
    "git clone": "needs a network",
    "tensorboard": "a server; another project's",
    "python -m mlperf_logging.compliance_checker": "of an extra; reports/test_mlperf.py runs it",
    "pip config": "shows the reader's settings",
}
# Names of other projects that documents mention without saying whose.
NAMES_OF_OTHERS = {"DTensor", "PATH", "split_embedding_cpu_forward_2", "weights_offsets"}


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """Return the commands of a bash block: comments dropped, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", block)
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def check_make(words: list[str]) -> None:
    """Run make's own dry run, without the set-up."""
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


#: Commands whose arguments are checked only.
PARSED = (
    *("profile", "plan", "report", "ckpt", "data", "verify", "sweep", "predict", "eval", "export"),
    "serve",
    "publish",
    "compare",
    "completion",
)


def check_embershard(words: list[str]) -> None:
    """Run the real command line on the real settings: train with --dry-run, doctor without its checks."""
    name, *arguments = words[1:]
    if "--help" in arguments or name in ("--help", "--version"):
        with pytest.raises(SystemExit) as leaves:
            cli.main([name, *arguments])
        assert leaves.value.code == 0
    elif name == "settings":
        assert cli.main([name, *arguments]) == 0
    elif name == "train" and _writes_config_first(arguments):
        check_arguments(name, arguments)  # a file that an earlier command of the page writes
    elif name == "train":
        with mock.patch("embershard.commands.train.command.check_data"):  # the reader's
            assert cli.main([name, *_without_plan(arguments), "--dry-run"]) == 0
    elif name in PARSED:
        check_arguments(name, arguments)
    else:
        assert name == "doctor", f"embershard has no command {name}"
        assert doctor.main(arguments, lambda timeout_seconds: iter(())) == 0


def _writes_config_first(arguments: list[str]) -> bool:
    place = arguments.index("--config") + 1 if "--config" in arguments else None
    if arguments[0].endswith((".csv", ".parquet")):
        place = 0  # a reader's data, of which settings are made first
    return place is not None and not (PROJECT / arguments[place]).exists()


def _without_plan(arguments: list[str]) -> list[str]:
    """Drop a document's plan, which does not exist here; tests/ranks/test_planning_workflow.py trains by one."""
    if "--plan" not in arguments:
        return arguments
    place = arguments.index("--plan")
    return arguments[:place] + arguments[place + 2 :]


def check_arguments(name: str, arguments: list[str]) -> None:
    """Parse by the command's own parser; tests/ranks/test_planning_workflow.py runs the commands."""
    stopped = mock.Mock(side_effect=_ParsedError)

    def parse_and_stop(method: str) -> Callable[..., argparse.Namespace]:
        parse = getattr(argparse.ArgumentParser, method)

        def parse_first(parser: argparse.ArgumentParser, *args: object) -> argparse.Namespace:
            parse(parser, *args)
            return stopped()

        return parse_first

    methods = {name: parse_and_stop(name) for name in ("parse_args", "parse_intermixed_args")}
    with mock.patch.multiple(argparse.ArgumentParser, **methods), pytest.raises(_ParsedError):
        cli.main([name, *arguments])


class _ParsedError(Exception):
    """The arguments were parsed."""


def check_torchrun(words: list[str]) -> None:
    """Parse by torchrun's own parser, then check the settings of the module that it starts."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words[1:])
    if parsed.training_script.endswith(".py"):
        text = (PROJECT / parsed.training_script).read_text()
        ast.parse(text)
        assert all(word in text for word in parsed.training_script_args if word.startswith("--")), parsed
        return
    assert parsed.module, "torchrun starts a module of ours: -m embershard train"
    assert parsed.training_script == "embershard"
    assert parsed.training_script_args[0] == "train"
    check_embershard(["embershard", *parsed.training_script_args])


def check_pip(words: list[str]) -> None:
    """Check that requirements parse, that our extras exist, and that versions match `setup.cfg`."""
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
    """Check that the script compiles, or that the module exists."""
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]), f"no module {words[2]}"
    else:
        ast.parse((PROJECT / words[1]).read_text())


def check_docker(words: list[str]) -> None:
    """Check that the Dockerfile has the stage that is built, or that the image can run the command."""
    if words[1] == "build":
        stage = words[words.index("--target") + 1]
        assert f" AS {stage}\n" in (PROJECT / "Dockerfile").read_text(), f"the Dockerfile has no stage {stage}"
    else:
        image = next(number for number, word in enumerate(words) if word.startswith("embershard:"))
        check_embershard(["embershard", *words[image + 1 :]])


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "embershard": check_embershard,
    "torchrun": check_torchrun,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "docker": check_docker,
}


def check(command: str) -> None:
    """Check one command line, or raise."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # VARIABLE=value in front of a command
        words.pop(0)
    for path in (word for word in words if re.match(r"(examples|docs|benchmarks|scripts|tests)/", word)):
        assert (PROJECT / path.partition("::")[0]).exists(), f"{path} does not exist"
    if any(" ".join(words[:number]) in TAKEN_ON_TRUST for number in (1, 2, 3)):
        return
    program = Path(words[0]).name if words[0].startswith(".venv/bin/") else words[0]
    assert program in CHECKS, f"nothing here checks `{command}`: add a check, or TAKEN_ON_TRUST with a reason"
    CHECKS[program](words)


def shown(language: str) -> list[object]:
    """Return every page's blocks of a language, as parameters."""
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


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    lines = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def wrong_links(page: Path, text: str) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading of it. Those to other sites are not checked."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if "://" not in target and not (there.exists() and (not anchor or anchor in headings(there))):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", [*PAGES, PROJECT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(PROJECT)))
def test_the_links_lead_somewhere(page: Path):
    assert wrong_links(page, page.read_text(encoding="utf-8")) == []


def test_a_wrong_link_is_noticed():
    right = ["docs/README.md", "#where-to-start", "docs/models.md#a-model-of-your-own", "https://none.example/none"]
    wrong = ["docs/none.md", "#none", "docs/training.md#none"]
    assert wrong_links(PROJECT / "README.md", " ".join(f"[x]({target})" for target in right + wrong)) == wrong


@pytest.mark.parametrize("page", LOG_PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_log_begins_with_what_failed(page: Path):
    """Then its entries come, the newest first; the index has the page."""
    failed, *entries = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert failed == "What failed"
    dates = [re.match(r"\d{4}-\d\d-\d\d(?=: )", entry) for entry in entries]
    assert all(dates), "an entry without a date"
    days = [date[0] for date in dates if date]
    assert days == sorted(days, reverse=True)
    assert f"](log/{page.name})" in LOG.read_text(encoding="utf-8")


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def long_lines(text: str) -> list[str]:
    """Return the lines of prose that are too long. Rows of tables and targets of links may be."""
    lines = (re.sub(r"\]\([^)]*\)", "]", line) for line in prose(text).splitlines() if not line.startswith("|"))
    return [line for line in lines if len(line) > LINE_LENGTH]


@pytest.mark.parametrize("page", [*PAGES, PROJECT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(PROJECT)))
def test_the_lines_are_not_too_long(page: Path):
    assert long_lines(page.read_text(encoding="utf-8")) == []


def test_a_long_line_is_noticed():
    long = "word " * 25
    assert long_lines(f"short\n{long}\n") == [long]
    assert long_lines(f"| {long} |\n```text\n{long}\n```\n[link]({long})\n") == []


def quoted(text: str) -> list[str]:
    """Return the text in backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def wrong_paths(text: str) -> list[str]:
    """Return paths in backticks that do not exist: those from the project's root, and all names of Python files."""
    wrong = []
    for word in quoted(text):
        path = word.partition("::")[0]
        if not re.fullmatch(r"[\w./-]+", path):
            continue
        if "/" in path and (path.partition("/")[0] in FOLDERS or path.endswith(".py")):
            wrong += [] if (PROJECT / path).exists() else [word]
        elif path.endswith(".py"):
            wrong += [] if any(any((PROJECT / folder).rglob(path)) for folder in FOLDERS) else [word]
    return wrong


@functools.cache
def words_of_the_code() -> frozenset[str]:
    files = [
        file
        for folder in ("embershard", "tests", "benchmarks", "examples")
        for file in (PROJECT / folder).rglob("*.py")
    ]
    files += [PROJECT / "setup.cfg", PROJECT / "Makefile"]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8")))


def unknown_names(text: str) -> list[str]:
    """Return names in backticks (`CamelCase`, `with_underscore`, `A.b`) that occur nowhere in the code."""
    known = words_of_the_code() | NAMES_OF_OTHERS
    unknown = []
    for word in quoted(text):
        name = re.fullmatch(r"([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\))?", word)
        if name is None or re.match(r"(torch|torchrec|fbgemm_gpu|SparseType)\.", word) or word.endswith(".tmp"):
            continue
        parts = [part for part in name[1].split(".") if re.search(r"_|[a-z][A-Z]|^[A-Z]", part)]
        unknown += [word] if set(parts) - known else []
    return unknown


@functools.cache
def classes_of_the_package() -> frozenset[str]:
    files = (PROJECT / "embershard").rglob("*.py")
    return frozenset(
        name for file in files for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    )


def out_of_reach(text: str) -> list[str]:
    """Return what a reader cannot import: classes in backticks that are called, which `embershard` does not export,
    and names with their module, `embershard.room.name`, that are not there."""
    import embershard

    found = []
    for word in quoted(text):
        called = re.fullmatch(r"(\w+)\(.*\)", word)
        if called and called[1] in classes_of_the_package() - set(embershard.__all__):
            found.append(word)
        dotted = re.match(r"embershard((?:\.\w+)+)", word)
        if dotted and not word.endswith(".py"):
            try:
                pkgutil.resolve_name(dotted[0])
            except (ImportError, AttributeError):
                found.append(word)
    return found


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_what_a_reader_is_to_call_can_be_imported(page: Path):
    assert out_of_reach(page.read_text(encoding="utf-8")) == []


def test_a_name_out_of_reach_is_noticed():
    assert out_of_reach("`CacheConfig(ratio=0.1)`, `RowCache`, `embershard.flush`, `embershard.cache.SlotScores`") == []
    wrong = ["RowCache(tables)", "embershard.RowCache", "embershard.cache.none.SlotScores"]
    assert out_of_reach(" ".join(f"`{name}`" for name in wrong)) == wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_the_paths_exist(page: Path):
    assert wrong_paths(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_the_names_exist(page: Path):
    assert unknown_names(page.read_text(encoding="utf-8")) == []


def test_a_wrong_path_or_name_is_noticed():
    right = "`embershard/cache/policies.py::x`, `tests/unit`, `policies.py`, `RowCache.know`, `make_scores()`"
    assert wrong_paths(right) == unknown_names(right) == []
    paths = ["cache/policies.py", "embershard/cache/forecast.py", "tests/none", "door.py"]
    assert wrong_paths(" ".join(f"`{path}`" for path in paths)) == paths
    backwards = "RowCache"[::-1]
    names = [backwards, f"RowCache.{backwards}", f"{backwards}(model)"]
    assert unknown_names(" ".join(f"`{name}`" for name in names)) == names


@pytest.mark.slow
def test_the_table_lists_every_room():
    table = ARCHITECTURE.read_text(encoding="utf-8").partition("## The rooms")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)/` ", table, re.MULTILINE))
    rooms = {path.parent.name for path in (PROJECT / "embershard").glob("*/__init__.py")}
    assert listed == rooms
    bare = [
        file for file in (PROJECT / "embershard").rglob("*.py") if not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert bare == [], "`make rooms` prints their docstrings"


def imports_of_rooms() -> set[tuple[str, str]]:
    """Return pairs of rooms of which the first imports from the second. As in setup.cfg, not for types alone."""
    found = set()
    for file in (PROJECT / "embershard").rglob("*.py"):
        room, *rest = file.relative_to(PROJECT / "embershard").parts
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        others = {module.split(".")[1] for module in modules if module.startswith("embershard.")}
        found |= {(room, other) for other in others - {room} if rest}
    return found


def reached(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return every pair that a path of arrows connects."""
    while more := {(a, d) for a, b in arrows for c, d in arrows if b == c} - arrows:
        arrows = arrows | more
    return arrows


@pytest.mark.slow
def test_the_picture_of_the_floors_is_what_the_code_imports():
    (picture,) = blocks(ARCHITECTURE.read_text(encoding="utf-8"), "mermaid")
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)$", picture, re.MULTILINE))
    assert reached(drawn) == reached(imports_of_rooms())
    assert all(reached(drawn - {arrow}) != reached(drawn) for arrow in drawn), "an arrow that a path makes superfluous"


def test_the_example_of_a_policy_does_what_the_page_says():
    """The example is a complete policy, and counts up to 15."""
    import torch

    from embershard.cache.rows.transfer import ScoresTransfer

    (block,) = (each for each in blocks(ARCHITECTURE.read_text(encoding="utf-8"), "python") if "CappedScores" in each)
    names: dict[str, Any] = {}
    exec(compile(block, str(ARCHITECTURE), "exec"), names)
    scores = names["CappedScores"](torch.zeros(30), 4, torch.device("cpu"), ScoresTransfer, None)
    scores.admit(torch.tensor([7, 9]), torch.tensor([1, 2]))
    none = torch.tensor([], dtype=torch.int64)
    for _ in range(20):
        scores.used(torch.tensor([1, 1]), torch.tensor([True, False]), none)
    scores.used(torch.tensor([2]), torch.tensor([False]), torch.tensor([2]))
    assert scores.of_slots().tolist() == [0.0, 15.0, 1.0, 0.0, 0.0]
    profiled = names["CappedScores"](torch.arange(30.0), 4, torch.device("cpu"), ScoresTransfer, None)
    profiled.admit(torch.tensor([29, 9]), torch.tensor([1, 2]))
    assert profiled.of_slots().tolist() == [0.0, 15.0, 9.0, 0.0, 0.0]


def test_every_policy_is_described():
    from typing import get_args

    from embershard.cache.config import Policy

    (row,) = [
        line
        for line in (PROJECT / "docs" / "cache.md").read_text(encoding="utf-8").splitlines()
        if "| `policy` |" in line
    ]
    assert [policy for policy in get_args(Policy) if f"`{policy}`" not in row] == []


def test_every_kind_of_data_is_described():
    from typing import get_args

    from embershard.data.config import DataKind

    page = (PROJECT / "docs" / "data.md").read_text(encoding="utf-8")
    assert [kind for kind in get_args(DataKind) if f"\n| `{kind}` |" not in page] == []


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
        "torchrun --nproc_per_node 2 -m embershard train --config examples/none.toml",
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
