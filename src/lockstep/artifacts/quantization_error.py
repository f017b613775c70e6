"""The quantization error of a model's answers: how far quantised weights are from the checkpoint's.

`reference/<layers>.quantization_error.json` in and out, next to the reference of the quantised weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document


@dataclass(frozen=True)
class QuantizationError(Document):
    """The quantization error of a model's first `layers` layers (or "all").

    Measured in transformers, float32. max_logit_error, rms_logit_error: of the logits along the rounded model's answers
    to the golden prompts. rms_logit: of the checkpoint's there. tokens_differing: of `tokens` likeliest tokens there.
    perplexity, full_perplexity: on `perplexity_tokens` tokens of text, of rounded numbers and of the checkpoint's.
    max_weight_error: of a weight, in steps of its group. kv_cache_dtype: of keys and values, where it is another than
    the activations'; then also of full weights, with `precision` that of the measurement.
    """

    FORMAT: ClassVar[str] = formats.QUANTIZATION_ERROR
    layers: int | str
    precision: str
    group_size: int
    max_weight_error: float
    max_logit_error: float
    rms_logit_error: float
    rms_logit: float
    tokens: int
    tokens_differing: int
    perplexity_tokens: int
    perplexity: float
    full_perplexity: float
    kv_cache_dtype: str | None = None

    @property
    def perplexity_change(self) -> float:
        """Return by which part the perplexity is above the checkpoint's."""
        return self.perplexity / self.full_perplexity - 1

    def words(self) -> str:
        cache = f"KV cache in {self.kv_cache_dtype}: " if self.kv_cache_dtype else ""
        return (
            f"{cache}logits off by {self.rms_logit_error:.2g} rms, {self.max_logit_error:.2g} at most; "
            f"{self.tokens_differing} of {self.tokens} tokens differ; perplexity {self.perplexity:.4g} for "
            f"{self.full_perplexity:.4g}"
        )
