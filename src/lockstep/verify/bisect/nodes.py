"""Find the first node of a graph whose output is off.

The graph, one that is right, and what both are fed, in; the node out.

Both run in ONNX Runtime with the outputs of all their nodes exposed. A node is at fault where its output differs and
what it reads does not. Nodes are paired by the names of their outputs; where a node was put in or taken out, so that
the names have moved, by the order of their operators.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from lockstep.artifacts.bisect_report import FaultNode
from lockstep.errors import CheckError
from lockstep.onnx_tools.judge import max_abs_error
from lockstep.onnx_tools.rewriter import upstream
from lockstep.onnx_tools.sessions import open_session
from lockstep.tolerances import NODE
from lockstep.verify.metrics import finite

_FEW = 6  # numbers of a constant that are shown


def first_fault(
    suspect: onnx.ModelProto,
    right: onnx.ModelProto,
    feeds: Sequence[Mapping[str, np.ndarray]],
    precision: str,
    outputs: Sequence[str],
    same_nodes: bool = True,
) -> FaultNode | None:
    """Find the first node that makes one of `outputs` wrong; None if all are the same.

    feeds: (those of `suspect`, those of `right`); they may differ in weights. same_nodes: `right` should have the same
    nodes, so that a node without a counterpart is a fault; otherwise such a node is as wrong as what it reads (an
    engine beside the graph that it was built from).
    """
    found = trace(suspect, feeds[0])
    expected = trace(right, feeds[1])
    pairs = _pairs(suspect.graph, right.graph, same_nodes)
    names = {value.name for value in suspect.graph.input}
    moved = {
        name for name in names & set(feeds[0]) & set(feeds[1]) if not np.array_equal(feeds[0][name], feeds[1][name])
    }
    errors: dict[str, float] = {}
    for node in suspect.graph.node:
        before = max((errors.get(name, 0.0) for name in node.input), default=0.0)
        for output in filter(None, node.output):
            partner = expected.get(pairs.get(output, ""))
            if partner is not None and (same_nodes or partner.shape == found[output].shape):
                errors[output] = _error(partner, found[output])
            elif same_nodes:
                errors[output] = min(
                    (_error(array, found[output]) for array in expected.values() if array.shape == found[output].shape),
                    default=np.inf,
                )
            else:
                errors[output] = before
    for bound in (NODE[precision], 0.0):
        off = [name for name in outputs if errors.get(name, 0.0) > bound]
        wrong = {name for name in upstream(suspect.graph.node, off) if errors.get(name, 0.0) > bound}
        faults = [
            node
            for node in suspect.graph.node
            if wrong & set(node.output) and not any(errors.get(name, 0.0) > bound for name in node.input)
        ]
        if faults:
            node = faults[0]
            output = next(name for name in node.output if name in wrong)
            before = max((errors.get(name, 0.0) for name in node.input), default=0.0)
            partners = {pairs[name]: name for name in pairs}
            reason = _reason(suspect.graph, right.graph, node, pairs.get(output), partners, moved)
            both = finite(before), finite(errors[output])
            return FaultNode(node.name or output, node.op_type, output, *both, reason, len(faults) - 1)
    return None


def trace(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute every tensor that a node gives, by name. Raises CheckError when ONNX Runtime cannot run the graph."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    given = {value.name for value in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in given)
    declared = {value.name for value in model.graph.input}
    session = open_session(exposed.SerializeToString())
    try:
        arrays = session.run(names, {name: array for name, array in feeds.items() if name in declared})
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise CheckError(
            f"graph {model.graph.name}: ONNX Runtime cannot run it: {' '.join(str(error).split())}"
        ) from error
    return dict(zip(names, arrays, strict=True))


def _pairs(suspect: onnx.GraphProto, right: onnx.GraphProto, same_nodes: bool) -> dict[str, str]:
    """Return {output of a node of `suspect`: that of its counterpart in `right`}."""
    one, other = ({name for node in graph.node for name in node.output if name} for graph in (suspect, right))
    if (
        not same_nodes or other <= one
    ):  # an optimiser keeps the names of what it keeps; a suspect that has all names has named nothing anew
        return {name: name for name in one & other}
    here, there = ([node.op_type for node in graph.node] for graph in (suspect, right))
    pairs: dict[str, str] = {}
    for tag, low, high, first, last in difflib.SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and high - low == last - first):
            for node, partner in zip(suspect.node[low:high], right.node[first:last]):
                pairs |= {
                    name: name_there for name, name_there in zip(node.output, partner.output) if name and name_there
                }
    return pairs


def _error(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the largest |found - expected| over the rms of what is expected; infinite where not finite."""
    if expected.shape != found.shape:
        return float("inf")
    if not expected.size or np.array_equal(expected, found):
        return 0.0
    exact = expected.astype(np.float64)
    other = found.astype(np.float64)
    error = max_abs_error(exact, other)
    with np.errstate(invalid="ignore", over="ignore"):
        # Masked scores are -3e38: they would make every other one's error vanish.
        unit = float(np.sqrt(np.mean(np.square(np.where(np.abs(exact) < 1e30, exact, 0.0)))))
    return error / (unit or 1.0) if np.isfinite(error) else float("inf")


def _reason(
    suspect: onnx.GraphProto,
    right: onnx.GraphProto,
    node: onnx.NodeProto,
    partner: str | None,
    back: Mapping[str, str],
    moved: set[str],
) -> str:
    """Say how a node differs from its counterpart, which makes `partner`. back: the suspect's names of right ones."""
    weights = [name for name in node.input if name in moved]
    if weights:
        return f"it reads other weights in slot {', '.join(weights)}"
    other = next((candidate for candidate in right.node if partner in candidate.output), None)
    if other is None:
        return "the right graph has no such node"
    constants, right_constants = ({tensor.name: tensor for tensor in graph.initializer} for graph in (suspect, right))
    names = {expected: back.get(expected, expected) for expected in other.input}
    for number, (name, expected_name) in enumerate(zip(node.input, other.input)):
        if name in constants and expected_name in right_constants:
            pair = constants[name], right_constants[expected_name]
            values, expected = map(numpy_helper.to_array, pair)
            if not np.array_equal(values, expected):
                return f"constant {name} (input {number}): expected {_numbers(expected)}, found {_numbers(values)}"
            names[expected_name] = name
    found = _text(node, {}, node.output)
    wanted = _text(other, names, node.output)
    return "" if found == wanted else f"expected {wanted}, found {found}"


def _text(node: onnx.NodeProto, names: Mapping[str, str], outputs: Sequence[str]) -> str:
    """Write a node as ONNX does, inputs by other names."""
    attributes = sorted(node.attribute, key=lambda attribute: attribute.name)
    plain = onnx.NodeProto(op_type=node.op_type, domain=node.domain, output=outputs, attribute=attributes)
    plain.input.extend(names.get(name, name) for name in node.input)
    return " ".join(onnx.printer.to_text(plain).split())


def _numbers(array: np.ndarray) -> str:
    if array.ndim == 0:
        return f"{array.item():.6g}" if array.dtype.kind == "f" else str(array.item())
    text = ", ".join(f"{number:.4g}" for number in array.ravel()[:_FEW].tolist())
    return f"{array.dtype.name} {list(array.shape)} [{text}{', ...' if array.size > _FEW else ''}]"
