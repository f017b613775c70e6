"""Tokens and logits of transformers on the dequantised weights with each adapter."""

from __future__ import annotations

from lockstep.stages.adapted_reference import AdaptedReference
from lockstep.stages.stage import artefacts


class QuantizedAdaptedReference(AdaptedReference):
    output = "{model}/{precision}/adapted_reference/{layers}.json"
    reads = artefacts("checkpoint", "weights", "adapters")
    help = "Tokens and logits of transformers on the dequantised weights with each adapter."
    only_quantized = True
