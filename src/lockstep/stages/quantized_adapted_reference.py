"""Tokens and logits of transformers on the dequantised weights with each adapter."""

from __future__ import annotations

from typing import Any

from lockstep.stages.adapted_reference import reference_options
from lockstep.stages.reference import make_reference
from lockstep.stages.stage import EXPORT, TORCH, Config, Job, Names, Stage


class QuantizedAdaptedReference(Stage):
    output = "{model}/{precision}/adapted_reference/{layers}.json"
    reads = {
        "checkpoint": "{model}/checkpoint.json",
        "weights": "{model}/{precision}/weights.json",
        "adapters": "{model}/adapters.json",
    }
    code = (*EXPORT, "verify/*", "verify/golden")
    packages = TORCH
    help = "Tokens and logits of transformers on the dequantised weights with each adapter."
    is_check = only_quantized = only_adapters = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return reference_options(config, names["model"])

    def run(self, job: Job) -> None:
        make_reference(job)
