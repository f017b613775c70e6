"""Adapters for real: several in one batch on a GPU compute what ONNX Runtime computes with each, and what PEFT does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_gpu_run import FORMS

from lockstep.artifacts.files import read_json
from lockstep.backends import builder
from lockstep.runtime import Advance, Decoding, Model, ModelOptions, Request, Tokenizer
from lockstep.targets import Limits
from lockstep.tolerances import Tolerances
from lockstep.verify import compare

pytestmark = pytest.mark.parametrize("backend, precision, options", FORMS, indirect=["backend"], scope="module")

PEFT = Path(__file__).parents[1] / "data" / "peft.npz"
NAMES = (None, "captain", "shakespeare")
PROMPTS = ("San Francisco is a", "Light", "Lake Zürich is long and narrow, and on clear days the snow")
LIMITS = {"max_batch_size": 4, "max_num_tokens": 128, "max_seq_len": 256}
# Largest error of logits, whose standard deviation is 2.6; an adapter moves them by more than 1.
TOLERANCE = {"fp32": 2e-3, "fp16": 0.1}


@pytest.fixture(scope="module")
def models(backend, precision, options, demo_with_adapters, tmp_path_factory):
    """ONNX Runtime's and the backend's, the precision, and the engines of the latter."""
    folder = tmp_path_factory.mktemp("engines")
    assembly = demo_with_adapters.assembly("demo-llama", precision)
    reference = builder.build(assembly, "onnxruntime", folder / "onnxruntime" / "engines.json")
    built = builder.build(assembly, backend, folder / backend / "engines.json", {**LIMITS, **options})
    weights = demo_with_adapters.weights("demo-llama", precision)
    adapters = demo_with_adapters.adapters("demo-llama")
    pair = (
        Model.open(item, assembly, weights, options=ModelOptions(**LIMITS, adapters_json=adapters))
        for item in (reference, built)
    )
    return *pair, precision, built, assembly, weights


def test_logits_are_those_of_peft(models):
    _, model, precision, *_ = models
    reference = np.load(PEFT)
    for slot, name in enumerate(NAMES[1:]):
        model.set_adapter(slot, name)
    logits = model.step([Advance(slot, reference["ids"], 0) for slot in range(3)])
    for slot in range(3):
        model.release(slot)
    for row, name in zip(logits, (*NAMES[1:], None)):
        assert np.abs(row - reference[name or "none"][-1]).max() < TOLERANCE[precision]


def test_tokens_of_several_adapters_in_one_batch_are_those_of_onnx_runtime(models):
    reference, model, precision, *_, assembly, _ = models
    tokenizer = Tokenizer.open(assembly)
    requests = []
    for text in PROMPTS:
        requests += [Request(tokenizer.encode(text), 12, adapter=name) for name in NAMES]
    results = []
    for item in (reference, model):
        item.warm_up()
        tokens = [[] for _ in requests]
        for output in Decoding(item, requests):
            tokens[output.request].append(output.token)
        results.append(tokens)
    if precision == "fp32":
        assert results[0] == results[1]
    else:  # a near tie may fall the other way, in a text of twelve tokens
        assert sum(a == b for a, b in zip(*results)) >= len(requests) - 1
    assert not model.in_flight and (model.adapters.residency.places == -1).all()


def test_steps_without_adapters_run_engines_without_room(models):
    _, model, _, engines, *_ = models
    assert {"entry.base", "middle.base", "exit.base"} < set(read_json(engines)["engines"])
    ids = np.load(PEFT)["ids"]
    alone = model.step([Advance(0, ids, 0)])
    model.set_adapter(1, "captain")
    beside = model.step([Advance(0, ids, 0), Advance(1, ids, 0)])
    model.release(1)
    again = model.step([Advance(0, ids, 0)])
    model.release(0)
    assert np.array_equal(alone, again) and np.abs(beside[0] - alone[0]).max() < TOLERANCE["fp16"]
    assert np.abs(beside[1] - alone[0]).max() > 1


def test_engines_compute_what_their_graphs_do(models, tmp_path):
    _, _, precision, engines, assembly, weights = models
    tolerances = Tolerances(precision, read_json(engines)["backend"])
    out = compare.run(assembly, weights, engines, tolerances, Limits(), tmp_path / "compare.json")
    report = read_json(out)
    assert {"middle", "middle.base", "exit", "exit.base"} < set(report["engines"])
