"""`gpu`: a backend on one GPU, with a model's shape and random weights.

Building, loading, decoding and prefill are measured.

In: the assembly of a shape, a scratch folder with room for its weights. Out: a record, which is written after each
part, so that a run that is cut short has the parts before. transformers runs the same weights in another process
(gpu_transformers.py): speeds, and logits to compare with.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import cold, options
from benchmarks.measure import read_json, recorder, spread, write_json
from benchmarks.shapes import config_of
from benchmarks.step_timing import breakdown, breakdown_prefill
from lockstep import Advance, Assembly, CheckError, InputError, Model, ModelOptions
from lockstep.artifacts import formats
from lockstep.artifacts.assembly import BoundBlock
from lockstep.artifacts.dtypes import DTYPE_BITS, graph_dtype, named_dtype
from lockstep.artifacts.quantized import is_scales
from lockstep.backends.base import get_backend
from lockstep.manifests.digest_cache import remember
from lockstep.onnx_tools.judge import Bound, max_abs_error, wrong
from lockstep.onnx_tools.judge import measure as judged

_DTYPES = {graph_dtype(name): name for name in DTYPE_BITS}  # safetensors' name of each
CONTEXT = 512
PREFILL = 2048
WARM = 8
STEPS = 64
LIMITS = {"max_batch_size": 16, "max_num_tokens": PREFILL, "max_seq_len": PREFILL}
BATCHES = (1, 16)
CHECK_PROMPT = 48
CHECK_TOKENS = 16
CHECK_LAYERS = (2, "all")
OPTIONS = (options.SHAPE, *options.ON_A_GPU)


def main(
    shape: str, backend: str, work: Path, build_options: dict[str, Any], rounds: int, write: Path | None
) -> None:  # fmt: skip
    """Measure one GPU: build, load, decode and prefill of a Llama in fp16, compared with transformers.

    The weights are random.
    """
    path = config_of(shape)
    config = llama(path)
    cold.ask("benchmarks.gpu:device", backend=backend)
    graphs = (work / "graphs").absolute()
    out = record_path(write, work, path.stem, backend)
    lockstep.export_config(config, "fp16", graphs)
    names = {"assembly": str(graphs / "assembly.json"), "work": str(work.absolute()), "out": str(out)}
    cold.ask("benchmarks.gpu:measure", **names, backend=backend, rounds=rounds, options=build_options, config=config)
    print(out)


def record_path(write: Path | None, work: Path, name: str, backend: str) -> Path:
    """Return where a record goes: NAME.json in `work`, or in gpu/ of the folder `write`.

    That of TensorRT is NAME-tensorrt.json.
    """
    if backend != "cuda":
        name = f"{name}-{backend}"
    folder = work
    if write:
        folder = write / "gpu"
    return folder.absolute() / f"{name}.json"


def llama(path: Path) -> dict[str, Any]:
    """Read the config.json of a Llama. Raises InputError for another model's."""
    config = read_json(path)
    kind = None
    if isinstance(config, dict):
        kind = config.get("model_type")
    if kind != "llama":
        raise InputError(
            f"{path}: model_type: expected llama, the class that transformers runs for comparison, "
            f"found {kind!r}; name another shape"
        )
    return config


def measure(assembly: str, work: str, out: str, **settings: Any) -> None:
    """`run` for `cold.ask`: arguments are JSON."""
    run(Path(assembly), Path(work), Path(out), **settings)


def run(
    assembly_json: Path,
    work: Path,
    out: Path,
    rounds: int,
    backend: str,
    options: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Measure everything once but speeds, which are medians of `rounds`.

    options: of the build. config: of the model that transformers makes.

    Raises InputError for an assembly in another precision than fp16 and where torch has no CUDA, before anything is
    made; CheckError, when all is measured, for logits too far from transformers'.
    """
    assembly = Assembly.load(assembly_json)
    if assembly.precision != "fp16":
        raise InputError(
            f"{assembly_json}: precision: expected fp16, found {assembly.precision}; export the shape in fp16"
        )
    probe()
    work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"benchmark": "gpu", "layers": len(assembly.layers), "precision": "fp16", "rounds": rounds}
    note = recorder(out, record)
    weights = random_weights(assembly, work / "weights")
    engines = work / backend / "engines.json"
    note(build=built(assembly_json, engines, backend, {**LIMITS, **options}))
    note(**described(engines))
    note(ready_seconds=ready_seconds(engines, assembly_json, weights))
    model = ready(engines, assembly_json, weights)
    note(decode={str(batch): decode(model, batch, rounds) for batch in BATCHES})
    note(prefill=prefill(model, rounds, assembly))
    note(prefill={**record["prefill"], **prefill_parts(model, record["prefill"], assembly)})
    del model
    note(transformers=transformers_speeds(work, weights, config))
    checks = {
        str(layers): check(engines, assembly_json, weights, layers, work / f"reference-{layers}.npz")
        for layers in CHECK_LAYERS
    }
    note(check=checks)
    for layers, errors in checks.items():
        if not errors["passes"]:
            ours = _in_digits(errors["max_logit_error"])
            theirs = _in_digits(errors["max_logit_error_of_transformers_fp16"])
            raise CheckError(
                f"{out}: check: {layers} layers: expected logits at most twice as far from fp32 "
                f"as fp16 of transformers ({theirs}), found {ours}"
            )


def built(assembly_json: Path, engines: Path, backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Build in a new process and an empty folder; return seconds, bytes and number of engines."""
    shutil.rmtree(engines.parent, ignore_errors=True)
    seconds = build_seconds(assembly_json, engines, backend, options)
    files = [engines.with_name(entry["file"]) for entry in read_json(engines)["engines"].values()]
    sizes = [path.stat().st_size for path in files]
    return {"cold_seconds": seconds, "engine_bytes": sum(sizes), "engines": len(files)}


def build_seconds(assembly_json: Path, engines: Path, backend: str, options: Mapping[str, Any]) -> float:
    """Of the build of an engine set, in a new process."""
    request = {"assembly": str(assembly_json), "backend": backend, "options": dict(options), "out": str(engines)}
    return round(timed(functools.partial(cold.ask, "benchmarks.gpu:build_engines", **request))[0], 1)


def build_engines(assembly: str, backend: str, out: str, options: Mapping[str, Any]) -> None:
    """Build an engine set, for `cold.ask`: arguments are JSON."""
    lockstep.build_engines(Path(assembly), backend, Path(out), options)


def described(engines: str | Path) -> dict[str, Any]:
    """Return what a record says of engines: backend, versions and device here, options of the build."""
    manifest = read_json(Path(engines))
    backend = get_backend(name := manifest["backend"])
    versions = {name: manifest["backend_version"], **backend.libraries(True)}
    return {"backend": name, "versions": versions, "device": device(name), "options": manifest["options"]}


def device(backend: str) -> dict[str, Any]:
    """Return the description of the GPU here. Raises InputError where engines of the backend do not run."""
    library: Any = get_backend(backend)
    if backend != "cuda":
        return library.describe_device()
    library.require()
    return library.describe_hardware()


def in_words(record: Mapping[str, Any]) -> str:
    """Return the backend and versions that a record was made with."""
    if "backend" not in record:  # from before there were two
        return f"TensorRT {record['tensorrt']}"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"the backend {record['backend']} ({versions})"


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def ready(engines: Path, assembly: Path, weights: Path, layers: int | str = "all") -> Model:
    """Return a model whose weights are on the device."""
    model = Model.open(engines, assembly, weights, layers, ModelOptions(**LIMITS))
    model.executor.runner.wait_for_weights()
    return model


def ready_at(engines: str, assembly: str, weights: str) -> float:
    """When all of it is on the device: seconds since 1970."""
    model = ready(Path(engines), Path(assembly), Path(weights))  # noqa: F841  keeps the memory allocated
    return time.time()


def ready_seconds(engines: Path, assembly: Path, weights: Path) -> float:
    """Return the seconds from the start of a new process until it can take a step.

    The weights' file is in the page cache. It takes interpreter, libraries, engines, kernels, weights.
    """
    began = time.time()
    return round(
        cold.ask("benchmarks.gpu:ready_at", engines=str(engines), assembly=str(assembly), weights=str(weights)) - began,
        1,
    )


def random_weights(assembly: Assembly, folder: Path, alike: bool = False, seed: int = 0, room: int = 0) -> Path:
    """Make a file of random numbers under a weights manifest.

    Numbers have a standard deviation of 0.02, gains are 1; those of quantised weights are random integers. alike: all
    layers share the numbers of the first in the file: for shapes that are larger than the disk. room: bytes of further
    numbers after those of each kind, which lie one after the other (`many_models.fine_tunes`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, list[int]] = {}
    dtypes: dict[str, str] = {}
    parts = [assembly.embedding, *(layer.block for layer in assembly.layers), assembly.layers[-1].exit]
    for part in parts:
        for slot in assembly.classes[part.graph].signature.slots:
            names = part.slots[slot.name]
            for name in names:  # several where a stack of experts is tensors of each
                shapes[name] = list(slot.sizes)
                dtypes[name] = slot.dtype
                if len(names) > 1:
                    shapes[name] = [math.prod(slot.sizes[:-1]) // len(names), slot.sizes[-1]]
    random = np.random.default_rng(seed)
    tensors = {}
    offset = 0
    digest = hashlib.sha256()
    pool = (
        random.standard_normal(min(1 << 26, 2 * max(map(math.prod, shapes.values()))), np.float32) * np.float32(0.02)
    ).astype(np.float16)
    # The lowest integer left out: numbers of another mean than 0 grow from layer to layer, out of fp16.
    small = {8: random.integers(1, 256, pool.size, np.uint8)}
    small[4] = random.integers(1, 16, pool.size, np.uint8) | random.integers(1, 16, pool.size, np.uint8) << 4
    path = folder / "weights.bin"
    with open(path, "wb") as file:

        def write(numbers: np.ndarray) -> None:
            data = memoryview(numbers.reshape(-1).view(np.uint8))
            file.write(data)
            digest.update(data)

        def write_numbers(name: str, dtype: np.dtype, count: int) -> None:
            if is_gain(name, shapes[name]):
                write(np.ones(count, dtype))
                return
            if is_scales(name):
                steps = _spread(_bits(assembly, name))
                write((random.uniform(0.5, 1.5, count) * 0.02 / steps).astype(dtype))
                return
            while count:  # pieces of one pool, from random places: as fast as the disk, and no two matrices alike
                start = int(random.integers(0, pool.size // 2))
                numbers = pool
                if dtype == np.uint8:
                    numbers = small[_bits(assembly, name)]
                piece = numbers[start : start + count]
                if dtype.itemsize == 1 and dtype != np.uint8:  # e4m3
                    piece = np.clip(piece * np.float32(_spread(8) / 0.02), -448, 448)
                write(np.ascontiguousarray(piece, dtype))
                count -= piece.size

        def kind(name: str) -> tuple:
            return dtypes[name], is_scales(name), is_gain(name, shapes[name])

        names = list(shapes)
        if room:
            names.sort(key=kind)
        places: dict[str, dict[str, Any]] = {}
        for number, name in enumerate(names):
            shape = shapes[name]
            role = name
            if alike:  # one array for the tensors of all layers
                role = re.sub(r"\.\d+\.", ".N.", name, count=1)
            if role in places and places[role]["shape"] == shape:
                tensors[name] = places[role]
                continue
            count = math.prod(shape)
            dtype = named_dtype(dtypes[name])
            length = dtype.itemsize * count
            places[role] = tensors[name] = {
                "file": 0,
                "offset": offset,
                "length": length,
                "dtype": _DTYPES[dtype.name],
                "shape": shape,
            }
            offset += length
            write_numbers(name, dtype, count)
            is_last = number + 1 == len(names) or kind(names[number + 1]) != kind(name)
            if room and is_last:
                write_numbers(name, dtype, room // dtype.itemsize)
                offset += room
    remember(path, digest.hexdigest())
    files = [{"path": path.name, "size": offset, "sha256": digest.hexdigest()}]
    manifest = {"format": formats.WEIGHTS, "precision": assembly.precision, "files": files, "tensors": tensors}
    if assembly.quantization:
        manifest["group_size"] = assembly.quantization.group_size
    write_json(folder / "weights.json", manifest)
    return folder / "weights.json"


def is_gain(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is the gains of a norm, or a bias."""
    return len(shape) == 1 and not is_scales(name)


def _in_digits(error: float | None) -> str:
    if error is None:
        return "NaN or infinity"
    return f"{error:.3g}"


def _spread(bits: int) -> float:
    """Return the standard deviation of random integers of `bits` bits, which e4m3 numbers have too."""
    return float(2**bits / 12**0.5)


def _bits(assembly: Assembly, name: str) -> int:
    """Return the bits of the weight with these integers or scales."""
    assert assembly.quantization is not None  # it has some
    return assembly.quantization.bits[name.rpartition(".")[0]]


def decode(model: Model, batch: int, rounds: int) -> dict[str, Any]:
    """Steps of `batch` requests at CONTEXT tokens: only token ids come back."""
    rates = []
    for _ in range(rounds):
        prompt = np.arange(CONTEXT) % model.vocab_size
        for slot in range(batch):
            tokens = model.step_tokens([Advance(slot, prompt, 0)])
        tokens = np.repeat(tokens, batch)
        position = CONTEXT
        for number in range(WARM + STEPS):
            if number == WARM:
                began = time.perf_counter()
            is_followed = number < WARM + STEPS - 1
            tokens = model.step_tokens(
                [Advance(slot, tokens[slot : slot + 1], position) for slot in range(batch)], is_followed
            )
            position += 1
        rates.append((time.perf_counter() - began) / STEPS)
        last = position
    seconds = statistics.median(rates)
    parts = breakdown(model.executor, batch)
    for slot in range(batch):
        model.release(slot)
    return {
        "context": CONTEXT, "last": last, "milliseconds": spread([rate * 1e3 for rate in rates], 3),
        "tokens_per_second": round(batch / seconds, 1), "microseconds": parts,
    }  # fmt: skip


def prefill(model: Model, rounds: int, assembly: Assembly) -> dict[str, Any]:
    """One prompt of PREFILL tokens, several times."""
    prompt = np.arange(PREFILL) % model.vocab_size
    times = []
    for number in range(rounds + 1):
        seconds, _ = timed(lambda: model.step_tokens([Advance(0, prompt, 0)]))
        if number:
            times.append(seconds)
    rate = sum(operations(assembly, PREFILL)) / statistics.median(times)
    return {
        "tokens": PREFILL,
        "milliseconds": spread([seconds * 1e3 for seconds in times], 2),
        "tflops": round(rate / 1e12, 1),
    }


def prefill_parts(model: Model, times: Mapping[str, Any], assembly: Assembly) -> dict[str, Any]:
    """Return where the time of the prompt that `prefill` has just taken goes.

    Each kind of call is repeated alone in a graph; "gaps" is the rest of the whole.
    """
    parts = breakdown_prefill(model.executor)
    parts["gaps"] = round(times["milliseconds"]["median"] * 1e3 - sum(parts.values()), 1)
    return {
        "microseconds": parts,
        "tflops_blocks": round(operations(assembly, PREFILL)[0] / parts["block"] * 1e6 / 1e12, 1),
    }


def operations(assembly: Assembly, tokens: int) -> tuple[int, int]:
    """Return the operations of one prompt, of blocks, attention and exit.

    Blocks: two for each weight and token. Attention: its products, without windows. Exit: for its one row.
    """

    def weights(part: BoundBlock) -> int:
        slots = assembly.classes[part.graph].signature.slots
        return sum(math.prod(slot.sizes) for slot in slots if len(slot.shape) > 1)

    blocks = 2 * tokens * sum(weights(layer.block) for layer in assembly.layers)
    kinds = [assembly.variants[layer.variant] for layer in assembly.layers]
    attention = sum(kind.num_heads * (kind.head_dim + kind.value_head_dim) * tokens * (tokens + 1) for kind in kinds)
    return blocks, attention + 2 * weights(assembly.layers[-1].exit)


def transformers_speeds(work: Path, weights: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Run transformers on the same weights, in another process.

    Returns its speeds, and writes its logits to the work folder.
    """
    request = {
        "weights": str(weights),
        "work": str(work),
        "context": CONTEXT,
        "prefill": PREFILL,
        "warm": WARM,
        "steps": STEPS,
        "batches": BATCHES,
        "prompt": CHECK_PROMPT,
        "tokens": CHECK_TOKENS,
        "layers": CHECK_LAYERS,
        "config": dict(config),
        "device": "cuda",
    }
    return _in_transformers(request)


def probe() -> None:
    """Raise InputError where transformers is absent or torch has no CUDA."""
    _in_transformers({"probe": True, "device": "cuda"})


def references(folder: Path, weights: Path, config: Mapping[str, Any], layers: Sequence[int | str]) -> None:
    """Leave logits of transformers on the same weights in `folder`.

    They are cut after each of `layers`, and made in another process.
    """
    request = {"weights": str(weights), "work": str(folder), "layers": layers, "config": dict(config), "device": "cuda"}
    _in_transformers({**request, "prompt": CHECK_PROMPT, "tokens": CHECK_TOKENS})


def _in_transformers(request: Mapping[str, Any]) -> Any:
    """Return what gpu_transformers.py answers. Raises InputError with its last line when it fails."""
    command = [sys.executable, str(Path(__file__).with_name("gpu_transformers.py"))]
    ended = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if ended.returncode:
        message = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise InputError(f"expected transformers, and a torch that runs on the GPU, found: {message}")
    return json.loads(ended.stdout.splitlines()[-1])


def check(engines: Path, assembly: Path, weights: Path, layers: int | str, reference: Path) -> dict[str, Any]:
    """Run the engines along the tokens of a reference of transformers. Returns what `agreement` does."""
    saved = np.load(reference)
    model = ready(engines, assembly, weights, layers)
    prompt = saved["prompt"]
    tokens = saved["tokens"]
    logits = [model.step([Advance(0, prompt, 0)])[0]]
    for number, token in enumerate(tokens[:-1]):
        logits.append(model.step([Advance(0, np.array([token]), len(prompt) + number)])[0])
    return agreement(np.stack(logits), saved["fp32"], saved["fp16"])


def agreement(ours: np.ndarray, exact: np.ndarray, half: np.ndarray) -> dict[str, Any]:
    """Compare the distances of our logits, and of transformers' in fp16, from its fp32 logits.

    Logits are [num_tokens, vocab_size]: ours, of transformers in fp16 (`half`) and in fp32 (`exact`). Returns the
    largest difference, and how many most likely tokens are the same. `preferred_by`: where ours is another, how much
    higher the exact logit of the right one is, at most; errors of logits allow twice theirs. An error is None where NaN
    or infinity is among the logits.

    Passes when our difference is at most twice that of fp16: the same rounding in another order.
    """
    of_half = max_abs_error(exact, half)
    error = judged(exact, ours, Bound(2 * of_half), 1.0)
    best, our_best, best_of_half = (logits.argmax(1) for logits in (exact, ours, half))
    steps = np.arange(len(exact))
    return {
        "max_logit_error": error.max_abs_error,
        "max_logit_error_of_transformers_fp16": of_half if math.isfinite(of_half) else None,
        "logits_std": float(exact.std()),
        "tokens": len(exact),
        "same_tokens": int((our_best == best).sum()),
        "same_tokens_of_transformers_fp16": int((best_of_half == best).sum()),
        "preferred_by": float((exact[steps, best] - exact[steps, our_best]).max()),
        "passes": math.isfinite(of_half) and wrong("logits", error) is None,
    }
