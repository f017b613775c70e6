"""Tokens and logits of transformers on the dequantised weights, and their drift."""

from __future__ import annotations

from typing import Any

from lockstep.stages.reference import make_reference
from lockstep.stages.stage import Config, Job, Names, Stage, artefacts


class QuantizedReference(Stage):
    output = "{model}/{precision}/reference/{layers}.json"
    beside = {
        "logits": "{model}/{precision}/reference/{layers}.safetensors",
        "drift": "{model}/{precision}/reference/{layers}.drift.json",
    }
    reads = artefacts("checkpoint", "weights")
    help = "Tokens and logits of transformers on the dequantised weights, and their drift."
    is_check = is_cached = is_reproduced = only_quantized = True

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        model = names["model"]
        return {"golden": config.reference_terms(model), "drift_text": config.models[model].golden.drift_text}

    def run(self, job: Job) -> None:
        make_reference(job)
