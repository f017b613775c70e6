"""Texts of prompts to token ids, long ones in threads; what is far too long is refused before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lockstep.errors import InputError
from lockstep.runtime.checks import wrong_length
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.bodies import bad_request
from lockstep.serve.stream import StreamError

LONG = 1 << 14  # characters of a request, from which on its texts are encoded in a thread
# Characters a token of the limit, from which on a text is counted in pieces first, and times the limit that the pieces
# may have. A cut makes a few tokens more, never as many again.
_PIECE = 4
_OVER = 2
_MOST_WAITING = 64  # long texts of one `Turns`, those that run too
_Made = TypeVar("_Made")


class Turns:
    """Threads that take turns at what would hold up the event loop: few, as each takes much memory."""

    def __init__(self, threads: int, name: str):
        self._threads = ThreadPoolExecutor(threads, name)
        self._count = 0

    async def run(self, make: Callable[[], _Made], size: int) -> _Made:
        """Return what `make` makes, in a thread if `size` is above `LONG`. Raises StreamError, 429, if many wait."""
        if size <= LONG:
            return make()
        if self._count >= _MOST_WAITING:
            raise StreamError(
                f"{self._count} long texts wait to be encoded or decoded; try again", 429, "queue_full", 1
            )
        self._count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        finally:
            self._count -= 1


_TURNS = Turns(2, "prompts")


async def encode_texts(
    texts: Sequence[str], tokenizer: Tokenizer, param: str, most: int, special: bool = True, turns: Turns = _TURNS
) -> list[list[int]]:
    """Return each text's token ids; most: tokens of each. Raises BadRequest, and StreamError where many wait."""
    for text in texts:
        if (least := tokenizer.min_tokens(len(text))) > most:
            raise bad_request(wrong_length(param, most, f"at least {least}"))

    def encode() -> list[list[int]]:
        return [_encode(text, tokenizer, param, most, special) for text in texts]

    return await turns.run(encode, sum(map(len, texts)))


def _encode(text: str, tokenizer: Tokenizer, param: str, most: int, special: bool) -> list[int]:
    try:
        piece = _PIECE * most + LONG
        count = 0
        for at in range(0, len(text) if len(text) > piece else 0, piece):
            count += len(tokenizer.encode(text[at : at + piece], special=False))
            if count > _OVER * most + LONG:
                raise wrong_length("prompt", most, f"more than {_OVER * most}")
        return tokenizer.encode(text, special).tolist()
    except InputError as error:
        raise bad_request(error, {"prompt": param}) from None
