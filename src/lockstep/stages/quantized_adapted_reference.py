"""Tokens and logits of transformers on the dequantised weights with each adapter."""

from __future__ import annotations

from lockstep.stages.adapted_reference import AdaptedReference


class QuantizedAdaptedReference(AdaptedReference):
    """A separate rule, because it reads the weights of a precision."""
