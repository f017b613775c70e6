"""Drafts by a model: a small one with the same tokenizer, or the first layers of the verifying model.

It samples with the request's own seed, choice and positions, so that where the two models agree it proposes the same
token, at a temperature too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.runtime.active_choice import ActiveChoice
from lockstep.runtime.model import Model
from lockstep.step.advance import Advance
from lockstep.step.logits_pipeline import Sampler
from lockstep.step.sampling import Sampling


@dataclass(slots=True)
class _Draft:
    """The slot of a choice in the draft model, and the tokens in its cache.

    num_confirmed: how many of them are known to be those of the choice.
    """

    slot: int
    tokens: list[int] = field(default_factory=list)
    num_confirmed: int = 0


class ModelDrafter:
    """Drafts by steps of `model`, which has its own slot and KV cache for each choice.

    It computes one chunk of a prompt at each call; the request has no draft until its prompt is done.
    """

    def __init__(self, model: Model):
        self._model = model
        self._drafts: dict[ActiveChoice, _Draft] = {}
        self._free_slots = list(range(model.max_batch_size))

    def propose(self, limits: Mapping[ActiveChoice, int]) -> dict[ActiveChoice, list[int]]:
        model = self._model
        proposed = dict[ActiveChoice, list[int]]()
        unfinished = dict(limits)
        while unfinished:
            advances = []
            choices = []
            for choice, limit in unfinished.items():
                advance = self._next_advance(choice, proposed.get(choice, []), limit)
                if advance is not None:
                    advances.append(advance)
                    choices.append(choice)
            if not advances:
                break
            tokens = model.step_tokens(advances).tolist()
            unfinished = {}
            for choice, token in zip(choices, tokens):
                draft = self._drafts[choice]
                # The draft model has to compute more of the prompt first, or its logits are not finite.
                if len(draft.tokens) < len(choice.prompt) + len(choice.answer) or token < 0:
                    continue
                proposed.setdefault(choice, []).append(token)
                if len(proposed[choice]) < limits[choice]:
                    unfinished[choice] = limits[choice]
        return proposed

    def _next_advance(self, choice: ActiveChoice, proposed: list[int], limit: int) -> Advance | None:
        """Return what the draft model computes next for a choice; None if there is no room for it."""
        model = self._model
        length = len(choice.prompt) + len(choice.answer)
        draft = self._drafts.get(choice)
        if draft is None:
            # A choice without a slot here, or too long for this model, is decoded without drafts.
            if not self._free_slots or length + limit > model.max_seq_len:
                return None
            draft = self._drafts[choice] = _Draft(self._free_slots.pop())
            sampling = choice.request.sampling
            if sampling.temperature and choice.request.choose is None:
                # Only the parameters of draws: a draft without penalties is still often right.
                draws = Sampling(
                    sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=sampling.seed
                )
                model.set_sampling(draft.slot, Sampler(draws, choice=choice.number))
        if proposed:
            tokens = [proposed[-1]]
            start = length + len(proposed) - 1
        else:
            start = self._drop_rejected(choice, draft)
            # One chunk of a prompt at a time, so that the requests of the step do not wait for all of it.
            end = min(length, (start // model.chunk_size + 1) * model.chunk_size)
            tokens = [self._token(choice, position) for position in range(start, end)]
        tables = model.tables
        missing_pages = tables.pages_for(start + len(tokens)) - len(tables[draft.slot])
        if start + len(tokens) > model.max_seq_len or missing_pages > tables.pool.num_available:
            return None
        draft.tokens += tokens
        return Advance(draft.slot, np.array(tokens, np.int64), start)

    def _drop_rejected(self, choice: ActiveChoice, draft: _Draft) -> int:
        """Remove rejected draft tokens from the slot; return the number of tokens left in it."""
        # Not the choice's last token, even if it is in the cache: the logits after it are needed.
        length = min(len(draft.tokens), len(choice.prompt) + len(choice.answer) - 1)
        confirmed = draft.num_confirmed
        while confirmed < length and draft.tokens[confirmed] == self._token(choice, confirmed):
            confirmed += 1
        draft.num_confirmed = confirmed
        del draft.tokens[confirmed:]
        self._model.keep(draft.slot, confirmed)
        return confirmed

    @staticmethod
    def _token(choice: ActiveChoice, position: int) -> int:
        prompt_len = len(choice.prompt)
        if position < prompt_len:
            return int(choice.prompt[position])
        return choice.answer[position - prompt_len]

    def forget(self, choice: ActiveChoice) -> None:
        if draft := self._drafts.pop(choice, None):
            self._model.release(draft.slot)
            self._free_slots.append(draft.slot)
