"""What continuous integration needs beside Python: a browser, and the end of the tests that names what did not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_FOUND = "#!/bin/sh\nexit 0\n"
_FAILS = "#!/bin/sh\necho E: no network >&2\nexit 100\n"
_INSTALLS = '#!/bin/sh\necho "$@" >> {log}\n'


def get_browser(project: Path, folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script where only these programs are found, and what it needs of the system."""
    programs |= {"id": "#!/bin/sh\necho 0\n", "timeout": '#!/bin/sh\nshift\nexec "$@"\n'}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in ("bash", "env", "sh"):
        (folder / name).symlink_to(f"/bin/{name}" if name != "env" else "/usr/bin/env")
    command = [project / "scripts" / "get_browser.sh"]
    return subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True)


def test_a_browser_that_is_there_is_left_as_it_is(project_dir: Path, tmp_path: Path):
    done = get_browser(project_dir, tmp_path, chromium=_FOUND, **{"apt-get": _FAILS})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_browser_comes_from_the_systems_packages(project_dir: Path, tmp_path: Path):
    log = tmp_path / "log"
    done = get_browser(project_dir, tmp_path, **{"apt-get": _INSTALLS.format(log=log)})
    assert done.returncode == 0, done.stderr
    first, second = log.read_text().splitlines()
    assert first.endswith(" update")
    assert second.endswith(" install -y chromium")


@pytest.mark.parametrize("programs", [{"apt-get": _FAILS}, {}], ids=["no network", "no apt"])
def test_without_packages_it_says_what_to_do(project_dir: Path, tmp_path: Path, programs: dict[str, str]):
    done = get_browser(project_dir, tmp_path, **programs)
    assert done.returncode == 1
    assert "Install it as your system does" in done.stderr


def test_continuous_integration_goes_on_without_a_browser(project_dir: Path):
    lines = (project_dir / ".ci" / "run").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("make browser")]
    assert " || echo " in line
    assert lines.index(line) < lines.index("make test </dev/null")


@pytest.mark.matrix
def test_the_end_of_the_tests_names_what_was_skipped_and_why(project_dir: Path, tmp_path: Path):
    test = (
        "import pytest\n\n\n@pytest.mark.skip(reason='there is no browser; make browser')\ndef test_{}():\n    pass\n"
    )
    (tmp_path / "test_page.py").write_text(test.format("drawn") + "\n\n" + test.format("dark").partition("\n\n\n")[2])
    (tmp_path / "test_other.py").write_text(
        "import pytest\n\npytest.importorskip('no_such_module', reason='no plots')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-n", "2", "."]
    environment = os.environ | {"PYTHONPATH": str(project_dir), "PYTEST_ADDOPTS": ""}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert "2 skipped in test_page.py: there is no browser; make browser" in told
    assert "1 skipped in test_other.py: no plots" in told
