"""A model on the prompts of a reference: what it decodes, and what of that is wrong. Needs no torch.

In: an engine set with its assembly and weights, and prompts of a reference. Out: tokens and logits in each way of
running, their errors, and a line for each thing that is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.artifacts.reports import TokenDifference
from lockstep.errors import CheckError, InputError
from lockstep.runtime import Decoding, Model, Request, Speed
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.targets import Limits, Target
from lockstep.verify.golden.forced import Errors
from lockstep.verify.golden.prompts import Decoded, Prompt, first_difference
from lockstep.verify.golden.text import new_text


def open_model(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    reference_json: Path,
    layers: int | str,
    target: Target,
    limits: Limits,
    threads: int | None,
    adapters_json: Path | None = None,
) -> Model:
    """Open the model of a target. Raises InputError for a reference of other layers, and as `Model.open` does."""
    if layers != target.layers:
        raise InputError(
            f"{reference_json}: layers: expected {target.layers}, found {layers}; make the reference of this target"
        )
    return Model.open(
        engines_json,
        assembly_json,
        weights_json,
        target.layers,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        threads=threads,
        adapters_json=adapters_json,
    )


class DecodingCheck:
    """One run of a check. failures: lines. wrong: the texts of the prompts that they are of."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        max_num_tokens: int,
    ):
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self.max_new_tokens, self.stop_ids, self.max_num_tokens = max_new_tokens, frozenset(stop_ids), max_num_tokens
        self.failures: list[str] = []
        self.wrong: set[str] = set()

    def fail(self, prompt: Prompt, what: str) -> None:
        self.wrong.add(prompt.text)
        self.failures.append(f"{prompt}, {what}")

    def along(self, prompt: Prompt) -> Request:
        tokens = iter(prompt.tokens)
        return Request(
            prompt.prompt_ids, len(prompt.tokens), lambda logits: next(tokens), adapter=prompt.adapter or None
        )

    def freely(self, prompt: Prompt, most: int | None = None) -> Request:
        """Return a request that chooses by the logits of each step, whatever they are. most: tokens, if fewer."""
        count = min(self.max_new_tokens, most or self.max_new_tokens)
        return Request(
            prompt.prompt_ids, count, lambda logits: int(logits.argmax()), self.stop_ids, adapter=prompt.adapter or None
        )

    def decode(self, requests: Sequence[Request], prefix_caching: bool = False) -> tuple[list[Decoded], Speed]:
        """Run requests in the loop of `lockstep generate`; keep the logits of each step."""
        decoding = Decoding(self.model, requests, None, self.max_num_tokens, prefix_caching)
        decoded = [Decoded() for _ in requests]
        for step in decoding:
            assert step.logits is not None  # each request chooses by itself
            decoded[step.request].tokens.append(step.token)
            decoded[step.request].logits.append(step.logits)
        return decoded, decoding.speed

    def generate(
        self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], stop_ids: frozenset[int]
    ) -> list[tuple[TokenDifference, ...]]:
        """Decode with tokens chosen by the model; return for each prompt the first that differs."""
        requests = [
            Request(prompt.prompt_ids, self.max_new_tokens, stop_ids=stop_ids, adapter=prompt.adapter or None)
            for prompt in prompts
        ]
        generated: list[list[int]] = [[] for _ in prompts]
        try:
            for step in Decoding(self.model, requests, max_num_tokens=self.max_num_tokens):
                generated[step.request].append(step.token)
        except CheckError as error:
            self.failures.append(f"generating: {error}")
        return [
            self.first_difference(prompt, "as lockstep generate decodes", expected, found)
            for prompt, expected, found in zip(prompts, tokens, generated)
        ]

    def logit_error(
        self, prompt: Prompt, how: str, found: Sequence[np.ndarray], expected: Sequence[np.ndarray] | None = None
    ) -> float | None:
        """Return the largest error of the steps' logits. expected: the reference's by default."""
        errors = Errors(prompt.bounds)
        for count, right, row in zip(prompt.counts, prompt.logits if expected is None else expected, found):
            errors.add(count, right, row)
        if wrong := errors.wrong():
            self.fail(prompt, f"step {wrong[0] - prompt.count(0)}, {how}: {wrong[1]}")
        return errors.worst

    def same_bits(self, prompt: Prompt, how: str, expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> bool:
        """Return whether logits are the same bits, where the engines are batch invariant."""
        if not self.model.engines.batch_invariant:
            return True
        differing = sum(not np.array_equal(*pair) for pair in zip(expected, found)) + abs(len(expected) - len(found))
        if differing:
            steps = f"{differing} of {len(expected)} steps"
            self.fail(prompt, f"{how}: expected the bits of all logits, found others in {steps}")
        return not differing

    def first_difference(
        self, prompt: Prompt, how: str, expected: Sequence[int], found: Sequence[int]
    ) -> tuple[TokenDifference, ...]:
        """Return the first differing token, one or none."""
        difference, wrong = first_difference(prompt, expected, found, self.tokenizer.decode)
        if wrong is not None:
            step, what = wrong
            self.fail(prompt, f"step {step}, {how}: {what}")
        return () if difference is None else (difference,)

    def text(self, prompt: Prompt, tokens: Sequence[int]) -> str:
        """Return what `tokens` add to a prompt; where that is not the text of the config, it goes to `failures`."""
        text = new_text(self.tokenizer.decode, prompt.prompt_ids, tokens)
        if prompt.expected is not None and text != prompt.expected:
            reference = f"(the reference says {prompt.new_text!r})"
            self.fail(prompt, f"text: expected {prompt.expected!r} as in the config, found {text!r} {reference}")
        return text
