"""The bytes of tokens, of which the text of an answer is made.

In: a tokenizer of the tokenizers package. Out: what each token adds to a text, as UTF-8 that may end inside a
character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a character
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
_ONE_EACH = "lockstep.one_replacement_for_each_byte"


def _one_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _UNDECODED * (error.end - error.start), error.end


codecs.register_error(_ONE_EACH, _one_each)


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as GPT-2 has them."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in shown else next(others)): byte for byte in range(256)}


_BYTES = _byte_characters()


class Pieces:
    """What each token adds to a text.

    That depends on whether it is the first, of which a decoder may take the space, and with few decoders on the token
    before. Special tokens, and ids without a token, add nothing and count as not there.
    """

    def __init__(self, library: Any):
        """Take a tokenizer of the tokenizers package."""
        self._library = library
        kinds = set() if library.decoder is None else set(_kinds(json.loads(library.decoder.__getstate__())))
        self._ends_words = "BPEDecoder" in kinds  # a space comes behind a word, if another word does
        self._is_local = not kinds & {"BPEDecoder", "CTC"}
        # What becomes of bytes that are no character: a replacement for each, or one for what could have been one.
        self.errors = _ONE_EACH if "ByteFallback" in kinds else "replace"
        self._behind: dict[int, bytes] = {}

    def is_silent(self, token: int) -> bool:
        """Return whether a token adds nothing, wherever it stands."""
        return not self.behind(token)

    def first(self, token: int) -> bytes:
        """Return what a token adds that no other stands before."""
        alone = self._decode([token])
        return self.behind(token) if _UNDECODED in alone else alone.encode()

    def behind(self, token: int, before: int | None = None) -> bytes:
        """Return what a token adds behind `before`; None: behind itself."""
        if before is not None and not self._is_local:
            return self._decode([before, token])[len(self._decode([before])) :].encode()
        piece = self._behind.get(token)
        if piece is None:
            piece = self._behind[token] = self._bytes(token, self._decode([token]), self._decode([token, token]))
        return piece

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without a character that they leave unfinished."""
        seen = [token for token in tokens if not self.is_silent(token)]
        pieces = [self.first(token) for token in seen[:1]] + [self.behind(*two) for two in zip(seen[1:], seen)]
        return self.decoder().decode(b"".join(pieces))

    def table(self, size: int) -> list[bytes]:
        """Return what each of the tokens 0 to size-1 adds behind others.

        Other threads run on meanwhile. With a decoder that puts spaces behind words, a space stands behind.
        """
        alone = self._library.decode_batch([[token] for token in range(size)], skip_special_tokens=True)
        twice = self._library.decode_batch([[token, token] for token in range(size)], skip_special_tokens=True)
        if self._ends_words:
            return [text[: len(text) - len(one)].encode() for one, text in zip(alone, twice)]
        return [self._bytes(token, *texts) for token, texts in enumerate(zip(alone, twice))]

    def unfinished(self, context: Sequence[int] | np.ndarray) -> bytes:
        """Return the bytes of a character that tokens leave unfinished at their end."""
        tail = b""
        for token in reversed(context):
            if len(tail) >= _LONGEST - 1:
                break
            tail = self.behind(int(token)) + tail
        decoder = self.decoder()
        decoder.decode(tail[1 - _LONGEST :])
        return decoder.getstate()[0]

    def decoder(self) -> codecs.IncrementalDecoder:
        """Return what makes text of bytes, of each as soon as it can become no other."""
        return codecs.getincrementaldecoder("utf-8")(self.errors)

    def _bytes(self, token: int, alone: str, twice: str) -> bytes:
        """Return what a token adds behind itself.

        alone, twice: the texts of the token, and of it twice.
        """
        if _UNDECODED not in alone:
            return twice[len(alone) :].encode()
        name = self._library.id_to_token(token)
        if byte := _BYTE_NAME.fullmatch(name):
            raw = bytes([int(byte[1], 16)])
        elif all(character in _BYTES for character in name):
            raw = bytes(_BYTES[character] for character in name)
        else:
            return alone.encode()
        return raw if raw.decode(errors="replace") == alone else alone.encode()

    def _decode(self, tokens: Sequence[int]) -> str:
        try:
            return self._library.decode(tokens, skip_special_tokens=True)
        except OverflowError:  # below 0, or of more than 32 bits
            return ""


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders") or ():
        yield from _kinds(part)
