"""TensorRT targets without a GPU: the DAG is planned, and the build says in one line what is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from checkout import Checkout


def with_tensorrt(config: dict[str, Any]) -> None:
    config["models"]["demo-llama"] |= {"backends": ["onnxruntime", "tensorrt"], "precisions": ["fp16"]}


def test_the_dag_is_planned_without_a_gpu(demo: Checkout) -> None:
    demo.edit_config(with_tensorrt)
    jobs = demo.would_run()
    assert (
        jobs["build"] == 1
        and jobs["compare"] == 1
        and jobs["golden"] == 2
        and "export" not in jobs
        and "validate" not in jobs
    )


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_a_build_says_what_is_missing(demo: Checkout) -> None:
    demo.edit_config(with_tensorrt)
    process = demo.snakemake("--cores", "2", "results/demo-llama/fp16/engines/tensorrt/engines.json", check=False)
    assert process.returncode
    line = (demo.results / "logs/build/demo-llama/fp16/tensorrt.log").read_text()
    assert line == (
        "lockstep: error: backend tensorrt: the Python package tensorrt is not installed for this Python; "
        "install what is missing, or name another interpreter in backends.tensorrt.python\n"
    )
