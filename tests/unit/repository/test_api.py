"""The public API: what `import lockstep` offers, and that the documents use nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import INSIDE

import lockstep
from lockstep.targets import Results

ROOT = Path(__file__).parents[3]
BELOW = re.compile(r"from lockstep[._]([\w.]+) import|import lockstep[._]([\w.]+)")
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_each_name_is_there_and_says_what_it_is() -> None:
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__doc__, name
    assert set(lockstep.__all__) <= set(dir(lockstep))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lockstep.nothing  # noqa: B018


def test_importing_it_loads_no_other_package() -> None:
    code = "import lockstep, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"numpy", "onnx", "onnxruntime", "torch", "pydantic", "click"} & set(loaded)


@pytest.mark.long
@pytest.mark.exports
def test_a_module_of_a_names_name_does_not_hide_it() -> None:
    """Whoever imports the module first puts it into its package, where the name is looked up."""
    code = """
import importlib, importlib.util, lockstep
for name, (module, attribute) in lockstep._API.items():
    package = importlib.import_module(f"lockstep.{module}")
    if hasattr(package, "__path__") and importlib.util.find_spec(f"lockstep.{module}.{attribute}"):
        importlib.import_module(f"lockstep.{module}.{attribute}")
    assert callable(getattr(lockstep, name)), name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documents_import_nothing_below_it() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for code in PYTHON.findall(page.read_text()):
            assert not BELOW.search(code), page.name


def test_benchmarks_import_below_it_only_what_they_list() -> None:
    """Also in code that they hand to other processes as text."""
    used = set()
    folder = ROOT / "benchmarks"
    for path in sorted(folder.rglob("*.py")):
        for first, other in BELOW.findall(path.read_text()):
            used.add(first or other)
    assert used == set(INSIDE)


def test_the_examples_of_the_docs_run(demo: Results, tmp_path: Path) -> None:
    (tmp_path / "results").symlink_to(demo.root, target_is_directory=True)
    pages = (ROOT / "docs" / name for name in ("python.md", "scheduling.md"))
    codes = PYTHON.findall("".join(page.read_text() for page in pages))
    assert len(codes) >= 3
    for code in codes:
        subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")}, cwd=tmp_path)


def test_a_backend_is_named_where_there_are_engines_of_several(demo: Results, tmp_path: Path) -> None:
    shutil.copytree(demo.root, tmp_path / "results")
    results = Results(tmp_path / "results")
    built = results.engines("demo-llama", "fp32", "onnxruntime").parent
    assert lockstep.open_model("demo-llama/fp32/2", results.root).layers == 2
    assert lockstep.open_tokenizer("demo-llama/fp32/2", results.root)
    shutil.copytree(built, built.with_name("tensorrt"))
    with pytest.raises(lockstep.InputError, match="with engines of onnxruntime and tensorrt"):
        lockstep.open_model("demo-llama/fp32/2", results.root)
    with pytest.raises(lockstep.InputError, match="with engines of no backend"):
        lockstep.open_model("demo-llama/fp64/2", results.root)


def test_a_name_that_is_no_target_is_one_line() -> None:
    with pytest.raises(lockstep.InputError, match="expected model/precision/layers/backend"):
        lockstep.open_model("demo-llama")
