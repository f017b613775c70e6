"""Imports run one way, and heavy or foreign packages stay where they belong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import buildkey

PACKAGE = Path(buildkey.__file__).parent
# From the bottom to the top: a module imports from its own row and the rows above it in this list.
ROWS = (
    ("__init__",),
    ("errors", "children", "files", "formats", "seen"),
    ("paths", "boundaries", "checks", "comparator", "sessions", "widened", "sidefiles", "modelconfig", "sources", "fetched", "documents", "configerrors", "configtypes", "config", "configdoc"),
    ("checkpoint",),
    ("hub",),
    ("schema", "manifests"),
    ("weights",),
    ("quiet",),
    ("split",),
    ("torch_model", "random_model"),
    ("validate",),
    ("engine",),
    ("runtime",),
    ("bisect",),
    ("compare",),
    ("golden",),
    ("summary", "plots", "show", "buildkey", "bench", "worker"),
    ("lock", "cache"),
    ("bundle",),
    ("cli", "__main__"),
)
# What traces, what is compared with, and what times it. Nothing else may need torch to be installed.
TORCH = ("split/", "validate/", "golden/reference.py", "torch_model.py", "random_model.py", "quiet.py", "bench/", "bisect/run.py", "bisect/streamed.py", "bisect/export_again.py")
# What runs where only an engine's runtime is installed.
RUNS_ALONE = ("errors", "files", "formats", "seen", "schema", "manifests", "weights", "engine", "runtime", "bisect.explain", "bundle.opened")
MODULES = sorted(PACKAGE.rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def row(path: Path) -> int:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return next(number for number, names in enumerate(ROWS) if first in names)


def outside(path: Path) -> set[str]:
    """Top-level packages that a module imports, wherever in it."""
    return {module.partition(".")[0] for module in buildkey._read(path).imports}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_run_one_way(path: Path) -> None:
    imported = {file for module in buildkey._read(path).imports if (file := buildkey._file_of(module))}
    above = {name(file) for file in imported if row(file) > row(path)}
    assert not above, f"{name(path)} is below them"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_torch_and_transformers_stay_where_they_belong(path: Path) -> None:
    if not name(path).startswith(TORCH):
        assert not outside(path) & {"torch", "transformers"}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_the_package_knows_no_snakemake(path: Path) -> None:
    assert "snakemake" not in outside(path)


def loaded_by(code: str) -> set[str]:
    """Top-level packages that a new process has loaded after `code`."""
    script = f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split())


def test_what_runs_engines_loads_no_torch() -> None:
    loaded = loaded_by("import " + ", ".join(f"lockstep.{module}" for module in (*RUNS_ALONE, "golden.check", "worker")))
    assert not loaded & {"torch", "transformers", "pydantic", "yaml", "snakemake", "matplotlib"}


def test_the_program_explains_itself_without_loading_what_it_runs() -> None:
    loaded = loaded_by("import lockstep.cli")
    assert not loaded & {"torch", "transformers", "numpy", "onnx", "onnxruntime", "pydantic", "rich"}


def test_what_a_workflow_loads_when_it_starts_is_light() -> None:
    loaded = loaded_by("import lockstep.config, lockstep.buildkey, lockstep.sidefiles, lockstep.checkpoint.resolve")
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime", "matplotlib", "scipy"}
