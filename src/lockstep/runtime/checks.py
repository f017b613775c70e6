"""Range checks of a request's values, for the engine and every front end: `name: expected A to B, found C`.

The names are those of `Request` and `Sampling`; a front end translates them to its API's. `Sampling` checks its own
fields.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.model import Model
from lockstep.runtime.request import Request
from lockstep.step.sampling import MAX_LOGPROBS

CHOICES = "choices (max_batch_size)"
_PRIORITY = 1 << 31
_SHORT = 64  # token ids: the extremes of so few are found faster in a list than by NumPy


class Sizes(Protocol):
    """The sizes of a model that limit a request's values."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_batch_size(self) -> int: ...


def expect(name: str, value: int, minimum: int, maximum: int, unit: str = "") -> None:
    """Raise InputError for a value out of range; unit: follows the range in the message."""
    if not minimum <= value <= maximum:
        raise InputError(f"{name}: expected {minimum} to {maximum}{unit and f' {unit}'}, found {str(value)[:40]}")


def expect_tokens(name: str, tokens: Collection[int] | np.ndarray, vocab_size: int) -> None:
    if not len(tokens):
        return
    # Only the extremes are compared, as other requests wait while a long prompt is checked.
    if isinstance(tokens, np.ndarray) and len(tokens) > _SHORT:
        extremes = [tokens.min(), tokens.max()]
    else:
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        extremes = [min(ids), max(ids)]
    for token in extremes:
        if not 0 <= token < vocab_size:
            raise InputError(f"{name}: expected token ids 0 to {vocab_size - 1}, found {str(token)[:40]}")


def wrong_length(name: str, limit: int, length: int | str) -> InputError:
    """Return the error of a prompt whose number of tokens is not 1 to `limit`."""
    advice = "shorten it or raise the limits (max_input_len, max_seq_len)" if length else "give it a text"
    return InputError(f"{name}: expected 1 to {limit} tokens, found {length}; {advice}")


def check_ranges(
    request: Request,
    sizes: Sizes,
    max_prompt_len: int,
    max_total_len: int | None = None,
    prompt: np.ndarray | None = None,
) -> None:
    """Raise InputError for the first value of a request that is out of range.

    max_total_len: limit of prompt and answer; None: no limit, as the answer ends when the context is full.
    prompt: prompt_ids as an array, if the caller has one.
    """
    ids = request.prompt_ids if prompt is None else prompt
    if not 1 <= len(ids) <= max_prompt_len:
        raise wrong_length("prompt_ids", max_prompt_len, len(ids))
    expect_tokens("prompt_ids", ids, sizes.vocab_size)
    expect_tokens("logit_bias", request.sampling.logit_bias, sizes.vocab_size)
    for tokens in request.sampling.bad_sequences:
        expect_tokens("bad_words", tokens, sizes.vocab_size)
    if request.forced_ids:
        check_forced(request, sizes)
    expect("n", request.n, 1, sizes.max_batch_size, CHOICES)
    expect("choice", request.choice, 0, (1 << 64) - request.n)
    expect("priority", request.priority, -_PRIORITY, _PRIORITY - 1)
    if request.prompt_logprobs is not None:
        expect("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    minimum = int(request.prompt_logprobs is None)
    if max_total_len is not None:
        room = f"(context {max_total_len}, prompt {len(ids)})"
        expect("max_new_tokens", request.max_new_tokens, minimum, max_total_len - len(ids), room)
    elif request.max_new_tokens < minimum:
        raise InputError(f"max_new_tokens: expected at least {minimum}, found {request.max_new_tokens}")


def check_forced(request: Request, sizes: Sizes) -> None:
    """Raise InputError for a given answer that is not valid."""
    expect_tokens("forced_ids", request.forced_ids, sizes.vocab_size)
    if len(request.forced_ids) != request.max_new_tokens:
        raise InputError(
            f"forced_ids: expected max_new_tokens ({request.max_new_tokens}) token ids, found {len(request.forced_ids)}"
        )
    for name, is_there in (("grammar", request.grammar), ("choose", request.choose), ("stop_ids", request.stop_ids)):
        if is_there:
            raise InputError(f"{name}: expected none together with forced_ids, the whole answer; leave it out")


def check_request(request: Request, model: Model, max_prompt_len: int, has_grammars: bool) -> Request:
    """Check a request; return it with prompt_ids as an array, int32 [num_tokens], and answer_ids as a list.

    Raises InputError for values of wrong types, out of range, or that this model does not support.
    """
    for name in ("max_new_tokens", "n", "priority", "choice"):
        value = getattr(request, name)
        try:
            operator.index(value)
        except TypeError:
            raise InputError(f"{name}: expected a whole number, found {str(value)[:60]!r}") from None
    prompt = _token_ids("prompt_ids", request.prompt_ids)
    answer = _token_ids("answer_ids", request.answer_ids)
    request = replace(request, forced_ids=_token_ids("forced_ids", request.forced_ids).tolist())
    check_ranges(request, model, max_prompt_len, prompt=prompt)
    expect_tokens("answer_ids", answer, model.vocab_size)
    if request.prompt_logprobs is not None:
        model.check_gives_all_logits()
    if not isinstance(request.cache_salt, str):
        raise InputError(f"cache_salt: expected text, found {request.cache_salt!r}")
    if len(answer) and request.n > 1:
        raise InputError(f"answer_ids: expected none with n above 1, found {len(answer)} with n {request.n}")
    if len(answer) and len(answer) >= request.max_new_tokens:
        raise InputError(
            f"answer_ids: expected fewer than max_new_tokens ({request.max_new_tokens}), found {len(answer)}"
        )
    if request.grammar is not None and not has_grammars:
        raise InputError(f"{request.grammar.name}: expected an engine that was opened with grammars, found one without")
    if request.grammar is not None and request.choose is not None:
        raise InputError(f"{request.grammar.name}: expected no `choose` besides it, found one")
    return replace(request, prompt_ids=prompt.astype(np.int32), answer_ids=answer.tolist())


def _token_ids(name: str, tokens: Iterable[int] | np.ndarray) -> np.ndarray:
    """Return token ids as integers [num_tokens]. Raises InputError for anything but a list of whole numbers."""
    try:
        array = tokens if isinstance(tokens, np.ndarray) else np.array(list(map(operator.index, tokens)), np.int64)
    except OverflowError:
        raise InputError(f"{name}: expected token ids, found one of more than 64 bits") from None
    except TypeError:
        raise InputError(f"{name}: expected a list of token ids, found {str(tokens)[:60]!r}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InputError(f"{name}: expected a list of token ids, found {array.dtype.name} {list(array.shape)}")
    return array
