"""Speculative decoding: tokens of running requests in, draft tokens that may follow them out.

The model verifies a draft in one step (`Advance.verifies`). Answers consist of the tokens that the model itself
chooses, so drafts affect only how many steps an answer takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.runtime.active_choice import ActiveChoice
from lockstep.runtime.checks import expect

MAX_DRAFT_TOKENS = 16
_MAX_NGRAM = 4
_MIN_NGRAM = 2
# Both in steps without a draft: after wrong drafts of a choice, and, on a GPU, after a step in which none was found.
_MAX_PAUSE = 32
_MISSED_PAUSE = 4


class Drafter(Protocol):
    def propose(self, limits: Mapping[ActiveChoice, int]) -> dict[ActiveChoice, list[int]]:
        """Return drafts of at most `limits[choice]` tokens, for the choices that have one."""

    def forget(self, choice: ActiveChoice) -> None:
        """Drop the state of a choice."""


class NgramDrafter:
    """Proposes what followed the same n-gram earlier in prompt and answer (prompt lookup decoding, Saxena 2023)."""

    def __init__(self) -> None:
        self._texts: dict[ActiveChoice, _Text] = {}

    def propose(self, limits: Mapping[ActiveChoice, int]) -> dict[ActiveChoice, list[int]]:
        drafts = {}
        for choice, limit in limits.items():
            text = self._texts.get(choice)
            if text is None:
                text = self._texts[choice] = _Text(len(choice.prompt))
                text.add(choice.prompt.tolist())
            text.add(choice.answer[len(text.tokens) - text.num_prompt_tokens :])
            if draft := text.continuation(limit):
                drafts[choice] = draft
        return drafts

    def forget(self, choice: ActiveChoice) -> None:
        self._texts.pop(choice, None)


class _Text:
    """The tokens of a choice, and where each of their n-grams ended last."""

    def __init__(self, num_prompt_tokens: int):
        self.num_prompt_tokens = num_prompt_tokens
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        # Where the longest n-gram at the end of the text ended earlier in it; 0: nowhere.
        self._earlier = 0

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._earlier = 0
            end = len(self.tokens)
            for size in range(min(_MAX_NGRAM, end), _MIN_NGRAM - 1, -1):
                ngram = tuple(self.tokens[-size:])
                self._earlier = self._earlier or self._ends.get(ngram, 0)
                self._ends[ngram] = end

    def continuation(self, limit: int) -> list[int]:
        """Return the tokens that followed the n-gram, repeated where they reach the end of the text."""
        if not self._earlier:
            return []
        period = len(self.tokens) - self._earlier
        return [self.tokens[self._earlier + number % period] for number in range(limit)]


@dataclass(slots=True)
class _Pace:
    """How much is drafted for a choice: more after accepted drafts, less after rejected ones.

    length: tokens of the next draft. pause: steps without one. rejected: drafts in a row without an accepted token.
    """

    length: int
    pause: int = 0
    rejected: int = 0

    def update(self, proposed: int, accepted: int, max_length: int, on_host: bool) -> None:
        self.rejected += 1
        if accepted:
            self.rejected = 0
        if not on_host:
            self.length = max_length
        elif accepted == proposed:
            self.length = min(max_length, 2 * proposed)
        else:
            self.length = max(1, accepted)
        # A rejected draft costs most of a step on a CPU, and little on a GPU.
        first_pause = 2 if on_host else 16
        self.pause = min((1 << self.rejected) // first_pause, _MAX_PAUSE)


class Speculation:
    """Decides how many tokens to draft for which requests of one engine, and counts the accepted ones.

    num_drafts, num_draft_tokens: verified so far. accepted: accepted tokens, by position in the draft. failure: why
    drafting has stopped. on_host: False on a GPU. There, looking for drafts delays the launch of a step until the
    tokens of the previous one are known, so after a step without drafts a few steps are not tried.
    """

    def __init__(self, drafter: Drafter, num_tokens: int):
        """Draft at most `num_tokens` for a request and step. Raises InputError for a number out of range."""
        expect("speculative", num_tokens, 1, MAX_DRAFT_TOKENS, "tokens of a draft")
        self.num_tokens = num_tokens
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted = [0] * num_tokens
        self.failure: str | None = None
        self.on_host = True
        self._pause = 0
        self._drafter = drafter
        self._paces = dict[ActiveChoice, _Pace]()

    def is_due(self, choices: Sequence[ActiveChoice], max_tokens: int) -> bool:
        """Return whether the next step may have drafts of these choices, which need the tokens of this step."""
        paces = (self._paces.get(choice) for choice in choices)
        return (
            self.failure is None
            and not self._pause
            and max_tokens >= 2 * len(choices)
            and any(pace is None or not pace.pause for pace in paces)
        )

    def propose(self, room: Mapping[ActiveChoice, int], max_tokens: int) -> dict[ActiveChoice, list[int]]:
        """Return the drafts of a step in which these choices decode.

        room: how many tokens a choice may have after its next one. max_tokens: of the whole step; with many choices
        nothing is left for drafts.
        """
        if self.failure is not None:
            return {}
        share = (max_tokens - len(room)) // len(room)
        if self._pause:
            self._pause -= 1
            share = 0
        limits = {}
        for choice, choice_room in room.items():
            pace = self._paces.setdefault(choice, _Pace(self.num_tokens))
            if pace.pause:
                pace.pause -= 1
                continue
            count = min(share, choice_room, pace.length)
            if count > 0:
                # Powers of two: each number of tokens in a step is a layout with its own bound calls.
                if count < self.num_tokens:
                    count = 1 << count.bit_length() - 1
                limits[choice] = count
        if not limits:
            return {}
        try:
            drafts = self._drafter.propose(limits)
        except Exception as error:
            # No answer may fail because of a draft, and the errors of libraries share no base class.
            self.failure = f"drafts: {' '.join(str(error).split()) or type(error).__name__}; decoding goes on without"
            return {}
        if not drafts and not self.on_host:
            self._pause = _MISSED_PAUSE
        return drafts

    def verified(self, choice: ActiveChoice, proposed: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        for position in range(accepted):
            self.accepted[position] += 1
        if pace := self._paces.get(choice):
            pace.update(proposed, accepted, self.num_tokens, self.on_host)

    def counts(self) -> list[int]:
        """Return num_drafts, num_draft_tokens, and accepted, by position."""
        return [self.num_drafts, self.num_draft_tokens, *self.accepted]

    def forget(self, choice: ActiveChoice) -> None:
        """Drop the state of a choice that has ended or was swapped out."""
        self._paces.pop(choice, None)
        if self.failure is None:
            self._drafter.forget(choice)
