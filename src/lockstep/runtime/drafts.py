"""Speculative decoding: tokens of running requests in, draft tokens that may follow them out.

The model verifies a draft in one step (`Advance.verifies`). Answers consist of the tokens that the model itself
chooses, so drafts affect only how many steps an answer takes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lockstep.runtime.active_choice import ActiveChoice, ModelRow
from lockstep.runtime.checks import expect
from lockstep.runtime.model import Model
from lockstep.runtime.request import Token
from lockstep.runtime.scheduler import Scheduled, SchedulerOutput

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


class VerifiedDraft(NamedTuple):
    """A draft that a step has computed; rows: the model's row after each of its tokens."""

    choice: ActiveChoice
    tokens: Sequence[int]
    rows: Sequence[ModelRow]


class Speculation:
    """Adds draft tokens to the steps of one engine, and keeps those that its model chooses itself.

    num_drafts, num_draft_tokens: verified so far. accepted: accepted tokens, by position in the draft. failure: why
    drafting has stopped.
    """

    def __init__(self, drafter: Drafter, num_tokens: int):
        """Draft at most `num_tokens` for a request and step. Raises InputError for a number out of range."""
        expect("speculative", num_tokens, 1, MAX_DRAFT_TOKENS, "tokens of a draft")
        self.num_tokens = num_tokens
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted = [0] * num_tokens
        self.failure: str | None = None
        self._drafter = drafter
        self._paces = dict[ActiveChoice, _Pace]()
        self._pause = 0  # steps without a search for drafts
        self._model: Model
        self._on_host = True
        self._max_tokens = 0  # of a step with drafts

    def attach(self, model: Model, max_num_tokens: int) -> None:
        """Draft for the engine of a model, in steps of up to `max_num_tokens`.

        Raises InputError for a model that cannot verify drafts.
        """
        model.check_verifies_drafts()
        self._model = model
        self._on_host = model.engines.backend.on_host
        self._max_tokens = min(model.max_verify_tokens, max_num_tokens)

    def may_follow(self, step: SchedulerOutput, choices: Mapping[Scheduled, ActiveChoice]) -> bool:
        """Return whether the next step may have drafts, which continue the tokens of this one."""
        if step.drafts:
            return True
        if self.failure is not None or self._pause or self._max_tokens < 2 * len(step.shares):
            return False
        if any(scheduled.in_prompt for scheduled, _ in step.shares):
            return False
        paces = (self._paces.get(choices[scheduled]) for scheduled, _ in step.shares)
        return any(pace is None or not pace.pause for pace in paces)

    def add_drafts(self, step: SchedulerOutput, choices: Mapping[Scheduled, ActiveChoice]) -> None:
        """Add drafts to a step in which all requests decode."""
        if self.failure is not None or any(scheduled.in_prompt for scheduled, _ in step.shares):
            return
        room = {}
        for scheduled, _ in step.shares:
            choice = choices[scheduled]
            if not choice.replayed:
                # After the token that is computed anyway: up to the answer's end, and within the slot's memory.
                length = scheduled.num_computed + 1
                room[choice] = min(scheduled.max_tokens - length, self._model.room(length))
        if room:
            share = (self._max_tokens - len(step.shares)) // len(room)
            drafts = self._propose(self._limits(room, share))
            step.drafts = {choice.scheduled: draft for choice, draft in drafts.items()}

    def _limits(self, room: Mapping[ActiveChoice, int], share: int) -> dict[ActiveChoice, int]:
        """Return how many tokens to draft for each choice that is not pausing; share: a choice's part of the step."""
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
        return limits

    def _propose(self, limits: Mapping[ActiveChoice, int]) -> dict[ActiveChoice, list[int]]:
        if not limits:
            return {}
        try:
            drafts = self._drafter.propose(limits)
        except Exception as error:
            # No answer may fail because of a draft, and the errors of libraries share no base class.
            self.failure = f"drafts: {' '.join(str(error).split()) or type(error).__name__}; decoding goes on without"
            return {}
        if not drafts and not self._on_host:
            # Looking for drafts delays the launch of a GPU's step until the tokens of the one before are known.
            self._pause = _MISSED_PAUSE
        return drafts

    def verify(
        self,
        drafts: Sequence[VerifiedDraft],
        choices: Mapping[Scheduled, ActiveChoice],
        choose: Callable[[Sequence[tuple[ActiveChoice, ModelRow]]], list[Token]],
    ) -> list[Token]:
        """Choose the token after each draft token, for as long as the draft equals the chosen tokens.

        choices: those that have not ended. choose: appends the next token of each choice to its answer. Returns the
        tokens, one for each accepted draft token. Afterwards the cache holds what plain decoding would have put there.
        """
        tokens: list[Token] = []
        accepted = Counter[ActiveChoice]()
        drafts = [draft for draft in drafts if draft.choice.scheduled in choices]
        # One round for each position of the drafts, over all choices whose drafts were right so far: choosing many
        # tokens at once is much faster than one at a time.
        continued = drafts
        for position in itertools.count():
            continued = [draft for draft in continued if _is_right(draft, position, choices)]
            if not continued:
                break
            for draft in continued:
                draft.choice.scheduled.num_computed += 1
                accepted[draft.choice] += 1
                self.accepted[position] += 1
            tokens += choose([(draft.choice, draft.rows[position]) for draft in continued])
        for choice, draft_tokens, _ in drafts:
            self.num_drafts += 1
            self.num_draft_tokens += len(draft_tokens)
            if pace := self._paces.get(choice):
                pace.update(len(draft_tokens), accepted[choice], self.num_tokens, self._on_host)
            if choice.scheduled in choices:
                self._model.keep(choice.scheduled.slot, choice.scheduled.num_computed)
        return tokens

    def counts(self) -> list[int]:
        """Return num_drafts, num_draft_tokens, and accepted, by position."""
        return [self.num_drafts, self.num_draft_tokens, *self.accepted]

    def forget(self, choice: ActiveChoice) -> None:
        """Drop the state of a choice that has ended or was swapped out."""
        self._paces.pop(choice, None)
        if self.failure is None:
            self._drafter.forget(choice)


def _is_right(draft: VerifiedDraft, position: int, choices: Mapping[Scheduled, ActiveChoice]) -> bool:
    """Return whether the token that was chosen last is the draft's at `position`, and its choice goes on."""
    choice = draft.choice
    return position < len(draft.tokens) and choice.scheduled in choices and choice.answer[-1] == draft.tokens[position]
