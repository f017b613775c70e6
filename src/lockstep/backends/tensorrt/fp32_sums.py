"""Have TensorRT accumulate products of fp16 numbers in fp32.

In a strongly typed network a product takes the type of its factors, for its sums too: TensorRT has kernels for fp16
that accumulate in fp16. Between casts of both factors to fp32 and of the result to fp16 it is taken as a kernel on fp16
factors that accumulates in fp32 (as Torch-TensorRT's `use_fp32_acc`). The numbers are those of the graph: casts to fp32
are exact, and the result is rounded once, as before. A bias is added in fp16 behind the casts: with an addition between
product and cast TensorRT 10.6 takes a kernel on fp32 factors.
"""

from __future__ import annotations

import onnx
import onnx.inliner
from onnx import TensorProto

from lockstep.onnx_tools.rewriter import Emitter, Rewriter, typed_values

_PRODUCTS = ("MatMul", "Gemm")


def with_fp32_sums(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph whose fp16 products are in fp32 between casts; `model` itself where it has none."""
    inlined = onnx.inliner.inline_local_functions(model) if model.functions else model
    elements = {name: element for name, (element, _) in typed_values(inlined).items()}
    graph = Rewriter(inlined)
    products = [
        node for node in graph.nodes if node.op_type in _PRODUCTS and elements.get(node.input[0]) == TensorProto.FLOAT16
    ]
    if not products:
        return model
    for node in products:
        out = node.output[0]
        bias = node.input[2] if len(node.input) > 2 else ""
        casts = Emitter(graph, f"{out}/fp32")
        node.input[:] = [casts("Cast", name, to=TensorProto.FLOAT) for name in node.input[:2]]
        node.output[:] = [f"{out}/sum"]
        result = Emitter(graph, f"{out}/fp16")
        rounded = result("Cast", f"{out}/sum", result="" if bias else out, to=TensorProto.FLOAT16)
        if bias:
            result("Add", rounded, bias, result=out)
        graph.replace(node, *casts.nodes, node, *result.nodes)
    return graph.finish()
