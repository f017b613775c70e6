"""A graph as a JSON document, for `lockstep show --json`.

Inputs and weight slots are divided as in the text of `lockstep show`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from lockstep.onnx_tools.show import is_slot
from lockstep.onnx_tools.signature import dtype_name, io_of, signature_of


def graph_json(path: Path) -> dict[str, Any]:
    """Return the document of the ONNX file `path`, which is valid.

    inputs, slots, outputs, constants: name, dtype (as NumPy calls it) and shape. operators: in the order in which they
    run; an output has a dtype and a shape where shape inference tells them. functions: of the model, the same way.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    graph = model.graph
    signature = signature_of(graph, {value.name for value in graph.input if is_slot(value)})
    known = {value.name: io_of(value).to_json() for value in (*graph.output, *graph.value_info)}
    return {
        "file": path.name,
        "graph": graph.name,
        "opset": next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0),
        **{name: [io.to_json() for io in getattr(signature, name)] for name in ("inputs", "slots", "outputs")},
        "constants": [_tensor(tensor) for tensor in graph.initializer],
        "operators": [_operator(node, known) for node in graph.node],
        "functions": [
            {
                "name": function.name,
                "inputs": list(function.input),
                "outputs": list(function.output),
                "operators": [_operator(node, {}) for node in function.node],
            }
            for function in model.functions
        ],
    }


def _operator(node: onnx.NodeProto, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": node.name,
        "op_type": node.op_type,
        "domain": node.domain,
        "inputs": list(node.input),
        "outputs": [known.get(name, {"name": name}) for name in node.output],
        "attributes": {each.name: _plain(helper.get_attribute_value(each)) for each in node.attribute},
    }


def _tensor(tensor: onnx.TensorProto) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": dtype_name(tensor.data_type), "shape": list(tensor.dims)}


def _plain(value: Any) -> Any:
    """Return an attribute's value as JSON has it.

    A tensor becomes its name, dtype and shape. Numbers that JSON lacks, and graphs, become text.
    """
    if isinstance(value, onnx.TensorProto):
        return _tensor(value)
    if isinstance(value, onnx.GraphProto):
        return value.name
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float)) else list(map(_plain, value))
