"""The checks of a request, before it is queued."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.model import Model
from lockstep.runtime.request import Request
from lockstep.step.sampling import MAX_LOGPROBS


def check_request(request: Request, model: Model, longest: int, has_grammars: bool) -> tuple[np.ndarray, list[int]]:
    """Check a request; return prompt_ids, int64 [num_tokens], and answer_ids.

    longest: tokens of a prompt. Raises InputError for a prompt that is empty or too long, and for values that are out
    of range.
    """
    for name in ("max_new_tokens", "n", "priority", "choice"):
        _index(name, getattr(request, name))
    prompt = _token_ids("prompt_ids", request.prompt_ids, model.vocab_size)
    again = _token_ids("answer_ids", request.answer_ids, model.vocab_size).tolist()
    _token_ids("logit_bias", request.sampling.logit_bias, model.vocab_size)
    _token_ids("bad_words", list(itertools.chain(*request.sampling.bad_sequences)), model.vocab_size)
    if not 1 <= len(prompt) <= longest:
        remedy = "shorten it or raise the limits" if len(prompt) else "give it a text"
        raise InputError(f"expected 1 to {longest} tokens (max_input_len, max_seq_len), found {len(prompt)}; {remedy}")
    wanted, least = request.prompt_logprobs, int(request.prompt_logprobs is None)
    if request.max_new_tokens < least:
        raise InputError(f"max_new_tokens: expected at least {least}, found {request.max_new_tokens}")
    if wanted is not None:
        if not 0 <= wanted <= MAX_LOGPROBS:
            raise InputError(f"prompt_logprobs: expected 0 to {MAX_LOGPROBS}, or none, found {wanted}")
        model.check_gives_all_logits()
    model.check_adapter(request.adapter)
    if request.n < 1:
        raise InputError(f"n: expected at least 1, found {request.n}")
    if not 0 <= request.choice <= (1 << 64) - request.n:
        raise InputError(f"choice: expected 0 to 2**64-{request.n}, found {request.choice}")
    if not isinstance(request.cache_salt, str):
        raise InputError(f"cache_salt: expected text, found {request.cache_salt!r}")
    if again and (request.n > 1 or len(again) >= request.max_new_tokens):
        raise InputError(
            f"answer_ids: expected fewer than max_new_tokens ({request.max_new_tokens}), of a request of "
            f"one choice, found {len(again)} and n {request.n}"
        )
    if request.grammar is not None and (not has_grammars or request.choose is not None):
        raise InputError(
            f"{request.grammar.name}: expected an engine that was opened with grammars, and no `choose`, found another"
        )
    return prompt, again


def _index(name: str, value: Any) -> int:
    """Return a whole number. Raises InputError for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name}: expected a whole number, found {str(value)[:60]!r}") from None


def _token_ids(name: str, tokens: Iterable[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return token ids as an array int64 [num_tokens].

    Raises InputError for what is no list of whole numbers, and for one that is outside the vocabulary.
    """
    try:
        if isinstance(tokens, np.ndarray):
            array = tokens
        else:
            array = np.array([operator.index(token) for token in tokens], np.int64)
    except OverflowError:
        raise InputError(f"{name}: expected tokens 0 to {vocab_size - 1}, found one of more than 64 bits") from None
    except TypeError:
        raise InputError(f"{name}: expected a list of token ids, found {str(tokens)[:60]!r}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InputError(f"{name}: expected a list of token ids, found {array.dtype.name} {list(array.shape)}")
    bad = array[(array < 0) | (array >= vocab_size)]
    if len(bad):
        raise InputError(f"{name}: expected tokens 0 to {vocab_size - 1}, found {bad[0]}")
    return array.astype(np.int64)
