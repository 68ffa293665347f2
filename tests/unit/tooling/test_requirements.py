"""One set of versions, wherever it is written."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
import setup_rules as rules
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def parse(lines: str, python: str) -> dict[str, Requirement]:
    """Requirements that hold for this Python: name -> requirement. A name twice is an error."""
    found: dict[str, Requirement] = {}
    for line in lines.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement = Requirement(line.partition(" #")[0])
        environment = {"python_version": python, "python_full_version": f"{python}.1"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = requirement
    return found


@pytest.fixture(scope="module")
def metadata(project_dir: Path) -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(project_dir / "setup.cfg")
    return config


@pytest.fixture(scope="module", params=PYTHONS)
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pins(project_dir: Path, python: str) -> dict[str, Requirement]:
    text = "\n".join((project_dir / name).read_text() for name in ("requirements.txt", "requirements-dev.txt"))
    return parse(text, python)


def version(requirement: Requirement) -> Version:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{requirement} is not pinned"
    return Version(specifier.version)


def test_every_requirement_is_pinned(pins: dict[str, Requirement]):
    for requirement in pins.values():
        version(requirement)


@pytest.mark.parametrize("section", ["install_requires", "dev"])
def test_the_pins_satisfy_the_metadata(pins, metadata, python, section):
    where = "options" if section == "install_requires" else "options.extras_require"
    for name, requirement in parse(metadata[where][section], python).items():
        assert requirement.specifier.contains(version(pins[name])), f"{requirement} and {pins[name]}"


def test_the_pins_of_the_documentation_satisfy_the_metadata(project_dir: Path, metadata, python):
    pins = parse((project_dir / "requirements-docs.txt").read_text(), python)
    assert all(version(requirement) for requirement in pins.values())
    for name, requirement in parse(metadata["options.extras_require"]["docs"], python).items():
        assert requirement.specifier.contains(version(pins[name])), f"{requirement} and {pins[name]}"


def test_torchrec_and_fbgemm_are_left_to_the_set_up(pins: dict[str, Requirement], metadata: configparser.ConfigParser):
    """pip, given torchrec in a list, would pull in the newest CUDA build of FBGEMM."""
    required = parse(metadata["options"]["install_requires"], "3.12")
    for name in ("torchrec", rules.CUDA_FBGEMM, rules.CPU_FBGEMM):
        assert name not in pins
        assert name not in required


@pytest.mark.parametrize("name", [name for name, versions in rules.SETS.items() if versions.is_a_pairing])
def test_every_released_set_has_its_extras(metadata: configparser.ConfigParser, name: str):
    versions = rules.SETS[name]
    suffix = "" if name == rules.DEFAULT_SET else f"-{name.replace('.', '-')}"
    cuda, cpu = (parse(metadata["options.extras_require"][kind + suffix], "3.12") for kind in ("cuda", "cpu"))
    want = {"torch": versions.torch, rules.CPU_FBGEMM: versions.fbgemm}
    assert {each: str(version(requirement)) for each, requirement in cpu.items()} == want
    want = {"torch": versions.torch, rules.CUDA_FBGEMM: versions.fbgemm, "torchrec": versions.torchrec}
    assert {each: str(version(requirement)) for each, requirement in cuda.items()} == want


def test_every_set_is_within_the_metadata(metadata: configparser.ConfigParser):
    required = parse(metadata["options"]["install_requires"], "3.12")["torch"].specifier
    assert all(required.contains(versions.torch) for versions in rules.SETS.values())


def test_the_docs_say_which_versions_were_tested(project_dir: Path):
    page = (project_dir / "docs" / "installation.md").read_text()
    for name, of in rules.SETS.items():
        title = f"`{name}`{' (default)' if name == rules.DEFAULT_SET else ''}"
        assert f"| {title} | {of.torch} | {of.torchrec} | {of.fbgemm} | {of.tested} |\n" in page
    for name, of in rules.SETS.items():
        if of.is_a_pairing:
            readme = " ".join((project_dir / "README.md").read_text().split())
            assert str(of) in readme
            arguments = (
                f"--build-arg TORCH={of.torch} --build-arg TORCHREC={of.torchrec} --build-arg FBGEMM={of.fbgemm}"
            )
            assert name == rules.DEFAULT_SET or arguments in page


def test_continuous_integration_tests_torchrec_1_9_on_the_default_torch(project_dir: Path):
    mixed, default = rules.SETS["torchrec-1.9-on-torch-2.13"], rules.SETS[rules.DEFAULT_SET]
    assert (mixed.torch, mixed.fbgemm) == (default.torch, default.fbgemm)
    assert f"torchrec-{mixed.torchrec}\n" in (project_dir / "Makefile").read_text()
    assert "test-torchrec-1.9" in (project_dir / ".ci" / "run").read_text()


def test_the_cpu_extra_does_not_name_torchrec(metadata: configparser.ConfigParser):
    """It would bring fbgemm-gpu over fbgemm-gpu-cpu."""
    assert "torchrec" not in parse(metadata["options.extras_require"]["cpu"], "3.12")
