"""Answers with and without speculation: where drafts are verified, tokens and logits must be the same bits.

Drafts are the tokens of plain decoding with planted errors, so that drafts of all lengths are accepted and rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lockstep.runtime import Engine, Model, Request, Sampling
from lockstep.runtime.active_choice import ActiveChoice
from lockstep.runtime.drafts import Speculation

_DRAFT_TOKENS = 4
_WRONG_EACH = 3
_TEMPERATURE = 4.0  # so that the noise decides most tokens


class RecordedDrafter:
    """Drafts recorded answers, by request and choice, in which every `wrong_each`th token is another one."""

    def __init__(self, answers: Mapping[tuple[int, int], Sequence[int]], wrong_each: int):
        self._answers = answers
        self._wrong_each = wrong_each

    def propose(self, limits: Mapping[ActiveChoice, int]) -> dict[ActiveChoice, list[int]]:
        drafts = {choice: self._draft(choice, limit) for choice, limit in limits.items()}
        return {choice: draft for choice, draft in drafts.items() if draft}

    def _draft(self, choice: ActiveChoice, limit: int) -> list[int]:
        first = len(choice.answer)
        draft = list(self._answers[choice.index, choice.number][first : first + limit])
        for place in range(-first % self._wrong_each, len(draft), self._wrong_each):
            draft[place] = abs(draft[place] - 1)
        return draft

    def forget(self, choice: ActiveChoice) -> None:
        """Do nothing: the answers are needed to the end."""


def difference(model: Model, request: Request, max_num_tokens: int) -> str | None:
    """Say where an answer with drafts differs from the plain one; None where not. request: chooses by logits."""
    if not model.verifies_drafts:
        return None
    drawn = Request(
        request.prompt_ids, request.max_new_tokens, sampling=Sampling(_TEMPERATURE, seed=1), adapter=request.adapter
    )
    requests = {"greedy": request, "drawn": drawn}
    plain = _answers(Engine(model, None, max_num_tokens, prefix_caching=False), requests.values())
    recorded = {}
    for key, answer in plain.items():
        recorded[key] = [token for token, _ in answer if token >= 0]
    speculation = Speculation(RecordedDrafter(recorded, _WRONG_EACH), _DRAFT_TOKENS)
    engine = Engine(model, None, max_num_tokens, prefix_caching=False, speculation=speculation)
    drafted = _answers(engine, requests.values())
    for (key, expected), how in zip(plain.items(), requests):
        answer = drafted.get(key, [])
        if answer != expected:
            differing = (step for step, pair in enumerate(zip(expected, answer)) if pair[0] != pair[1])
            step = next(differing, min(len(expected), len(answer)))
            return f"step {step}, with drafts, {how}: {_differing(expected[step:], answer[step:])}"
    return None


def _answers(engine: Engine, requests: Iterable[Request]) -> dict[tuple[int, int], list[tuple[int, bytes]]]:
    """Return each answer's tokens, with the bits of the logits that the host chose from."""
    answers: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    for token in engine.run(requests):
        logits = b""
        if token.logits is not None:
            logits = np.ascontiguousarray(token.logits).tobytes()
        answers.setdefault((token.request, token.choice), []).append((token.token, logits))
    return answers


def _differing(plain: Sequence[tuple[int, bytes]], drafted: Sequence[tuple[int, bytes]]) -> str:
    expected: int | str = next((token for token, _ in plain), "none")
    actual: int | str = next((token for token, _ in drafted), "none")
    if expected == actual:
        return "expected the logits of plain decoding to the bit, found others"
    return f"expected token {expected} as without, found {actual}"
