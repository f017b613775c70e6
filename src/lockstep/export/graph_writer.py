"""The base of builders that append operators to a graph, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from lockstep.export.known import constant


class GraphWriter:
    """Appends operators and constants to `graph`; prefix: what the names of constants begin with."""

    def __init__(self, graph: ir.Graph, prefix: str):
        self.graph, self._prefix, self._constants = graph, prefix, 0

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes, num_outputs=1)
        self.graph.append(node)
        return node.outputs[0]

    def const(self, value: np.ndarray | np.generic) -> ir.Value:
        self._constants += 1
        initializer = constant(f"{self._prefix}_const_{self._constants}", np.asarray(value))
        self.graph.register_initializer(initializer)
        return initializer

    def ints(self, *values: int) -> ir.Value:
        return self.const(np.array(values, dtype=np.int64))
