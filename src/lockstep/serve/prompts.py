"""Texts of prompts in, token ids out.

The event loop is not held up, and texts that are far too long are refused before they are encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lockstep.errors import InputError
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.bodies import BadRequest

LONG = 1 << 14  # characters of a request, from which on its texts are encoded in a thread


async def encode_texts(
    texts: Sequence[str], tokenizer: Tokenizer, param: str, most: int | None = None, special: bool = True
) -> list[list[int]]:
    """Return the token ids of each text of a request.

    param: the field that they stand in. most: tokens that each may have; None: any number. special: as of
    `Tokenizer.encode`. Raises BadRequest for a text that cannot be encoded, or has too many bytes for so few tokens.
    """
    for text in texts:
        least = tokenizer.min_tokens(len(text)) if most is not None else 0
        if most is not None and least > most:
            raise too_long(param, most, f"at least {least}")
    encode = lambda: [encode_text(text, tokenizer, param, special) for text in texts]
    return await asyncio.to_thread(encode) if sum(map(len, texts)) > LONG else encode()


def encode_text(text: str, tokenizer: Tokenizer, param: str, special: bool) -> list[int]:
    """Return the token ids of one text. Raises BadRequest, as `encode_texts`."""
    try:
        return tokenizer.encode(text, special).tolist()
    except InputError as error:
        raise BadRequest(f"{param}: {str(error).removeprefix('prompt: ')}", param) from None


def too_long(param: str, most: int, found: int | str) -> BadRequest:
    """Return the error of a prompt whose number of tokens is not 1 to `most`."""
    do = "shorten it" if found else "give it a text"
    return BadRequest(f"{param}: expected 1 to {most} tokens, found {found}; {do}", param)
