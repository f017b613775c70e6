"""Tokens of an answer in, one at a time; their text out, as soon as it is sure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.runtime.pieces import Pieces


class TextStream:
    """The text of tokens behind a context: that of all of them, less that of the context.

    All pieces together are `Tokenizer.decode` of context and tokens, less `decode` of the context, but for a run of
    byte tokens (<0xE4>) that is no text: `decode` then gives up its whole characters too. Bytes that may become a
    character are held back, three at most. A token costs the same however many came before.
    """

    def __init__(
        self,
        pieces: Pieces,
        context: Sequence[int] | np.ndarray = (),
        owed: bool = False,
        shown: Mapping[int, str] = {},
    ):
        """Begin behind a context.

        shown: names of special tokens that are part of the text. owed: where the context leaves a character unfinished
        and the tokens do not finish it, a replacement character stands for it. Else that is a part of the context's
        text.
        """
        self._pieces = pieces
        self._decoder = pieces.decoder()
        self._shown = shown
        behind = map(int, reversed(context))
        self._before = next((token for token in behind if not pieces.is_silent(token)), None)
        unfinished = pieces.unfinished(context)
        self._decoder.decode(unfinished)
        self._given = b"" if owed else unfinished

    def push(self, token: int) -> str:
        """Return the text that this token completes.

        It is empty in the middle of a character.
        """
        token = int(token)
        pieces = self._pieces
        if (name := self._shown.get(token)) is not None:
            return self.finish() + name
        if pieces.is_silent(token):
            return ""
        piece = pieces.first(token) if self._before is None else pieces.behind(token, self._before)
        self._before = token
        return self._new(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return what is left.

        A character cut off by the end shows as the replacement character.
        """
        return self._new(self._decoder.decode(b"", True))

    def _new(self, text: str) -> str:
        """Return a text without what the context has shown of its last character."""
        given = self._given
        if not given or not text:
            return text
        self._given = b""
        return text if text[0].encode().startswith(given) else text[len(given.decode(errors=self._pieces.errors)) :]
