"""Several ranks for real: sums over peer memory, and a model split over two. With one GPU both ranks run there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.step_timing import breakdown, breakdown_prefill
from test_gpu_run import FORMS, PROMPTS, decode

from lockstep.backends import builder
from lockstep.errors import CheckError
from lockstep.runtime import Advance, Model, Sampling, Tokenizer
from lockstep.step.logits_pipeline import Sampler
from lockstep.targets import Results


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many there are."""
    from lockstep_gpu import cuda
    from lockstep_gpu import device as rank_device

    count = cuda.device_count()
    if count < 2:
        monkeypatch.setenv(rank_device.ONE_GPU, "1")
    monkeypatch.setattr(rank_device.Device, "instances", {0: rank_device.Device.get(0)})
    return count


def values(count: int, dtype: np.dtype, rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("one_shot", [1 << 30, 0], ids=["one shot", "two shots"])
def test_sums_are_those_of_numpy_to_the_bit(
    world: int, dtype: str, one_shot: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CUDA graphs, again and again, of sizes that change between them."""
    from lockstep.artifacts.dtypes import named_dtype
    from lockstep_gpu import cuda
    from lockstep_gpu.device import Device
    from lockstep_gpu.ranks import all_reduce

    if 1 < devices < world:
        pytest.skip(f"{devices} GPUs")
    monkeypatch.setattr(all_reduce, "ONE_SHOT_NBYTES", one_shot)
    kind = named_dtype(dtype)
    ranks = [Device.get(rank) for rank in range(world)]
    counts = (8, 4096, 24, 16 * 4096, 520, 300 * 1000)
    exchanges = all_reduce.connect(ranks, max(counts) * kind.itemsize + 16, 16)
    hosts: dict[int, list[np.ndarray]] = {}
    arrays: dict[int, list[cuda.Array]] = {}
    for count in counts:
        hosts[count] = [values(count, kind, rank) for rank in range(world)]
        arrays[count] = []
        for device, host in zip(ranks, hosts[count]):
            device.use()
            arrays[count].append(cuda.zeros((count + 8,), kind)[:count])
            device.stream.upload(arrays[count][-1], host)
    graphs = []
    for number, exchange in enumerate(exchanges):
        exchange.device.use()
        with exchange.device.stream.capture() as graph:
            for count in counts:
                exchange.sum(arrays[count][number])
        graphs.append(graph)
    for _ in range(3):
        for exchange, graph in zip(exchanges, graphs):
            exchange.device.use()
            graph.launch(exchange.device.stream)
    for count in counts:
        expected = hosts[count]
        for _ in range(3):
            total = expected[0].astype(np.float32)
            for host in expected[1:]:
                total += host.astype(np.float32)
            expected = [total.astype(kind)] * world
        for device, array in zip(ranks, arrays[count]):
            device.use()
            actual = np.empty(count, kind)
            device.stream.download(actual, array)
            device.stream.synchronize()
            assert actual.tobytes() == expected[0].tobytes(), (count, device.number)
    for exchange in exchanges:
        exchange.check()


@pytest.mark.parametrize(("rows", "columns"), [(1, 384), (5, 100), (256, 16000)])
def test_parts_are_put_side_by_side(rows: int, columns: int) -> None:
    from lockstep_gpu import cuda
    from lockstep_gpu.device import Device
    from lockstep_gpu.ranks import all_reduce

    ranks = [Device.get(rank) for rank in range(2)]
    exchanges = all_reduce.connect(ranks, 16, rows * columns * 2)
    parts = [values(rows * columns, np.dtype("f2"), rank).reshape(rows, columns) for rank in range(2)]
    wholes = []
    for exchange, part in zip(exchanges, parts):
        exchange.device.use()
        array = cuda.zeros((rows + 1, columns), "f2")[:rows]
        wholes.append((array, cuda.zeros((rows, 2 * columns), "f2")))
        exchange.device.stream.upload(array, part)
    for _ in range(3):
        for exchange, (part, gathered) in zip(exchanges, wholes):
            exchange.device.use()
            exchange.gather(part, gathered)
    for exchange, (_, gathered) in zip(exchanges, wholes):
        exchange.device.use()
        actual = np.empty(gathered.shape, "f2")
        exchange.device.stream.download(actual, gathered)
        exchange.device.stream.synchronize()
        assert np.array_equal(actual, np.concatenate(parts, axis=1))


@pytest.mark.parametrize("world", [2, 3])  # in one shot, and in two
def test_a_rank_that_does_not_come_is_named_and_holds_nobody(
    world: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep_gpu import cuda
    from lockstep_gpu.device import Device
    from lockstep_gpu.ranks import all_reduce

    if 1 < devices < world:
        pytest.skip(f"{devices} GPUs")
    monkeypatch.setattr(all_reduce, "TIMEOUT_S", 2)
    monkeypatch.setattr(all_reduce, "ONE_SHOT_NBYTES", 0)
    first, *other_ranks = all_reduce.connect([Device.get(rank) for rank in range(world)], 8192, 16)
    first.device.use()
    array = cuda.zeros((4096,), "f2")
    for _ in range(3):
        first.sum(array)
    first.device.stream.synchronize()
    with pytest.raises(CheckError, match="expected rank [12] .* at a sum, found that rank 0 waited 2 s for it"):
        first.check()
    for other in other_ranks:
        other.check()


@pytest.mark.parametrize("backend, precision, options", FORMS, indirect=["backend"])
def test_tokens_of_two_ranks_are_those_of_onnx_runtime(
    demo: Results,
    demo_of_two_ranks: Results,
    backend: str,
    precision: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_CHECK_RANKS", "1")
    single, split = (results.assembly("demo-llama", precision) for results in (demo, demo_of_two_ranks))
    weights = demo.weights("demo-llama", precision)
    built = {
        "reference": (builder.build(single, "onnxruntime", tmp_path / "onnxruntime" / "engines.json"), single),
        "ranks": (builder.build(split, backend, tmp_path / backend / "engines.json", options), split),
    }
    tokenizer = Tokenizer.open(single)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    reference, model = (Model.open(engines, assembly, weights) for engines, assembly in built.values())
    expected = decode(reference, prompts)
    assert np.array_equal(decode(model, prompts), expected)
    model.warm_up()
    assert np.array_equal(decode(model, prompts), expected)
    executor: Any = model.executor
    assert {"sum", "gather", "attention", "gaps"} < set(breakdown(executor, len(prompts)))
    # What the ranks tell of their parts of the logits is what the whole logits say, gathered after the same step.
    for mixed in (False, True):
        tokens = model.step_tokens([Advance(slot, prompt, 0) for slot, prompt in enumerate(prompts)], mixed)
        for _ in range(3):
            advances = [Advance(slot, tokens[slot : slot + 1], model.length(slot)) for slot in range(len(prompts))]
            tokens, logits = model.step_with_logits(advances, range(len(prompts)))
            assert tokens.tolist() == logits.argmax(axis=1).tolist()
    sampler = Sampler(Sampling(temperature=0.8, seed=3))
    model.set_sampling(0, sampler)  # gathers in the graph
    for _ in range(4):
        advances = [Advance(slot, tokens[slot : slot + 1], model.length(slot)) for slot in range(len(prompts))]
        tokens, logits = model.step_with_logits(advances, range(len(prompts)))
        assert tokens[1:].tolist() == logits[1:].argmax(axis=1).tolist()
        assert tokens[0] == sampler(logits[0], model.length(0)).token
    model.release(0)
    model.step_tokens([Advance(0, prompts[0], 0)])
    assert {"sum", "gather"} < set(breakdown_prefill(executor))
    assert np.array_equal(decode(model, prompts), expected)
