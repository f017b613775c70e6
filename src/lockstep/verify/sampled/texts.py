"""The text of an answer, by the tokenizers package alone: what its tokens add to a prompt's."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from lockstep.verify.golden.text import new_text

UNDECODED = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Texts:
    """A tokenizer.json."""

    def __init__(self, path: Path):
        self._tokenizer = Tokenizer.from_file(str(path))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def added(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        return new_text(self.decode, prompt, tokens)

    def named(self, letters: str, longest: int) -> list[int]:
        """Return the tokens that may spell up to `longest` letters in ASCII, by their names in the vocabulary."""
        spelling = re.compile(f"[{letters}]{{1,{longest}}}")
        tokens = []
        for name, token in self._vocabulary.items():
            byte = _BYTE.fullmatch(name)
            if byte:
                name = chr(int(byte[1], 16))
            if spelling.fullmatch(name):
                tokens.append(token)
        return tokens

    @functools.cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()


def agree(expected: str, actual: str) -> bool:
    """Return whether two texts are the same up to the first character that is none.

    The replacement of bytes that are no character depends on the decoder, and where a run of them ends.
    """
    prefix, undecoded, _ = expected.partition(UNDECODED)
    if undecoded:
        return actual.startswith(prefix)
    return actual == expected
