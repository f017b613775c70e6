"""The passes over a graph before OpenVINO reads it.

In: a graph. Out: one of plain products with full weights, and the quantised weights to replace these by.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_ir as ir

from lockstep.errors import CheckError
from lockstep.onnx_tools.group_experts import GroupExperts
from lockstep.onnx_tools.int8_products import Int8Products
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, add_input, run_passes
from lockstep.onnx_tools.values import attribute, is_linear, is_transposed, required, sizes_of


def rewrite(model: onnx.ModelProto, where: str) -> tuple[onnx.ModelProto, list[Weight]]:
    """Return the graph for OpenVINO, and its quantised weights. where: the file, for messages."""
    expand = ExpandWeights(where)
    return run_passes(model, GroupExperts(), Int8Products(), expand, PlainProducts()), expand.weights


@dataclass(frozen=True)
class IntegerWeight:
    """A quantised weight [rows, columns] of two inputs."""

    data: ir.Value
    scales: ir.Value
    rows: int
    columns: int
    group_size: int
    bits: int


def embedding_of(node: ir.Node) -> IntegerWeight | None:
    """Return the weight that a `GatherBlockQuantized` reads; None for another operator, and for experts."""
    if node.op_type != "GatherBlockQuantized" or not required(node.inputs[0]).is_graph_input():
        return None
    data, _, scales = map(required, node.inputs)
    rows, groups, _ = sizes_of(data)
    size = attribute(node, "block_size")
    stored = required(required(scales.producer()).inputs[0])
    return IntegerWeight(data, stored, rows, groups * size, size, attribute(node, "bits"))


def factor_of(node: ir.Node) -> IntegerWeight:
    """Return the weight of a `MatMulNBits` without zero points."""
    rows, columns, size, bits = (attribute(node, name) for name in ("N", "K", "block_size", "bits"))
    return IntegerWeight(required(node.inputs[1]), required(node.inputs[2]), rows, columns, size, bits)


@dataclass(frozen=True)
class Weight(IntegerWeight):
    """full: the input that `compress` replaces by the weight. is_mxfp4: it is codes and shared exponents."""

    full: str
    is_mxfp4: bool = False


class ExpandWeights(Pass):
    """Let products and embeddings read full weights, as inputs. where: the file, for messages.

    weights: the quantised ones, after the pass. Raises CheckError for others.
    """

    def __init__(self, where: str):
        self._where = where
        self.weights = list[Weight]()

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        for node in graph:
            writer = GraphWriter(graph, f"{node.outputs[0].name}/full", before=node)
            if (embedding := embedding_of(node)) is not None:
                full = self._full(graph, embedding)
                writer.op("Gather", full, node.inputs[1], axis=0, replaces=node.outputs[0])
            elif node.op_type == "If":
                # Experts of `group_experts`: skipped where no token has chosen them. OpenVINO computes all of them.
                branch = [*node.attributes["then_branch"].as_graph()]
                rows = next(inner.inputs[0] for inner in branch if inner.op_type == "Gemm")
                full = self._full(graph, _decoded(branch), is_mxfp4=True)
                writer.op("Gemm", rows, full, transB=1, replaces=node.outputs[0])
            elif node.op_type == "MatMulNBits":
                x, *slots = map(required, node.inputs)
                if len(slots) != 2 or not all(slot.is_graph_input() for slot in slots):
                    raise CheckError(
                        f"{self._where}: {node.name or 'MatMulNBits'}: expected integers and scales that are inputs, "
                        f"and no zero points, found {', '.join(str(slot.name) for slot in slots)}; export again"
                    )
                writer.op("Gemm", x, self._full(graph, factor_of(node)), transB=1, replaces=node.outputs[0])
        return PassResult(model, bool(self.weights))

    def _full(self, graph: ir.Graph, weight: IntegerWeight, is_mxfp4: bool = False) -> ir.Value:
        name = f"{weight.data.name}/full"
        self.weights.append(Weight(**vars(weight), full=name, is_mxfp4=is_mxfp4))
        return add_input(graph, name, ir.DataType.FLOAT, [weight.rows, weight.columns])


def _decoded(branch: list[ir.Node]) -> IntegerWeight:
    """Return the weight that a product of `group_experts` decodes, from codes [rows, num_groups, 16]."""
    inputs = list[ir.Value]()
    for node in branch:
        inputs += [value for value in node.inputs if value is not None and value.is_graph_input()]
    data, scales = sorted(inputs, key=lambda value: -len(sizes_of(value)))
    rows, groups, size = sizes_of(data)
    return IntegerWeight(data, scales, rows, groups * size * 2, size * 2, 4)


class PlainProducts(Pass):
    """Write each Gemm as MatMul, Transpose and Add: OpenVINO reads factors and absent biases as nodes, too."""

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        products = [node for node in graph if is_linear(node) or is_transposed(node)]
        for node in products:
            x, weight, *bias = node.inputs
            (out,) = node.outputs
            writer = GraphWriter(graph, f"{out.name}/plain", before=node)
            if attribute(node, "transB", 0):
                weight = writer.op("Transpose", weight, perm=[1, 0])
            if bias:
                writer.op("Add", writer.op("MatMul", x, weight), *bias, replaces=out)
            else:
                writer.op("MatMul", x, weight, replaces=out)
        return PassResult(model, bool(products))
