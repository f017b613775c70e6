"""Backends that are not installed here, or whose engines are built but cannot run."""

from __future__ import annotations

import sys

import pytest
from demo_model import DEMO

from lockstep.config.load import load
from lockstep.errors import InputError
from lockstep_gpu.backends.cuda import gpu


def config(backend: str, precisions: tuple[str, ...] = (), **changes) -> dict:
    model = {"source": str(DEMO), "backends": ["onnxruntime", backend], "golden": {"prompts": [{"text": "Light"}]}}
    if precisions:
        model |= {"precisions": ["fp32", "fp16"], "backend_precisions": {backend: list(precisions)}}
    return {"models": {"m": model}, **changes}


def names(config_read) -> list[str]:
    return [f"{target.precision}/{target.backend}" for target in config_read.targets()]


def test_a_backend_has_precisions_of_its_own() -> None:
    assert names(load(config("cuda", ("bf16", "fp16")))) == [
        "fp32/onnxruntime",
        "fp16/onnxruntime",
        "fp16/cuda",
        "bf16/cuda",
    ]


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        (("int4",), r"backend_precisions.openvino\[0\]: expected one of "),
        (("fp16", "fp16"), r"backend_precisions.openvino\[1\]: expected each item once; found 'fp16' again"),
    ],
)
def test_a_mistake_in_them_is_named(precisions, message) -> None:
    with pytest.raises(InputError, match=message):
        load(config("openvino", precisions))


@pytest.mark.parametrize("required", [True, "true", "True"])
def test_checks_that_cannot_run_are_refused_where_they_are_required(monkeypatch, required) -> None:
    """Also as a text, which Snakemake's command line gives."""
    monkeypatch.setattr(gpu, "compute_capability", lambda: "7.5")
    expected = (
        r"models.m.backends\[1\]: expected to run its engines .*; cuda: needs an NVIDIA GPU of compute capability 8.0 "
        "or higher, found one of 7.5$"
    )
    with pytest.raises(InputError, match=expected):
        load(config("cuda", require_run=required)).check_backends()


@pytest.mark.parametrize("required", [False, "false", "False"])
def test_targets_that_cannot_run_are_built_and_not_checked(monkeypatch, required) -> None:
    monkeypatch.setattr(gpu, "compute_capability", lambda: None)
    actual = load(config("cuda", require_run=required))
    actual.check_backends()
    assert {target.backend: actual.is_run(target) for target in actual.targets()} == {
        "onnxruntime": True,
        "cuda": False,
    }


def test_without_its_library_the_targets_of_a_backend_are_a_mistake_or_left_out(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(InputError, match=r"models.m.backends\[1\]: expected backends that are ") as caught:
        load(config("openvino")).check_backends()
    why = "the Python package openvino is not installed for this Python: pip install --no-deps openvino"
    assert str(caught.value).endswith(f"or skip_missing_backends: true; openvino: {why}")
    for skip in (True, "true"):
        actual = load(config("openvino", skip_missing_backends=skip, require_run=True))
        actual.check_backends()
        assert names(actual) == ["fp32/onnxruntime"] and list(actual.skipped_backends()) == ["openvino"]
    (target,) = [target for target in load(config("openvino")).targets() if target.backend == "openvino"]
    with pytest.raises(InputError) as caught:
        actual.parse_target(str(target))
    assert str(caught.value) == (
        f"target: expected one that is made here, found {target}: the config skips the backend openvino "
        f"(skip_missing_backends), for {why}"
    )
