"""Build keys: which files and packages a stage's digests cover."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from lockstep.config.backends import backends
from lockstep.errors import InputError
from lockstep.provenance import code_identity
from lockstep.provenance.code_identity import SOURCES, imports, reach, third_party, with_data
from lockstep.stages import STAGES

REPOSITORY = Path(__file__).resolve().parents[3]
# Which environment file the rules name, and so must hold what the stage imports.
ENVIRONMENTS = {
    "fetch": "fetch", "make_checkpoint": "torch", "resolve": "checkpoint", "convert": "checkpoint", "export": "torch",
    "validate": "torch", "reference": "torch", "build": "engine", "compare": "engine", "golden": "engine",
    "quality": "report", "served": "serve", "summary": "report",
}  # fmt: skip

# What PyTorch's default build for Linux requires besides what each build does, for which it says the versions.
CUDA_OF_TORCH = (
    "cuda-bindings", "cuda-toolkit", "nvidia-cudnn-cu13", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13", "triton",
)  # fmt: skip


def names(files: Iterable[Path]) -> set[str]:
    return {path.relative_to(SOURCES).as_posix() for path in files}


def backends_of(stage: str) -> list[str | None]:
    return [*backends()] if "backend" in STAGES[stage].wildcards else [None]


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_imports_is_pinned_or_comes_with_its_backend(stage: str) -> None:
    unpinned = set(map(canonical, itertools.chain(*(settings.unpinned for settings in backends().values()))))
    for backend in backends_of(stage):
        packages = third_party(reach(STAGES[stage].module, backend))
        assert packages - unpinned <= code_identity.read_pins().keys(), backend


def test_a_stage_is_its_own_code_and_that_of_its_backend() -> None:
    files = names(reach("stages.build", "onnxruntime"))
    assert {f"lockstep/{path}" for path in ("stages/build.py", "backends/onnxruntime/backend.py")} <= files
    assert not [path for path in files if not path.startswith("lockstep/")]
    assert {"lockstep_serve/service.py", "lockstep_gpu/executor.py"} <= names(reach("stages.served", "cuda"))


def test_the_kernels_are_part_of_what_runs_them() -> None:
    """Sources that no import names, of the folders of modules and below them."""
    files = names(with_data(reach("stages.golden", "cuda")))
    assert names(SOURCES.rglob("*.cu*")) <= files
    assert {"lockstep/report/templates/index.html"} <= names(with_data(reach("report.summary")))


def test_no_import_is_overlooked() -> None:
    """Texts are searched for imports, which is quick; the syntax tree has them all."""
    for path in SOURCES.rglob("*.py"):
        assert _imports(path) <= imports(path, with_types=True), path


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a module that imports two in place of this one."""
    for name, text in {
        "a.py": "import os\ndef late():\n    from lockstep.deep.b import (\n        c,  # why\n    )\n",
        "deep/__init__.py": "", "deep/b.py": "if TYPE_CHECKING:\n    import lockstep.types\n", "deep/kernel.cu": "x",
        "deep/text.md": "x", "types.py": "", "other.py": "",
    }.items():  # fmt: skip
        path = tmp_path / "lockstep" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(code_identity, "SOURCES", tmp_path)
    for cached in (code_identity.file_of, code_identity.reach):
        cached.cache_clear()
    yield tmp_path / "lockstep"
    for cached in (code_identity.file_of, code_identity.reach):
        cached.cache_clear()


@pytest.mark.parametrize(("changed", "folders"), [
    ("a.py", {"lockstep/a.py"}), ("deep/b.py", {"lockstep/deep"}), ("deep/kernel.cu", {"lockstep/deep"}),
    ("deep/text.md", set()),
    ("types.py", set()), ("other.py", set()),
])  # fmt: skip
def test_the_code_of_a_stage_is_the_bytes_of_what_it_imports(package: Path, changed: str, folders: set[str]) -> None:
    before = code_identity.code_digests("a")
    assert set(before) == {"lockstep/a.py", "lockstep/deep"}
    (package / changed).write_text((package / changed).read_text() + "\n# edited")
    now = code_identity.code_digests("a")
    assert {name for name in before if now[name] != before[name]} == folders


def test_digests_are_the_same_in_another_process() -> None:
    code = "from lockstep.provenance.code_identity import stage_key\nprint(*stage_key('stages.export').values())"
    output = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(REPOSITORY / "src"), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(output) == 1


def test_a_pin_is_read_in_any_form_and_one_that_is_none_is_named(tmp_path: Path) -> None:
    pins = tmp_path / "requirements.txt"
    pins.write_text("# comment\nNumPy==1.0\nml_dtypes==2.0  # why\n\n")
    assert code_identity.read_pins(pins) == {"ml-dtypes": "2.0", "numpy": "1.0"}
    pins.write_text("numpy>=1.0\n")
    with pytest.raises(InputError, match=r"requirements.txt:1: expected name==version, found 'numpy>=1.0'"):
        code_identity.read_pins(pins)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_this_environment_is_the_pinned_one() -> None:
    """Installed versions equal the pins: else the digests would name other packages than those that run."""
    from importlib.metadata import distributions

    installed = {
        canonical(item.metadata["Name"]): item.version.partition("+")[0]
        for item in distributions()
        if item.metadata["Name"]
    }
    pins = code_identity.read_pins()
    assert {name: installed.get(name) for name in pins} == pins


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS.values())))
def test_the_environment_files_agree_with_the_pins(name: str) -> None:
    environment = yaml.safe_load((REPOSITORY / "envs" / f"{name}.yaml").read_text())
    (packages,) = (item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    listed = {}
    for line in packages:
        name, version = line.split("==")
        listed[canonical(name)] = version
    pins = code_identity.read_pins() | code_identity.read_pins(REPOSITORY / "envs" / "openvino.txt")
    assert listed == {package: pins[package] for package in listed}
    stages = [stage for stage, group in ENVIRONMENTS.items() if group == name and stage in STAGES]
    for stage in stages:
        for backend in backends_of(stage):
            assert set(code_identity.pinned_packages(STAGES[stage].module, backend)) <= set(listed), stage
    assert unpinned({package: requires(package) or [] for package in listed}) <= {"openvino-telemetry"}


def unpinned(requirements: Mapping[str, Sequence[str]]) -> set[str]:
    """Names that the keys of `requirements` need and that are not among them: pip would choose their versions.

    Without the libraries of CUDA that PyTorch's default build requires. The environment files name no build: what one
    build alone requires is pinned by its own metadata.
    """
    needed = set()
    for package, texts in requirements.items():
        for requirement in map(Requirement, texts):
            name = canonical(requirement.name)
            is_of_a_build = package == "torch" and name in CUDA_OF_TORCH
            if not is_of_a_build and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                needed.add(name)
    return needed - requirements.keys()


def test_only_libraries_of_cuda_that_torch_requires_need_no_pin() -> None:
    cpu = ["filelock", 'optree>=0.13.0; extra == "optree"']
    default = [*cpu, "cuda-toolkit[cublas]==13.0.3", "nvidia-cudnn-cu13==9.20.0.48", "triton==3.7.1"]
    for build in (cpu, default):
        assert unpinned({"torch": build, "filelock": []}) == set()
        assert unpinned({"torch": build}) == {"filelock"}
    assert unpinned({"torch": [*default, "nvidia-other==1.0"], "filelock": ["triton"]}) == {"nvidia-other", "triton"}
