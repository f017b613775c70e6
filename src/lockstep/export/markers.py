"""Token mixers as ONNX operators without parameters, which replace them in a trace.

`Attention` takes query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim], and sinks
[num_heads] where each head has a logit next to its scores. `TokenWindow` returns each token [num_tokens, size] after
the width - 1 before it, oldest first. `DeltaRule` and `LinearAttention` (without beta): see `state_mixer.Recurrence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DOMAIN = "lockstep"


def marker(
    op_type: str, inputs: Sequence[torch.Tensor], shape: Sequence[int | torch.SymInt], **attributes: int | float
) -> torch.Tensor:
    """Emit a marker into the trace. shape: of its output, in the dtype of its first input."""
    settings: dict[str, Any] = {**attributes}
    dtype = inputs[0].dtype
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{op_type}", inputs, settings, dtype=dtype, shape=shape, version=1)
