"""The summary of finished targets, and a target that was built again. `summary.json` has a row for each target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document
from lockstep.artifacts.reports import FAIL
from lockstep.targets import Target


@dataclass(frozen=True)
class SummaryRow:
    """A target: the results of its checks, and its speed. None: not known.

    verdict, validation, golden: "pass", "fail" or "not run"; served: None where no server was checked. engine_error: of
    the comparison of these engines. adapters: of the check of a model's adapters; None where it has none. reproduced:
    in how many of the rounds it came out the same, "-" where it was not tried. reason: why the verdict is no pass.
    quality: of the config's bound on the quantization error; None where it has none. logit_noise: the error of a logit
    that the precision itself costs.

    quantization_error: in words. quantization_logit_error: rms, in units of the logits. quantization_tokens_differing:
    of the likeliest tokens of the golden answers. quantization_perplexity: relative to the checkpoint's, less 1.
    max_logprob_error: of the server's, compared with those of a second sampler; None where none were requested.
    """

    # The columns of the CSV file have this order.
    model: str
    layers: int | str
    precision: str
    backend: str
    verdict: str
    backend_version: str | None
    device: str | None
    engine_digest: str | None
    engine_error: float | None
    reproduced: str
    validation: str
    golden: str
    served: str | None
    reason: str | None
    max_logit_error: float | None
    logit_noise: float | None
    tokens_differing: int | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    adapters: str | None = None
    quality: str | None = None
    quantization_error: str | None = None
    quantization_logit_error: float | None = None
    quantization_tokens_differing: int | None = None
    quantization_perplexity: float | None = None
    max_logprob_error: float | None = None

    @property
    def quality_in_words(self) -> str | None:
        """Return the cost of quantization, which no check of engines shows: they are compared with rounded weights."""
        if self.quantization_perplexity is None:
            return None
        return f"perplexity {self.quantization_perplexity:+.1%}{', too high' * (self.quality == FAIL)}"

    @property
    def target(self) -> Target:
        return Target(self.model, self.precision, self.layers, self.backend)


@dataclass(frozen=True)
class Summary(Document):
    """All targets. not_run: why engines do not run here, by backend or `<precision>/<backend>`."""

    FORMAT: ClassVar[str] = formats.SUMMARY
    targets: tuple[SummaryRow, ...]
    not_run: Mapping[str, str]


@dataclass(frozen=True)
class Reproduction(Document):
    """A target that was built again `rounds` times.

    device: JSON, as its engine set describes it. same_rounds: how many had the same artefacts. artefacts: {place in a
    lock: its first difference}, None where all rounds were the same.
    """

    FORMAT: ClassVar[str] = formats.REPRODUCTION
    target: Target
    engine_digest: str
    backend_version: str
    device: Mapping[str, Any]
    rounds: int
    same_rounds: int
    artefacts: Mapping[str, str | None]

    @property
    def in_words(self) -> str:
        return f"{self.same_rounds} of {self.rounds}"
