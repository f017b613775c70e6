"""Running for real: what the demo's engines decode on a GPU is what ONNX Runtime decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.step_timing import breakdown, breakdown_prefill

from lockstep import backends
from lockstep.runtime import Advance, Model, Tokenizer

PROMPTS = ("San Francisco is a", "Light", "Lake Zürich is long and narrow, and on clear days the snow")
FIRST, LATER = 10, 6  # tokens after the prompts, and after slot 1 has begun again


def tensorrt(attention: str) -> dict[str, Any]:
    return {"attention": attention, "tactic_sources": ["edge_mask_convolutions", "jit_convolutions"]}


# A backend, a precision and options of a build, for each way in which the executor runs a step. cuda has no options.
FORMS = [
    pytest.param("cuda", "fp16", {}, id="cuda-fp16"),
    pytest.param("tensorrt", "fp16", tensorrt("fused"), id="tensorrt-fp16-fused"),
    pytest.param("tensorrt", "fp32", tensorrt("traced"), id="tensorrt-fp32-traced", marks=pytest.mark.long),
]
TRACED = pytest.param("tensorrt", "fp16", tensorrt("traced"), id="tensorrt-fp16-traced", marks=pytest.mark.long)


def decode(model: Model, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """The tokens of each step: three prompts, then one token of each, then the second prompt again beside the others,
    then one token of each."""
    steps = [model.step_tokens([Advance(slot, prompt, 0) for slot, prompt in enumerate(prompts)])]
    for number in range(FIRST + LATER):
        advances = [Advance(slot, steps[-1][slot : slot + 1], model.length(slot)) for slot in range(len(prompts))]
        if number == FIRST:
            model.release(1)
            advances[1] = Advance(1, prompts[1], 0)
        steps.append(model.step_tokens(advances, following=True))  # which is not so where a prompt comes again
    return steps


@pytest.mark.parametrize("backend, precision, options", [*FORMS, TRACED], indirect=["backend"])
def test_tokens_are_those_of_onnx_runtime(demo, tmp_path, backend, precision, options):
    assembly, tensors = demo.assembly("demo-llama", precision), demo.weights("demo-llama", precision)
    built = (
        backends.build(assembly, "onnxruntime", tmp_path / "onnxruntime" / "engines.json"),
        backends.build(assembly, backend, tmp_path / backend / "engines.json", options),
    )
    tokenizer = Tokenizer.open(assembly)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    reference, model = (Model.open(engines, assembly, tensors) for engines in built)
    expected, found = (decode(opened, prompts) for opened in (reference, model))
    assert np.array_equal(found, expected) and np.array_equal(found[0][1], found[FIRST + 1][1])
    # What a step takes, part by part, can be captured; decoding leaves the rows as they are, a prompt's row is
    # forgotten.
    assert model.in_flight and not reference.in_flight
    executor: Any = model._executor
    assert {"block", "attention", "exit", "gaps"} < set(breakdown(executor, len(prompts)))
    model.step_tokens([Advance(0, prompts[0], 0)])
    assert {"block", "attention", "exit"} < set(breakdown_prefill(executor))
    assert np.array_equal(decode(model, prompts), expected)
