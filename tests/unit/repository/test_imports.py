"""Imports run one way, and heavy or foreign packages stay where they belong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lockstep.provenance.code_imports import SOURCES as PACKAGE
from lockstep.provenance.code_imports import file_of, imports

# From the bottom to the top: a package imports from those above it in this list, as docs/design.md draws it.
LAYERS = (
    "__init__", "errors", "progress", "processes", "targets", "tolerances", "artifacts", "manifests", "config",
    "checkpoint", "weights", "onnx_tools", "export", "step", "gpu", "backends", "runtime", "verify", "serve", "stages",
    "provenance", "bundle", "publish", "report", "workflow", "cli", "__main__",
)  # fmt: skip
# What traces, and what is compared with. Nothing else may need torch to be installed.
TORCH = (
    "checkpoint/auto_config.py",
    "checkpoint/auto_tokenizer.py",  # in its own process, and where a model is traced
    "export/",
    "verify/validate/",
    "verify/golden/model.py",
    "verify/golden/reference.py",
    "verify/golden/teacher_forced.py",
    "verify/rounded.py",
    "verify/bisect/run.py",
)
# What runs where only an engine's runtime is installed.
RUNS_ALONE = (
    "errors", "artifacts.assembly", "artifacts.document", "manifests.digest_cache", "weights", "backends", "runtime",
    "verify.bisect.explain", "bundle.opened",
)  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer(path: Path) -> int:
    first, *rest = path.relative_to(PACKAGE).parts
    # What a backend brings to the config: whether its engines run here is asked of the device, without its library.
    is_settings = first == "backends" and rest[-1] in ("settings.py", "gpu.py", "cpu.py")
    return LAYERS.index("config" if is_settings else first.removesuffix(".py"))


def outside(path: Path) -> set[str]:
    """Top-level packages that a module imports, wherever in it."""
    return {module.partition(".")[0] for module in imports(path, with_types=True)}


def test_each_module_is_in_a_package_of_the_list() -> None:
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} == {*LAYERS}


def test_imports_run_one_way() -> None:
    imported = {
        (path, file) for path in MODULES for module in imports(path, with_types=True) if (file := file_of(module))
    }
    above = [(name(path), name(file)) for path, file in imported if layer(file) > layer(path)]
    assert imported and not above, "the first imports the second, and is below it"


def test_the_gpu_runtime_has_no_word_of_tensorrt() -> None:
    """A backend's name stands on its own door; what runs on a GPU serves all of them."""
    found = {
        name(path)
        for path in (PACKAGE / "gpu").rglob("*")
        if path.suffix in (".py", ".cu") and "tensorrt" in path.read_text().lower()
    }
    assert found == {"gpu/__init__.py"}, "which says who runs on it"


def test_torch_and_transformers_stay_where_they_belong() -> None:
    heavy = {"torch", "transformers"}
    assert not [name(path) for path in MODULES if not name(path).startswith(TORCH) and outside(path) & heavy]


def test_the_package_knows_no_snakemake() -> None:
    assert not [name(path) for path in MODULES if "snakemake" in outside(path)]


def test_only_compat_knows_tensorrt() -> None:
    assert {name(path) for path in MODULES if "tensorrt" in outside(path)} == {"backends/tensorrt/compat.py"}


def loaded_by(code: str) -> set[str]:
    """Top-level packages that a new process has loaded after `code`."""
    script = f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


def test_what_runs_engines_loads_no_torch() -> None:
    loaded = loaded_by(
        "import " + ", ".join(f"lockstep.{module}" for module in (*RUNS_ALONE, "verify.golden.check", "stages"))
    )
    assert not loaded & {"torch", "transformers", "pydantic", "yaml", "snakemake"}


def test_engines_run_without_the_toolkit_of_graph_passes() -> None:
    """onnx_ir imports sympy: half a second and 40 MB of each process."""
    modules = ("runtime", "bundle.opened", "serve.engine_process")
    backends = ("onnxruntime", "openvino", "cuda", "tensorrt_rtx")
    names = [*(f"lockstep.{module}" for module in modules), *(f"lockstep.backends.{name}.backend" for name in backends)]
    assert not loaded_by(f"import {', '.join(names)}") & {"onnx_ir", "sympy"}


def test_the_program_explains_itself_without_loading_what_it_runs() -> None:
    loaded = loaded_by("import lockstep.cli.main")
    assert not loaded & {"torch", "transformers", "numpy", "onnx", "onnxruntime", "pydantic", "rich"}


def test_what_a_workflow_loads_when_it_starts_is_light() -> None:
    loaded = loaded_by(
        "import lockstep.config.load, lockstep.provenance.code_identity, "
        "lockstep.manifests.manifest_files, lockstep.checkpoint.resolve"
    )
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime", "scipy"}
