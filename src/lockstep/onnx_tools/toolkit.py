"""The toolkit of graph passes: run them, and write the graphs that they change; values.py reads them.

A pass is an onnx_ir pass: `call` changes a model in place and returns a PassResult that says whether it did; `requires`
and `ensures` may check the model before and after. Nodes are not edited: a pass writes new ones and replaces values;
whatever is no longer read is removed after each pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from lockstep.onnx_tools.types import with_types

Pass = ir.passes.InPlacePass
PassResult = ir.passes.PassResult
Dims = Iterable[int | ir.SymbolicDim | str | None] | None
Operand = ir.Value | Sequence[int] | np.ndarray | np.generic


def run_passes(model: onnx.ModelProto, *passes: Pass, check: bool = True, keep_inputs: bool = False) -> onnx.ModelProto:
    """Return a copy of a model after passes; the model itself where none changes it.

    keep_inputs: those that nothing reads, too.

    Raises onnx.checker.ValidationError or onnx.shape_inference.InferenceError for an invalid graph, unless `check` is
    False.
    """
    graph_model = ir.from_proto(model)
    if not change(graph_model, *passes, keep_inputs=keep_inputs):
        return model
    changed = to_proto(graph_model)
    if check:
        onnx.checker.check_model(changed, full_check=True)
    return changed


def change(model: ir.Model, *passes: Pass, keep_inputs: bool = False) -> bool:
    """Change a model by passes, and remove unused nodes and inputs after each; return whether one changed it."""
    is_modified = False
    for graph_pass in passes:
        if graph_pass(model).modified:
            is_modified = True
            remove_unused(model.graph, keep_inputs)
    return is_modified


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return a model in ONNX's form, without the types and shapes of inner values."""
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    return proto


def remove_unused(graph: ir.Graph, keep_inputs: bool = False) -> None:
    """Remove the nodes, constants and, unless they are kept, inputs that nothing reads."""
    for node in reversed(graph):  # readers first: then nothing reads what they read
        if not any(map(is_read, node.outputs)):
            graph.remove(node, safe=True)
    for value in [value for value in graph.initializers.values() if not is_read(value)]:
        del graph.initializers[str(value.name)]
    for value in [value for value in graph.inputs if not keep_inputs and not is_read(value)]:
        graph.inputs.remove(value)


def is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def infer_types(model: ir.Model) -> None:
    """Give all values the types and shapes that ONNX infers; those of values that it cannot infer become None."""
    values = {}
    for node in model.graph:
        for value in node.outputs:
            values[value.name] = value
            if not value.is_graph_output():  # what an earlier pass wrote may be wrong by now
                value.type = None
                value.shape = None
    for info in with_types(to_proto(model)).graph.value_info:
        if info.name in values:
            ir.serde.deserialize_value_info_proto(info, values[info.name])


def replace(value: ir.Value, new: ir.Value, keep: ir.Node | None = None) -> None:
    """Let a new value take the name and the place of a value at its readers, except one, and in the graph's outputs."""
    new.name = value.name
    new.type = value.type
    new.shape = value.shape
    if keep is not None:  # the value stays in the graph, where names are unique
        value.name = f"{value.name}/before"
    kept_uses = [(node, index) for node, index in value.uses() if node is keep]
    value.replace_all_uses_with(new, replace_graph_outputs=True)
    for node, index in kept_uses:
        node.replace_input_with(index, value)


def add_input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: Dims, before: ir.Value | None = None) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype))
    if shape is not None:
        value.shape = ir.Shape(shape)
    position = len(graph.inputs)
    if before is not None:
        position = graph.inputs.index(before)
    graph.inputs.insert(position, value)
    return value


class GraphWriter:
    """Adds operators to a graph, whose operands are values or constants: arrays and lists of integers.

    prefix: of the names of nodes and values; None: ONNX IR names them. before, after: the node that they precede or
    follow; None: the end of the graph.
    """

    def __init__(
        self, graph: ir.Graph, prefix: str | None = None, before: ir.Node | None = None, after: ir.Node | None = None
    ):
        self.graph = graph
        self._prefix = prefix
        self._before = before
        self._after = after
        self._count = 0

    def op(
        self,
        op_type: str,
        *inputs: Operand | None,
        shape: Dims = None,
        dtype: ir.DataType | None = None,
        replaces: ir.Value | None = None,
        result: str | None = None,
        name: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Add an operator with one output, and return that.

        replaces: the value whose name and place the output takes; else `result` is its name. name: of the node.
        """
        (value,) = self.several(
            op_type, *inputs, results=[result or self._name()], name=name, domain=domain, **attributes
        )
        if shape is not None:
            value.shape = ir.Shape(shape)
        if dtype is not None:
            value.type = ir.TensorType(dtype)
        if replaces is not None:
            replace(replaces, value)
        return value

    def several(
        self,
        op_type: str,
        *inputs: Operand | None,
        results: Sequence[str | None],
        name: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Add an operator with several outputs of these names, and return them."""
        values = [self._value(operand) for operand in inputs]
        settings = list[ir.Attr]()
        for key, setting in sorted(attributes.items()):
            if not isinstance(setting, ir.Attr):
                setting = ir.convenience.convert_attribute(key, setting)
            settings.append(setting)
        if name is None:
            name = self._name() or ""
        node = ir.Node(domain, op_type, values, settings, num_outputs=len(results), name=name)
        for value, value_name in zip(node.outputs, results, strict=True):
            value.name = value_name
        self._insert(node)
        return node.outputs

    def copy(self, node: ir.Node, *inputs: Operand | None, **settings: Any) -> ir.Value:
        """Add a node again with other inputs, and return its one output. settings: of `op`, and other attributes."""
        return self.op(
            node.op_type, *inputs, **{"name": node.name, "domain": node.domain, **node.attributes, **settings}
        )

    def constant(self, array: np.ndarray | np.generic, name: str | None = None) -> ir.Value:
        """Return a constant of the graph; without a name, equal ones are one."""
        array = np.asarray(array)
        if name is None:
            content = hashlib.sha256(f"{array.dtype.name} {array.shape}".encode() + array.tobytes())
            name = f"constant/{content.hexdigest()[:16]}"
        if name not in self.graph.initializers:
            self.graph.register_initializer(constant(name, array))
        return self.graph.initializers[name]

    def _value(self, operand: Operand | None) -> ir.Value | None:
        if operand is None or isinstance(operand, ir.Value):
            return operand
        return self.constant(np.asarray(operand))

    def _name(self) -> str | None:
        return None if self._prefix is None else f"{self._prefix}/{self._count}"

    def _insert(self, node: ir.Node) -> None:
        self._count += 1
        if self._before is not None:
            self.graph.insert_before(self._before, node)
        elif self._after is not None:
            self.graph.insert_after(self._after, node)
            self._after = node  # the next one follows this one
        else:
            self.graph.append(node)


def constant(name: str, array: np.ndarray) -> ir.Value:
    """Return an initializer, not yet registered in a graph."""
    dtype = ir.DataType.from_numpy(array.dtype)
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor)


def node_of(
    op_type: str, inputs: Sequence[ir.Value], shape: Dims, dtype: ir.DataType | None, attributes: Sequence[ir.Attr] = ()
) -> ir.Node:
    """Return a node with one output of this shape and type, not yet in a graph."""
    node = ir.Node("", op_type, inputs, attributes, num_outputs=1)
    if shape is not None:
        node.outputs[0].shape = ir.Shape(shape)
    if dtype is not None:
        node.outputs[0].type = ir.TensorType(dtype)
    return node
