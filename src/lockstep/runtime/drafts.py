"""Drafts: tokens of running requests in, tokens that may follow them out.

The model verifies a draft in one step (`Advance.verifies`): what is given out are the tokens that the model chooses, so
a draft decides how many steps an answer takes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.runtime.active_choice import ActiveChoice
from lockstep.runtime.checks import expect

MOST_DRAFT_TOKENS = 16
# n-grams
_LONGEST = 4
_SHORTEST = 2
# steps
_LONGEST_PAUSE = 32
_MISSED_PAUSE = 4


class Drafter(Protocol):
    """Proposes what may follow."""

    def propose(self, asked: Mapping[ActiveChoice, int]) -> dict[ActiveChoice, list[int]]:
        """Return a draft, of at most so many tokens, for each choice for which there is one."""
        ...

    def forget(self, choice: ActiveChoice) -> None:
        """Drop what is kept of a choice."""
        ...


class NgramDrafter:
    """Drafts what followed the same last tokens earlier in prompt and answer (prompt lookup decoding, Saxena 2023)."""

    def __init__(self) -> None:
        self._texts: dict[ActiveChoice, _Text] = {}

    def propose(self, asked: Mapping[ActiveChoice, int]) -> dict[ActiveChoice, list[int]]:
        drafts = {}
        for choice, most in asked.items():
            text = self._texts.get(choice)
            if text is None:
                text = self._texts[choice] = _Text(len(choice.prompt))
                text.add(choice.prompt.tolist())
            text.add(choice.answer[len(text.tokens) - text.num_prompt_tokens :])
            if draft := text.continuation(most):
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
        self._earlier = 0  # where the longest n-gram that ends the text ended before; 0: nowhere

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._earlier, end = 0, len(self.tokens)
            for size in range(min(_LONGEST, end), _SHORTEST - 1, -1):
                ngram = tuple(self.tokens[-size:])
                self._earlier = self._earlier or self._ends.get(ngram, 0)
                self._ends[ngram] = end

    def continuation(self, most: int) -> list[int]:
        """Return what followed there; where that comes to the text's end, it repeats itself."""
        tokens = self.tokens
        start = self._earlier
        period = len(tokens) - start
        return [tokens[start + number % period] for number in range(most)] if start else []


@dataclass(slots=True)
class _Pace:
    """How much is drafted for a choice: after drafts that were right more, after wrong ones less.

    most: tokens of the next draft. pause: steps without one. wrong: drafts in a row of which no token was right.
    """

    most: int
    pause: int = 0
    wrong: int = 0

    def take(self, proposed: int, accepted: int, most: int, on_host: bool) -> None:
        self.wrong = 0 if accepted else self.wrong + 1
        if on_host:
            self.most = min(most, 2 * proposed) if accepted == proposed else max(1, accepted)
        else:
            self.most = most
        # A wrong draft costs a CPU most of a step, and a GPU little.
        self.pause = min((1 << self.wrong) // (2 if on_host else 16), _LONGEST_PAUSE)


class Speculation:
    """The drafts of one engine: how many tokens of which requests, and how many were right.

    num_drafts, num_draft_tokens: that were verified. accepted: by position in the draft, how often it was right.
    failure: why nothing is drafted any more. on_host: False on a GPU, whose step begins late where a draft is looked
    for, as that needs the tokens of the one before: where there was none, some steps go by.
    """

    def __init__(self, drafter: Drafter, num_tokens: int):
        """Draft at most `num_tokens` for a request and step. Raises InputError for a number that is out of range."""
        expect("speculative", num_tokens, 1, MOST_DRAFT_TOKENS, "tokens of a draft")
        self.num_tokens = num_tokens
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted = [0] * num_tokens
        self.failure: str | None = None
        self.on_host = True
        self._pause = 0
        self._drafter = drafter
        self._paces = dict[ActiveChoice, _Pace]()

    def is_due(self, choices: Sequence[ActiveChoice], most_tokens: int) -> bool:
        """Return whether the next step may have drafts of these choices, which need the tokens of this one."""
        paces = (self._paces.get(choice) for choice in choices)
        return (
            self.failure is None
            and not self._pause
            and most_tokens >= 2 * len(choices)
            and any(pace is None or not pace.pause for pace in paces)
        )

    def propose(self, room: Mapping[ActiveChoice, int], most_tokens: int) -> dict[ActiveChoice, list[int]]:
        """Return the drafts of a step in which these choices decode.

        room: tokens behind its next one that a choice may have. most_tokens: of the step, drafts and all; where there
        are many choices, there are no drafts.
        """
        if self.failure is not None:
            return {}
        self._pause = max(0, (missed := self._pause) - 1)
        share = 0 if missed else (most_tokens - len(room)) // len(room)
        asked = {}
        for choice, most in room.items():
            pace = self._paces.setdefault(choice, _Pace(self.num_tokens))
            pace.pause = max(0, (paused := pace.pause) - 1)
            count = min(share, most, pace.most)
            if not paused and count > 0:
                # Of few lengths: each number of tokens in a step is a layout, which has calls of its own to bind.
                asked[choice] = count if count == self.num_tokens else 1 << count.bit_length() - 1
        try:
            drafts = self._drafter.propose(asked) if asked else {}
        except Exception as error:  # libraries' errors share no base class, and no answer is to end for a draft
            self.failure = f"drafts: {' '.join(str(error).split()) or type(error).__name__}; decoding goes on without"
            return {}
        if asked and not drafts and not self.on_host:
            self._pause = _MISSED_PAUSE
        return drafts

    def verified(self, choice: ActiveChoice, proposed: int, accepted: int) -> None:
        """Take how many tokens of a draft were right."""
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        for position in range(accepted):
            self.accepted[position] += 1
        if pace := self._paces.get(choice):
            pace.take(proposed, accepted, self.num_tokens, self.on_host)

    def counts(self) -> list[int]:
        """Return num_drafts, num_draft_tokens, and accepted, by position."""
        return [self.num_drafts, self.num_draft_tokens, *self.accepted]

    def forget(self, choice: ActiveChoice) -> None:
        """Drop what is kept of a choice that has ended, or was swapped out."""
        self._paces.pop(choice, None)
        if self.failure is None:
            self._drafter.forget(choice)
