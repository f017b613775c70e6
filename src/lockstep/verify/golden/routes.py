"""The golden check of a model that chooses inside: what its logits must be along the engines' choices.

Where two scores are nearer to each other than rounding, an engine may choose otherwise than transformers, and its
logits jump. That is no error, and no noise: a request is judged by the logits that follow from the choices that were
made in its run. A choice that rounding does not explain is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from lockstep.artifacts.reports import GoldenChoices
from lockstep.runtime import Model
from lockstep.verify.golden.forced import Forced
from lockstep.verify.golden.prompts import Prompt
from lockstep.verify.routing.along import Along, Router
from lockstep.verify.walk import Tokens


class Routes:
    """The requests of a check, followed along the engines' choices. wrong: what is wrong with a block."""

    def __init__(self, router: Router, reference_rows: Mapping[tuple[int, ...], np.ndarray]):
        """known: the reference's logits by the tokens before them; they count up to the first choice that is tied."""
        self._router = router
        self._recorder = router.recorder()
        self._known = reference_rows
        self._requests = self._tied = 0
        self.wrong: list[str] = []

    @contextmanager
    def observed(self, model: Model) -> Iterator[None]:
        self._recorder.clear()
        with model.observed(self._recorder):
            yield

    def steps(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> list[np.ndarray]:
        """Return the logits that each step of a request must have come to."""
        ids = [*prompt_ids, *tokens[:-1]]
        along = self._along(ids, len(prompt_ids))
        return [self._row(ids, count, along) for count in range(len(prompt_ids), len(ids) + 1)]

    def forced(self, request: Forced) -> dict[int, np.ndarray]:
        """Return the logits that a request must have come to, by number of tokens."""
        ids = request.tokens[: request.ends[-1]].tolist()
        along = self._along(ids, len(ids))
        return {
            count: row if along.first is None or count <= along.first else along.logits[count - 1]
            for count, row in request.expected.items()
            if count <= len(ids)
        }

    def wrong_block(self, ids: Sequence[int]) -> str | None:
        """Say which block of a request is wrong in the run before; None where none is."""
        wrong = self._router.judge(self._recorder.take(ids)).wrong
        if wrong:
            self.wrong.append(wrong)
        return wrong

    def report(self) -> GoldenChoices:
        return GoldenChoices(self._requests, self._tied)

    def _along(self, ids: Sequence[int], num_prompt: int) -> Along:
        tokens = Tokens(np.array(ids, np.int64), num_prompt)
        along = self._router.judge(self._recorder.take(ids))
        along.logits = self._router.logits(tokens, along)
        if along.wrong:
            self.wrong.append(along.wrong)
        self._requests += 1
        self._tied += along.tied
        return along

    def _row(self, ids: Sequence[int], count: int, along: Along) -> np.ndarray:
        reference_row = self._known.get(tuple(ids[:count]))
        is_free = along.first is None or count <= along.first
        return reference_row if reference_row is not None and is_free else along.logits[count - 1]


def known_rows(prompts: Sequence[Prompt]) -> dict[tuple[int, ...], np.ndarray]:
    """Return the reference's logits by the tokens before them."""
    rows: dict[tuple[int, ...], np.ndarray] = {}
    for prompt in prompts:
        for step, row in enumerate(prompt.logits):
            ids = (*prompt.prompt_ids, *prompt.tokens[:step])
            rows[ids] = row
    return rows
