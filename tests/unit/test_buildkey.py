"""Build keys: what a stage's digests see, and what they leave out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from code_imports import reach, third_party
from lockstep.config.backends import backends
from lockstep.errors import InputError
from lockstep.provenance import code_identity
from lockstep.stages import STAGES

REPOSITORY = Path(__file__).resolve().parents[2]
# The module that a stage's work enters by.
ENTRIES = {
    "fetch": "checkpoint.hub", "fetch_adapters": "checkpoint.hub.adapters", "make_checkpoint": "export.make_checkpoint",
    "resolve": "checkpoint", "architecture": "checkpoint", "adapters": "weights.check_adapters", "convert": "weights",
    "export": "export", "validate": "verify.validate", "build": "backends", "compare": "verify.compare",
    "reference": "verify.golden.reference", "quantized_reference": "verify.golden.reference",
    "adapted_reference": "verify.golden.reference",
    "quantized_adapted_reference": "verify.golden.reference", "golden": "verify.golden.check",
    "adapted": "verify.golden.adapted", "served": "serve.check",
}  # fmt: skip
# Which environment file the rules name, and so must hold what the stage imports.
ENVIRONMENTS = {
    "fetch": "fetch", "make_checkpoint": "torch", "resolve": "checkpoint", "convert": "checkpoint", "export": "torch",
    "validate": "torch", "reference": "torch", "build": "engine", "compare": "engine", "golden": "engine",
    "served": "serve", "summary": "report",
}  # fmt: skip

# What PyTorch's default build for Linux requires beside what each build does, for which it says the versions.
CUDA_OF_TORCH = (
    "cuda-bindings", "cuda-toolkit", "nvidia-cudnn-cu13", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13", "triton",
)  # fmt: skip


def test_each_stage_has_an_entry() -> None:
    assert set(ENTRIES) == {name for name, stage in STAGES.items() if stage.code}


@pytest.mark.parametrize("name", ENTRIES)
def test_what_a_stage_may_load_is_in_its_parts_and_its_packages_are_named(name: str) -> None:
    stage = STAGES[name]
    for backend in backends() if "backend" in stage.wildcards else [None]:
        parts = code_identity.code_digests(stage.code, backend)
        files = {path for part in parts for path in code_identity.files_of(part)}
        loaded = reach(ENTRIES[name], backend) - {code_identity.SOURCES / "__init__.py"}
        assert not loaded - files, backend
        assert third_party(loaded) <= set(stage.packages), backend
    assert set(stage.packages) <= set(code_identity.read_pins())


def test_other_backends_are_no_part() -> None:
    parts = code_identity.code_digests(STAGES["build"].code, "onnxruntime")
    assert "backends/onnxruntime" in parts and not {"gpu", "backends/tensorrt"} & parts.keys()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two parts in place of this one."""
    for name in ("one/a.py", "one/deep/b.py", "one/kernel.cu", "one/text.md", "two.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1")
    monkeypatch.setattr(code_identity, "SOURCES", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("changed", "parts"), [
    ("one/a.py", {"one", "one/*"}), ("one/deep/b.py", {"one"}), ("one/kernel.cu", {"one", "one/*"}),
    ("one/text.md", set()), ("two.py", {"two.py"}),
])  # fmt: skip
def test_a_part_is_the_bytes_of_its_sources(package: Path, changed: str, parts: set[str]) -> None:
    names = ("one", "one/*", "two.py")
    before = code_identity.code_digests(names)
    (package / changed).write_text("x = 22")
    now = code_identity.code_digests(names)
    assert {name for name in names if now[name] != before[name]} == parts


def test_a_file_that_is_renamed_is_another(package: Path) -> None:
    before = code_identity.part_digest("one")
    os.rename(package / "one" / "a.py", package / "one" / "c.py")
    assert code_identity.part_digest("one") != before


def test_a_part_that_does_not_exist_is_named() -> None:
    with pytest.raises(InputError, match="nothing: expected a part of this package"):
        code_identity.code_digests(["nothing"])


def test_digests_are_the_same_in_another_process() -> None:
    code = (
        "from lockstep.provenance.code_identity import stage_key; from lockstep.stages import STAGES\n"
        "print(*stage_key(STAGES['export'].code, STAGES['export'].packages).values())"
    )
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


def test_a_pin_is_read_in_any_form_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    pins = tmp_path / "requirements.txt"
    pins.write_text("# comment\nNumPy==1.0\nml_dtypes==2.0  # why\n\n")
    assert code_identity.pinned_packages(["ml-dtypes", "numpy"], pins) == {"ml-dtypes": "2.0", "numpy": "1.0"}
    with pytest.raises(InputError, match="pin of torch"):
        code_identity.pinned_packages(["torch"], pins)
    pins.write_text("numpy>=1.0\n")
    with pytest.raises(InputError, match=r"requirements.txt:1: expected name==version, found 'numpy>=1.0'"):
        code_identity.pinned_packages(["numpy"], pins)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_this_environment_is_the_pinned_one() -> None:
    """Versions of what is installed, against the pins: else the digests would speak of other packages than those that
    run."""
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
    listed = {canonical(name): version for name, version in (line.split("==") for line in packages)}
    pins = code_identity.read_pins() | code_identity.read_pins(REPOSITORY / "envs" / "openvino.txt")
    assert listed == {package: pins[package] for package in listed}
    stages = [STAGES[stage] for stage, group in ENVIRONMENTS.items() if group == name and stage in STAGES]
    assert {package for stage in stages for package in stage.packages} <= set(listed), (
        "a stage imports what its environment lacks"
    )
    assert unpinned({package: requires(package) or [] for package in listed}) <= {"openvino-telemetry"}


def unpinned(requirements: Mapping[str, Sequence[str]]) -> set[str]:
    """Names that the keys of `requirements` need and that are not among them: pip would choose their versions.

    Without the libraries of CUDA that PyTorch's default build requires. The environment files name no build: what one
    build alone requires is pinned by its own metadata.
    """
    needed = {
        (package, canonical(requirement.name))
        for package, texts in requirements.items()
        for requirement in map(Requirement, texts)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    of_a_build = {("torch", library) for library in CUDA_OF_TORCH}
    return {name for _, name in needed - of_a_build if name not in requirements}


def test_only_libraries_of_cuda_that_torch_requires_need_no_pin() -> None:
    cpu = ["filelock", 'optree>=0.13.0; extra == "optree"']
    default = [*cpu, "cuda-toolkit[cublas]==13.0.3", "nvidia-cudnn-cu13==9.20.0.48", "triton==3.7.1"]
    for build in (cpu, default):
        assert unpinned({"torch": build, "filelock": []}) == set()
        assert unpinned({"torch": build}) == {"filelock"}
    assert unpinned({"torch": [*default, "nvidia-other==1.0"], "filelock": ["triton"]}) == {"nvidia-other", "triton"}
