"""Adapters on the fake GPU give the numbers that ONNX Runtime gives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import LIMITS
from fine_tunes import add_fine_tune
from lora_folders import NAMES, logits_of, opened, requests, shared_lora

import fake_gpu
from lockstep.backends.builder import build
from lockstep.runtime import Decoding, Model, ModelOptions, Request, Sampling
from lockstep.runtime.request import CheckpointFiles, adapter_of
from lockstep.step.advance import Advance
from lockstep.targets import Results
from shared import Shared

FORMS = [("10.6.0", "fp16", "fused", "tensorrt"), ("10.9.0", "fp32", "traced", "tensorrt")]
FORMS += [("10.6.0", "fp16", "fused", "cuda")]
# Tests that take seconds run in the form with the most code that no other form runs; all forms are compared below.
MOST = pytest.mark.parametrize(
    "form",
    [FORMS[2], *(pytest.param(item, marks=pytest.mark.long) for item in FORMS if item != FORMS[2])],
    indirect=True,
    ids="-".join,
)
TOLERANCE = {"fp32": 2e-4, "fp16": 0.1}  # of logits, largest 20: sums in another order; fp16: roundings between engines
SIZES = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
Open = Callable[..., Model]
Form = tuple[str, str, str, str]  # version of TensorRT, precision, attention, backend


@pytest.fixture(scope="module")
def lora(demo: Results, shared: Shared) -> Results:
    return shared_lora(demo, shared)


@pytest.fixture(params=[FORMS[2], *(pytest.param(form, marks=pytest.mark.long) for form in FORMS[:2])], ids="-".join)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


@pytest.fixture
def gpu(form: Form) -> Iterator[fake_gpu.Gpu]:
    with fake_gpu.installed(form[0], form[3]) as gpu:
        yield gpu
    assert not gpu.faults


def built(results: Results, form: Form, shared: Shared, name: str) -> Path:
    """Return engines.json of a form; name: of the folder that the tests share."""
    _, precision, attention, backend = form
    assembly = results.assembly("demo-llama", precision)
    options = {**({} if backend == "cuda" else {"attention": attention}), **SIZES}

    def make(folder: Path) -> None:
        build(assembly, backend, folder / "engines.json", options)

    return shared.folder(f"{name}/{'-'.join(form)}", make) / "engines.json"


@pytest.fixture
def open_model(lora: Results, form: Form, gpu: fake_gpu.Gpu, shared: Shared) -> Open:
    assembly = lora.assembly("demo-llama", form[1])
    weights = lora.weights("demo-llama", form[1])
    engines = built(lora, form, shared, "lora-tensorrt")
    adapters = lora.adapters("demo-llama")

    def open_with(weights: Path = weights, **options: Any) -> Model:
        all_options = {**SIZES, "adapters_json": adapters, **options}
        return Model.open(engines, assembly, weights, options=ModelOptions(**all_options))

    return open_with


def test_requests_of_several_adapters_in_one_batch_are_those_of_onnx_runtime(
    lora: Results, form: Form, open_model: Open
) -> None:
    """Three adapters take turns in two slots, with prompts together with rows that decode."""
    expected = logits_of(opened(lora, form[1], **SIZES), requests())
    model = open_model()
    for _ in range(2):
        for first, other in zip(expected, logits_of(model, requests()), strict=True):
            np.testing.assert_allclose(other, first, rtol=0, atol=TOLERANCE[form[1]])
    assert model.adapters is not None and model.adapters.residency.loads > 4
    assert (model.adapters.residency.places == -1).all()


@pytest.mark.parametrize("max_bound", [1, 2])
def test_adapters_are_those_of_the_checkpoint_in_whatever_network_it_is(
    lora: Results, form: Form, open_model: Open, tmp_path: Path, max_bound: int
) -> None:
    tree = Results(Path(shutil.copytree(lora.root, tmp_path / "results", copy_function=os.link)))
    add_fine_tune(tree, "tuned", form[1])
    weights = tree.weights("tuned", form[1])
    batch = requests()[:3]
    expected = {"": logits_of(open_model(), batch, 2), "tuned": logits_of(open_model(weights), batch, 2)}
    adapters = str(lora.adapters("demo-llama"))
    tuned = CheckpointFiles("tuned", str(lora.assembly("demo-llama", form[1])), str(weights), adapters)
    model = open_model(others=[tuned], max_bound=max_bound)
    for checkpoint in ("", "tuned", ""):
        named = [(ids, name and adapter_of(checkpoint, name)) for ids, name in batch]
        assert all(map(np.array_equal, logits_of(model, named, 2, checkpoint), expected[checkpoint]))


class Forced:
    """Chooses tokens that another engine chose; `gaps`: by how much their logits are below the largest.

    Two engines whose logits differ by a rounding may choose either of two tokens that are nearly as likely, and go on
    from there with different texts: so this one goes on with the other's.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self.gaps = list[float]()

    def __call__(self, logits: np.ndarray) -> int:
        token = self._tokens[len(self.gaps)]
        self.gaps.append(float(logits.max() - logits[token]))
        return token


def test_what_the_device_chooses_goes_ahead_with_the_adapter(lora: Results, form: Form, open_model: Open) -> None:
    """Tokens that stay on the device, of more requests than slots."""
    batch = [Request(ids, 3 + n % 4, adapter=name) for n, (ids, name) in enumerate(2 * requests())]
    tokens: list[list[int]] = [[] for _ in batch]
    ahead = 0
    model = open_model()
    for output in Decoding(model, batch):
        tokens[output.request].append(output.token)
        ahead += model.in_flight
    assert ahead and [len(token) for token in tokens] == [request.max_new_tokens for request in batch]
    judges = [Forced(token) for token in tokens]
    forced = [replace(request, choose=judge) for request, judge in zip(batch, judges)]
    for _ in Decoding(opened(lora, form[1], **SIZES), forced):
        pass
    assert max(max(judge.gaps) for judge in judges) <= TOLERANCE[form[1]]


def test_a_slot_that_gets_another_adapter_in_its_place_is_not_given_the_step_under_way(
    lora: Results, form: Form, open_model: Open
) -> None:
    def set_adapters(number: int, model: Model) -> None:
        for slot, adapter in {0: [(0, "captain"), (1, "random")], 3: [(0, "shakespeare")], 5: [(0, None)]}.get(
            number, ()
        ):
            model.set_adapter(slot, adapter)  # the latter two where another was

    def step_of(number: int, tokens: Sequence[np.ndarray]) -> list[Advance]:
        prompt = np.arange(5, 12)
        return [Advance(s, tokens[-1][s : s + 1] if number else prompt, 6 + number if number else 0) for s in range(2)]

    model = open_model()
    reference = opened(lora, form[1], **SIZES)
    tokens: list[np.ndarray] = []
    for number in range(7):
        advances = step_of(number, tokens)
        for item in (model, reference):
            set_adapters(number, item)
        tokens.append(model.step_tokens(advances, following=True))
        logits = reference.step(advances)  # of the same tokens: see `Forced`
        assert (logits[np.arange(2), tokens[-1]] >= logits.max(axis=1) - TOLERANCE[form[1]]).all(), number


def test_an_adapter_slot_holds_nothing_of_the_adapter_before(open_model: Open, gpu: fake_gpu.Gpu, form: Any) -> None:
    model = open_model()
    model.set_adapter(0, "random")  # of rank 16, of all modules
    model.step([Advance(0, np.arange(5), 0)])
    model.release(0)
    model.set_adapter(1, "shakespeare")
    model.set_adapter(0, "captain")  # of rank 8, in the same slot
    logits = model.step([Advance(0, np.arange(5), 0)])
    fresh = open_model()
    fresh.set_adapter(0, "captain")
    assert np.array_equal(logits, fresh.step([Advance(0, np.arange(5), 0)]))


@pytest.mark.long
@MOST
def test_loading_an_adapter_waits_for_nothing_and_builds_nothing(
    open_model: Open, gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model()
    model.warm_up()
    model.step_tokens([Advance(2, np.arange(5), 0)], following=True)
    waited: list[int] = []
    from lockstep_gpu import cuda

    synchronize = cuda.Stream.synchronize
    monkeypatch.setattr(cuda.Stream, "synchronize", lambda stream: (waited.append(1), synchronize(stream))[1])
    assert model.adapters is not None
    contexts = len(gpu.profiles)
    for name in NAMES:
        model.set_adapter(0, name)
        model.adapters.load()
        model.release(0)
    assert not waited and model.in_flight and len(gpu.profiles) == contexts


@pytest.mark.long  # fp32: draws near a tie differ with the last bits of logits
@pytest.mark.parametrize("form", [FORMS[1]], indirect=True)
def test_sampled_tokens_of_an_adapter_are_those_of_onnx_runtime(lora: Results, form: Form, open_model: Open) -> None:
    requests = [
        Request([5, 6], 6, sampling=Sampling(0.8, seed=n), adapter=name) for n, name in enumerate((*NAMES, None))
    ]
    results = []
    for model in (opened(lora, form[1], **SIZES), open_model()):
        tokens: list[list[int]] = [[] for _ in requests]
        for output in Decoding(model, requests):
            tokens[output.request].append(output.token)
        results.append(tokens)
    assert results[0] == results[1]


@pytest.mark.long
@MOST
def test_steps_in_which_no_row_has_an_adapter_run_the_engines_of_the_model_without(
    demo: Results, form: Form, open_model: Open, shared: Shared
) -> None:
    """The same bits, whether others had one before, will have one, or there is none."""
    paths = built(demo, form, shared, "tensorrt-without"), demo.assembly("demo-llama", form[1])
    plain = Model.open(*paths, demo.weights("demo-llama", form[1]), options=ModelOptions(**SIZES))
    plain_requests = [(np.arange(9), None), (np.arange(3, 70), None)]
    expected = logits_of(plain, plain_requests)
    for model in (open_model(), open_model(adapters_json=None)):
        model.warm_up()
        for again in range(2):
            assert all(map(np.array_equal, logits_of(model, plain_requests), expected))
            if model.adapters is not None and model.adapters.loaded and not again:
                logits_of(model, requests())


@MOST
@pytest.mark.long
def test_nothing_is_captured_behind_the_warm_up(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep_gpu import cuda

    model = open_model()
    captures = list[int]()
    model.warm_up()
    capture = cuda.Stream.capture
    monkeypatch.setattr(cuda.Stream, "capture", lambda stream: (captures.append(1), capture(stream))[1])
    requests = [(np.arange(2 + n), name) for n, name in enumerate(("captain", None, "random"))]
    for several in (requests, requests[1:2]):
        logits_of(model, several)
    assert not captures
