"""Print a graph for people: inputs, slots, outputs, and each operator with its result's type and shape."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.dtypes import NAME_PRECISIONS
from lockstep.errors import InputError
from lockstep.onnx_tools.signature import dtype_name
from lockstep.onnx_tools.types import dims_of


def show(path: str | os.PathLike) -> str:
    """Return the text for the ONNX file `path`. Raises InputError when it is absent or not an ONNX model."""
    path = Path(path)
    try:
        model = onnx.load(path, format="protobuf")  # whatever the suffix
        onnx.checker.check_model(model)
    except FileNotFoundError:
        raise InputError(
            f"{path}: expected an ONNX file, found none; run `lockstep run` first, or correct the path"
        ) from None
    except IsADirectoryError:
        raise InputError(
            f"{path}: expected an ONNX file, found a folder; name a file in it, such as graphs/middle.onnx"
        ) from None
    except (DecodeError, onnx.checker.ValidationError) as error:
        raise InputError(f"{path}: expected an ONNX model, found {' '.join(str(error).split())[:200]}") from None
    return "\n".join(_lines(path, onnx.shape_inference.infer_shapes(model))) + "\n"


def layer_table(assembly_json: str | os.PathLike) -> str:
    """Return a table of each layer's class, attention variant and exit. Raises InputError for no assembly."""
    assembly = Assembly.load(assembly_json)
    layers = []
    for layer in assembly.layers:
        layers.append((layer.block.graph, layer.variant, ", ".join(exit.graph for exit in layer.exits)))
    rows = [("layers", "block", "attention", "exit when cut here")]
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[start]:
            numbers = str(start)
            if index > start + 1:
                numbers += f"-{index - 1}"
            rows.append((numbers, *layers[start]))
            start = index
    digests = [(name, graph.sha256[:12]) for name, graph in sorted(assembly.classes.items())]
    for name, variant in sorted(assembly.mixers.items()):
        digests += [(f"{name}.{phase}", graph.sha256[:12]) for phase, graph in variant.phases().items()]
    counts = (
        (len(assembly.layers), "layers"),
        (len(assembly.classes), "classes"),
        (len(assembly.variants), "attention variants"),
        (len(assembly.state_mixers), "state mixers"),
    )
    summary = ", ".join(f"{count} {name}" for count, name in counts if count)
    return "\n".join([summary, *_columns(rows), *_columns(digests)])


def _lines(path: Path, model: onnx.ModelProto) -> Iterator[str]:
    graph = model.graph
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    slots = [value for value in graph.input if is_slot(value)]
    inputs = [value for value in graph.input if not is_slot(value)]
    yield f"{path.name}: {graph.name}, opset {opset}, {len(graph.node)} operators, {len(slots)} slots"
    for title, values in (("inputs", inputs), ("slots", slots), ("outputs", graph.output)):
        if values:
            yield f"\n{title}"
            yield from _columns([(value.name, _type(value)) for value in values])
    types = {value.name: _type(value) for value in (*graph.input, *graph.output, *graph.value_info)}
    constants = {tensor.name: _constant(tensor) for tensor in graph.initializer}
    yield "\noperators"
    rows = []
    for node in graph.node:
        rows.append((", ".join(node.output), _call(node, constants), types.get(node.output[0], "")))
    yield from _columns(rows)
    for function in model.functions:
        yield f"\nfunction {function.name}({', '.join(function.input)}) -> {', '.join(function.output)}"
        function_constants = {}
        for node in function.node:
            if node.op_type == "Constant" and node.attribute:
                function_constants[node.output[0]] = _constant(node.attribute[0].t)
        nodes = [node for node in function.node if node.op_type != "Constant"]
        yield from _columns([(", ".join(node.output), _call(node, function_constants)) for node in nodes])


def is_slot(value: onnx.ValueInfoProto) -> bool:
    """Return whether an input is a weight: of fixed shape and float type, and not a state."""
    tensor = value.type.tensor_type
    is_fixed = all(dim.HasField("dim_value") for dim in tensor.shape.dim) and not value.name.startswith("past_")
    return is_fixed and tensor.elem_type != onnx.TensorProto.INT64


def _type(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    return f"{_short(tensor.elem_type)} [{', '.join(map(str, dims_of(value)))}]"


def _short(element: int) -> str:
    """Return the precision of an ONNX element type if it has one, else its dtype."""
    name = dtype_name(element)
    return NAME_PRECISIONS.get(name, name)


def _call(node: onnx.NodeProto, constants: dict[str, str]) -> str:
    arguments = [constants.get(name, name) for name in node.input if name]
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if node.op_type == "Cast" and attribute.name == "to":
            value = _short(value)
        if isinstance(value, tuple):
            value = list(value)
        if _DEFAULTS.get(attribute.name) != value:
            arguments.append(f"{attribute.name}={value}")
    return f"{node.op_type}({', '.join(arguments)})"


_DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "keepdims": 1, "noop_with_empty_axes": 0, "allowzero": 0}


def _constant(tensor: onnx.TensorProto) -> str:
    array = numpy_helper.to_array(tensor)
    if array.size == 1:
        number = array.reshape(-1)[0]
        return f"{number:g}" if array.dtype.kind == "f" else str(number)
    if array.size <= 8 and array.dtype.kind == "i":
        return str(array.tolist()).replace(str(np.iinfo(np.int64).max), "end")
    return f"<{array.dtype} {list(array.shape)}>"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
