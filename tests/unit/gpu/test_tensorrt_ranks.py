"""A model split over several GPUs, on fake ones: each rank on its device, with sums between their streams."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from benchmarks.step_timing import breakdown
from demo_model import GOLDEN, LIMITS, TOLERANCES
from handmade import make as make_random

import fake_gpu
from lockstep.artifacts.files import read_json
from lockstep.backends.builder import build
from lockstep.errors import CheckError
from lockstep.runtime import Advance, Engine, Model, ModelOptions, Request, Sampling
from lockstep.step.logits_pipeline import Sampler, most_likely
from lockstep.targets import Results, Target
from lockstep.verify.golden.check import check_engines
from shared import Shared
from some import some

MODEL = "demo-llama"
SIZES = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
FORMS = [("10.6.0", "fp32", "traced", 2), ("10.9.0", "fp16", "fused", 2), ("cuda", "fp16", "fused", 4)]
Form = tuple[str, str, str, int]  # version of TensorRT or "cuda", precision, attention, ranks
TOLERANCE = {"fp32": 2e-4, "fp16": 0.1}  # as of one rank, test_tensorrt_run.py


@pytest.fixture(params=some([(form,) for form in FORMS], (FORMS[2],)), ids=lambda form: "-".join(map(str, form)))
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


@pytest.fixture
def split(demo: Results, shared: Shared, form: Form) -> tuple[Path, Path, Path]:
    """assembly.json of the ranks, assembly.json and weights.json of one. The demo has heads for 2 ranks, a random model
    for 4."""
    _, precision, _, degree = form

    def make(folder: Path) -> None:
        from lockstep.export.run import export  # loads torch

        of_one = demo.checkpoint(MODEL) if degree == 2 else make_random(folder, [precision]).checkpoint("tiny")
        export(of_one, precision, folder / "ranks" / "assembly.json", tensor_parallel=degree)

    folder = shared.folder(f"gpu-ranks/{precision}-{degree}", make)
    results, name = (demo, MODEL) if degree == 2 else (Results(folder / "results"), "tiny")
    return folder / "ranks" / "assembly.json", results.assembly(name, precision), results.weights(name, precision)


def _installed(version: str) -> AbstractContextManager[fake_gpu.Gpu]:
    return fake_gpu.installed(name="cuda") if version == "cuda" else fake_gpu.installed(version)


@pytest.fixture
def gpu(form: Form) -> Iterator[fake_gpu.Gpu]:
    with _installed(form[0]) as gpu, pytest.MonkeyPatch.context() as patch:
        from lockstep_gpu import weights as device_weights

        patch.setattr(
            device_weights, "PIECE_NBYTES", 1 << 12
        )  # several pieces of small weights, of rows and of columns
        gpu.devices = form[3]
        yield gpu
        assert not gpu.faults


@pytest.fixture
def paths(split: tuple[Path, Path, Path], shared: Shared, form: Form, gpu: fake_gpu.Gpu) -> tuple[Path, Path, Path]:
    """engines.json, assembly.json and weights.json of the form."""
    version, _, attention, _ = form
    options = SIZES if version == "cuda" else {"attention": attention, **SIZES}
    backend = "cuda" if version == "cuda" else "tensorrt"

    def make(folder: Path) -> None:
        build(split[0], backend, folder / "engines.json", options)

    return shared.folder(f"gpu-ranks-engines/{'-'.join(map(str, form))}", make) / "engines.json", split[0], split[2]


@pytest.fixture
def open_model(paths: tuple[Path, Path, Path]) -> Callable[..., Model]:
    return lambda layers=2, **limits: Model.open(*paths, layers, ModelOptions(**{**SIZES, **limits}))


@pytest.fixture
def reference(split: tuple[Path, Path, Path], shared: Shared, form: Form) -> Callable[..., Model]:
    """One rank, in ONNX Runtime."""
    _, assembly, weights = split

    def make(folder: Path) -> None:
        build(assembly, "onnxruntime", folder / "engines.json")

    engines = shared.folder(f"gpu-ranks-one/{form[1]}-{form[3]}", make) / "engines.json"
    return lambda layers=2: Model.open(engines, assembly, weights, layers, ModelOptions(**SIZES))


def steps(model: Model) -> Iterator[tuple[list[Advance], np.ndarray]]:
    """Prompts, decoding rows, both; slots that begin again; tokens and logits in turn."""
    random = np.random.default_rng(0)

    def step(*slots: int, prompts: tuple[tuple[int, int], ...] = ()) -> tuple[list[Advance], np.ndarray]:
        advances = [Advance(slot, random.integers(0, 96, 1), model.length(slot)) for slot in slots]
        advances += [Advance(slot, random.integers(0, 96, count), model.length(slot)) for slot, count in prompts]
        return advances, model.step(advances)

    yield step(prompts=((2, 45), (0, 8)))
    for _ in range(25):  # slot 2 goes over 64 tokens: a page, or a larger cache
        yield step(2, 0)
    yield step(2, 0, prompts=((1, 24), (3, 1)))
    yield step(0, 1, 2, 3)
    model.release(2)
    yield step(3, 0, prompts=((2, 100),))
    yield step(1, prompts=((2, 30), (0, 17)))
    yield step(0, 1, 2, 3)


def test_ranks_give_the_logits_of_one(open_model, reference, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CHECK_RANKS", "1")
    for (_, actual), (_, expected) in zip(steps(open_model("all")), steps(reference("all")), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[form[1]])


@pytest.mark.long
@pytest.mark.parametrize(
    "form",
    [FORMS[0], FORMS[1]],  # traced attention has the ranks of the tests above
    indirect=True,
    ids=["traced", "fused"],
)
def test_the_demo_passes_the_golden_check(references: Results, paths, form: Form, gpu, tmp_path: Path) -> None:
    engines, assembly, weights = paths
    check_engines(
        assembly, weights, engines, references.reference(MODEL, "all"), Target(MODEL, form[1], "all", "tensorrt"),
        TOLERANCES[form[1]], LIMITS, tmp_path / "golden.json", tmp_path / "speed.json",
        [prompt.expected["all"] for prompt in GOLDEN.prompts],
    )  # fmt: skip
    assert read_json(tmp_path / "golden.json")["result"] == "pass"


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS, indirect=True, ids=lambda form: "-".join(map(str, form)))
def test_requests_share_pages_are_sampled_and_swapped_out(open_model, form: Form) -> None:
    """The scheduler's work on all ranks at once: the tokens that each request has alone, and a pool that is whole."""
    shared_prompt = list(range(3, 73))
    requests = [
        Request([*shared_prompt, 5], 12),
        Request([*shared_prompt, 9, 8], 12, sampling=Sampling(temperature=0.9, seed=3), n=2),
        Request(list(range(20, 50)), 20),
        Request([7], 16, sampling=Sampling(temperature=1.1, top_p=0.9, seed=5)),
    ]
    model = open_model("all", chunk_size=64)
    model.warm_up()

    def run(engine: Engine, some: list[Request]) -> dict[tuple[int, int], list[int]]:
        results: dict[tuple[int, int], list[int]] = {}
        for token in engine.run(some):
            results.setdefault((token.request, token.choice), []).append(token.token)
        return results

    alone = {}
    for number, request in enumerate(requests):
        decoded = run(Engine(model, prefix_caching=False), [request])
        alone |= {(number, choice): tokens for (_, choice), tokens in decoded.items()}
    together = Engine(model)
    assert run(together, requests) == alone
    assert run(together, requests) == {
        (number + len(requests), choice): alone[number, choice] for number, choice in alone
    }
    pool = model.tables.pool
    assert pool.num_available == pool.num_pages
    if form[2] == "fused":
        model.step([Advance(0, np.arange(70), 0)])
        model.step([Advance(0, np.array([3]), 70)])
        swapped = model.swap_out(0)
        model.step([Advance(1, np.arange(10, 90), 0)])  # takes its pages
        model.tables.reserve({0: 71})
        model.swap_in(0, swapped)
        model.step([Advance(2, np.arange(70), 0)])
        model.step([Advance(2, np.array([3]), 70)])
        pair = [model.step([Advance(slot, np.array([4]), 71)]) for slot in (0, 2)]
        np.testing.assert_allclose(*pair, rtol=0, atol=TOLERANCE[form[1]])


def test_a_decode_step_is_a_graph_on_each_device(open_model, gpu, form: Form) -> None:
    model = open_model()
    model.step_tokens([Advance(0, np.arange(5), 0)])
    for position in range(5, 8):
        model.step_tokens([Advance(0, np.array([1]), position)])
    launches = gpu.launches
    plain = gpu.plain
    model.step_tokens([Advance(0, np.array([1]), 8)])
    assert (gpu.launches - launches, gpu.plain - plain) == (form[3], 0)
    parts = breakdown(model.executor, 1)
    assert {"embedding", "block", "attention", "sum", "exit", "gather", "next token"} < set(parts)


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_blocks_and_attention_of_passes_are_graphs(open_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits: called one by one, captured, launched again, and captured whole."""
    from lockstep_gpu import runner

    monkeypatch.setattr(runner, "CAPTURED_TOKENS_OF_RANKS", 0)
    called = [logits for _, logits in steps(open_model())]
    monkeypatch.undo()
    monkeypatch.setattr(runner, "CAPTURED_AFTER", 3)
    model = open_model()
    for _ in range(4):
        for (_, actual), expected in zip(steps(model), called, strict=True):
            np.testing.assert_array_equal(actual, expected)
        for slot in range(4):
            model.release(slot)
    for rank in model.executor.ranks:
        assert all(rank.graphs.values())
        # of prompts of 45 and 8 tokens, of 100 together with a row, of 24 and 1 together with two: padded
        assert {key[2] for key in rank.graphs if key[0] == "block"} == {64, 128, 32}
        assert {key[0] for key in rank.graphs} == {"block", "decode", "prompts"}
    full = model.executor.runner.captured.values()
    assert len(full) == 4
    for calls_of_ranks in full:
        assert all(calls.graph is not None for calls in calls_of_ranks)


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_a_plan_that_waits_for_the_device_is_made_where_no_rank_waits_for_another(open_model, monkeypatch) -> None:
    """As a library that loads a kernel may: of any layer, for a model may have several kinds of attention."""
    from lockstep_gpu.attention import prompt

    planned = prompt.PromptAttention.planned

    def plan(self: prompt.PromptAttention, *arguments: object) -> list[prompt.PromptCall]:
        self._stream.synchronize()
        return planned(self, *arguments)

    monkeypatch.setattr(prompt.PromptAttention, "planned", plan)
    model = open_model()
    for start in (0, 50, 100):  # blocks are called one by one, captured, and launched again, with their sums
        model.step([Advance(0, np.arange(50), start)])


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_few_rows_are_summed_by_the_kernel_that_reads_them(open_model, gpu, form: Form, monkeypatch) -> None:
    """One launch instead of two, and the same bits."""
    from lockstep_gpu.backends.cuda.program import KernelsExecutable

    def decode() -> tuple[list[bytes], int]:
        model = open_model("all")
        model.step([Advance(0, np.arange(20), 0), Advance(1, np.arange(9), 0)])
        plain = gpu.plain
        rows = list[bytes]()
        launches = 0
        for number in range(3):  # call by call, captured, a graph
            advances = [Advance(0, np.array([1]), 20 + number), Advance(1, np.array([7]), 9 + number)]
            rows.append(model.step(advances).tobytes())
            launches = launches or gpu.plain - plain
        return rows, launches + form[3] * fused * [n for n, _ in model.executor.runner.last[0].calls].count("sum")

    fused = True
    expected = decode()
    monkeypatch.setattr(KernelsExecutable, "prepare_fused_all_reduce", lambda *arguments: None)
    fused = False
    assert decode() == expected


@pytest.mark.long
def test_logits_are_gathered_where_they_are_asked_for(open_model, form: Form) -> None:
    """Of rows that decode and of prompts, whether the step was in flight before, or not; and where a token is drawn."""
    model = open_model()
    prompts = [Advance(0, np.arange(5), 0), Advance(1, np.arange(9, 30), 0)]

    def clear() -> None:
        for rank in model.executor.runner.on_each_device():
            for key, array in rank.blocks.logit_buffers.items():
                if key[-1] != "part":
                    rank.stream.upload(array, np.full(array.shape, np.nan, array.dtype))
            rank.stream.synchronize()

    def gathered() -> bool:
        results = []
        for rank in model.executor.runner.on_each_device():
            for key, array in rank.blocks.logit_buffers.items():
                if key[-1] != "part":
                    results.append(np.empty(array.shape, array.dtype))
                    rank.stream.download(results[-1], array)
            rank.stream.synchronize()
        return any(np.isfinite(item).any() for item in results)

    expected = most_likely(model.step(prompts))
    for _ in range(2):
        tokens = model.step_tokens(prompts)
        assert tokens.tolist() == expected.tolist()
        decoding = lambda extra: model.step_tokens(
            [Advance(slot, tokens[slot : slot + 1], model.length(slot)) for slot in range(2)], extra
        )
        clear()
        for number in range(4):
            tokens = decoding(number < 3)
        assert not gathered()
        tokens, logits = model.step_with_logits(
            [Advance(slot, tokens[slot : slot + 1], model.length(slot)) for slot in range(2)], [0, 1]
        )
        assert gathered() and tokens.tolist() == most_likely(logits).tolist()
        tokens = decoding(True)
        clear()
        advances = [Advance(slot, tokens[slot : slot + 1], model.length(slot)) for slot in range(2)]
        tokens, logits = model.step_with_logits([*advances, Advance(2, np.arange(40), 0)], [0, 2])
        assert tokens[[0, 2]].tolist() == most_likely(logits).tolist()
        sampler = Sampler(Sampling(temperature=1.3, seed=6))
        model.set_sampling(1, sampler)
        advances = [Advance(slot, tokens[slot : slot + 1], model.length(slot)) for slot in range(2)]
        tokens, logits = model.step_with_logits(advances, [0, 1])
        assert tokens.tolist() == [logits[0].argmax(), sampler(logits[1], model.length(1)).token]
        clear()
        tokens = decoding(False)
        assert gathered()
        model.release(1)
        model.release(2)
        model.warm_up()


def test_logits_that_are_none_end_their_request_alone(open_model, gpu) -> None:
    model = open_model()
    model.step_tokens([Advance(0, np.array([3, 4]), 0)])
    for rank in model.executor.ranks:
        (table,) = rank.network.embedding.engine.weights.values()
        gpu.array(table.address, table.shape, table.dtype)[9] = np.nan
    advances = [Advance(0, np.array([5]), 2), Advance(1, np.array([9]), 0), Advance(2, np.array([5]), 0)]
    tokens, logits = model.step_with_logits(advances, [0, 1, 2])
    assert tokens.tolist() == [logits[0].argmax(), -1, logits[2].argmax()] and np.isnan(logits[1]).any()
    assert model.step_tokens([Advance(slot, np.array([5]), 0) for slot in (1, 3)])[0] == logits[2].argmax()


@pytest.mark.parametrize("fails", [1, 6])
def test_a_step_that_fails_half_way_leaves_no_rank_waiting(open_model, gpu, fails: int, monkeypatch) -> None:
    from lockstep_gpu.ranks import all_reduce

    model = open_model()
    results = []
    launch = all_reduce.Exchange.sum

    def broken(self: all_reduce.Exchange, values: object) -> None:
        if len(results) == fails:
            raise CheckError("no more memory")
        results.append(values)
        launch(self, values)

    monkeypatch.setattr(all_reduce.Exchange, "sum", broken)
    with pytest.raises(CheckError, match="no more memory"):
        model.step([Advance(0, np.arange(60), 0)])
    monkeypatch.undo()
    for rank in model.executor.ranks:
        rank.stream.synchronize()
    with pytest.raises(CheckError, match="tensor_parallel: expected whole steps, found one that ended half way"):
        model.step([Advance(0, np.arange(60), 0)])


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_a_step_that_a_rank_cannot_capture_can_be_asked_for_again(open_model, monkeypatch) -> None:
    from lockstep_gpu import cuda

    model = open_model()
    capture = cuda.Stream.capture
    model.step([Advance(0, np.arange(5), 0)])
    model.step([Advance(0, np.array([1]), 5)])
    streams = [rank.stream for rank in model.executor.ranks]

    def broken(stream: cuda.Stream) -> AbstractContextManager[cuda.Graph]:
        if stream is streams[1]:
            raise CheckError("no more memory")
        return capture(stream)

    with monkeypatch.context() as patched:
        patched.setattr(cuda.Stream, "capture", broken)
        with pytest.raises(CheckError, match="no more memory"):
            model.step([Advance(0, np.array([1]), 6)])
    expected = open_model()
    expected.step([Advance(0, np.arange(5), 0)])
    for position in range(5, 8):
        logits = expected.step([Advance(0, np.array([1]), position)])
        if position > 5:
            np.testing.assert_array_equal(model.step([Advance(0, np.array([1]), position)]), logits)


def test_a_rank_that_does_not_come_is_named(open_model) -> None:
    model = open_model()
    model.step([Advance(0, np.arange(6), 0)])
    model.executor.ranks[0].exchange.host_lost[0] = 2  # as the kernel writes it
    with pytest.raises(CheckError, match=r"expected rank 1 \(GPU 1\) at a sum, found that rank 0 waited 30 s for it"):
        model.step([Advance(0, np.array([3]), 6)])


@pytest.mark.long
@pytest.mark.parametrize("form", [FORMS[1]], indirect=True)
def test_a_device_that_hangs_ends_the_process_with_its_rank(open_model, monkeypatch, capfd) -> None:
    """The first rank's never comes back, so nobody would see what the second one notes."""
    from lockstep_gpu import cuda
    from lockstep_gpu.ranks import watch as rank_watch

    model = open_model()
    released = threading.Event()
    codes = []

    def end(code: int) -> None:  # what would end this process
        codes.append(code)
        released.set()

    monkeypatch.setattr(rank_watch, "GRACE_S", 0.2)
    monkeypatch.setattr(rank_watch, "POLL_S", 0.05)
    monkeypatch.setattr(rank_watch.os, "_exit", end)
    model.step([Advance(0, np.arange(6), 0)])
    wait = cuda.Event.wait

    def hang(event: cuda.Event) -> None:
        wait(event)
        model.executor.ranks[1].exchange.host_lost[0] = 1  # as the kernel writes it
        assert released.wait(20)

    monkeypatch.setattr(cuda.Event, "wait", hang)
    with pytest.raises(CheckError, match=r"expected rank 0 \(GPU 0\) at a sum, found that rank 1 waited 30 s for it"):
        model.step_tokens([Advance(0, np.array([3]), 6)])
    line = capfd.readouterr().err.splitlines()[0]
    assert codes[0] == 1 and line.startswith(
        "lockstep: error: tensor_parallel: expected rank 0 (GPU 0) at a sum, found"
    )
    assert line.endswith("it still hangs, so this process ends")


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_a_step_that_ended_is_no_device_that_hangs(open_model, monkeypatch, capfd) -> None:
    """A rank was given up, the step said so, and the caller goes on without the model."""
    from lockstep_gpu.ranks import watch as rank_watch

    codes: list[int] = []
    monkeypatch.setattr(rank_watch, "GRACE_S", 0.1)
    monkeypatch.setattr(rank_watch, "POLL_S", 0.02)
    monkeypatch.setattr(rank_watch.os, "_exit", codes.append)
    model = open_model()
    model.executor.ranks[0].exchange.host_lost[0] = 2
    with pytest.raises(CheckError, match="expected rank 1"):
        model.step([Advance(0, np.arange(6), 0)])
    time.sleep(0.5)
    assert not codes and not capfd.readouterr().err
    watch = weakref.ref(model.executor.runner.watch)
    del model
    gc.collect()
    assert watch() is None, "the thread holds no model"


def test_ranks_that_differ_are_told_when_asked_for(open_model, gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CHECK_RANKS", "1")
    model = open_model()
    model.step([Advance(0, np.arange(6), 0)])
    (table,) = model.executor.ranks[1].network.embedding.engine.weights.values()
    gpu.array(table.address, table.shape, table.dtype)[3] *= 2
    with pytest.raises(CheckError, match=r"rank 1 \(GPU 1\): expected the values after the last layer of rank 0 to"):
        model.step([Advance(0, np.array([3]), 6)])


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
@pytest.mark.parametrize(
    "change, message",
    [(lambda gpu: vars(gpu).update(devices=3), "expected a GPU for each rank, 4 or more, found 3; make more visible"),
        (lambda gpu: gpu.names.update({2: b"other\0"}), "GPU 2: expected name fake, .* as GPU 0, found name other"),
        (lambda gpu: gpu.unreachable.append({1, 3}),
            "GPU 3: expected access to the memory of GPU 1, found none; choose GPUs")],
    ids=["missing", "another kind", "no access"],
)  # fmt: skip
def test_devices_that_do_not_serve_are_refused(open_model, gpu, change, message: str) -> None:
    change(gpu)
    with pytest.raises(CheckError, match=f"^tensor_parallel: {message}"):
        open_model()


@pytest.mark.parametrize("form", [FORMS[2]], indirect=True)
def test_ranks_may_share_the_first_gpu_for_checks(open_model, reference, gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.devices = 1
    monkeypatch.setenv("LOCKSTEP_RANKS_ON_ONE_GPU", "1")
    prompt = [Advance(0, np.arange(60), 0)]
    np.testing.assert_allclose(open_model().step(prompt), reference().step(prompt), rtol=0, atol=TOLERANCE["fp16"])


@pytest.mark.long
@pytest.mark.parametrize("form", [FORMS[1]], indirect=True)
@pytest.mark.parametrize("number", [0, 1])
def test_too_little_memory_on_one_of_two_names_that_gpu(open_model, gpu, number: int) -> None:
    gpu.room[number] = 1 << 20
    with pytest.raises(CheckError, match=rf"MiB of free GPU memory for .* on GPU {number}; lower"):
        open_model("all")


def test_large_sums_are_made_in_two_shots(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank its part, sent to all: the same numbers, to the bit, as in one."""
    from lockstep_gpu import cuda
    from lockstep_gpu.device import Device
    from lockstep_gpu.ranks import all_reduce

    world = gpu.devices
    random = np.random.default_rng(0)
    devices = [Device.get(rank) for rank in range(world)]
    for count in (8, 40, 1000, 4096):
        hosts = [random.standard_normal(count).astype(np.float16) for _ in devices]
        actual = []
        for limit in (1 << 20, 0):
            monkeypatch.setattr(all_reduce, "ONE_SHOT_NBYTES", limit)
            exchanges = all_reduce.connect(devices, 2 * count, 16)
            arrays = []
            for device, host in zip(devices, hosts):
                device.use()
                arrays.append(cuda.zeros((count,), "f2"))
                device.stream.upload(arrays[-1], host)
            for _ in range(3):  # the second and third time the sums of sums
                for exchange, array in zip(exchanges, arrays):
                    exchange.device.use()
                    exchange.sum(array)
            for device, array in zip(devices, arrays):
                actual.append(np.empty(count, np.float16))
                device.stream.download(actual[-1], array)
            for device in devices:
                device.stream.synchronize()
        expected = hosts
        for _ in range(3):
            total = expected[0].astype(np.float32)
            for host in expected[1:]:
                total += host
            expected = [total.astype(np.float16)] * world
        assert all(np.array_equal(item, expected[0]) for item in actual)
