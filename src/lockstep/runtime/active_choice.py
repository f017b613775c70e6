"""One choice of a request that has not ended.

It holds what the choice goes on with, and chooses its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from lockstep.runtime.bad_words import BadWordFilter
from lockstep.runtime.grammar.matcher import Matcher
from lockstep.runtime.request import Request, Token
from lockstep.runtime.scheduler import Scheduled
from lockstep.step.logits_pipeline import Row, Sampler
from lockstep.step.sampling import Sampled


@dataclass(eq=False, slots=True)
class ActiveChoice:
    """Choice `number` of a request, which the scheduler knows as `scheduled`.

    answer: its tokens; the next step computes the last one. replayed: tokens that were returned before an interruption
    and are still to be recomputed. sampling_slot: the slot whose sampling parameters the model has, or -1. bad_words:
    has seen all tokens of `replayed`.
    """

    index: int
    number: int
    request: Request
    prompt: np.ndarray
    sampler: Sampler
    scheduled: Scheduled
    answer: list[int] = field(default_factory=list)
    sampling_slot: int = -1
    replayed: deque[int] = field(default_factory=deque)
    matcher: Matcher | None = None
    bad_words: BadWordFilter | None = None
    prompt_logprobs: int | None = None

    @property
    def needs_logits(self) -> bool:
        """Return whether the host chooses the next token.

        Also where choices that are still to fork draw from the same logits.
        """
        request = self.request
        forks = bool(self.scheduled.siblings and request.sampling.temperature)
        return bool(request.choose or request.grammar or request.sampling.needs_logits or forks)

    def pipeline_row(self, row: np.ndarray | int, eos_token_ids: Collection[int]) -> Row | None:
        """Return what the logits pipeline chooses the next token from.

        None if the model or `Request.choose` chooses it, if it was given out before, or if the grammar allows none.
        row: the choice's logits, or the token that the model chose.
        """
        request = self.request
        if not isinstance(row, np.ndarray) or request.choose or self.replayed or not request.max_new_tokens:
            return None
        allowed = None
        if self.matcher is not None:
            allowed = self.matcher.allowed(request.stop_ids.intersection(eos_token_ids))
            if allowed is None:
                return None
        forbidden = self.bad_words.tokens() if self.bad_words is not None else ()
        return Row(self.sampler, row, self.scheduled.num_computed, allowed, forbidden)

    def next_token(
        self, row: np.ndarray | int, sampled: Sampled | None, max_seq_len: int, eos_token_ids: Collection[int]
    ) -> Token | None:
        """Append the next token; return None for one that was given out before.

        With its `finish` the choice has ended. row: as for `pipeline_row`. sampled: what the pipeline chose.
        """
        request = self.request
        if not request.max_new_tokens:
            return Token(self.index, -1, None, "max_new_tokens", self.number)
        if self.replayed:
            self.answer.append(self.replayed.popleft())
            return None
        if not isinstance(row, np.ndarray):
            sampled = Sampled(int(row))
        elif request.choose is not None:
            sampled = Sampled(int(request.choose(row)))
        sampled, finish = self._consume(sampled)
        token = sampled.token
        self.answer.append(token)
        if token in request.stop_ids or (finish == "grammar_end" and token in eos_token_ids):
            finish = "stop_id"
        elif finish:
            pass
        elif len(self.answer) == request.max_new_tokens:
            finish = "max_new_tokens"
        elif self.scheduled.num_computed == max_seq_len:
            finish = "max_seq_len"
        logits = row if isinstance(row, np.ndarray) else None
        return Token(self.index, token, logits, finish, self.number, sampled.logprobs)

    def _consume(self, sampled: Sampled | None) -> tuple[Sampled, str | None]:
        """Return the token, and why none can follow it, as far as logits and grammar say; None: none was allowed."""
        if sampled is None:
            return Sampled(-1), "grammar_error"
        if sampled.token < 0:
            return sampled, "error"
        if self.bad_words is not None:
            self.bad_words.push(sampled.token)
        ended = self.matcher.consume(sampled.token) if self.matcher is not None else None
        return (Sampled(-1), ended) if ended == "grammar_error" else (sampled, ended)
