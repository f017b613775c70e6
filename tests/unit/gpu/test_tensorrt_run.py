"""Running TensorRT's engines on the fake GPU: all above CUDA and TensorRT is real, down to the uploads."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import engine_steps
import numpy as np
import onnx
import pytest
from benchmarks.step_timing import breakdown
from demo_model import GOLDEN, LIMITS, TOLERANCES
from polygraphy.json import load_json

import fake_gpu
from faults.table import FAULTS
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends.builder import build
from lockstep.errors import CheckError, InputError
from lockstep.runtime import (
    Advance,
    Decoding,
    Engine,
    Model,
    ModelOptions,
    Request,
    Sampling,
    Tokenizer,
    engine_core,
    generate,
    scheduler,
)
from lockstep.runtime.grammar import Grammar
from lockstep.step.logits_pipeline import Sampler, log_probabilities
from lockstep.targets import Target
from lockstep.verify.bisect.explain import engine_report
from lockstep.verify.golden.check import GoldenCheck, check_engines
from lockstep.verify.golden.moved import MovedCheck
from lockstep.verify.walk import Tokens
from lockstep.weights import Weights
from lockstep_gpu.backends.tensorrt.compat import TENSORRT
from some import some_cases

MODEL = "demo-llama"
FORMS = [("10.6.0", "fp16", "fused"), ("10.6.0", "fp32", "traced"), ("10.9.0", "fp16", "fused")]
# Of logits, largest 20: sums in another order; fp16: roundings between engines.
TOLERANCE = {"fp32": 2e-4, "fp16": 0.1}


def ask(request, fixture):
    """Return the forms of the tests that are to run, of those that take the fixture."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    taking = [item for item in items if fixture in getattr(item, "fixturenames", ())]
    return sorted({item.callspec.params["form"] for item in taking})


@pytest.fixture(scope="session")
def engines(demo, tmp_path_factory, request):
    """{(version, precision, attention): engines.json} of the forms that are requested"""
    folder = tmp_path_factory.mktemp("tensorrt")
    results = {}
    for version, precision, attention in ask(request, "engines"):
        with fake_gpu.installed(version):
            options = {
                "attention": attention,
                **{name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")},
            }
            results[version, precision, attention] = build(
                demo.assembly(MODEL, precision), "tensorrt", folder / version / attention / "engines.json", options
            )
    return results


def forms(*always):
    """All forms as parameters; those but `always` are long, for what runs is mostly the same."""
    return some_cases({"-".join(form): (form,) for form in FORMS}, *map("-".join, always))


@pytest.fixture(params=forms(FORMS[2]))
def form(request):
    return request.param


@pytest.fixture
def tensorrt_version(form):
    return form[0]


@pytest.fixture
def gpu(gpu, monkeypatch):
    from lockstep_gpu import weights as device_weights

    monkeypatch.setattr(device_weights, "PIECE_NBYTES", 1 << 15)  # several pieces of the demo's small weights
    return gpu


@pytest.fixture
def open_model(demo, engines, form, gpu):
    """A model of the form, of `layers` layers."""
    paths = engines[form], demo.assembly(MODEL, form[1]), demo.weights(MODEL, form[1])
    return lambda layers=2, **limits: Model.open(*paths, layers, ModelOptions(**{**LIMITS_OF_MODEL, **limits}))


LIMITS_OF_MODEL = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}


class Both:
    """The model against the same in ONNX Runtime, step by step. Each slot goes on with the token that was found.
    following: what each step is told of the next one."""

    def __init__(self, demo, open_model, precision, layers=2, following=False):
        self.reference = engine_steps.open_model(demo, precision, layers, **LIMITS_OF_MODEL)
        self.found = open_model(layers)
        self.tolerance = TOLERANCE[precision]
        self.next = {}
        self.random = np.random.default_rng(0)
        self.following = following

    def step(self, *slots, prompts=(), tokens=True):
        """One token of each of `slots`, and (slot, count) of `prompts`, which go on where the slot is, or begin; the
        tokens or the logits of it."""
        advances = [Advance(slot, np.array([self.next[slot]]), self.found.length(slot)) for slot in slots]
        advances += [
            Advance(slot, self.random.integers(0, 768, count), self.found.length(slot)) for slot, count in prompts
        ]
        expected = self.reference.step(advances)
        if tokens:
            step_tokens = self.found.step_tokens(advances, self.following)
            # The most likely one, or as likely within the tolerance.
            assert (expected[np.arange(len(advances)), step_tokens] >= expected.max(axis=1) - self.tolerance).all()
        else:
            logits = self.found.step(advances)
            np.testing.assert_allclose(logits, expected, rtol=0, atol=self.tolerance)
            step_tokens = logits.argmax(axis=1)
        self.next |= {advance.slot: token for advance, token in zip(advances, step_tokens.tolist())}

    def release(self, slot):
        self.reference.release(slot)
        self.found.release(slot)


AT_EXIT = """
import atexit, sys
from lockstep.runtime import Model, ModelOptions
import fake_gpu

# With separate globals: functions of this script would keep those of the script, and so the model.
spies = {}
exec(
    "import os\\nended = []\\n"
    "def spy(call, name, ended=ended, write=os.write):\\n"
    "    def destroy(*given):\\n"
    "        return write(2, f'{name} is destroyed, '.encode()) if ended else call(*given)\\n"
    "    return destroy\\n",
    spies,
)
for kind, name in ((fake_gpu.Gpu, "free"), (fake_gpu.Gpu, "free_host"), (fake_gpu.tensorrt.Context, "__del__")):
    setattr(kind, name, spies["spy"](getattr(kind, name, id), f"{kind.__name__}.{name}"))
installed = fake_gpu.installed(sys.argv[1])
installed.__enter__()
model = Model.open(*sys.argv[2:5], 2, ModelOptions(max_batch_size=4, max_num_tokens=128, max_seq_len=256))
import numpy as np
from lockstep.step.advance import Advance, then_decode
advances = [Advance(0, np.arange(3, 20), 0)]
model.step_tokens(advances, then_decode(advances))
atexit.register(spies["ended"].append, True)
"""


@pytest.mark.long
@pytest.mark.parametrize("form", forms(FORMS[2]), indirect=True)
def test_a_model_in_a_global_leaves_the_gpu_to_the_end_of_the_process(demo, engines, form, gpu):
    """The interpreter would destroy streams and engines in any order, after the driver's and TensorRT's own end."""
    paths = engines[form], demo.assembly(MODEL, form[1]), demo.weights(MODEL, form[1])
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT, form[0], *map(str, paths)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("following", [pytest.param(False, marks=pytest.mark.long), True])
def test_steps_give_what_onnx_runtime_gives(demo, open_model, form, gpu, following):
    pair = Both(demo, open_model, form[1], following=following)
    pair.step(prompts=[(2, 45), (0, 8)])
    for number in range(25):  # slot 2 goes over 64 tokens
        pair.step(2, 0, tokens=number % 8 != 3)
    pair.step(2, 0, prompts=[(1, 24), (3, 1)])
    pair.step(0, 1, 2, 3, tokens=False)
    pair.release(2)
    pair.step(3, 0, prompts=[(2, 100)])
    pair.step(1, prompts=[(2, 30), (0, 17)])  # slot 2 goes over 128
    for _ in range(4):
        pair.step(2, 1)
    pair.release(2)
    pair.release(0)
    for _ in range(4):
        pair.step(3, 1)
    pair.step(3, prompts=[(0, 3), (2, 70)])
    for _ in range(4):
        pair.step(0, 1, 2, 3)


def test_the_demo_passes_the_golden_check(references, engines, form, gpu, tmp_path):
    precision = form[1]
    expected = [prompt.expected["all"] for prompt in GOLDEN.prompts]
    check_engines(
        references.assembly(MODEL, precision), references.weights(MODEL, precision), engines[form],
        references.reference(MODEL, "all"), Target(MODEL, precision, "all", "tensorrt"), TOLERANCES[precision], LIMITS,
        tmp_path / "golden.json", tmp_path / "speed.json", expected,
    )  # fmt: skip
    assert read_json(tmp_path / "golden.json")["result"] == "pass"


@pytest.mark.parametrize("form", [pytest.param(FORMS[2], marks=pytest.mark.long)], indirect=True, ids="-".join)
def test_the_golden_check_sees_faults_of_pages_that_are_moved(references, engines, form, gpu):
    words = {
        "pages-copy": "choice 1 of 3 copies",
        "pages-swap": "swapped out and back",
        "pages-last": "the last pages of the cache",
    }
    check = GoldenCheck(
        references.assembly(MODEL, form[1]), references.weights(MODEL, form[1]), engines[form],
        references.reference(MODEL, 2), Target(MODEL, form[1], 2, "tensorrt"), TOLERANCES[form[1]], LIMITS, (), None,
    )  # fmt: skip
    for fault, how in words.items():
        with FAULTS[fault].change():
            MovedCheck(check, check.long).run()
        assert any(how in failure for failure in check.failures), fault
        check.failures.clear()
    states = MovedCheck(check, check.long).run()
    assert not check.failures and all(state.requests for state in states)


def test_a_block_that_leaves_its_graph_is_named_by_bisect(demo, engines, form, gpu, tmp_path):
    """The engine of another graph, which goes by the name and the digest of the right one; fused attention is no
    engine, and is left out."""
    assembly = demo.assembly(MODEL, form[1])
    weights = demo.weights(MODEL, form[1])
    inputs = tmp_path / "inputs.json"
    request = Tokens(np.arange(3, 20), 9)

    def report(engines_json):
        return engine_report(assembly, weights, engines_json, 2, TOLERANCES[form[1]], request, inputs=inputs)

    right = report(engines[form])
    assert right.fault is None and right.rows[-1].part == "runtime" and all(row.passed for row in right.rows)
    assert any(row.part == "attention" for row in right.rows) == (form[2] == "traced")
    for name, source in (("graphs", assembly.parent), ("engines", engines[form].parent)):
        shutil.copytree(source, tmp_path / name)
    graph = tmp_path / "graphs" / "exit.onnx"
    described = read_json(tmp_path / "graphs" / "assembly.json")
    model = onnx.load(graph)
    next(attribute for attribute in model.graph.node[-1].attribute if attribute.name == "alpha").f = 1.5
    onnx.save(model, graph)
    described["classes"]["exit"]["sha256"] = sha256_file(graph)
    write_json(tmp_path / "graphs" / "assembly.json", described)
    built = read_json(build(
        tmp_path / "graphs" / "assembly.json", "tensorrt", tmp_path / "engines" / "engines.json",
        # fewer tokens than the request has, and no spare row after them
        {**read_json(engines[form])["options"], "max_num_tokens": 8, "max_seq_len": 18},
    ))  # fmt: skip
    built["engines"]["exit"]["graph_sha256"] = read_json(assembly)["classes"]["exit"]["sha256"]
    write_json(tmp_path / "engines" / "engines.json", built)
    fault = report(tmp_path / "engines" / "engines.json").fault
    assert (fault.wrong, fault.graph, fault.part) == ("engine", "exit", "exit")
    assert "polygraphy debug reduce" in fault.look_at and " --trt " in fault.look_at
    (feeds,) = load_json(str(inputs))
    assert feeds["hidden"].shape[0] == 17


def test_generated_tokens_are_those_of_onnx_runtime(demo, open_model, form, gpu):
    """With requests that come and go, so that slots are taken again, and prompts between decode steps."""
    tokenizer = Tokenizer.open(demo.assembly(MODEL, form[1]))
    prompts = 2 * [prompt.text for prompt in GOLDEN.prompts]
    results = []
    for model in (engine_steps.open_model(demo, form[1], **LIMITS_OF_MODEL), open_model("all")):
        generation = generate(model, tokenizer, prompts, max_new_tokens=24)
        list(generation)
        results.append(generation.tokens)
    assert results[0] == results[1] and len(results[0]) == 8


def test_tokens_of_logits_that_are_not_finite_are_an_error(open_model, form, gpu):
    """The device chooses: nothing on the host has seen the logits."""
    model = open_model(2)
    (token,) = model.step_tokens([Advance(0, np.arange(5), 0)])
    gains = next(array for name, array in model.executor.ranks[0].network.exit.engine.weights.items() if "norm" in name)
    gpu.array(gains.address, gains.shape, gains.dtype)[3] = np.nan
    # -1 is no token that a step could go on with
    assert model.step_tokens([Advance(0, np.array([token]), 5)], following=True).tolist() == [-1] and model.in_flight
    model.set_sampling(1, Sampler(Sampling(1.0)))
    assert model.step_tokens([Advance(1, np.arange(5), 0)]).tolist() == [-1]
    for slot in range(2):
        model.release(slot)
    with pytest.raises(
        CheckError, match="prompt 1: logits: expected finite numbers, found NaN or infinity as the largest"
    ):
        list(Decoding(model, [Request([1, 2], 3)]))


def test_a_step_is_under_way_before_it_is_asked_for(demo, open_model, form, gpu, monkeypatch):
    """Another request in its place gets its own results."""
    from lockstep_gpu import cuda

    pair = Both(demo, open_model, form[1], following=True)
    pair.step(prompts=[(0, 8), (1, 5), (2, 50)])
    for _ in range(3):
        pair.step(0, 1, 2)
    wait = cuda.Event.wait
    launched = []
    with monkeypatch.context() as patched:
        patched.setattr(cuda.Event, "wait", lambda event: (launched.append(gpu.launches), wait(event)))
        for _ in range(14):  # slot 2 goes over 64 tokens
            launches = gpu.launches
            plain = gpu.plain
            pair.step(1, 2, 0)
            assert pair.found.in_flight
    assert (gpu.launches, gpu.plain) == (launches + 1, plain) and launched[-1] == launches + 1, (
        "a launch a step, before its tokens are waited for"
    )
    pair.step(2, 0)  # some of its rows
    assert pair.found.in_flight and gpu.launches == launches + 2, "the next one without the row that ended"
    for _ in range(2):
        pair.step(2, 0)
    pair.step(2, 1)  # a row that it has not
    pair.step(2, 1)
    pair.next[1] = 5  # another token
    pair.step(1, 2)
    pair.step(1, 2, tokens=False)  # logits
    pair.step(1, 2)
    pair.release(1)
    pair.step(1, 2)  # a request that begins with the token that another one would have gone on with
    pair.step(1, 2)
    pair.step(1, prompts=[(3, 7), (0, 4)])  # prompts
    pair.step(0, 1)
    pair.release(0)
    pair.release(1)
    pair.step(3, prompts=[(1, 120)])  # pages of rows that the step is still at work in
    for _ in range(2):
        pair.step(1, 2, 3)
    assert "step" in breakdown(pair.found.executor, 4) and not pair.found.in_flight
    for _ in range(3):
        pair.step(1, 2, 3)
    pair.step(2, prompts=[(1, 254 - pair.found.length(1))])
    for _ in range(2):
        pair.step(1, 2)
    assert pair.found.length(1) == 256 and not pair.found.in_flight  # no room for one more
    for _ in range(3):
        pair.step(2, 3)
    assert pair.found.in_flight  # for others there is


def test_what_may_never_be_asked_for_costs_nobody_a_token(demo, open_model, form, gpu, monkeypatch):
    """No memory for the step ahead; an interrupt while its predecessor is waited for."""
    from lockstep_gpu import cuda

    pair = Both(demo, open_model, form[1], following=True)
    pair.step(prompts=[(0, 61), (1, 5)])
    pair.step(0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(
            type(pair.found.executor.ranks[0].attentions[0]),
            "reserve",
            lambda self, ends, *arguments: refuse() if max(ends.values()) > 64 else False,
        )

        def refuse():
            raise CheckError("expected 1 MiB of free GPU memory")

        for _ in range(2):
            pair.step(0, 1)
        assert not pair.found.in_flight
        with pytest.raises(CheckError, match="free GPU memory"):
            pair.found.step_tokens([Advance(0, np.array([1]), 64)])
    for _ in range(2):
        pair.step(0, 1)
    with monkeypatch.context() as patched:

        def interrupted(event):
            raise KeyboardInterrupt

        patched.setattr(cuda.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.found.step_tokens(
                [Advance(slot, np.array([pair.next[slot]]), pair.found.length(slot)) for slot in (0, 1)], following=True
            )
    for _ in range(3):
        pair.step(0, 1)


def test_decoding_goes_ahead_whatever_comes_and_goes_and_ends_with_nothing_under_way(open_model, form, gpu):
    model = open_model()
    requests = [Request(np.arange(1, 6), count) for count in (4, 4, 4, 9, 12)]
    decoding = Decoding(model, requests)
    moves = decoding.engine.scheduler  # a step after which requests move to lower slots is waited for
    steps = [(output.request, model.in_flight or moves.is_spread) for output in decoding]
    assert len(steps) == 33 and not steps[-1][1] and all(ahead for _, ahead in steps[:-1])


def test_a_decode_step_is_one_launch_of_a_graph(demo, open_model, form, gpu):
    pair = Both(demo, open_model, form[1])
    pair.step(prompts=[(0, 8), (1, 5)])
    for _ in range(2):
        pair.step(0, 1)
    launches = gpu.launches
    plain = gpu.plain
    for _ in range(5):
        pair.step(0, 1)
    assert (gpu.launches, gpu.plain) == (launches + 5, plain)


def test_rows_decode_in_the_pass_of_prompts(demo, open_model, form, gpu, monkeypatch):
    """The blocks run once; only tokens come back, and the step after sends no token or position."""
    from lockstep_gpu import cuda

    pair = Both(demo, open_model, form[1])
    sent = []
    fetched = []
    pair.step(prompts=[(0, 8), (1, 5)])
    for _ in range(3):
        pair.step(0, 1)
    upload = cuda.Stream.upload
    download = cuda.Stream.download
    monkeypatch.setattr(cuda.Stream, "upload", lambda *arguments: (sent.append(arguments[1]), upload(*arguments))[1])
    monkeypatch.setattr(
        cuda.Stream, "download", lambda *arguments: (fetched.append(arguments[2]), download(*arguments))[1]
    )
    launches = gpu.launches
    executor = pair.found.executor
    state = executor.ranks[0].state
    pair.step(0, 1, prompts=[(2, 30), (3, 5)])
    assert gpu.launches == launches and [array.address for array in fetched] == [state.next_tokens.address]
    assert [name for name, _ in executor.runner.last[0].calls].count("block") == len(executor.ranks[0].network.layers)
    assert state.token_ids.address not in [array.address for array in sent]
    for slots in ((0, 1, 2, 3), (0, 1, 2, 3), (1, 3), (0, 1, 2, 3)):
        sent.clear()
        pair.step(*slots)
        assert {array.address for array in sent} <= {state.rows.address, *tables(pair.found)}
    sent.clear()
    pair.next[1] = 5  # another token than the one that was found
    pair.step(0, 1)
    assert {state.token_ids.address, state.positions.address} <= {array.address for array in sent}


def test_a_pass_has_room_for_all_rows_beside_a_full_prompt(demo, open_model, form, gpu):
    """Rows are all up to the highest that decodes: more than the tokens that the step brings."""
    pair = Both(demo, open_model, form[1])
    max_tokens = LIMITS.max_num_tokens
    pair.step(prompts=[(3, 8)])
    pair.step(3)
    longest = LIMITS.max_seq_len
    pair.step(3, prompts=[(0, longest), (1, max_tokens - 1 - longest)])
    pair.step(3, 1)


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_rows_decode_by_themselves_where_prompts_would_take_the_profile_of_longer_ones(demo, gpu, form, tmp_path):
    """Blocks take as long as at the size that their profile is tuned for: 513 tokens as 1024, 5 as 512."""
    limits = {"max_batch_size": 4, "max_num_tokens": 2048, "max_seq_len": 512}
    assembly = demo.assembly(MODEL, form[1])
    engines = build(assembly, "tensorrt", tmp_path / "engines.json", {**limits, "attention": form[2]})
    model = Model.open(engines, assembly, demo.weights(MODEL, form[1]), 2)
    assert [model.executor.ranks[0].tuned_for(count) for count in (1, 3, 4, 5, 512, 513, 1025)] == [
        1, 4, 4, 512, 512, 1024, 2048,
    ]  # fmt: skip
    model.step_tokens([Advance(0, np.arange(9), 0)])
    for length, (count, num_passes) in enumerate(((4, 2), (511, 1), (512, 2), (30, 1)), 9):
        halves = [Advance(1, np.arange(count // 2), 0), Advance(2, np.arange(count - count // 2), 0)]
        model.step_tokens([Advance(0, np.array([5]), length), *halves])
        assert len(model.executor.last_step.passes) == num_passes


def put_passes(model, monkeypatch):
    """Fills with the lengths of what each step brings that is put on the streams."""
    runner = model.executor.runner
    put = []
    enqueue = runner.enqueue
    monkeypatch.setattr(
        runner,
        "enqueue",
        lambda plan: (put.append([len(advance.tokens) for advance in (*plan.decoding, *plan.chunks)]), enqueue(plan))[
            1
        ],
    )
    return put


def test_each_step_is_begun_once_before_the_tokens_of_the_one_before_with_the_prompts_that_it_takes_in(
    open_model, form, gpu, monkeypatch
):
    """The parts of a long prompt, prompts that waited for a slot, and one that came while a step was under way."""
    model = open_model(max_batch_size=2, chunk_size=16, max_num_tokens=64)
    put = put_passes(model, monkeypatch)
    ahead = []
    engine = Engine(model, prefix_caching=False)
    for count, new in ((5, 7), (140, 2), (4, 3)):
        engine.add(Request(np.arange(count), new))
    while engine.has_work:
        engine.step()
        ahead.append(model.in_flight)
        if len(ahead) == 6:
            engine.add(Request(np.arange(7), 2))
    assert put == [
        [5, 48],
        [1, 48],
        [1, 44],
        [1, 1],
        [1],  # the second request has ended, which only the step after knows
        [1, 4],
        [1, 1],
        [1],  # so has the first
        [7],
        [1],
    ]
    assert ahead == [*[True] * (len(put) - 1), False]


def test_the_wait_for_a_request_behind_a_stop_token_is_no_time_of_a_step(open_model, form, gpu, monkeypatch):
    clock = [1.0]
    monkeypatch.setattr(engine_core.time, "perf_counter", lambda: clock[0])
    model = open_model()
    engine = Engine(model)
    (first, *_) = tokens_of(engine, [Request(np.arange(9), 4)])[0, 0]
    assert engine.speed.prefill_seconds == 0
    for output in engine.run([Request(np.arange(9), 4, stop_ids=frozenset([first]))]):
        assert output.finish == "stop_id" and model.in_flight
    clock[0] = 3600.0
    tokens_of(engine, [Request(np.arange(9), 4)])
    assert engine.speed.prefill_seconds == engine.speed.decode_seconds == 0


class Chaos:
    """Requests that come, end early and are aborted at random."""

    def __init__(self, seed, adapters=(None,)):
        random = self.random = np.random.default_rng(seed)
        prefix = random.integers(0, 768, 130)
        self.requests = []
        for number in range(16):
            prompt = random.integers(0, 768, random.integers(*((1, 90) if number % 2 else (56, 64))))
            if number % 3 == 0:
                prompt = np.append(prefix, prompt[:40])
            rule = dataclasses.replace((PROCESSED if number % 3 == 2 else RULES)[number % 4], seed=number)
            self.requests.append(Request(
                prompt, int(random.integers(1 if number % 2 else 12, 20)), sampling=rule, n=1 + (number % 7 == 5),
                adapter=adapters[number % len(adapters)], priority=int(random.integers(0, 2)),
            ))  # fmt: skip

    def expect(self, engine):
        """The tokens of each request alone; every third one is to stop at one of them from now on."""
        self.alone = [tokens_of(engine, [request]) for request in self.requests]
        for number, (request, tokens) in enumerate(zip(self.requests, self.alone)):
            if number % 3 == 1 and request.n == 1:
                stop = int(self.random.choice(tokens[0, 0]))
                end = tokens[0, 0].index(stop) + 1
                self.requests[number] = dataclasses.replace(request, stop_ids=frozenset([stop]))
                self.alone[number] = {(0, 0): tokens[0, 0][:end]}

    def check(self, engine):
        results = {}
        aborted = set()
        numbers = {}
        slots = list(self.random.permutation(len(self.requests)))
        while slots or engine.has_work:
            for _ in range(min(len(slots), int(self.random.integers(0, 3)))):
                number = slots.pop()
                numbers[engine.add(self.requests[number])] = number
            if numbers and self.random.random() < 0.1:
                number = int(self.random.choice(list(numbers)[-6:]))
                if engine.abort(number):
                    aborted.add(numbers[number])
            for output in engine.step():
                results.setdefault(numbers[output.request], {}).setdefault((0, output.choice), []).append(output.token)
        engine.scheduler.check()
        for number, expected in enumerate(self.alone):
            tokens = results.get(number, {})
            if number in aborted:
                assert all(token == expected[key][: len(token)] for key, token in tokens.items())
            else:
                assert tokens == expected, number
        assert 0 < len(aborted) < len(self.requests) / 2


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(seed for seed in (1, 2))])
@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_any_schedule_gives_the_tokens_of_each_request_alone_with_steps_begun_early(
    open_model, form, gpu, monkeypatch, seed
):
    model = open_model(chunk_size=64)
    chaos = Chaos(seed)
    with monkeypatch.context() as patched:
        patched.setattr(model.executor, "async_scheduling", False, raising=False)
        chaos.expect(Engine(model, prefix_caching=False))
    put = put_passes(model, monkeypatch)
    chaos.check(Engine(model))
    assert sum(len(item) > 1 and max(item) > 1 for item in put) > 5
    model.tables.pool.forget()
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 1)
    small = open_model(chunk_size=64, kv_bytes=4 * model.tables.pool.page_nbytes)
    engine = Engine(small, admission="optimistic")
    chaos.check(engine)
    assert engine.scheduler.num_swaps


def tables(model):
    """Addresses of the page tables of a model."""
    return {attention.table.address for attention in model.executor.ranks[0].attentions if hasattr(attention, "table")}


def test_prompts_that_arrive_follow_the_step_that_is_under_way(demo, open_model, form, gpu):
    """It is not taken again; and the step after both goes ahead too."""
    pair = Both(demo, open_model, form[1], following=True)
    pair.step(prompts=[(0, 8), (1, 63)])  # a cache of 64, where the step under way writes the last token
    assert pair.found.in_flight, "the prompts' next tokens are on the device"
    for _ in range(3):
        pair.step(0, 1)
    launches = gpu.launches
    pair.step(0, 1, prompts=[(2, 100)])  # the cache grows
    assert pair.found.in_flight and gpu.launches <= launches + 1, "no launch but the one ahead"
    pair.step(0, 1, 2)
    launches = gpu.launches
    pair.step(0, 2, prompts=[(1, 7), (3, 2)])  # a row of the step goes on with other tokens
    pair.step(0, 1, 2, 3)
    pair.step(0, 2, prompts=[(3, 40)])
    pair.step(0, 2)  # while slot 3 is in the middle of its prompt
    pair.step(0, 2, prompts=[(3, 20)])
    pair.step(0, 2, 3)
    pair.step(prompts=[(1, 9)])  # none of the rows under way
    for _ in range(2):
        pair.step(0, 1, 2, 3)
    pair.step(0, 1, prompts=[(2, 9)], tokens=False)
    pair.step(0, 1, 2)


def test_nothing_is_captured_or_planned_for_a_request_behind_the_warm_up(demo, open_model, form, gpu, monkeypatch):
    from lockstep_gpu import cuda

    pair = Both(demo, open_model, form[1], following=True)
    pair.found.warm_up()
    captures = []
    contexts = len(gpu.profiles)
    capture = cuda.Stream.capture
    monkeypatch.setattr(cuda.Stream, "capture", lambda stream: (captures.append(1), capture(stream))[1])
    if form[2] == "fused":
        from lockstep_gpu.attention import prompt as prompt_attention

        monkeypatch.setattr(prompt_attention, "CudnnPlan", None)
    pair.step(prompts=[(0, 8), (1, 5), (2, 3)])
    for _ in range(3):
        pair.step(0, 1, 2)
    pair.step(0, 1, 2, prompts=[(3, 30)])
    for _ in range(3):
        pair.step(3, 2)
    if form[2] == "fused":  # traced attention has contexts and graphs by the capacity of its cache
        pair.step(2, prompts=[(0, 190), (1, 240), (3, 33)])
    assert not captures and (form[2] == "traced" or len(gpu.profiles) == contexts)
    for slot in range(4):
        pair.release(slot)
    pair.step(prompts=[(3, 2)])


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
@pytest.mark.parametrize("refused", [False, True])
def test_prompts_are_one_call_of_attention(demo, open_model, gpu, monkeypatch, capsys, refused):
    from lockstep_gpu.attention import prompt as prompt_attention

    results = []
    init = prompt_attention.CudnnPlan.__init__

    def plan(self, size, stream, packed):
        if refused and packed:
            raise CheckError("no attention for several")
        init(self, size, stream, packed)

    monkeypatch.setattr(prompt_attention.CudnnPlan, "__init__", plan)
    bind = prompt_attention.CudnnPlan.bind

    def bound(self, *arguments):
        results.append(arguments)
        return bind(self, *arguments)

    monkeypatch.setattr(prompt_attention.CudnnPlan, "bind", bound)
    prompt_attention.packed_plan.cache_clear()
    pair = Both(demo, open_model, "fp16")
    pair.step(prompts=[(0, 3), (1, 40), (2, 12), (3, 16)], tokens=False)
    assert len(results) == 2 * (4 if refused else 1)
    pair.step(prompts=[(2, 20), (1, 17), (3, 30), (0, 32)], tokens=False)  # after what the rows hold
    assert len(results) == 2 * (8 if refused else 2)
    assert capsys.readouterr().err.count("has no attention of several prompts") == refused
    for _ in range(2):
        pair.step(0, 1, 2, 3)
    prompt_attention.packed_plan.cache_clear()


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_attention_of_more_sizes_than_graphs_may_take_is_called_one_by_one(demo, open_model, form, monkeypatch):
    from lockstep_gpu.attention import prompt as prompt_attention

    monkeypatch.setattr(prompt_attention, "MAX_CAPTURED_SIZES", 2)
    pair = Both(demo, open_model, form[1])
    for counts in 3 * ((8, 5), (20, 3), (5,), (40, 3)):
        pair.step(prompts=list(enumerate(counts)), tokens=False)
        for slot in range(len(counts)):
            pair.release(slot)
    graphs = pair.found.executor.ranks[0].graphs
    assert {key[2:] for key in graphs if key[0] == "prompts"} == {(0, 2, 16), (0, 2, 32), (0, 0, 16)}


@pytest.mark.parametrize("form", [FORMS[1]], indirect=True)
def test_what_is_sent_is_what_it_was_when_it_was_sent(form, gpu):
    """However far the host is ahead of the device."""
    from lockstep_gpu import cuda, staging

    stream = cuda.Stream()
    sender = staging.Staging(20, 2)
    arrays = [(cuda.zeros((3,), "i4"), cuda.zeros((1,), "i8")) for _ in range(6)]
    values = np.arange(3)
    for first, second in arrays:
        sender.send(stream, [(first, values), (second, values[:1])])
        values += 10
    stream.synchronize()
    for number, (first, second) in enumerate(arrays):
        assert down(first).tolist() == [10 * number, 10 * number + 1, 10 * number + 2]
        assert down(second).tolist() == [10 * number]


@pytest.mark.parametrize("fails", [1, 4])
def test_a_prompt_is_worked_on_while_it_is_prepared_and_may_fail_half_way(
    demo, open_model, form, gpu, monkeypatch, fails
):
    """A new request and one that goes on, with a row that decodes: the rows keep their tokens, and the next step sees
    nothing of the failed one."""
    from lockstep_gpu.ranks import blocks

    models = Both(demo, open_model, form[1], "all")
    models.step(prompts=[(0, 8), (1, 5)])
    results = []
    prepare = blocks.PrefillPass.calls

    def broken(*arguments):
        if len(results) == fails:
            raise CheckError("no more memory")
        results.append(arguments)
        return prepare(*arguments)

    models.step(0)  # which makes the plan of one row
    before = gpu.plain
    lengths = [models.found.length(slot) for slot in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(blocks.PrefillPass, "calls", broken)
        with pytest.raises(CheckError, match="no more memory"):
            models.found.step([Advance(0, np.array([3]), 9), Advance(1, np.arange(4), 5), Advance(2, np.arange(60), 0)])
    assert gpu.plain > before and [models.found.length(slot) for slot in range(3)] == lengths
    # The failed step left NaN in the new row, as the worst case. Pages after a row's tokens are not read.
    if form[2] == "traced":
        for pair in models.found.executor.ranks[0].attentions[0].cache.values():
            for array in pair:
                gpu.array(array.address, array.shape, array.dtype)[2] = np.nan
    models.step(0, prompts=[(1, 3), (2, 10)])
    for _ in range(3):
        models.step(0, 1, 2, tokens=False)


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_a_cache_leaves_room_for_graphs(open_model, form, monkeypatch):
    from lockstep_gpu.attention import make

    network = open_model().executor.ranks[0].network
    monkeypatch.setattr(make, "OTHER_NBYTES", 1 << 20)
    for free, share in ((100 << 20, 0.9), (5 << 20, 0.8), (1 << 20, 0.5)):
        pool = make.make_tables(network, 1000, 4096, None, free).pool
        assert 0 <= free * share - pool.num_pages * pool.page_nbytes < pool.page_nbytes


@pytest.mark.parametrize("form", [FORMS[1]], indirect=True)
def test_graphs_outlive_another_model_that_needs_more_memory(demo, open_model, form, gpu, monkeypatch):
    pair = Both(demo, open_model, form[1])
    pair.step(prompts=[(0, 8)])
    for _ in range(3):
        pair.step(0)
    needed = TENSORRT.device_memory_size
    monkeypatch.setattr(TENSORRT, "device_memory_size", lambda engine: 2 * needed(engine))
    other = Both(demo, open_model, form[1])
    for _ in range(3):
        other.step(prompts=[(0, 8)])
        pair.step(0)
    for _ in range(3):
        other.step(0)
        pair.step(0)


def test_a_model_that_is_deleted_gives_its_memory_back_at_once(open_model, form, gpu):
    lefts = []
    for _ in range(2):
        model = open_model()
        for start, count in ((0, 5), (5, 1), (6, 1), (7, 1)):
            model.step_tokens([Advance(0, np.arange(count), start)], following=True)
        assert model.in_flight
        gc.collect()
        gc.disable()
        try:
            blocks = gpu.blocks
            del model
            lefts.append(gpu.blocks)
        finally:
            gc.enable()
    # The process keeps the memory that contexts work in, and with fused attention cuDNN's.
    assert lefts[1] <= lefts[0] <= 2 and lefts[0] < blocks
    from lockstep_gpu.device import Device

    Device.get().stream.synchronize()  # nothing is at work any more in what was freed


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
@pytest.mark.parametrize("tokens", [4, 8, 12, 17, 24])
def test_small_limits_leave_room_for_what_fused_attention_touches(open_model, gpu, tokens):
    alone, packed = (open_model(max_batch_size=rows, max_num_tokens=tokens) for rows in (1, 2))
    assert np.isfinite(alone.step([Advance(0, np.arange(tokens), 0)])).all()
    assert np.isfinite(packed.step([Advance(0, np.arange(tokens - 2), 0), Advance(1, np.arange(2), 0)])).all()


def test_a_model_opened_without_limits_takes_no_more_than_its_engines(demo, engines, form, gpu):
    model = Model.open(engines[form], demo.assembly(MODEL, form[1]), demo.weights(MODEL, form[1]), 2)
    max_tokens = LIMITS.max_num_tokens // LIMITS.max_batch_size
    assert model.step([Advance(slot, np.arange(max_tokens), 0) for slot in range(LIMITS.max_batch_size)]).shape == (
        LIMITS.max_batch_size,
        768,
    )
    with pytest.raises(InputError, match=rf"expected at most {LIMITS.max_num_tokens} tokens \(max_num_tokens\)"):
        model.step([Advance(slot, np.arange(max_tokens + (slot == 3)), 0) for slot in range(LIMITS.max_batch_size)])


def tokens_of(engine, requests) -> dict[tuple[int, int], list[int]]:
    """By request, from 0, and choice."""
    results: dict[tuple[int, int], list[int]] = {}
    for output in engine.run(requests):
        results.setdefault((output.request, output.choice), []).append(output.token)
    assert not engine.has_work
    engine.scheduler.check()
    first = min(number for number, _ in results)
    return {(number - first, choice): tokens for (number, choice), tokens in results.items()}


RULES = [Sampling(1.2, seed=2**64 - 1), Sampling(), Sampling(0.8, top_p=0.95, seed=7), Sampling(2.0, 50, min_p=0.01)]


PROCESSED = [
    Sampling(0.8, top_p=0.95, repetition_penalty=1.3, logprobs=5, seed=1),
    Sampling(presence_penalty=1.0, frequency_penalty=0.5),
    Sampling(1.5, logit_bias={9: 8.0, 11: -4.0}, min_tokens=5, seed=3),
    Sampling(bad_words=((600,),), logprobs=2),
    Sampling(0.9, top_k=40, bad_words=((7, 8),), repetition_penalty=0.8, seed=5),
]


def by_logits(request: Request, allowed=lambda answer: None) -> Request:
    """Return a request whose tokens the host chooses: by the plain sampler, from logits, with the mask of a grammar."""
    sampler = Sampler(request.sampling, request.prompt_ids, request.stop_ids)
    answer: list[int] = []

    def choose(row: np.ndarray) -> int:
        answer.append(sampler(row, len(request.prompt_ids) + len(answer), allowed(answer)).token)
        return answer[-1]

    return dataclasses.replace(request, choose=choose, sampling=Sampling(), grammar=None)


@pytest.mark.parametrize("rules", [RULES, PROCESSED[:4]], ids=["drawn", "processed"])
def test_requests_are_sampled_on_the_device_with_a_step_under_way(open_model, form, gpu, monkeypatch, rules):
    """The tokens that the host chooses from the same logits, in slots that others had."""
    from lockstep_gpu import cuda

    model = open_model()
    fetched = set()
    prompts = [np.random.default_rng(seed).integers(0, 768, count) for seed, count in enumerate((5, 70, 9, 30, 3, 100))]
    requests = [
        Request(prompt, 12 + number, sampling=rules[number % 4], stop_ids=frozenset([9]))
        for number, prompt in enumerate(prompts)
    ]
    expected = {}
    rows = {}
    for token in Engine(model, prefix_caching=False).run([by_logits(request) for request in requests]):
        expected.setdefault(token.request, []).append(token.token)
        rows.setdefault(token.request, []).append(token.logits)
    download = cuda.Stream.download
    with monkeypatch.context() as patched:
        patched.setattr(
            cuda.Stream, "download", lambda *arguments: (fetched.add(arguments[2].address), download(*arguments))[1]
        )
        engine = Engine(model, prefix_caching=False)
        actual = {}
        ahead = []
        for token in engine.run(requests):
            position = len(actual.setdefault(token.request, []))
            actual[token.request].append(token.token)
            ahead.append(model.in_flight or engine.scheduler.is_spread)
            count = requests[token.request].sampling.logprobs
            assert token.logits is None and (token.logprobs is None) == (count is None)
            if count is not None:
                logprobs = log_probabilities(rows[token.request][position], token.token, count)
                assert [id for id, _ in token.logprobs.top] == [id for id, _ in logprobs.top]
                np.testing.assert_allclose(token.logprobs.chosen, logprobs.chosen, atol=1e-6)
    state = model.executor.ranks[0].state
    logprobs = {state.logits_tables.logprobs.address} if rules is not RULES else set()
    assert actual == expected and fetched == {state.next_tokens.address} | logprobs and all(ahead[:-1])
    alone = [tokens_of(Engine(model), [request])[0, 0] for request in requests]
    assert [expected[number] for number in range(6)] == alone


class Cycle:
    """A grammar that allows every third token, those that follow the last one; it compiles itself, and matches."""

    def __init__(self):
        self.last = 0
        self.outcomes = []

    def submit(self, key, *arguments):
        self.outcomes.append((key, self))

    def poll(self):
        return [self.outcomes.pop()] if self.outcomes else []

    def consume(self, token):
        self.last = token

    def allowed(self, end_ids):
        return self.mask([self.last])

    @staticmethod
    def mask(answer):
        return np.arange(768) % 3 == ([0, *answer][-1] + 1) % 3


def test_masks_of_grammars_and_bad_words_are_applied_on_the_device(open_model, form, gpu):
    """Their tokens are those of the plain sampler; no logits come back, and the steps between are launched ahead."""
    model = open_model()
    sampling = Sampling(0.9, min_p=0.01, seed=8, presence_penalty=0.5)
    requests = [Request(np.arange(3, 20), 9, sampling=sampling, grammar=Grammar("regex", ".*"))]
    greedy = Sampling(bad_words=((600,),))
    requests += [Request(np.arange(30, 90), 9, sampling=rules) for rules in (PROCESSED[4], PROCESSED[0], greedy)]
    masks = [Cycle.mask, *[lambda answer: None] * 3]
    expected = tokens_of(Engine(model), [by_logits(*pair) for pair in zip(requests, masks)])
    actual: dict[tuple[int, int], list[int]] = {}
    for token in Engine(model, grammars={"": Cycle()}).run(requests):
        actual.setdefault((token.request, 0), []).append(token.token)
        assert token.logits is None
    assert actual == expected


def test_requests_that_are_left_in_high_slots_move_to_low_ones_with_their_tokens(open_model, form, gpu):
    """Else a step computes the rows of all free slots below them."""
    model = open_model()
    prompts = [np.arange(3, 9 + 30 * number) for number in range(4)]
    requests = [
        Request(prompt, 40 if number == 3 else 5, sampling=RULES[number % 2]) for number, prompt in enumerate(prompts)
    ]
    alone = [tokens_of(Engine(model, prefix_caching=False), [request])[0, 0] for request in requests]
    engine = Engine(model, prefix_caching=False)
    rows = []
    runner = model.executor.runner
    decode_pass = runner.decode_pass

    def noted(count, *arguments):
        rows.append(count)
        return decode_pass(count, *arguments)

    with mock.patch.object(runner, "decode_pass", noted):  # holds the model no longer than the GPU is there
        tokens = tokens_of(engine, requests)
    assert [tokens[number, 0] for number in range(4)] == alone
    assert rows[0] == 4 and rows[-1] == (4 if form[2] == "traced" else 1)


def test_choices_of_a_sampled_request_draw_for_themselves(open_model, form, gpu):
    model = open_model()
    request = Request(np.arange(3, 20), 10, sampling=dataclasses.replace(RULES[0], logprobs=0), n=3)
    drawn, by_logits = (tokens_of(Engine(model, samples_on_host=on_host), [request]) for on_host in (False, True))
    assert drawn == by_logits and len({tuple(tokens) for tokens in drawn.values()}) == 3


def test_only_the_logits_of_requests_that_need_them_come_back(open_model, form, gpu, monkeypatch):
    from lockstep_gpu import cuda

    model = open_model()
    first = [Advance(slot, np.arange(2, 9 + slot), 0) for slot in range(3)]
    _, none = model.step_with_logits(first, [])
    for slot in range(3):
        model.release(slot)
    expected = model.step(first)
    tokens = {}
    assert none.shape == (0, 768)
    for slot in range(3):
        model.release(slot)
    fetched = []
    download = cuda.Stream.download
    monkeypatch.setattr(
        cuda.Stream, "download", lambda *arguments: (fetched.append(arguments[2].shape), download(*arguments))[1]
    )
    actual, logits = model.step_with_logits(first, [2, 0])
    assert sorted(fetched) == [(1, 768), (1, 768), (model.max_batch_size,)]
    np.testing.assert_array_equal(logits, expected[[2, 0]])
    tokens = dict(enumerate(actual.tolist()))

    def advances():
        return [Advance(slot, np.array([tokens[slot]]), model.length(slot)) for slot in (1, 2, 0)]

    tokens |= zip((1, 2, 0), model.step_tokens(advances(), following=True).tolist())
    assert model.in_flight
    actual, logits = model.step_with_logits(advances(), [1])  # of the step under way
    assert logits.shape == (1, 768) and logits.argmax() == actual[1] and not model.in_flight


def test_a_step_under_way_is_not_asked_for_in_a_slot_that_samples_in_another_way(open_model, form, gpu):
    model = open_model()
    tokens = model.step_tokens([Advance(slot, np.arange(2, 9), 0) for slot in range(2)], following=True)
    model.set_sampling(1, Sampler(Sampling(50.0, seed=3)))  # hot: another token than the likeliest
    advances = [Advance(slot, tokens[slot : slot + 1], 7) for slot in range(2)]
    step_tokens, logits = model.step_with_logits(advances, [0, 1])
    assert step_tokens.tolist() == [logits[0].argmax(), Sampler(Sampling(50.0, seed=3))(logits[1], 8).token]
    assert step_tokens[1] != logits[1].argmax()
    for slot in range(2):
        model.release(slot)
    step_tokens = model.step_tokens([Advance(slot, np.arange(2, 9), 0) for slot in range(2)])
    assert step_tokens.tolist() == tokens.tolist(), "greedy again"


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_what_is_swapped_out_comes_back_in_other_pages(demo, open_model, form, gpu):
    pair = Both(demo, open_model, form[1], following=True)
    pair.step(prompts=[(0, 8), (1, 100), (2, 64)])
    pair.step(0, 1, 2)
    model = pair.found
    before = list(model.tables[1])
    swapped = model.swap_out(1)
    assert model.length(1) == 0 and not model.tables[1]
    pair.step(0, 2, prompts=[(3, 150)])  # takes its pages
    model.tables.reserve({1: 102})
    assert list(model.tables[1]) != before
    model.swap_in(1, swapped)
    pair.step(0, 1, 2, 3)
    pair.step(1, 2)
    pair.step(0, prompts=[(1, 30)])


def down(array) -> np.ndarray:
    """What a device array holds, once the uploads before are through."""
    from lockstep_gpu import cuda

    host = np.empty(array.shape, array.dtype)
    stream = cuda.Stream()
    stream.download(host, array)
    stream.synchronize()
    return host


def test_the_parts_of_a_slot_lie_side_by_side_and_are_uploaded_once(demo, form, gpu):
    from lockstep_gpu import weights as device_weights

    weights = Weights.open(demo.weights(MODEL, form[1]))
    DeviceWeights = device_weights.DeviceWeights
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    rows = np.concatenate([weights[name] for name in names])
    dtype = weights[names[0]].dtype
    assert rows.nbytes > 2 * device_weights.PIECE_NBYTES
    store = DeviceWeights.of(weights, device_weights.Device.get())
    array = store.put(weights, names, rows.shape, dtype, "slot")
    blocks = gpu.blocks
    assert DeviceWeights.of(weights, device_weights.Device.get()) is store
    assert store.put(weights, names, rows.shape, dtype, "slot").address == array.address and gpu.blocks == blocks
    store.uploads.wait()
    np.testing.assert_array_equal(down(array), rows)
    for shape, kind in (((rows.shape[0], rows.shape[1] + 1), dtype), (rows.shape, np.dtype("f8"))):
        with pytest.raises(
            CheckError,
            match=r"where: expected weights .*, found float\d+ \[80, 144\], .*are "
            r"graphs and weights of one model and precision",
        ):
            store.put(weights, names[::-1], shape, kind, "where")


def test_an_upload_holds_the_memory_that_it_writes(demo, form, gpu, monkeypatch):
    from lockstep_gpu import weights as device_weights

    weights = Weights.open(demo.weights(MODEL, form[1]))
    go_on = threading.Event()
    copy = device_weights.Uploader.copy_piece
    monkeypatch.setattr(device_weights.Uploader, "copy_piece", lambda self, *piece: (go_on.wait(), copy(self, *piece)))
    store = device_weights.DeviceWeights.of(weights, device_weights.Device.get())
    weight = "lm_head.weight"
    array = store.put(weights, [weight], weights[weight].shape, weights[weight].dtype, "slot")
    del array  # whoever asked for it has gone
    go_on.set()
    store.uploads.wait()


def test_a_failed_upload_stops_its_own_model_and_no_other(open_model, gpu, monkeypatch):
    from lockstep_gpu import weights as device_weights

    def fail(*arguments):
        raise CheckError("CUDA: cudaErrorUnknown")

    with monkeypatch.context() as patch:
        patch.setattr(device_weights.Uploader, "copy_piece", fail)
        failed = open_model()
    assert np.isfinite(open_model().step([Advance(0, np.arange(3), 0)])).all()
    for _ in range(2):
        with pytest.raises(CheckError, match="cudaErrorUnknown"):
            failed.step([Advance(0, np.arange(3), 0)])


def settled(gpu) -> int:
    """Return the bytes in use, once the threads that upload have released their last copies."""
    from lockstep_gpu import weights as device_weights
    from lockstep_gpu.device import Device

    gc.collect()
    # A thread takes the next work only when it has released the last: each of them meets all others here.
    pool = device_weights.Uploader.of(Device.get())._pool
    barrier = threading.Barrier(pool._max_workers)
    for met in [pool.submit(barrier.wait) for _ in range(barrier.parties)]:
        met.result()
    return gpu.used


@pytest.mark.parametrize(("share", "what"), [(0.2, "weights"), (0.8, "the values of a step")])
def test_too_little_memory_is_told_with_what_it_was_for(open_model, gpu, share, what):
    prompt = [Advance(0, np.arange(3), 0)]
    open_model().step(prompt)
    before = settled(gpu)
    model = open_model()
    model.step(prompt)
    gpu.total = before + int(share * (settled(gpu) - before))
    del model
    settled(gpu)
    with pytest.raises(
        CheckError,
        match=rf"^expected \d+ MiB of free GPU memory for {what}, found \d+ MiB "
        rf"of \d+ MiB; lower limits.max_batch_size",
    ):
        open_model().step(prompt)


@pytest.mark.parametrize("form", [FORMS[1]], indirect=True)
def test_a_cache_that_cannot_grow_stays_what_it_was(demo, open_model, form, gpu):
    pair = Both(demo, open_model, form[1])
    pair.step(prompts=[(0, 62)])
    pair.step(0)
    pair.step(0)
    # one layer's keys in a cache of 128, no more
    total = gpu.total
    gpu.total = gpu.used + (200 << 10)
    with pytest.raises(CheckError, match="MiB of free GPU memory for the KV cache"):
        pair.found.step([Advance(0, np.array([1]), 64)])
    gpu.total = total
    for _ in range(3):
        pair.step(0, tokens=False)


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_pages_of_a_step_are_not_told_to_the_step_before(open_model, gpu):
    from lockstep_gpu import cuda

    executor = open_model().executor
    lengths = np.zeros(4, np.int64)
    table = cuda.pinned((4, 4), "i4")
    (attention,) = executor.ranks[0].attentions
    pages = [list(executor.tables[slot]) for slot in range(4)]
    for ends in ({1: 65}, {0: 1, 2: 130, 1: 128}):
        executor.runner.reserve(ends, lengths)
        pages.append([[*executor.tables[slot], 0, 0, 0, 0][:4] for slot in range(4)])
        if len(pages) == 5:
            executor.ranks[0].stream.download(table, attention.table)
    executor.ranks[0].stream.synchronize()
    assert table.tolist() == pages[4] and pages[4] != pages[5] == down(attention.table).tolist()


@pytest.mark.parametrize("form", FORMS[:1], indirect=True)
@pytest.mark.parametrize(
    ("call", "arguments"),
    [("set_profile", (1, 0)), ("set_input_shape", ("x", (1,))), ("set_tensor_address", ("x", 1)), ("enqueue", (0,))],
)
def test_what_tensorrt_said_before_is_not_told_as_the_error(gpu, call, arguments):
    def refuse(*arguments):
        TENSORRT.log.errors.append("the error of this call")
        return False

    methods = ("set_optimization_profile_async", "set_input_shape", "set_tensor_address", "execute_async_v3")
    context = SimpleNamespace(active_optimization_profile=0, **dict.fromkeys(methods, refuse))
    TENSORRT.log.clear()
    TENSORRT.log.errors.append("an earlier error")
    with pytest.raises(CheckError, match="TensorRT 10.6.0 .*: the error of this call$"):
        getattr(TENSORRT, call)(context, *arguments)


def test_a_prompt_comes_twice_and_finds_its_prefix_where_pages_can_be_shared(open_model, form, gpu):
    engine = Engine(open_model(chunk_size=64))
    request = Request(np.arange(3, 203), 8)
    first, second = (tokens_of(engine, [request])[0, 0] for _ in range(2))
    assert first == second and len(first) == 8
    assert (engine.prefix_hits > 0) == engine.prefix_caching == (form[2] == "fused")


def test_beside_rows_that_decode_a_prompt_is_one_piece_of_many_chunks(open_model, form, gpu, monkeypatch):
    """As long as the step has room for it, or as the threshold says; its chunks are found again all the same."""
    random = np.random.default_rng(0)
    shared = random.integers(0, 768, 140)
    prompts = [np.append(shared, random.integers(0, 768, count)) for count in (60, 0, 21)]
    model = open_model(chunk_size=64)
    sizes = []
    alone = [tokens_of(Engine(model, prefix_caching=False), [Request(prompt, 9)])[0, 0] for prompt in prompts]
    step_tokens = model.step_tokens
    monkeypatch.setattr(
        model,
        "step_tokens",
        lambda advances, following=False: (
            sizes.append([len(advance.tokens) for advance in advances]),
            step_tokens(advances, following),
        )[1],
    )
    for threshold, pieces in ((None, [[200], [12], [33]]), (130, [[128, 72], [12], [33]])):
        engine = Engine(model, long_prefill_token_threshold=threshold)
        model.tables.pool.forget()
        engine.add(Request(np.arange(5), 40))
        engine.step()
        for prompt, expected, counts in zip(prompts, alone, pieces):
            sizes.clear()
            number = engine.add(Request(prompt, 9))
            tokens = []
            while len(tokens) < 9:
                tokens += [output.token for output in engine.step() if output.request == number]
            assert tokens == expected and all(item[0] == 1 for item in sizes)
            if engine.prefix_caching:
                assert [item[1] for item in sizes if max(item) > 1] == counts
        assert engine.prefix_hits == (256 if engine.prefix_caching else 0)
        engine.close()


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_layers_of_a_prompt_are_not_told_the_same_shapes_and_addresses_again(demo, open_model, form, gpu, monkeypatch):
    """Those of one engine share a context: of the second layer on, only its weights are new, and what alternates."""
    pair = Both(demo, open_model, form[1], "all")
    pair.step(prompts=[(0, 40)])
    shapes = []
    addresses = []

    def noted(method, tensors, context, tensor, value):
        tensors.append(tensor)
        return method(context, tensor, value)

    for name, tensors in (("set_input_shape", shapes), ("set_tensor_address", addresses)):
        monkeypatch.setattr(TENSORRT, name, functools.partial(noted, getattr(TENSORRT, name), tensors))
    pair.step(prompts=[(1, 40)])
    assert not shapes and {"query", "attention"}.isdisjoint(addresses)
    assert addresses, "each layer has other weights"
    pair.step(prompts=[(2, 41)])
    network = pair.found.executor.ranks[0].network
    engines = {id(block.engine.program): block for block, _ in network.layers}
    inputs = []
    for block in (*engines.values(), network.embedding, network.exit):
        inputs += [io.name for io in block.signature.inputs]
    assert len(engines) < len(network.layers) and sorted(shapes) == sorted(inputs)
    pair.step(0, 1, 2)
