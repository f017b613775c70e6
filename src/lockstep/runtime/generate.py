"""Requests that all come at once, run to their end: token by token, or as text while it is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lockstep.errors import CheckError
from lockstep.runtime.completion import Collector
from lockstep.runtime.drafts import Speculation
from lockstep.runtime.engine import Engine
from lockstep.runtime.model import Model
from lockstep.runtime.request import NOT_FINITE, Request, Speed, Token
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Sampling


class Decoding:
    """Requests that all come at once; iterate to run them.

    Tokens come in the order in which steps make them. `speed` is filled as it goes.

    Raises InputError, before any step, for a prompt that is empty or longer than `max_input_len` or the slots allow;
    CheckError for a most likely token whose logit is NaN or infinite.
    """

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        max_input_len: int | None = None,
        max_num_tokens: int | None = None,
        speculation: Speculation | None = None,
    ):
        self.engine = Engine(model, max_input_len, max_num_tokens, prefix_caching=False, speculation=speculation)
        self.speed = self.engine.speed
        self.engine.add_all(requests)

    def __iter__(self) -> Iterator[Token]:
        for token in self.engine.run():
            if token.finish == "error":
                raise CheckError(f"prompt {token.request + 1}: {NOT_FINITE}")
            yield token

    def finish(self, index: int) -> None:
        self.engine.abort(index)


@dataclass(frozen=True)
class TextDelta:
    """New text of prompt number `prompt`: whole characters, may be empty.

    `finish` is None while more follows, else why it ended: "stop_id" (end of sequence), "stop_string", "max_new_tokens"
    or "max_seq_len".
    """

    prompt: int
    text: str
    finish: str | None


class Generation:
    """A running generation; iterate to advance it.

    `completions[i]` and `tokens[i]` are the completion and new tokens of prompt i so far.
    """

    def __init__(self, decoding: Decoding, tokenizer: Tokenizer, requests: Sequence[Request], stop: Sequence[str]):
        self._decoding = decoding
        self._collectors = [
            Collector(tokenizer, request.prompt_ids, 1, stop, request.sampling.min_tokens) for request in requests
        ]
        self.completions = [collector.completion for collector in self._collectors]
        self.tokens: list[list[int]] = [completion.choices[0].token_ids for completion in self.completions]

    @property
    def speed(self) -> Speed:
        return self._decoding.speed

    def __iter__(self) -> Iterator[TextDelta]:
        for token in self._decoding:
            collector = self._collectors[token.request]
            text = collector.push(token)
            finish = self.completions[token.request].choices[0].finish
            if collector.stopped(token):
                self._decoding.finish(token.request)
            if text or finish:
                yield TextDelta(token.request, text, finish)


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    stop: Sequence[str] = (),
    max_input_len: int | None = None,
    max_num_tokens: int | None = None,
    adapter: str | None = None,
    speculation: Speculation | None = None,
) -> Generation:
    """Generate for all prompts together, as many at a time as there are slots.

    The answer to a prompt does not depend on the others. adapter: name of the adapter for all. speculation: see
    `Engine`.

    Raises InputError, before any step, for a prompt that is empty or too long.
    """
    requests = [
        Request(
            tokenizer.encode(prompt),
            max_new_tokens,
            stop_ids=frozenset(model.eos_token_ids),
            sampling=replace(sampling, seed=(sampling.seed + i) % 2**64),
            adapter=adapter,
        )
        for i, prompt in enumerate(prompts)
    ]
    return Generation(
        Decoding(model, requests, max_input_len, max_num_tokens, speculation=speculation), tokenizer, requests, stop
    )
