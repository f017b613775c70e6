"""Join the partial sums of two branches of a layer: one sum over the ranks.

In: a canonical block and what its data flow says. Out: the same block with `(hidden + attention) + mlp` written as
`(attention + mlp) + hidden`, where both branches are partial sums. They are then added before the sum over the ranks,
and not each after its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import helper

from lockstep.export.shard_flow import Flow
from lockstep.onnx_tools.rewriter import Rewriter


def join_sums(graph: Rewriter, flow: Flow) -> onnx.ModelProto | None:
    """Return the block with chains of additions that need the fewest sums; None where they are so already."""
    additions = {node.output[0]: node for node in graph.nodes if node.op_type == "Add"}
    links = {name: node for name, node in additions.items() if name not in flow.partial}

    def is_read_once(name: str) -> bool:
        return len(graph.consumers.get(name, ())) + (name in graph.outputs) == 1

    inner = {name for link in links.values() for name in link.input if name in links and is_read_once(name)}

    def terms(name: str) -> list[str]:
        """Return what a chain adds, from the left."""
        return [term for other in links[name].input for term in (terms(other) if other in inner else [other])]

    is_joined = False
    for name in links.keys() - inner:
        first = [term for term in terms(name) if term in flow.summed and is_read_once(term)]
        if len(first) > 1:
            graph.replace(
                links[name], *_additions(name, [*first, *(term for term in terms(name) if term not in first)])
            )
            is_joined = True
    return graph.finish() if is_joined else None


def _additions(result: str, terms: list[str]) -> Iterable[onnx.NodeProto]:
    total = terms[0]
    for number, term in enumerate(terms[1:], 1):
        name = result if number == len(terms) - 1 else f"{result}/{number}"
        yield helper.make_node("Add", [total, term], [name], name=name)
        total = name
