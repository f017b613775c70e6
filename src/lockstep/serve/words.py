"""Words that must not come, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import InputError
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.bodies import BadRequest


def words(name: str, texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return words as sequences of tokens, those without any left out.

    Raises BadRequest.
    """
    try:
        found = [tuple(tokenizer.encode(text, special=False).tolist()) for text in texts]
    except InputError as error:
        raise BadRequest(f"{name}: {error}", name) from None
    return tuple(tokens for tokens in dict.fromkeys(found) if tokens)


def with_spaces(texts: Sequence[str]) -> list[str]:
    """Return the words, and each with a space before it.

    Most tokenizers make other tokens of that: a word that must not come must come in neither way.
    """
    return [each for text in texts for each in (text, text if text[0].isspace() else f" {text}")]
