"""The parameters that completions and chat completions share.

In: a body of OpenAI's API. Out: prompts for the service.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.runtime.request import Request
from lockstep.serve.bodies import BadRequest
from lockstep.serve.grammar import grammar_of
from lockstep.serve.prompts import too_long
from lockstep.serve.service import Service
from lockstep.serve.stream import PromptRequest
from lockstep.serve.words import check_words
from lockstep.step.sampling import Sampling

_ID = re.compile("[!-~]{1,128}")
_TOKEN = re.compile("[0-9]{1,20}")  # an id, and no number that takes long to read
# Taken by others, not here: refused, so that nobody takes an answer for what it is not.
_UNSUPPORTED = {
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
    "guided_whitespace_pattern": (None,),
    "logprob_token_ids": (None,),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
}


class StreamOptions(msgspec.Struct):
    """What a stream has beside its text.

    continuous_usage_stats: with include_usage, as vLLM has it: each chunk has the numbers of its answer so far.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Parameters(msgspec.Struct, kw_only=True):
    """The fields of both bodies.

    lora: the name of an adapter, which may also stand in `model`. What is not named is accepted and ignored, but for
    what is unsupported.
    """

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
    best_of: Any = None
    suffix: Any = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None
    structured_outputs: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    logits_processors: Any = None
    return_tokens_as_token_ids: Any = None
    guided_whitespace_pattern: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Return how many likeliest tokens are listed beside the chosen one.

        None: no log-probability at all.
        """
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Return how many tokens an answer may have; None for as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether each chunk has them, of its answer so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def request_id(body: Parameters, header: str | None) -> str:
    """Return what the answer's id ends in.

    That is what the header X-Request-Id names, the body, or a random one. A header that is none is ignored: a proxy may
    have set it. Raises BadRequest for a value of the body that is none.
    """
    if body.request_id is not None and not _ID.fullmatch(body.request_id):
        raise BadRequest("request_id: expected 1 to 128 visible ASCII characters, found others", "request_id")
    if header is not None and _ID.fullmatch(header):
        return header
    return body.request_id or secrets.token_hex(12)


def check_supported(body: Parameters, service: Service) -> None:
    """Raise BadRequest for another model, or a parameter that is not supported."""
    service.adapters.named(body.model, body.lora)
    refuse(body, _UNSUPPORTED)


def refuse(body: msgspec.Struct, unsupported: dict[str, tuple]) -> None:
    """Raise BadRequest for the first of these fields that has a value.

    Values that mean nothing are let pass.
    """
    for name, allowed in unsupported.items():
        if getattr(body, name) not in allowed:
            raise BadRequest(f"{name}: not supported by this server; leave it out", name)


def longest_prompt(service: Service) -> int:
    """Return the most tokens that a prompt may have."""
    return min(service.ready.max_input_len, service.ready.max_seq_len)


def prompt_requests(
    body: Parameters, prompts: Sequence[list[int]], param: str, service: Service, prompt_logprobs: int | None = None
) -> list[PromptRequest]:
    """Return what the engine computes for each prompt.

    param: the field that the prompts stand in. prompt_logprobs: as of `Request`; an answer may then have no token.
    Raises BadRequest for values that cannot be.
    """
    most, least = body.most_tokens, int(prompt_logprobs is None)
    longest, limit = service.ready.max_seq_len, service.ready.max_input_len
    stop_ids = frozenset(body.stop_token_ids or ()) | frozenset(() if body.ignore_eos else service.ready.eos_token_ids)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if not all(stop):
        raise BadRequest("stop: expected strings that are not empty, found an empty one", "stop")
    check_words("stop", stop)
    adapter = service.adapters.named(body.model, body.lora)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    n, vocab_size = 1 if body.n is None else body.n, service.ready.vocab_size
    _expect("n", n, 1, service.ready.max_batch_size)
    _expect("seed", seed, 0, (1 << 64) - 1)
    _expect("priority", body.priority or 0, -(1 << 31), (1 << 31) - 1)
    for token in body.stop_token_ids or ():
        _expect("stop_token_ids", token, 0, vocab_size - 1)
    salt = body.cache_salt or ""
    _expect("cache_salt", len(salt), 0, 256, "characters")
    check_words("bad_words", body.bad_words or ())
    grammar = grammar_of(body)
    sampling = _sampling(body, vocab_size)
    requests = []
    for number, prompt in enumerate(prompts):
        room = longest - len(prompt)
        if not 1 <= len(prompt) <= limit or room < least:
            raise too_long(param, min(limit, longest - least), len(prompt))
        for token in (min(prompt), max(prompt)):  # not each of them: the loop would wait for a long prompt
            _expect(param, token, 0, vocab_size - 1)
        wanted = room if most is None else most
        if not least <= wanted <= room:
            name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            raise BadRequest(
                f"{name}: expected {least} to {room}, which the {len(prompt)} tokens of the prompt leave of "
                f"{longest}, found {wanted}",
                name,
            )
        _expect("min_tokens", body.min_tokens or 0, 0, wanted)
        request = Request(
            prompt,
            wanted,
            stop_ids=stop_ids,
            sampling=replace(sampling, seed=(seed + number) % (1 << 64)),
            n=n,
            priority=body.priority or 0,
            grammar=grammar,
            prompt_logprobs=prompt_logprobs,
            cache_salt=salt,
            adapter=adapter,
        )
        requests.append(PromptRequest(request, stop, min_stop_tokens=body.min_tokens or 0))
    return requests


def _expect(name: str, value: int, least: int, most: int, what: str = "") -> None:
    if not least <= value <= most:
        raise BadRequest(f"{name}: expected {least} to {most}{what and f' {what}'}, found {str(value)[:40]}", name)


def _sampling(body: Parameters, vocab_size: int) -> Sampling:
    given: dict[str, Any] = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_tokens",
        )
        if (value := getattr(body, name)) is not None
    }
    given |= {"top_k": max(0, body.top_k or 0), "logprobs": body.num_logprobs}  # top_k: -1 is all too
    given["bad_words"] = tuple(body.bad_words or ())
    if body.temperature is None:
        given["temperature"] = 1.0
    bias = body.logit_bias or {}
    if not all(map(_TOKEN.fullmatch, bias)) or max(map(int, bias), default=0) >= vocab_size:
        raise BadRequest(f"logit_bias: expected token ids 0 to {vocab_size - 1}, found another name", "logit_bias")
    try:
        return Sampling(**given, logit_bias={int(token): value for token, value in bias.items()})
    except InputError as error:
        raise BadRequest(str(error), str(error).partition(":")[0]) from None
