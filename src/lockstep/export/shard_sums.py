"""Join the partial sums of two branches of a layer: one sum over the ranks.

In: a canonical block and what its data flow says. Out: the same block with `(hidden + attention) + mlp` written as
`(attention + mlp) + hidden`, where both branches are partial sums. They are then added before the sum over the ranks,
and not each after its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx
from onnx import helper

from lockstep.export.shard_flow import Flow


def join_sums(model: onnx.ModelProto, flow: Flow) -> onnx.ModelProto | None:
    """Return the block with chains of additions that need the fewest sums.

    None where they are in that order already.
    """
    reads = Counter(name for node in model.graph.node for name in node.input)
    reads.update(value.name for value in model.graph.output)
    additions = (node for node in model.graph.node if node.op_type == "Add")
    links = {node.output[0]: node for node in additions if node.output[0] not in flow.partial}
    inner = {name for link in links.values() for name in link.input if name in links and reads[name] == 1}
    summed = set(flow.summed)
    chains: dict[str, list[str]] = {}
    for name in links.keys() - inner:
        terms = list(_terms(name, links, inner))
        first = [term for term in terms if term in summed and reads[term] == 1]
        if len(first) > 1:
            chains[name] = [*first, *(term for term in terms if term not in first)]
    if not chains:
        return None
    gone = {link for name in chains for link in _links(name, links, inner)}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    for node in model.graph.node:
        if node.output[0] in chains:
            made.graph.node.extend(_additions(node, chains[node.output[0]]))
        elif node.output[0] not in gone:
            made.graph.node.append(node)
    return made


def _terms(name: str, links: dict[str, onnx.NodeProto], inner: set[str]) -> Iterable[str]:
    """Yield what a chain adds, from the left."""
    for given in links[name].input:
        if given in inner:
            yield from _terms(given, links, inner)
        else:
            yield given


def _links(name: str, links: dict[str, onnx.NodeProto], inner: set[str]) -> Iterable[str]:
    """Yield the additions of a chain behind its last."""
    for given in links[name].input:
        if given in inner:
            yield given
            yield from _links(given, links, inner)


def _additions(last: onnx.NodeProto, terms: list[str]) -> Iterable[onnx.NodeProto]:
    total = terms[0]
    for number, term in enumerate(terms[1:], 1):
        name = last.output[0] if number == len(terms) - 1 else f"{last.output[0]}/{number}"
        yield helper.make_node("Add", [total, term], [name], name=f"{last.name or last.output[0]}/{number}")
        total = name
