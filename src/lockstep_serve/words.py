"""Stop words and bad words: their limits, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.tokenizer import Tokenizer
from lockstep_serve.bodies import BadRequest, bad_request

# Limited, because the text of each new token is searched for all words.
_MAX_WORDS = 64
_MAX_LENGTH = 4096  # characters or tokens of all words together


def check_words(name: str, words: Sequence[Sized], unit: str = "characters") -> None:
    """Raise BadRequest for too many or too long words; unit: of their lengths."""
    total = sum(map(len, words))
    if len(words) > _MAX_WORDS or total > _MAX_LENGTH:
        expected = f"at most {_MAX_WORDS} words and {_MAX_LENGTH} {unit}"
        raise BadRequest(f"{name}: expected {expected}, found {len(words)} and {total}", name)


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
