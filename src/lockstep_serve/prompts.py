"""Encode the texts of prompts, long ones in threads; reject far too long ones before they are encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.checks import wrong_length
from lockstep.runtime.tokenizer import Tokenizer
from lockstep_serve.bodies import bad_request
from lockstep_serve.stream import StreamError

LONG = 1 << 14  # characters of a request that would block the event loop
# A text of more than _PIECE characters per allowed token is first counted in pieces, and rejected once the pieces have
# _OVER times the limit: cuts add a few tokens, but never double their number.
_PIECE = 4
_OVER = 2
MAX_WAITING = 64  # long texts of one `Turns`, waiting or running
_Result = TypeVar("_Result")


class Turns:
    """A few threads for work that would block the event loop; each needs much memory."""

    def __init__(self, threads: int, name: str):
        self._threads = ThreadPoolExecutor(threads, name)
        self._count = 0

    async def run(self, work: Callable[[], _Result], size: int) -> _Result:
        """Return the result of `work`, in a thread if `size` is above `LONG`. Raises StreamError, 429, if many wait."""
        if size <= LONG:
            return work()
        if self._count >= MAX_WAITING:
            raise StreamError(
                f"{self._count} long texts wait to be encoded or decoded; try again", 429, "queue_full", 1
            )
        self._count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._count -= 1


_TURNS = Turns(2, "prompts")


async def encode_texts(
    texts: Sequence[str], tokenizer: Tokenizer, param: str, limit: int, special: bool = True, turns: Turns = _TURNS
) -> list[np.ndarray]:
    """Return each text's ids, int32; limit: tokens of each. Raises BadRequest, and StreamError where many wait."""
    for text in texts:
        lower_bound = tokenizer.min_tokens(len(text))
        if lower_bound > limit:
            raise bad_request(wrong_length(param, limit, f"at least {lower_bound}"))

    def encode() -> list[np.ndarray]:
        return [_encode(text, tokenizer, param, limit, special) for text in texts]

    return await turns.run(encode, sum(map(len, texts)))


def _encode(text: str, tokenizer: Tokenizer, param: str, limit: int, special: bool) -> np.ndarray:
    try:
        piece = _PIECE * limit + LONG
        count = 0
        if len(text) > piece:
            for start in range(0, len(text), piece):
                count += len(tokenizer.encode(text[start : start + piece], special=False))
                if count > _OVER * limit + LONG:
                    raise wrong_length("prompt", limit, f"more than {_OVER * limit}")
        return tokenizer.encode(text, special)
    except InputError as error:
        raise bad_request(error, {"prompt": param}) from None
