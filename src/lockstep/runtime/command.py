"""Generate text on a terminal: an engine set and prompts in, text on stdout or a file of completions out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.files import dump_json
from lockstep.errors import CheckError
from lockstep.targets import Limits

if TYPE_CHECKING:
    from lockstep.runtime import Model
    from lockstep.runtime.drafts import Speculation


def generate(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    limits: Mapping[str, int],
    prompt: str,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    stop: list[str],
    threads: int | None = None,
    adapters: str | None = None,
    adapter: str | None = None,
    as_json: bool = False,
    speculative: Mapping[str, Any] | None = None,
) -> None:
    """Print the text as it is made; then the speed, on stderr.

    as_json: one document at the end, with both.
    """
    from lockstep.runtime import Sampling, Tokenizer
    from lockstep.runtime import generate as start

    sizes = Limits(**limits)
    model = _open(assembly, weights, engines, layers, sizes, 1, threads, adapters)
    speculation = _speculation(model, speculative, threads)
    generation = start(
        model,
        Tokenizer.open(Path(assembly)),
        [prompt],
        max_new_tokens,
        Sampling(**sampling),
        stop,
        sizes.max_input_len,
        adapter=adapter,
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
    for what, tokens, rate in (
        ("prefill", speed.prefill_tokens, speed.prefill_tokens_per_second),
        ("decode", speed.decode_tokens, speed.decode_tokens_per_second),
    ):
        print(f"{what}: {tokens} tokens, {rate:.0f} tokens/s", file=sys.stderr)
    if speculation:
        accepted = sum(speculation.accepted)
        proposed = speculation.num_draft_tokens
        print(f"drafts: {accepted} of {proposed} tokens were right", file=sys.stderr)
        _say_failure(speculation)


def generate_file(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    limits: Mapping[str, int],
    source: str,
    out: str,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    stop: list[str],
    threads: int | None = None,
    adapters: str | None = None,
    adapter: str | None = None,
    speculative: Mapping[str, Any] | None = None,
) -> None:
    """Complete a file of prompts; on a terminal say how far it is.

    Raises CheckError, when all lines are through, for lines that failed.
    """
    from lockstep.runtime import Sampling, Tokenizer
    from lockstep.runtime.batch_file import Defaults, Done
    from lockstep.runtime.batch_file import generate_file as run
    from lockstep.runtime.request import Speed

    def say(done: Done, speed: Speed) -> None:
        if sys.stderr.isatty():
            rate = f"{speed.decode_tokens_per_second:.0f} tokens/s"
            print(f"\r{done.lines} requests done, {speed.decode_tokens} tokens, {rate} ", end="", file=sys.stderr)

    sizes = Limits(**limits)
    model = _open(assembly, weights, engines, layers, sizes, sizes.max_batch_size, threads, adapters)
    model.check_adapter(adapter)
    defaults = Defaults(max_new_tokens, Sampling(**sampling), tuple(stop), adapter)
    tokenizer = Tokenizer.open(Path(assembly))
    speculation = _speculation(model, speculative, threads)
    done = run(model, tokenizer, Path(source), Path(out), defaults, sizes.max_input_len, say, speculation)
    _say_failure(speculation)
    requests = f"{done.lines} request{'s' * (done.lines != 1)}"
    if sys.stderr.isatty():
        print(end="\r", file=sys.stderr)  # over the line of progress
    print(f"{out}: {requests}, {done.failed} failed", file=sys.stderr)
    if done.failed:
        which = f"the first of {done.failed} requests that failed; " * (done.failed > 1)
        raise CheckError(f"{done.first_error} ({which}see {out})")


def _speculation(model: Model, speculative: Mapping[str, Any] | None, threads: int | None) -> Speculation | None:
    from lockstep.runtime.speculative import Speculative, open_speculation

    return open_speculation(model, Speculative(**speculative), threads) if speculative else None


def _say_failure(speculation: Speculation | None) -> None:
    if speculation and speculation.failure:
        print(f"lockstep: warning: {speculation.failure}", file=sys.stderr)


def _open(
    assembly: str,
    weights: str,
    engines: str,
    layers: int | str,
    sizes: Limits,
    max_batch_size: int,
    threads: int | None,
    adapters: str | None,
) -> Model:
    from lockstep.runtime import Model

    return Model.open(
        Path(engines),
        Path(assembly),
        Path(weights),
        layers,
        max_batch_size=max_batch_size,
        max_seq_len=sizes.max_seq_len,
        max_num_tokens=sizes.max_num_tokens,
        threads=threads,
        adapters_json=adapters,
    )
