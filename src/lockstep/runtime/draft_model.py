"""Drafts by a model: a small one of the same tokenizer, or the first layers of the one that verifies.

It draws with the request's own seed, choice and positions, so that at a temperature too its tokens are those of the
model that verifies where the two agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.runtime.active_choice import ActiveChoice
from lockstep.runtime.model import Model
from lockstep.step.advance import Advance
from lockstep.step.sampling import Sampling


@dataclass(slots=True)
class _Draft:
    """The slot of a choice in the draft model, and the tokens that it holds; known: those that the choice has too."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    known: int = 0


class ModelDrafter:
    """Drafts by steps of `model`, which has a slot and KV cache of its own for each choice.

    A prompt is computed there chunk by chunk, in steps in which its request has no draft yet.
    """

    def __init__(self, model: Model):
        self._model = model
        self._drafts: dict[ActiveChoice, _Draft] = {}
        self._free = list(range(model.max_batch_size))

    def propose(self, asked: Mapping[ActiveChoice, int]) -> dict[ActiveChoice, list[int]]:
        model = self._model
        found = dict[ActiveChoice, list[int]]()
        left = dict(asked)
        while left:
            advances = []
            choices = []
            for choice, most in left.items():
                advance = self._next(choice, found.get(choice, []), most)
                if advance is not None:
                    advances.append(advance)
                    choices.append(choice)
            if not advances:
                break
            tokens = model.step_tokens(advances).tolist()
            left = {}
            for choice, token in zip(choices, tokens):
                draft = self._drafts[choice]
                if len(draft.tokens) < len(choice.prompt) + len(choice.answer) or token < 0:
                    continue  # more of its text is to be computed first
                found.setdefault(choice, []).append(token)
                if len(found[choice]) < asked[choice]:
                    left[choice] = asked[choice]
        return found

    def _next(self, choice: ActiveChoice, found: list[int], most: int) -> Advance | None:
        """Return what the draft model computes next for a choice; None where there is no room for it."""
        model = self._model
        length = len(choice.prompt) + len(choice.answer)
        draft = self._drafts.get(choice)
        if draft is None:
            if not self._free or length + most > model.max_seq_len:
                return None
            draft = self._drafts[choice] = _Draft(self._free.pop())
            sampling = choice.request.sampling
            if sampling.temperature and choice.request.choose is None:
                model.set_sampling(draft.slot, _drawn(sampling), choice.number)
        if found:
            tokens = [found[-1]]
            start = length + len(found) - 1
        else:
            start = self._held(choice, draft)
            end = min(length, (start // model.chunk_size + 1) * model.chunk_size)
            tokens = [self._token(choice, at) for at in range(start, end)]
        tables = model.tables
        more = tables.pages_for(start + len(tokens)) - len(tables[draft.slot])
        if start + len(tokens) > model.max_seq_len or more > tables.pool.num_available:
            return None
        draft.tokens += tokens
        return Advance(draft.slot, np.array(tokens, np.int64), start)

    def _held(self, choice: ActiveChoice, draft: _Draft) -> int:
        """Forget what the slot holds of drafts that were wrong; return the tokens that are left."""
        length = min(len(draft.tokens), len(choice.prompt) + len(choice.answer) - 1)
        while draft.known < length and draft.tokens[draft.known] == self._token(choice, draft.known):
            draft.known += 1
        del draft.tokens[draft.known :]
        self._model.keep(draft.slot, draft.known)
        return draft.known

    @staticmethod
    def _token(choice: ActiveChoice, at: int) -> int:
        count = len(choice.prompt)
        return int(choice.prompt[at]) if at < count else choice.answer[at - count]

    def forget(self, choice: ActiveChoice) -> None:
        if draft := self._drafts.pop(choice, None):
            self._model.release(draft.slot)
            self._free.append(draft.slot)


def _drawn(sampling: Sampling) -> Sampling:
    """Return what of a sampling needs no logits: a draft without penalties is right more often than none."""
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=sampling.seed)
