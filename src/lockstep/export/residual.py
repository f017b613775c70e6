"""Keep the residual stream of a 16-bit model in float32.

In: a packed trace in float16 or bfloat16, of the model or of its embedding. Out: the same graph with a float32 stream,
in place.

The stream of some models (Gemma 3) exceeds 65504, the largest float16, and bfloat16 rounds each addition to it to 8
bits. It is found by data flow: all values between `hidden` and the nearest products, in both directions. They are
computed in float32: the stream's additions, norms that read it, and what a branch computes after its last product.
Products and attention read and return 16 bits as before, so that weights, RoPE, attention and KV cache do not change.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from lockstep.export.flow import Flow
from lockstep.export.markers import DOMAIN
from lockstep.onnx_tools.overflow import PRODUCTS
from lockstep.onnx_tools.toolkit import constant, node_of
from lockstep.onnx_tools.values import dtype_of

_WIDE = ir.DataType.FLOAT


def widen_residual(graph: ir.Graph, weights: Collection[str]) -> None:
    """Compute the residual stream, from `hidden` on, in float32, in place. weights: their names."""
    _Widening(graph, Flow(graph, frozenset(weights))).run()


class _Widening:
    def __init__(self, graph: ir.Graph, flow: Flow):
        self.graph = graph
        self.flow = flow
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        (hidden,) = [value for value in (*self.graph.inputs, *self.graph.outputs) if value.name == "hidden"]
        self._narrow = dtype_of(hidden)
        maker = hidden.producer()
        if maker is not None and self._stays_narrow(maker):  # an embedding that is a row of its table
            self.graph.outputs[0] = self._cast(hidden, _WIDE)
            hidden.name = "hidden/rows"
            self.graph.outputs[0].name = "hidden"
            return
        wide = self._wide_values(hidden)
        for node in list(self.graph):
            if node.op_type == "Cast" and node.outputs[0] in wide:
                node.attributes["to"] = ir.AttrInt64("to", int(_WIDE))
            elif node.op_type != "Cast" and not wide.isdisjoint({*node.inputs, *node.outputs}):
                self._rewrite(node, wide)
        for value in wide:
            value.dtype = _WIDE
        self._drop_idle_casts()

    def _stays_narrow(self, node: ir.Node) -> bool:
        """Return whether a node stays in 16 bits: a product, an attention, or rows of a table."""
        is_lookup = node.op_type.startswith("Gather") and node.inputs[0] not in self.flow.tokens
        return node.op_type in PRODUCTS or node.domain == DOMAIN or is_lookup

    def _wide_values(self, hidden: ir.Value) -> set[ir.Value]:
        """Return all values that are linked to `hidden` by nodes that do not stay in 16 bits, in both directions."""
        wide: set[ir.Value] = set()
        stack: list[ir.Value] = [hidden]
        while stack:
            value = stack.pop()
            if value in wide:
                continue
            wide.add(value)
            for reader in value.consumers():
                if not self._stays_narrow(reader):
                    stack += [output for output in reader.outputs if output.dtype == self._narrow]
            # Backwards, too: the other summand of a residual add is as wide as the stream.
            maker = value.producer()
            if maker is None:
                continue
            for operand in maker.inputs:
                if operand is not None and operand.dtype == self._narrow and operand in self.flow.tokens:
                    before = operand.producer()
                    if before is not None and not self._stays_narrow(before):
                        stack.append(operand)
        return wide

    def _rewrite(self, node: ir.Node, wide: set[ir.Value]) -> None:
        is_narrow = self._stays_narrow(node)
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            if is_narrow and value in wide:
                node.replace_input_with(index, self._cast(value, self._narrow))
            elif not is_narrow and value not in wide and value.dtype == self._narrow:
                node.replace_input_with(index, self._cast(value, _WIDE))

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return a value in another type: a wide constant, or one Cast for all readers."""
        if (value, dtype) not in self._casts:
            if value.const_value is not None:
                cast = constant(f"{value.name}/wide", value.const_value.numpy().astype(np.float32))
                self.graph.register_initializer(cast)
            else:
                node = node_of("Cast", [value], value.shape, dtype, [ir.AttrInt64("to", int(dtype))])
                cast = node.outputs[0]
                maker = value.producer()
                if maker is None:
                    self.graph.insert_before(self.graph[0], node)
                else:
                    self.graph.insert_after(maker, node)
            self._casts[value, dtype] = cast
        return self._casts[value, dtype]

    def _drop_idle_casts(self) -> None:
        # Norms cast to float32 themselves: a wide stream leaves such casts nothing to do.
        for node in [node for node in self.graph if node.op_type == "Cast"]:
            source = node.inputs[0]
            cast = node.outputs[0]
            if source is not None and source.dtype == node.attributes["to"].as_int() and cast not in self.graph.outputs:
                cast.replace_all_uses_with(source)
                self.graph.remove(node, safe=True)
