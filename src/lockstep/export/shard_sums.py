"""Join the partial sums of two branches of a layer, so that one all-reduce serves both.

In: a canonical block and its sharding. Out: the same block with `(hidden + attention) + mlp` written as
`(attention + mlp) + hidden`, where both branches are partial sums: they are added before the all-reduce instead of
each being reduced alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import helper

from lockstep.export.shard_flow import Sharding
from lockstep.onnx_tools.rewriter import Rewriter


def join_sums(graph: Rewriter, sharding: Sharding) -> onnx.ModelProto | None:
    """Return the block with its chains of additions reordered to need the fewest all-reduces; None if unchanged."""
    additions = {}
    for node in graph.nodes:
        if node.op_type == "Add" and node.output[0] not in sharding.partial:
            additions[node.output[0]] = node

    def is_read_once(name: str) -> bool:
        return len(graph.consumers.get(name, ())) + (name in graph.outputs) == 1

    inner_sums: set[str] = set()  # additions whose sum only another addition reads
    for addition in additions.values():
        inner_sums.update(name for name in addition.input if name in additions and is_read_once(name))

    def addends(name: str) -> list[str]:
        """Return what a chain of additions adds, from the left."""
        names: list[str] = []
        for operand in additions[name].input:
            names += addends(operand) if operand in inner_sums else [operand]
        return names

    is_joined = False
    for name in additions.keys() - inner_sums:
        operands = addends(name)
        partial = [operand for operand in operands if operand in sharding.reduced and is_read_once(operand)]
        if len(partial) > 1:
            ordered = partial + [operand for operand in operands if operand not in partial]
            graph.replace(additions[name], *_addition_chain(name, ordered))
            is_joined = True
    return graph.finish() if is_joined else None


def _addition_chain(result: str, operands: list[str]) -> Iterable[onnx.NodeProto]:
    total = operands[0]
    for number, operand in enumerate(operands[1:], 1):
        name = result if number == len(operands) - 1 else f"{result}/{number}"
        yield helper.make_node("Add", [total, operand], [name], name=name)
        total = name
