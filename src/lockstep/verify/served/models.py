"""Check a server of several models: each answers its golden prompts as golden did, alone and among other requests.

In: a server's socket, and the golden check of each model. Out: the first answer that differs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import CheckError
from lockstep.targets import Results, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.golden.prompts import Prompt, first_difference, read_golden, read_reference, short
from lockstep.verify.served.client import answers

_MAX_IN_FLIGHT = 64  # requests


@dataclass(frozen=True)
class GoldenAnswers:
    """The golden prompts of a model. name: in requests. answers: golden's token ids. decode: its tokenizer's."""

    name: str
    prompts: Sequence[Prompt]
    answers: Sequence[Sequence[int]]
    max_new_tokens: int
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def read(
        cls, name: str, target: Target, tree: Results, tolerance: Tolerances, decode: Callable[[Sequence[int]], str]
    ) -> GoldenAnswers:
        """Read the golden check of a target. Raises InputError where it was not run."""
        path = tree.golden(target.model, target.precision, target.layers, target.backend)
        prompts, _, reference = read_reference(
            tree.reference_of(target.model, target.precision, target.layers), (), tolerance
        )
        answers = [prompt.tokens for prompt in read_golden(path, target, len(prompts)).prompts]
        return cls(name, prompts, answers, reference.max_new_tokens, decode)


async def check_models(socket: Path, models: Sequence[GoldenAnswers], is_batch_invariant: bool) -> None:
    """Send the prompts of each model one by one, then those of all models together, shuffled.

    is_batch_invariant: the answers must then be golden's, even at near-ties. Raises CheckError for one that differs.
    """
    cases = [(model, number) for model in models for number in range(len(model.prompts))]
    for model, number in cases:
        await _check(socket, model, number, "alone", is_batch_invariant)
    # A model makes room for another one, and comes back, while requests of both wait.
    cases *= 2
    random.Random(0).shuffle(cases)
    places = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def check(model: GoldenAnswers, number: int) -> None:
        async with places:
            await _check(socket, model, number, "among requests of all models", is_batch_invariant)

    await asyncio.gather(*(check(model, number) for model, number in cases))


async def _check(socket: Path, model: GoldenAnswers, number: int, how: str, is_exact: bool) -> None:
    prompt = model.prompts[number]
    expected = model.answers[number]
    body = {"model": model.name, "prompt": prompt.text, "max_tokens": model.max_new_tokens, "temperature": 0}
    (answer,), _ = await answers(socket, "/v1/completions", body, stream=False)
    difference, fault = first_difference(prompt, expected, answer.token_ids, prompt.logits, model.decode)
    if difference is None:
        return
    if is_exact:
        fault = difference.step, f"expected token {difference.reference}, found {difference.found}"
    elif list(expected[: difference.step]) != list(prompt.tokens[: difference.step]):
        return  # golden took another token at a near-tie before: the reference has no logits after it
    if fault is not None:
        step, message = fault
        raise CheckError(f"{model.name}: prompt {short(prompt.text)!r}, {how}: step {step}: {message}")
