"""Decode the prompts of a reference with a model, and compare. Needs no torch.

In: an engine set with its assembly and weights, and prompts of a reference. Out: tokens and logits in each way of
running, and a line for each error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.artifacts.reports import PositionError, Report, TokenDifference
from lockstep.errors import CheckError, InputError
from lockstep.progress import steps
from lockstep.runtime import Decoding, Model, ModelOptions, Request, Speed
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.targets import Limits, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.golden.forced import Errors, Forced, force, keep_largest
from lockstep.verify.golden.prompts import Decoded, Prompt, first_difference, read_reference
from lockstep.verify.golden.text import new_text
from lockstep.verify.metrics import finish

if TYPE_CHECKING:
    from lockstep.verify.golden.routes import Routes


@dataclass(eq=False)
class DecodingCheck:
    """One run of a check. Raises InputError for inputs that do not fit together or prompts that exceed the limits.

    expected: for each prompt the text that must follow it, or None. failures: lines. wrong: `id` of each prompt that
    one of them is of.
    """

    assembly_json: Path
    weights_json: Path
    engines_json: Path
    reference_json: Path
    target: Target
    tolerance: Tolerances
    limits: Limits
    expected: Sequence[str | None]
    threads: int | None
    adapters_json: Path | None = None

    def __post_init__(self) -> None:
        self.prompts, self.long, self.reference = read_reference(self.reference_json, self.expected, self.tolerance)
        if self.reference.layers != self.target.layers:
            raise InputError(
                f"{self.reference_json}: layers: expected {self.target.layers}, found {self.reference.layers}; make "
                "the reference of this target"
            )
        self.max_new_tokens = self.reference.max_new_tokens
        self.stop_ids = frozenset(self.reference.eos_token_ids)
        self.max_num_tokens = self.limits.max_num_tokens
        self._check_limits(self.limits)
        self.model = Model.open(
            self.engines_json,
            self.assembly_json,
            self.weights_json,
            self.target.layers,
            ModelOptions(
                max_batch_size=self.limits.max_batch_size,
                max_seq_len=self.limits.max_seq_len,
                max_num_tokens=self.max_num_tokens,
                threads=self.threads,
                adapters_json=self.adapters_json,
            ),
        )
        vocab_size = self.prompts[0].logits.shape[1]
        if vocab_size != self.model.vocab_size:
            raise InputError(
                f"{self.reference_json}: expected logits of {self.model.vocab_size} tokens as in "
                f"{self.assembly_json}, found {vocab_size}; make the reference again"
            )
        self.tokenizer = Tokenizer.open(self.assembly_json)
        self.failures: list[str] = []
        self.wrong: set[int] = set()
        self.positions: dict[int, PositionError] = {}
        self.routes: Routes | None = None  # of requests that are judged along the engines' own choices

    @property
    def all_prompts(self) -> list[Prompt]:
        """The prompts of the config, and the long one last where there is one."""
        if self.long is None:
            return self.prompts
        return [*self.prompts, self.long.prompt]

    def _check_limits(self, limits: Limits) -> None:
        for prompt in self.all_prompts:
            count = len(prompt.prompt_ids)
            if count > limits.max_input_len and not (self.long and prompt is self.long.prompt):
                raise InputError(
                    f"golden {prompt}: expected at most {limits.max_input_len} tokens (limits.max_input_len), found "
                    f"{count}; shorten it or raise the limit"
                )
            if count + self.max_new_tokens > limits.max_seq_len:
                raise InputError(
                    f"golden {prompt}: expected prompt and answer within {limits.max_seq_len} tokens "
                    f"(limits.max_seq_len), found {count} + {self.max_new_tokens}; shorten it, lower max_new_tokens or "
                    "raise the limit, and make the reference again"
                )

    def finish(self, out: Path, report: Report) -> Path:
        """Write the report. Raises CheckError for the first thing wrong."""
        return finish(out, report, next(iter(self.failures), None))

    def fail(self, prompt: Prompt, what: str) -> None:
        self.wrong.add(id(prompt))
        self.failures.append(f"{prompt}, {what}")

    def teacher_forced(self, prompt: Prompt) -> Request:
        tokens = iter(prompt.tokens)
        return Request(
            prompt.prompt_ids, len(prompt.tokens), lambda logits: next(tokens), adapter=prompt.adapter or None
        )

    def free_running(self, prompt: Prompt, limit: int | None = None) -> Request:
        """Return a request that decodes greedily on the host. limit: of new tokens, below the reference's."""
        count = min(self.max_new_tokens, limit or self.max_new_tokens)
        return Request(
            prompt.prompt_ids, count, lambda logits: int(logits.argmax()), self.stop_ids, adapter=prompt.adapter or None
        )

    def decode(self, requests: Sequence[Request]) -> tuple[list[Decoded], Speed]:
        """Run requests in the loop of `lockstep generate`; keep the logits of each step."""
        decoding = Decoding(self.model, requests, None, self.max_num_tokens)
        decoded = [Decoded() for _ in requests]
        with self._observed():
            for step in steps(decoding, "decode", "tokens", sum(request.max_new_tokens for request in requests)):
                assert step.logits is not None  # each request chooses by itself
                decoded[step.request].tokens.append(step.token)
                decoded[step.request].logits.append(step.logits)
        for request, answer in zip(requests, decoded):
            answer.expected = self._followed(request, answer.tokens)
        return decoded, decoding.speed

    def _observed(self) -> AbstractContextManager[None]:
        """Record the inputs of blocks with a router, where requests are judged along the engines' choices."""
        if self.routes is None:
            return contextlib.nullcontext()
        return self.routes.observed(self.model)

    def _followed(self, request: Request, tokens: Sequence[int]) -> Sequence[np.ndarray] | None:
        """Return the logits of each step along the engines' choices in the last run; None where none are followed."""
        if self.routes is None:
            return None
        return self.routes.steps([*map(int, request.prompt_ids)], tokens)

    def force(self, requests: Sequence[Forced], pauses: bool = False) -> list[Errors]:
        """Run teacher-forced requests, and compare their logits with those of `_followed`, or the reference's."""
        follow = None
        if self.routes:
            follow = self.routes.forced
        with self._observed():
            errors = force(self.model, requests, self.max_num_tokens, pauses, follow)
        for of_request in errors:
            keep_largest(self.positions, of_request.positions)
        return errors

    def generate(
        self, prompts: Sequence[Prompt], expected: Sequence[Prompt | Decoded], stop_ids: frozenset[int]
    ) -> list[tuple[TokenDifference, ...]]:
        """Decode with tokens chosen by the model; return for each prompt the first that differs."""
        requests = [
            Request(prompt.prompt_ids, self.max_new_tokens, stop_ids=stop_ids, adapter=prompt.adapter or None)
            for prompt in prompts
        ]
        generated = [Decoded() for _ in prompts]
        try:
            with self._observed():
                for step in Decoding(self.model, requests, max_num_tokens=self.max_num_tokens):
                    generated[step.request].tokens.append(step.token)
        except CheckError as error:
            self.failures.append(f"generating: {error}")
        for request, answer in zip(requests, generated):
            answer.expected = self._followed(request, answer.tokens)
        differences = []
        for prompt, right, answer in zip(prompts, expected, generated):
            differences.append(self.first_difference(prompt, "as lockstep generate decodes", right, answer))
        return differences

    def logit_error(
        self, prompt: Prompt, how: str, decoded: Decoded, other_logits: Sequence[np.ndarray] | None = None
    ) -> float | None:
        """Return the largest error of the steps' logits. other_logits: another run's, instead of the reference's.

        A run that is judged along the engines' choices has its own expected logits instead of either.
        """
        errors = Errors(prompt.bounds)
        expected: Sequence[np.ndarray] | np.ndarray = prompt.logits
        if other_logits is not None:
            expected = other_logits
        if decoded.expected is not None:
            expected = decoded.expected[: len(expected)]
        for count, right, row in zip(prompt.counts, expected, decoded.logits):
            errors.add(count, right, row)
        if other_logits is None:
            keep_largest(self.positions, errors.positions)
        if wrong := errors.wrong():
            self.fail(prompt, f"step {wrong[0] - prompt.count(0)}, {how}: {wrong[1]}")
        return errors.worst

    def same_bits(self, prompt: Prompt, how: str, expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> bool:
        """Return whether logits are the same bits, where the engines are batch invariant."""
        if not self.model.engines.batch_invariant:
            return True
        differing = sum(not np.array_equal(*pair) for pair in zip(expected, actual)) + abs(len(expected) - len(actual))
        if differing:
            steps = f"{differing} of {len(expected)} steps"
            self.fail(prompt, f"{how}: expected the bits of all logits, found others in {steps}")
        return not differing

    def first_difference(
        self, prompt: Prompt, how: str, expected: Prompt | Decoded, decoded: Decoded
    ) -> tuple[TokenDifference, ...]:
        """Return the first differing token, one or none. expected: the reference, or another run."""
        logits: Sequence[np.ndarray] | np.ndarray = expected.logits
        if decoded.expected is not None:
            logits = decoded.expected
        difference, wrong = first_difference(prompt, expected.tokens, decoded.tokens, logits, self.tokenizer.decode)
        if wrong is not None:
            step, what = wrong
            self.fail(prompt, f"step {step}, {how}: {what}")
        if difference is None:
            return ()
        return (difference,)

    def compare_runs(
        self, prompt: Prompt, how: str, batch: Decoded, other: Decoded
    ) -> tuple[tuple[TokenDifference, ...], float | None]:
        """Return the first differing token of another way of running, and the largest error of logits up to there."""
        how = f"{how} instead of in the batch"
        differences = self.first_difference(prompt, how, batch, other)
        # After a differing token the histories differ, and so do all logits.
        steps = [difference.step + 1 for difference in differences]
        error = self.logit_error(prompt, how, other, batch.logits[: min(steps, default=len(batch.tokens))])
        self.same_bits(prompt, how, batch.logits, other.logits)
        return differences, error

    def text(self, prompt: Prompt, tokens: Sequence[int]) -> str:
        """Return the text that `tokens` add to a prompt; an error where the config expects another."""
        text = new_text(self.tokenizer.decode, prompt.prompt_ids, tokens)
        if prompt.expected is not None and text != prompt.expected:
            reference = f"(the reference says {prompt.new_text!r})"
            self.fail(prompt, f"text: expected {prompt.expected!r} as in the config, found {text!r} {reference}")
        return text
