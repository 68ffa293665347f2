"""What a stranger sees of the project first: metadata of the package, its citation, forms for reports."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import embershard
from tests.unit.tooling.test_requirements import PYTHONS


@pytest.fixture
def metadata(project_dir: Path) -> configparser.SectionProxy:
    config = configparser.ConfigParser()
    config.read(project_dir / "setup.cfg")
    return config["metadata"]


@pytest.fixture
def citation(project_dir: Path) -> dict[str, Any]:
    return yaml.safe_load((project_dir / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_classifiers_are_true(metadata: configparser.SectionProxy, project_dir: Path):
    classifiers = metadata["classifiers"].strip().splitlines()
    prefix = "Programming Language :: Python :: 3."
    assert [f"3.{line.removeprefix(prefix)}" for line in classifiers if line.startswith(prefix)] == [*PYTHONS]
    assert "Typing :: Typed" in classifiers
    assert (project_dir / "embershard" / "py.typed").is_file()
    assert "embershard = py.typed\n" in (project_dir / "setup.cfg").read_text(encoding="utf-8")


def test_the_citation_has_what_the_format_requires(citation: dict[str, Any]):
    """Citation File Format 1.2.0. All values are texts, or lists: a version such as 0.1 would be a number."""
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert all(
        {"name"} == set(author) or {"given-names", "family-names"} <= set(author) for author in citation["authors"]
    )
    texts = [value for key, value in citation.items() if key not in ("authors", "keywords")]
    assert all(isinstance(text, str) for text in [*texts, *citation["keywords"]])


def test_the_citation_and_the_metadata_say_the_same(citation: dict[str, Any], metadata: configparser.SectionProxy):
    assert citation["title"] == metadata["name"] == "embershard"
    assert citation["version"] == metadata["version"] == embershard.__version__
    assert citation["license"] == metadata["license"]
    assert citation["abstract"] == metadata["description"]
    assert [author["name"] for author in citation["authors"]] == [metadata["author"]]
    assert citation["keywords"] == metadata["keywords"].strip().splitlines()
    urls = dict(line.split(" = ") for line in metadata.get("project_urls", "").strip().splitlines())
    assert citation.get("repository-code") == urls.get("Source")


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_the_forms_of_issues_are_forms_to_github(name: str, project_dir: Path):
    """What GitHub's syntax of forms requires; it shows no form that breaks it."""
    form = yaml.safe_load((project_dir / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids)) > 0
    for field in form["body"]:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert field["type"] in ("markdown", "textarea", "checkboxes")
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]


def test_a_report_of_a_bug_has_what_the_doctor_says(project_dir: Path):
    text = (project_dir / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text(encoding="utf-8")
    required = {field.get("id"): field.get("validations") for field in yaml.safe_load(text)["body"]}
    assert required["doctor"] == {"required": True}
    assert "`embershard doctor`" in text


def test_the_forms_name_files_that_exist(project_dir: Path):
    files = [path for path in (project_dir / ".github").rglob("*") if path.is_file()]
    assert len(files) == 4
    for file in files:
        named = re.findall(r"[\w/.]*\w\.(?:md|toml)\b", file.read_text(encoding="utf-8"))
        of_the_project = [name for name in named if name != "config.toml"]
        assert [name for name in of_the_project if not (project_dir / name).is_file()] == [], file
