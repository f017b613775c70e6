"""Tokens of a request's choices in, their texts out, up to the first stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.request import Token
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Logprobs


@dataclass
class Choice:
    """One choice of a completion.

    text: what token_ids add to the prompt's text, up to a stop string. finish: as `Token.finish`, or "stop_string";
    None while more follows. token_ids: all that were made, the end of sequence and those of a stop string too.
    logprobs: one for each token, where they were asked for. stop: the stop string that ended it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    stop: str | None = None


@dataclass
class Completion:
    """The answers to one prompt."""

    num_prompt_tokens: int
    choices: list[Choice]

    @property
    def done(self) -> bool:
        """Return whether all choices have ended."""
        return all(choice.finish for choice in self.choices)

    def record(self) -> dict[str, Any]:
        """Return `choices` and `usage` as OpenAI's API has them, with token ids.

        Plain JSON.
        """
        choices = []
        for index, choice in enumerate(self.choices):
            entry = {"index": index, "text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish}
            if choice.logprobs:
                entry["logprobs"] = [
                    {"token_id": token, "logprob": of.chosen, "top": [list(pair) for pair in of.top]}
                    for token, of in zip(choice.token_ids, choice.logprobs)
                ]
            choices.append(entry)
        made = sum(len(choice.token_ids) for choice in self.choices)
        return {"choices": choices, "usage": {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": made}}


class Collector:
    """Makes the completion of one request from its tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | np.ndarray,
        n: int,
        stop: Sequence[str] = (),
        min_stop_tokens: int = 0,
        echo: bool = False,
        shown: Mapping[int, str] = {},
    ):
        """Begin a completion without tokens.

        min_stop_tokens: of an answer, in whose text no stop string may end, as vLLM's min_tokens. echo: whether the
        answers come behind `Tokenizer.text` of the prompt, and so have all of a character that it leaves unfinished.
        shown: as of `TextStream`.
        """
        self._min_stop_tokens = min_stop_tokens
        self.completion = Completion(len(prompt_ids), [Choice() for _ in range(n)])
        self._streams = [tokenizer.stream(prompt_ids, echo, shown) for _ in range(n)]
        self._filters = [StopFilter(stop) for _ in range(n)]

    def push(self, made: Token) -> str:
        """Take one token and return the text that it adds.

        A choice that a stop string has ended (`finish`) must be aborted: more would follow.
        """
        return self.add(made.choice, made.token, made.finish, made.logprobs)

    def add(self, number: int, token: int, finish: str | None, logprobs: Logprobs | None) -> str:
        """Take one token of choice `number` and return the text that it adds."""
        choice = self.completion.choices[number]
        choice.finish = finish
        if token < 0:
            text = self._streams[number].finish()
            choice.text += text
            return text
        choice.token_ids.append(token)
        if logprobs is not None:
            choice.logprobs.append(logprobs)
        stream = self._streams[number]
        stop = self._filters[number]
        text = "" if finish == "stop_id" else stream.push(token)
        may_end = len(choice.token_ids) > self._min_stop_tokens
        text = stop.push(text + stream.finish() if finish else text, may_end)
        if stop.found is not None:
            choice.finish = "stop_string"
            choice.stop = stop.found
        elif finish:
            text += stop.rest()
        choice.text += text
        return text

    def stopped(self, made: Token) -> bool:
        """Return whether a stop string has ended the choice of this token."""
        return self.completion.choices[made.choice].finish == "stop_string"


class StopFilter:
    """Text deltas in, text up to the first stop string out.

    What may be the start of a stop string is held back until more has come. found: the stop string.
    """

    def __init__(self, stop: str | Sequence[str]):
        stop = (stop,) if isinstance(stop, str) else stop
        if any(not text for text in stop):
            raise InputError("stop: expected strings that are not empty, found an empty one")
        self.found: str | None = None
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> str:
        """Take more text and return what can be given out now.

        Nothing comes after a stop string was found. may_end: whether a stop string may end in `text`; one that begins
        in it may end later in any case.
        """
        if not self._stop:
            return text
        if self.found is not None:
            return ""
        before = len(self._held)
        self._held = self._held + text
        # From where a string would end in the new text: those that ended before may not have counted.
        finds = ((self._held.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stop if may_end)
        if ends := [found for found in finds if found[0] >= 0]:
            end, self.found = min(ends, key=lambda found: found[0])
            return self._held[:end]
        held = self._held
        lengths = (n for stop in self._stop for n in range(1, min(len(stop), len(held) + 1)) if held.endswith(stop[:n]))
        keep = max(lengths, default=0)
        text = held[: len(held) - keep]
        self._held = held[len(held) - keep :]
        return text

    def rest(self) -> str:
        """Return what was held back, when no more comes."""
        text = self._held
        self._held = ""
        return text if self.found is None else ""
