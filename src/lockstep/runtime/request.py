"""The engine's inputs and outputs: requests, tokens, speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.runtime.grammar import Grammar
from lockstep.step.sampling import Logprobs, Sampling

# The error of a request whose next token cannot be chosen.
NOT_FINITE = (
    "logits: expected finite numbers, found NaN or infinity as the largest; lockstep bisect says in which layer, and "
    "whether float16 overflows there"
)


@dataclass(frozen=True)
class Request:
    """A prompt (at least one token id) and how to continue it.

    It ends after `max_new_tokens`, after a token of `stop_ids` (which is returned), or at `max_seq_len`.

    choose: returns the next token from logits [vocab_size] float32, in place of `sampling`.
    n: number of choices; the prompt is computed once. choice: number of the first, which seeds its noise.
    priority: lower is scheduled first.
    cache_salt: prefixes are shared only between requests of the same salt.
    answer_ids: tokens returned before an interruption. They are recomputed one a step, as they were, and new ones
        follow.
    forced_ids: the answer, max_new_tokens token ids, computed as if the model had chosen each (teacher forcing): its
        log-probabilities have the bits that they had when it did. No end token ends it.
    grammar: constrains each choice, which ends where the grammar allows no further token.
    prompt_logprobs: return log-probabilities of the prompt's tokens, and of this many top tokens
        (`Engine.prompt_logprobs`); max_new_tokens may then be 0.
    adapter: name of a LoRA adapter, or None; NAME:ADAPTER for one of the further checkpoint NAME. checkpoint: name of
        the weights, "" for the model's first ones. id: the client's, for logs.
    """

    prompt_ids: Sequence[int] | np.ndarray
    max_new_tokens: int
    choose: Callable[[np.ndarray], int] | None = None
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    answer_ids: Sequence[int] = ()
    choice: int = 0
    forced_ids: Sequence[int] = ()
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    adapter: str | None = None
    checkpoint: str = ""
    id: str = ""


@dataclass(frozen=True)
class CheckpointFiles:
    """The manifests of a checkpoint, and its name in requests: "" for the first one of a model.

    adapters: None without any. checkpoint: that its adapters are checked against, None where none can be loaded later.
    weights_sha256: of the weights that an earlier process had, which need not be there before they are requested; None:
    weights as they are.
    """

    name: str
    assembly: str
    weights: str
    adapters: str | None = None
    checkpoint: str | None = None
    weights_sha256: str | None = None


def adapter_of(checkpoint: str, name: str) -> str:
    """Return the name in requests of a checkpoint's adapter."""
    return f"{checkpoint}:{name}" if checkpoint else name


def split_adapter(adapter: str) -> tuple[str, str]:
    """Return checkpoint and name of what `adapter_of` put together: a checkpoint's name may have colons in it."""
    checkpoint, _, name = adapter.rpartition(":")
    return checkpoint, name


@dataclass(frozen=True)
class Token:
    """One new token of choice `choice` of request number `request`.

    logits: [vocab_size] float32 that it was chosen from; None when the model chose (see `Engine`).
    finish: None while more tokens follow, else why this is the last: "stop_id", "grammar_end" (the grammar allows no
        further token), "max_new_tokens" or "max_seq_len". With `token` -1: "error" for logits that are NaN or infinite,
        "grammar_error" for a grammar that became too complex, "max_new_tokens" for a request of 0 tokens.
    """

    request: int
    token: int
    logits: np.ndarray | None
    finish: str | None
    choice: int = 0
    logprobs: Logprobs | None = None


@dataclass
class Speed:
    """Tokens and seconds spent in steps.

    A step with any prompt tokens counts as prefill, and only these tokens are counted. A step launched speculatively
    (on a GPU) is timed from the end of the previous one, which includes what the caller did between.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / (self.prefill_seconds or math.inf)

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / (self.decode_seconds or math.inf)
