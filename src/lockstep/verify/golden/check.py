"""The golden check: an engine set, run by the runtime, against the reference. Needs no torch.

In: an engine set with its assembly and weights, and a reference. Out: a report, the same for the same engines, and a
separate one of speeds. The prompts are decoded freely in one batch, then teacher-forced, then each alone; as `lockstep
generate` does, where the device samples; with speculation, where it is supported; and in random chunks in a mixed
batch, in all slots. A long prompt, up to the limits, is prefilled whole, in chunks that end on both sides of each edge
of cache, window and RoPE, and in the mixed batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.reports import (
    PASS,
    GoldenLongPrompt,
    GoldenPrompt,
    GoldenReport,
    MovedState,
    RequestsSpeed,
    SpeedReport,
)
from lockstep.backends.graphs import graph_file
from lockstep.runtime import Decoding, Request, Speed
from lockstep.targets import Limits, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.golden import drafted
from lockstep.verify.golden.decoding import DecodingCheck
from lockstep.verify.golden.forced import (
    Errors,
    Forced,
    chunks_to_edges,
    drawn_positions,
    largest_of_neighbours,
    random_chunks,
)
from lockstep.verify.golden.moved import MovedCheck
from lockstep.verify.golden.prompts import Decoded, Long, Prompt, read_reference
from lockstep.verify.metrics import largest
from lockstep.verify.routing import may_choose

if TYPE_CHECKING:
    from lockstep.verify.golden.routes import Routes

_TIMED_TOKENS = 9  # of a prompt and of its answer, where speeds are timed: a prefill, and eight decode steps


def check_engines(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    reference_json: Path,
    target: Target,
    tolerance: Tolerances,
    limits: Limits,
    out: Path,
    speed_out: Path,
    expected: Sequence[str | None] = (),
    threads: int | None = None,
) -> Path:
    """Check an engine set; write the report to `out`, the speeds to `speed_out`.

    Returns `out`. tolerance: of the logits. limits: the config's. expected: for each prompt the text that must follow
    it, or None.

    Raises CheckError, one line, for the first thing wrong, with the whole report in `<out>.failed.json`; InputError for
    inputs that do not fit together or prompts that exceed the limits.
    """
    files = assembly_json, weights_json, engines_json, reference_json
    check = GoldenCheck(*files, target, tolerance, limits, expected, threads)
    report, speed = check.run()
    if check.failures and check.follow_choices():
        report, _ = check.run()
    check.finish(out, report)
    replace(speed, by_requests=check.speeds()).save(speed_out)
    return Path(out)


class GoldenCheck(DecodingCheck):
    """The golden check of one engine set. It may `run` twice: see `follow_choices`."""

    _routes: Routes | None = None  # of a model with a router
    _not_followed = ""  # why such a model has none

    def judge_choices(self) -> None:
        """Compare the blocks that have a router with their graphs, in the prompts' batch."""
        if not self._has_choices():
            return
        # Most models have no router, and the toolkit of graphs takes a fifth of this check to import.
        from lockstep.verify.golden.routes import Routes, known_rows
        from lockstep.verify.routing.router import Router

        router = Router.open(self.assembly_json, self.weights_json, self.target.layers, self.tolerance, self.threads)
        if router is None:
            return
        if unsupported := router.unsupported():
            self._not_followed = f"; choices of experts, which rounding may decide, are not followed {unsupported}"
            return
        self.prompts, self.long, _ = read_reference(self.reference_json, self.expected, self.tolerance, follows=True)
        self._routes = Routes(router, known_rows(self.all_prompts, self.long))
        requests = [self.teacher_forced(prompt) for prompt in self.prompts]
        with self._routes.observed(self.model):
            self.decode(requests)
        for prompt in self.prompts:
            if wrong := self._routes.wrong_block([*prompt.prompt_ids, *prompt.tokens[:-1]]):
                self.fail(prompt, wrong)

    def _has_choices(self) -> bool:
        folder = self.assembly_json.parent
        graphs = Assembly.load(self.assembly_json).classes.values()
        return any(may_choose(onnx.load(graph_file(folder, graph))) for graph in graphs)

    def follow_choices(self) -> bool:
        """Begin again, each request judged along the engines' choices; False where that cannot help."""
        if self.failures:
            self.failures[0] += self._not_followed
        if self._routes is None or self._routes.wrong:
            return False
        self.failures = []
        self.wrong = set()
        self.positions = {}
        self.routes = self._routes
        return True

    def run(self) -> tuple[GoldenReport, SpeedReport]:
        if tuple(sorted(self.model.eos_token_ids)) != self.reference.eos_token_ids:
            self.failures.append(
                f"end-of-sequence tokens: expected {list(self.reference.eos_token_ids)} as in transformers, found "
                f"{list(self.model.eos_token_ids)}"
            )
        if self._routes is None:
            self.judge_choices()
        free, _ = self.decode([self.free_running(prompt) for prompt in self.prompts])
        forced, batch = self.decode([self.teacher_forced(prompt) for prompt in self.prompts])
        judged = []
        alone = []
        for i, prompt in enumerate(self.prompts):
            lone, speed = self.decode([self.free_running(prompt)])
            alone.append(speed)
            judged.append(self._judge(prompt, free[i], forced[i], lone[0]))
        entries = [
            replace(entry, generate_equal=not differences, generate_differences=differences)
            for entry, differences in zip(judged, self.generate(self.prompts, free, self.stop_ids))
        ]
        for prompt in self.prompts:
            if what := drafted.difference(self.model, self.free_running(prompt), self.max_num_tokens):
                self.fail(prompt, what)
        long = None
        moved: tuple[MovedState, ...] = ()
        if self.long:
            long = self._long(self.long)
            moved = MovedCheck(self, self.long).run()
        mixed = self.mixed(free)
        # Only now: each of the ways of running above may have found an error of a prompt.
        entries = [
            replace(entry, mixed_max_logit_error=error, passed=id(prompt) not in self.wrong)
            for entry, prompt, error in zip(entries, self.prompts, mixed)
        ]
        errors = [entry.max_logit_error for entry in entries] + [entry.mixed_max_logit_error for entry in entries]
        if long and self.long:
            passed = id(self.long.prompt) not in self.wrong
            long = replace(long, mixed_max_logit_error=mixed[-1], passed=passed)
            errors += long.errors()
        report = GoldenReport(
            result=PASS,
            target=self.target,
            engine_digest=self.model.engines.digest(),
            tolerance=max(prompt.bounds.largest for prompt in self.all_prompts),
            logit_noise=max(prompt.bounds.cost for prompt in self.all_prompts),
            max_logit_error=largest(errors),
            prompts=tuple(entries),
            long_prompt=long,
            moved=moved,
            positions=largest_of_neighbours(self.positions),
        )
        if self.routes:
            report = replace(report, choices=self.routes.report())
            self.failures[:0] = self.routes.wrong[:1]
        return report, self._speed(batch, alone)

    def _speed(self, batch: Speed, alone: Sequence[Speed]) -> SpeedReport:
        """Return speeds of the teacher-forced pass: the free one before it was the warm-up."""
        speed_alone = Speed(*(sum(values) for values in zip(*map(astuple, alone))))
        return SpeedReport(
            target=self.target,
            engine_digest=self.model.engines.digest(),
            batch_size=min(len(self.prompts), self.model.max_batch_size),
            prefill_tokens_per_s=batch.prefill_tokens_per_second,
            decode_tokens_per_s=batch.decode_tokens_per_second,
            alone_prefill_tokens_per_s=speed_alone.prefill_tokens_per_second,
            alone_decode_tokens_per_s=speed_alone.decode_tokens_per_second,
        )

    def speeds(self) -> tuple[RequestsSpeed, ...]:
        """Return the decoding speed of 1, 2, 4, 8 ... requests, up to the number of slots."""
        speeds = []
        for requests in (2**power for power in range(self.model.max_batch_size.bit_length())):
            prompts = itertools.islice(itertools.cycle(self.prompts), requests)
            new_tokens = min(self.max_new_tokens, _TIMED_TOKENS)
            timed = [Request(prompt.prompt_ids[:_TIMED_TOKENS], new_tokens) for prompt in prompts]
            decoding = Decoding(self.model, timed, max_num_tokens=self.max_num_tokens)
            for _ in decoding:
                pass
            speeds.append(RequestsSpeed(requests, decoding.speed.decode_tokens_per_second))
        return tuple(speeds)

    def _long(self, long: Long) -> GoldenLongPrompt:
        """Return the long prompt's entry, without `mixed_max_logit_error`.

        Its logits when prefilled whole, in as many requests as fill a step; in chunks that end at the edges; and token
        by token before the edges, and at positions drawn by the engines' digest from all others; and its answer.
        """
        prompt = long.prompt
        logits = long.logits
        count = len(prompt.prompt_ids)
        answer = tuple(range(count + 1, prompt.total + 1))
        num_requests = min(self.model.max_batch_size, self.max_num_tokens // count + 2)  # more than fit into one step
        uncut = [prompt.forced((count, *answer), logits)] * num_requests
        single = [prompt.forced(ends, logits) for ends in chunks_to_edges(long.edges)]
        decoded = set[int](answer).union(*(request.decoded() for request in single))
        drawn = drawn_positions(count, decoded, self.model.engines.digest())
        unknown = frozenset(drawn).difference(logits)
        cut = replace(prompt.forced((*sorted({*long.edges, *drawn}), *answer), logits), keep=unknown)
        worst = [self._forced(prompt, "in one piece", uncut), self._forced(prompt, "in pieces", [cut])]
        if drawn:  # where the reference has no logits, those after a chunk that ends there are the expected ones
            ends = sorted({*drawn, *(position - 1 for position in drawn)})
            single.append(prompt.forced(ends, {**cut.kept_logits, **logits}))
            decoded |= single[-1].decoded()
        worst.append(self._forced(prompt, "token by token", single))
        (differences,) = self.generate([prompt], [prompt], frozenset())
        return GoldenLongPrompt(
            num_tokens=count,
            tokens=tuple(prompt.tokens),
            logit_noise=prompt.bounds.cost,
            tolerance=prompt.bounds.largest,
            passed=False,
            max_logit_error=worst[0],
            cut_max_logit_error=worst[1],
            single_max_logit_error=worst[2],
            decoded_positions=len(decoded),
            positions=prompt.total,
            generate_equal=not differences,
            generate_differences=differences,
            mixed_max_logit_error=None,
        )

    def mixed(self, free: Sequence[Decoded]) -> list[float | None]:
        """Run all prompts in random chunks, in all slots; return the largest error of each, the long one last."""
        random = np.random.default_rng(0)
        requests = []
        owners = []
        if self.long:
            prompt = self.long.prompt
            answer = range(len(prompt.prompt_ids) + 1, prompt.total + 1)
            requests.append(prompt.forced((*self.long.edges, *answer), self.long.logits))
            owners.append(prompt)
        for number in range(self.model.max_batch_size + len(self.prompts)):
            prompt = self.prompts[number % len(self.prompts)]
            requests.append(prompt.forced(random_chunks(len(prompt.prompt_ids), prompt.total, random)))
            owners.append(prompt)
        errors = self.force(requests, pauses=True)
        worst = []
        for prompt in self.all_prompts:
            of_prompt = [error for error, owner in zip(errors, owners) if owner is prompt]
            worst.append(self._forced_error(prompt, "in pieces among other requests", of_prompt))
        return worst

    def _forced(self, prompt: Prompt, how: str, requests: Sequence[Forced]) -> float | None:
        return self._forced_error(prompt, how, self.force(requests))

    def _forced_error(self, prompt: Prompt, how: str, errors: Sequence[Errors]) -> float | None:
        """Return the largest error; the first that is too large goes to `failures`."""
        wrong = next(filter(None, map(Errors.wrong, errors)), None)
        if wrong:
            self.fail(prompt, f"after {wrong[0]} tokens, {how}: {wrong[1]}")
        return largest([error.worst for error in errors])

    def _judge(self, prompt: Prompt, free: Decoded, forced: Decoded, alone: Decoded) -> GoldenPrompt:
        """Return a prompt's entry, without the results of `generate` and `mixed`."""
        tokens = free.tokens
        prompt_ids = self.tokenizer.encode(prompt.text).tolist()
        if prompt_ids != list(prompt.prompt_ids):
            self.fail(prompt, f"prompt ids: expected {list(prompt.prompt_ids)} as in transformers, found {prompt_ids}")
        differences = self.first_difference(prompt, "decoding freely", prompt, free)
        worst = self.logit_error(prompt, "along the reference's tokens", forced)
        alone_differences, alone_error = self.compare_runs(prompt, "alone", free, alone)
        return GoldenPrompt(
            text=prompt.text,
            tokens=tuple(tokens),
            text_out=self.text(prompt, tokens),
            reference_text=prompt.new_text,
            expected=prompt.expected,
            prompt_ids_equal=prompt_ids == list(prompt.prompt_ids),
            tokens_equal=not differences,
            differences=differences,
            logit_noise=prompt.bounds.cost,
            tolerance=prompt.bounds.largest,
            passed=False,
            max_logit_error=worst,
            alone_equal=not alone_differences,
            alone_differences=alone_differences,
            alone_max_logit_difference=alone_error,
            generate_equal=True,
            generate_differences=(),
            mixed_max_logit_error=None,
        )
