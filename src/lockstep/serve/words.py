"""Words that end an answer or must not come: their limits, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.bodies import BadRequest, bad_request

_MOST_WORDS = 64
_MOST_CHARACTERS = 4096  # or tokens, where words are tokens


def check_words(name: str, given: Sequence[Sized], unit: str = "characters") -> None:
    """Raise BadRequest for more or longer words than each token is searched for; unit: of the lengths."""
    total = sum(map(len, given))
    if len(given) > _MOST_WORDS or total > _MOST_CHARACTERS:
        found = f"{len(given)}, of {total} in all"
        raise BadRequest(
            f"{name}: expected at most {_MOST_WORDS}, of {_MOST_CHARACTERS} {unit} in all, found {found}", name
        )


def spellings(name: str, texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return words as sequences of tokens, each in the ways in which the tokenizer splits it. Raises BadRequest."""
    check_words(name, texts)
    try:
        return tuple(dict.fromkeys(tokens for text in texts for tokens in tokenizer.spellings(text)))
    except InputError as error:
        raise bad_request(error, {"prompt": name}) from None


def word_ids(name: str, rows: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return sequences of tokens from [2, length]: tokens, and where each ends or -1. Raises BadRequest."""
    if not rows.size:
        return ()
    tokens = rows[0].tolist()
    found = []
    start = 0
    for end in rows[1].tolist():
        if end == -1:
            continue
        if not start <= end <= len(tokens):
            raise BadRequest(f"{name}: expected ends of words from {start} to {len(tokens)}, or -1, found {end}", name)
        if end > start:
            found.append(tuple(tokens[start:end]))
        start = end
    check_words(name, found, "tokens")
    return tuple(found)
