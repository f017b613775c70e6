"""The wheel: it builds, holds the package and nothing else, and starts outside of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from checkout import REPOSITORY

PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


def python(*arguments: str, folder: Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess:
    process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )
    assert not check or process.returncode == 0, process.stdout + process.stderr
    return process


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the repository, for setuptools leaves files beside what it builds from."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in ("src", "benchmarks", "tests"):
        shutil.copytree(REPOSITORY / part, folder / "source" / part, ignore=ignored)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(REPOSITORY / part, folder / "source" / part)
    python(*PIP, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(folder), folder=folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds the installed wheel; what it depends on is this interpreter's."""
    target = wheel.parent / "installed"
    python(*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), folder=wheel.parent)
    return target


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"lockstep"}, "no benchmarks, no tests"
    expected = {
        path.relative_to(REPOSITORY / "src").as_posix()
        for path in (REPOSITORY / "src" / "lockstep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected == {name for name in names if name.startswith("lockstep/")}
    assert "lockstep/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_installed_wheel_starts_outside_of_the_repository(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        return python(*arguments, folder=tmp_path, PYTHONPATH=str(installed)).stdout

    assert Path(run("-c", "import lockstep; print(lockstep.__file__)").strip()).is_relative_to(installed)
    assert "generate" in run("-m", "lockstep", "--help")
    assert "lockstep 0." in run("-m", "lockstep", "--version")


def test_a_stage_of_an_installed_wheel_says_that_it_needs_a_checkout(installed: Path, tmp_path: Path) -> None:
    """The pins of envs/requirements.txt are part of every record."""
    config = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
    config["models"]["demo-llama"]["source"] = str(REPOSITORY / "resources" / "demo-llama")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    process = python(
        *("-m", "lockstep", "resolve", "demo-llama", "--config", "my.yaml"),
        folder=tmp_path, check=False, PYTHONPATH=str(installed),
    )  # fmt: skip
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert "envs/requirements.txt: expected the pinned packages, found no file" in line and "checkout" in line
