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

    text: what token_ids add to the prompt's text, up to a stop string. finish: as `Token.finish`, or "stop_string".
    token_ids: all new tokens, including the end of sequence and those of a stop string. logprobs: one for each token,
    if requested. stop: the stop string that ended it.
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
        return all(choice.finish for choice in self.choices)

    def record(self) -> dict[str, Any]:
        """Return `choices` and `usage` in the form of OpenAI's API, with token ids, as plain JSON values."""
        choices = []
        for index, choice in enumerate(self.choices):
            entry = {"index": index, "text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish}
            if choice.logprobs:
                entry["logprobs"] = [
                    {"token_id": token, "logprob": logprobs.chosen, "top": list(map(list, logprobs.top))}
                    for token, logprobs in zip(choice.token_ids, choice.logprobs)
                ]
            choices.append(entry)
        usage = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": sum(len(choice.token_ids) for choice in self.choices),
        }
        return {"choices": choices, "usage": usage}


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

        min_stop_tokens: no stop string ends in the text of the first tokens, as vLLM's min_tokens. echo: the answers
        follow `Tokenizer.text` of the prompt, so they include all of a character that the prompt leaves unfinished.
        shown: see `TextStream`.
        """
        self._min_stop_tokens = min_stop_tokens
        self.completion = Completion(len(prompt_ids), [Choice() for _ in range(n)])
        self._streams = [tokenizer.stream(prompt_ids, echo, shown) for _ in range(n)]
        self._filters = [StopFilter(stop) for _ in range(n)]

    def push(self, token: Token) -> str:
        """Add a token and return its text. The caller aborts a choice that a stop string has ended (`stopped`)."""
        return self.add(token.choice, token.token, token.finish, token.logprobs)

    def add(self, number: int, token: int, finish: str | None, logprobs: Logprobs | None) -> str:
        choice = self.completion.choices[number]
        choice.finish = finish
        if token < 0:  # no token: only why the choice ended
            text = self._streams[number].finish()
            choice.text += text
            return text
        choice.token_ids.append(token)
        if logprobs is not None:
            choice.logprobs.append(logprobs)
        stream = self._streams[number]
        stop = self._filters[number]
        text = ""
        if finish != "stop_id":  # whose text is no part of the answer
            text = stream.push(token)
        may_end = len(choice.token_ids) > self._min_stop_tokens
        if finish:
            text += stream.finish()
        text = stop.push(text, may_end)
        if stop.found is not None:
            choice.finish = "stop_string"
            choice.stop = stop.found
        elif finish:
            text += stop.finish()
        choice.text += text
        return text

    def stopped(self, token: Token) -> bool:
        return self.completion.choices[token.choice].finish == "stop_string"


class StopFilter:
    """Text deltas in, text up to the first stop string out.

    Text that may be the start of a stop string is buffered until more arrives. found: the stop string.
    """

    def __init__(self, stop: str | Sequence[str]):
        stop = (stop,) if isinstance(stop, str) else stop
        if any(not text for text in stop):
            raise InputError("stop: expected strings that are not empty, found an empty one")
        self.found: str | None = None
        self._stop = tuple(stop)
        self._buffer = ""

    def push(self, text: str, may_end: bool = True) -> str:
        """Add text and return what can be returned now: nothing more after a stop string was found.

        may_end: whether a stop string may end in `text`; one that starts in it may end later in any case.
        """
        if not self._stop:
            return text
        if self.found is not None:
            return ""
        buffered = len(self._buffer)
        buffer = self._buffer + text
        self._buffer = buffer
        if may_end:
            matches = []
            for stop in self._stop:
                # Only strings that end in the new text: earlier ones may have ended where none was allowed to.
                position = buffer.find(stop, max(0, buffered - len(stop) + 1))
                if position >= 0:
                    matches.append((position, stop))
            if matches:
                position, self.found = min(matches, key=lambda match: match[0])
                return buffer[:position]
        keep = max((_overlap(buffer, stop) for stop in self._stop), default=0)
        self._buffer = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """Return the buffered text at the end of the answer."""
        if self.found is not None:
            return ""
        text = self._buffer
        self._buffer = ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which `text` ends."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
