"""Words that no text of an answer may hold, whichever tokens would spell them.

In: a tokenizer and texts. Out, for the answer so far: the tokens that would complete one of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.runtime.pieces import Pieces

_KNOWN = 256  # words whose tables are kept


@dataclass(frozen=True)
class BadWord:
    """A word, in UTF-8, and the tokens that complete it.

    failure: of each beginning of the word the length of the longest other one that it ends in (Knuth, Morris and Pratt
    1977). inside: tokens that hold all of it. completing: by the length of a beginning, tokens that begin with what is
    left.
    """

    text: bytes
    failure: tuple[int, ...]
    inside: np.ndarray
    completing: dict[int, np.ndarray]

    def advance(self, matched: int, piece: bytes) -> int:
        """Return how much of the word a text ends in that ended in `matched` bytes of it, behind a further piece."""
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
        """Look at the tokens 0 to size-1, which takes 1 s for 128,000; other threads run on for the most part."""
        self.unfinished = tokenizer.unfinished
        self.pieces = pieces = tokenizer.table(size)
        self._order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self._sorted = [pieces[token] for token in self._order]
        # 0xFF is in no UTF-8, so no word is found across the end of a piece.
        self._joined = b"\xff".join(pieces) + b"\xff"
        self._starts = np.cumsum([0, *(len(piece) + 1 for piece in pieces)])
        self._longest = max(map(len, pieces), default=0)
        self._words: dict[str, BadWord] = {}  # oldest first

    def word(self, text: str) -> BadWord:
        """Return the tables of a word."""
        found = self._words.get(text)
        if found is None:
            data = text.encode()
            rests = {length: self._beginning(data[length:]) for length in range(1, len(data))[-self._longest :]}
            completing = {length: tokens for length, tokens in rests.items() if len(tokens)}
            found = self._words[text] = BadWord(data, _failure(data), self._holding(data), completing)
            if len(self._words) > _KNOWN:
                del self._words[next(iter(self._words))]
        return found

    def _holding(self, text: bytes) -> np.ndarray:
        places = []
        at = self._joined.find(text)
        while at >= 0:
            places.append(at)
            at = self._joined.find(text, at + 1)
        return np.unique(np.searchsorted(self._starts, places, "right") - 1)

    def _beginning(self, text: bytes) -> np.ndarray:
        first = bisect.bisect_left(self._sorted, text)
        behind = bisect.bisect_left(self._sorted, text[:-1] + bytes([text[-1] + 1]), first)
        return np.array(self._order[first:behind], np.int64)


class BadWordFilter:
    """The bad words of one answer, at its end so far."""

    def __init__(self, vocabulary: Vocabulary, words: Sequence[str], prompt: Sequence[int] | np.ndarray = ()):
        """Begin an answer to a prompt, at least one word given."""
        self._pieces = vocabulary.pieces
        self._words = [vocabulary.word(text) for text in words]
        self._inside = np.unique(np.concatenate([word.inside for word in self._words]))
        begun = vocabulary.unfinished(prompt)  # a character, which is the answer's
        self._matched = [word.advance(0, begun) for word in self._words]

    def push(self, token: int) -> None:
        """Take a token of the answer."""
        if piece := self._pieces[token]:
            self._matched = [word.advance(matched, piece) for word, matched in zip(self._words, self._matched)]

    def tokens(self) -> np.ndarray:
        """Return the tokens that would complete a word, int64."""
        found = [self._inside]
        for word, matched in zip(self._words, self._matched):
            least = min(word.completing, default=len(word.text))
            while matched >= least:
                if matched in word.completing:
                    found.append(word.completing[matched])
                matched = word.failure[matched - 1]
        return np.concatenate(found)


def _failure(text: bytes) -> tuple[int, ...]:
    failure = [0]
    matched = 0
    for byte in text[1:]:
        while matched and text[matched] != byte:
            matched = failure[matched - 1]
        matched += text[matched] == byte
        failure.append(matched)
    return tuple(failure)
