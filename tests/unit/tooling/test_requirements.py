"""One set of versions, wherever it is written."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
import setup_rules as rules
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHONS = ("3.10", "3.11", "3.12")


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
def test_the_pins_satisfy_the_metadata(
    pins: dict[str, Requirement], metadata: configparser.ConfigParser, python: str, section: str
):
    where = "options" if section == "install_requires" else "options.extras_require"
    for name, requirement in parse(metadata[where][section], python).items():
        assert requirement.specifier.contains(version(pins[name])), f"{requirement} and {pins[name]}"


def test_torchrec_and_fbgemm_are_left_to_the_set_up(pins: dict[str, Requirement], metadata: configparser.ConfigParser):
    """pip, given torchrec in a list, would pull in the newest CUDA build of FBGEMM."""
    required = parse(metadata["options"]["install_requires"], "3.12")
    for name in rules.PINS:
        assert name not in pins
        assert name not in required


@pytest.mark.parametrize("extra", ["cuda", "cpu"])
def test_the_extras_are_the_set_up_s_versions(
    metadata: configparser.ConfigParser, pins: dict[str, Requirement], extra: str
):
    for name, requirement in parse(metadata["options.extras_require"][extra], "3.12").items():
        want = rules.PINS.get(name) or str(version(pins[name]))
        assert str(version(requirement)) == want


def test_the_cpu_extra_does_not_name_torchrec(metadata: configparser.ConfigParser):
    """It would bring fbgemm-gpu over fbgemm-gpu-cpu."""
    assert "torchrec" not in parse(metadata["options.extras_require"]["cpu"], "3.12")
