"""Edit an ONNX graph by the roles that its nodes have, to plant faults in it.

In: a canonical graph of an assembly. Out: the same graph with nodes added, rewired or changed, sorted and checked.
Needs onnx, no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from lockstep.onnx_tools.types import typed_values

LAST = 2**62  # the end of a slice
Value = str  # the name of a value in a graph


class Edit:
    """A graph under change. `spec` is the kind's entry in the assembly, for attention graphs; empty for blocks."""

    def __init__(self, model: onnx.ModelProto, spec: Mapping[str, Any] | None = None):
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.graph = self.model.graph
        self.spec = dict(spec or {})
        self._before = model.SerializeToString(deterministic=True)
        self._types = typed_values(model)
        self._count = 0

    # Reading the graph

    def nodes(self, *op_types: str) -> list[NodeProto]:
        return [node for node in self.graph.node if node.op_type in op_types]

    def producer(self, value: Value) -> NodeProto | None:
        return next((node for node in self.graph.node if value in node.output), None)

    def readers(self, value: Value) -> list[NodeProto]:
        return [node for node in self.graph.node if value in node.input]

    def reader(self, value: Value, op_type: str) -> NodeProto:
        """Return the first reader of this operator."""
        return next(node for node in self.readers(value) if node.op_type == op_type)

    def constant(self, value: Value) -> np.ndarray | None:
        return next((numpy_helper.to_array(tensor) for tensor in self.graph.initializer if tensor.name == value), None)

    def constant_of(self, node: NodeProto) -> tuple[int, np.ndarray]:
        """(place, value) of a node's first constant input."""
        return next(
            (place, array) for place, name in enumerate(node.input) if (array := self.constant(name)) is not None
        )

    def is_float(self, value: Value) -> bool:
        return self._element(value) in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)

    def slot(self, text: str) -> Value:
        """Return the weight input whose name holds `text`."""
        name = next((value.name for value in self.graph.input if text in value.name), None)
        if name is None:
            raise ValueError(f"graph {self.graph.name}: expected a slot {text}, found none")
        return name

    def product(self, text: str) -> NodeProto:
        """Return the Gemm that reads the slot whose name holds `text`."""
        slot = self.slot(text)
        return next(node for node in self.nodes("Gemm") if slot in node.input)

    def result_of(self, text: str) -> Value:
        """Return the product with the weight whose name holds `text`, in any precision."""
        weight = self.slot(f"{text}.weight")
        reader = self.readers(weight)[0]
        if reader.op_type != "Cast":
            return reader.output[0]
        product = self.reader(reader.output[0], "Gemm").output[0]  # of fp8: times the scales of both
        for _ in range(2):
            product = self.reader(product, "Mul").output[0]
        return product

    def quantized_product(self, text: str) -> NodeProto:
        """Return the MatMulNBits that reads the quantised weight whose name holds `text`."""
        data = self.slot(f"{text}.weight.data")
        return next(node for node in self.nodes("MatMulNBits") if data in node.input)

    # Adding nodes

    def const(self, value: Any, dtype: Any = None) -> Value:
        """Add a constant. Python's numbers and booleans take `dtype`, by default int64."""
        array = np.asarray(value, dtype if dtype is not None or isinstance(value, np.ndarray) else np.int64)
        name = self._name("fault_const")
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def like(self, value: Value, number: Any) -> Value:
        """Add a constant in the element type of `value`."""
        return self.const(number, helper.tensor_dtype_to_np_dtype(self._element(value)))

    def op(self, op_type: str, *inputs: Value | int, **attributes: Any) -> Value:
        """Add a node, and return its result; an integer is a constant. `done` puts the node where it belongs."""
        inputs = tuple(value if isinstance(value, str) else self.const(value) for value in inputs)
        out = self._name("fault")
        self.graph.node.append(helper.make_node(op_type, list(inputs), [out], name=out, **attributes))
        self._note(out, op_type, inputs, attributes)
        return out

    def ints(self, *values: int) -> Value:
        return self.const(list(values))

    def size(self, value: Value, axis: int = 0) -> Value:
        """Return a dimension of a value, as a scalar."""
        return self.op("Gather", self.op("Shape", value), axis, axis=0)

    def numbers(self, value: Value) -> Value:
        """0, 1, ... for each row of a value."""
        return self.op("Range", 0, self.size(value), 1)

    def all_of(self, *conditions: Value) -> Value:
        return functools.reduce(functools.partial(self.op, "And"), conditions)

    def before(self, rows: Value) -> Value:
        """Return the row before each row; the first stays."""
        return self.op("Max", self.op("Sub", rows, 1), 0)

    def first_for_all(self, values: Value) -> Value:
        return self.op("Expand", self.op("Gather", values, self.ints(0), axis=0), self.op("Shape", values))

    def reversed_above_two(self, value: Value) -> Value:
        """Return the rows of a value, in reverse order where there are more than two."""
        rows = self.numbers(value)
        count = self.size(value)
        back = self.op("Sub", self.op("Sub", count, 1), rows)
        return self.op("Gather", value, self.op("Where", self.op("Greater", count, 2), back, rows), axis=0)

    def column(self, value: Value) -> Value:
        return self.op("Unsqueeze", value, self.ints(1))

    def times(self, value: Value, factor: Value | float) -> Value:
        return self.op("Mul", value, factor if isinstance(factor, str) else self.like(value, factor))

    def rounded(self, value: Value, element: int = TensorProto.FLOAT16) -> Value:
        """Rounded to another type and brought back."""
        narrow = self.op("Cast", value, to=element)
        return self.op("Cast", narrow, to=self._element(value))

    def rows_where(self, value: Value, condition: Value, instead: Value | float) -> Value:
        """`value` with the rows for which `condition` [rows] holds replaced."""
        other = instead if isinstance(instead, str) else self.like(value, instead)
        # Quantised weights, which are inputs, are [rows, blocks, bytes]; results have two dimensions.
        dims = next((len(io.type.tensor_type.shape.dim) for io in self.graph.input if io.name == value), 2)
        return self.op("Where", self.op("Unsqueeze", condition, self.ints(*range(1, dims))), other, value)

    # Changing nodes

    def set_constant(self, node: NodeProto, place: int, value: np.ndarray) -> None:
        """Have this node alone read another constant, in the same type."""
        node.input[place] = self.const(np.asarray(value, self.constant(node.input[place]).dtype))

    def replace(
        self, value: Value, make: Callable[[Value], Value], readers: Collection[NodeProto] | None = None
    ) -> None:
        """Have all that read `value` read `make(value)` instead, or these readers alone.

        Where `value` is an output the graph gives `make(value)`.
        """
        chosen = self.readers(value) if readers is None else list(readers)
        is_output = readers is None and value in [output.name for output in self.graph.output]
        right = value
        if is_output:
            right = f"{value}_right"
            producer = self.producer(value)
            producer.output[:] = [right if name == value else name for name in producer.output]
            self._types[right] = self._types[value]
        replacement = make(right)
        for node in chosen:
            node.input[:] = [replacement if name == value else name for name in node.input]
        if is_output:
            self.graph.node.append(helper.make_node("Identity", [replacement], [value], name=f"fault_{value}"))

    def give(self, output: Value, instead: Value) -> None:
        """Give another value as an output. Readers within the graph keep the right one."""
        readers = self.readers(output)
        right = f"{output}_right"
        producer = self.producer(output)
        producer.output[:] = [right if name == output else name for name in producer.output]
        for node in readers:
            node.input[:] = [right if name == output else name for name in node.input]
        self.graph.node.append(
            helper.make_node("Identity", [right if instead == output else instead], [output], name=f"fault_{output}")
        )

    def done(self) -> bytes:
        """Return the faulty graph. Raises ValueError where nothing changed or the graph is invalid."""
        self._sort()
        data = self.model.SerializeToString(deterministic=True)
        if data == self._before:
            raise ValueError(f"graph {self.graph.name}: expected a fault, found the graph as it was")
        if all(node.domain or onnx.defs.has(node.op_type) for node in self.graph.node):
            onnx.checker.check_model(onnx.ModelProto.FromString(data), full_check=True)
        return data  # with ONNX Runtime's own operators among ONNX's, it says itself what is no graph

    def _sort(self) -> None:
        waiting = list(self.graph.node)
        available = {
            "",
            *(value.name for value in self.graph.input),
            *(tensor.name for tensor in self.graph.initializer),
        }
        ordered: list[NodeProto] = []
        while waiting:
            ready = next((node for node in waiting if available.issuperset(node.input)), None)
            if ready is None:
                raise ValueError(f"graph {self.graph.name}: node {waiting[0].name} reads what nothing makes, or itself")
            waiting.remove(ready)
            ordered.append(ready)
            available.update(ready.output)
        copies = [NodeProto.FromString(node.SerializeToString()) for node in ordered]
        del self.graph.node[:]
        self.graph.node.extend(copies)

    def _element(self, value: Value) -> int:
        if value not in self._types:  # after an operator of ONNX Runtime's own, which ONNX infers no type of
            node = self.producer(value)
            attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
            self._note(value, node.op_type, tuple(node.input), attributes)
        return self._types[value][0]

    def _note(self, out: Value, op_type: str, inputs: tuple[Value, ...], attributes: Mapping[str, Any]) -> None:
        """Note the element type of a new value, as far as faults ask for it."""
        if op_type == "Cast":
            element = attributes["to"]
        elif op_type in ("Shape", "Range"):
            element = TensorProto.INT64
        elif op_type in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "And", "Or", "Not"):
            element = TensorProto.BOOL
        else:
            source = inputs[1] if op_type == "Where" else inputs[0]
            array = self.constant(source)
            element = helper.np_dtype_to_tensor_dtype(array.dtype) if array is not None else self._element(source)
        self._types[out] = (element, [])

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"
