"""The Dockerfile: its stages, its user, and the versions that it installs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import setup_rules as rules

Stages = dict[str, tuple[str, list[tuple[str, str]]]]


def stages_of(text: str) -> Stages:
    """Name -> what it is built from, and its instructions."""
    found: Stages = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = (base, [])
        else:
            list(found.values())[-1][1].append((instruction, rest))
    return found


@pytest.fixture(scope="module")
def stages(project_dir: Path) -> Stages:
    return stages_of((project_dir / "Dockerfile").read_text())


@pytest.mark.parametrize(("target", "fbgemm"), [("cpu", rules.CPU_FBGEMM), ("cuda", rules.CUDA_FBGEMM)])
def test_the_versions_are_those_of_the_set_up(stages: Stages, project_dir: Path, target: str, fbgemm: str) -> None:
    runs = [rest for instruction, rest in stages[target][1] if instruction == "RUN"]
    arguments = dict(rest.split("=") for instruction, rest in stages[target][1] if instruction == "ARG")
    pins = {name: arguments[value] for name, value in re.findall(r"([\w-]+)==\$(\w+)", " ".join(runs))}
    versions = rules.SETS[rules.DEFAULT_SET]
    assert pins == {"torch": versions.torch, fbgemm: versions.fbgemm, "torchrec": versions.torchrec}
    assert f"torch=={versions.torch}\n" in (project_dir / "requirements.txt").read_text()
    (compiled_for_each_other,) = [run for run in runs if "torchrec==" in run]
    assert compiled_for_each_other.startswith("pip install --no-deps ")
    (others,) = [run for run in runs if "/tmp/requirements.txt | pip install -r /dev/stdin" in run]
    assert runs.index(others) < runs.index(compiled_for_each_other)


def test_images_start_embershard_as_a_user_without_rights(stages: Stages) -> None:
    assert list(stages) == ["wheel", "base", "cpu", "cuda"]
    for target in ("cpu", "cuda"):
        assert stages[target][0] == "base"
        assert not [rest for instruction, rest in stages[target][1] if instruction == "ENTRYPOINT"]
        users = [rest for instruction, rest in stages[target][1] if instruction == "USER"]
        assert users[-1:] in ([], ["embershard"])
    base = dict(stages["base"][1])
    assert base["USER"] == "embershard"
    assert base["ENTRYPOINT"] == '["embershard"]'
    python = re.fullmatch(r"python:(\d+)\.(\d+)-slim", stages["base"][0])
    assert rules.python_problem((int(python[1]), int(python[2]))) == ""
    assert stages["wheel"][0] == stages["base"][0]


def test_the_cuda_image_can_compile_what_triton_compiles(stages: Stages) -> None:
    """Its link to the driver, in C, with the first launch (`triton/runtime/build.py`); slim images have no compiler."""
    user = dict(stages["base"][1])["USER"]
    installed: set[str] = set()
    for instruction, rest in stages["cuda"][1]:
        user = rest if instruction == "USER" else user
        if instruction == "RUN" and "apt-get install" in rest:
            assert user == "root"
            installed.update(shlex.split(rest))
        if instruction == "RUN" and "pip install" in rest:
            assert user == "embershard", "the environment is this user's"
    assert {"gcc", "libc6-dev"} <= installed


def test_what_is_copied_is_there_and_not_ignored(stages: Stages, project_dir: Path) -> None:
    ignored, *kept = (project_dir / ".dockerignore").read_text().split()
    assert ignored == "*"
    copies = [shlex.split(rest) for _, of in stages.values() for instruction, rest in of if instruction == "COPY"]
    for words in copies:
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        for source in words[:-1]:
            assert (project_dir / source).exists(), source
            assert f"!{source}" in kept
