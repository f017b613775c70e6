"""The wheel: it builds, holds the package and nothing else, and starts outside of the repository."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
import yaml
from checkout import REPOSITORY, Checkout

import without_extras
from lockstep import __version__
from lockstep.cli.extras import EXTRAS
from lockstep.cli.main import main
from lockstep.provenance.code_identity import read_pins
from some import some

PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


def python(*arguments: str, folder: Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess:
    process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )
    assert not check or process.returncode == 0, process.stdout + process.stderr
    return process


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the repository, because setuptools leaves files in the folder it builds from."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in ("src", "benchmarks", "tests", "config", "envs", "profiles", "resources", "workflow"):
        shutil.copytree(REPOSITORY / part, folder / "source" / part, ignore=ignored)
    for part in ("pyproject.toml", "README.md", "LICENSE", "Snakefile"):
        shutil.copy2(REPOSITORY / part, folder / "source" / part)
    python(*PIP, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(folder), folder=folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(wheel: Path) -> Path:
    """The sdist of the same copy."""
    code = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    python("-c", code, folder=wheel.parent / "source")
    (built,) = wheel.parent.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds the installed wheel; its dependencies are this interpreter's."""
    target = wheel.parent / "installed"
    python(*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), folder=wheel.parent)
    return target


def test_the_wheel_holds_the_package_the_workflow_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {"lockstep", "lockstep_gpu", "lockstep_serve", "snakemake_logger_plugin_lockstep"}
    folders = {name.split("/")[0].partition("-")[0] for name in names}
    assert folders == {*packages, "lockstep_engines"}, "no benchmarks, no tests"
    sources = REPOSITORY / "src"
    paths = itertools.chain(*((sources / package).rglob("*") for package in packages))
    expected = {path for path in paths if path.is_file() and "__pycache__" not in path.parts}
    expected = {path.relative_to(sources).as_posix() for path in expected}
    assert expected == {name for name in names if name.split("/")[0] in packages}
    data = f"lockstep_engines-{__version__}.data/data/share/lockstep/"
    workflow = {name.removeprefix(data) for name in names if name.startswith(data)}
    needed = {
        "Snakefile", "workflow/Snakefile", "config/config.yaml", "envs/requirements.txt",
        "profiles/default/config.yaml",
    }  # fmt: skip
    needed |= {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "workflow" / "rules").iterdir()}
    needed |= {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "workflow" / "scripts").glob("*.py")}
    assert needed <= workflow and not any(name.startswith(("tests", "docs", "src")) for name in workflow)
    assert "lockstep/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_installed_wheel_starts_outside_of_the_repository(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        return python(*arguments, folder=tmp_path, PYTHONPATH=str(installed)).stdout

    assert Path(run("-c", "import lockstep; print(lockstep.__file__)").strip()).is_relative_to(installed)
    assert "generate" in run("-m", "lockstep", "--help")
    assert "lockstep 0." in run("-m", "lockstep", "--version")


@pytest.mark.long
def test_a_stage_of_an_installed_wheel_knows_its_pins(installed: Path, tmp_path: Path) -> None:
    """The pins of envs/requirements.txt are part of every statement."""
    config = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
    config["models"]["demo-llama"]["source"] = str(REPOSITORY / "resources" / "demo-llama")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    process = python(
        *("-m", "stage_job", "resolve", "demo-llama/fp32", "my.yaml", "results"),
        folder=tmp_path, check=False, PYTHONPATH=f"{installed}:{REPOSITORY}/tests",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "results" / "demo-llama" / "checkpoint.statement.json").is_file()


def interpreter(version: str) -> str | None:
    """A Python of this version that starts: pyenv's names for those that are switched off do not."""
    names = shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for name in filter(None, names):
        if subprocess.run([name, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
            return str(name)
    return None


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_each_python_installs_wheel_and_sdist_and_runs_engines_without_torch(
    version: str, wheel: Path, sdist: Path, finished: Checkout, tmp_path: Path
) -> None:
    """The engine side alone; its dependencies come from the index."""
    program = interpreter(version)
    if program is None:
        pytest.skip(f"needs Python {version}")
    for name, options in (("wheel", [wheel]), ("sdist", ["--no-deps", sdist])):
        subprocess.run([program, "-m", "venv", tmp_path / name], check=True)
        subprocess.run([tmp_path / name / "bin" / "python", *PIP, "install", *options], check=True)
        code = "import importlib.metadata as m; print(m.version('lockstep-engines'))"
        done = subprocess.run(
            [tmp_path / name / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == __version__
        assert next((tmp_path / name).glob("share/lockstep/Snakefile")).is_file()
    programs = tmp_path / "wheel" / "bin"
    code = (
        "import sys, lockstep; lockstep.Model, lockstep.Engine; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([programs / "python", "-c", code], check=True)
    finished.call("lockstep", "bundle", TARGET, "--weights", "--out", str(tmp_path / "demo.tar"))
    if version != "3.10":  # the engines' libraries do not exist for it
        pin = f"onnxruntime=={read_pins()['onnxruntime']}"
        subprocess.run([programs / "python", *PIP, "install", pin], check=True)
    command = [programs / "lockstep", "generate", "demo.tar", "--prompt", "San Francisco is a", "--max-new-tokens", "8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if version != "3.10":
        assert done.stdout.startswith(" hilly city"), done.stderr
    else:
        line = "lockstep: error: demo.tar: engines/engines.json: onnxruntime version: made for "
        assert done.returncode == 1 and done.stderr.startswith(line) and done.stderr.count("\n") == 1


TARGET = "demo-llama/fp32/all"
# What each command needs besides pyproject's `dependencies`, and arguments with which it needs it.
NEEDS = {
    "init": ("workflow", ("random:config.json",)), "run": ("workflow", ()),
    "doctor": ("workflow", ()), "summary": ("workflow", ()), "report": ("workflow", ()), "targets": ("workflow", ()),
    "bisect": ("workflow", (TARGET,)),
    "generate": ("workflow", (TARGET, "--prompt", "A")), "explain": ("workflow", (TARGET,)),
    "bundle": ("workflow", (TARGET,)), "reproduce": ("workflow", (TARGET,)), "serve": ("workflow", (TARGET,)),
    "push": (None, ("none.tar", "127.0.0.1:9/none")), "pull": (None, ("127.0.0.1:9/none", "none.tar")),
    "sbom": ("workflow", (TARGET,)), "triton": ("serve", (TARGET, "repository")),
    "lock": ("workflow", ()), "verify": (None, ()),
}  # fmt: skip


def test_each_extra_of_pyproject_is_in_the_table() -> None:
    """By the names that its packages are imported under, where they are others."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    imported = {"pyyaml": "yaml", "grpcio": "grpc", "protobuf": "google.protobuf", "pyopenssl": "OpenSSL"}
    imported["cyclonedx-python-lib"] = "cyclonedx"
    imported |= {"cuda-bindings": "cuda.bindings", "nvidia-cudnn-frontend": "cudnn", "nvmath-python": "nvmath"}
    imported |= {"tensorrt-cu12": "tensorrt"}
    imported |= dict.fromkeys(("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"), "opentelemetry")
    extras: dict[str, set[str]] = {}
    for extra, requirements in project["optional-dependencies"].items():
        names = {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements}
        names = {name for name in names if name in imported or not name.startswith("nvidia-")}  # libraries alone
        if extra != "test":
            extras[extra] = {imported.get(name, name.replace("-", "_")) for name in names if name != "lockstep-engines"}
    assert set(EXTRAS) == set().union(*extras.values())
    assert not [module for module, extra in EXTRAS.items() if module not in extras[extra]]
    assert not set(EXTRAS) & {requirement.partition(">")[0] for requirement in project["dependencies"]}


@pytest.mark.parametrize("command", some(main.commands, "generate", "run", "serve"))
def test_a_command_names_the_extra_that_it_needs(command: str, installed: Path, tmp_path: Path) -> None:
    """With pyproject's `dependencies` alone. What needs no more says what else is missing."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "config.json").write_text('{"models": {"demo-llama": {}}}')
    extra, arguments = NEEDS[command]
    process = python(
        *(without_extras.__file__, command, *arguments), folder=tmp_path, check=False, PYTHONPATH=str(installed)
    )
    (line,) = process.stderr.splitlines()
    assert process.returncode == (1 if command == "verify" else 2)
    assert "Traceback" not in process.stdout + process.stderr
    assert line.startswith("lockstep: error: ")
    if extra is None:
        assert "Python package" not in line
    else:
        assert line.startswith(f"lockstep: error: {command}: needs the Python package '")
        assert line.endswith(f'which is not installed here; pip install ".[{extra}]" in a clone of this project')


def test_the_program_explains_itself_without_any_extra(installed: Path, tmp_path: Path) -> None:
    """What a bundle generates without them is in tests/unit/bundle/test_bundle.py."""
    for arguments, text in (
        (("--help",), "generate"),
        (("--version",), "lockstep 0."),
        (("serve", "-h"), "--grpc-port"),
    ):
        process = python(without_extras.__file__, *arguments, folder=tmp_path, PYTHONPATH=str(installed))
        assert text in process.stdout
