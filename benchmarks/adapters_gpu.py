"""What adapters cost on a GPU.

Decode steps and prompts of a model with an adapter in each row, with none, and of the same model whose graphs take
none, in turn; how long one takes to load; and forms that their products could have.

In: assemblies of a shape in fp16, one of which takes adapters; a scratch folder. Out: a record, which is written after
each part, so that a run that is cut short says what it came to.

The forms, in TensorRT, of q, k and v of one layer beside the layers alone: as they are exported, two thin products for
each layer and the resident adapters' columns of which a token's own are kept; with one first product for the three;
with one of each, whose second matrix is block diagonal; the first and the third with the first product as further rows
of the layers' own weights ("rows"), as they are exported; with one first product, and the second as further columns of
the layers' weights ("columns"); and each token's matrices, gathered.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks import batches
from benchmarks.gpu import described, random_weights
from benchmarks.measure import in_turn, read_json, recorder, spread
from lockstep import Advance, Assembly, Model, Sampling, build_engines
from lockstep.artifacts.adapters import LoraSlots
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.backends import get_backend
from lockstep.weights.adapters import LoadedAdapter

ROWS, PROMPT, RANK, SMALL = 16, 512, 16, 8  # SMALL: the rank of the adapter that is loaded, 40 MB of the 7B
LIMITS = {"max_batch_size": ROWS, "max_num_tokens": PROMPT, "max_seq_len": 1024}
FORM_TOKENS, FORM_CALLS = (1, ROWS, PROMPT), 32
_WITHOUT, _NONE, _ROOM, _ONE, _EACH = "graphs without room", "no row", "room, no row", "one row", "each row"


def measure(plain: str, taking: str, work: str, out: str, **settings: Any) -> None:
    """`run`, for the process of another interpreter, whose arguments are JSON."""
    run(Path(plain), Path(taking), Path(work), Path(out), **settings)


def run(
    plain: Path,
    taking: Path,
    work: Path,
    out: Path,
    rounds: int = 3,
    backend: str = "cuda",
    options: Mapping[str, Any] | None = None,
    forms: bool = True,
    vllm: str | None = None,
) -> None:
    """Measure everything, and write the record.

    plain, taking: assemblies of one shape, the second with room for adapters of RANK of all linear layers. options: of
    the builds. forms: measure those too, in TensorRT. vllm: a record of vllm_adapters.py on the same machine, which is
    kept beside.
    """
    assembly = Assembly.load(taking)
    assert assembly.adapters is not None
    work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "benchmark": "adapters-gpu",
        "layers": len(assembly.layers),
        "precision": assembly.precision,
        "rows": ROWS,
        "max_adapters": assembly.adapters.max_adapters,
        "rank": RANK,
        "weights": "of one layer, for all",
    }
    note = recorder(out, record)
    weights = work / "weights" / "weights.json"
    weights = weights if weights.is_file() else random_weights(assembly, work / "weights", alike=True)
    built, seconds = {}, {}
    for name, path in (("plain", plain), ("taking", taking)):
        started = time.perf_counter()
        engines = work / backend / name / "engines.json"
        built[name] = build_engines(path, backend, engines, {**LIMITS, **(options or {})})
        seconds[name] = round(time.perf_counter() - started, 1)
    note(build_seconds=seconds, **described(built["taking"]))
    base = Model.open(built["plain"], plain, weights)
    model = Model.open(built["taking"], taking, weights)
    names = [f"a{number}" for number in range(assembly.adapters.max_adapters)]
    started = time.perf_counter()
    for name in names:
        _add(model, assembly, name, RANK)
    note(prepare_seconds=round((time.perf_counter() - started) / len(names), 3), adapter_bytes=_nbytes(assembly, RANK))
    ways: dict[str, tuple[Model, Sequence[str | None], bool]] = {
        _WITHOUT: (base, [None] * ROWS, False),
        _NONE: (model, [None] * ROWS, False),
        _ROOM: (model, [None] * ROWS, True),
        _ONE: (model, [names[0], *[None] * (ROWS - 1)], False),
        _EACH: (model, [names[slot % len(names)] for slot in range(ROWS)], False),
    }
    decode = {way: _timer(_decode, *given) for way, given in ways.items()}
    note(decode_step=_compared(in_turn(decode, rounds)))
    note(breakdown={way: _timer(_breakdown, *given)() for way, given in ways.items() if way != _ONE})
    prompt = {way: _timer(_prompt, *given) for way, given in ways.items() if way != _ONE}
    note(prompt={"tokens": PROMPT, **_compared(in_turn(prompt, rounds))})
    _add(model, assembly, "small", SMALL)
    note(load={"bytes": _nbytes(assembly, SMALL), **_load(model, names, rounds)})
    if forms:
        hidden = assembly.hidden_size
        note(forms={str(t): found for t, found in _forms(hidden, assembly.adapters, work / "forms", rounds).items()})
    if vllm:
        note(vllm=of_vllm(read_json(Path(vllm))))


def of_vllm(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a record of vLLM: version, numbers, how it was started."""
    lora, plain = found["lora"], found.get("plain", {})
    steps = lora["decode_step"]["milliseconds"] | (
        {_WITHOUT: plain["decode_step"]["milliseconds"][_NONE]} if "decode_step" in plain else {}
    )
    kept = {key: found[key] for key in ("rows", "context", "max_adapters", "rank", "adapter_bytes", "small_bytes")}
    return {"version": lora["version"], **kept, "start": lora["start"], "decode_step": {"milliseconds": steps}} | (
        {"load": lora["load"]} if "load" in lora else {}
    )


def _add(model: Model, assembly: Assembly, name: str, rank: int) -> None:
    """Add an adapter of all linear layers, of the same random numbers for each layer."""
    random, pool, modules = np.random.default_rng(len(name)), dict[tuple[int, ...], np.ndarray](), {}
    for module, (deep, wide) in _modules(assembly).items():
        pair = []
        for shape in ((rank, deep), (wide, rank)):
            if shape not in pool:
                pool[shape] = (random.standard_normal(shape, np.float32) * np.float32(0.01)).astype(np.float16)
            pair.append(pool[shape])
        modules[module] = (pair[0], pair[1])
    assert model.adapters is not None
    model.adapters.add(LoadedAdapter(name, rank, 1.0, name, modules, "random"))


def _modules(assembly: Assembly) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of the linear layers."""
    assert assembly.adapters is not None
    parts = [layer.block for layer in assembly.layers] + [assembly.layers[-1].exit]
    return {
        part.slots[weight][0].removesuffix(".weight"): (slot.in_features, slot.out_features)
        for part in parts
        for weight, slot in assembly.adapters.classes.get(part.graph, {}).items()
    }


def _nbytes(assembly: Assembly, rank: int) -> int:
    return sum(2 * rank * (deep + wide) for deep, wide in _modules(assembly).values())


def _timer(call: Callable[[Model], Any], model: Model, adapters: Sequence[str | None], room: bool) -> Callable[[], Any]:
    """Return a call that times steps with adapters in the slots.

    room: by the engines that take adapters, whatever rows have.
    """

    def run() -> Any:
        executor: Any = model._executor
        if room:
            executor._adapted = lambda slots: True
        try:
            for slot, adapter in enumerate(adapters):
                model.set_adapter(slot, adapter)
            return call(model)
        finally:
            batches.release(model)
            if room:
                del executor._adapted

    return run


def _decode(model: Model) -> float:
    return batches.seconds_of_a_step(model, ROWS, Sampling())


def _breakdown(model: Model) -> dict[str, float]:
    """Microseconds of a step, by what they go to."""
    batches.begin(model, ROWS)
    executor: Any = model._executor
    return executor.breakdown(ROWS)


def _prompt(model: Model) -> float:
    given, seconds = np.arange(PROMPT) % model.vocab_size, []
    for _ in range(3):
        started = time.perf_counter()
        model.step_tokens([Advance(0, given, 0)])
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _compared(times: dict[str, list[float]]) -> dict[str, Any]:
    of = times[_WITHOUT]
    return {
        "milliseconds": {way: spread([1e3 * value for value in values], 3) for way, values in times.items()},
        "times_as_long": {
            way: spread([a / b for a, b in zip(values, of, strict=True)], 3)
            for way, values in times.items()
            if way != _WITHOUT
        },
    }


def _load(model: Model, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Time the load of an adapter that is not resident, in milliseconds.

    Until its copies are on the stream, until they are through, and of a step of 15 rows that waits for them, beside one
    that does not.
    """
    host, through, steps, quiet = [], [], [], []
    assert model.adapters is not None
    executor: Any = model._executor
    loading, adapter_slot = model.adapters.residency.loading, len(names) - 1  # which nobody holds
    tokens, position = batches.begin(model, ROWS - 1), batches.CONTEXT
    for number in range(4 * rounds + 2):
        if number % 2:
            loading[adapter_slot] = "small"
            executor.group.synchronize()
            started = time.perf_counter()
            model.adapters.load()
            host.append(time.perf_counter() - started)
            executor.group.synchronize()
            through.append(time.perf_counter() - started)
            loading[adapter_slot] = "small"
        started = time.perf_counter()
        advances = [Advance(slot, tokens[slot : slot + 1], position) for slot in range(ROWS - 1)]
        tokens[: ROWS - 1] = model.step_tokens(advances)
        (steps if number % 2 else quiet).append(time.perf_counter() - started)
        position += 1
    model.adapters.residency.forget(adapter_slot)
    batches.release(model)
    milliseconds = lambda values: spread([1e3 * value for value in values[1:]], 2)
    return {
        "host_milliseconds": milliseconds(host),
        "milliseconds": milliseconds(through),
        "step_milliseconds": milliseconds(quiet),
        "step_that_loads_milliseconds": milliseconds(steps),
    }


def _forms(hidden: int, slots: LoraSlots, folder: Path, rounds: int) -> dict[int, dict[str, dict[str, float]]]:
    """By tokens microseconds of q, k and v of one layer, in each form."""
    from lockstep.backends.tensorrt.program import TensorRTProgram
    from lockstep.gpu import cuda

    backend: Any = get_backend("tensorrt")
    options = {**backend.default_options(), **LIMITS}
    folder.mkdir(parents=True, exist_ok=True)
    graphs = form_graphs(hidden, slots.max_adapters, slots.max_lora_rank)
    device = backend.describe_device()
    manifest = EngineSetManifest("tensorrt", backend.version(), None, "fp16", device, options)
    backend.start(folder, manifest, list(graphs))
    runs: dict[int, dict[str, Callable[[], float]]] = {tokens: {} for tokens in FORM_TOKENS}
    held: list[Any] = []
    for name, model in graphs.items():
        path = folder / f"{name.replace(' ', '-')}.onnx"
        onnx.save(model, path)
        engine = path.with_suffix(".engine")
        backend.build(path, engine, options)
        program = TensorRTProgram(backend.library, engine, ())
        executable = program.bind(None, {})
        for tokens in FORM_TOKENS:
            arrays = {}
            for key, tensor in program.tensors.items():
                shape = tuple(tokens if size == -1 else size for size in tensor.shape)
                arrays[key] = cuda.zeros(shape, tensor.dtype)
            split = lambda is_input, arrays=arrays, program=program: {
                key: array for key, array in arrays.items() if program.tensors[key].is_input == is_input
            }
            call = executable.prepare(split(True), split(False), own=True)
            runs[tokens][name] = _in_a_graph(call, program.device.stream)
            held += [arrays, executable]
    return {
        tokens: {
            name: spread([1e6 * value for value in values], 2) for name, values in in_turn(contestants, rounds).items()
        }
        for tokens, contestants in runs.items()
    }


def _in_a_graph(call: Callable[[], None], stream: Any) -> Callable[[], float]:
    """Seconds of a call, the median of several graphs of FORM_CALLS."""
    from lockstep.gpu import cuda

    call()
    stream.synchronize()
    with stream.capture() as graph:
        for _ in range(FORM_CALLS):
            call()

    def run() -> float:
        first, last, found = cuda.Event(), cuda.Event(), []
        for _ in range(5):
            first.record(stream)
            graph.launch(stream)
            last.record(stream)
            last.wait()
            found.append(last.milliseconds_since(first) / 1e3 / FORM_CALLS)
        return statistics.median(found)

    return run


def form_graphs(hidden: int, count: int, rank: int) -> dict[str, onnx.ModelProto]:
    """Return graphs of q, k and v with what adapters add, one for each form.

    q, k and v have `hidden` features each and are one product. In: fp16 x [num_tokens, hidden], and mask [num_tokens,
    count * rank] (adapter_mask.py) or ids int64 [num_tokens]. Out: y [num_tokens, 3 * hidden]. "alone" is without
    adapters.
    """
    node, half, columns = helper.make_node, TensorProto.FLOAT16, count * rank
    three = [f"{part}" for part in "qkv"]
    base = [node("Gemm", ["x", "w"], ["base"], transB=1)]

    def chosen(shrunk: Mapping[str, str]) -> list[onnx.NodeProto]:
        return [node("Mul", [name, "mask"], [f"{part}/own"]) for part, name in shrunk.items()]

    def expanded(shrunk: Mapping[str, str]) -> list[onnx.NodeProto]:
        """Each part's own columns, times its B, side by side."""
        nodes = chosen(shrunk)
        nodes += [node("Gemm", [f"{part}/own", f"b_{part}"], [f"{part}/added"]) for part in shrunk]
        return [*nodes, node("Concat", [f"{part}/added" for part in shrunk], ["added"], axis=1)]

    shrinks = [node("Gemm", ["x", f"a_{part}"], [f"{part}/shrunk"]) for part in three]
    one = [node("Gemm", ["x", "a"], ["shrunk"])]
    split = [node("Split", ["shrunk"], [f"{part}/shrunk" for part in three], axis=1)]
    each = {part: f"{part}/shrunk" for part in three}
    owns = [f"{part}/own" for part in three]
    diagonal = [*chosen(each), node("Concat", owns, ["own"], axis=1), node("Gemm", ["own", "b"], ["added"])]
    # The layers' weights with the rows of all A behind them: the first product takes no time of its own.
    rows = [
        node("Gemm", ["x", "w"], ["whole"], transB=1),
        node("Split", ["whole", "sizes"], ["base", *each.values()], axis=1),
    ]
    # And B as further columns of them: the second product takes no time of its own.
    columns_too = [*one, *split, *chosen(each), node("Concat", ["x", *owns], ["given"], axis=1)]
    columns_too += [node("Gemm", ["given", "w"], ["y"], transB=1)]
    gathered = [
        node("Gather", ["as", "ids"], ["own_as"], axis=0),
        node("Gather", ["bs", "ids"], ["own_bs"], axis=0),
        node("Unsqueeze", ["x", "one"], ["x3"]),
        node("MatMul", ["x3", "own_as"], ["shrunk"]),
        node("MatMul", ["shrunk", "own_bs"], ["added3"]),
        node("Squeeze", ["added3", "one"], ["added"]),
    ]
    total = [node("Add", ["base", "added"], ["y"])]
    of_each = {f"a_{part}": [hidden, columns] for part in three} | {f"b_{part}": [columns, hidden] for part in three}
    first = {"a": [hidden, 3 * columns]}
    second = {name: shape for name, shape in of_each.items() if name.startswith("b_")}
    gather = {"as": [count, hidden, 3 * rank], "bs": [count, 3 * rank, 3 * hidden]}
    diagonal_b = {"b": [3 * columns, 3 * hidden]}
    parts: dict[str, tuple[list[onnx.NodeProto], dict[str, list[int]], list[int]]] = {
        "alone": ([node("Gemm", ["x", "w"], ["y"], transB=1)], {}, [3 * hidden, hidden]),
        "rows, thin products": ([*rows, *expanded(each), *total], second, [3 * (hidden + columns), hidden]),
        "rows, block diagonal": ([*rows, *diagonal, *total], diagonal_b, [3 * (hidden + columns), hidden]),
        "thin products": ([*base, *shrinks, *expanded(each), *total], of_each, [3 * hidden, hidden]),
        "one first product": (
            [*base, *one, *split, *expanded(each), *total],
            {**first, **second},
            [3 * hidden, hidden],
        ),
        "block diagonal": ([*base, *one, *split, *diagonal, *total], {**first, **diagonal_b}, [3 * hidden, hidden]),
        "columns": (columns_too, first, [3 * hidden, hidden + 3 * columns]),
        "gathered": ([*base, *gathered, *total], gather, [3 * hidden, hidden]),
    }
    value = helper.make_tensor_value_info
    models = {}
    for name, (nodes, arrays, shape) in parts.items():
        inputs = [value("x", half, ["num_tokens", hidden]), value("w", half, shape)]
        if name == "gathered":
            inputs.append(value("ids", TensorProto.INT64, ["num_tokens"]))
        elif name != "alone":
            inputs.append(value("mask", half, ["num_tokens", columns]))
        inputs += [value(key, half, size) for key, size in arrays.items()]
        sizes = np.array([3 * hidden, *[columns] * 3], np.int64)
        constants = [numpy_helper.from_array(sizes, "sizes")] if name.startswith("rows") else []
        if name == "gathered":
            constants.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
        y = value("y", half, ["num_tokens", 3 * hidden])
        copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in nodes]
        graph = helper.make_graph(copies, "form", inputs, [y], constants)
        models[name] = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(models[name], full_check=True)
    return models
