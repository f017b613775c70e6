"""The reports of checks: validate, compare, golden, served, and golden's speeds.

JSON in and out. The report of a check that passed is its stage's output; one that failed is next to it
(`failed_path`). An error of None is not finite: NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.document import Document, Key
from lockstep.targets import Target

PASS = "pass"
FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Report(Document):
    """The base of all reports. result: PASS or FAIL. failure: the first error, as a line; None where it passed."""

    result: str
    failure: str | None = None


@dataclass(frozen=True)
class TensorError:
    """The errors of a tensor, and its noise in the precision.

    relative_error, rms_error: relative to the size of each row (`verify.noise.spread`). noise, rms_noise: the same of
    the precision. tolerance, rms_tolerance: the largest that pass; None: any.
    """

    max_abs_error: float | None
    relative_error: float | None
    rms_error: float | None
    cosine: float | None
    noise: float
    rms_noise: float
    tolerance: float
    rms_tolerance: float | None


@dataclass(frozen=True)
class BlockErrors:
    """The errors of a block's outputs and of the attention after the block, by tensor.

    layer: the decoder layer that the block ends in. variant: of that layer's attention. None where there is none.
    """

    block: str
    tensors: Mapping[str, TensorError]
    layer: int | None = None
    variant: Annotated[str | None, Key("kind")] = None


@dataclass(frozen=True)
class CacheError:
    """The largest error of the layers after a cache of `num_past` tokens, with the noise and bound of its tensor."""

    num_past: int
    relative_error: float | None
    noise: float
    tolerance: float


@dataclass(frozen=True)
class LongContext:
    """The errors of the first `layers` layers after long caches."""

    max_seq_len: int
    layers: int
    caches: tuple[CacheError, ...]


@dataclass(frozen=True)
class ForwardError:
    """The errors of the logits of whole sequences, and Polygraphy's verdict. noise: what the precision itself costs."""

    max_abs_error: float | None
    noise: float
    tolerance: float
    passed: bool


@dataclass(frozen=True)
class Linted:
    """The result of Polygraphy's lint: how many nodes pass, and its warnings."""

    nodes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class GraphChecks:
    """The results of ONNX's checker (PASS) and of Polygraphy's lint, by graph."""

    checker: Mapping[str, str]
    lint: Mapping[str, Linted]


@dataclass(frozen=True)
class ValidatedGraphs:
    """The graphs that a validation is of."""

    model: str
    precision: str
    layers: int | str


@dataclass(frozen=True, kw_only=True)
class ValidationReport(Report):
    """The errors of graphs against PyTorch.

    A check that failed has the errors measured until then. forward: {runner: errors}. unused_tensors: tensors of the
    checkpoint that no block takes.
    """

    FORMAT: ClassVar[str] = formats.VALIDATION
    target: ValidatedGraphs
    first_failing_layer: int | None
    unused_tensors: tuple[str, ...] | None = None
    checks: GraphChecks | None = None
    embedding: BlockErrors | None = None
    blocks: tuple[BlockErrors, ...] | None = None
    exit: BlockErrors | None = None
    long_context: LongContext | None = None
    forward: Mapping[str, ForwardError] | None = None


@dataclass(frozen=True, kw_only=True)
class QualityReport(Report):
    """The cost of quantization and the config's bound: perplexity relative to the checkpoint's, less 1."""

    FORMAT: ClassVar[str] = formats.QUALITY
    perplexity_change: float
    max_perplexity_change: float


@dataclass(frozen=True)
class ComparedRun:
    """An engine on one input. sizes: of the free dimensions. past_lengths: of attention's requests."""

    profile: int
    sizes: Mapping[str, int]
    outputs: Mapping[str, TensorError]
    past_lengths: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SizeCombinations:
    """How many pairs, or triples, of sizes that vary together were tried, and how many requests come to."""

    tried: int
    known: int


@dataclass(frozen=True)
class SweptSizes:
    """An engine at all sizes that the limits allow.

    known: how many there are, with every pair of sizes that is tried. tried: of these, in the time allowed. worst: the
    run with the largest error.
    """

    known: int
    tried: int
    worst: ComparedRun | None = None
    pairs: SizeCombinations | None = None
    triples: SizeCombinations | None = None


@dataclass(frozen=True)
class ComparedEngine:
    """The largest errors of an engine's runs. weights_of_layer: whose weights it ran with, where it takes some."""

    max_abs_error: float | None
    relative_error: float | None
    cosine: float | None
    tolerance: float
    passed: bool
    runs: tuple[ComparedRun, ...]
    sizes: SweptSizes
    weights_of_layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class ComparisonReport(Report):
    """The errors of engines against their graphs. versions: of libraries."""

    FORMAT: ClassVar[str] = formats.COMPARISON
    backend: str
    precision: str
    engine_digest: str
    versions: Mapping[str, str]
    seed: int
    tolerance: float
    engines: Mapping[str, ComparedEngine]
    relative_error: float | None


@dataclass(frozen=True)
class TokenDifference:
    """The first token that differs; None for both where their number differs.

    gap: between the reference's two likeliest logits, None where not finite. accepted: both are equally likely. The
    texts: before it, and added by each token.
    """

    step: int
    reference: int | None
    found: int | None
    gap: float | None
    accepted: bool
    text_before: str | None = None
    reference_text: str | None = None
    found_text: str | None = None


@dataclass(frozen=True)
class GoldenPrompt:
    """A prompt of the golden check: its free decoding and its logit errors.

    The errors are given for each way of running. logit_noise: what the precision itself costs of a logit; tolerance:
    the largest error that passes. expected: the text that the config asks for. The lists of differences have one entry
    or none. passed: whether nothing of it is wrong.
    """

    text: str
    tokens: tuple[int, ...]
    text_out: str
    reference_text: str
    expected: str | None
    prompt_ids_equal: bool
    tokens_equal: bool
    differences: tuple[TokenDifference, ...]
    logit_noise: float
    tolerance: float
    passed: bool
    max_logit_error: float | None
    alone_equal: bool
    alone_differences: tuple[TokenDifference, ...]
    alone_max_logit_difference: float | None
    generate_equal: bool
    generate_differences: tuple[TokenDifference, ...]
    mixed_max_logit_error: float | None


@dataclass(frozen=True)
class GoldenLongPrompt:
    """The logit errors of the long prompt: in one chunk, in several, token by token, in a mixed batch.

    positions: of it and its answer. decoded_positions: how many of these were run as a single token, as in decode.
    """

    num_tokens: int
    tokens: tuple[int, ...]
    logit_noise: float
    tolerance: float
    passed: bool
    max_logit_error: float | None
    cut_max_logit_error: float | None
    single_max_logit_error: float | None
    decoded_positions: int
    positions: int
    generate_equal: bool
    generate_differences: tuple[TokenDifference, ...]
    mixed_max_logit_error: float | None

    def errors(self) -> tuple[float | None, ...]:
        return (self.max_logit_error, self.cut_max_logit_error, self.single_max_logit_error, self.mixed_max_logit_error)


@dataclass(frozen=True)
class MovedState:
    """Requests whose keys and values were moved, compared with the same requests alone.

    max_logit_difference: of any of them. not_run: why none was run, such as a feature that the backend lacks.
    """

    name: str
    requests: int
    max_logit_difference: float | None
    not_run: str | None = None


@dataclass(frozen=True)
class GoldenChoices:
    """Near-ties inside the model, such as a router's top-k, that rounding decided.

    requests: how many were judged by logits along the engines' choices. tied: in how many layers of tokens other
    choices were as good.
    """

    requests: int
    tied: int


@dataclass(frozen=True)
class PositionError:
    """The largest error of the logits after `num_tokens` tokens, of all requests in all ways of running.

    logit_noise: what the precision itself costs there. tolerance: the largest error that passes there.
    """

    num_tokens: int
    logit_error: float | None
    logit_noise: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class GoldenReport(Report):
    """The answers of an engine set to the golden prompts.

    tolerance, logit_noise: the largest of its prompts. choices: None where the reference's own logits are judged by.
    positions: ascending; of many the largest errors of neighbours.
    """

    FORMAT: ClassVar[str] = formats.GOLDEN
    target: Target
    engine_digest: str
    tolerance: float
    logit_noise: float
    max_logit_error: float | None
    prompts: tuple[GoldenPrompt, ...]
    long_prompt: GoldenLongPrompt | None
    moved: tuple[MovedState, ...] = ()
    choices: GoldenChoices | None = None
    positions: tuple[PositionError, ...] = ()


@dataclass(frozen=True)
class ServedPhase:
    """One phase of the served check.

    requests: compared ones. others: of the load beside them; cancelled: how many of these. differences: the first
    token of a request that differs.
    """

    requests: int
    others: int
    cancelled: int
    differences: tuple[TokenDifference, ...]


@dataclass(frozen=True)
class SampledCase:
    """Requests whose tokens, text and log-probabilities were compared with a second sampler's.

    answers: whole and streamed ones. tokens: of distinct answers. decided: tokens that would differ without the option
    that the requests test. near: tokens that are not the second sampler's, but as likely. max_logprob_error: None where
    none were requested.
    """

    answers: int
    tokens: int
    decided: int
    near: int
    max_logprob_error: float | None


@dataclass(frozen=True, kw_only=True)
class ServedReport(Report):
    """The answers of a server to the golden prompts, and to requests that choose tokens in other ways (`sampling`).

    batch_invariant: its tokens must be the golden check's, whatever runs in the batch; else some may differ where the
    reference has two equally likely ones. prefix_hit_tokens: of prompts, taken from the prefix cache. restarts: of the
    engine, which was killed as often.
    """

    FORMAT: ClassVar[str] = formats.SERVED
    target: Target
    engine_digest: str
    identity: str
    batch_invariant: bool
    phases: Mapping[str, ServedPhase]
    prefix_hit_tokens: int
    restarts: int
    num_pages: int
    sampling: Mapping[str, SampledCase]

    @property
    def tokens_differing(self) -> int:
        return sum(len(phase.differences) for phase in self.phases.values())

    @property
    def max_logprob_error(self) -> float | None:
        errors = [case.max_logprob_error for case in self.sampling.values() if case.max_logprob_error is not None]
        return max(errors, default=None)


@dataclass(frozen=True)
class RequestsSpeed:
    """Tokens per second of `requests` that decode together, all of them counted."""

    requests: int
    decode_tokens_per_s: float


@dataclass(frozen=True)
class SpeedReport(Document):
    """Tokens per second of the golden prompts in a batch, alone, and of 1, 2, 4 ... requests (by_requests)."""

    FORMAT: ClassVar[str] = formats.SPEED
    target: Target
    engine_digest: str
    batch_size: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    alone_prefill_tokens_per_s: float
    alone_decode_tokens_per_s: float
    by_requests: tuple[RequestsSpeed, ...] = ()
