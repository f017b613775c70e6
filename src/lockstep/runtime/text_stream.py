"""Incremental detokenization.

`Pieces`: a tokenizer of the tokenizers package in; what each token adds to a text out, as UTF-8 that may end inside a
character. `TextStream`: tokens of an answer in, one at a time; text out once no later token can change it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
_ONE_EACH = "lockstep.one_replacement_for_each_byte"


def _one_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _UNDECODED * (error.end - error.start), error.end


codecs.register_error(_ONE_EACH, _one_each)


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's mapping)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return {chr(byte if byte in printable else next(substitutes)): byte for byte in range(256)}


_BYTES = _byte_characters()


class Pieces:
    """What each token adds to a text.

    It depends on whether the token is the first one, of which some decoders strip the space, and with a few decoders on
    the token before. Special tokens and unused ids add nothing.
    """

    def __init__(self, library: Any):
        self._library = library
        kinds = set[str]()
        if library.decoder is not None:
            kinds.update(_kinds(json.loads(library.decoder.__getstate__())))
        # This decoder adds a space after a word if another word follows.
        self._ends_words = "BPEDecoder" in kinds
        self._is_local = not kinds & {"BPEDecoder", "CTC"}
        # Invalid UTF-8 becomes one replacement character a byte, or one for each truncated character.
        self.errors = _ONE_EACH if "ByteFallback" in kinds else "replace"
        self._cache: dict[int, bytes] = {}

    def is_silent(self, token: int) -> bool:
        return not self.after(token)

    def first(self, token: int) -> bytes:
        alone = self._decode([token])
        if _UNDECODED in alone:
            return self.after(token)
        return alone.encode()

    def after(self, token: int, previous: int | None = None) -> bytes:
        """Return what a token adds after `previous`, by default after itself."""
        if previous is not None and not self._is_local:
            return self._decode([previous, token])[len(self._decode([previous])) :].encode()
        piece = self._cache.get(token)
        if piece is None:
            piece = self._bytes(token, self._decode([token]), self._decode([token, token]))
            self._cache[token] = piece
        return piece

    def text(self, tokens: Iterable[int]) -> str:
        audible = [token for token in tokens if not self.is_silent(token)]
        pieces = [self.first(token) for token in audible[:1]]
        for previous, token in zip(audible, audible[1:]):
            pieces.append(self.after(token, previous))
        return self.decoder().decode(b"".join(pieces))

    def table(self, size: int) -> list[bytes]:
        """Return what each of the tokens 0 to size-1 adds after others, with the GIL released.

        With a decoder that ends words by spaces, the space is included.
        """
        alone = self._library.decode_batch([[token] for token in range(size)], skip_special_tokens=True)
        twice = self._library.decode_batch([[token, token] for token in range(size)], skip_special_tokens=True)
        if self._ends_words:
            return [text[: len(text) - len(single)].encode() for single, text in zip(alone, twice)]
        return [self._bytes(token, *texts) for token, texts in enumerate(zip(alone, twice))]

    def unfinished(self, context: Sequence[int] | np.ndarray) -> bytes:
        """Return the bytes of an incomplete character at the end of a context."""
        tail = b""
        # Only the end of a long prompt is looked at.
        for token in reversed(context):
            if len(tail) >= _MAX_CHARACTER_BYTES - 1:
                break
            tail = self.after(int(token)) + tail
        decoder = self.decoder()
        decoder.decode(tail[1 - _MAX_CHARACTER_BYTES :])
        return decoder.getstate()[0]

    def decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(self.errors)

    def _bytes(self, token: int, alone: str, twice: str) -> bytes:
        """Return what a token adds after itself, from the text of the token, and the text of it twice."""
        if _UNDECODED not in alone:
            return twice[len(alone) :].encode()
        # Decoded alone, part of a character is a replacement character: its bytes are in the token's name.
        name = self._library.id_to_token(token)
        if byte := _BYTE_NAME.fullmatch(name):
            raw = bytes([int(byte[1], 16)])
        elif all(character in _BYTES for character in name):
            raw = bytes(_BYTES[character] for character in name)
        else:
            return alone.encode()
        if raw.decode(errors="replace") != alone:  # the name only looks like bytes
            return alone.encode()
        return raw

    def _decode(self, tokens: Sequence[int]) -> str:
        try:
            return self._library.decode(tokens, skip_special_tokens=True)
        except OverflowError:
            # A negative id, or one of more than 32 bits.
            return ""


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders") or ():
        yield from _kinds(part)


class TextStream:
    """The text that tokens add after a context.

    All deltas together are `Tokenizer.decode` of context and tokens without `decode` of the context. The exception is a
    run of byte tokens (<0xE4>) that is not valid UTF-8, where `decode` drops whole characters too. At most three bytes,
    of an incomplete character, are buffered. The cost of a token does not grow with the text.
    """

    def __init__(
        self,
        pieces: Pieces,
        context: Sequence[int] | np.ndarray = (),
        owed: bool = False,
        shown: Mapping[int, str] = {},
    ):
        """Start after a context.

        shown: texts of special tokens that are part of the answer. owed: a character that the context leaves incomplete
        belongs to the answer, as a replacement character if the tokens do not complete it.
        """
        self._pieces = pieces
        self._decoder = pieces.decoder()
        self._shown = shown
        backwards = map(int, reversed(context))
        self._previous = next((token for token in backwards if not pieces.is_silent(token)), None)
        unfinished = pieces.unfinished(context)
        self._decoder.decode(unfinished)
        # Bytes of the answer's first character that the context's text shows already, as replacement characters.
        self._context_bytes = b"" if owed else unfinished

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty in the middle of a character."""
        token = int(token)
        pieces = self._pieces
        if (name := self._shown.get(token)) is not None:
            return self.finish() + name
        if pieces.is_silent(token):
            return ""
        piece = pieces.first(token) if self._previous is None else pieces.after(token, self._previous)
        self._previous = token
        return self._new(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return the rest of the text; an incomplete character becomes the replacement character."""
        return self._new(self._decoder.decode(b"", True))

    def _new(self, text: str) -> str:
        """Remove what the context's text has already shown of an incomplete character."""
        unfinished = self._context_bytes
        if not unfinished or not text:
            return text
        self._context_bytes = b""
        if text[0].encode().startswith(unfinished):  # the answer completes the character: it is all the answer's
            return text
        return text[len(unfinished.decode(errors=self._pieces.errors)) :]
