"""Adapters on TensorRT's engines, on the fake GPU: what they compute is what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from demo_model import LIMITS
from lora_folders import NAMES, logits_of, opened, requests, shared_lora

import fake_gpu
from lockstep.backends import build
from lockstep.runtime import Decoding, Model, Request, Sampling
from lockstep.step.advance import Advance
from lockstep.targets import Results
from shared import Shared

FORMS = [("8.6.0", "fp32", "traced"), ("10.9.0", "fp16", "fused")]
TOLERANCE = {"fp32": 2e-4, "fp16": 0.1}  # of logits, largest 20: sums in another order; fp16: roundings between engines
SIZES = {name: LIMITS[name] for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
Open = Callable[..., Model]


@pytest.fixture(scope="module")
def lora(demo: Results, shared: Shared) -> Results:
    return shared_lora(demo, shared)


@pytest.fixture(params=FORMS, ids=lambda form: "-".join(form))
def form(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return request.param


@pytest.fixture
def gpu(form: tuple[str, str, str]) -> Iterator[fake_gpu.Gpu]:
    with fake_gpu.installed(form[0]) as found:
        yield found
    assert not found.faults


@pytest.fixture
def open_model(lora: Results, form: tuple[str, str, str], gpu: fake_gpu.Gpu, shared: Shared) -> Open:
    _, precision, attention = form
    assembly, weights = lora.assembly("demo-llama", precision), lora.weights("demo-llama", precision)
    options = {"attention": attention, **SIZES}
    make = lambda folder: build(assembly, "tensorrt", folder / "engines.json", options)
    engines = shared.folder(f"lora-tensorrt/{precision}", make) / "engines.json"
    adapters = lora.adapters("demo-llama")
    return lambda **given: Model.open(engines, assembly, weights, **{**SIZES, "adapters_json": adapters, **given})


def test_requests_of_several_adapters_in_one_batch_are_those_of_onnx_runtime(
    lora: Results, form: tuple[str, str, str], open_model: Open
) -> None:
    """Three adapters take turns in two places, with prompts beside rows that decode."""
    expected = logits_of(opened(lora, form[1], **SIZES), requests())
    model = open_model()
    for _ in range(2):
        for one, other in zip(expected, logits_of(model, requests()), strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE[form[1]])
    assert model.adapters is not None and model.adapters.residency.loads > 4
    assert (model.adapters.places == -1).all()


def test_what_the_device_chooses_goes_ahead_with_the_adapter(
    lora: Results, form: tuple[str, str, str], open_model: Open
) -> None:
    """Tokens that stay on the device, of more requests than slots."""
    given = [Request(ids, 3 + n % 4, adapter=name) for n, (ids, name) in enumerate(2 * requests())]
    found = []
    for model in (opened(lora, form[1], **SIZES), open_model()):
        tokens: list[list[int]] = [[] for _ in given]
        ahead = 0
        for made in Decoding(model, given):
            tokens[made.request].append(made.token)
            ahead += model.in_flight
        found.append(tokens)
    assert found[0] == found[1] and ahead


def test_a_slot_that_gets_another_adapter_in_its_place_is_not_given_the_step_under_way(
    lora: Results, form: tuple[str, str, str], open_model: Open
) -> None:
    def tokens(model: Model) -> list[Any]:
        model.set_adapter(0, "captain")
        model.set_adapter(1, "random")
        found = [model.step_tokens([Advance(slot, np.arange(5, 12), 0) for slot in range(2)], more=True)]
        for number in range(6):
            if number == 2:
                model.set_adapter(0, "shakespeare")  # where "captain" was
            if number == 4:
                model.set_adapter(0, None)
            found.append(model.step_tokens([Advance(s, found[-1][s : s + 1], 7 + number) for s in range(2)], more=True))
        return np.array(found).tolist()

    assert tokens(open_model()) == tokens(opened(lora, form[1], **SIZES))


def test_a_place_holds_nothing_of_the_adapter_before(open_model: Open, gpu: fake_gpu.Gpu, form: Any) -> None:
    model = open_model()
    model.set_adapter(0, "random")  # of rank 16, of all modules
    model.step([Advance(0, np.arange(5), 0)])
    model.release(0)
    model.set_adapter(1, "shakespeare")
    model.set_adapter(0, "captain")  # of rank 8, in its place
    logits = model.step([Advance(0, np.arange(5), 0)])
    fresh = open_model()
    fresh.set_adapter(0, "captain")
    assert np.array_equal(logits, fresh.step([Advance(0, np.arange(5), 0)]))


def test_loading_an_adapter_waits_for_nothing_and_builds_nothing(
    open_model: Open, gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model()
    model.warm_up()
    model.step_tokens([Advance(2, np.arange(5), 0)], more=True)
    waited: list[int] = []
    from lockstep.backends.tensorrt import cuda

    synchronize = cuda.Stream.synchronize
    monkeypatch.setattr(cuda.Stream, "synchronize", lambda stream: (waited.append(1), synchronize(stream))[1])
    assert model.adapters is not None
    contexts = len(gpu.profiles)
    for name in NAMES:
        model.set_adapter(0, name)
        model.adapters.load()
        model.release(0)
    assert not waited and model.in_flight and len(gpu.profiles) == contexts


def test_sampled_tokens_of_an_adapter_are_those_of_onnx_runtime(
    lora: Results, form: tuple[str, str, str], open_model: Open
) -> None:
    if form[1] == "fp16":
        pytest.skip("draws near a tie differ with the last bits of logits")
    given = [Request([5, 6], 6, sampling=Sampling(0.8, seed=n), adapter=name) for n, name in enumerate((*NAMES, None))]
    found = []
    for model in (opened(lora, form[1], **SIZES), open_model()):
        tokens: list[list[int]] = [[] for _ in given]
        for made in Decoding(model, given):
            tokens[made.request].append(made.token)
        found.append(tokens)
    assert found[0] == found[1]


def test_steps_in_which_no_row_has_an_adapter_run_the_engines_of_the_model_without(
    demo: Results, form: tuple[str, str, str], open_model: Open, shared: Shared
) -> None:
    """The same bits, whether others had one before, will have one, or there is none."""
    _, precision, attention = form
    assembly, options = demo.assembly("demo-llama", precision), {"attention": attention, **SIZES}
    make = lambda folder: build(assembly, "tensorrt", folder / "engines.json", options)
    engines = shared.folder(f"tensorrt-without/{precision}", make) / "engines.json"
    given = [(np.arange(9), None), (np.arange(3, 70), None)]
    expected = logits_of(Model.open(engines, assembly, demo.weights("demo-llama", precision), **SIZES), given)
    for model in (open_model(), open_model(adapters_json=None)):
        model.warm_up()
        for again in range(2):
            assert all(map(np.array_equal, logits_of(model, given), expected))
            if model.adapters is not None and model.adapters.known and not again:
                logits_of(model, requests())


def test_nothing_is_captured_behind_the_warm_up(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.backends.tensorrt import cuda

    model, captures = open_model(), list[int]()
    model.warm_up()
    capture = cuda.Stream.capture
    monkeypatch.setattr(cuda.Stream, "capture", lambda stream: (captures.append(1), capture(stream))[1])
    given = [(np.arange(2 + n), name) for n, name in enumerate(("captain", None, "random"))]
    for several in (given, given[1:2]):
        logits_of(model, several)
    assert not captures
