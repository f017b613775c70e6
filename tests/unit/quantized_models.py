"""Models of quantised weights, taken through the stages before the golden check, and faults of their weights."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from demo_model import CONFIG, DEMO, GOLDEN
from families import FAMILIES
from pipeline import run_golden, run_validate, write_assembly
from safetensors.numpy import load_file

from lockstep import make_random_checkpoint
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve
from lockstep.export.quantize import quantize
from lockstep.export.run import export
from lockstep.targets import Limits, Results, Target
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.weights import convert
from shared import Shared

PRECISIONS = ("w8a16", "w4a16", "w8a8", "w4a8", "w8a8-fp8")
GROUP = 16
TOLERANCES = {precision: CONFIG.tolerance("demo-llama", precision, "onnxruntime") for precision in PRECISIONS}
PROMPTS = tuple(prompt.text for prompt in GOLDEN.prompts)
LIMIT = Limits(max_batch_size=3, max_input_len=64, max_seq_len=96, max_num_tokens=128)


def build_model(
    source: Path,
    precision: str,
    layers: tuple[int | str, ...],
    terms: GoldenTerms,
    root: Path,
    graphs: Callable[[Path], Any] | None = None,
) -> Results:
    """A model through all stages but the golden check. graphs: writes its assembly, instead of `export`."""
    results = Results(root)
    name = "model"
    checkpoint = results.checkpoint(name)
    assembly = results.assembly(name, precision)
    resolve(str(source), source, checkpoint)
    graphs(assembly) if graphs else export(checkpoint, precision, assembly, group_size=GROUP)
    convert(checkpoint, precision, results.weights(name, precision), assembly)
    build(assembly, "onnxruntime", results.engines(name, precision, "onnxruntime"))
    for count in layers:
        refer(results, precision, count, terms)
    return results


def refer(results: Results, precision: str, layers: int | str, terms: GoldenTerms) -> Path:
    name = "model"
    reference = results.quantized_reference(name, precision, layers)
    return make_reference(results.checkpoint(name), layers, terms, reference, results.weights(name, precision))


def check(
    results: Results, precision: str, layers: int | str, limits: Limits, out: Path, engines: Path | None = None
) -> dict[str, Any]:
    """The golden report. engines: of another backend than ONNX Runtime."""
    target = Target("model", precision, layers, "onnxruntime")
    changes = {} if engines is None else {"engines_json": engines}
    return run_golden(results, target, TOLERANCES[precision], limits, out, **changes)


def validated(results: Results, precision: str, layers: int | str, out: Path, assembly: Path | None = None) -> None:
    target = Target("model", precision, layers, "onnxruntime")
    changes = {} if assembly is None else {"assembly_json": assembly}
    run_validate(results, target, CONFIG.tolerance("demo-llama", precision), 96, out, **changes)


ASKED = GoldenTerms(8, PROMPTS, 120)


def demo(shared: Shared, precision: str) -> Results:
    return Results(
        shared.folder(f"quantized/{precision}", lambda root: build_model(DEMO, precision, (2, "all"), ASKED, root))
    )


FAMILY_ASKED = GoldenTerms(4, ("San Francisco is a", "Light"), 40)


def random_source(shared: Shared, family: str) -> Path:
    """A checkpoint of the family with random weights."""

    def make(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(dict(FAMILIES[family].config)))
        make_random_checkpoint(folder / "config.json", 0, folder / "source")

    return shared.folder(f"random/{family}", make) / "source"


def random_family(shared: Shared, family: str, precision: str) -> Results:
    source = random_source(shared, family)
    graphs = functools.partial(unproven, shared, dict(FAMILIES[family].config), source, precision)

    def make(root: Path) -> None:
        build_model(source, precision, (2, "all"), FAMILY_ASKED, root, graphs)

    return Results(shared.folder(f"quantized-{family}/{precision}", make))


def unproven(shared: Shared, config: dict[str, Any], source: Path, precision: str, out: Path) -> None:
    """What `export` writes, without another model that shows that the split is right: other tests do."""
    write_assembly(*quantize(*shared.assembled(config, "fp32"), precision, GROUP), source, out)


def product(data: np.ndarray, scales: np.ndarray, columns: int, bits: int, group: int = GROUP) -> onnx.ModelProto:
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=columns, N=len(data), bits=bits,
        block_size=group,
    )  # fmt: skip
    ios = [onnx.helper.make_tensor_value_info(name, 1, ["rows", n]) for name, n in (("x", columns), ("y", len(data)))]
    constants = [onnx.numpy_helper.from_array(data, "w"), onnx.numpy_helper.from_array(scales, "s")]
    graph = onnx.helper.make_graph([node], "product", ios[:1], ios[1:], constants)
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _swap_scales(tensors: dict[str, np.ndarray]) -> None:
    first, other = (f"model.layers.1.mlp.{part}_proj.weight.scales" for part in ("gate", "up"))
    tensors[first], tensors[other] = tensors[other], tensors[first]


def _group_off_by_one(tensors: dict[str, np.ndarray]) -> None:
    name = "model.layers.0.self_attn.o_proj.weight.scales"
    tensors[name] = np.ascontiguousarray(np.roll(tensors[name], 1, axis=1))


def _other_zero_point(tensors: dict[str, np.ndarray]) -> None:
    name = "model.layers.1.mlp.down_proj.weight.data"
    tensors[name] = np.where(tensors[name] & 15, tensors[name] - 1, tensors[name]).astype(np.uint8)


def _nibbles_reversed(tensors: dict[str, np.ndarray]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight.data"
    tensors[name] = (tensors[name] >> 4) | (tensors[name] << 4)


FAULTS = (_swap_scales, _group_off_by_one, _other_zero_point, _nibbles_reversed)


def damaged(results: Results, root: Path, fault: Callable[[dict[str, np.ndarray]], None]) -> Results:
    """A copy whose weights have a fault, with digests that are right."""
    shutil.copytree(results.root, root)
    manifest = Results(root).weights("model", "w4a16")
    file = manifest.with_suffix(".safetensors")
    places = read_json(manifest)["tensors"]
    tensors = load_file(file)
    before = {name: array.copy() for name, array in tensors.items()}
    fault(tensors)
    assert any(not np.array_equal(tensors[name], before[name]) for name in before)
    raw = bytearray(file.read_bytes())
    for name, place in places.items():
        raw[place["offset"] : place["offset"] + place["length"]] = tensors[name].tobytes()
    file.write_bytes(raw)
    value = read_json(manifest)
    value["files"][0]["sha256"] = sha256_file(file)
    write_json(manifest, value)
    return Results(root)


def assert_far_off(message: str) -> None:
    """Another token, or a logit that is off by several times a bound as small as the demo's roundings make it."""
    match = re.search(r"expected a logit error of at most (\S+), found (0\.\d+)", message)
    assert match or "expected token" in message, message
    assert match is None or (float(match[1]) < 0.02 and float(match[2]) > 3 * float(match[1])), message
