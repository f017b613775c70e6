"""The golden check of a model with a router: the expected logits, given the engines' choices.

Where two scores differ by less than rounding, an engine may choose other experts than transformers, and its logits
jump. That is no error, and no noise: a request is compared with the logits that follow from the choices made in its
run. A choice that rounding does not explain is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from lockstep.artifacts.reports import GoldenChoices
from lockstep.runtime import Model
from lockstep.verify.golden.forced import Forced
from lockstep.verify.golden.prompts import Long, Prompt
from lockstep.verify.routing.router import RoutedRequest, Router
from lockstep.verify.walk import Tokens


class Routes:
    """The requests of a check, judged with the engines' choices of experts. wrong: a line for each faulty block."""

    def __init__(self, router: Router, reference_rows: Mapping[tuple[int, ...], np.ndarray]):
        """reference_rows: {tokens: the reference's logits after them}, right up to the first near-tie."""
        self._router = router
        self._recorder = router.recorder()
        self._reference_rows = reference_rows
        self._requests = 0
        self._tied = 0
        self.wrong: list[str] = []

    @contextmanager
    def observed(self, model: Model) -> Iterator[None]:
        self._recorder.clear()
        with model.observed(self._recorder):
            yield

    def steps(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> list[np.ndarray]:
        ids = [*prompt_ids, *tokens[:-1]]
        routed = self._follow(ids, len(prompt_ids))
        return [self._row(ids, count, routed) for count in range(len(prompt_ids), len(ids) + 1)]

    def forced(self, request: Forced) -> dict[int, np.ndarray]:
        ids = request.tokens[: request.ends[-1]].tolist()
        routed = self._follow(ids, len(ids))
        return {count: self._row(ids, count, routed) for count in request.expected if count <= len(ids)}

    def wrong_block(self, ids: Sequence[int]) -> str | None:
        """Return the error of a request's blocks in the last run; None without one."""
        wrong = self._router.judge(self._recorder.take(ids)).wrong
        if wrong:
            self.wrong.append(wrong)
        return wrong

    def report(self) -> GoldenChoices:
        return GoldenChoices(self._requests, self._tied)

    def _follow(self, ids: Sequence[int], num_prompt: int) -> RoutedRequest:
        tokens = Tokens(np.array(ids, np.int64), num_prompt)
        routed = self._router.judge(self._recorder.take(ids))
        routed.logits = self._router.logits(tokens, routed)
        if routed.wrong:
            self.wrong.append(routed.wrong)
        self._requests += 1
        self._tied += routed.tied
        return routed

    def _row(self, ids: Sequence[int], count: int, routed: RoutedRequest) -> np.ndarray:
        reference_row = self._reference_rows.get(tuple(ids[:count]))
        if reference_row is None or not routed.is_untied(count):
            return routed.logits[count - 1]
        return reference_row


def known_rows(prompts: Sequence[Prompt], long: Long | None) -> dict[tuple[int, ...], np.ndarray]:
    """Return the reference's logits by the tokens before them. prompts: the long one too."""
    rows: dict[tuple[int, ...], np.ndarray] = {}
    for prompt in prompts:
        for step, row in enumerate(prompt.logits):
            ids = (*prompt.prompt_ids, *prompt.tokens[:step])
            rows[ids] = row
    if long is not None:
        rows |= {tuple(long.prompt.prompt_ids[:count]): row for count, row in long.logits.items()}
    return rows
