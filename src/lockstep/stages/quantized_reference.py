"""Tokens and logits of transformers on the dequantised weights, and the quantization error."""

from __future__ import annotations

from lockstep.stages.reference import make_reference
from lockstep.stages.stage import Job, Stage


class QuantizedReference(Stage):
    is_check = True

    def run(self, job: Job) -> None:
        make_reference(job)
