"""A device of the config: what a job looks for before it builds or runs engines."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from lockstep.backends.cpu import describe_cpu
from lockstep.backends.identity import hardware, identity
from lockstep.errors import InputError
from lockstep.provenance.statements import backend_identity
from lockstep.stages import Job

HERE = describe_cpu()["architecture"]


def step(stage: str, backend: str, hardware: str) -> Job:
    names = {"model": "m", "precision": "fp32", "backend": "mine"}
    return Job(stage, names, {}, {}, Path("engines.json"), device={"backend": backend, "hardware": hardware})


def test_a_step_has_the_backend_of_its_device() -> None:
    assert step("build", "onnxruntime", HERE).backend == "onnxruntime"
    assert Job("build", {"backend": "onnxruntime"}, {}, {}, Path("x")).backend == "onnxruntime"
    assert Job("export", {"precision": "fp32"}, {}, {}, Path("x")).backend is None


def test_the_declared_device_is_found() -> None:
    device = backend_identity(step("build", "onnxruntime", HERE))
    assert device == identity("onnxruntime") and device["device"]["architecture"] == HERE


def test_another_device_is_one_line_with_both_names_and_the_node() -> None:
    with pytest.raises(InputError) as error:
        backend_identity(step("golden", "onnxruntime", "riscv64"))
    line = str(error.value)
    assert line.startswith(f"golden m/fp32/mine: expected 'riscv64', the device mine of the config, found {HERE!r} on ")
    assert platform.node() in line and "\n" not in line


def test_engines_for_any_device_are_built_anywhere_and_run_on_their_own() -> None:
    assert hardware("cuda", builds=True) is None
    assert backend_identity(step("build", "cuda", "No such GPU"))["name"] == "cuda"
    with pytest.raises(InputError, match="expected 'No such GPU', the device mine of the config, found "):
        backend_identity(step("golden", "cuda", "No such GPU"))
