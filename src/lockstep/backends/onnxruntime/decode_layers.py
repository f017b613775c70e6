"""All layers of rows that decode, as one graph.

In: the engines of blocks and of their attention, without weights. Out: one graph of them in the order of a step. So a
step makes one call, and values that all layers compute, such as the angles of RoPE, are computed once: ONNX Runtime
merges equal nodes when it opens the graph. Results have the bits of the separate engines.
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
    if name not in PRESENT:
        return None
    return ".".join([*prefix, PRESENT[name]])


class Part(NamedTuple):
    """An engine of a step.

    prefix: of its private names in the graph: weights, past keys and values. reads, writes: {name of an input or
    output: name of the value in a step}.
    """

    prefix: str
    model: onnx.ModelProto
    reads: Mapping[str, str]
    writes: Mapping[str, str]


def stitch(parts: Sequence[Part], ends: Sequence[str]) -> onnx.ModelProto:
    """Return one graph of all parts.

    Its outputs are the values `ends` as their last writer leaves them, named `<value>_out`, and all parts' new keys and
    values. Its inputs are the values of a step that a part reads before any part has written them.
    """
    last_writer: dict[str, int] = {}  # {value of a step: number of the part}
    for number, part in enumerate(parts):
        last_writer.update(dict.fromkeys(part.writes.values(), number))
    values: dict[str, str] = {}  # {value of a step: its name in the graph}
    inputs = dict[str, onnx.ValueInfoProto]()
    outputs = list[onnx.ValueInfoProto]()
    nodes = list[onnx.NodeProto]()
    constants = dict[bytes, onnx.TensorProto]()
    for number, part in enumerate(parts):
        graph = part.model.graph
        names = {"": ""}  # {name in the part: name in the graph}; "" is an optional input that is absent
        for value in graph.input:
            key = part.reads.get(value.name)
            if key is None:  # private to the part: a weight, or past keys and values
                names[value.name] = part.prefix + value.name
            else:
                names[value.name] = values.setdefault(key, key)
            if key is None or values[key] == key:
                inputs[names[value.name]] = _renamed(value, names[value.name])
        for node in graph.node:
            names.update((name, part.prefix + name) for name in node.output if name)
        for tensor in graph.initializer:  # one copy for all layers, so that equal nodes have equal inputs
            content = _renamed(tensor, "").SerializeToString()
            names[tensor.name] = constants.setdefault(content, _renamed(tensor, f"constant_{len(constants)}")).name
        for value in graph.output:
            key = part.writes.get(value.name)
            is_end = key is not None and key in ends and last_writer[key] == number
            if is_end:
                names[value.name] = f"{key}_out"
            if key is not None:
                values[key] = names[value.name]
            if is_end or value.name.startswith("present_"):
                outputs.append(_renamed(value, names[value.name]))
        for node in graph.node:
            nodes.append(_renamed(node, ""))
            for side in (nodes[-1].input, nodes[-1].output):
                side[:] = [names[name] for name in side]
    nodes, read = _needed(nodes, [value.name for value in outputs])
    domains: dict[str, int] = {}
    for part in parts:
        domains.update((entry.domain, entry.version) for entry in part.model.opset_import)
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
