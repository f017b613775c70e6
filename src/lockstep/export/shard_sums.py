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
        # Additions after an all-reduce. Those of partial sums are before one already.
        additions = {node.outputs[0]: node for node in graph if node.op_type == "Add"}
        additions = {value: node for value, node in additions.items() if value not in self._sharding.partial}
        inner_sums: set[ir.Value] = set()  # additions whose sum only another addition reads
        for addition in additions.values():
            operands = map(required, addition.inputs)
            inner_sums.update(value for value in operands if value in additions and _is_read_once(value))

        def addends(value: ir.Value) -> list[ir.Value]:
            values: list[ir.Value] = []
            for operand in map(required, additions[value].inputs):
                if operand in inner_sums:
                    values += addends(operand)
                else:
                    values.append(operand)
            return values

        is_joined = False
        for value, addition in additions.items():
            if value in inner_sums:
                continue
            chain = addends(value)
            partial = [addend for addend in chain if addend in self._sharding.reduced and _is_read_once(addend)]
            if len(partial) > 1:
                # Partial sums first: their sum is a partial sum too, and one all-reduce is left.
                total, *addends_left = partial + [addend for addend in chain if addend not in partial]
                writer = GraphWriter(graph, before=addition)
                for addend in addends_left[:-1]:
                    total = writer.op("Add", total, addend)
                writer.op("Add", total, addends_left[-1], replaces=value)
                is_joined = True
        return PassResult(model, is_joined)


def _is_read_once(value: ir.Value) -> bool:
    return len(value.uses()) + value.is_graph_output() == 1
