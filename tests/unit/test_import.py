"""What importing embershard costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import matrix

#: The process that starts the ranks: it checks the settings, and lives as long as they do.
START = "embershard.commands.train.command"
HEAVY = {"matplotlib", "tensorboard", "pyarrow", "torchrec", "fbgemm_gpu", "rich", "tyro"}
CODE = "{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}}, sep='\\n')"


def modules_after(statement: str, folder: Path) -> set[str]:
    """Top-level modules that are loaded in a fresh process after a statement."""
    command = [sys.executable, "-W", "ignore", "-c", CODE.format(statement=statement)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.slow
def test_the_imports_are_light(project_dir: Path):
    modules = ("embershard", "embershard.cache", "embershard.commands.doctor.command", START)
    assert modules_after(f"import {', '.join(modules)}", project_dir) & HEAVY == set()


@pytest.mark.slow
def test_the_command_line_answers_ctrl_c_at_once(project_dir: Path):
    """It handles Ctrl-C from there on, while a command loads its libraries."""
    assert modules_after("import embershard.commands.cli", project_dir) & {*HEAVY, "torch", "numpy", "numba"} == set()


@pytest.mark.matrix
@pytest.mark.parametrize("module", ["embershard.training.trained_run", matrix("embershard.sharding.torchrec")])
def test_compiled_loops_wait_until_one_is_used(module: str, project_dir: Path):
    """Scoring on a CPU without a cache uses none of them."""
    assert modules_after(f"import {module}", project_dir) & {"torchrec", "numba"} == {"torchrec"}


@pytest.mark.matrix
@pytest.mark.slow
def test_a_rank_imports_no_metrics_before_its_first_step(project_dir: Path):
    assert modules_after("import embershard.commands.train.run", project_dir) & {"torchmetrics", "matplotlib"} == set()


@pytest.mark.slow
@pytest.mark.matrix
def test_the_probe_sees_a_heavy_import(project_dir: Path):
    assert "pyarrow" in modules_after("import embershard, pyarrow", project_dir)


def test_every_public_name_exists():
    import embershard

    assert [name for name in embershard.__all__ if not hasattr(embershard, name)] == []


def test_the_version_is_the_metadata_s(project_dir: Path):
    import embershard

    assert f"version = {embershard.__version__}\n" in (project_dir / "setup.cfg").read_text()
