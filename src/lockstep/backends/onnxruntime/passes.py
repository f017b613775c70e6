"""The passes over a graph before ONNX Runtime builds it."""

from __future__ import annotations

import onnx

from lockstep.backends.onnxruntime.adapter_products import KeepOrder
from lockstep.backends.onnxruntime.fixed_sums import FixSums
from lockstep.backends.onnxruntime.grouped_attention import GroupedAttention
from lockstep.backends.onnxruntime.norms import FuseNorms
from lockstep.backends.onnxruntime.whole_vectors import PadAngles
from lockstep.onnx_tools.group_experts import GroupExperts
from lockstep.onnx_tools.int8_products import Int8Products
from lockstep.onnx_tools.toolkit import run_passes

PASSES = (GroupExperts, PadAngles, FixSums, KeepOrder, Int8Products)
FUSIONS = (FuseNorms, GroupedAttention)  # to operators that ONNX's checker does not know


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph that ONNX Runtime is given; the model itself where no pass changes it."""
    rewritten = run_passes(model, *(make() for make in PASSES))
    # Without RoPE only the mask reads positions, and steps give them.
    return run_passes(rewritten, *(make() for make in FUSIONS), check=False, keep_inputs=True)
