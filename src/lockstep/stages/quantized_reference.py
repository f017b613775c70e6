"""Tokens and logits of transformers on the dequantised weights, and the quantization error."""

from __future__ import annotations

from lockstep.stages.adapted_reference import AdaptedReference


class QuantizedReference(AdaptedReference):
    """A separate rule, because it reads the weights of a precision."""
