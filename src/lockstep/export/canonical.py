"""Canonical graphs: equal computations in equal order have one form, hence one digest.

In: an onnx_ir graph and names for its inputs and outputs. Out: ONNX bytes in which every name is derived from the
structure alone, without metadata, doc strings, intermediate shapes and unused constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx import numpy_helper

from lockstep.artifacts.signature import Signature
from lockstep.onnx_tools.signature import signature_of

OPSET = 20
IR_VERSION = 10
# Constants of shapes, axes and rotary frequencies are small; a larger one would be a weight that slipped in.
MAX_CONSTANT_BYTES = 1 << 20


@dataclass(frozen=True)
class Graph:
    data: bytes
    signature: Signature

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def proto(self) -> onnx.ModelProto:
        return onnx.ModelProto.FromString(self.data)


def canonical(graph: ir.Graph, name: str, order: Sequence[str], slots: Mapping[str, str]) -> Graph:
    """Return the canonical form of `graph`; its weights, which may be initializers, become inputs.

    order: names of the inputs that are not weights, in the order of the result (missing and unused ones are dropped);
    slots: {name: slot name} of the weights, which become inputs in order of first use.
    """
    for weight in [weight for weight in graph.initializers if weight in slots]:
        graph.inputs.append(graph.initializers.pop(weight))
    proto = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).graph
    nodes = _structural_order(proto)
    outputs = {value.name: value for value in proto.output}
    used: list[str] = []
    for node in nodes:
        used += filter(None, node.input)
    declared = {value.name: value for value in proto.input}
    constants = {tensor.name: tensor for tensor in proto.initializer}
    rename = {name: name for name in (*order, *outputs)} | dict(slots)

    result = onnx.GraphProto(name=name)
    read = set(used) | set(outputs)
    result.input.extend(_io(declared[n], n) for n in order if n in declared and n in read)
    result.input.extend(_io(declared[n], slots[n]) for n in dict.fromkeys(used) if n in slots)
    # Constants are numbered in order of first use, and equal ones are one: their names in the trace are arbitrary.
    by_content: dict[tuple, str] = {}
    for constant in dict.fromkeys(name for name in used if name in constants and name not in slots):
        array = numpy_helper.to_array(constants[constant])
        if array.nbytes > MAX_CONSTANT_BYTES:
            raise ValueError(
                f"graph {name}: constant {constant} of {array.nbytes} bytes: expected none above {MAX_CONSTANT_BYTES}"
            )
        key = (constants[constant].data_type, array.shape, array.tobytes())
        if key not in by_content:
            by_content[key] = f"const_{len(by_content)}"
            tensor = onnx.TensorProto(
                name=by_content[key],
                data_type=constants[constant].data_type,
                dims=array.shape,
                raw_data=array.tobytes(),
            )
            result.initializer.append(tensor)
        rename[constant] = by_content[key]
    rename[""] = ""  # an absent optional input
    # Nodes are named by operator and number, and their outputs by their node.
    counts: dict[str, int] = {}
    for node in nodes:
        index = counts.get(node.op_type, 0)
        counts[node.op_type] = index + 1
        label = f"{node.op_type.lower()}_{index}"
        for position, output in enumerate(node.output):
            if output and output not in outputs:
                is_only = len(node.output) == 1
                rename[output] = label if is_only else f"{label}.{position}"
        new = result.node.add(op_type=node.op_type, domain=node.domain, name=label)
        new.input.extend(rename[name] for name in node.input)
        new.output.extend(rename[name] for name in node.output)
        new.attribute.extend(sorted(node.attribute, key=lambda attribute: attribute.name))
        for attribute in new.attribute:
            attribute.doc_string = ""
    result.output.extend(_io(value, value.name) for value in proto.output)
    model = onnx.ModelProto(ir_version=IR_VERSION, graph=result, opset_import=[onnx.helper.make_opsetid("", OPSET)])
    slot_names = {slots[n] for n in used if n in slots}
    return Graph(model.SerializeToString(deterministic=True), signature_of(result, slot_names))


def _structural_order(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes that the outputs need, each after its inputs, in an order that depends on structure alone."""
    producer: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        producer.update((output, index) for output in node.output if output)
    order: dict[int, None] = {}
    # Depth first without recursion: a node is visited again, and placed, after the nodes that it reads.
    stack = [(producer[value.name], False) for value in reversed(graph.output) if value.name in producer]
    while stack:
        index, inputs_placed = stack.pop()
        if index in order:
            continue
        if inputs_placed:
            order[index] = None
            continue
        stack.append((index, True))
        for name in reversed(graph.node[index].input):
            if name in producer and producer[name] not in order:
                stack.append((producer[name], False))
    return [graph.node[index] for index in order]


def _io(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    new = onnx.ValueInfoProto(name=name)
    new.type.tensor_type.elem_type = value.type.tensor_type.elem_type
    new.type.tensor_type.shape.SetInParent()  # a scalar has a shape too, of no dimensions
    for dim in value.type.tensor_type.shape.dim:
        new_dim = new.type.tensor_type.shape.dim.add()
        if dim.HasField("dim_value"):
            new_dim.dim_value = dim.dim_value
        else:
            new_dim.dim_param = dim.dim_param
    return new
