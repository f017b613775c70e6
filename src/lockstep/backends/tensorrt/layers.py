"""What TensorRT made of a graph, from its inspector: layers, the tactic of each, and the types that they compute in.

In: the inspector's JSON at detailed verbosity, which may hold raw control characters. Format: `Layers`, each with
`Name`, `LayerType`, `TacticName`, `TacticValue`, and `Inputs`, `Outputs` with `Name` and `Format/Datatype` (TensorRT
developer guide, "Engine Inspector").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from lockstep.backends.tensorrt.compat import GraphRefusedError
from lockstep.errors import CheckError

# Names that TensorRT makes from addresses: hexadecimal, or decimal of that size. Longer ones are hashes of contents,
# which do say what was chosen.
_POINTER = re.compile(r"0x[0-9a-fA-F]{6,16}(?![0-9a-fA-F])|(?<![0-9])[0-9]{13,20}(?![0-9])")
_PRODUCT = re.compile(r"gemm|matmul|matrix_?multiply|xmma|cutlass|cublas|_mha", re.IGNORECASE)
# kinds that hold other operators too, which may read fp32 by right
_FUSED = re.compile(r"^(kgen|fusion|myelin)", re.IGNORECASE)
_FP32_TACTIC = re.compile(r"sgemm|f32f32_f32f32|tf32|s1688gemm(?!_f16|_bf16)", re.IGNORECASE)
# Kernels that add up products of fp16 in fp16: types of both factors, of the result and the sum; or the letter of
# cuBLAS.
_FP16_SUMS = re.compile(r"f16f16_f16f16_f16|(?<![a-z])h\d{3,5}(cudnn|gemm)", re.IGNORECASE)
_REGION = re.compile(r"^\{ForeignNode\[.*\]\}$", re.DOTALL)
_DATATYPES = (
    ("bfloat16", re.compile(r"bf16|bfloat", re.IGNORECASE)),
    ("float16", re.compile(r"fp16|half", re.IGNORECASE)),
    ("float32", re.compile(r"fp32|tf32|\bfloat(32)?\b", re.IGNORECASE)),
)
_HALVES = ("float16", "bfloat16")
IN_REGION = "in a fused region"  # ends the kind of a layer that regions.py finds


@dataclass(frozen=True)
class Layer:
    """A layer of an engine. inputs, outputs: (tensor, format as TensorRT writes it). Names as they are, pointers and
    all."""

    name: str
    kind: str
    tactic: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


def read_layers(text: str, where: str) -> list[Layer]:
    """All layers, of all profiles. Raises CheckError where the engine says less than that."""
    try:
        entries = json.loads(text, strict=False)["Layers"]
        return [_layer(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise CheckError(
            f"{where}: expected the layers of the engine in detail from TensorRT's inspector, "
            f"found {found}; please report it"
        ) from None


def _layer(entry: Mapping[str, Any]) -> Layer:
    tensors = lambda key: tuple(
        (tensor["Name"], str(tensor.get("Format/Datatype", tensor.get("Format", "")))) for tensor in entry.get(key, ())
    )
    tactic = " ".join(str(entry[key]) for key in ("TacticName", "TacticValue") if entry.get(key))
    kind = " ".join(str(entry[key]) for key in ("LayerType", "ParameterType") if entry.get(key))
    return Layer(entry["Name"], kind, tactic, tensors("Inputs"), tensors("Outputs"))


def fingerprint(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """What was chosen, as JSON: layers in the engine's order with tactic and formats; what is made from pointers is
    left out of names.

    A fused region is what lies between its tensors, in whatever order they are listed: TensorRT names it by two of its
    nodes, not always the same.
    """
    return [
        {**_named(layer), "kind": layer.kind, "tactic": _without_pointers_in_name(layer.tactic)} for layer in layers
    ]


def _named(layer: Layer) -> dict[str, Any]:
    if not _REGION.match(layer.name):
        return {"name": without_pointers(layer.name), "formats": [text for _, text in (*layer.inputs, *layer.outputs)]}
    inputs, outputs = (
        [(without_pointers(name), text) for name, text in tensors] for tensors in (layer.inputs, layer.outputs)
    )
    boundary = [
        f"{side} {name}: {text}" for side, tensors in (("from", inputs), ("to", outputs)) for name, text in tensors
    ]
    return {
        "name": f"fused region that gives {', '.join(sorted(name for name, _ in outputs))}",
        "formats": sorted(boundary),
    }


def without_pointers(name: str) -> str:
    return _POINTER.sub("*", name)


def _without_pointers_in_name(tactic: str) -> str:
    """A tactic's value is a hash, written like a pointer: only the name before it is looked at."""
    name, space, value = tactic.rpartition(" ")
    return (
        f"{without_pointers(name)}{space}{value}" if re.fullmatch("0x[0-9a-fA-F]+", value) else without_pointers(tactic)
    )


def differences(recorded: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], where: str) -> Iterator[str]:
    """A line for each layer that got another tactic or other formats, with both; the last one where the layers are
    others."""
    for old, new in zip(recorded, found):
        if old["name"] != new["name"]:
            yield (
                f"{where}: expected layer {old['name']} ({_chosen(old)}) as recorded, found layer "
                f"{new['name']} ({_chosen(new)})"
            )
            return
        if old != new:
            yield f"{where}: layer {old['name']}: expected {_chosen(old)} as recorded, found {_chosen(new)}"
    if len(recorded) != len(found):
        yield f"{where}: expected {len(recorded)} layers as recorded, found {len(found)}"


def compare(recorded: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raises CheckError with the first difference."""
    if line := next(differences(recorded, found, where), None):
        anew = (
            "; TensorRT 8.6 chooses the kernels of fused regions anew in each build: keep the engines "
            "that were built with the record"
        )
        raise CheckError(line + (anew if any_in_region(layer["kind"] for layer in (*recorded, *found)) else ""))


def _chosen(layer: Mapping[str, Any]) -> str:
    return ", ".join([f"tactic {layer['tactic'] or 'of its own'}", *dict.fromkeys(layer["formats"])])


def datatype(text: str) -> str | None:
    """float32, float16 or bfloat16 of a format's description; None for others."""
    return next((name for name, pattern in _DATATYPES if pattern.search(text)), None)


def any_in_region(kinds: Iterable[str]) -> bool:
    """Whether one of these kinds of layers is of a kernel in a fused region."""
    return any(kind.endswith(IN_REGION) for kind in kinds)


def unlisted(layers: Sequence[Layer]) -> bool:
    """Whether there are fused regions of which no kernel is known."""
    return any(_REGION.match(layer.name) for layer in layers) and not any_in_region(layer.kind for layer in layers)


def check_precision(layers: Sequence[Layer], model: onnx.ModelProto, types: Mapping[str, str], where: str) -> None:
    """Raises GraphRefusedError naming a layer that computes in fp32 what the graph computes in half precision,
    CheckError where no layers are told.

    types: {tensor of the graph: dtype}. Held to the graph are every tensor of it that a layer reads or writes, and the
    tactics of matrix products. Inside fused regions those are the products that `regions.region_layers` finds; kernels
    that are made for the graph tell no types.
    """
    products = {node.output[0]: node.name for node in model.graph.node if node.op_type in ("MatMul", "Gemm")}
    wanted = {types[tensor] for tensor in products if tensor in types}
    if products and not layers:
        raise CheckError(
            f"{where}: expected layers, among them the matrix product {next(iter(products.values()))}; found none"
        )
    half = wanted and wanted <= set(_HALVES)
    for layer in layers:
        for tensor, text in (*layer.inputs, *layer.outputs):
            expected, found = types.get(tensor), datatype(text)
            if expected in _HALVES and found == "float32":
                wrong = f"tensor {tensor}: expected {expected} as in the graph, found {text}"
                raise GraphRefusedError(f"{where}: layer {layer.name}: {wrong}; the engine is not of this precision")
        if not _PRODUCT.search(f"{layer.kind} {layer.tactic}"):
            continue
        reads_fp32 = not _FUSED.match(layer.kind) and any(datatype(text) == "float32" for _, text in layer.inputs)
        if half and (reads_fp32 or _FP32_TACTIC.search(layer.tactic)):
            wrong = f"expected a matrix product in {'/'.join(sorted(wanted))} as in the graph"
            found = " on ".join(filter(None, (f"tactic {layer.tactic}", ", ".join(text for _, text in layer.inputs))))
            raise GraphRefusedError(
                f"{where}: layer {layer.name}: {wrong}, found {found}; the engine is not of this precision"
            )


def fp16_sums(layers: Sequence[Layer]) -> list[str]:
    """The layers whose kernel adds up products of fp16 numbers in fp16, which is an error ten times as large as
    rounding at 4096 products.

    ONNX Runtime and transformers add up in fp32. TensorRT 8.6 has no other kernels for a product that is in no fused
    region, and is told to take others inside (Library.compiler_flags). Kernels that are made for the graph, as those of
    products of one row, do not tell.
    """
    return [layer.name for layer in layers if _FP16_SUMS.search(layer.tactic)]
