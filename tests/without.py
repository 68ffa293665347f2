"""What can be taken out: hides the rooms of a capability, whose imports then raise, and runs the tests of the rest.

    python -m tests.without                                 # what there is
    python -m tests.without hot_cold tests/unit/data ...    # arguments of pytest; default: what `make test` runs

Left out are test files that import a hidden room, by themselves or through a file beside them, and tests with one of
the capability's words in their place or name. `tests/unit/test_without.py` imports, trains and resumes without rooms.
"""

from __future__ import annotations

import ast
import importlib.abc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Capability:
    """Something beside the core.

    Attributes:
        rooms: its modules and packages, without "embershard.".
        tests: words of which the path or the name of each of its tests has one.
        carries: capabilities that stand on this one, and go with it.
    """

    rooms: tuple[str, ...]
    tests: tuple[str, ...]
    carries: tuple[str, ...] = ()


CAPABILITIES = {
    "hot_cold": Capability(("extras.hot_cold",), ("hot",)),
    "data_parallel": Capability(
        ("extras.data_parallel",),
        ("data_parallel", "data-parallel", "mode_moves"),
    ),
    "rows_exchange": Capability(
        ("sharding.torchrec.modes.rows_exchange",), ("exchange", "rows", "auto"), carries=("data_parallel",)
    ),
    "ids": Capability(
        (
            "cache.ids.id_map",
            "commands.data.start_ids",
            "extras.verify.id_rows",
            "sharding.torchrec.ids",
            "training.parts.id_tables",
        ),
        ("ids", "id_", "_id"),
    ),
    "file": Capability(
        tuple(f"cache.file.{name}" for name in ("disk_rates", "file_part", "file_rows", "filed_rows")),
        (
            "/file/",
            "file_tier",
            "filed",
            "in_a_file",
            "in_files",
            "of_a_file",
            "host_file",
            "disk",
            "planned_files",
            "two_levels",
        ),
    ),
    "small_rows": Capability(
        (
            *(f"cache.homes.{name}" for name in ("quantised", "small_rows")),
            *(f"cache.gpu.{name}" for name in ("small_rows", "small_transfer")),
            "cache.loops.small",
            "extras.verify.rounding",
        ),
        ("small", "int8", "fp16", "rounded", "quantised", "host_dtype", "host_types"),
    ),
    "accumulation": Capability(("extras.accumulation",), ("accumul", "micro", "pieces")),
    "publications": Capability(("extras.publications",), ("publish", "publication", "replica")),
    "following": Capability(("extras.following",), ("follow", "journal", "idle", "arriv")),
    "time_order": Capability(
        ("data.order.time_windows", "training.parts.windows"), ("time", "window", "days"), carries=("following",)
    ),
    "networks": Capability(
        ("extras.networks",),
        ("task", "label", "tower", "mmoe", "ple", "bottom", "funnel", "fm", "deep", "din", "tbsm", "history"),
    ),
    "trackers": Capability(
        ("reports.tracking",), ("track", "tensorboard", "wandb", "mlflow", "prometheus"), carries=("mlperf",)
    ),
    "event_logs": Capability(("extras.event_logs",), ("events", "event_logs", "sessions", "yambda", "windows")),
    "engines": Capability(
        ("extras.sweep_engines",),
        ("ray", "slurm", "kubernetes", "cluster"),
    ),
    "serving": Capability(
        ("extras.serving",), ("export", "serv", "publish", "replica", "predict"), carries=("server",)
    ),
    "server": Capability(("extras.serving.server",), ("serve", "server")),
    "judging": Capability(
        ("extras.judging",),
        ("inspect", "judg", "kinds", "suggest", "layouts", "lists", "own_data", ".csv"),
    ),
    "mlperf": Capability(("extras.mlperf",), ("mlperf",)),
    "warm_start": Capability(("extras.warm_start",), ("warm", "load_from", "pretrained", "vectors")),
    "what_if": Capability(("extras.what_if",), ("what_if", "simulat", "picture", "target", "price", "explain")),
    "replan": Capability(("extras.replan",), ("replan",)),
    "scale_out": Capability(("extras.scale_out",), ("scale_out", "scaling", "slow_link")),
    "report_page": Capability(("extras.report_page",), ("page", "found_wherever", "html")),
    "profile_picture": Capability(("extras.profile_picture",), ("picture", "png", "optimum", "hit_rate_curve")),
    "calibrate": Capability(("extras.calibrate",), ("calibrat", "back_test")),
    "compare": Capability(("extras.compare",), ("compare", "compared")),
    "convert": Capability(("extras.convert",), ("convert", "join", "movielens")),
    "verify": Capability(("extras.verify",), ("verify", "equivalence", "stock")),
    "step_trace": Capability(("extras.step_trace",), ("trace", "stages")),
    "deal": Capability(("extras.deal",), ("dealt", "deals", "/deal", "_deal", "deal_")),
    "dense_graph": Capability(("extras.dense_graph",), ("recorded_calls", "cuda_graph", "host_thread")),
    "groups": Capability(
        ("extras.groups",),
        ("test_groups", "grouped", "in_groups", "extras.groups", "docs/groups.md", "group_quality", "[groups]"),
    ),
    "wire_types": Capability(("extras.wire_types",), ("wire_types", "int8-", "-int8", "fp8")),
    "hstu": Capability(("extras.hstu",), ("hstu", "music", "times", "events")),
    "hstu_fbgemm": Capability(("extras.hstu_fbgemm",), ("hstu_fbgemm",)),
    "length_groups": Capability(("extras.length_groups",), ("length_groups",), carries=("hstu", "networks")),
}


class _Hidden(importlib.abc.MetaPathFinder):
    def __init__(self, rooms: frozenset[str]) -> None:
        self._rooms = rooms

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if is_in(name, self._rooms):
            raise ModuleNotFoundError(f"{name} is taken out", name=name)
        return None


def is_in(module: str, rooms: Iterable[str]) -> bool:
    """Return True for a module of one of these rooms."""
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


def with_carried(names: Iterable[str]) -> frozenset[str]:
    """Return capabilities, and those that stand on them."""
    found = frozenset(names)
    return found.union(*(with_carried(CAPABILITIES[name].carries) for name in found))


def rooms_of(names: Iterable[str]) -> frozenset[str]:
    """Return the full names of the rooms of capabilities, and of those that stand on them."""
    return frozenset(f"embershard.{room}" for name in with_carried(names) for room in CAPABILITIES[name].rooms)


def hide(names: Iterable[str]) -> None:
    """Let imports of the rooms of these capabilities raise `ImportError`, in this process, from now on."""
    sys.meta_path.insert(0, _Hidden(rooms_of(names)))


def hiding_environment(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return an environment in which every Python process hides these capabilities; `folder` gets a file for it."""
    (folder / "sitecustomize.py").write_text(f"from tests.without import hide\n\nhide({list(names)!r})\n")
    path = os.pathsep.join([str(folder), str(PROJECT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports when it is imported itself; lazy names of a room as their modules."""
    names = imports_of(ast.parse(path.read_text(encoding="utf-8")).body)
    return frozenset(_lazy_names(name.rpartition(".")[0]).get(name, name) for name in names)


@cache
def _lazy_names(package: str) -> dict[str, str]:
    """Return the modules of a room's lazy names, by the names with the package in front."""
    path = PROJECT / package.replace(".", "/") / "__init__.py"
    if not package or not path.exists():
        return {}
    for_type_checkers = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [each for node in for_type_checkers for each in node.body if isinstance(each, ast.ImportFrom)]
    return {f"{package}.{name.name}": str(node.module) for node in imports for name in node.names}


def imports_of(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the modules that these statements import when they run; not those for type checkers, or in functions. A
    name that is imported from a package may be a module, and counts as one."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_of(node.orelse)
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            yield from imports_of([*node.body, *getattr(node, "orelse", ())])


def needs(path: Path, rooms: frozenset[str], seen: frozenset[Path] = frozenset()) -> bool:
    """Return True for a test file that cannot be imported without these rooms."""
    if path in seen:
        return False
    files = (
        PROJECT / (name.replace(".", "/") + ".py")
        for name in _imports(path)
        if name.startswith(("tests.", "benchmarks."))
    )
    return any(is_in(name, rooms) for name in _imports(path)) or any(
        needs(file, rooms, seen | {path}) for file in files if file.exists()
    )


_VARIABLE = "EMBERSHARD_TESTS_WITHOUT"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave files out, where this module is a plugin of pytest."""
    rooms = rooms_of(os.environ[_VARIABLE].split(","))
    return True if collection_path.suffix == ".py" and needs(collection_path, rooms) else None


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave tests out by their words."""
    words = [word for name in with_carried(os.environ[_VARIABLE].split(",")) for word in CAPABILITIES[name].tests]
    left_out = [item for item in items if any(word in item.nodeid.lower() for word in words)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def main(arguments: Sequence[str]) -> int:
    """Run the tests of the rest; return pytest's exit code."""
    if not arguments or arguments[0] not in CAPABILITIES:
        print(__doc__, *(f"{name}: {', '.join(each.rooms)}" for name, each in CAPABILITIES.items()), sep="\n")
        return 2
    name, given = arguments[0], arguments[1:]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**hiding_environment(Path(folder), [name]), _VARIABLE: name}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.without",
            *(given or ["-m", "not matrix and (not extra or smoke)"]),
        ]
        return subprocess.run(command, cwd=PROJECT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
