"""Generate text on a terminal: an engine set and prompts in, text on stdout or a file of completions out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import dump_json
from lockstep.errors import CheckError
from lockstep.runtime import batch_file
from lockstep.runtime.drafts import Speculation
from lockstep.runtime.generate import generate as generation_of
from lockstep.runtime.model import Model, ModelOptions
from lockstep.runtime.request import Speed
from lockstep.runtime.speculative import Speculative, open_speculation
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Sampling
from lockstep.targets import Limits


@dataclass(frozen=True)
class Job:
    """The engine set that answers, and how.

    adapters: the manifest of the model's adapters; adapter: the name of one. speculative: fields of `Speculative`.
    """

    engines: Path
    assembly: Path
    weights: Path
    layers: int | str
    limits: Limits
    max_new_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    threads: int | None = None
    adapters: Path | None = None
    adapter: str | None = None
    speculative: Mapping[str, Any] | None = None

    def open(self, max_batch_size: int) -> tuple[Model, Tokenizer, Speculation | None]:
        options = ModelOptions(
            max_batch_size,
            self.limits.max_seq_len,
            self.limits.max_num_tokens,
            self.threads,
            adapters_json=self.adapters,
        )
        model = Model.open(self.engines, self.assembly, self.weights, self.layers, options)
        speculation = None
        if self.speculative:
            speculation = open_speculation(model, Speculative(**self.speculative), self.threads)
        return model, Tokenizer.open(self.assembly), speculation


def generate(job: Job, prompt: str, as_json: bool = False) -> None:
    """Print the text as it is made; then the speed, on stderr.

    as_json: one document at the end, with both.
    """
    model, tokenizer, speculation = job.open(1)
    generation = generation_of(
        model,
        tokenizer,
        [prompt],
        job.max_new_tokens,
        job.sampling,
        job.stop,
        job.limits.max_input_len,
        adapter=job.adapter,
        speculation=speculation,
    )
    for piece in generation:
        if not as_json:
            print(piece.text, end="", flush=True)
    speed = generation.speed
    if as_json:
        rates = {
            "prefill_tokens_per_s": speed.prefill_tokens_per_second,
            "decode_tokens_per_s": speed.decode_tokens_per_second,
        }
        document: dict[str, Any] = {**generation.completions[0].record(), "speed": rates}
        if speculation:
            document["drafts"] = {"tokens": speculation.num_draft_tokens, "accepted": speculation.accepted}
        print(dump_json(document), end="")
        return
    print(flush=True)
    print(f"prefill: {speed.prefill_tokens} tokens, {speed.prefill_tokens_per_second:.0f} tokens/s", file=sys.stderr)
    print(f"decode: {speed.decode_tokens} tokens, {speed.decode_tokens_per_second:.0f} tokens/s", file=sys.stderr)
    if speculation:
        accepted = sum(speculation.accepted)
        proposed = speculation.num_draft_tokens
        print(f"drafts: {accepted} of {proposed} tokens were right", file=sys.stderr)
        _say_failure(speculation)


def generate_file(job: Job, source: Path, out: Path) -> None:
    """Complete a file of prompts; on a terminal say how far it is.

    Raises CheckError, when all lines are through, for lines that failed.
    """

    def say(done: batch_file.Done, speed: Speed) -> None:
        if sys.stderr.isatty():
            rate = f"{speed.decode_tokens_per_second:.0f} tokens/s"
            print(f"\r{done.lines} requests done, {speed.decode_tokens} tokens, {rate} ", end="", file=sys.stderr)

    model, tokenizer, speculation = job.open(job.limits.max_batch_size)
    model.check_adapter(job.adapter)
    defaults = batch_file.Defaults(job.max_new_tokens, job.sampling, tuple(job.stop), job.adapter)
    done = batch_file.generate_file(model, tokenizer, source, out, defaults, job.limits.max_input_len, say, speculation)
    _say_failure(speculation)
    requests = f"{done.lines} request{'s' * (done.lines != 1)}"
    if sys.stderr.isatty():
        print(end="\r", file=sys.stderr)  # over the line of progress
    print(f"{out}: {requests}, {done.failed} failed", file=sys.stderr)
    if done.failed:
        which = f"the first of {done.failed} requests that failed; " * (done.failed > 1)
        raise CheckError(f"{done.first_error} ({which}see {out})")


def _say_failure(speculation: Speculation | None) -> None:
    if speculation and speculation.failure:
        print(f"lockstep: warning: {speculation.failure}", file=sys.stderr)
