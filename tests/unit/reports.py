"""Reports of checks as they are left on disk, with entries of a check that passed where a test does not say."""

from __future__ import annotations

from typing import Any

from lockstep.artifacts.reports import (
    PASS,
    BlockErrors,
    ComparisonReport,
    GoldenPrompt,
    GoldenReport,
    PositionError,
    RequestsSpeed,
    SampledCase,
    ServedPhase,
    ServedReport,
    SpeedReport,
    TensorError,
    ValidatedGraphs,
    ValidationReport,
)
from lockstep.targets import Target

DIGEST = "ab" * 32


def golden_prompt(text: str = "A", **options: Any) -> GoldenPrompt:
    passed: dict[str, Any] = {
        "tokens": (1,), "text_out": "", "reference_text": "", "expected": None, "prompt_ids_equal": True,
        "tokens_equal": not options.get("differences"), "differences": (), "logit_noise": 0.1, "tolerance": 0.5,
        "passed": True, "max_logit_error": 1e-6, "alone_equal": not options.get("alone_differences"),
        "alone_differences": (), "alone_max_logit_difference": 0.0,
        "generate_equal": not options.get("generate_differences"), "generate_differences": (),
        "mixed_max_logit_error": 1e-6,
    }  # fmt: skip
    return GoldenPrompt(text=text, **{**passed, **options})


def golden(target: Target, *prompts: GoldenPrompt, **options: Any) -> GoldenReport:
    passed: dict[str, Any] = {
        "result": PASS, "engine_digest": DIGEST, "tolerance": 0.5, "logit_noise": 0.1, "max_logit_error": 0.0,
    }  # fmt: skip
    passed["positions"] = (PositionError(3, 0.25, 0.1, 0.5), PositionError(7, None, 0.1, 0.5))
    return GoldenReport(target=target, prompts=prompts, long_prompt=None, **{**passed, **options})


def served(target: Target, **options: Any) -> ServedReport:
    passed: dict[str, Any] = {
        "result": PASS, "engine_digest": DIGEST, "identity": DIGEST, "batch_invariant": True,
        "phases": {"alone": ServedPhase(1, 0, 0, ())}, "prefix_hit_tokens": 0, "restarts": 1, "num_pages": 1,
        "sampling": {"logprobs": SampledCase(2, 16, 0, 0, 1e-6)},
    }  # fmt: skip
    return ServedReport(target=target, **{**passed, **options})


def speed(target: Target, prefill: float, decode: float) -> SpeedReport:
    by_requests = (RequestsSpeed(1, decode / 2 + 1), RequestsSpeed(4, decode + 1))
    return SpeedReport(target, DIGEST, 4, prefill, decode, prefill, decode, by_requests)


def blocks(*errors: float | None, noise: float = 0.1) -> tuple[BlockErrors, ...]:
    """A block of one tensor for each error, layer by layer."""
    results = []
    for layer, error in enumerate(errors):
        tensor = TensorError(error, error, error, 1.0, noise, noise, 6 * noise, 2 * noise)
        results.append(BlockErrors("middle", {"hidden": tensor}, layer))
    return tuple(results)


def validation(target: Target, blocks: tuple[BlockErrors, ...] | None = None) -> ValidationReport:
    of = ValidatedGraphs(target.model, target.precision, target.layers)
    return ValidationReport(result=PASS, target=of, first_failing_layer=None, blocks=blocks)


def comparison(relative_error: float, digest: str = DIGEST) -> ComparisonReport:
    return ComparisonReport(
        result=PASS, backend="onnxruntime", precision="fp16", engine_digest=digest, versions={}, seed=0, tolerance=0.01,
        engines={}, relative_error=relative_error,
    )  # fmt: skip
