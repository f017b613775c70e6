"""The parameters of completions and chat completions, and their conversion to prompts of a model."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.checks import check_ranges, expect, expect_tokens
from lockstep.runtime.request import Request
from lockstep.step.sampling import Sampling
from lockstep_serve.bodies import BadRequest, Unsupported, bad_request, check_words
from lockstep_serve.grammar import grammar_of
from lockstep_serve.log import log_once
from lockstep_serve.served_model import ServedModel
from lockstep_serve.stream import PromptRequest

_ID = re.compile("[!-~]{1,128}")
_TOKEN = re.compile("[0-9]{1,20}")  # int() of a longer one could take long
# Fields of `Sampling` with the same name and meaning in a body.
_SAMPLING = "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty min_tokens seed".split()
_UNSUPPORTED: Unsupported = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "prompt_logprobs": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "skip_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "logits_processors": (None, []),
    "return_tokens_as_token_ids": (None, False),
    # vLLM's until 0.12
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "guided_whitespace_pattern"), (None,)
    ),
    "logprob_token_ids": (None,),
    "repetition_detection": (None,),
}


class StreamOptions(msgspec.Struct):
    """Options of a stream.

    include_usage: it ends with the numbers of tokens. continuous_usage_stats: then each chunk has those so far, as in
    vLLM.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Parameters(msgspec.Struct, kw_only=True):
    """The fields of both bodies; lora: an adapter's name, as in `model`. Unknown ones are ignored."""

    UNSUPPORTED: ClassVar[Unsupported] = _UNSUPPORTED

    model: str | None = None  # the one that is served
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False
    priority: int | None = 0
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    lora: str | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    response_format: Any = None
    structured_outputs: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of likeliest tokens to list; None: no log-probabilities. Each body overrides it."""
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        """Return the maximum number of tokens of an answer; None for as many as fit."""
        limit = self.max_completion_tokens
        if limit is None:
            limit = self.max_tokens
        if limit != -1:
            return limit
        log_once("max_tokens -1 is taken as null: as many tokens as fit")
        return None


def request_id(body: Parameters, header: str | None) -> str:
    """Return the id of a request, from the header or the body, else a random one, and keep it in the body.

    Raises BadRequest for the body's.
    """
    if body.request_id is not None and not _ID.fullmatch(body.request_id):
        raise BadRequest("request_id: expected 1 to 128 visible ASCII characters, found others", "request_id")
    if header is not None and _ID.fullmatch(header):
        body.request_id = header
    body.request_id = body.request_id or secrets.token_hex(12)
    return body.request_id


def longest_prompt(model: ServedModel) -> int:
    return min(model.ready.max_input_len, model.ready.max_seq_len)


def prompt_requests(
    body: Parameters,
    prompts: Sequence[np.ndarray],
    param: str,
    model: ServedModel,
    prompt_logprobs: int | None = None,
    forced_ids: Sequence[list[int]] = (),
) -> list[PromptRequest]:
    """Return what the engine computes for each prompt of the field `param`. Raises BadRequest.

    forced_ids: the answer to each prompt, if all are given.
    """
    ready = model.ready
    # A prompt with requested log-probabilities may fill the context: no token needs to follow.
    longest = ready.max_seq_len - int(prompt_logprobs is None)
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    stop_ids = frozenset(body.stop_token_ids or ())
    if not body.ignore_eos and not forced_ids:
        stop_ids |= frozenset(ready.eos_token_ids)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stop):
        raise BadRequest("stop: expected strings that are not empty, found an empty one", "stop")
    check_words("stop", stop)
    check_words("bad_words", body.bad_words or ())
    adapter = model.adapters.resolve(body.model, body.lora)
    grammar = grammar_of(body)
    salt = body.cache_salt or ""
    n = 1 if body.n is None else body.n
    requests = []
    try:
        expect_tokens("stop_token_ids", body.stop_token_ids or (), ready.vocab_size)
        expect("cache_salt", len(salt), 0, 256, "characters")
        sampling = _sampling(body)
        for number, prompt in enumerate(prompts):
            max_new_tokens = body.max_new_tokens
            if max_new_tokens is None:
                max_new_tokens = ready.max_seq_len - len(prompt)
            if forced_ids:
                max_new_tokens = len(forced_ids[number])
            request = Request(
                prompt,
                max_new_tokens,
                stop_ids=stop_ids,
                # Each prompt of a list samples with another seed.
                sampling=replace(sampling, seed=(sampling.seed + number) % (1 << 64)),
                n=n,
                priority=body.priority or 0,
                grammar=grammar,
                prompt_logprobs=prompt_logprobs,
                cache_salt=salt,
                forced_ids=forced_ids[number] if forced_ids else (),
                adapter=adapter,
                id=body.request_id or "",
            )
            check_ranges(request, ready, min(ready.max_input_len, longest), ready.max_seq_len)
            expect("min_tokens", sampling.min_tokens, 0, request.max_new_tokens)
            requests.append(PromptRequest(request, tuple(stop), min_stop_tokens=sampling.min_tokens))
    except InputError as error:
        fields = {"prompt_ids": param, "max_new_tokens": name, "forced_ids": "forced_token_ids"}
        raise bad_request(error, fields) from None
    return requests


def _sampling(body: Parameters) -> Sampling:
    """Return the sampling parameters. Raises InputError."""
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    values["top_k"] = max(0, body.top_k or 0)  # clients send -1 for all tokens
    values["logprobs"] = body.num_logprobs
    values["bad_words"] = tuple(body.bad_words or ())
    values.setdefault("temperature", 1.0)
    if values.get("seed") == -1:
        log_once("seed -1 is taken as null: one is drawn")
        del values["seed"]
    values.setdefault("seed", secrets.randbits(63))
    bias = body.logit_bias or {}
    if not all(map(_TOKEN.fullmatch, bias)):
        raise InputError("logit_bias: expected token ids 0 to the last one, found another name")
    biases = {int(token): value for token, value in bias.items()}
    if len(biases) < len(bias):
        twice = next(token for token in bias if token != str(int(token)))
        raise InputError(f"logit_bias: expected each token once, found {int(twice)} also as {twice!r}")
    return Sampling(**values, logit_bias=biases)
