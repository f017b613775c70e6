"""Join the partial sums of two branches of a layer, so that one all-reduce serves both.

In: a canonical block and its sharding. Out: the same block with `(hidden + attention) + mlp` written as
`(attention + mlp) + hidden`, where both branches are partial sums: they are added before the all-reduce instead of
each being reduced alone.
"""

from __future__ import annotations

import onnx_ir as ir

from lockstep.export.shard_flow import Sharding
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult
from lockstep.onnx_tools.values import required


class JoinSums(Pass):
    """Reorder a block's chains of additions to need the fewest all-reduces."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        additions = {
            node.outputs[0]: node
            for node in graph
            if node.op_type == "Add" and node.outputs[0] not in self._sharding.partial
        }
        inner_sums: set[ir.Value] = set()  # additions whose sum only another addition reads
        for addition in additions.values():
            inner_sums.update(value for value in map(required, addition.inputs) if _is_inner(value, additions))

        def addends(value: ir.Value) -> list[ir.Value]:
            """Return what a chain of additions adds, from the left."""
            values: list[ir.Value] = []
            for operand in map(required, additions[value].inputs):
                values += addends(operand) if operand in inner_sums else [operand]
            return values

        is_joined = False
        for value, addition in additions.items():
            if value in inner_sums:
                continue
            operands = addends(value)
            partial = [operand for operand in operands if operand in self._sharding.reduced and _is_read_once(operand)]
            if len(partial) > 1:
                first, *others = partial + [operand for operand in operands if operand not in partial]
                writer = GraphWriter(graph, before=addition)
                for operand in others[:-1]:
                    first = writer.op("Add", first, operand)
                writer.op("Add", first, others[-1], replaces=value)
                is_joined = True
        return PassResult(model, is_joined)


def _is_inner(value: ir.Value, additions: dict[ir.Value, ir.Node]) -> bool:
    return value in additions and _is_read_once(value)


def _is_read_once(value: ir.Value) -> bool:
    return len(value.uses()) + value.is_graph_output() == 1
