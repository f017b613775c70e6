"""TensorRT-RTX for real: what the demo's engines compute and decode is what ONNX Runtime does, and kernels are kept."""

from __future__ import annotations

import numpy as np
import pytest
from test_gpu_run import PROMPTS, decode

from lockstep import backends
from lockstep.runtime import Model, Tokenizer
from lockstep.targets import Limits
from lockstep.tolerances import Tolerances
from lockstep.verify import compare
from lockstep_gpu.backends.tensorrt_rtx.gpu import why_not


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tokens_and_numbers_are_those_of_onnx_runtime(demo, tmp_path, precision):
    if reason := why_not(None):
        pytest.skip(reason)
    assembly = demo.assembly("demo-llama", precision)
    tensors = demo.weights("demo-llama", precision)
    built = [
        backends.build(assembly, name, tmp_path / name / "engines.json") for name in ("onnxruntime", "tensorrt_rtx")
    ]
    tokenizer = Tokenizer.open(assembly)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    expected, actual = (decode(Model.open(engines, assembly, tensors), prompts) for engines in built)
    assert np.array_equal(actual, expected)
    compare.run(assembly, tensors, built[1], Tolerances(precision, "tensorrt_rtx"), Limits(), tmp_path / "compare.json")
