"""Rewrite graphs with adapter inputs (`export.lora`) into other forms.

A linear layer there is y = x W^T + where(column's adapter == token's adapter, x A, 0) B.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, BETWEEN, IDS, mask_name
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, add_input, replace
from lockstep.onnx_tools.values import array_of, attribute, dtype_of, maker, required, sizes_of


class IdsAsMask(Pass):
    """Let blocks read a token's adapter as a mask that multiplies the first products, instead of ids.

    They mask with clip(x A) * mask, and have the input `adapter_mask.<rank>` [num_tokens, max_adapters * rank] instead
    of `adapter_ids`: 1 in the columns of the token's adapter, else 0. One version of TensorRT crashed on comparing
    integers inside a fused region; later ones were not tried. The clip keeps another adapter's result for a token
    finite, so that 0 times it is 0.
    """

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        ids = next((value for value in graph.inputs if value.name == IDS), None)
        if ids is None:
            return PassResult(model, False)
        mask = None
        for node in graph:
            if node.op_type != "Where":
                continue
            equal = maker(node.inputs[0], "Equal")
            if equal is None:
                continue
            columns, rank = adapter_columns(equal)
            dtype = dtype_of(required(node.inputs[2]))
            if mask is None:
                mask = add_input(graph, mask_name(rank), dtype, ["num_tokens", columns], before=ids)
            numbers = dtype.numpy()
            largest = np.array(3e38, numbers)  # bfloat16, which NumPy's finfo does not know
            if numbers.kind == "f":
                largest = np.array(np.finfo(numbers).max, numbers)
            writer = GraphWriter(graph, f"{node.outputs[0].name}/finite", before=node)
            finite = writer.op("Clip", node.inputs[1], -largest, largest)
            source = required(required(required(equal.inputs[0]).producer()).inputs[0])
            if source is ids:
                source = mask  # else rows of it, which an exit gathers: their ids become the mask below
            writer.op("Mul", finite, source, replaces=node.outputs[0])
        assert mask is not None  # as `export.lora` writes it
        ids.replace_all_uses_with(mask)
        return PassResult(model, True)


def adapter_columns(equal: ir.Node) -> tuple[int, int]:
    """Return (columns of all adapters, columns of each: the rank), from the Equal that makes a mask."""
    owners = array_of(equal.inputs[1])
    assert owners is not None  # as `export.lora` writes it
    owners = owners.reshape(-1)
    return len(owners), int((owners == owners[0]).sum())


class ShrinkInRows(Pass):
    """Let a layer's product also compute its adapters' first products: A becomes additional rows of its weight.

    There is one product of x with the rows of W and then those of each A_i^T, and a Split. A kernel that decodes reads
    these rows with the others; a separate first product takes as long as a kernel launch. Transposed weights do not
    change.

    parts: {slot: its parts}; of a slot with additional rows the inputs A_i too, which are in its name.
    """

    def __init__(self, parts: Mapping[str, list[str]]):
        self.parts = dict(parts)

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        products = {str(required(node.inputs[1]).name): node for node in graph if node.op_type == "Gemm"}
        is_changed = False
        for name, node in products.items():
            weight = required(node.inputs[1])
            # The matrices A of the weight's parts (query, key and value, say), and their products x A.
            parts = [part + A_SUFFIX for part in self.parts.get(name, ()) if part + A_SUFFIX in products]
            shrinks = [products[part] for part in parts]
            shares_input = all(shrink.inputs[0] is node.inputs[0] for shrink in shrinks)
            if not shrinks or not attribute(node, "transB", 0) or not shares_input:
                continue
            # The weight gets their columns as rows.
            rows, in_features = sizes_of(weight)
            columns = [sizes_of(shrink.inputs[1])[1] for shrink in shrinks]
            shape = [rows + sum(columns), in_features]
            joined = add_input(graph, BETWEEN.join([name, *parts]), dtype_of(weight), shape)
            self.parts[str(joined.name)] = [*self.parts.pop(name), *parts]
            (out,) = node.outputs
            writer = GraphWriter(graph, f"{out.name}/wide", before=node)
            bias = list(node.inputs[2:])
            if bias:  # x A has none
                bias = [writer.op("Concat", *bias, np.zeros(sum(columns), dtype_of(weight).numpy()), axis=0)]
            wide = writer.copy(node, node.inputs[0], joined, *bias, result=f"{out.name}/wide")
            outputs = [out, *(shrink.outputs[0] for shrink in shrinks)]
            names = [f"{value.name}/split" for value in outputs]
            for value, split in zip(outputs, writer.several("Split", wide, [rows, *columns], results=names, axis=1)):
                replace(value, split)
            is_changed = True
        return PassResult(model, is_changed)


def is_expand(node: ir.Node | None) -> bool:
    """Return whether a node is the second product of adapters, which is added to a layer's result."""
    return node is not None and node.op_type == "Gemm" and str(required(node.inputs[1]).name).endswith(B_SUFFIX)


class WithoutAdapters(Pass):
    """Remove the adapters from a graph, which then computes what the model without adapters does."""

    def call(self, model: ir.Model) -> PassResult:
        expands = [node for node in model.graph if is_expand(node)]
        for expand in expands:
            (total,) = expand.outputs[0].consumers()
            (base,) = (value for value in total.inputs if value is not expand.outputs[0])
            replace(total.outputs[0], required(base))
        return PassResult(model, bool(expands))
