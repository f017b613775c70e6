"""Running for real: what the demo's engines decode on a GPU is what ONNX Runtime decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.step_timing import breakdown, breakdown_prefill

from lockstep.backends import builder
from lockstep.runtime import Advance, Engine, Model, ModelOptions, Request, Sampling, Tokenizer
from lockstep.runtime.drafts import Speculation
from lockstep.runtime.speculative import Speculative, open_speculation
from lockstep.verify.golden.drafted import RecordedDrafter

PROMPTS = ("San Francisco is a", "Light", "Lake Zürich is long and narrow, and on clear days the snow")
# tokens after the prompts, and after slot 1 has begun again
FIRST = 10
LATER = 6


# A backend, a precision and options of a build, for each way in which the executor runs a step. cuda has no options.
FORMS = [
    pytest.param("cuda", "fp16", {}, id="cuda-fp16"),
    pytest.param("cuda", "fp32", {}, id="cuda-fp32"),
    pytest.param("tensorrt", "fp16", {"attention": "fused"}, id="tensorrt-fp16-fused"),
    pytest.param("tensorrt", "fp32", {"attention": "traced"}, id="tensorrt-fp32-traced", marks=pytest.mark.long),
]
TRACED = pytest.param("tensorrt", "fp16", {"attention": "traced"}, id="tensorrt-fp16-traced", marks=pytest.mark.long)


def decode(model: Model, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """The tokens of each step: three prompts, then one token of each, then the second prompt again with the others,
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
    assembly = demo.assembly("demo-llama", precision)
    tensors = demo.weights("demo-llama", precision)
    built = (
        builder.build(assembly, "onnxruntime", tmp_path / "onnxruntime" / "engines.json"),
        builder.build(assembly, backend, tmp_path / backend / "engines.json", options),
    )
    tokenizer = Tokenizer.open(assembly)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    reference, model = (Model.open(engines, assembly, tensors) for engines in built)
    expected, actual = (decode(opened, prompts) for opened in (reference, model))
    assert np.array_equal(actual, expected) and np.array_equal(actual[0][1], actual[FIRST + 1][1])
    # What a step takes, part by part, can be captured; decoding leaves the rows as they are, a prompt's row is
    # forgotten.
    assert model.in_flight and not reference.in_flight
    executor: Any = model.executor
    assert {"block", "attention", "exit", "gaps"} < set(breakdown(executor, len(prompts)))
    model.step_tokens([Advance(0, prompts[0], 0)])
    assert {"block", "attention", "exit"} < set(breakdown_prefill(executor))
    assert np.array_equal(decode(model, prompts), expected)


def answers(model: Model, requests: list[Request], speculation: Speculation | None = None) -> dict[tuple, list[tuple]]:
    """Return by request and choice each token, its log-probabilities, and the bits of its logits."""
    results: dict[tuple, list[tuple]] = {}
    engine = Engine(model, speculation=speculation, samples_on_host=True)
    for output in engine.run(requests):
        logits = None if output.logits is None else output.logits.tobytes()
        results.setdefault((output.request, output.choice), []).append(
            (output.token, output.finish, output.logprobs, logits)
        )
    engine.scheduler.check()
    return results


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_drafts_change_no_bit(demo, demo_bf16, tmp_path, backend, precision):
    """Of requests that come and go, greedy, drawn or chosen by the host, with steps that are launched ahead."""
    results = demo_bf16 if precision == "bf16" else demo
    assembly = results.assembly("demo-llama", precision)
    weights = results.weights("demo-llama", precision)
    engines = builder.build(assembly, backend, tmp_path / "engines.json")
    model = Model.open(engines, assembly, weights, 2, ModelOptions(max_seq_len=160))
    random = np.random.default_rng(1)
    prompts = [np.resize(random.integers(0, model.vocab_size, 9), length) for length in (50, 21, 64, 9, 33)]
    samplings = Sampling(), Sampling(0.8, seed=5), Sampling(0.8, seed=6, presence_penalty=0.3, logprobs=2)
    requests = [Request(prompt, 40, sampling=item) for prompt, item in zip(prompts, samplings)]
    requests += [
        Request(prompts[3], 60, choose=lambda row: int(row.argmax())),
        Request(prompts[4], 30, sampling=Sampling(1.0, seed=3), n=2),
    ]
    plain = answers(model, requests)
    recorded = {}
    for key, answer in plain.items():
        recorded[key] = [token for token, *_ in answer]
    for wrong_each in (1, 3, 10**9):
        speculation = Speculation(RecordedDrafter(recorded, wrong_each), 5)
        assert answers(model, requests, speculation) == plain
        assert speculation.num_drafts and bool(sum(speculation.accepted)) is (wrong_each > 1)
    assert sum(speculation.accepted) == speculation.num_draft_tokens
    cut = Speculative(4, "a cut", str(engines), str(assembly), str(weights), 1)
    for speculative in (Speculative(4), cut):
        assert answers(model, requests, open_speculation(model, speculative)) == plain
