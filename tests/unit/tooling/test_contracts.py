"""Rules of the house: imports, lengths, names, folders. import-linter has the floors (setup.cfg)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx
import pytest

# What differs between TorchRec releases, and what we subclass of it, stays in one folder.
PRIVATE = re.compile(
    r"torchrec\.distributed\.(sharding(\..*)?|batched_embedding_kernel|embedding_kernel|embedding_lookup"
    r"|embedding_sharding|grouped_position_weighted|composable\..*|key_value_embedding.*)"
)
PLUG = Path("embershard", "sharding", "torchrec")
#: Extras that plug in there: modes, what holds lookups, what averages tables, what exchanges rows.
_NAMES = ("accumulation.py", "data_parallel", "groups", "hot_cold", "wire_types")
PLUGGED = tuple(Path("embershard", "extras", name) for name in _NAMES)


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Return line and dotted name of every import; `from a import b` counts as both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def breaches(source_of: dict[Path, str]) -> list[str]:
    """Return imports of TorchRec's private modules, or of FBGEMM, outside the folders that plug into them."""
    return [
        f"{path}:{line} imports {name}"
        for path, source in source_of.items()
        if not {PLUG, *PLUGGED}.intersection((path, *path.parents))
        for line, name in imported(source)
        if PRIVATE.fullmatch(name) or name.partition(".")[0] == "fbgemm_gpu"
    ]


@pytest.fixture
def sources(project_dir: Path) -> dict[Path, str]:
    files = (project_dir / "embershard").rglob("*.py")
    return {file.relative_to(project_dir): file.read_text(encoding="utf-8") for file in files}


@pytest.mark.slow
def test_torchrec_s_private_modules_are_used_where_modes_plug_in(sources: dict[Path, str]):
    assert breaches(sources) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torchrec.distributed.batched_embedding_kernel",
        "from torchrec.distributed import embedding_lookup",
        "from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding",
        "from fbgemm_gpu.split_embedding_configs import EmbOptimType",
    ],
)
def test_a_breach_is_seen(line: str):
    assert breaches({Path("embershard/cache/slot_map.py"): line})
    assert breaches({Path("embershard/extras/compare/command.py"): line})
    assert not breaches(dict.fromkeys((PLUG / "kernel.py", PLUGGED[0], PLUGGED[1] / "mode.py"), line))


def test_public_torchrec_is_free_to_use():
    public = "from torchrec.distributed.model_parallel import DistributedModelParallel\nimport torchrec"
    assert not breaches({Path("embershard/training/trainer.py"): public})


MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 50


def too_long(path: Path, source: str) -> Iterator[str]:
    """Say what has too many lines: the file, and functions with their signatures and docstrings."""
    if (size := len(source.splitlines())) > MOST_LINES:
        yield f"{path} has {size} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if (size := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION:
                yield f"{path}: {node.name} has {size} lines"


@pytest.mark.slow
def test_files_and_functions_stay_short(sources: dict[Path, str]):
    assert [line for path, source in sources.items() for line in too_long(path, source)] == []


@pytest.mark.parametrize(
    ("longest", "problem"),
    [
        ("x = 1\n" * MOST_LINES, f"a.py has {MOST_LINES + 1} lines"),
        ("def f():\n" + "    pass\n" * (MOST_LINES_OF_A_FUNCTION - 1), "a.py: f has 51 lines"),
        ("class A:\n    def f(self):\n" + "        pass\n" * (MOST_LINES_OF_A_FUNCTION - 1), "a.py: f has 51 lines"),
    ],
)
def test_a_line_too_many_is_noticed(longest: str, problem: str):
    last = longest.splitlines(keepends=True)[-1]
    assert list(too_long(Path("a.py"), longest)) == []
    assert list(too_long(Path("a.py"), longest + last)) == [problem]


MOST_FILES = 15


@pytest.mark.slow
def test_no_folder_is_a_drawer(project_dir: Path):
    """More files than that are rooms of their own."""
    for folder in [path.parent for path in (project_dir / "embershard").rglob("__init__.py")]:
        files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, f"{folder.relative_to(project_dir)} has {len(files)} files: {sorted(files)}"


def repeated_classes(source_of: dict[Path, str]) -> dict[str, list[str]]:
    """Return the names of classes that several modules define, with these modules."""
    found = defaultdict(list)
    for path, source in source_of.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path))
    return {name: places for name, places in found.items() if len(places) > 1}


@pytest.mark.slow
def test_a_class_name_means_one_thing(sources: dict[Path, str]):
    assert repeated_classes(sources) == {}
    assert repeated_classes({Path("a.py"): "class A: pass", Path("b.py"): "class A: pass"}) == {"A": ["a.py", "b.py"]}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that import each other, directly or not."""
    graph = networkx.DiGraph((module, other) for module, others in imports.items() for other in others)
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


@pytest.mark.slow
def test_no_modules_import_each_other_not_for_their_types_either():
    graph = grimp.build_graph("embershard", exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert circles(imports) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
