"""vLLM's endpoints of the tokenizer: text or a chat to token ids, and back, long ones in a thread."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from lockstep.errors import InputError
from lockstep.runtime.checks import expect, expect_tokens
from lockstep_serve.bodies import BadRequest, Unsupported, bad_request
from lockstep_serve.messages import chat_text
from lockstep_serve.prompts import LONG, Turns, encode_texts
from lockstep_serve.served_model import ServedModel

_TURNS = Turns(1, "tokenization")


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize, as vLLM has it: of a text or of a chat."""

    UNSUPPORTED: ClassVar[Unsupported] = {"tools": (None, []), "chat_template": (None,)}

    model: str | None = None
    prompt: str | None = None
    messages: Any = None  # see `chat_text`
    add_special_tokens: bool | None = None  # true for a text, false for a chat, whose template writes them
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize, as vLLM has it."""

    model: str | None = None
    tokens: list[int]


async def tokenize(body: TokenizeBody, model: ServedModel) -> bytes:
    """Return the tokens of a text or a chat, as JSON. Raises BadRequest, StreamError."""
    if body.prompt is None and body.messages is None:
        raise BadRequest("prompt: expected either prompt or messages, found neither", "prompt")
    if body.prompt is not None and body.messages is not None:
        raise BadRequest("prompt: expected either prompt or messages, found both", "prompt")
    if body.prompt is not None:
        param = "prompt"
        text = body.prompt
        special = body.add_special_tokens is not False
    else:
        continues = bool(body.continue_final_message)
        variables = body.chat_template_kwargs or {}
        text = await chat_text(model, body.messages, body.add_generation_prompt, continues, variables)
        param = "messages"
        special = bool(body.add_special_tokens)
    (tokens,) = await encode_texts([text], model.tokenizer, param, _max_tokens(model), special, _TURNS)

    def answer() -> bytes:
        ids = tokens.tolist()
        names = model.tokenizer.names(ids) if body.return_token_strs else None
        limit = model.ready.max_seq_len
        return msgspec.json.encode({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})

    return await _TURNS.run(answer, len(tokens))


async def detokenize(body: DetokenizeBody, model: ServedModel) -> bytes:
    """Return the JSON of the text of token ids, special ones too. Raises BadRequest, StreamError."""
    limit = 3 * _max_tokens(model)  # more than `encode_texts` returns
    try:
        expect("tokens", len(body.tokens), 0, limit, "tokens")
        expect_tokens("tokens", body.tokens, model.ready.vocab_size)
    except InputError as error:
        raise bad_request(error) from None

    def answer() -> bytes:
        return msgspec.json.encode({"prompt": model.tokenizer.decode_whole(body.tokens)})

    return await _TURNS.run(answer, len(body.tokens))


def _max_tokens(model: ServedModel) -> int:
    return max(model.ready.max_seq_len, LONG)


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json that clients read."""
    tokenizer = model.tokenizer
    template = model.chat.template
    ends = tokenizer.names(model.ready.eos_token_ids)
    begins = tokenizer.names(tokenizer.encode("").tolist()[:1])
    info: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.ready.max_seq_len,
        "eos_token": next(iter(ends), None),
    }
    if template is None:
        return info | {"bos_token": next(iter(begins), None), "chat_template": None}
    return info | dict(template.special_tokens) | {"chat_template": template.template}
