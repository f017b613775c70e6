"""All layers of rows that decode, as one graph.

In: the engines of blocks and of their attention, without weights. Out: one graph of them in the order of a step. Its
calls are one then, and what layers compute alike, as the angles of RoPE, is computed once: ONNX Runtime finds equal
nodes when it opens the graph. Results are those of the engines one by one, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import onnx
from onnx import helper

PRESENT = {"present_key": "past_key", "present_value": "past_value"}  # {output: the input that it is bound to}
_Named = TypeVar("_Named", onnx.NodeProto, onnx.TensorProto, onnx.ValueInfoProto)


def past_of(output: str) -> str | None:
    """Return the input that an output is to be bound to, of an engine or of several in one graph; None for others."""
    *prefix, name = output.split(".")
    return ".".join([*prefix, PRESENT[name]]) if name in PRESENT else None


class Part(NamedTuple):
    """An engine of a step.

    prefix: of names in the graph that are the engine's own: of weights, past keys and values. reads, gives: {its name:
    that of the value in a step}.
    """

    prefix: str
    model: onnx.ModelProto
    reads: Mapping[str, str]
    gives: Mapping[str, str]


def stitch(parts: Sequence[Part], ends: Sequence[str]) -> onnx.ModelProto:
    """Return the graph; its outputs are the last of each of the values `ends` that a part gives, as `<value>_out`."""
    last = {key: number for number, part in enumerate(parts) for key in part.gives.values() if key in ends}
    values: dict[str, str] = {}  # {value of a step: its name in the graph}
    inputs = dict[str, onnx.ValueInfoProto]()
    outputs = list[onnx.ValueInfoProto]()
    nodes = list[onnx.NodeProto]()
    constants = dict[bytes, onnx.TensorProto]()
    for number, part in enumerate(parts):
        graph = part.model.graph
        names = {"": ""}
        for value in graph.input:
            key = part.reads.get(value.name)
            names[value.name] = part.prefix + value.name if key is None else values.setdefault(key, key)
            if key is None or values[key] == key:
                inputs[names[value.name]] = _renamed(value, names[value.name])
        names |= {name: part.prefix + name for node in graph.node for name in node.output if name}
        for tensor in graph.initializer:  # once for all layers, whose equal nodes are equal then
            content = _renamed(tensor, "").SerializeToString()
            names[tensor.name] = constants.setdefault(content, _renamed(tensor, f"constant_{len(constants)}")).name
        for value in graph.output:
            key = part.gives.get(value.name)
            if key is not None:
                values[key] = names[value.name] = f"{key}_out" if last.get(key) == number else names[value.name]
            if values.get(key or "") == f"{key}_out" or value.name.startswith("present_"):
                outputs.append(_renamed(value, names[value.name]))
        for node in graph.node:
            nodes.append(_renamed(node, ""))
            for side in (nodes[-1].input, nodes[-1].output):
                side[:] = [names[name] for name in side]
    nodes, read = _needed(nodes, [value.name for value in outputs])
    domains = {entry.domain: entry.version for part in parts for entry in part.model.opset_import}
    graph = helper.make_graph(
        nodes,
        "decode_layers",
        [value for name, value in inputs.items() if name in read],
        outputs,
        [tensor for tensor in constants.values() if tensor.name in read],
    )
    opsets = [helper.make_opsetid(*entry) for entry in domains.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=parts[0].model.ir_version)


def _needed(nodes: Sequence[onnx.NodeProto], names: Sequence[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes that these values depend on, and all that they read."""
    read = {*names}
    needed: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if not read.isdisjoint(node.output):
            needed.insert(0, node)
            read.update(node.input)
    return needed, read


def _renamed(message: _Named, name: str) -> _Named:
    copy = type(message)()
    copy.CopyFrom(message)
    copy.name = name
    return copy
