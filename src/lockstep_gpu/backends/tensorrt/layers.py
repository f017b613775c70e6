"""The layers of an engine, from TensorRT's inspector: tactics and types.

In: the inspector's JSON at detailed verbosity, which may hold raw control characters. Format: `Layers`, each with
`Name`, `LayerType`, `TacticName`, `TacticValue`, and `Inputs`, `Outputs` with `Name` and `Format/Datatype`, or from
11.0 on `Datatype` and `Format` (TensorRT developer guide, "Engine Inspector").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from lockstep.artifacts.document import JsonObject
from lockstep.errors import CheckError
from lockstep_gpu.backends.tensorrt.compat import GraphRefusedError

# Names that TensorRT makes from addresses: hexadecimal, or decimal of that size. Longer ones are hashes of contents,
# which do identify the choice.
_POINTER = re.compile(r"0x[0-9a-fA-F]{6,16}(?![0-9a-fA-F])|(?<![0-9])[0-9]{13,20}(?![0-9])")
# Names that the compiler numbers.
_COUNTED = re.compile(r"__mye\d+")
_PRODUCT = re.compile(r"gemm|matmul|matrix_?multiply|xmma|cutlass|cublas|_mha", re.IGNORECASE)
# A kernel that the compiler generated for the graph, named after its operators: Fc is a product with weights.
_GENERATED_PRODUCT = re.compile(r"__myl_[A-Za-z]*Fc")
# kinds with other operators too, which may read fp32 in a half-precision graph
_FUSED = re.compile(r"^(kgen|fusion|myelin)", re.IGNORECASE)
_FP32_TACTIC = re.compile(r"sgemm|f32f32_f32f32|tf32|s1688gemm(?!_f16|_bf16)", re.IGNORECASE)
# Kernels that accumulate products of fp16 in fp16: types of both factors, of the result and the accumulator; or the
# letter of cuBLAS.
_FP16_SUMS = re.compile(r"f16_?f16_f16_?f16_f16|(?<![a-z])h\d{3,5}(cudnn|gemm)", re.IGNORECASE)
_FUSED_REGION = re.compile(r"^\{ForeignNode\[.*\]\}$", re.DOTALL)
_DATATYPES = (
    ("bfloat16", re.compile(r"bf16|bfloat", re.IGNORECASE)),
    ("float16", re.compile(r"fp16|half", re.IGNORECASE)),
    ("float32", re.compile(r"fp32|tf32|\bfloat(32)?\b", re.IGNORECASE)),
)
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Layer:
    """A layer of an engine, as TensorRT names it; inputs, outputs: (tensor, format as TensorRT writes it)."""

    name: str
    kind: str
    tactic: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def is_fused_region(self) -> bool:
        return bool(_FUSED_REGION.match(self.name))

    @property
    def is_product(self) -> bool:
        text = f"{self.kind} {self.tactic}"
        return bool(_PRODUCT.search(text) or _GENERATED_PRODUCT.search(f"{self.name} {text}"))


def read_layers(text: str, where: str) -> list[Layer]:
    """Return all layers, of all profiles. Raises CheckError where the JSON does not have them in detail."""
    try:
        entries = json.loads(text, strict=False)["Layers"]
        return [_layer(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckError(
            f"{where}: expected the layers of the engine in detail from TensorRT's inspector, "
            f"found {type(error).__name__}: {error}; please report it"
        ) from None


def _layer(entry: Mapping[str, Any]) -> Layer:
    tactic = " ".join(str(entry[key]) for key in ("TacticName", "TacticValue") if entry.get(key))
    kind = " ".join(str(entry[key]) for key in ("LayerType", "ParameterType") if entry.get(key))
    return Layer(entry["Name"], kind, tactic, _tensors(entry.get("Inputs", ())), _tensors(entry.get("Outputs", ())))


def _tensors(entries: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((entry["Name"], _format(entry)) for entry in entries)


def _format(entry: Mapping[str, Any]) -> str:
    """Return the format and datatype of a tensor as TensorRT writes them, in one text or two."""
    parts = (entry.get(key) for key in ("Format/Datatype", "Format", "Datatype"))
    return " ".join(str(part) for part in parts if part)


@dataclass(frozen=True)
class ChosenLayer(JsonObject):
    """The tactic and formats that TensorRT chose for a layer, the same in equal builds.

    No part of it is made from pointers. formats: of inputs and outputs; of a fused region with their names, sorted.
    """

    name: str
    formats: tuple[str, ...]
    kind: str
    tactic: str

    @property
    def text(self) -> str:
        """Return the tactic and the formats, as messages name them."""
        return ", ".join([f"tactic {self.tactic or 'without a name'}", *dict.fromkeys(self.formats)])


def fingerprint(layers: Sequence[Layer]) -> list[ChosenLayer]:
    """Return the chosen layers in the engine's order.

    Pointers are left out of names and tactics. A fused region is identified by its input and output tensors, in any
    order: TensorRT names it by two of its nodes, not always the same ones.
    """
    return [
        ChosenLayer(*_name_and_formats(layer), layer.kind, _without_pointers_in_name(layer.tactic)) for layer in layers
    ]


def _name_and_formats(layer: Layer) -> tuple[str, tuple[str, ...]]:
    if not layer.is_fused_region:
        return without_pointers(layer.name), tuple(text for _, text in (*layer.inputs, *layer.outputs))
    boundary = [f"from {without_pointers(name)}: {text}" for name, text in layer.inputs]
    boundary += [f"to {without_pointers(name)}: {text}" for name, text in layer.outputs]
    outputs = sorted(without_pointers(name) for name, _ in layer.outputs)
    return f"fused region that gives {', '.join(outputs)}", tuple(sorted(boundary))


def without_pointers(name: str) -> str:
    return _COUNTED.sub("*", _POINTER.sub("*", name))


def _without_pointers_in_name(tactic: str) -> str:
    """Return a tactic without pointers in its name; its value, a hash that looks like a pointer, stays."""
    name, space, value = tactic.rpartition(" ")
    is_hash = re.fullmatch("0x[0-9a-fA-F]+", value)
    if not is_hash:
        return without_pointers(tactic)
    return f"{without_pointers(name)}{space}{value}"


def differences(recorded: Sequence[ChosenLayer], chosen: Sequence[ChosenLayer], where: str) -> Iterator[str]:
    """Yield a line for each layer with another tactic or formats; one for other layers is the last."""
    for old, new in zip(recorded, chosen):
        if old.name != new.name:
            yield (f"{where}: expected layer {old.name} ({old.text}) as recorded, found layer {new.name} ({new.text})")
            return
        if old != new:
            yield f"{where}: layer {old.name}: expected {old.text} as recorded, found {new.text}"
    if len(recorded) != len(chosen):
        yield f"{where}: expected {len(recorded)} layers as recorded, found {len(chosen)}"


def datatype(text: str) -> str | None:
    """Return float32, float16 or bfloat16 of a format's description; None for others."""
    return next((name for name, pattern in _DATATYPES if pattern.search(text)), None)


def check_precision(layers: Sequence[Layer], model: onnx.ModelProto, types: Mapping[str, str], where: str) -> None:
    """Raise GraphRefusedError for fp32 where the graph has half precision.

    Compared with the graph are all of its tensors that a layer reads or writes, and the factors and tactics of matrix
    products: a product's other inputs (alpha, beta and the bias) may be fp32. The inspector does not say which inputs
    of a generated kernel are the factors: at least one must have half precision. types: {tensor of the graph: dtype}.

    Raises CheckError where the graph has matrix products, and the engine has no layers or none with a type.
    """
    products = {node.output[0]: node.name for node in model.graph.node if node.op_type in ("MatMul", "Gemm")}
    product_types = {types[tensor] for tensor in products if tensor in types}
    if products and not layers:
        raise CheckError(
            f"{where}: expected layers, among them the matrix product {next(iter(products.values()))}; found none"
        )
    formats = list[str]()
    for layer in layers:
        formats += [text for _, text in (*layer.inputs, *layer.outputs)]
    if products and not any(map(datatype, formats)):
        raise CheckError(
            f"{where}: expected the datatypes of tensors from TensorRT's inspector, found none in {len(layers)} "
            "layers; please report it"
        )
    half = product_types and product_types <= set(_HALVES)
    for layer in layers:
        for tensor, text in (*layer.inputs, *layer.outputs):
            expected = types.get(tensor)
            if expected in _HALVES and datatype(text) == "float32":
                wrong = f"tensor {tensor}: expected {expected} as in the graph, found {text}"
                raise GraphRefusedError(f"{where}: layer {layer.name}: {wrong}; the engine is not of this precision")
        if half and layer.is_product and (_reads_fp32(layer) or _FP32_TACTIC.search(layer.tactic)):
            wrong = f"expected a matrix product in {'/'.join(sorted(product_types))} as in the graph"
            actual = f"tactic {layer.tactic}"
            if layer.inputs:
                actual += " on " + ", ".join(text for _, text in layer.inputs)
            raise GraphRefusedError(
                f"{where}: layer {layer.name}: {wrong}, found {actual}; the engine is not of this precision"
            )


def _reads_fp32(layer: Layer) -> bool:
    if _FUSED.match(layer.kind):
        read = [datatype(text) for _, text in layer.inputs]
        return "float32" in read and not any(dtype in _HALVES for dtype in read)
    return any(datatype(text) == "float32" for _, text in layer.inputs[:2])


def fp16_sums(layers: Sequence[Layer]) -> list[str]:
    """Return the layers whose kernel accumulates products of fp16 numbers in fp16.

    At 4096 products this is an error ten times as large as that of rounding to fp16. ONNX Runtime and transformers
    accumulate in fp32. Kernels that are generated for the graph, as those of products of one row, do not tell.
    """
    return [layer.name for layer in layers if _FP16_SUMS.search(layer.tactic)]
