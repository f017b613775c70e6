"""Incremental detokenization: tokens of an answer in, one at a time; text out once no later token can change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.runtime.pieces import Pieces


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
        # Bytes of the first character that are part of the context's text already.
        self._shown_bytes = b"" if owed else unfinished

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
        shown = self._shown_bytes
        if not shown or not text:
            return text
        self._shown_bytes = b""
        if text[0].encode().startswith(shown):
            return text
        return text[len(shown.decode(errors=self._pieces.errors)) :]
