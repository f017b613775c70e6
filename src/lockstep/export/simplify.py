"""Bring a traced graph to packed form.

It drops the leading batch dimension of 1 that transformers' modules carry.

In: a traced graph whose values are `[1, num_tokens, ...]`. Out: the same computation on `[num_tokens, ...]`, rebuilt
node by node. Each value has a full form and a short one (without the leading 1); whichever a node needs is made from
the other on demand, so a node that no rule fits keeps its full form between an Unsqueeze and a Squeeze: unusual
operators cost a node, never correctness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from lockstep.export.known import array_of, axis_of, constant, node_of, required, shape_of

ELEMENTWISE = frozenset(
    "Abs Add And Atanh Cast Ceil Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid "
    "HardSwish Identity IsNaN LeakyRelu "
    "Less LessOrEqual Log Max Min Mish Mod Mul Neg Not Or Pow Reciprocal Relu Round Selu Sigmoid Sign Sin "
    "Softplus Sqrt Sub Tanh Where Xor".split()
)
REDUCTIONS = frozenset("ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare ReduceL2".split())
_ALONG_AXIS = frozenset("Softmax LogSoftmax LayerNormalization RMSNormalization".split())


def pack(model: ir.Model) -> ir.Model:
    """Return a new model without leading ones and idle movement, with the same names of inputs and outputs."""
    packed = ir.Model(_Packer(model.graph).run(), ir_version=model.ir_version)
    merge_movement(packed.graph)
    passes.CommonSubexpressionEliminationPass()(packed)
    passes.RemoveUnusedNodesPass()(packed)
    return packed


class _Packer:
    def __init__(self, graph: ir.Graph):
        self.old = graph
        self.full: dict[ir.Value, ir.Value] = {}
        self.short: dict[ir.Value, ir.Value] = {}
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.constants: dict[tuple, ir.Value] = {}

    def run(self) -> ir.Graph:
        inputs = [self._copy(value) for value in self.old.inputs]
        for value in self.old.initializers.values():
            assert value.name is not None  # what it is registered by
            self.initializers[value.name] = self._copy(value)
        for node in self.old:
            if not self._rewrite(node):
                self._keep(node)
        outputs = []
        for value in self.old.outputs:
            outputs.append(self._full(value))
            outputs[-1].name = value.name
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports=dict(self.old.opset_imports),
            name=self.old.name,
        )
        return graph

    def _copy(self, value: ir.Value) -> ir.Value:
        new = ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
        self.full[value] = new
        return new

    # --- the two forms of a value ---

    def _full(self, value: ir.Value) -> ir.Value:
        if value not in self.full:
            self.full[value] = self._emit("Unsqueeze", [self.short[value], self._const([0])], value.shape, value.dtype)
        return self.full[value]

    def _short(self, value: ir.Value) -> ir.Value:
        if value not in self.short:
            array = array_of(value)
            if array is not None:
                self.short[value] = self._const(array[0])
            else:
                self.short[value] = self._emit(
                    "Squeeze", [self.full[value], self._const([0])], shape_of(value)[1:], value.dtype
                )
        return self.short[value]

    def _const(self, array: Sequence[int] | np.ndarray) -> ir.Value:
        array = np.asarray(array, dtype=np.int64 if isinstance(array, (list, tuple)) else None)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            name = f"packed_const_{len(self.constants)}"
            self.constants[key] = self.initializers[name] = constant(name, array)
        return self.constants[key]

    def _emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        shape: Iterable[int | ir.SymbolicDim] | None,
        dtype: ir.DataType | None,
    ) -> ir.Value:
        self.nodes.append(node_of(op_type, inputs, shape, dtype))
        return self.nodes[-1].outputs[0]

    def _keep(self, node: ir.Node) -> None:
        new = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else self._full(value) for value in node.inputs],
            list(node.attributes.values()),
            overload=node.overload,
            num_outputs=len(node.outputs),
        )
        self.nodes.append(new)
        for old, value in zip(node.outputs, new.outputs, strict=True):
            value.shape, value.type, value.name = old.shape, old.type, old.name
            self.full[old] = value

    # --- the rules ---

    def _leads(self, value: ir.Value | None) -> bool:
        """Return whether a value is computed and has a leading dimension of exactly 1."""
        if value is None or value.shape is None or len(value.shape) < 2 or value.shape[0] != 1:
            return False
        return value.producer() is not None

    def _rewrite(self, node: ir.Node) -> bool:
        """Emit the node in short form if a rule fits; return whether all its outputs are served."""
        if node.domain not in ("", "ai.onnx") or any(
            a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()
        ):
            return False
        if any(value is not None and value.shape is None for value in (*node.inputs, *node.outputs)):
            return False
        op, out = node.op_type, node.outputs[0]
        if op == "Reshape":
            return self._reshape(node)
        if op == "Gather" and self._leads(node.inputs[0]):
            return self._gather(node)
        if not all(self._leads(value) for value in node.outputs):
            return False
        if op in ELEMENTWISE:
            return self._elementwise(node)
        if op == "Unsqueeze":
            return self._unsqueeze(node)
        if not self._leads(node.inputs[0]):
            return False
        if op in REDUCTIONS or op == "Slice":
            return self._by_axes_input(node)
        if op in _ALONG_AXIS:
            return self._by_axis_attribute(node, default=-1, rest=node.inputs[1:])
        if op == "Split":
            return self._by_axis_attribute(node, default=0, rest=node.inputs[1:])
        if op == "Concat":
            return all(self._leads(v) for v in node.inputs) and self._by_axis_attribute(node, default=0, short_all=True)
        if op == "Transpose":
            perm = node.attributes["perm"].as_ints()
            if perm[0] != 0:
                return False
            return self._serve(
                node, [self._short(required(node.inputs[0]))], [ir.AttrInt64s("perm", [p - 1 for p in perm[1:]])]
            )
        if op == "MatMul":
            return (
                self._elementwise(node)
                if len(shape_of(out)) > 2 and min(len(shape_of(v)) for v in node.inputs) >= 2
                else False
            )
        return False

    def _serve(self, node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr]) -> bool:
        new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
        self.nodes.append(new)
        for old, value in zip(node.outputs, new.outputs, strict=True):
            value.shape, value.type, value.name = ir.Shape(shape_of(old)[1:]), old.type, f"{old.name}/packed"
            self.short[old] = value
        return True

    def _elementwise(self, node: ir.Node) -> bool:
        """Emit an element-wise operator: an input of full rank loses its 1, one of lower rank stays."""
        rank = len(shape_of(node.outputs[0]))
        inputs: list[ir.Value | None] = []
        for value in node.inputs:
            if value is None or len(shape_of(value)) < rank:
                inputs.append(None if value is None else self._full(value))
            elif self._leads(value) or (array_of(value) is not None and shape_of(value)[0] == 1):
                inputs.append(self._short(value))
            else:
                return False
        return self._serve(node, inputs, list(node.attributes.values()))

    def _by_axes_input(self, node: ir.Node) -> bool:
        """Emit a reduction or Slice, whose axes are its second or fourth input; they are counted from the end."""
        position, rank = 3 if node.op_type == "Slice" else 1, len(shape_of(node.inputs[0]))
        axes = array_of(node.inputs[position]) if len(node.inputs) > position else None
        keepdims = node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1
        if axes is None or not axes.size or any(axis % rank == 0 for axis in axes) or not keepdims:
            return False
        rest = [None if value is None else self._full(value) for value in node.inputs[1:]]
        rest[position - 1] = self._const([int(axis % rank) - rank for axis in axes])
        return self._serve(node, [self._short(required(node.inputs[0])), *rest], list(node.attributes.values()))

    def _by_axis_attribute(
        self, node: ir.Node, default: int, rest: Sequence[ir.Value | None] = (), short_all: bool = False
    ) -> bool:
        rank = len(shape_of(node.inputs[0]))
        axis = axis_of(node, default)
        if axis % rank == 0:
            return False
        inputs = (
            [self._short(required(v)) for v in node.inputs]
            if short_all
            else [self._short(required(node.inputs[0])), *(None if v is None else self._full(v) for v in rest)]
        )
        attributes = [a for a in node.attributes.values() if a.name != "axis"]
        return self._serve(node, inputs, [*attributes, ir.AttrInt64("axis", axis % rank - rank)])

    def _gather(self, node: ir.Node) -> bool:
        data, out = required(node.inputs[0]), node.outputs[0]
        axis = axis_of(node, 0) % len(shape_of(data))
        index = array_of(node.inputs[1])
        if axis == 0 and index is not None and index.ndim == 0 and index == 0:  # x[0]
            self.full[out] = self._short(data)
            return True
        if axis == 0 or not self._leads(out):
            return False
        return self._serve(
            node, [self._short(data), self._full(required(node.inputs[1]))], [ir.AttrInt64("axis", axis - 1)]
        )

    def _unsqueeze(self, node: ir.Node) -> bool:
        numbers = array_of(node.inputs[1])
        if numbers is None:
            return False
        data, out = required(node.inputs[0]), node.outputs[0]
        axes = sorted(int(axis) % len(shape_of(out)) for axis in numbers)
        source = self._full(data) if 0 in axes else self._short(data)
        rest = [axis - 1 for axis in axes if axis != 0]
        self.short[out] = (
            self._emit("Unsqueeze", [source, self._const(rest)], shape_of(out)[1:], out.dtype) if rest else source
        )
        return True

    def _reshape(self, node: ir.Node) -> bool:
        """Emit a reshape, which keeps the element order: it may read and write short forms."""
        data, out = required(node.inputs[0]), node.outputs[0]
        target = array_of(node.inputs[1])
        if target is None or not (self._leads(data) or self._leads(out)):
            return False
        source = self._short(data) if self._leads(data) else self._full(data)
        shape = list(shape_of(out)[1:] if self._leads(out) else shape_of(out))
        store = self.short if self._leads(out) else self.full
        if _same(shape_of(source), shape):
            store[out] = source
            return True
        static = [dim if isinstance(dim, int) else -1 for dim in shape]
        if static.count(-1) > 1:
            return False
        store[out] = self._emit("Reshape", [source, self._const(static)], shape, out.dtype)
        return True


def _same(one: Iterable[object], other: Iterable[object]) -> bool:
    """Return whether two shapes are equal: at most one dimension is dynamic, in the same place."""
    one, other = list(one), list(other)
    if len(one) != len(other):
        return False
    dynamic = [not isinstance(a, int) or not isinstance(b, int) for a, b in zip(one, other, strict=True)]
    return sum(dynamic) <= 1 and all(d or a == b for d, a, b in zip(dynamic, one, other, strict=True))


def merge_movement(graph: ir.Graph, keep: Collection[ir.Value] = ()) -> None:
    """Let reshapes and transposes read past others, but not past values in `keep`, and drop idle ones."""
    for node in list(graph):
        out, source = node.outputs[0], node.inputs[0] if node.inputs else None
        if source is None:
            continue
        if node.op_type == "Reshape":
            target = array_of(node.inputs[1])
            if target is not None and 0 not in target:
                while (
                    source not in keep and (producer := source.producer()) is not None and producer.op_type == "Reshape"
                ):
                    source = required(producer.inputs[0])
                node.replace_input_with(0, source)
            if source.shape is not None and out.shape is not None and _same(source.shape, out.shape):
                _replace(graph, node, source, keep)
        elif node.op_type == "Transpose":
            perm = list(node.attributes["perm"].as_ints())
            producer = source.producer()
            if source not in keep and producer is not None and producer.op_type == "Transpose":
                perm = [producer.attributes["perm"].as_ints()[p] for p in perm]
                source = required(producer.inputs[0])
                node.replace_input_with(0, source)
                node.attributes["perm"] = ir.AttrInt64s("perm", perm)
            if perm == sorted(perm):
                _replace(graph, node, source, keep)


def _replace(graph: ir.Graph, node: ir.Node, value: ir.Value, keep: Collection[ir.Value]) -> None:
    if not node.outputs[0].is_graph_output() and node.outputs[0] not in keep:
        node.outputs[0].replace_all_uses_with(value)
        graph.remove(node, safe=True)
