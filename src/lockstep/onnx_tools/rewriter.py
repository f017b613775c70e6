"""Change an ONNX graph in protobuf: what the row kernels of GPUs still use. Passes are written with toolkit.py."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from lockstep.onnx_tools.types import Dims, dims_of, typed_values, with_types

__all__ = ["Dims", "Emitter", "Rewriter", "attributes_of", "dims_of", "typed_values", "with_types"]


class Rewriter:
    """A copy of a model that is being changed; `finish` returns it.

    nodes: of the original graph, in topological order, which may be changed in place. producers: {value: its node} and
    consumers: {value: the nodes that read it, once for each read} of that graph. inputs, outputs: {name: declaration}.
    Replacements are inserted where the replaced node was, which keeps the order topological.
    """

    def __init__(self, model: ModelProto):
        self.model = ModelProto()
        self.model.CopyFrom(model)
        graph = self.model.graph
        self.nodes = list(graph.node)
        self.inputs = {value.name: value for value in graph.input}
        self.outputs = {value.name: value for value in graph.output}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self.consumers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in reads(node):
                self.consumers.setdefault(name, []).append(node)
        self._replacements: dict[int, list[NodeProto]] = {}
        self._prepended: list[NodeProto] = []
        self._appended: list[NodeProto] = []

    def shape(self, name: str) -> list[int]:
        """Return the shape of an input, with 0 for a dynamic dimension."""
        return [dim.dim_value for dim in self.inputs[name].type.tensor_type.shape.dim]

    def element(self, name: str) -> int:
        return self.inputs[name].type.tensor_type.elem_type

    def array(self, name: str) -> np.ndarray | None:
        return numpy_helper.to_array(self.constants[name]) if name in self.constants else None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {name: numpy_helper.to_array(tensor) for name, tensor in self.constants.items()}

    def constant(self, name: str, array: np.ndarray) -> str:
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def input(self, name: str, element: int, shape: Sequence[int | str]) -> str:
        self.inputs[name] = helper.make_tensor_value_info(name, element, shape)
        return name

    def replace_input(self, name: str, *replacements: ValueInfoProto) -> None:
        """Replace an input in the order of the inputs."""
        inputs: dict[str, ValueInfoProto] = {}
        for value in self.inputs.values():
            for new in replacements if value.name == name else (value,):
                inputs[new.name] = new
        self.inputs = inputs

    def replace(self, node: NodeProto, *replacements: NodeProto) -> None:
        """Replace a node by others, one of which may be itself; none removes it."""
        self._replacements[id(node)] = list(replacements)

    def prepend(self, *nodes: NodeProto) -> None:
        """Insert nodes before all others, in call order."""
        self._prepended += nodes

    def append(self, *nodes: NodeProto) -> None:
        self._appended += nodes

    def set_opset(self, version: int) -> None:
        """Require this version of ONNX's operators, and no other operators."""
        _assign(self.model.opset_import, [helper.make_opsetid("", version)])

    def finish(self, check: bool = True) -> ModelProto:
        """Return the changed model without nodes, constants and inputs that nothing reads.

        Raises onnx.checker.ValidationError or onnx.shape_inference.InferenceError for an invalid graph, unless `check`
        is False.
        """
        graph = self.model.graph
        nodes = list(self._prepended)
        for node in self.nodes:
            nodes += self._replacements.get(id(node), [node])
        nodes += self._appended
        needed = upstream(nodes, self.outputs, self.inputs)
        computed = needed - self.inputs.keys()
        _assign(graph.node, [node for node in nodes if not computed.isdisjoint(node.output)])
        _assign(graph.initializer, [tensor for tensor in self.constants.values() if tensor.name in needed])
        _assign(graph.input, [value for value in self.inputs.values() if value.name in needed])
        _assign(graph.output, list(self.outputs.values()))
        del graph.value_info[:]
        if check:
            onnx.checker.check_model(self.model, full_check=True)
        return self.model


class Emitter:
    """Makes nodes of a graph one after another, in `nodes`. prefix: of the names of their values.

    Inputs are names, or constants: arrays, and lists of integers.
    """

    def __init__(self, graph: Rewriter, prefix: str):
        self.nodes: list[NodeProto] = []
        self._graph = graph
        self._prefix = prefix

    def __call__(self, op_type: str, *inputs: Operand, result: str = "", **settings: Any) -> str:
        """Make a node with one output, and return its name: `result`, or a new one."""
        name = result or f"{self._prefix}/{len(self.nodes)}"
        return self.several(op_type, *inputs, results=[name], **settings)[0]

    def several(self, op_type: str, *inputs: Operand, results: Sequence[str], **settings: Any) -> Sequence[str]:
        """Make a node with several outputs, and return their names."""
        names = [value if isinstance(value, str) else self._constant(np.asarray(value)) for value in inputs]
        settings = {"name": f"{self._prefix}/{len(self.nodes)}", **settings}
        self.nodes.append(helper.make_node(op_type, names, results, **settings))
        return results

    def _constant(self, array: np.ndarray) -> str:
        content = hashlib.sha256(f"{array.dtype.name} {array.shape}".encode() + array.tobytes())
        return self._graph.constant(f"constant/{content.hexdigest()[:16]}", array)


Operand = str | Sequence[int] | np.ndarray | np.generic


def _assign(field: Any, messages: Sequence[Any]) -> None:
    del field[:]
    field.extend(messages)


def upstream(nodes: Sequence[NodeProto], names: Iterable[str], stops: Collection[str] = ()) -> set[str]:
    """Return `names` and all values that they depend on, up to those in `stops`."""
    needed = set(names)
    for node in reversed(nodes):
        if any(name in needed and name not in stops for name in node.output):
            needed.update(reads(node))
    return needed


def reads(node: NodeProto) -> list[str]:
    """Return the inputs of a node, and of the nodes of its branches."""
    names = list(node.input)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            for inner in attribute.g.node:
                names += reads(inner)
    return names


def attributes_of(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
