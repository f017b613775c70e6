"""Have TensorRT accumulate products of fp16 numbers in fp32.

In a strongly typed network a product and its accumulator have the type of its factors: TensorRT has kernels for fp16
that accumulate in fp16. Between casts of both factors to fp32 and of the result to fp16 it becomes a kernel with fp16
factors that accumulates in fp32 (as Torch-TensorRT's `use_fp32_acc`). This keeps the graph's numbers: casts to fp32 are
exact, and the result is rounded once, as before. A bias is added in fp16 after the casts: with an addition between
product and cast TensorRT 10.6 chooses a kernel with fp32 factors.
"""

from __future__ import annotations

import onnx_ir as ir

from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, infer_types

_PRODUCTS = ("MatMul", "Gemm")


class Fp32Sums(Pass):
    """Compute fp16 products in fp32, between casts."""

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        infer_types(model)
        products = [
            node
            for node in graph
            if node.op_type in _PRODUCTS and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT16
        ]
        for node in products:
            (out,) = node.outputs
            first, second, *bias = node.inputs
            casts = GraphWriter(graph, f"{out.name}/fp32", before=node)
            factors = [casts.op("Cast", factor, to=ir.DataType.FLOAT) for factor in (first, second)]
            product = casts.copy(node, *factors, result=f"{out.name}/sum")
            result = GraphWriter(graph, f"{out.name}/fp16", before=node)
            if bias:
                result.op("Add", result.op("Cast", product, to=ir.DataType.FLOAT16), *bias, replaces=out)
            else:
                result.op("Cast", product, to=ir.DataType.FLOAT16, replaces=out)
        return PassResult(model, bool(products))
