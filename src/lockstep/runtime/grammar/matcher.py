"""The matcher of one answer, which says what tokens its grammar allows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

End = Literal["grammar_end", "grammar_error"]


class Matcher:
    """The grammar of one answer, at the answer's end so far.

    The next mask is computed in a thread, while the model computes the logits that it is for: median 60 us, but up to
    30 ms for a grammar that is made to be slow.
    """

    def __init__(self, matcher: Any, vocab_size: int, mask_threads: ThreadPoolExecutor):
        """Take over llguidance's `matcher`, and compute the first mask."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask_threads = mask_threads
        self._mask: bytes = matcher.compute_bitmask()
        self._next_mask: Future[bytes] | None = None

    def fork(self) -> Matcher:
        """Return a matcher of another answer, in the state of this one."""
        self._wait()
        other = object.__new__(Matcher)
        other._matcher = self._matcher.deep_copy()
        other._vocab_size = self._vocab_size
        other._mask_threads = self._mask_threads
        other._mask = self._mask
        other._next_mask = None
        return other

    def allowed(self, end_ids: Collection[int]) -> np.ndarray | None:
        """Return which tokens may come next, [vocab_size] bool; None for none.

        None where llguidance gives up, for the grammar is too complex here, or allows only tokens that the model lacks.
        end_ids: the model's end tokens, as far as they end the answer. Where one is text too, the grammar would take it
        in the middle of a string: it waits until the grammar may end.
        """
        self._wait()
        if self._matcher.is_error():
            return None
        bits = np.unpackbits(np.frombuffer(self._mask, np.uint8), bitorder="little")
        allowed = bits[: self._vocab_size].view(bool)
        if end_ids and not self._matcher.is_accepting():
            without_ends = allowed.copy()
            without_ends[[token for token in end_ids if token < self._vocab_size]] = False
            if without_ends.any():  # else the grammar requires one
                allowed = without_ends
        return allowed if allowed.any() else None

    def consume(self, token: int) -> End | None:
        """Go on with this token; return why no other can follow, if so."""
        self._wait()
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            return "grammar_error"
        if self._matcher.is_stopped():
            return "grammar_end"
        self._next_mask = self._mask_threads.submit(self._matcher.compute_bitmask)
        return None

    def _wait(self) -> None:
        """Wait for the mask: llguidance's matcher is not for two threads at once."""
        if self._next_mask is not None:
            self._mask = self._next_mask.result()
            self._next_mask = None


class ForcedTokens:
    """A matcher that allows one token at a time: those of an answer that is known."""

    def __init__(self, tokens: Sequence[int], vocab_size: int):
        self._tokens = iter(tokens)
        self._allowed = np.zeros(vocab_size, bool)
        self._token = -1
        self.consume(-1)

    def allowed(self, end_ids: Collection[int]) -> np.ndarray | None:
        """Return which token comes next, [vocab_size] bool; None after the last one."""
        if self._token < 0:
            return None
        allowed = self._allowed.copy()
        allowed[self._token] = True
        return allowed

    def consume(self, token: int) -> End | None:
        self._token = next(self._tokens, -1)
        return None
