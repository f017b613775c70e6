"""`residual: float32` of every family: the stream is wide from end to end, and the computation is transformers' own."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from families import FAMILIES, some_families
from onnx import TensorProto

from lockstep.artifacts.agreement import validate_assembly
from lockstep.errors import InputError
from lockstep.export import parity
from lockstep.export.run import assemble
from lockstep.export.tracer import meta_model
from lockstep.onnx_tools.signature import signature_of
from lockstep.onnx_tools.widened import widened


@pytest.mark.parametrize("family", some_families())  # test_residual.py has a Llama
def test_the_stream_is_wide_and_the_computation_the_same(family: str) -> None:
    """In float32 throughout, the graphs are checked against transformers as those of an fp32 export are."""
    config = FAMILIES[family].config
    if family == "opt":  # projects its embedding first
        with pytest.raises(InputError, match=r"^model type 'opt': residual: .*, found a product in it \(block \w+\)"):
            assemble(meta_model(config, "fp16"), config, "fp16", residual="float32")
        return
    files, assembly = assemble(meta_model(config, "fp16"), config, "fp16", residual="float32")
    validate_assembly(assembly, len(assembly.layers))
    for graph in assembly.classes.values():
        hidden = [io for io in (*graph.signature.inputs, *graph.signature.outputs) if io.key == "hidden"]
        assert {io.dtype for io in hidden} == {"float32"}
    wide = {name: widened(onnx.ModelProto.FromString(data), TensorProto.FLOAT16) for name, data in files.items()}

    def of(graph):
        signature = signature_of(wide[graph.file].graph, [slot.name for slot in graph.signature.slots])
        return replace(graph, signature=signature)

    small = parity.Small(
        config,
        {name: model.SerializeToString() for name, model in wide.items()},
        replace(
            assembly,
            precision="fp32",
            dtype="float32",
            classes={name: of(graph) for name, graph in assembly.classes.items()},
            variants={
                name: replace(variant, prefill=of(variant.prefill), decode=of(variant.decode))
                for name, variant in assembly.variants.items()
            },
        ),
    )
    # Constants that transformers makes in the model's type are those of float16 here.
    assert parity.measure(small).error <= 1e-2
