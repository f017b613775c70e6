"""Prompts in, pieces of text out, as they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lockstep.errors import InputError
from lockstep.runtime.engine import Decoding, Request, Speed
from lockstep.runtime.model import Model
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Sampling


@dataclass(frozen=True)
class Piece:
    """New text of prompt number `prompt`, whole characters, may be empty. `finish` is None while more follows.

    Else why it ended: "stop_id" (end of sequence), "stop_string", "max_new_tokens" or "max_seq_len".
    """

    prompt: int
    text: str
    finish: str | None


class Generation:
    """Iterate to generate. `tokens[i]` holds prompt i's new tokens so far; `speed` the tokens a second of prefill and
    decode."""

    def __init__(self, decoding: Decoding, tokenizer: Tokenizer, count: int, stop: Sequence[str]):
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self._decoding = decoding
        self._streams = [tokenizer.stream() for _ in range(count)]
        self._filters = [StopFilter(stop) for _ in range(count)]

    @property
    def speed(self) -> Speed:
        return self._decoding.speed

    def __iter__(self) -> Iterator[Piece]:
        for made in self._decoding:
            i = made.request
            stream, stop = self._streams[i], self._filters[i]
            self.tokens[i].append(made.token)
            text = "" if made.finish == "stop_id" else stream.push(made.token)
            text = stop.push(text + stream.finish() if made.finish else text)
            finish = made.finish
            if stop.found:
                finish = "stop_string"
                self._decoding.finish(i)
            elif finish:
                text += stop.rest()
            if text or finish:
                yield Piece(i, text, finish)


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    stop: Sequence[str] = (),
    max_input_len: int | None = None,
    max_num_tokens: int | None = None,
) -> Generation:
    """Generate for all prompts together, as many at a time as the model has slots. What one prompt gives does not hang
    on the others.

    Raises InputError, before any step, for a prompt that is empty or too long.
    """
    requests = [
        Request(
            tokenizer.encode(prompt),
            max_new_tokens,
            stop_ids=frozenset(model.eos_token_ids),
            sampling=replace(sampling, seed=(sampling.seed + i) % 2**64),
        )
        for i, prompt in enumerate(prompts)
    ]
    return Generation(Decoding(model, requests, max_input_len, max_num_tokens), tokenizer, len(prompts), stop)


class StopFilter:
    """Text in pieces, out up to the first stop string. What may be the start of one is held back until more has
    come."""

    def __init__(self, stop: Sequence[str]):
        if any(not text for text in stop):
            raise InputError("stop: expected strings that are not empty, found an empty one")
        self.found = False
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> str:
        """What can be given out now. Nothing after a stop string was found."""
        if self.found:
            return ""
        self._held += text
        ends = [at for at in map(self._held.find, self._stop) if at >= 0]
        if ends:
            self.found = True
            return self._held[: min(ends)]
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def rest(self) -> str:
        """What was held back, when no more comes."""
        text, self._held = self._held, ""
        return "" if self.found else text
