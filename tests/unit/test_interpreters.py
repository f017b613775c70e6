"""A stage whose engines another interpreter runs: it runs there, and its record names what that one has."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from demo_model import CONFIG, LIMITS, TOLERANCES

import fake_gpu
from lockstep.backends import build
from lockstep.backends.identity import identity
from lockstep.errors import InputError
from lockstep.provenance import slsa
from lockstep.provenance.record import build_key
from lockstep.runtime import Model
from lockstep.runtime.prefix import root_key
from lockstep.stages import STAGES, Job
from lockstep.targets import Results, Target
from lockstep.verify.golden.check import check_engines

MODEL = "demo-llama"
NAMES = {"model": MODEL, "precision": "fp32", "layers": 2, "backend": "onnxruntime"}


@pytest.fixture
def other(tmp_path: Path) -> str:
    """An interpreter that has another onnx than this one, by its metadata."""
    folder = tmp_path / "packages" / "onnx-9.9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: onnx\nVersion: 9.9.9\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder.parent}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def step_of(stage: str, results: Results, python: str | None, backend: str = "onnxruntime") -> Job:
    return replace(STAGES[stage].job(CONFIG, results.root, {**NAMES, "backend": backend}), python=python)


def test_a_record_names_the_versions_of_the_interpreter_that_ran(demo: Results, other: str) -> None:
    here, there = (build_key(step_of("build", demo, python)) for python in (None, other))
    assert here.environment["onnx"] == version("onnx") and "python" not in here.environment
    assert there.environment["onnx"] == "9.9.9" and there.environment["python"] == platform.python_version()
    assert there.environment.keys() - {"python"} <= here.environment.keys()
    assert here.sha256 != there.sha256


def test_the_provenance_names_them_too(demo: Results, other: str) -> None:
    made = step_of("build", demo, other)
    statement = slsa.make(made, build_key(made), "", "")
    named = {entry.get("uri") for entry in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert {"pkg:pypi/onnx@9.9.9", f"pkg:generic/python@{platform.python_version()}"} <= named


@pytest.mark.long
def test_a_server_has_the_packages_of_both(references: Results, other: str) -> None:
    served = replace(step_of("served", references, other), inputs={})
    found = build_key(served).environment
    assert found["onnx"] == "9.9.9" and found["python"] == platform.python_version()
    assert found["starlette"] == version("starlette")


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES.values() if "backend" in stage.wildcards])
def test_each_stage_that_runs_engines_runs_them_in_the_interpreter_of_the_config(
    references: Results, tmp_path: Path, stage: str
) -> None:
    """So each refuses one that is not there."""
    made = replace(step_of(stage, references, "/nowhere/python3"), output=tmp_path / "out.json")
    if stage == "served":  # which reads what it expects before it starts the engine
        made = replace(made, inputs={**made.inputs, "golden": _golden(references, tmp_path / "golden.json")})
    with pytest.raises(InputError, match="expected a Python interpreter, found '/nowhere/python3'"):
        STAGES[stage].make(made)


def _golden(results: Results, out: Path) -> Path:
    target = Target(MODEL, "fp32", 2, "onnxruntime")
    paths = (results.assembly(MODEL, "fp32"), results.weights(MODEL, "fp32"))
    engines, reference = results.engines(MODEL, "fp32", "onnxruntime"), results.reference(MODEL, 2)
    check_engines(*paths, engines, reference, target, TOLERANCES["fp32"], LIMITS, out, out.with_suffix(".speed.json"))
    return out


def test_each_library_that_computes_on_a_gpu_is_part_of_the_identity(demo: Results, tmp_path: Path) -> None:
    """Another cuBLAS may sum in another order: other keys of builds, of prefixes, of answers."""
    sizes = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    with fake_gpu.installed("10.9.0") as gpu:
        assembly, engines = demo.assembly(MODEL, "fp16"), tmp_path / "engines.json"
        build(assembly, "tensorrt", engines, {"attention": "fused", **sizes})
        assert identity("tensorrt")["libraries"] == {"cublas": "12.8.4", "cudnn": "9.19.0", "nvrtc": "12.9"}
        keys = set()
        for number in ("12.8.4", "12.8.4", "12.9.1"):
            gpu.cublas_version = number
            model = Model.open(engines, assembly, demo.weights(MODEL, "fp16"), 2, **sizes)
            made = step_of("build", demo, None, "tensorrt")
            keys |= {build_key(made).sha256, root_key(model)}
            del model
        assert len(keys) == 4
        statement = slsa.make(replace(made, output=engines), build_key(made), "", "")
        named = {entry.get("uri") for entry in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}
        assert {"pkg:generic/cublas@12.9.1", "pkg:generic/cudnn@9.19.0", "pkg:generic/nvrtc@12.9"} <= named
