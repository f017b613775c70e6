"""Imports run one way, and heavy or foreign packages stay where they belong."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.plugins import backend_packages
from lockstep.provenance.code_identity import PACKAGES, SOURCES, file_of, imports

# From the bottom to the top: a package imports from those above it in this list, as docs/design.md draws it.
LAYERS = (
    "__init__", "errors", "progress", "processes", "plugins", "targets", "tolerances", "artifacts", "manifests",
    "config", "checkpoint", "weights", "onnx_tools", "export", "step", "backends", "runtime", "verify", "certify",
    "stages", "provenance", "bundle", "publish", "report", "workflow", "cli", "__main__",
)  # fmt: skip
# Tracing, and references for comparison. Nothing else may need torch.
TORCH = tuple(
    f"lockstep/{place}"
    for place in (
        "certify/tables.py",
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
)
# What runs where only an engine's runtime is installed.
RUNS_ALONE = (
    "errors", "artifacts.assembly", "artifacts.document", "manifests.digest_cache", "weights", "backends", "runtime",
    "verify.bisect.explain", "bundle.opened",
)  # fmt: skip
MODULES = sorted(path for path in SOURCES.rglob("*.py") if path.relative_to(SOURCES).parts[0] in PACKAGES)


def name(path: Path) -> str:
    return path.relative_to(SOURCES).as_posix()


def layer(path: Path) -> int:
    first, *folders = path.relative_to(SOURCES / "lockstep").parts
    # What a backend brings to the config: whether its engines run here is asked of the device, without its library.
    is_settings = first == "backends" and folders[-1] in ("settings.py", "cpu.py")
    return LAYERS.index("config" if is_settings else first.removesuffix(".py"))


def package(path: Path) -> str:
    return path.relative_to(SOURCES).parts[0]


def outside(path: Path) -> set[str]:
    """Top-level packages that a module imports, wherever in it."""
    return {module.partition(".")[0] for module in imports(path, with_types=True)}


def named(path: Path) -> set[Path]:
    """The modules of our packages that a module's import statements name; entry points do not count."""
    text = re.sub("lockstep.backends.\\*|load_plugin", "", path.read_text())
    modules = re.findall(r"^\s*(?:from|import) (lockstep[\w.]*)(?: import ([^\n#]*|\([^)]*\)))?", text, re.MULTILINE)
    results = set()
    for module, members in modules:
        for dotted in (module, *(f"{module}.{member}" for member in re.findall(r"\w+", members))):
            if (file := file_of(dotted)) is not None:
                results.add(file)
    return results


def test_each_module_is_in_a_package_of_the_list() -> None:
    places = {path.relative_to(SOURCES / "lockstep").parts[0] for path in MODULES if package(path) == "lockstep"}
    assert {place.removesuffix(".py") for place in places} == {*LAYERS}


@functools.cache
def module_names(path: Path) -> set[str]:
    """The names that a module gives a value, outside of its functions and classes."""
    names = set()
    nodes: list[ast.AST] = [*ast.parse(path.read_text()).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes += ast.iter_child_nodes(node)
    return names


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "workflow"])
def test_names_that_are_imported_from_the_packages_exist(folder: str) -> None:
    """In functions too: those of long tests and of commands that no CI runs are found by nothing else."""
    missing = []
    for path in (SOURCES.parent / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.level or node.module.partition(".")[0] not in PACKAGES:
                continue
            file = file_of(node.module)
            names = set() if file is None else module_names(file)
            if "__getattr__" in names:  # of a module that loads its names lazily
                continue
            for alias in node.names:
                if alias.name not in names and file_of(f"{node.module}.{alias.name}") is None:
                    missing.append(f"{path.relative_to(SOURCES.parent)}:{node.lineno}: {node.module}.{alias.name}")
    assert not missing


def test_imports_run_one_way() -> None:
    top_modules = [path for path in MODULES if package(path) == "lockstep"]
    above = []
    for path in top_modules:
        for file in named(path):
            if package(file) != "lockstep" or layer(file) > layer(path):
                above.append((name(path), name(file)))
    assert top_modules and not above, "the first imports the second, and is below it"


def test_the_gpu_runtime_and_the_server_do_not_know_each_other() -> None:
    pairs = {"lockstep_gpu": "lockstep_serve", "lockstep_serve": "lockstep_gpu"}
    for path in MODULES:
        assert pairs.get(package(path)) not in map(package, named(path)), name(path)


def test_nothing_of_the_server_imports_triton_s_protocols() -> None:
    folder = SOURCES / "lockstep_serve" / "triton"
    assert folder.is_dir()
    for path in MODULES:
        if not path.is_relative_to(folder):
            names = [name(file) for file in named(path) if file.is_relative_to(folder)]
            assert not names, f"{name(path)}: they are a plug-in, found by an entry point"


def test_the_gpu_runtime_has_no_word_of_tensorrt() -> None:
    """A backend's name stands on its own door; what runs on a GPU serves all of them."""
    texts = [path for path in (SOURCES / "lockstep_gpu").rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    worded = {name(path) for path in texts if "tensorrt" in path.read_text().lower()}
    runtime = {place for place in worded if not place.startswith("lockstep_gpu/backends/")}
    assert runtime == {"lockstep_gpu/__init__.py"}, "which says who runs on it"


def test_the_gpu_runtime_knows_no_backend() -> None:
    runtime = [path for path in MODULES if package(path) == "lockstep_gpu" and "/backends/" not in name(path)]
    assert runtime
    for path in runtime:
        assert not [file for file in named(path) if name(file).startswith("lockstep_gpu/backends/")], name(path)


def test_torch_and_transformers_stay_where_they_belong() -> None:
    heavy = {"torch", "transformers"}
    assert not [name(path) for path in MODULES if not name(path).startswith(TORCH) and outside(path) & heavy]


def test_the_package_knows_no_snakemake() -> None:
    assert not [name(path) for path in MODULES if "snakemake" in outside(path)]


def test_only_compat_knows_tensorrt() -> None:
    assert {name(path) for path in MODULES if "tensorrt" in outside(path)} == {
        "lockstep_gpu/backends/tensorrt/compat.py"
    }


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
    backends = [package for name, package in backend_packages().items() if name != "tensorrt"]
    names = ["lockstep.runtime", "lockstep.bundle.opened", "lockstep_serve.engine_process"]
    names += [f"{package}.backend" for package in backends]
    assert not loaded_by(f"import {', '.join(names)}") & {"onnx_ir", "sympy"}


def test_the_engine_process_needs_no_package_but_numpy() -> None:
    """Its Python may be one that has the backend's packages, and no server's."""
    loaded = loaded_by("import lockstep_serve.engine_process") - sys.stdlib_module_names
    assert loaded - {"__main__", "_distutils_hack"} == {"lockstep", "lockstep_serve", "numpy"}


def test_the_program_explains_itself_without_loading_what_it_runs() -> None:
    loaded = loaded_by("import lockstep.cli.main")
    assert not loaded & {"torch", "transformers", "numpy", "onnx", "onnxruntime", "pydantic", "rich"}


def test_what_a_workflow_loads_when_it_starts_is_light() -> None:
    loaded = loaded_by(
        "import lockstep.config.load, lockstep.provenance.code_identity, "
        "lockstep.manifests.manifest_files, lockstep.checkpoint.resolve"
    )
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime", "scipy"}


def test_a_checkout_that_is_not_installed_has_all_plug_ins() -> None:
    """As in Snakemake's environments, which have pinned packages alone."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from lockstep.plugins import backend_packages, entry_points\n"
        "print(*backend_packages(), *entry_points('server'), *entry_points('protocols'))"
    )
    command = [sys.executable, "-S", "-c", code, str(SOURCES)]  # without installed packages
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert names == ["cuda", "onnxruntime", "openvino", "tensorrt", "open_server", "triton"]


def test_a_checkout_has_its_own_plug_ins_where_it_was_installed_with_others(tmp_path: Path) -> None:
    """A module that moved is found without a new installation, and one that is gone is not looked for."""
    metadata = tmp_path / "lockstep_engines-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: lockstep-engines\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[lockstep.commands]\nserve = gone:serve\nmore = other:more\n")
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from lockstep.plugins import entry_points\n"
        "print(*(entry.module for entry in entry_points('commands').values()))"
    )
    command = [sys.executable, "-S", "-c", code, str(SOURCES), str(tmp_path)]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert names == ["lockstep_serve.cli.serve", "lockstep_serve.triton.command"]
