"""Stop words and bad words as tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.tokenizer import Tokenizer
from lockstep_serve.bodies import BadRequest, bad_request, check_words


def spellings(name: str, texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the distinct token sequences that spell the words. Raises BadRequest."""
    check_words(name, texts)
    sequences: dict[tuple[int, ...], None] = {}
    try:
        for text in texts:
            sequences |= dict.fromkeys(tokenizer.spellings(text))
    except InputError as error:
        raise bad_request(error, {"prompt": name}) from None
    return tuple(sequences)


def word_ids(name: str, rows: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return sequences of tokens from [2, length]: tokens, and where each ends or -1. Raises BadRequest."""
    if not rows.size:
        return ()
    tokens = rows[0].tolist()
    words = []
    start = 0
    for end in rows[1].tolist():
        if end == -1:
            continue
        if not start <= end <= len(tokens):
            raise BadRequest(f"{name}: expected ends of words from {start} to {len(tokens)}, or -1, found {end}", name)
        if end > start:
            words.append(tuple(tokens[start:end]))
        start = end
    check_words(name, words, "tokens")
    return tuple(words)
