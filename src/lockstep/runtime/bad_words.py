"""Bad words: texts that must not appear in an answer, whichever tokens would spell them.

A tokenizer and texts in; out, for the answer so far, the tokens that would complete one of the texts.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.runtime.tokenizer import Pieces

_MAX_CACHED_WORDS = 256


@dataclass(frozen=True)
class BadWord:
    """A word in UTF-8, and the tokens that complete it.

    failure: the failure function of Knuth, Morris and Pratt (1977): for each prefix, the length of the longest shorter
    prefix that it ends with. inside: tokens that contain the word. completing: by the length of a matched prefix, the
    tokens that start with the rest of the word.
    """

    text: bytes
    failure: tuple[int, ...]
    inside: np.ndarray
    completing: dict[int, np.ndarray]

    def advance(self, matched: int, piece: bytes) -> int:
        """Return the length of the prefix that matches at the end of the text, after appending a piece."""
        text = self.text
        failure = self.failure
        for byte in piece:
            while matched and (matched == len(text) or text[matched] != byte):
                matched = failure[matched - 1]
            matched += text[matched] == byte
        return matched


class Vocabulary:
    """The bytes of all tokens, and which of them complete a word."""

    def __init__(self, tokenizer: Pieces, size: int):
        """Index the tokens 0 to size-1: 1 s for 128,000, mostly with the GIL released."""
        self.unfinished = tokenizer.unfinished
        self.pieces = pieces = tokenizer.table(size)
        self._order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self._sorted = [pieces[token] for token in self._order]
        # UTF-8 never contains 0xFF, so no word matches across two pieces.
        self._joined = b"\xff".join(pieces) + b"\xff"
        self._starts = np.cumsum([0, *(len(piece) + 1 for piece in pieces)])
        self._max_piece = max(map(len, pieces), default=0)
        self._words: dict[str, BadWord] = {}  # the oldest first

    def word(self, text: str) -> BadWord:
        word = self._words.get(text)
        if word is None:
            data = text.encode()
            completing = {}
            # No token has more bytes than `_max_piece`, so none completes a shorter prefix of the word.
            for length in range(1, len(data))[-self._max_piece :]:
                tokens = self._starting_with(data[length:])
                if len(tokens):
                    completing[length] = tokens
            word = BadWord(data, _failure(data), self._containing(data), completing)
            self._words[text] = word
            if len(self._words) > _MAX_CACHED_WORDS:
                del self._words[next(iter(self._words))]
        return word

    def _containing(self, text: bytes) -> np.ndarray:
        positions = []
        position = self._joined.find(text)
        while position >= 0:
            positions.append(position)
            position = self._joined.find(text, position + 1)
        return np.unique(np.searchsorted(self._starts, positions, "right") - 1)

    def _starting_with(self, text: bytes) -> np.ndarray:
        first = bisect.bisect_left(self._sorted, text)
        # The least string after all that start with `text`. Its last byte stays below 256: UTF-8 never has 0xFF.
        end = bisect.bisect_left(self._sorted, text[:-1] + bytes([text[-1] + 1]), first)
        return np.array(self._order[first:end], np.int64)


class BadWordFilter:
    """Matches the bad words at the end of one answer."""

    def __init__(self, vocabulary: Vocabulary, words: Sequence[str], prompt: Sequence[int] | np.ndarray = ()):
        self._pieces = vocabulary.pieces
        self._words = [vocabulary.word(text) for text in words]
        self._inside = np.unique(np.concatenate([word.inside for word in self._words]))
        # An incomplete character at the end of the prompt is part of the answer.
        unfinished = vocabulary.unfinished(prompt)
        self._matched = [word.advance(0, unfinished) for word in self._words]

    def push(self, token: int) -> None:
        if piece := self._pieces[token]:
            self._matched = [word.advance(matched, piece) for word, matched in zip(self._words, self._matched)]

    def tokens(self) -> np.ndarray:
        """Return the tokens that would complete a word: those that contain it, and those that end one that is begun."""
        forbidden = [self._inside]
        for word, matched in zip(self._words, self._matched):
            shortest = min(word.completing, default=len(word.text))
            # The text may end with several prefixes of the word, each a suffix of the longest.
            while matched >= shortest:
                if matched in word.completing:
                    forbidden.append(word.completing[matched])
                matched = word.failure[matched - 1]
        return np.concatenate(forbidden)


def _failure(text: bytes) -> tuple[int, ...]:
    failure = [0]
    matched = 0
    for byte in text[1:]:
        while matched and text[matched] != byte:
            matched = failure[matched - 1]
        matched += text[matched] == byte
        failure.append(matched)
    return tuple(failure)
